"""Matrix products with float32 sums, each in the form that is fastest on the platform.

On a CPU a bfloat16 product that contracts the *rows* of its left operand (every weight gradient,
x^T g) misses XLA's fast path and takes 2 to 3 times as long, and XLA folds a plain transpose into
the product. `transposed` therefore copies the transpose behind a branch that XLA cannot fold. A
product of few rows, or of many where that is faster, uses `kernels_pallas.native` where the trace
allows it.

Legend: the last two dimensions are M rows, K inner, N columns; leading dimensions (experts) are
batched.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.native import (
    MAX_ROWS,
    SIZE_MULTIPLE,
    uses_native_inference,
    uses_native_products_of_many_rows,
)
from kernels_pallas.native import matmul as native_matmul


def _transpose_by_copy(x: jax.Array) -> jax.Array:
    flipped = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    always = lax.optimization_barrier(jnp.int32(1)) > 0
    return lax.cond(always, lambda a: a.swapaxes(-1, -2), lambda a: a.reshape(flipped), x)


def transposed(x: jax.Array) -> jax.Array:
    """Return x with its last two dimensions swapped; on a CPU a copy, except for float32."""
    if x.dtype == jnp.float32:
        return x.swapaxes(-1, -2)  # float32 products are as fast either way
    return lax.platform_dependent(x, cpu=_transpose_by_copy, default=lambda a: a.swapaxes(-1, -2))


def float32_precision(*operands: jax.Array) -> lax.Precision | None:
    """Return the `precision` of a product of these operands: HIGHEST if all are float32, else None.

    XLA's default on a GPU is TF32, which has 10 bits of mantissa instead of 23.
    """
    is_float32 = all(operand.dtype == jnp.float32 for operand in operands)
    return lax.Precision.HIGHEST if is_float32 else None


# With more rows the native bfloat16 products, which use no matrix unit, lose more in arithmetic
# than they save in reading weights.
NATIVE_ROWS = 16
MIN_ROWS = 8  # bfloat16 products of fewer rows miss XLA:CPU's fast path: there they are padded


def dot(a: jax.Array, b: jax.Array, *, b_transposed: bool = False) -> jax.Array:
    """Return float32 a @ b, [..., M, N], or a @ b^T with `b_transposed`, where b is [..., N, K]."""
    if b.ndim == 2 and a.ndim > 2:
        y = dot(a.reshape(-1, a.shape[-1]), b, b_transposed=b_transposed)
        return y.reshape(*a.shape[:-1], y.shape[-1])
    if _is_native(a, b, b_transposed):
        return native_matmul(a, b, transposed=b_transposed)
    rows = a.shape[-2]
    product = partial(_dot_general, b_transposed=b_transposed)
    if rows < MIN_ROWS and a.dtype == jnp.bfloat16:
        return lax.platform_dependent(
            a, b, cpu=partial(_padded_dot, b_transposed=b_transposed), default=product
        )
    return product(a, b)


def _is_native(a: jax.Array, b: jax.Array, b_transposed: bool) -> bool:
    """Return True if the current trace allows native products and has one for these operands."""
    rows, is_narrow = a.shape[-2], b.dtype == jnp.bfloat16
    if uses_native_inference():
        fits = rows <= NATIVE_ROWS if is_narrow else b.dtype == jnp.float32
        return fits and a.ndim == b.ndim and a.ndim <= 3
    is_matrix = a.ndim == b.ndim == 2 and not b_transposed and b.shape[-1] % SIZE_MULTIPLE == 0
    return is_narrow and is_matrix and rows > MAX_ROWS and uses_native_products_of_many_rows()


def _padded_dot(a: jax.Array, b: jax.Array, *, b_transposed: bool) -> jax.Array:
    rows = a.shape[-2]
    a = jnp.pad(a, ((0, 0),) * (a.ndim - 2) + ((0, MIN_ROWS - rows), (0, 0)))
    return _dot_general(a, b, b_transposed=b_transposed)[..., :rows, :]


def _dot_general(a: jax.Array, b: jax.Array, *, b_transposed: bool) -> jax.Array:
    batch = tuple(range(b.ndim - 2))
    inner = b.ndim - 1 if b_transposed else b.ndim - 2
    return lax.dot_general(
        a,
        b,
        (((a.ndim - 1,), (inner,)), (batch, batch)),
        precision=float32_precision(a, b),
        preferred_element_type=jnp.float32,
    )


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return float32 x @ w for x [..., K] and w [K, N] of one dtype. Both gradients use the fast
    form.
    """
    return dot(x, w)


def _matmul_fwd(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dot(x, w), (x, w)


def _matmul_bwd(
    residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    g = g.astype(w.dtype)
    dx = dot(g, w, b_transposed=True).astype(x.dtype)
    rows_x, rows_g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return dx, dot(transposed(rows_x), rows_g).astype(w.dtype)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Return three bfloat16 arrays whose sum is the float32 x, the largest first."""
    parts = []
    for _ in range(3):
        # not a cast there and back, which XLA may leave out
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _sum_of_parts(y: jax.Array) -> jax.Array:
    """Return the sum of the three thirds of y's columns, the smallest first."""
    first, second, third = jnp.split(y, 3, axis=-1)
    return first + (second + third)


def matmul_by_parts(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return float32 x @ w for bfloat16 x [M, K] and float32 w [K, N], by products of bfloat16: a
    GPU has no fast float32 product, and x is not widened in memory.

    w is split into three bfloat16 parts, whose products with x are exact in float32: the result
    differs from the float32 product by the order of sums. So does the gradient of w; that of x,
    bfloat16, leaves out products below 2^-16 of the largest.
    """
    # in `shard_map` a custom gradient's operands must vary over the same axes
    axes = [jax.typeof(operand).manual_axis_type.varying for operand in (x, w)]
    x = lax.pcast(x, tuple(axes[1] - axes[0]), to="varying")
    return _matmul_by_parts(x, lax.pcast(w, tuple(axes[0] - axes[1]), to="varying"))


@jax.custom_vjp
def _matmul_by_parts(x: jax.Array, w: jax.Array) -> jax.Array:
    return _sum_of_parts(dot(x, jnp.concatenate(_bfloat16_parts(w), axis=-1)))


def _matmul_by_parts_fwd(
    x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul_by_parts(x, w), (x, w)


def _matmul_by_parts_bwd(
    residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    (g1, g2, g3), (w1, w2, _) = _bfloat16_parts(g), _bfloat16_parts(w)
    columns = (jnp.concatenate(parts, axis=-1) for parts in ((g1, g1, g2), (w1, w2, w1)))
    dx = dot(*columns, b_transposed=True).astype(x.dtype)
    return dx, _sum_of_parts(dot(transposed(x), jnp.concatenate((g1, g2, g3), axis=-1)))


_matmul_by_parts.defvjp(_matmul_by_parts_fwd, _matmul_by_parts_bwd)
