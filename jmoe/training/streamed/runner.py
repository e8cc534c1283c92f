"""The training step with experts on several tiers: the host runs layer by layer while further
experts arrive.

Each layer runs for all micro-batches before the next layer starts, so that its experts are fetched
once per pass. The gradients of an expert are applied when it is fetched next: the global norm is
known by then, and the update overlaps with other layers' compute. On several devices there are two
prefetches (MoESys, section 3.2): while a layer computes, the next layer's experts arrive from lower
tiers and its dense parameters from other devices. `StreamedTrainer` and `StreamedVisionTrainer` are
the subclasses.

Legend:
A micro-batches
P experts of this process
N layers
R devices
C elements of a device's shard of a layer's flat buffer
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.config import Layer, LayerKind
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import LossTokens
from jmoe.models.functional import split_parameters
from jmoe.offload.expert_index import SlottedExperts
from jmoe.offload.expert_state import ExpertArrays
from jmoe.offload.training_slots import DeviceStacks
from jmoe.optim.loss_scale import LossScale
from jmoe.training.gradient_reduction import StreamedGradients
from jmoe.training.state import TrainState, without_experts
from jmoe.training.streamed.experts import StreamedExperts
from jmoe.training.streamed.model import (
    BackwardInputs,
    Choices,
    FinishStepInputs,
    GradAccumulator,
    LayerOptions,
    LayerParams,
    LayerToGather,
    Metrics,
    MicroBatch,
    NeighborLayerCollectives,
    NeighborLayerResults,
    Params,
    PendingGradients,
    RoutedTokens,
    RoutingTotals,
    StreamedModel,
    SummedGradients,
    common_layer_options,
)
from jmoe.training.streamed.programs import make_step_programs
from jmoe.training.update import has_overflowed, run_without_drops
from jmoe.types import PyTree

Squares = dict[LayerKind, list[jax.Array]]


@dataclass
class _LayerForwardValues:
    """The values that one layer's forward pass leaves for its backward pass; lists have one entry
    per micro-batch.
    """

    xs: list[jax.Array]
    residuals: list[PyTree] = field(default_factory=list)  # see `BackwardInputs`
    choices: list[Choices] = field(default_factory=list)  # empty for a dense layer, like chosen_P
    chosen_P: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    slot_rows: int = 0  # slot rows of each device; 0: one for each expert


@dataclass(frozen=True)
class _PendingLayer:
    """A layer whose backward pass has run and whose gradients are not reduced over devices yet."""

    layer: Layer
    gradients: PendingGradients
    chosen_P: NDArray[np.bool_]  # the experts with gradients


@dataclass
class PassState(Generic[MicroBatch]):
    """The state of one forward (and backward) pass over the layers.

    choices: per micro-batch, the routing of each layer that is routed by task. dweights: per
    micro-batch, the gradients of those routings' weights, last layer first. flat: see
    `FirstGatheredParams`.
    """

    state: TrainState
    micro_batches: list[MicroBatch]
    outside: Params
    stacks: dict[str, Params]
    flat: dict[LayerKind, jax.Array]
    unsharded_RC: jax.Array | None  # the gathered flat buffer of the layer that runs next
    train: bool
    full_capacity: bool
    saves_residuals: bool
    choices: list[list[Choices]] = field(default_factory=list)
    passed: list[_LayerForwardValues] = field(default_factory=list)
    stats: list[list[MoEStats]] = field(default_factory=list)
    dweights: list[list[jax.Array]] = field(default_factory=list)

    def layer_params(self, layer: Layer, experts: DeviceStacks | None = None) -> LayerParams:
        """Return the parameters for the program of `layer`, which must be the layer
        gathered last.
        """
        bias = self.state.router_bias if layer.kind == "moe" else None
        return LayerParams(self.stacks[layer.stack_name], self.unsharded_RC, bias, experts)


def initial_state_without_experts(
    model: nnx.Module, loss_scale: LossScale | None = None
) -> TrainState:
    """Return the state of step 0 without experts, from a model with random parameters."""
    _, params, bias = split_parameters(model)
    dense = without_experts(nnx.to_pure_dict(params))
    return TrainState.at_step_0(dense, nnx.to_pure_dict(bias), loss_scale)


class StreamedRunner(StreamedExperts, ABC, Generic[MicroBatch]):
    """The `Trainer` of a run with experts on tiers; its `TrainState` holds all parameters except
    experts.

    run, slotted: see `StreamedExperts`. before: an earlier trainer of the same run whose experts
    this trainer takes over.
    """

    def __init__(
        self,
        streamed: StreamedModel[MicroBatch],
        run: str = "run",
        slotted: SlottedExperts | None = None,
        before: "StreamedRunner[MicroBatch] | None" = None,
    ) -> None:
        self.config = config = streamed.config
        self.streamed, self.programs = streamed, make_step_programs(streamed)
        self._layers, self._record_layers = config.model.layers, config.model.expert_layers
        self._common_options = common_layer_options(self._layers)
        self._down = list(range(len(self._record_layers)))  # layers with experts, forward order
        if before is None:
            shapes = streamed.modules.expert_shapes
            super().__init__(config, streamed.sharded.mesh, shapes, run, slotted)
        else:
            self._take_over_experts(before)
        self.full_shape = streamed.sharded.saved_shape
        self.saved_shape = self.full_shape.map_params_and_moments(without_experts)

    @abstractmethod
    def _random_experts(self, kind: LayerKind, number: jax.Array) -> nnx.Module:
        """Return random experts of step 0 for the layer of index `number` in its kind."""

    @abstractmethod
    def _micro_batches(self, state: TrainState, batch: PyTree) -> list[MicroBatch]:
        """Return the step's micro-batches, placed on the devices."""

    def _draw_experts(self) -> None:
        """Draw random experts of step 0 onto their tiers, one layer at a time."""

        @partial(jax.jit, static_argnames="kind")
        def draw_layer(number: jax.Array, *, kind: LayerKind) -> dict[str, jax.Array]:
            drawn: dict[str, jax.Array] = nnx.to_pure_dict(
                nnx.state(self._random_experts(kind, number))
            )
            return drawn

        def draw_weights(layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
            place = self._record_layers[layer]
            drawn = draw_layer(jnp.int32(place.number), kind=place.kind)
            return {name: np.asarray(w)[experts] for name, w in drawn.items()}

        self._stop_threads_and_fill_stores(
            self.stores.fresh_replay_state(0), draw_weights, lambda layer, experts: {}
        )

    # A step

    def step(
        self, state: TrainState, batch: PyTree, full_capacity: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Return (new state, metrics) after one optimizer step, like `Trainer.step`. After a buffer
        overflow the metrics are only `overflow` and `ok`.
        """
        experts = self._loaded_experts
        waited_s = experts.waited_s
        with experts.permanent_errors():
            result = self._run_step(state, batch, full_capacity)
        experts.step_waited_s += experts.waited_s - waited_s
        return result

    def _run_step(
        self, state: TrainState, batch: PyTree, full_capacity: bool
    ) -> tuple[TrainState, Metrics]:
        """Return the result of `step`; an error may leave the experts in the middle of a pass."""
        programs, experts = self.programs, self._loaded_experts
        micro_batches = self._micro_batches(state, batch)
        experts.begin_pass(self._down + self._down[::-1])
        pass_state, xs = self._forward(
            state, micro_batches, train=True, full_capacity=full_capacity
        )
        totals = (
            self._wait_on_cpu_mesh(programs.routing_totals(pass_state.stats))
            if pass_state.stats
            else RoutingTotals()
        )
        dropped_N = np.asarray(totals.dropped_N) if pass_state.stats else None
        if has_overflowed(self.config.model, dropped_N):
            experts.end_pass()
            return state, {"overflow": jnp.bool_(True), "ok": jnp.bool_(False)}
        grads = programs.zero_gradients(pass_state.stacks, pass_state.outside)
        losses, outside = self._loss_gradients(pass_state, xs, grads.outside)
        squares = self._backward(pass_state, xs, grads, totals.loss_tokens)
        for micro_batch, dx, dweights in zip(micro_batches, xs, pass_state.dweights, strict=True):
            args = pass_state.outside, micro_batch, dx, outside, dweights[::-1]
            outside = self._wait_on_cpu_mesh(programs.embed_gradients(*args))
        grads = grads._replace(outside=outside)
        results = FinishStepInputs(grads, squares, losses, pass_state.stats, totals)
        state, metrics = self._wait_on_cpu_mesh(programs.finish_step(state, results))
        self._commit_or_discard_gradients(metrics)
        return state, metrics

    def _loss_gradients(
        self, pass_state: PassState[MicroBatch], xs: list[jax.Array], sums: Params
    ) -> tuple[list[PyTree], Params]:
        """Return (losses per micro-batch, summed gradients of the parameters outside the layers);
        replaces each entry of `xs` by its gradient.
        """
        losses, scale = list[PyTree](), pass_state.state.loss_scale
        for a, micro_batch in enumerate(pass_state.micro_batches):
            args = pass_state.outside, xs[a], micro_batch, sums, scale
            loss, xs[a], sums = self._wait_on_cpu_mesh(self.programs.loss_gradients(*args))
            losses.append(loss)
        return losses, sums

    def _layer_to_gather(self, pass_state: PassState[MicroBatch], i: int) -> LayerToGather | None:
        """Return layer i for a program to gather; None if i is out of range or nothing is gathered
        per layer.
        """
        if not pass_state.flat or not 0 <= i < len(self._layers):
            return None
        layer = self._layers[i]
        return LayerToGather(pass_state.flat[layer.kind], self._common_options[layer].number)

    def _layer_options(
        self, pass_state: PassState[MicroBatch], layer: Layer, micro_batch_index: int
    ) -> LayerOptions:
        """Return the options of a layer's programs for micro-batch `micro_batch_index`."""
        common, step = self._common_options[layer], pass_state.state.step
        options = self.streamed.layer_options(
            layer.kind, common, step, pass_state.micro_batches[micro_batch_index], micro_batch_index
        )
        if layer.kind != "task":
            return options
        return options._replace(choices=pass_state.choices[micro_batch_index][layer.number])

    # Forwards

    def _forward(
        self,
        state: TrainState,
        micro_batches: list[MicroBatch],
        *,
        train: bool,
        full_capacity: bool,
    ) -> tuple[PassState[MicroBatch], list[jax.Array]]:
        """Return (the pass with the values that its backward pass needs, last hidden states per
        micro-batch).
        """
        programs, first = self.programs, self._layers[0].kind
        unsharded = self._wait_on_cpu_mesh(
            programs.gather_first_params(state.params, first_kind=first)
        )
        # Full-capacity buffers hold the tokens of all devices: too large to save for every layer.
        saves_residuals = train and not full_capacity and self.streamed.saves_residuals
        stacks = unsharded.stacks
        if stacks is None:
            stacks = {layer.stack_name: state.params[layer.stack_name] for layer in self._layers}
        args = unsharded.outside, stacks, unsharded.flat, unsharded.first_RC
        pass_state = PassState(state, micro_batches, *args, train, full_capacity, saves_residuals)
        xs = []
        for micro_batch in micro_batches:
            x, choices = self._wait_on_cpu_mesh(programs.embed(pass_state.outside, micro_batch))
            xs.append(x)
            pass_state.choices.append(choices)
            pass_state.dweights.append([])
        for i, layer in enumerate(self._layers):
            if not train:
                pass_state.passed.clear()  # frees the saved values: no backward pass follows
            pass_state.passed.append(_LayerForwardValues(xs))
            ys = list(xs) if train else xs  # evaluation overwrites its inputs
            (self._forward_dense if layer.kind == "dense" else self._forward_experts)(
                pass_state, i, ys
            )
            xs = ys
        return pass_state, xs

    def _forward_dense(
        self, pass_state: PassState[MicroBatch], i: int, xs: list[jax.Array]
    ) -> None:
        """Run dense layer i on all micro-batches; replaces each entry of `xs` by the layer's
        output.
        """
        layer, next_layer = self._layers[i], self._layer_to_gather(pass_state, i + 1)
        params = pass_state.layer_params(layer)
        for a, x in enumerate(xs):
            work = NeighborLayerCollectives(None if a else next_layer)
            args = params, self._layer_options(pass_state, layer, a), x, work
            xs[a], residuals, overlapped = self._wait_on_cpu_mesh(
                self.programs.dense_forward(*args, saves_residuals=pass_state.saves_residuals)
            )
            pass_state.passed[-1].residuals.append(residuals)
            if work.next_layer is not None:
                pass_state.unsharded_RC = overlapped.unsharded_RC

    def _forward_experts(
        self, pass_state: PassState[MicroBatch], i: int, xs: list[jax.Array]
    ) -> None:
        """Run MoE layer i on all micro-batches; replaces each entry of `xs` by the layer's output.

        Training fetches the experts of all micro-batches at once. Evaluation, which has many
        micro-batches, fetches the missing experts before each one.
        """
        params, size = pass_state.layer_params(self._layers[i]), len(xs) if pass_state.train else 1
        for first in range(0, len(xs), size):
            group = slice(first, first + size)
            xs[group] = self._forward_micro_batch_group(pass_state, i, params, xs[group], first)
        self._loaded_experts.release_layer()

    def _forward_micro_batch_group(
        self,
        pass_state: PassState[MicroBatch],
        i: int,
        params: LayerParams,
        xs: Sequence[jax.Array],
        first_micro_batch: int,
    ) -> list[jax.Array]:
        """Return the outputs of MoE layer i for the inputs `xs`, which are the micro-batches from
        number `first_micro_batch` on.
        """
        programs, layer, passed = self.programs, self._layers[i], pass_state.passed[-1]
        static = {"kind": layer.kind, "saves_residuals": pass_state.saves_residuals}
        route_static = static | {
            "train": pass_state.train,
            "full_capacity": pass_state.full_capacity,
        }
        all_options = [
            self._layer_options(pass_state, layer, first_micro_batch + a) for a in range(len(xs))
        ]
        ahead = [
            None if first_micro_batch + a else self._layer_to_gather(pass_state, i + 1)
            for a in range(len(xs))
        ]
        works = list(map(NeighborLayerCollectives, ahead))
        each = [
            self._wait_on_cpu_mesh(programs.route(params, options, x, work, **route_static))
            for x, options, work in zip(xs, all_options, works, strict=True)
        ]
        routed: list[RoutedTokens] = [tokens for tokens, _, _ in each]
        if layer.kind == "moe":
            pass_state.stats.append([tokens.stats for tokens in routed])
        arrived = [tokens.arrived_E for tokens in routed]
        passed.choices = [
            {"topk_idx_TK": tokens.topk_idx_TK} if options.choices is None else options.choices
            for tokens, options in zip(routed, all_options, strict=True)
        ]
        passed.chosen_P = self._chosen_experts(arrived)
        passed.slot_rows = self._grow_slots_for_chosen(arrived)
        fetch = (
            self._loaded_experts.fetch_more_experts
            if first_micro_batch
            else partial(self._loaded_experts.fetch_layer, layer.record)
        )
        params = params._replace(experts=self._global_arrays(fetch(passed.chosen_P)))
        params = params._replace(chosen=self._chosen_slot_rows(passed.chosen_P, passed.slot_rows))
        ys = []
        for halves in zip(each, all_options, works, strict=True):
            (tokens, route_residuals, gathered), options, work = halves
            work = work._replace(gathered=gathered)
            args = params, tokens, options._replace(choices=None), work
            y, residuals, overlapped = self._wait_on_cpu_mesh(
                programs.apply_experts(*args, **static)
            )
            if work.next_layer is not None:
                pass_state.unsharded_RC = overlapped.unsharded_RC
            ys.append(y)
            both = (tokens, route_residuals, residuals) if pass_state.saves_residuals else None
            passed.residuals.append(both)
        return jax.block_until_ready(ys)  # the slot is overwritten after this

    def _grow_slots_for_chosen(self, arrived_counts: Sequence[jax.Array]) -> int:
        """Grow the slots if the chosen experts of a device do not fit; return the rows per device.

        Returns 0, and grows nothing, if the slot has a row for each expert.
        """
        experts = self._loaded_experts
        if experts.experts_per_slot is None:
            return 0
        experts.grow_slots(
            int(self._wait_on_cpu_mesh(self.programs.max_chosen_experts_per_device(arrived_counts)))
        )
        return experts.experts_per_slot

    # Backwards

    def _backward(
        self,
        pass_state: PassState[MicroBatch],
        dxs: list[jax.Array],
        grads: StreamedGradients,
        loss_tokens: LossTokens | None,
    ) -> Squares:
        """Return the squared gradient norms of each layer's experts, by kind; fills `grads` and
        replaces `dxs` by the gradients of the first layer's inputs.
        """
        squares: Squares = {layer.kind: [] for layer in self._record_layers}
        pending: _PendingLayer | None = None
        for i, layer in reversed(list(enumerate(self._layers))):
            sums = GradAccumulator(None, grads.outside_buffer[layer.kind])
            unreduced = PendingGradients() if pending is None else pending.gradients
            work, square = (
                NeighborLayerCollectives(self._layer_to_gather(pass_state, i - 1), unreduced),
                None,
            )
            if layer.kind == "dense":
                sums, overlapped = self._backward_dense(pass_state, i, dxs, sums, work)
            else:
                results = self._backward_experts(pass_state, i, dxs, sums, work, loss_tokens)
                sums, overlapped, square = results
            grads.outside_buffer[layer.kind] = sums.outside_buffer
            if pending is not None:
                self._store_reduced(pending, overlapped.summed, grads, squares)
            pass_state.unsharded_RC = overlapped.unsharded_RC
            left = PendingGradients(sums.rows_RG, sums.experts, sums.ids_M)
            pending = _PendingLayer(layer, left, pass_state.passed[i].chosen_P)
            if square is not None:  # the experts' gradients needed no further reduction
                squares[layer.kind].append(square)
            pass_state.passed.pop()  # frees the layer's residuals
            # No layer follows to overlap with; with slots, no program reduces for a neighbour.
            if i == 0 or self.streamed.slots is not None:
                self._reduce_without_overlap(pending, grads, squares)
                pending = None
        for last_layer_first in (*grads.rows_G.values(), *squares.values()):
            last_layer_first.reverse()
        return squares

    def _reduce_without_overlap(
        self, pending: _PendingLayer, grads: StreamedGradients, squares: Squares
    ) -> None:
        """Reduce a layer's gradients over devices without other work to overlap with, and store
        them.
        """
        if jax.tree.leaves(pending.gradients):
            number = pending.layer.number
            summed = self._wait_on_cpu_mesh(
                self.programs.reduce_pending(pending.gradients, number=number)
            )
            self._store_reduced(pending, summed, grads, squares)

    def _store_reduced(
        self,
        pending: _PendingLayer,
        summed: SummedGradients,
        grads: StreamedGradients,
        squares: Squares,
    ) -> None:
        """Store a layer's reduced gradients: dense ones in `grads`, experts' on their tier, norms
        in `squares`.
        """
        layer = pending.layer
        if summed.row_G is not None:
            grads.rows_G[layer.kind].append(summed.row_G)
        if summed.experts is not None and summed.square is not None:
            squares[layer.kind].append(summed.square)
            self._store_gradients(layer.record, pending.chosen_P, summed.experts)

    def _backward_dense(
        self,
        pass_state: PassState[MicroBatch],
        i: int,
        dxs: list[jax.Array],
        sums: GradAccumulator,
        work: NeighborLayerCollectives,
    ) -> tuple[GradAccumulator, NeighborLayerResults]:
        """Return (summed gradients, results of `work`) of dense layer i's backward pass; replaces
        `dxs`.
        """
        layer, passed, results = self._layers[i], pass_state.passed[i], NeighborLayerResults()
        params = pass_state.layer_params(layer)
        for a, (x, residuals) in enumerate(zip(passed.xs, passed.residuals, strict=True)):
            inputs = BackwardInputs(x, dxs[a], None, residuals)
            options = self._layer_options(pass_state, layer, a)
            args = params, options, inputs, sums, NeighborLayerCollectives() if a else work
            dxs[a], sums, overlapped = self._wait_on_cpu_mesh(self.programs.dense_gradients(*args))
            results = results if a else overlapped
        return sums, results

    def _backward_experts(
        self,
        pass_state: PassState[MicroBatch],
        i: int,
        dxs: list[jax.Array],
        sums: GradAccumulator,
        work: NeighborLayerCollectives,
        loss_tokens: LossTokens | None,
    ) -> tuple[GradAccumulator, NeighborLayerResults, jax.Array | None]:
        """Return (summed gradients, results of `work`, squared norms of the experts' gradients) of
        MoE layer i's backward pass; replaces `dxs`.

        The experts' gradients go to their tier. If they first need a reduction over devices, they
        are among the summed gradients instead, and the norms are None.
        """
        experts, layer, passed = self._loaded_experts, self._layers[i], pass_state.passed[i]
        fetched = self._global_arrays(experts.fetch_layer(layer.record, passed.chosen_P))
        params = pass_state.layer_params(layer, fetched)
        params = params._replace(chosen=self._chosen_slot_rows(passed.chosen_P, passed.slot_rows))
        results, square = NeighborLayerResults(), None
        each = zip(passed.xs, passed.choices, passed.residuals, strict=True)
        for a, (x, choices, residuals) in enumerate(each):
            options = self._layer_options(pass_state, layer, a)._replace(choices=None)
            loss_scale = pass_state.state.loss_scale
            inputs = BackwardInputs(x, dxs[a], choices, residuals, loss_scale, loss_tokens)
            args = params, options, inputs, sums, NeighborLayerCollectives() if a else work
            static = {
                "full_capacity": pass_state.full_capacity,
                "is_last_micro_batch": a == len(passed.xs) - 1,
            }
            program = partial(self.programs.moe_gradients, kind=layer.kind, **static)
            dxs[a], sums, overlapped, square, dweights = self._wait_on_cpu_mesh(program(*args))
            results = results if a else overlapped
            if dweights is not None:
                pass_state.dweights[a].append(dweights)
        jax.block_until_ready(dxs)
        del fetched, params, args
        experts.release_layer()
        if square is None:
            return sums, results, None
        assert sums.experts is not None
        self._store_gradients(layer.record, passed.chosen_P, sums.experts)
        return sums._replace(experts=None, ids_M=None), results, square

    # Without gradients

    def _last_hidden_states(
        self, state: TrainState, micro_batches: list[MicroBatch]
    ) -> tuple[Params, list[jax.Array]]:
        """Run all layers without gradients; return (unsharded parameters outside the layers, last
        hidden states per micro-batch).

        Each layer's experts are fetched once for all micro-batches.
        """

        def run_forward(*, full_capacity: bool) -> tuple[tuple[Params, list[jax.Array]], jax.Array]:
            self._loaded_experts.begin_pass(self._down)
            pass_state, xs = self._forward(
                state, micro_batches, train=False, full_capacity=full_capacity
            )
            dropped = (
                self._wait_on_cpu_mesh(self.programs.dropped_assignments(pass_state.stats))
                if pass_state.stats
                else jnp.int32(0)
            )
            return (pass_state.outside, xs), dropped

        with self._loaded_experts.permanent_errors():
            return run_without_drops(run_forward)
