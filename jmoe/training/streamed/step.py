"""The training step with experts on several tiers: the host runs layer by layer while the next layers' experts arrive.

Legend: A accumulation steps, B batch, S sequence, D hidden, V vocabulary, E experts, P those of this process, N MoE
layers, R devices, C elements of a device's part of a layer's flat buffer, G the same for gradients.

Layers go 0 … N-1 and back, each for all accumulation steps at once, so that its experts are fetched once a pass.
Gradients of experts are applied when the expert is fetched next: by then the global norm is known, and the update hides
under other layers' work. On several devices that is one of two prefetches (MoESys section 3.2): while layer i computes,
its successor's experts arrive from the tiers below, and its dense parameters from the other devices.
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
from jmoe.config.cluster import LinksConfig
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import RouterBias
from jmoe.mesh import ACCUMULATED_BATCH, BATCH
from jmoe.models.decoder import STACKS, Decoder
from jmoe.offload.expert_state import ExpertArrays, ReadExperts
from jmoe.offload.training_slots import DeviceStacks
from jmoe.optim.loss_scale import first_loss_scale
from jmoe.training.gradient_reduction import StreamedGradients
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import Batch, TrainState, without_experts
from jmoe.training.streamed.experts import StreamedExperts
from jmoe.training.streamed.programs import (
    ForBackward,
    GradAccumulator,
    LayerIndex,
    LayerParams,
    LayerPrograms,
    NeighborWork,
    NextLayer,
    Overlapped,
    PendingGradients,
    RoutedTokens,
    StepResults,
    SummedGradients,
)
from jmoe.training.update import without_drops


@dataclass(frozen=True)
class _LayerPlace:
    """A layer's kind, its number among those of its kind, and its program's index."""

    kind: LayerKind
    number: int
    index: LayerIndex


@dataclass
class _PassedLayer:
    """A layer on the way forward, for the way back: its inputs and what it keeps, one of each accumulation step."""

    xs: list[jax.Array]
    kept: list[Any] = field(default_factory=list)  # as its gradients' program takes it
    choices: list[jax.Array] = field(default_factory=list)  # only of a layer with experts, as is chosen_P
    chosen_P: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    room: int = 0  # experts of a device that its programs are given; 0: all


@dataclass(frozen=True)
class _PendingLayer:
    """A layer on the way back whose gradients are not summed over devices yet. chosen_P: as its `_PassedLayer` has."""

    place: _LayerPlace
    gradients: PendingGradients
    chosen_P: NDArray[np.bool_]


@dataclass
class _Pass:
    """A pass over the layers on its way. outside, flat: of `LayerPrograms.prepare`."""

    state: TrainState
    outside: Any
    flat: dict[LayerKind, jax.Array]
    unsharded_RC: jax.Array | None  # the buffer of the layer that comes next
    train: bool
    full_capacity: bool
    keeps: bool  # what layers need on the way back
    passed: list[_PassedLayer] = field(default_factory=list)
    stats: list[list[MoEStats]] = field(default_factory=list)

    def params(self, kind: LayerKind, experts: DeviceStacks | None = None) -> LayerParams:
        """Return what the next layer's program is given."""
        bias = self.state.router_bias if kind == "moe" else None
        return LayerParams(self.state.params[STACKS[kind]], self.unsharded_RC, bias, experts)


class StreamedTrainer(StreamedExperts):
    """The `Trainer` of runs whose experts lie on several tiers; its state is of everything but the experts.

    chunk_bytes: how much the network takes at once, see `ShardedDecoder.reverse_scan`. links: see there. run: see
    `StreamedExperts`.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        chunk_bytes: int | None = None,
        run: str = "run",
        links: LinksConfig | None = None,
    ) -> None:
        self.config = config
        self.model = model = ShardedDecoder(config, mesh, links)
        self.programs = LayerPrograms(model, chunk_bytes)
        windows, kinds = config.model.windows, config.model.layer_kinds
        self._layers = []
        for i, kind in enumerate(kinds):
            number, window = kinds[:i].count(kind), None if windows is None else jnp.int32(windows[i])
            self._layers.append(_LayerPlace(kind, number, LayerIndex(jnp.int32(number), window)))
        self._num_layers = config.model.num_moe_layers
        self._device = mesh.devices.flat[0] if mesh.size == 1 else None
        self._tokens_place = self._device or NamedSharding(mesh, ACCUMULATED_BATCH)
        self._batch_place = self._device or NamedSharding(mesh, BATCH)
        super().__init__(config, mesh, {name: tuple(w.shape[2:]) for name, w in self.programs.experts.items()}, run)
        self.notes, self.full_shape = [*model.notes, self.stores.note], model.saved_shape
        self.saved_shape = self.full_shape.map(without_experts)
        # as many hidden states as a training step keeps of its layers' inputs
        self.evaluation_batches = len(self._layers) * config.gradient_accumulation_steps

    # State

    def init(self) -> TrainState:
        """Draw step 0, with the fused trainer's parameters; experts are drawn one layer at a time."""
        seed, model = self.config.seed, self.config.model
        small = replace(model, moe_intermediate_size=1)  # experts are drawn last: all else is the same

        def rest() -> TrainState:
            split: Any = nnx.split(Decoder(small, rngs=nnx.Rngs(seed)), nnx.Param, RouterBias)
            params = without_experts(nnx.to_pure_dict(split[1]))
            return self.model.from_saved(
                TrainState.at_step_0(params, nnx.to_pure_dict(split[2]), first_loss_scale(self.config))
            )

        places = jax.tree.map(lambda s: s.sharding, self.model.state_shape.map(without_experts))
        state: TrainState = jax.jit(rest, out_shardings=None if self.mesh.size == 1 else places)()
        draw = jax.jit(lambda layer: nnx.to_pure_dict(nnx.state(Decoder.experts_of(model, layer, nnx.Rngs(seed)))))

        def weights(layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
            return {name: np.asarray(w)[experts] for name, w in draw(jnp.int32(layer)).items()}

        self._open(self.stores.up_to_date(0), weights, lambda layer, experts: {})
        return state

    def save_state(self, state: TrainState) -> TrainState:
        """Return what a checkpoint holds besides records, which are durable then where they are on the tier nvme.

        With moments there, experts are saved as they stand, else up to date.
        """
        with self._opened.guard():
            self.stores.save(self._opened)
            return self.model.to_saved(state)

    def load_state(
        self, saved: TrainState, weights: ReadExperts | None = None, moments: ReadExperts | None = None
    ) -> TrainState:
        """Return the state; experts go to their tiers layer by layer. None: they are there already."""
        self._load(int(saved.step), weights, moments)
        return jax.device_put(saved, self._device) if self._device else self.model.from_saved(saved)

    # Passes

    def step(
        self, state: TrainState, tokens_ABS: jax.Array, full_capacity: bool = False
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one step; where a buffer overflowed there are no metrics but `overflow` and `ok`."""
        with self._opened.guard():
            return self._step(state, tokens_ABS, full_capacity)

    def _step(
        self, state: TrainState, tokens_ABS: jax.Array, full_capacity: bool
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        programs, experts = self.programs, self._opened
        tokens = programs.unstack(jax.device_put(tokens_ABS, self._tokens_place))
        inputs, labels = (list(part) for part in zip(*(programs.split(t) for t in tokens), strict=True))
        down = list(range(self._num_layers))
        experts.begin(down + down[::-1])
        run, xs = self._forward(state, inputs, train=True, full_capacity=full_capacity)
        totals = self._done(programs.totals(run.stats))
        if self.config.model.capacity_factor is None and np.any(np.asarray(totals[1])):
            experts.stop()
            return state, {"overflow": jnp.bool_(True), "ok": jnp.bool_(False)}
        grads = programs.zeros(state.params, run.outside)
        losses, outside = [], grads.outside
        for a, part in enumerate(labels):
            loss, xs[a], outside = self._done(
                programs.loss_gradients(run.outside, xs[a], part, outside, state.loss_scale)
            )
            losses.append(loss)
        dxs, squares = self._backward(run, xs, grads, totals[0])
        for part, dx in zip(inputs, dxs, strict=True):
            outside = self._done(programs.embed_gradients(run.outside, part, dx, outside))
        results = StepResults(grads._replace(outside=outside), squares, losses, run.stats, *totals)
        state, metrics = self._done(programs.finish(state, results))
        self._end_step(metrics)
        return state, metrics

    def _next_layer(self, run: _Pass, i: int) -> NextLayer | None:
        """Return layer i, where there is one and its parameters have to be gathered."""
        if not run.flat or not 0 <= i < len(self._layers):
            return None
        return NextLayer(run.flat[self._layers[i].kind], self._layers[i].index.number)

    # Forwards

    def _forward(
        self, state: TrainState, inputs: Sequence[jax.Array], *, train: bool, full_capacity: bool
    ) -> tuple[_Pass, list[jax.Array]]:
        """Return (what the way back needs, hidden states)."""
        programs = self.programs
        outside, flat, unsharded_RC = self._done(programs.prepare(state.params, first=self._layers[0].kind))
        # buffers for full capacity are as large as all devices' tokens: too much to keep of every layer
        keeps = train and not full_capacity and self.config.remat != "layer"
        run = _Pass(state, outside, flat, unsharded_RC, train, full_capacity, keeps)
        xs = [self._done(programs.embed(run.outside, tokens)) for tokens in inputs]
        for i, place in enumerate(self._layers):
            if not train:
                run.passed.clear()  # there is no way back
            run.passed.append(_PassedLayer(xs))
            ys = list(xs) if train else xs  # the inputs of an evaluation are needed no more
            (self._forward_experts if place.kind == "moe" else self._forward_dense)(run, i, ys)
            xs = ys
        return run, xs

    def _forward_dense(self, run: _Pass, i: int, xs: list[jax.Array]) -> None:
        """Run a layer, in place of its inputs."""
        params, next_layer = run.params("dense"), self._next_layer(run, i + 1)
        for a, x in enumerate(xs):
            work = NeighborWork(None if a else next_layer)
            xs[a], kept, overlapped = self._done(
                self.programs.dense(params, self._layers[i].index, x, work, keeps=run.keeps)
            )
            run.passed[-1].kept.append(kept)
            if work.next_layer is not None:
                run.unsharded_RC = overlapped.unsharded_RC

    def _forward_experts(self, run: _Pass, i: int, xs: list[jax.Array]) -> None:
        """Run a layer, in place of its inputs.

        Experts are fetched for all accumulation steps at once, but for one of the many batches of an evaluation.
        """
        params, size = run.params("moe"), len(xs) if run.train else 1
        for first in range(0, len(xs), size):
            group = slice(first, first + size)
            xs[group] = self._forward_group(run, i, params, xs[group], first)
        self._opened.release()

    def _forward_group(
        self, run: _Pass, i: int, params: LayerParams, xs: Sequence[jax.Array], first: int
    ) -> list[jax.Array]:
        """Run a layer with experts on those of its inputs from number `first` on."""
        programs, place, passed = self.programs, self._layers[i], run.passed[-1]
        options = {"train": run.train, "full_capacity": run.full_capacity, "keeps": run.keeps}
        layers = [place.index._replace(step=run.state.step, accumulation=jnp.int32(first + a)) for a in range(len(xs))]
        works = [NeighborWork(None if first + a else self._next_layer(run, i + 1)) for a in range(len(xs))]
        each = [
            self._done(programs.route(params, layer, x, work, **options))
            for x, layer, work in zip(xs, layers, works, strict=True)
        ]
        routed: list[RoutedTokens] = [tokens for tokens, _, _ in each]
        run.stats.append([tokens.stats for tokens in routed])
        passed.choices = [tokens.topk_idx_TK for tokens in routed]
        passed.chosen_P = self._chosen([tokens.arrived_E for tokens in routed])
        passed.room = self._room_for([tokens.arrived_E for tokens in routed])
        fetch = self._opened.fetch_more if first else partial(self._opened.fetch, place.number)
        params = params._replace(experts=self._joined(fetch(passed.chosen_P)))
        params = params._replace(chosen=self._rows_of(passed.chosen_P, passed.room))
        ys = []
        for (tokens, of_route, gathered), layer, work in zip(each, layers, works, strict=True):
            work = work._replace(gathered=gathered)
            y, kept, overlapped = self._done(programs.add_experts(params, tokens, layer, work, keeps=run.keeps))
            if work.next_layer is not None:
                run.unsharded_RC = overlapped.unsharded_RC
            ys.append(y)
            passed.kept.append((tokens, of_route, kept) if run.keeps else None)
        return jax.block_until_ready(ys)  # the slot may change then

    def _room_for(self, arrived: Sequence[jax.Array]) -> int:
        """Return how many experts of a device there is room for, once all of these are among them; 0: for all."""
        experts = self._opened
        if experts.room is None:
            return 0
        experts.make_room(int(self._done(self.programs.most_chosen(arrived))))
        return experts.room

    # Backwards

    def _backward(
        self, run: _Pass, dxs: list[jax.Array], grads: StreamedGradients, counts_NAE: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return (gradients of the first layer's inputs, squared norms of each layer's experts'); fills `grads`."""
        squares: list[jax.Array] = []
        pending: _PendingLayer | None = None
        for i, place in reversed(list(enumerate(self._layers))):
            sums = GradAccumulator(None, grads.rest[place.kind])
            of_last = PendingGradients() if pending is None else pending.gradients
            work, square = NeighborWork(self._next_layer(run, i - 1), of_last), None
            if place.kind == "moe":
                sums, overlapped, square = self._backward_experts(run, i, dxs, sums, work, counts_NAE)
            else:
                sums, overlapped = self._backward_dense(run, i, dxs, sums, work)
            grads.rest[place.kind] = sums.rest
            if pending is not None:
                self._take(pending, overlapped.summed, grads, squares)
            run.unsharded_RC = overlapped.unsharded_RC
            pending = _PendingLayer(
                place, PendingGradients(sums.rows_RG, sums.experts, sums.ids_M), run.passed[i].chosen_P
            )
            if square is not None:  # no replica has gradients of the same experts
                squares.append(square)
            run.passed.pop()  # what it kept is needed no more
        if pending is not None and jax.tree.leaves(pending.gradients):
            self._take(pending, self._done(self.programs.reduce(pending.gradients)), grads, squares)
        for rows_G in grads.rows_G.values():
            rows_G.reverse()
        return dxs, squares[::-1]

    def _take(
        self, layer: _PendingLayer, summed: SummedGradients, grads: StreamedGradients, squares: list[jax.Array]
    ) -> None:
        """Take a layer's gradients to where they are kept, once they are summed."""
        if summed.row_G is not None:
            grads.rows_G[layer.place.kind].append(summed.row_G)
        if summed.experts is not None and summed.square is not None:
            squares.append(summed.square)
            self._keep(layer.place.number, layer.chosen_P, summed.experts)

    def _backward_dense(
        self, run: _Pass, i: int, dxs: list[jax.Array], sums: GradAccumulator, work: NeighborWork
    ) -> tuple[GradAccumulator, Overlapped]:
        """Run one layer backwards; changes `dxs`."""
        params, results, passed = run.params("dense"), Overlapped(), run.passed[i]
        for a, (x, kept) in enumerate(zip(passed.xs, passed.kept, strict=True)):
            inputs = ForBackward(x, dxs[a], None, kept)
            args = params, self._layers[i].index, inputs, sums, NeighborWork() if a else work
            dxs[a], sums, overlapped = self._done(self.programs.dense_gradients(*args))
            results = results if a else overlapped
        return sums, results

    def _backward_experts(
        self,
        run: _Pass,
        i: int,
        dxs: list[jax.Array],
        sums: GradAccumulator,
        work: NeighborWork,
        counts_NAE: jax.Array,
    ) -> tuple[GradAccumulator, Overlapped, jax.Array | None]:
        """Run one layer backwards, whose experts' gradients go to their tier; changes `dxs`.

        Returns (the other gradients, the neighbours' results, the squared norm of the experts' gradients). Where
        replicas have the same experts, their gradients are among the others, to be summed, and the norm is None.
        """
        experts, place, passed = self._opened, self._layers[i], run.passed[i]
        params = run.params("moe", self._joined(experts.fetch(place.number, passed.chosen_P)))
        params = params._replace(chosen=self._rows_of(passed.chosen_P, passed.room))
        results, square = Overlapped(), None
        for a, (x, idx, kept) in enumerate(zip(passed.xs, passed.choices, passed.kept, strict=True)):
            layer = place.index._replace(step=run.state.step, accumulation=jnp.int32(a))
            inputs = ForBackward(x, dxs[a], idx, kept, run.state.loss_scale)
            args = params, layer, inputs, sums, counts_NAE, NeighborWork() if a else work
            options = {"full_capacity": run.full_capacity, "last": a == len(passed.xs) - 1}
            dxs[a], sums, overlapped, square = self._done(self.programs.moe_gradients(*args, **options))
            results = results if a else overlapped
        jax.block_until_ready(dxs)
        del params, args
        experts.release()
        if square is None:
            return sums, results, None
        assert sums.experts is not None
        self._keep(place.number, passed.chosen_P, sums.experts)
        return sums._replace(experts=None, ids_M=None), results, square

    # Without gradients

    def _hidden(self, state: TrainState, inputs: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Return (what is outside the layers, unsharded; the last hidden states)."""

        def forward(*, full_capacity: bool) -> tuple[tuple[Any, list[jax.Array]], jax.Array]:
            self._opened.begin(range(self._num_layers))
            run, xs = self._forward(state, inputs, train=False, full_capacity=full_capacity)
            return (run.outside, xs), self._done(self.programs.dropped(run.stats))

        with self._opened.guard():
            return without_drops(forward)

    def evaluate(self, state: TrainState, batches: Sequence[Batch]) -> list[jax.Array]:
        """Return the summed negative log-likelihood of each batch; experts are fetched once for all of them."""
        batches = [jax.device_put(batch, self._batch_place) for batch in batches]
        inputs, labels = zip(*(self._done(self.programs.split(tokens)) for tokens, _ in batches), strict=True)
        outside, xs = self._hidden(state, inputs)
        each = zip(xs, labels, (weights for _, weights in batches), strict=True)
        return [self._done(self.programs.nll(outside, *args)) for args in each]

    def next_logits(self, state: TrainState, tokens_BS: jax.Array, position: jax.Array) -> jax.Array:
        outside, (x_BSD,) = self._hidden(state, [jax.device_put(tokens_BS, self._batch_place)])
        logits_V: jax.Array = self._done(self.programs.logits(outside, x_BSD, position))
        return logits_V
