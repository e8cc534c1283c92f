"""Which tier holds what of a model in training, whether it fits, and how long a step takes: numbers in, plan out.

Symbols: D dense parameters, P parameters of an expert, L layers with experts of E experts each, k experts a token, B
tokens of a step. Of every parameter there are 4 bytes each of weight, gradient and two moments; with all experts off
the device that is 16 D + what a few layers of experts need on it, and up to 16 L E P below (MoESys, table 1:
GPU 16 D + 4 a S / L, CPU 16 a S, SSD 12 S). Several devices share all of it out evenly, experts too; the plan is then
of one device and of the host that it is in, and knows nothing of the network between them.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jmoe.planning.capacity import RESERVE
from jmoe.planning.roofline import distinct_experts

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
RUNTIME_BYTES = 600_000_000  # Python, JAX and compiled programs, in host memory
PASSES = 3  # products of a weight with a token: forward, two gradients
UPDATE_BYTES = 52  # moved in memory for a parameter's update: 28 by AdamW itself, 24 to and from its records


@dataclass(frozen=True)
class Machine:
    """Free bytes by tier, and speeds. shared: device and host are the same memory, counted as the host's.

    flops: that the device reaches in products. link, nvme_read, nvme_write, memory: bytes/s between host and device,
    from and to the disk, and of the device's memory.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    shared: bool
    flops: float
    link_bytes_per_s: float
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    memory_bytes_per_s: float

    def free_bytes(self, tier: Tier) -> int:
        return {"device": self.device_bytes, "host": self.host_bytes, "nvme": self.nvme_bytes}[tier]


@dataclass(frozen=True)
class TrainedModel:
    """What is trained, on how many devices, in hosts of how many, that share the experts out.

    dense_flops: of a step, everything but the experts. activation_bytes: layers' inputs and what is in use at once, by
    all devices. kept_bytes: what the layers keep besides for the backward pass of one of the micro-batches, on all
    devices; 0: they are computed again. A streamed step keeps that of all its micro-batches.
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    expert_parameters: int
    dense_parameters: int
    step_tokens: int
    dense_flops: float
    activation_bytes: int
    compute_bytes: int  # of a weight in the dtype of the products
    gradient_bytes: int  # of an expert's gradient, of each parameter, where it is kept
    num_devices: int = 1
    devices_per_host: int = 1
    kept_bytes: int = 0
    micro_batches: int = 1

    @property
    def all_parameters(self) -> int:
        """Of all experts."""
        return self.num_layers * self.num_experts * self.expert_parameters

    @property
    def device_parameters(self) -> int:
        """Of a device's experts."""
        return self.all_parameters // self.num_devices

    @property
    def active_experts(self) -> float:
        """Distinct experts of a device that a layer's tokens choose in a step, under uniform routing."""
        chosen = distinct_experts(self.num_experts, self.num_experts_per_tok, self.step_tokens)
        return chosen / self.num_devices

    @property
    def tokens_per_expert(self) -> float:
        """Of a step, those that have chosen it, among the experts that are chosen at all."""
        return self.step_tokens * self.num_experts_per_tok / (self.active_experts * self.num_devices)


class Traffic(NamedTuple):
    """Bytes, of one expert: between device and host, and from and to NVMe."""

    link_bytes: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True)
class Placement:
    """Where each kind of state is; the last three as in the configuration, `host_cache_bytes` resolved."""

    experts: Tier
    optimizer: Tier
    gradients: Tier
    device_layers: int
    host_cache_bytes: int
    checkpoints: int  # whose records are kept on the tier nvme

    @property
    def streamed(self) -> bool:
        return (self.experts, self.optimizer) != ("device", "device")


@dataclass(frozen=True)
class TrainingPlan:
    """rows: (tier, kind, bytes)."""

    model: TrainedModel
    placement: Placement
    machine: Machine
    rows: tuple[tuple[Tier, str, int], ...]

    def bytes_on(self, tier: Tier) -> int:
        return sum(size for where, _, size in self.rows if where == tier)

    def lacking(self) -> dict[Tier, int]:
        """Bytes by which a tier is too small; empty if everything fits."""
        machine, needed = self.machine, {tier: self.bytes_on(tier) for tier in TIERS}
        if machine.shared:
            of_devices = needed["device"] * self.model.devices_per_host
            needed = {"device": 0, "host": of_devices + needed["host"], "nvme": needed["nvme"]}
        free = {tier: int(machine.free_bytes(tier) * (1 - RESERVE)) for tier in TIERS}
        return {tier: needed[tier] - free[tier] for tier in TIERS if needed[tier] > free[tier]}

    # Time

    def expert_traffic(self) -> tuple[Traffic, Traffic]:
        """Of a step for one expert that is chosen, on the way forward, where it is updated too, and on the way back."""
        model, place = self.model, self.placement
        weights, moments, gradients = (n * model.expert_parameters for n in (4, 8, model.gradient_bytes))
        kinds = ((place.experts, weights), (place.optimizer, moments), (place.gradients, gradients))
        on_disk = sum(size for tier, size in kinds if tier == "nvme")
        all_records = model.num_layers * model.num_experts // model.num_devices * on_disk
        missed = 1 - min(1.0, place.host_cache_bytes / all_records) if all_records else 0.0
        again = 1 - min(1.0, place.device_layers / model.num_layers)  # the last layers' weights are still there

        def traffic(times: Sequence[tuple[float, float]]) -> Traffic:
            """times: how often each kind comes and goes."""
            link = read = written = 0.0
            for (tier, size), (comes, goes) in zip(kinds, times, strict=True):
                link += size * (comes + goes) * (tier != "device")
                read += size * comes * missed * (tier == "nvme")
                written += size * goes * missed * (tier == "nvme")
            return Traffic(link, read, written)

        return traffic([(1, 1), (1, 1), (1, 0)]), traffic([(again, 0), (0, 0), (0, 1)])

    @property
    def transfer_s(self) -> tuple[float, float]:
        """Seconds that an expert's transfers take forward and back, each on its slowest way."""
        machine, seconds = self.machine, []
        for traffic in self.expert_traffic():
            over_link = 0.0 if machine.shared else traffic.link_bytes / machine.link_bytes_per_s
            disk = traffic.read_bytes / machine.nvme_read_bytes_per_s
            disk += traffic.written_bytes / machine.nvme_write_bytes_per_s
            seconds.append(max(over_link, disk * self.model.devices_per_host))
        return seconds[0], seconds[1]

    @property
    def passes(self) -> tuple[int, int]:
        """Products of a weight with a token, forward and back; a layer that keeps nothing is computed again."""
        return 1, PASSES - 1 + (not self.model.kept_bytes)

    @property
    def break_even_tokens(self) -> float:
        """Tokens an expert needs in a step for its computing to take as long as its transfers, both ways."""
        flops = 2 * self.model.expert_parameters  # of a token and a pass
        both = zip(self.transfer_s, self.passes, strict=True)
        return max(seconds * self.machine.flops / (flops * passes) for seconds, passes in both)

    def step_s(self, *, overlapped: bool = True) -> float:
        """Seconds of a step: each way computing or transfers, whichever takes longer; or else their sum."""
        model, machine = self.model, self.machine
        choices = model.num_layers * model.step_tokens * model.num_experts_per_tok
        flops = 2 * model.expert_parameters * choices + model.dense_flops / PASSES  # of a pass
        experts = model.num_layers * model.active_experts
        updated = model.dense_parameters / model.num_devices + experts * model.expert_parameters
        compute_s = [passes * flops / model.num_devices / machine.flops for passes in self.passes]
        compute_s[0] += updated * UPDATE_BYTES / machine.memory_bytes_per_s
        transfers_s = [experts * seconds for seconds in self.transfer_s]
        longer = max if overlapped else operator.add
        return sum(longer(*both) for both in zip(compute_s, transfers_s, strict=True))

    def advice(self) -> list[str]:
        """What to change for it to fit; nothing if it does."""
        lines = []
        for tier, size in self.lacking().items():
            lines.append(f"{tier}: {_gigabytes(size)} too much. {_remedy(tier, self.placement)}")
        return lines

    def __str__(self) -> str:
        lines = [f"{'':<34}" + "".join(f"{tier:>14}" for tier in TIERS)]
        kinds = list(dict.fromkeys(kind for _, kind, _ in self.rows))
        for kind in kinds:
            sizes = [sum(n for tier, k, n in self.rows if (tier, k) == (where, kind)) for where in TIERS]
            lines.append(f"{kind:<34}" + "".join(f"{_gigabytes(size) if size else '':>14}" for size in sizes))
        lines.append(f"{'together':<34}" + "".join(f"{_gigabytes(self.bytes_on(tier)):>14}" for tier in TIERS))
        free = {tier: _gigabytes(self.machine.free_bytes(tier)) for tier in TIERS}
        if self.machine.shared:
            free["device"] = "of the host"
        lines.append(f"{'free':<34}" + "".join(f"{free[tier]:>14}" for tier in TIERS))
        lines += self.advice() or ["it fits"]
        lines.append(
            f"an expert chosen in a step gets {self.model.tokens_per_expert:.0f} tokens; transfers hide behind "
            f"computing from {math.ceil(self.break_even_tokens)} tokens on"
        )
        lines.append(
            f"predicted step: {self.step_s():.2f} s ({self.step_s(overlapped=False):.2f} s if nothing overlapped)"
        )
        return "\n".join(lines)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _remedy(tier: Tier, place: Placement) -> str:
    if tier == "device":
        lower = "tiers.experts = host or nvme" if place.experts == "device" else "a smaller batch_size"
        fewer = "" if place.device_layers == 1 or place.experts == "device" else ", tiers.device_layers = 1"
        return f"Take {lower}{fewer} or remat = layer"
    if tier == "host":
        for name in ("optimizer", "experts", "gradients"):
            if getattr(place, name) != "nvme":
                return f"Take tiers.{name} = nvme, or tiers.gradient_dtype = bfloat16, or fewer tiers.device_layers"
        return "Take a smaller tiers.host_cache_bytes or batch_size"
    return "Take a larger disk (tiers.path), fewer checkpoint.keep, or host memory for one of the tiers"


def plan_training(model: TrainedModel, placement: Placement, machine: Machine) -> TrainingPlan:
    """The bytes of every kind on every tier."""
    rows = tuple((tier, kind, size) for tier, kind, size in _rows(model, placement) if size)
    return TrainingPlan(model, placement, machine, rows)


def _rows(model: TrainedModel, place: Placement) -> Iterator[tuple[Tier, str, int]]:
    devices, here = model.num_devices, model.devices_per_host
    layer = model.num_experts // devices * model.expert_parameters
    yield "device", "dense weights, moments, gradients", 16 * model.dense_parameters // devices
    if devices > 1:  # the layer that computes and its neighbour, with their gradients
        layer_bytes = 2 * (model.compute_bytes + 4)
        yield "device", "dense layers made whole", layer_bytes * model.dense_parameters // model.num_layers
    yield "device", "activations", model.activation_bytes // devices
    times = model.micro_batches if place.streamed else 1
    yield "device", "kept for the backward pass", model.kept_bytes * times // devices
    yield "host", "runtime", RUNTIME_BYTES * here
    if not place.streamed:
        yield "device", "experts: weights", 4 * model.device_parameters
        yield "device", "experts: moments", 8 * model.device_parameters
        yield "device", "experts: gradients", 4 * model.device_parameters
        yield "device", "experts: in use", 2 * model.compute_bytes * layer
        return
    slots = model.num_layers if place.experts == "device" else min(place.device_layers, model.num_layers)
    yield "device", "experts: weights", 4 * slots * layer
    # gradients of the layer that computes and of the one on its way to its tier; both in the dtype of the products too
    yield "device", "experts: in use", (2 * 4 + 2 * model.compute_bytes) * layer
    kinds = (
        (place.experts, "experts: weights", 4, place.checkpoints),
        (place.optimizer, "experts: moments", 8, place.checkpoints),
        (place.gradients, "experts: gradients", model.gradient_bytes, 0),
    )
    for tier, kind, size, kept in kinds:
        if tier != "device":
            yield tier, kind, size * model.device_parameters * here
        if tier == "nvme":
            yield "nvme", "older versions in checkpoints", kept * size * model.device_parameters * here
    if "nvme" in (place.experts, place.optimizer, place.gradients):
        yield "host", "cache of records on nvme", place.host_cache_bytes * here


def choose(model: TrainedModel, machine: Machine, placements: list[Placement]) -> TrainingPlan:
    """The first placement that fits; `ValueError` saying what the last one lacks if none does."""
    plans = [plan_training(model, placement, machine) for placement in placements]
    fitting = [plan for plan in plans if not plan.lacking()]
    if not fitting:
        raise ValueError("tiers = 'auto': no choice of tiers fits. " + "; ".join(plans[-1].advice()))
    return fitting[0]


def candidates(experts: str, optimizer: str) -> list[tuple[Tier, Tier]]:
    """Tiers of experts and optimizer from the fastest on, where either may be `auto`."""
    pairs = [(a, b) for a in TIERS for b in TIERS if TIERS.index(b) >= TIERS.index(a)]
    pairs.sort(key=lambda pair: (TIERS.index(pair[0]) + TIERS.index(pair[1]), TIERS.index(pair[0])))
    return [p for p in pairs if experts in ("auto", p[0]) and optimizer in ("auto", p[1])]
