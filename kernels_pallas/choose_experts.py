"""The choice of experts from a router's logits, for few tokens: scores, groups, the K largest and
their weights in one Triton kernel.

A program has one token, whose logits it holds as [groups, experts of a group].

Legend: T tokens, E experts of a layer, K experts that a token chooses, G groups of experts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.triton import (
    BlockSizes,
    Ref,
    index_range,
    launch_with_results,
    load,
    split_optional,
    store,
)

SCORES = ("softmax", "sigmoid")  # the functions of logits that the kernel computes
MAX_EXPERTS = 1024  # a program holds all logits of a token in registers
SETTINGS = BlockSizes(num_warps=1, num_stages=1)
_LEAST = -3e38  # the score of experts that cannot be chosen: finite, as -inf - -inf is NaN
_TINY = 1e-20  # keeps a sum of sigmoids that all underflowed from dividing 0 by 0


@dataclass(frozen=True)
class ChoiceRules:
    """How experts are chosen.

    scores: one of `SCORES`. num_choices: K. normalizes: divide the weights by
    their sum. factor: of the weights. num_groups: G groups of consecutive experts, of which the
    best `open_groups` are open to a token. ranked_by: number of a group's largest scores whose sum
    ranks it; 0 if all groups are open.
    """

    scores: str
    num_choices: int
    normalizes: bool
    factor: float = 1.0
    num_groups: int = 1
    open_groups: int = 1
    ranked_by: int = 0


def choose_experts(
    logits_TE: jax.Array,
    rules: ChoiceRules,
    *,
    bias_E: jax.Array | None = None,
    positions_T: jax.Array | None = None,
    end: int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (int32 [T, K], the experts with the largest scores, best first; float32 [T, K], their
    weights).

    A tie goes to the lowest expert. bias_E: added to the scores for the choice alone. positions_T:
    tokens at `end` or beyond choose E, which is no expert; None for no such tokens. Raises
    NotImplementedError for other scores and for more than `MAX_EXPERTS` experts.
    """
    num_tokens, num_experts = logits_TE.shape
    if rules.scores not in SCORES:
        raise NotImplementedError(f"scores {rules.scores}: neither {' nor '.join(SCORES)}")
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(f"{num_experts} experts: more than {MAX_EXPERTS}")
    optional = bias_E, positions_T
    operands = [logits_TE.astype(jnp.float32), *(x for x in optional if x is not None)]
    body = _ChooseExperts(rules, end, *(x is not None for x in optional))
    shape = num_tokens, rules.num_choices
    outs = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    idx_TK, weights_TK = launch_with_results(
        body, outs, (num_tokens,), operands, blocks=SETTINGS, interpret=interpret
    )
    return idx_TK, weights_TK


@dataclass(frozen=True)
class _ChooseExperts:
    """The kernel's body. has_bias, has_positions: which operands there are."""

    rules: ChoiceRules
    end: int
    has_bias: bool
    has_positions: bool
    __name__ = "choose_experts_kernel"

    def __call__(self, logits: Ref, *refs: Ref) -> None:
        (bias, positions), outs = split_optional(refs, (self.has_bias, self.has_positions))
        (idx_out, weights_out), rules = outs, self.rules
        token, num_experts = pl.program_id(0), logits.shape[1]
        size = num_experts // rules.num_groups
        group = index_range(0, pl.next_power_of_2(rules.num_groups))[:, None]
        member = index_range(0, pl.next_power_of_2(size))[None]
        column = group * size + member
        exists = (group < rules.num_groups) & (member < size)
        scores = self._scores(load(logits.at[token, column], exists), exists)
        ranked = scores if bias is None else scores + load(bias.at[column], exists)
        ranked = jnp.where(exists, ranked, _LEAST)
        if rules.ranked_by:
            ranked = jnp.where(self._is_open(ranked, size), ranked, _LEAST)
        choice = index_range(0, pl.next_power_of_2(rules.num_choices))
        chosen = jnp.zeros(choice.shape, jnp.int32)
        weights = jnp.zeros(choice.shape, jnp.float32)
        for i in range(rules.num_choices):
            expert = _first_largest(ranked, column, num_experts - 1)
            is_chosen = column == expert
            weight = jnp.where(is_chosen & exists, scores, 0.0).sum()
            chosen = jnp.where(choice == i, expert, chosen)
            weights = jnp.where(choice == i, weight, weights)
            ranked = jnp.where(is_chosen, _LEAST, ranked)
        if rules.normalizes:
            weights = weights / (weights.sum() + _TINY)
        if positions is not None:
            chosen = jnp.where(positions[token] < self.end, chosen, num_experts)
        is_choice = choice < rules.num_choices
        store(idx_out.at[token, choice], chosen, is_choice)
        store(weights_out.at[token, choice], weights * rules.factor, is_choice)

    def _scores(self, logits: jax.Array, exists: jax.Array) -> jax.Array:
        if self.rules.scores == "sigmoid":
            return jnp.where(exists, 1.0 / (1.0 + jnp.exp(-logits)), 0.0)
        top = jnp.where(exists, logits, _LEAST).max()
        weights = jnp.where(exists, jnp.exp(logits - top), 0.0)
        return weights / weights.sum()

    def _is_open(self, ranked: jax.Array, size: int) -> jax.Array:
        """Return which groups are open to the token, bool [groups, 1]."""
        rules, (groups, members) = self.rules, ranked.shape
        group, member = index_range(0, groups), index_range(0, members)[None]
        of_group, left = jnp.zeros(groups, jnp.float32), ranked
        for _ in range(min(rules.ranked_by, size)):
            best = left.max(axis=1)
            first = jnp.where(left == best[:, None], member, members).min(axis=1)
            left = jnp.where(member == first[:, None], _LEAST, left)
            of_group += best
        of_group = jnp.where(group < rules.num_groups, of_group, _LEAST)
        is_open = jnp.zeros(groups, jnp.int32)
        for _ in range(rules.open_groups):
            best_group = _first_largest(of_group, group, rules.num_groups - 1)
            is_open = jnp.where(group == best_group, 1, is_open)
            of_group = jnp.where(group == best_group, _LEAST, of_group)
        return is_open[:, None] > 0


def _first_largest(values: jax.Array, column: jax.Array, last: int) -> jax.Array:
    """Return the least `column` of the largest value; `last` if the values have NaN."""
    return jnp.where(values == values.max(), column, last).min()
