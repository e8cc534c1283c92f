"""The Hopper kernels on CPU, in Pallas' interpreter, against the references: values and every gradient.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, T tokens, K choices a token, M rows.

The interpreter runs every warpgroup as a thread of its own, with shared memory, barriers and copies; where it can it
also looks for races between them. Shapes are small: one case takes seconds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import grouped_matmul as gm
from kernels_pallas import token_permute as tp
from kernels_pallas.grouped_matmul import mosaic_gpu as gm_mosaic
from kernels_pallas.grouped_matmul import reference as gm_reference
from kernels_pallas.grouped_mlp import mosaic_gpu as mlp_mosaic
from kernels_pallas.grouped_mlp import reference as mlp_reference
from kernels_pallas.token_permute import mosaic_gpu as tp_mosaic

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

old_interpreter = jax.__version_info__ < (0, 12)
needs_transposes = pytest.mark.skipif(old_interpreter, reason="this JAX's interpreter cannot transpose a wgmma operand")
INTERPRET = {"num_sms": 2, "interpret": InterpretGPUParams(detect_races=not old_interpreter)}
MATMUL = gm.Implementation(
    partial(gm_mosaic.grouped_matmul, **INTERPRET), partial(gm_mosaic.weight_gradient, **INTERPRET)
)
PERMUTE = tp.Implementation(partial(tp_mosaic.gather_rows, **INTERPRET), partial(tp_mosaic.gather_sum, **INTERPRET))
# rows of a group that neither begin nor end on a tile, an empty group, rows beyond; one group of several tiles
SIZES = {"uneven": (100, 0, 37, 60), "one group": (0, 300, 0, 0), "no rows": (0, 0, 0, 0), "few": (1, 2, 0, 5)}
ROWS = {"uneven": 216, "one group": 300, "no rows": 64, "few": 8}


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_close(ours: Any, expected: Any, tolerance: float = 1e-2) -> None:
    ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    limit = tolerance * max(1e-3, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["one group", "few"])
def test_grouped_matmul(name: str) -> None:
    n, sizes = ROWS[name], jnp.asarray(SIZES[name], jnp.int32)
    x, w = normal(0, (n, 128)), normal(1, (4, 128, 256))
    inside = int(sizes.sum())
    ours = MATMUL.grouped_matmul(x, w, sizes)
    assert ours.shape == (n, 256)
    assert ours.dtype == jnp.bfloat16
    assert_close(ours[:inside], gm_reference.grouped_matmul(x, w, sizes)[:inside])


@needs_transposes
@pytest.mark.parametrize("name", ["uneven", "no rows"])
def test_grouped_matmul_gradients(name: str) -> None:
    n, sizes = ROWS[name], jnp.asarray(SIZES[name], jnp.int32)
    inside = int(sizes.sum())
    # whatever lies in rows beyond the groups stays there
    x = normal(0, (n, 128)).at[inside:].set(jnp.nan)
    w, dy = normal(1, (4, 128, 128)), normal(2, (n, 128)).at[inside:].set(jnp.nan)
    _, vjp = jax.vjp(lambda x, w: gm.grouped_matmul(x, w, sizes, implementation=MATMUL), x, w)
    dx, dw = vjp(dy)
    clean = lambda a: a.at[inside:].set(0)  # noqa: E731
    assert_close(dx[:inside], gm_reference.grouped_matmul(dy, w, sizes, transpose_rhs=True)[:inside])
    assert_close(dw, gm_reference.weight_gradient(clean(x), clean(dy), sizes))


@needs_transposes
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_grouped_mlp(activation: str) -> None:
    """With biases; the oracle in float32."""
    n, sizes = 216, jnp.asarray(SIZES["uneven"], jnp.int32)
    inside, up = int(sizes.sum()), 256 if activation == "swiglu" else 128
    draws = (n, 128), (4, 128, up), (4, 128, 128), (4, up), (4, 128)
    x, w_up, w_down, b_up, b_down = (normal(i, shape, jnp.float32) * 0.3 for i, shape in enumerate(draws))
    half = [a.astype(jnp.bfloat16) for a in (x, w_up, w_down)]
    exact = [a.astype(jnp.float32) for a in half]
    dy = normal(9, (n, 128)).at[inside:].set(0)

    def ours(x: jax.Array, *weights: Any) -> jax.Array:
        return mlp_mosaic.grouped_mlp(x, sizes, *weights, activation=activation, matmul=MATMUL)

    def expected(x: jax.Array, *weights: Any) -> jax.Array:
        return mlp_reference.grouped_mlp(x, sizes, *weights, activation=activation)

    y, vjp = jax.vjp(ours, *half, b_up, b_down)
    y_expected, vjp_expected = jax.vjp(expected, *exact, b_up, b_down)
    assert_close(y[:inside], y_expected[:inside], 2e-2)
    gradients, gradients_expected = vjp(dy), vjp_expected(dy.astype(jnp.float32))
    assert_close(gradients[0][:inside], gradients_expected[0][:inside], 2e-2)
    for a, b in zip(gradients[1:], gradients_expected[1:], strict=True):
        assert_close(a, b, 2e-2)


def permutation(t: int, k: int) -> tuple[jax.Array, jax.Array]:
    """(src_M, slot_TK) with one choice dropped and one row empty."""
    order = np.random.default_rng(t).permutation(t * k).astype(np.int32)
    src, slot = order // k, np.argsort(order).astype(np.int32)
    dropped = order[3]
    slot[dropped], src[3] = t * k, t
    return jnp.asarray(src), jnp.asarray(slot.reshape(t, k))


@pytest.mark.parametrize(
    ("t", "k", "d", "dtype"), [(4, 3, 256, jnp.bfloat16), (8, 1, 128, jnp.float32), (1, 8, 1024, jnp.bfloat16)]
)
def test_permutations(t: int, k: int, d: int, dtype: Any) -> None:
    """Dispatch, combine and their gradients, against the XLA ones; what no row holds may be NaN."""
    src, slot = permutation(t, k)
    x, y = normal(0, (t, d), dtype), normal(1, (t * k, d), dtype).at[3].set(jnp.nan)
    weights = jnp.asarray(np.random.default_rng(2).uniform(size=(t, k)), jnp.float32)
    full = np.asarray(src) < t
    g_MD, g_TD = normal(3, (t * k, d), dtype).at[3].set(jnp.nan), normal(4, (t, d), jnp.float32)

    def both(implementation: Any) -> Any:
        rows, rows_vjp = jax.vjp(lambda x: tp.dispatch(x, src, slot, implementation=implementation), x)
        out, out_vjp = jax.vjp(lambda y, w: tp.combine(y, w, src, slot, implementation=implementation), y, weights)
        dy, dw = out_vjp(g_TD)
        sums = tp.sum_rows(y, src, slot, implementation=implementation)
        return rows[full], rows_vjp(g_MD)[0], out, dy[full], dw, sums

    tolerance = 1e-6 if dtype == jnp.float32 else 8e-3
    for a, b in zip(both(PERMUTE), both("xla"), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, tolerance)
