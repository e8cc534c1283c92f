"""Named shapes and routings for the kernels' tests and benchmarks.

Legend: T tokens, D hidden, F expert hidden, E experts, K choices per token, N = T K rows.
"""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class MoEShape:
    """The sizes of one MoE layer and of its batch."""

    num_tokens: int
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int

    @property
    def num_rows(self) -> int:
        """N, the number of (token, expert) assignments."""
        return self.num_tokens * self.num_experts_per_tok

    def scaled(self, width: int, experts: int, rows: int) -> "MoEShape":
        """Return a smaller shape with the same ratios for interpret mode: D at most `width`, E at
        most `experts`, about `rows` rows.
        """
        divisor = max(1, self.hidden_size // width)
        some = min(self.num_experts, experts)
        k = min(self.num_experts_per_tok, some)
        return replace(
            self,
            num_tokens=min(self.num_tokens, max(1, rows // k)),
            hidden_size=self.hidden_size // divisor,
            moe_intermediate_size=max(64, self.moe_intermediate_size // divisor // 64 * 64),
            num_experts=some,
            num_experts_per_tok=k,
        )


MODELS = {
    "mixtral-8x7b": MoEShape(8192, 4096, 14336, 8, 2),
    "qwen3-30b-a3b": MoEShape(8192, 2048, 768, 128, 8),
    "deepseek-v3": MoEShape(4096, 7168, 2048, 256, 8),
    "olmoe": MoEShape(8192, 2048, 1024, 64, 8),
    "gpt-moe": MoEShape(8192, 4096, 16384, 8, 1),  # MoESys, Table 2
    "tiny": MoEShape(512, 128, 256, 4, 2),
    "one-token": MoEShape(1, 2048, 768, 128, 8),
}
CPU = MoEShape(4096, 512, 1024, 16, 1)

ROUTINGS = ("balanced", "skewed", "hot", "empty")


def group_sizes(routing: str, num_rows: int, num_groups: int) -> np.ndarray:
    """Return int32 [E] that sum to `num_rows`.

    balanced: equal sizes. skewed: Zipf, the l-th largest group has 1/l of the largest. hot: one
    group has half of all rows. empty: every other group is empty.
    """
    shares = {
        "balanced": np.ones(num_groups),
        "skewed": 1 / np.random.default_rng(0).permutation(np.arange(1, num_groups + 1)),
        "hot": np.where(np.arange(num_groups) == num_groups // 3, max(1, num_groups - 1), 1.0),
        "empty": (np.arange(num_groups) % 2 == 0).astype(float),
    }[routing]
    ends = np.rint(np.cumsum(shares) / shares.sum() * num_rows)
    return np.diff(ends, prepend=0).astype(np.int32)
