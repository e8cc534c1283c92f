"""Causal grouped-query attention with rotary positions, sliding windows and sinks.

`models/block.py` and the engine call `Attention`; image models use it without a causal mask. Four
implementations compute causal attention: on a GPU cuDNN's flash attention, or a kernel in Triton
for rows of several documents; a native kernel (CPU); and blocked XLA.

Legend: B batch, S sequence, H query heads, G key/value heads, R = H / G query heads per group, d
size of a query or key head, e size of a value head, Q query rows of a block, C keys that a block
sees.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmoe.config import NO_WINDOW, ModelConfig, RopeScaling
from jmoe.layers.chunked_attention import (
    Window,
    chunk_numbers,
    queries_without_positions,
    select_by_window,
    unscaled_rms_norm,
)
from jmoe.layers.documents import Documents, first_tokens
from jmoe.layers.experts import affine, normal_parameter
from jmoe.layers.norm import Norm
from jmoe.layers.rotary import apply_rotary, rotary_frequencies_and_scale
from jmoe.layers.rotated_heads import norm_and_rotate
from jmoe.types import PyTree
from kernels_pallas import cudnn, native
from kernels_pallas import range_attention as ranged
from kernels_pallas.implementations import first_supported, log_once, target_device
from kernels_pallas.matmul import dot, transposed
from kernels_pallas.saved import mark_saved, mark_saved_residual

if TYPE_CHECKING:
    from kernels_pallas.rotary_write import Rotary

QUERY_BLOCK = 128
PACKED_IN_XLA = (
    "attention: rows of several documents run in XLA, not in the native operation;"
    " data.mask_documents = False or data.pack_samples = False avoids such rows"
)


def _query_block_spans(length: int) -> list[tuple[int, int]]:
    return [(i, min(i + QUERY_BLOCK, length)) for i in range(0, length, QUERY_BLOCK)]


def _flatten_query_rows(x_BGRSd: jax.Array, start: int, end: int) -> jax.Array:
    """Return query rows start..end of every head of a group, flattened to [B, G, R*Q, d]."""
    x = x_BGRSd[:, :, :, start:end]
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _key_range(start: int, end: int, window: int | None) -> slice:
    """Return the slice of the keys that query rows start..end see, begun earlier if necessary so
    that it starts at a multiple of `QUERY_BLOCK`.
    """
    first = 0 if window is None else max(0, start - window + 1)
    return slice(first // QUERY_BLOCK * QUERY_BLOCK, end)


def _masked_scores(
    q: jax.Array,
    k: jax.Array,
    documents_BS: jax.Array | None,
    start: int,
    end: int,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Return float32 [B, G, R, Q, C]: scaled, causally masked scores of query rows start..end
    against the keys of `_key_range`.

    documents_BS: a query sees the keys of its own document; None for all. window: a query sees this
    many keys, itself included; None for no limit.
    """
    keys = _key_range(start, end, window)
    s = dot(_flatten_query_rows(q, start, end), k[:, :, keys], b_transposed=True) * scale
    s = s.reshape(*s.shape[:2], -1, end - start, end - keys.start)
    row, key = jnp.arange(start, end)[:, None], jnp.arange(keys.start, end)
    seen = row >= key
    if window is not None:
        seen &= row - key < window
    if documents_BS is not None:
        rows_BQ1, keys_B1C = documents_BS[:, start:end, None], documents_BS[:, None, keys]
        seen = seen & (rows_BQ1 == keys_B1C)[:, None, None]
    return jnp.where(seen, s, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend_in_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    documents_BS: jax.Array | None,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Return causal attention [B, G, R, S, e] of q [B, G, R, S, d] over k [B, G, S, d] and v [B, G,
    S, e], one query block at a time.

    sinks: float32 [G, R], per head the logit of a key without a value. documents_BS: int32, equal
    for the tokens that see each other. window: the number of keys that a query sees, itself
    included.
    """
    return _attend_in_blocks_fwd(q, k, v, sinks, documents_BS, scale, window)[0]


def _attend_in_blocks_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    documents_BS: jax.Array | None,
    scale: float,
    window: int | None,
) -> PyTree:
    out, lse = [], []
    for start, end in _query_block_spans(q.shape[3]):
        s = _masked_scores(q, k, documents_BS, start, end, scale, window)
        top = s.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = jnp.maximum(top, sinks[:, :, None, None])
        p = jnp.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks[:, :, None, None] - top)
        flat = p.astype(v.dtype).reshape(*s.shape[:2], -1, s.shape[-1])
        o = dot(flat, v[:, :, _key_range(start, end, window)])
        out.append((o.reshape(*s.shape[:-1], -1) / total).astype(q.dtype))
        lse.append(top + jnp.log(total))
    o, lse_all = jnp.concatenate(out, axis=3), jnp.concatenate(lse, axis=3)
    o, lse_all = mark_saved_residual(o, "attention"), mark_saved_residual(lse_all, "attention")
    return o, (q, k, v, sinks, documents_BS, o, lse_all)


def _attend_in_blocks_bwd(
    scale: float, window: int | None, residuals: PyTree, do: jax.Array
) -> PyTree:
    q, k, v, sinks, documents_BS, o, lse = residuals
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for start, end in _query_block_spans(q.shape[3]):
        keys = _key_range(start, end, window)
        s = _masked_scores(q, k, documents_BS, start, end, scale, window)
        p = jnp.exp(s - lse[:, :, :, start:end])
        flat = (*p.shape[:2], -1, p.shape[-1])
        do_rows, q_rows = _flatten_query_rows(do, start, end), _flatten_query_rows(q, start, end)
        dp = dot(do_rows, v[:, :, keys], b_transposed=True).reshape(p.shape)
        ds = (p * (dp - delta[:, :, :, start:end]) * scale).astype(q.dtype).reshape(flat)
        dv = _add_to_keys(dv, keys, dot(transposed(p.astype(v.dtype).reshape(flat)), do_rows))
        dk = _add_to_keys(dk, keys, dot(transposed(ds), q_rows))
        dq.append(dot(ds, k[:, :, keys]).astype(q.dtype).reshape(*p.shape[:-1], -1))
    dsinks = None
    if sinks is not None:  # a sink's probability takes weight from every value
        dsinks = -(jnp.exp(sinks[:, :, None, None] - lse) * delta).sum(axis=(0, 3, 4))
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None


def _add_to_keys(sums: jax.Array, keys: slice, x: jax.Array) -> jax.Array:
    """Return sums [B, G, S, d] with x [B, G, C, d] added to the rows `keys`.

    `sums.at[:, :, keys].add(x)` with all keys is a scatter without indices, whose constant makes
    jaxlib 0.11.2 crash in a shard_map (Shardy's ManualComputationUnusedInputsPattern).
    """
    return lax.dynamic_update_slice_in_dim(sums, sums[:, :, keys] + x, keys.start, axis=2)


_attend_in_blocks.defvjp(_attend_in_blocks_fwd, _attend_in_blocks_bwd)


def blocked_attention(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGd: jax.Array,
    *,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
    window: int | None = None,
    documents_BS: jax.Array | None = None,
) -> jax.Array:
    """Return causal attention [B, S, H, d] in plain XLA, one query block at a time.

    Blocks above the diagonal and outside the window are skipped, and no score matrix is saved for
    the backward pass. The arguments are those of `causal_attention`.
    """
    b, s, h, d = q_BSHd.shape
    g = k_BSGd.shape[2]
    q = q_BSHd.reshape(b, s, g, h // g, d).transpose(0, 2, 3, 1, 4)
    sinks = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(g, h // g)
    scale = d**-0.5 if scale is None else scale
    k, v = k_BSGd.transpose(0, 2, 1, 3), v_BSGd.transpose(0, 2, 1, 3)
    o = _attend_in_blocks(q, k, v, sinks, documents_BS, scale, window)
    return o.transpose(0, 3, 1, 2, 4).reshape(b, s, h, -1)


class FlashKernel(NamedTuple):
    """The forward and the gradient function of a causal attention kernel.

    forward: (q, k, v) -> (o [B, S, H, e], lse float32 [B, H, S]), where lse is the log-sum-exp of
    each query's scores. gradient: ((q, k, v), (o, lse), do) -> (dq, dk, dv).
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(
    q_BSHd: jax.Array,
    k_BSGd: PyTree,
    v_BSGe: PyTree,
    sinks_H: jax.Array | None,
    kernel: FlashKernel,
) -> jax.Array:
    """Return causal attention [B, S, H, e] by a kernel that knows no sinks.

    k_BSGd, v_BSGe: arrays, or trees with arrays that the kernel takes besides.

    With a sink, a query's log-sum-exp becomes log(exp(lse) + exp(sink)), and its output is scaled
    by exp(lse) / (exp(lse) + exp(sink)). A flash kernel's gradient computes probabilities from the
    log-sum-exps and subtracts the products of output and output gradient, so that both of these
    with the sink in them give the exact gradients of queries, keys and values.
    """
    return _flash_fwd(q_BSHd, k_BSGd, v_BSGe, sinks_H, kernel)[0]


def _flash_fwd(
    q_BSHd: jax.Array,
    k_BSGd: PyTree,
    v_BSGe: PyTree,
    sinks_H: jax.Array | None,
    kernel: FlashKernel,
) -> PyTree:
    o_BSHe, lse_BHS = kernel.forward(q_BSHd, k_BSGd, v_BSGe)
    if sinks_H is not None:
        sinks_H1 = sinks_H.astype(jnp.float32)[:, None]
        share_BHS = jax.nn.sigmoid(lse_BHS - sinks_H1)
        o_BSHe = (o_BSHe.astype(jnp.float32) * share_BHS.transpose(0, 2, 1)[..., None]).astype(
            o_BSHe.dtype
        )
        lse_BHS = jnp.logaddexp(lse_BHS, sinks_H1)
    # named, so that rematerialization does not run the kernel again
    o_BSHe, lse_BHS = (
        mark_saved_residual(o_BSHe, "attention"),
        mark_saved_residual(lse_BHS, "attention"),
    )
    return o_BSHe, (q_BSHd, k_BSGd, v_BSGe, sinks_H, o_BSHe, lse_BHS)


def _flash_bwd(kernel: FlashKernel, residuals: PyTree, do_BSHe: jax.Array) -> PyTree:
    *operands, sinks_H, o_BSHe, lse_BHS = residuals
    gradients = kernel.gradient(tuple(operands), (o_BSHe, lse_BHS), do_BSHe)
    if sinks_H is None:
        return *gradients, None
    delta_BSH = (do_BSHe.astype(jnp.float32) * o_BSHe.astype(jnp.float32)).sum(axis=-1)
    weight_BHS = jnp.exp(sinks_H.astype(jnp.float32)[:, None] - lse_BHS)  # of the sink
    dsinks_H = -(weight_BHS.transpose(0, 2, 1) * delta_BSH).sum(axis=(0, 1))
    return *gradients, dsinks_H.astype(sinks_H.dtype)


flash_attention.defvjp(_flash_fwd, _flash_bwd)


def _cudnn_attention(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGe: jax.Array,
    sinks_H: jax.Array | None,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Return `causal_attention` of one document a row by cuDNN; raises NotImplementedError for
    operands that it has no kernel for.
    """
    cudnn.check_attention_supported(q_BSHd, k_BSGd, v_BSGe)
    kernel = FlashKernel(
        partial(cudnn.attention, scale=scale, window=window),
        partial(cudnn.attention_gradient, scale=scale, window=window),
    )
    return flash_attention(q_BSHd, k_BSGd, v_BSGe, sinks_H, kernel)


def _triton_attention(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGe: jax.Array,
    sinks_H: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    documents_BS: jax.Array,
) -> jax.Array:
    """Return `causal_attention` of rows of several documents by a kernel in Triton; raises
    NotImplementedError for operands that it does not support.
    """
    ranged.check_supported(q_BSHd, k_BSGd, v_BSGe)
    keys = k_BSGd, ranges_of_documents(documents_BS, window)
    return flash_attention(q_BSHd, keys, v_BSGe, sinks_H, ranges_kernel(scale))


def ranges_of_documents(documents_BS: jax.Array, window: int | None) -> ranged.KeyRanges:
    """Return the keys that queries see: those of their document up to their own, in the window."""
    index_S = jnp.arange(documents_BS.shape[1], dtype=jnp.int32)
    first_BS = first_tokens(documents_BS)
    if window is not None:
        first_BS = jnp.maximum(first_BS, index_S - window + 1)
    return ranged.KeyRanges(first_BS, jnp.broadcast_to(index_S + 1, first_BS.shape))


def ranges_kernel(scale: float, interpret: bool = False) -> FlashKernel:
    """Return attention to ranges of keys, whose operands are (q, (k, `KeyRanges`), v)."""
    options: dict[str, Any] = {"scale": scale, "interpret": interpret}

    def forward(q: jax.Array, keys: PyTree, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ranged.range_attention(q, keys[0], v, keys[1], **options)

    def gradient(operands: PyTree, results: PyTree, do: jax.Array) -> PyTree:
        q, (k, ranges), v = operands
        dq, dk, dv = ranged.range_attention_gradient((q, k, v), results, do, ranges, **options)
        return dq, (dk, None), dv

    return FlashKernel(forward, gradient)


def causal_attention(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGe: jax.Array,
    *,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
    window: int | None = None,
    documents_BS: jax.Array | None = None,
) -> jax.Array:
    """Return softmax(scale q k^T) v under a causal mask, [B, S, H, e] in q's dtype.

    The native CPU kernel runs where the trace allows it (`native.allow_native_training`), without
    sinks, windows and documents. On a GPU cuDNN's flash attention runs, or a kernel in Triton if
    rows hold several documents; their reason for a case that they do not support is logged once.
    All else runs as blocked XLA.

    scale: None for d^-0.5. sinks_H: per head the logit of a key without a value. window: the number
    of keys that a query sees, itself included. documents_BS: int32, equal for the tokens of one
    document, which alone see each other; None if a sequence is one document.
    """
    dims = q_BSHd.shape[-1], v_BSGe.shape[-1]
    scale = dims[0] ** -0.5 if scale is None else scale
    window = None if window is None or window >= k_BSGd.shape[1] else window
    operands = q_BSHd, k_BSGd, v_BSGe
    dtypes = (x.dtype for x in operands)
    plain = sinks_H is None and window is None
    is_native = plain and native.uses_native_training(*dtypes, multiples=dims)
    if is_native and documents_BS is not None:
        log_once(PACKED_IN_XLA)
    elif is_native:
        kernel = FlashKernel(
            partial(native.causal_attention, scale=scale),
            partial(native.causal_attention_gradient, scale=scale),
        )
        return flash_attention(*operands, None, kernel)
    options: dict[str, Any] = {"scale": scale, "window": window}
    blocked = partial(
        blocked_attention, *operands, sinks_H=sinks_H, documents_BS=documents_BS, **options
    )
    if target_device().platform != "gpu":
        return blocked()
    name, attend = "cudnn", partial(_cudnn_attention, *operands, sinks_H, **options)
    if documents_BS is not None:
        by_triton = partial(_triton_attention, documents_BS=documents_BS)
        name, attend = "triton", partial(by_triton, *operands, sinks_H, **options)
    return first_supported("attention", ((name, attend), ("xla", blocked)))


def full_attention(
    q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGd: jax.Array, *, scale: float
) -> jax.Array:
    """Return softmax(scale q k^T) v without a mask: every token sees its whole sequence, as image
    patches do, or all of another one.
    """
    # dot_product_attention takes no precision; its gradients keep the precision of this trace
    with jax.default_matmul_precision("highest" if q_BSHd.dtype == jnp.float32 else "default"):
        return mark_saved(
            jax.nn.dot_product_attention(q_BSHd, k_BSGd, v_BSGd, scale=scale), "attention"
        )


# (cached keys [B, G, C, d]) -> the keys and values [B, H, C, ...] of every query head
Expand = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class CacheInputs(NamedTuple):
    """The queries of a step's tokens, and their keys and values as a KV cache stores them.

    expand: a function from cached keys to the (keys, values) that the queries attend to; None if
    they attend to the cached keys and values themselves.
    write: (cached keys, cached values, tables of blocks, positions) -> (queries, cached keys,
    cached values) by a kernel that rotates and writes; raises NotImplementedError for what it does
    not support. None if there is no kernel.
    write_and_attend: the same -> (weighted sums of values, cached keys, cached values), with
    `paged_attention`'s `scale`, `window` and `sinks_H`; of single tokens.
    """

    q_BSHd: jax.Array
    k_BSGd: jax.Array
    v_BSGe: jax.Array
    expand: Expand | None = None
    write: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    write_and_attend: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None


class Attention(nnx.Module):
    """Self-attention [B, S, D] -> float32 [B, S, D] with grouped query heads.

    Causal if `config.is_causal`. The other fields of `config` choose biases, the norms of queries
    and keys (per head or over all heads), clipping, rotary positions and sinks.

    out_std: standard deviation of the initial output projection.
    """

    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs) -> None:
        self.config = config
        d, dh, std = config.hidden_size, config.dim_per_head, config.initializer_range
        q, kv = config.num_attention_heads * dh, config.num_key_value_heads * dh
        gate = q if config.attention_gate else 0
        self.w_qkv = normal_parameter(rngs, (d, q + gate + 2 * kv), std)
        self.w_out = normal_parameter(rngs, (q, d), out_std)
        self.b_qkv = (
            nnx.Param(jnp.zeros(q + 2 * kv)) if config.attention_bias or config.qkv_bias else None
        )
        self.b_out = nnx.Param(jnp.zeros(d)) if config.attention_bias else None
        by_head = dict.fromkeys(("head", "rotated_head"), (dh, dh))
        sizes = {**by_head, "full": (q, kv)}.get(config.qk_norm)
        kind = "rmsnorm" if config.norm == "layernorm" else config.norm
        self.q_norm = Norm(sizes[0], kind, config.norm_eps) if sizes else None
        self.k_norm = Norm(sizes[1], kind, config.norm_eps) if sizes else None
        self.sinks = (
            nnx.Param(jnp.zeros(config.num_attention_heads)) if config.attention_sinks else None
        )

    @property
    def scale(self) -> float:
        """Factor of the scores before the softmax: 1 / sqrt(head dimension), or as configured."""
        return self.config.attention_scale

    def rope_scaling_at(self, length: int | None) -> RopeScaling | None:
        """Return the form of scaled positions for sequences of `length` tokens, or as configured if
        that is None.
        """
        scaling = self.config.rope_scaling
        return scaling if length is None or scaling is None else scaling.at_length(length)

    def project(
        self,
        x_BSD: jax.Array,
        positions: jax.Array,
        length: int | None = None,
        window: Window = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Return (queries [B, S, H, d], keys [B, S, G, d], values [B, S, G, d], the gate's input
        [B, S, H, d] or None) in x's dtype.

        positions: [S] or [B, S], the positions to which queries and keys are rotated.
        length: tokens of a sequence, on which frequencies may depend; None: as configured.
        window: of the layer, on which positions depend in a model with chunks.

        On a GPU a kernel norms and rotates; its reason for a case that it does not support is
        logged once.
        """
        qkv, gate = self._split_gate(self._project_qkv(x_BSD))
        plain = partial(self._normed_and_rotated, qkv, positions, length, window)
        by_xla = self.config.position != "rope" or self.config.has_chunked_attention
        if target_device().platform != "gpu" or by_xla:
            return *plain(), gate
        options = self.config, (self.q_norm, self.k_norm), self.rope_scaling_at(length)
        by_kernel = partial(norm_and_rotate, *options, qkv, positions)
        candidates = ("triton", by_kernel), ("xla", plain)
        return *first_supported("norms and rotation of queries and keys", candidates), gate

    def _project_qkv(self, x_BSD: jax.Array) -> jax.Array:
        """Return queries, keys and values of all heads side by side, in x's dtype."""
        return mark_saved(affine(x_BSD, self.w_qkv, self.b_qkv).astype(x_BSD.dtype), "qkv")

    def _split_gate(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return (queries, keys and values of all heads side by side, the gate's input [B, S, H, d]
        or None), from the output of `_project_qkv`, where it follows each head's query.
        """
        if not self.config.attention_gate:
            return qkv, None
        heads, dh = self.config.num_attention_heads, self.config.dim_per_head
        both, kv = jnp.split(qkv, [2 * heads * dh], axis=-1)
        q, gate = jnp.split(both.reshape(*both.shape[:-1], heads, 2 * dh), 2, axis=-1)
        return jnp.concatenate([q.reshape(*q.shape[:-2], -1), kv], axis=-1), gate

    def _normed_and_rotated(
        self,
        qkv: jax.Array,
        positions: jax.Array,
        length: int | None = None,
        window: Window = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values by head, from those of all heads side by side."""
        config, dtype = self.config, qkv.dtype
        dh = config.dim_per_head
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        q, k, v = jnp.split(qkv, [heads * dh, (heads + groups) * dh], axis=-1)
        if self.q_norm is not None and self.k_norm is not None and config.qk_norm == "full":
            q, k = self.q_norm(q, dtype), self.k_norm(k, dtype)
        if config.clip_qkv is not None:
            q, k, v = (jnp.clip(y, -config.clip_qkv, config.clip_qkv) for y in (q, k, v))
        q, k, v = (y.reshape(*y.shape[:-1], -1, dh) for y in (q, k, v))
        if config.qk_norm == "head":
            q, k = self._normed_heads(q, k)
        full = q, k
        if config.position == "rope":
            q, k = (self._rotated(x, positions, length) for x in (q, k))
        if config.qk_norm == "rotated_head":
            q, k = self._normed_heads(q, k)
        if config.qk_norm == "rotated_l2":
            q, k = (unscaled_rms_norm(x, config.norm_eps) for x in (q, k))
        if config.has_chunked_attention:
            full = queries_without_positions(full[0], positions, config), full[1]
            q, k = select_by_window(window, full, (q, k))
        return q, k, v

    def _normed_heads(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q, q.dtype), self.k_norm(k, k.dtype)

    def _rotated(
        self, x_BSHd: jax.Array, positions: jax.Array, length: int | None = None
    ) -> jax.Array:
        """Return x with the first `rotary_dim` dimensions of each head rotated."""
        config = self.config
        rotate = partial(
            apply_rotary,
            positions=positions,
            theta=config.rope_theta,
            scaling=self.rope_scaling_at(length),
            interleave=config.rope_interleave,
        )
        if config.rotary_dim == x_BSHd.shape[-1]:
            return rotate(x_BSHd)
        rotated, plain = jnp.split(x_BSHd, [config.rotary_dim], axis=-1)
        return jnp.concatenate([rotate(rotated), plain], axis=-1)

    def output(
        self, o_BSHd: jax.Array, gate_BSHd: jax.Array | None = None, *, with_bias: bool = True
    ) -> jax.Array:
        """Return float32 [B, S, D], the output projection of the heads' results.

        gate_BSHd: the results are multiplied by its sigmoid; None if there is no gate.
        """
        bias = self.b_out if with_bias else None
        if gate_BSHd is not None:
            gate = jax.nn.sigmoid(gate_BSHd.astype(jnp.float32))
            o_BSHd = (o_BSHd.astype(jnp.float32) * gate).astype(o_BSHd.dtype)
        return affine(o_BSHd.reshape(*o_BSHd.shape[:-2], -1), self.w_out, bias)

    def attend_to_cache(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        attend: Callable[[CacheInputs], jax.Array],
        *,
        window: Window = None,
        with_output_bias: bool = True,
    ) -> jax.Array:
        """Return float32 [B, S, D]: the tokens' attention to a KV cache.

        attend: a function that writes the tokens' keys and values to the cache, and returns the
            weighted sums of values [B, S, H, e].
        window: of the layer; see `project`.
        with_output_bias: False if the caller adds `b_out`.
        """
        qkv, gate = self._split_gate(self._project_qkv(x_BSD))
        new = self._normed_and_rotated(qkv, positions_BS, window=window)

        def unbiased() -> jax.Array:
            # the kernel adds the bias; XLA drops whichever product nobody reads
            return qkv if self.b_qkv is None else affine(x_BSD, self.w_qkv)

        def write(*cached: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            return self._rotate_and_write(unbiased(), *cached, dtype=x_BSD.dtype)

        def write_and_attend(
            *cached: jax.Array, **masks: Any
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            return self._rotate_write_and_attend(unbiased(), *cached, dtype=x_BSD.dtype, **masks)

        heads = attend(CacheInputs(*new, write=write, write_and_attend=write_and_attend))
        return self.output(heads, gate, with_bias=with_output_bias)

    def _has_chunks(self, window: int, length: int) -> bool:
        """Return whether a layer of this window attends within several chunks of a sequence."""
        return self.config.has_chunked_attention and window != NO_WINDOW and window < length

    def _rotate_and_write(
        self,
        qkv: jax.Array,
        k_NGLd: jax.Array,
        v_NGLe: jax.Array,
        blocks_PW: jax.Array,
        positions_PC: jax.Array,
        *,
        dtype: DTypeLike | None = None,
        interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (queries, cached keys, cached values), by a kernel; see `CacheInputs.write`.

        qkv: `_project_qkv` before its bias, then in float32. dtype: of the queries; None for qkv's.
        """
        from kernels_pallas import rotary_write  # not at the top: needs Pallas' Triton backend

        operands = qkv, (k_NGLd, v_NGLe), blocks_PW, positions_PC, self._kernel_rotary()
        bias = None if self.b_qkv is None else (self.b_qkv[...], dtype or qkv.dtype)
        return rotary_write.rotate_and_write(*operands, bias=bias, interpret=interpret)

    def _rotate_write_and_attend(
        self,
        qkv: jax.Array,
        k_NGLd: jax.Array,
        v_NGLe: jax.Array,
        blocks_PW: jax.Array,
        positions_PC: jax.Array,
        *,
        dtype: DTypeLike | None = None,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (weighted sums of values, cached keys, cached values), by a kernel; see
        `CacheInputs.write_and_attend`.

        qkv, dtype: see `_rotate_and_write`.
        """
        from kernels_pallas.paged_attention import rotated_triton  # as `_rotate_and_write`

        operands = qkv, (k_NGLd, v_NGLe), blocks_PW, positions_PC, self._kernel_rotary()
        bias = None if self.b_qkv is None else (self.b_qkv[...], dtype or qkv.dtype)
        return rotated_triton.rotate_write_and_attend(*operands, bias=bias, **options)

    def _kernel_rotary(self) -> "Rotary":
        """Return the kernels' operations on queries and keys; raises NotImplementedError for what
        they do not compute.
        """
        from kernels_pallas import rotary_write

        config, norms = self.config, [self.q_norm, self.k_norm]
        rotated = config.position == "rope"
        if rotated and (config.rotary_dim != config.dim_per_head or config.rope_interleave):
            raise NotImplementedError("rotary positions of a part of a head, or interleaved")
        if config.qk_norm.startswith("rotated"):
            raise NotImplementedError("norms of queries and keys after their rotation")
        if config.has_chunked_attention:
            raise NotImplementedError("layers without positions")
        if any(norm is not None and (norm.axes or norm.bias is not None) for norm in norms):
            raise NotImplementedError("norms over the heads of several devices")
        # the kernel takes a norm over all heads of one head for a norm of each, which clips first
        if config.qk_norm == "full" and config.clip_qkv and config.num_key_value_heads == 1:
            raise NotImplementedError("clipping after a norm over a single head")
        q_norm, k_norm = (
            None if norm is None else rotary_write.HeadNorm(norm.factors, norm.eps)
            for norm in norms
        )
        options: dict[str, Any] = {"clip": config.clip_qkv, "q_norm": q_norm, "k_norm": k_norm}
        frequencies, factor = rotary_frequencies_and_scale(
            config.dim_per_head, config.rope_theta, config.rope_scaling
        )
        return rotary_write.Rotary(frequencies if rotated else None, factor, **options)

    def __call__(
        self, x_BSD: jax.Array, window: int | None = None, documents: Documents | None = None
    ) -> jax.Array:
        """Return float32 [B, S, D].

        window: the number of tokens that a token sees, itself included; None for all earlier
        tokens. documents: see `Documents`; None if each sequence is one document.
        """
        in_order = jnp.arange(x_BSD.shape[1])
        positions = in_order if documents is None else documents.positions()
        q, k, v, gate = self.project(x_BSD, positions, x_BSD.shape[1], window)
        if not self.config.is_causal:
            return self.output(full_attention(q, k, v, scale=self.scale), gate)
        sinks_H = None if self.sinks is None else self.sinks[...]
        numbers_BS = None if documents is None else documents.number_BS
        if window is not None and self._has_chunks(window, x_BSD.shape[1]):
            shape = x_BSD.shape[0], x_BSD.shape[1]
            numbers_BS = chunk_numbers(positions, numbers_BS, shape, window)
        options: dict[str, Any] = {"scale": self.scale, "window": window}
        options["documents_BS"] = numbers_BS
        return self.output(causal_attention(q, k, v, sinks_H=sinks_H, **options), gate)
