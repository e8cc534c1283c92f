"""The router against plain numpy (values) and an independent dense formulation (gradients)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jmoe.config import ROUTERS, ModelConfig, RouterConfig
from jmoe.config.router import RouterKind, RouterRules
from jmoe.layers import router as router_module
from jmoe.layers.router import (
    SCORES,
    Router,
    RouterBias,
    Routing,
    balance_loss_local,
    route,
    top_k_indices,
    updated_bias,
)
from tests.arrays import assert_close

T, D, E = 96, 24, 16
CASES = {
    "switch": (1, RouterConfig(kind="switch")),
    "gshard": (2, RouterConfig(kind="gshard")),
    "softmax": (3, RouterConfig(kind="softmax")),
    "softmax-raw": (3, RouterConfig(kind="softmax", norm_topk_prob=False)),
    "softmax-top1": (1, RouterConfig(kind="softmax")),
    "softmax-bias": (2, RouterConfig(kind="softmax", bias=True)),
    "sigmoid": (4, RouterConfig(kind="sigmoid", routed_scaling_factor=2.5)),
    "sigmoid-raw": (4, RouterConfig(kind="sigmoid", norm_topk_prob=False)),
    "group_limited": (
        3,
        RouterConfig(kind="group_limited", n_group=4, topk_group=2, routed_scaling_factor=2.5),
    ),
    "softmax_biased": (3, RouterConfig(kind="softmax_biased")),
    "softmax_group_limited": (
        3,
        RouterConfig(
            kind="softmax_group_limited",
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=2.5,
        ),
    ),
    "group-of-one": (2, RouterConfig(kind="group_limited", n_group=16, topk_group=3)),
}
SIGMOID = ("sigmoid", "group_limited")
BIASED = (*SIGMOID, "softmax_biased")
cases = pytest.mark.parametrize("name", CASES)


def make(name: str, seed: int = 0) -> tuple[Router, np.ndarray]:
    """A router whose bias is large enough to change the choice, and inputs."""
    k, config = CASES[name]
    rng = np.random.default_rng(seed)
    router = Router(
        D, E, k, config, rngs=nnx.Rngs(seed), kernel_init=jax.nn.initializers.normal(0.4)
    )
    if config.kind in BIASED:
        assert router.e_score_correction_bias is not None
        router.e_score_correction_bias[...] = jnp.asarray(rng.normal(size=E) * 0.3, jnp.float32)
    if router.bias is not None:
        router.bias[...] = jnp.asarray(rng.normal(size=E), jnp.float32)
    return router, rng.normal(size=(T, D)).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def run_state(graph: nnx.GraphDef[Router], state: nnx.State, x_TD: jax.Array) -> Routing:
    return nnx.merge(graph, state)(x_TD)


def run(router: Router, x_TD: ArrayLike) -> Routing:
    """`router(x_TD)` as one program, compiled once per configuration."""
    return run_state(*nnx.split(router), jnp.asarray(x_TD))


def reference(router: Router, x_TD: np.ndarray) -> dict[str, np.ndarray]:
    """The same routing, token by token, in float64."""
    k, config = router.num_experts_per_tok, router.config
    logits_TE = x_TD.astype(np.float64) @ np.asarray(router.kernel[...], np.float64)
    if router.bias is not None:
        logits_TE = logits_TE + np.asarray(router.bias[...], np.float64)
    bias = router.e_score_correction_bias
    bias_E = np.zeros(E) if bias is None else np.asarray(bias[...], np.float64)
    out: dict[str, Any] = {
        "idx": [],
        "weights": [],
        "counts": np.zeros(E, int),
        "probs_sum": np.zeros(E),
    }
    out |= {"z_sum": 0.0, "entropy_sum": 0.0, "open": []}
    for logits in logits_TE:
        sigmoid = config.kind in SIGMOID
        scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits) / np.exp(logits).sum()
        probs = scores / scores.sum()
        choice = scores + bias_E
        open_groups = list(range(config.n_group))
        if config.kind.endswith("group_limited"):
            size, best = E // config.n_group, 2 if config.kind == "group_limited" else 1
            value = [
                np.sort(choice[g * size : (g + 1) * size])[-best:].sum()
                for g in range(config.n_group)
            ]
            open_groups = sorted(
                np.argsort(np.negative(value), kind="stable")[: config.topk_group].tolist()
            )
            choice = np.array(
                [c if e // size in open_groups else -np.inf for e, c in enumerate(choice)]
            )
        idx = np.argsort(-choice, kind="stable")[:k]
        weights = scores[idx]
        if k > 1 and (config.kind == "gshard" or config.norm_topk_prob):
            weights = weights / weights.sum()
        out["idx"].append(idx)
        out["weights"].append(weights * config.routed_scaling_factor)
        out["open"].append(open_groups)
        out["counts"][idx] += 1
        out["probs_sum"] += probs
        out["z_sum"] += np.log(np.exp(logits).sum()) ** 2
        out["entropy_sum"] -= (probs * np.log(probs)).sum()
    return {name: np.asarray(value) for name, value in out.items()}


@cases
def test_values_agree_with_numpy(name: str) -> None:
    router, x_TD = make(name)
    routing, expected = run(router, x_TD), reference(router, x_TD)
    np.testing.assert_array_equal(routing.topk_idx_TK, expected["idx"])
    np.testing.assert_array_equal(routing.counts_E, expected["counts"])
    np.testing.assert_allclose(routing.topk_weights_TK, expected["weights"], rtol=1e-5)
    np.testing.assert_allclose(routing.probs_sum_E, expected["probs_sum"], rtol=1e-5)
    np.testing.assert_allclose(routing.z_sum, expected["z_sum"], rtol=1e-5)
    np.testing.assert_allclose(routing.entropy_sum, expected["entropy_sum"], rtol=1e-5)
    assert routing.topk_idx_TK.dtype == routing.counts_E.dtype == jnp.int32
    assert routing.topk_weights_TK.dtype == routing.probs_sum_E.dtype == jnp.float32


def objective(weights_TK: jax.Array, probs_sum_E: jax.Array, z_sum: jax.Array) -> jax.Array:
    """A scalar in which each differentiable output has its own, uneven weight."""
    a_TK = jnp.cos(jnp.arange(weights_TK.size, dtype=jnp.float32)).reshape(weights_TK.shape)
    b_E = jnp.sin(jnp.arange(probs_sum_E.size, dtype=jnp.float32))
    return jnp.sum(a_TK * weights_TK) + 0.3 * jnp.sum(b_E * probs_sum_E) + 0.01 * z_sum


def dense(
    x_TD: jax.Array, kernel_DE: jax.Array, bias_E: jax.Array, idx: np.ndarray, config: RouterConfig
) -> jax.Array:
    """`objective` of the chosen experts, written with plain exponentials, divisions and a
    one-hot mask.
    """
    exp_TE = jnp.exp(x_TD @ kernel_DE + bias_E)
    scores_TE = (
        exp_TE / (1 + exp_TE) if config.kind in SIGMOID else exp_TE / exp_TE.sum(1, keepdims=True)
    )
    mask_TKE = jnp.asarray(np.eye(E, dtype=np.float32)[idx])
    weights_TK = jnp.einsum("tke,te->tk", mask_TKE, scores_TE)
    if idx.shape[1] > 1 and (config.kind == "gshard" or config.norm_topk_prob):
        weights_TK = weights_TK / weights_TK.sum(1, keepdims=True)
    probs_TE = scores_TE / scores_TE.sum(1, keepdims=True)
    z_sum = jnp.sum(jnp.log(exp_TE.sum(1)) ** 2)
    return objective(weights_TK * config.routed_scaling_factor, probs_TE.sum(0), z_sum)


@cases
def test_gradients_agree_with_a_dense_formulation(name: str) -> None:
    router, x_TD = make(name)
    parts: Any = nnx.split(router, nnx.Param, ...)
    graph, state, rest = parts

    def loss(state: nnx.State, x_TD: jax.Array) -> jax.Array:
        routing = nnx.merge(graph, state, rest)(x_TD)
        return objective(routing.topk_weights_TK, routing.probs_sum_E, routing.z_sum)

    value, (d_state, d_x) = jax.jit(jax.value_and_grad(loss, (0, 1)))(state, jnp.asarray(x_TD))
    idx = reference(router, x_TD)["idx"]
    plain = jax.jit(
        jax.value_and_grad(
            lambda x, kernel, bias: dense(x, kernel, bias, idx, router.config), (0, 1, 2)
        )
    )
    bias_E = jnp.zeros(E) if router.bias is None else router.bias[...]
    expected, (e_x, e_kernel, e_bias) = plain(jnp.asarray(x_TD), router.kernel[...], bias_E)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    pairs = [(d_state["kernel"][...], e_kernel), (d_x, e_x)]
    pairs += [] if router.bias is None else [(d_state["bias"][...], e_bias)]
    for ours, theirs in pairs:
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-5, atol=1e-5 * float(jnp.abs(theirs).max())
        )
        assert float(jnp.abs(ours).max()) > 1e-3


def test_entropy_and_bias_carry_no_gradient() -> None:
    logits = jax.random.normal(jax.random.key(0), (T, E))
    assert not jax.jit(jax.grad(lambda a: route(a, 2).entropy_sum))(logits).any()
    config = RouterConfig(kind="sigmoid")
    of_bias = jax.jit(jax.grad(lambda b: route(logits, 2, config, b).topk_weights_TK[:, 0].sum()))
    assert not of_bias(jnp.zeros(E)).any()


def test_no_scatter_in_the_gradient() -> None:
    """XLA:CPU scatters row by row, and float scatters on GPU add in no fixed order."""
    config = RouterConfig(kind="group_limited", n_group=4, topk_group=2)

    def loss(logits: jax.Array) -> jax.Array:
        routing = route(logits, 3, config)
        return objective(routing.topk_weights_TK, routing.probs_sum_E, routing.z_sum)

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((T, E))))


@pytest.mark.parametrize("k", [1, 2, 8])
def test_top_k_indices_breaks_ties_like_lax(k: int) -> None:
    # nearly every row ties
    scores = jnp.asarray(np.random.default_rng(k).integers(0, 4, (200, 12)), jnp.float32)
    np.testing.assert_array_equal(top_k_indices(scores, k), lax.top_k(scores, k)[1])
    np.testing.assert_array_equal(
        top_k_indices(jnp.zeros((3, 12)), k), np.tile(np.arange(k), (3, 1))
    )


def test_not_a_number_gives_valid_experts() -> None:
    routing = jax.jit(route, static_argnums=1)(jnp.full((4, E), jnp.nan), 3)
    assert ((routing.topk_idx_TK >= 0) & (routing.topk_idx_TK < E)).all()
    assert int(routing.counts_E.sum()) == 12
    assert jnp.isnan(routing.topk_weights_TK).all()


def test_group_limit_is_obeyed() -> None:
    config = CASES["group_limited"][1]
    size = E // config.n_group
    for seed in range(5):
        router, x_TD = make("group_limited", seed)
        groups_TK = np.asarray(run(router, x_TD).topk_idx_TK) // size
        assert max(len(set(row)) for row in groups_TK.tolist()) <= config.topk_group
        allowed = reference(router, x_TD)["open"]
        assert all(
            set(row) <= set(ok)
            for row, ok in zip(groups_TK.tolist(), allowed.tolist(), strict=True)
        )


def test_closed_groups_stay_closed_below_zero() -> None:
    """Scores plus bias may all be negative: experts outside the chosen groups must not win with
    a zero.
    """
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(20, 8)), jnp.float32)
    config = RouterConfig(kind="group_limited", n_group=4, topk_group=2, norm_topk_prob=False)
    bias_E = jnp.full(8, -3.0)
    below, plain = route(logits, 3, config, bias_E), route(logits, 3, config, None)
    np.testing.assert_array_equal(below.topk_idx_TK, plain.topk_idx_TK)
    np.testing.assert_allclose(below.topk_weights_TK, plain.topk_weights_TK)


def test_sparsemixer_weighs_among_near_logits() -> None:
    """Each choice by a softmax over the experts that are left and near the largest logit of these;
    gradients flow through those alone.
    """
    logits_TE = np.random.default_rng(0).normal(1.0, 2.0, (T, 6))
    config = RouterConfig(kind="sparsemixer", mask_distance=0.6)

    def by_hand(logits: np.ndarray) -> tuple[list[int], list[float]]:
        left, idx, weights = set(range(6)), [], []
        for _ in range(2):
            best = max(left, key=lambda e: logits[e])
            near = [
                e
                for e in left
                if (logits[best] - logits[e]) / max(abs(logits[e]), logits[best]) <= 0.6
            ]
            idx.append(best)
            weights.append(np.exp(logits[best]) / np.exp(logits[near]).sum())
            left.remove(best)
        return idx, weights

    def weights_of(logits_TE: jax.Array) -> jax.Array:
        return route(logits_TE, 2, config).topk_weights_TK

    routing = route(jnp.asarray(logits_TE, jnp.float32), 2, config)
    idx, weights = zip(*map(by_hand, logits_TE), strict=True)
    np.testing.assert_array_equal(routing.topk_idx_TK, idx)
    np.testing.assert_allclose(routing.topk_weights_TK, weights, rtol=1e-5)
    assert len(np.unique(np.asarray(weights) < 1)) == 2  # some experts are alone, some are not
    replayed = route(
        jnp.asarray(logits_TE, jnp.float32), 2, config, topk_idx_TK=routing.topk_idx_TK
    )
    np.testing.assert_array_equal(replayed.topk_weights_TK, routing.topk_weights_TK)
    slopes = jax.grad(lambda a: weights_of(a)[0].sum())(jnp.asarray(logits_TE, jnp.float32))[0]
    for e in range(6):
        step = np.zeros_like(logits_TE)
        step[0, e] = 1e-6
        up, down = (np.sum(by_hand((logits_TE + s * step)[0])[1]) for s in (1, -1))
        assert float(slopes[e]) == pytest.approx((up - down) / 2e-6, abs=1e-4)


def test_bias_selects_but_does_not_weigh() -> None:
    logits = jnp.linspace(-1.0, 1.0, E)[None]
    config = RouterConfig(kind="sigmoid", norm_topk_prob=False)
    routing = route(logits, 2, config, jnp.zeros(E).at[0].set(5.0))
    assert routing.topk_idx_TK.tolist() == [[0, E - 1]]
    np.testing.assert_allclose(
        routing.topk_weights_TK[0], jax.nn.sigmoid(logits[0, jnp.array([0, E - 1])]), rtol=1e-6
    )


def test_jitter_only_in_training_and_within_bounds() -> None:
    noise = 0.1
    config = RouterConfig(kind="switch", jitter_noise=noise)
    # hidden size 1 and a kernel of (1, 0): logits are (jittered x, 0), so z_sum of one token gives
    # the jitter away
    router = Router(1, 2, 1, config, rngs=nnx.Rngs(0))
    router.kernel[...] = jnp.array([[1.0, 0.0]])
    one = jnp.ones((1, 1))
    graph, state = nnx.split(router)
    call = jax.jit(
        lambda x, key, train: nnx.merge(graph, state)(x, key=key, train=train),
        static_argnames="train",
    )

    def seen(key: jax.Array | None, train: bool) -> float:
        return float(jnp.log(jnp.exp(jnp.sqrt(call(one, key=key, train=train).z_sum)) - 1))

    keys = jax.random.split(jax.random.key(0), 50)
    values = [seen(key, True) for key in keys]
    assert 1 - noise - 1e-5 <= min(values) < 1 - noise / 2
    assert 1 + noise / 2 < max(values) <= 1 + noise + 1e-5
    assert seen(keys[0], True) == values[0]
    assert seen(keys[0], False) == pytest.approx(1.0, abs=1e-6)
    assert seen(None, False) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match=r"key = None.*jitter_noise = 0\.1"):
        router(one, train=True)
    calm = Router(1, 2, 1, RouterConfig(kind="switch"), rngs=nnx.Rngs(0))
    assert float(calm(one, train=True).z_sum) == float(calm(one).z_sum)


def test_a_token_goes_to_its_second_expert_as_often_as_its_weight_says() -> None:
    config = RouterConfig(kind="gshard", second_expert_policy="random")
    second_T = np.repeat([0.0, 0.1, 0.25, 0.5], 4000)  # the normalised weight of expert 1
    logits = jnp.asarray(
        np.stack([np.log(1 - second_T), np.log(second_T + 1e-30), -60 + 0 * second_T], 1),
        jnp.float32,
    )
    routing = route(logits, 2, config, key=jax.random.key(0))
    went_T = np.asarray(routing.topk_idx_TK[:, 1]) == 1
    assert (np.asarray(routing.topk_idx_TK)[~went_T, 1] == 3).all()
    rates = went_T.reshape(4, -1).mean(axis=1)
    np.testing.assert_allclose(rates, [0.0, 0.2, 0.5, 1.0], atol=0.03)  # four standard deviations
    assert rates[3] == 1
    np.testing.assert_allclose(
        routing.topk_weights_TK, np.stack([1 - second_T, second_T * went_T], 1), atol=1e-6
    )
    np.testing.assert_array_equal(routing.counts_E, [went_T.size, went_T.sum(), 0])
    kept = route(logits, 2, config, topk_idx_TK=routing.topk_idx_TK)
    for ours, first in zip(jax.tree.leaves(kept), jax.tree.leaves(routing), strict=True):
        np.testing.assert_array_equal(ours, first)
    assert (route(logits, 2, config).topk_idx_TK < 3).all()  # no key: not in training
    with pytest.raises(ValueError, match=r"key = None.*second_expert_policy = 'random'"):
        Router(1, 3, 2, config, rngs=nnx.Rngs(0))(jnp.ones((1, 1)), train=True)


def test_bias_update_drives_a_skewed_load_to_balance() -> None:
    rng = np.random.default_rng(0)
    # a strong favourite
    logits = jnp.asarray(rng.normal(size=(512, E)) + np.linspace(-2, 2, E), jnp.float32)
    config = RouterConfig(kind="sigmoid")

    @jax.jit
    def step(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
        counts_E = route(logits, 2, config, bias_E).counts_E
        return updated_bias(bias_E, counts_E, 0.01), counts_E

    bias_E = jnp.zeros(E)
    _, before = step(bias_E)
    for _ in range(150):
        bias_E, counts_E = step(bias_E)
    fair = 512 * 2 / E
    assert int(before.min()) < 0.1 * fair and int(before.max()) > 2.5 * fair
    assert int(counts_E.min()) > 0.75 * fair and int(counts_E.max()) < 1.25 * fair


def test_bias_update_values_and_layers() -> None:
    bias_LE, load_LE = jnp.zeros((2, 3)), jnp.array([[1, 5, 3], [2, 2, 2]], jnp.int32)
    expected = np.array([[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]], np.float32)
    np.testing.assert_array_equal(updated_bias(bias_LE, load_LE, 0.5), expected)
    with pytest.raises(ValueError, match=r"load_E.shape"):
        updated_bias(jnp.zeros(3), jnp.zeros(4), 0.5)


def global_losses(x_TD: jax.Array, kernel_DE: jax.Array, k: int) -> jax.Array:
    """Balance plus z-loss of the whole batch by their definitions."""
    logits_TE = x_TD @ kernel_DE
    probs_TE = jax.nn.softmax(logits_TE)
    share_E = jax.nn.one_hot(lax.top_k(probs_TE, k)[1], E).mean((0, 1))
    return E * jnp.sum(share_E * probs_TE.mean(0)) + jnp.mean(jax.nn.logsumexp(logits_TE, 1) ** 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_losses_under_shard_map(check_vma: bool) -> None:
    router, x_TD = make("softmax")
    x, kernel, k = jnp.asarray(x_TD), router.kernel[...], 3
    mesh = jax.make_mesh(
        (min(4, jax.device_count()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    split, whole = PartitionSpec("data"), PartitionSpec()

    def step_local(x_TD: jax.Array, kernel_DE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        kernel_DE = lax.pcast(kernel_DE, "data", to="varying") if check_vma else kernel_DE

        def loss(x_TD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
            routing = route(x_TD @ kernel_DE, k)
            counts_E = lax.psum(routing.counts_E, "data")
            return balance_loss_local(routing.probs_sum_E, counts_E, T, E, k) + routing.z_sum / T

        value, (d_x, d_kernel) = jax.value_and_grad(loss, (0, 1))(x_TD, kernel_DE)
        return lax.psum(value, "data"), d_x, lax.psum(d_kernel, "data")

    step = jax.shard_map(
        step_local,
        mesh=mesh,
        in_specs=(split, whole),
        out_specs=(whole, split, whole),
        check_vma=check_vma,
    )
    value, (d_x, d_kernel) = jax.jit(jax.value_and_grad(global_losses, (0, 1)), static_argnums=2)(
        x, kernel, k
    )
    ours = jax.block_until_ready(jax.jit(step)(x, kernel))
    np.testing.assert_allclose(ours[0], value, rtol=1e-5)
    np.testing.assert_allclose(ours[1], d_x, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(ours[2], d_kernel, rtol=1e-4, atol=1e-6)


def test_equal_probabilities_and_uniform_counts_give_balance_loss_one() -> None:
    for num_experts, k in ((8, 1), (16, 2), (128, 8)):
        tokens = num_experts * 4
        routing = jax.jit(route, static_argnums=1)(jnp.zeros((tokens, num_experts)), k)
        counts_E = jnp.full(num_experts, tokens * k // num_experts, jnp.int32)
        loss = balance_loss_local(routing.probs_sum_E, counts_E, tokens, num_experts, k)
        assert float(loss) == pytest.approx(1.0, abs=1e-6)
        assert float(routing.entropy_sum) / tokens == pytest.approx(np.log(num_experts), rel=1e-5)
    stacked = balance_loss_local(
        jnp.ones((3, 4)), jnp.full((3, 4), 1, jnp.int32), jnp.int32(4), 4, 1
    )
    np.testing.assert_allclose(stacked, np.ones(3), rtol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "group_limited"])
def test_jit_scan_remat_and_vmap_agree_with_a_plain_call(name: str) -> None:
    router, x_TD = make(name)
    x_LTD = jnp.asarray(x_TD).reshape(3, T // 3, D)
    graph, state = nnx.split(router)

    def call(x_TD: jax.Array) -> Routing:
        return nnx.merge(graph, state)(x_TD)

    plain = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[run(router, x) for x in x_LTD])
    scanned = jax.jit(lambda x: lax.scan(lambda c, x: (c, jax.checkpoint(call)(x)), 0, x)[1])(x_LTD)
    mapped = jax.jit(jax.vmap(call))(x_LTD)
    for other in (scanned, mapped):
        assert isinstance(other, Routing)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other, plain
        )

    def loss(x_LTD: jax.Array, remat: bool) -> jax.Array:
        body = jax.checkpoint(call) if remat else call
        out = lax.scan(lambda c, x: (c, body(x)), 0, x_LTD)[1]
        return objective(
            out.topk_weights_TK.reshape(T, -1), out.probs_sum_E.sum(0), out.z_sum.sum()
        )

    gradients = [jax.jit(jax.grad(loss), static_argnums=1)(x_LTD, remat) for remat in (False, True)]
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_low_precision_inputs_are_routed_in_float32() -> None:
    router, x_TD = make("softmax")
    x = jnp.asarray(x_TD, jnp.bfloat16)
    low, full = run(router, x), run(router, x.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, low, full)
    assert jax.grad(lambda x: router(x).z_sum)(x).dtype == jnp.bfloat16


def test_variables() -> None:
    router, _ = make("sigmoid")
    parts: Any = nnx.split(router, nnx.Param, RouterBias)
    _, params, biases = parts
    assert list(params) == ["kernel"] and list(biases) == ["e_score_correction_bias"]
    assert router.kernel[...].shape == (D, E) and router.kernel[...].dtype == jnp.float32
    assert make("softmax")[0].e_score_correction_bias is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 2), "hidden_size = 0"),
        ((4, 8, 9), "num_experts_per_tok = 9: must be between 1 and num_experts = 8"),
        ((4, 8, 2, RouterConfig(kind="switch")), "num_experts_per_tok = 2: must be 1"),
        ((4, 8, 1, RouterConfig(kind="gshard")), "num_experts_per_tok = 1: must be 2"),
        (
            (4, 8, 2, RouterConfig(kind="group_limited", n_group=3)),
            "n_group = 3: must divide num_experts = 8",
        ),
        (
            (4, 8, 3, RouterConfig(kind="group_limited", n_group=4)),
            "num_experts_per_tok = 3: must not exceed the 2",
        ),
    ],
)
def test_bad_settings(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(*arguments, rngs=nnx.Rngs(0))


def test_a_router_needs_its_row_and_its_scores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice, bias, sums and the model's size follow the row; nothing decides by the name."""

    def squared(logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_TE = jnp.square(logits_TE)
        return scores_TE, scores_TE / jnp.sum(scores_TE, axis=1, keepdims=True)

    one_bias = ModelConfig(router=RouterConfig(kind="sigmoid")).total_and_active_parameters()
    monkeypatch.setitem(SCORES, "squared", squared)
    rules = RouterRules("squared", num_experts_per_tok=3, normalizes=True, has_bias=True)
    monkeypatch.setitem(ROUTERS, "softmax", rules)
    with pytest.raises(ValueError, match=r"= 2: must be 3 for router\.kind = 'softmax'"):
        ModelConfig(num_experts_per_tok=2)
    ours, theirs = (
        ModelConfig(num_experts_per_tok=3).total_and_active_parameters()[0],
        one_bias[0],
    )
    assert ours == theirs
    router = Router(D, E, 3, RouterConfig(), rngs=nnx.Rngs(0))
    bias_E = jnp.asarray(np.random.default_rng(1).normal(size=E), jnp.float32)
    router.e_score_correction_bias[...] = bias_E
    routing = router(jnp.asarray(np.random.default_rng(0).normal(size=(T, D)), jnp.float32))
    scores = np.square(np.asarray(routing.logits_TE))
    chosen = np.argsort(-(scores + np.asarray(bias_E)), axis=1, kind="stable")[:, :3]
    assert np.array_equal(routing.topk_idx_TK, chosen)
    weights = np.take_along_axis(scores, chosen, axis=1)
    np.testing.assert_allclose(
        routing.topk_weights_TK, weights / weights.sum(1, keepdims=True), 1e-5
    )


def test_every_router_has_its_row_and_its_scores() -> None:
    assert list(ROUTERS) == list(get_args(RouterKind))
    assert {rules.scores for rules in ROUTERS.values()} == SCORES.keys()


def test_bad_shapes() -> None:
    router, _ = make("sigmoid")
    with pytest.raises(
        ValueError, match=rf"x_TD.shape = \({T}, {D + 1}\): must be \[tokens, hidden_size = {D}\]"
    ):
        router(jnp.zeros((T, D + 1)))
    with pytest.raises(ValueError, match=r"x_TD.shape"):
        router(jnp.zeros((2, T, D)))
    with pytest.raises(ValueError, match=r"logits_TE.shape"):
        route(jnp.zeros(E), 1)
    with pytest.raises(ValueError, match=r"bias_E.shape = \(3,\): must be \(16,\)"):
        route(jnp.zeros((T, E)), 1, RouterConfig(kind="sigmoid"), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"router.kind = 'softmax': takes no bias_E"):
        route(jnp.zeros((T, E)), 1, RouterConfig(), jnp.zeros(E))
    with pytest.raises(ValueError, match=r"counts_global_E.shape"):
        balance_loss_local(jnp.zeros(E), jnp.zeros(E - 1, jnp.int32), T, E, 2)


def test_a_gpu_routes_bfloat16_tokens_by_float32_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens' logits and gradients, by products of bfloat16, are those of a CPU."""
    config = RouterConfig()
    router = Router(D, E, 2, config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(router)
    many = router_module.MIN_TOKENS_BY_PARTS
    x_TD = jnp.asarray(np.random.default_rng(0).normal(size=(many, D)), jnp.bfloat16)

    def loss(state: nnx.State, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing = nnx.merge(graph, state)(x_TD)
        return (routing.topk_weights_TK**2).sum() + routing.z_sum, routing.logits_TE

    def results() -> list[np.ndarray]:
        (_, logits_TE), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x_TD)
        leaves = [logits_TE, *jax.tree.leaves(grads)]
        return [np.asarray(leaf, np.float32) for leaf in leaves]

    expected = results()
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(router_module, "target_device", lambda: gpu)
    by_parts, used = router_module.matmul_by_parts, []

    def counted(x: jax.Array, w: jax.Array) -> jax.Array:
        used.append(x.shape)
        return by_parts(x, w)

    monkeypatch.setattr(router_module, "matmul_by_parts", counted)
    for ours, theirs, rtol in zip(results(), expected, (1e-6, 1e-6, 2**-7), strict=True):
        assert_close(ours, theirs, rtol)
    assert used == [(many, D)]


def test_choices_are_gathered_alike_on_every_platform() -> None:
    """What a CPU does choice by choice and an accelerator at once: values, counts and gradients."""
    rng = np.random.default_rng(0)
    values_TE = jnp.asarray(rng.standard_normal((7, 5)), jnp.float32)
    idx_TK = jnp.asarray(rng.integers(0, 6, (7, 3)), jnp.int32)  # 5: none
    weights_TK = jnp.asarray(rng.standard_normal((7, 3)), jnp.float32)

    def weighted(values_TE: jax.Array, gather: Any) -> Any:
        gathered_TK, counts_E = gather(values_TE, idx_TK)
        return (gathered_TK * weights_TK).sum(), (gathered_TK, counts_E)

    forms = (router_module._gather_and_count_by_choice, router_module._gather_and_count_at_once)
    (one, other) = (jax.grad(weighted, has_aux=True)(values_TE, form) for form in forms)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("k", [1, 3])
def test_an_accelerator_chooses_as_a_cpu_does(k: int) -> None:
    # with ties
    scores_TE = jnp.asarray(np.random.default_rng(0).integers(0, 4, (50, 8)), jnp.float32)
    in_passes = router_module._top_k_in_passes(scores_TE, k)
    np.testing.assert_array_equal(in_passes, jax.lax.top_k(scores_TE, k)[1])
