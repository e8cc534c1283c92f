"""Opens the experts of a served checkpoint: device slots, the tiers below them, and the residency
policy.

`inference/loading.py` calls `open_experts` for one device and `open_placed_experts` for a mesh.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from jmoe.config import check
from jmoe.memory.buffers import Allocate, allocate_slots
from jmoe.memory.direct_io import UNWRITABLE
from jmoe.memory.pinned import choose_host_allocator
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords, RecordStore
from jmoe.memory.slot_table import HitCounts, RecordRanks
from jmoe.memory.tiered_store import LinkName, TieredStore
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.host_experts import HostExperts, HybridExperts
from jmoe.offload.layer_ring import LayerRing
from jmoe.offload.mesh_chosen import MeshChosenExperts
from jmoe.offload.mesh_hybrid import MeshHybridExperts
from jmoe.offload.mesh_ring import MeshRing
from jmoe.offload.placed_experts import (
    MeshExperts,
    PlacedExperts,
    ReadRecord,
    even_placement,
    expert_numbers_by_local_device,
)
from jmoe.offload.policies import AllResident, ChosenExperts, Residency
from jmoe.offload.slots import DeviceSlots, ExpertSlots, HostSlots
from jmoe.planning.memory_plan import MemoryPlan
from jmoe.planning.placement import Placement

PACK_FOLDER = "jmoe_experts"

log = logging.getLogger("jmoe")


def open_experts(  # noqa: PLR0913  what the engine's options say
    checkpoint: LazyCheckpoint,
    plan: MemoryPlan,
    *,
    cache_dir: str | os.PathLike[str] | None,
    bandwidth_limit_bytes_per_s: Mapping[LinkName, float] | None,
    native: bool = False,
    activations: Literal["exact", "int8", "fp8"] = "exact",
    on_host: bool = False,
    pin: Literal["auto", "on", "off"] = "auto",
    make_ranks: Callable[[int], RecordRanks] = HitCounts,
) -> tuple[Residency, TieredStore | None]:
    """Return (residency policy, store), with the experts loaded as the plan says, for one device.

    The store is None if all experts are on the device. native: use native CPU operations for few
    tokens. activations: how the experts' inputs are rounded, see `EngineConfig`.
    on_host: the CPU may compute experts in host memory, which is then not pinned. pin: whether to
    pin host memory (`memory.pinned.choose_host_allocator`). bandwidth_limit_bytes_per_s: by link,
    see `TieredStore`; make_ranks: of the cache, see there.

    Raises `ValueError` if the plan's policy is hybrid and no native operation takes the experts.
    """
    fields = checkpoint.expert_fields
    device = jax.devices()[0]
    index = ExpertIndex.from_model(checkpoint.config)
    rounding = {"fp8_inputs": activations == "fp8"}
    slots: ExpertSlots
    if device.platform == "cpu":
        is_int8 = activations == "int8"
        slots = HostSlots(
            plan.expert_slots, fields, native=native, int8_activations=is_int8, **rounding
        )
    else:
        slots = DeviceSlots(plan.expert_slots, fields, device, **rounding)
    if plan.policy == "resident":
        record = {name: np.empty(shape, dtype) for name, (shape, dtype) in fields.items()}
        for number in range(index.num_records):
            checkpoint.fill_expert(*index.layer_and_expert_of(number), record)
            slots.write(number, record)
        return AllResident(slots, index), None
    memory = choose_host_allocator(
        "off" if on_host and plan.expert_tier == "host" else pin, "pin_host_memory", [device]
    )
    log.info("experts off the device: %s", memory.note)
    limits = bandwidth_limit_bytes_per_s
    tier = ExpertTier.of_engine(plan, checkpoint, cache_dir)
    store = open_expert_store(
        checkpoint, index, tier, limits, allocate=memory.allocate, make_ranks=make_ranks
    )
    if plan.policy == "ring":
        return LayerRing(slots, store, index, plan.ring_slots), store
    if on_host and plan.expert_tier == "host" and store.host_records is not None:
        host = HostExperts(store.host_records, fields, checkpoint.dtype)
        if host.is_known:
            return HybridExperts(slots, store, index, host), store
        host.close()
        _check_host_supports(host, plan, checkpoint)
    finds = slots.native is not None and slots.native.supports(1, checkpoint.dtype)
    return ChosenExperts(slots, store, index, finds=finds), store


def open_placed_experts(  # noqa: PLR0913  what the engine's options say
    checkpoint: LazyCheckpoint,
    plan: MemoryPlan,
    mesh: Mesh,
    *,
    cache_dir: str | os.PathLike[str] | None,
    bandwidth_limit_bytes_per_s: Mapping[LinkName, float] | None,
    placements: Sequence[Placement] | None = None,
    on_host: bool = False,
    pin: Literal["auto", "on", "off"] = "auto",
    make_ranks: Callable[[int], RecordRanks] = HitCounts,
) -> tuple[MeshExperts, TieredStore | None]:
    """Return (experts on a mesh, store), with the experts loaded as the plan says.

    The store is None if the experts come directly from the checkpoint. placements: one per layer,
    permanent; None means even placement. on_host: the CPU may compute experts in host memory, which
    is then not pinned. pin: whether to pin the host memory of each device's streamed experts
    (`memory.pinned.choose_host_allocator`). make_ranks: see `TieredStore`.

    Raises `ValueError` if the plan's policy is hybrid and no native operation takes the experts.
    """
    index, fields = ExpertIndex.from_model(checkpoint.config), checkpoint.expert_fields
    limits = bandwidth_limit_bytes_per_s
    if plan.policy != "resident":
        placement, layers = even_placement(index.num_experts, mesh.size), range(index.num_layers)
        owned_by_device = {
            device: [
                number
                for layer in layers
                for number in index.record_numbers(layer, experts).tolist()
            ]
            for device, experts in expert_numbers_by_local_device(placement, mesh).items()
        }
        counts = list(map(len, owned_by_device.values()))
        memory = choose_host_allocator(
            "off" if on_host else pin,
            "pin_host_memory",
            list(owned_by_device),
            counts if plan.expert_tier == "host" else None,
        )
        log.info("experts off the devices: %s", memory.note)
        owned = chain.from_iterable(owned_by_device.values())
        tier = ExpertTier.of_engine(plan, checkpoint, cache_dir)
        store = open_expert_store(
            checkpoint, index, tier, limits, owned, memory.allocate, make_ranks
        )
        if plan.policy == "ring":
            return MeshRing(mesh, index, fields, plan.ring_slots, store), store
        if on_host and store.host_records is not None:
            host = HostExperts(store.host_records, fields, checkpoint.dtype)
            if not host.is_known:
                host.close()
            _check_host_supports(host, plan, checkpoint)
            host.compile_rows(index.num_experts, checkpoint.config.hidden_act)
            return MeshHybridExperts(mesh, index, fields, plan.expert_slots, store, host), store
        return MeshChosenExperts(mesh, index, fields, plan.expert_slots, store), store
    if placements is not None:
        read = _record_reader(checkpoint, index)
        return PlacedExperts(
            mesh, index, fields, placements[0].slots_per_device, read, placements
        ), None
    slots = plan.expert_slots // index.num_layers
    if plan.expert_tier is not None:
        tier = ExpertTier.of_engine(plan, checkpoint, None)
        store = open_expert_store(checkpoint, index, tier, limits, make_ranks=make_ranks)
        return PlacedExperts(mesh, index, fields, slots, store.get), store
    return PlacedExperts(mesh, index, fields, slots, _record_reader(checkpoint, index)), None


def _check_host_supports(host: HostExperts, plan: MemoryPlan, checkpoint: LazyCheckpoint) -> None:
    """Raise `ValueError` if the policy is hybrid and no native operation takes the experts."""
    kinds = f"experts of {checkpoint.expert_fields} and {np.dtype(checkpoint.dtype)} tokens"
    known = host.is_known or plan.policy != "hybrid"
    check(known, "policy", plan.policy, f"no native operation takes {kinds}")


def _record_reader(checkpoint: LazyCheckpoint, index: ExpertIndex) -> ReadRecord:
    """Return a function that takes a record number and returns a context manager with the expert's
    arrays by name, read from the checkpoint into memory that the next read overwrites.
    """
    record = {
        name: np.empty(shape, dtype) for name, (shape, dtype) in checkpoint.expert_fields.items()
    }

    @contextlib.contextmanager
    def read(number: int) -> Iterator[dict[str, np.ndarray]]:
        checkpoint.fill_expert(*index.layer_and_expert_of(number), record)
        yield record

    return read


class ExpertTier(NamedTuple):
    """The tier of experts' records.

    cache_bytes: host memory that caches records of the tier nvme. folder: of these records. option:
    the option that names the folder, for error messages, with its value.
    """

    name: Literal["host", "nvme"]
    cache_bytes: int
    folder: Path
    option: str

    @classmethod
    def of_engine(
        cls, plan: MemoryPlan, checkpoint: LazyCheckpoint, cache_dir: str | os.PathLike[str] | None
    ) -> Self:
        """Return the tier of an engine's plan."""
        assert plan.expert_tier is not None
        folder = Path(cache_dir) if cache_dir is not None else checkpoint.folder / PACK_FOLDER
        return cls(plan.expert_tier, plan.host_bytes, folder, f"cache_dir = {cache_dir!r}")


def open_expert_store(
    checkpoint: LazyCheckpoint,
    index: ExpertIndex,
    tier: ExpertTier,
    limits: Mapping[LinkName, float] | None = None,
    owned: Iterable[int] | None = None,
    allocate: Allocate = allocate_slots,
    make_ranks: Callable[[int], RecordRanks] = HitCounts,
    on_record: Callable[[int], None] = lambda _: None,
) -> TieredStore:
    """Return a store of a checkpoint's experts, as records on a tier.

    owned: the records to hold in host memory, None for all; the tier nvme holds all records.
    on_record: called with the number of each record once it is read from the checkpoint. Raises
    `OSError` if the folder is not writable.
    """
    layout = RecordLayout.from_arrays(checkpoint.expert_fields)

    def fill(number: int, views: dict[str, np.ndarray]) -> None:
        checkpoint.fill_expert(*index.layer_and_expert_of(number), views)
        on_record(number)

    if tier.name == "host":
        records = HostRecords.allocate_and_fill(layout, index.num_records, fill, owned, allocate)
        return TieredStore(records, bandwidth_limit_bytes_per_s=limits)
    open_again, fingerprint = checkpoint.reopen, checkpoint.fingerprint

    def repair(number: int, views: dict[str, np.ndarray]) -> None:
        """Read a record from the checkpoint again; any thread may call this, long after the start.

        Raises `ValueError` if the checkpoint has changed since the experts were packed.
        """
        with open_again() as again:
            if again.fingerprint != fingerprint:
                raise ValueError(f"{again.folder}: has changed since the experts were packed")
            again.fill_expert(*index.layer_and_expert_of(number), views)

    try:
        packed = RecordStore.open_or_pack(
            tier.folder, layout, index.num_records, fill, fingerprint=fingerprint, repair=repair
        )
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        place = f"experts of the tier nvme cannot be written to {tier.folder}: {error.strerror}"
        raise OSError(f"{tier.option}: {place}; give another folder, on a fast disk") from error
    if packed.io == "mapped" and "nvme" not in (limits or {}):
        return TieredStore(packed.map_records(), bandwidth_limit_bytes_per_s=limits)
    return TieredStore(
        packed,
        cache_bytes=tier.cache_bytes,
        bandwidth_limit_bytes_per_s=limits,
        allocate=allocate,
        make_ranks=make_ranks,
    )
