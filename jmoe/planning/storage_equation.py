"""MoESys' bytes of a training run's state by tier (section 2.1 of SE-MoE, arXiv 2205.10034).

The planner's own bytes (`training.py`) are those of jmoe's programs. These are the paper's, which
count Adam in mixed precision and nothing beside the state: no activations, copies or checkpoints.
"""

from dataclasses import dataclass

from jmoe.config import check
from jmoe.config.tiers import Tier


@dataclass(frozen=True)
class StorageEquation:
    """Equation 1: the state's bytes on all devices, in all hosts' memory and on all drives.

    dense, sparse: parameters outside the experts, and of all experts (D and S). layers: layers with
    experts (L). alpha: probability that an expert's parameter is activated. A device holds the
    dense parameters (2 bytes) with their gradients (2), float32 weights (4) and moments (4 and 4),
    and of one layer the active experts' parameters and gradients; host memory caches the states of
    active experts; drives hold the float32 weights and moments of all experts.
    """

    dense: int
    sparse: int
    layers: int
    alpha: float

    def __post_init__(self) -> None:
        for name in ("dense", "sparse"):
            value = getattr(self, name)
            check(value >= 0, name, value, "must not be negative")
        check(self.layers > 0, "layers", self.layers, "must be greater than 0")
        check(0 <= self.alpha <= 1, "alpha", self.alpha, "must be between 0 and 1")

    @property
    def bytes_by_tier(self) -> dict[Tier, float]:
        """Return the left sides of the equation's three constraints."""
        return {
            "device": 16 * self.dense + 4 * self.alpha * self.sparse / self.layers,
            "host": 16 * self.alpha * self.sparse,
            "nvme": 12.0 * self.sparse,
        }

    def fits(self, memory: dict[Tier, int], num_devices: int) -> bool:
        """Return True if all three constraints hold with these bytes of a device's share of each
        tier (M_GPU, M_CPU, M_SSD) times `num_devices` (N).
        """
        return all(size <= memory[tier] * num_devices for tier, size in self.bytes_by_tier.items())
