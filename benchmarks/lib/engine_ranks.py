"""Engines over several processes, as `serve.py` has them: rank 0 leads, the others follow, several
engines at once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.lib import report
from benchmarks.lib.linked_nodes import ADDRESSES
from jmoe.config import DistributedConfig
from jmoe.config.engine import EngineConfig
from jmoe.inference.mesh.lockstep import Leader, call_on_all_ranks

if TYPE_CHECKING:
    from jmoe.inference.engine import Engine
    from jmoe.inference.loading import LoadedModel

XLA_THREADS = 4  # more than a rank's one core: one that waits for another rank computes nothing
Engines = Mapping[str, "Engine"]
Load = Mapping[str, tuple[Path, EngineConfig]]


def pin_to_one_core(rank: int) -> None:
    """Keep this rank and XLA's threads to one core, as if its device had no more.

    An idle rank would otherwise lend its core to a busy one. Call this before JAX is used.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ["NPROC"] = str(XLA_THREADS)


class EngineRank(NamedTuple):
    """A rank and its job's address. mbit_per_s: the link between two nodes; 0 without one."""

    rank: int
    num_ranks: int
    port: int
    mbit_per_s: float


def run_rank(
    place: EngineRank, cache_dir: Path, load: Load, measure: Callable[[Engines], object]
) -> None:
    """Run as a rank: rank 0 prints `measure` of an engine of each name; the others follow it.

    cache_dir: of compiled programs. load: a checkpoint's folder and the engine's options, by name.
    """
    import jax

    from jmoe.inference.engine import Engine
    from jmoe.inference.mesh.lockstep import Follower, join_lockstep

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if place.num_ranks == 1:
        report.finish(measure({name: Engine(*what) for name, what in load.items()}))
        return
    host = ADDRESSES[0] if place.mbit_per_s else "127.0.0.1"
    config = DistributedConfig(
        coordinator_address=f"{host}:{place.port}",
        num_processes=place.num_ranks,
        process_id=place.rank,
        heartbeat_timeout_s=120,
    )
    with join_lockstep(config) as role:
        runners = _EngineRunners(load)
        if isinstance(role, Follower):
            role.run_leader_calls(runners)
            return
        runners.leader = role
        engines = {}
        for name, (folder, options) in load.items():
            runners.load(name)
            engines[name] = Engine(folder, options, leader=_LeaderOfNamedEngine(role, name))
        report.finish(measure(engines))


class _LeaderOfNamedEngine:
    """A leader of followers that run several engines each."""

    def __init__(self, leader: Leader, name: str) -> None:
        self.limit_step_time, self._leader, self._name = leader.limit_step_time, leader, name

    def send_call(self, method: str, *arguments: object) -> None:
        self._leader.send_call("call", self._name, method, arguments)


class _EngineRunners:
    """A follower's share of every engine; on rank 0 only the message to load it."""

    def __init__(self, load: Load) -> None:
        self.leader: Leader | None = None
        self._load, self._models = load, dict[str, "LoadedModel"]()

    @call_on_all_ranks
    def load(self, name: str) -> None:
        from jmoe.inference.loading import LoadedModel

        if self.leader is None:
            self._models[name] = LoadedModel(*self._load[name])

    @call_on_all_ranks
    def call(self, name: str, method: str, arguments: Sequence[object]) -> None:
        getattr(self._models[name].runner, method)(*arguments)
