"""Padded or ragged rows: `comm.exchange = auto` takes what is faster on the mesh.

`make_trainer` calls this module before it builds the model. Both exchanges are timed once, with a
step's rows and an even load, and the times are stored in the output folder, so that a resumed run
chooses the same.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jmoe.collectives.exchange import TokenChoices
from jmoe.collectives.planned_exchange import dispatch_and_combine_without_experts, make_exchange
from jmoe.collectives.ragged import supports_ragged_exchange
from jmoe.config import TrainConfig
from jmoe.config.parallel import ExchangeKind
from jmoe.data.shards import replace_content_durably
from jmoe.mesh import BATCH, EXPERT, mesh_shape, num_expert_copies
from jmoe.planning.exchange import MIN_SAVING, plan_exchange
from jmoe.training.bandwidth import time_on_slowest_process_s

# XLA copies rows between peers in one kernel only in groups of so many GPUs of a process. In others
# it sends each block by itself, after the host has read the offsets: `auto` does not try that.
MOST_PEERS = 8


@dataclass(frozen=True)
class ExchangeTimes:
    """Measured seconds of one layer's dispatch and combine in the forward pass, by exchange."""

    padded_s: float
    ragged_s: float

    @property
    def chosen_exchange(self) -> ExchangeKind:
        """The faster exchange; flat, which pads, unless ragged saves `MIN_SAVING` of its time."""
        return "ragged" if self.ragged_s <= (1 - MIN_SAVING) * self.padded_s else "flat"

    def __str__(self) -> str:
        return (
            f"comm.exchange = auto: {self.chosen_exchange}; a layer's rows there and back take"
            f" {1e3 * self.padded_s:.3g} ms padded and {1e3 * self.ragged_s:.3g} ms ragged"
        )


def may_choose_ragged(config: TrainConfig, mesh: Mesh) -> bool:
    """Return whether `comm.exchange = auto` lets a ragged exchange compete: between GPUs of one
    process, in a dropless run whose experts are on the devices.
    """
    groups = mesh.devices.reshape(num_expert_copies(mesh), -1)
    one_process = all(len({device.process_index for device in group}) == 1 for group in groups)
    return (
        config.comm.exchange == "auto"
        and config.comm.schedule != "pipelined"
        and bool(config.model.num_moe_layers)
        and config.model.capacity_factor is None
        and config.tiers.all_on_device
        and one_process
        and 1 < groups.shape[1] <= MOST_PEERS
        and supports_ragged_exchange(mesh.devices.flat[0])
    )


def with_faster_exchange(config: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, list[str]]:
    """Return (`config` with the faster of `flat` and `ragged` in place of `comm.exchange = auto`, a
    line with the times), or (`config`, no line) if ragged does not compete.

    Every process must call this: it runs collectives.
    """
    if not may_choose_ragged(config, mesh):
        return config, []
    times = _read_or_measure_exchange_times(config, mesh)
    return replace(config, comm=replace(config.comm, exchange=times.chosen_exchange)), [str(times)]


def _read_or_measure_exchange_times(config: TrainConfig, mesh: Mesh) -> ExchangeTimes:
    """Return the times that an earlier start stored in the output folder; measure them
    otherwise.
    """
    shape = "x".join(map(str, mesh_shape(mesh)))
    path = Path(config.output_dir) / f"exchange-{shape}.json"
    stored = np.zeros(2, np.float32)
    if jax.process_index() == 0 and config.output_dir:
        stored = _read_stored_exchange_times(path)
    padded_s, ragged_s = (float(s) for s in multihost_utils.broadcast_one_to_all(stored))
    if padded_s > 0:
        return ExchangeTimes(padded_s, ragged_s)
    times = ExchangeTimes(
        time_exchange_s(config, mesh, "flat"), time_exchange_s(config, mesh, "ragged")
    )
    if jax.process_index() == 0 and config.output_dir and path.parent.is_dir():
        content = {"padded_s": times.padded_s, "ragged_s": times.ragged_s}
        replace_content_durably(path, json.dumps(content).encode())
    return times


def _read_stored_exchange_times(path: Path) -> np.ndarray:
    """Return (padded, ragged) seconds, float32; zeros if the file is missing or damaged."""
    try:
        stored = json.loads(path.read_text())
        return np.array([stored["padded_s"], stored["ragged_s"]], np.float32)
    except (OSError, ValueError, KeyError, TypeError):
        return np.zeros(2, np.float32)


def time_exchange_s(config: TrainConfig, mesh: Mesh, kind: ExchangeKind) -> float:
    """Return the seconds of one layer's dispatch and combine in the forward pass, on the slowest
    process, with equally loaded experts that return their rows. Every process must call this.
    """
    model, sizes = config.model, [mesh.shape[axis] for axis in EXPERT]
    plan = plan_exchange(
        kind,
        num_nodes=sizes[0],
        devices_per_node=sizes[1],
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
    )
    exchange = make_exchange(plan, EXPERT, None)
    step_tokens = config.batch_size * max(config.text_parts)
    tokens = step_tokens // config.gradient_accumulation_steps // mesh.size

    def send_and_return(x_TD: jax.Array) -> jax.Array:
        number_TK = jnp.arange(tokens * model.num_experts_per_tok, dtype=jnp.int32)
        idx_TK = (number_TK % model.num_experts).reshape(tokens, -1)
        weights_TK = jnp.full(idx_TK.shape, 1 / model.num_experts_per_tok, jnp.float32)
        chosen = TokenChoices.from_topk(idx_TK, weights_TK, model.num_experts)
        y_TD, _ = dispatch_and_combine_without_experts(exchange, x_TD, chosen)
        return y_TD.astype(x_TD.dtype)

    program = jax.jit(
        jax.shard_map(send_and_return, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=False)
    )
    place = jax.sharding.NamedSharding(mesh, BATCH)
    shape = mesh.size * tokens, model.hidden_size
    make_ones = jax.jit(lambda: jnp.ones(shape, config.compute_dtype), out_shardings=place)
    return time_on_slowest_process_s(program, make_ones())
