"""Norms and rotation of queries and keys, and the write of keys and values to a cache in blocks, in
one Triton kernel.

A step of decoding spends more time in launches than in this work, which XLA does in about ten. A
program has one head of one token.

Legend: P rows of a step, C tokens a row, H query heads, G key/value heads, X = (H + 2 G) d columns
of queries, keys and values; N blocks, L positions of a block, W blocks of a table; d dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from kernels_pallas.cached_values import FP8, encode, stored_dtype
from kernels_pallas.triton import (
    BlockSizes,
    Ref,
    check_dtypes,
    index_range,
    launch_with_results,
    load,
    split_optional,
    store,
)

SETTINGS = BlockSizes(num_warps=4, num_stages=1)


class HeadNorm(NamedTuple):
    """RMSNorm of queries or keys: its scale, [d] for each head or [heads d] over all heads."""

    scale: jax.Array
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Operations on queries and keys before keys are written to the cache.

    frequencies: float32 [d / 2], radians per position; None for no rotation. factor: of the
    result. clip: limit of the magnitudes, None for no limit; norms over all heads come before it,
    norms of each head after it.
    """

    frequencies: np.ndarray | None
    factor: float = 1.0
    clip: float | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None


def rotate_and_write(
    qkv_PCX: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    rotary: Rotary,
    *,
    bias: tuple[jax.Array, DTypeLike] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (queries [P, C, H, d] in qkv's dtype; the cache's keys and values with this step's).

    cache: (keys, values), [N, G, L, d], bfloat16 or FP8 as its bits. bias: ([X], dtype of the
    results); it is first added to qkv, in float32. Tokens at position W L are not written, and
    their queries are arbitrary but finite. Raises NotImplementedError for heads whose half is not a
    power of two and for dtypes that the kernel does not read.
    """
    k_NGLd, v_NGLd = cache
    (p, c, _), (_, g, _, d) = qkv_PCX.shape, k_NGLd.shape
    if v_NGLd.shape != k_NGLd.shape:
        raise NotImplementedError(f"a cache of {k_NGLd.dtype} {v_NGLd.shape}")
    heads, arrays = NewHeads.from_columns(qkv_PCX, k_NGLd, rotary, bias)
    outs = [
        jax.ShapeDtypeStruct((p, c, heads.num_heads, d), heads.dtype),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ]
    operands = [blocks_PW, positions_PC, *arrays, k_NGLd, v_NGLd]
    first = len(operands) - 2
    q_PCHd, k_NGLd, v_NGLd = launch_with_results(
        _RotateAndWrite(heads),
        outs,
        (p * c, heads.num_heads + 2 * g),
        operands,
        blocks=SETTINGS,
        aliases={first: 1, first + 1: 2},
        interpret=interpret,
    )
    return q_PCHd, k_NGLd, v_NGLd


class _HeadRefs(NamedTuple):
    """References to what `NewHeads` reads; None for what there is not."""

    qkv: Ref
    frequencies: Ref
    bias: Ref | None
    q_scale: Ref | None
    k_scale: Ref | None


@dataclass(frozen=True)
class NewHeads:
    """The heads of a step's tokens, normed and rotated, as a part of a kernel.

    num_heads, num_groups: query heads and key/value heads. size: d. dtype: of the results.
    are_there: which of the bias and the norms' scales are operands. rotates: whether heads are
    rotated. factor, clip: see `Rotary`. q_eps, k_eps: of the norms.
    """

    num_heads: int
    num_groups: int
    size: int
    dtype: jnp.dtype
    are_there: tuple[bool, ...]
    rotates: bool
    factor: float
    clip: float | None
    q_eps: float
    k_eps: float

    @classmethod
    def from_columns(
        cls,
        qkv_PCX: jax.Array,
        k_NGLd: jax.Array,
        rotary: Rotary,
        bias: tuple[jax.Array, DTypeLike] | None,
    ) -> tuple["NewHeads", list[jax.Array]]:
        """Return (the heads of queries, keys and values; the kernel's operands that they are read
        from). Raises NotImplementedError as `rotate_and_write`.
        """
        _, g, _, d = k_NGLd.shape
        check_dtypes(qkv_PCX)
        dtype = qkv_PCX.dtype if bias is None else jnp.dtype(bias[1])
        if k_NGLd.dtype not in (stored_dtype(dtype), stored_dtype(FP8)):
            raise NotImplementedError(f"a cache of {k_NGLd.dtype} {k_NGLd.shape}")
        if d != pl.next_power_of_2(d):
            raise NotImplementedError(f"heads of {d} dimensions: no power of two")
        frequencies = np.zeros(d // 2) if rotary.frequencies is None else rotary.frequencies
        norms = rotary.q_norm, rotary.k_norm
        optional = [None if bias is None else bias[0], *(n and n.scale for n in norms)]
        arrays = [qkv_PCX, jnp.asarray(frequencies, jnp.float32)]
        arrays += [x for x in optional if x is not None]
        heads = cls(
            qkv_PCX.shape[2] // d - 2 * g,
            *(g, d, dtype),
            tuple(x is not None for x in optional),
            rotary.frequencies is not None,
            *(rotary.factor, rotary.clip),
            *(0.0 if n is None else n.eps for n in norms),
        )
        return heads, arrays

    def split(self, refs: Sequence[Ref]) -> tuple[_HeadRefs, list[Ref]]:
        """Return (references to the operands, the references after them)."""
        optional, following = split_optional(refs[2:], self.are_there)
        return _HeadRefs(refs[0], refs[1], *optional), following

    def queries(
        self, refs: _HeadRefs, token: tuple[jax.Array, jax.Array], head_R: jax.Array, at: jax.Array
    ) -> jax.Array:
        """Return [R, d]: query heads of a token (row, column) at position `at`. Heads that do not
        exist hold arbitrary values.
        """
        scale = refs.q_scale, self.q_eps, 0, self.num_heads
        return self._rotated(self._normed(refs, token, head_R, scale), refs, at)

    def key(
        self, refs: _HeadRefs, token: tuple[jax.Array, jax.Array], group: jax.Array, at: jax.Array
    ) -> jax.Array:
        """Return [1, d], a token's key of a group."""
        scale = refs.k_scale, self.k_eps, self.num_heads, self.num_groups
        head_1 = index_range(self.num_heads + group, 1)
        return self._rotated(self._normed(refs, token, head_1, scale), refs, at)

    def value(
        self, refs: _HeadRefs, token: tuple[jax.Array, jax.Array], group: jax.Array
    ) -> jax.Array:
        """Return [1, d], a token's value of a group."""
        at, head_1 = index_range(0, self.size), index_range(self.num_heads + group, 1)
        return self._clipped(self._read(refs, token, self._columns(head_1 + self.num_groups, at)))

    def _columns(self, head_R: jax.Array, at: jax.Array) -> jax.Array:
        return head_R[:, None] * self.size + at[None]

    def _read(
        self, refs: _HeadRefs, token: tuple[jax.Array, jax.Array], columns: jax.Array
    ) -> jax.Array:
        """Return some columns of a token with their bias, 0 for columns that do not exist."""
        exists = columns < refs.qkv.shape[2]
        values = load(refs.qkv.at[(*token, columns)], exists)
        if refs.bias is not None:
            values = values.astype(jnp.float32) + load(refs.bias.at[columns], exists).astype(
                jnp.float32
            )
        return values.astype(self.dtype)

    def _clipped(self, values: jax.Array) -> jax.Array:
        return values if self.clip is None else jnp.clip(values, -self.clip, self.clip)

    def _normed(
        self,
        refs: _HeadRefs,
        token: tuple[jax.Array, jax.Array],
        head_R: jax.Array,
        norm: tuple[Ref | None, float, int, int],
    ) -> tuple[jax.Array, jax.Array]:
        """Return (heads [R, d] after clipping and norm, the same with their halves swapped).

        norm: (scale, epsilon, first head and number of heads of the kind).
        """
        (scale, eps, first, heads), d = norm, self.size
        at = index_range(0, d)
        swapped = (at + d // 2) % d
        pair = [self._read(refs, token, self._columns(head_R, x)) for x in (at, swapped)]
        if scale is None:
            return self._clipped(pair[0]), self._clipped(pair[1])
        over_all = scale.shape[0] != d
        if over_all:  # clips after it
            everything = index_range(0, pl.next_power_of_2(heads * d))
            exists = everything < heads * d
            columns = jnp.where(exists, first * d + everything, refs.qkv.shape[2])
            of_token = self._read(refs, token, columns).astype(jnp.float32)
            square_sum = jnp.sum(of_token * of_token)
        else:
            pair = [self._clipped(x) for x in pair]
            wide = pair[0].astype(jnp.float32)
            square_sum = jnp.sum(wide * wide, axis=1)[:, None]
        factor = lax.rsqrt(square_sum / scale.shape[0] + eps)
        normed = []
        for x, place in zip(pair, (at, swapped), strict=True):
            columns = self._columns(head_R - first, place) if over_all else place[None]
            of_scale = load(scale.at[columns], columns < scale.shape[0]).astype(jnp.float32)
            y = (x.astype(jnp.float32) * factor * of_scale).astype(self.dtype)
            normed.append(self._clipped(y) if over_all else y)
        return normed[0], normed[1]

    def _rotated(
        self, pair: tuple[jax.Array, jax.Array], refs: _HeadRefs, position: jax.Array
    ) -> jax.Array:
        """Return heads in their dtype, rotated. pair: heads, and with their halves swapped."""
        values, swapped = pair
        if not self.rotates:
            return values
        at, half = index_range(0, self.size), self.size // 2
        angle = position.astype(jnp.float32) * load(refs.frequencies.at[at % half], at >= 0)
        cos, sin = (f(angle) * self.factor for f in (jnp.cos, jnp.sin))
        sin = jnp.where(at < half, -sin, sin)
        wide = values.astype(jnp.float32) * cos[None] + swapped.astype(jnp.float32) * sin[None]
        return wide.astype(self.dtype)


def write_to_cache(cache: Ref, place: tuple[jax.Array, ...], values: jax.Array) -> jax.Array:
    """Write a head [1, d] to a place (block, group, position in it) of a cache; return its bits."""
    bits = encode(values, cache.dtype)
    at = index_range(0, values.shape[1])
    store(cache.at[(*place, at[None])], bits, (at >= 0)[None])
    return bits


@dataclass(frozen=True)
class _RotateAndWrite:
    """The kernel's body."""

    heads: NewHeads
    __name__ = "rotate_and_write_kernel"

    def __call__(self, blocks: Ref, positions: Ref, *refs: Ref) -> None:
        head_refs, (_, _, q_out, k_out, v_out) = self.heads.split(refs)
        h, g = self.heads.num_heads, self.heads.num_groups
        length = k_out.shape[2]
        index, head = pl.program_id(0), pl.program_id(1)
        token = index // positions.shape[1], index % positions.shape[1]
        position = positions[token]
        block = blocks[token[0], jnp.minimum(position // length, blocks.shape[1] - 1)]
        is_real = position < blocks.shape[1] * length
        place = block, jnp.maximum(head - h, 0) % g, position % length

        @pl.when(head < h)
        def write_query() -> None:
            query = self.heads.queries(head_refs, token, index_range(head, 1), position)
            at = index_range(0, self.heads.size)[None]
            store(q_out.at[(*token, head, at)], query, at >= 0)

        @pl.when((head >= h) & (head < h + g) & is_real)
        def write_key() -> None:
            write_to_cache(k_out, place, self.heads.key(head_refs, token, head - h, position))

        @pl.when((head >= h + g) & is_real)
        def write_value() -> None:
            write_to_cache(v_out, place, self.heads.value(head_refs, token, head - h - g))
