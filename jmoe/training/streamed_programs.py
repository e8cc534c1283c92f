"""A training step in parts, compiled each for itself, for a host that runs layer by layer.

Legend: A accumulation steps, B batch, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, L experts of a
device, K choices a token, N layers of a kind, R devices, C elements of a device's part of a layer's flat buffer, G the
same for gradients.

Every program serves all layers of its kind: it is given the stacked dense parameters and the layer's number. A layer
with experts is cut in two on its way forward, once its tokens are where their experts are: what has arrived says which
experts have to be there. Its backward pass is one program, which is handed what both parts have kept
(`training.vjp`), so that nothing is multiplied or sent twice. Where nothing is kept (`remat = layer`, buffers for
the worst case) it runs the layer again from its input, and keeps to the choices that were made.

On several devices a program is one `shard_map` over all of them. A layer's dense parameters come to it as one unsharded
buffer; beside its own work it gathers the buffer of the layer that runs next, and on the way back it sums the gradients
of the layer before it, as `collectives.schedule` places them. Arrays that differ between devices and have no dimension
of tokens or experts have a leading one of R. On one device all of that is empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.fusion import (
    all_gather_rows_local,
    pack,
    pack_gradients,
    reduce_scatter_rows_local,
    unpack,
)
from jmoe.collectives.schedule import interleave
from jmoe.config import LayerKind, TrainConfig
from jmoe.layers.moe import MoEStats, moe_stats
from jmoe.mesh import ACCUMULATED_BATCH, ALL, BATCH, EXPERTS_PATH, REPLICATED, split_over
from jmoe.models.block import Block, add_residual, causal
from jmoe.models.decoder import STACKS
from jmoe.models.functional import FunctionalModule
from jmoe.training.gradient_reduction import (
    Gradients,
    finish_local,
    kind_of_layers,
    kind_of_outside,
    without_stacks,
)
from jmoe.training.layer_values import Experts, GradAccumulator, Layer, NextLayer, Overlapped, Routed
from jmoe.training.reverse_scan import Kind
from jmoe.training.state import TrainState, without_experts
from jmoe.training.step import PureDecoder
from jmoe.training.update import auxiliary_losses, over_devices, router_key, tokens_per_accumulation_step
from jmoe.training.vjp import apply_vjp, vjp_with_residuals


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, 0, keepdims=False), tree)


def _zeros_of(tree: Any) -> Any:
    """float32, of one device."""
    return jax.tree.map(lambda w: jnp.zeros((1, *w.shape), jnp.float32), tree)


def _with_residuals_if(
    keeps: bool, function: Callable[..., Any], wanted: Sequence[int]
) -> Callable[..., tuple[Any, Any]]:
    """The function with what its backward pass keeps beside its result; None if that is nothing."""
    return lambda *args: vjp_with_residuals(function, args, wanted) if keeps else (function(*args), None)


class LayerPrograms:
    """The compiled functions of one run, by what they do.

    Parameters and moments are nested dictionaries named as in `TrainState`, without the experts; those come as
    [E, ...] arrays of one layer. `outside` is everything outside the layers, unsharded. Gradients are summed into
    what is given, which is donated.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._model = model = PureDecoder(config, mesh)
        self.dtype = model.dtype
        self._scan = model.reverse_scan()
        self._num_tokens = tokens_per_accumulation_step(config)
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
        specs, make = without_experts(self._model.specs), self._sharded
        one: Any = REPLICATED
        split: Any = BATCH
        outside = {
            name: specs[name] if name in self._model.embedding.split else jax.tree.map(lambda _: one, shapes)
            for name, shapes in without_stacks(self._model.shapes).items()
        }
        dense, sparse = (specs.get(name) for name in STACKS.values())
        state = TrainState(specs, specs, specs, one, one)
        rows: Any = split_over(ALL, 1)
        ahead, beside = NextLayer(rows, one), Overlapped(one, split)
        self.unstack = make(list, ACCUMULATED_BATCH, out=split)
        self.split = make(lambda tokens_BS: (tokens_BS[:, :-1], tokens_BS[:, 1:]), split, out=split)
        self.prepare = make(self._prepare, specs, out=(outside, rows, one), static="first")
        self.embed = make(self._embed, outside, split, out=split)
        keeps = "keeps"
        self.dense = make(self._dense_layer, dense, one, split, one, ahead, out=(split, split, beside), static=keeps)
        options = ("train", "full_capacity", keeps)
        routed = (split, split, one)
        self.route = make(self._route, sparse, one, split, one, one, ahead, out=routed, static=options)
        with_experts = (sparse, one, split, split, one, ahead, one)
        self.add_experts = make(self._add_experts, *with_experts, out=(split, split, beside), static=keeps)
        self.totals = make(self._totals, split, out=one)
        self.zeros = make(self._zeros, specs, outside, out=split)
        self.loss_gradients = make(self._loss_gradients, outside, split, split, split, out=split, donate=3)
        moe = (sparse, one, split, split, split, split, one, one, one, ahead, split, split, split)
        found = (split, split, beside)
        squared, static = (*found, split), ("full_capacity", "last")
        self.moe_gradients = make(self._moe_gradients, *moe, out=squared, static=static, donate=5)
        no_moe = (dense, one, split, split, split, one, ahead, split, split)
        self.dense_gradients = make(self._dense_gradients, *no_moe, out=found, donate=4)
        self.embed_gradients = make(self._embed_gradients, outside, split, split, split, out=split, donate=3)
        self.reduce = make(self._reduce, split, out=split)
        update = partial(finish_local, self.config, self._model)
        self.finish = make(update, state, split, split, split, split, one, out=(state, one), donate=0)
        self.nll = make(self._nll, outside, split, split, split, out=one)
        self.logits = make(self._logits, outside, split, one, out=one)

    def _sharded(
        self, function: Callable[..., Any], *specs: Any, out: Any, static: str | Sequence[str] = (), donate: Any = ()
    ) -> Callable[..., Any]:
        """The compiled function, over all devices. specs: of its arguments; static: options by name."""
        if self.mesh.size == 1:
            return jax.jit(function, static_argnames=static, donate_argnums=donate)

        def call(*args: Any, **options: Any) -> Any:
            given = tuple(REPLICATED if arg is None else spec for arg, spec in zip(args, specs, strict=True))
            body = partial(function, **options)
            return jax.shard_map(body, mesh=self.mesh, in_specs=given, out_specs=out, check_vma=False)(*args)

        return jax.jit(call, static_argnames=static, donate_argnums=donate)

    # What travels

    def _prepare(self, params: Any, *, first: LayerKind) -> tuple[Any, dict[LayerKind, jax.Array], jax.Array | None]:
        """(outside, every layer's part of its buffer by kind, the first layer's buffer). first: its kind."""
        outside, scan = without_stacks(params), self._scan
        if scan is None:
            return outside, {}, None
        flat = {}
        for kind, name in STACKS.items():
            if name in params:
                layers = kind_of_layers(self._model, params[name])
                rows = jax.vmap(partial(pack, parts=layers.parts), axis_size=layers.num_layers)
                flat[kind] = rows(layers.split(params[name])[0])
        layers = kind_of_outside(self._model, outside)
        shards, rest = layers.split(outside)
        if shards:
            rows_RC = all_gather_rows_local(pack(shards, layers.parts), scan.hierarchy)
            outside = layers.join(unpack(rows_RC, layers.parts, scan.hierarchy), rest)
        row_C = flat[first][0]
        return outside, flat, scan.unsharded([gather(lambda row: row) for gather in scan.gathers(row_C)], row_C)

    def _params(self, stack: Any, unsharded_RC: jax.Array | None, layer: Layer) -> Any:
        """A layer's parameters."""
        layers = kind_of_layers(self._model, stack)
        fused = [] if unsharded_RC is None else unpack(unsharded_RC, layers.parts, self._model.hierarchy)
        return layers.join(fused, _at(layers.split(stack)[1], layer.number))

    def _beside(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        begin: jax.Array,
        ahead: NextLayer | None,
        pending_RG: jax.Array | None = None,
        begun: Sequence[jax.Array] = (),
    ) -> tuple[Any, Overlapped]:
        """A layer's own work and that for its neighbours. begin: known when the latter may begin.

        begun: of the layer ahead, the parts that are gathered already.
        """
        scan = self._scan
        if scan is None or (ahead is None and pending_RG is None):
            return function(*args), Overlapped(None, None)
        row_C = None if ahead is None else _at(ahead.flat_NC, ahead.number)
        gathers = scan.gathers(row_C)[len(begun) :]
        reductions = [] if pending_RG is None else scan.reductions(pending_RG)
        result, done = interleave(function, args, gathers + reductions, scan.schedule, ALL, begin)
        unsharded_RC = None if row_C is None else scan.unsharded([*begun, *done[: len(gathers)]], row_C)
        sum_G = None if pending_RG is None else jnp.concatenate([jnp.zeros(0), *done[len(gathers) :]])
        return result, Overlapped(unsharded_RC, sum_G)

    # Forward

    def _embed(self, outside: Any, tokens_BS: jax.Array) -> jax.Array:
        module, lookup = self._outside(self._model.cast(outside)), self._model.embedding.lookup
        x_BSD: jax.Array = module.embed(tokens_BS, self.dtype, lookup)
        return x_BSD

    def _dense_layer(
        self,
        stack: Any,
        unsharded_RC: jax.Array | None,
        x_BSD: jax.Array,
        layer: Layer,
        ahead: NextLayer | None,
        *,
        keeps: bool,
    ) -> tuple[jax.Array, Any, Overlapped]:
        """(the layer's output, what it keeps, what it did beside)."""
        run = _with_residuals_if(keeps, self._run_dense, wanted=(0, 2))
        params = self._params(stack, unsharded_RC, layer)
        (y_BSD, kept), beside = self._beside(run, (params, layer, x_BSD), x_BSD, ahead)
        return y_BSD, kept, beside

    def _run_dense(self, params: Any, layer: Layer, x_BSD: jax.Array) -> jax.Array:
        assert self._dense is not None
        block: Block = self._dense(self._model.cast(params))
        x_BSD = block.attend(x_BSD, causal(layer.window), self.dtype)
        return add_residual(x_BSD, block.feed_forward(x_BSD, self.dtype))

    def _route(
        self,
        stack: Any,
        unsharded_RC: jax.Array | None,
        x_BSD: jax.Array,
        layer: Layer,
        bias: Any,
        ahead: NextLayer | None,
        *,
        train: bool,
        full_capacity: bool,
        keeps: bool,
    ) -> tuple[Routed, Any, list[jax.Array]]:
        """(a layer until its tokens are where their experts are, what it keeps, parts gathered of the layer ahead).

        The parts are some of the buffer's columns, [R, ...] each: as many as attention multiplies of the layer.
        """
        run = _with_residuals_if(
            keeps, partial(self._run_route, train=train, full_capacity=full_capacity), wanted=(0, 3)
        )
        args = self._params(stack, unsharded_RC, layer), _at(bias, layer.number), layer, x_BSD
        if self._scan is None or ahead is None:
            return *run(*args), []
        row_C, model = _at(ahead.flat_NC, ahead.number), self.config.model
        gathers, dense = self._scan.gathers(row_C), row_C.size * self.mesh.size
        early = len(gathers) * dense // (dense + model.num_experts_per_tok * model.expert_parameters)
        found, begun = interleave(run, args, gathers[:early], self._scan.schedule, ALL, x_BSD)
        return *found, begun

    def _run_route(
        self,
        params: Any,
        bias: Any,
        layer: Layer,
        x_BSD: jax.Array,
        *,
        train: bool,
        full_capacity: bool,
        topk_idx_TK: jax.Array | None = None,
    ) -> Routed:
        block: Block = self._moe(self._model.cast(params), bias)
        x_BSD = block.attend(x_BSD, causal(layer.window), self.dtype)
        key = self._key(layer, train)
        h_TD, routing = block.route(x_BSD, self.dtype, key=key, train=train, topk_idx_TK=topk_idx_TK)
        arrived = block.dispatch(h_TD, routing, full_capacity=full_capacity)
        sizes = [part.group_sizes_L for part in arrived]
        return Routed(
            x_BSD,
            h_TD,
            [replace(part, dropped=part.dropped[None]) for part in arrived],
            sum(sizes[1:], sizes[0]),
            routing.topk_idx_TK,
            jax.tree.map(lambda value: value[None], moe_stats(routing, arrived)),
        )

    def _key(self, layer: Layer, train: bool) -> jax.Array | None:
        """For the router's jitter, the same as the ordinary step's; None where there is none."""
        config = self.config
        if not train or not config.model.router.jitter_noise:
            return None
        assert layer.step is not None and layer.accumulation is not None
        device = lax.axis_index(ALL) if self.mesh.size > 1 else 0
        key = router_key(config, layer.step, device, layer.accumulation)
        return jax.random.split(key, config.model.num_moe_layers)[layer.number]

    def _add_experts(
        self,
        stack: Any,
        unsharded_RC: jax.Array | None,
        experts: Experts,
        routed: Routed,
        layer: Layer,
        ahead: NextLayer | None,
        begun: Sequence[jax.Array],
        *,
        keeps: bool,
    ) -> tuple[jax.Array, Any, Overlapped]:
        """(the layer's output, from the experts that its tokens chose; what it keeps; what it did beside).

        The other experts may be anything finite. begun: of `route`.
        """
        run = _with_residuals_if(keeps, self._run_experts, wanted=(0, 1, 2))
        args = self._params(stack, unsharded_RC, layer), experts, routed
        (y_BSD, kept), beside = self._beside(run, args, routed.x_BSD, ahead, begun=begun)
        return y_BSD, kept, beside

    def _run_experts(self, params: Any, experts: Experts, routed: Routed) -> jax.Array:
        bias = jax.tree.map(lambda b: jnp.zeros(b.shape[1:], b.dtype), self._moe.bias)  # it has done its work
        block: Block = self._moe(self._model.cast(params), bias)
        assert block.moe is not None
        block.moe.experts = self._experts(self._model.cast({EXPERTS_PATH: experts})[EXPERTS_PATH])
        return block.apply_experts(routed.x_BSD, routed.h_TD, routed.arrived)

    def _totals(self, stats: Sequence[Sequence[MoEStats]]) -> tuple[jax.Array, jax.Array]:
        """(assignments to each expert [N, A, E], assignments that found no row [N]) of all devices, from [N][A]."""
        counts_NAE = jnp.stack([jnp.stack([s.counts_E[0] for s in layer]) for layer in stats])
        dropped_N = jnp.stack([sum(s.dropped[0] for s in layer) for layer in stats])
        return over_devices(self.mesh.size, (counts_NAE, dropped_N))

    def _head(self, outside: Any, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the last norm's output [T, D], the head as `Embedding` makes it)."""
        module, embedding = self._outside(self._model.cast(outside)), self._model.embedding
        x_TD = module.norm(x_BSD, self.dtype).reshape(-1, x_BSD.shape[-1])
        head = None if module.head is None else module.head[...]
        return x_TD, embedding.head(module.embedding[...], head, self.dtype)

    def _nll_local(self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        head = self._head(outside, x_BSD)
        return self._model.embedding.cross_entropy(*head, labels_BS.reshape(-1), weights_BS.reshape(-1))

    def _nll(self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
        nll: jax.Array = over_devices(self.mesh.size, self._nll_local(outside, x_BSD, labels_BS, weights_BS))
        return nll

    def _logits(self, outside: Any, x_BSD: jax.Array, position: jax.Array) -> jax.Array:
        """float32 [V]: after the token at `position` of the first sequence."""
        x_TD, head = self._head(outside, x_BSD[:1])
        last_D = lax.dynamic_index_in_dim(x_TD, position, 0, keepdims=False).astype(jnp.float32)
        if self.mesh.size > 1:
            last_D = lax.psum(jnp.where(lax.axis_index(ALL) == 0, last_D, 0), ALL)
        return self._model.embedding.logits(last_D, head)

    # Backward

    def _zeros(self, params: Any, outside: Any) -> Gradients:
        stacks = {kind: params[name] for kind, name in STACKS.items() if name in params}
        rest = {kind: _zeros_of(kind_of_layers(self._model, stack).split(stack)[1]) for kind, stack in stacks.items()}
        return Gradients(_zeros_of(outside), rest, {kind: [] for kind in stacks})

    def _loss_gradients(
        self, outside: Any, x_BSD: jax.Array, labels_BS: jax.Array, grads: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(this device's part of the loss, dx, summed gradients of what is outside the layers)."""
        scale = 1.0 / (self._num_tokens * self.config.gradient_accumulation_steps)
        weights_BS = jnp.full(labels_BS.shape, scale, jnp.float32)
        with jax.named_scope("loss"):
            loss, (doutside, dx_BSD) = jax.value_and_grad(self._nll_local, argnums=(0, 1))(
                outside, x_BSD, labels_BS, weights_BS
            )
        return loss[None], dx_BSD, self._added_outside(grads, doutside)

    def _added_outside(self, grads: Any, new: Any) -> Any:
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32)[None], grads, new)

    def _added(
        self, layers: Kind, layer: Layer, sums: GradAccumulator, dparams: Any, dexperts: Experts | None = None
    ) -> GradAccumulator:
        """A layer's sums with the gradients of one more accumulation step."""
        fused, rest = layers.split(dparams)
        rows_RG = sums.rows_RG
        if self._scan is not None:
            new_RG = pack_gradients(fused, layers.parts, self._scan.hierarchy)
            rows_RG = new_RG if rows_RG is None else rows_RG + new_RG
        if sums.experts is not None:
            dexperts = jax.tree.map(jnp.add, sums.experts, dexperts)
        totals = [total.at[0, layer.number].add(g) for total, g in zip(sums.rest, rest, strict=True)]
        return GradAccumulator(rows_RG, totals, dexperts)

    def _moe_gradients(
        self,
        stack: Any,
        unsharded_RC: jax.Array | None,
        experts: Experts,
        x_BSD: jax.Array,
        dy_BSD: jax.Array,
        sums: GradAccumulator,
        layer: Layer,
        bias: Any,
        counts_NAE: jax.Array,
        ahead: NextLayer | None,
        pending_RG: jax.Array | None,
        topk_idx_TK: jax.Array,
        kept: tuple[Routed, Any, Any] | None,
        *,
        full_capacity: bool,
        last: bool,
    ) -> tuple[jax.Array, GradAccumulator, Overlapped, jax.Array | None]:
        """(dx, summed gradients of the layer, what it did beside, this device's sum of squares of the experts').

        kept: what `route` found and kept, and what `add_experts` kept; None: the layer runs again from its input. last:
        no accumulation step follows, so the experts' gradients are as they are to be kept, and their square is known.
        """
        counts_E, bias = counts_NAE[layer.number, layer.accumulation], _at(bias, layer.number)
        losses = partial(self._auxiliary, counts_E)

        def pull(params: Any, experts: Experts, x_BSD: jax.Array, dy_BSD: jax.Array, kept: Any) -> Any:
            routed, of_route, of_experts = kept
            dparams, dexperts, drouted = apply_vjp(of_experts, (params, experts, routed), dy_BSD)
            drouted = drouted._replace(stats=jax.grad(losses, allow_int=True)(routed.stats))
            dparams_before, dx_BSD = apply_vjp(of_route, (params, bias, layer, x_BSD), drouted)
            return jax.tree.map(jnp.add, dparams_before, dparams), dexperts, dx_BSD

        def run(idx: jax.Array, params: Any, experts: Experts, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
            routed = self._run_route(
                params, bias, layer, x_BSD, full_capacity=full_capacity, train=True, topk_idx_TK=idx
            )
            return self._run_experts(params, experts, routed), losses(routed.stats)

        def again(params: Any, experts: Experts, x_BSD: jax.Array, dy_BSD: jax.Array, idx: jax.Array) -> Any:
            _, pull = jax.vjp(partial(run, idx), params, experts, x_BSD)
            return pull((dy_BSD, jnp.ones((), jnp.float32)))

        function, rest = (again, topk_idx_TK) if kept is None else (pull, kept)
        args = self._params(stack, unsharded_RC, layer), experts, x_BSD, dy_BSD, rest
        (dparams, dexperts, dx_BSD), beside = self._beside(function, args, dy_BSD, ahead, pending_RG)
        sums = self._added(kind_of_layers(self._model, stack), layer, sums, dparams, dexperts)
        if not last:
            return dx_BSD, sums, beside, None
        assert sums.experts is not None
        square = sum((jnp.square(g).sum() for g in sums.experts.values()), jnp.zeros((), jnp.float32))
        kept_as = {name: g.astype(self.config.tiers.gradient_dtype) for name, g in sums.experts.items()}
        return dx_BSD, sums._replace(experts=kept_as), beside, square[None]

    def _auxiliary(self, counts_E: jax.Array, stats: MoEStats) -> jax.Array:
        """This device's part of a layer's balance and z losses; counts_E: of all devices."""
        balance, z = auxiliary_losses(self.config, stats.probs_sum_E[0], stats.z_sum[0], counts_E)
        return balance + z

    def _dense_gradients(
        self,
        stack: Any,
        unsharded_RC: jax.Array | None,
        x_BSD: jax.Array,
        dy_BSD: jax.Array,
        sums: GradAccumulator,
        layer: Layer,
        ahead: NextLayer | None,
        pending_RG: jax.Array | None,
        kept: Any,
    ) -> tuple[jax.Array, GradAccumulator, Overlapped]:
        def pull(params: Any, layer: Layer, x_BSD: jax.Array, dy_BSD: jax.Array, kept: Any) -> Any:
            return apply_vjp(kept, (params, layer, x_BSD), dy_BSD)

        def again(params: Any, layer: Layer, x_BSD: jax.Array, dy_BSD: jax.Array, _: None) -> Any:
            return jax.vjp(lambda params, x: self._run_dense(params, layer, x), params, x_BSD)[1](dy_BSD)

        args = self._params(stack, unsharded_RC, layer), layer, x_BSD, dy_BSD, kept
        function = again if kept is None else pull
        (dparams, dx_BSD), beside = self._beside(function, args, dy_BSD, ahead, pending_RG)
        return dx_BSD, self._added(kind_of_layers(self._model, stack), layer, sums, dparams), beside

    def _embed_gradients(self, outside: Any, tokens_BS: jax.Array, dx_BSD: jax.Array, grads: Any) -> Any:
        _, pull = jax.vjp(lambda outside: self._embed(outside, tokens_BS), outside)
        return self._added_outside(grads, pull(dx_BSD)[0])

    def _reduce(self, rows_RG: jax.Array) -> jax.Array:
        return reduce_scatter_rows_local(rows_RG, self._model.hierarchy)
