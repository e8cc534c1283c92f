"""Training with experts on NVMe: python benchmarks/training_tiers.py step | traffic | replay | two_nodes

step     seconds of a step with and without fetching ahead, beside max(computing, bytes / disk rate); what fio, moving
         as many bytes a second by itself, does to a step that needs no disk
traffic  bytes of a step with half of the experts idle, beside those with all of them in use
replay   seconds to replay 1, 10 and 100 missed steps of an expert, beside those to fetch it
two_nodes  as step, in two processes with a limited link between them; needs root

Prints one JSON object as its last line. Legend: E experts of a layer, N layers with experts.
"""

if __name__ == "__main__":
    import script

    script.reexec_with_env()

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks.lib import fio
from benchmarks.offload import two_nodes
from jmoe.config import MeshConfig, ModelConfig, OptimizerConfig, RouterConfig, TiersConfig, TrainConfig
from jmoe.memory.buffers import RecordBuffers
from jmoe.memory.version_store import VersionStore
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.offload.expert_state import ExpertState, ExpertStats
from jmoe.offload.train_stores import THREADS
from jmoe.training.state import TrainState
from jmoe.training.streamed_step import StreamedTrainer


def model_of(a: argparse.Namespace) -> ModelConfig:
    """A model of the size asked for, whose router's choices can be steered by its bias."""
    return ModelConfig(
        vocab_size=1024,
        hidden_size=a.hidden_size,
        num_hidden_layers=a.layers,
        num_attention_heads=a.hidden_size // 64,
        num_key_value_heads=a.hidden_size // 64,
        moe_intermediate_size=a.intermediate_size,
        num_experts=a.experts,
        num_experts_per_tok=a.top_k,
        capacity_factor=1.25,
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0, bias_update_speed=0.0),
    )


def add_model_options(parser: argparse.ArgumentParser, layers: int) -> None:
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)


def config_of(a: argparse.Namespace, folder: Path, mesh: MeshConfig | None = None, **tiers: Any) -> TrainConfig:
    """A step of `model_of` with its records in `folder`."""
    mesh = mesh or MeshConfig()
    records = a.layers * a.experts * 3 * a.hidden_size * a.intermediate_size * 16 // mesh.expert_inter  # of a process
    return TrainConfig(
        model=model_of(a),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0),
        mesh=mesh,
        batch_size=a.batch_size,
        sequence_length=a.sequence_length,
        tiers=TiersConfig(
            path=str(folder), **({"host_cache_bytes": int(a.cache * records), "gradients": "nvme"} | tiers)
        ),
    )


@dataclasses.dataclass
class Session:
    """A program with its state."""

    program: StreamedTrainer
    state: TrainState

    @classmethod
    def open(cls, config: TrainConfig, mesh: Mesh | None = None) -> "Session":
        program = StreamedTrainer(config, mesh or make_mesh((1, 1, 1), jax.devices()[:1]))
        return cls(program, program.init())

    def step(self, number: int) -> tuple[float, int, int]:
        """(seconds, bytes read from NVMe, bytes written to it) of a step on random tokens."""
        config = self.program.config
        shape = (1, config.batch_size, config.sequence_length + 1)
        drawn = np.random.default_rng(number).integers(0, config.model.vocab_size, shape).astype(np.int32)
        place = NamedSharding(self.program.mesh, ACCUMULATED_BATCH)
        tokens = jax.make_array_from_callback(shape, place, lambda index: drawn[index])
        before, begun = moved(self.program.expert_stats()), time.perf_counter()
        self.state, metrics = self.program.step(self.state, tokens)
        jax.block_until_ready(metrics)
        step_s, after = time.perf_counter() - begun, moved(self.program.expert_stats())
        return step_s, after[0] - before[0], after[1] - before[1]

    def only(self, experts: int) -> None:
        """Let the routers choose only the first experts of each layer."""

        def bias(b: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(b.shape[-1]) < experts, 0.0, -10.0) + jnp.zeros_like(b)

        self.state = dataclasses.replace(self.state, router_bias=jax.tree.map(bias, self.state.router_bias))


def moved(stats: ExpertStats) -> tuple[int, int]:
    """Bytes (read from NVMe, written to it) so far."""
    stores = [store for store in (stats.weights, stats.moments, stats.gradients) if store is not None]
    return sum(s.nvme.num_bytes for s in stores), sum(s.nvme_writes.num_bytes for s in stores)


def disk_rates(program: StreamedTrainer, folder: Path, rounds: int) -> tuple[float, float]:
    """Median bytes/s of (reads, writes) of records of moments, alone and one after the other."""
    layout = program.stores.layouts["moments"]
    count = max(4, (1 << 28) // layout.record_bytes)
    reads, writes = [], []
    with VersionStore.open(folder, layout, count, fingerprint="rates") as store:
        record_R = RecordBuffers(1, store.layout.record_bytes).slot(0)
        for _ in range(rounds):
            for rates, call in ((writes, store.write), (reads, store.read_into)):
                begun = time.perf_counter()
                for index in range(count):
                    call(index, record_R)
                rates.append(count * record_R.nbytes / (time.perf_counter() - begun))
    return median(reads), median(writes)


def measure_steps(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """With fetching ahead, without, and with everything in host memory, also beside fio; in alternation."""
    kinds = {
        "ahead": config_of(a, folder / "ahead", experts="nvme", optimizer="nvme", device_layers=2),
        "not_ahead": config_of(a, folder / "not_ahead", experts="nvme", optimizer="nvme", device_layers=1),
        "host": config_of(a, folder, experts="host", optimizer="host", gradients="host"),
    }
    sessions = {name: Session.open(config) for name, config in kinds.items()}
    if fio.is_here():
        sessions["host_beside_io"] = sessions["host"]
    read_rate, write_rate = disk_rates(sessions["ahead"].program, folder / "rates", 3)
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name in sessions}
    rates = (0.0, 0.0)  # bytes/s read and written by the step with fetching ahead, which comes first
    for number in range(a.rounds + 2):
        for name, session in sessions.items():
            with fio.beside(folder / "fio", *rates) if name == "host_beside_io" else nullcontext():
                measured = session.step(number)
            if name == "ahead":
                rates = measured[1] / measured[0], measured[2] / measured[0]
            if number >= 2:
                seen[name].append(measured)
    for name in kinds:
        sessions[name].program.close()
    step_s = {name: median(s for s, _, _ in steps) for name, steps in seen.items()}
    read_bytes, written_bytes = (median(step[i] for step in seen["ahead"]) for i in (1, 2))
    disk_s = read_bytes / read_rate + written_bytes / write_rate
    bound_s = max(step_s["host"], disk_s)
    result = {
        "step_s": step_s,
        "disk_s": disk_s,
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
        "read_bytes_per_s": read_rate,
        "write_bytes_per_s": write_rate,
        "ahead_against_bound": step_s["ahead"] / bound_s,
        "not_ahead_against_bound": step_s["not_ahead"] / bound_s,
    }
    if beside_io_s := step_s.get("host_beside_io"):
        result["io_slows_computing"] = beside_io_s / step_s["host"]
        result["ahead_against_bound_beside_io"] = step_s["ahead"] / max(beside_io_s, disk_s)
    return result


def measure_traffic(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """With a cache for the same share of the experts in use, beside what is being read and written."""
    result = {}
    for name, experts in (("all", a.experts), ("half", a.experts // 2)):
        record_bytes = 16 * 3 * a.hidden_size * a.intermediate_size
        slots = int(a.cache * a.layers * experts) + 4 * THREADS  # two under way for each that reads or writes
        cache_bytes = slots * (record_bytes + 4 * 4096)
        session = Session.open(
            config_of(a, folder / name, experts="nvme", optimizer="nvme", host_cache_bytes=cache_bytes)
        )
        session.only(experts)
        steps = [session.step(i) for i in range(a.rounds + 2)][2:]
        result[name] = median(read + written for _, read, written in steps)
        session.program.close()
    return result | {"half_against_all": result["half"] / result["all"]}


def measure_replay(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One expert after the other, with nothing else under way."""
    session = Session.open(config_of(a, folder, experts="nvme", optimizer="nvme", host_cache_bytes=a.small_cache))
    state: ExpertState = session.program.experts
    result: dict[str, Any] = {"parameters": 3 * a.hidden_size * a.intermediate_size}
    nobody = np.zeros(a.experts, np.bool_)
    for steps in (1, 10, 100):
        seconds = []
        for _ in range(a.rounds + 1):
            state.flush_updates()
            for _ in range(steps):
                state.commit(1e-3, 1.0)
            state.begin(range(a.layers))
            before = state.stats()
            begun = time.perf_counter()
            state.fetch(0, nobody | (np.arange(a.experts) == 0))
            seconds.append(time.perf_counter() - begun)
            after = state.stats()
            assert after.replayed_steps - before.replayed_steps == steps
            state.release()
            for layer in range(1, a.layers):
                state.fetch(layer, nobody)
                state.release()
        result[f"fetch_and_{steps}_steps_s"] = median(seconds[1:])
    session.program.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {
        "step": measure_steps,
        "traffic": measure_traffic,
        "replay": measure_replay,
        "two_nodes": two_nodes.measure,
    }
    parser.add_argument("what", choices=measures)
    parser.add_argument("--folder", type=Path, help="where records are; default: the system's temporary folder")
    add_model_options(parser, layers=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--cache", type=float, default=0.25, help="share of all records in host memory")
    parser.add_argument("--rounds", type=int, default=7)
    two_nodes.add_options(parser)
    a = parser.parse_args()
    if a.rank is not None:
        print(json.dumps(two_nodes.worker(a)), flush=True)
        return 0
    a.small_cache = 40 * 16 * 3 * a.hidden_size * a.intermediate_size
    with tempfile.TemporaryDirectory(prefix="jmoe-training-tiers-", dir=a.folder) as folder:
        print(json.dumps(measures[a.what](a, Path(folder))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
