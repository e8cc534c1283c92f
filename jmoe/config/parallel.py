"""The device mesh, and communication between devices. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_unset,
)

ExchangeKind = Literal["flat", "hierarchical", "dedup", "ragged"]
ExchangeChoice = Literal["auto"] | ExchangeKind
EmbeddingKind = Literal["replicated", "columns", "rows"]
EmbeddingChoice = Literal["auto"] | EmbeddingKind
ExpertSharding = Literal["none", "optimizer", "weights"]  # from the most memory to the least
ExpertShardingChoice = Literal["auto"] | ExpertSharding
ScheduleKind = Literal["none", "ready", "fixed", "priority", "chunks", "pipelined"]
# Sizes that a partition of the embedding divides over the devices, in order of preference.
SPLIT_SIZES: dict[EmbeddingKind, tuple[str, ...]] = {
    "columns": ("hidden_size", "vocab_size"),
    "rows": ("vocab_size",),
}


@dataclass(frozen=True)
class MeshConfig:
    """The device mesh: sizes of the axes (data, expert_inter, expert_intra)."""

    data: int = 0  # 0: the number of devices divided by the other two sizes
    expert_inter: int = 1  # across nodes
    # inside a node; 0: the devices of a host, so that expert_inter counts hosts
    expert_intra: int = 1
    # neighbouring devices, in the order of the mesh, that share each sequence: the context. 0: one,
    # or the fewest with which batch_size reaches all devices
    context: int = 0
    # copies of the state (torchtitan's data_parallel_replicate_degree), a part of the data axis:
    # each copy is sharded over the neighbouring devices of one data / replicate-th of the axis, and
    # gradients are summed over the copies once in a step
    replicate: int = 1

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "data", "expert_intra", "context")
        check_positive(self, "expert_inter", "replicate")

    def resolve_shape(self, num_devices: int, devices_per_host: int) -> tuple[int, int, int]:
        """Return the mesh shape (data, expert_inter, expert_intra) for `num_devices` devices.

        Raises ValueError if the axes do not multiply to the number of devices.
        """
        intra = self.expert_intra or devices_per_host
        check(
            intra > 0,
            "mesh.expert_intra",
            self.expert_intra,
            "needs hosts of one number of devices",
        )
        data = self.data or num_devices // (self.expert_inter * intra)
        name = "mesh.(data, expert_inter, expert_intra)"
        value = (data, self.expert_inter, intra)
        check(
            math.prod(value) == num_devices,
            name,
            value,
            f"must multiply to the {num_devices} devices",
        )
        constraint = f"must divide mesh.data = {data}"
        check(data % self.replicate == 0, "mesh.replicate", self.replicate, constraint)
        return value


def packed_shape(shape: tuple[int, int, int], packing: int) -> tuple[int, int, int]:
    """Return the mesh shape (data, expert_inter, expert_intra) with `packing` times as many experts
    per device: smaller expert axes, a larger data axis. Raises ValueError if the expert axes cannot
    be divided so.

    The inter-node axis shrinks first, so that a group of devices that shares the experts spans
    fewer nodes. The order of devices, and so the rows of a batch on each device, stay the same.
    """
    data, inter, intra = shape
    nodes = math.gcd(inter, packing)
    constraint = f"must divide mesh.expert_inter x mesh.expert_intra = {inter} x {intra}"
    check(intra % (packing // nodes) == 0, "comm.packing", packing, constraint)
    return data * packing, inter // nodes, intra // (packing // nodes)


def largest_packing(shape: tuple[int, int, int]) -> int:
    """Return the largest power of two that `packed_shape` accepts as packing."""
    _, inter, intra = shape
    return (inter & -inter) * (intra & -intra)


@dataclass(frozen=True)
class CommConfig:
    """Communication between devices: how tokens, parameters and gradients are exchanged."""

    # how tokens are sent to the devices of their experts; dedup: a token is sent once to each node;
    # ragged: like flat, but only the rows that there are, where flat fills buffers of one size;
    # auto: the fastest by the links, ragged where GPUs of a process are measured to be faster so
    exchange: ExchangeChoice = "auto"
    schedule: ScheduleKind = "chunks"  # the order of collectives, see `collectives.schedule`
    exchange_chunks: int = 0  # schedule = pipelined: pieces of each all-to-all; 0: two
    # TOML file of the links from which exchange = auto is planned; empty: several processes measure
    # their links
    links: str = ""
    # sharding of the embedding table. columns, rows: each device keeps and looks up its own shard;
    # replicated: handled like any dense parameter
    embedding: EmbeddingChoice = "auto"
    # what the devices of the data axis split, of experts that they would else all hold. none:
    # nothing; optimizer: float32 weights, moments and gradients, while each device keeps the
    # weights in the compute dtype from the forward to the backward pass; weights: these too, each
    # layer's gathered anew for either pass. auto: the first that fits the devices' memory
    shard_experts: ExpertShardingChoice = "auto"
    # multiplies the experts that the mesh gives each device; auto: doubled while all-to-alls take
    # longer than the experts' computation (Lina)
    packing: Literal["auto"] | int = 1
    # steps after which experts change their devices so that all get similar numbers of tokens; 0:
    # experts stay where they are
    balance_every_steps: int = 0
    # piece size of a gather or reduction, between whose pieces all-to-alls can run; 0: the size
    # that takes 20 ms, measured
    chunk_bytes: int = 0
    # bytes of dense parameters' float32 gradients that are reduced in one collective; 0: one
    # layer's. The schedules chunks and pipelined split the collective further, by chunk_bytes
    bucket_bytes: int = 0
    # what the papers' figures compare with: presets of `configs/ablations.py` set these, the
    # command line does not
    # gathers and reductions of dense parameters cross between nodes once, then go on inside
    hierarchical: bool = True
    # ZeRO-3: dense parameters and their optimizer state sharded over all devices
    shard_dense: bool = True
    # gather a layer's dense parameters as one buffer, one layer ahead; False: one by one
    fuse_dense: bool = True

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(
            self, "balance_every_steps", "bucket_bytes", "chunk_bytes", "exchange_chunks"
        )
        if self.exchange_chunks:
            constraint = (
                f"must be 0 with schedule = {self.schedule!r}: only pipelined cuts all-to-alls"
            )
            check_field(self.schedule == "pipelined", self, "exchange_chunks", constraint)
            check_field(
                self.exchange_chunks > 1, self, "exchange_chunks", "must be at least 2, or 0"
            )
        whole = self.exchange != "ragged" or self.schedule != "pipelined"
        constraint = "must not be pipelined with exchange = 'ragged': its rows go in one piece"
        check_field(whole, self, "schedule", constraint)
        constraint = (
            f"must be empty with exchange = {self.exchange!r}: only auto is planned for them"
        )
        check_field(not self.links or self.exchange == "auto", self, "links", constraint)
        ordered = self.schedule == "none" or self.fuse_dense or not self.shard_dense
        constraint = (
            "must be none with fuse_dense = False: every parameter is gathered and reduced by"
            " itself"
        )
        check_field(ordered, self, "schedule", constraint)
        buckets = not self.bucket_bytes or self.fuse_dense or not self.shard_dense
        constraint = "must be 0 with fuse_dense = False: every parameter is reduced by itself"
        check_field(buckets, self, "bucket_bytes", constraint)
        one_by_one = self.shard_dense and not self.fuse_dense
        constraint = "must be none with fuse_dense = False"
        replicated = self.expert_sharding == "none" or not one_by_one
        check_field(replicated, self, "shard_experts", constraint)
        if self.schedule not in ("chunks", "pipelined"):
            check_unset(
                self,
                "comm",
                ["chunk_bytes"],
                f"with comm.schedule = {self.schedule!r}: nothing goes in chunks",
            )
        packing = self.packing
        power = (
            isinstance(packing, int)
            and not isinstance(packing, bool)
            and packing > 0
            and not packing & (packing - 1)
        )
        check(packing == "auto" or power, "packing", packing, "must be a power of two, or auto")

    @property
    def expert_sharding(self) -> ExpertSharding:
        """The part of expert states that the data axis splits: `shard_experts`; none while `auto`
        is not yet chosen (`run.planner.with_chosen_expert_sharding`).
        """
        return "none" if self.shard_experts == "auto" else self.shard_experts

    @property
    def initial_packing(self) -> int:
        """The packing (see `packed_shape`) with which a run begins; 1 for `auto`."""
        return 1 if self.packing == "auto" else self.packing
