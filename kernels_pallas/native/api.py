"""Native operations as JAX functions, for the CPU; gradients are functions of their own. `load`
must have been called.

Legend: T tokens or rows, K inner dimension or choices, N columns, D hidden, F expert hidden, E
experts, M slots; L groups of rows, U = 2F (SwiGLU) or F (GELU); P rows of a step, C tokens a row, H
query heads, G key heads, d and e dimensions of a key and of a value, B cache rows, S positions of a
row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.compressed import FORMATS, Format
from kernels_pallas.native.scope import in_background

ACTIVATIONS = {"swiglu": 0, "gelu": 1, "clamped_swiglu": 2}


def few_row_matmul(x_TK: jax.Array, w: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Return float32 [T, N] = x w for w [K, N], or for w [N, K] if `transposed`.

    Each is float32 or bfloat16; sums are in float32, each row's in an order that does not depend on
    the others.
    """
    columns = w.shape[0] if transposed else w.shape[1]
    call = jax.ffi.ffi_call(
        "jmoe_matmul", jax.ShapeDtypeStruct((x_TK.shape[0], columns), jnp.float32)
    )
    return call(x_TK, w, transposed=transposed)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: jnp.dtype | type) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last dimension, computed in float32, in
    `dtype`.

    Each of x, scale and `dtype` is float32 or bfloat16.
    """
    return jax.ffi.ffi_call("jmoe_rms_norm", jax.ShapeDtypeStruct(x.shape, dtype))(
        x, scale, eps=np.float32(eps)
    )


class SlotLayout(NamedTuple):
    """Where the arrays of an expert's MLP begin in a slot, in bytes: w_up [D, U], w_down [F, D],
    b_up [U], b_down [D].

    -1: there is no such array. hidden: F; U is F for GELU, else 2 F. wide_biases: they are float32,
    else bfloat16.
    form: of the matrices (`kernels_pallas/compressed.py`), which then have scales; None: as the
    tokens.
    """

    w_up: int
    w_up_scales: int
    w_down: int
    w_down_scales: int
    b_up: int
    b_down: int
    hidden: int
    wide_biases: bool
    form: Format | None


SLOT_ARRAYS = SlotLayout._fields[:6]


def slot_mlp(
    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    slots_MR: jax.Array,
    table_E: jax.Array,
    layout: SlotLayout,
    activation: str,
) -> jax.Array:
    """Return float32 [T, D]: y + the weighted sum of each token's experts, by ascending number.

    tokens: h_TD, float32 or bfloat16, as the weights where those are not compressed; idx_TK, int32,
    E or more for none; weights_TK and y_TD, float32.
    slots_MR: uint8, a slot of R bytes an expert; table_E: int32, an expert's slot.
    For more than `MAX_ROWS` tokens of bfloat16 a matrix is widened once for all rows, where
    `multiplies_many_rows` says so, and D and F are multiples of 16.
    """
    y = jax.ShapeDtypeStruct(tokens[3].shape, jnp.float32)
    call = jax.ffi.ffi_call("jmoe_slot_mlp", y, input_output_aliases={3: 0})
    numbers = {name: np.int64(getattr(layout, name)) for name in (*SLOT_ARRAYS, "hidden")}
    numbers["activation"] = np.int64(ACTIVATIONS[activation])
    numbers["form"] = np.int64(
        0 if layout.form is None else 1 + list(FORMATS.values()).index(layout.form)
    )
    return call(*tokens, slots_MR, table_E, wide_biases=layout.wide_biases, **numbers)


def find_slots(idx_TK: jax.Array, where_2: jax.Array, layer: int, num_experts: int) -> jax.Array:
    """Return int32 [E]: the slots of a layer's experts; of those that no token chose any.

    where_2: int32, from `SlotFinder.where`, of the program's first layer with experts; layer:
    counted from that one. What was chosen and has no slot is asked of that `SlotFinder`, and waited
    for.
    """
    call = jax.ffi.ffi_call("jmoe_find_slots", jax.ShapeDtypeStruct((num_experts,), jnp.int32))
    return call(idx_TK, where_2, layer=np.int64(layer))


def cached_attention(
    new: tuple[jax.Array, jax.Array, jax.Array],
    caches: tuple[jax.Array, jax.Array],
    rows_P: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | None = None,
    sinks_H: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write the step's keys and values into the caches in place; return (attention [P, C, H, e],
    both caches).

    new: q_PCHd, k_PCGd, v_PCGe; caches: k_BGSd, v_BGSe, of bfloat16 as uint16. Every token attends
    to the positions up to its own in its row, to `window` of them, its own included, where that is
    not None. Positions of S or more are
    padding: not written, and 0. Rows are distinct but for padding.
    """
    q_PCHd, _, v_PCGe = new
    limit = jnp.zeros(0, jnp.int32) if window is None else window.reshape(1).astype(jnp.int32)
    sinks = jnp.zeros(0, jnp.float32) if sinks_H is None else sinks_H.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((*q_PCHd.shape[:3], v_PCGe.shape[3]), q_PCHd.dtype)
    results = (out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches))
    call = jax.ffi.ffi_call("jmoe_attention", results, input_output_aliases={7: 1, 8: 2})
    done, k_BGSd, v_BGSe = call(
        *new, rows_P, positions_PC, limit, sinks, *caches, scale=np.float32(scale)
    )
    return done, k_BGSd, v_BGSe


def top_k(scores_TE: jax.Array, k: int) -> jax.Array:
    """Return int32 [T, k]: columns of the k largest scores of each row, by falling score; ties:
    the lowest column.
    """
    call = jax.ffi.ffi_call("jmoe_top_k", jax.ShapeDtypeStruct((scores_TE.shape[0], k), jnp.int32))
    return call(scores_TE)


def causal_attention(
    q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGe: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return (softmax(scale q k^T) v under a causal mask [B, S, H, e], float32 [B, H, S] the logs
    of its sums).

    All of bfloat16, with d and e multiples of 16.
    """
    b, s, h, _ = q_BSHd.shape
    out = (
        jax.ShapeDtypeStruct((b, s, h, v_BSGe.shape[3]), q_BSHd.dtype),
        jax.ShapeDtypeStruct((b, h, s), jnp.float32),
    )
    o_BSHe, lse_BHS = jax.ffi.ffi_call("jmoe_causal_attention", out)(
        q_BSHd, k_BSGd, v_BSGe, scale=np.float32(scale), background=in_background()
    )
    return o_BSHe, lse_BHS


def causal_attention_gradient(
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    do_BSHe: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of `causal_attention`'s three inputs, in bfloat16, from what it was
    given and returned.
    """
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
    call = jax.ffi.ffi_call("jmoe_causal_attention_gradient", out)
    dq_BSHd, dk_BSGd, dv_BSGe = call(
        *inputs, *results, do_BSHe, scale=np.float32(scale), background=in_background()
    )
    return dq_BSHd, dk_BSGd, dv_BSGe


# (x_TD, the row of x_TD of each of N rows or None where x_TD has these rows, sizes_L)
GroupedRows = tuple[jax.Array, jax.Array | None, jax.Array]
# (w_up_LDU, w_down_LFD, b_up_LU or None, b_down_LD or None)
MLPArrays = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def grouped_mlp(rows: GroupedRows, weights: MLPArrays) -> tuple[jax.Array, jax.Array]:
    """Return (each group's MLP of its rows [N, D], their pre-activations [N, U]); zeros beyond the
    groups' rows.

    GELU if U is F, else SwiGLU. x_TD and the weights are bfloat16, biases float32; D and F
    multiples of 16.
    """
    (x_TD, src_N, sizes_L), (w_up_LDU, w_down_LFD, b_up_LU, b_down_LD) = rows, weights
    num_rows, none = (x_TD if src_N is None else src_N).shape[0], jnp.zeros(0, jnp.float32)
    y, h = (
        jax.ShapeDtypeStruct((num_rows, size), x_TD.dtype)
        for size in (x_TD.shape[1], w_up_LDU.shape[2])
    )
    workspace = jax.ShapeDtypeStruct(((w_up_LDU.size + w_down_LFD.size) // 2,), jnp.uint32)
    src_N = jnp.zeros(0, jnp.int32) if src_N is None else src_N
    biases = (none if b is None else b for b in (b_up_LU, b_down_LD))
    call = jax.ffi.ffi_call("jmoe_grouped_mlp", (y, h, workspace))
    y_ND, h_NU, _ = call(
        x_TD, src_N, sizes_L, w_up_LDU, w_down_LFD, *biases, background=in_background()
    )
    return y_ND, h_NU


def grouped_mlp_gradient(
    rows: GroupedRows, weights: MLPArrays, h_NU: jax.Array, dy_ND: jax.Array
) -> tuple[jax.Array, MLPArrays]:
    """Return (dx [N, D], the weights' gradients in float32) of `grouped_mlp`, which returned
    `h_NU`.
    """
    (x_TD, src_N, sizes_L), (w_up_LDU, w_down_LFD, b_up_LU, b_down_LD) = rows, weights
    groups, d, u = w_up_LDU.shape
    f, num_rows = w_down_LFD.shape[1], dy_ND.shape[0]
    # as `Workspace` in grouped_mlp.cc counts them
    pairs, blocks = num_rows // 2 + groups, num_rows // 96 + groups
    num_words = (w_up_LDU.size + w_down_LFD.size) // 2 + pairs * (2 * d + f + u) + blocks * u
    wide = [jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in (w_up_LDU, w_down_LFD)]
    biases = [
        jax.ShapeDtypeStruct((0,) if b is None else b.shape, jnp.float32)
        for b in (b_up_LU, b_down_LD)
    ]
    results = (
        jax.ShapeDtypeStruct(dy_ND.shape, x_TD.dtype),
        *wide,
        *biases,
        jax.ShapeDtypeStruct((num_words,), jnp.uint32),
    )
    src_N = jnp.zeros(0, jnp.int32) if src_N is None else src_N
    call = jax.ffi.ffi_call("jmoe_grouped_mlp_gradient", results)
    dx_ND, dw_up_LDU, dw_down_LFD, db_up_LU, db_down_LD, _ = call(
        x_TD, src_N, sizes_L, w_up_LDU, w_down_LFD, h_NU, dy_ND, background=in_background()
    )
    return dx_ND, (
        dw_up_LDU,
        dw_down_LFD,
        None if b_up_LU is None else db_up_LU,
        None if b_down_LD is None else db_down_LD,
    )


def hold(known: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    """Return int32 [] `known`, once the arrays are known too; until then XLA uses their memory for
    nothing else.

    What an operation in the background reads and writes should be held: another that is given a
    part of that memory would wait for it.
    """
    return jax.ffi.ffi_call("jmoe_hold", jax.ShapeDtypeStruct((), jnp.int32))(known, *arrays)


def multiplications(name: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the multiplications of a training step's call by the name of its target and its
    inputs' shapes.

    0 for other operations. Rows beyond the groups' count as rows; what is masked does not.
    """
    gradient = name.endswith("_gradient")
    if name.startswith("jmoe_causal_attention"):
        (b, s, h, d), _, (*_, e) = shapes[:3]
        return b * h * s * (s + 1) // 2 * (3 * d + 2 * e if gradient else d + e)
    if name.startswith("jmoe_grouped_mlp"):
        (num_tokens, d), (chosen,), _, (*_, u), (_, f, _) = shapes[:5]
        return (chosen or num_tokens) * d * (u + f) * (2 if gradient else 1)
    return 0
