"""Memory and time plan of training: which tier (device, host memory, NVMe) holds which state,
whether it fits, and how long a step takes. Pure functions.

Every parameter has 4 bytes each of weight and gradient, and 8 of AdamW's two moments (MoESys,
Equation 1: GPU 16 D + 4 a S / L, CPU 16 a S, SSD 12 S). Devices share all state evenly, experts
too. The plan covers one device and its host, without network traffic (`jmoe.planning.cluster` adds
it). Data-parallel replicas share dense state and tokens; each holds all experts, or they split
their state (`comm.shard_experts`).
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

from jmoe.config.parallel import ExpertSharding
from jmoe.config.tiers import TIERS, Tier, Update
from jmoe.planning.memory_plan import RESERVE
from jmoe.planning.roofline import distinct_experts, scale_chosen_share
from jmoe.planning.storage_equation import StorageEquation

EXPERT_SHARDINGS: tuple[ExpertSharding, ...] = get_args(ExpertSharding)
RUNTIME_BYTES = 600_000_000  # Python, JAX and compiled programs, in host memory
WEIGHT_BYTES = 4  # per parameter, moment or summed gradient
PASSES = 3  # products of a weight with a token: one forward, two backward
SAVED_AT_ONCE = 8  # expert records of each kind that are copied to host memory at a time
# memory traffic of a parameter's update: 28 bytes by AdamW, 24 to and from its records
UPDATE_BYTES = 52
# memory traffic of a parameter's update on the host: 30 bytes by AdamW (weight, moments and
# gradient read, weight, moments and a 16-bit copy written), 8 by the gradient's way to its record
# and the copy's way to the device
HOST_UPDATE_BYTES = 38


@dataclass(frozen=True)
class Machine:
    """Free bytes per tier, and speeds, of a device and its host.

    shared: device and host are the same memory, counted as the host's. flops: FLOP/s of matrix
    products. link_bytes_per_s: between host and device. nvme_read_bytes_per_s,
    nvme_write_bytes_per_s: of the disk. memory_bytes_per_s: of the device's memory. source: origin
    of the device's figures. assumed_tiers: tiers whose free bytes were read from the planning
    machine, because the configuration gives none. host_memory_bytes_per_s: of the host's memory,
    all its devices together.
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
    source: str = "as given"
    assumed_tiers: tuple[Tier, ...] = ()
    host_memory_bytes_per_s: float = 1e11

    def free_bytes(self, tier: Tier) -> int:
        return {"device": self.device_bytes, "host": self.host_bytes, "nvme": self.nvme_bytes}[tier]

    @property
    def free_bytes_notes(self) -> list[str]:
        """Return a line about the tiers whose free bytes were read from this machine, and the
        options that set them; [] if there are none.
        """
        if not self.assumed_tiers:
            return []
        sizes = " and ".join(f"{tier} bytes" for tier in self.assumed_tiers)
        line = f"free {sizes} are those of this machine"
        options = " and ".join(f"--machine.{tier}-bytes" for tier in self.assumed_tiers)
        return [line if self.shared else f"{line}: give {options} of the hosts that the run is for"]

    def enlarge_advice(self, tier: Tier) -> str:
        """Return advice for a tier that no other change makes large enough."""
        if tier in self.assumed_tiers and not self.shared:
            free = _gigabytes_text(self.free_bytes(tier))
            return (
                f"--machine.{tier}-bytes, if a host of the run has more than the {free} of this"
                " machine"
            )
        return _LARGER[tier]


@dataclass(frozen=True)
class TrainingSizes:
    """Sizes of the model to train, of a step, and of the devices that share the experts.

    Of one replica's step: step_tokens, and dense_flops (FLOPs of everything but the experts).

    Of a micro-batch, over the replica's devices: input_bytes, inputs of layers; working_bytes, in
    use at once by a layer's gradients; residual_bytes, other residuals saved for the backward pass,
    0 if layers are recomputed; experts_residual_bytes, the bytes of residual_bytes that experts'
    products make; recomputed_bytes, in use by a layer's recomputation; logits_bytes, logits with
    their gradient. If experts are streamed, the inputs and residuals of all micro-batches exist at
    once.

    loss_chunk_bytes: most bytes of logits that a device has at once. experts_again: experts'
    products are recomputed. max_micro_batches: micro-batches of one sequence per `context` devices.
    packing: expert packing (`comm.packing`), included in num_devices (devices that share the
    experts) and replicas. chosen_share: measured mean fraction of a device's experts of a layer
    that a step's tokens choose; 0: estimated for uniform routing. on_gpu: the devices are GPUs.
    expert_sharding: what replicas split of their experts. context: devices that share a sequence.
    context_bytes: keys and values, with their gradients, that a device sends in a step to those
    that share its sequences. sequence_length: of sequences that devices can share, else 0.
    sequence_bytes: in use on a device by the attention of one sequence that it shares.
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    parameters_per_expert: int
    dense_parameters: int
    step_tokens: int
    dense_flops: float
    input_bytes: int
    working_bytes: int
    compute_dtype_bytes: int  # per weight, in the compute dtype
    gradient_bytes_per_parameter: int  # of an expert's stored gradient
    num_devices: int = 1
    devices_per_host: int = 1
    residual_bytes: int = 0
    micro_batches: int = 1
    max_micro_batches: int = 1
    replicas: int = 1
    packing: int = 1
    shard_dense: bool = True
    chosen_share: float = 0.0
    experts_residual_bytes: int = 0
    experts_again: bool = False
    logits_bytes: int = 0
    loss_chunk_bytes: int = 0
    recomputed_bytes: int = 0
    on_gpu: bool = False
    expert_sharding: ExpertSharding = "none"
    context: int = 1
    context_bytes: int = 0
    sequence_length: int = 0
    sequence_bytes: int = 0

    @property
    def layer_activation_bytes(self) -> int:
        """Return the bytes that a device uses for a layer of a micro-batch, besides the layer's
        weights.
        """
        recomputed_bytes = (
            0 if self.residual_bytes and not self.experts_again else self.recomputed_bytes
        )
        return (self.working_bytes + recomputed_bytes) // self.num_devices

    @property
    def device_logits_bytes(self) -> int:
        """Return the bytes of logits that a device has at once."""
        return min(self.loss_chunk_bytes, self.logits_bytes // self.num_devices)

    @property
    def casts_all_experts_at_once(self) -> bool:
        """Return True if the experts of all layers are cast to the compute dtype at once, and their
        gradients stay in that dtype.

        GPUs do so if no other gradients are added to these (`training.sharded_decoder`).
        """
        alone = self.num_all_devices == 1 or (self.replicas == 1 and self.micro_batches == 1)
        return self.on_gpu and alone and self.compute_dtype_bytes < WEIGHT_BYTES

    @property
    def num_all_devices(self) -> int:
        """Return the number of devices of all replicas together."""
        return self.num_devices * self.replicas

    @property
    def num_dense_shards(self) -> int:
        """Return the number of shards of the dense parameters and their state."""
        return self.num_all_devices if self.shard_dense else 1

    @property
    def num_expert_shards(self) -> int:
        """Return the number of replicas that split the state of a device's experts."""
        return 1 if self.expert_sharding == "none" else self.replicas

    @property
    def num_all_expert_parameters(self) -> int:
        """Return the number of parameters of all experts."""
        return self.num_layers * self.num_experts * self.parameters_per_expert

    @property
    def num_device_expert_parameters(self) -> int:
        """Return the number of parameters of one device's experts."""
        return self.num_all_expert_parameters // self.num_devices

    @property
    def uniform_active_experts(self) -> float:
        """Return the expected number of a device's experts of a layer that any replica's tokens
        choose in a step under uniform routing.
        """
        chosen = distinct_experts(
            self.num_experts, self.num_experts_per_tok, self.step_tokens * self.replicas
        )
        return chosen / self.num_devices

    @property
    def active_experts(self) -> float:
        """Return the mean number of a device's experts of a layer that a step's tokens choose:
        measured if `chosen_share` is set, else `uniform_active_experts`.
        """
        return (
            self.chosen_share * self.num_experts / self.num_devices
            if self.chosen_share
            else self.uniform_active_experts
        )

    @property
    def peak_active_experts(self) -> float:
        """Return the number of a device's experts of a layer to plan slots for: single steps may
        choose more experts than the mean.
        """
        return max(self.uniform_active_experts, self.active_experts)

    @property
    def tokens_per_expert(self) -> float:
        """Return the mean number of a step's tokens per expert, over the experts that are chosen at
        all.
        """
        return (
            self.step_tokens * self.num_experts_per_tok / (self.active_experts * self.num_devices)
        )


class ExpertTraffic(NamedTuple):
    """Bytes moved for one expert: between device and host, read from NVMe, and written to
    NVMe.
    """

    link_bytes: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True)
class StatePlacement:
    """Tier of each kind of state. gradients, device_layers, device_experts and update are as in
    `TrainConfig.tiers`.

    host_cache_bytes: None means a quarter of the records on NVMe.
    """

    experts: Tier
    optimizer: Tier
    gradients: Tier
    device_layers: int
    host_cache_bytes: int | None
    checkpoints: int  # number of checkpoints whose records stay on NVMe
    device_experts: float = 1.0  # slots per layer, as a fraction of a device's experts
    update: Update = "device"

    @property
    def is_streamed(self) -> bool:
        """Whether experts or their moments are off the device."""
        return (self.experts, self.optimizer) != ("device", "device")


@dataclass(frozen=True)
class TrainingPlan:
    """Memory plan of a training run. rows: (tier, kind of state, bytes), per device for the tier
    `device`, per host for the others.
    """

    model: TrainingSizes
    placement: StatePlacement
    machine: Machine
    rows: tuple[tuple[Tier, str, int], ...]

    def bytes_on_tier(self, tier: Tier) -> int:
        """Return the bytes of all kinds of state on a tier."""
        return sum(size for where, _, size in self.rows if where == tier)

    def needed_bytes(self, tier: Tier) -> int:
        """Return the bytes needed on one device (tier `device`) or one host. If device and host
        share memory, all bytes count as the host's.
        """
        if self.machine.shared and tier in ("device", "host"):
            of_devices = self.bytes_on_tier("device") * self.model.devices_per_host
            return 0 if tier == "device" else of_devices + self.bytes_on_tier("host")
        return self.bytes_on_tier(tier)

    @cached_property
    def lacking_bytes(self) -> dict[Tier, int]:
        """Return {tier: bytes that it lacks}; empty if everything fits."""
        left = {
            tier: self.needed_bytes(tier) - int(self.machine.free_bytes(tier) * (1 - RESERVE))
            for tier in TIERS
        }
        return {tier: bytes_ for tier, bytes_ in left.items() if bytes_ > 0}

    @property
    def experts_per_slot(self) -> int:
        """Return the number of experts per layer slot of a device: as configured, but at least the
        experts that a step's tokens choose.
        """
        experts = self.model.num_experts // self.model.num_devices
        if self.placement.experts == "device":
            return experts
        slots = math.ceil(self.placement.device_experts * experts)
        return min(experts, max(slots, math.ceil(self.model.peak_active_experts)))

    @property
    def host_cache_bytes(self) -> int:
        """Return the bytes of host memory that cache one device's expert records of the tier
        nvme.
        """
        on_disk = (
            _nvme_bytes_per_parameter(self.model, self.placement)
            * self.model.num_device_expert_parameters
        )
        cache_bytes = self.placement.host_cache_bytes
        return on_disk // 4 if cache_bytes is None else min(cache_bytes, on_disk)

    @property
    def storage_equation(self) -> StorageEquation:
        """Return MoESys' bytes of this model's state, for comparison with `rows`."""
        model = self.model
        alpha = min(1.0, model.active_experts * model.num_devices / model.num_experts)
        sparse = model.num_all_expert_parameters
        return StorageEquation(model.dense_parameters, sparse, model.num_layers, alpha)

    def with_chosen_share(self, share: float) -> "TrainingPlan":
        """Return the plan for steps that choose the fraction `share` of a device's experts of a
        layer.
        """
        return plan_training(replace(self.model, chosen_share=share), self.placement, self.machine)

    # Time

    def expert_traffic_by_pass(self) -> tuple[ExpertTraffic, ExpertTraffic]:
        """Return the bytes that a step moves per chosen expert: (forward pass with update, backward
        pass).
        """
        model, place = self.model, self.placement
        if not place.is_streamed:
            return ExpertTraffic(0, 0, 0), ExpertTraffic(0, 0, 0)
        bytes_per_parameter = 4, 8, model.gradient_bytes_per_parameter
        weights, moments, gradients = (n * model.parameters_per_expert for n in bytes_per_parameter)
        kinds = ((place.experts, weights), (place.optimizer, moments), (place.gradients, gradients))
        on_disk = _nvme_bytes_per_parameter(model, place) * model.num_device_expert_parameters
        missed = 1 - self.host_cache_bytes / on_disk if on_disk else 0.0
        # the last layers' weights are still on the device
        again = 1 - min(1.0, place.device_layers / model.num_layers)

        def traffic_of(times: Sequence[tuple[float, float]]) -> ExpertTraffic:
            """Return the bytes moved in a pass for one expert's weights, moments and gradients;
            times: for each of the three, how often it comes to the device and how often it leaves.
            """
            link = read = written = 0.0
            for (tier, size), (comes, goes) in zip(kinds, times, strict=True):
                link += size * (comes + goes) * (tier != "device")
                read += size * comes * missed * (tier == "nvme")
                written += size * goes * missed * (tier == "nvme")
            return ExpertTraffic(link, read, written)

        forward = traffic_of([(1, 1), (1, 1), (1, 0)])
        back = traffic_of([(again, 0), (0, 0), (0, 1)])
        if place.update == "host":
            sent = model.compute_dtype_bytes * model.parameters_per_expert
            forward = forward._replace(link_bytes=sent)
            back = back._replace(link_bytes=again * sent + gradients)
        return forward, back

    @property
    def expert_transfer_s_by_pass(self) -> tuple[float, float]:
        """Return the seconds of one expert's transfers, (forward, backward), each on the slowest of
        link, disk and, for an update on the host, the host's memory.
        """
        machine, per_host, seconds = self.machine, self.model.devices_per_host, list[float]()
        updates = HOST_UPDATE_BYTES * self.model.parameters_per_expert, 0
        for traffic, updated in zip(self.expert_traffic_by_pass(), updates, strict=True):
            over_link = 0.0 if machine.shared else traffic.link_bytes / machine.link_bytes_per_s
            disk = traffic.read_bytes / machine.nvme_read_bytes_per_s
            disk += traffic.written_bytes / machine.nvme_write_bytes_per_s
            by_host = 0.0
            if self.placement.update == "host" and not machine.shared:
                by_host = updated / machine.host_memory_bytes_per_s
            seconds.append(max(over_link, disk * per_host, by_host * per_host))
        return seconds[0], seconds[1]

    @property
    def dense_products_by_pass(self) -> tuple[int, int]:
        """Return the number of products of a dense weight with a token, (forward, backward);
        recomputation adds one.
        """
        return 1, PASSES - 1 + (not self.model.residual_bytes)

    @property
    def expert_products_by_pass(self) -> tuple[int, int]:
        """Return the number of products of an expert's weight with a token, (forward, backward)."""
        forward, back = self.dense_products_by_pass
        return forward, back + self.model.experts_again

    @property
    def break_even_tokens_per_expert(self) -> float:
        """Return the tokens per expert and step above which computation takes longer than the
        expert's transfers, in both passes.
        """
        flops = 2 * self.model.parameters_per_expert  # of a token and a pass
        both = zip(self.expert_transfer_s_by_pass, self.expert_products_by_pass, strict=True)
        return max(seconds * self.machine.flops / (flops * passes) for seconds, passes in both)

    @property
    def compute_s_by_pass(self) -> tuple[float, float]:
        """Return the seconds of a step's computation, (forward with the optimizer update,
        backward).
        """
        model, machine = self.model, self.machine
        choices = model.num_layers * model.step_tokens * model.num_experts_per_tok
        # of a pass
        expert_flops = 2 * model.parameters_per_expert * choices
        dense_flops = model.dense_flops / PASSES
        num_active = model.num_layers * model.active_experts
        updated_bytes = UPDATE_BYTES * model.dense_parameters / model.num_dense_shards
        if self.placement.update == "device":
            of_experts = UPDATE_BYTES * num_active * model.parameters_per_expert
            updated_bytes += of_experts / model.num_expert_shards
        elif machine.shared:  # the host's cores are those that compute
            updated_bytes += HOST_UPDATE_BYTES * num_active * model.parameters_per_expert
        passes = zip(self.expert_products_by_pass, self.dense_products_by_pass, strict=True)
        flops = (experts * expert_flops + dense * dense_flops for experts, dense in passes)
        forward, back = (n / model.num_devices / machine.flops for n in flops)
        return forward + updated_bytes / machine.memory_bytes_per_s, back

    @property
    def transfers_s_by_pass(self) -> tuple[float, float]:
        """Return the seconds of a step's expert transfers, (forward, backward)."""
        forward, back = self.expert_transfer_s_by_pass
        experts = self.model.num_layers * self.model.active_experts
        return experts * forward, experts * back

    def step_s(self, *, overlapped: bool = True) -> float:
        """Return the seconds of a step: in each pass the longer of computation and transfers, or
        their sum if `overlapped` is False.
        """
        longer = max if overlapped else operator.add
        return sum(
            longer(*both)
            for both in zip(self.compute_s_by_pass, self.transfers_s_by_pass, strict=True)
        )

    def advice(self) -> list[str]:
        """Return one line per tier that is too small, with settings to change; [] if everything
        fits.
        """
        return [self._tier_advice(tier) for tier in self.lacking_bytes]

    def _tier_advice(self, tier: Tier) -> str:
        """Return a line with what the tier lacks, its largest kind of state, and settings that
        help.
        """
        sizes = {kind: size for _, kind, _ in self.rows if (size := self._state_bytes(tier, kind))}
        by_size = sorted(sizes, key=lambda kind: -sizes[kind])
        remedies = next(filter(None, (self._setting_remedies(tier, kind) for kind in by_size)), [])
        if not any(remedy.endswith(_ENOUGH) for remedy in remedies):
            remedies.append(self.machine.enlarge_advice(tier))
        lack, most = _gigabytes_text(self.lacking_bytes[tier]), _gigabytes_text(sizes[by_size[0]])
        return (
            f"{tier}: {lack} too much; the most is {by_size[0]}, {most}. Take"
            f" {', or '.join(remedies)}"
        )

    def _state_bytes(self, tier: Tier, kind: str) -> int:
        """Return the bytes of one kind of state on a tier, counted as in `needed_bytes`."""
        rows = tuple(row for row in self.rows if row[1] == kind)
        return replace(self, rows=rows).needed_bytes(tier)

    def _setting_remedies(self, tier: Tier, kind: str) -> list[str]:
        """Return up to three texts `setting = value` that shrink `kind` on `tier` by more than a
        tenth of what the tier lacks, and make no tier lack more than now.
        """
        remedies: dict[str, str] = {}
        for setting, value, model, place in _possible_changes(self.model, self.placement):
            plan = plan_training(model, place, self.machine)
            saved = self.needed_bytes(tier) - plan.needed_bytes(tier)
            shrinks = (
                plan._state_bytes(tier, kind) < self._state_bytes(tier, kind)
                and saved > 0.1 * self.lacking_bytes[tier]
            )
            harmless = all(
                lack <= self.lacking_bytes.get(where, 0)
                for where, lack in plan.lacking_bytes.items()
            )
            # For each setting keep the first value that is enough, or else the last one.
            enough = setting in remedies and remedies[setting].endswith(_ENOUGH)
            if shrinks and harmless and not enough:
                remark = (
                    _ENOUGH
                    if tier not in plan.lacking_bytes
                    else f" ({_gigabytes_text(saved)} less)"
                )
                remedies[setting] = f"{setting} = {value}{remark}"
        return list(remedies.values())[:3]

    def __str__(self) -> str:
        advice = self.advice()
        fits = [f"it does not fit ({100 * RESERVE:g} % of each stay free)", *advice]
        lines = [
            *self._table_lines(),
            *self.machine.free_bytes_notes,
            *(fits if advice else ["it fits"]),
        ]
        return "\n".join([*lines, *self._prediction_lines()])

    def _table_lines(self) -> list[str]:
        """Return lines with the bytes of each kind of state on each tier."""
        num_devices = self.model.num_all_devices
        hosts = num_devices // self.model.devices_per_host
        table: dict[str, list[str]] = {"": list(TIERS)}
        for kind in dict.fromkeys(kind for _, kind, _ in self.rows):
            sizes = [
                sum(n for tier, k, n in self.rows if (tier, k) == (where, kind)) for where in TIERS
            ]
            table[kind] = [_gigabytes_text(size) if size else "" for size in sizes]
        table["together"] = [_gigabytes_text(self.bytes_on_tier(tier)) for tier in TIERS]
        if self.placement.is_streamed:
            whole, among = self.storage_equation.bytes_by_tier, (num_devices, hosts, hosts)
            table["MoESys, equation 1"] = [
                _gigabytes_text(round(whole[tier] / parts))
                for tier, parts in zip(TIERS, among, strict=True)
            ]
        table["free"] = [_gigabytes_text(self.machine.free_bytes(tier)) for tier in TIERS]
        if self.machine.shared:
            table["free"][TIERS.index("device")] = "of the host"
        return [
            (
                f"per device, {num_devices} device{'s' * (num_devices > 1)}; host and"
                f" nvme per host, {hosts} host{'s' * (hosts > 1)}"
            ),
            *(
                f"{head:<34}" + "".join(f"{cell:>14}" for cell in row)
                for head, row in table.items()
            ),
        ]

    def _prediction_lines(self) -> list[str]:
        """Return lines with the predicted step time and the figures it assumes."""
        model, machine, lines = self.model, self.machine, list[str]()
        predicted = f"predicted step: {self.step_s():.2f} s"
        if self.placement.is_streamed:
            lines.append(
                f"an expert chosen in a step gets {model.tokens_per_expert:,.0f} tokens; transfers"
                " hide behind computing from"
                f" {math.ceil(self.break_even_tokens_per_expert):,} tokens on"
            )
            predicted += f" ({self.step_s(overlapped=False):.2f} s if nothing overlapped)"
        if model.num_all_devices > 1:
            predicted += (
                f", without the traffic between the {model.num_all_devices} devices, which"
                " --cluster FILE adds"
            )
        lines.append(predicted)
        figures = (
            f"{machine.flops / 1e12:.3g} TFLOP/s, memory {machine.memory_bytes_per_s / 1e9:,.0f}"
            " GB/s"
        )
        figures += "" if machine.shared else f", link {machine.link_bytes_per_s / 1e9:.3g} GB/s"
        return [*lines, f"for devices of {figures} ({machine.source})"]


_ENOUGH = " (enough)"
# with records on NVMe: one checkpoint is durable while the other's records are copied
LEAST_CHECKPOINTS = 2
_LARGER = {
    "device": "devices with more memory",
    "host": "more host memory",
    "nvme": "a larger disk (tiers.path)",
}


class SettingChange(NamedTuple):
    """A setting's new value, with the model and the placement that result."""

    setting: str
    value: object
    model: TrainingSizes
    placement: StatePlacement


def _gigabytes_text(size: int) -> str:
    """Return a number of bytes as text in GB."""
    return f"{size / 1e9:.2f} GB"


def _possible_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield the changes of settings that may save memory, those with the least effect on the run
    first.
    """
    if model.experts_residual_bytes:
        residual_bytes = model.residual_bytes - model.experts_residual_bytes
        again = replace(
            model, residual_bytes=residual_bytes, experts_residual_bytes=0, experts_again=True
        )
        yield SettingChange("remat", "experts", again, place)
    if model.residual_bytes:
        yield SettingChange(
            "remat",
            "layer",
            replace(model, residual_bytes=0, experts_residual_bytes=0, experts_again=False),
            place,
        )
    if model.replicas > 1 and not place.is_streamed:
        for sharding in EXPERT_SHARDINGS[EXPERT_SHARDINGS.index(model.expert_sharding) + 1 :]:
            split = replace(model, expert_sharding=sharding)
            yield SettingChange("comm.shard_experts", sharding, split, place)
    number = model.micro_batches
    while number * 2 <= model.max_micro_batches:
        number *= 2
        smaller = _with_micro_batch_scaled(
            replace(model, micro_batches=number), model.micro_batches / number
        )
        yield SettingChange("gradient_accumulation_steps", number, smaller, place)
    yield from _context_changes(model, place)
    if model.packing > 1:
        yield SettingChange("comm.packing", model.packing // 2, _with_half_packing(model), place)
    yield from _tier_setting_changes(model, place)
    if place.checkpoints > LEAST_CHECKPOINTS:
        fewer = replace(place, checkpoints=LEAST_CHECKPOINTS)
        yield SettingChange("checkpoint.keep", LEAST_CHECKPOINTS, model, fewer)
    yield from _mesh_and_batch_changes(model, place)


def _context_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield changes to more devices per sequence, where each already has one sequence at a time;
    the batch stays, in as many more micro-batches.
    """
    for times in (2, 4, 8, 16):
        context, number = model.context * times, model.micro_batches * times
        shares = model.sequence_length and model.sequence_length % (2 * context) == 0
        if not shares or place.is_streamed or model.num_all_devices % context:
            return
        if model.micro_batches < model.max_micro_batches:
            return
        smaller = _with_micro_batch_scaled(model, 1 / times)
        smaller = replace(
            smaller,
            context=context,
            micro_batches=number,
            max_micro_batches=number,
            working_bytes=max(smaller.working_bytes, model.num_devices * model.sequence_bytes),
        )
        value = f"{context} with gradient_accumulation_steps = {number}"
        yield SettingChange("mesh.context", value, smaller, place)


def _tier_setting_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield changes of `tiers`: to tiers, dtypes, slots and caches that may take less memory."""
    if (
        model.gradient_bytes_per_parameter > 2
        and model.compute_dtype_bytes == 2
        and place.is_streamed
    ):
        yield SettingChange(
            "tiers.gradient_dtype",
            "bfloat16",
            replace(model, gradient_bytes_per_parameter=2),
            place,
        )
    for experts, optimizer in candidate_tier_pairs("auto", "auto"):
        if experts == "device" and place.update == "host":
            continue
        if experts != place.experts and optimizer != place.optimizer:
            both = f"{experts} and tiers.optimizer = {optimizer}"
            yield SettingChange(
                "tiers.experts", both, model, replace(place, experts=experts, optimizer=optimizer)
            )
        elif experts != place.experts:
            yield SettingChange("tiers.experts", experts, model, replace(place, experts=experts))
        elif optimizer != place.optimizer:
            yield SettingChange(
                "tiers.optimizer", optimizer, model, replace(place, optimizer=optimizer)
            )
    if place.is_streamed:
        gradients: Tier = "nvme" if place.gradients == "host" else "host"
        yield SettingChange(
            "tiers.gradients", gradients, model, replace(place, gradients=gradients)
        )
    if place.is_streamed and place.experts != "device" and place.device_layers > 1:
        yield SettingChange("tiers.device_layers", 1, model, replace(place, device_layers=1))
    share = math.ceil(8 * model.peak_active_experts * model.num_devices / model.num_experts) / 8
    if place.is_streamed and place.experts != "device" and share < place.device_experts:
        yield SettingChange(
            "tiers.device_experts", share, model, replace(place, device_experts=share)
        )
    for share in (8, 16, 64):
        cache_bytes = (
            _nvme_bytes_per_parameter(model, place) * model.num_device_expert_parameters // share
        )
        if cache_bytes:
            yield SettingChange(
                "tiers.host_cache_bytes",
                cache_bytes,
                model,
                replace(place, host_cache_bytes=cache_bytes),
            )


def _mesh_and_batch_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield changes to more devices, or to a smaller batch."""
    hosts = model.num_devices * model.packing // model.devices_per_host
    for times in (2, 4, 8, 16):
        devices = model.num_devices * times
        if (
            model.num_experts % devices == 0
            and model.max_micro_batches >= model.micro_batches * times
        ):
            spread = replace(
                model, num_devices=devices, max_micro_batches=model.max_micro_batches // times
            )
            yield SettingChange(
                "mesh.expert_inter",
                f"{hosts * times}, on {devices * model.replicas} devices",
                spread,
                place,
            )
    for times in (2, 4, 8, 16):
        if model.max_micro_batches >= model.micro_batches * times:
            more = _with_replicas(model, times)
            value = f"{more.replicas // more.packing}, on {more.num_all_devices} devices"
            yield SettingChange("mesh.data", value, more, place)
    sequences = model.max_micro_batches
    while sequences // 2 >= model.micro_batches:
        sequences //= 2
        yield SettingChange(
            "batch_size",
            sequences * model.num_all_devices // model.context,
            _with_sequences_per_device(model, sequences),
            place,
        )


def _with_half_packing(model: TrainingSizes) -> TrainingSizes:
    """Return the model with half the experts per device: half the replicas, each with twice the
    tokens.
    """
    half = _with_micro_batch_scaled(model, 2.0)
    return replace(
        half,
        packing=model.packing // 2,
        num_devices=model.num_devices * 2,
        replicas=model.replicas // 2,
        step_tokens=model.step_tokens * 2,
        dense_flops=model.dense_flops * 2,
    )


def _with_replicas(model: TrainingSizes, times: int) -> TrainingSizes:
    """Return the model on `times` as many replicas, which each hold all experts and share the
    step's tokens.
    """
    return replace(
        _with_micro_batch_scaled(model, 1 / times),
        replicas=model.replicas * times,
        step_tokens=model.step_tokens // times,
        dense_flops=model.dense_flops / times,
        max_micro_batches=model.max_micro_batches // times,
    )


def _with_sequences_per_device(model: TrainingSizes, sequences: int) -> TrainingSizes:
    """Return the model with a step of `sequences` sequences per device."""
    share = sequences / model.max_micro_batches
    smaller = _with_micro_batch_scaled(replace(model, max_micro_batches=sequences), share)
    smaller = replace(
        smaller, step_tokens=int(model.step_tokens * share), dense_flops=model.dense_flops * share
    )
    measured_tokens, num_tokens = (m.step_tokens * m.replicas for m in (model, smaller))
    routing = model.chosen_share, model.num_experts, model.num_experts_per_tok
    chosen = scale_chosen_share(*routing, measured_tokens=measured_tokens, num_tokens=num_tokens)
    return replace(smaller, chosen_share=chosen)


def _with_micro_batch_scaled(model: TrainingSizes, share: float) -> TrainingSizes:
    """Return the model with the sizes of a micro-batch multiplied by `share`."""
    return replace(
        model,
        input_bytes=int(model.input_bytes * share),
        working_bytes=int(model.working_bytes * share),
        residual_bytes=int(model.residual_bytes * share),
        experts_residual_bytes=int(model.experts_residual_bytes * share),
        recomputed_bytes=int(model.recomputed_bytes * share),
        logits_bytes=int(model.logits_bytes * share),
    )


def plan_training(
    model: TrainingSizes, placement: StatePlacement, machine: Machine
) -> TrainingPlan:
    """Return the plan with the bytes of every kind of state on every tier."""
    plan = TrainingPlan(model, placement, machine, ())
    return replace(
        plan, rows=tuple((tier, kind, size) for tier, kind, size in _state_rows(plan) if size)
    )


def _nvme_bytes_per_parameter(model: TrainingSizes, place: StatePlacement) -> int:
    """Return the bytes on the tier nvme per expert parameter."""
    kinds = (
        (place.experts, 4),
        (place.optimizer, 8),
        (place.gradients, model.gradient_bytes_per_parameter),
    )
    return sum(size for tier, size in kinds if tier == "nvme") if place.is_streamed else 0


def _save_copy_bytes(model: TrainingSizes, place: StatePlacement) -> int:
    """Return the bytes of host memory that a save needs per device: a copy of its arrays, and a few
    expert records at a time if experts are streamed.
    """
    dense = 12 * model.dense_parameters // model.num_dense_shards
    return dense + 12 * (
        SAVED_AT_ONCE * model.parameters_per_expert
        if place.is_streamed
        else model.num_device_expert_parameters // model.num_expert_shards
    )


def _state_rows(plan: TrainingPlan) -> Iterator[tuple[Tier, str, int]]:
    """Yield (tier, kind of state, bytes), see `TrainingPlan.rows`; some with 0 bytes."""
    model, place = plan.model, plan.placement
    devices, per_host = model.num_devices, model.devices_per_host
    dense_bytes = 4 * WEIGHT_BYTES + _summed_gradient_bytes_per_parameter(model, place)
    yield (
        "device",
        "dense weights, moments, gradients",
        dense_bytes * model.dense_parameters // model.num_dense_shards,
    )
    if model.num_dense_shards > 1:  # the current layer and the next, with their gradients
        layer_bytes = 2 * (model.compute_dtype_bytes + 4)
        yield (
            "device",
            "unsharded dense layers",
            layer_bytes * model.dense_parameters // model.num_layers,
        )
    times = model.micro_batches if place.is_streamed else 1
    yield "device", "activations: inputs of layers", model.input_bytes * times // devices
    yield "device", "activations: in use", model.layer_activation_bytes
    layer = model.num_experts // devices * model.parameters_per_expert
    cast_bytes = (
        0
        if place.is_streamed or model.casts_all_experts_at_once
        else 2 * model.compute_dtype_bytes * layer
    )
    # the loss and the layers' gradients do not coexist: count the larger
    yield (
        "device",
        "logits in use",
        max(0, model.device_logits_bytes - model.layer_activation_bytes - cast_bytes),
    )
    yield "device", "kept for the backward pass", model.residual_bytes * times // devices
    yield "host", "runtime", RUNTIME_BYTES * per_host
    yield "host", "copies for a save", _save_copy_bytes(model, place) * per_host
    if place.is_streamed:
        yield from _streamed_expert_rows(plan)
    else:
        yield from _resident_expert_rows(
            model, _summed_gradient_bytes_per_parameter(model, place), cast_bytes
        )


def _summed_gradient_bytes_per_parameter(model: TrainingSizes, place: StatePlacement) -> int:
    """Return the bytes per parameter of the gradients summed over earlier micro-batches; 0 with one
    micro-batch or with streamed experts.
    """
    return WEIGHT_BYTES if model.micro_batches > 1 and not place.is_streamed else 0


def _resident_expert_rows(
    model: TrainingSizes, summed_bytes_per_parameter: int, cast_bytes: int
) -> Iterator[tuple[Tier, str, int]]:
    """Yield the rows of experts that are all on the device. cast_bytes: of a layer's weights and
    gradients in the compute dtype, if layers are cast one by one.
    """
    sharded = model.num_device_expert_parameters // model.num_expert_shards
    yield "device", "experts: weights", 4 * sharded
    yield "device", "experts: moments", 8 * sharded
    gradient_bytes = summed_bytes_per_parameter + (
        model.compute_dtype_bytes if model.casts_all_experts_at_once else WEIGHT_BYTES
    )
    yield "device", "experts: gradients", gradient_bytes * sharded
    yield "device", "experts: in use", cast_bytes + _unsharded_expert_bytes(model)
    if model.expert_sharding == "optimizer":
        kept = model.compute_dtype_bytes * model.num_device_expert_parameters
        yield "device", "experts: weights gathered for a step", kept
    if model.casts_all_experts_at_once:
        copied = model.num_device_expert_parameters + (
            model.dense_parameters if model.num_all_devices == 1 else 0
        )
        yield "device", "weights in the products' dtype", model.compute_dtype_bytes * copied


def _unsharded_expert_bytes(model: TrainingSizes) -> int:
    """Return the bytes in use if replicas split their experts: float32 gradients of two layers, the
    current one and the one whose gradients are being reduced, and the next layer's weights beside
    the current one's.
    """
    if model.num_expert_shards == 1:
        return 0
    layer = model.num_device_expert_parameters // model.num_layers
    return (2 * WEIGHT_BYTES + 2 * model.compute_dtype_bytes) * layer


def _streamed_expert_rows(plan: TrainingPlan) -> Iterator[tuple[Tier, str, int]]:
    """Yield the rows of experts whose state is on several tiers."""
    model, place, per_host = plan.model, plan.placement, plan.model.devices_per_host
    layer = plan.experts_per_slot * model.parameters_per_expert
    slots = (
        model.num_layers
        if place.experts == "device"
        else min(place.device_layers, model.num_layers)
    )
    on_host = place.update == "host"  # slots then have the compute dtype
    yield (
        "device",
        "experts: weights",
        (model.compute_dtype_bytes if on_host else WEIGHT_BYTES) * slots * layer,
    )
    # Gradients of the current layer and of the layer moving to its tier, and the weights, unless
    # their slots have it, and gradients in the compute dtype. With replicas, the gradients of a
    # third layer are being all-reduced.
    cast_bytes = (2 - on_host) * model.compute_dtype_bytes
    yield (
        "device",
        "experts: in use",
        ((2 + (model.replicas > 1)) * WEIGHT_BYTES + cast_bytes) * layer,
    )
    kinds = (
        (place.experts, "experts: weights", 4, place.checkpoints),
        (place.optimizer, "experts: moments", 8, place.checkpoints),
        (place.gradients, "experts: gradients", model.gradient_bytes_per_parameter, 0),
    )
    saved = -(-model.num_device_expert_parameters // model.replicas)  # replicas share the saving
    for tier, kind, size, checkpoints in kinds:
        if tier != "device":
            yield tier, kind, size * model.num_device_expert_parameters * per_host
        if tier == "nvme":
            yield "nvme", "older versions in checkpoints", checkpoints * size * saved * per_host
    # a checkpoint contains every gradient not yet applied, including those in host memory
    if place.optimizer == "nvme":
        own = (
            place.checkpoints * saved
            + (place.gradients != "nvme") * model.num_device_expert_parameters
        )
        yield (
            "nvme",
            "gradients in checkpoints",
            model.gradient_bytes_per_parameter * own * per_host,
        )
    if "nvme" in (place.experts, place.optimizer, place.gradients):
        yield "host", "cache of records on nvme", plan.host_cache_bytes * per_host


def first_fitting_plan(
    model: TrainingSizes, machine: Machine, placements: list[StatePlacement]
) -> TrainingPlan:
    """Return the plan of the first placement that fits. Raises `ValueError`, with advice for the
    last placement, if none fits.
    """
    plans = [plan_training(model, placement, machine) for placement in placements]
    fitting = [plan for plan in plans if not plan.lacking_bytes]
    if not fitting:
        raise ValueError(
            "tiers = 'auto': no choice of tiers fits. " + "; ".join(plans[-1].advice())
        )
    return fitting[0]


def first_fitting_expert_sharding(
    model: TrainingSizes, machine: Machine, placement: StatePlacement
) -> ExpertSharding | None:
    """Return the first of `EXPERT_SHARDINGS` with which the experts fit the devices; None if none
    does. placement: with experts and optimizer on the device.
    """
    for sharding in EXPERT_SHARDINGS:
        plan = plan_training(replace(model, expert_sharding=sharding), placement, machine)
        if not {"device", "host" if machine.shared else "device"} & plan.lacking_bytes.keys():
            return sharding
    return None


def candidate_tier_pairs(experts: str, optimizer: str) -> list[tuple[Tier, Tier]]:
    """Return the allowed pairs of tiers (experts, optimizer), fastest first: the optimizer's tier
    is never faster than the experts'. A named tier stays fixed; `auto` allows every tier.
    """
    pairs = [(a, b) for a in TIERS for b in TIERS if TIERS.index(b) >= TIERS.index(a)]
    pairs.sort(key=lambda pair: (TIERS.index(pair[0]) + TIERS.index(pair[1]), TIERS.index(pair[0])))
    return [p for p in pairs if experts in ("auto", p[0]) and optimizer in ("auto", p[1])]
