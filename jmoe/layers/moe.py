"""One Mixture-of-Experts layer: route, dispatch, exchange, experts, exchange back, combine.

Legend: T local tokens, D hidden, F expert hidden, E experts, L experts of this device, K choices a token, M rows that
arrived for this device's experts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh

from jmoe.collectives.exchange import ArrivedRows, Choices, DispatchedTokens, Exchange, make_exchange
from jmoe.config import MoEConfig, RouterConfig, check
from jmoe.config.parallel import ExchangeChoice
from jmoe.layers.experts import Experts
from jmoe.layers.router import Router, Routing, balance_loss_local
from jmoe.mesh import EXPERTS_PATH, path_names, split_over
from jmoe.planning.exchange import ExchangeLoad, ExchangePlan, plan_exchange
from kernels_pallas.saved import saved_residual

ExpertFn = Callable[[jax.Array, jax.Array, int], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """A layer's statistics of its routing on this device; sums over devices give the global values."""

    counts_E: jax.Array  # int32, assignments per expert
    probs_sum_E: jax.Array  # float32, router probability per expert, summed over tokens; differentiable
    z_sum: jax.Array  # float32, logsumexp squared, summed over tokens; differentiable
    entropy_sum: jax.Array  # float32
    dropped: jax.Array  # int32, assignments (of any device) that found no row in this device's buffers
    routing: Routing | None = None  # every token's own logits, choices and weights, where they were asked for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEMetrics:
    """Global metrics of one layer. Add `balance_loss` and `z_loss` (already weighted) to your loss."""

    load_E: jax.Array  # share of the assignments per expert
    entropy: jax.Array  # mean entropy of the router's distribution, nats
    dropped_fraction: jax.Array
    balance_loss: jax.Array
    z_loss: jax.Array


def dispatch_local(
    x_TD: jax.Array, routing: Routing, exchange: Exchange, *, full_capacity: bool = False, num_chunks: int = 1
) -> DispatchedTokens:
    """Each token's rows where their experts are, inside `shard_map`, in `num_chunks` parts; see `moe`."""
    chosen = Choices.counted(routing.topk_idx_TK, routing.topk_weights_TK, routing.counts_E.shape[0])
    return exchange.dispatch(x_TD, chosen, full_capacity, num_chunks)


def _run_experts(expert_fn: ExpertFn, arrived: ArrivedRows) -> jax.Array:
    """Our own experts gather their rows themselves; a user's are given them."""
    with jax.named_scope("experts"):
        if isinstance(expert_fn, Experts):
            return expert_fn(arrived.x, arrived.group_sizes_L, arrived.expected_rows, arrived.rows)
        return expert_fn(arrived.rows_MD, arrived.group_sizes_L, arrived.expected_rows)


def combine_local(dispatched: DispatchedTokens, expert_fn: ExpertFn, exchange: Exchange) -> jax.Array:
    """float32 y_TD: the weighted sum of each token's experts, once its rows have arrived; see `moe`."""
    return exchange.combine([_run_experts(expert_fn, arrived) for arrived in dispatched.chunks], dispatched.handle)


def moe_stats(routing: Routing, dispatched: DispatchedTokens, *, keep_routing: bool = False) -> MoEStats:
    """Return what this device knows of its routing. keep_routing: every token's too."""
    kept = routing if keep_routing else None
    sums = routing.counts_E, routing.probs_sum_E, routing.z_sum, routing.entropy_sum
    return MoEStats(*sums, dispatched.dropped, kept)


def moe(
    x_TD: jax.Array,
    routing: Routing,
    expert_fn: ExpertFn,
    exchange: Exchange,
    *,
    full_capacity: bool = False,
    num_chunks: int = 1,
) -> tuple[jax.Array, DispatchedTokens]:
    """Return (float32 y_TD, the weighted sum of each token's experts; what was dispatched), inside `shard_map`.

    expert_fn(rows sorted by local expert, group_sizes_L, expected rows) -> rows. num_chunks: the rows go in so many
    parts, which share the buffers' capacity; experts begin when the first has come.
    """
    dispatched = dispatch_local(x_TD, routing, exchange, full_capacity=full_capacity, num_chunks=num_chunks)
    return combine_local(dispatched, expert_fn, exchange), dispatched


@dataclass(frozen=True)
class ExpertParallel:
    """Which axes of a mesh a layer's experts and tokens are split over, and how tokens reach their experts.

    mesh: of your `jit`, its axes of type Auto. expert_axes: hold the experts (and split tokens): one axis, or two,
    (across nodes, inside a node). data_axes: further axes that split tokens. exchange: `flat`; over two expert axes
    also `hierarchical` and `dedup`, which sends a token once to a node; `auto` takes one of them by topology and top-k.
    num_chunks: rows are exchanged in so many parts, so that experts begin with the first. load: what a layer exchanges
    over which links, for `auto`.
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
                check(axis in self.mesh.shape, name, axis, f"is not an axis of {tuple(self.mesh.shape)}")
                kind = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))[axis]
                check(kind == AxisType.Auto, "mesh.axis_types", kind, f"axis {axis!r} must be AxisType.Auto")
        check(self.num_chunks > 0, "num_chunks", self.num_chunks, "must be greater than 0")

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split tokens."""
        return self.data_axes + self.expert_axes

    def plan(self, config: MoEConfig) -> ExchangePlan:
        """Return which exchange takes this layer's tokens to its experts, and why."""
        sizes = tuple(self.mesh.shape[axis] for axis in self.expert_axes)
        devices = math.prod(sizes)
        many = f"must be a multiple of {devices} devices"
        check(config.num_experts % devices == 0, "num_experts", config.num_experts, many)
        num_nodes, devices_per_node = (sizes[0], sizes[1]) if len(sizes) == 2 else (1, devices)
        limited = config.router.kind == "group_limited"
        groups = {"n_group": config.router.n_group, "topk_group": config.router.topk_group} if limited else {}
        return plan_exchange(
            self.exchange,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            load=self.load,
            **groups,
        )


class MoELayer(nnx.Module):
    """A Mixture-of-Experts feed-forward layer: `y, metrics = layer(x)`.

    y[t] = sum_k weight[t, k] * expert_{idx[t, k]}(x[t]).

    Args:
        config: sizes, activation, capacity, and how tokens choose experts.
        parallel: where experts and tokens are; None: on one device. `layer.exchange_plan.reason` says why its exchange
            was chosen.
        router: any callable (x_TD, key=, train=) -> `Routing`, in place of `config.router`'s.
        experts: any module called as experts(rows, group_sizes, expected_rows) -> rows whose parameters have a leading
            expert dimension, in place of the MLPs that `config` describes.

    Works under `jit`, `scan`, `remat` and `grad`; inside your own `shard_map` call `layer.local(x_TD)`. Over several
    devices a call outside `jit` is compiled as well, so that routers and experts must be pure functions there too.
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
        mlp |= {"init_std": config.initializer_range, "init_out_std": config.output_initializer_range}
        self.experts = Experts(e, d, config.intermediate_size, **mlp, rngs=rngs) if experts is None else experts
        one_device = ExchangePlan("flat", "all experts are on one device", 1, 1, 1.0)
        self.exchange_plan = one_device if parallel is None else parallel.plan(config)
        expert_axes = () if parallel is None else parallel.expert_axes
        self.num_chunks = 1 if parallel is None else parallel.num_chunks
        complete = config.router.second_expert_policy == "all"
        self.exchange = make_exchange(self.exchange_plan, expert_axes, config.capacity_factor, complete=complete)

    def route(
        self,
        x_TD: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        topk_idx_TK: jax.Array | None = None,
        topk_weights_TK: jax.Array | None = None,
    ) -> Routing:
        """Return where each token goes. key: for what it draws; topk_idx_TK: choices made before, to keep to.

        topk_weights_TK: their weights, of a layer routed by task.
        """
        made = {"topk_idx_TK": topk_idx_TK, "topk_weights_TK": topk_weights_TK}
        choices = {name: choice for name, choice in made.items() if choice is not None}
        with jax.named_scope("router"):
            routing = self.router(x_TD, key=key, train=train, **choices)
            self._check_routing(routing, x_TD.shape[0])
            return replace(routing, topk_idx_TK=saved_residual(routing.topk_idx_TK, "routing"))

    def dispatch(self, x_TD: jax.Array, routing: Routing, *, full_capacity: bool = False) -> DispatchedTokens:
        """Send each token's row to its experts' devices, inside `shard_map`, in `num_chunks` parts."""
        return dispatch_local(x_TD, routing, self.exchange, full_capacity=full_capacity, num_chunks=self.num_chunks)

    def apply_experts(self, dispatched: DispatchedTokens) -> jax.Array:
        """Return float32 y_TD: the weighted sum of each token's experts, once its rows are where they are."""
        return combine_local(dispatched, self.experts, self.exchange)

    def local(
        self,
        x_TD: jax.Array,
        *,
        key: jax.Array | None = None,
        train: bool = False,
        full_capacity: bool = False,
        keep_routing: bool = False,
    ) -> tuple[jax.Array, MoEStats]:
        """Return (float32 y_TD, `MoEStats`) for this device's tokens, inside `shard_map`.

        `experts` holds its L experts. keep_routing: the statistics hold the whole `Routing` too.
        """
        routing = self.route(x_TD, key=key, train=train)
        options: dict[str, Any] = {"full_capacity": full_capacity, "num_chunks": self.num_chunks}
        y_TD, dispatched = moe(x_TD, routing, self.experts, self.exchange, **options)
        return y_TD, moe_stats(routing, dispatched, keep_routing=keep_routing)

    def _check_routing(self, routing: Routing, num_tokens: int) -> None:
        """Raise `ValueError` if a user's own router did not choose what the layer was made for."""
        config = self.config
        experts, choices = (config.num_experts,), (num_tokens, config.num_experts_per_tok)
        shapes = {"topk_idx_TK": choices, "topk_weights_TK": choices, "counts_E": experts, "probs_sum_E": experts}
        for name, shape in shapes.items():
            actual = getattr(routing, name).shape
            limit = f"must be {shape} for num_experts_per_tok = {choices[1]} and num_experts = {config.num_experts}"
            check(actual == shape, f"router: {name}.shape", actual, limit)

    def __call__(
        self, x: jax.Array, *, key: jax.Array | None = None, train: bool = False
    ) -> tuple[jax.Array, MoEMetrics]:
        """Return (y [..., D] in x's dtype, `MoEMetrics`) of x [..., D]. Tokens are split over all the layer's axes."""
        config, parallel = self.config, self.parallel
        check(x.shape[-1] == config.hidden_size, "x.shape", x.shape, f"must end in hidden_size = {config.hidden_size}")
        x_TD = x.reshape(-1, config.hidden_size)
        if parallel is None or not parallel.axes:
            y_TD, stats = self.local(x_TD, key=key, train=train)
            metrics = moe_metrics(stats, config.router, x_TD.shape[0], config.num_experts_per_tok)
            return y_TD.astype(x.dtype).reshape(x.shape), metrics
        devices = math.prod(parallel.mesh.shape[axis] for axis in parallel.axes)
        check(x_TD.shape[0] % devices == 0, "tokens", x_TD.shape[0], f"must be a multiple of {devices} devices")
        graph, state = nnx.split(self)
        y_TD, metrics = _compiled(graph, config, parallel, train)(state, x_TD, key)
        return y_TD.reshape(x.shape), metrics


def _compiled(*fixed: Any) -> Callable[..., tuple[jax.Array, MoEMetrics]]:
    """Return `_over_devices` of these arguments as one program, kept for later calls.

    `shard_map` outside `jit` would compile each operation in it again in every call. A user's module with lists or
    dicts, which may change, is compiled in every call.
    """
    try:
        hash(fixed)
    except TypeError:
        return jax.jit(partial(_over_devices, *fixed))
    return partial(_over_devices_compiled, *fixed)


def _over_devices(
    graph: nnx.GraphDef[MoELayer],
    config: MoEConfig,
    parallel: ExpertParallel,
    train: bool,
    state: nnx.State,
    x_TD: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, MoEMetrics]:
    """Return what the layer `graph` with parameters `state` makes of x_TD, split over all axes of `parallel`."""
    axes, num_tokens = parallel.axes, x_TD.shape[0]

    def spec(path: tuple[Any, ...], _: jax.Array) -> jax.sharding.PartitionSpec:
        return split_over(parallel.expert_axes if path_names(path)[0] == EXPERTS_PATH else ())

    def body(state: Any, x_TD: jax.Array, key: jax.Array | None) -> tuple[jax.Array, MoEMetrics]:
        if key is not None:
            key = jax.random.fold_in(key, lax.axis_index(axes))
        layer = nnx.merge(graph, state)
        full_capacity = config.capacity_factor is None  # a layer alone cannot rerun a step that overflows
        y_TD, stats = layer.local(x_TD, key=key, train=train, full_capacity=full_capacity)
        metrics = moe_metrics(stats, config.router, num_tokens, config.num_experts_per_tok, axes)
        return y_TD.astype(x_TD.dtype), metrics

    sharded = jax.shard_map(
        body,
        mesh=parallel.mesh,
        in_specs=(jax.tree_util.tree_map_with_path(spec, state), split_over(axes), split_over(())),
        out_specs=(split_over(axes), split_over(())),
        check_vma=False,
    )
    return sharded(state, x_TD, key)


_over_devices_compiled = jax.jit(_over_devices, static_argnums=(0, 1, 2, 3))


def moe_metrics(
    stats: MoEStats, config: RouterConfig, num_tokens: int, k: int, axes: tuple[str, ...] = ()
) -> MoEMetrics:
    """Global metrics from one layer's local statistics; `num_tokens` over all devices of `axes`."""
    total = lambda v: lax.psum(v, axes) if axes else v  # noqa: E731
    counts_E, dropped = total((stats.counts_E, stats.dropped))
    num_experts = counts_E.shape[-1]
    assignments = counts_E.sum(dtype=jnp.int32).astype(jnp.float32)
    balance = balance_loss_local(stats.probs_sum_E, counts_E, num_tokens, num_experts, k)
    return MoEMetrics(
        load_E=counts_E.astype(jnp.float32) / assignments,
        entropy=total(stats.entropy_sum) / num_tokens,
        dropped_fraction=dropped.astype(jnp.float32) / assignments,
        balance_loss=config.aux_loss_coef * total(balance),
        z_loss=config.z_loss_coef * total(stats.z_sum) / num_tokens,
    )
