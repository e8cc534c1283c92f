"""Memory tiers of the experts' training state, and the planner's machine description. Standard
library only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jmoe.config.checks import (
    check,
    check_field_types,
    check_not_negative,
    check_positive,
    check_unset,
)

Tier = Literal["device", "host", "nvme"]
Update = Literal["device", "host"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")  # from the fastest to the largest
# options of MoESys' cache policy
OF_MOESYS = ("cache_threshold", "cache_beta", "cache_interval")
# options of the tier nvme
OF_NVME = ("path", "host_cache_bytes", "write_back_every_steps", "cache_policy", *OF_MOESYS)
# options of experts that have gradients and optimizer state
OF_TRAINED_EXPERTS = (
    *("gradients", "gradient_dtype", "update", "write_back_every_steps", "device_experts"),
    *("chosen_share", "cache_policy", *OF_MOESYS),
)
CachePolicy = Literal["lfu", "moesys"]


@dataclass(frozen=True)
class TiersConfig:
    """Memory tiers of the experts' training state: `device`, `host` memory or `nvme`.

    `auto` lets the planner choose. All other parameters stay on the device. With experts off the
    device, an expert that no token chooses is not fetched; the optimizer steps that it skips are
    replayed when it is fetched next. Each process stores the records of its devices' experts, one
    for all replicas (`mesh.data`) inside the process; processes with replicas of the same experts
    share the work of saving.

    experts: tier of the float32 weights. optimizer: tier of AdamW's moments, the same tier or a
    slower one; `train.py` uses the tier of the weights if only that is given.
    """

    experts: Literal["auto"] | Tier = "device"
    optimizer: Literal["auto"] | Tier = "device"
    # tier of the gradients, from the backward pass until their expert is fetched next
    gradients: Literal["host", "nvme"] = "host"
    # data type of the stored gradients; bfloat16 is exact for compute_dtype = bfloat16
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    # where AdamW updates the experts: on the device, to which their float32 weights and moments go
    # and from which they return, or on the host's cores, which send only weights in compute_dtype;
    # auto: where the planner predicts the faster step
    update: Literal["auto", "device", "host"] = "device"
    # folder of the tier nvme, in which each run makes its own subfolder; "": OUTPUT_DIR/records
    path: str = ""
    # host memory in which a process caches records of the tier nvme; 0: a quarter of their bytes
    host_cache_bytes: int = 0
    # which records stay in that cache. lfu: the most used ones, with counts that notice changes of
    # traffic; moesys: Algorithm 2 of MoESys as printed
    cache_policy: CachePolicy = "lfu"
    # cache_policy = moesys: hits that a record must have before another may take its place
    cache_threshold: float = 1.0
    # cache_policy = moesys: beta, by which all hits are multiplied every `cache_interval` steps
    cache_beta: float = 0.8
    # cache_policy = moesys: K, the steps between two of these multiplications
    cache_interval: int = 4
    # steps between two writes of changed records to nvme; 0: a record is written when it leaves the
    # cache or a checkpoint is saved
    write_back_every_steps: int = 0
    # page-lock the host memory from which records are copied to the device; auto: for a GPU
    pin_host_memory: Literal["auto", "on", "off"] = "auto"
    # layers whose experts are on the device at one time, including the layer that computes
    device_layers: int = 2
    # initial capacity of the device for such a layer, as a share of the layer's experts
    device_experts: float = 1.0
    # share of a layer's experts on a device that an average step uses, as an earlier run measured
    # it; the planner predicts traffic and step time from it; 0: estimated for even routing
    chosen_share: float = 0.0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "host_cache_bytes", "write_back_every_steps")
        check_positive(self, "device_layers")
        check_cache_policy(self, "tiers")
        share = self.device_experts
        check(0 < share <= 1, "tiers.device_experts", share, "must be greater than 0 and at most 1")
        fetched = self.experts != "device" or share == 1
        check(
            fetched,
            "tiers.device_experts",
            share,
            "must be 1 with tiers.experts = 'device', where all of them are",
        )
        chosen = self.chosen_share
        check(0 <= chosen <= 1, "tiers.chosen_share", chosen, "must be between 0 and 1")
        if "auto" not in (self.experts, self.optimizer):
            above = TIERS.index(self.optimizer) >= TIERS.index(self.experts)
            allowed = " or ".join(TIERS[TIERS.index(self.experts) :])
            check(
                above,
                "tiers.optimizer",
                self.optimizer,
                f"must be {allowed} with tiers.experts = {self.experts!r}",
            )
        for name, why in _unused_options_with_reasons(
            self.experts, self.optimizer, self.gradients
        ).items():
            check_unset(self, "tiers", [name], why)

    def with_tiers(
        self, experts: Tier, optimizer: Tier, update: Update | None = None
    ) -> TiersConfig:
        """Return a copy with these tiers in place of `auto`, and options that the tiers do not use
        reset to their defaults. update: replaces `update`, unless the tiers do not use it.
        """
        idle = _unused_options_with_reasons(experts, optimizer, self.gradients)
        options: dict[str, Any] = {
            f.name: f.default for f in dataclasses.fields(self) if f.name in idle
        }
        if update is not None:
            options = {"update": update} | options
        if experts == "device":  # all of them are there
            options["device_experts"] = 1.0
        return dataclasses.replace(self, experts=experts, optimizer=optimizer, **options)

    def check_frozen_experts(self) -> None:
        """Raise ValueError unless the options are of experts that have no optimizer state, as with
        `lora.rank`.
        """
        check(
            self.experts != "auto",
            "tiers.experts",
            self.experts,
            "must be device, host or nvme with lora.rank: not planned yet",
        )
        alone = f"must be {self.experts} with lora.rank: frozen experts have no optimizer state"
        check(self.optimizer == self.experts, "tiers.optimizer", self.optimizer, alone)
        why = "with lora.rank, whose experts are only read"
        check_unset(self, "tiers", OF_TRAINED_EXPERTS, why)

    @property
    def all_on_device(self) -> bool:
        """Whether weights and optimizer state of all experts stay on the device."""
        return (self.experts, self.optimizer) == ("device", "device")

    @property
    def any_off_device(self) -> bool:
        """Whether weights or optimizer state of some experts are placed off the device by name,
        not by `auto`.
        """
        return bool({"host", "nvme"} & {self.experts, self.optimizer})


def check_cache_policy(options: Any, section: str) -> None:
    """Raise ValueError for values of `cache_threshold`, `cache_beta` and `cache_interval` that are
    out of range, or that another cache policy does not use.
    """
    check_positive(options, "cache_interval")
    check_not_negative(options, "cache_threshold")
    name, beta = f"{section}.cache_beta".lstrip("."), options.cache_beta
    check(0 < beta <= 1, name, beta, "must be greater than 0 and at most 1")
    if options.cache_policy != "moesys":
        why = f"with cache_policy = {options.cache_policy!r}, which does not use it"
        check_unset(options, section, OF_MOESYS, why)


# GPUs for which `--estimate` can compile programs
EstimatedGpu = Literal["", "a100", "h100", "h200", "b200", "rtx-4090", "rtx-5090"]
AcceleratorName = Literal["", "a100-40gb", "a100", "h100", "h200", "b200", "rtx-4090", "rtx-5090"]


def _unused_options_with_reasons(experts: str, optimizer: str, gradients: str) -> dict[str, str]:
    """Return {option: reason} of the options that no code uses on these tiers.

    Empty while a tier is `auto`.
    """
    if "auto" in (experts, optimizer):
        return {}
    if (experts, optimizer) == ("device", "device"):
        why = (
            "with tiers.experts = 'device' and tiers.optimizer = 'device', where nothing leaves the"
            " device"
        )
        return dict.fromkeys(
            ("gradients", "gradient_dtype", "update", "pin_host_memory", "device_layers", *OF_NVME),
            why,
        )
    idle = {}
    if "nvme" not in (experts, optimizer, gradients):
        idle = dict.fromkeys(OF_NVME, "with nothing on the tier nvme")
    if experts == "device":
        idle["device_layers"] = "with tiers.experts = 'device', where those of all layers are"
        idle["update"] = "with tiers.experts = 'device', which holds the float32 weights"
    return idle


@dataclass(frozen=True)
class AcceleratorPeaks:
    """Peak figures from a device's data sheet, which programs do not reach."""

    device_bytes: int
    flops: float  # dense products in bfloat16 with float32 sums
    link_bytes_per_s: float  # PCIe, one way
    memory_bytes_per_s: float


# SXM modules and cards, from NVIDIA's data sheets, which print sparse products (twice these) and
# PCIe both ways together; of cards the rate with float32 sums, which is half of that with sums in
# float16.
ACCELERATORS = {
    "a100-40gb": AcceleratorPeaks(40_000_000_000, 312e12, 32e9, 1.555e12),
    "a100": AcceleratorPeaks(80_000_000_000, 312e12, 32e9, 2.039e12),
    "h100": AcceleratorPeaks(80_000_000_000, 989e12, 64e9, 3.35e12),
    "h200": AcceleratorPeaks(141_000_000_000, 989e12, 64e9, 4.8e12),
    "b200": AcceleratorPeaks(180_000_000_000, 2250e12, 64e9, 8e12),
    "rtx-4090": AcceleratorPeaks(24_000_000_000, 165e12, 32e9, 1.008e12),
    "rtx-5090": AcceleratorPeaks(32_000_000_000, 210e12, 64e9, 1.792e12),
}
TWO_CORES = AcceleratorPeaks(0, 2e11, 5e10, 1.5e10)  # what two CPU cores reach


@dataclass(frozen=True)
class MachineConfig:
    """The machine that the planner (`--plan`, tiers `auto`) plans for."""

    # its data sheet has what is 0 of the device; "": two CPU cores, a device that shares the host's
    # memory
    accelerator: AcceleratorName = ""
    # with several image tasks, also the limit within which a run deals them out
    device_bytes: int = 0
    host_bytes: int = 0  # 0: what is free here
    nvme_bytes: int = 0  # 0: what is free here
    flops: float = 0.0  # that products reach
    link_bytes_per_s: float = 0.0  # between host and device
    memory_bytes_per_s: float = 0.0  # of the device
    nvme_read_bytes_per_s: float = 2e9
    nvme_write_bytes_per_s: float = 1.5e9
    # of a host's memory, where it updates experts (tiers.update); with a CPU as the device, its own
    host_memory_bytes_per_s: float = 1e11

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "device_bytes", "host_bytes", "nvme_bytes")
        check_not_negative(self, "flops", "link_bytes_per_s", "memory_bytes_per_s")
        check_positive(self, "nvme_read_bytes_per_s", "nvme_write_bytes_per_s")
        check_positive(self, "host_memory_bytes_per_s")

    def resolve_device_peaks(self) -> AcceleratorPeaks:
        """The device's figures: those given explicitly, else those of `accelerator`, or of two CPU
        cores if none is named.
        """
        nominal = dataclasses.asdict(ACCELERATORS.get(self.accelerator, TWO_CORES))
        return AcceleratorPeaks(
            **{name: getattr(self, name) or figure for name, figure in nominal.items()}
        )
