"""The KV cache, one array of keys and one of values per layer, and attention over it by
`kernels_pallas.paged_attention`. A gated delta network has states instead (`delta_states.py`).

A cache of latents (DeepSeek) has one array: a token's normed latent and rotated shared key are one
key of a head that all query heads share, and its first dimensions are the value.

The arrays consist of blocks of `BLOCK` positions. A row of a step has a table of blocks: its
position i is in block i // BLOCK of its table. Several tables may share a block that is full; a
step writes only to blocks that one table has. `BlockPool` decides which blocks a table has, and
programs take tables as operands, so they do not depend on them. Blocks before the window of a layer
stay in the table, because other layers of the same model may read them.

Steps update the arrays in place (by donation). bfloat16 is stored as its bits, uint16: XLA:CPU
would otherwise convert the whole cache to read or write a part of it. `kv_cache_dtype = "fp8"`
stores E4M3 as its bits, uint8, without scales (`kernels_pallas/cached_values.py`); a step reads its
own keys and values from the cache too, rounded as later steps read them.

Legend:
N blocks of the cache
W blocks of a table
S positions of a table, W * BLOCK; position S marks a padding token of a step
P rows of a step
C tokens a row in this step
G key/value heads
H query heads
L positions of a block
d dimension of a key head
e dimension of a value head
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.config import ModelConfig
from jmoe.config.engine import CACHE_BLOCK, EngineConfig
from jmoe.inference.delta_states import DeltaCache, empty_delta_cache
from jmoe.layers.attention import CacheInputs
from kernels_pallas.cached_values import FP8, encode, stored_dtype
from kernels_pallas.implementations import Name, default_implementations, first_supported
from kernels_pallas.native import cached_attention, uses_native_attention
from kernels_pallas.paged_attention import paged_attention, reads_in_place
from kernels_pallas.paged_attention.xla import attend_by_block

BLOCK = CACHE_BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One layer's keys and values.

    v_NGLe: None if the values are the first dimensions of the keys.
    """

    k_NGLd: jax.Array
    v_NGLe: jax.Array | None = None


def table_width(max_seq_len: int) -> int:
    """Return W, the number of blocks of a table for sequences of up to `max_seq_len` tokens."""
    return -(-max_seq_len // BLOCK)


def tables_of_consecutive_blocks(num_rows: int, max_seq_len: int) -> np.ndarray:
    """Return tables with blocks of their own for rows 0, 1, ..., int32 [num_rows, W]: row r has
    blocks r W to r W + W - 1.
    """
    width = table_width(max_seq_len)
    return np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)


def cache_value_dtype(options: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of cached keys and values of an engine that computes in `dtype`."""
    return FP8 if options.kv_cache_dtype == "fp8" else dtype


LayerCache = KVCache | DeltaCache


def empty_caches(
    config: ModelConfig,
    num_blocks: int,
    dtype: jnp.dtype,
    head_copies: int = 1,
    *,
    num_rows: int = 0,
    draft_width: int = 1,
) -> list[LayerCache]:
    """Return zeroed caches of `num_blocks` blocks, one cache for each layer; for a gated delta
    network the states of `num_rows` rows.

    head_copies: how often every key/value head is repeated. draft_width: tokens a row of a step
    with drafts, 1 without speculation.
    """
    assert num_rows or not config.has_linear_attention, "states belong to rows"
    stored = stored_dtype(dtype)
    if config.kv_lora_rank is not None:
        heads, dims = 1, [config.kv_lora_rank + config.qk_rope_head_dim]
    else:
        heads, dims = config.num_key_value_heads, [config.dim_per_head] * 2
    shapes = [(num_blocks, heads * head_copies, BLOCK, dim) for dim in dims]
    return [
        empty_delta_cache(config, num_rows, draft_width)
        if layer.kind == "linear_moe"
        else KVCache(*(jnp.zeros(shape, stored) for shape in shapes))
        for layer in config.layers
    ]


def _encode_for_cache(cache: KVCache, k_PCGd: jax.Array, v_PCGe: jax.Array) -> KVCache:
    """Return the arrays of a step's keys and values that `cache` stores, as it stores them."""
    values = None if cache.v_NGLe is None else encode(v_PCGe, cache.v_NGLe.dtype)
    return KVCache(encode(k_PCGd, cache.k_NGLd.dtype), values)


def is_not_padding(positions_PC: jax.Array, blocks_PW: jax.Array) -> jax.Array:
    """Return which tokens of a step are no padding, bool [P, C]."""
    return positions_PC < blocks_PW.shape[1] * BLOCK


def write_keys_and_values(
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    k_PCGd: jax.Array,
    v_PCGe: jax.Array,
) -> KVCache:
    """Return the cache with this step's keys and values written; tokens at position S are skipped.

    The positions of a row must be consecutive.
    """
    operands = cache, blocks_PW, positions_PC, k_PCGd, v_PCGe
    written: KVCache = lax.platform_dependent(
        *operands, cpu=write_by_slices, default=write_by_scatter
    )
    return written


def write_by_slices(
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    k_PCGd: jax.Array,
    v_PCGe: jax.Array,
) -> KVCache:
    """Return the cache as `write_keys_and_values` does, by one slice for each row and block that
    the row touches: scatters are slow on XLA:CPU.

    A slice that would pass the block's end starts earlier and keeps the old content there.
    """
    width = min(positions_PC.shape[1], BLOCK)
    slices = (positions_PC.shape[1] - 2) // BLOCK + 2  # the most blocks that a row can touch
    around = (width, width)  # a slice may begin before the first token, and end after the last
    new = jax.tree.map(
        lambda x_PCGd: jnp.pad(x_PCGd.swapaxes(1, 2), ((0, 0), (0, 0), around, (0, 0))),
        _encode_for_cache(cache, k_PCGd, v_PCGe),
    )
    real_PC = jnp.pad(is_not_padding(positions_PC, blocks_PW), ((0, 0), around))

    def write_slice(i: jax.Array, cache: KVCache) -> KVCache:
        p, start = i // slices, positions_PC[i // slices, 0]
        place = start // BLOCK + i % slices  # in the table
        first = jnp.clip(start - place * BLOCK, 0, BLOCK - width)  # of the block's positions
        token = width + place * BLOCK + first - start
        block = blocks_PW[p, jnp.minimum(place, blocks_PW.shape[1] - 1)]
        real_C1 = lax.dynamic_slice_in_dim(real_PC[p], token, width)[:, None]

        def put_tokens(all_NGLd: jax.Array, new_PGCd: jax.Array) -> jax.Array:
            at, size = (block, 0, first, 0), (1, all_NGLd.shape[1], width, all_NGLd.shape[3])
            old = lax.dynamic_slice(all_NGLd, at, size)
            piece = lax.dynamic_slice(new_PGCd, (p, 0, token, 0), size)
            return lax.dynamic_update_slice(all_NGLd, jnp.where(real_C1, piece, old), at)

        return jax.tree.map(put_tokens, cache, new)

    return lax.fori_loop(0, blocks_PW.shape[0] * slices, write_slice, cache)


def write_by_scatter(
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    k_PCGd: jax.Array,
    v_PCGe: jax.Array,
) -> KVCache:
    """Return the cache as `write_keys_and_values` does, by one scatter for each array."""
    row_P1 = jnp.arange(positions_PC.shape[0])[:, None]
    # padding is beyond the table, and gets block N, which does not exist
    block_PC = blocks_PW.at[row_P1, positions_PC // BLOCK].get(
        mode="fill", fill_value=cache.k_NGLd.shape[0]
    )

    def put_tokens(all_NGLd: jax.Array, new_PCGd: jax.Array) -> jax.Array:
        at = block_PC, slice(None), positions_PC % BLOCK
        return all_NGLd.at[at].set(new_PCGd, mode="drop")

    return jax.tree.map(put_tokens, cache, _encode_for_cache(cache, k_PCGd, v_PCGe))


def write_and_attend(  # noqa: PLR0913  as `paged_attention`
    new: CacheInputs,
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    window: jax.Array | np.int32 | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
    implementation: Name | None = None,
) -> tuple[jax.Array, KVCache]:
    """Write this step's keys and values; return (attention output [P, C, H, e], cache).

    new: of this step's tokens.
    context: for one token a row on an accelerator whose attention does not read blocks in place, an
        exclusive bound on all positions, a multiple of `BLOCK`; see `paged_attention`.
    implementation: of `paged_attention`.
    """
    q_PCHd, k_PCGd, v_PCGe, expand, *_ = new
    masks: dict[str, Any] = {"scale": scale, "window": window, "sinks_H": sinks_H}
    sizes, value_dim = (q_PCHd.dtype, q_PCHd.shape[3], v_PCGe.shape[3]), v_PCGe.shape[3]
    known = (stored_dtype(q_PCHd.dtype), jnp.uint8)  # uint8: FP8
    is_native = cache.k_NGLd.dtype in known and uses_native_attention(*sizes)
    if expand is None and context is None and is_native:
        caches = (cache.k_NGLd, cache.v_NGLe)
        out_PCHe, k_NGLd, v_NGLe = cached_attention(
            (q_PCHd, k_PCGd, v_PCGe), caches, blocks_PW, positions_PC, **masks
        )
        if cache.v_NGLe is None:  # drop the sums of what follows a key's value
            out_PCHe = out_PCHe[..., :value_dim]
        return out_PCHe, KVCache(k_NGLd, v_NGLe)

    def in_one_kernel() -> tuple[jax.Array, KVCache]:
        if new.write_and_attend is None or cache.v_NGLe is None:
            raise NotImplementedError("latents, which are rotated apart")
        out_PCHe, *caches = new.write_and_attend(
            cache.k_NGLd, cache.v_NGLe, blocks_PW, positions_PC, **masks
        )
        return out_PCHe, KVCache(*caches)

    def one_after_the_other() -> tuple[jax.Array, KVCache]:
        q_PCHd, written = _write_and_return_queries(
            new, cache, blocks_PW, positions_PC, in_place=context is None
        )
        operands = q_PCHd, written.k_NGLd, written.v_NGLe, blocks_PW, positions_PC
        if expand is not None:
            assert context is None, "single tokens attend to what is cached"
            return attend_by_block(*operands, expand=expand, **masks), written
        options: dict[str, Any] = {"context": context, "implementation": implementation} | masks
        return paged_attention(*operands, value_dim=value_dim, **options), written

    is_single = positions_PC.shape[1] == 1 and expand is None and implementation is None
    forms = [("triton", in_one_kernel)] if is_single and _attends_in_triton(context) else []
    forms.append(("kernels one after the other", one_after_the_other))
    return first_supported("write_and_attend", forms)


def _attends_in_triton(context: int | None) -> bool:
    """Return whether a kernel in Triton reads the blocks of the cache in place."""
    return context is None and "triton" in default_implementations() and reads_in_place()


def _write_and_return_queries(
    new: CacheInputs,
    cache: KVCache,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    in_place: bool,
) -> tuple[jax.Array, KVCache]:
    """Write this step's keys and values; return (queries, cache).

    in_place: whether attention reads the cache's blocks in place. On an NVIDIA GPU a kernel then
        rotates and writes; otherwise XLA does.
    """
    operands = blocks_PW, positions_PC

    def by_kernel() -> tuple[jax.Array, KVCache]:
        if new.write is None or cache.v_NGLe is None:
            raise NotImplementedError("latents, which are rotated apart")
        q_PCHd, k_NGLd, v_NGLe = new.write(cache.k_NGLd, cache.v_NGLe, *operands)
        return q_PCHd, KVCache(k_NGLd, v_NGLe)

    def by_xla() -> tuple[jax.Array, KVCache]:
        write = write_keys_and_values if in_place else write_by_scatter
        return new.q_BSHd, write(cache, *operands, new.k_BSGd, new.v_BSGe)

    forms = [("triton", by_kernel)] if in_place and "triton" in default_implementations() else []
    return first_supported("write_keys_and_values", [*forms, ("xla", by_xla)])


@partial(jax.jit, donate_argnums=0)
def copy_cache_blocks(
    cache: KVCache, sources_W: jax.Array, targets_W: jax.Array, count: jax.Array
) -> KVCache:
    """Return the cache with the first `count` of the blocks `sources_W` copied, in order, to the
    blocks `targets_W`.
    """

    def copy_block(i: jax.Array, x_NGLd: jax.Array) -> jax.Array:
        block = lax.dynamic_index_in_dim(x_NGLd, sources_W[i])
        return lax.dynamic_update_index_in_dim(x_NGLd, block, targets_W[i], 0)

    return jax.tree.map(lambda x_NGLd: lax.fori_loop(0, count, copy_block, x_NGLd), cache)
