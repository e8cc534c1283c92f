"""The Triton kernels on CPU, in Pallas' interpreter, against the references: values and every
gradient.

Legend: N rows sorted by group, D inner, F outer dimension, E groups, T tokens, K choices a token, M
rows.
"""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers import slot_experts
from jmoe.layers.low_rank import ExpertAdapters, LowRank
from jmoe.layers.slot_experts import (
    ExpertInputs,
    ExpertProducts,
    UnchosenInputs,
    add_expert_outputs_by_slot_table,
    choose_and_apply_experts,
    sum_outputs,
)
from jmoe.run.ahead_of_time import lower_for_device
from kernels_pallas import grouped_matmul as gm
from kernels_pallas import token_permute as tp
from kernels_pallas.choose_experts import choose_experts
from kernels_pallas.compressed import SCALES, compress, decompress
from kernels_pallas.expert_choices import ChoiceRules, RouterLogits, WeightedOutputs
from kernels_pallas.formats import FORMATS
from kernels_pallas.grouped_matmul import reference as gm_reference
from kernels_pallas.grouped_matmul import triton as gm_triton
from kernels_pallas.grouped_matmul import triton_weights
from kernels_pallas.grouped_matmul.operands import WeightSlots
from kernels_pallas.grouped_matmul.triton_choices import matmul_of_choices
from kernels_pallas.grouped_mlp import MLPWeights, activation_triton
from kernels_pallas.grouped_mlp import reference as mlp_reference
from kernels_pallas.grouped_mlp import triton as mlp_triton
from kernels_pallas.implementations import trace_for_device
from kernels_pallas.shapes import ROUTINGS, group_sizes
from kernels_pallas.token_permute import triton as tp_triton
from kernels_pallas.triton import FLOAT32, SMALL, WIDE, choose_blocks, tile_in_bands
from tests.arrays import assert_close

MATMUL = gm.Implementation(
    partial(gm_triton.grouped_matmul, interpret=True),
    partial(gm_triton.weight_gradient, interpret=True),
    gates_slots=True,
)
PERMUTE = tp.Implementation(
    partial(tp_triton.gather_rows, interpret=True), partial(tp_triton.gather_sum, interpret=True)
)
# groups of several tiles and of none, rows beyond them; sizes that no block divides
SIZES, NUM_ROWS, D, F = (70, 0, 17), 90, 72, 136
INSIDE = sum(SIZES)
TOLERANCE = {jnp.bfloat16: 1e-2, jnp.float32: 2e-6}


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_grouped_matmul_and_its_gradients(dtype: Any, transpose_rhs: bool) -> None:
    """Whatever lies in rows beyond the groups stays there."""
    sizes = jnp.asarray(SIZES, jnp.int32)
    x, dy = (normal(i, (NUM_ROWS, n), dtype).at[INSIDE:].set(jnp.nan) for i, n in ((0, D), (2, F)))
    w = normal(1, (3, F, D) if transpose_rhs else (3, D, F), dtype)

    @jax.jit
    def ours(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(
            lambda x, w: gm.grouped_matmul(
                x, w, sizes, transpose_rhs=transpose_rhs, implementation=MATMUL
            ),
            x,
            w,
        )
        return y, *vjp(dy)

    clean = lambda a: a.at[INSIDE:].set(0)  # noqa: E731
    y, dx, dw = ours(x, w, dy)
    expected, vjp = jax.vjp(
        lambda x, w: gm.grouped_matmul(x, w, sizes, transpose_rhs=transpose_rhs),
        clean(x),
        w,
    )
    dx_expected, dw_expected = vjp(clean(dy))
    assert y.dtype == dtype and dw.dtype == dtype
    assert_close(y[:INSIDE], expected[:INSIDE], TOLERANCE[dtype])
    assert_close(dx[:INSIDE], dx_expected[:INSIDE], TOLERANCE[dtype])
    assert_close(dw, dw_expected, TOLERANCE[dtype])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_row_of_every_group_is_in_one_tile(routing: str) -> None:
    """Balanced, skewed, one hot, empty groups; fewer rows than a tile, and none at all."""
    for num_rows, num_groups, height in ((500, 16, 64), (5, 16, 16), (300, 2, 128)):
        sizes = group_sizes(routing, num_rows, num_groups)
        tiles_3M = np.asarray(gm_triton.row_tiles(jnp.asarray(sizes), num_rows, height))
        rows = [(g, n) for g, start, end in tiles_3M.T for n in range(start, end)]
        assert rows == list(zip(np.repeat(np.arange(num_groups), sizes), range(num_rows)))
        assert (tiles_3M[2] - tiles_3M[1] <= height).all()
    none = gm_triton.row_tiles(jnp.zeros(4, jnp.int32), 7, 16)
    assert (none[1:] == 0).all()


def test_rows_by_index() -> None:
    """Tokens that are not dispatched: values and both gradients; an empty row, and rows beyond the
    groups.
    """
    num_tokens = NUM_ROWS // 2
    order = np.random.default_rng(0).permutation(NUM_ROWS).astype(np.int32)
    src, slot = jnp.asarray(order // 2), jnp.asarray(np.argsort(order).astype(np.int32))
    inside = jnp.arange(NUM_ROWS) < INSIDE
    rows = tp.RowMap(
        jnp.where(inside, src, num_tokens),
        jnp.where(slot < INSIDE, slot, NUM_ROWS).reshape(num_tokens, 2),
    )
    sizes = jnp.asarray(SIZES, jnp.int32)
    x, w = normal(0, (num_tokens, D)), normal(1, (3, D, F))
    dy = jnp.where(inside[:, None], normal(2, (NUM_ROWS, F)), 0)

    @partial(jax.jit, static_argnums=0)
    def both(implementation: Any, x: jax.Array, w: jax.Array) -> Any:
        f = partial(gm.grouped_matmul, rows=rows, implementation=implementation)
        y, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return y[:INSIDE], *vjp(dy)

    for a, b in zip(both(MATMUL, x, w), both("xla", x, w), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, 1e-2)


def test_few_rows_take_low_tiles() -> None:
    """A step of decoding: eight tokens on eight of sixteen experts, in tiles of 16 rows."""
    sizes = jnp.asarray([1, 0] * 8, jnp.int32)
    x, w = normal(0, (8, D)), normal(1, (16, D, F))
    jaxpr = str(jax.make_jaxpr(MATMUL.grouped_matmul)(x, w, sizes))
    assert "f32[16,64]" in jaxpr and "f32[128,128]" not in jaxpr  # half the columns: few programs
    ours = jax.jit(MATMUL.grouped_matmul)(x, w, sizes)
    assert_close(ours, gm_reference.grouped_matmul(x, w, sizes), 1e-2)


def test_int8() -> None:
    x, sizes = normal(0, (NUM_ROWS, D)), jnp.asarray(SIZES, jnp.int32)
    w, scale = gm.quantize(normal(1, (3, D, F)), "int8")
    ours = gm.quantized_grouped_matmul(x, w, scale, sizes, implementation=MATMUL)
    expected = gm_reference.grouped_matmul(x, w, sizes, scale_EF=scale)
    assert_close(ours[:INSIDE], expected[:INSIDE], 1e-2)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, jnp.bfloat16) for kind in sorted(FORMATS)), ("int4", jnp.float32)]
)
def test_compressed(kind: str, dtype: Any) -> None:
    """Weights of slots, compressed in blocks, of sizes that no tile divides: 200 inputs are several
    steps and blocks, the last of them partial.
    """
    form, inner = FORMATS[kind], 200 if FORMATS[kind].partial_block else 192
    sizes, slot_E = jnp.asarray(SIZES, jnp.int32), jnp.asarray([2, 0, 1], jnp.int32)
    drawn = (np.asarray(normal(m, (inner, F), jnp.float32)) for m in range(3))
    kept = [compress(one, form) for one in drawn]
    values, scales = (jnp.asarray(np.stack(part)) for part in zip(*kept, strict=True))
    x = normal(9, (NUM_ROWS, inner), dtype).at[INSIDE:].set(jnp.nan)
    slots = WeightSlots(slot_E, scales)
    ours = jax.jit(lambda x: MATMUL.grouped_matmul(x, values, sizes, slots=slots))(x)
    wide = jax.vmap(partial(decompress, dtype=dtype))(values, scales)[slot_E]
    expected = gm_reference.grouped_matmul(x.at[INSIDE:].set(0), wide, sizes)
    assert_close(ours[:INSIDE], expected[:INSIDE], TOLERANCE[dtype])


def test_every_code_and_scale_is_decoded_exactly() -> None:
    """As `decompress`, bit for bit, not-a-numbers among them; codes that no `compress` writes."""
    every = np.arange(256, dtype=np.uint8)
    for name, decode in triton_weights._DECODERS.items():
        form = FORMATS[name]
        codes = jnp.asarray(np.repeat(every[:, None], 2, 1)).astype(form.values)
        blocks = 256 * form.per_byte // form.block
        one = {"uint8": 127, "uint16": 0x3F80, "float32": 1.0}[form.scales]
        expected = decompress(codes, jnp.full((blocks, 2), one, form.scales), jnp.float32)
        wide = codes.astype(jnp.uint32) & 0xFF
        halves = [wide] if form.per_byte == 1 else [wide & 15, wide >> 4]
        found = jnp.stack([decode(half) for half in halves], axis=1).reshape(-1, 2)
        assert np.array_equal(found, expected, equal_nan=True), name


@pytest.mark.parametrize(
    ("activation", "scaled"), [("clamped_swiglu", False), ("gelu", False), ("swiglu", True)]
)
def test_grouped_mlp(activation: str, scaled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without gradients: biases and activation in the kernels. With them: every gradient. Without
    biases if rows have factors. The oracle in float32.
    """
    up = F if activation == "gelu" else 2 * F
    shapes = (NUM_ROWS, D), (3, D, up), (3, F, D), (3, up), (3, D)
    x, *weights = (normal(i, shape, jnp.float32) * 0.3 for i, shape in enumerate(shapes))
    scale_N = normal(7, (NUM_ROWS,), jnp.float32)
    if scaled:
        weights = weights[:2]
    sizes = jnp.asarray(SIZES, jnp.int32)
    dy = normal(9, (NUM_ROWS, D), jnp.float32).at[INSIDE:].set(0)

    def mlp(run: Any, x: jax.Array, scale_N: jax.Array, *weights: jax.Array) -> jax.Array:
        options = {"activation": activation, "scale_N": scale_N if scaled else None}
        y_ND: jax.Array = run(x, sizes, MLPWeights(*weights), **options)
        return y_ND

    ours = partial(mlp, partial(mlp_triton.grouped_mlp, matmul=MATMUL))
    expected = partial(mlp, mlp_reference.grouped_mlp)
    y, vjp = jax.vjp(expected, x, scale_N, *weights)
    assert_close(jax.jit(ours)(x, scale_N, *weights)[:INSIDE], y[:INSIDE], 1e-5)
    assert not caplog.records  # the fused form was taken

    @jax.jit
    def gradients(*operands: jax.Array) -> Any:
        return jax.vjp(ours, *operands)[1](dy)

    for a, b in zip(gradients(x, scale_N, *weights), vjp(dy), strict=True):
        n = INSIDE if a.shape[0] == NUM_ROWS else None
        assert_close(a[:n], b[:n], 1e-5)


@pytest.mark.parametrize(
    ("activation", "scaled", "dtype"),
    [
        ("swiglu", True, jnp.bfloat16),
        ("swiglu", False, jnp.float32),
        ("clamped_swiglu", True, jnp.float32),
        ("gelu", True, jnp.float32),
    ],
)
def test_activation_gradients(activation: str, scaled: bool, dtype: Any) -> None:
    """Rows and columns that no block divides; the factors' gradients sum over two blocks."""
    num_rows, width = 6, 600
    h = normal(0, (num_rows, width if activation == "gelu" else 2 * width), dtype) * 3
    dscaled = normal(1, (num_rows, width), dtype)
    scale_N = normal(2, (num_rows,), jnp.float32) if scaled else None
    ours = activation_triton.activation_gradients(
        h, dscaled, scale_N, activation=activation, interpret=True
    )
    wide = (x.astype(jnp.float32) for x in (h, dscaled))
    expected = mlp_reference.activation_gradients(*wide, scale_N, activation=activation)
    assert (ours.dscale_N is None) == (expected.dscale_N is None)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-2 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("kind", "by_choice", "tokens", "adapted"),
    [
        (None, False, 6, False),
        (None, False, 6, True),
        ("mxfp4", False, 6, False),
        ("mxfp4", True, 6, True),  # with adapters rows are sorted
        (None, True, 6, False),
        ("int8", True, 1, False),
    ],
)
def test_experts_out_of_slots(
    kind: str | None, by_choice: bool, tokens: int, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All experts' products at once, with biases and padding, and with the change of adapters,
    against the loop over tiles; widths that are no multiple of a tile. Rows are sorted, or the
    kernel reads the choices: one tile for each of several experts, or for each of one token's
    choices.
    """
    slots, experts, d, f = 4, 3, 96, 160
    shapes = {"w_up": (d, 2 * f), "w_down": (f, d), "b_up": (2 * f,), "b_down": (d,)}
    arrays: dict[str, jax.Array] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        drawn = normal(i, (slots, *shape)) * 0.2
        if kind is None or name.startswith("b_"):
            arrays[name] = jax.lax.bitcast_convert_type(drawn, jnp.uint16)
            continue
        kept = [compress(np.asarray(one, np.float32), FORMATS[kind]) for one in drawn]
        for field, part in zip((name, name + SCALES), zip(*kept, strict=True), strict=True):
            arrays[field] = jnp.asarray(np.stack(part))
    draw = np.random.default_rng(0)
    idx = np.stack([draw.permutation([0, 2]) for _ in range(tokens)])  # nobody chooses expert 1
    idx[1:2] = experts  # padding
    weights = jnp.asarray(np.random.default_rng(1).uniform(size=(tokens, 2)), jnp.float32)
    routed = ExpertInputs(
        normal(7, (tokens, d)), jnp.asarray(idx, jnp.int32), weights, jnp.ones((tokens, d))
    )
    if adapted:
        owner_R = jnp.asarray([1, 2], jnp.int32)
        a, b = (normal(i, (experts, *s)) for i, s in ((8, (d, 2)), (9, (2, 2 * f))))
        change = {"w_up": LowRank(a, b * 0.2, owner_R)}
        adapter_T = jnp.asarray([1, 0, 2, 1, 0, 2], jnp.int32)
        routed = routed._replace(adapters=ExpertAdapters(change, adapter_T))
    table = jnp.asarray([3, 0, 1], jnp.int32)
    in_interpreter = partial(mlp_triton.grouped_mlp_in_slots, matmul=MATMUL)
    monkeypatch.setattr(mlp_triton, "grouped_mlp_in_slots", in_interpreter)
    of_choices = partial(mlp_triton.mlp_of_choices, interpret=True)
    monkeypatch.setattr(mlp_triton, "mlp_of_choices", of_choices)
    monkeypatch.setattr(slot_experts, "MAX_TOKENS_BY_CHOICE", 64 if by_choice else 0)
    options: dict[str, Any] = {"activation": "swiglu", "tile_rows": 4}
    ours = add_expert_outputs_by_slot_table(
        routed, arrays, table, implementation="triton", **options
    )
    assert_close(
        ours,
        add_expert_outputs_by_slot_table(routed, arrays, table, implementation="xla", **options),
        2e-2,
    )
    assert (ours[1:2] == 1).all()


@pytest.mark.parametrize(
    ("rules", "tokens", "experts"),
    [
        (ChoiceRules("softmax", 2, False), 3, 5),  # a tile for each expert
        (ChoiceRules("softmax", 3, True), 2, 12),  # for each choice
        (ChoiceRules("sigmoid", 2, True, 2.5), 1, 6),
        (ChoiceRules("sigmoid", 2, True, 2.5, 3, 2, 2), 4, 6),  # groups: chosen in a kernel before
    ],
)
def test_a_product_that_chooses(rules: ChoiceRules, tokens: int, experts: int) -> None:
    """Outputs, numbers and weights are those of chosen experts, ties and padding included."""
    d, f = 32, 64
    slots = {
        name: normal(i, (experts + 1, *shape), jnp.float32)
        for i, (name, shape) in enumerate({"w_up": (d, 2 * f), "w_down": (f, d)}.items())
    }
    table = jnp.arange(experts, 0, -1, dtype=jnp.int32)
    rng, has_bias = np.random.default_rng(5), rules.scores == "sigmoid"
    bias = jnp.asarray(rng.integers(-2, 3, experts) / 8, jnp.float32) if has_bias else None
    logits = RouterLogits(
        jnp.asarray(rng.integers(-3, 3, (tokens, experts)) / 2, jnp.float32),
        rules,
        bias,
        jnp.asarray([7, 3, 9, 1][:tokens], jnp.int32),
        9 if tokens > 2 else 100,
    )
    h_TD = normal(8, (tokens, d), jnp.float32)
    options: dict[str, Any] = {"products": ExpertProducts("swiglu"), "tile_rows": tokens}
    unchosen = UnchosenInputs(h_TD, logits, None)
    outputs, chosen_TK = choose_and_apply_experts(unchosen, slots, table, interpret=True, **options)
    idx_TK, weights_TK = choose_experts(logits, interpret=True)
    assert np.array_equal(chosen_TK, idx_TK)
    assert (np.asarray(idx_TK)[2:3] == experts).all()  # padding
    # experts out of groups are chosen before, and then computed as a CPU does
    assert isinstance(outputs, WeightedOutputs) == (rules.num_groups == 1)
    if isinstance(outputs, WeightedOutputs):
        np.testing.assert_array_equal(outputs.weights_TK, weights_TK)
    routed = ExpertInputs(h_TD, idx_TK, weights_TK, jnp.zeros((tokens, d)))
    options = {"activation": "swiglu", "tile_rows": 4, "implementation": "xla"}
    assert_close(
        sum_outputs(outputs),
        add_expert_outputs_by_slot_table(routed, slots, table, **options),
        1e-5,
    )


def test_choices_of_many_tokens_are_another_kernels() -> None:
    x, w = normal(0, (65, 64)), normal(1, (2, 64, 64))
    slots = WeightSlots(jnp.arange(2))
    with pytest.raises(NotImplementedError, match="65 tokens: more than 64"):
        matmul_of_choices(x, w, jnp.zeros((65, 1), jnp.int32), slots)


@pytest.mark.parametrize(
    ("t", "k", "dtype"), [(9, 2, jnp.bfloat16), (1, 4, jnp.float32), (5, 3, jnp.float16)]
)
def test_permutations(t: int, k: int, dtype: Any) -> None:
    """Dispatch, combine and their gradients, against the XLA ones; what no row holds may be NaN."""
    order = np.random.default_rng(t).permutation(t * k).astype(np.int32)
    src, slot = order // k, np.argsort(order).astype(np.int32)
    dropped = order[3]
    slot[dropped], src[3] = t * k, t
    src_M, row_TK = jnp.asarray(src), jnp.asarray(slot.reshape(t, k))
    full = src < t
    x, y = normal(0, (t, 600), dtype), normal(1, (t * k, 600), dtype).at[3].set(jnp.nan)
    weights = jnp.asarray(np.random.default_rng(2).uniform(size=(t, k)), jnp.float32)
    g_MD, g_TD = normal(3, (t * k, 600), dtype).at[3].set(jnp.nan), normal(4, (t, 600), jnp.float32)

    @partial(jax.jit, static_argnums=0)
    def all_of(implementation: Any) -> Any:
        rows, pull = jax.vjp(
            lambda x: tp.dispatch(x, src_M, row_TK, implementation=implementation), x
        )
        sums, pull_both = jax.vjp(
            lambda y, w: tp.combine(y, w, src_M, row_TK, implementation=implementation), y, weights
        )
        dy, dweights = pull_both(g_TD)
        return rows[full], *pull(g_MD), sums, dy[full], dweights

    for a, b in zip(all_of(PERMUTE), all_of("xla"), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, 1e-6)


def test_places_are_each_tile_once() -> None:
    for num_m, num_n in ((1, 1), (20, 3), (8, 5), (9, 1)):
        found = [tile_in_bands(jnp.int32(i), num_m, num_n) for i in range(num_m * num_n)]
        tiles = {(int(m), int(n)) for m, n in found}
        assert tiles == {(m, n) for m in range(num_m) for n in range(num_n)}


@pytest.mark.parametrize(
    ("capability", "blocks"), [("8.0", WIDE), ("8.9", SMALL), ("10.0", WIDE), ("12.0", SMALL)]
)
def test_blocks_by_the_shared_memory_of_the_gpu(capability: str, blocks: Any) -> None:
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    with trace_for_device(device):
        assert choose_blocks(jnp.bfloat16) == blocks and choose_blocks(jnp.float32) == FLOAT32


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0", "12.0"])
def test_kernels_lower_to_triton_on_a_machine_without_a_gpu(capability: str) -> None:
    """Forward, both gradients and the permutations; from JAX 0.11 on for the GPU that is named."""
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    index = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731

    def layer(x: Any, w: Any, sizes: Any, src_M: Any, row_TK: Any) -> Any:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            rows = tp.dispatch(x, src_M, row_TK, implementation="triton")
            y = gm.grouped_matmul(rows, w, sizes, implementation="triton")
            return tp.sum_rows(y, src_M, row_TK, implementation="triton").sum()

        return jax.value_and_grad(run, (0, 1))(x, w)

    operands = of(64, 256), of(4, 256, 128), index(4), index(128), index(64, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        _, lowered = lower_for_device(device, jax.jit(layer), *operands)
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 7


def test_what_it_does_not_read_goes_on_to_xla() -> None:
    x, sizes = normal(0, (16, 64)), jnp.asarray([8, 8], jnp.int32)
    with pytest.raises(NotImplementedError, match="dtypes int32"):
        gm_triton.grouped_matmul(x.astype(jnp.int32), jnp.zeros((2, 64, 64), jnp.int32), sizes)
    w, scale = gm.quantize(normal(1, (2, 64, 64)), "float8_e4m3fn")
    with pytest.raises(NotImplementedError, match="not int8"):
        gm.quantized_grouped_matmul(x, w, scale, sizes, implementation="triton")
