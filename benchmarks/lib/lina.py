"""Contestants of `benchmarks.paper.lina_inference`, and the engine's planner without an engine, to
simulate.

Legend: T tokens of a step, K choices a token, E experts of a layer, L layers with experts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.config import ModelConfig
from jmoe.config.engine import EngineMesh
from jmoe.inference.engine import Engine
from jmoe.inference.mesh.expert_placer import ExpertPlacer, SwapCosts
from jmoe.inference.mesh.lockstep import call_on_all_ranks
from jmoe.inference.mesh.programs import GateOutput
from jmoe.inference.mesh.runner import MeshRunner
from jmoe.inference.path_table import PathCounter, PathTable
from jmoe.inference.sampling_params import SamplingParams
from jmoe.mesh import BATCH, REPLICATED, put_sharded
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.offload.expert_index import ExpertIndex
from jmoe.planning.placement import (
    EMPTY,
    Placement,
    PlacementChanges,
    place_experts,
    placement_changes,
)

LENGTHS = (1, 3, 6)
LINA, LINA_WHOLE = "lina, l = 3", "lina, l = 3, all experts"
TABLES = {
    "lina, l = 1": (1, False),
    LINA: (3, False),
    LINA_WHOLE: (3, True),
    "lina, l = 6": (6, False),
}
TIMES = 30
# (layer with experts, gates of the micro-batches, path of each token) -> their results
RunExperts = Callable[[int, list[GateOutput], list[np.ndarray]], list[jax.Array]]


def count_path_tables(
    engine: Engine, folder: Path, prompts: list[list[int]]
) -> dict[int, PathTable]:
    """Return path tables of every length with all experts of a path, counted on these prompts."""
    config = engine.config
    sizes = (config.num_moe_layers, config.num_experts, config.num_experts_per_tok)
    counters = {length: PathCounter(*sizes, length) for length in LENGTHS}
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        for counter in counters.values():
            counter.count_step(engine.last_expert_choices())
    with LazyCheckpoint(folder) as checkpoint:
        fingerprint = checkpoint.routing_fingerprint
    return {
        length: counter.make_table(fingerprint, config.num_experts)
        for length, counter in counters.items()
    }


def load_table(folder: Path, length: int, *, whole: bool = False) -> PathTable:
    """Return a model's path table: of whole paths, or as Lina keeps it, with the top K."""
    with LazyCheckpoint(folder) as checkpoint:
        table = PathTable.load(folder / f"l{length}", checkpoint.routing_fingerprint)
    k = table.header.num_experts_per_tok
    if whole:
        return table
    header = replace(table.header, kept=k)
    return replace(table, header=header, experts=table.experts[:, :k], counts=table.counts[:, :k])


def configure_as_contestant(placer: ExpertPlacer, name: str, folder: Path) -> None:
    """Make a placer decide as one contestant does, with its path length and table of `TABLES`."""
    length, whole = TABLES.get(name, TABLES[LINA])
    lina = name not in ("even", "ideal")
    placer._mesh = replace(placer._mesh, placement="lina" if lina else "even")
    placer._estimates = lina and name != "without_estimate"
    placer._table = load_table(folder, length, whole=whole) if placer._estimates else None
    was_right = make_estimate_check(placer, name)
    placer._estimate_was_right = was_right  # type: ignore[method-assign]


def make_estimate_check(placer: ExpertPlacer, name: str) -> Callable[[int, np.ndarray], bool]:
    """Return the test of whether phase two has to plan; it never has to without a phase two."""
    if name == "without_phase_two":
        return lambda layer, counts_E: True
    return lambda layer, counts_E: ExpertPlacer._estimate_was_right(placer, layer, counts_E)


@call_on_all_ranks
def start_contestant(runner: MeshRunner, name: str, folder: str) -> None:
    """Run a contestant's next steps from the even placement; all processes call this."""
    configure_as_contestant(runner.placer, name, Path(folder))
    experts = runner.residency
    num_experts = experts.index.num_experts
    for layer, placement in enumerate(experts.placements):
        slots = placement.slots_per_device
        even = place_experts(
            np.ones(num_experts),
            placement.num_devices,
            slots_per_device=slots,
            max_packed=slots,
            policy="even",
        )
        experts._held[layer][:] = (
            EMPTY  # what an earlier contestant has copied is of no use to this one
        )
        experts.apply_copies(layer, experts.copies_for_placement(layer, even))
    for learned in (runner.placer._recent_LE, runner.placer._promised_L, runner.placer._kept_L):
        learned[:] = 0
    run = MeshRunner._run_experts.__get__(runner)
    runner._run_experts = _with_balanced_choices(runner, run) if name == "ideal" else run  # type: ignore[method-assign]


MeshRunner.start_contestant = start_contestant  # type: ignore[attr-defined]  # followers find it there


def _with_balanced_choices(runner: MeshRunner, run: RunExperts) -> RunExperts:
    """Return `_run_experts` with choices dealt to all experts; for unpadded whole batches."""
    experts = runner.config.num_experts
    made: dict[tuple[int, int], tuple[jax.Array, jax.Array]] = {}

    def dealt_out(gate: GateOutput) -> GateOutput:
        shape = gate.all_idx_TK.shape
        if shape not in made:
            idx_TK = (np.arange(shape[0] * shape[1]) % experts).astype(np.int32).reshape(shape)
            made[shape] = (
                put_sharded(idx_TK, runner.mesh, BATCH),
                put_sharded(idx_TK, runner.mesh, REPLICATED),
            )
        own, every = made[shape]
        return GateOutput(gate.routed._replace(idx_TK=own), every)

    def run_experts(
        moe_layer: int, gates: list[GateOutput], path: list[np.ndarray]
    ) -> list[jax.Array]:
        found: list[jax.Array] = run(moe_layer, list(map(dealt_out, gates)), path)
        return found

    return run_experts


def measure_layer_rows(
    engine: Engine, folder: Path, batches: list[list[list[int]]], names: Sequence[str]
) -> list[JsonObject]:
    """Return a row for each contestant and layer: times here, with the host waiting for each."""
    runner: Any = engine._runner
    rows = []
    for name in names:
        runner.start_contestant(name, str(folder))
        taken: list[list[tuple[float, float, float]]] = [
            [] for _ in range(runner.config.num_moe_layers)
        ]
        inner, ended = runner._run_experts, [0.0]

        def run_experts(
            moe_layer: int,
            gates: list[GateOutput],
            path: list[np.ndarray],
            taken: list[list[tuple[float, float, float]]] = taken,
            inner: RunExperts = inner,
            ended: list[float] = ended,
        ) -> list[jax.Array]:
            jax.block_until_ready([gate.all_idx_TK for gate in gates])
            begun = time.perf_counter()
            loads_N = runner.placer._loads_N.copy()
            out = jax.block_until_ready(inner(moe_layer, gates, path))
            now = time.perf_counter()
            least = float(np.min(runner.placer._loads_N - loads_N))
            taken[moe_layer].append((now - (ended[0] if moe_layer else begun), now - begun, least))
            ended[0] = now
            return out

        runner._run_experts = run_experts
        for prompts in batches:
            engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
        runner._run_experts = inner
        row_s = runner.placer.costs.row_s
        for layer, found in enumerate(taken):
            whole, experts, least = np.array(found[1:]).T
            waits = np.maximum(0, experts - row_s * least)
            row = {
                "contestant": name,
                "layer": layer,
                "layer_ms_median": round(1e3 * float(np.median(whole)), 2) if layer else None,
                "layer_ms_p95": round(1e3 * float(np.percentile(whole, 95)), 2) if layer else None,
                "experts_ms_median": round(1e3 * float(np.median(experts)), 2),
                "all_to_all_ms_median": round(1e3 * float(np.median(waits)), 2),
                "all_to_all_ms_p95": round(1e3 * float(np.percentile(waits, 95)), 2),
            }
            rows.append(report.progress(row))
    return rows


def most_popular_experts(popularity_E: np.ndarray, count: int) -> set[int]:
    """Return the `count` most popular experts."""
    return set(np.argsort(-popularity_E, kind="stable")[:count].tolist())


def measure_estimate_accuracy(
    kind: str, steps: list[list[np.ndarray]], folder: Path, config: ModelConfig
) -> list[JsonObject]:
    """Return a row for each path length and kind of table: a figure a layer from the second."""
    experts, k = config.num_experts, config.num_experts_per_tok
    most, rows = min(2 * k, max(1, experts // 2)), []
    for length in LENGTHS:
        for whole in (False, True):
            table = load_table(folder, length, whole=whole)
            equal: list[list[bool]] = [[] for _ in range(config.num_moe_layers - 1)]
            right: list[list[float]] = [[] for _ in range(config.num_moe_layers - 1)]
            for step in steps:
                for layer in range(config.num_moe_layers - 1):
                    actual_E = np.bincount(step[layer + 1].ravel(), minlength=experts + 1)[:-1]
                    sets = [
                        most_popular_experts(x, most)
                        for x in (
                            table.estimate_popularity(step[: layer + 1]).popularity_E,
                            actual_E,
                        )
                    ]
                    equal[layer].append(sets[0] == sets[1])
                    right[layer].append(len(sets[0] & sets[1]) / most)
            means = {"sets_equal": equal, "share_right": right}
            rows.append(
                {"text": kind, "path_length": length, "kept": "all" if whole else "top k"}
                | {
                    name: [round(float(np.mean(x)), 3) for x in by_layer]
                    for name, by_layer in means.items()
                }
            )
    return rows


# The planner without an engine


class WeightlessPlacedExperts:
    """The places of experts, as in `PlacedExperts` but without weights; a device is a process."""

    def __init__(self, config: ModelConfig, devices: int, slots: int) -> None:
        self.index = ExpertIndex(config.num_moe_layers, config.num_experts)
        self.process_of_N, self.copies_N = np.arange(devices), np.zeros(devices, np.int64)
        self.copied_bytes, self.copied_s = 0, 0.0
        even = place_experts(
            np.ones(config.num_experts),
            devices,
            slots_per_device=slots,
            max_packed=slots,
            policy="even",
        )
        self.placements: list[Placement] = [even] * config.num_moe_layers
        self._held = [even.physical_to_logical.copy() for _ in self.placements]
        self.slowest_copies = 0  # of the process that has most to copy, every time

    def copies_for_placement(self, layer: int, placement: Placement) -> PlacementChanges:
        return placement_changes(self._held[layer], placement)

    def apply_copies(self, layer: int, changed: PlacementChanges) -> None:
        copies_N = np.zeros_like(self.copies_N)
        for fill in changed.fills:
            self._held[layer][fill.device, fill.slot] = fill.expert
            copies_N[fill.device] += 1
        self.copies_N += copies_N
        self.slowest_copies += int(np.max(copies_N))
        self.placements[layer] = changed.placement


def make_contestant_planner(
    name: str, folder: Path, places: WeightlessPlacedExperts, costs: SwapCosts, config: ModelConfig
) -> ExpertPlacer:
    """Return the engine's planner, set as a contestant's."""
    devices, slots = len(places.copies_N), places.placements[0].slots_per_device
    mesh, experts = EngineMesh(devices=devices, placement="lina", slots_per_device=slots), places
    placer = ExpertPlacer(mesh, experts, config.num_experts_per_tok, True, None)  # type: ignore[arg-type]
    configure_as_contestant(placer, name, folder)
    placer.costs = costs
    return placer


class ReplayTotals(NamedTuple):
    """Totals of a step: busiest device's rows, copies, plans. replanned: share of estimates."""

    busiest: np.ndarray
    copies: np.ndarray
    plans: np.ndarray
    replanned: float


def replay_choices(placer: ExpertPlacer, steps: list[list[np.ndarray]]) -> ReplayTotals:
    """Run a planner on recorded choices and return the totals of the steps."""
    places: Any = placer._experts
    busiest, copies, plans = [], [], []
    for step in steps:
        path: list[np.ndarray] = []
        most, copied, planned = 0, places.slowest_copies, placer._replans + placer._num_estimates
        for layer, idx_TK in enumerate(step):
            placer.place_by_estimate(layer, path)
            placer.record_choices_and_correct_placement(layer, idx_TK)
            placement = places.placements[layer]
            token, choice = np.nonzero(idx_TK < placement.num_experts)
            device = (
                placement.replica_of_tokens(token, idx_TK[token, choice])
                // placement.slots_per_device
            )
            most += int(np.max(np.bincount(device, minlength=1)))
            path.append(idx_TK)
        placer.end_step()
        busiest.append(most)
        copies.append(places.slowest_copies - copied)
        plans.append(placer._replans + placer._num_estimates - planned)
    replanned = placer._replans / placer._num_estimates if placer._num_estimates else 0.0
    return ReplayTotals(np.array(busiest, float), np.array(copies), np.array(plans), replanned)


def measure_planning_ms(
    folder: Path, steps: list[list[np.ndarray]], engine: Engine, many_devices: int
) -> JsonObject:
    """Return the median milliseconds of a plan and its parts, beside the paper's figures."""
    config, table = engine.config, load_table(folder, 3)
    step, layer = steps[0], config.num_moe_layers - 1
    counts_E = np.bincount(step[layer].ravel(), minlength=config.num_experts + 1)[:-1].astype(float)
    slots = engine.residency.placements[0].slots_per_device

    def median_ms(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(TIMES):
            begun = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - begun))
        return report.median(taken, 3)

    def plan(devices: int, slots: int) -> Callable[[], None]:
        places = WeightlessPlacedExperts(config, devices, slots)

        def call() -> None:
            planned = place_experts(
                counts_E, devices, slots_per_device=slots, max_packed=slots, policy="lina"
            )
            places.copies_for_placement(layer, planned)

        return call

    right = make_contestant_planner(
        LINA, folder, WeightlessPlacedExperts(config, 2, slots), SwapCosts(1.0, 1e9), config
    )
    right._table = _TrueTable(counts_E)  # type: ignore[assignment]
    right.place_by_estimate(layer, step[:layer])
    return {
        "lookup": median_ms(lambda: table.estimate_popularity(step[:layer])),
        "plan_2_devices": median_ms(plan(2, slots)),
        f"plan_{many_devices}_devices": median_ms(plan(many_devices, 4)),
        "nothing_changes": median_ms(
            lambda: right.record_choices_and_correct_placement(layer, step[layer])
        ),
        "paper_plan": 6.2,
        "paper_nothing_changes": 1.45,
    }


class _TrueTable:
    """A path table that knows the choices beforehand."""

    def __init__(self, popularity_E: np.ndarray) -> None:
        self.popularity_E = popularity_E

    def estimate_popularity(self, path: Sequence[np.ndarray]) -> "_TrueTable":
        return self
