"""The training step with experts on several tiers: the host runs layer by layer while the next layers' experts arrive.

Legend: A accumulation steps, B batch, S sequence, D hidden, V vocabulary, E experts, N MoE layers.

Layers go 0 … N-1 and back, each for all accumulation steps at once, so that its experts are fetched once a pass. Of a
layer only its input and its router's choices are kept for the backward pass. Gradients of experts are applied when
the expert is fetched next: by then the global norm is known, and the update hides under other layers' work.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jmoe.config import TrainConfig
from jmoe.layers.router import RouterBias, Routing
from jmoe.memory.buffers import RecordBuffers
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.memory.record_store import Fill, HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore
from jmoe.models.decoder import Decoder
from jmoe.training.expert_state import ExpertState, ExpertStats, Stores, layouts
from jmoe.training.layer_programs import Layer, LayerPrograms, Routed
from jmoe.training.step import Program, TrainState, make_program

ExpertArrays = dict[str, NDArray[np.float32]]


@dataclass
class _Passed:
    """A layer on the way forward, for the way back: its inputs and choices, one of each accumulation step."""

    xs: list[jax.Array]
    choices: list[jax.Array] = field(default_factory=list)
    chosen_E: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


class StreamedProgram:
    """The functions of `Program`, for experts on several tiers; the state is then of everything but the experts.

    `close` ends its threads.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.tiers = config, config.tiers
        self._programs = LayerPrograms(config, mesh)
        self._sparse = config.model.sparse_layers
        windows = config.model.windows
        kinds: dict[bool, int] = {False: 0, True: 0}
        self._layers = []
        for i, sparse in enumerate(self._sparse):
            window = None if windows is None else jnp.int32(windows[i])
            self._layers.append(Layer(jnp.int32(kinds[sparse]), window))
            kinds[sparse] += 1
        self._num_layers, self._num_experts = config.model.num_moe_layers, config.model.num_experts
        self._shapes = {name: tuple(w.shape[2:]) for name, w in self._programs.experts.items()}
        self._device = mesh.devices.flat[0]
        self.experts: ExpertState | None = None
        self._num_records = self._num_layers * self._num_experts
        self.layouts = layouts(self._shapes, self.tiers.gradient_dtype)
        self._held = contextlib.ExitStack()
        self._versions = self._open_versions()
        saved = {kind: store for kind, store in self._versions.items() if kind != "gradients"}
        self.records = RecordCheckpoints(saved) if saved else None

    def _open_versions(self) -> dict[str, VersionStore]:
        """The records of every kind on the tier nvme, as they are found there."""
        tiers = self.tiers
        kinds = {"weights": tiers.experts, "moments": tiers.optimizer, "gradients": tiers.gradients}
        folder = Path(tiers.path or Path(self.config.output_dir) / "records")
        opened = {}
        for kind, tier in kinds.items():
            if tier == "nvme":
                layout = self.layouts[kind]
                opened[kind] = VersionStore.open(folder / kind, layout, self._num_records, fingerprint="jmoe experts")
                self._held.callback(opened[kind].close)
        return opened

    # State

    def program(self, ordinary: Program) -> Program:
        """What the training loop uses, from the ordinary step's."""
        whole = ordinary.saved_shape
        on_disk = (self.tiers.experts == "nvme", self.tiers.optimizer == "nvme", self.tiers.optimizer == "nvme")
        trees = zip(on_disk, (whole.params, whole.m, whole.v), strict=True)
        params, m, v = (_without_experts(tree) if in_records else tree for in_records, tree in trees)
        return replace(
            ordinary,
            init=self.init,
            step=self.step,
            step_worst_case=self.step,  # on one device no buffer overflows
            evaluate=self.evaluate,
            next_logits=self.next_logits,
            saved_shape=TrainState(params, m, v, whole.router_bias, whole.step),
            to_saved=self.to_saved,
            from_saved=self.from_saved,
            whole=self.whole,
            records=self.records,
            expert_stats=self.stats,
            close=self.close,
        )

    def init(self) -> TrainState:
        """Step 0 with fresh parameters, the same as the ordinary step's; experts are drawn one layer at a time."""
        seed, model = self.config.seed, self.config.model
        small = replace(model, moe_intermediate_size=1)  # experts are drawn last: all else is the same

        def rest() -> Any:
            split: Any = nnx.split(Decoder(small, rngs=nnx.Rngs(seed)), nnx.Param, RouterBias)
            params, bias = nnx.to_pure_dict(split[1]), nnx.to_pure_dict(split[2])
            del params["moe_layers"]["moe"]["experts"]
            return params, bias

        params, bias = jax.jit(rest)()
        draw = jax.jit(lambda layer: nnx.to_pure_dict(nnx.state(Decoder.experts_of(model, layer, nnx.Rngs(seed)))))
        zeros = self._programs.zeros
        state = TrainState(params, zeros(params), zeros(params), bias, jnp.int32(0))
        self._open(0, lambda layer: jax.device_get(draw(jnp.int32(layer))), lambda layer: {})
        return state

    def to_saved(self, state: TrainState) -> TrainState:
        """The state as it is saved; what is on the tier nvme is in its records, up to date and durable."""
        experts = self._state
        experts.settle()
        for store in experts.stores.all():
            store.flush()
        return self._with_experts(state, self.tiers.experts != "nvme", self.tiers.optimizer != "nvme")

    def whole(self, state: TrainState) -> TrainState:
        """The state as the ordinary step has it, with all experts in memory."""
        self._state.settle()
        return self._with_experts(state, True, True)

    def _with_experts(self, state: TrainState, weights: bool, moments: bool) -> TrainState:
        params, m, v, experts = state.params, state.m, state.v, self._state
        if weights:
            params = _with_experts(params, experts.weights())
        if moments:
            m, v = (_with_experts(tree, experts.moments(part)) for tree, part in ((m, "m"), (v, "v")))
        return TrainState(params, m, v, state.router_bias, state.step)

    def from_saved(self, saved: TrainState) -> TrainState:
        """The state without its experts, which go to their tiers."""
        w, *mv = (_experts(tree) for tree in (saved.params, saved.m, saved.v))

        def weights(layer: int) -> ExpertArrays:
            return {name: np.asarray(a[layer]) for name, a in w.items()}

        def moments(layer: int) -> ExpertArrays:
            return {
                f"{part}.{name}": np.asarray(a[layer])
                for part, tree in (("m", m), ("v", v))
                for name, a in tree.items()
            }

        self._open(int(saved.step), weights if w else None, moments if mv[0] else None)
        params, m, v = (_without_experts(tree) for tree in (saved.params, saved.m, saved.v))
        rest = TrainState(params, m, v, saved.router_bias, saved.step)
        state: TrainState = jax.device_put(rest, self._device)
        return state

    def _open(
        self, step: int, weights: Callable[[int], ExpertArrays] | None, moments: Callable[[int], ExpertArrays] | None
    ) -> None:
        """Fill the tiers from a layer's weights and moments; None: they are in their records already."""
        if self.experts is not None:
            self.experts.close()
        tiers = self.tiers
        resident = tiers.experts == "device"
        self.experts = ExpertState(
            Stores(
                None if resident else self._store("weights", tiers.experts, weights),
                self._store("moments", tiers.optimizer, moments),
                self._store("gradients", tiers.gradients, None),
            ),
            optimizer=self.config.optimizer,
            num_layers=self._num_layers,
            num_experts=self._num_experts,
            shapes=self._shapes,
            num_slots=self._num_layers if resident else tiers.device_layers,
            step=step,
            initial=(lambda layer: jax.tree.map(jnp.array, weights(layer))) if resident and weights else None,
            wait_limit_s=self.config.distributed.step_timeout_s,
        )

    def _store(self, kind: str, tier: str, of_layer: Callable[[int], ExpertArrays] | None) -> TieredStore:
        tiers, versions = self.tiers, self._versions.get(kind)
        if versions is None:
            records = HostRecords.fill(self.layouts[kind], self._num_records, self._filling(of_layer))
            return TieredStore(host_records=records)
        if of_layer is not None:
            write_all(versions, self._filling(of_layer))
        return TieredStore(
            versions,
            cache_bytes=self._cache_bytes(versions.layout.record_bytes),
            beta=tiers.beta,
            decay_every_steps=tiers.decay_every_steps,
            wait_limit_s=self.config.distributed.step_timeout_s,
        )

    def _filling(self, of_layer: Callable[[int], ExpertArrays] | None) -> Fill:
        """Writes record after record from arrays [E, ...] of a layer; of None: leaves zeros."""
        layer, arrays = -1, dict[str, NDArray[np.float32]]()

        def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
            nonlocal layer, arrays
            if of_layer is None:
                return
            if index // self._num_experts != layer:
                layer = index // self._num_experts
                arrays = of_layer(layer)
            for name, array in arrays.items():
                np.copyto(views[name], array[index % self._num_experts])

        return fill

    def _cache_bytes(self, record_bytes: int) -> int:
        """A store's share of the host cache: as its share of the bytes on the tier nvme."""
        given = self.tiers.host_cache_bytes
        if not given:
            return max(self._num_records // 4, 2) * record_bytes
        return given * record_bytes // sum(store.layout.record_bytes for store in self._versions.values())

    @property
    def _state(self) -> ExpertState:
        if self.experts is None:
            raise ValueError("the experts are nowhere yet: init or from_saved comes first")
        return self.experts

    def stats(self) -> ExpertStats:
        """Of the experts' tiers."""
        return self._state.stats()

    def close(self) -> None:
        """End the threads of the tiers."""
        if self.experts is not None:
            self.experts.close()
            self.experts = None
        if self.records is not None:
            self.records.close()
        self._held.close()

    # Passes

    def step(self, state: TrainState, tokens_ABS: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; `metrics["ok"]` is False, and nothing has changed, if the loss or gradient norm is not finite."""
        programs, params, experts = self._programs, state.params, self._state
        tokens_ABS = jax.device_put(tokens_ABS, self._device)
        inputs = [tokens[:, :-1] for tokens in tokens_ABS]
        down = list(range(self._num_layers))
        experts.begin(down + down[::-1])
        passed, xs, routings = self._forward(state, inputs, self._keys(state.step, len(inputs)), train=True)

        outside = programs.outside(params)
        grads = programs.zeros(params)
        rest = {name: tree for name, tree in grads.items() if name in outside}
        sums: dict[str, list[jax.Array]] = {"loss": [], "balance_loss": [], "z_loss": []}
        for a, tokens in enumerate(tokens_ABS):
            loss, xs[a], rest = programs.loss_gradients(outside, xs[a], tokens[:, 1:], rest)
            sums["loss"].append(loss)
        for layer in routings:
            for routing in layer:
                balance, z = programs.losses(routing)
                sums["balance_loss"].append(balance)
                sums["z_loss"].append(z)
        grads |= rest
        dxs, squares = self._backward(state, passed, xs, grads)
        for tokens, dx in zip(inputs, dxs, strict=True):
            rest = programs.embed_gradients(outside, tokens, dx, rest)
        state, metrics = programs.finish(state, grads | rest, squares, sums, routings)
        values = jax.device_get({name: metrics[name] for name in ("ok", "learning_rate", "clip")})
        if values["ok"]:
            experts.commit(float(values["learning_rate"]), float(values["clip"]))
        else:
            experts.abandon()
        return state, metrics

    def _keys(self, step: jax.Array, accumulation_steps: int) -> list[Any]:
        """Random keys for the router's jitter, [A][N]; None where there is none."""
        if not self.config.model.router.jitter_noise:
            return [[None] * self._num_layers] * accumulation_steps
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.config.seed), step), 0)
        return [list(jax.random.split(jax.random.fold_in(key, a), self._num_layers)) for a in range(accumulation_steps)]

    def _forward(
        self, state: TrainState, inputs: Sequence[jax.Array], keys: Sequence[Sequence[Any]], *, train: bool
    ) -> tuple[list[_Passed], list[jax.Array], list[list[Routing]]]:
        """(layers passed, hidden states, routings [N][A])."""
        programs, params, experts = self._programs, state.params, self._state
        xs = [programs.embed(programs.outside(params), tokens) for tokens in inputs]
        passed: list[_Passed] = []
        routings: list[list[Routing]] = []
        for sparse, layer in zip(self._sparse, self._layers, strict=True):
            here = _Passed(xs)
            passed.append(here)
            if not sparse:
                xs = [programs.dense(params["dense_layers"], layer, x) for x in xs]
                continue
            n, stack = len(routings), params["moe_layers"]
            routed: list[Routed] = [
                programs.route(stack, state.router_bias, layer, x, key[n], train=train)
                for x, key in zip(xs, keys, strict=True)
            ]
            routings.append([r.routing for r in routed])
            here.choices = [r.routing.topk_idx_TK for r in routed]
            here.chosen_E = np.any([np.asarray(r.routing.counts_E) > 0 for r in routed], axis=0)
            slot = experts.fetch(n, here.chosen_E)
            xs = jax.block_until_ready([programs.add_experts(stack, layer, slot, r) for r in routed])
            experts.release()
        return passed, xs, routings

    def _backward(
        self, state: TrainState, passed: Sequence[_Passed], dxs: list[jax.Array], grads: dict[str, Any]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """(gradients of the first layer's inputs, squared norms of each layer's experts' gradients); fills `grads`."""
        programs, experts = self._programs, self._state
        keys = self._keys(state.step, len(dxs))
        squares: list[jax.Array] = []
        for sparse, layer, here in zip(self._sparse[::-1], self._layers[::-1], passed[::-1], strict=True):
            if not sparse:
                for a, (x, dx) in enumerate(zip(here.xs, dxs, strict=True)):
                    stack, total = state.params["dense_layers"], grads["dense_layers"]
                    dxs[a], grads["dense_layers"] = programs.dense_gradients(stack, layer, x, dx, total)
                continue
            n = self._num_layers - 1 - len(squares)
            slot = experts.fetch(n, here.chosen_E)
            dexperts = None
            stack, total = state.params["moe_layers"], grads["moe_layers"]
            for a, (x, idx, dx) in enumerate(zip(here.xs, here.choices, dxs, strict=True)):
                dxs[a], total, dexperts = programs.moe_gradients(
                    stack, state.router_bias, layer, slot, x, keys[a][n], idx, total, dexperts, dx
                )
            grads["moe_layers"] = total
            square, kept = programs.expert_gradients(dexperts, dtype=self.tiers.gradient_dtype)
            squares.append(square)
            jax.block_until_ready(dxs)
            experts.release()
            experts.keep(n, here.chosen_E, kept)
        return dxs, squares[::-1]

    def _hidden(self, state: TrainState, tokens_BS: jax.Array) -> jax.Array:
        self._state.begin(range(self._num_layers))
        return self._forward(state, [tokens_BS], [[None] * self._num_layers], train=False)[1][0]

    def evaluate(self, state: TrainState, tokens_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        """Summed negative log-likelihood in nats."""
        tokens_BS, weights_BS = jax.device_put((tokens_BS, weights_BS), self._device)
        x_BSD = self._hidden(state, tokens_BS[:, :-1])
        nll: jax.Array = self._programs.nll(self._programs.outside(state.params), x_BSD, tokens_BS[:, 1:], weights_BS)
        return nll

    def next_logits(self, state: TrainState, tokens_BS: jax.Array, position: jax.Array) -> jax.Array:
        """[V], after the token at `position` of the first sequence."""
        x_BSD = self._hidden(state, jax.device_put(tokens_BS, self._device))
        logits_V: jax.Array = self._programs.logits(self._programs.outside(state.params), x_BSD, position)
        return logits_V


def _experts(tree: Any) -> Any:
    """Of nothing, where they are in records."""
    return tree["moe_layers"]["moe"].get("experts", {})


def _with_experts(tree: Any, experts: Any) -> Any:
    layers = tree["moe_layers"]
    return tree | {"moe_layers": layers | {"moe": layers["moe"] | {"experts": experts}}}


def _without_experts(tree: Any) -> Any:
    layers = tree["moe_layers"]
    rest = {name: part for name, part in layers["moe"].items() if name != "experts"}
    return tree | {"moe_layers": layers | {"moe": rest}}


def make_tiered_program(config: TrainConfig, mesh: Mesh) -> Program:
    """`make_program`, with experts where `config.tiers` wants them."""
    ordinary = make_program(config, mesh)
    return ordinary if config.tiers.on_device else StreamedProgram(config, mesh).program(ordinary)


def write_all(store: VersionStore, fill: Fill) -> None:
    """Let `fill` write every record anew, whatever the store holds."""
    record_R = RecordBuffers(1, store.layout.record_bytes).slot(0)
    for index in store.owned:
        record_R[:] = 0
        fill(index, store.layout.views(record_R))
        store.write(index, record_R)
    store.sync()
