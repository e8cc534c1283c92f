"""The forward and backward functions of one layer in a streamed step, traced on each device into
`StepPrograms`.

An MoE layer's forward pass is split where its tokens have arrived at their experts' devices:
`route`, then the host fetches the chosen experts, then `apply_experts`. Its backward pass is one
function, which takes the residuals of both (`training.vjp`), or reruns the layer with the same
routing if none were saved. Beside its own work a function gathers the dense parameters of the layer
that runs next; in the backward pass it also reduces the gradients of the layer that ran before.
`collectives.schedule` places these collectives.

Legend:
A micro-batches
B batch
S sequence
T = B S tokens
D hidden
E experts
L experts of a device
M experts that a slot holds
K experts per token
N layers of a kind
R devices
C elements of a device's shard of a layer's flat buffer
G elements of a device's shard of its gradients
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.exchange import DispatchedTokens
from jmoe.collectives.fusion import (
    BufferLayout,
    ShardInBuffer,
    flatten_gradients,
    flatten_shards,
    reduce_scatter_buffer_local,
    unflatten_gradient_shards,
    unflatten_parameters,
)
from jmoe.collectives.schedule import interleave_collectives
from jmoe.config import LayerKind
from jmoe.layers.moe import MoEStats, moe_stats
from jmoe.layers.router import Routing
from jmoe.mesh import ALL, DATA, EXPERTS_PATH
from jmoe.models.block import Block, causal_attention_fn, saved_residual_names
from jmoe.optim.loss_scale import scale_loss
from jmoe.training.fused.reverse_scan import layer_slice
from jmoe.training.streamed.model import (
    BackwardInputs,
    Choices,
    ExpertStacks,
    GradAccumulator,
    LayerOptions,
    LayerParams,
    NeighborLayerCollectives,
    NeighborLayerResults,
    Params,
    PendingGradients,
    RoutedTokens,
    StreamedModel,
    SummedGradients,
)
from jmoe.training.update import router_key
from jmoe.training.vjp import apply_vjp, vjp_with_residuals
from jmoe.types import PyTree


def _make_routed_tokens(
    x_BSD: jax.Array, h_TD: jax.Array, routing: Routing, dispatched: DispatchedTokens
) -> RoutedTokens:
    """Return routed and dispatched tokens as `RoutedTokens`, with a leading dimension R of 1 on
    per-device scalars and statistics.
    """
    sizes = [arrived.group_sizes_L for arrived in dispatched.chunks]
    return RoutedTokens(
        x_BSD,
        h_TD,
        replace(dispatched, dropped=dispatched.dropped[None]),
        sum(sizes[1:], sizes[0]),
        routing.topk_idx_TK,
        jax.tree.map(lambda value: value[None], moe_stats(routing, dispatched)),
    )


class _MoEBackwardConstants(NamedTuple):
    """The values of an MoE layer's backward pass that are not differentiated. losses: a function of
    the layer's statistics that returns its router losses.
    """

    kind: LayerKind
    options: LayerOptions
    bias: Params
    ids_M: jax.Array | None
    full_capacity: bool
    losses: Callable[[MoEStats], jax.Array]


class LayerFunctions:
    """The forward and backward functions of a model's layers, one for each kind of layer."""

    def __init__(self, model: StreamedModel[PyTree]) -> None:
        self.config, self.mesh, self._model = model.config, model.sharded.mesh, model
        self._sharded, self._scan, self._slots = model.sharded, model.scan, model.slots
        self._blocks, self._experts = model.modules.blocks, model.modules.experts
        self.dtype = self._sharded.dtype
        self.replicas = self.mesh.shape[DATA] if self._slots is None else 1
        self._num_local = self.config.model.num_experts * self.replicas // self.mesh.size

    def buffer_layout(self, stack: Params) -> BufferLayout:
        """Return which parameters of a layer travel in its flat buffer; none if layers are not
        gathered one by one.
        """
        if self._scan is None:
            return BufferLayout(stack, [None] * len(jax.tree.leaves(stack)))
        return self._sharded.buffer_layout(stack, stacked=True)

    def _unsharded_dense_params(self, params: LayerParams, layer: LayerOptions) -> Params:
        """Return one layer's dense parameters, unsharded."""
        layout, buffer_RC = self.buffer_layout(params.stack), params.unsharded_RC
        hierarchy = self._sharded.hierarchy
        fused = (
            [] if buffer_RC is None else unflatten_parameters(buffer_RC, layout.entries, hierarchy)
        )
        return layout.join(fused, layer_slice(layout.split(params.stack)[1], layer.number))

    def _run_unless_empty(
        self, layer: LayerOptions, function: Callable[..., PyTree], args: tuple[PyTree, ...]
    ) -> PyTree:
        """Return `function(*args)`; on a device whose micro-batch has no images, zeros of the same
        shapes, without computing.
        """
        if layer.weight_B is None:
            return function(*args)
        nothing = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(function, *args)
        )
        return lax.cond(layer.weight_B[0] > 0, function, lambda *_: nothing, *args)

    def _run_beside_collectives(
        self,
        layer: LayerOptions,
        function: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        start_after: jax.Array,
        work: NeighborLayerCollectives,
    ) -> tuple[PyTree, NeighborLayerResults]:
        """Return (`function(*args)`, results of the neighbours' collectives), run concurrently.

        start_after: an array; the collectives start once it is computed.
        """
        scan, pending = self._scan, work.pending
        if scan is None or not jax.tree.leaves((work.next_layer, pending)):
            return self._run_unless_empty(layer, function, args), NeighborLayerResults()
        row_C = None if work.next_layer is None else layer_slice(*work.next_layer)
        gathers = scan.all_gathers_by_chunk(row_C)[len(work.gathered) :]
        rows_RG, experts = pending.rows_RG, pending.experts
        reductions = [] if rows_RG is None else scan.reduce_scatters_by_chunk(rows_RG)
        flat = None if experts is None else _flatten_experts(experts)
        all_reductions = [] if flat is None else scan.all_reduces_by_chunk(flat, ((DATA,),))
        works = gathers + reductions + all_reductions
        result, received = interleave_collectives(
            function, args, works, scan.schedule, ALL, start_after
        )
        num_gathers, num_reductions = len(gathers), len(reductions)
        gathered, reduced = received[:num_gathers], received[num_gathers:]
        unsharded_RC = None
        if row_C is not None:
            unsharded_RC = scan.join_gathered_chunks([*work.gathered, *gathered], row_C)
        rows = reduced[:num_reductions], reduced[num_reductions:]
        row_G, experts_G = (jnp.concatenate([jnp.zeros(0), *chunks]) for chunks in rows)
        return result, NeighborLayerResults(
            unsharded_RC, self._unflatten_reduced(pending, row_G, experts_G)
        )

    def reduce_pending(self, pending: PendingGradients, *, number: int) -> SummedGradients:
        """Return the gradients of layer `number` of its kind summed over devices, without other
        work to overlap with.
        """
        if self._slots is not None and pending.experts is not None:
            reduced = self._slots.reduce_layer_local(pending.experts, number)
            stored, squares_S = self._tier_gradients_and_squared_norms(reduced, None)
            owns_S = self._slots.device_row_local(self._slots.is_first_holder_RNS[:, number])
            return SummedGradients(None, stored, jnp.where(owns_S, squares_S, 0.0))
        row_G = experts_G = jnp.zeros(0)
        if pending.rows_RG is not None:
            row_G = reduce_scatter_buffer_local(pending.rows_RG, self._sharded.hierarchy)
        if pending.experts is not None:
            experts_G = lax.psum(_flatten_experts(pending.experts), DATA)
        return self._unflatten_reduced(pending, row_G, experts_G)

    def _unflatten_reduced(
        self, pending: PendingGradients, row_G: jax.Array, experts_G: jax.Array
    ) -> SummedGradients:
        """Return a layer's gradients after their reduction over devices, with the experts' in their
        own shapes and their tier's dtype.

        row_G: of the flat buffer. experts_G: the experts', flat.
        """
        sums = SummedGradients(None if pending.rows_RG is None else row_G)
        if pending.experts is None:
            return sums
        experts = unflatten_gradient_shards(experts_G, _expert_buffer_entries(pending.experts))
        by_name = dict(zip(pending.experts, experts, strict=True))
        stored, square = self._tier_gradients_and_squared_norms(by_name, pending.ids_M)
        return sums._replace(experts=stored, square=square)

    def _tier_gradients_and_squared_norms(
        self, experts: ExpertStacks, ids_M: jax.Array | None
    ) -> tuple[ExpertStacks, jax.Array]:
        """Return (the experts' gradients in the dtype of their tier, squared norms [R, L] with one
        entry per expert).
        """
        each = [jnp.square(g).sum(axis=tuple(range(1, g.ndim))) for g in experts.values()]
        dtype = self.config.tiers.gradient_dtype
        stored = {name: g.astype(dtype) for name, g in experts.items()}
        squares = jnp.stack(each).sum(axis=0)
        # By expert instead of by slot row, so that the sum does not depend on the slot's size.
        if ids_M is not None:
            nothing = jnp.zeros(self._num_local, jnp.float32)
            squares = nothing.at[ids_M].set(squares, mode="drop")
        return stored, squares[None]

    # Forward

    def _with_residuals_if(
        self, saves_residuals: bool, function: Callable[..., PyTree], wanted: Sequence[int]
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """Return a function that returns (the result of `function`, its residuals); the residuals
        are None unless `saves_residuals`.
        """
        if not saves_residuals:
            return lambda *args: (function(*args), None)
        names = saved_residual_names(self.config.remat)
        return lambda *args: vjp_with_residuals(function, args, wanted, names)

    def dense_forward(
        self,
        params: LayerParams,
        layer: LayerOptions,
        x_BSD: jax.Array,
        work: NeighborLayerCollectives,
        *,
        saves_residuals: bool,
    ) -> tuple[jax.Array, PyTree, NeighborLayerResults]:
        """Return (output of a dense layer, its residuals, results of `work`)."""
        run = self._with_residuals_if(saves_residuals, self._run_dense, wanted=(0, 2))
        args = self._unsharded_dense_params(params, layer), layer, x_BSD
        (y_BSD, residuals), overlapped = self._run_beside_collectives(layer, run, args, x_BSD, work)
        return y_BSD, residuals, overlapped

    def _run_dense(self, params: Params, layer: LayerOptions, x_BSD: jax.Array) -> jax.Array:
        """Return the output of a dense layer with these unsharded parameters."""
        block: Block = self._blocks["dense"](self._sharded.cast_params(params))
        attention = causal_attention_fn(layer.window.size, layer.documents)
        return block.apply_dense(x_BSD, attention, self.dtype)

    def route(
        self,
        params: LayerParams,
        layer: LayerOptions,
        x_BSD: jax.Array,
        work: NeighborLayerCollectives,
        *,
        kind: LayerKind,
        train: bool,
        full_capacity: bool,
        saves_residuals: bool,
    ) -> tuple[RoutedTokens, PyTree, Sequence[jax.Array]]:
        """Run an MoE layer up to the arrival of its tokens at their experts' devices.

        Returns (routed tokens, residuals, gathered chunks [R, ...] of the next layer's flat
        buffer). The number of chunks is proportional to this half's share of the layer's FLOPs;
        `apply_experts` gathers the rest.
        """
        function = partial(self._run_route, kind=kind, train=train, full_capacity=full_capacity)
        run = self._with_residuals_if(saves_residuals, function, wanted=(0, 3))
        bias = layer_slice(params.router_bias, layer.number)
        args = self._unsharded_dense_params(params, layer), bias, layer, x_BSD
        gathered: Sequence[jax.Array] = []
        scan = self._scan
        if scan is None or work.next_layer is None:
            routed, residuals = self._run_unless_empty(layer, run, args)
        else:
            row_C, model = layer_slice(*work.next_layer), self.config.model
            gathers, dense = scan.all_gathers_by_chunk(row_C), row_C.size * self.mesh.size
            multiplied = dense + model.num_experts_per_tok * model.parameters_per_expert
            early = gathers[: len(gathers) * dense // multiplied]
            (routed, residuals), gathered = interleave_collectives(
                run, args, early, scan.schedule, ALL, x_BSD
            )
        # All replicas of an expert fetch it if one needs it, so that all apply its pending update
        # in the same step.
        arrived_E = routed.arrived_E
        if self._slots is not None:
            arrived_E = self._slots.sum_by_expert_local(arrived_E, layer.number)
        elif self.replicas > 1:
            arrived_E = lax.psum(arrived_E, DATA)
        return routed._replace(arrived_E=arrived_E), residuals, gathered

    def _run_route(
        self,
        params: Params,
        bias: Params,
        layer: LayerOptions,
        x_BSD: jax.Array,
        *,
        kind: LayerKind,
        train: bool,
        full_capacity: bool,
        choices: Choices | None = None,
    ) -> RoutedTokens:
        """Return an MoE layer's tokens after attention, routing and dispatch. choices: the experts
        of each token, if they are known already.
        """
        block: Block = self._blocks[kind](self._sharded.cast_params(params), bias)
        attention = causal_attention_fn(layer.window.size, layer.documents)
        x_BSD = block.attend(x_BSD, attention, self.dtype)
        key = self._router_key(layer) if train else None
        options: PyTree = {"documents": layer.documents, **(choices or layer.choices or {})}
        h_TD, routing = block.route(x_BSD, self.dtype, key=key, train=train, **options)
        # An image task may send all its tokens to one expert, which must not overflow.
        roomy = full_capacity or kind == "task"
        dispatched = block.dispatch(h_TD, routing, full_capacity=roomy)
        return _make_routed_tokens(x_BSD, h_TD, routing, dispatched)

    def _router_key(self, layer: LayerOptions) -> jax.Array | None:
        """Return the PRNG key of the layer's router, the same as in the fused step; None if routers
        draw nothing.
        """
        config, step, accumulation = self.config, layer.step, layer.accumulation
        if not config.model.router.draws_random_numbers or step is None or accumulation is None:
            return None
        device = lax.axis_index(ALL) if self.mesh.size > 1 else 0
        key = router_key(config, step, device, accumulation)
        return jax.random.split(key, config.model.num_moe_layers)[layer.number]

    def apply_experts(
        self,
        params: LayerParams,
        routed: RoutedTokens,
        layer: LayerOptions,
        work: NeighborLayerCollectives,
        *,
        kind: LayerKind,
        saves_residuals: bool,
    ) -> tuple[jax.Array, PyTree, NeighborLayerResults]:
        """Return (output of an MoE layer, residuals of this half, results of `work`). routed: the
        result of `route`.
        """
        function = partial(self._run_experts, kind=kind)
        run = self._with_residuals_if(saves_residuals, function, wanted=(0, 1, 2))
        experts, ids_M = params.chosen_experts()
        args = self._unsharded_dense_params(params, layer), experts, routed, ids_M
        (y_BSD, residuals), overlapped = self._run_beside_collectives(
            layer, run, args, routed.x_BSD, work
        )
        return y_BSD, residuals, overlapped

    def _run_experts(
        self,
        params: Params,
        experts: ExpertStacks,
        routed: RoutedTokens,
        ids_M: jax.Array | None,
        *,
        kind: LayerKind,
    ) -> jax.Array:
        """Return the output of an MoE layer from its dispatched tokens. ids_M: as of
        `LayerParams.chosen_experts`.
        """
        module = self._blocks[kind]
        # The router has run already: its bias has no effect here.
        bias = jax.tree.map(lambda b: jnp.zeros(b.shape[1:], b.dtype), module.bias)
        block: Block = module(self._sharded.cast_params(params), bias)
        assert block.moe is not None
        cast = self._sharded.cast_params({EXPERTS_PATH: experts})[EXPERTS_PATH]
        block.moe.experts = mine = self._experts[kind](cast)
        mine.ids_M = ids_M
        return block.apply_experts(routed.x_BSD, routed.h_TD, routed.dispatched)

    # Backward

    def _add_gradients(
        self,
        params: LayerParams,
        layer: LayerOptions,
        sums: GradAccumulator,
        dparams: Params,
        dexperts: PyTree = None,
    ) -> GradAccumulator:
        """Return `sums` with one micro-batch's gradients of a layer added, in float32."""
        layout, rows_RG = self.buffer_layout(params.stack), sums.rows_RG
        fused, outside_buffer = layout.split(dparams)
        if self._scan is not None and self._sharded.fused:
            new_RG = flatten_gradients(fused, layout.entries, self._scan.hierarchy)
            rows_RG = new_RG if rows_RG is None else rows_RG + new_RG
        # weights in a slot may have the dtype of the products (`tiers.update = "host"`)
        dexperts = jax.tree.map(lambda g: g.astype(jnp.float32), dexperts)
        if sums.experts is not None:
            dexperts = jax.tree.map(jnp.add, sums.experts, dexperts)
        totals = [
            total.at[0, layer.number].add(g.astype(jnp.float32))
            for total, g in zip(sums.outside_buffer, outside_buffer, strict=True)
        ]
        ids_M = None if params.chosen is None or dexperts is None else params.chosen.ids_M
        return GradAccumulator(rows_RG, totals, dexperts, ids_M)

    def moe_gradients(
        self,
        params: LayerParams,
        layer: LayerOptions,
        inputs: BackwardInputs,
        sums: GradAccumulator,
        work: NeighborLayerCollectives,
        *,
        kind: LayerKind,
        full_capacity: bool,
        is_last_micro_batch: bool,
    ) -> tuple[
        jax.Array, GradAccumulator, NeighborLayerResults, jax.Array | None, jax.Array | None
    ]:
        """Return (dx, summed gradients, results of `work`, squared norms of the experts' gradients
        [R, L], gradients of the routing weights).

        inputs.residuals: (routed tokens, residuals of `route`, residuals of `apply_experts`), or
        None to rerun the layer. is_last_micro_batch: the experts' gradients are then converted to
        their tier's dtype and their squared norms returned, unless `reduce_pending` has to sum them
        over devices first. The routing weights' gradients are None if the caller supplied no
        weights.
        """
        loss_tokens = None
        if inputs.loss_tokens is not None and layer.accumulation is not None:
            at = layer.number, layer.accumulation
            loss_tokens = jax.tree.map(lambda totals: totals[at], inputs.loss_tokens)
        bias = layer_slice(params.router_bias, layer.number)
        experts, ids_M = params.chosen_experts()

        def router_losses(stats: MoEStats) -> jax.Array:
            loss = self._model.auxiliary_loss(kind, stats, loss_tokens)
            return scale_loss(loss, inputs.loss_scale)

        moe = _MoEBackwardConstants(kind, layer, bias, ids_M, full_capacity, router_losses)
        if inputs.residuals is not None:
            function, saved = partial(self._moe_gradients_from_residuals, moe), inputs.residuals
        else:
            function, saved = partial(self._moe_gradients_by_rerunning, moe), inputs.choices
        args = (
            self._unsharded_dense_params(params, layer),
            experts,
            inputs.x_BSD,
            inputs.dy_BSD,
            saved,
        )
        results, overlapped = self._run_beside_collectives(
            layer, function, args, inputs.dy_BSD, work
        )
        dparams, dexperts, dx_BSD, dweights_TK = results
        sums, square = self._add_gradients(params, layer, sums, dparams, dexperts), None
        if (
            is_last_micro_batch
            and self._slots is None
            and (self.replicas == 1 or self._scan is None)
        ):
            assert sums.experts is not None
            own = sums.experts if self.replicas == 1 else lax.psum(sums.experts, DATA)
            stored, square = self._tier_gradients_and_squared_norms(own, sums.ids_M)
            sums = sums._replace(experts=stored)
        return dx_BSD, sums, overlapped, square, dweights_TK

    def _moe_gradients_from_residuals(
        self,
        moe: _MoEBackwardConstants,
        params: Params,
        experts: PyTree,
        x_BSD: jax.Array,
        dy_BSD: jax.Array,
        residuals: PyTree,
    ) -> PyTree:
        """Return the gradients of (dense parameters, experts, x, routing weights: None) from the
        residuals of both halves of the layer.
        """
        routed, route_residuals, experts_residuals = residuals
        args = (params, experts, routed, moe.ids_M)
        dparams, dexperts, drouted = apply_vjp(experts_residuals, args, dy_BSD)
        drouted = drouted._replace(stats=jax.grad(moe.losses, allow_int=True)(routed.stats))
        before, dx_BSD = apply_vjp(route_residuals, (params, moe.bias, moe.options, x_BSD), drouted)
        return jax.tree.map(jnp.add, before, dparams), dexperts, dx_BSD, None

    def _moe_gradients_by_rerunning(
        self,
        moe: _MoEBackwardConstants,
        params: Params,
        experts: PyTree,
        x_BSD: jax.Array,
        dy_BSD: jax.Array,
        choices: Choices,
    ) -> PyTree:
        """Return the gradients of (dense parameters, experts, x, routing weights) from a second
        forward pass with the same routing.
        """

        def rerun_layer(
            idx_TK: jax.Array,
            params: Params,
            experts: PyTree,
            x_BSD: jax.Array,
            weights_TK: jax.Array | None,
        ) -> tuple[jax.Array, jax.Array]:
            chosen = {"topk_idx_TK": idx_TK}
            chosen |= {} if weights_TK is None else {"topk_weights_TK": weights_TK}
            routed = self._run_route(
                params,
                moe.bias,
                moe.options,
                x_BSD,
                kind=moe.kind,
                train=True,
                full_capacity=moe.full_capacity,
                choices=chosen,
            )
            y_BSD = self._run_experts(params, experts, routed, moe.ids_M, kind=moe.kind)
            return y_BSD, moe.losses(routed.stats)

        args = params, experts, x_BSD, choices.get("topk_weights_TK")
        _, pull = jax.vjp(partial(rerun_layer, choices["topk_idx_TK"]), *args)
        return pull((dy_BSD, jnp.ones((), jnp.float32)))

    def dense_gradients(
        self,
        params: LayerParams,
        layer: LayerOptions,
        inputs: BackwardInputs,
        sums: GradAccumulator,
        work: NeighborLayerCollectives,
    ) -> tuple[jax.Array, GradAccumulator, NeighborLayerResults]:
        """Return (dx, summed gradients, results of `work`) of a dense layer's backward pass."""

        def from_residuals(
            params: Params,
            layer: LayerOptions,
            x_BSD: jax.Array,
            dy_BSD: jax.Array,
            residuals: PyTree,
        ) -> PyTree:
            return apply_vjp(residuals, (params, layer, x_BSD), dy_BSD)

        def by_rerunning(
            params: Params, layer: LayerOptions, x_BSD: jax.Array, dy_BSD: jax.Array, _: None
        ) -> PyTree:
            run = lambda params, x: self._run_dense(params, layer, x)  # noqa: E731
            return jax.vjp(run, params, x_BSD)[1](dy_BSD)

        args = (
            self._unsharded_dense_params(params, layer),
            layer,
            inputs.x_BSD,
            inputs.dy_BSD,
            inputs.residuals,
        )
        function = by_rerunning if inputs.residuals is None else from_residuals
        (dparams, dx_BSD), overlapped = self._run_beside_collectives(
            layer, function, args, inputs.dy_BSD, work
        )
        return dx_BSD, self._add_gradients(params, layer, sums, dparams), overlapped


def _expert_buffer_entries(experts: ExpertStacks) -> list[ShardInBuffer]:
    return [ShardInBuffer(g.shape, 0, jnp.float32) for g in experts.values()]


def _flatten_experts(experts: ExpertStacks) -> jax.Array:
    """Return the experts' gradients as one flat float32 array."""
    return flatten_shards(list(experts.values()), _expert_buffer_entries(experts))
