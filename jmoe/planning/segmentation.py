"""Division of a model's layers and experts over devices of different speed and memory, for the
shortest step. Pure functions.

Devices form groups, and a layer lies on the devices of one group: all devices (split by experts), a
single device (split by layers), or the devices of one machine (both). In a step of few tokens, each
layer takes the time to read its experts, plus the time to send tokens there and back. Axis legend:

N  devices
L  layers with experts
E  experts of a layer
K  experts per token
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jmoe.config.cluster import DevicesConfig, MachinesConfig, NetworkConfig
from jmoe.planning.memory_plan import RESERVE, ModelBytes

SegmentBy = Literal["experts", "layers", "both"]
SPLITS: tuple[SegmentBy, ...] = ("experts", "layers", "both")


@dataclass(frozen=True)
class StepTokens:
    """Number of tokens in a step, over all devices, and the bytes of one token sent to an
    expert.
    """

    count: int
    token_bytes: int


@dataclass(frozen=True)
class LayerPlace:
    """A possible place of a layer.

    experts_N: number of its experts on each device. read_s: seconds until the last device has read
    its experts. link_s: seconds to send tokens there and back. layers: number of layers placed
    here.
    """

    experts_N: tuple[int, ...]
    read_s: float
    link_s: float
    layers: int = 0

    @property
    def layer_s(self) -> float:
        return self.read_s + self.link_s


@dataclass(frozen=True)
class SegmentPlan:
    """A split: its places in layer order, each with the number of layers in a row that lie there.

    device_bytes: bytes of weights and KV cache that each device needs, the same for all.
    """

    by: SegmentBy
    places: tuple[LayerPlace, ...]
    device_bytes: int

    @property
    def read_s(self) -> float:
        """Return the seconds of a step spent reading experts."""
        return sum(place.layers * place.read_s for place in self.places)

    @property
    def link_s(self) -> float:
        """Return the seconds of a step spent sending tokens."""
        return sum(place.layers * place.link_s for place in self.places)

    @property
    def step_s(self) -> float:
        return self.read_s + self.link_s

    def segments(self) -> list[list[list[int]]]:
        """Return the experts of each device and layer, indexed [device][layer]; each is a range of
        neighbouring experts.
        """
        devices: list[list[list[int]]] = [[] for _ in self.places[0].experts_N]
        for place in self.places:
            for _ in range(place.layers):
                first = 0
                for device, count in zip(devices, place.experts_N, strict=True):
                    device.append(list(range(first, first + count)))
                    first += count
        return devices


def plan_segments(
    model: ModelBytes, described: MachinesConfig, tokens: StepTokens, by: SegmentBy | None = None
) -> SegmentPlan:
    """Return the division of layers and experts over devices. Raises `ValueError`, naming the
    machine, if they do not fit.

    model: with one device's bytes of dense weights and KV cache. by: kind of split; None selects
    the feasible split with the shortest step.
    """
    plans, errors = [], []
    for split in SPLITS if by is None else (by,):
        try:
            plans.append(_plan_segments_by(model, described, tokens, split))
        except ValueError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda plan: plan.step_s)


def _plan_segments_by(
    model: ModelBytes, described: MachinesConfig, tokens: StepTokens, by: SegmentBy
) -> SegmentPlan:
    """Return the plan of one kind of split with the shortest step. Raises `ValueError` if none
    fits.

    Every device has as many expert slots as the fullest device needs. Layers of different groups
    share slots: the first layer of each group uses the same slots as the other groups' first
    layers, and so on.
    """
    machines, weights = described.machines, model.weights
    rest_bytes = model.dense_bytes + model.cache_bytes
    capacities = [
        (int(one.device_bytes * (1 - RESERVE)) - rest_bytes) // weights.expert_bytes
        for one in machines
    ]
    capacity, least = max(0, min(capacities)), capacities.index(min(capacities))
    groups, most = _device_groups(machines, by), weights.num_experts
    possible: list[tuple[float, int, tuple[LayerPlace, ...]]] = []
    for cap in range(-(-most // max(map(len, groups))), most + 1):
        dealt = [
            _place_layer(model, described, tokens, group, cap)
            for group in groups
            if len(group) * cap >= most
        ]
        places = _distribute_layers(dealt, weights.num_layers, capacity // cap)
        if places:
            slots = max(place.layers for place in places) * max(
                max(place.experts_N) for place in places
            )
            possible.append((sum(place.layers * place.layer_s for place in places), slots, places))
        if all(max(place.experts_N) < cap for place in dealt):
            break  # a larger cap would change nothing
    if not possible:
        raise ValueError(
            f"machines[{least}].device_bytes = {machines[least].device_bytes}: has room for"
            f" {capacity} experts beside {rest_bytes} bytes on each device;"
            f" {sum(map(len, groups))} devices with as much do not hold {weights.num_layers} layers"
            f" of {most} experts by {by}"
        )
    _, slots, places = min(possible, key=lambda one: one[:2])
    return SegmentPlan(by, places, slots * weights.expert_bytes + rest_bytes)


def _device_groups(machines: Sequence[DevicesConfig], by: SegmentBy) -> list[list[int]]:
    """Return the groups of devices (numbered through all machines) that can share a layer:
    all of them, each one alone, or those of each machine.
    """
    ends = [sum(one.devices for one in machines[: n + 1]) for n in range(len(machines))]
    if by == "experts":
        return [list(range(ends[-1]))]
    if by == "layers":
        return [[device] for device in range(ends[-1])]
    return [list(range(end - one.devices, end)) for one, end in zip(machines, ends, strict=True)]


def _distribute_layers(
    places: Sequence[LayerPlace], num_layers: int, most_per_place: int
) -> tuple[LayerPlace, ...]:
    """Return the places with their numbers of layers: at most `most_per_place` each, the fastest
    places first, equal numbers on equally fast ones.

    Returns () if `num_layers` do not fit. Layers run one after another, so spreading them over
    places gains no time.
    """
    if len(places) * most_per_place < num_layers:
        return ()
    counts, left = [0] * len(places), num_layers
    rounded = [float(f"{place.layer_s:.6g}") for place in places]
    for layer_s in sorted(set(rounded)):
        alike = [n for n, other in enumerate(rounded) if other == layer_s]
        dealt = min(left, most_per_place * len(alike))
        for at, n in enumerate(alike):
            counts[n] = (at + 1) * dealt // len(alike) - at * dealt // len(alike)
        left -= dealt
    return tuple(
        replace(place, layers=count) for place, count in zip(places, counts, strict=True) if count
    )


def _place_layer(
    model: ModelBytes,
    described: MachinesConfig,
    tokens: StepTokens,
    group: Sequence[int],
    most_experts: int,
) -> LayerPlace:
    """Return the place of a layer on a group of devices with at most `most_experts` experts each.

    Each expert goes to the device that would finish reading it first.
    """
    speeds = [one.bytes_per_s for one in described.machines for _ in range(one.devices)]
    experts_N = [0] * len(speeds)
    for _ in range(model.weights.num_experts):
        open_ = [n for n in group if experts_N[n] < most_experts]
        experts_N[min(open_, key=lambda n: (experts_N[n] + 1) / speeds[n])] += 1
    read_s = max(
        n * model.weights.expert_bytes / speed for n, speed in zip(experts_N, speeds, strict=True)
    )
    link_s = 0.0
    if described.network is not None:
        sizes = [one.devices for one in described.machines]
        needed_N = [
            _reached_token_share(n, model.weights.num_experts, model.weights.num_experts_per_tok)
            for n in experts_N
        ]
        link_s = 2 * _token_transfer_s(needed_N, sizes, described.network, tokens)
    return LayerPlace(tuple(experts_N), read_s, link_s)


def _reached_token_share(experts: int, num_experts: int, k: int) -> float:
    """Return the fraction of tokens that choose at least one of `experts` experts under uniform
    routing.
    """
    return 1 - math.comb(num_experts - experts, k) / math.comb(num_experts, k)


def _token_transfer_s(
    needed_N: Sequence[float], sizes: Sequence[int], network: NetworkConfig, tokens: StepTokens
) -> float:
    """Return the seconds to send tokens, one way, to the devices that need them. Tokens are evenly
    spread over devices at first.

    needed_N: fraction of the tokens that each device needs. sizes: devices of each machine.
    """
    # own_bytes: of the tokens of one device
    own_bytes, first = tokens.count * tokens.token_bytes / len(needed_N), 0
    inside = between = 0.0
    for size in sizes:
        here, others = needed_N[first : first + size], len(needed_N) - size
        for needed in here:
            inside = max(inside, own_bytes * (sum(here) - needed), own_bytes * (size - 1) * needed)
        sent = own_bytes * size * (sum(needed_N) - sum(here))
        received = own_bytes * others * sum(here)
        between = max(between, sent, received)
        first += size
    latency_s = network.between_latency_s if len(sizes) > 1 else network.inside_latency_s
    return latency_s + max(
        inside / network.inside_bytes_per_s, between / network.between_bytes_per_s
    )
