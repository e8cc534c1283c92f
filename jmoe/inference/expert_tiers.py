"""Where the experts of a checkpoint are kept: the policy, the slots on the device, the tiers below them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jmoe.config import check
from jmoe.inference.expert_slots import DeviceSlots, ExpertSlots, HostSlots
from jmoe.inference.residency import AllResident, ChosenExperts, LayerRing, Residency
from jmoe.memory.record_store import RecordLayout, RecordStore
from jmoe.memory.tiered_store import HostRecords, TieredStore
from jmoe.models.split_checkpoint import SplitCheckpoint

Policy = Literal["auto", "resident", "ring", "experts"]
ExpertTier = Literal["auto", "host", "nvme"]
PACK_FOLDER = "jmoe_experts"


@dataclass(frozen=True)
class ExpertPlan:
    """A policy that is not `auto` any more, and its slots."""

    policy: Literal["resident", "ring", "experts"]
    num_slots: int  # expert slots
    ring_slots: int = 0


def open_experts(
    checkpoint: SplitCheckpoint,
    *,
    policy: Policy,
    ring_slots: int | None,
    device_bytes: int | None,
    expert_tier: ExpertTier,
    host_cache_bytes: int | None,
    cache_dir: str | os.PathLike[str] | None,
    bandwidth_limit_bytes_per_s: Mapping[Any, float] | None,
) -> tuple[Residency, TieredStore | None]:
    """The experts in their places, and the store that they come from (None: all are on the device).

    The arguments are those of `Engine.from_pretrained`; all are checked before weights are read.
    """
    plan = plan_experts(checkpoint, policy, ring_slots, device_bytes)
    tier = ("nvme" if host_cache_bytes is not None else "host") if expert_tier == "auto" else expert_tier
    check(tier in ("host", "nvme"), "expert_tier", tier, "must be auto, host or nvme")
    usable = host_cache_bytes is None or tier == "nvme"
    check(usable, "host_cache_bytes", host_cache_bytes, "needs expert_tier = 'nvme'")
    slots = _make_slots(plan.num_slots, checkpoint.expert_fields)
    config = checkpoint.config
    if plan.policy == "resident":
        record = {name: np.empty(shape, dtype) for name, (shape, dtype) in checkpoint.expert_fields.items()}
        for index in range(checkpoint.num_experts):
            checkpoint.fill_expert(index, record)
            slots.write(index, record)
        return AllResident(slots, config.num_experts), None
    store = _open_store(checkpoint, tier, host_cache_bytes, cache_dir, bandwidth_limit_bytes_per_s)
    if plan.policy == "ring":
        return LayerRing(slots, store, config.num_moe_layers, config.num_experts, plan.ring_slots), store
    return ChosenExperts(slots, store, config.num_moe_layers, config.num_experts, plan.num_slots), store


def plan_experts(
    checkpoint: SplitCheckpoint, policy: Policy, ring_slots: int | None, device_bytes: int | None
) -> ExpertPlan:
    """Which way to keep the experts, and in how many slots."""
    config = checkpoint.config
    e, layers = config.num_experts, config.num_moe_layers
    check(
        policy in ("auto", "resident", "ring", "experts"), "policy", policy, "must be auto, resident, ring or experts"
    )
    check(ring_slots is None or 1 <= ring_slots <= layers, "ring_slots", ring_slots, f"must be between 1 and {layers}")
    check(ring_slots is None or policy in ("auto", "ring"), "ring_slots", ring_slots, "needs policy = 'ring'")
    expert_bytes = checkpoint.expert_bytes
    fit = layers * e if device_bytes is None else device_bytes // expert_bytes
    if policy == "auto":
        policy = "ring" if ring_slots is not None or fit < layers * e else "resident"
    if policy == "resident":
        needed = f"must hold all {layers * e} experts of {expert_bytes} bytes for policy = 'resident'"
        check(fit >= layers * e, "device_bytes", device_bytes, needed)
        return ExpertPlan("resident", layers * e)
    check(fit >= e, "device_bytes", device_bytes, f"must hold the {e} experts of a layer, of {expert_bytes} bytes each")
    if policy == "ring":
        if ring_slots is None:
            ring_slots = max(1, layers // 2) if device_bytes is None else min(layers, fit // e)
        check(ring_slots * e <= fit, "ring_slots", ring_slots, f"{ring_slots * e} experts do not fit device_bytes")
        return ExpertPlan("ring", ring_slots * e, ring_slots)
    return ExpertPlan("experts", min(layers * e, fit if device_bytes is not None else max(e, layers * e // 2)))


def _open_store(
    checkpoint: SplitCheckpoint,
    tier: ExpertTier,
    host_cache_bytes: int | None,
    cache_dir: str | os.PathLike[str] | None,
    limits: Mapping[Any, float] | None,
) -> TieredStore:
    layout = RecordLayout.of(checkpoint.expert_fields)
    if tier == "host":
        records = HostRecords.fill(layout, checkpoint.num_experts, checkpoint.fill_expert)
        return TieredStore(host_records=records, bandwidth_limit_bytes_per_s=limits)
    folder = Path(cache_dir) if cache_dir is not None else checkpoint.folder / PACK_FOLDER
    packed = RecordStore.pack(
        folder, layout, checkpoint.num_experts, checkpoint.fill_expert, fingerprint=checkpoint.fingerprint
    )
    cache_bytes = host_cache_bytes
    if cache_bytes is None:  # a quarter of the records, and of this machine's memory at most
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cache_bytes = min(checkpoint.num_experts * layout.record_bytes, memory_bytes) // 4
    return TieredStore(packed, cache_bytes=cache_bytes, bandwidth_limit_bytes_per_s=limits)


def _make_slots(num_slots: int, fields: Any) -> ExpertSlots:
    device = jax.devices()[0]
    return HostSlots(num_slots, fields) if device.platform == "cpu" else DeviceSlots(num_slots, fields, device)
