"""Plan an engine for a machine that need not be here: its memory and the tokens/s expected.

`serve.py --dry-run` prints the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jmoe.config import MachineConfig
from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.inference.delta_states import DeltaCache
from jmoe.inference.kv_cache import BLOCK
from jmoe.inference.loading import EngineMachine, plan_engine_memory, resolve_sequence_length
from jmoe.inference.mesh.runner import make_mesh_caches
from jmoe.memory.host_memory import available_bytes
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.planning.gpu_links import GPUS_PER_NODE
from jmoe.planning.memory_plan import FreeMemory, MemoryPlan
from jmoe.planning.serving import (
    DecodeEstimate,
    DecodeStep,
    ServingEstimator,
    ServingRates,
    serving_rates,
)
from jmoe.runtime import gpu_memory_fraction

CONTEXT = 1000  # tokens before each token, if sequences may be twice as long


@dataclass(frozen=True)
class DryRun:
    """An engine's memory plan and expected steps. options: with `max_seq_len` set."""

    options: EngineConfig
    memory: MemoryPlan
    steps: tuple[DecodeEstimate, ...]
    source: str  # of the rates

    def __str__(self) -> str:
        return "\n".join([str(self.memory), self.source, *map(str, self.steps)])


def plan_dry_run(
    checkpoint: LazyCheckpoint, options: EngineConfig, machine: MachineConfig
) -> DryRun:
    """Return the plan of an engine with these options on `options.mesh.devices` accelerators of
    `machine`, or on this machine if it describes no memory.

    Steps: one sequence, and `options.max_batch` of them. Raises ValueError naming the field if the
    model does not fit.
    """
    described = engine_machine_from_config(machine, options.mesh.devices)
    options = resolve_sequence_length(checkpoint, options, described)
    memory = plan_engine_memory(checkpoint, options, described)
    machine = machine if described else _with_detected_accelerator(machine)
    rates = serving_rates(machine, options.mesh.devices)
    estimator = ServingEstimator(memory, rates, checkpoint.config.num_hidden_layers)
    steps = [
        estimator.estimate(_busiest_device_decode_step(checkpoint, options, memory, rows))
        for rows in dict.fromkeys((1, options.max_batch))
    ]
    return DryRun(options, memory, tuple(steps), _describe_rates_source(machine, rates, options))


def engine_machine_from_config(machine: MachineConfig, num_devices: int) -> EngineMachine | None:
    """Return the memory of a host with `num_devices` devices, at most `GPUS_PER_NODE`, as the
    options describe it; None if they say no device's memory.

    The host's free memory is this machine's if `machine.host_bytes` is 0.
    """
    figures = machine.resolve_device_peaks()
    if not figures.device_bytes:
        return None
    share = 1.0 if machine.device_bytes else gpu_memory_fraction()
    host_bytes = machine.host_bytes or available_bytes()
    free = FreeMemory(int(share * figures.device_bytes), host_bytes, shared=False)
    return EngineMachine(free, min(num_devices, GPUS_PER_NODE))


def _with_detected_accelerator(machine: MachineConfig) -> MachineConfig:
    """Return `machine` with the name of the accelerator here, "" without a data sheet of it."""
    kind = jax.local_devices()[0].device_kind.lower().replace(" ", "-")
    names: Sequence[str] = sorted(ACCELERATORS, key=len)
    here = [name for name in names if name in kind]
    if "a100" in here and "40gb" in kind:
        here = ["a100-40gb"]
    return MachineConfig(**{**vars(machine), "accelerator": here[-1] if here else ""})


def _describe_rates_source(
    machine: MachineConfig, rates: ServingRates, options: EngineConfig
) -> str:
    """Return a line that names the device, its rates, and the source of these."""
    name = machine.accelerator or "device"
    named = f"the data sheet of {name}" if machine.accelerator else "two CPU cores' figures"
    figures = f"memory {rates.memory_bytes_per_s / 1e12:.3g} TB/s"
    if rates.launches_s:
        figures += (
            f", link {rates.link_bytes_per_s / 1e9:.3g} GB/s, host memory"
            f" {rates.host_memory_bytes_per_s / 1e9:.3g} GB/s a device"
        )
    return (
        f"expected of {options.mesh.devices} x {name}, not measured: {figures} (the shares that"
        f" programs reach of {named}, or as --machine.* give them); uniform routing"
    )


def _busiest_device_decode_step(
    checkpoint: LazyCheckpoint, options: EngineConfig, memory: MemoryPlan, rows: int
) -> DecodeStep:
    """Return a step of `rows` sequences as the busiest device sees it."""
    config, n = checkpoint.config, options.mesh.devices
    assert options.max_seq_len is not None, "the plan has set it"
    context = min(CONTEXT, options.max_seq_len // 2)
    is_sharded = options.mesh.dense == "tensor"
    own_rows = rows / n if is_sharded else math.ceil(rows / n)
    positions = options.num_cache_blocks() * BLOCK
    cache_bytes = 0.0
    caches = jax.eval_shape(lambda: make_mesh_caches(checkpoint, options))
    for layer, cache in zip(config.layers, caches, strict=True):
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache)]
        if isinstance(cache, DeltaCache):  # a row's state is read, and the next one written
            kept = cache.memory_NMHde.shape[0]
            cache_bytes += own_rows * 2 * sum(sizes) / kept / options.max_batch
            continue
        attended = context if layer.window is None else min(context, layer.window)
        cache_bytes += own_rows * attended * sum(sizes) / positions
    width = checkpoint.dtype.itemsize
    table_bytes = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    dense_bytes = memory.model.dense_bytes - table_bytes * width / (n if is_sharded else 1)
    flops = config.flops_per_token(2 * context) / 3  # half of the positions are attended to
    sent = own_rows * config.num_experts_per_tok * config.hidden_size * width
    return DecodeStep(rows, context, dense_bytes, cache_bytes, flops * rows / n, sent)
