"""Native CPU operations as JAX functions. Gradients are separate functions. Call `load` first.

Legend: T tokens or rows, K inner dimension or choices, N columns, D hidden, F expert hidden, E
experts, M slots; L groups of rows, or positions of a block of the cache, U = 2F (SwiGLU) or F
(GELU); P rows (sequences) of a step, C tokens per row, H query heads, G key heads, d and e
dimensions of a key and of a value, B batch, N blocks of the cache, W blocks of a row, S positions
of a row, R bytes of a slot.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kernels_pallas.formats import Format
from kernels_pallas.native.scope import runs_in_background

ACTIVATIONS = {"swiglu": 0, "gelu": 1, "clamped_swiglu": 2}


def matmul(x_TK: jax.Array, w: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Return float32 [..., T, N] = x w for w [..., K, N], or x w^T for w [..., N, K] if
    `transposed`.

    x and w are float32 or bfloat16, with the same leading dimensions: one product for each. Sums
    are float32, and a row's order of summation depends on nothing but whether there are more than
    `MAX_ROWS` rows. Those of one product [K, N] share its conversion to float32, if N is a multiple
    of 16.
    """
    columns = w.shape[-2] if transposed else w.shape[-1]
    call = jax.ffi.ffi_call(
        "jmoe_matmul", jax.ShapeDtypeStruct((*x_TK.shape[:-1], columns), jnp.float32)
    )
    return call(x_TK, w, transposed=transposed)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: DTypeLike) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last dimension, computed in float32 and
    returned in `dtype`.

    x, scale and `dtype` are each float32 or bfloat16.
    """
    return jax.ffi.ffi_call("jmoe_rms_norm", jax.ShapeDtypeStruct(x.shape, dtype))(
        x, scale, eps=np.float32(eps)
    )


class ExpertByteOffsets(NamedTuple):
    """The byte offsets of an expert's arrays in its slot: w_up [D, U], w_down [F, D], b_up [U],
    b_down [D]; -1 for an array that does not exist.

    hidden: F; U is F for GELU, else 2 F. wide_biases: biases are float32, else bfloat16. form: the
    compressed format of the matrices, which then have scales (`kernels_pallas/compressed.py`); None
    if they have the tokens' dtype. int8_activations: the inputs of both products are rounded to 8
    bits, in blocks of 32 with one scale; the format takes them (`Format.takes_int8`).
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
    int8_activations: bool = False


SLOT_ARRAYS = ExpertByteOffsets._fields[:6]


def slot_mlp(
    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    slots_MR: jax.Array,
    table_E: jax.Array,
    layout: ExpertByteOffsets,
    activation: str,
) -> jax.Array:
    """Return float32 [T, D]: y plus the weighted sum of each token's experts, added by ascending
    expert number.

    tokens: (h_TD, idx_TK, weights_TK, y_TD). h is float32 or bfloat16, the weights' dtype unless
    they are compressed; idx is int32, E or more for no expert; weights and y are float32.

    slots_MR: uint8, a slot of R bytes per expert. table_E: int32, each expert's slot. With more
    than `MAX_ROWS` tokens each matrix is converted once for all rows, if the processor has AVX2
    (`has_wide_vectors`) and D and F are multiples of 16.
    """
    y = jax.ShapeDtypeStruct(tokens[3].shape, jnp.float32)
    call = jax.ffi.ffi_call("jmoe_slot_mlp", y, input_output_aliases={3: 0})
    numbers = {name: np.int64(getattr(layout, name)) for name in (*SLOT_ARRAYS, "hidden")}
    numbers["activation"] = np.int64(ACTIVATIONS[activation])
    numbers["form"] = np.int64(0)
    if layout.form is not None:
        assert layout.form.native is not None, "the caller checks that C++ reads the format"
        numbers["form"] = np.int64(layout.form.native)
    rounded = layout.int8_activations
    assert not rounded or (layout.form is not None and layout.form.takes_int8)
    flags = {"wide_biases": layout.wide_biases, "int8_activations": rounded}
    return call(*tokens, slots_MR, table_E, **flags, **numbers)


def find_slots(idx_TK: jax.Array, where_2: jax.Array, layer: int, num_experts: int) -> jax.Array:
    """Return int32 [E], the slots of a layer's experts; arbitrary for experts that no token chose.

    where_2: int32, from `SlotFinder.find_slots_operand` for the program's first layer with experts.
    layer: counted from that layer. The operation asks that `SlotFinder` for chosen experts without
    a slot, and waits for them.
    """
    call = jax.ffi.ffi_call("jmoe_find_slots", jax.ShapeDtypeStruct((num_experts,), jnp.int32))
    return call(idx_TK, where_2, layer=np.int64(layer))


def cached_attention(
    new: tuple[jax.Array, jax.Array, jax.Array],
    caches: tuple[jax.Array, jax.Array | None],
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Write the step's keys and values into the caches in place; return (attention [P, C, H, e],
    both caches).

    new: q_PCHd, k_PCGd, v_PCGe. caches: k_NGLd, v_NGLe, with L = 128, bfloat16 as
    uint16 bits, FP8 as uint8 codes (`cached_values.py`);
    v_NGLe is None if the values are the first e dimensions of the keys.
    blocks_PW: the blocks of each sequence: position i is in block i // L of its row. Blocks to
    which the step writes are in one row alone, except for padding. A token attends to the positions
    of its row up to its own; with `window` to the last `window` of them, its own included.
    Positions of S = W L or more are padding: their keys are not written, and their result is 0.
    """
    q_PCHd, _, v_PCGe = new
    limit = jnp.zeros(0, jnp.int32) if window is None else window.reshape(1).astype(jnp.int32)
    sinks = jnp.zeros(0, jnp.float32) if sinks_H is None else sinks_H.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((*q_PCHd.shape[:3], v_PCGe.shape[3]), q_PCHd.dtype)
    stored = [x for x in caches if x is not None]
    results = (out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored))
    aliases = {7 + i: 1 + i for i in range(len(stored))}
    name = "jmoe_attention" if len(stored) == 2 else "jmoe_latent_attention"
    done, *written = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(
        *new, blocks_PW, positions_PC, limit, sinks, *stored, scale=np.float32(scale)
    )
    return done, written[0], written[1] if len(stored) == 2 else None


def top_k_indices(scores_TE: jax.Array, k: int) -> jax.Array:
    """Return int32 [T, k], the columns of each row's k largest scores, by falling score; a tie goes
    to the lowest column.
    """
    call = jax.ffi.ffi_call("jmoe_top_k", jax.ShapeDtypeStruct((scores_TE.shape[0], k), jnp.int32))
    return call(scores_TE)


def causal_attention(
    q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGe: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return (softmax(scale q k^T) v under a causal mask, [B, S, H, e]; float32 [B, H, S], the
    logarithm of each query's sum of exp(scores)).

    Operands are bfloat16; d and e are multiples of 16.
    """
    b, s, h, _ = q_BSHd.shape
    out = (
        jax.ShapeDtypeStruct((b, s, h, v_BSGe.shape[3]), q_BSHd.dtype),
        jax.ShapeDtypeStruct((b, h, s), jnp.float32),
    )
    o_BSHe, lse_BHS = jax.ffi.ffi_call("jmoe_causal_attention", out)(
        q_BSHd, k_BSGd, v_BSGe, scale=np.float32(scale), background=runs_in_background()
    )
    return o_BSHe, lse_BHS


def causal_attention_gradient(
    inputs: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    do_BSHe: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the bfloat16 gradients of `causal_attention`'s inputs (q, k, v).

    inputs, results: its operands and both results. do_BSHe: the output's gradient.
    """
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
    call = jax.ffi.ffi_call("jmoe_causal_attention_gradient", out)
    dq_BSHd, dk_BSGd, dv_BSGe = call(
        *inputs, *results, do_BSHe, scale=np.float32(scale), background=runs_in_background()
    )
    return dq_BSHd, dk_BSGd, dv_BSGe


class GroupedRows(NamedTuple):
    """N rows sorted by group.

    src_N: the row of x_TD that is each row; None if x_TD holds the rows. scale_N: float32, the
    factor of each row's output; None for 1.
    """

    x_TD: jax.Array
    src_N: jax.Array | None
    sizes_L: jax.Array
    scale_N: jax.Array | None = None

    @property
    def num_rows(self) -> int:
        return int((self.x_TD if self.src_N is None else self.src_N).shape[0])


# (w_up_LDU, w_down_LFD, b_up_LU or None, b_down_LD or None)
MLPArrays = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]


def _or_empty(x: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return x; an array without elements for None."""
    return jnp.zeros(0, dtype) if x is None else x


def grouped_mlp(rows: GroupedRows, weights: MLPArrays) -> tuple[jax.Array, jax.Array]:
    """Return (each group's MLP applied to its rows [N, D], pre-activations [N, U]); zeros beyond
    the groups.

    The activation is GELU if U is F, else SwiGLU. x_TD and the matrices are bfloat16, biases
    float32; D and F are multiples of 16. The factors of `rows` multiply the activations and the
    bias of the second product.
    """
    w_up_LDU, w_down_LFD, *biases = weights
    y, h = (
        jax.ShapeDtypeStruct((rows.num_rows, size), rows.x_TD.dtype)
        for size in (rows.x_TD.shape[1], w_up_LDU.shape[2])
    )
    workspace = jax.ShapeDtypeStruct(((w_up_LDU.size + w_down_LFD.size) // 2,), jnp.uint32)
    call = jax.ffi.ffi_call("jmoe_grouped_mlp", (y, h, workspace))
    y_ND, h_NU, _ = call(
        rows.x_TD,
        _or_empty(rows.src_N, jnp.int32),
        rows.sizes_L,
        w_up_LDU,
        w_down_LFD,
        *map(_or_empty, (*biases, rows.scale_N)),
        background=runs_in_background(),
    )
    return y_ND, h_NU


def grouped_mlp_gradient(
    rows: GroupedRows, weights: MLPArrays, h_NU: jax.Array, dy_ND: jax.Array
) -> tuple[jax.Array, jax.Array | None, MLPArrays]:
    """Return (dx [N, D], float32 gradients of the factors [N], None without factors, float32
    gradients of the weights) of `grouped_mlp`. h_NU: its pre-activations.
    """
    w_up_LDU, w_down_LFD, b_up_LU, b_down_LD = weights
    groups, d, u = w_up_LDU.shape
    f, num_rows = w_down_LFD.shape[1], dy_ND.shape[0]
    # must match `Workspace` in grouped_mlp.cc
    pairs, blocks = num_rows // 2 + groups, num_rows // 96 + groups
    num_words = (w_up_LDU.size + w_down_LFD.size) // 2 + pairs * (2 * d + f + u) + blocks * u
    optional = b_up_LU, b_down_LD, rows.scale_N
    results = (
        jax.ShapeDtypeStruct(dy_ND.shape, rows.x_TD.dtype),
        *(
            jax.ShapeDtypeStruct(_or_empty(w).shape, jnp.float32)
            for w in (w_up_LDU, w_down_LFD, *optional)
        ),
        jax.ShapeDtypeStruct((num_words,), jnp.uint32),
    )
    call = jax.ffi.ffi_call("jmoe_grouped_mlp_gradient", results)
    dx_ND, dw_up_LDU, dw_down_LFD, *others, _ = call(
        rows.x_TD,
        _or_empty(rows.src_N, jnp.int32),
        rows.sizes_L,
        w_up_LDU,
        w_down_LFD,
        *map(_or_empty, (b_down_LD, rows.scale_N)),
        h_NU,
        dy_ND,
        background=runs_in_background(),
    )
    db_up_LU, db_down_LD, dscale_N = (
        None if x is None else gradient for x, gradient in zip(optional, others, strict=True)
    )
    return dx_ND, dscale_N, (dw_up_LDU, dw_down_LFD, db_up_LU, db_down_LD)


def delay_until_available(scalar: jax.Array, arrays: Sequence[jax.Array]) -> jax.Array:
    """Return the int32 `scalar`, available once `arrays` are; XLA does not reuse the memory of
    `arrays` before.

    Hold what a background operation reads and writes: another operation that gets a part of that
    memory would have to wait for it.
    """
    return jax.ffi.ffi_call("jmoe_hold", jax.ShapeDtypeStruct((), jnp.int32))(scalar, *arrays)
