"""Norms and rotation of queries and keys in training, between the fused projection and attention,
in one Triton kernel for each pass.

XLA runs about ten passes over queries and keys, some of them over float32 copies, and concatenates
the gradients of queries, keys and values. The kernels read the projection once and write each
result once, where it is needed.

Legend: T tokens, X = (H + 2 G) d columns of queries, keys and values; H query heads, G key/value
heads, d dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.implementations import default_implementations
from kernels_pallas.triton import (
    BlockSizes,
    Ref,
    check_dtypes,
    index_range,
    launch_with_results,
    load,
    store,
)

SETTINGS = BlockSizes(num_warps=8, num_stages=1)
TOKENS_PER_PROGRAM = 16  # of the backward pass, which sums the gradients of scales over them


class HeadsByKind(NamedTuple):
    """Queries [T, H, d], keys and values [T, G, d], or their gradients."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Scales(NamedTuple):
    """Scales of the RMSNorms of queries and keys, each [d] for every head or [heads d] over all
    heads; None without a norm.
    """

    q: jax.Array | None
    k: jax.Array | None


class Angles(NamedTuple):
    """Cosines and sines of the rotation of each pair of dimensions, float32 [n, d / 2] of n
    positions. Token t has entry t mod n.
    """

    cos: jax.Array
    sin: jax.Array


@dataclass(frozen=True)
class HeadLayout:
    """Numbers of query heads and of key/value heads, epsilon of the norms."""

    num_heads: int
    num_groups: int
    eps: float
    interpret: bool = False

    def sections(self, scales: Sequence[Ref | None]) -> list["_Section"]:
        """Return the queries' and the keys' columns of a projection. scales: of their norms."""
        h, g = self.num_heads, self.num_groups
        return [_Section(0, h, scales[0], self.eps), _Section(h, g, scales[1], self.eps)]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def rotated_heads(
    qkv_TX: jax.Array, scales: Scales, angles: Angles, layout: HeadLayout
) -> HeadsByKind:
    """Return queries and keys after their norm and rotation, and values, each contiguous, in qkv's
    dtype.

    The norm's result is rounded to that dtype before the rotation, as in `Attention`.
    Differentiable in `qkv_TX` and `scales`. Raises NotImplementedError for heads whose size is no
    power of two, dtypes that the kernel does not read, and GPUs without Triton.
    """
    return _rotated_heads_fwd(qkv_TX, scales, angles, layout)[0]


_Residuals: TypeAlias = tuple[jax.Array, Scales, Angles]


def _rotated_heads_fwd(
    qkv_TX: jax.Array, scales: Scales, angles: Angles, layout: HeadLayout
) -> tuple[HeadsByKind, _Residuals]:
    check_dtypes(qkv_TX)
    num_tokens, num_columns = qkv_TX.shape
    h, g = layout.num_heads, layout.num_groups
    d = num_columns // (h + 2 * g)
    if d != pl.next_power_of_2(d):
        raise NotImplementedError(f"heads of {d} dimensions: no power of two")
    if not layout.interpret and "triton" not in default_implementations():
        raise NotImplementedError("no Triton for this GPU")
    outs = [jax.ShapeDtypeStruct((num_tokens, n, d), qkv_TX.dtype) for n in (h, g, g)]
    operands = [qkv_TX, *angles, *(scale for scale in scales if scale is not None)]
    heads = launch_with_results(
        _RotatedHeads(layout, *(scale is not None for scale in scales)),
        outs,
        (num_tokens,),
        operands,
        blocks=SETTINGS,
        interpret=layout.interpret,
    )
    return HeadsByKind(*heads), (qkv_TX, scales, angles)


def _rotated_heads_bwd(
    layout: HeadLayout, residuals: _Residuals, gradients: HeadsByKind
) -> tuple[jax.Array, Scales, None]:
    qkv_TX, scales, angles = residuals
    present = [scale for scale in scales if scale is not None]
    num_programs = pl.cdiv(qkv_TX.shape[0], TOKENS_PER_PROGRAM)
    outs = [jax.ShapeDtypeStruct(qkv_TX.shape, qkv_TX.dtype)]
    outs += [jax.ShapeDtypeStruct((num_programs, scale.size), jnp.float32) for scale in present]
    # without norms the gradients do not depend on the projection
    operands = [*([qkv_TX] if present else []), *gradients, *angles, *present]
    dqkv_TX, *sums = launch_with_results(
        _RotatedHeadsGradients(layout, *(scale is not None for scale in scales)),
        outs,
        (num_programs,),
        operands,
        blocks=SETTINGS,
        interpret=layout.interpret,
    )
    of_scale = iter(sums)
    dscales = (
        None if scale is None else next(of_scale).sum(axis=0).astype(scale.dtype)
        for scale in scales
    )
    return dqkv_TX, Scales(*dscales), None


rotated_heads.defvjp(_rotated_heads_fwd, _rotated_heads_bwd)


@dataclass(frozen=True)
class _Section:
    """Consecutive heads of a token: queries, keys or values. first: the first head. scale: of their
    norm, None without one. A block has the first or second halves of all heads, [heads, d / 2],
    padded to a power of two.
    """

    first: int
    heads: int
    scale: Ref | None
    eps: float

    def head_and_column(self, d: int, half: int) -> tuple[jax.Array, jax.Array]:
        """Return indices [heads, 1] and [1, d / 2] of a half of each head."""
        head = index_range(0, pl.next_power_of_2(self.heads))[:, None]
        return head, index_range(half * (d // 2), d // 2)[None]

    def exists(self, d: int) -> jax.Array:
        """Return which entries of a block are of a head, [heads, d / 2]."""
        head, at = self.head_and_column(d, 0)
        return (head < self.heads) & (at < d)

    def _places(self, ref: Ref, token: jax.Array, d: int) -> list[Ref]:
        """Return the places of both halves of a token's heads in an array [T, heads, d], or
        in one [T, X] in which the heads of queries, keys and values lie side by side.
        """
        halves = [self.head_and_column(d, half) for half in (0, 1)]
        if len(ref.shape) == 3:
            return [ref.at[token, head, at] for head, at in halves]
        return [ref.at[token, (self.first + head) * d + at] for head, at in halves]

    def load_halves(self, ref: Ref, token: jax.Array, d: int) -> list[jax.Array]:
        """Return both halves of a token's heads as they are stored."""
        return [load(place, self.exists(d)) for place in self._places(ref, token, d)]

    def store_halves(self, ref: Ref, token: jax.Array, d: int, halves: Sequence[jax.Array]) -> None:
        """Write both halves of a token's heads."""
        for place, value in zip(self._places(ref, token, d), halves, strict=True):
            store(place, value, self.exists(d))

    def over_all_heads(self, d: int) -> bool:
        """Whether the norm is over all heads."""
        return self.scale is not None and self.scale.shape[0] != d

    def load_scale(self, d: int) -> list[jax.Array]:
        """Return both halves of the norm's scale, of each head or of all."""
        assert self.scale is not None
        halves = []
        for half in (0, 1):
            head, at = self.head_and_column(d, half)
            column = head * d + at if self.over_all_heads(d) else head * 0 + at
            halves.append(load(self.scale.at[column], self.exists(d)).astype(jnp.float32))
        return halves

    def mean(self, halves: Sequence[jax.Array], d: int) -> jax.Array:
        """Return the mean over a head, [heads, 1], or over all heads, [1, 1]."""
        first, second = (half.sum(axis=1, keepdims=True) for half in halves)
        sums = first + second
        if not self.over_all_heads(d):
            return sums / d
        return sums.sum(axis=0, keepdims=True) / (self.heads * d)


def _float32(halves: Sequence[jax.Array]) -> list[jax.Array]:
    return [half.astype(jnp.float32) for half in halves]


@dataclass(frozen=True)
class _RotatedHeads:
    """The body of the forward kernel: one token. q_norm, k_norm: whether there is a norm."""

    layout: HeadLayout
    q_norm: bool
    k_norm: bool
    __name__ = "rotated_heads_kernel"

    def __call__(self, qkv: Ref, cos: Ref, sin: Ref, *refs: Ref) -> None:
        *scales, q, k, v = refs
        token, d = pl.program_id(0), q.shape[2]
        rotation = _load_angles(cos, sin, token)
        sections = self.layout.sections(_by_kind(scales, self.q_norm, self.k_norm))
        for section, out in zip(sections, (q, k), strict=True):
            a, b = section.load_halves(qkv, token, d)
            if section.scale is not None:
                wide = _float32((a, b))
                factor = lax.rsqrt(section.mean([x * x for x in wide], d) + section.eps)
                scale = section.load_scale(d)
                a, b = (
                    (x * factor * s).astype(qkv.dtype) for x, s in zip(wide, scale, strict=True)
                )
            section.store_halves(out, token, d, _rotate(_float32((a, b)), *rotation))
        values = _value_section(self.layout)
        values.store_halves(v, token, d, values.load_halves(qkv, token, d))


@dataclass(frozen=True)
class _RotatedHeadsGradients:
    """The body of the backward kernel: `TOKENS_PER_PROGRAM` tokens, whose sums of the scales'
    gradients it writes.
    """

    layout: HeadLayout
    q_norm: bool
    k_norm: bool
    __name__ = "rotated_heads_gradients_kernel"

    def __call__(self, *refs: Ref) -> None:
        num_norms = self.q_norm + self.k_norm
        rest = list(refs)
        qkv = rest.pop(0) if num_norms else None
        dq, dk, dv, cos, sin, *rest = rest
        scales, dqkv, sums = rest[:num_norms], rest[num_norms], rest[num_norms + 1 :]
        program, d = pl.program_id(0), dq.shape[2]
        sections = self.layout.sections(_by_kind(scales, self.q_norm, self.k_norm))
        first = program * TOKENS_PER_PROGRAM
        count = jnp.minimum(TOKENS_PER_PROGRAM, dqkv.shape[0] - first)
        values = _value_section(self.layout)

        def copy_values(i: jax.Array, carry: None) -> None:
            values.store_halves(dqkv, first + i, d, values.load_halves(dv, first + i, d))

        lax.fori_loop(0, count, copy_values, None)
        outs = iter(sums)
        for section, gradient in zip(sections, (dq, dk), strict=True):
            head, at = section.head_and_column(d, 0)
            zeros = jnp.zeros((head.shape[0], at.shape[1]), jnp.float32)
            add_token = partial(_add_token, section, qkv, gradient, (cos, sin), dqkv, first)
            halves = lax.fori_loop(0, count, add_token, (zeros, zeros))
            if section.scale is not None:
                _store_scale_gradient(section, next(outs), program, d, halves)


_Halves: TypeAlias = tuple[jax.Array, jax.Array]


def _add_token(
    section: _Section,
    qkv: Ref | None,
    gradient: Ref,
    angles: tuple[Ref, Ref],
    dqkv: Ref,
    first: jax.Array,
    i: jax.Array,
    sums: _Halves,
) -> _Halves:
    """Write the gradients of a section of token `first` + i; return `sums`, of the gradients of the
    norm's scale, with this token's added.
    """
    token, d = first + i, gradient.shape[2]
    cos, sin = _load_angles(*angles, token)
    halves = _float32(section.load_halves(gradient, token, d))
    halves = _rotate(halves, cos, -sin)  # the inverse rotation is its transpose
    if section.scale is None or qkv is None:
        section.store_halves(dqkv, token, d, halves)
        return sums
    dy = _float32([half.astype(dqkv.dtype) for half in halves])
    x, scale = _float32(section.load_halves(qkv, token, d)), section.load_scale(d)
    factor = lax.rsqrt(section.mean([half * half for half in x], d) + section.eps)
    g = [half * s for half, s in zip(dy, scale, strict=True)]
    mean = section.mean([a * b for a, b in zip(g, x, strict=True)], d)
    dx = [factor * (a - b * (factor * factor * mean)) for a, b in zip(g, x, strict=True)]
    section.store_halves(dqkv, token, d, dx)
    a, b = (total + y * h * factor for total, y, h in zip(sums, dy, x, strict=True))
    return a, b


def _store_scale_gradient(
    section: _Section, out: Ref, program: jax.Array, d: int, halves: _Halves
) -> None:
    """Write a program's sums of the gradient of a norm's scale; sums of a norm of each head are
    added over heads.
    """
    for half, value in enumerate(halves):
        head, at = section.head_and_column(d, half)
        if section.over_all_heads(d):
            store(out.at[program, head * d + at], value, section.exists(d))
        else:
            store(out.at[program, at[0]], value.sum(axis=0), at[0] < d)


def _by_kind(scales: Sequence[Ref], q_norm: bool, k_norm: bool) -> list[Ref | None]:
    """Return the scales of (queries, keys), None without a norm."""
    left = iter(scales)
    return [next(left) if is_there else None for is_there in (q_norm, k_norm)]


def _value_section(layout: HeadLayout) -> _Section:
    return _Section(layout.num_heads + layout.num_groups, layout.num_groups, None, layout.eps)


def _load_angles(cos: Ref, sin: Ref, token: jax.Array) -> _Halves:
    """Return a token's cosines and sines, [1, d / 2]."""
    position, at = token % cos.shape[0], index_range(0, cos.shape[1])[None]
    return load(cos.at[position, at], at >= 0), load(sin.at[position, at], at >= 0)


def _rotate(halves: Sequence[jax.Array], cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    """Return float32 halves of heads, rotated."""
    a, b = halves
    return [a * cos - b * sin, b * cos + a * sin]
