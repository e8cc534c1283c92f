"""Dispatch and combine against plain indexing and JAX's own gradients of it.

Legend: T tokens, K choices a token, M rows of a buffer, D hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.token_permute import (
    combine,
    dispatch,
    row_weights,
    sort_by_expert,
    sum_rows,
    take_rows,
)
from kernels_pallas.token_permute.sort import counting_sort
from tests.arrays import random_row_map

T, K, D = 20, 3, 8


def permutation(rows: int, dropped: int) -> tuple[np.ndarray, np.ndarray]:
    """(src_M, row_TK) of a random assignment of the T * K choices to `rows` rows, `dropped` of
    them to none.
    """
    row_map = random_row_map(T, K, rows, rows, dropped)
    return np.asarray(row_map.src_M), np.asarray(row_map.row_TK)


# rows == T * K: full; more: empty rows; choices dropped: tokens that lost one choice or all of them
CASES = [(60, 0), (96, 0), (40, 20), (64, 31), (8, 60)]
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def plain_dispatch(x_TD: jax.Array, src_M: np.ndarray) -> jax.Array:
    return jnp.concatenate([x_TD, jnp.zeros((1, D), x_TD.dtype)])[src_M]


def plain_combine(y_MD: jax.Array, weights_TK: jax.Array, row_TK: np.ndarray) -> jax.Array:
    y_MD = jnp.concatenate([y_MD.astype(jnp.float32), jnp.zeros((1, D))])
    return jnp.einsum("tkd,tk->td", y_MD[row_TK], weights_TK)


@pytest.mark.parametrize(
    ("rows", "dropped", "complete"), [(*c, False) for c in CASES] + [(60, 0, True), (96, 0, True)]
)
@dtypes
def test_dispatch(rows: int, dropped: int, complete: bool, dtype: Any) -> None:
    src_M, row_TK = permutation(rows, dropped)
    rng = np.random.default_rng(0)
    x_TD = jnp.asarray(rng.normal(size=(T, D)), dtype)
    g_MD = jnp.asarray(rng.normal(size=(rows, D)), dtype)

    @jax.jit
    def run(
        x_TD: jax.Array, src_M: jax.Array, row_TK: jax.Array, g_MD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        y, vjp = jax.vjp(lambda x: dispatch(x, src_M, row_TK, complete), x_TD)
        return y, vjp(g_MD)[0]

    y_MD, dx_TD = run(x_TD, jnp.asarray(src_M), jnp.asarray(row_TK), g_MD)
    full_M = src_M < T  # an empty row holds some token
    np.testing.assert_array_equal(y_MD[full_M], plain_dispatch(x_TD, src_M)[full_M])
    assert np.isfinite(np.asarray(y_MD, np.float32)).all()
    assert y_MD.dtype == dx_TD.dtype == dtype
    # the gradient is summed in float32 and rounded once
    _, vjp = jax.vjp(lambda x: plain_dispatch(x, src_M), x_TD.astype(jnp.float32))
    expected = vjp(g_MD.astype(jnp.float32))[0]
    tolerance = 1e-6 if dtype == jnp.float32 else 4e-3
    np.testing.assert_allclose(dx_TD.astype(jnp.float32), expected, rtol=tolerance, atol=1e-6)


def test_the_gradient_of_a_permutation_is_one() -> None:
    """Bit for bit, and not by a sum in float32, which a GPU wrote to memory and read again."""
    rng = np.random.default_rng(0)
    order, x, g = (
        jnp.asarray(rng.permutation(T), jnp.int32),
        *(jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16) for _ in range(2)),
    )
    rank = jnp.argsort(order)

    def gradient(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: dispatch(x, order, rank[:, None], True), x)[1](g)[0]

    np.testing.assert_array_equal(jax.jit(gradient)(x, g), g[rank])
    assert "f32" not in str(jax.make_jaxpr(gradient)(x, g))


@pytest.mark.parametrize(
    ("rows", "dropped", "complete"), [(*c, False) for c in CASES] + [(60, 0, True)]
)
@dtypes
def test_combine(rows: int, dropped: int, complete: bool, dtype: Any) -> None:
    src_M, row_TK = permutation(rows, dropped)
    rng = np.random.default_rng(1)
    y_MD = jnp.asarray(rng.normal(size=(rows, D)), dtype)
    weights_TK = jnp.asarray(rng.uniform(size=(T, K)), jnp.float32)
    # exact in both dtypes
    g_TD = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16).astype(jnp.float32)

    @jax.jit
    def run(
        y_MD: jax.Array, weights_TK: jax.Array, src_M: jax.Array, row_TK: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        out, vjp = jax.vjp(lambda y, w: combine(y, w, src_M, row_TK, complete), y_MD, weights_TK)
        return out, *vjp(g_TD)

    out_TD, dy_MD, dweights_TK = run(y_MD, weights_TK, jnp.asarray(src_M), jnp.asarray(row_TK))
    expected, vjp = jax.vjp(
        lambda y, w: plain_combine(y, w, row_TK), y_MD.astype(jnp.float32), weights_TK
    )
    expected_dy, expected_dweights = vjp(g_TD)
    assert out_TD.dtype == dweights_TK.dtype == jnp.float32 and dy_MD.dtype == dtype
    np.testing.assert_allclose(out_TD, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dweights_TK, expected_dweights, rtol=1e-5, atol=1e-6)
    tolerance = 1e-6 if dtype == jnp.float32 else 4e-3
    np.testing.assert_allclose(dy_MD.astype(jnp.float32), expected_dy, rtol=tolerance, atol=1e-6)
    lost_T = (row_TK == rows).all(axis=1)
    assert not out_TD[lost_T].any()
    assert not dy_MD[src_M == T].any()  # an empty row takes no gradient
    assert not dweights_TK[row_TK == rows].any()  # nor does the weight of a dropped choice


@pytest.mark.parametrize(("rows", "dropped"), CASES)
@dtypes
def test_sum_rows_is_the_transpose_of_dispatch(rows: int, dropped: int, dtype: Any) -> None:
    src_M, row_TK = (jnp.asarray(index) for index in permutation(rows, dropped))
    rng = np.random.default_rng(2)
    y_MD = jnp.asarray(rng.normal(size=(rows, D)), dtype)
    # exact in both dtypes
    g_TD = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16).astype(jnp.float32)
    out_TD, vjp = jax.vjp(lambda y: sum_rows(y, src_M, row_TK), y_MD)
    assert out_TD.dtype == jnp.float32
    np.testing.assert_array_equal(out_TD, combine(y_MD, jnp.ones((T, K)), src_M, row_TK))
    _, transpose = jax.vjp(lambda x: dispatch(x, src_M, row_TK), g_TD)
    np.testing.assert_allclose(out_TD, transpose(y_MD.astype(jnp.float32))[0], rtol=1e-5, atol=1e-6)
    (dy_MD,), full_M = vjp(g_TD), src_M < T
    assert dy_MD.dtype == dtype
    np.testing.assert_array_equal(
        dy_MD[full_M], dispatch(g_TD.astype(dtype), src_M, row_TK)[full_M]
    )
    assert np.isfinite(np.asarray(dy_MD, np.float32)).all()


@pytest.mark.parametrize(("rows", "dropped"), CASES)
def test_row_weights(rows: int, dropped: int) -> None:
    """A row has its choice's weight, and a choice the gradient of its row; an empty row and a
    dropped choice have 0.
    """
    src_M, row_TK = permutation(rows, dropped)
    choice_M = np.full(rows, T * K, np.int32)
    kept = row_TK.reshape(-1) < rows
    choice_M[row_TK.reshape(-1)[kept]] = np.flatnonzero(kept)
    weights_TK, dweight_M = (
        jnp.asarray(np.random.default_rng(2).normal(size=size), jnp.float32)
        for size in ((T, K), rows)
    )
    weight_M, vjp = jax.vjp(lambda w: row_weights(w, choice_M, jnp.asarray(row_TK)), weights_TK)
    expected = np.zeros(rows, np.float32)
    expected[choice_M < T * K] = np.asarray(weights_TK).reshape(-1)[choice_M[choice_M < T * K]]
    np.testing.assert_array_equal(weight_M, expected)
    assert not np.any(np.asarray(weight_M)[src_M == T])
    (dweights_TK,) = vjp(dweight_M)
    padded = np.append(dweight_M, 0)
    np.testing.assert_array_equal(dweights_TK, padded[np.minimum(row_TK, rows)])


def test_a_permutation_and_its_inverse() -> None:
    """Rows put in order and back, as the exchange does on arrival: bit-exact, forwards and
    backwards.
    """
    order_M = jnp.asarray(np.random.default_rng(3).permutation(64), jnp.int32)
    rank_M = jnp.argsort(order_M).astype(jnp.int32)
    x_MD, g_MD = (
        jnp.asarray(np.random.default_rng(s).normal(size=(64, D)), jnp.bfloat16) for s in (4, 5)
    )

    def there_and_back(x_MD: jax.Array) -> jax.Array:
        return dispatch(
            dispatch(x_MD, order_M, rank_M[:, None], True), rank_M, order_M[:, None], True
        )

    y_MD, vjp = jax.vjp(there_and_back, x_MD)
    np.testing.assert_array_equal(y_MD, x_MD)
    np.testing.assert_array_equal(vjp(g_MD)[0], g_MD)


def test_dispatch_then_combine_is_the_sum_of_the_kept_weights() -> None:
    src_M, row_TK = permutation(64, 31)
    x_TD = jnp.asarray(np.random.default_rng(2).normal(size=(T, D)), jnp.float32)
    weights_TK = jnp.full((T, K), 0.25)
    out_TD = combine(
        dispatch(x_TD, src_M, row_TK), weights_TK, jnp.asarray(src_M), jnp.asarray(row_TK)
    )
    kept_T = (row_TK < 64).sum(axis=1).astype(np.float32)
    np.testing.assert_allclose(out_TD, x_TD * (0.25 * kept_T)[:, None], rtol=1e-6)


def test_no_scatter_forwards_or_backwards() -> None:
    """XLA:CPU scatters row by row, and float scatters on GPU add in no fixed order."""
    src_M, row_TK = permutation(96, 0)

    def loss(x_TD: jax.Array, weights_TK: jax.Array) -> jax.Array:
        return combine(
            dispatch(x_TD, src_M, row_TK), weights_TK, jnp.asarray(src_M), jnp.asarray(row_TK)
        ).sum()

    assert "scatter" not in str(
        jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((T, D)), jnp.ones((T, K)))
    )


def test_take_rows_out_of_range_is_zero() -> None:
    x = jnp.arange(6.0).reshape(3, 2) + 1
    np.testing.assert_array_equal(take_rows(x, jnp.array([2, 3, 0])), [[5, 6], [0, 0], [1, 2]])


@pytest.mark.parametrize(
    ("n", "experts"), [(0, 3), (1, 1), (7, 3), (128, 4), (1000, 5), (513, 512)]
)
def test_sort_by_expert(n: int, experts: int) -> None:
    """Both ways of sorting are the stable sort; the index `experts` (none) comes last."""
    idx = np.random.default_rng(n).integers(0, experts + 1, n).astype(np.int32)
    expected = np.argsort(idx, kind="stable")
    order, rank = sort_by_expert(jnp.asarray(idx), experts)
    assert order.dtype == rank.dtype == jnp.int32
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(rank, np.argsort(expected))
    np.testing.assert_array_equal(counting_sort(jnp.asarray(idx), experts), rank)


def test_sort_of_more_experts_times_assignments_than_an_integer_counts() -> None:
    idx = np.random.default_rng(0).integers(0, 2**23 + 1, 300).astype(np.int32)
    order, rank = jax.jit(sort_by_expert, static_argnums=1)(jnp.asarray(idx), 2**23)
    np.testing.assert_array_equal(order, np.argsort(idx, kind="stable"))
    np.testing.assert_array_equal(rank, np.argsort(order))
