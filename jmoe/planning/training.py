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
from typing import NamedTuple

from jmoe.config.tiers import TIERS, Tier
from jmoe.planning.memory_plan import RESERVE
from jmoe.planning.setting_changes import possible_changes
from jmoe.planning.state_bytes import (
    nvme_bytes_per_parameter,
    resident_expert_rows,
    save_copy_bytes,
    summed_gradient_bytes_per_parameter,
)
from jmoe.planning.storage_equation import StorageEquation
from jmoe.planning.training_sizes import (
    WEIGHT_BYTES,
    Machine,
    StatePlacement,
    TrainingSizes,
    gigabytes_text,
)

RUNTIME_BYTES = 600_000_000  # Python, JAX and compiled programs, in host memory
PASSES = 3  # products of a weight with a token: one forward, two backward
# memory traffic of a parameter's update: weight, gradient and moments are read, all but the
# gradient written
ADAMW_BYTES = 28
# the same on the host, without gradient and copies
HOST_ADAMW_BYTES = 24


class ExpertTraffic(NamedTuple):
    """Bytes moved for one expert: from host to device and back, read from NVMe, and written to
    NVMe.
    """

    to_device_bytes: float = 0.0
    from_device_bytes: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    @property
    def link_bytes(self) -> float:
        """Return the bytes between device and host, of both directions."""
        return self.to_device_bytes + self.from_device_bytes


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
            nvme_bytes_per_parameter(self.model, self.placement)
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
            return ExpertTraffic(), ExpertTraffic()
        bytes_per_parameter = 4, 8, model.gradient_bytes_per_parameter
        weights, moments, gradients = (n * model.parameters_per_expert for n in bytes_per_parameter)
        kinds = ((place.experts, weights), (place.optimizer, moments), (place.gradients, gradients))
        on_disk = nvme_bytes_per_parameter(model, place) * model.num_device_expert_parameters
        missed = 1 - self.host_cache_bytes / on_disk if on_disk else 0.0
        again = self._share_sent_again

        def traffic_of(times: Sequence[tuple[float, float]]) -> ExpertTraffic:
            """Return the bytes moved in a pass for one expert's weights, moments and gradients;
            times: for each of the three, how often it comes to the device and how often it leaves.
            """
            to = back = read = written = 0.0
            for (tier, size), (comes, goes) in zip(kinds, times, strict=True):
                to += size * comes * (tier != "device")
                back += size * goes * (tier != "device")
                read += size * comes * missed * (tier == "nvme")
                written += size * goes * missed * (tier == "nvme")
            return ExpertTraffic(to, back, read, written)

        forward = traffic_of([(1, 1), (1, 1), (1, 0)])
        back = traffic_of([(again, 0), (0, 0), (0, 1)])
        if place.update == "host":
            sent = model.compute_dtype_bytes * model.parameters_per_expert
            forward = forward._replace(to_device_bytes=sent, from_device_bytes=0)
            back = back._replace(to_device_bytes=again * sent, from_device_bytes=gradients)
        return forward, back

    @property
    def link_bytes_in_series_by_pass(self) -> tuple[float, float]:
        """Return the bytes of one expert that cross the link one after the other, (forward,
        backward).

        If the host updates, weights go to the device while gradients return: the longer direction.
        An update on the device moves an expert there and back before the next one.
        """
        longest = max if self.placement.update == "host" else operator.add
        forward, back = (
            longest(traffic.to_device_bytes, traffic.from_device_bytes)
            for traffic in self.expert_traffic_by_pass()
        )
        return forward, back

    @property
    def _share_sent_again(self) -> float:
        """Return the share of the layers whose weights go to the device again in the backward pass:
        those of the last layers are still there.
        """
        return 1 - min(1.0, self.placement.device_layers / self.model.num_layers)

    @property
    def device_update_bytes(self) -> int:
        """Return the bytes that a device's memory moves per parameter of an expert that the device
        updates: those of AdamW, and those of weights and moments that come from another tier and
        return to it.
        """
        place = self.placement
        of_records = 2 * (place.experts != "device") + 4 * (place.optimizer != "device")
        return ADAMW_BYTES + WEIGHT_BYTES * of_records

    @property
    def host_bytes_by_pass(self) -> tuple[float, float]:
        """Return the bytes that the host's memory moves per parameter of a chosen expert if the
        host updates it, (forward, backward).

        Forward: AdamW, which also reads the gradient and writes a copy in the compute dtype, and
        the link, which reads the copy. Backward: the gradient arrives and is copied to its record,
        and weights are copied and sent again.
        """
        sent, gradient = self.model.compute_dtype_bytes, self.model.gradient_bytes_per_parameter
        forward = HOST_ADAMW_BYTES + gradient + 2 * sent
        return forward, 3 * gradient + self._share_sent_again * (WEIGHT_BYTES + 2 * sent)

    @property
    def expert_transfer_s_by_pass(self) -> tuple[float, float]:
        """Return the seconds of one expert's transfers, (forward, backward), each on the slowest of
        link, disk and, for an update on the host, the host's memory.
        """
        machine, per_host, seconds = self.machine, self.model.devices_per_host, list[float]()
        passes = zip(
            self.expert_traffic_by_pass(),
            self.link_bytes_in_series_by_pass,
            self.host_bytes_by_pass,
            strict=True,
        )
        for traffic, link_bytes, of_parameter in passes:
            over_link = 0.0 if machine.shared else link_bytes / machine.link_bytes_per_s
            disk = traffic.read_bytes / machine.nvme_read_bytes_per_s
            disk += traffic.written_bytes / machine.nvme_write_bytes_per_s
            by_host = 0.0
            if self.placement.update == "host" and not machine.shared:
                updated_bytes = of_parameter * self.model.parameters_per_expert
                by_host = updated_bytes / machine.host_memory_bytes_per_s
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
        updated_bytes = ADAMW_BYTES * model.dense_parameters / model.num_dense_shards
        if self.placement.update == "device":
            of_experts = self.device_update_bytes * num_active * model.parameters_per_expert
            updated_bytes += of_experts / model.num_expert_shards
        elif machine.shared:  # the host's cores are those that compute
            of_parameter = sum(self.host_bytes_by_pass)
            updated_bytes += of_parameter * num_active * model.parameters_per_expert
        passes = zip(self.expert_products_by_pass, self.dense_products_by_pass, strict=True)
        flops = (experts * expert_flops + dense * dense_flops for experts, dense in passes)
        forward, back = (n / model.num_devices / machine.flops for n in flops)
        update_s = updated_bytes / machine.memory_bytes_per_s
        update_s += model.update_flops / model.num_devices / machine.flops
        return forward + update_s, back

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
        lack, most = gigabytes_text(self.lacking_bytes[tier]), gigabytes_text(sizes[by_size[0]])
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
        for setting, value, model, place in possible_changes(self.model, self.placement):
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
                    else f" ({gigabytes_text(saved)} less)"
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
            table[kind] = [gigabytes_text(size) if size else "" for size in sizes]
        table["together"] = [gigabytes_text(self.bytes_on_tier(tier)) for tier in TIERS]
        if self.placement.is_streamed:
            whole, among = self.storage_equation.bytes_by_tier, (num_devices, hosts, hosts)
            table["MoESys, equation 1"] = [
                gigabytes_text(round(whole[tier] / parts))
                for tier, parts in zip(TIERS, among, strict=True)
            ]
        table["free"] = [gigabytes_text(self.machine.free_bytes(tier)) for tier in TIERS]
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


def plan_training(
    model: TrainingSizes, placement: StatePlacement, machine: Machine
) -> TrainingPlan:
    """Return the plan with the bytes of every kind of state on every tier."""
    plan = TrainingPlan(model, placement, machine, ())
    return replace(
        plan, rows=tuple((tier, kind, size) for tier, kind, size in _state_rows(plan) if size)
    )


def _state_rows(plan: TrainingPlan) -> Iterator[tuple[Tier, str, int]]:
    """Yield (tier, kind of state, bytes), see `TrainingPlan.rows`; some with 0 bytes."""
    model, place = plan.model, plan.placement
    devices, per_host = model.num_devices, model.devices_per_host
    dense_bytes = 2 * WEIGHT_BYTES + model.dense_moment_bytes
    dense_bytes += summed_gradient_bytes_per_parameter(model, place)
    yield (
        "device",
        "dense weights, moments, gradients",
        int(dense_bytes * model.dense_parameters) // model.num_dense_shards,
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
    yield "host", "copies for a save", save_copy_bytes(model, place) * per_host
    if place.is_streamed:
        yield from _streamed_expert_rows(plan)
    else:
        yield from resident_expert_rows(
            model, summed_gradient_bytes_per_parameter(model, place), cast_bytes
        )


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
