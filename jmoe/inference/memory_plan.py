"""Where the bytes of a checkpoint would go, by its headers and the memory that is free."""

import math
import os

import jax

from jmoe.config.engine import EngineConfig
from jmoe.inference.kv_cache import empty_caches
from jmoe.memory.host_memory import available_bytes
from jmoe.memory.record_store import RecordLayout
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.planning.capacity import FreeMemory, MemoryPlan, ModelBytes, plan_memory
from jmoe.planning.roofline import ExpertWeights


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
    """Return what is free on a device and beside it now. The CPU's memory is the host's."""
    host_bytes = available_bytes()
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is None:
        return FreeMemory(host_bytes, host_bytes, shared=True)
    return FreeMemory(stats["bytes_limit"] - stats["bytes_in_use"], host_bytes, shared=False)
