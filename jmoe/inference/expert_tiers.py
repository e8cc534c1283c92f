"""Where the experts of a checkpoint are kept: the policy, the slots on the device, the tiers below them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmoe.config.engine import EngineConfig
from jmoe.inference.kv_cache import empty_caches
from jmoe.memory.host_memory import available_bytes
from jmoe.memory.record_store import HostRecords, RecordLayout, RecordStore
from jmoe.memory.tiered_store import TieredStore
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.offload.policies import AllResident, ChosenExperts, LayerRing, Residency
from jmoe.offload.slots import DeviceSlots, ExpertSlots, HostSlots
from jmoe.planning.capacity import FreeMemory, MemoryPlan, ModelBytes, plan_memory
from jmoe.planning.roofline import ExpertWeights

PACK_FOLDER = "jmoe_experts"


def memory_plan(path: str | os.PathLike[str] | LazyCheckpoint, options: EngineConfig) -> MemoryPlan:
    """Return where an engine would put the bytes of a checkpoint, by its headers and what is free now."""
    checkpoint = path if isinstance(path, LazyCheckpoint) else LazyCheckpoint(path, options.dtype)
    config, length = checkpoint.config, checkpoint.sequence_length(options.max_seq_len)
    caches = jax.eval_shape(lambda: empty_caches(config, options.max_batch, length, checkpoint.dtype))
    weights = ExpertWeights(
        config.num_moe_layers, config.num_experts, config.num_experts_per_tok, checkpoint.expert_bytes
    )
    model = ModelBytes(
        weights,
        record_bytes=RecordLayout.of(checkpoint.expert_fields).record_bytes,
        dense_bytes=checkpoint.rest_bytes,
        cache_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(caches)),
    )
    return plan_memory(model, free_memory(jax.devices()[0]), options)


def free_memory(device: jax.Device) -> FreeMemory:
    """What is free on a device and beside it now. The CPU's is the host's."""
    host_bytes = available_bytes()
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is None:
        return FreeMemory(host_bytes, host_bytes, shared=True)
    return FreeMemory(stats["bytes_limit"] - stats["bytes_in_use"], host_bytes, shared=False)


def open_experts(
    checkpoint: LazyCheckpoint,
    plan: MemoryPlan,
    *,
    cache_dir: str | os.PathLike[str] | None,
    bandwidth_limit_bytes_per_s: Mapping[Any, float] | None,
) -> tuple[Residency, TieredStore | None]:
    """Return the experts in their places, and the store that they come from (None: all are on the device)."""
    slots = _make_slots(plan.expert_slots, checkpoint.expert_fields)
    config = checkpoint.config
    if plan.policy == "resident":
        record = {name: np.empty(shape, dtype) for name, (shape, dtype) in checkpoint.expert_fields.items()}
        for index in range(checkpoint.num_experts):
            checkpoint.fill_expert(index, record)
            slots.write(index, record)
        return AllResident(slots, config.num_experts), None
    store = _open_store(checkpoint, plan, cache_dir, bandwidth_limit_bytes_per_s)
    if plan.policy == "ring":
        return LayerRing(slots, store, config.num_moe_layers, config.num_experts, plan.ring_slots), store
    return ChosenExperts(slots, store, config.num_moe_layers, config.num_experts), store


def _open_store(
    checkpoint: LazyCheckpoint,
    plan: MemoryPlan,
    cache_dir: str | os.PathLike[str] | None,
    limits: Mapping[Any, float] | None,
) -> TieredStore:
    layout = RecordLayout.of(checkpoint.expert_fields)
    if plan.expert_tier == "host":
        records = HostRecords.fill(layout, checkpoint.num_experts, checkpoint.fill_expert)
        return TieredStore(host_records=records, bandwidth_limit_bytes_per_s=limits)
    folder = Path(cache_dir) if cache_dir is not None else checkpoint.folder / PACK_FOLDER
    packed = RecordStore.pack(
        folder,
        layout,
        checkpoint.num_experts,
        checkpoint.fill_expert,
        fingerprint=checkpoint.fingerprint,
        repair=_Source(checkpoint).fill_expert,
    )
    return TieredStore(packed, cache_bytes=plan.host_bytes, bandwidth_limit_bytes_per_s=limits)


class _Source:
    """Reads experts of a checkpoint again, long after the start and from any thread."""

    def __init__(self, checkpoint: LazyCheckpoint) -> None:
        self._open, self._fingerprint = checkpoint.opened_again, checkpoint.fingerprint

    def fill_expert(self, index: int, views: dict[str, np.ndarray]) -> None:
        """As `LazyCheckpoint.fill_expert`; `ValueError` if the checkpoint is not the one that was packed."""
        with self._open() as checkpoint:
            if checkpoint.fingerprint != self._fingerprint:
                raise ValueError(f"{checkpoint.folder}: has changed since the experts were packed")
            checkpoint.fill_expert(index, views)


def _make_slots(num_slots: int, fields: Any) -> ExpertSlots:
    device = jax.devices()[0]
    return HostSlots(num_slots, fields) if device.platform == "cpu" else DeviceSlots(num_slots, fields, device)
