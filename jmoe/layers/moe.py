"""One Mixture-of-Experts layer: route, dispatch (all-to-all), experts, combine (all-to-all back).

`MoELayer` is the public layer. `models/block.py` calls its phases one by one (`route`, `dispatch`,
`apply_experts`), so that a runner can place other work between them.

Legend: T local tokens, D hidden, F expert hidden, E experts, L experts of this device, K choices
per token, M rows that arrived for this device's experts.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.tree_util import KeyPath

from jmoe.collectives.exchange import (
    ArrivedRows,
    DispatchedTokens,
    Exchange,
    OneDeviceExchange,
    TokenChoices,
)
from jmoe.collectives.planned_exchange import make_exchange
from jmoe.collectives.ragged_rounds import RoundsExchange, RunExperts
from jmoe.config import MoEConfig, RouterConfig, check
from jmoe.config.parallel import ExchangeChoice
from jmoe.layers.experts import Experts
from jmoe.layers.router import LossTokens, Router, Routing, balance_loss_local, weigh_inputs
from jmoe.mesh import (
    EXPERTS_PATH,
    find_explicit_mesh,
    path_names,
    shard_array,
    split_over,
    under_auto_axes,
    with_auto_axes,
)
from jmoe.planning.exchange import ExchangeLoad, ExchangePlan, plan_exchange
from jmoe.types import PyTree
from kernels_pallas.saved import mark_saved_residual

ExpertFn = Callable[[jax.Array, jax.Array, int], jax.Array]
AnyExchange = Exchange | RoundsExchange


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """Routing statistics of one layer on this device. Summed over devices they are the global
    values.
    """

    counts_E: jax.Array  # int32, (token, expert) assignments per expert
    # float32, router probability per expert, summed over tokens; differentiable
    probs_sum_E: jax.Array
    z_sum: jax.Array  # float32, logsumexp squared, summed over tokens; differentiable
    entropy_sum: jax.Array  # float32
    # int32, assignments of any device for which this device's buffers had no free row
    dropped: jax.Array
    # logits, choices and weights of every token; only with keep_routing
    routing: Routing | None = None
    # the tokens that the sums count, if not all that go to experts
    loss_tokens: LossTokens | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEMetrics:
    """Global metrics of one layer. Add `balance_loss` and `z_loss`, which include their
    coefficients, to your loss.
    """

    load_E: jax.Array  # fraction of all assignments, per expert
    entropy: jax.Array  # mean entropy of the router's distribution, nats
    dropped_fraction: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array


def dispatch_local(
    x_TD: jax.Array,
    routing: Routing,
    exchange: AnyExchange,
    *,
    full_capacity: bool = False,
    num_chunks: int = 1,
) -> DispatchedTokens:
    """Send each token's row to the devices of its experts, in `num_chunks` chunks, and return the
    rows that arrived here.

    Runs inside `shard_map`. The arguments are those of `moe`; `combine_local` takes the result.
    """
    chosen = TokenChoices.from_topk(
        routing.topk_idx_TK, routing.topk_weights_TK, routing.counts_E.shape[0]
    )
    return exchange.dispatch(x_TD, chosen, full_capacity, num_chunks)


def _run_experts(expert_fn: ExpertFn, arrived: ArrivedRows) -> jax.Array:
    """Return the experts' outputs for the arrived rows, times the rows' weights if they have any.

    `Experts` may gather rows inside its kernel, so it gets the row map; a user's experts get
    gathered rows. Raises ValueError if a user's experts return rows of another shape.
    """
    with jax.named_scope("experts"):
        if isinstance(expert_fn, Experts):
            return expert_fn(
                arrived.rows_or_tokens,
                arrived.group_sizes_L,
                arrived.expected_rows,
                arrived.rows,
                arrived.weights_M,
            )
        rows_MD = arrived.rows_MD
        y_MD = expert_fn(rows_MD, arrived.group_sizes_L, arrived.expected_rows)
        check(
            y_MD.shape == rows_MD.shape,
            "experts: rows.shape",
            y_MD.shape,
            f"must be {rows_MD.shape}, that of the rows given",
        )
        if arrived.weights_M is None:
            return y_MD
        return (y_MD.astype(jnp.float32) * arrived.weights_M[:, None]).astype(y_MD.dtype)


def _experts_as_function(expert_fn: ExpertFn) -> tuple[RunExperts, list[jax.Array], PyTree]:
    """Return (a function of (parameters, other arrays, arrived rows) that runs the experts, their
    float parameters, their other arrays).
    """
    name = getattr(expert_fn, "__name__", type(expert_fn).__name__)
    module = isinstance(expert_fn, nnx.Module)
    check(module, "experts", name, "must be an nnx.Module for a ragged exchange")
    graph, state = nnx.split(expert_fn)
    leaves, tree = jax.tree.flatten(state)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    params = [x for x, kept in zip(leaves, is_float, strict=True) if kept]
    others = [x for x, kept in zip(leaves, is_float, strict=True) if not kept]

    def run_experts(params: PyTree, others: PyTree, arrived: ArrivedRows) -> jax.Array:
        floats, rest = iter(params), iter(others)
        leaves = [next(floats) if kept else next(rest) for kept in is_float]
        experts: Any = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return _run_experts(experts, arrived)

    return run_experts, params, others


def combine_local(
    dispatched: DispatchedTokens, expert_fn: ExpertFn, exchange: AnyExchange
) -> jax.Array:
    """Return float32 y_TD: run the experts on the arrived rows, send the outputs back and sum them
    by weight.

    The arguments are those of `moe`. Raises ValueError if a ragged exchange gets experts that are
    no `nnx.Module`, whose parameters it could not see.
    """
    if isinstance(exchange, RoundsExchange):
        return exchange.run_experts(dispatched.handle, *_experts_as_function(expert_fn))
    return exchange.combine(
        [_run_experts(expert_fn, arrived) for arrived in dispatched.chunks], dispatched.handle
    )


def moe_stats(
    routing: Routing, dispatched: DispatchedTokens, *, keep_routing: bool = False
) -> MoEStats:
    """Return this device's `MoEStats`. keep_routing: include the whole `Routing`."""
    kept = routing if keep_routing else None
    sums = routing.counts_E, routing.probs_sum_E, routing.z_sum, routing.entropy_sum
    return MoEStats(*sums, dispatched.dropped, kept, routing.loss_tokens)


def moe(
    x_TD: jax.Array,
    routing: Routing,
    expert_fn: ExpertFn,
    exchange: AnyExchange,
    *,
    full_capacity: bool = False,
    num_chunks: int = 1,
) -> tuple[jax.Array, DispatchedTokens]:
    """Return (float32 y_TD, the weighted sum of each token's expert outputs; the
    `DispatchedTokens`), inside `shard_map`.

    expert_fn: (rows sorted by local expert, group_sizes_L, expected rows) -> rows. full_capacity:
    size the buffers for the worst case, so that no assignment is dropped. num_chunks: exchange the
    rows in this many chunks, which share the buffers' capacity; the experts start on the first
    chunk while the next is in flight.
    """
    dispatched = dispatch_local(
        x_TD, routing, exchange, full_capacity=full_capacity, num_chunks=num_chunks
    )
    return combine_local(dispatched, expert_fn, exchange), dispatched


@dataclass(frozen=True)
class ExpertParallel:
    """The mesh axes over which a layer's experts and tokens are split, and the exchange that takes
    tokens to experts.

    mesh: the mesh of your `jit`; its axes have type Auto or Explicit.

    expert_axes: axes that split the experts (and tokens): one axis, or two as (across nodes, within
    a node).

    data_axes: further axes that split tokens only.

    exchange: `flat`; `ragged`, which sends no padding and drops nothing; or over two expert axes
    also `hierarchical` or `dedup`, which sends a token to a node once however many of its experts
    are there. `auto` chooses among those that pad by topology and top-k.

    num_chunks: exchange rows in this many chunks, so that the experts start on the first while the
    next is in flight.

    load: the layer's traffic and the speed of its links, used by `auto`.
    """

    mesh: Mesh
    expert_axes: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    exchange: ExchangeChoice = "auto"
    num_chunks: int = 1
    load: ExchangeLoad | None = None

    def __post_init__(self) -> None:
        for name in ("expert_axes", "data_axes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for axis in getattr(self, name):
                check(
                    axis in self.mesh.shape,
                    name,
                    axis,
                    f"is not an axis of {tuple(self.mesh.shape)}",
                )
        check(self.num_chunks > 0, "num_chunks", self.num_chunks, "must be greater than 0")
        whole = self.exchange != "ragged" or self.num_chunks == 1
        check(whole, "num_chunks", self.num_chunks, "must be 1 with exchange = 'ragged'")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split tokens: data axes, then expert axes."""
        return self.data_axes + self.expert_axes

    def plan(self, config: MoEConfig) -> ExchangePlan:
        """Return the exchange for a layer of this configuration, with the reason for the choice.

        Raises ValueError if the devices of `expert_axes` do not divide `num_experts`.
        """
        sizes = tuple(self.mesh.shape[axis] for axis in self.expert_axes)
        devices = math.prod(sizes)
        many = f"must be a multiple of {devices} devices"
        check(config.num_experts % devices == 0, "num_experts", config.num_experts, many)
        num_nodes, devices_per_node = (sizes[0], sizes[1]) if len(sizes) == 2 else (1, devices)
        return plan_exchange(
            self.exchange,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            n_group=config.router.n_group,
            topk_group=config.router.topk_group,
            load=self.load,
        )


class MoELayer(nnx.Module):
    """A Mixture-of-Experts feed-forward layer: `y, metrics = layer(x)`.

    y[t] = sum_k weight[t, k] * expert_{idx[t, k]}(x[t]).

    Args:
        config: sizes, activation, capacity, and how tokens choose experts.
        parallel: the mesh axes of experts and tokens; None for one device.
            `layer.exchange_plan.reason` explains the choice of the exchange.
        router: a callable (x_TD, key=, train=) -> `Routing` that replaces the router of
            `config.router`. To support `token_mask` (and token counts that the devices do not
            divide) it also takes token_mask_T= and leaves masked tokens out of every sum of
            `Routing`.
        experts: a module called as experts(rows, group_sizes, expected_rows) -> rows that replaces
            the MLPs of `config`. Its parameters have a leading expert dimension.

    The layer places its parameters as `parallel` says and records the placement:
    `nnx.get_partition_spec` splits expert parameters over `expert_axes`, so that an initialisation
    under `jit` or a restored checkpoint puts each expert on its device.

    The layer works under `jit`, `scan`, `remat` and `grad`; inside your own `shard_map` call
    `layer.local(x_TD)`. Over several devices a call outside `jit` is compiled too, so a custom
    router or custom experts must be pure functions.

    Source: GShard (arXiv 2006.16668), Switch (arXiv 2101.03961), SE-MoE (arXiv 2205.10034).
    """

    def __init__(
        self,
        config: MoEConfig,
        parallel: ExpertParallel | None = None,
        *,
        router: Callable[..., Routing] | None = None,
        experts: Callable[..., jax.Array] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        e, d, k = config.num_experts, config.hidden_size, config.num_experts_per_tok
        self.config, self.parallel = config, parallel
        self.router = Router(d, e, k, config.router, rngs=rngs) if router is None else router
        mlp: dict[str, Any] = {"activation": config.hidden_act, "bias": config.bias}
        mlp |= {
            "init_std": config.initializer_range,
            "init_out_std": config.output_initializer_range,
        }
        self.experts = (
            Experts(e, d, config.intermediate_size, **mlp, rngs=rngs)
            if experts is None
            else experts
        )
        one_device = ExchangePlan("flat", "all experts are on one device", 1, 1, 1.0)
        self.exchange_plan = one_device if parallel is None else parallel.plan(config)
        expert_axes = () if parallel is None else parallel.expert_axes
        self.num_chunks = 1 if parallel is None else parallel.num_chunks
        complete = config.router.second_expert_policy == "all"
        self.exchange = make_exchange(
            self.exchange_plan,
            expert_axes,
            config.capacity_factor,
            complete=complete,
            experts_weigh=isinstance(self.experts, Experts),
        )
        if parallel is not None:
            self._place_parameters(parallel)

    def _place_parameters(self, parallel: ExpertParallel) -> None:
        """Split expert parameters over the expert axes, replicate all others, and record both in
        the parameters' metadata for Flax.

        A parameter of a user's module that already has `out_sharding` metadata is left unchanged.
        Raises ValueError if a parameter of the experts has no leading expert dimension.
        """
        for path, variable in nnx.iter_graph(self):
            if not isinstance(variable, nnx.Variable):
                continue
            value = variable.get_value()
            of_experts = path[0] == EXPERTS_PATH and bool(parallel.expert_axes)
            if of_experts:
                name, shape = ".".join(map(str, path)), getattr(value, "shape", ())
                many = f"must begin with num_experts = {self.config.num_experts}, which"
                split = f"{many} {parallel.expert_axes} split over devices"
                check(shape[:1] == (self.config.num_experts,), f"{name}.shape", shape, split)
            if variable.get_metadata().get("out_sharding"):
                continue
            axes: list[str | tuple[str, ...] | None] = [None] * getattr(value, "ndim", 0)
            if of_experts:
                axes[0] = (
                    parallel.expert_axes
                    if len(parallel.expert_axes) > 1
                    else parallel.expert_axes[0]
                )
            variable.set_metadata(out_sharding=tuple(axes), mesh=parallel.mesh)
            if isinstance(value, jax.Array):
                variable.set_value(shard_array(value, parallel.mesh, axes))

    def route(
        self,
        x_TD: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        topk_idx_TK: jax.Array | None = None,
        topk_weights_TK: jax.Array | None = None,
        token_mask_T: jax.Array | None = None,
        loss_mask_T: jax.Array | None = None,
    ) -> Routing:
        """Return the `Routing` of the local tokens.

        key: randomness of jitter and of the second expert's draw. topk_idx_TK: use these choices,
        made earlier from the same x, instead of choosing again. topk_weights_TK: their weights, for
        a layer routed by task. token_mask_T: False for tokens that go to no expert. loss_mask_T:
        True for tokens that the losses count; None for all of `token_mask_T`. Raises ValueError if
        a custom router lacks an argument or returns wrong shapes.
        """
        self._check_router_arguments(masked=token_mask_T is not None)
        made = {
            "topk_idx_TK": topk_idx_TK,
            "topk_weights_TK": topk_weights_TK,
            "token_mask_T": token_mask_T,
            "loss_mask_T": loss_mask_T,
        }
        choices = {name: array for name, array in made.items() if array is not None}
        with jax.named_scope("router"):
            routing = self.router(x_TD, key=key, train=train, **choices)
            self._check_routing(routing, x_TD.shape[0])
            topk_idx_TK = routing.topk_idx_TK
            if token_mask_T is not None:
                topk_idx_TK = jnp.where(token_mask_T[:, None], topk_idx_TK, self.config.num_experts)
            return replace(routing, topk_idx_TK=mark_saved_residual(topk_idx_TK, "routing"))

    def dispatch(
        self, x_TD: jax.Array, routing: Routing, *, full_capacity: bool = False
    ) -> DispatchedTokens:
        """Send each token's row to the devices of its experts, in `num_chunks` chunks, and return
        the rows that arrived here.

        Runs inside `shard_map`. full_capacity: size the buffers for the worst case, so that no
        assignment is dropped.
        """
        masked = routing.loss_tokens is not None
        x_TD, routing = weigh_inputs(x_TD, routing, self.config.router)
        return dispatch_local(
            x_TD,
            routing,
            self._exchange_for(masked=masked),
            full_capacity=full_capacity,
            num_chunks=self.num_chunks,
        )

    def _exchange_for(self, *, masked: bool) -> AnyExchange:
        """Return the layer's exchange; on one device and `masked` (some tokens go to no expert) one
        that takes choices without an expert.
        """
        if masked and isinstance(self.exchange, OneDeviceExchange):
            return replace(self.exchange, complete=False)
        return self.exchange

    def apply_experts(self, dispatched: DispatchedTokens) -> jax.Array:
        """Return float32 y_TD: run the experts on dispatched rows, send the outputs back and sum
        them by weight.
        """
        return combine_local(dispatched, self.experts, self.exchange)

    def local(
        self,
        x_TD: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        full_capacity: bool = False,
        keep_routing: bool = False,
        token_mask_T: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """Return (float32 y_TD, `MoEStats`) for this device's tokens, inside `shard_map`.

        `layer.experts` must hold this device's L experts. full_capacity: size the buffers for the
        worst case, so that no assignment is dropped. keep_routing: include the whole `Routing` in
        the statistics. token_mask_T: False for tokens that go to no expert; their y is 0.
        """
        if x_TD.shape[0] == 0:
            return jnp.zeros(x_TD.shape, jnp.float32), self._empty_stats(keep_routing)
        if token_mask_T is not None:
            # a NaN in a masked token would reach the router's gradient, as 0 * NaN
            x_TD = jnp.where(token_mask_T[:, None], x_TD, jnp.zeros((), x_TD.dtype))
        routing = self.route(x_TD, key=key, train=train, token_mask_T=token_mask_T)
        y_TD, dispatched = moe(
            *weigh_inputs(x_TD, routing, self.config.router),
            self.experts,
            self._exchange_for(masked=token_mask_T is not None),
            full_capacity=full_capacity,
            num_chunks=self.num_chunks,
        )
        return y_TD, moe_stats(routing, dispatched, keep_routing=keep_routing)

    def _empty_stats(self, keep_routing: bool) -> MoEStats:
        """Return the statistics of a batch without tokens."""
        k, num_experts = self.config.num_experts_per_tok, self.config.num_experts
        counts_E = jnp.zeros(num_experts, jnp.int32)
        probs_sum_E = jnp.zeros(num_experts, jnp.float32)
        sums = counts_E, probs_sum_E, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
        routing = Routing(jnp.zeros((0, k), jnp.int32), jnp.zeros((0, k), jnp.float32), *sums)
        return MoEStats(*sums, jnp.zeros((), jnp.int32), routing if keep_routing else None)

    def _check_router_arguments(self, masked: bool) -> None:
        """Raise ValueError if a custom router lacks an argument that the layer gives it."""
        parameters = inspect.signature(self.router).parameters
        if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            return
        name = getattr(self.router, "__name__", type(self.router).__name__)
        takes = "must take key= and train=: it is called as router(x_TD, key=key, train=train)"
        check({"key", "train"} <= parameters.keys(), "router", name, takes)
        why = (
            "tokens are left out: those of token_mask, or those that make up a multiple of the"
            " devices"
        )
        takes = f"must take token_mask_T=, bool, since {why}"
        check(not masked or "token_mask_T" in parameters, "router", name, takes)

    def _check_routing(self, routing: Routing, num_tokens: int) -> None:
        """Raise ValueError if a router's result does not have the shapes of this layer, or its
        choices are no integers.
        """
        config, kind = self.config, type(routing).__name__
        check(isinstance(routing, Routing), "router", kind, "must return a jmoe.Routing")
        experts, choices = (config.num_experts,), (num_tokens, config.num_experts_per_tok)
        shapes = {
            "topk_idx_TK": choices,
            "topk_weights_TK": choices,
            "counts_E": experts,
            "probs_sum_E": experts,
        }
        for name, shape in shapes.items():
            actual = getattr(getattr(routing, name), "shape", ())
            limit = (
                f"must be {shape} for num_experts_per_tok = {choices[1]} and num_experts ="
                f" {config.num_experts}"
            )
            check(actual == shape, f"router: {name}.shape", actual, limit)
        dtype = routing.topk_idx_TK.dtype
        limit = "must be an integer, as the second result of jax.lax.top_k is"
        check(jnp.issubdtype(dtype, jnp.integer), "router: topk_idx_TK.dtype", dtype.name, limit)
        for name in ("z_sum", "entropy_sum"):
            actual = jnp.shape(getattr(routing, name))
            check(actual == (), f"router: {name}.shape", actual, "must be (), a sum over tokens")

    def __call__(
        self,
        x: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Return (y [..., D] in x's dtype, global `MoEMetrics`) for x [..., D].

        Tokens are split over all axes of `parallel`; a number of tokens that the devices do not
        divide is padded with masked tokens.

        key: needed in training if `config.router` draws (jitter or a random second expert).
        token_mask: bool [...], False for tokens that go to no expert (padding). Such a token has y
        = 0, so that a residual connection passes it unchanged, and it takes no part in losses,
        counts or buffers. Raises ValueError if the shape or dtype of x or token_mask is wrong.
        """
        x, hidden_size = jnp.asarray(x), self.config.hidden_size
        check(
            x.shape[-1:] == (hidden_size,),
            "x.shape",
            x.shape,
            f"must end in hidden_size = {hidden_size}",
        )
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        check(is_float, "x.dtype", x.dtype.name, "must be a float: token ids need an embedding")
        if token_mask is not None:
            shape, dtype, tokens = token_mask.shape, token_mask.dtype, x.shape[:-1]
            check(
                shape == tokens,
                "token_mask.shape",
                shape,
                f"must be {tokens}, a value for each token of x",
            )
            check(
                dtype == jnp.bool_,
                "token_mask.dtype",
                dtype,
                "must be bool, as `attention_mask != 0` is",
            )
        graph, state = nnx.split(self)
        mesh = find_explicit_mesh(state, x)
        if mesh is None and not self._token_axes:
            return _apply_on_one_device(self, train, x, key, token_mask)
        run = _compile_layer(graph, train)
        run = run if mesh is None else under_auto_axes(run, mesh)
        return run(state, x, key, token_mask)

    @property
    def _token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens; () on one device."""
        return () if self.parallel is None else self.parallel.axes


def _compile_layer(*fixed: Any) -> Callable[..., tuple[jax.Array, MoEMetrics]]:
    """Return `_merge_and_apply` compiled, with its leading arguments (graph, train) bound to
    `fixed`.

    Without `jit`, `shard_map` would compile each of its operations in every call. A graph that is
    not hashable, because a user's module has lists or dicts, which may change, is compiled again in
    every call.
    """
    try:
        hash(fixed)
    except TypeError:
        return jax.jit(partial(_merge_and_apply, *fixed))
    return partial(_apply_compiled, *fixed)


def _merge_and_apply(
    graph: nnx.GraphDef[MoELayer],
    train: bool,
    state: nnx.State,
    x: jax.Array,
    key: jax.Array | None,
    token_mask: jax.Array | None,
) -> tuple[jax.Array, MoEMetrics]:
    """Return the layer's result for x, where `graph` and `state` together are the layer."""
    layer = nnx.merge(graph, state)
    if layer._token_axes:
        return _apply_over_devices(layer, train, x, key, token_mask)
    return _apply_on_one_device(layer, train, x, key, token_mask)


def _apply_on_one_device(
    layer: MoELayer, train: bool, x: jax.Array, key: jax.Array | None, token_mask: jax.Array | None
) -> tuple[jax.Array, MoEMetrics]:
    """Return (y [..., D], metrics) for x [..., D], all of whose tokens are on this device."""
    x_TD, token_mask_T, num_tokens = _flatten_tokens(x, token_mask)
    y_TD, stats = layer.local(x_TD, key=key, train=train, token_mask_T=token_mask_T)
    metrics = moe_metrics(stats, layer.config.router, num_tokens, layer.config.num_experts_per_tok)
    return y_TD.astype(x.dtype).reshape(x.shape), metrics


def _apply_over_devices(
    layer: MoELayer, train: bool, x: jax.Array, key: jax.Array | None, token_mask: jax.Array | None
) -> tuple[jax.Array, MoEMetrics]:
    """Return (y [..., D], metrics) for x [..., D], whose tokens are split over the layer's mesh
    axes.

    A number of tokens that the devices do not divide is padded with masked tokens.
    """
    axes, config, (graph, state) = layer._token_axes, layer.config, nnx.split(layer)
    assert layer.parallel is not None
    x_TD, token_mask_T, num_tokens = _flatten_tokens(x, token_mask)
    tokens = x_TD.shape[0]
    if padding := -tokens % math.prod(layer.parallel.mesh.shape[axis] for axis in axes):
        token_mask_T = jnp.ones(tokens, jnp.bool_) if token_mask_T is None else token_mask_T
        x_TD = jnp.pad(x_TD, ((0, padding), (0, 0)))
        token_mask_T = jnp.pad(token_mask_T, (0, padding))
    expert_axes = layer.parallel.expert_axes

    def parameter_spec(path: KeyPath, _: jax.Array) -> jax.sharding.PartitionSpec:
        return split_over(expert_axes if path_names(path)[0] == EXPERTS_PATH else ())

    def apply_local(
        state: PyTree, key: jax.Array | None, num_tokens: jax.Array, *rows: Any
    ) -> tuple[jax.Array, MoEMetrics]:
        if key is not None:
            key = jax.random.fold_in(key, lax.axis_index(axes))
        x_TD, token_mask_T = rows
        # a trainer would rerun an overflowing step with full capacity; a layer alone cannot
        full_capacity = config.capacity_factor is None
        options = {
            "key": key,
            "train": train,
            "full_capacity": full_capacity,
            "token_mask_T": token_mask_T,
        }
        y_TD, stats = nnx.merge(graph, state).local(x_TD, **options)
        metrics = moe_metrics(stats, config.router, num_tokens, config.num_experts_per_tok, axes)
        return y_TD.astype(x_TD.dtype), metrics

    whole, split = split_over(()), split_over(axes)
    sharded = jax.shard_map(
        apply_local,
        mesh=with_auto_axes(layer.parallel.mesh),
        in_specs=(
            jax.tree_util.tree_map_with_path(parameter_spec, state),
            whole,
            whole,
            split,
            split,
        ),
        out_specs=(split, whole),
        check_vma=False,
    )
    y_TD, metrics = sharded(state, key, num_tokens, x_TD, token_mask_T)
    return y_TD[:tokens].reshape(x.shape), metrics


def _flatten_tokens(
    x: jax.Array, token_mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return (x_TD, token_mask_T or None without a mask, number of unmasked tokens)."""
    x_TD = x.reshape(-1, x.shape[-1])
    if token_mask is None:
        return x_TD, None, jnp.asarray(x_TD.shape[0], jnp.int32)
    return x_TD, token_mask.reshape(-1), token_mask.sum(dtype=jnp.int32)


_apply_compiled = jax.jit(_merge_and_apply, static_argnums=(0, 1))


def moe_metrics(
    stats: MoEStats,
    config: RouterConfig,
    num_tokens: int | jax.Array,
    k: int,
    axes: tuple[str, ...] = (),
) -> MoEMetrics:
    """Return global metrics from one layer's local statistics, summed over the devices of `axes`.

    num_tokens: unmasked tokens of all devices; without any, all metrics are 0.
    """
    total = lambda v: lax.psum(v, axes) if axes else v  # noqa: E731
    counts_E, dropped = total((stats.counts_E, stats.dropped))
    num_experts = counts_E.shape[-1]
    tokens = jnp.maximum(jnp.asarray(num_tokens, jnp.float32), 1.0)
    assignments = jnp.maximum(counts_E.sum(dtype=jnp.int32), 1).astype(jnp.float32)
    balance = balance_loss_local(stats.probs_sum_E, counts_E, tokens, num_experts, k)
    return MoEMetrics(
        load_E=counts_E.astype(jnp.float32) / assignments,
        entropy=total(stats.entropy_sum) / tokens,
        dropped_fraction=dropped.astype(jnp.float32) / assignments,
        balance_loss=config.aux_loss_coef * total(balance),
        z_loss=config.z_loss_coef * total(stats.z_sum) / tokens,
    )
