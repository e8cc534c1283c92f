"""A training step compiled for GPUs that are not here: how long it takes, and what memory it
needs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jmoe.config import TrainConfig
from jmoe.config.cluster import read_links
from jmoe.config.tiers import ACCELERATORS
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.planning.exchange import DROPLESS_BUFFER
from jmoe.planning.gpu_estimate import ExpertRows, GpuEstimate, estimate_module, gpu_rates
from jmoe.planning.gpu_links import GPUS_PER_NODE
from jmoe.planning.hlo import parse_hlo
from jmoe.run import ahead_of_time
from jmoe.runtime import device_memory_share
from jmoe.training.fused.step import FusedTrainer

MOST_COSTLY = 5  # rows that an estimate shows


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a device. state: parameters and moments, with a batch; temporary: what a step
    needs besides.
    """

    state_bytes: int
    temporary_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.state_bytes + self.temporary_bytes


@dataclass(frozen=True)
class StepEstimate:
    """A step of a run on `num_devices` GPUs of the kind that `config.estimate` names."""

    config: TrainConfig
    num_devices: int
    gpu: GpuEstimate
    memory: StepMemory

    @property
    def tokens_per_s(self) -> float:
        return self.config.batch_size * self.config.sequence_length / self.gpu.seconds

    @property
    def model_flops_per_s(self) -> float:
        """Return the FLOP/s of a device in the products of the model, forward and back, none of
        them counted twice.
        """
        flops = self.config.model.flops_per_token(self.config.sequence_length)
        return flops * self.tokens_per_s / self.num_devices

    @property
    def mfu(self) -> float:
        """Return the share of the data sheet's FLOP/s."""
        return self.model_flops_per_s / ACCELERATORS[self.config.estimate].flops

    def __str__(self) -> str:
        gpu, memory, kind = self.gpu, self.memory, self.config.estimate
        share = device_memory_share()
        room_bytes = share * ACCELERATORS[kind].device_bytes
        fits = "it fits" if memory.num_bytes <= room_bytes else "it does not fit"
        state, temporary, whole = (
            f"{size / 1e9:.1f}"
            for size in (memory.state_bytes, memory.temporary_bytes, memory.num_bytes)
        )
        lines = [
            f"estimated from the step as compiled for {self.num_devices} x {kind}, not measured:",
            (
                f"{gpu.seconds:.4g} s a step, {self.tokens_per_s:,.0f} tokens/s,"
                f" {100 * self.mfu:.1f} % MFU of {ACCELERATORS[kind].flops / 1e12:g} TFLOP/s"
            ),
            (
                f"memory of a device: {whole} GB, {state} of state and {temporary} besides, of"
                f" {room_bytes / 1e9:.1f} GB that JAX takes ({100 * share:g} % of"
                f" {ACCELERATORS[kind].device_bytes / 1e9:g} GB): {fits}"
            ),
            (
                f"{gpu.launches:,} launches, {gpu.num_bytes / 1e9:,.0f} GB moved,"
                f" {gpu.flops / 1e12:.1f} TFLOP computed; most of the time goes to"
            ),
            *map(str, gpu.kernels[:MOST_COSTLY]),
        ]
        if gpu.communication:
            links = gpu_rates(kind).links
            lines.append(
                f"communication: {gpu.exposed_s:.3g} s of the step, on links each way and device of"
                f" {links.inside_bytes_per_s / 1e9:g} GB/s inside a node,"
                f" {links.between_bytes_per_s / 1e9:g} between"
            )
            lines += map(str, gpu.communication)
        return "\n".join([*lines, *(f"note: {note}" for note in gpu.notes)])


def estimate_step(config: TrainConfig) -> StepEstimate:
    """Return the estimate for the GPU that `config.estimate` names; `ValueError` if nothing can
    be compiled for it.
    """
    ahead_of_time.check_cuda("estimate", config.estimate)
    hosts, each = machine_shape(config)
    compiled = lower_step(config, config.estimate).compile()
    rates = replace(gpu_rates(config.estimate), devices_per_node=each)
    gpu = estimate_module(parse_hlo(compiled.as_text() or ""), rates, expert_rows_of(config))
    return StepEstimate(config, hosts * each, gpu, step_memory(compiled))


def machine_shape(config: TrainConfig) -> tuple[int, int]:
    """Return (hosts, devices of each) of the mesh; what it leaves open is one, as for `--plan`.

    Hosts have the devices of `mesh.expert_intra` where there are several (`mesh.expert_inter`),
    else up to eight.
    """
    mesh = config.mesh
    intra = max(1, mesh.expert_intra)
    devices = max(1, mesh.data) * mesh.expert_inter * intra
    if mesh.expert_inter > 1 or intra > GPUS_PER_NODE:
        return devices // intra, intra
    each = max(n for n in range(intra, GPUS_PER_NODE + 1, intra) if devices % n == 0)
    return devices // each, each


def expert_rows_of(config: TrainConfig) -> ExpertRows:
    """Return which share of the rows of a device's buffers are tokens, where routing is even."""
    devices = config.mesh.expert_inter * max(1, config.mesh.expert_intra)
    factor = config.model.capacity_factor or DROPLESS_BUFFER
    return ExpertRows(filled=min(1.0, 1 / factor) if devices > 1 else 1.0)


def lower_step(config: TrainConfig, target: str) -> jax.stages.Lowered:
    """Return the step of a run whose experts stay on the device, to compile for a GPU of
    `ahead_of_time.TARGETS`.
    """
    hosts, each = machine_shape(config)
    devices = ahead_of_time.devices(target, hosts, each)
    mesh = make_mesh(config.check_devices(len(devices), each), devices)
    links = read_links(Path(config.comm.links)) if config.comm.links else None
    trainer, parts = FusedTrainer(config, mesh, links=links), config.gradient_accumulation_steps
    sizes = parts, config.batch_size // parts, config.sequence_length + 1
    tokens = jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=NamedSharding(mesh, ACCUMULATED_BATCH))
    _, lowered = ahead_of_time.lower_for(devices[0], trainer.step, trainer.state_shape, tokens)
    return lowered


def step_memory(compiled: jax.stages.Compiled) -> StepMemory:
    """Return the bytes that a compiled step takes of a device, whose new state lies where the
    old one did.
    """
    sizes = compiled.memory_analysis()
    assert sizes is not None
    new_bytes = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return StepMemory(sizes.argument_size_in_bytes + new_bytes, sizes.temp_size_in_bytes)
