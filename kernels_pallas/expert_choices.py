"""A router's logits before experts are chosen, and experts' outputs before they are added up: what
kernels for few tokens pass on, since a choice or a sum alone would be a launch of its own.

Legend: T tokens, D hidden, E experts of a layer, K experts that a token chooses.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ChoiceRules:
    """How experts are chosen.

    scores: one of `choose_experts.SCORES`. num_choices: K. normalizes: divide the weights by
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterLogits:
    """Logits from which a kernel chooses experts.

    bias_E: added to the scores for the choice alone. positions_T: tokens at `end` or beyond choose
    E, which is no expert; None for no such tokens.
    """

    logits_TE: jax.Array
    rules: ChoiceRules = field(metadata={"static": True})
    bias_E: jax.Array | None = None
    positions_T: jax.Array | None = None
    end: int = field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedOutputs:
    """Rows of experts whose weighted sum a later kernel computes.

    rows_TKD: of each token's experts. weights_TK: their float32 factors. idx_TK: the experts'
    numbers; `num_experts` for no expert, whose row holds arbitrary values. y_TD: float32, to which
    the sum is added; None adds nothing.
    """

    rows_TKD: jax.Array
    weights_TK: jax.Array
    idx_TK: jax.Array
    y_TD: jax.Array | None
    num_experts: int = field(metadata={"static": True})

    def sum(self) -> jax.Array:
        """Return float32 [T, D]: y + the weighted sum of each token's rows."""
        weighted_TKD = self.weights_TK[:, :, None] * self.rows_TKD.astype(jnp.float32)
        is_expert_TK1 = (self.idx_TK < self.num_experts)[:, :, None]
        sum_TD = jnp.where(is_expert_TK1, weighted_TKD, 0.0).sum(axis=1)
        return sum_TD if self.y_TD is None else self.y_TD + sum_TD
