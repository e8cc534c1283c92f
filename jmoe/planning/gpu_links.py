"""Collectives of an optimized HLO module, and their predicted time on the links between GPUs. Pure
functions, used by `jmoe.planning.gpu_estimate`.
"""

import math
import re
from dataclasses import dataclass

from jmoe.config.cluster import NetworkConfig
from jmoe.planning.hlo import HloComputation, HloModule, HloOperation

# NVLink of an H100 (DGX H100: 900 GB/s both ways); a 400 Gbit/s adapter for each GPU
GPU_LINKS = NetworkConfig(450e9, 50e9)
GPUS_PER_NODE = 8

_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ALL_TO_ALLS = ("ragged-all-to-all", "all-to-all", "collective-permute")
_GROUPS = re.compile(r"replica_groups=\{\{(.*?)\}\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_SYNCHRONOUS = '"is_sync":true'  # what XLA writes into the start of such a collective
_PAIRS = re.compile(r"source_target_pairs=\{\{(.*?)\}\}")

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """A collective operation over groups of devices. held_bytes: bytes of the operands on each
    device. is_synchronous: XLA lets nothing run beside it, even if it has a start and an end.
    """

    kind: str
    groups: Groups
    held_bytes: float
    is_synchronous: bool = False

    @property
    def label(self) -> str:
        """Its kind and the devices of a group: "all-gather of 8"."""
        return f"{self.kind} of {len(self.groups[0])}" if self.groups else self.kind

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each device sends."""
        n = len(self.groups[0]) if self.groups else 1
        if self.kind == "all-gather":
            return self.held_bytes * (n - 1)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.held_bytes
        return self.held_bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)

    def _num_local(self, devices_per_node: int) -> int:
        """Return how many devices of a group are on its first device's node."""
        nodes = [device // devices_per_node for device in (self.groups or ((0,),))[0]]
        return nodes.count(nodes[0])

    def away_bytes(self, devices_per_node: int) -> float:
        """Return the bytes that each device sends to other nodes.

        In a ring, bytes leave a node once for all of its devices; in an all-to-all, each device
        sends to every remote peer.
        """
        n, local = len((self.groups or ((0,),))[0]), self._num_local(devices_per_node)
        if n == 1:
            return 0.0
        away_bytes = self.sent_bytes * (n - local) / (n - 1)
        return away_bytes if self.kind in _ALL_TO_ALLS else away_bytes / local

    def duration_s(self, links: NetworkConfig, devices_per_node: int) -> float:
        """Return the seconds of the collective alone: the longer of the traffic inside nodes and
        between nodes, plus a latency.
        """
        n, local = len((self.groups or ((0,),))[0]), self._num_local(devices_per_node)
        if n == 1:
            return 0.0
        away_bytes = self.away_bytes(devices_per_node)
        inside_s = (self.sent_bytes - away_bytes) / links.inside_bytes_per_s
        latency_s = links.inside_latency_s if local == n else links.between_latency_s
        return max(inside_s, away_bytes / links.between_bytes_per_s) + latency_s


def collective_of(
    module: HloModule, computation: HloComputation, operation: HloOperation
) -> Collective | None:
    """Return the collective that an operation runs or starts, or None."""
    kind = operation.kind.removesuffix("-start")
    attributes = [operation.attributes]
    if kind == "async":
        inner = module.called_computation(operation, "calls").root
        kind, attributes = inner.kind, [*attributes, inner.attributes]
    elif called := module.computations.get(operation.attribute("calls")):
        attributes += [inner.attributes for inner in called.values()]
    if kind not in _KINDS:
        return None
    operands = [computation[name] for name in operation.operands]
    groups = next((groups for text in attributes if (groups := replica_groups(text))), ())
    is_synchronous = any(_SYNCHRONOUS in text for text in attributes)
    if kind == "ragged-all-to-all":  # rows and the buffer they go to, of which one has spare rows
        held_bytes = min(operand.num_bytes for operand in operands[:2])
    else:
        held_bytes = sum(operand.num_bytes for operand in operands)
    return Collective(kind, groups, held_bytes, is_synchronous)


def replica_groups(attributes: str) -> Groups:
    """Return the groups of device numbers in a collective's attributes; () if they are missing or
    split a mesh axis.
    """
    if match := _PAIRS.search(attributes) or _GROUPS.search(attributes):
        return tuple(tuple(int(n) for n in group.split(",")) for group in match[1].split("},{"))
    if match := _COUNTED_GROUPS.search(attributes):
        shape, counted, order = (
            [int(n) for n in text.split(",")] if text else [] for text in match.groups()
        )
        numbers, size = _transposed_numbers(counted, order or list(range(len(counted)))), shape[-1]
    # the named mesh axes are the ones along which the devices of a group differ
    elif match := _MESH_GROUPS.search(attributes):
        axes = _MESH_AXIS.findall(match[1])
        joined = [f"'{name}'" in match[2].split(",") for name, _ in axes]
        sizes = [int(size) for _, size in axes]
        outer, inner = (
            [n for n, is_joined in enumerate(joined) if is_joined == which]
            for which in (False, True)
        )
        numbers, size = (
            _transposed_numbers(sizes, outer + inner),
            math.prod(sizes[n] for n in inner),
        )
        if len(inner) != len(match[2].split(",")):  # a group covers only part of an axis
            return ()
    else:
        return ()
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def _transposed_numbers(shape: list[int], order: list[int]) -> list[int]:
    """Return the numbers 0, 1, 2, … of an array of this shape, in the order of its transpose."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    numbers = [0]
    for axis in order:
        numbers = [start + i * strides[axis] for start in numbers for i in range(shape[axis])]
    return numbers
