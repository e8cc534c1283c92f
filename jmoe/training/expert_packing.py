"""Expert packing during training: time all-to-alls and experts, then move the state to another
mesh.

`Session.rebalance` calls this module between steps; `jmoe.planning.expert_packing` holds the
decision rule. Source: Lina (USENIX ATC '23), section 4.2.

Legend: L experts of a device, M rows (token-expert pairs), D hidden.
"""

import dataclasses
import time
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jmoe.cluster.coordinator import result_from_rank_0
from jmoe.collectives.exchange import TokenChoices
from jmoe.collectives.planned_exchange import trace_dispatch_all_to_alls
from jmoe.config import TrainConfig
from jmoe.config.parallel import largest_packing, packed_shape
from jmoe.mesh import ALL, EXPERT, REPLICATED, split_over
from jmoe.planning.expert_packing import (
    EVERY_STEPS,
    MemoryShortfall,
    PackingDecision,
    decide_packing,
    is_packing_decided_at,
)
from jmoe.planning.training_sizes import EXPERT_SHARDINGS
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.planner import (
    described_machine,
    packing_shortfall,
    with_chosen_expert_sharding,
    with_experts_in_host_memory,
)
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import TrainState, experts_of
from jmoe.training.trainer import Trainer
from jmoe.types import PyTree

ROUNDS = 5


def initial_packing(config: TrainConfig, num_devices: int, devices_per_host: int) -> int:
    """Return the expert packing that a run starts with.

    `comm.packing` if that is a number. With `auto`, the newest checkpoint's packing (1 without a
    checkpoint), limited to the mesh's largest. Every process must call this.
    """
    if config.comm.packing != "auto":
        return config.comm.packing

    def read_newest_packing() -> str:
        return str(
            Checkpoints(Path(config.output_dir) / "checkpoints", config.checkpoint).newest_packing()
        )

    saved = int(
        result_from_rank_0("packing", read_newest_packing, config.distributed.start_timeout_s)
    )
    return min(saved, largest_packing(config.mesh.resolve_shape(num_devices, devices_per_host)))


class MeasuredTrainer(Protocol):
    """A `Trainer` whose layers `time_exchange_and_experts` can time."""

    model: ShardedDecoder


class PackingController:
    """Decides how many experts each device holds; every process reaches the same decision.

    config: the run's, with `comm.packing` as the user set it. shape: (data, expert_inter,
    expert_intra) of the mesh at packing 1. packing: the initial packing.
    """

    def __init__(self, config: TrainConfig, shape: tuple[int, int, int], packing: int) -> None:
        self.packing = packing
        self.done = (
            config.comm.packing != "auto"
            or not config.model.num_moe_layers
            or largest_packing(shape) == 1
        )
        data, inter, intra = shape
        mesh = dataclasses.replace(config.mesh, data=data, expert_inter=inter, expert_intra=intra)
        self._config = dataclasses.replace(config, mesh=mesh)
        # read now, while the devices' memory is still empty
        self._shortfalls = {} if self.done else self._measure_shortfalls()
        # both since the last decision; _seconds leaves out steps that compiled
        self._steps, self._seconds = 0, list[float]()
        self._step_s: dict[int, float] = {}  # seconds of a step, by experts per device

    @property
    def experts_per_device(self) -> int:
        """Number of experts of one layer on each device; 0 for a model without experts."""
        return self.packing * self._unpacked_experts_per_device

    @property
    def _unpacked_mesh_shape(self) -> tuple[int, int, int]:
        """(data, expert_inter, expert_intra) of the mesh at packing 1."""
        mesh = self._config.mesh
        return mesh.data, mesh.expert_inter, mesh.expert_intra

    @property
    def _unpacked_experts_per_device(self) -> int:
        """Number of experts of one layer on each device at packing 1."""
        return self._config.model.num_experts // (
            self._unpacked_mesh_shape[1] * self._unpacked_mesh_shape[2]
        )

    def current_config_and_shape(self) -> tuple[TrainConfig, tuple[int, int, int]]:
        """Return the configuration and the mesh shape for the current packing; the configuration
        has the experts in host memory if they fit nowhere else.
        """
        config = self._config.with_packing(self.packing)
        if self.is_offloaded:
            config = with_experts_in_host_memory(config)
        return config, packed_shape(self._unpacked_mesh_shape, self.packing)

    @property
    def is_offloaded(self) -> bool:
        """Whether experts are in host memory because the devices cannot hold the current
        packing's.
        """
        shortfall = self._shortfalls.get(self.packing)
        return shortfall is not None and shortfall.must_offload

    def note_step(self, seconds: float, *, compiled: bool) -> None:
        """Record the seconds of a step, unless packing is settled. A step that compiled is counted
        but its time is ignored.
        """
        if self.done:
            return
        self._steps += 1
        if not compiled:
            self._seconds.append(seconds)

    def is_packing_choice_due(self, step: int) -> bool:
        """Return whether to call `measure_and_choose_packing` before `step`.

        False until `EVERY_STEPS` steps have been noted since the start or the last decision.
        """
        return not self.done and is_packing_decided_at(step) and self._steps >= EVERY_STEPS

    def measure_and_choose_packing(
        self, step: int, trainer: MeasuredTrainer
    ) -> tuple[PackingDecision, dict[str, float]]:
        """Measure, choose the packing for the steps from `step` on, and return (decision, measured
        seconds by name).

        Every process must call this: measurements are collectives, and each number is the maximum
        over processes.
        """
        own = median(self._seconds[1 - EVERY_STEPS :] or [0.0])
        all_to_all_s, ffn_s, step_s = max_over_processes([*time_exchange_and_experts(trainer), own])
        if step_s:
            self._step_s[self.experts_per_device] = step_s
        decision = decide_packing(
            all_to_all_s,
            ffn_s,
            self.experts_per_device,
            step=step,
            most_experts=largest_packing(self._unpacked_mesh_shape)
            * self._unpacked_experts_per_device,
            shortfall=self._shortfalls.get(2 * self.packing),
            step_s=self._step_s,
        )
        self.packing = decision.experts_per_device // self._unpacked_experts_per_device
        self.done, self._steps, self._seconds = decision.done, 0, []
        return decision, {"all_to_all_s": all_to_all_s, "ffn_s": ffn_s, "step_s": step_s}

    def _measure_shortfalls(self) -> dict[int, MemoryShortfall]:
        """Return the bytes that memory lacks by packing, for every packing above 1 that the mesh
        allows; the same on every process.
        """
        machine = described_machine(with_device_bytes(self._config))
        packings = takewhile(
            lambda packing: packing <= largest_packing(self._unpacked_mesh_shape),
            (2**power for power in count(1)),
        )
        own = {
            packing: packing_shortfall(self._config.with_packing(packing), machine)
            for packing in packings
        }
        lacking = max_over_processes(
            [
                float(value)
                for shortfall in own.values()
                for value in (shortfall.lacking_bytes, shortfall.offloaded_lacking_bytes)
            ]
        )
        pairs = zip(own.items(), lacking[::2], lacking[1::2], strict=True)
        return {
            packing: MemoryShortfall(int(device), int(host), shortfall.refused)
            for (packing, shortfall), device, host in pairs
        }


def with_device_bytes(config: TrainConfig) -> TrainConfig:
    """Return `config` with `machine.device_bytes` set to the device's own memory limit, unless the
    configuration or its accelerator already gives one.
    """
    limit_bytes = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if config.machine.resolve_device_peaks().device_bytes or not limit_bytes:
        return config
    return dataclasses.replace(
        config, machine=dataclasses.replace(config.machine, device_bytes=int(limit_bytes))
    )


def choose_expert_sharding(
    config: TrainConfig, shape: tuple[int, int, int], packing: int
) -> TrainConfig:
    """Return the run with a `comm.shard_experts` that fits every process's devices. Collective:
    every process must call this.

    shape: (data, expert_inter, expert_intra) of the mesh at packing 1. packing: the initial
    packing.
    """
    data, inter, intra = shape
    mesh = dataclasses.replace(config.mesh, data=data, expert_inter=inter, expert_intra=intra)
    on_mesh = dataclasses.replace(config.with_packing(packing), mesh=mesh)
    if config.can_shard_experts:
        on_mesh = with_device_bytes(on_mesh)
    own = with_chosen_expert_sharding(on_mesh).comm.expert_sharding
    (rank,) = max_over_processes([float(EXPERT_SHARDINGS.index(own))])
    comm = dataclasses.replace(config.comm, shard_experts=EXPERT_SHARDINGS[int(rank)])
    return dataclasses.replace(config, comm=comm)


def max_over_processes(values: list[float]) -> list[float]:
    """Return the elementwise maximum of `values` over all processes, which must all call this."""
    every = multihost_utils.process_allgather(np.array(values, np.float32))
    return [float(value) for value in np.max(np.reshape(every, (-1, len(values))), axis=0)]


# Moving


class MeshTrainer(Trainer, Protocol):
    """A `Trainer` that exposes its `ShardedModel`, and so its mesh."""

    model: Any  # a `ShardedModel`


def move_state(
    state: TrainState, trainer_before: MeshTrainer, trainer_after: MeshTrainer
) -> TrainState:
    """Return `trainer_before`'s state on the mesh of `trainer_after`, and free the old arrays.

    Arrays move one after another, so that only one exists twice at any time. Every process must
    call this and must have devices in both meshes.
    """
    saved = trainer_before.prepare_state_for_save(state)

    def move_array(x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if x.sharding.device_set == shape.sharding.device_set:
            there = jax.jit(lambda x: x, out_shardings=shape.sharding)(x)
        # Through host memory: JAX cannot move arrays of several processes between meshes of
        # different devices.
        else:
            everywhere = NamedSharding(trainer_before.model.mesh, REPLICATED)
            whole = np.asarray(
                jax.jit(lambda x: x, out_shardings=everywhere)(x).addressable_data(0)
            )
            # One copy per device: JAX may alias the NumPy memory that it is given.
            there = jax.make_array_from_callback(
                x.shape, shape.sharding, lambda index: np.array(whole[index])
            )
        jax.block_until_ready(there)
        x.delete()
        return there

    return trainer_after.restore_state(jax.tree.map(move_array, saved, trainer_after.saved_shape))


# Measuring


def time_exchange_and_experts(trainer: MeasuredTrainer) -> tuple[float, float]:
    """Return the forward seconds of (one layer's dispatch all-to-alls, one layer's experts), with
    tokens spread evenly over experts.

    Both are timed in programs of their own, without the work that a training step overlaps with
    them, and with experts on the device. The all-to-alls take 0 if each device holds all experts.
    Every process must call this.
    """
    model = trainer.model
    layer: Any = model.abstract.moe_layers.moe
    config = model.config
    tokens = (
        config.batch_size
        * config.sequence_length
        // config.gradient_accumulation_steps
        // model.mesh.size
    )
    shapes = _MoELayerSizes(
        tokens, config.model.num_experts_per_tok, config.model.hidden_size, model.dtype
    )
    sent_s = (
        _time_all_to_alls_s(model, layer, shapes) if layer.exchange_plan.num_devices > 1 else 0.0
    )
    return sent_s, _time_experts_s(model, layer, shapes)


@dataclasses.dataclass(frozen=True)
class _MoELayerSizes:
    """The sizes that a measurement needs: tokens per device, experts per token, hidden size, and
    dtype.
    """

    tokens: int
    top_k: int
    hidden: int
    dtype: DTypeLike


def _time_all_to_alls_s(model: ShardedDecoder, layer: Any, sizes: _MoELayerSizes) -> float:
    """Return the forward seconds of a layer's dispatch all-to-alls on zeros, a median."""
    mesh, split, choices = model.mesh, split_over(ALL), (sizes.tokens, sizes.top_k)
    shape: PyTree = jax.ShapeDtypeStruct
    counts = shape((model.config.model.num_experts,), jnp.int32)
    chosen = TokenChoices(shape(choices, jnp.int32), shape(choices, jnp.float32), counts)
    sent = trace_dispatch_all_to_alls(
        layer.exchange, shape((sizes.tokens, sizes.hidden), sizes.dtype), chosen, layer.num_chunks
    )

    def dispatch_local(trees: PyTree) -> PyTree:
        return [all_to_all(tree) for (all_to_all, _), tree in zip(sent, trees, strict=True)]

    def make_zeros() -> PyTree:
        return jax.tree.map(
            lambda a: jnp.zeros((mesh.size * a.shape[0], *a.shape[1:]), a.dtype),
            [t for _, t in sent],
        )

    program = jax.jit(
        jax.shard_map(
            dispatch_local, mesh=mesh, in_specs=(split,), out_specs=split, check_vma=False
        )
    )
    return _median_call_s(program, jax.jit(make_zeros, out_shardings=NamedSharding(mesh, split))())


def _time_experts_s(model: ShardedDecoder, layer: Any, sizes: _MoELayerSizes) -> float:
    """Return the forward seconds of a layer's experts, a median, with tokens spread evenly."""
    rows, mesh, split = sizes.tokens * sizes.top_k, model.mesh, split_over(ALL)
    graph, structure = nnx.split(layer.experts)
    # of one layer; the state has none if experts are streamed
    place = NamedSharding(mesh, split_over(EXPERT, 1))
    shapes = jax.tree.map(lambda w: (1, *w.shape[1:]), experts_of(model.shapes))
    make_experts = jax.jit(
        lambda: {name: jnp.full(shape, 0.01, jnp.float32) for name, shape in shapes.items()},
        out_shardings=place,
    )
    local = model.config.model.num_experts // layer.exchange_plan.num_devices

    def run_experts_local(experts: PyTree, x_MD: jax.Array) -> jax.Array:
        first = [w[0] for w in jax.tree.leaves(experts)]
        apply = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(structure), first))
        even = jnp.arange(local, dtype=jnp.int32) < rows % local
        group_sizes_L = rows // local + even.astype(jnp.int32)
        out_MD: jax.Array = apply(x_MD, group_sizes_L, rows)
        return out_MD

    def make_ones() -> jax.Array:
        return jnp.ones((mesh.size * rows, sizes.hidden), sizes.dtype)

    specs = (split_over(EXPERT, 1), split)
    program = jax.jit(
        jax.shard_map(
            run_experts_local, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False
        )
    )
    return _median_call_s(
        program,
        make_experts(),
        jax.jit(make_ones, out_shardings=NamedSharding(mesh, split))(),
    )


def time_call_s(program: Callable[..., PyTree], *args: PyTree) -> float:
    """Return the wall-clock seconds of one call of `program`. Every process must call this if the
    program holds collectives.
    """
    begun = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - begun


def _median_call_s(program: Callable[..., PyTree], *args: PyTree) -> float:
    """Return the median wall-clock seconds of `ROUNDS` calls, after one that compiles."""
    seconds = [time_call_s(program, *args) for _ in range(1 + ROUNDS)]  # the first one compiles
    return median(seconds[1:])
