"""Norms and rotation of queries and keys, and the write of keys and values to a cache in blocks, in
one Triton kernel.

A step of decoding spends more time in launches than in this work, which XLA does in about ten. A
program has one head of one token.

Legend: P rows of a step, C tokens a row, H query heads, G key/value heads, X = (H + 2 G) d columns
of queries, keys and values; N blocks, L positions of a block, W blocks of a table; d dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
    (p, c, num_columns), (_, g, _, d) = qkv_PCX.shape, k_NGLd.shape
    check_dtypes(qkv_PCX)
    dtype = qkv_PCX.dtype if bias is None else jnp.dtype(bias[1])
    stored = stored_dtype(dtype), stored_dtype(FP8)
    if k_NGLd.dtype not in stored or v_NGLd.shape != k_NGLd.shape:
        raise NotImplementedError(f"a cache of {k_NGLd.dtype} {v_NGLd.shape}")
    if d != pl.next_power_of_2(d):
        raise NotImplementedError(f"heads of {d} dimensions: no power of two")
    h = num_columns // d - 2 * g
    frequencies = np.zeros(d // 2) if rotary.frequencies is None else rotary.frequencies
    norms = [n for n in (rotary.q_norm, rotary.k_norm) if n is not None]
    operands = [
        qkv_PCX,
        blocks_PW,
        positions_PC,
        jnp.asarray(frequencies, jnp.float32),
        *([] if bias is None else [bias[0]]),
        *(norm.scale for norm in norms),
        k_NGLd,
        v_NGLd,
    ]
    outs = [
        jax.ShapeDtypeStruct((p, c, h, d), dtype),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ]
    epsilons = [None if n is None else n.eps for n in (rotary.q_norm, rotary.k_norm)]
    rotates = rotary.frequencies is not None
    sizes = h, g, bias is not None
    body = _RotateAndWrite(*sizes, rotates, rotary.factor, rotary.clip, *epsilons)
    first = len(operands) - 2
    q_PCHd, k_NGLd, v_NGLd = launch_with_results(
        body,
        outs,
        (p * c, h + 2 * g),
        operands,
        blocks=SETTINGS,
        aliases={first: 1, first + 1: 2},
        interpret=interpret,
    )
    return q_PCHd, k_NGLd, v_NGLd


@dataclass(frozen=True)
class _RotateAndWrite:
    """The kernel's body for `num_heads` query heads and `num_groups` key/value heads.

    has_bias: whether a bias is added first. rotates: whether heads are rotated. factor, clip: see
    `Rotary`. q_eps, k_eps: of the norms, None without one.
    """

    num_heads: int
    num_groups: int
    has_bias: bool
    rotates: bool
    factor: float
    clip: float | None
    q_eps: float | None
    k_eps: float | None
    __name__ = "rotate_and_write_kernel"

    def __call__(self, qkv: Ref, blocks: Ref, positions: Ref, frequencies: Ref, *refs: Ref) -> None:
        (bias,), others = split_optional(refs, [self.has_bias])
        *scales, _, _, q_out, k_out, v_out = others
        h, g = self.num_heads, self.num_groups
        _, _, length, d = k_out.shape
        token, head = pl.program_id(0), pl.program_id(1)
        row, column = token // positions.shape[1], token % positions.shape[1]
        position = positions[row, column]
        at = index_range(0, d // 2)
        projected = partial(_add_bias, (qkv, row, column), bias, q_out.dtype)
        halves = [projected(head * d + n * (d // 2) + at, at < d) for n in (0, 1)]
        place = jnp.minimum(position // length, blocks.shape[1] - 1)
        block, is_real = blocks[row, place], position < blocks.shape[1] * length

        def normed_and_rotated(
            scale: Ref | None, eps: float | None, first: int, heads: int
        ) -> list[jax.Array]:
            square_sum = None
            if scale is not None and scale.shape[0] != d:  # over all heads
                everything = index_range(0, pl.next_power_of_2(heads * d))
                is_column = everything < heads * d
                all_of_token = projected(first * d + everything, is_column)
                square_sum = jnp.sum(all_of_token.astype(jnp.float32) ** 2)
            normed = lambda x: _normed(x, scale, head - first, square_sum, eps or 0.0)  # noqa: E731
            steps = [normed, self._clip] if square_sum is not None else [self._clip, normed]
            values: Sequence[jax.Array] = halves
            for step in steps:
                values = step(values)
            return self._rotated(values, position, load(frequencies.at[at], at < d))

        def write(to: Ref, values: Sequence[jax.Array]) -> None:
            for n, value in enumerate(values):
                bits = encode(value.astype(q_out.dtype), to.dtype)
                index = block, (head - h) % g, position % length, n * (d // 2) + at
                store(to.at[index], bits, (at < d) & is_real)

        @pl.when(head < h)
        def write_query() -> None:
            scale = None if self.q_eps is None else scales[0]
            for n, value in enumerate(normed_and_rotated(scale, self.q_eps, 0, h)):
                store(q_out.at[row, column, head, n * (d // 2) + at], value, at < d)

        @pl.when((head >= h) & (head < h + g))
        def write_key() -> None:
            scale = None if self.k_eps is None else scales[-1]
            write(k_out, normed_and_rotated(scale, self.k_eps, h, g))

        @pl.when(head >= h + g)
        def write_value() -> None:
            write(v_out, self._clip(halves))

    def _clip(self, halves: Sequence[jax.Array]) -> Sequence[jax.Array]:
        limit = self.clip
        return halves if limit is None else [jnp.clip(x, -limit, limit) for x in halves]

    def _rotated(
        self, halves: Sequence[jax.Array], position: jax.Array, frequency: jax.Array
    ) -> list[jax.Array]:
        """Return float32 halves of a head, rotated."""
        a, b = (x.astype(jnp.float32) for x in halves)
        if not self.rotates:
            return [a, b]
        angle = position.astype(jnp.float32) * frequency
        cos, sin = (f(angle) * self.factor for f in (jnp.cos, jnp.sin))
        return [a * cos - b * sin, b * cos + a * sin]


def _add_bias(
    token: tuple[Ref, jax.Array, jax.Array],
    bias: Ref | None,
    dtype: DTypeLike,
    at: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Return queries, keys and values at columns `at`, 0 where the mask is False.

    token: (qkv, the token's row and column).
    """
    qkv, row, column = token
    values = load(qkv.at[row, column, at], mask)
    if bias is not None:
        values = values.astype(jnp.float32) + load(bias.at[at], mask).astype(jnp.float32)
    return values.astype(dtype)


def _normed(
    halves: Sequence[jax.Array],
    scale: Ref | None,
    head: jax.Array,
    square_sum: jax.Array | None,
    eps: float,
) -> Sequence[jax.Array]:
    """Return the halves of a head after RMSNorm, in their dtype.

    scale: None for no norm. square_sum: over all heads; None for a norm of each head.
    """
    if scale is None:
        return halves
    size, dtype = halves[0].shape[0], halves[0].dtype
    wide = [x.astype(jnp.float32) for x in halves]
    if square_sum is None:
        square_sum, first = (wide[0] ** 2).sum() + (wide[1] ** 2).sum(), jnp.int32(0)
    else:
        first = head * 2 * size
    factor = lax.rsqrt(square_sum / scale.shape[0] + eps)
    at = index_range(first, size)
    rows = [load(scale.at[at + n * size], at >= 0).astype(jnp.float32) for n in (0, 1)]
    return [(x * factor * row).astype(dtype) for x, row in zip(wide, rows, strict=True)]
