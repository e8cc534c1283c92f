"""How many experts of a layer each of several unlike devices should have: numbers in, plan out.

A step of few tokens takes as long as its experts are read. So of every layer the device that would be done first gets
the next expert, which makes the last one done as early as can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jmoe.config.cluster import DevicesConfig
from jmoe.planning.memory_plan import RESERVE, ModelBytes


@dataclass(frozen=True)
class SegmentPlan:
    """Experts of every layer on each device, in order of the machines; what is read of a layer, and how fast."""

    counts: tuple[int, ...]
    expert_bytes: int
    bytes_per_s: tuple[float, ...]

    @property
    def layer_s(self) -> float:
        """Return how long the slowest device reads all its experts of a layer."""
        return self._slowest(self.counts)

    @property
    def even_layer_s(self) -> float:
        """Return the same if the experts were spread evenly."""
        experts, devices = sum(self.counts), len(self.counts)
        return self._slowest(tuple((n + 1) * experts // devices - n * experts // devices for n in range(devices)))

    def segments(self, num_layers: int) -> list[list[list[int]]]:
        """Return the experts of each device, by device and layer: neighbours, in order."""
        devices, at = [], 0
        for count in self.counts:
            devices.append([list(range(at, at + count)) for _ in range(num_layers)])
            at += count
        return devices

    def _slowest(self, counts: tuple[int, ...]) -> float:
        speeds = zip(counts, self.bytes_per_s, strict=True)
        return max(count * self.expert_bytes / bytes_per_s for count, bytes_per_s in speeds)


def plan_segments(model: ModelBytes, machines: Sequence[DevicesConfig]) -> SegmentPlan:
    """Return how many experts each device should have; `ValueError` naming the machine if they do not fit.

    model: with what one device has beside experts. Every device has room for as many as the fullest one, so that the
    one with the least memory says how many that may be.
    """
    weights = model.weights
    rest_bytes, slot_bytes = model.dense_bytes + model.cache_bytes, weights.num_layers * weights.expert_bytes
    rooms = [(int(one.device_bytes * (1 - RESERVE)) - rest_bytes) // slot_bytes for one in machines]
    room, least = min(rooms), rooms.index(min(rooms))
    speeds = tuple(one.bytes_per_s for one in machines for _ in range(one.devices))
    if room * len(speeds) < weights.num_experts:
        raise ValueError(
            f"machines[{least}].device_bytes = {machines[least].device_bytes}: has room for {max(0, room)} experts of "
            f"every layer beside {rest_bytes} bytes on each device; {len(speeds)} devices hold "
            f"{max(0, room) * len(speeds)} of {weights.num_experts} so"
        )
    counts = [0] * len(speeds)
    for _ in range(weights.num_experts):
        open_ = [n for n, count in enumerate(counts) if count < room]
        counts[min(open_, key=lambda n: (counts[n] + 1) / speeds[n])] += 1
    return SegmentPlan(tuple(counts), weights.expert_bytes, speeds)
