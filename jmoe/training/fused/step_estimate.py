"""Estimate a training step's time and memory on GPUs that are not present, from the program
compiled for them (`--estimate`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jmoe.collectives.ragged_rounds import LATER_ROUNDS
from jmoe.config import TrainConfig
from jmoe.config.cluster import NetworkConfig, read_links
from jmoe.config.tiers import ACCELERATORS
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.planning.exchange import DROPLESS_BUFFER, RAGGED_BUFFER
from jmoe.planning.gpu_estimate import GpuEstimate, KernelFacts, estimate_module, gpu_rates
from jmoe.planning.gpu_links import GPU_LINKS, GPUS_PER_NODE
from jmoe.planning.hlo import parse_hlo
from jmoe.run import ahead_of_time
from jmoe.run.planner import with_chosen_expert_sharding
from jmoe.runtime import gpu_memory_fraction
from jmoe.training.fused.masking import fused_trainer_class

MOST_COSTLY = 5  # kernels that a report lists


@dataclass(frozen=True)
class StepMemory:
    """Device memory of a compiled step, in bytes. state_bytes: parameters, moments and a batch.
    temporary_bytes: XLA's temporary buffers.
    """

    state_bytes: int
    temporary_bytes: int

    @property
    def num_bytes(self) -> int:
        """The peak memory of the step, in bytes."""
        return self.state_bytes + self.temporary_bytes


@dataclass(frozen=True)
class StepEstimate:
    """Estimated time and memory of a run's step on `num_devices` GPUs; `str` gives the report.

    config.estimate: the kind of GPU. gpu: time, kernels and communication. memory: of one device.
    links: the links that communication is priced on.
    """

    config: TrainConfig
    num_devices: int
    gpu: GpuEstimate
    memory: StepMemory
    links: NetworkConfig = GPU_LINKS

    @property
    def tokens_per_s(self) -> float:
        return self.config.batch_size * self.config.sequence_length / self.gpu.seconds

    @property
    def model_flops_per_s(self) -> float:
        """The model FLOP/s per device: matrix products of one forward and backward pass, without
        recomputation.
        """
        return self.config.flops_per_token * self.tokens_per_s / self.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `model_flops_per_s` as a fraction of the GPU's data-sheet
        FLOP/s.
        """
        return self.model_flops_per_s / ACCELERATORS[self.config.estimate].flops

    def __str__(self) -> str:
        gpu, memory, kind = self.gpu, self.memory, self.config.estimate
        share = gpu_memory_fraction()
        free_bytes = share * ACCELERATORS[kind].device_bytes
        fits = "it fits" if memory.num_bytes <= free_bytes else "it does not fit"
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
                f" {free_bytes / 1e9:.1f} GB that JAX takes ({100 * share:g} % of"
                f" {ACCELERATORS[kind].device_bytes / 1e9:g} GB): {fits}"
            ),
            (
                f"{gpu.launches:,} launches, {gpu.num_bytes / 1e9:,.0f} GB moved,"
                f" {gpu.flops / 1e12:.1f} TFLOP computed; most of the time goes to"
            ),
            *map(str, gpu.kernels[:MOST_COSTLY]),
        ]
        if gpu.communication:
            links = self.links
            lines.append(
                f"communication: {gpu.exposed_s:.3g} s of the step, on links each way and device of"
                f" {links.inside_bytes_per_s / 1e9:g} GB/s inside a node,"
                f" {links.between_bytes_per_s / 1e9:g} between"
            )
            lines += map(str, gpu.communication)
        return "\n".join([*lines, *(f"note: {note}" for note in gpu.notes)])


def estimate_step(config: TrainConfig, links: NetworkConfig = GPU_LINKS) -> StepEstimate:
    """Return the estimate for the GPU that `config.estimate` names, on these links between GPUs.

    Raises ValueError if jmoe cannot compile for that GPU here.
    """
    ahead_of_time.check_cuda_installed("estimate", config.estimate)
    machine = config.machine
    if not machine.accelerator:
        machine = replace(machine, accelerator=config.estimate)
    config = with_chosen_expert_sharding(replace(config, machine=machine))
    hosts, each = hosts_and_devices_per_host(config)
    compiled = lower_step(config, config.estimate).compile()
    rates = replace(gpu_rates(config.estimate), devices_per_node=each, links=links)
    gpu = estimate_module(
        parse_hlo(compiled.as_text() or ""),
        rates,
        assumed_expert_kernel_facts(config),
        lambda scope: 0 if LATER_ROUNDS in scope else None,
    )
    return StepEstimate(config, hosts * each, gpu, step_memory(compiled), links)


def hosts_and_devices_per_host(config: TrainConfig) -> tuple[int, int]:
    """Return (number of hosts, devices per host) of the mesh; an axis whose size is left open
    counts as 1, as in `--plan`.

    A host has `mesh.expert_intra` devices if experts span hosts (`mesh.expert_inter` > 1) or that
    number exceeds 8; else the largest multiple of it, at most 8, that divides all devices.
    """
    mesh = config.mesh
    intra = max(1, mesh.expert_intra)
    devices = max(1, mesh.data) * mesh.expert_inter * intra
    if mesh.expert_inter > 1 or intra > GPUS_PER_NODE:
        return devices // intra, intra
    each = max(n for n in range(intra, GPUS_PER_NODE + 1, intra) if devices % n == 0)
    return devices // each, each


def assumed_expert_kernel_facts(config: TrainConfig) -> KernelFacts:
    """Return what the estimate assumes of the expert kernels: the fraction of a device's buffer
    rows that hold tokens under balanced routing.
    """
    devices = config.mesh.expert_inter * max(1, config.mesh.expert_intra)
    dropless = RAGGED_BUFFER if config.comm.exchange == "ragged" else DROPLESS_BUFFER
    factor = config.model.capacity_factor or dropless
    return KernelFacts(filled=min(1.0, 1 / factor) if devices > 1 else 1.0)


def lower_step(config: TrainConfig, target: str) -> jax.stages.Lowered:
    """Return the lowered step of a run with all experts on the devices, for a GPU in
    `ahead_of_time.TARGETS`.
    """
    hosts, each = hosts_and_devices_per_host(config)
    devices = ahead_of_time.abstract_gpu_devices(target, hosts, each)
    shape = config.checked_mesh_shape(len(devices), each)
    mesh = make_mesh(shape, devices, replicas=config.mesh.replicate)
    links = read_links(Path(config.comm.links)) if config.comm.links else None
    trainer, parts = (
        fused_trainer_class(config)(config, mesh, links=links),
        config.gradient_accumulation_steps,
    )
    context, sequences = config.devices_per_sequence(len(devices)), config.batch_size // parts
    tokens_of_row = config.sequence_length // context + (1 if context == 1 else 2)
    sizes = parts, sequences * context, tokens_of_row
    tokens = jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=NamedSharding(mesh, ACCUMULATED_BATCH))
    _, lowered = ahead_of_time.lower_for_device(
        devices[0], trainer.step, trainer.state_shape, tokens
    )
    return lowered


def step_memory(compiled: jax.stages.Compiled) -> StepMemory:
    """Return a compiled step's device memory; outputs that alias inputs count once."""
    sizes = compiled.memory_analysis()
    assert sizes is not None
    new_bytes = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return StepMemory(sizes.argument_size_in_bytes + new_bytes, sizes.temp_size_in_bytes)
