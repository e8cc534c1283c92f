"""The grouped matmul and its gradients against the `ragged_dot` oracle, on the named shapes and on
any group sizes.

Legend: N rows sorted by group, D inner, F outer dimension, E groups; T tokens, K choices a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.grouped_matmul import Implementation, grouped_matmul, reference, xla
from kernels_pallas.shapes import MODELS, ROUTINGS, group_sizes
from kernels_pallas.token_permute import RowMap, dispatch
from tests.arrays import assert_close, random_row_map

ORACLE = Implementation(reference.grouped_matmul, reference.weight_gradient)
# of the largest value; bfloat16 is rounded once
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def operands(
    n: int, d: int, f: int, e: int, dtype: Any, transpose_rhs: bool = False
) -> tuple[jax.Array, ...]:
    """(x, w, dy)."""
    rng = np.random.default_rng(n + e)
    shapes = (n, d), (e, f, d) if transpose_rhs else (e, d, f), (n, f)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return x, w, dy


@partial(jax.jit, static_argnums=(0, 1))
def run(
    implementation: Any,
    transpose_rhs: bool,
    x: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
) -> Any:
    """(y, dx, dw)."""
    f = partial(grouped_matmul, transpose_rhs=transpose_rhs, implementation=implementation)
    y, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
    return y, *vjp(dy)


def assert_same(ours: Any, expected: Any, num_inside: int, tolerance: float, message: str) -> None:
    """Compare (y, dx, dw); rows of y and dx beyond the groups may differ."""
    for name, a, b in zip(("y", "dx", "dw"), ours, expected, strict=True):
        assert a.dtype == b.dtype
        a, b = (a, b) if name == "dw" else (a[:num_inside], b[:num_inside])
        assert_close(a, b, tolerance, f"{message} {name}")


@partial(jax.jit, static_argnums=(0, 1, 2))
def run_tokens(
    implementation: Any,
    dispatched: bool,
    transpose_rhs: bool,
    x_TD: jax.Array,
    w: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    rows: RowMap,
) -> Any:
    """(y of the rows that are not empty, dx, dw), with and without a dispatch before."""

    def f(x_TD: jax.Array, w: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"transpose_rhs": transpose_rhs, "implementation": implementation}
        if dispatched:
            x_ND = dispatch(x_TD, rows.src_M, rows.row_TK, rows.complete)
            return grouped_matmul(x_ND, w, sizes, **options)
        return grouped_matmul(x_TD, w, sizes, rows=rows, **options)

    full_N1 = (rows.src_M < x_TD.shape[0])[:, None]
    y, vjp = jax.vjp(f, x_TD, w)
    return jnp.where(full_N1, y, 0), *vjp(jnp.where(full_N1, dy, 0))


def tokens_of(rows: RowMap, d: int, dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).normal(size=(rows.row_TK.shape[0], d)), dtype)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n.startswith("mixtral") else pytest.mark.slow) for n in MODELS],
)
def test_named_shapes(name: str, dtype: Any) -> None:
    """The models' ratios, scaled down, and every routing: rows that are written, and tokens that
    are gathered.

    All slot counts and both tile sizes come into play.
    """
    shape = MODELS[name].scaled(width=32, experts=16, rows=600)
    n, e = shape.num_rows, shape.num_experts
    x_ND, w, dy = operands(n, shape.hidden_size, shape.moe_intermediate_size, e, dtype)
    rows = random_row_map(shape.num_tokens, shape.num_experts_per_tok, n, n)
    x = tokens_of(rows, shape.hidden_size, dtype)
    for routing in ROUTINGS:
        sizes = jnp.asarray(group_sizes(routing, n, e))
        ours, expected = (run(i, False, x_ND, w, dy, sizes) for i in (None, ORACLE))
        assert_same(ours, expected, n, TOLERANCE[dtype], routing)
        ours, expected = (
            run_tokens(i, False, False, x, w, dy, sizes, rows) for i in ("xla", ORACLE)
        )
        assert_same(ours, expected, n, TOLERANCE[dtype], f"{routing}, tokens")


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 80) | st.just(0), min_size=5, max_size=5),
    st.integers(0, 30),
    st.booleans(),
)
def test_any_group_sizes_of_tokens(sizes: list[int], num_dropped: int, transpose_rhs: bool) -> None:
    """As a dispatch and the product of its rows; dropped choices, empty rows and rows beyond the
    groups too.
    """
    _, w, dy = operands(400, 8, 16, 5, jnp.float32, transpose_rhs)
    rows = random_row_map(90, 3, sum(sizes), 400, num_dropped)
    x, sizes_E = tokens_of(rows, 8, jnp.float32), jnp.asarray(sizes, jnp.int32)
    ours, expected = (
        run_tokens("xla", d, transpose_rhs, x, w, dy, sizes_E, rows) for d in (False, True)
    )
    assert_same(ours, expected, 400, 1e-5, str(sizes))


def test_gradient_of_tokens_has_no_scatter() -> None:
    """XLA:CPU scatters row by row, and float scatters on GPU add in no fixed order."""
    rows, sizes = random_row_map(20, 3, 60, 60), jnp.array([40, 20], jnp.int32)
    f = lambda x, w: grouped_matmul(x, w, sizes, rows=rows).sum()  # noqa: E731
    jaxpr = str(jax.make_jaxpr(jax.grad(f))(jnp.ones((20, 8)), jnp.ones((2, 8, 8))))
    assert "f32[20,8]" in jaxpr
    assert "f32[20,8] = scatter" not in jaxpr


@pytest.mark.parametrize(
    ("src", "slot", "complaint"),
    [
        (
            jnp.zeros((8, 1), jnp.int32),
            jnp.zeros((4, 2), jnp.int32),
            r"src int32 \(8, 1\): must be integers \[M\]",
        ),
        (jnp.zeros(8), jnp.zeros((4, 2), jnp.int32), "src float32"),
        (
            jnp.zeros(8, jnp.int32),
            jnp.zeros(8, jnp.int32),
            r"row int32 \(8,\): must be integers \[T, K\]",
        ),
        (jnp.zeros(8, jnp.int32), jnp.zeros((3, 2), jnp.int32), "a line for each of the 4 tokens"),
    ],
)
def test_row_maps_are_checked(src: jax.Array, slot: jax.Array, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        grouped_matmul(
            jnp.ones((4, 8)),
            jnp.ones((2, 8, 8)),
            jnp.array([5, 3], jnp.int32),
            rows=RowMap(src, slot),
        )


@dtypes
def test_transposed(dtype: Any) -> None:
    x, w, dy = operands(300, 24, 40, 5, dtype, transpose_rhs=True)
    for routing in ROUTINGS:
        sizes = jnp.asarray(group_sizes(routing, 300, 5))
        ours, expected = (run(i, True, x, w, dy, sizes) for i in ("xla", ORACLE))
        assert_same(ours, expected, 300, TOLERANCE[dtype], routing)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 400), min_size=6, max_size=6).filter(lambda sizes: sum(sizes) <= 700)
)
def test_any_group_sizes(sizes: list[int]) -> None:
    """Rows beyond the groups too."""
    x, w, dy = operands(700, 8, 16, 6, jnp.float32)
    ours, expected = (
        run(i, False, x, w, dy, jnp.asarray(sizes, jnp.int32)) for i in ("xla", ORACLE)
    )
    assert_same(ours, expected, sum(sizes), 1e-5, str(sizes))
    assert np.isfinite(np.asarray(ours[0])).all()


def test_sums_are_float32() -> None:
    """4096 bfloat16 ones add up to 4096: a bfloat16 sum would stop at 256."""
    x, w = jnp.ones((16, 4096), jnp.bfloat16), jnp.ones((2, 4096, 8), jnp.bfloat16)
    assert (grouped_matmul(x, w, jnp.array([10, 6], jnp.int32)) == 4096).all()


def temp_bytes(implementation: Any, e: int) -> int:
    n, d, f = 2048, 64, 128
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    operands = of((n, d)), of((e, d, f)), of((n, f)), jax.ShapeDtypeStruct((e,), jnp.int32)
    compiled = run.lower(implementation, False, *operands).compile()
    # less what grows with the weights
    return compiled.memory_analysis().temp_size_in_bytes - 4 * e * d * f


def test_no_work_is_masked_or_padded_for_every_expert() -> None:
    """Temporaries do not grow with the number of experts, beyond one copy of the weights; the
    oracle's do.
    """
    few, many = temp_bytes("xla", 4), temp_bytes("xla", 32)
    rows_bytes = 4 * 2048 * (64 + 128)
    assert many < few + 2 * rows_bytes
    assert many < 6 * rows_bytes
    assert temp_bytes(ORACLE, 32) > 4 * many


def test_groups_that_are_not_chosen_are_not_read() -> None:
    """One row: NaN in every other group's weights does not matter."""
    w = jnp.full((8, 16, 4), jnp.nan).at[5].set(1.0)
    y = xla.grouped_matmul(jnp.ones((1, 16)), w, jnp.array([0, 0, 0, 0, 0, 1, 0, 0], jnp.int32))
    np.testing.assert_array_equal(y, np.full((1, 4), 16))


@pytest.mark.parametrize(
    ("x", "w", "sizes", "complaint"),
    [
        ((8, 4), (2, 4, 6), (3,), r"must be \[N, D\], \[E, D, F\] and \[E\]"),
        ((8, 4, 1), (2, 4, 6), (2,), r"must be \[N, D\], \[E, D, F\] and \[E\]"),
        ((8, 5), (2, 4, 6), (2,), "inner dimensions differ"),
    ],
)
def test_shapes_are_checked(x: Any, w: Any, sizes: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        grouped_matmul(jnp.ones(x), jnp.ones(w), jnp.ones(sizes, jnp.int32))


def test_dtypes_are_checked() -> None:
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 6)), jnp.array([3, 5], jnp.int32)
    with pytest.raises(ValueError, match="must have one dtype"):
        grouped_matmul(x.astype(jnp.bfloat16), w, sizes)
    with pytest.raises(ValueError, match="must be integers"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))
