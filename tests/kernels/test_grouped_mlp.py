"""The grouped MLP against its `ragged_dot` oracle: values and every gradient, for even and skewed
groups.

Legend: N rows sorted by group, L groups, D hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_mlp import MLPWeights, grouped_mlp, mosaic_gpu, reference
from kernels_pallas.token_permute import RowMap, dispatch
from tests.arrays import assert_close, assert_near

N, L, D, F = 400, 4, 12, 20
GROUPS = {
    "balanced": (100, 100, 100, 100),
    "uneven": (130, 37, 201, 32),
    # with few slots: three overflow tiles of one group, the last one partly filled
    "one group": (0, 0, 400, 0),
    "empty groups": (0, 233, 0, 167),
    "rows beyond": (60, 0, 151, 20),  # 169 rows belong to no group
    "no rows": (0, 0, 0, 0),
    "edges": (128, 129, 127, 16),  # groups that end on a tile's edge, and one beside it
}


def arrays(activation: str, bias: bool, dtype: Any, scaled: bool = False) -> list[jax.Array | None]:
    """[x, w_up, w_down, b_up, b_down, scale]; the biases float32, as the layers keep them."""
    up = F if activation == "gelu" else 2 * F
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, w_up, w_down = draw(N, D), draw(L, D, up) * D**-0.5, draw(L, F, D) * F**-0.5
    biases = [draw(L, up), draw(L, D)] if bias else [None, None]
    scale = draw(N) if scaled else None
    return [x.astype(dtype), w_up.astype(dtype), w_down.astype(dtype), *biases, scale]


@partial(jax.jit, static_argnums=(0, 1))
def run(
    slots: int | None, activation: str, operands: list[Any], sizes_L: jax.Array, dy_ND: jax.Array
) -> Any:
    """(y, gradients of the operands); slots None is the oracle. One compilation serves every
    routing.
    """

    def f(x: jax.Array, *operands: Any) -> jax.Array:
        *weights, scale = operands
        options: Any = {"activation": activation, "scale_N": scale}
        if slots is None:
            return reference.grouped_mlp(x, sizes_L, MLPWeights(*weights), **options)
        return grouped_mlp(
            x, sizes_L, MLPWeights(*weights), batched_rows_per_group=slots, **options
        )

    y, vjp = jax.vjp(f, *operands)
    return y, vjp(dy_ND)


def compare(
    slots: int, activation: str, bias: bool, dtype: Any, tolerance: float, scaled: bool = False
) -> None:
    operands = arrays(activation, bias, dtype, scaled)
    dy_ND = jnp.asarray(np.random.default_rng(1).normal(size=(N, D)), dtype)
    for name, sizes in GROUPS.items():
        sizes_L = jnp.asarray(sizes, jnp.int32)
        ours, expected = (run(s, activation, operands, sizes_L, dy_ND) for s in (slots, None))
        structure: Any = jax.tree.structure(ours)
        assert structure == jax.tree.structure(expected)
        for i, (a, b) in enumerate(
            zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
        ):
            assert a.dtype == b.dtype
            assert jnp.isfinite(a).all(), name
            if len(a) == N:  # rows that belong to no group hold anything
                a, b = a[: sum(sizes)], b[: sum(sizes)]
            assert_close(a, b, tolerance, f"{name}, leaf {i}")


# nearly all rows in tiles ... all rows in slots
@pytest.mark.parametrize("slots", [8, 40, 128, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_float32(activation: str, bias: bool, slots: int) -> None:
    compare(slots, activation, bias, jnp.float32, 1e-5)


@pytest.mark.parametrize("slots", [40, 1000])
@pytest.mark.parametrize(
    ("activation", "bias"), [("swiglu", False), ("gelu", True), ("clamped_swiglu", True)]
)
def test_bfloat16(activation: str, bias: bool, slots: int) -> None:
    compare(slots, activation, bias, jnp.bfloat16, 2e-2)


@pytest.mark.parametrize("slots", [8, 1000])
@pytest.mark.parametrize(
    ("activation", "bias"), [("swiglu", False), ("gelu", True), ("clamped_swiglu", True)]
)
def test_factors_of_rows(activation: str, bias: bool, slots: int) -> None:
    """The factor multiplies activations and bias; the reference multiplies the output."""
    compare(slots, activation, bias, jnp.float32, 1e-5, scaled=True)
    compare(slots, activation, bias, jnp.bfloat16, 2e-2, scaled=True)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (jnp.ones(N - 1), rf"scale float32 \({N - 1},\): must be float32 \[{N}\]"),
        (jnp.ones(N, jnp.bfloat16), rf"scale bfloat16 \({N},\): must be float32 \[{N}\]"),
    ],
)
def test_factors_that_do_not_fit(scale: jax.Array, words: str) -> None:
    x, w_up, w_down, *_ = arrays("swiglu", False, jnp.float32)
    assert x is not None and w_up is not None and w_down is not None
    with pytest.raises(ValueError, match=words):
        grouped_mlp(
            x,
            jnp.asarray(GROUPS["balanced"], jnp.int32),
            MLPWeights(w_up, w_down),
            activation="swiglu",
            batched_rows_per_group=8,
            scale_N=scale,
        )


def test_bfloat16_stays_near_float32() -> None:
    """Rounded operands, not rounded sums: bfloat16 is within a per cent of the float32 result."""
    low, full = (arrays("swiglu", False, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    sizes_L, dy_ND = jnp.asarray(GROUPS["uneven"], jnp.int32), jnp.ones((N, D))
    ours = run(40, "swiglu", low, sizes_L, dy_ND.astype(jnp.bfloat16))
    expected = run(40, "swiglu", full, sizes_L, dy_ND)
    assert_near(ours, expected, 1e-2)


@pytest.mark.parametrize("slots", [40, 1000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_that_are_not_dispatched(dtype: Any, slots: int) -> None:
    """Values and gradients are those of a dispatch before, which is not in the program."""
    num_tokens, k = N // 2, 2
    order = np.random.default_rng(2).permutation(N).astype(np.int32)
    rows = RowMap(
        jnp.asarray(order // k),
        jnp.asarray(np.argsort(order).reshape(-1, k), jnp.int32),
        complete=True,
    )
    x, w_up, w_down, *_ = arrays("swiglu", False, dtype)
    assert x is not None and w_up is not None and w_down is not None
    dy_ND = jnp.asarray(np.random.default_rng(1).normal(size=(N, D)), dtype)

    @partial(jax.jit, static_argnums=0)
    def both(dispatched: bool, x: jax.Array, sizes_L: jax.Array) -> Any:
        def f(x: jax.Array, *weights: jax.Array) -> jax.Array:
            x = dispatch(x, rows.src_M, rows.row_TK, True) if dispatched else x
            at = None if dispatched else rows
            return grouped_mlp(
                x,
                sizes_L,
                MLPWeights(*weights),
                activation="swiglu",
                batched_rows_per_group=slots,
                rows=at,
            )

        y, vjp = jax.vjp(f, x, w_up, w_down)
        return y, *vjp(dy_ND)

    for name in ("balanced", "uneven", "one group"):
        sizes_L = jnp.asarray(GROUPS[name], jnp.int32)
        for a, b in zip(
            *(both(dispatched, x[:num_tokens], sizes_L) for dispatched in (False, True)),
            strict=True,
        ):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(
                a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-6, atol=1e-6, err_msg=name
            )


def test_one_group() -> None:
    x, w_up, w_down, *_ = arrays("swiglu", False, jnp.float32)
    assert x is not None and w_up is not None and w_down is not None
    y = grouped_mlp(
        x,
        jnp.array([N], jnp.int32),
        MLPWeights(w_up[:1], w_down[:1]),
        activation="swiglu",
        batched_rows_per_group=64,
    )
    expected = reference.activate(x @ w_up[0], "swiglu") @ w_down[0]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_activations() -> None:
    h = jnp.linspace(-3, 3, 12).reshape(2, 6)
    gate, up = h[:, :3], h[:, 3:]
    np.testing.assert_allclose(
        reference.activate(h, "swiglu"), gate / (1 + jnp.exp(-gate)) * up, rtol=1e-5
    )
    erf = jax.scipy.special.erf(h / jnp.sqrt(2.0))
    np.testing.assert_allclose(
        reference.activate(h, "gelu"), h * (1 + erf) / 2, rtol=1e-5, atol=1e-6
    )
    h = jnp.asarray([[-9.0, 3.0, 9.0, 2.0, -9.0, 9.0, 0.5, -0.5]])
    gate, up = np.array([-9.0, 3.0, 7.0, 2.0]), np.array([-7.0, 7.0, 0.5, -0.5])  # after the clamps
    clamped = reference.activate(h, "clamped_swiglu")[0]
    np.testing.assert_allclose(clamped, gate / (1 + np.exp(-1.702 * gate)) * (up + 1), rtol=1e-5)


def test_what_a_kernel_writes_for_the_backward_pass_is_from_the_launch_that_the_forward_pass_reads() -> (
    None
):
    """A scan stacks it: XLA would launch the kernel once more, straight into the stack, but for
    a barrier.
    """

    def forward(x_ND: jax.Array, w_up: jax.Array, w_down: jax.Array, sizes_L: jax.Array) -> Any:
        weights = MLPWeights(w_up, w_down, None, None)
        return jax.vjp(
            lambda x, w: mosaic_gpu.grouped_mlp(x, sizes_L, w, activation="swiglu"), x_ND, weights
        )

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    shapes = of(256, 128), of(2, 128, 256), of(2, 128, 128), jax.ShapeDtypeStruct((2,), jnp.int32)
    text = jax.jit(forward).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    written = re.findall(r"(%\w+) = stablehlo.custom_call @mosaic_gpu", text)
    assert len(written) == 2
    for name in written:
        (reader,) = re.findall(rf"^.*[(\s,]{name}\b(?! = ).*$", text, re.MULTILINE)
        assert "stablehlo.optimization_barrier" in reader
