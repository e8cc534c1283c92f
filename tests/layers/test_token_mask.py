"""Tokens that a `MoELayer` leaves out: padding by the caller, and what makes up a multiple of the
devices.

Legend: T tokens, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe import MoELayer, RouterConfig, Routing
from jmoe.layers.router import route
from jmoe.mesh import DATA, make_mesh, split_over
from tests.arrays import assert_trees_close
from tests.moe_layers import D, E, Result, Split, T, config_of, inputs, make, over, run

MASK_T = np.random.default_rng(2).random(T) < 0.6


def of_real_tokens(name: str, **options: Any) -> Result:
    """The layer on one device, given the tokens of `MASK_T` alone."""
    x, g = inputs()
    return run(make(name, **options), x[MASK_T], g[MASK_T])


def with_padding(layer: MoELayer) -> Result:
    """The layer given all tokens, of which those outside `MASK_T` are masked and hold NaN."""
    x, g = inputs()
    return run(layer, jnp.where(MASK_T[:, None], x, jnp.nan), g, token_mask=jnp.asarray(MASK_T))


def assert_left_out(padded: Result, expected: Result) -> None:
    """Masked tokens have no output and no gradient; all else is as without them."""
    assert not np.asarray(padded.y)[~MASK_T].any()
    assert not np.asarray(padded.dx)[~MASK_T].any()
    real = Result(padded.y[MASK_T], padded.metrics, padded.dx[MASK_T], padded.dparams)
    assert_trees_close(vars(real), vars(expected))


@pytest.mark.parametrize(
    "name",
    ["group_limited", *(pytest.param(n, marks=pytest.mark.slow) for n in ("switch", "softmax"))],
)
def test_masked_tokens_change_nothing(name: str) -> None:
    assert_left_out(with_padding(make(name)), of_real_tokens(name))


@pytest.mark.parametrize(
    ("split", "exchange"),
    [
        ((2, 2, 2), "flat"),
        *(pytest.param((1, 2, 4), kind, marks=pytest.mark.slow) for kind in ("dedup", "ragged")),
    ],
)
def test_masked_tokens_change_nothing_over_devices(split: Split, exchange: str) -> None:
    assert_left_out(
        with_padding(make("softmax", split, exchange=exchange, bias=True)),
        of_real_tokens("softmax", bias=True),
    )


def test_masked_tokens_take_no_capacity() -> None:
    """All tokens want the same experts, whose devices have rows for half of them: a quarter is
    real.
    """
    layer = make("softmax", (1, 1, 8), capacity_factor=2.0)
    x = jnp.broadcast_to(inputs()[0][0], (T, D))
    mask = jnp.arange(T) % 4 == 0
    y, metrics = layer(x, token_mask=mask)
    assert float(metrics.dropped_fraction) == 0
    assert float(layer(x)[1].dropped_fraction) == 0.5
    assert np.abs(y[0]).max() > 0.1
    # equal tokens, none of whose experts is missing
    assert_trees_close(y, jnp.where(mask[:, None], y[0], 0))


def test_no_token_counts() -> None:
    y, metrics = make("sigmoid", (2, 2, 2))(inputs()[0], token_mask=jnp.zeros(T, bool))
    assert not y.any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(metrics))  # not NaN either


@pytest.mark.parametrize(
    ("tokens", "split", "exchange"),
    [
        (13, (2, 2, 2), "flat"),
        (13, (1, 2, 4), "dedup"),
        (1, (1, 1, 8), "flat"),
        pytest.param(1, (1, 1, 8), "ragged", marks=pytest.mark.slow),
    ],
)
def test_tokens_that_the_devices_do_not_divide(tokens: int, split: Split, exchange: str) -> None:
    x, g = (a[:tokens] for a in inputs())
    ours = run(make("sigmoid", split, exchange=exchange), x, g)
    expected = run(make("sigmoid"), x, g)
    assert ours.y.shape == (tokens, D)
    assert_trees_close(vars(ours), vars(expected))


@pytest.mark.parametrize(("split", "shape"), [(None, (0, D)), ((2, 2, 2), (4, 0, D))])
def test_no_tokens(split: Split | None, shape: tuple[int, ...]) -> None:
    x = jnp.zeros(shape)
    result = run(make("sigmoid", split), x, x)
    assert result.y.shape == result.dx.shape == shape
    assert not any(leaf.any() for leaf in jax.tree.leaves((result.metrics, result.dparams)))


def test_a_device_without_tokens_in_own_shard_map() -> None:
    layer = make("softmax", (8, 1, 1), expert_axes=())

    def choose(x_TD: jax.Array) -> jax.Array:
        routing = layer.local(x_TD, keep_routing=True)[1].routing
        assert routing is not None
        return routing.topk_idx_TK

    mesh, specs = make_mesh((8, 1, 1)), split_over((DATA,))
    routings = jax.jit(
        jax.shard_map(choose, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    )
    assert routings(jnp.zeros((0, D))).shape == (0, 2)
    assert routings(inputs()[0]).shape == (T, 2)


def test_choices_that_are_sampled_or_given_are_masked_too() -> None:
    config = RouterConfig(kind="gshard", second_expert_policy="random")
    logits, mask_T = jax.random.normal(jax.random.key(0), (T, E)), jnp.asarray(MASK_T)
    drawn = route(logits, 2, config, key=jax.random.key(1))
    for chosen in ({"key": jax.random.key(1)}, {"topk_idx_TK": drawn.topk_idx_TK}):
        masked = route(logits, 2, config, token_mask_T=mask_T, **chosen)
        np.testing.assert_array_equal(
            masked.topk_idx_TK, jnp.where(mask_T[:, None], drawn.topk_idx_TK, E)
        )
        np.testing.assert_array_equal(
            masked.topk_weights_TK, jnp.where(mask_T[:, None], drawn.topk_weights_TK, 0)
        )
        expected = jnp.bincount(drawn.topk_idx_TK[mask_T].reshape(-1), length=E + 1)[:E]
        np.testing.assert_array_equal(masked.counts_E, expected)


# ---- a user's own router


def first_experts(x_TD: jax.Array, *, key: Any = None, train: bool = False) -> Routing:
    """Every token to experts 0 and 1, whatever is masked."""
    idx_TK = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (x_TD.shape[0], 2))
    counts_E = jnp.zeros(E, jnp.int32).at[:2].set(x_TD.shape[0])
    zero = jnp.float32(0)
    return Routing(
        idx_TK, jnp.full(idx_TK.shape, 0.5), counts_E, counts_E.astype(jnp.float32), zero, zero
    )


def first_experts_of_some(
    x_TD: jax.Array, *, token_mask_T: jax.Array | None = None, **_: Any
) -> Routing:
    """Leaves the choices of masked tokens to the layer, but not its sums."""
    routing = first_experts(x_TD)
    if token_mask_T is None:
        return routing
    counts_E = jnp.zeros(E, jnp.int32).at[:2].set(token_mask_T.sum(dtype=jnp.int32))
    sums = counts_E, counts_E.astype(jnp.float32), routing.z_sum, routing.entropy_sum
    return Routing(routing.topk_idx_TK, routing.topk_weights_TK, *sums)


@pytest.mark.parametrize("split", [None, (2, 2, 2)])
def test_own_router(split: Split | None) -> None:
    def layer(router: Callable[..., Routing]) -> MoELayer:
        return MoELayer(
            config_of(), over(split and make_mesh(split)), router=router, rngs=nnx.Rngs(0)
        )

    x, mask = inputs()[0], jnp.asarray(MASK_T)
    whole, _ = layer(first_experts)(x)
    y, metrics = layer(first_experts_of_some)(x, token_mask=mask)
    assert_trees_close(y, jnp.where(mask[:, None], whole, 0))
    np.testing.assert_allclose(metrics.load_E[:2], 0.5)
    with pytest.raises(
        ValueError,
        match=r"router = 'first_experts': must take token_mask_T=, bool, since tokens are",
    ):
        layer(first_experts)(x, token_mask=mask)
    if split is not None:
        with pytest.raises(ValueError, match=r"router = 'first_experts': must take token_mask_T="):
            layer(first_experts)(x[:12])
        assert_trees_close(layer(first_experts_of_some)(x[:12])[0], whole[:12])


def test_bad_masks() -> None:
    layer, x = make("softmax"), jnp.zeros((4, 8, D))
    with pytest.raises(
        ValueError,
        match=r"token_mask.shape = \(32,\): must be \(4, 8\), a value for each token of x",
    ):
        layer(x, token_mask=jnp.ones(32, bool))
    with pytest.raises(
        ValueError, match=r"token_mask.dtype = dtype\('int32'\): must be bool, as `attention_"
    ):
        layer(x, token_mask=jnp.ones((4, 8), jnp.int32))
