"""Settings of LoRA: low-rank adapters that are trained in place of a model's own weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jmoe.config.checks import check, check_field, check_field_types, check_positive, check_unset
from kernels_pallas.formats import ExpertDtype

LORA_TARGETS = ("attention", "mlp", "shared_expert", "router", "experts")


@dataclass(frozen=True)
class LoraConfig:
    """Adapters A [in, rank] and B [rank, out]: a targeted weight becomes W + scale x A B.

    scale is alpha / rank, or alpha / sqrt(rank) with `rslora` (arXiv 2312.03732). A begins random
    and B zero. W is frozen: it has no gradient and no optimizer state. Each projection has its own
    adapter (query, key, value; gate and up of a dense MLP), and each expert its own for gate|up and
    down, as in PEFT.
    """

    rank: int | None = None  # None: no adapters, all parameters are trained
    alpha: float = 16.0
    rslora: bool = False
    # parts of a layer: attention, mlp (of dense layers), shared_expert, router, experts
    targets: tuple[str, ...] = ("attention", "mlp", "shared_expert", "experts")
    # probability with which an element of an adapter's input is zero in training; of attention
    # alone, as in PEFT, whose adapters of parameters have none
    dropout: float = 0.0
    # format of the frozen experts' matrices on the device; wide: the compute dtype. A model that is
    # stored in this format keeps its values exactly, others are rounded
    expert_dtype: ExpertDtype = "wide"

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.rank is None:
            names = ["alpha", "rslora", "dropout", "targets", "expert_dtype"]
            check_unset(self, "lora", names, "without lora.rank")
            return
        check_field(self.rank >= 1, self, "lora.rank", "must be at least 1")
        check_positive(self, "alpha")
        check_field(bool(self.targets), self, "lora.targets", "must name a part of a layer")
        for name in self.targets:
            known = f"must be among {', '.join(LORA_TARGETS)}"
            check(name in LORA_TARGETS, "lora.targets", name, known)
        check_field(0 <= self.dropout < 1, self, "lora.dropout", "must be in [0, 1)")
        drops = not self.dropout or self.targets == ("attention",)
        words = "must be 0 unless lora.targets is attention alone: the other parts have no dropout"
        check_field(drops, self, "lora.dropout", words)

    @property
    def scale(self) -> float:
        """The factor of A B."""
        assert self.rank is not None
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
