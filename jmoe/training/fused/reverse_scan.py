"""Run a decoder's layers with a hand-written backward pass: an explicit scan over the layers in
reverse.

`ShardedDecoder` passes a `ReverseScan` to the decoder as its `DecoderExecution.layer_runner`,
inside `shard_map`. In the forward pass, a layer runs while the next layer's parameters are
gathered. In the backward pass, layer i runs while the parameters of layer i - 1 are gathered and
the gradients of layer i + 1 (a *bucket*, which may hold several layers) are reduced: by a
reduce-scatter onto their shards, or by an all-reduce for replicated parameters and replicas of
experts. At most two layers are unsharded at any time. `collectives.schedule` decides when inside a
layer each collective starts. The residuals are those of `jax.vjp`, without the parameters.

Legend:
R devices
C elements of a device's shard of a layer's flat buffer
G elements of a shard of its gradients
N layers of a kind
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import KeyPath

from jmoe.collectives.fusion import (
    BufferLayout,
    Hierarchy,
    ShardInBuffer,
    all_gather_buffer_local,
    all_reduce_buffer_local,
    flatten_gradients,
    flatten_shards,
    reduce_scatter_buffer_local,
    unflatten_gradient_shards,
    unflatten_parameters,
)
from jmoe.collectives.schedule import (
    After,
    CollectiveSchedule,
    Work,
    cut_ranges,
    interleave_collectives,
)
from jmoe.config import LayerKind
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import RouterBias
from jmoe.mesh import DATA, is_expert
from jmoe.models.block import ApplyBlock
from jmoe.models.decoder import LayerInputs
from jmoe.models.layer_patterns import LayerPattern
from jmoe.training.vjp import replace_known_residuals, restore_known_residuals
from jmoe.types import PyTree

Tree = TypeVar("Tree")  # a pytree of arrays, or of stacks of them
Index = int | jax.Array  # of a layer in the stack of its kind
Keys = jax.Array | None  # a layer's PRNG key for router noise, or a stack of these


def layer_slice(tree: Tree, index: Index) -> Tree:
    """Return entry `index` of every array in a stack of layers."""
    entries: Tree = jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, index, 0, keepdims=False), tree
    )
    return entries


def _set_layer_at(stack: jax.Array, index: Index, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), index, 0)


def _is_nnx_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)


def _gradient_per_variable(grads: PyTree, state: PyTree) -> list[jax.Array]:
    """Return a list with a gradient for every variable of a stack of layers, in the order of
    `state`: zeros for routers' biases, which `grads` lacks, and the leaves of `grads` for all
    others.
    """
    own = iter(jax.tree.leaves(grads))
    variables = jax.tree.leaves(state, is_leaf=_is_nnx_variable)
    return [jnp.zeros_like(v[...]) if isinstance(v, RouterBias) else next(own) for v in variables]


class _PendingGradients(NamedTuple):
    """A layer's gradients on this device, before they are reduced over devices.

    rows: [R, G], row r holds the gradients of device r's shards. replicated: flat, of parameters
    that every device holds. experts: flat, of experts that have replicas.
    """

    rows: jax.Array
    replicated: jax.Array
    experts: jax.Array


class _ReducedGradients(NamedTuple):
    """A layer's `_PendingGradients` summed over devices. row: [G], the gradients of this device's
    shards.
    """

    row: jax.Array
    replicated: jax.Array
    experts: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["indices", "grads"], meta_fields=["kinds"])
@dataclass(frozen=True)
class _Bucket:
    """The pending gradients of some layers, with each layer's kind and its index in its kind's
    stack.
    """

    kinds: tuple[LayerKind, ...] = ()
    indices: tuple[jax.Array, ...] = ()
    grads: tuple[_PendingGradients, ...] = ()

    def add(self, kind: LayerKind, index: Index, grads: _PendingGradients) -> "_Bucket":
        return _Bucket((*self.kinds, kind), (*self.indices, jnp.int32(index)), (*self.grads, grads))


class _UnbufferedParams:
    """The parameters of one kind of layer that are not in its flat buffer, grouped by their
    gradients' reduction: none, over all devices, or over replicas of experts.
    """

    def __init__(self, layers: BufferLayout, state: PyTree, *, reduces: bool) -> None:
        def reduced_over(path: KeyPath, variable: PyTree) -> str:
            if isinstance(variable, RouterBias) or not reduces:
                return "none"
            return (
                "all" if not is_expert(path) else "replicas" if lax.axis_size(DATA) > 1 else "none"
            )

        sums = layers.split(
            jax.tree_util.tree_map_with_path(reduced_over, state, is_leaf=_is_nnx_variable)
        )[1]
        self._entries = [ShardInBuffer(w.shape[1:], 0, jnp.float32) for w in layers.split(state)[1]]
        self._unreduced, self._replicated, self._experts = (
            [i for i, over in enumerate(sums) if over == name]
            for name in ("none", "all", "replicas")
        )

    def num_all_reduced_elements(self) -> int:
        """Return the number of gradient elements per layer that an all-reduce sums."""
        return sum(self._entries[i].num_elements for i in self._replicated + self._experts)

    def flatten(self, grads: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return two flat vectors: the gradients to sum over all devices, and the gradients to sum
        over replicas of experts.
        """
        replicated, experts = (
            flatten_shards([grads[i] for i in some], [self._entries[i] for i in some])
            for some in (self._replicated, self._experts)
        )
        return replicated, experts

    def store_unreduced(
        self, stacks: list[jax.Array], index: Index, grads: list[jax.Array]
    ) -> list[jax.Array]:
        """Return `stacks` with the gradients of layer `index` that need no reduction written at
        that index.
        """
        return self._set_gradients_at(
            stacks, index, self._unreduced, [grads[i] for i in self._unreduced]
        )

    def store_reduced(
        self, stacks: list[jax.Array], index: Index, reduced: _ReducedGradients
    ) -> list[jax.Array]:
        """Return `stacks` with the reduced gradients of layer `index`, undoing `flatten`, written
        at that index.
        """
        for some, row_G in (
            (self._replicated, reduced.replicated),
            (self._experts, reduced.experts),
        ):
            stacks = self._set_gradients_at(
                stacks,
                index,
                some,
                unflatten_gradient_shards(row_G, [self._entries[i] for i in some]),
            )
        return stacks

    @staticmethod
    def _set_gradients_at(
        stacks: list[jax.Array], index: Index, positions: list[int], grads: list[jax.Array]
    ) -> list[jax.Array]:
        by_position = dict(zip(positions, grads, strict=True))
        return [
            _set_layer_at(w, index, by_position[i]) if i in by_position else w
            for i, w in enumerate(stacks)
        ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _SavedForward:
    """The values that the forward pass saves for the backward pass."""

    flat: dict[LayerKind, jax.Array]  # [N, C]
    outside_buffer: dict[LayerKind, list[jax.Array]]
    keys: dict[LayerKind, Keys]
    unsharded: jax.Array  # [R, C], the last layer's parameters
    residuals: list[PyTree]  # per pattern: (of all repeats but the last, of the last)
    summed: PyTree  # see `ReverseScan`


class _BackwardState(NamedTuple):
    """The values that the backward pass hands from layer to layer.

    unsharded: [R, C], the parameters of the layer that runs next. dx: the gradient of its output.
    pending: the gradients to reduce beside it. sums: reduced gradients of the flat buffers, by
    kind. others: gradients of the parameters outside these buffers, by kind.
    """

    unsharded: jax.Array
    dx: jax.Array
    pending: _Bucket
    sums: dict[LayerKind, jax.Array]  # [N, G]
    others: dict[LayerKind, list[jax.Array]]


@dataclass(frozen=True)
class ReverseScan:
    """Runs a decoder's layers, as its `DecoderExecution.layer_runner`, inside `shard_map`, with
    overlapped collectives.
    """

    # maps a stack of layers to the parameters that travel in the flat buffer
    layout_of: Callable[[PyTree], BufferLayout]
    hierarchy: Hierarchy
    schedule: CollectiveSchedule
    bucket_bytes: int  # float32 gradients that one reduction sums; 0: one layer's
    chunk_bytes: int  # of one collective, see `collectives.schedule`
    # Whether gradients outside the flat buffer are summed over devices. False in all accumulation
    # steps but the last, which sums them once for all.
    reduces: bool = True
    summed: PyTree = None  # the earlier accumulation steps' gradients, by kind, to add to

    # Work: the gathers and reductions that `interleave_collectives` places

    def all_gathers_by_chunk(self, row_C: jax.Array | None) -> list[Work]:
        """Return the all-gathers of a layer's parameters, one for each chunk of its shard `row_C`;
        none if that is None.
        """
        if row_C is None:
            return []
        num_devices = lax.axis_size(self.axis_names)
        limit = self.chunk_bytes if self.schedule.chunked else num_devices * row_C.nbytes
        chunks = cut_ranges(row_C.size, num_devices * row_C.dtype.itemsize, limit)
        return self._work_per_chunk(
            "gather", partial(all_gather_buffer_local, hierarchy=self.hierarchy), row_C, chunks
        )

    def join_gathered_chunks(self, gathered: list[jax.Array], row_C: jax.Array) -> jax.Array:
        """Return a layer's flat buffer [R, C] from the gathered chunks; C is 0 if no parameter of
        the layer is sharded.
        """
        empty = jnp.zeros((lax.axis_size(self.axis_names), 0), row_C.dtype)
        return jnp.concatenate([empty, *gathered], axis=1)

    def reduce_scatters_by_chunk(self, rows_RG: jax.Array) -> list[Work]:
        """Return the reduce-scatters of `rows_RG`, one per chunk of columns; their results
        concatenate to this device's row [G].
        """
        limits = [
            limit
            for limit in (self.bucket_bytes, self.chunk_bytes * self.schedule.chunked)
            if limit
        ]
        chunks = cut_ranges(
            rows_RG.shape[1], 4 * rows_RG.shape[0], min(limits, default=rows_RG.nbytes)
        )
        return self._work_per_chunk(
            "reduce",
            partial(reduce_scatter_buffer_local, hierarchy=self.hierarchy),
            rows_RG,
            chunks,
        )

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
        return self._work_per_chunk(
            "all_reduce", partial(all_reduce_buffer_local, hierarchy=hierarchy), row_G, chunks
        )

    def _work_per_chunk(
        self,
        scope: str,
        collective: Callable[[jax.Array], jax.Array],
        rows: jax.Array,
        chunks: Iterable[tuple[int, int]],
    ) -> list[Work]:
        """Return one `Work` for each chunk (start, end) of columns: `collective` applied to that
        chunk of `rows`.
        """

        def run_on_chunk(after: After, start: int, end: int) -> jax.Array:
            with jax.named_scope(scope):
                return collective(after(rows[..., start:end]))

        return [partial(run_on_chunk, start=start, end=end) for start, end in chunks]

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis for axes in self.hierarchy for axis in axes)

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
        self.axis_names, self.num_devices = config.axis_names, lax.axis_size(config.axis_names)
        self.kinds = {kind: config.layout_of(state) for kind, state in states.items()}
        self.outside_buffer = {
            k: _UnbufferedParams(layers, states[k], reduces=config.reduces)
            for k, layers in self.kinds.items()
        }
        layer_bytes = max(self._pending_gradient_bytes(kind) for kind in self.kinds)
        self.layers_per_bucket = max(1, config.bucket_bytes // max(1, layer_bytes))
        self.patterns = [pattern.join_repeats(self.layers_per_bucket) for pattern in patterns]

    def _pending_gradient_bytes(self, kind: LayerKind) -> int:
        """Return the bytes of one layer's `_PendingGradients`, in float32."""
        return 4 * (
            self.num_devices * sum(entry.num_elements for entry in self.kinds[kind].entries)
            + self.outside_buffer[kind].num_all_reduced_elements()
        )

    def _bucket_reductions(self, bucket: _Bucket) -> list[list[Work]]:
        """Return the collectives that reduce a bucket's gradients: one list for each field of
        `_PendingGradients`.
        """
        if not bucket.kinds:
            return [[], [], []]
        joined = _PendingGradients(
            *(jnp.concatenate(some, axis=-1) for some in zip(*bucket.grads, strict=True))
        )
        return [
            self.config.reduce_scatters_by_chunk(joined.rows),
            self.config.all_reduces_by_chunk(joined.replicated, self.config.hierarchy),
            self.config.all_reduces_by_chunk(joined.experts, ((DATA,),)),
        ]

    def _store_reduced(
        self, state: _BackwardState, reduced: Sequence[Sequence[jax.Array]]
    ) -> _BackwardState:
        """Return `state` without pending gradients: their sums, `reduced`, are written at their
        layers' indices. reduced: the results of `_bucket_reductions`.
        """
        sums, others, starts = dict(state.sums), dict(state.others), [0, 0, 0]
        rows = [jnp.concatenate([jnp.zeros(0), *some]) for some in reduced]
        bucket = state.pending
        for kind, index, grads in zip(bucket.kinds, bucket.indices, bucket.grads, strict=True):
            stops = [start + g.shape[-1] for start, g in zip(starts, grads, strict=True)]
            mine = [row[start:end] for row, start, end in zip(rows, starts, stops, strict=True)]
            own = _ReducedGradients(*mine)
            sums[kind] = _set_layer_at(sums[kind], index, own.row)
            others[kind] = self.outside_buffer[kind].store_reduced(others[kind], index, own)
            starts = stops
        return state._replace(pending=_Bucket(), sums=sums, others=others)

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
            fused, outside_buffer[kind] = layers.split(states[kind])
            flat[kind] = jax.vmap(
                partial(flatten_shards, entries=layers.entries), axis_size=layers.num_layers
            )(fused)
        run = partial(self._forward_repeat, flat, outside_buffer, keys)
        firsts = [self._layer_shard(flat, pattern, 0, 0) for pattern in self.patterns]
        carry = (
            self.config.join_gathered_chunks(
                [send(lambda row: row) for send in self.config.all_gathers_by_chunk(firsts[0])],
                firsts[0],
            ),
            x,
        )
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
        return (x, self._stack_in_layer_order(stats)), _SavedForward(
            flat, outside_buffer, keys, unsharded, residuals, summed
        )

    @staticmethod
    def _layer_shard(
        flat: dict[LayerKind, jax.Array], pattern: LayerPattern, position: int, repeat: Index
    ) -> jax.Array:
        """Return the shard of the flat buffer of the layer at `position` of a repeat."""
        return flat[pattern.kinds[position]][pattern.layer_index(position, repeat)]

    def _forward_repeat(
        self,
        flat: dict[LayerKind, jax.Array],
        outside_buffer: dict[LayerKind, list[jax.Array]],
        keys: dict[LayerKind, Keys],
        pattern: LayerPattern,
        repeat: Index,
        carry: tuple[jax.Array, jax.Array],
        ahead: jax.Array | None,
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[list[PyTree], list[MoEStats]]]:
        """Run one repeat of a pattern; return (carry after it, (residuals, MoE statistics)).

        carry: (the layer's gathered flat buffer, x). ahead: the shard of the flat buffer of the
        layer after this repeat, to gather beside its last layer; None after the last layer.
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
                self.config.all_gathers_by_chunk(following),
                self.config.schedule,
                self.axis_names,
                x,
            )
            unsharded = (
                unsharded
                if following is None
                else self.config.join_gathered_chunks(gathered, following)
            )
            residuals.append(layer_residuals)
            stats += [layer_stats] if kind == "moe" else []
        return (unsharded, x), (residuals, stats)

    def _forward_layer(
        self,
        kind: LayerKind,
        window: int | None,
        unsharded: jax.Array,
        outside_buffer: list[jax.Array],
        key: Keys,
        x: jax.Array,
    ) -> tuple[jax.Array, MoEStats | None, PyTree]:
        """Return (x after the layer, its statistics, its residuals without its parameters)."""
        layers = self.kinds[kind]
        params = unflatten_parameters(unsharded, layers.entries, self.config.hierarchy)

        def apply_layer(
            params: list[jax.Array], outside_buffer: list[jax.Array], x: jax.Array
        ) -> PyTree:
            y, stats = self.apply_block(kind, layers.join(params, outside_buffer), key, window, x)
            return (
                y,
                [s for s in jax.tree.leaves(stats) if jnp.issubdtype(s.dtype, jnp.floating)],
            ), stats

        (y, _), vjp, stats = jax.vjp(apply_layer, params, outside_buffer, x, has_aux=True)
        return (
            y,
            stats,
            replace_known_residuals(vjp, [*params, *outside_buffer, *jax.tree.leaves(key)]),
        )

    def _stack_in_layer_order(
        self, stats: list[tuple[LayerPattern, list[MoEStats] | None, list[MoEStats]]]
    ) -> MoEStats | None:
        """Return the MoE layers' statistics, stacked in layer order; None without MoE layers."""
        indices: list[int] = []
        stacks = []
        for pattern, early, last in stats:
            for number, position in enumerate(
                p for p, kind in enumerate(pattern.kinds) if kind == "moe"
            ):
                indices += [pattern.layer_index(position, i) for i in range(pattern.repeats)]
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
            kind: jnp.zeros(
                (layers.num_layers, sum(entry.num_elements for entry in layers.entries))
            )
            for kind, layers in self.kinds.items()
        }
        others = jax.tree.map(jnp.zeros_like, saved.outside_buffer)
        state = _BackwardState(saved.unsharded, dx, _Bucket(), sums, others)
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
                step = lambda state, i, pattern=pattern, early=early, last_row=last_row: (  # noqa: E731
                    run(pattern, i, layer_slice(early, i), state, last_row(i - 1)),
                    None,
                )
                state, _ = lax.scan(step, state, jnp.arange(1, repeats - 1), reverse=True)
            if repeats > 1:
                state = run(pattern, 0, layer_slice(early, 0), state, before)
        works = self._bucket_reductions(state.pending)
        reduced = [[send(lambda rows: rows) for send in some] for some in works]
        state = self._store_reduced(state, reduced)
        return self._gradients_by_kind(saved, state), state.dx

    def _gradients_by_kind(
        self, saved: _SavedForward, state: _BackwardState
    ) -> dict[LayerKind, PyTree]:
        """Return the gradients of all layers' parameters, on their shards, by kind."""
        gradients = {}
        for kind, layers in self.kinds.items():
            unflatten_rows = jax.vmap(partial(unflatten_gradient_shards, entries=layers.entries))
            shards = unflatten_rows(state.sums[kind])
            if saved.summed is not None:
                shards = jax.tree.map(jnp.add, shards, layers.split(saved.summed[kind])[0])
            gradients[kind] = layers.join(shards, state.others[kind])
        return gradients

    def _backward_repeat(
        self,
        saved: _SavedForward,
        dstats: list[jax.Array],
        pattern: LayerPattern,
        repeat: Index,
        residuals: list[PyTree],
        state: _BackwardState,
        ahead: jax.Array | None,
    ) -> _BackwardState:
        """Run one repeat of a pattern in reverse; return the state for the layer before it.

        ahead: the shard of the flat buffer of the layer before this repeat, to gather beside its
        first layer; None before the first layer.
        """
        bucket = _Bucket()
        for position in reversed(range(pattern.period)):
            kind, index = pattern.kinds[position], pattern.layer_index(position, repeat)
            before = (
                self._layer_shard(saved.flat, pattern, position - 1, repeat) if position else ahead
            )
            state, gradients = self._backward_beside_collectives(
                saved, dstats, kind, index, residuals[position], state, before
            )
            bucket = bucket.add(kind, index, gradients)
            if position == 0 or len(bucket.kinds) == self.layers_per_bucket:
                state, bucket = state._replace(pending=bucket), _Bucket()
        return state

    def _backward_beside_collectives(
        self,
        saved: _SavedForward,
        dstats: list[jax.Array],
        kind: LayerKind,
        index: Index,
        residuals: PyTree,
        state: _BackwardState,
        before: jax.Array | None,
    ) -> tuple[_BackwardState, _PendingGradients]:
        """Run a layer in reverse beside the collectives of its neighbours; return (the state for
        the layer before it, the layer's gradients before their reduction).

        before: the shard of the flat buffer of the layer before it, to gather; None before the
        first layer.
        """
        gathers, reductions = (
            self.config.all_gathers_by_chunk(before),
            self._bucket_reductions(state.pending),
        )
        args = (
            state.unsharded,
            layer_slice(saved.outside_buffer[kind], index),
            layer_slice(saved.keys[kind], index),
            residuals,
            state.dx,
            layer_slice(dstats, index) if kind == "moe" else [],
        )
        (rows_RG, gradients, dx), results = interleave_collectives(
            partial(self._backward_layer, kind),
            args,
            gathers + list(itertools.chain(*reductions)),
            self.config.schedule,
            self.axis_names,
            state.dx,
        )
        state = state._replace(dx=dx)
        if before is not None:
            unsharded = self.config.join_gathered_chunks(results[: len(gathers)], before)
            state = state._replace(unsharded=unsharded)
        done = iter(results[len(gathers) :])
        state = self._store_reduced(
            state, [list(itertools.islice(done, len(works))) for works in reductions]
        )
        if saved.summed is not None:
            earlier = layer_slice(self.kinds[kind].split(saved.summed[kind])[1], index)
            gradients = jax.tree.map(jnp.add, gradients, earlier)
        own = self.outside_buffer[kind]
        others = state.others | {kind: own.store_unreduced(state.others[kind], index, gradients)}
        return state._replace(others=others), _PendingGradients(rows_RG, *own.flatten(gradients))

    def _backward_layer(
        self,
        kind: LayerKind,
        unsharded: jax.Array,
        outside_buffer: list[jax.Array],
        key: Keys,
        residuals: PyTree,
        dx: jax.Array,
        dstats: list[jax.Array],
    ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
        """Return (the gradients of the flat buffer [R, G], of the other parameters, of x)."""
        layers, hierarchy = self.kinds[kind], self.config.hierarchy
        params = unflatten_parameters(unsharded, layers.entries, hierarchy)
        known = [*params, *outside_buffer, *jax.tree.leaves(key)]
        dparams, doutside_buffer, dx = restore_known_residuals(residuals, known)((dx, dstats))
        return flatten_gradients(dparams, layers.entries, hierarchy), doutside_buffer, dx
