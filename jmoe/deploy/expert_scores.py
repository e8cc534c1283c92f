"""Scores of experts on a text, by use or by REAP (arXiv:2510.13999), and the choice of experts to
keep.

Legend: N layers with experts, E experts, n kept experts.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jmoe.config import ModelConfig, check
from jmoe.deploy.layerwise import ExpertOutputs, hidden_states
from jmoe.models.lazy_checkpoint import LazyCheckpoint

ScoreKind = Literal["reap", "usage"]


@dataclass
class ExpertScores:
    """Sums [N, E] over the tokens of a text.

    use: number of tokens that chose the expert. strength: sum of router weight x norm of the
    expert's output.
    """

    use: NDArray[np.int64]
    strength: NDArray[np.float64]

    @property
    def reap(self) -> NDArray[np.float64]:
        """Scores [N, E]: the mean, over each expert's tokens, of router weight x norm of its output
        (arXiv:2510.13999); 0 for an expert without tokens.
        """
        mean: NDArray[np.float64] = self.strength / np.maximum(self.use, 1)
        return mean

    def scores_of(self, kind: ScoreKind) -> NDArray[np.float64]:
        """Return the scores [N, E] of this kind."""
        return self.reap if kind == "reap" else self.use.astype(np.float64)

    def add_outputs(self, outputs: ExpertOutputs) -> None:
        """Add one expert's outputs to the sums."""
        norms_R = np.linalg.norm(outputs.outputs_RD.astype(np.float64), axis=1)
        self.use[outputs.layer, outputs.expert] += norms_R.size
        self.strength[outputs.layer, outputs.expert] += float((outputs.weights_R * norms_R).sum())


def measure_experts(checkpoint: LazyCheckpoint, windows_BS: NDArray[np.int32]) -> ExpertScores:
    """Return the scores of all experts on windows [B, S + 1] of a text. Experts are read one at a
    time.
    """
    shape = (checkpoint.config.num_moe_layers, checkpoint.config.num_experts)
    scores = ExpertScores(np.zeros(shape, np.int64), np.zeros(shape))
    hidden_states(checkpoint, windows_BS[:, :-1], scores.add_outputs)
    return scores


def check_num_kept(config: ModelConfig, num_kept: int, option_name: str = "experts") -> None:
    """Raise ValueError naming the option unless the model can run with `num_kept` experts per
    layer.
    """
    has, k, n_group = config.num_experts, config.num_experts_per_tok, config.router.n_group
    check(
        num_kept <= has, option_name, num_kept, f"must not exceed the model's num_experts = {has}"
    )
    check(num_kept >= k, option_name, num_kept, f"must be at least num_experts_per_tok = {k}")
    multiple = f"must be a multiple of the router's n_group = {n_group}"
    check(num_kept % n_group == 0, option_name, num_kept, multiple)
    reachable = num_kept // n_group * config.router.topk_group
    constraint = (
        f"leaves {reachable} experts in a token's groups: must leave num_experts_per_tok = {k}"
    )
    check(reachable >= k, option_name, num_kept, constraint)


def best_experts(
    scores_NE: NDArray[np.float64], num_kept: int, n_group: int = 1
) -> NDArray[np.int64]:
    """Return int64 [N, n], the experts with the highest scores of each layer, ascending; a tie goes
    to the lowest number.

    n_group: the router's groups of consecutive experts; the same number of experts is kept in each
    group.
    """
    layers, experts = scores_NE.shape
    by_group = scores_NE.reshape(layers, n_group, experts // n_group)
    best = np.argsort(-by_group, axis=-1, kind="stable")[..., : num_kept // n_group]
    first = np.arange(n_group)[:, None] * (experts // n_group)
    return np.sort((best + first).reshape(layers, num_kept), axis=1)
