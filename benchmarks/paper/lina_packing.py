"""Time expert packing over a slow link between two nodes (Lina, Tables 3 and 4).

    sudo python benchmarks/paper/lina_packing.py                        two shapes at 100 Mbit/s
    sudo python benchmarks/paper/lina_packing.py --shapes 0 --rounds 3

Two nodes of two ranks with one device each; one expert a device without packing. The controller of
`--comm.packing auto` runs a training of its own from step 0 until it is done. Then its next steps
(`controller`) are timed in turn with those of trainings with 1, 2 and 4 experts a device from the
start, from a barrier to a barrier; `off_best`: how much longer a step takes than with the best of
these three, median, round by round. all_to_all_ms, experts_ms: of a forward micro-operation, as the
controller measures them. pipelining_efficiency: experts_ms / all_to_all_ms, at most 1: the part of
an all-to-all that experts can hide. utilisation: processor time of all ranks over wall time and
cores, which stands in for the GPU utilisation of the paper's table 4.

trials: what the controller paid until it was done: `deciding_s` to measure and to move the state,
`slower_s` for the steps with a packing that it left again, beyond those of the packing that it
kept.

Shape 0 sends much to small experts; of shape 1 the experts are large and few tokens come, so that
their gradients, which replicas have to add up, are more than what the all-to-alls carry, and Lina's
rule alone would be wrong.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import copy
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from benchmarks.comm.steps import SEQUENCE_LENGTH, compiled, config_of
from benchmarks.lib import report
from benchmarks.lib.ranks import (
    NUM_NODES,
    Clock,
    Rounds,
    add_rank_options,
    join_as_rank,
    launch_ranks,
)
from benchmarks.lib.report import JsonObject
from jmoe.config import TrainConfig

RANKS_PER_NODE = 2
SHAPE = (1, NUM_NODES, RANKS_PER_NODE)
PACKINGS = (1, 2, 4)
# (hidden size, layers, experts, top-k, tokens of a rank, intermediate size)
SHAPES = [(256, 2, 4, 2, 1024, 64), (256, 2, 4, 1, 64, 1024)]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="by number"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[100], help="Mbit/s, both directions together"
    )
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument(
        "--schedule", default="pipelined", help="of collectives; Lina's is pipelined"
    )
    parser.add_argument("--chunk-bytes", type=int, help="default: what the link carries in 20 ms")
    parser.add_argument("--cache-dir", help="keep compiled programs in this folder")
    add_rank_options(parser)
    return parser.parse_args()


class Packed:
    """The program of one packing, its state and figures."""

    def __init__(self, a: argparse.Namespace, config: TrainConfig) -> None:
        import jax

        from jmoe.config.parallel import packed_shape
        from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
        from jmoe.training.fused.step import FusedTrainer

        mesh = make_mesh(packed_shape(SHAPE, config.comm.initial_packing))
        self.trainer = FusedTrainer(config, mesh)
        rows = config.batch_size // jax.process_count()
        local = (
            np.random.default_rng(a.rank)
            .integers(0, 256, (1, rows, SEQUENCE_LENGTH + 1))
            .astype(np.int32)
        )
        sharding = jax.sharding.NamedSharding(mesh, ACCUMULATED_BATCH)
        self.tokens = jax.make_array_from_process_local_data(sharding, local)
        lowered = self.trainer.step.lower(self.trainer.state_shape, self.tokens)
        self.trainer.step = compiled(lowered, Path(a.cache_dir), a.rank)
        self.state = self.trainer.init()
        self.taken, self.busy_s = Rounds(), 0.0

    def __call__(self) -> object:
        self.state, metrics = self.trainer.step(self.state, self.tokens)
        return metrics

    def second_training(self) -> "Packed":
        """Return a second training with the same program."""
        other = copy.copy(self)
        other.state, other.taken = self.trainer.init(), Rounds()
        return other

    def time(self, clock: Clock) -> None:
        begun = time.process_time()
        self.taken.add(*clock(self))
        self.busy_s += time.process_time() - begun


class Controlled(NamedTuple):
    """A finished run of the packing controller: its final state, decisions and their cost."""

    packing: int
    run: Packed
    decisions: list[str]
    deciding_s: float
    steps: list[tuple[int, float]]  # packing and seconds

    def trials(self, kept_s: float) -> JsonObject:
        """Return the cost of the controller's trials. kept_s: of a step with its final packing."""
        first = next(
            (n for n, (packing, _) in enumerate(self.steps) if packing != self.steps[0][0]),
            len(self.steps),
        )
        left = [seconds for packing, seconds in self.steps[first:] if packing != self.packing]
        slower_s = sum(seconds - kept_s for seconds in left)
        return {
            "deciding_s": round(self.deciding_s, 2),
            "steps_left": len(left),
            "slower_s": round(slower_s, 2),
        }


def control(config: TrainConfig, packed: dict[int, Packed]) -> Controlled:
    """Train until the controller has settled on a packing."""
    import jax

    from jmoe.training.expert_packing import PackingController, move_state

    controller, decisions, deciding_s = PackingController(config, SHAPE, 1), list[str](), 0.0
    steps: list[tuple[int, float]] = []
    now = packed[1].second_training()
    while not controller.done:
        begun = time.perf_counter()
        if controller.is_packing_choice_due(len(steps)):
            before = controller.packing
            decision, _ = controller.measure_and_choose_packing(len(steps), now.trainer)
            decisions.append(f"step {len(steps)}: {decision.reason}")
            if controller.packing != before:
                after = packed[controller.packing].second_training()
                after.state = move_state(now.state, now.trainer, after.trainer)
                now = after
            deciding_s += time.perf_counter() - begun
            begun = time.perf_counter()
        jax.block_until_ready(now())
        seconds = time.perf_counter() - begun
        controller.note_step(seconds, compiled=False)
        steps.append((controller.packing, seconds))
    return Controlled(controller.packing, now, decisions, deciding_s, steps)


def measure(a: argparse.Namespace, mesh: Mesh, clock: Clock) -> list[JsonObject]:
    """Return a row for every shape and packing."""
    return [
        row for number in a.shapes for row in measure_shape(a, mesh.size, clock, SHAPES[number])
    ]


def measure_shape(
    a: argparse.Namespace, num_ranks: int, clock: Clock, shape: tuple[int, ...]
) -> list[JsonObject]:
    from jax.experimental import multihost_utils

    from jmoe.training.expert_packing import max_over_processes, time_exchange_and_experts

    configs = {
        p: config_of(a, shape, num_ranks, {"schedule": a.schedule, "packing": p})
        for p in (*PACKINGS, "auto")
    }
    packed = {p: Packed(a, configs[p]) for p in PACKINGS}
    for run in packed.values():
        clock(run)
    controlled = control(configs["auto"], packed)
    runs = [*packed.items(), (controlled.packing, controlled.run)]
    for _ in range(a.rounds):
        for _, run in runs:
            run.time(clock)
    measured = {
        p: max_over_processes(list(time_exchange_and_experts(run.trainer)))
        for p, run in packed.items()
    }
    busy_s = multihost_utils.process_allgather(np.array([run.busy_s for _, run in runs])).sum(
        axis=0
    )
    best = min(
        (run.taken for run in packed.values()), key=lambda taken: report.median(taken.seconds)
    )
    names = ("hidden_size", "layers", "experts", "top_k", "tokens_per_rank", "intermediate_size")
    rows = []
    for (p, run), busy in zip(runs, busy_s.tolist(), strict=True):
        sent_s, experts_s = measured[p]
        rows.append(
            {
                "mbit_per_s": a.rates[0],
                **dict(zip(names, shape, strict=True)),
                "experts_per_device": p,
                **run.taken.result_row("unpacked", packed[1].taken),
                "all_to_all_ms": round(1e3 * sent_s, 3),
                "experts_ms": round(1e3 * experts_s, 3),
                "pipelining_efficiency": round(min(1.0, experts_s / sent_s), 3) if sent_s else None,
                "utilisation": round(
                    busy / sum(run.taken.seconds) / len(os.sched_getaffinity(0)), 3
                ),
                "controller": run is controlled.run,
                "off_best": round(report.ratio(run.taken.seconds, best.seconds) - 1, 3),
            }
        )
    trials = controlled.trials(report.median(controlled.run.taken.seconds))
    return [*rows[:-1], rows[-1] | {"trials": trials, "decisions": controlled.decisions}]


def main() -> None:
    a = parse()
    if a.rank is not None:
        a.nodes, a.ranks_per_node, a.bucket_bytes, a.native = NUM_NODES, RANKS_PER_NODE, 0, "auto"
        report.finish(measure(a, *join_as_rank(a, RANKS_PER_NODE)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for rate in a.rates
            for row in launch_ranks(rate, a.cache_dir or folder, RANKS_PER_NODE)
        ]
    decisions = [line for row in rows for line in row.pop("decisions", [])]
    options = report.options(a, "rates", "rank", "port", "cache_dir")
    result = {"benchmark": "expert packing", "nodes": NUM_NODES, "options": options, "rows": rows}
    report.finish(result | {"decisions": decisions, "versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
