"""The Hopper kernels on CPU, in Pallas' interpreter, against the references: values and every
gradient.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, T tokens, K choices a token, M
rows.

The interpreter runs every warpgroup as a thread of its own, with shared memory, barriers and
copies; where it can it also looks for races between them. Shapes are small: one case takes seconds.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers.slot_experts import ExpertInputs, add_expert_outputs_by_slot_table
from kernels_pallas import grouped_matmul as gm
from kernels_pallas import token_permute as tp
from kernels_pallas.compressed import SCALES, compress, decompress
from kernels_pallas.formats import FORMATS
from kernels_pallas.grouped_matmul import mosaic_gpu as gm_mosaic
from kernels_pallas.grouped_matmul import reference as gm_reference
from kernels_pallas.grouped_mlp import MLPWeights
from kernels_pallas.grouped_mlp import mosaic_gpu as mlp_mosaic
from kernels_pallas.grouped_mlp import reference as mlp_reference
from kernels_pallas.hopper import Launch
from kernels_pallas.token_permute import mosaic_gpu as tp_mosaic
from tests.arrays import assert_close

try:
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams
except ImportError:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

old_interpreter = jax.__version_info__ < (0, 12)
needs_new_interpreter = pytest.mark.skipif(
    old_interpreter,
    reason="this JAX's interpreter can neither transpose a wgmma operand nor cast a layout",
)
needs_quick_interpreter = pytest.mark.skipif(
    old_interpreter, reason="this JAX's interpreter is several times slower"
)
LAUNCH = Launch(num_sms=2, interpret=InterpretGPUParams(detect_races=not old_interpreter))
MATMUL = gm.Implementation(
    partial(gm_mosaic.grouped_matmul, launch=LAUNCH),
    partial(gm_mosaic.weight_gradient, launch=LAUNCH),
)
PERMUTE = tp.Implementation(
    partial(tp_mosaic.gather_rows, launch=LAUNCH), partial(tp_mosaic.gather_sum, launch=LAUNCH)
)
# groups that neither begin nor end on a tile, an empty one, rows beyond: one of the tiles has two
# groups' rows
SIZES, NUM_ROWS = (70, 0, 17), 90
INSIDE = sum(SIZES)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("sizes", "n", "columns"),
    [
        (SIZES, NUM_ROWS, 128),
        pytest.param((0, 140, 0), 140, 128, marks=needs_quick_interpreter),
        pytest.param((1, 2, 5), 8, 256, marks=needs_quick_interpreter),
    ],
)
def test_grouped_matmul(sizes: tuple[int, ...], n: int, columns: int) -> None:
    x, w, sizes_E = normal(0, (n, 64)), normal(1, (3, 64, columns)), jnp.asarray(sizes, jnp.int32)
    ours = MATMUL.grouped_matmul(x, w, sizes_E)
    assert ours.shape == (n, columns)
    assert ours.dtype == jnp.bfloat16
    assert_close(ours[: sum(sizes)], gm_reference.grouped_matmul(x, w, sizes_E)[: sum(sizes)], 1e-2)


@pytest.mark.slow
@needs_quick_interpreter
@pytest.mark.parametrize(("columns", "transpose_rhs"), [(256, False), (128, True)])
def test_rows_by_index(columns: int, transpose_rhs: bool) -> None:
    """Tokens that are not dispatched: values and both gradients; an empty row, and rows beyond
    the groups.
    """
    num_tokens, d = NUM_ROWS // 2, 128
    src, slot = permutation(num_tokens, 2)
    inside = jnp.arange(NUM_ROWS) < INSIDE
    rows = tp.RowMap(jnp.where(inside, src, num_tokens), jnp.where(slot < INSIDE, slot, NUM_ROWS))
    full, sizes = rows.src_M < num_tokens, jnp.asarray(SIZES, jnp.int32)
    x = normal(0, (num_tokens, d))
    w = normal(1, (3, columns, d) if transpose_rhs else (3, d, columns))
    dy = jnp.where(full[:, None], normal(2, (NUM_ROWS, columns)), 0)

    def both(implementation: Any) -> Any:
        f = partial(
            gm.grouped_matmul, rows=rows, transpose_rhs=transpose_rhs, implementation=implementation
        )
        y, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return y[full], *vjp(dy)

    for a, b in zip(both(MATMUL), both("xla"), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, 1e-2)


@needs_new_interpreter
def test_gradients() -> None:
    """Of the input and the weights; whatever lies in rows beyond the groups stays there."""
    sizes = jnp.asarray(SIZES, jnp.int32)
    x, dy = (normal(i, (NUM_ROWS, 128)).at[INSIDE:].set(jnp.nan) for i in (0, 2))
    w = normal(1, (3, 128, 128))
    dx = MATMUL.grouped_matmul(dy, w, sizes, transpose_rhs=True)
    dw = MATMUL.weight_gradient(x, dy, sizes)
    clean = lambda a: a.at[INSIDE:].set(0)  # noqa: E731
    assert_close(
        dx[:INSIDE], gm_reference.grouped_matmul(dy, w, sizes, transpose_rhs=True)[:INSIDE], 1e-2
    )
    assert_close(dw, gm_reference.weight_gradient(clean(x), clean(dy), sizes), 1e-2)


@needs_new_interpreter
def test_weight_gradient_of_no_rows() -> None:
    """Zeros for every group, not what the memory held."""
    x, dy = normal(0, (16, 128)), normal(1, (16, 128))
    assert (MATMUL.weight_gradient(x, dy, jnp.zeros(3, jnp.int32)) == 0).all()


@needs_new_interpreter
@pytest.mark.parametrize(
    ("dtype", "transpose_rhs"), [("int8", False), ("float8_e4m3fn", False), ("int8", True)]
)
def test_quantized(dtype: str, transpose_rhs: bool) -> None:
    x, sizes = normal(0, (NUM_ROWS, 128)), jnp.asarray(SIZES, jnp.int32)
    w, scale = gm.quantize(normal(1, (3, 128, 128)), dtype)
    w = w.swapaxes(1, 2) if transpose_rhs else w
    call = partial(gm.quantized_grouped_matmul, x, w, scale, sizes, transpose_rhs=transpose_rhs)
    expected = gm_reference.grouped_matmul(x, w, sizes, transpose_rhs=transpose_rhs, scale_EF=scale)
    assert_close(call(implementation=MATMUL)[:INSIDE], expected[:INSIDE], 1e-2)


@needs_new_interpreter
@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_compressed(kind: str) -> None:
    """Weights of slots, compressed in blocks: steps of several blocks and blocks of several
    steps.
    """
    form = FORMATS[kind]
    sizes = jnp.asarray(SIZES, jnp.int32)
    slot_E = jnp.asarray([2, 0, 1], jnp.int32)
    kept = [compress(np.asarray(normal(m, (256, 128), jnp.float32)), form) for m in range(3)]
    values, scales = (jnp.asarray(np.stack(part)) for part in zip(*kept, strict=True))
    x = normal(9, (NUM_ROWS, 256))
    ours = MATMUL.grouped_matmul(x, values, sizes, slots=gm_mosaic.WeightSlots(slot_E, scales))
    wide = jax.vmap(partial(decompress, dtype=jnp.bfloat16))(values, scales)[slot_E]
    assert_close(ours[:INSIDE], gm_reference.grouped_matmul(x, wide, sizes)[:INSIDE], 1e-2)


@needs_new_interpreter
@pytest.mark.parametrize("kind", [pytest.param(None, marks=pytest.mark.slow), "int8"])
def test_experts_out_of_slots(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts' products at once, with biases and padding, against the loop over tiles."""
    tokens, d, f, slots, experts = 6, 128, 128, 4, 3
    shapes = {"w_up": (d, 2 * f), "w_down": (f, d), "b_up": (2 * f,), "b_down": (d,)}
    shapes = shapes if kind is None else {"w_up": (d, 2 * f), "w_down": (f, d)}
    arrays: dict[str, jax.Array] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        drawn = normal(i, (slots, *shape), jnp.float32) * 0.2
        if kind is None:
            arrays[name] = jax.lax.bitcast_convert_type(drawn.astype(jnp.bfloat16), jnp.uint16)
        else:
            kept = [compress(np.asarray(one), FORMATS[kind]) for one in drawn]
            for field, part in zip((name, name + SCALES), zip(*kept, strict=True), strict=True):
                arrays[field] = jnp.asarray(np.stack(part))
    idx = np.random.default_rng(0).integers(0, 2, (tokens, 2)) * 2  # nobody chooses expert 1
    idx[1] = experts  # padding
    weights = jnp.asarray(np.random.default_rng(1).uniform(size=(tokens, 2)), jnp.float32)
    routed = ExpertInputs(
        normal(7, (tokens, d)), jnp.asarray(idx, jnp.int32), weights, jnp.ones((tokens, d))
    )
    table = jnp.asarray([3, 0, 1], jnp.int32)
    in_interpreter = partial(mlp_mosaic.grouped_mlp_in_slots, matmul=MATMUL)
    monkeypatch.setattr(mlp_mosaic, "grouped_mlp_in_slots", in_interpreter)
    options: dict[str, Any] = {"activation": "swiglu", "tile_rows": 4}
    ours = add_expert_outputs_by_slot_table(
        routed, arrays, table, implementation="mosaic_gpu", **options
    )
    assert_close(
        ours,
        add_expert_outputs_by_slot_table(routed, arrays, table, implementation="xla", **options),
        2e-2,
    )
    assert (ours[1] == 1).all()


def mlp_operands(activation: str, bias: bool) -> tuple[Any, ...]:
    """(x, w_up, w_down, b_up, b_down): bfloat16, the biases float32 or None."""
    up = 128 if activation == "gelu" else 256
    draws = (NUM_ROWS, 64), (3, 64, up), (3, 128, 128), (3, up), (3, 128)
    *half, b_up, b_down = (normal(i, shape, jnp.float32) * 0.3 for i, shape in enumerate(draws))
    return *(a.astype(jnp.bfloat16) for a in half), *((b_up, b_down) if bias else (None, None))


def in_float32(operands: tuple[Any, ...]) -> list[Any]:
    return [a if a is None else a.astype(jnp.float32) for a in operands]


@needs_new_interpreter
@pytest.mark.parametrize(
    ("activation", "bias"), [("swiglu", False), ("clamped_swiglu", True), ("gelu", True)]
)
def test_activation_as_epilogue(
    activation: str, bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without gradients: two kernels and nothing between them. The oracle in float32."""
    operands, sizes = mlp_operands(activation, bias), jnp.asarray(SIZES, jnp.int32)
    x, *weights = operands
    with caplog.at_level(logging.WARNING):
        ours = mlp_mosaic.grouped_mlp(
            x, sizes, MLPWeights(*weights), activation=activation, matmul=MATMUL
        )
    assert not caplog.records  # the fused form was taken
    x, *weights = in_float32(operands)
    expected = mlp_reference.grouped_mlp(x, sizes, MLPWeights(*weights), activation=activation)
    assert_close(ours[:INSIDE], expected[:INSIDE], 2e-2)


def test_gelu() -> None:
    """Within 1e-6 of the exact one, far out too."""
    x = jnp.linspace(-12, 12, 4001)
    np.testing.assert_allclose(
        mlp_reference.gelu_without_erf(x), jax.nn.gelu(x, approximate=False), rtol=0, atol=1e-6
    )


@needs_new_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_grouped_mlp_gradients(activation: str) -> None:
    """With biases; the oracle in float32."""
    operands, sizes = mlp_operands(activation, bias=True), jnp.asarray(SIZES, jnp.int32)
    operands = (
        normal(0, (NUM_ROWS, 128)),
        normal(1, (3, 128, operands[1].shape[2])) * 0.3,
        *operands[2:],
    )
    dy = normal(9, (NUM_ROWS, 128)).at[INSIDE:].set(0)

    def ours(x: jax.Array, *weights: Any) -> jax.Array:
        return mlp_mosaic.grouped_mlp(
            x, sizes, MLPWeights(*weights), activation=activation, matmul=MATMUL
        )

    def expected(x: jax.Array, *weights: Any) -> jax.Array:
        return mlp_reference.grouped_mlp(x, sizes, MLPWeights(*weights), activation=activation)

    y, vjp = jax.vjp(ours, *operands)
    y_expected, vjp_expected = jax.vjp(expected, *in_float32(operands))
    assert_close(y[:INSIDE], y_expected[:INSIDE], 2e-2)
    gradients, gradients_expected = vjp(dy), vjp_expected(dy.astype(jnp.float32))
    assert_close(gradients[0][:INSIDE], gradients_expected[0][:INSIDE], 2e-2)
    for a, b in zip(gradients[1:], gradients_expected[1:], strict=True):
        assert_close(a, b, 2e-2)


def permutation(t: int, k: int) -> tuple[jax.Array, jax.Array]:
    """(src_M, row_TK) with one choice dropped and one row empty."""
    order = np.random.default_rng(t).permutation(t * k).astype(np.int32)
    src, slot = order // k, np.argsort(order).astype(np.int32)
    dropped = order[3]
    slot[dropped], src[3] = t * k, t
    return jnp.asarray(src), jnp.asarray(slot.reshape(t, k))


@pytest.mark.parametrize(
    ("t", "k", "d", "dtype"), [(4, 2, 256, jnp.bfloat16), (1, 4, 128, jnp.float32)]
)
def test_permutations(t: int, k: int, d: int, dtype: Any) -> None:
    """Dispatch, combine and their gradients, against the XLA ones; what no row holds may be NaN."""
    src, slot = permutation(t, k)
    x, y = normal(0, (t, d), dtype), normal(1, (t * k, d), dtype).at[3].set(jnp.nan)
    weights = jnp.asarray(np.random.default_rng(2).uniform(size=(t, k)), jnp.float32)
    full = np.asarray(src) < t
    g_MD, g_TD = normal(3, (t * k, d), dtype).at[3].set(jnp.nan), normal(4, (t, d), jnp.float32)

    def both(implementation: Any) -> Any:
        rows, rows_vjp = jax.vjp(
            lambda x: tp.dispatch(x, src, slot, implementation=implementation), x
        )
        out, out_vjp = jax.vjp(
            lambda y, w: tp.combine(y, w, src, slot, implementation=implementation), y, weights
        )
        dy, dw = out_vjp(g_TD)
        sums = tp.sum_rows(y, src, slot, implementation=implementation)
        return rows[full], rows_vjp(g_MD)[0], out, dy[full], dw, sums

    tolerance = 1e-6 if dtype == jnp.float32 else 8e-3
    for a, b in zip(both(PERMUTE), both("xla"), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, tolerance)
