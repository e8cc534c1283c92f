"""Run a decoder's layers with a hand-written backward pass: an explicit scan over the layers in
reverse.

`ShardedDecoder` passes a `ReverseScan` to the decoder as its `DecoderExecution.layer_runner`,
inside `shard_map`. In the forward pass, a layer runs while the next layer's parameters are
gathered. In the backward pass, layer i runs while the parameters of layer i - 1 are gathered and
the gradients of layer i + 1 (a *bucket*, which may hold several layers) are reduced: by a
reduce-scatter onto their shards, or by an all-reduce for replicated parameters and replicas of
experts. At most two layers are unsharded at any time. `collectives.schedule` decides when inside a
layer each collective starts. The residuals are those of `jax.vjp`, without the parameters.

Experts that the data axis splits travel in a buffer of their own. Their layers are gathered for
both passes too, or the forward pass keeps them as residuals (`keeps_experts`).

Legend:
R devices
C elements of a device's shard of a layer's flat buffer
G elements of a shard of its gradients
N layers of a kind
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.collectives.fusion import (
    Hierarchy,
    add_to_own_row_local,
    all_gather_buffer_local,
    all_reduce_buffer_local,
    axis_names,
    reduce_scatter_buffer_local,
)
from jmoe.collectives.schedule import (
    CollectiveSchedule,
    ColumnWork,
    Work,
    cut_ranges,
    interleave_collectives,
)
from jmoe.config import TOKEN_ROUTED, LayerKind
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import RouterBias
from jmoe.models.block import ApplyBlock
from jmoe.models.decoder import LayerInputs
from jmoe.models.layer_patterns import LayerPattern
from jmoe.training.fused.gradient_buckets import (
    Bucket,
    Index,
    ReducedGradients,
    UnbufferedParams,
    UnreducedGradients,
    is_nnx_variable,
    set_layer_at,
)
from jmoe.training.fused.layer_buffers import (
    EXPERT_SHARDS,
    BufferPair,
    MakeBuffers,
    ParamsByBuffer,
)
from jmoe.training.vjp import replace_known_residuals, restore_known_residuals
from jmoe.types import PyTree

Tree = TypeVar("Tree")  # a pytree of arrays, or of stacks of them
Keys = jax.Array | None  # a layer's PRNG key for router noise, or a stack of these


def layer_slice(tree: Tree, index: Index) -> Tree:
    """Return entry `index` of every array in a stack of layers."""
    entries: Tree = jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, index, 0, keepdims=False), tree
    )
    return entries


def _gradient_per_variable(grads: PyTree, state: PyTree) -> list[jax.Array]:
    """Return a list with a gradient for every variable of a stack of layers, in the order of
    `state`: zeros for routers' biases, which `grads` lacks, and the leaves of `grads` for all
    others.
    """
    own = iter(jax.tree.leaves(grads))
    variables = jax.tree.leaves(state, is_leaf=is_nnx_variable)
    return [jnp.zeros_like(v[...]) if isinstance(v, RouterBias) else next(own) for v in variables]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SavedForward:
    """The values that the forward pass saves for the backward pass."""

    flat: dict[LayerKind, BufferPair]  # [N, C], of the buffers that are gathered again
    outside_buffer: dict[LayerKind, list[jax.Array]]
    keys: dict[LayerKind, Keys]
    unsharded: BufferPair  # [R, C], the last layer's parameters
    residuals: list[PyTree]  # per pattern: (of all repeats but the last, of the last)
    summed: PyTree  # see `ReverseScan`


class _BackwardState(NamedTuple):
    """The values that the backward pass hands from layer to layer.

    unsharded: [R, C], the parameters of the layer that runs next. dx: the gradient of its output.
    pending: the gradients to reduce beside it. sums: reduced gradients of the flat buffers, by
    kind. others: gradients of the parameters outside these buffers, by kind.
    """

    unsharded: BufferPair
    dx: jax.Array
    pending: Bucket
    sums: dict[LayerKind, BufferPair]  # [N, G]
    others: dict[LayerKind, list[jax.Array]]


@dataclass(frozen=True)
class ReverseScan:
    """Runs a decoder's layers, as its `DecoderExecution.layer_runner`, inside `shard_map`, with
    overlapped collectives.
    """

    buffers_of: MakeBuffers
    hierarchy: Hierarchy
    schedule: CollectiveSchedule
    bucket_bytes: int  # float32 gradients that one reduction sums; 0: one layer's
    chunk_bytes: int  # of one collective, see `collectives.schedule`
    # Whether gradients outside the flat buffers are summed over devices, and those of the buffers
    # over replicas. False in all accumulation steps but the last, which sums them once for all.
    reduces: bool = True
    summed: PyTree = None  # the earlier accumulation steps' gradients, by kind, to add to
    # Whether gathered experts are residuals of the forward pass, instead of being gathered again.
    keeps_experts: bool = False
    # The axis over which the devices of `hierarchy` have replicas (`mesh.replicate`); () if none.
    replica_axes: tuple[str, ...] = ()

    # Work: the gathers and reductions that `interleave_collectives` places

    def all_gathers_by_chunk(
        self, row_C: jax.Array | None, hierarchy: Hierarchy | None = None
    ) -> list[Work]:
        """Return the all-gathers of a layer's parameters, one for each chunk of its row `row_C`;
        none if that is None. hierarchy: of the row's devices; None: all.
        """
        if row_C is None:
            return []
        hierarchy = hierarchy or self.hierarchy
        gather = partial(all_gather_buffer_local, hierarchy=hierarchy)
        chunks = self._gather_chunk_ranges(row_C, hierarchy)
        return [ColumnWork("gather", gather, row_C, *chunk) for chunk in chunks]

    def _gather_chunk_ranges(self, row_C: jax.Array, hierarchy: Hierarchy) -> list[tuple[int, int]]:
        """Return the chunks (start, end) in which a row is gathered."""
        num_devices = lax.axis_size(axis_names(hierarchy))
        limit = self.chunk_bytes if self.schedule.chunked else num_devices * row_C.nbytes
        return list(cut_ranges(row_C.size, num_devices * row_C.dtype.itemsize, limit))

    def join_gathered_chunks(
        self, gathered: list[jax.Array], row_C: jax.Array, hierarchy: Hierarchy | None = None
    ) -> jax.Array:
        """Return a layer's buffer [R, C] from the gathered chunks of `row_C`; C is 0 if no
        parameter of the layer is in that buffer. hierarchy: as for `all_gathers_by_chunk`.
        """
        num_devices = lax.axis_size(axis_names(hierarchy or self.hierarchy))
        empty = jnp.zeros((num_devices, 0), row_C.dtype)
        return jnp.concatenate([empty, *gathered], axis=1)

    def pair_all_gathers_by_chunk(self, rows_C: BufferPair | None) -> list[Work]:
        """Return the all-gathers of both of a layer's buffers; none if `rows_C` is None."""
        if rows_C is None:
            return []
        dense = self.all_gathers_by_chunk(rows_C.dense)
        return dense + self.all_gathers_by_chunk(rows_C.experts, EXPERT_SHARDS)

    def join_gathered_pair(self, gathered: list[jax.Array], rows_C: BufferPair) -> BufferPair:
        """Return both of a layer's buffers [R, C] from the results of
        `pair_all_gathers_by_chunk`.
        """
        num_dense = len(self._gather_chunk_ranges(rows_C.dense, self.hierarchy))
        return BufferPair(
            self.join_gathered_chunks(gathered[:num_dense], rows_C.dense),
            self.join_gathered_chunks(gathered[num_dense:], rows_C.experts, EXPERT_SHARDS),
        )

    def gather_pair(self, rows_C: BufferPair) -> BufferPair:
        """Return both of a layer's buffers [R, C], each gathered by one collective."""
        with jax.named_scope("gather"):
            return BufferPair(
                all_gather_buffer_local(rows_C.dense, self.hierarchy),
                all_gather_buffer_local(rows_C.experts, EXPERT_SHARDS),
            )

    def reduce_scatters_by_chunk(
        self, rows_RG: jax.Array, hierarchy: Hierarchy | None = None
    ) -> list[Work]:
        """Return the reduce-scatters of `rows_RG` over the devices of `hierarchy` (None: those of a
        replica), each followed by an all-reduce over replicas, one per chunk of columns; their
        results concatenate to this device's row [G].
        """
        limits = [
            limit
            for limit in (self.bucket_bytes, self.chunk_bytes * self.schedule.chunked)
            if limit
        ]
        chunks = cut_ranges(
            rows_RG.shape[1], 4 * rows_RG.shape[0], min(limits, default=rows_RG.nbytes)
        )
        hierarchy = hierarchy or self.hierarchy
        replica_axes = self.replica_axes if self.reduces else ()

        def reduce(rows_RG: jax.Array) -> jax.Array:
            row_G = reduce_scatter_buffer_local(rows_RG, hierarchy)
            return lax.psum(row_G, replica_axes) if replica_axes else row_G

        return [ColumnWork("reduce", reduce, rows_RG, *chunk) for chunk in chunks]

    def all_reduces_by_chunk(self, row_G: jax.Array, hierarchy: Hierarchy) -> list[Work]:
        """Return the all-reduces of `row_G` over the devices of `hierarchy`, one per chunk.

        Chunks have half of `chunk_bytes`, because an all-reduce moves each element twice.
        """
        limits = [
            limit
            for limit in (self.bucket_bytes, -(-self.chunk_bytes // 2) * self.schedule.chunked)
            if limit
        ]
        chunks = cut_ranges(row_G.size, 4, min(limits, default=row_G.nbytes))
        reduce = partial(all_reduce_buffer_local, hierarchy=hierarchy)
        return [ColumnWork("all_reduce", reduce, row_G, *chunk) for chunk in chunks]

    def across_replicas(self, hierarchy: Hierarchy) -> Hierarchy:
        """Return `hierarchy` with the replica axis in its slowest level."""
        return (self.replica_axes + hierarchy[0], *hierarchy[1:])

    @property
    def axis_names(self) -> tuple[str, ...]:
        return axis_names(self.across_replicas(self.hierarchy))

    def __call__(
        self,
        patterns: Sequence[LayerPattern],
        apply_block: ApplyBlock,
        inputs: LayerInputs,
        x: jax.Array,
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (x after all layers, the MoE layers' statistics stacked in layer order, or None
        without MoE layers).
        """
        states = {kind: stack.params for kind, stack in inputs.items()}
        keys = {kind: stack.keys for kind, stack in inputs.items()}
        scan = _BoundReverseScan(self, patterns, apply_block, states)

        @jax.custom_vjp
        def run_layers(states: PyTree, keys: PyTree, summed: PyTree, x: jax.Array) -> PyTree:
            return scan.forward(states, keys, summed, x)[0]

        def backward(saved: _SavedForward, cotangents: PyTree) -> PyTree:
            states, x = scan.backward(saved, *cotangents)
            return states, None, None, x

        run_layers.defvjp(scan.forward, backward)
        summed = self.summed and {
            kind: _gradient_per_variable(g, states[kind]) for kind, g in self.summed.items()
        }
        y, stats = run_layers(states, keys, summed, x)
        return y, stats


class _BoundReverseScan:
    """One decoder's layers, bound to a `ReverseScan`: the forward and backward functions of its
    `custom_vjp`.
    """

    def __init__(
        self,
        config: ReverseScan,
        patterns: Sequence[LayerPattern],
        apply_block: ApplyBlock,
        states: dict[LayerKind, PyTree],
    ) -> None:
        self.config, self.apply_block = config, apply_block
        self.axis_names = config.axis_names
        self.kinds = {kind: config.buffers_of(state) for kind, state in states.items()}
        self.outside_buffer = {
            k: UnbufferedParams(layers, states[k], reduces=config.reduces)
            for k, layers in self.kinds.items()
        }
        layer_bytes = max(self._pending_gradient_bytes(kind) for kind in self.kinds)
        self.layers_per_bucket = max(1, config.bucket_bytes // max(1, layer_bytes))
        self.patterns = [pattern.join_repeats(self.layers_per_bucket) for pattern in patterns]

    def _pending_gradient_bytes(self, kind: LayerKind) -> int:
        """Return the bytes of one layer's `UnreducedGradients`, in float32."""
        return 4 * (
            self.kinds[kind].num_unsharded_elements()
            + self.outside_buffer[kind].num_all_reduced_elements()
        )

    def _bucket_reductions(self, bucket: Bucket) -> list[list[Work]]:
        """Return the collectives that reduce a bucket's gradients: one list for each field of
        `UnreducedGradients`.
        """
        if not bucket.kinds:
            return [[], [], [], []]
        joined = UnreducedGradients(
            *(jnp.concatenate(some, axis=-1) for some in zip(*bucket.grads, strict=True))
        )
        return [
            self.config.reduce_scatters_by_chunk(joined.dense_rows),
            self.config.reduce_scatters_by_chunk(joined.expert_rows, EXPERT_SHARDS),
            self.config.all_reduces_by_chunk(
                joined.replicated, self.config.across_replicas(self.config.hierarchy)
            ),
            self.config.all_reduces_by_chunk(
                joined.experts, self.config.across_replicas(EXPERT_SHARDS)
            ),
        ]

    def _store_reduced(
        self, state: _BackwardState, reduced: Sequence[Sequence[jax.Array]]
    ) -> _BackwardState:
        """Return `state` without pending gradients: their sums, `reduced`, are written at their
        layers' indices. reduced: the results of `_bucket_reductions`.
        """
        sums, others, starts = dict(state.sums), dict(state.others), [0, 0, 0, 0]
        rows = [jnp.concatenate([jnp.zeros(0), *some]) for some in reduced]
        bucket = state.pending
        for kind, index, grads in zip(bucket.kinds, bucket.indices, bucket.grads, strict=True):
            stops = [start + g.shape[-1] for start, g in zip(starts, grads, strict=True)]
            mine = [row[start:end] for row, start, end in zip(rows, starts, stops, strict=True)]
            own = ReducedGradients(*mine)
            sums[kind] = BufferPair(
                set_layer_at(sums[kind].dense, index, own.dense_row),
                set_layer_at(sums[kind].experts, index, own.expert_row),
            )
            others[kind] = self.outside_buffer[kind].store_reduced(others[kind], index, own)
            starts = stops
        return state._replace(pending=Bucket(), sums=sums, others=others)

    # Forwards

    def forward(
        self,
        states: dict[LayerKind, PyTree],
        keys: dict[LayerKind, Keys],
        summed: PyTree,
        x: jax.Array,
    ) -> tuple[tuple[jax.Array, MoEStats | None], _SavedForward]:
        """Return ((x, statistics), the values that `backward` needs)."""
        flat, outside_buffer = {}, {}
        for kind, layers in self.kinds.items():
            outside_buffer[kind] = layers.split(states[kind]).others
            flat[kind] = layers.flatten_stack(states[kind])
        run = partial(self._forward_repeat, flat, outside_buffer, keys)
        firsts = [self._layer_shard(flat, pattern, 0, 0) for pattern in self.patterns]
        carry = self.config.gather_pair(firsts[0]), x
        residuals, stats = [], []
        for pattern, after in zip(self.patterns, [*firsts[1:], None], strict=True):
            early: PyTree = None
            if pattern.repeats > 1:

                def run_repeat(
                    carry: PyTree, i: jax.Array, pattern: LayerPattern = pattern
                ) -> PyTree:
                    return run(pattern, i, carry, self._layer_shard(flat, pattern, 0, i + 1))

                carry, early = lax.scan(run_repeat, carry, jnp.arange(pattern.repeats - 1))
            carry, last = run(pattern, pattern.repeats - 1, carry, after)
            residuals.append((None if early is None else early[0], last[0]))
            stats.append((pattern, None if early is None else early[1], last[1]))
        unsharded, x = carry
        if self.config.keeps_experts:
            flat, unsharded = _without_experts((flat, unsharded))
        return (x, self._stack_in_layer_order(stats)), _SavedForward(
            flat, outside_buffer, keys, unsharded, residuals, summed
        )

    @staticmethod
    def _layer_shard(
        flat: dict[LayerKind, BufferPair], pattern: LayerPattern, position: int, repeat: Index
    ) -> BufferPair:
        """Return this device's rows of the buffers of the layer at `position` of a repeat."""
        index = pattern.layer_index(position, repeat)
        return BufferPair(*(row[index] for row in flat[pattern.kinds[position]]))

    def _forward_repeat(
        self,
        flat: dict[LayerKind, BufferPair],
        outside_buffer: dict[LayerKind, list[jax.Array]],
        keys: dict[LayerKind, Keys],
        pattern: LayerPattern,
        repeat: Index,
        carry: tuple[BufferPair, jax.Array],
        ahead: BufferPair | None,
    ) -> tuple[tuple[BufferPair, jax.Array], tuple[list[PyTree], list[MoEStats]]]:
        """Run one repeat of a pattern; return (carry after it, (residuals, MoE statistics)).

        carry: (the layer's gathered buffers, x). ahead: this device's rows of the layer after this
        repeat, to gather beside its last layer; None after the last layer.
        """
        unsharded, x = carry
        residuals: list[PyTree] = []
        stats: list[MoEStats] = []
        for position, kind in enumerate(pattern.kinds):
            following = ahead
            if position + 1 < pattern.period:
                following = self._layer_shard(flat, pattern, position + 1, repeat)
            index = pattern.layer_index(position, repeat)
            own = layer_slice(outside_buffer[kind], index)
            args = unsharded, own, layer_slice(keys[kind], index), x
            (x, layer_stats, layer_residuals), gathered = interleave_collectives(
                partial(self._forward_layer, kind, pattern.windows[position]),
                args,
                self.config.pair_all_gathers_by_chunk(following),
                self.config.schedule,
                self.axis_names,
                x,
            )
            unsharded = (
                unsharded
                if following is None
                else self.config.join_gathered_pair(gathered, following)
            )
            residuals.append(layer_residuals)
            stats += [layer_stats] if kind in TOKEN_ROUTED else []
        return (unsharded, x), (residuals, stats)

    def _forward_layer(
        self,
        kind: LayerKind,
        window: int | None,
        unsharded: BufferPair,
        outside_buffer: list[jax.Array],
        key: Keys,
        x: jax.Array,
    ) -> tuple[jax.Array, MoEStats | None, PyTree]:
        """Return (x after the layer, its statistics, its residuals without its parameters)."""
        layers = self.kinds[kind]
        params = ParamsByBuffer(
            layers.unflatten_dense(unsharded.dense),
            layers.unflatten_experts(unsharded.experts),
            outside_buffer,
        )

        def apply_layer(params: ParamsByBuffer, x: jax.Array) -> PyTree:
            y, stats = self.apply_block(kind, layers.join(params), key, window, x)
            return (
                y,
                [s for s in jax.tree.leaves(stats) if jnp.issubdtype(s.dtype, jnp.floating)],
            ), stats

        (y, _), vjp, stats = jax.vjp(apply_layer, params, x, has_aux=True)
        return y, stats, replace_known_residuals(vjp, self._known_residuals(params, key))

    def _known_residuals(self, params: ParamsByBuffer, key: Keys) -> list[PyTree]:
        """Return a layer's arrays that the backward pass has without residuals. With
        `keeps_experts` it has no experts; these come last, so that the other positions stay.
        """
        experts = [None] * len(params.experts) if self.config.keeps_experts else params.experts
        return [*params.dense, *params.others, *jax.tree.leaves(key), *experts]

    def _stack_in_layer_order(
        self, stats: list[tuple[LayerPattern, list[MoEStats] | None, list[MoEStats]]]
    ) -> MoEStats | None:
        """Return the MoE layers' statistics, stacked in layer order; None without MoE layers."""
        indices: list[int] = []
        stacks = []
        for pattern, early, last in stats:
            for number, position in enumerate(
                p for p, kind in enumerate(pattern.kinds) if kind in TOKEN_ROUTED
            ):
                indices += [pattern.record_index(position, i) for i in range(pattern.repeats)]
                stacked = jax.tree.map(lambda s: s[None], last[number])
                if early is not None:
                    stacked = jax.tree.map(lambda *s: jnp.concatenate(s), early[number], stacked)
                stacks.append(stacked)
        if not stacks:
            return None
        order = np.argsort(np.asarray(indices))
        return jax.tree.map(lambda *s: jnp.concatenate(s)[order], *stacks)

    # Backwards

    def backward(
        self, saved: _SavedForward, dx: jax.Array, dstats: PyTree
    ) -> tuple[dict[LayerKind, PyTree], jax.Array]:
        """Return (gradients of the parameters, on their shards, by kind; the gradient of x)."""
        dstats = [d for d in jax.tree.leaves(dstats) if d.dtype != jax.dtypes.float0]
        sums = {
            kind: BufferPair(
                *(jnp.zeros((layers.num_layers, n)) for n in layers.num_shard_elements())
            )
            for kind, layers in self.kinds.items()
        }
        others = jax.tree.map(jnp.zeros_like, saved.outside_buffer)
        if saved.summed is not None:  # this pass adds to these stacks, layer by layer
            others = {
                kind: [s.astype(w.dtype) for s, w in zip(earlier, others[kind], strict=True)]
                for kind, earlier in self._earlier_gradients_outside_buffer(saved).items()
            }
        state = _BackwardState(saved.unsharded, dx, Bucket(), sums, others)
        run = partial(self._backward_repeat, saved, dstats)
        for number in reversed(range(len(self.patterns))):
            pattern, (early, last) = self.patterns[number], saved.residuals[number]
            before = None
            if number:
                previous = self.patterns[number - 1]
                before = self._layer_shard(saved.flat, previous, -1, previous.repeats - 1)
            last_row = partial(self._layer_shard, saved.flat, pattern, -1)
            repeats = pattern.repeats
            ahead = last_row(repeats - 2) if repeats > 1 else before
            state = run(pattern, repeats - 1, last, state, ahead)
            if repeats > 2:

                def run_repeat(
                    state: _BackwardState,
                    i: jax.Array,
                    pattern: LayerPattern = pattern,
                    early: PyTree = early,
                    last_row: Callable[[Index], BufferPair] = last_row,
                ) -> tuple[_BackwardState, None]:
                    return run(pattern, i, layer_slice(early, i), state, last_row(i - 1)), None

                state, _ = lax.scan(run_repeat, state, jnp.arange(1, repeats - 1), reverse=True)
            if repeats > 1:
                state = run(pattern, 0, layer_slice(early, 0), state, before)
        works = self._bucket_reductions(state.pending)
        reduced = [[send(lambda rows: rows) for send in some] for some in works]
        state = self._store_reduced(state, reduced)
        return self._gradients_by_kind(saved, state), state.dx

    def _earlier_gradients_outside_buffer(
        self, saved: _SavedForward
    ) -> dict[LayerKind, list[jax.Array]]:
        """Return the parts of `saved.summed` that are in neither flat buffer, by kind."""
        return {
            kind: layers.split(saved.summed[kind]).others for kind, layers in self.kinds.items()
        }

    def _gradients_by_kind(
        self, saved: _SavedForward, state: _BackwardState
    ) -> dict[LayerKind, PyTree]:
        """Return the gradients of all layers' parameters, on their shards, by kind."""
        gradients = {}
        for kind, layers in self.kinds.items():
            dense, experts = layers.unflatten_gradient_stack(state.sums[kind])
            gradients[kind] = layers.join(ParamsByBuffer(dense, experts, state.others[kind]))
        return gradients

    def _backward_repeat(
        self,
        saved: _SavedForward,
        dstats: list[jax.Array],
        pattern: LayerPattern,
        repeat: Index,
        residuals: list[PyTree],
        state: _BackwardState,
        ahead: BufferPair | None,
    ) -> _BackwardState:
        """Run one repeat of a pattern in reverse; return the state for the layer before it.

        ahead: this device's rows of the layer before this repeat, to gather beside its first layer;
        None before the first layer.
        """
        bucket = Bucket()
        for position in reversed(range(pattern.period)):
            kind, index = pattern.kinds[position], pattern.layer_index(position, repeat)
            before = (
                self._layer_shard(saved.flat, pattern, position - 1, repeat) if position else ahead
            )
            routed, of_layer = kind in TOKEN_ROUTED, pattern.record_index(position, repeat)
            state, gradients = self._backward_beside_collectives(
                saved,
                layer_slice(dstats, of_layer) if routed else [],
                kind,
                index,
                residuals[position],
                state,
                before,
            )
            bucket = bucket.add(kind, index, gradients)
            if position == 0 or len(bucket.kinds) == self.layers_per_bucket:
                state, bucket = state._replace(pending=bucket), Bucket()
        return state

    def _backward_beside_collectives(
        self,
        saved: _SavedForward,
        dstats: list[jax.Array],
        kind: LayerKind,
        index: Index,
        residuals: PyTree,
        state: _BackwardState,
        before: BufferPair | None,
    ) -> tuple[_BackwardState, UnreducedGradients]:
        """Run a layer in reverse beside the collectives of its neighbours; return (the state for
        the layer before it, the layer's gradients before their reduction).

        before: this device's rows of the layer before it, to gather; None before the first layer.
        """
        gathers, reductions = (
            self.config.pair_all_gathers_by_chunk(before),
            self._bucket_reductions(state.pending),
        )
        args = (
            state.unsharded,
            layer_slice(saved.outside_buffer[kind], index),
            layer_slice(saved.keys[kind], index),
            residuals,
            state.dx,
            dstats,
        )
        (rows, gradients, dx), results = interleave_collectives(
            partial(self._backward_layer, kind),
            args,
            gathers + list(itertools.chain(*reductions)),
            self.config.schedule,
            self.axis_names,
            state.dx,
        )
        state = state._replace(dx=dx)
        if before is not None:
            unsharded = self.config.join_gathered_pair(results[: len(gathers)], before)
            state = state._replace(unsharded=unsharded)
        done = iter(results[len(gathers) :])
        state = self._store_reduced(
            state, [list(itertools.islice(done, len(works))) for works in reductions]
        )
        if saved.summed is not None:
            earlier = layer_slice(self.kinds[kind].split(saved.summed[kind]), index)
            # read from the stack that the sums are written to, so that it need not be copied
            gradients = jax.tree.map(jnp.add, gradients, layer_slice(state.others[kind], index))
            rows = BufferPair(
                add_to_own_row_local(rows.dense, earlier.dense, self.config.hierarchy),
                add_to_own_row_local(rows.experts, earlier.experts, EXPERT_SHARDS),
            )
        own = self.outside_buffer[kind]
        others = state.others | {
            kind: own.store_needing_no_reduction(state.others[kind], index, gradients)
        }
        return state._replace(others=others), UnreducedGradients(
            rows.dense, rows.experts, *own.flatten(gradients)
        )

    def _backward_layer(
        self,
        kind: LayerKind,
        unsharded: BufferPair,
        outside_buffer: list[jax.Array],
        key: Keys,
        residuals: PyTree,
        dx: jax.Array,
        dstats: list[jax.Array],
    ) -> tuple[BufferPair, list[jax.Array], jax.Array]:
        """Return (the gradients of the buffers [R, G], of the other parameters, of x)."""
        layers = self.kinds[kind]
        dense, experts = layers.unflatten_dense(unsharded.dense), list[jax.Array]()
        if not self.config.keeps_experts:
            experts = layers.unflatten_experts(unsharded.experts)
        known = self._known_residuals(ParamsByBuffer(dense, experts, outside_buffer), key)
        grads, dx = restore_known_residuals(residuals, known)((dx, dstats))
        return layers.flatten_gradients(grads.dense, grads.experts), grads.others, dx


def _without_experts(tree: PyTree) -> PyTree:
    """Return a tree in which the experts' buffer of each `BufferPair` has no columns."""

    def cut(pair: BufferPair) -> BufferPair:
        return pair._replace(experts=pair.experts[:, :0])

    return jax.tree.map(cut, tree, is_leaf=lambda x: isinstance(x, BufferPair))
