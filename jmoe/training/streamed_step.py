"""The training step with experts on several tiers: the host runs layer by layer while the next layers' experts arrive.

Legend: A accumulation steps, B batch, S sequence, D hidden, V vocabulary, E experts, P those of this process, N MoE
layers, R devices, C elements of a device's part of a layer's flat buffer, G the same for gradients.

Layers go 0 … N-1 and back, each for all accumulation steps at once, so that its experts are fetched once a pass. Of a
layer what the ordinary step keeps is kept for the backward pass, of all accumulation steps; with `remat = layer` only
its input and its router's choices. Gradients of experts are applied when the expert is fetched next: by then the global
norm is known, and the update hides under other layers' work.

On several devices that is one of two prefetches (MoESys section 3.2): while layer i computes, its successor's experts
arrive from the tiers below, and its dense parameters from the other devices. Every device has experts of its own, every
process their records. All processes run the same programs in the same order, each when the one before it is done; what
a process waits for on its own tiers is no part of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jmoe.config import LayerKind, TrainConfig
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import RouterBias
from jmoe.mesh import ACCUMULATED_BATCH, BATCH, EXPERT, split_over
from jmoe.models.decoder import STACKS, Decoder
from jmoe.offload.expert_state import ExpertState, ExpertStats, LocalExperts, Stacks
from jmoe.offload.lazy_adamw import Laziness
from jmoe.offload.saved_experts import OfExperts
from jmoe.offload.train_stores import ExpertArrays, ExpertStores, OfLayer
from jmoe.training.gradient_reduction import Gradients
from jmoe.training.layer_values import GradAccumulator, Layer, NextLayer, Overlapped, Routed
from jmoe.training.state import with_experts, without_experts
from jmoe.training.step import Batch, Program, TrainState, make_program
from jmoe.training.streamed_programs import LayerPrograms

# Beside a layer's own work: the layer whose buffer is gathered, the gradients [R, G] that are reduced.
_Also = tuple[NextLayer | None, jax.Array | None]


@dataclass
class _Passed:
    """A layer on the way forward, for the way back: its inputs and what it keeps, one of each accumulation step.

    kept: as its gradients' program takes it. choices, chosen_P: only of a layer with experts.
    """

    xs: list[jax.Array]
    kept: list[Any] = field(default_factory=list)
    choices: list[jax.Array] = field(default_factory=list)
    chosen_P: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


@dataclass
class _Run:
    """A pass on its way: what all layers share. unsharded_RC: the buffer of the layer that comes next.

    outside, flat: of `LayerPrograms.prepare`. keeps: what layers need on the way back.
    """

    outside: Any
    flat: dict[LayerKind, jax.Array]
    unsharded_RC: jax.Array | None
    train: bool
    full_capacity: bool
    keeps: bool
    passed: list[_Passed] = field(default_factory=list)
    stats: list[list[MoEStats]] = field(default_factory=list)


class StreamedProgram:
    """The functions of `Program`, for experts on several tiers; the state is then of everything but the experts.

    `close` ends its threads. run: names the folder of its records, see `ExpertStores`.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, run: str = "run") -> None:
        self.config, self.tiers, self.mesh = config, config.tiers, mesh
        self._ordinary = make_program(config, mesh)
        self.programs = LayerPrograms(config, mesh)
        self._kinds = config.model.layer_kinds
        windows = config.model.windows
        counts = dict.fromkeys(STACKS, 0)
        self._layers = []
        for i, kind in enumerate(self._kinds):
            window = None if windows is None else jnp.int32(windows[i])
            self._layers.append(Layer(jnp.int32(counts[kind]), window))
            counts[kind] += 1
        self._num_layers, self._num_experts = config.model.num_moe_layers, config.model.num_experts
        shapes = {name: tuple(w.shape[2:]) for name, w in self.programs.experts.items()}
        one = mesh.size == 1
        self._owned = LocalExperts.of(mesh, self._num_experts)
        self._device = mesh.devices.flat[0] if one else None
        self._tokens_place = self._device or NamedSharding(mesh, ACCUMULATED_BATCH)
        self._batch_place = self._device or NamedSharding(mesh, BATCH)
        self.experts: ExpertState | None = None
        self.stores = ExpertStores(config, self._owned, shapes, run)

    # State

    def program(self) -> Program:
        """What the training loop uses."""
        whole = self._ordinary.saved_shape
        params, m, v = (without_experts(tree) for tree in (whole.params, whole.m, whole.v))
        return replace(
            self._ordinary,
            init=self.init,
            step=self.step,
            step_full_capacity=partial(self.step, full_capacity=True),
            evaluate=self.evaluate,
            # as many hidden states as a training step keeps of its layers' inputs
            evaluation_batches=len(self._layers) * self.config.gradient_accumulation_steps,
            next_logits=self.next_logits,
            saved_shape=TrainState(params, m, v, whole.router_bias, whole.step),
            to_saved=self.to_saved,
            from_layers=self.from_layers,
            full_state=self.full_state,
            records=self.stores.records,
            progress=self.progress,
            expert_stats=self.stats,
            close=self.close,
        )

    def init(self) -> TrainState:
        """Step 0 with fresh parameters, the same as the ordinary step's; experts are drawn one layer at a time."""
        seed, model = self.config.seed, self.config.model
        small = replace(model, moe_intermediate_size=1)  # experts are drawn last: all else is the same

        def rest() -> TrainState:
            split: Any = nnx.split(Decoder(small, rngs=nnx.Rngs(seed)), nnx.Param, RouterBias)
            params = without_experts(nnx.to_pure_dict(split[1]))
            zeros = jax.tree.map(jnp.zeros_like, params)
            state = TrainState(params, zeros, jax.tree.map(jnp.copy, zeros), nnx.to_pure_dict(split[2]), jnp.int32(0))
            return self._ordinary.from_saved(state)

        shape = self._ordinary.state_shape
        params, m, v = (without_experts(tree) for tree in (shape.params, shape.m, shape.v))
        places = jax.tree.map(lambda s: s.sharding, TrainState(params, m, v, shape.router_bias, shape.step))
        state: TrainState = jax.jit(rest, out_shardings=None if self.mesh.size == 1 else places)()
        draw = jax.jit(lambda layer: nnx.to_pure_dict(nnx.state(Decoder.experts_of(model, layer, nnx.Rngs(seed)))))

        def weights(layer: int) -> ExpertArrays:
            return {name: np.asarray(w)[self._owned.experts] for name, w in draw(jnp.int32(layer)).items()}

        self._open(self.stores.up_to_date(0), weights, lambda layer: {})
        return state

    def to_saved(self, state: TrainState) -> TrainState:
        """The state as it is saved, without the experts: those are records, durable where they are on the tier nvme.

        With moments there, experts are saved as they stand, else up to date.
        """
        with self._state.guard():
            self.stores.save(self._state)
            return self._ordinary.to_saved(state)

    def full_state(self, state: TrainState) -> TrainState:
        """The state as the ordinary step has it, with all experts in memory."""
        with self._state.guard():
            experts = self._state
            experts.flush_updates()
            state = self._ordinary.to_saved(state)
            params = with_experts(state.params, self._everyones(experts.weights()))
            m, v = (
                with_experts(tree, self._everyones(experts.moments(part)))
                for part, tree in (("m", state.m), ("v", state.v))
            )
            return TrainState(params, m, v, state.router_bias, state.step)

    def _everyones(self, arrays: ExpertArrays) -> Any:
        """Arrays [N, E, ...] of all processes, from those [N, P, ...] of each."""
        if self.mesh.size == 1:
            return arrays
        parts = [
            {name: jnp.array(w, device=device) for name, w in part.items()}
            for part, device in zip(self._owned.split(arrays, axis=1), self._owned.devices, strict=True)
        ]
        return self._joined(parts, axis=1)

    def _joined(self, parts: Sequence[Stacks], axis: int = 0) -> Stacks:
        """One array of all devices from the parts of this process's devices, joined in dimension `axis`."""
        if self.mesh.size == 1:
            return parts[0]
        sharding = NamedSharding(self.mesh, split_over(EXPERT, axis))

        def join(name: str) -> jax.Array:
            shape = list(parts[0][name].shape)
            shape[axis] = self._num_experts
            arrays = [part[name] for part in parts]
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)

        return {name: join(name) for name in parts[0]}

    def _mine(self, array: jax.Array) -> list[jax.Array]:
        """The parts of an array that lie on this process's devices, in their order."""
        parts = {shard.device: shard.data for shard in array.addressable_shards}
        return [parts[device] for device in self._owned.devices]

    def from_layers(self, rest: TrainState, weights: OfExperts | None, moments: OfExperts | None) -> TrainState:
        """The state without its experts, which go to their tiers layer by layer; None: they are there already."""
        mine, step = self._owned.experts, int(rest.step)
        of_layer = [None if read is None else partial(_of_mine, read, mine) for read in (weights, moments)]
        laziness = self.stores.laziness(step) if weights is moments is None else self.stores.up_to_date(step)
        self._open(laziness, *of_layer)
        state: TrainState = jax.device_put(rest, self._device) if self._device else self._ordinary.from_saved(rest)
        return state

    def _open(self, laziness: Laziness, weights: OfLayer | None, moments: OfLayer | None) -> None:
        if self.experts is not None:
            self.experts.close()
        self.experts = self.stores.fill(laziness, weights, moments)

    @property
    def _state(self) -> ExpertState:
        if self.experts is None:
            raise ValueError("the experts are nowhere yet: init or from_layers comes first")
        return self.experts

    def stats(self) -> ExpertStats:
        """Of the experts' tiers."""
        return self._state.stats()

    def progress(self) -> tuple[int, ...]:
        """What changes as long as records are moved or brought up to date."""
        return (*self.stores.progress(), 0 if self.experts is None else self.experts.stats().updates)

    def close(self) -> None:
        """End the threads of the tiers."""
        try:
            if self.experts is not None:
                self.experts.close()
                self.experts = None
        finally:
            self.stores.close()

    # Passes

    def step(
        self, state: TrainState, tokens_ABS: jax.Array, *, full_capacity: bool = False
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; `metrics["ok"]` is False, and nothing has changed, if the loss or gradient norm is not finite.

        Or if a buffer overflowed (`overflow`; there are no other metrics then), unless `full_capacity`. After an error
        there are no more steps: every call raises it.
        """
        with self._state.guard():
            return self._step(state, tokens_ABS, full_capacity=full_capacity)

    def _step(
        self, state: TrainState, tokens_ABS: jax.Array, *, full_capacity: bool
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        programs, params, experts = self.programs, state.params, self._state
        tokens = programs.unstack(jax.device_put(tokens_ABS, self._tokens_place))
        inputs, labels = (list(part) for part in zip(*(programs.split(t) for t in tokens), strict=True))
        down = list(range(self._num_layers))
        experts.begin(down + down[::-1])
        run, xs = self._forward(state, inputs, train=True, full_capacity=full_capacity)
        totals = self._done(programs.totals(run.stats))
        if self.config.model.capacity_factor is None and np.any(np.asarray(totals[1])):
            experts.stop()
            return state, {"overflow": jnp.bool_(True), "ok": jnp.bool_(False)}
        grads = programs.zeros(params, run.outside)
        losses, outside = [], grads.outside
        for a, part in enumerate(labels):
            loss, xs[a], outside = self._done(programs.loss_gradients(run.outside, xs[a], part, outside))
            losses.append(loss)
        dxs, squares = self._backward(state, run, xs, grads, totals[0])
        for part, dx in zip(inputs, dxs, strict=True):
            outside = self._done(programs.embed_gradients(run.outside, part, dx, outside))
        grads = grads._replace(outside=outside)
        state, metrics = self._done(programs.finish(state, grads, squares, losses, run.stats, totals))
        values = jax.device_get({name: metrics[name] for name in ("ok", "learning_rate", "clip")})
        if values["ok"]:
            experts.commit(float(values["learning_rate"]), float(values["clip"]))
        else:
            experts.abandon()
        return state, metrics

    def _done(self, result: Any) -> Any:
        """On CPU collectives of two programs under way at once may wait for each other for ever."""
        return result if self.mesh.size == 1 else jax.block_until_ready(result)

    def _ahead(self, run: _Run, i: int) -> NextLayer | None:
        """Layer i, where there is one and its parameters have to be gathered."""
        if not run.flat or not 0 <= i < len(self._layers):
            return None
        return NextLayer(run.flat[self._kinds[i]], self._layers[i].number)

    def _forward(
        self, state: TrainState, inputs: Sequence[jax.Array], *, train: bool, full_capacity: bool
    ) -> tuple[_Run, list[jax.Array]]:
        """(what the way back needs, hidden states)."""
        programs = self.programs
        outside, flat, unsharded_RC = self._done(programs.prepare(state.params, first=self._kinds[0]))
        # buffers for the worst case are as large as all devices' tokens: too much to keep of every layer
        keeps = train and not full_capacity and self.config.remat == "none"
        run = _Run(outside, flat, unsharded_RC, train, full_capacity, keeps)
        xs = [self._done(programs.embed(run.outside, tokens)) for tokens in inputs]
        for i, kind in enumerate(self._kinds):
            if not train:
                run.passed.clear()  # there is no way back
            run.passed.append(_Passed(xs))
            xs = (self._forward_experts if kind == "moe" else self._forward_dense)(state, run, i, xs)
        return run, xs

    def _forward_dense(self, state: TrainState, run: _Run, i: int, xs: list[jax.Array]) -> list[jax.Array]:
        stack, unsharded_RC, ahead = state.params[STACKS["dense"]], run.unsharded_RC, self._ahead(run, i + 1)
        ys = list(xs) if run.train else xs  # the inputs of an evaluation are needed no more
        for a, x in enumerate(xs):
            args = stack, unsharded_RC, x, self._layers[i], ahead
            y, kept, beside = self._done(self.programs.dense(*args, keeps=run.keeps))
            if ahead is not None:
                run.unsharded_RC, ahead = beside.unsharded_RC, None
            ys[a] = y
            run.passed[-1].kept.append(kept)
        return ys

    def _forward_experts(self, state: TrainState, run: _Run, i: int, xs: list[jax.Array]) -> list[jax.Array]:
        """Experts are fetched for all accumulation steps at once, but for one of the many batches of an evaluation."""
        unsharded_RC, each = run.unsharded_RC, len(xs) if run.train else 1
        ys = list(xs) if run.train else xs  # the inputs of an evaluation are needed no more
        for first in range(0, len(xs), each):
            group = slice(first, first + each)
            ys[group] = self._forward_group(state, run, i, unsharded_RC, xs[group], first)
        self._state.release()
        return ys

    def _forward_group(
        self, state: TrainState, run: _Run, i: int, unsharded_RC: jax.Array | None, xs: Sequence[jax.Array], first: int
    ) -> list[jax.Array]:
        """Of a layer with experts, for those of its inputs from number `first` on."""
        programs, experts, stack = self.programs, self._state, state.params[STACKS["moe"]]
        here, options = run.passed[-1], {"train": run.train, "full_capacity": run.full_capacity, "keeps": run.keeps}
        layers = [self._layers[i]._replace(step=state.step, accumulation=jnp.int32(first + a)) for a in range(len(xs))]
        aheads = [self._ahead(run, i + 1) if first + a == 0 else None for a in range(len(xs))]
        found = [
            self._done(programs.route(stack, unsharded_RC, x, layer, state.router_bias, ahead, **options))
            for x, layer, ahead in zip(xs, layers, aheads, strict=True)
        ]
        routed: list[Routed] = [r for r, _, _ in found]
        run.stats.append([r.stats for r in routed])
        here.choices = [r.topk_idx_TK for r in routed]
        here.chosen_P = np.any([self._on_host(r.arrived_E) > 0 for r in routed], axis=0)
        number = self._kinds[:i].count("moe")
        slot = self._joined(experts.fetch_more(here.chosen_P) if first else experts.fetch(number, here.chosen_P))
        ys = []
        for (r, before, begun), layer, ahead in zip(found, layers, aheads, strict=True):
            args = stack, unsharded_RC, slot, r, layer, ahead, begun
            y, kept, beside = self._done(programs.add_experts(*args, keeps=run.keeps))
            if ahead is not None:
                run.unsharded_RC = beside.unsharded_RC
            ys.append(y)
            here.kept.append((r, before, kept) if run.keeps else None)
        return jax.block_until_ready(ys)  # the slot may change then

    def _on_host(self, array: jax.Array) -> NDArray[Any]:
        """What lies on this process's devices."""
        return np.concatenate([np.asarray(part) for part in self._mine(array)])

    def _backward(
        self, state: TrainState, run: _Run, dxs: list[jax.Array], grads: Gradients, counts_NAE: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """(gradients of the first layer's inputs, squared norms of each layer's experts' gradients); fills `grads`."""
        squares: list[jax.Array] = []
        pending: tuple[LayerKind, jax.Array] | None = None  # a layer's kind and gradients, not summed over devices yet
        for i in reversed(range(len(self._kinds))):
            kind, before = self._kinds[i], self._ahead(run, i - 1)
            sums = GradAccumulator(None, grads.rest[kind])
            args = state, run, i, dxs, sums, (before, None if pending is None else pending[1])
            if kind == "moe":
                sums, beside, square = self._backward_experts(*args, counts_NAE)
                squares.append(square)
            else:
                sums, beside = self._backward_dense(*args)
            grads.rest[kind] = sums.rest
            if pending is not None and beside.sum_G is not None:
                grads.rows_G[pending[0]].append(beside.sum_G)
            run.unsharded_RC = beside.unsharded_RC
            pending = None if sums.rows_RG is None else (kind, sums.rows_RG)
            run.passed.pop()  # what it kept is needed no more
        if pending is not None:
            grads.rows_G[pending[0]].append(self._done(self.programs.reduce(pending[1])))
        for rows_G in grads.rows_G.values():
            rows_G.reverse()
        return dxs, squares[::-1]

    def _backward_dense(
        self, state: TrainState, run: _Run, i: int, dxs: list[jax.Array], sums: GradAccumulator, also: _Also
    ) -> tuple[GradAccumulator, Overlapped]:
        """Of one layer; changes `dxs`."""
        found, stack = Overlapped(None, None), state.params[STACKS["dense"]]
        for a, (x, kept) in enumerate(zip(run.passed[i].xs, run.passed[i].kept, strict=True)):
            args = stack, run.unsharded_RC, x, dxs[a], sums, self._layers[i], *also, kept
            dxs[a], sums, beside = self._done(self.programs.dense_gradients(*args))
            found, also = (found if a else beside), (None, None)
        return sums, found

    def _backward_experts(
        self,
        state: TrainState,
        run: _Run,
        i: int,
        dxs: list[jax.Array],
        sums: GradAccumulator,
        also: _Also,
        counts_NAE: jax.Array,
    ) -> tuple[GradAccumulator, Overlapped, jax.Array]:
        """Of one layer, with the squared norm of its experts' gradients, which go to their tier; changes `dxs`."""
        programs, experts, here, stack = self.programs, self._state, run.passed[i], state.params[STACKS["moe"]]
        number = self._kinds[:i].count("moe")
        slot = self._joined(experts.fetch(number, here.chosen_P))
        found, square = Overlapped(None, None), None
        for a, (x, idx, kept) in enumerate(zip(here.xs, here.choices, here.kept, strict=True)):
            layer = self._layers[i]._replace(step=state.step, accumulation=jnp.int32(a))
            args = stack, run.unsharded_RC, slot, x, dxs[a], sums, layer, state.router_bias, counts_NAE, *also
            options = {"full_capacity": run.full_capacity, "last": a == len(here.xs) - 1}
            dxs[a], sums, beside, square = self._done(programs.moe_gradients(*args, idx, kept, **options))
            found, also = (found if a else beside), (None, None)
        assert square is not None and sums.experts is not None
        jax.block_until_ready(dxs)
        del slot
        experts.release()
        by_device = zip(*(self._mine(g) for g in sums.experts.values()), strict=True)
        experts.keep(number, here.chosen_P, [dict(zip(sums.experts, parts, strict=True)) for parts in by_device])
        return sums._replace(experts=None), found, square

    def _hidden(self, state: TrainState, inputs: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """(what is outside the layers, unsharded; the last hidden states)."""
        with self._state.guard():
            self._state.begin(range(self._num_layers))
            run, xs = self._forward(state, inputs, train=False, full_capacity=True)
            return run.outside, xs

    def evaluate(self, state: TrainState, batches: Sequence[Batch]) -> list[jax.Array]:
        """Summed negative log-likelihood of each batch in nats; the experts are fetched once for all of them."""
        batches = [jax.device_put(batch, self._batch_place) for batch in batches]
        inputs, labels = zip(*(self._done(self.programs.split(tokens)) for tokens, _ in batches), strict=True)
        outside, xs = self._hidden(state, inputs)
        each = zip(xs, labels, (weights for _, weights in batches), strict=True)
        return [self._done(self.programs.nll(outside, *args)) for args in each]

    def next_logits(self, state: TrainState, tokens_BS: jax.Array, position: jax.Array) -> jax.Array:
        """[V], after the token at `position` of the first sequence."""
        outside, (x_BSD,) = self._hidden(state, [jax.device_put(tokens_BS, self._batch_place)])
        logits_V: jax.Array = self._done(self.programs.logits(outside, x_BSD, position))
        return logits_V


def _of_mine(read: OfExperts, mine: NDArray[np.int64], layer: int) -> ExpertArrays:
    return read(layer, mine)


def make_tiered_program(config: TrainConfig, mesh: Mesh, run: str = "run") -> Program:
    """`make_program`, with experts where `config.tiers` wants them. run: its name in `tiers.path`."""
    return make_program(config, mesh) if config.tiers.on_device else StreamedProgram(config, mesh, run).program()
