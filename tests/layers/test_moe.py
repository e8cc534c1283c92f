"""`MoELayer` against a dense reference in which every expert computes every token: values, metrics
and gradients.

Legend: T tokens, D hidden, F expert hidden, E experts, K choices a token, N = T K assignments, R
expert devices.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding

import jmoe
from jmoe import (
    ExpertParallel,
    Experts,
    MoELayer,
    MoEMetrics,
    Router,
    RouterConfig,
    Routing,
    moe_metrics,
)
from jmoe.collectives.exchange import TokenChoices
from jmoe.mesh import ALL, EXPERT, make_mesh, split_over
from tests.arrays import assert_near, assert_trees_close
from tests.compiled import compilations
from tests.moe_layers import CASES, D, E, F, Result, Split, T, config_of, inputs, make, over, run

SPLITS = [(d, i, 8 // d // i) for d in (1, 2, 4, 8) for i in (1, 2, 4, 8) if 8 % (d * i) == 0]
QUICK_SPLITS = ((1, 1, 8), (8, 1, 1), (2, 2, 2))
QUICK_ROUTERS = ("switch", "group_limited")  # one device tries all
QUICK_EXCHANGES = (("hierarchical", (1, 2, 4)), ("dedup", (1, 4, 2)), ("ragged", (2, 2, 2)))


def choose(layer: MoELayer, x: jax.Array) -> np.ndarray:
    """[T, K] experts of each token by plain sorting, in float64."""
    router, (k, config) = layer.router, (layer.config.num_experts_per_tok, layer.config.router)
    assert isinstance(router, Router)
    logits = np.asarray(x, np.float64) @ np.asarray(router.kernel[...], np.float64)
    if config.kind not in ("sigmoid", "group_limited"):
        return np.argsort(-logits, axis=1)[:, :k]
    assert router.e_score_correction_bias is not None
    choice = 1 / (1 + np.exp(-logits)) + np.asarray(router.e_score_correction_bias[...], np.float64)
    if config.kind == "group_limited":  # groups of two experts: both count
        groups = choice.reshape(T, config.n_group, -1)
        best = np.argsort(-groups.sum(axis=2), axis=1)[:, : config.topk_group]
        is_open = (np.arange(config.n_group) == best[:, :, None]).any(axis=1)
        choice = np.where(is_open[:, :, None], groups, -np.inf).reshape(T, E)
    return np.argsort(-choice, axis=1)[:, :k]


def dense(layer: MoELayer, x: jax.Array, g: jax.Array, kept_TK: np.ndarray | None = None) -> Result:
    """The same as `run(layer, x, g)`: y = sum_e weight[t, e] expert_e(x[t]) over *all* experts."""
    k, config = layer.config.num_experts_per_tok, layer.config.router
    idx = choose(layer, x)
    kept_TK = np.ones(idx.shape, bool) if kept_TK is None else kept_TK
    onehot_TKE = jnp.asarray(np.eye(E, dtype=np.float32)[idx])
    counts_E = np.bincount(idx.reshape(-1), minlength=E).astype(np.float32)
    gelu = isinstance(layer.experts, Experts) and layer.experts.activation == "gelu"

    def weights_and_probs(logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
        softmax = config.kind in ("switch", "gshard", "softmax")
        scores_TE = jax.nn.softmax(logits_TE) if softmax else jax.nn.sigmoid(logits_TE)
        weights_TK = jnp.einsum("tke,te->tk", onehot_TKE, scores_TE)
        if k > 1 and config.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(axis=1, keepdims=True)
        weights_TK = weights_TK * config.routed_scaling_factor
        return weights_TK, scores_TE / scores_TE.sum(axis=1, keepdims=True)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, MoEMetrics]]:
        logits_TE = x @ params["router"]["kernel"]
        weights_TK, probs_TE = weights_and_probs(logits_TE)
        weights_TE = jnp.einsum("tk,tke->te", jnp.where(kept_TK, weights_TK, 0), onehot_TKE)
        experts = params["experts"]
        h_TEU = jnp.einsum("td,edu->teu", x, experts["w_up"]) + experts.get("b_up", 0.0)
        gate, up = h_TEU[..., :F], h_TEU[..., F:]
        a_TEF = jax.nn.gelu(h_TEU, approximate=False) if gelu else gate * jax.nn.sigmoid(gate) * up
        y_TED = jnp.einsum("tef,efd->ted", a_TEF, experts["w_down"]) + experts.get("b_down", 0.0)
        y_TD = jnp.einsum("te,ted->td", weights_TE, y_TED)
        metrics = MoEMetrics(
            load_E=jnp.asarray(counts_E / (T * k)),
            entropy=-(probs_TE * jnp.log(probs_TE)).sum(axis=1).mean(),
            dropped_fraction=jnp.float32((~kept_TK).mean()),
            balance_loss=config.aux_loss_coef
            * E
            * jnp.sum(counts_E / (T * k) * probs_TE.mean(axis=0)),
            z_loss=config.z_loss_coef * jnp.mean(jax.nn.logsumexp(logits_TE, axis=1) ** 2),
        )
        return (y_TD * g).sum() + metrics.balance_loss + metrics.z_loss, (y_TD, metrics)

    params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, (y, metrics)), (dparams, dx) = jax.block_until_ready(step(params, x))
    return Result(y, metrics, dx, dparams)


def assert_agree(ours: Result, expected: Result) -> None:
    assert_trees_close(vars(ours), vars(expected))
    assert all(
        np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves((ours.y, ours.dx, ours.dparams))
    )


# ---- against the dense reference


@pytest.mark.parametrize("name", CASES)
def test_one_device(name: str) -> None:
    layer = make(name, bias=name == "softmax")
    result = run(layer, *inputs())
    assert_agree(result, dense(layer, *inputs()))
    assert float(result.metrics.dropped_fraction) == 0


@pytest.mark.parametrize(
    ("exchange", "split"),
    # they differ only where both levels have more than one device
    [
        pytest.param("flat", split, marks=() if split in QUICK_SPLITS else pytest.mark.slow)
        for split in SPLITS
    ]
    + [
        pytest.param(*case, marks=() if case in QUICK_EXCHANGES else pytest.mark.slow)
        for case in itertools.product(
            ("hierarchical", "dedup", "ragged"), ((1, 2, 4), (1, 4, 2), (2, 2, 2))
        )
    ],
    ids=str,
)
def test_every_split_of_8_devices(exchange: str, split: Split) -> None:
    layer = make("softmax", split, exchange=exchange, bias=True)
    result = run(layer, *inputs())
    assert_agree(result, dense(layer, *inputs()))
    assert float(result.metrics.dropped_fraction) == 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK_ROUTERS else pytest.mark.slow)
        for name in CASES
        if name != "softmax"
    ],
)
def test_every_router_on_8_devices(name: str) -> None:
    layer = make(name, (2, 2, 2))
    assert_agree(run(layer, *inputs()), dense(layer, *inputs()))


@pytest.mark.parametrize("split", [None, (1, 2, 4)])
def test_gelu_experts(split: Split | None) -> None:
    layer = make("softmax", split, hidden_act="gelu", bias=True)
    assert_agree(run(layer, *inputs()), dense(layer, *inputs()))


@pytest.mark.parametrize("split", [None, (2, 2, 2), (1, 1, 8)])
def test_dropless_with_every_token_on_the_same_experts(split: Split | None) -> None:
    layer = make("softmax", split)
    assert isinstance(layer.router, Router)
    x, g = inputs()
    x = x.at[:, 0].set(1.0)
    layer.router.kernel[0] = jnp.zeros(E).at[jnp.array([5, 6])].set(jnp.array([40.0, 39.0]))
    result = run(layer, x, g)
    assert float(result.metrics.load_E[5]) == float(result.metrics.load_E[6]) == 0.5
    assert float(result.metrics.dropped_fraction) == 0
    assert_trees_close(vars(result), vars(dense(layer, x, g)))


# ---- capacity


def kept_choices(
    layer: MoELayer, x: jax.Array, num_shards: int, num_expert_devices: int, rows: int
) -> np.ndarray:
    """Which choices find a row, one by one: of all that go to a device those with the largest
    weights.
    """
    routing = layer.router(x)
    idx_TK, weights_TK = np.asarray(routing.topk_idx_TK), np.asarray(routing.topk_weights_TK)
    np.testing.assert_array_equal(idx_TK, choose(layer, x))
    kept_TK = np.zeros(idx_TK.shape, bool)
    tokens = T // num_shards
    for shard in range(num_shards):
        used = [0] * num_expert_devices
        by_weight = sorted(
            np.ndindex(tokens, idx_TK.shape[1]),
            key=lambda at: -weights_TK[shard * tokens + at[0], at[1]],
        )
        for token, choice in by_weight:
            device = idx_TK[shard * tokens + token, choice] // (E // num_expert_devices)
            kept_TK[shard * tokens + token, choice] = used[device] < rows
            used[device] += 1
    return kept_TK


CAPACITIES = list(
    itertools.product(
        (((2, 2, 2), "hierarchical"), ((4, 1, 2), "flat"), ((1, 2, 4), "hierarchical")), (0.25, 1.0)
    )
)
QUICK_CAPACITIES = ((((1, 2, 4), "hierarchical"), 0.25), (((4, 1, 2), "flat"), 1.0))


@pytest.mark.parametrize(
    ("split", "exchange", "factor"),
    [
        pytest.param(*case[0], case[1], marks=() if case in QUICK_CAPACITIES else pytest.mark.slow)
        for case in CAPACITIES
    ],
)
def test_capacity_drops_exactly_what_does_not_fit(
    split: Split, exchange: str, factor: float
) -> None:
    # its bias makes load uneven
    layer = make("sigmoid", split, exchange=exchange, capacity_factor=factor)
    x, g = inputs()
    devices = split[1] * split[2]
    rows = math.ceil(factor * T // 8 * 3 / devices / 8) * 8
    kept_TK = kept_choices(layer, x, 8, devices, rows)
    assert 0 < kept_TK.mean() < 1
    result = run(layer, x, g)
    assert_agree(result, dense(layer, x, g, kept_TK))
    assert float(result.metrics.dropped_fraction) == pytest.approx((~kept_TK).mean())
    lost_T = ~kept_TK.any(axis=1)
    assert not np.asarray(result.y)[lost_T].any()


def test_a_large_capacity_factor_drops_nothing() -> None:
    # 4 x 4 devices: a row for every assignment
    layer = make("softmax", (2, 2, 2), capacity_factor=4.0)
    assert_agree(run(layer, *inputs()), dense(layer, *inputs()))


# ---- as a guest in a user's own program


def test_own_axis_names_and_shardings_under_own_jit() -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    expected = run(make("softmax"), *inputs())
    for axes in (
        {"expert_axes": ("y",), "data_axes": ("x",)},
        {"expert_axes": ("x",)},
        {"data_axes": ("x", "y")},
    ):
        layer = make("softmax", mesh, **({"expert_axes": (), "data_axes": ()} | axes))
        assert_agree(run(layer, *inputs()), expected)
    layer = make("softmax", mesh, expert_axes=("x", "y"), data_axes=())
    graph, state = nnx.split(layer)
    experts = NamedSharding(mesh, split_over(("x", "y")))
    state["experts"] = jax.device_put(state["experts"], experts)
    x = jax.device_put(inputs()[0].reshape(8, 4, 4, D), NamedSharding(mesh, split_over(("x", "y"))))

    @jax.jit
    def double(state: nnx.State, x: jax.Array) -> tuple[jax.Array, MoEMetrics]:
        y, metrics = nnx.merge(graph, state)(x)
        return 2 * y, metrics

    y, metrics = jax.block_until_ready(double(state, x))
    assert y.shape == x.shape
    assert_trees_close(y.reshape(T, D), 2 * expected.y)
    assert_trees_close(metrics, expected.metrics)


def stacked(split: Split | None) -> tuple[Any, nnx.State]:
    """(graph, state with a leading layer dimension) of three different layers."""
    layers = [make("softmax", split) for _ in range(3)]
    for i, layer in enumerate(layers):
        assert isinstance(layer.router, Router)
        layer.router.kernel[...] = jnp.roll(layer.router.kernel[...], i, axis=1)
    graphs, states = zip(*[nnx.split(layer) for layer in layers], strict=True)
    return graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@pytest.mark.parametrize("split", [pytest.param(None, marks=pytest.mark.slow), (2, 2, 2)])
def test_scan_over_stacked_layers_with_remat(split: Split | None) -> None:
    """A user's scan of checkpointed layers, on any mesh, is a plain loop over them on one
    device.
    """
    x, g = inputs()

    def call(graph: Any, state: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, metrics = nnx.merge(graph, state)(x)
        return x + 0.1 * y, metrics.balance_loss + metrics.z_loss

    def loop(graph: Any, states: nnx.State, x: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for i in range(3):
            x, loss = call(graph, jax.tree.map(lambda leaf: leaf[i], states), x)  # noqa: B023 (used at once)
            total += loss
        return (x * g).sum() + total

    def scanned(graph: Any, states: nnx.State, x: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda state, x: call(graph, state, x))
        x, losses = lax.scan(lambda x, state: step(state, x), x, states)
        return (x * g).sum() + losses.sum()

    ours, expected = (
        jax.block_until_ready(
            jax.jit(jax.value_and_grad(f, (1, 2)), static_argnums=0)(*stacked(where), x)
        )
        for f, where in ((scanned, split), (loop, None))
    )
    (value, (dparams, dx)), (expected_value, (expected_dparams, expected_dx)) = ours, expected
    pure = nnx.to_pure_dict  # a layer over devices has partitioning metadata
    assert_trees_close(
        (value, pure(dparams), dx), (expected_value, pure(expected_dparams), expected_dx)
    )


def test_local_inside_own_shard_map() -> None:
    mesh = make_mesh((2, 2, 2))
    layer = make("softmax", mesh)
    graph, state = nnx.split(layer)
    x, _ = inputs()

    def body(state: nnx.State, x_TD: jax.Array) -> tuple[jax.Array, MoEMetrics]:
        y, stats = nnx.merge(graph, state).local(x_TD, full_capacity=True)
        return y, moe_metrics(stats, CASES["softmax"][1], T, 2, ALL)

    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: split_over(EXPERT if "experts" in jax.tree_util.keystr(path) else ()), state
    )
    step = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, split_over(ALL)),
        out_specs=(split_over(ALL), split_over(())),
        check_vma=False,
    )
    y, metrics = jax.block_until_ready(jax.jit(step)(state, x))
    expected = run(make("softmax"), *inputs())
    assert_trees_close(y, expected.y)
    assert_trees_close(metrics, expected.metrics)


def round_robin(x_TD: jax.Array, *, key: jax.Array | None = None, train: bool = False) -> Routing:
    """A user's own router: token t of a device to experts t and t + 3, half of each."""
    first_T = jnp.arange(x_TD.shape[0], dtype=jnp.int32) % E
    idx_TK = jnp.stack([first_T, (first_T + 3) % E], axis=1)
    tokens = jnp.float32(x_TD.shape[0])
    return Routing(
        topk_idx_TK=idx_TK,
        topk_weights_TK=jnp.full(idx_TK.shape, 0.5),
        counts_E=jnp.bincount(idx_TK.reshape(-1), length=E).astype(jnp.int32),
        probs_sum_E=jnp.full(E, tokens / E),
        z_sum=jnp.float32(0),
        entropy_sum=tokens * jnp.log(jnp.float32(E)),
    )


class Scale(nnx.Module):
    """A user's own experts: expert e multiplies by a vector."""

    def __init__(self) -> None:
        self.scale = nnx.Param(
            jnp.asarray(np.random.default_rng(3).normal(size=(E, D)), jnp.float32)
        )

    def __call__(
        self, rows_ND: jax.Array, group_sizes_L: jax.Array, expected_rows: int
    ) -> jax.Array:
        assert expected_rows <= rows_ND.shape[0]
        group_N = (jnp.arange(rows_ND.shape[0])[:, None] >= jnp.cumsum(group_sizes_L)).sum(axis=1)
        return rows_ND * jnp.take(self.scale[...], group_N, axis=0, mode="fill", fill_value=0)


class ExpertsBias(nnx.Module):
    """A user's own router with a parameter of its own, whose name must not be taken for the
    experts'.
    """

    def __init__(self) -> None:
        self.experts_bias = nnx.Param(jnp.linspace(0.5, 1.5, 3))

    def __call__(
        self, x_TD: jax.Array, *, key: jax.Array | None = None, train: bool = False
    ) -> Routing:
        routing = round_robin(x_TD)
        weights_TK = routing.topk_weights_TK * self.experts_bias[...].sum()
        return replace(routing, topk_weights_TK=weights_TK)


@pytest.mark.parametrize("split", [None, (1, 2, 4)])
def test_own_router_and_own_experts(split: Split | None) -> None:
    mesh = None if split is None else make_mesh(split)
    x, g = inputs()
    first_T = np.arange(T) % E  # 16 tokens a device: every device starts at expert 0
    scale = np.asarray(Scale().scale[...])
    expected = np.asarray(x) * (scale[first_T] + scale[(first_T + 3) % E]) / 2
    for router, factor in ((round_robin, 1.0), (ExpertsBias(), 3.0)):
        layer = MoELayer(config_of(), over(mesh), router=router, experts=Scale(), rngs=nnx.Rngs(0))
        result = run(layer, x, g)
        assert_trees_close(result.y, factor * expected)
        assert_trees_close(result.dx, factor * np.asarray(g) * expected / np.asarray(x))
        np.testing.assert_allclose(result.metrics.load_E, np.full(E, 1 / E), rtol=1e-6)
        dscale = np.zeros((E, D), np.float32)
        np.add.at(dscale, first_T, np.asarray(x * g) / 2)
        np.add.at(dscale, (first_T + 3) % E, np.asarray(x * g) / 2)
        assert_trees_close(result.dparams["experts"]["scale"], factor * dscale)
    assert_trees_close(
        result.dparams["router"]["experts_bias"],
        np.full(3, (expected * np.asarray(g)).sum(), np.float32),
    )


def test_plain_function_as_experts() -> None:
    layer = MoELayer(
        config_of(),
        router=round_robin,
        experts=lambda rows, sizes, expected: 3 * rows,
        rngs=nnx.Rngs(0),
    )
    x, _ = inputs()
    y, _ = layer(x)
    assert_trees_close(y, 3 * x)
    assert not jax.tree.leaves(nnx.state(layer, nnx.Param))


class Given(nnx.Module):
    """A user's experts: they are given rows."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts

    def __call__(
        self, rows_ND: jax.Array, group_sizes_L: jax.Array, expected_rows: int
    ) -> jax.Array:
        assert rows_ND.shape == (2 * T, D)
        y_ND: jax.Array = self.experts(rows_ND, group_sizes_L, expected_rows)
        return y_ND


def test_our_experts_gather_rows_that_a_users_are_given() -> None:
    """On one device no rows are written for ours; values and gradients are the same."""
    ours = make("softmax")
    users = make("softmax", experts=Given(ours.experts))
    x, g = inputs()
    a, b = run(ours, x, g), run(users, x, g)
    assert_trees_close(a.y, b.y)
    assert_trees_close(a.dx, b.dx)
    for name in ("w_up", "w_down"):
        assert_trees_close(a.dparams["experts"][name], b.dparams["experts"]["experts"][name])
    chosen = TokenChoices(jnp.zeros((T, 2), jnp.int32), jnp.ones((T, 2)), jnp.zeros(E, jnp.int32))
    (arrived,) = ours.exchange.dispatch(x, chosen).chunks
    assert arrived.rows_or_tokens is x
    assert arrived.rows_MD.shape == (2 * T, D)


def test_a_layer_over_devices_is_compiled_once_outside_jit() -> None:
    layer = make("softmax", (2, 2, 2))
    x, g = inputs()
    y, metrics = layer(x)
    layer.router.kernel[...] = -layer.router.kernel[...]
    with compilations() as compiled:
        other, _ = layer(x)
    assert compiled == []
    assert np.any(other != y)
    expected = dense(make("softmax"), x, g)
    assert_trees_close((y, metrics), (expected.y, expected.metrics))


class Scaled(nnx.Module):
    """Our experts, times what a dict says: nothing that JAX could compare programs by."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.settings = {"scale": 1.0}

    def __call__(
        self, rows_ND: jax.Array, group_sizes_L: jax.Array, expected_rows: int
    ) -> jax.Array:
        y_ND: jax.Array = (
            self.experts(rows_ND, group_sizes_L, expected_rows) * self.settings["scale"]
        )
        return y_ND


def test_what_changes_within_a_users_module_is_seen() -> None:
    layer = make("softmax", (1, 1, 8), experts=Scaled(make("softmax").experts))
    x, _ = inputs()
    before, _ = layer(x)
    layer.experts.settings["scale"] = 2.0
    assert_trees_close(layer(x)[0], 2 * before)


@pytest.mark.parametrize("split", [None, (2, 2, 2)])
def test_jitter_in_training_only(split: Split | None) -> None:
    mesh = None if split is None else make_mesh(split)
    config = RouterConfig(kind="switch", jitter_noise=0.2, z_loss_coef=1.0)
    layer = MoELayer(config_of(1, config), over(mesh), rngs=nnx.Rngs(0))
    assert isinstance(layer.router, Router)
    layer.router.kernel[...] = jnp.ones((D, E)) * jnp.linspace(0.1, 1.0, E)
    graph, state = nnx.split(layer)
    # every token the same: without jitter the z loss is that of one token, with it noise averages
    # out to nearly it
    x = jnp.ones((T, D))

    @partial(jax.jit, static_argnames="train")
    def z_loss(key: jax.Array | None, train: bool) -> jax.Array:
        return nnx.merge(graph, state)(x, key=key, train=train)[1].z_loss

    calls = [
        (None, False),
        (jax.random.key(0), True),
        (jax.random.key(0), True),
        (jax.random.key(1), True),
    ]
    calm, first, again, second = (
        float(jax.block_until_ready(z_loss(key, train=train))) for key, train in calls
    )
    assert first == again
    assert len({calm, first, second}) == 3
    assert first == pytest.approx(calm, rel=0.02)
    with pytest.raises(ValueError, match=r"key = None"):
        layer(x, train=True)


def test_devices_draw_different_jitter() -> None:
    config = RouterConfig(kind="switch", jitter_noise=0.5)
    layer = MoELayer(config_of(1, config), over(make_mesh((8, 1, 1))), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    y, _ = jax.jit(lambda x, key: nnx.merge(graph, state)(x, key=key, train=True))(
        jnp.ones((T, D)), jax.random.key(0)
    )
    shards = np.asarray(y).reshape(8, -1)
    assert len({shard.tobytes() for shard in shards}) == 8


def sampled(layer: MoELayer, x: jax.Array, key: jax.Array) -> np.ndarray:
    """[T, K] the experts that tokens go to in training with this key, E for none."""
    graph, state = nnx.split(layer.router)
    axes = () if layer.parallel is None else layer.parallel.axes

    def body(state: Any, x_TD: jax.Array, key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, lax.axis_index(axes)) if axes else key
        router: Any = nnx.merge(graph, state)
        return router(x_TD, key=key, train=True).topk_idx_TK  # type: ignore[no-any-return]

    if layer.parallel is not None:
        specs = split_over(()), split_over(axes), split_over(())
        mesh = layer.parallel.mesh
        body = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=split_over(axes), check_vma=False
        )
    return np.asarray(jax.jit(body)(state, x, key))


@pytest.mark.parametrize(
    ("split", "exchange"),
    [
        pytest.param(None, "flat", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "flat", marks=pytest.mark.slow),
        pytest.param((1, 4, 2), "hierarchical", marks=pytest.mark.slow),
        ((1, 2, 4), "dedup"),
    ],
)
def test_second_experts_are_sampled(
    split: Split | None, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = RouterConfig(
        kind="gshard", second_expert_policy="random", aux_loss_coef=0.0, z_loss_coef=0.1
    )
    monkeypatch.setitem(CASES, "sampled", (2, router))
    layer = make("sampled", split, bias=True, **({} if split is None else {"exchange": exchange}))
    (x, g), key = inputs(), jax.random.key(7)
    kept_TK = sampled(layer, x, key) < E
    assert kept_TK[:, 0].all()
    assert 0.2 * T < kept_TK[:, 1].sum() < 0.95 * T
    ours, expected = run(layer, x, g, key), dense(make("sampled", bias=True), x, g, kept_TK)
    assert_trees_close((ours.y, ours.dx, ours.dparams), (expected.y, expected.dx, expected.dparams))
    assert float(ours.metrics.dropped_fraction) == 0
    everything, without = run(layer, x, g), dense(make("sampled", bias=True), x, g)
    assert_trees_close((everything.y, everything.dparams), (without.y, without.dparams))


@pytest.mark.parametrize("split", [None, (2, 2, 2)])
def test_bfloat16_inputs(split: Split | None) -> None:
    layer = make("softmax", split, bias=True)
    x, g = inputs(jnp.bfloat16)
    ours = run(layer, x, g)
    expected = dense(make("softmax", bias=True), x.astype(jnp.float32), g.astype(jnp.float32))
    assert ours.y.dtype == ours.dx.dtype == jnp.bfloat16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(ours.dparams))
    # the router sees the same numbers, in float32
    assert_trees_close(ours.metrics, expected.metrics)
    assert_near((ours.y, ours.dx, ours.dparams), (expected.y, expected.dx, expected.dparams), 0.02)


def test_float16_inputs_and_vmap() -> None:
    layer, (x, _) = make("softmax"), inputs()
    expected, metrics = layer(x)
    y, _ = layer(x.astype(jnp.float16))
    assert y.dtype == jnp.float16
    assert_near(y, expected, 0.02)
    mapped, load = jax.jit(jax.vmap(layer))(x.reshape(4, -1, D))
    assert_trees_close(mapped.reshape(T, D), expected)
    assert_trees_close(load.load_E.mean(axis=0), metrics.load_E)


@pytest.mark.parametrize("split", [None, (2, 2, 2)])
def test_a_token_that_is_not_a_number_stays_alone(split: Split | None) -> None:
    layer = make("softmax", split)
    x, _ = inputs()
    y, _ = layer(x)
    spoiled, metrics = layer(x.at[5].set(jnp.nan))
    others = np.arange(T) != 5
    assert_trees_close(spoiled[others], y[others])
    assert np.isnan(spoiled[5]).all()
    assert np.isfinite(metrics.load_E).all() and metrics.dropped_fraction == 0


# ---- mistakes


def test_bad_inputs() -> None:
    layer, mesh = make("softmax"), make_mesh((2, 2, 2))
    with pytest.raises(ValueError, match=r"x.shape = \(4, 17\): must end in hidden_size = 16"):
        layer(jnp.zeros((4, 17)))
    with pytest.raises(ValueError, match=r"x.shape = \(\): must end in hidden_size = 16"):
        layer(jnp.float32(1))
    with pytest.raises(ValueError, match=r"x.dtype = 'int32': must be a float: token ids need an"):
        layer(jnp.zeros((4, 16), jnp.int32))
    assert layer([[0.5] * 16])[0].shape == (1, 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_experts = 6: must be a multiple of 4 devices"):
        MoELayer(config_of(num_experts=6), over(mesh), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError,
        match=r"'model'.* is not an axis of \('replica', 'data', 'expert_inter', 'expert",
    ):
        ExpertParallel(mesh, ("model",))
    with pytest.raises(ValueError, match=r"num_chunks = 0: must be greater than 0"):
        ExpertParallel(mesh, EXPERT, num_chunks=0)
    with pytest.raises(ValueError, match=r"num_chunks = 2: must be 1 with exchange = 'ragged'"):
        ExpertParallel(mesh, EXPERT, num_chunks=2, exchange="ragged")
    with pytest.raises(
        ValueError, match=r"exchange = 'ring': must be one of auto, flat, hierarchical, dedup"
    ):
        MoELayer(config_of(), over(mesh, exchange="ring"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"hidden_act = 'relu'"):
        config_of(hidden_act="relu")
    with pytest.raises(ValueError, match=r"num_experts_per_tok = 9"):
        config_of(9)


@pytest.mark.parametrize("split", [None, pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_a_router_that_chooses_another_number_than_was_said(split: Split | None) -> None:
    mesh = None if split is None else make_mesh(split)
    x, _ = inputs()
    tokens = T if split is None else T // 8

    def call(**changed: Any) -> None:
        def router(
            x_TD: jax.Array, *, key: jax.Array | None = None, train: bool = False
        ) -> Routing:
            return replace(
                round_robin(x_TD), **{name: change(x_TD) for name, change in changed.items()}
            )

        MoELayer(config_of(), over(mesh), router=router, rngs=nnx.Rngs(0))(x)

    said = "for num_experts_per_tok = 2 and num_experts = 8"
    one = {
        "topk_idx_TK": lambda x_TD: jnp.zeros((x_TD.shape[0], 1), jnp.int32),
        "topk_weights_TK": lambda x_TD: jnp.ones((x_TD.shape[0], 1)),
    }
    shape = rf"\({tokens}, 1\): must be \({tokens}, 2\)"
    with pytest.raises(ValueError, match=rf"router: topk_idx_TK.shape = {shape} {said}"):
        call(**one)
    with pytest.raises(ValueError, match=rf"router: topk_weights_TK.shape = {shape} {said}"):
        call(topk_weights_TK=one["topk_weights_TK"])
    for name in ("counts_E", "probs_sum_E"):
        with pytest.raises(
            ValueError, match=rf"router: {name}.shape = \(7,\): must be \(8,\) {said}"
        ):
            call(**{name: lambda x_TD: jnp.zeros(7)})


def test_what_a_users_router_or_experts_return_is_named() -> None:
    x, _ = inputs()

    def router(x_TD: jax.Array, *, key: Any = None, train: bool = False) -> Any:
        return x_TD, x_TD

    def experts(rows: jax.Array, group_sizes: jax.Array, expected_rows: int) -> jax.Array:
        return rows[:, :3]

    def swapped(x_TD: jax.Array, *, key: Any = None, train: bool = False) -> Routing:
        made = round_robin(x_TD)
        return replace(made, topk_idx_TK=made.topk_weights_TK, topk_weights_TK=made.topk_idx_TK)

    def of_each(x_TD: jax.Array, *, key: Any = None, train: bool = False) -> Routing:
        return replace(round_robin(x_TD), z_sum=jnp.zeros(T))

    def bare(x_TD: jax.Array) -> Routing:
        return round_robin(x_TD)

    for wrong, words in (
        (router, r"router = 'tuple': must return a jmoe\.Routing"),
        (swapped, r"router: topk_idx_TK\.dtype = 'float32': must be an integer, as the second"),
        (of_each, r"router: z_sum\.shape = \(128,\): must be \(\), a sum over tokens"),
        (bare, r"router = 'bare': must take key= and train=: it is called as router\(x_TD, key"),
    ):
        with pytest.raises(ValueError, match=words):
            MoELayer(config_of(), router=wrong, rngs=nnx.Rngs(0))(x)
    with pytest.raises(ValueError, match=r"experts: rows.shape = \(\d+, 3\): must be \(\d+, 16\)"):
        MoELayer(config_of(), experts=experts, rngs=nnx.Rngs(0))(x)


@pytest.mark.parametrize("shape", [(), (D,), (E - 1, D), (2 * E, D)])
def test_experts_over_devices_have_a_leading_expert_dimension(shape: tuple[int, ...]) -> None:
    """A scale that they share would be cut, and one that is a number cannot be."""

    class Shared(Scale):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nnx.Param(jnp.ones(shape))

    words = rf"experts\.shared\.shape = {re.escape(str(shape))}: must begin with num_experts = 8"
    with pytest.raises(ValueError, match=words):
        MoELayer(config_of(), over(make_mesh((2, 2, 2))), experts=Shared(), rngs=nnx.Rngs(0))


def test_package_exports() -> None:
    assert all(getattr(jmoe, name) is not None for name in jmoe.__all__)
    assert set(jmoe.__all__) <= set(dir(jmoe))
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        _ = jmoe.Transformer
