"""A residual sum, its RMSNorm and a router's logits of few tokens, in one Triton kernel.

XLA sums the squares in one launch, norms in a second and multiplies in a third. Here each program
computes the sum of squares of its token again, which it reads from the cache, and then the logits
of some experts. What is added to the residual may be the outputs of each token's experts and their
weights, whose sum would be a launch of its own.

Legend: T tokens, D hidden, E experts of a layer, K experts that a token chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.expert_choices import WeightedOutputs
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

MAX_TOKENS = 64  # with more, XLA's product, which reads the router's weights once, is faster
MAX_HIDDEN = 16384  # a program holds a token's numbers in registers
COLUMNS = 8  # experts whose logits one program computes: few, so that a token fills more of a GPU
INNER = 256  # numbers of a token that a program multiplies at a time
SETTINGS = BlockSizes(num_warps=8, num_stages=2)


class RouterWeights(NamedTuple):
    """Weights [D, E] and biases [E] of a router's logits, in any dtype."""

    kernel_DE: jax.Array
    bias_E: jax.Array | None = None


def add_and_norm(
    x_TD: jax.Array,
    y_TD: jax.Array | WeightedOutputs,
    scale_D: jax.Array,
    eps: float,
    *,
    bias_D: jax.Array | None = None,
    router: RouterWeights | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return (s = x + (y + bias), RMSNorm of s, its float32 logits [T, E]), the first two in x's
    dtype.

    y_TD, bias_D: summed in float32; y may be outputs of experts whose sum the kernel computes.
    router: None for no logits; they are products of float32. Raises NotImplementedError for more
    than `MAX_TOKENS` tokens or `MAX_HIDDEN` numbers of a token.
    """
    check_dtypes(x_TD)
    num_tokens, hidden = x_TD.shape
    if num_tokens > MAX_TOKENS or hidden > MAX_HIDDEN:
        raise NotImplementedError(
            f"{num_tokens} tokens of {hidden}: more than {MAX_TOKENS} or {MAX_HIDDEN}"
        )
    num_experts = 0 if router is None else router.kernel_DE.shape[1]
    summands: list[jax.Array | None]
    if isinstance(y_TD, WeightedOutputs):
        summands = [y_TD.y_TD, y_TD.rows_TKD, y_TD.weights_TK, y_TD.idx_TK]
    else:
        summands = [y_TD, None, None, None]
    optional = [*summands, bias_D, *(router or (None, None))]
    operands = [x_TD, scale_D, *(x for x in optional if x is not None)]
    outs = [jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)] * 2
    if router is not None:
        outs.append(jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32))
    num_chosen_from = y_TD.num_experts if isinstance(y_TD, WeightedOutputs) else 0
    body = _AddAndNorm(eps, tuple(x is not None for x in optional), num_chosen_from)
    grid = num_tokens, max(1, pl.cdiv(num_experts, COLUMNS))
    results = launch_with_results(body, outs, grid, operands, blocks=SETTINGS, interpret=interpret)
    return results[0], results[1], results[2] if router is not None else None


@dataclass(frozen=True)
class _AddAndNorm:
    """The kernel's body.

    are_there: which of these are operands: y; the experts' rows, weights and numbers; the bias of
    y; the router's weights and their bias. num_experts: of `WeightedOutputs`.
    """

    eps: float
    are_there: tuple[bool, ...]
    num_experts: int
    __name__ = "add_and_norm_kernel"

    def __call__(self, x: Ref, scale: Ref, *refs: Ref) -> None:
        optional, outs = split_optional(refs, self.are_there)
        y, rows, weights, idx, bias, kernel, router_bias = optional
        sum_out, normed_out, *logits_out = outs
        token, part = pl.program_id(0), pl.program_id(1)
        hidden = x.shape[1]

        def summed(at: jax.Array) -> jax.Array:
            added = jnp.zeros(at.shape, jnp.float32)
            if y is not None:
                added += load(y.at[token, at], at < hidden).astype(jnp.float32)
            if rows is not None and weights is not None and idx is not None:
                for choice in range(rows.shape[1]):
                    is_row = (at < hidden) & (idx[token, choice] < self.num_experts)
                    row = load(rows.at[token, choice, at], is_row).astype(jnp.float32)
                    added += row * weights[token, choice]
            if bias is not None:
                added += load(bias.at[at], at < hidden).astype(jnp.float32)
            return load(x.at[token, at], at < hidden) + added.astype(x.dtype)

        everything = index_range(0, pl.next_power_of_2(hidden))
        total = summed(everything)
        square = total.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(square * square) / hidden + self.eps)

        def normed(values: jax.Array, at: jax.Array) -> jax.Array:
            of_scale = load(scale.at[at], at < hidden).astype(jnp.float32)
            return (values.astype(jnp.float32) * factor * of_scale).astype(x.dtype)

        @pl.when(part == 0)
        def write_sum_and_norm() -> None:
            store(sum_out.at[token, everything], total, everything < hidden)
            store(normed_out.at[token, everything], normed(total, everything), everything < hidden)

        if kernel is not None:
            normed_at = lambda at: normed(summed(at), at)  # noqa: E731
            _write_logits(normed_at, kernel, router_bias, logits_out[0])


def _write_logits(
    normed_at: Callable[[jax.Array], jax.Array], kernel: Ref, bias: Ref | None, out: Ref
) -> None:
    """Write the logits of a program's token and experts. normed_at: its normed numbers, by
    index.
    """
    hidden, num_experts = kernel.shape
    token, part = pl.program_id(0), pl.program_id(1)
    column = index_range(part * COLUMNS, COLUMNS)
    is_expert = column < num_experts

    def add_products(i: jax.Array, sums: jax.Array) -> jax.Array:
        at = index_range(i * INNER, INNER)
        mask = (at < hidden)[:, None] & is_expert[None]
        weights = load(kernel.at[at[:, None], column[None]], mask).astype(jnp.float32)
        return sums + normed_at(at).astype(jnp.float32)[:, None] * weights

    sums = jnp.zeros((INNER, COLUMNS), jnp.float32)
    logits = lax.fori_loop(0, pl.cdiv(hidden, INNER), add_products, sums).sum(axis=0)
    if bias is not None:
        logits += load(bias.at[column], is_expert).astype(jnp.float32)
    store(out.at[token, column], logits, is_expert)
