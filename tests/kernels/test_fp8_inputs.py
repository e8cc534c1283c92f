"""Products of inputs and weights in E4M3: the Triton kernels in Pallas' interpreter and XLA's form,
against products group after group.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers.slot_experts import (
    ExpertInputs,
    ExpertProducts,
    add_expert_outputs_by_slot_table,
)
from jmoe.run.ahead_of_time import lower_for_device
from kernels_pallas.compressed import compress, decompress
from kernels_pallas.formats import FP8, INT8
from kernels_pallas.fp8_dot import ALLOWS_FEWER_BITS, fp8_dot
from kernels_pallas.grouped_matmul import mosaic_gpu, triton
from kernels_pallas.grouped_matmul.fp8_inputs import (
    E4M3,
    has_fp8_products,
    matmul_of_rounded,
    round_inputs,
    rounded,
)
from kernels_pallas.grouped_matmul.operands import Epilogue, WeightSlots
from kernels_pallas.grouped_matmul.triton_choices import matmul_of_choices
from kernels_pallas.grouped_mlp.reference import activate
from kernels_pallas.implementations import trace_for_device
from tests.arrays import assert_close

D, F, EXPERTS = 200, 72, 3  # a group of 128 inputs, and a shorter one


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stored(seed: int, inner: int, outer: int) -> tuple[jax.Array, jax.Array]:
    """Return (values, scales) of the matrices of all experts in the format fp8; slots have them
    transposed.
    """
    pairs = [compress(normal(seed + e, inner, outer) / 8, FP8) for e in range(EXPERTS)]
    values, scales = (jnp.asarray(np.stack(x)) for x in zip(*pairs, strict=True))
    return values, scales


def flipped(w: jax.Array) -> jax.Array:
    return w.swapaxes(1, 2)


def relative_error(ours: Any, exact: Any) -> float:
    ours, exact = (np.asarray(x, np.float64) for x in (ours, exact))
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


def test_groups_of_inputs_are_rounded_to_their_largest() -> None:
    x = normal(0, 4, D) * np.logspace(-6, 6, 4)[:, None].astype(np.float32)
    x[1, :128] = 0
    inputs = round_inputs(jnp.asarray(x))
    assert inputs.values_ND.dtype == jnp.float8_e4m3fn and inputs.scales_NB.shape == (4, 2)
    wide = np.asarray(inputs.wide())
    for n in range(4):
        for group in (slice(0, 128), slice(128, D)):
            peak = np.abs(x[n, group]).max()
            # half a step of 4 significant bits, and of the smallest numbers 2^-9 of the scale
            bound = np.maximum(np.abs(x[n, group]) / 16, peak / 448 * 2**-10) * (1 + 1e-5)
            assert (np.abs(wide[n, group] - x[n, group]) <= bound).all()
    assert np.array_equal(rounded(jnp.asarray(x)), wide)


def test_products_of_blocks_have_float32_sums() -> None:
    """Under `jit` and alone, as in Pallas' interpreter; this JAX also allows sums of fewer bits."""
    assert ALLOWS_FEWER_BITS
    a, b = (jnp.asarray(normal(i, 16, 128)).astype(E4M3) for i in (0, 1))
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    for product in (fp8_dot(a, b), jax.jit(fp8_dot)(a, b)):
        assert product.dtype == jnp.float32
        assert_close(product, expected, 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = normal(0, 2, D)
    x[0, 3] = bad
    wide = np.asarray(rounded(jnp.asarray(x)))
    assert np.isnan(wide[0, :128]).all() and np.isfinite(wide[0, 128:]).all()
    assert np.isfinite(wide[1]).all()


def test_a_product_changes_by_a_known_share_of_its_norm() -> None:
    """The figures of docs/inference.md: normally distributed inputs and weights."""
    inner, hidden = 1024, 512
    x = jnp.asarray(normal(0, 64, inner), jnp.bfloat16)
    up, down = (
        [jnp.asarray(a) for a in compress(normal(i, *shape), FP8)]
        for i, shape in ((1, (inner, 2 * hidden)), (2, (hidden, inner)))
    )
    wide_up, wide_down = (np.asarray(decompress(*w, jnp.float32)) for w in (up, down))
    exact = np.asarray(x, np.float32) @ wide_up
    of_product = relative_error(matmul_of_rounded(x, *up), exact)
    act = lambda h: activate(jnp.asarray(h), "swiglu")  # noqa: E731
    a = act(matmul_of_rounded(x, *up) / 32).astype(jnp.bfloat16)
    exact_a = np.asarray(act(exact / 32).astype(jnp.bfloat16), np.float32)
    of_expert = relative_error(matmul_of_rounded(a, *down), exact_a @ wide_down)
    assert 0.024 < of_product < 0.027 and 0.040 < of_expert < 0.045


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernel_of_sorted_rows(dtype: Any, gated: bool) -> None:
    x, sizes = jnp.asarray(normal(0, 40, D), dtype), jnp.array([17, 0, 20], jnp.int32)
    w, scales = stored(1, D, 2 * F)
    bias = jnp.asarray(normal(7, EXPERTS, 2 * F))
    table = [2, 0, 1]
    slots = WeightSlots(jnp.asarray(table, jnp.int32), scales, fp8_inputs=True)
    function = (lambda gate, up: gate * up) if gated else None
    y = triton.grouped_matmul(
        *(x, flipped(w), sizes),
        slots=slots,
        epilogue=Epilogue(bias, function, gated),
        interpret=True,
    )
    assert y.dtype == dtype and y.shape == (40, F if gated else 2 * F)
    for e, rows in ((0, slice(0, 17)), (2, slice(17, 37))):
        sums = matmul_of_rounded(x[rows], w[table[e]], scales[table[e]]) + bias[table[e]]
        expected = sums[:, :F] * sums[:, F:] if gated else sums
        assert_close(y[rows], expected, 1e-2 if dtype == jnp.bfloat16 else 1e-5)


def test_kernel_of_choices_rounds_in_registers() -> None:
    x, idx = jnp.asarray(normal(0, 4, D)), jnp.array([[0, 2], [2, 1], [3, 3], [1, 0]], jnp.int32)
    w, scales = stored(1, D, F)
    slots = WeightSlots(jnp.array([1, 2, 0], jnp.int32), scales, fp8_inputs=True)
    y = matmul_of_choices(x, flipped(w), idx, slots, interpret=True).reshape(4, 2, F)
    for token, choice in ((0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1)):
        slot = [1, 2, 0][int(idx[token, choice])]
        expected = matmul_of_rounded(x[token : token + 1], w[slot], scales[slot])[0]
        assert_close(y[token, choice], expected, 1e-5)


def test_experts_in_xla() -> None:
    """XLA's form, which a CPU runs, is the MLP of products group after group."""
    h, (up, up_scales), (down, down_scales) = normal(0, 5, D), stored(1, D, 2 * F), stored(5, F, D)
    scales = {"w_up_scales": up_scales, "w_down_scales": down_scales}
    slots = scales | {"w_up": flipped(up), "w_down": flipped(down)}
    idx, weights = np.array([[0], [2], [2], [1], [0]], np.int32), np.ones((5, 1), np.float32)
    routed = ExpertInputs(*map(jnp.asarray, (h, idx, weights)), jnp.zeros((5, D)))
    table = jnp.array([2, 0, 1], jnp.int32)
    options: dict[str, Any] = {"activation": "swiglu", "tile_rows": 2, "implementation": "xla"}
    ours = add_expert_outputs_by_slot_table(routed, slots, table, fp8_inputs=True, **options)
    unflipped = scales | {"w_up": up, "w_down": down}
    exact = add_expert_outputs_by_slot_table(routed, unflipped, table, **options)
    for token in range(5):
        slot = int(table[idx[token, 0]])
        sums = matmul_of_rounded(h[token : token + 1], up[slot], up_scales[slot])
        a = activate(sums, "swiglu")
        assert_close(ours[token], matmul_of_rounded(a, down[slot], down_scales[slot])[0], 1e-5)
    assert 0.01 < relative_error(ours, exact) < 0.1


def test_what_no_kernel_multiplies() -> None:
    x, sizes, slot = jnp.zeros((16, 128), jnp.bfloat16), jnp.array([16]), jnp.zeros(1, jnp.int32)
    fp8 = jnp.zeros((1, 128, 128), jnp.uint8), jnp.ones((1, 1, 128), jnp.float32)
    int8 = jnp.zeros((1, 128, 128), jnp.int8), jnp.zeros((1, 4, 128), jnp.uint16)
    for (w, scales), capability, match in (
        (int8, "8.9", f"inputs in fp8 with weights in the format {INT8.name}"),
        (fp8, "8.0", "no FP8 tensor cores"),
    ):
        slots = WeightSlots(slot, scales, fp8_inputs=True)
        with trace_for_device(gpu(capability)), pytest.raises(NotImplementedError, match=match):
            triton.grouped_matmul(x, w, sizes, slots=slots)
    slots = WeightSlots(slot, fp8[1], fp8_inputs=True)
    with pytest.raises(NotImplementedError, match="inputs in fp8"):
        mosaic_gpu.grouped_matmul(x, fp8[0], sizes, slots=slots)


@pytest.mark.parametrize(
    ("capability", "has"), [("8.0", False), ("8.6", False), ("8.9", True), ("9.0", True)]
)
def test_gpus_with_fp8_products(capability: str, has: bool) -> None:
    with trace_for_device(gpu(capability)):
        assert has_fp8_products() == has
    assert not has_fp8_products()  # a CPU


def products_of(jaxpr: Any) -> list[Any]:
    """Return the products of a program, those of its kernels too."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    found = [eqn for eqn in inner.eqns if eqn.primitive.name in ("dot_general", "fp8_dot")]
    for eqn in inner.eqns:
        for parameter in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            found += products_of(parameter) if is_program(parameter) else []
    return found


def is_program(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize("tokens", [4, 200])
def test_a_gpus_program_multiplies_e4m3(tokens: int) -> None:
    """Every product of its kernels has two operands in E4M3."""
    of: Any = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    d, f, e = 256, 128, 4
    slots = {
        "w_up": of(jnp.uint8, e, 2 * f, d),
        "w_up_scales": of(jnp.float32, e, d // 128, 2 * f),
        "w_down": of(jnp.uint8, e, d, f),
        "w_down_scales": of(jnp.float32, e, f // 128, d),
    }
    routed = ExpertInputs(
        of(jnp.bfloat16, tokens, d),
        *(of(dtype, tokens, 2) for dtype in (jnp.int32, jnp.float32)),
        of(jnp.float32, tokens, d),
    )
    products = ExpertProducts("swiglu", fp8_inputs=True)

    def experts(routed: ExpertInputs, slots: Any, table: jax.Array) -> jax.Array:
        return add_expert_outputs_by_slot_table(
            routed, slots, table, tile_rows=64, **products._asdict()
        )

    operands = routed, slots, of(jnp.int32, e)
    with trace_for_device(gpu("8.9")):
        traced = jax.jit(experts).trace(*operands)
    dtypes = [[x.aval.dtype for x in dot.invars] for dot in products_of(traced.jaxpr)]
    # of a gate, an up and a down projection
    assert len(dtypes) == 3 and {dtype for pair in dtypes for dtype in pair} == {E4M3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Pallas' Triton backend
        _, lowered = lower_for_device(gpu("8.9"), jax.jit(experts), *operands)
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") >= 2
