"""A process of several that share engines: python -m tests.inference.mesh.mesh_ranks MODEL RANK
PROCESSES PORT FOLDER [NAME ...].

FOLDER: for experts on NVMe, of all processes. NAME: keys of `COMPRESSED` or `ON_HOST`; none for all
of `PLACEMENTS`.
Engines of every name answer the same requests, one after the other. Rank 0 prints what they
gave, the last line of every rank says how many experts were copied to its devices under each; under
a name of `ON_HOST`, how many its host computed.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from jmoe.config import DistributedConfig
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.engine import Engine
from jmoe.inference.loading import LoadedModel
from jmoe.inference.mesh.lockstep import Follower, Leader, call_on_all_ranks, join_lockstep
from jmoe.inference.mesh.runner import MeshRunner
from tests.inference.mesh.mesh_traffic import (
    MAX_BATCH,
    PREPARE,
    estimate_rightly,
    note_popularity,
    traffic,
)
from tests.model_configs import CHECKPOINTS
from tests.tiny_engines import SIZES

PATIENCE_S = 300
RINGS: dict[str, dict[str, Any]] = {
    "ring": {"policy": "ring", "ring_slots": 1},
    "nvme": {"policy": "ring", "ring_slots": 1, "expert_tier": "nvme", "host_cache_bytes": 1 << 15},
}
COMPRESSED: dict[str, dict[str, Any]] = {
    "fp8": {"expert_dtype": "fp8"},
    "fp8 ring": {
        "expert_dtype": "fp8",
        "expert_tier": "host",
        "pin_host_memory": "on",
        **RINGS["ring"],
    },
    "fp8 experts": {
        "expert_dtype": "fp8",
        "expert_tier": "host",
        "pin_host_memory": "on",
        "policy": "experts",
    },
    "fp8 auto": {"expert_dtype": "fp8", "expert_tier": "host", "device_bytes": 30_000},
}
ON_HOST: dict[str, dict[str, Any]] = {
    "hybrid": {"policy": "hybrid"},
    "fp8 hybrid": {"policy": "hybrid", "expert_dtype": "fp8"},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "even": {},
    "tensor": {"dense": "tensor"},
    "dedup": {"nodes": 2},
    "ring": {},
    "nvme": {},
    "wrong": {"placement": "lina", "slots_per_device": 3},
    "right": {"placement": "lina", "slots_per_device": 3},
    "random": {"placement": "lina", "slots_per_device": 3},
    "eplb": {
        "placement": "eplb",
        "slots_per_device": 3,
        "rebalance_every": 2,
        "rebalance_window": 3,
    },
}


class Turns:
    """Engines by turns: what every process does with its part of the one whose turn it is."""

    def __init__(self, model: str, folder: str, leader: Leader | None) -> None:
        self.model, self.folder, self.leader = model, folder, leader
        self.copied = dict[str, int]()
        self.noted: list[np.ndarray] = []
        self.runner: MeshRunner | None = None

    def config(self, name: str) -> EngineConfig:
        sizes: dict[str, Any] = SIZES | {"max_batch": MAX_BATCH, "cache_dir": self.folder}
        sizes |= (RINGS | COMPRESSED | ON_HOST).get(name, {})
        placement = PLACEMENTS.get(name, {})
        return EngineConfig(**sizes, mesh=EngineMesh(devices=jax.device_count(), **placement))

    @call_on_all_ranks
    def load(self, name: str) -> None:
        """Load a follower's part of the engine's model."""
        if self.leader is None:
            self.runner = LoadedModel(CHECKPOINTS / self.model, self.config(name)).on_mesh

    @call_on_all_ranks
    def prepare(self, name: str) -> None:
        """Let every gain be worth a swap, or what the name says move the experts."""
        assert self.runner is not None
        self.runner.placer.costs = self.runner.placer.costs._replace(
            row_s=float(name != "random"), copy_s=0.0
        )
        if name in PREPARE:
            PREPARE[name](self.runner)
        if name == "even":
            note_popularity(self.runner, self.noted)
        if name == "right":
            estimate_rightly(self.runner, self.noted)

    @call_on_all_ranks
    def call(self, method: str, arguments: list[Any]) -> None:
        """Make a follower's call of its runner."""
        getattr(self.runner, method)(*arguments)

    @call_on_all_ranks
    def done(self, name: str) -> None:
        assert self.runner is not None
        residency = self.runner.residency
        on_host = residency.stats().on_host
        self.copied[name] = on_host if name in ON_HOST else residency.copied_experts
        residency.close()


class LeaderOfTurns:
    """What an engine takes for its leader."""

    def __init__(self, leader: Leader) -> None:
        self.limit_step_time, self._leader = leader.limit_step_time, leader

    def send_call(self, method: str, *arguments: Any) -> None:
        self._leader.send_call("call", method, arguments)


def lead(turns: Turns, leader: Leader) -> dict[str, Any]:
    """Return what the engines gave."""
    found = {}
    stand_in: Any = LeaderOfTurns(leader)
    for name in sys.argv[6:] or PLACEMENTS:
        turns.load(name)
        engine = Engine(CHECKPOINTS / turns.model, turns.config(name), leader=stand_in)
        assert isinstance(engine._runner, MeshRunner)
        turns.runner = engine._runner
        turns.prepare(name)
        engine.reset_stats()
        answer = traffic(engine)
        placed = engine.stats().placement
        assert placed is not None
        found[name] = (
            answer._asdict()
            | asdict(placed)
            | {"tokens_per_expert": engine.tokens_per_expert().tolist()}
        )
        turns.done(name)
    return found


def main() -> None:
    model, (rank, processes, port) = sys.argv[1], map(int, sys.argv[2:5])
    config = DistributedConfig(
        f"127.0.0.1:{port}",
        processes,
        rank,
        step_timeout_s=PATIENCE_S,
        heartbeat_timeout_s=PATIENCE_S,
    )
    with join_lockstep(config) as role:  # type: ignore[union-attr]
        turns = Turns(model, sys.argv[5], role if isinstance(role, Leader) else None)
        if isinstance(role, Follower):
            role.run_leader_calls(turns)
        else:
            assert role is not None
            print(json.dumps(lead(turns, role)))
    print(json.dumps(turns.copied))


if __name__ == "__main__":
    main()
