"""A training step in parts, compiled each for itself, for a host that runs layer by layer.

Legend: A accumulation steps, B batch, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, L experts of a
device, M that its slot has room for, K choices a token, N layers of a kind, R devices, C elements of a device's part of
a layer's flat buffer, G the same for gradients.

On several devices a program is one `shard_map` over all of them. Beside its own work it gathers the dense parameters of
the layer that runs next, and on the way back it sums the gradients of the layer before it, as `collectives.schedule`
places them. Arrays that differ between devices and have no dimension of tokens or experts have a leading one of R.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.exchange import DispatchedTokens
from jmoe.collectives.fusion import (
    ShardInBuffer,
    all_gather_buffer_local,
    pack,
    pack_gradients,
    reduce_scatter_buffer_local,
    unpack,
    unpack_gradients,
)
from jmoe.collectives.schedule import interleave
from jmoe.config import LayerKind
from jmoe.layers.moe import MoEStats, moe_stats
from jmoe.layers.router import Routing
from jmoe.mesh import ACCUMULATED_BATCH, ALL, BATCH, DATA, EXPERT, EXPERTS_PATH, REPLICATED, split_over
from jmoe.models.block import Block, causal, saved_names
from jmoe.models.decoder import STACKS
from jmoe.models.functional import FunctionalModule
from jmoe.offload.slot_rows import ChosenRows
from jmoe.optim.loss_scale import LossScale, scaled, unscaled
from jmoe.training.fused.reverse_scan import layer_of
from jmoe.training.gradient_reduction import StreamedGradients, squared_norms_local, streamed_on_shards_local
from jmoe.training.native import with_native
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import TrainState, without_experts
from jmoe.training.update import (
    auxiliary_losses,
    finish_step,
    over_devices,
    router_key,
    tokens_per_accumulation_step,
)
from jmoe.training.vjp import apply_vjp, vjp_with_residuals

ExpertStacks = Mapping[str, jax.Array]  # of one layer, [E, ...] each


class LayerIndex(NamedTuple):
    """Which layer of its kind, how far its attention looks, and what its router draws from; int32 scalars."""

    number: jax.Array
    window: jax.Array | None  # None: all tokens before
    step: jax.Array | None = None
    accumulation: jax.Array | None = None


class LayerParams(NamedTuple):
    """Parameters that a layer's program is given."""

    stack: Any  # dense ones of all layers of its kind, as they lie on the devices
    unsharded_RC: jax.Array | None  # the layer's flat buffer
    router_bias: Any = None  # of all layers with experts
    experts: ExpertStacks | None = None  # this layer's; those that its tokens did not choose may be anything finite
    chosen: ChosenRows | None = None  # None: `experts` has a row for each expert, in order

    def of_chosen(self) -> tuple[ExpertStacks | None, jax.Array | None]:
        """Return (arrays of the chosen experts [M, ...], which they are), or (arrays of all experts, None)."""
        if self.chosen is None or self.experts is None:
            return self.experts, None
        take = lambda w: jnp.take(w, self.chosen.rows_M, axis=0, mode="clip")  # noqa: E731
        return {name: take(w) for name, w in self.experts.items()}, self.chosen.ids_M


class RoutedTokens(NamedTuple):
    """A layer with experts, half done: its tokens' rows are where their experts are."""

    x_BSD: jax.Array
    h_TD: jax.Array
    dispatched: DispatchedTokens
    arrived_E: jax.Array  # how many rows for each expert, of all replicas together, int32
    topk_idx_TK: jax.Array
    stats: MoEStats  # this device's, [R] each


class NextLayer(NamedTuple):
    """The layer whose parameters are to be gathered."""

    flat_NC: jax.Array  # the devices' parts, of all layers of its kind
    number: jax.Array


class PendingGradients(NamedTuple):
    """A layer's gradients that are still to be summed over devices."""

    rows_RG: jax.Array | None = None  # of its flat buffer
    experts: ExpertStacks | None = None  # where replicas have the same experts, to be summed over those
    ids_M: jax.Array | None = None  # which experts these are, as `ChosenRows` has them


class SummedGradients(NamedTuple):
    """The sums of `PendingGradients`; what those do not have is None."""

    row_G: jax.Array | None = None  # this device's part of the flat buffer's
    experts: ExpertStacks | None = None  # as they are to be kept
    square: jax.Array | None = None  # of each of this device's experts', [R, L]


class NeighborWork(NamedTuple):
    """The work that a program does for neighbouring layers beside its own work."""

    next_layer: NextLayer | None = None  # to be gathered
    pending: PendingGradients = PendingGradients()  # of the last layer
    gathered: Sequence[jax.Array] = ()  # the next layer's first chunks, which are there already


class Overlapped(NamedTuple):
    """The results of `NeighborWork`."""

    unsharded_RC: jax.Array | None = None  # the next layer's parameters
    summed: SummedGradients = SummedGradients()  # gradients of the last layer


class GradAccumulator(NamedTuple):
    """A layer's gradients, summed over accumulation steps but not over devices."""

    rows_RG: jax.Array | None  # None before the first step, or where there are none; so are experts
    rest: list[jax.Array]  # [R, N, ...], of all layers
    experts: ExpertStacks | None = None
    ids_M: jax.Array | None = None  # which experts these are; None: all


class ForBackward(NamedTuple):
    """The values that a layer's backward pass is given of its forward pass, and the gradient of its output."""

    x_BSD: jax.Array
    dy_BSD: jax.Array
    topk_idx_TK: jax.Array | None  # its tokens' choices; None of a dense layer
    kept: Any  # residuals; None: the layer runs again from x
    loss_scale: LossScale | None = None  # of its routers' losses


class StepResults(NamedTuple):
    """The values that the parts of a step hand to its end. counts_NAE, dropped_N: of `LayerPrograms.totals`."""

    grads: StreamedGradients
    expert_squares: Sequence[jax.Array]  # of each layer's experts' gradients, [R, L]
    losses: Sequence[jax.Array]  # parts to add up
    stats: Sequence[Sequence[MoEStats]]  # [N][A]
    counts_NAE: jax.Array
    dropped_N: jax.Array


def _zeros_of(tree: Any) -> Any:
    """Return zeros in float32, one device's."""
    return jax.tree.map(lambda w: jnp.zeros((1, *w.shape), jnp.float32), tree)


def _specs_of(args: Any, specs: Any) -> Any:
    """Return the specs of arguments; what is None has none."""
    if args is None:
        return REPLICATED
    if type(args) is type(specs) and hasattr(args, "_fields"):
        return type(args)(*map(_specs_of, args, specs))
    return specs


def compiled_on(
    mesh: Mesh, function: Callable[..., Any], *specs: Any, out: Any, static: Sequence[str] = (), donate: Any = ()
) -> Callable[..., Any]:
    """Compile a function over all devices of a mesh. specs: of its arguments; static: options by name."""
    if mesh.size == 1:
        return jax.jit(function, static_argnames=static, donate_argnums=donate)

    def call(*args: Any, **options: Any) -> Any:
        in_specs = tuple(map(_specs_of, args, specs))
        body = partial(function, **options)
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False)(*args)

    return jax.jit(call, static_argnames=static, donate_argnums=donate)


def routed_tokens(x_BSD: jax.Array, h_TD: jax.Array, routing: Routing, dispatched: DispatchedTokens) -> RoutedTokens:
    """Return a layer half done, as a program hands it to the next."""
    sizes = [arrived.group_sizes_L for arrived in dispatched.chunks]
    return RoutedTokens(
        x_BSD,
        h_TD,
        replace(dispatched, dropped=dispatched.dropped[None]),
        sum(sizes[1:], sizes[0]),
        routing.topk_idx_TK,
        jax.tree.map(lambda value: value[None], moe_stats(routing, dispatched)),
    )


def gradients_to_keep(experts: ExpertStacks, dtype: str) -> tuple[ExpertStacks, jax.Array]:
    """Return (experts' gradients as they are to be kept, each expert's sum of squares [L])."""
    squares = [jnp.square(g).sum(axis=tuple(range(1, g.ndim))) for g in experts.values()]
    return {name: g.astype(dtype) for name, g in experts.items()}, jnp.stack(squares).sum(axis=0)


class LayerPrograms:
    """The compiled functions of one run, each for all layers of a kind.

    A layer with experts is cut in two on its way forward, once its tokens are where their experts are. Its backward
    pass is one program, given what both have kept (`training.vjp`); where nothing is kept (`remat = layer`,
    full-capacity buffers) it runs the layer again, with the choices that were made. `outside` is what is outside the
    layers, unsharded. Gradients are summed into what is given, which is donated.
    """

    def __init__(self, model: ShardedDecoder, chunk_bytes: int | None = None) -> None:
        self.config, self.mesh, self._model = model.config, model.mesh, model
        self.dtype = model.dtype
        self._scan = model.reverse_scan(chunk_bytes)
        self._replicas = model.mesh.shape[DATA]
        self._num_local = self.config.model.num_experts * self._replicas // self.mesh.size
        decoder: Any = nnx.eval_shape(model.build)
        self._experts = FunctionalModule(decoder.moe_layers.moe.experts)
        del decoder.moe_layers.moe.experts
        self._moe = FunctionalModule(decoder.moe_layers)
        self._dense = FunctionalModule(decoder.dense_layers) if decoder.dense_layers is not None else None
        decoder.dense_layers = decoder.moe_layers = None
        self._outside = FunctionalModule(decoder)
        self.experts: dict[str, jax.ShapeDtypeStruct] = self._experts.params  # of all layers, [N, E, ...]
        self._compile()

    def _compile(self) -> None:
        specs = without_experts(self._model.specs)
        replicated: Any = REPLICATED
        split: Any = BATCH  # of what differs between devices

        def make(function: Callable[..., Any], *specs: Any, **options: Any) -> Callable[..., Any]:
            return compiled_on(self.mesh, with_native(self._model.native, function), *specs, **options)

        outside = {
            name: specs[name] if name in self._model.embedding.split else jax.tree.map(lambda _: REPLICATED, shapes)
            for name, shapes in self._model.shapes.items()
            if name not in STACKS.values()
        }
        dense = LayerParams(specs.get(STACKS["dense"]), replicated)
        experts: Any = split_over(EXPERT)
        moe = LayerParams(specs[STACKS["moe"]], replicated, replicated, experts, ChosenRows(experts, experts))
        columns: Any = split_over(ALL, 1)
        work = NeighborWork(NextLayer(columns, replicated), split, replicated)
        overlapped = Overlapped(replicated, split)
        forward, backward = (split, split, overlapped), (split, split, overlapped)
        scaling = None if self.config.compute_dtype != "float16" else replicated
        state = TrainState(specs, specs, specs, replicated, replicated, scaling)
        results = StepResults(split, split, split, split, replicated, replicated)

        self.unstack = make(list, ACCUMULATED_BATCH, out=split)
        self.split = make(lambda tokens_BS: (tokens_BS[:, :-1], tokens_BS[:, 1:]), split, out=split)
        self.prepare = make(self._prepare, specs, out=(outside, columns, replicated), static=["first"])
        self.embed = make(self._embed, outside, split, out=split)
        self.dense = make(self._dense_layer, dense, replicated, split, work, out=forward, static=["keeps"])
        options = ["train", "full_capacity", "keeps"]
        self.route = make(self._route, moe, replicated, split, work, out=(split, split, replicated), static=options)
        self.add_experts = make(self._add_experts, moe, split, replicated, work, out=forward, static=["keeps"])
        self.most_chosen = make(self._most_chosen, split, out=replicated)
        self.totals = make(self._totals, split, out=replicated)
        self.dropped = make(self._dropped, split, out=replicated)
        self.zeros = make(self._zeros, specs, outside, out=split)
        self.loss_gradients = make(self._loss_gradients, outside, split, split, split, replicated, out=split, donate=3)
        self.moe_gradients = make(
            self._moe_gradients,
            *(moe, replicated, ForBackward(split, split, split, split, replicated), split, replicated, work),
            out=(*backward, split),
            static=["full_capacity", "last"],
            donate=3,
        )
        self.dense_gradients = make(
            self._dense_gradients, *(dense, replicated, split, split, work), out=backward, donate=3
        )
        self.embed_gradients = make(self._embed_gradients, outside, split, split, split, out=split, donate=3)
        self.reduce = make(self._reduce, split, out=split)
        self.finish = make(self._finish, state, results, out=(state, replicated), donate=0)
        self.nll = make(self._nll, outside, split, split, split, out=replicated)
        self.logits = make(self._logits, outside, split, replicated, out=replicated)

    # What travels

    def _prepare(self, params: Any, *, first: LayerKind) -> tuple[Any, dict[LayerKind, jax.Array], jax.Array | None]:
        """Return (outside, every layer's part of its buffer by kind, the first layer's buffer). first: its kind."""
        outside, scan = {name: tree for name, tree in params.items() if name not in STACKS.values()}, self._scan
        if scan is None or not self._model.fused:
            return outside, {}, None
        flat = {}
        for kind, name in STACKS.items():
            if name in params:
                layout = self._model.layout(params[name], stacked=True)
                rows = jax.vmap(partial(pack, parts=layout.parts), axis_size=layout.num_layers)
                flat[kind] = rows(layout.split(params[name])[0])
        layout = self._model.layout(outside)
        shards, rest = layout.split(outside)
        if shards:
            rows_RC = all_gather_buffer_local(pack(shards, layout.parts), scan.hierarchy)
            outside = layout.join(unpack(rows_RC, layout.parts, scan.hierarchy), rest)
        row_C = flat[first][0]
        return outside, flat, scan.unsharded([gather(lambda row: row) for gather in scan.gathers(row_C)], row_C)

    def _unsharded(self, params: LayerParams, layer: LayerIndex) -> Any:
        """Return a layer's own parameters."""
        layout, buffer_RC = self._model.layout(params.stack, stacked=True), params.unsharded_RC
        fused = [] if buffer_RC is None else unpack(buffer_RC, layout.parts, self._model.hierarchy)
        return layout.join(fused, layer_of(layout.split(params.stack)[1], layer.number))

    def _overlap(
        self, function: Callable[..., Any], args: tuple[Any, ...], begin: jax.Array, work: NeighborWork
    ) -> tuple[Any, Overlapped]:
        """Run a layer's own function, and the work for its neighbours beside it. begin: known when that may begin."""
        scan, pending = self._scan, work.pending
        if scan is None or not jax.tree.leaves((work.next_layer, pending)):
            return function(*args), Overlapped()
        row_C = None if work.next_layer is None else layer_of(*work.next_layer)
        gathers = scan.gathers(row_C)[len(work.gathered) :]
        reductions = [] if pending.rows_RG is None else scan.reductions(pending.rows_RG)
        of_experts = [] if pending.experts is None else scan.all_reductions(self._flat(pending.experts), ((DATA,),))
        works = gathers + reductions + of_experts
        result, done = interleave(function, args, works, scan.schedule, ALL, begin)
        unsharded_RC = None if row_C is None else scan.unsharded([*work.gathered, *done[: len(gathers)]], row_C)
        rows = done[len(gathers) : len(gathers) + len(reductions)], done[len(gathers) + len(reductions) :]
        row_G, experts_G = (jnp.concatenate([jnp.zeros(0), *chunks]) for chunks in rows)
        return result, Overlapped(unsharded_RC, self._summed(pending, row_G, experts_G))

    def _reduce(self, pending: PendingGradients) -> SummedGradients:
        """Sum gradients over devices beside nothing else."""
        row_G = experts_G = jnp.zeros(0)
        if pending.rows_RG is not None:
            row_G = reduce_scatter_buffer_local(pending.rows_RG, self._model.hierarchy)
        if pending.experts is not None:
            experts_G = lax.psum(self._flat(pending.experts), DATA)
        return self._summed(pending, row_G, experts_G)

    def _flat(self, experts: ExpertStacks) -> jax.Array:
        return pack(list(experts.values()), self._parts_of(experts))

    def _parts_of(self, experts: ExpertStacks) -> list[ShardInBuffer]:
        return [ShardInBuffer(g.shape, 0, jnp.float32) for g in experts.values()]

    def _summed(self, pending: PendingGradients, row_G: jax.Array, experts_G: jax.Array) -> SummedGradients:
        """Return the sums by their names; experts_G: flat."""
        sums = SummedGradients(None if pending.rows_RG is None else row_G)
        if pending.experts is None:
            return sums
        experts = unpack_gradients(experts_G, self._parts_of(pending.experts))
        stored, square = self._to_keep(dict(zip(pending.experts, experts, strict=True)), pending.ids_M)
        return sums._replace(experts=stored, square=square)

    def _to_keep(self, experts: ExpertStacks, ids_M: jax.Array | None) -> tuple[ExpertStacks, jax.Array]:
        """Return (gradients as they are to be kept, their squares by expert [R, L]), which are added up later."""
        kept, squares = gradients_to_keep(experts, self.config.tiers.gradient_dtype)
        if ids_M is not None:  # the same sum, whatever there is room for
            squares = jnp.zeros(self._num_local, jnp.float32).at[ids_M].set(squares, mode="drop")
        return kept, squares[None]

    # Forward

    def _embed(self, outside: Any, tokens_BS: jax.Array) -> jax.Array:
        module, lookup = self._outside(self._model.cast(outside)), self._model.embedding.lookup
        x_BSD: jax.Array = module.embed(tokens_BS, self.dtype, lookup)
        return x_BSD

    def _dense_layer(
        self, params: LayerParams, layer: LayerIndex, x_BSD: jax.Array, work: NeighborWork, *, keeps: bool
    ) -> tuple[jax.Array, Any, Overlapped]:
        """Return (the layer's output, what it keeps, the neighbours' results)."""
        run = self._with_residuals_if(keeps, self._run_dense, wanted=(0, 2))
        args = self._unsharded(params, layer), layer, x_BSD
        (y_BSD, kept), overlapped = self._overlap(run, args, x_BSD, work)
        return y_BSD, kept, overlapped

    def _with_residuals_if(
        self, keeps: bool, function: Callable[..., Any], wanted: Sequence[int]
    ) -> Callable[..., tuple[Any, Any]]:
        """Return the function with what its backward pass keeps beside its result; None if that is nothing."""
        names = saved_names(self.config.remat)
        return lambda *args: vjp_with_residuals(function, args, wanted, names) if keeps else (function(*args), None)

    def _run_dense(self, params: Any, layer: LayerIndex, x_BSD: jax.Array) -> jax.Array:
        assert self._dense is not None
        block: Block = self._dense(self._model.cast(params))
        return block.dense(x_BSD, causal(layer.window), self.dtype)

    def _route(
        self,
        params: LayerParams,
        layer: LayerIndex,
        x_BSD: jax.Array,
        work: NeighborWork,
        *,
        train: bool,
        full_capacity: bool,
        keeps: bool,
    ) -> tuple[RoutedTokens, Any, Sequence[jax.Array]]:
        """Run a layer until its tokens are where their experts are: (that, what it keeps, chunks of the next layer).

        The chunks are some of the buffer's columns, [R, ...] each: as many as attention multiplies of the layer.
        """
        function = partial(self._run_route, train=train, full_capacity=full_capacity)
        run = self._with_residuals_if(keeps, function, wanted=(0, 3))
        args = self._unsharded(params, layer), layer_of(params.router_bias, layer.number), layer, x_BSD
        gathered: Sequence[jax.Array] = []
        if self._scan is None or work.next_layer is None:
            routed, kept = run(*args)
        else:
            row_C, model = layer_of(*work.next_layer), self.config.model
            gathers, dense = self._scan.gathers(row_C), row_C.size * self.mesh.size
            early = len(gathers) * dense // (dense + model.num_experts_per_tok * model.expert_parameters)
            (routed, kept), gathered = interleave(run, args, gathers[:early], self._scan.schedule, ALL, x_BSD)
        if self._replicas > 1:  # what one of them needs, all fetch, and so bring it up to date in the same steps
            routed = routed._replace(arrived_E=lax.psum(routed.arrived_E, DATA))
        return routed, kept, gathered

    def _run_route(
        self,
        params: Any,
        bias: Any,
        layer: LayerIndex,
        x_BSD: jax.Array,
        *,
        train: bool,
        full_capacity: bool,
        topk_idx_TK: jax.Array | None = None,
    ) -> RoutedTokens:
        block: Block = self._moe(self._model.cast(params), bias)
        x_BSD = block.attend(x_BSD, causal(layer.window), self.dtype)
        key = self._router_key(layer) if train else None
        h_TD, routing = block.route(x_BSD, self.dtype, key=key, train=train, topk_idx_TK=topk_idx_TK)
        dispatched = block.dispatch(h_TD, routing, full_capacity=full_capacity)
        return routed_tokens(x_BSD, h_TD, routing, dispatched)

    def _router_key(self, layer: LayerIndex) -> jax.Array | None:
        """Return the key of what the router draws, the fused step's too; None where it draws nothing."""
        config = self.config
        if not config.model.router.draws:
            return None
        assert layer.step is not None and layer.accumulation is not None
        device = lax.axis_index(ALL) if self.mesh.size > 1 else 0
        key = router_key(config, layer.step, device, layer.accumulation)
        return jax.random.split(key, config.model.num_moe_layers)[layer.number]

    def _add_experts(
        self, params: LayerParams, routed: RoutedTokens, layer: LayerIndex, work: NeighborWork, *, keeps: bool
    ) -> tuple[jax.Array, Any, Overlapped]:
        """Return (the layer's output, what it keeps, the neighbours' results)."""
        run = self._with_residuals_if(keeps, self._run_experts, wanted=(0, 1, 2))
        experts, ids_M = params.of_chosen()
        args = self._unsharded(params, layer), experts, routed, ids_M
        (y_BSD, kept), overlapped = self._overlap(run, args, routed.x_BSD, work)
        return y_BSD, kept, overlapped

    def _run_experts(
        self, params: Any, experts: ExpertStacks, routed: RoutedTokens, ids_M: jax.Array | None = None
    ) -> jax.Array:
        bias = jax.tree.map(lambda b: jnp.zeros(b.shape[1:], b.dtype), self._moe.bias)  # it has done its work
        block: Block = self._moe(self._model.cast(params), bias)
        assert block.moe is not None
        block.moe.experts = mine = self._experts(self._model.cast({EXPERTS_PATH: experts})[EXPERTS_PATH])
        mine.ids_M = ids_M
        return block.apply_experts(routed.x_BSD, routed.h_TD, routed.dispatched)

    def _most_chosen(self, arrived: Sequence[jax.Array]) -> jax.Array:
        """Return how many experts of a device rows arrived for, in any of these arrays, where they are most."""
        most = (sum(arrived[1:], arrived[0]) > 0).sum(dtype=jnp.int32)
        return lax.pmax(most, ALL) if self.mesh.size > 1 else most

    def _totals(self, stats: Sequence[Sequence[MoEStats]]) -> tuple[jax.Array, jax.Array]:
        """Return (assignments to each expert [N, A, E], those that found no row [N]) of all devices, from [N][A]."""
        counts_NAE = jnp.stack([jnp.stack([s.counts_E[0] for s in layer]) for layer in stats])
        dropped_N = jnp.stack([sum(s.dropped[0] for s in layer) for layer in stats])
        return over_devices(self.mesh.size, (counts_NAE, dropped_N))

    def _dropped(self, stats: Sequence[Sequence[MoEStats]]) -> jax.Array:
        """Return how many assignments of all devices found no row in buffers."""
        dropped = jnp.stack([s.dropped[0] for layer in stats for s in layer])
        total: jax.Array = over_devices(self.mesh.size, dropped.sum(dtype=jnp.int32))
        return total

    def _head(self, outside: Any, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (the last norm's output [T, D], the head's weight)."""
        module = self._outside(self._model.cast(outside))
        x_TD = module.norm(x_BSD, self.dtype).reshape(-1, x_BSD.shape[-1])
        head = None if module.head is None else module.head[...]
        return x_TD, self._model.head.weight(module.embedding[...], head, self.dtype)

    def _nll_local(self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        head = self._head(outside, x_BSD)
        return self._model.head.cross_entropy(*head, labels_BS.reshape(-1), weights_BS.reshape(-1))

    def _nll(self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        nll: jax.Array = over_devices(self.mesh.size, self._nll_local(outside, x_BSD, labels_BS, weights_BS))
        return nll

    def _logits(self, outside: Any, x_BSD: jax.Array, position: jax.Array) -> jax.Array:
        x_TD, head = self._head(outside, x_BSD[:1])
        last_D = lax.dynamic_index_in_dim(x_TD, position, 0, keepdims=False).astype(jnp.float32)
        if self.mesh.size > 1:
            last_D = lax.psum(jnp.where(lax.axis_index(ALL) == 0, last_D, 0), ALL)
        return self._model.head.logits(last_D, head)

    # Backward

    def _zeros(self, params: Any, outside: Any) -> StreamedGradients:
        stacks = {kind: params[name] for kind, name in STACKS.items() if name in params}
        rest = {k: _zeros_of(self._model.layout(w, stacked=True).split(w)[1]) for k, w in stacks.items()}
        return StreamedGradients(_zeros_of(outside), rest, {kind: [] for kind in stacks})

    def _loss_gradients(
        self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, grads: Any, loss_scale: LossScale | None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return (this device's part of the loss, dx, summed gradients of what is outside the layers)."""
        num_tokens = tokens_per_accumulation_step(self.config) * self.config.gradient_accumulation_steps
        weights_BS = scaled(jnp.full(labels_BS.shape, 1.0 / num_tokens, jnp.float32), loss_scale)
        with jax.named_scope("loss"):
            loss_and_gradients = jax.value_and_grad(self._nll_local, argnums=(0, 1))
            loss, (doutside, dx_BSD) = loss_and_gradients(outside, x_BSD, labels_BS, weights_BS)
        return unscaled(loss, loss_scale)[None], dx_BSD, self._add_outside(grads, doutside)

    def _add_outside(self, grads: Any, new: Any) -> Any:
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32)[None], grads, new)

    def _accumulate(
        self, params: LayerParams, layer: LayerIndex, sums: GradAccumulator, dparams: Any, dexperts: Any = None
    ) -> GradAccumulator:
        """Add the gradients of one more accumulation step to a layer's sums."""
        layout, rows_RG = self._model.layout(params.stack, stacked=True), sums.rows_RG
        fused, rest = layout.split(dparams)
        if self._scan is not None and self._model.fused:
            new_RG = pack_gradients(fused, layout.parts, self._scan.hierarchy)
            rows_RG = new_RG if rows_RG is None else rows_RG + new_RG
        if sums.experts is not None:
            dexperts = jax.tree.map(jnp.add, sums.experts, dexperts)
        totals = [total.at[0, layer.number].add(g) for total, g in zip(sums.rest, rest, strict=True)]
        ids_M = None if params.chosen is None or dexperts is None else params.chosen.ids_M
        return GradAccumulator(rows_RG, totals, dexperts, ids_M)

    def _moe_gradients(
        self,
        params: LayerParams,
        layer: LayerIndex,
        inputs: ForBackward,
        sums: GradAccumulator,
        counts_NAE: jax.Array,
        work: NeighborWork,
        *,
        full_capacity: bool,
        last: bool,
    ) -> tuple[jax.Array, GradAccumulator, Overlapped, jax.Array | None]:
        """Return (dx, summed gradients, the neighbours' results, this device's squares of the experts', [R, L]).

        inputs.kept: what `route` found and kept, and what `add_experts` kept. last: no accumulation step follows, so
        the experts' gradients are as they are to be kept, and their square is known, unless replicas are to add theirs.
        """
        counts_E, bias = counts_NAE[layer.number, layer.accumulation], layer_of(params.router_bias, layer.number)
        experts, ids_M = params.of_chosen()
        losses = lambda stats: scaled(self._auxiliary(counts_E, stats), inputs.loss_scale)  # noqa: E731

        def pull(params: Any, experts: ExpertStacks, x_BSD: jax.Array, dy_BSD: jax.Array, kept: Any) -> Any:
            routed, of_route, of_experts = kept
            args = (params, experts, routed, ids_M)
            dparams, dexperts, drouted = apply_vjp(of_experts, args, dy_BSD)
            drouted = drouted._replace(stats=jax.grad(losses, allow_int=True)(routed.stats))
            dparams_before, dx_BSD = apply_vjp(of_route, (params, bias, layer, x_BSD), drouted)
            return jax.tree.map(jnp.add, dparams_before, dparams), dexperts, dx_BSD

        def run(idx: jax.Array, params: Any, experts: ExpertStacks, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
            route = partial(self._run_route, train=True, full_capacity=full_capacity, topk_idx_TK=idx)
            routed = route(params, bias, layer, x_BSD)
            return self._run_experts(params, experts, routed, ids_M), losses(routed.stats)

        def again(params: Any, experts: ExpertStacks, x_BSD: jax.Array, dy_BSD: jax.Array, idx: jax.Array) -> Any:
            _, pull = jax.vjp(partial(run, idx), params, experts, x_BSD)
            return pull((dy_BSD, jnp.ones((), jnp.float32)))

        function, rest = (again, inputs.topk_idx_TK) if inputs.kept is None else (pull, inputs.kept)
        args = self._unsharded(params, layer), experts, inputs.x_BSD, inputs.dy_BSD, rest
        (dparams, dexperts, dx_BSD), overlapped = self._overlap(function, args, inputs.dy_BSD, work)
        sums = self._accumulate(params, layer, sums, dparams, dexperts)
        if not last or self._replicas > 1:
            return dx_BSD, sums, overlapped, None
        assert sums.experts is not None
        stored, square = self._to_keep(sums.experts, sums.ids_M)
        return dx_BSD, sums._replace(experts=stored), overlapped, square

    def _auxiliary(self, counts_E: jax.Array, stats: MoEStats) -> jax.Array:
        """Return this device's part of a layer's balance and z losses; counts_E: of all devices."""
        balance, z = auxiliary_losses(self.config, stats.probs_sum_E[0], stats.z_sum[0], counts_E)
        return balance + z

    def _dense_gradients(
        self, params: LayerParams, layer: LayerIndex, inputs: ForBackward, sums: GradAccumulator, work: NeighborWork
    ) -> tuple[jax.Array, GradAccumulator, Overlapped]:
        def pull(params: Any, layer: LayerIndex, x_BSD: jax.Array, dy_BSD: jax.Array, kept: Any) -> Any:
            return apply_vjp(kept, (params, layer, x_BSD), dy_BSD)

        def again(params: Any, layer: LayerIndex, x_BSD: jax.Array, dy_BSD: jax.Array, _: None) -> Any:
            return jax.vjp(lambda params, x: self._run_dense(params, layer, x), params, x_BSD)[1](dy_BSD)

        args = self._unsharded(params, layer), layer, inputs.x_BSD, inputs.dy_BSD, inputs.kept
        function = again if inputs.kept is None else pull
        (dparams, dx_BSD), overlapped = self._overlap(function, args, inputs.dy_BSD, work)
        return dx_BSD, self._accumulate(params, layer, sums, dparams), overlapped

    def _embed_gradients(self, outside: Any, tokens_BS: jax.Array, dx_BSD: jax.Array, grads: Any) -> Any:
        _, pull = jax.vjp(lambda outside: self._embed(outside, tokens_BS), outside)
        return self._add_outside(grads, pull(dx_BSD)[0])

    # The end of a step

    def _finish(self, state: TrainState, step: StepResults) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return (the dense state after its update, the step's metrics)."""
        metrics = over_devices(self.mesh.size, self._metrics(step))
        metrics |= {"counts": step.counts_NAE.sum(axis=1, dtype=jnp.int32), "dropped": step.dropped_N}
        reduced = streamed_on_shards_local(self._model, state.params, step.grads)
        squares = squared_norms_local(reduced, self._model)
        of_experts = jnp.stack([square.sum() for square in step.expert_squares]) / self._replicas  # which all have it
        squares["moe_layers"] = squares["moe_layers"] + of_experts
        squares = over_devices(self.mesh.size, squares)
        return finish_step(self.config, state, reduced, squares, metrics, jnp.bool_(False))

    def _metrics(self, step: StepResults) -> dict[str, jax.Array]:
        """Return this device's part of the step's losses and of its routers' entropies."""
        config, zero = self.config, jnp.zeros((), jnp.float32)
        total_tokens = tokens_per_accumulation_step(config) * config.gradient_accumulation_steps
        parts = [
            auxiliary_losses(config, s.probs_sum_E[0], s.z_sum[0], step.counts_NAE[n, a])
            for n, layer in enumerate(step.stats)
            for a, s in enumerate(layer)
        ]
        return {
            "loss": sum((loss[0] for loss in step.losses), zero),
            "balance_loss": sum((balance for balance, _ in parts), zero),
            "z_loss": sum((z for _, z in parts), zero),
            "entropy": jnp.stack([sum(s.entropy_sum[0] for s in layer) for layer in step.stats]) / total_tokens,
        }
