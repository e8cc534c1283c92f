"""The choice of experts from a router's logits, for few tokens: scores, groups, the K largest and
their weights in one Triton kernel, or inside of another (`TokenChoice`).

A program has one token, whose logits it holds as [groups, experts of a group].

Legend: T tokens, E experts of a layer, K experts that a token chooses, G groups of experts, R rows
of a tile of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.expert_choices import ChoiceRules, RouterLogits
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
MAX_RANKED = 128  # experts that are compared with each other at once
# as many warps as a product that chooses, so that sums of weights have one order
SETTINGS = BlockSizes(num_warps=4, num_stages=1)
_LEAST = -3e38  # the score of experts that cannot be chosen: finite, as -inf - -inf is NaN
_TINY = 1e-20  # keeps a sum of sigmoids that all underflowed from dividing 0 by 0


def choose_experts(logits: RouterLogits, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return (int32 [T, K], the experts with the largest scores, best first; float32 [T, K], their
    weights).

    A tie goes to the lowest expert; softmax alone keeps the order of the logits, which decide then.
    Raises NotImplementedError for other scores and for more than `MAX_EXPERTS` experts.
    """
    choice, operands = TokenChoice.from_logits(logits)
    body, grid = _ChooseExperts(choice), (choice.num_tokens,)
    idx_TK, weights_TK = launch_with_results(
        body, choice.results(), grid, operands, blocks=SETTINGS, interpret=interpret
    )
    return idx_TK, weights_TK


class ChoiceRefs(NamedTuple):
    """References to logits, bias of the scores and positions; None without one."""

    logits: Ref
    bias: Ref | None
    positions: Ref | None


@dataclass(frozen=True)
class TokenChoice:
    """The choice of each token's experts, as a part of a kernel.

    end: see `RouterLogits`. has_bias, has_positions: which operands there are.
    """

    rules: ChoiceRules
    end: int
    num_tokens: int
    num_experts: int
    has_bias: bool
    has_positions: bool

    @classmethod
    def from_logits(cls, logits: RouterLogits) -> tuple["TokenChoice", list[jax.Array]]:
        """Return (the choice from these logits, the kernel's operands that it reads). Raises
        NotImplementedError as `choose_experts`.
        """
        rules, (num_tokens, num_experts) = logits.rules, logits.logits_TE.shape
        if rules.scores not in SCORES:
            raise NotImplementedError(f"scores {rules.scores}: neither {' nor '.join(SCORES)}")
        if num_experts > MAX_EXPERTS:
            raise NotImplementedError(f"{num_experts} experts: more than {MAX_EXPERTS}")
        optional = logits.bias_E, logits.positions_T
        operands = [logits.logits_TE.astype(jnp.float32), *(x for x in optional if x is not None)]
        are_there = (x is not None for x in optional)
        return cls(rules, logits.end, num_tokens, num_experts, *are_there), operands

    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the experts' numbers and weights."""
        shape = self.num_tokens, self.rules.num_choices
        return [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]

    def split(self, refs: Sequence[Ref]) -> tuple[ChoiceRefs, list[Ref]]:
        """Return (references to the operands, the references after them)."""
        optional, following = split_optional(refs[1:], (self.has_bias, self.has_positions))
        return ChoiceRefs(refs[0], *optional), following

    def write(self, refs: ChoiceRefs, token: jax.Array, idx_out: Ref, weights_out: Ref) -> None:
        """Write a token's experts and their weights."""
        rules, num_experts = self.rules, self.num_experts
        size = num_experts // rules.num_groups
        group = index_range(0, pl.next_power_of_2(rules.num_groups))[:, None]
        member = index_range(0, pl.next_power_of_2(size))[None]
        column = group * size + member
        exists = (group < rules.num_groups) & (member < size)
        logits = load(refs.logits.at[token, column], exists)
        scores = self._scores(logits, exists)
        if self._is_ranked_by_logits:
            ranked = logits
        else:
            ranked = scores if refs.bias is None else scores + load(refs.bias.at[column], exists)
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
        if refs.positions is not None:
            chosen = jnp.where(refs.positions[token] < self.end, chosen, num_experts)
        is_choice = choice < rules.num_choices
        store(idx_out.at[token, choice], chosen, is_choice)
        store(weights_out.at[token, choice], weights * rules.factor, is_choice)

    def check_ranks(self) -> None:
        """Raise NotImplementedError for choices that need more than comparisons of two experts."""
        if self.rules.ranked_by:
            raise NotImplementedError("groups of experts")
        if self.rules.scores == "softmax" and self.has_bias:
            raise NotImplementedError("softmax with a bias of the scores")
        if self.num_experts > MAX_RANKED:
            raise NotImplementedError(f"{self.num_experts} experts: more than {MAX_RANKED}")

    def expert_of(self, refs: ChoiceRefs, token: jax.Array, rank: jax.Array) -> jax.Array:
        """Return the expert that is a token's choice `rank`, 0 for the best; see `check_ranks`."""
        column, exists = self._columns()
        values = self._ranked(refs, refs.logits.at[token, column], column, exists)
        is_ahead = _is_ahead((values[None], column[None]), (values[:, None], column[:, None]))
        rank_E = (is_ahead & exists[None]).astype(jnp.int32).sum(axis=1)
        expert = jnp.where((rank_E == rank) & exists, column, 0).sum()
        return jnp.minimum(expert, self.num_experts - 1)  # NaN leaves several in one rank

    def ranks_of(self, refs: ChoiceRefs, token_R: jax.Array, expert: jax.Array) -> jax.Array:
        """Return int32 [R]: which choice of each token an expert is, K or more if none; also for
        padding and for tokens that do not exist.
        """
        is_token = token_R < self.num_tokens
        column, exists = self._columns()
        exists = exists[None] & is_token[:, None]
        values = self._ranked(refs, refs.logits.at[token_R[:, None], column[None]], column, exists)
        mine = jnp.where(column[None] == expert, values, 0.0).sum(axis=1)
        is_ahead = _is_ahead((values, column[None]), (mine[:, None], expert))
        rank_R = (is_ahead & exists).astype(jnp.int32).sum(axis=1)
        if refs.positions is not None:
            is_token &= load(refs.positions.at[token_R], is_token) < self.end
        return jnp.where(is_token, rank_R, self.num_experts)

    def _columns(self) -> tuple[jax.Array, jax.Array]:
        """Return (numbers of experts, which of them exist)."""
        column = index_range(0, pl.next_power_of_2(self.num_experts))
        return column, column < self.num_experts

    @property
    def _is_ranked_by_logits(self) -> bool:
        return self.rules.scores == "softmax" and not (self.has_bias or self.rules.ranked_by)

    def _ranked(
        self, refs: ChoiceRefs, logits: Ref, column: jax.Array, exists: jax.Array
    ) -> jax.Array:
        """Return what `write` ranks experts by. logits: a reference to some of them."""
        values = load(logits, exists)
        if self._is_ranked_by_logits:
            return values
        scores = self._scores(values, exists)
        if refs.bias is None:
            return scores
        return scores + load(refs.bias.at[column], column < self.num_experts)

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


def _is_ahead(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return whether an expert comes before another, each (its value, its number)."""
    (value, expert), (others_value, others_expert) = one, other
    return (value > others_value) | ((value == others_value) & (expert < others_expert))


@dataclass(frozen=True)
class _ChooseExperts:
    """The body of the kernel that does nothing else."""

    choice: TokenChoice
    __name__ = "choose_experts_kernel"

    def __call__(self, *refs: Ref) -> None:
        operands, (idx_out, weights_out) = self.choice.split(refs)
        self.choice.write(operands, pl.program_id(0), idx_out, weights_out)
