"""Causal attention of sequences that are split over devices (`layers/context.py`).

Every device gathers the keys and values of its sequences, and computes the rows of its own two
chunks, numbers r and b = 2 n - 1 - r of a group of n devices. Both see their own chunk under the
causal mask, and all earlier chunks entirely. Chunk b sees the n first chunks on every device; what
is left are n - 1 pairs of a chunk of queries and a chunk of keys, which are: chunk r with the r
chunks before it, and chunk b with the n - 1 - r that lie between the n first and itself. So three
calls of a flash kernel of the same shapes on every device compute all rows, and their results are
added in float32 by the log-sum-exps. The gradient calls the kernel's gradient three times with the
combined outputs and log-sum-exps.

With a window that does not exceed a chunk, a device needs only the end of the chunks before its
own: neighbours send them, and `causal_attention` computes the rows.

Legend: B sequences of a group, S positions of a device, L = S / 2 positions of a chunk, K = 2 n L
positions of a sequence, H query heads, G key/value heads, R = H / G, d size of a query or key head,
e size of a value head, P pairs of a chunk of queries and a chunk of keys, Q query rows of a block,
C keys of a call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.layers.attention import (
    Attention,
    FlashKernel,
    causal_attention,
    flash_attention,
    ranges_kernel,
)
from jmoe.layers.context import ContextGroup, SplitSequences
from jmoe.layers.documents import first_tokens
from jmoe.layers.latent_attention import LatentAttention
from jmoe.types import PyTree
from kernels_pallas import cudnn, native
from kernels_pallas.implementations import first_supported, log_once, target_device
from kernels_pallas.matmul import dot, transposed
from kernels_pallas.range_attention import KeyRanges, check_supported

QUERY_ROWS = 128  # of a block in XLA
SPLIT_IN_XLA = (
    "attention: sequences on several devices run in XLA, not in the native operation;"
    " mesh.context = 1 avoids that"
)


class Places(NamedTuple):
    """Where tokens [B, L] are: position in the sequence, and position of their document's first
    token; None if a sequence is one document.
    """

    position: jax.Array
    first: jax.Array | None


class ChunkKernel(NamedTuple):
    """The forward and the gradient function of a flash kernel for chunks of a sequence.

    forward: (operands (q [B, L, H, d], k [B, C, G, d], v [B, C, G, e]), places) -> (o [B, L, H, e],
    lse float32 [B, H, L]). gradient: (operands, (o, lse), do, places) -> (dq, dk, dv). places: of
    the queries and of the keys. Both take a keyword `causal`: True if queries and keys are the same
    tokens, False if the keys come before the queries.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


class _Call(NamedTuple):
    """One call of a kernel, with P chunks of queries in its batch.

    keys: the queries' own chunks, the first half of the sequence, or the chunks `chunk_P`.
    operands, places: see `ChunkKernel`; their first dimension is [B P]. slot_P: which of the
    device's two chunks the queries are.
    """

    keys: Literal["own", "first half", "chunks"]
    operands: tuple[jax.Array, jax.Array, jax.Array]
    places: tuple[Places, Places]
    slot_P: jax.Array
    chunk_P: jax.Array | None = None

    @property
    def is_causal(self) -> bool:
        return self.keys == "own"


def _by_chunk(x_BS: jax.Array, chunks: int) -> jax.Array:
    """Return [B, chunks, L, ...]."""
    return x_BS.reshape(x_BS.shape[0], chunks, -1, *x_BS.shape[2:])


def _chosen(x: jax.Array, index_P: jax.Array) -> jax.Array:
    """Return chunks of x [B, chunks, L, ...], with B and P as one dimension."""
    return jnp.take(x, index_P, axis=1).reshape(-1, *x.shape[2:])


def _calls(group: ContextGroup, q: jax.Array, k: PyTree, v: PyTree) -> list[_Call]:
    """Return the calls that compute the rows of this device's chunks; see the module's docstring.

    k: (keys of this device, of the whole sequences, `Places.first` of these or None). v: (values
    of this device, of the whole sequences).
    """
    n, batch, chunk = group.size, q.shape[0], q.shape[1] // 2
    k_own, v_own = (_by_chunk(x[0], 2) for x in (k, v))
    k_all, v_all = (_by_chunk(x[1], 2 * n) for x in (k, v))
    first = None if k[2] is None else _by_chunk(k[2], 2 * n)
    position = jnp.arange(2 * n * chunk, dtype=jnp.int32).reshape(1, 2 * n, chunk)
    position = jnp.broadcast_to(position, (batch, 2 * n, chunk))
    q_chunks, own = _by_chunk(q, 2), group.chunk_numbers()

    def places(index_P: jax.Array) -> Places:
        return Places(
            _chosen(position, index_P), None if first is None else _chosen(first, index_P)
        )

    slots = jnp.arange(2)
    same = _chosen(q_chunks, slots), _chosen(k_own, slots), _chosen(v_own, slots)
    calls = [_Call("own", same, (places(own), places(own)), slots)]
    end = n * chunk
    before = Places(
        position[:, :n].reshape(batch, end),
        None if first is None else first[:, :n].reshape(batch, end),
    )
    last = slots[1:]
    half = _chosen(q_chunks, last), k[1][:, :end], v[1][:, :end]
    calls.append(_Call("first half", half, (places(own[1:]), before), last))
    pair, rank = jnp.arange(n - 1), group.rank()
    slot_P = (pair >= rank).astype(jnp.int32)
    chunk_P = jnp.where(pair < rank, pair, n + pair - rank)
    pairs = _chosen(q_chunks, slot_P), _chosen(k_all, chunk_P), _chosen(v_all, chunk_P)
    between = places(own[slot_P]), places(chunk_P)
    return [*calls, _Call("chunks", pairs, between, slot_P, chunk_P)]


def _sum_to_slots(x_PL: jax.Array, slot_P: jax.Array) -> jax.Array:
    """Return float32 [B, 2, L, ...], the sums of chunks [B P, L, ...] over the pairs of a slot."""
    x = x_PL.astype(jnp.float32).reshape(-1, slot_P.size, *x_PL.shape[1:])
    at = [(slot_P == slot).reshape(-1, *[1] * (x.ndim - 2)) for slot in range(2)]
    return jnp.stack([jnp.where(mine, x, 0.0).sum(axis=1) for mine in at], axis=1)


def _attend_to_chunks(
    kernel: ChunkKernel, group: ContextGroup, q: jax.Array, k: PyTree, v: PyTree
) -> tuple[jax.Array, jax.Array]:
    """Return (o [B, S, H, e], lse float32 [B, H, S]) of this device's rows. k, v: see `_calls`."""
    results = []
    for call in _calls(group, q, k, v):
        o_PLHe, lse_PHL = kernel.forward(call.operands, call.places, causal=call.is_causal)
        results.append((o_PLHe, lse_PHL, call.slot_P))

    def of_slot(lse_PHL: jax.Array, slot_P: jax.Array, slot: int) -> jax.Array:
        lse = lse_PHL.reshape(-1, slot_P.size, *lse_PHL.shape[1:])
        return jnp.where((slot_P == slot)[:, None, None], lse, -jnp.inf)

    by_slot = [[of_slot(lse, slot_P, slot) for _, lse, slot_P in results] for slot in range(2)]
    lse = jnp.stack(
        [jax.nn.logsumexp(jnp.concatenate(some, axis=1), axis=1) for some in by_slot], axis=1
    )  # [B, 2, H, L]
    sums = []
    for o_PLHe, lse_PHL, slot_P in results:
        share = jnp.exp(lse_PHL - _chosen(lse, slot_P)).swapaxes(1, 2)[..., None]
        sums.append(_sum_to_slots(o_PLHe.astype(jnp.float32) * share, slot_P))
    o = sum(sums[1:], sums[0]).astype(q.dtype)
    return o.reshape(*q.shape[:3], -1), lse.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def _attend_to_chunks_gradient(
    kernel: ChunkKernel,
    group: ContextGroup,
    operands: tuple[jax.Array, PyTree, PyTree],
    results: tuple[jax.Array, jax.Array],
    do: jax.Array,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Return the gradients of the operands of `_attend_to_chunks`."""
    q, k, v = operands
    o, do = _by_chunk(results[0], 2), _by_chunk(do, 2)
    batch, heads, _ = results[1].shape
    lse = results[1].reshape(batch, heads, 2, -1).swapaxes(1, 2)
    dq, own, whole = jnp.zeros((), jnp.float32), [], []
    for call in _calls(group, q, k, v):
        slot_P = call.slot_P
        rows = (_chosen(o, slot_P), _chosen(lse, slot_P)), _chosen(do, slot_P)
        dq_PL, *dkv = kernel.gradient(call.operands, *rows, call.places, causal=call.is_causal)
        dq = dq + _sum_to_slots(dq_PL, slot_P)
        if call.keys == "own":
            own = [d.reshape(batch, -1, *d.shape[2:]) for d in dkv]
        elif call.keys == "first half":
            ends = [(0, 0), (0, k[1].shape[1] // 2), (0, 0), (0, 0)]
            whole = [jnp.pad(d.astype(jnp.float32), ends) for d in dkv]
        else:
            whole = [
                _add_chunks(x, d, call.chunk_P, group) for x, d in zip(whole, dkv, strict=True)
            ]
    (dk_own, dv_own), (dk, dv) = own, whole
    dk, dv = dk.astype(k[1].dtype), dv.astype(v[1].dtype)
    return dq.reshape(q.shape).astype(q.dtype), (dk_own, dk, None), (dv_own, dv)


def _add_chunks(
    x_BK: jax.Array, d_PL: jax.Array, chunks_P: jax.Array | None, group: ContextGroup
) -> jax.Array:
    """Return x [B, K, G, d] with chunks [B P, L, G, d] added where `chunks_P` says, each once."""
    assert chunks_P is not None
    x = _by_chunk(x_BK, group.num_chunks)
    d = d_PL.astype(x.dtype).reshape(x.shape[0], -1, *d_PL.shape[1:])
    return x.at[:, chunks_P].add(d, unique_indices=True).reshape(x_BK.shape)


# One call in XLA, in blocks of query rows


def _score_mask(rows: Places, keys: Places, window: int | None) -> jax.Array:
    """Return bool [B, Q, C]: the keys that each query sees."""
    distance = rows.position[:, :, None] - keys.position[:, None]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if rows.first is not None:
        seen &= keys.position[:, None] >= rows.first[:, :, None]
    return seen


def _scores(q_BGMd: jax.Array, k_BGCd: jax.Array, seen_BQC: jax.Array, scale: float) -> jax.Array:
    """Return float32 [B, G, R, Q, C]: masked scores of R heads' query rows, M = R Q."""
    s = dot(q_BGMd, k_BGCd, b_transposed=True) * scale
    s = s.reshape(*s.shape[:2], -1, *seen_BQC.shape[1:])
    return jnp.where(seen_BQC[:, None, None], s, -jnp.inf)


def _row_blocks(x_BLHd: jax.Array, groups: int) -> jax.Array:
    """Return [blocks, B, G, M, d]: rows of all heads of a group, one block of queries at a time."""
    b, length, h, d = x_BLHd.shape
    rows = next(n for n in range(min(length, QUERY_ROWS), 0, -1) if length % n == 0)
    x = x_BLHd.reshape(b, length // rows, rows, groups, h // groups, d)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(length // rows, b, groups, -1, d)


def _joined_blocks(x: jax.Array, heads: int) -> jax.Array:
    """Return [B, L, H, d], what `_row_blocks` cut into blocks."""
    blocks, b, g, _, d = x.shape
    x = x.reshape(blocks, b, g, heads // g, -1, d).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(b, -1, heads, d)


def _place_blocks(rows: Places, blocks: int) -> Places:
    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], blocks, -1).swapaxes(0, 1)

    return Places(cut(rows.position), None if rows.first is None else cut(rows.first))


def _xla_forward(
    operands: tuple[jax.Array, jax.Array, jax.Array],
    places: tuple[Places, Places],
    *,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Return `ChunkKernel.forward` in XLA. causal: implied by `places`."""
    q, k, v = operands[0], *(x.swapaxes(1, 2) for x in operands[1:])
    heads, groups = q.shape[2], k.shape[1]
    blocks = _row_blocks(q, groups)

    def attend(block: tuple[jax.Array, Places]) -> tuple[jax.Array, jax.Array]:
        q_BGMd, rows = block
        s = _scores(q_BGMd, k, _score_mask(rows, places[1], window), scale)
        # rows that see no key here: finite differences, and an output of 0
        top = jnp.maximum(s.max(axis=-1, keepdims=True), -1e30)
        p = jnp.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        lse = top + jnp.log(total)
        flat = (*q_BGMd.shape[:3], -1)
        o = dot(p.astype(v.dtype).reshape(flat), v) / jnp.maximum(total, 1e-30).reshape(flat)
        return o.astype(q.dtype), lse.reshape(flat)

    o, lse = lax.map(attend, (blocks, _place_blocks(places[0], blocks.shape[0])))
    return _joined_blocks(o, heads), _joined_blocks(lse, heads)[..., 0].swapaxes(1, 2)


def _xla_gradient(
    operands: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    do: jax.Array,
    places: tuple[Places, Places],
    *,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `ChunkKernel.gradient` in XLA, dk and dv in float32. causal: implied by `places`."""
    q, k, v = operands[0], *(x.swapaxes(1, 2) for x in operands[1:])
    groups = k.shape[1]
    o, lse_BLH1 = results[0], results[1].swapaxes(1, 2)[..., None]
    delta = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    blocks = [_row_blocks(x, groups) for x in (q, do, lse_BLH1, delta)]
    rows = _place_blocks(places[0], blocks[0].shape[0])

    def add_block(sums: tuple[jax.Array, jax.Array], block: PyTree) -> PyTree:
        (q_BGMd, do_BGMe, lse, delta), row_places = block
        s = _scores(q_BGMd, k, _score_mask(row_places, places[1], window), scale)
        p = jnp.exp(s.reshape(*q_BGMd.shape[:3], -1) - lse)
        dp = dot(do_BGMe, v, b_transposed=True)
        ds = (p * (dp - delta) * scale).astype(q.dtype)
        dk = sums[0] + dot(transposed(ds), q_BGMd)
        dv = sums[1] + dot(transposed(p.astype(v.dtype)), do_BGMe)
        return (dk, dv), dot(ds, k).astype(q.dtype)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dk, dv), dq = lax.scan(add_block, zeros, (blocks, rows))
    return _joined_blocks(dq, q.shape[2]), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


# One call by a kernel of a GPU


def _cudnn_kernel(operands: tuple[jax.Array, ...], *, scale: float) -> ChunkKernel:
    """Return cuDNN's flash attention, for sequences of one document without a window; raises
    NotImplementedError for what it has no kernel for.
    """
    cudnn.check_attention_supported(*operands)

    def forward(operands: PyTree, places: PyTree, *, causal: bool) -> PyTree:
        return cudnn.attention(*operands, scale=scale, window=None, causal=causal)

    def gradient(
        operands: PyTree, results: PyTree, do: jax.Array, places: PyTree, *, causal: bool
    ) -> PyTree:
        options: dict[str, Any] = {"scale": scale, "window": None, "causal": causal}
        return cudnn.attention_gradient(operands, results, do, **options)

    return ChunkKernel(forward, gradient)


def _key_ranges(places: tuple[Places, Places], window: int | None) -> KeyRanges:
    """Return the range of keys that each query sees. The positions of the keys follow each
    other.
    """
    rows, keys = places
    first, before = jnp.zeros_like(rows.position), keys.position[:, :1]
    if rows.first is not None:
        first = rows.first
    if window is not None:
        first = jnp.maximum(first, rows.position - window + 1)
    num_keys = keys.position.shape[1]
    return KeyRanges(
        jnp.clip(first - before, 0, num_keys), jnp.clip(rows.position + 1 - before, 0, num_keys)
    )


def _triton_kernel(
    operands: tuple[jax.Array, ...], *, scale: float, window: int | None
) -> ChunkKernel:
    """Return attention to ranges of keys in Triton, for documents and windows; raises
    NotImplementedError for what it has no kernel for.
    """
    check_supported(*operands)
    kernel = ranges_kernel(scale)

    def forward(operands: PyTree, places: PyTree, *, causal: bool) -> PyTree:
        q, k, v = operands
        return kernel.forward(q, (k, _key_ranges(places, window)), v)

    def gradient(
        operands: PyTree, results: PyTree, do: jax.Array, places: PyTree, *, causal: bool
    ) -> PyTree:
        q, k, v = operands
        keys = k, _key_ranges(places, window)
        dq, (dk, _), dv = kernel.gradient((q, keys, v), results, do)
        return dq, dk, dv

    return ChunkKernel(forward, gradient)


def _chunk_kernel(
    operands: tuple[jax.Array, ...], *, scale: float, window: int | None, documents: bool
) -> ChunkKernel:
    """Return the kernel for operands (q, k, v) on the target device."""
    options: dict[str, Any] = {"scale": scale, "window": window}
    in_xla = ChunkKernel(partial(_xla_forward, **options), partial(_xla_gradient, **options))
    dims = operands[0].shape[-1], operands[2].shape[-1]
    if native.uses_native_training(*(x.dtype for x in operands), multiples=dims):
        log_once(SPLIT_IN_XLA)
    if target_device().platform != "gpu":
        return in_xla
    kernel = "cudnn", partial(_cudnn_kernel, operands, scale=scale)
    if documents or window is not None:
        kernel = "triton", partial(_triton_kernel, operands, **options)
    return first_supported("attention of split sequences", (kernel, ("xla", lambda: in_xla)))


# Attention of a layer


def attend_over_devices(
    attention: Attention, x_BSD: jax.Array, split: SplitSequences, window: int | None
) -> jax.Array:
    """Return float32 [B, S, D], what `attention(x, window)` returns for whole sequences.

    Latent attention gathers latents, and expands the whole sequences' keys and values on every
    device: fewer bytes by the number of heads.
    """
    sinks_H = None if attention.sinks is None else attention.sinks[...]
    options: dict[str, Any] = {"scale": attention.scale, "sinks_H": sinks_H, "window": window}
    if not isinstance(attention, LatentAttention):
        q, k, v, gate = attention.project(x_BSD, split.position)
        return attention.output(context_attention(q, k, v, split, **options), gate)
    c_BSr, k_rope = attention.latents(x_BSD, split.position)
    c_BK1r, k_rope = split.group.gather_together(c_BSr[:, :, None], k_rope)
    whole = attention.keys_and_values(c_BK1r[:, :, 0], k_rope, are_saved=False)
    own = split.group.own_positions(whole[0]), split.group.own_positions(whole[1])
    queries = attention.queries(x_BSD, split.position)
    return attention.output(attend_to_sequences(queries, own, whole, split, **options))


def attend_to_sequences(
    q_BSHd: jax.Array,
    own: tuple[jax.Array, jax.Array],
    whole: Sequence[jax.Array],
    split: SplitSequences,
    *,
    scale: float,
    sinks_H: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Return causal attention [B, S, H, e] of this device's queries.

    own: keys [B, S, G, d] and values [B, S, G, e] of this device's tokens. whole: of the whole
    sequences, [B, K, ...]. sinks_H, window: see `causal_attention`.
    """
    first_BK = None if split.number_BK is None else first_tokens(split.number_BK)
    kernel = _chunk_kernel(
        (q_BSHd, *own), scale=scale, window=window, documents=first_BK is not None
    )
    rows = FlashKernel(
        partial(_attend_to_chunks, kernel, split.group),
        partial(_attend_to_chunks_gradient, kernel, split.group),
    )
    keys, values = (own[0], whole[0], first_BK), (own[1], whole[1])
    return flash_attention(q_BSHd, keys, values, sinks_H, rows)


def context_attention(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGe: jax.Array,
    split: SplitSequences,
    *,
    scale: float,
    sinks_H: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Return causal attention [B, S, H, e] of this device's tokens to those of its sequences.

    Neighbours send the ends of their chunks if `window` reaches no farther; else the whole keys and
    values are gathered. sinks_H, window: see `causal_attention`.
    """
    length = split.group.size * q_BSHd.shape[1]
    window = None if window is None or window >= length else window
    options: dict[str, Any] = {"scale": scale, "sinks_H": sinks_H, "window": window}
    if window is not None and window <= q_BSHd.shape[1] // 2:
        return _attend_to_neighbours(q_BSHd, k_BSGd, v_BSGe, split, **options)
    whole = split.group.gather_together(k_BSGd, v_BSGe)
    return attend_to_sequences(q_BSHd, (k_BSGd, v_BSGe), whole, split, **options)


def _attend_to_neighbours(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGe: jax.Array,
    split: SplitSequences,
    *,
    scale: float,
    sinks_H: jax.Array | None,
    window: int,
) -> jax.Array:
    """Return `context_attention` with a window of at most a chunk.

    The rows are those of a sequence of the end of the chunk before and the chunk itself. The first
    chunk has none before it: its end is attached behind it, where no row of it sees it.
    """
    group, sizes = split.group, [k_BSGd.shape[-1]]
    q, kv = _by_chunk(q_BSHd, 2), _by_chunk(jnp.concatenate([k_BSGd, v_BSGe], axis=-1), 2)
    batch, _, chunk = q.shape[:3]
    tail = min(chunk, max(1, -(-(window - 1) // QUERY_ROWS)) * QUERY_ROWS)
    before = group.ends_before(kv[:, :, chunk - tail :])
    is_first = (group.chunk_numbers() == 0).reshape(1, 2, 1, 1, 1)

    def joined(before: jax.Array, own: jax.Array) -> jax.Array:
        at = is_first.reshape(1, 2, *[1] * (own.ndim - 2))
        first = jnp.concatenate([own, before], axis=2)
        rows = jnp.where(at, first, jnp.concatenate([before, own], axis=2))
        return rows.reshape(2 * batch, tail + chunk, *own.shape[3:])

    k, v = jnp.split(joined(before, kv), sizes, axis=-1)
    no_queries = jnp.zeros((batch, 2, tail, *q.shape[3:]), q.dtype)
    documents = None
    if split.number_BK is not None:
        number, own = _by_chunk(split.number_BK, group.num_chunks), group.chunk_numbers()
        earlier = jnp.take(number, jnp.maximum(own - 1, 0), axis=1)[:, :, chunk - tail :]
        documents = joined(earlier, jnp.take(number, own, axis=1))
    options: dict[str, Any] = {"scale": scale, "sinks_H": sinks_H, "window": window}
    o: jax.Array = causal_attention(joined(no_queries, q), k, v, documents_BS=documents, **options)
    o = _by_chunk(o.reshape(batch, 2 * (tail + chunk), *o.shape[2:]), 2)
    return jnp.where(is_first, o[:, :, :chunk], o[:, :, tail:]).reshape(*q_BSHd.shape[:3], -1)
