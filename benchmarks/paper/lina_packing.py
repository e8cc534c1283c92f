"""Expert packing over a slow link between two nodes (Lina, Tables 3 and 4); the last line of output is one JSON object.

    sudo python benchmarks/paper/lina_packing.py                        two shapes at 100 Mbit/s
    sudo python benchmarks/paper/lina_packing.py --shapes 0 --rounds 3

Two nodes of two ranks with one device each; one expert a device without packing. Steps with 1, 2 and 4 experts a device
are timed in turn, from a barrier to a barrier. Then the controller of `--comm.packing auto` runs a training of its own
from step 0 until it is done; `controller` marks what it chose, `off_best` how much longer a step takes than with the
best. all_to_all_ms, experts_ms: of a forward micro-operation, as the controller measures them.
pipelining_efficiency: experts_ms / all_to_all_ms, at most 1: the part of an all-to-all that experts can hide.

Shape 0 sends much to small experts; of shape 1 the experts are large and few tokens come, so that their gradients,
which replicas have to add up, are more than what the all-to-alls carry, and Lina's rule alone would be wrong.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder
    from jmoe.runtime import reexec_with_env

    reexec_with_env()

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comm.steps import SEQUENCE_LENGTH, compiled, config_of
from benchmarks.lib import report
from benchmarks.lib.ranks import NUM_NODES, Clock, Taken, add_rank_options, join, launch
from jmoe.config import TrainConfig

RANKS_PER_NODE = 2
SHAPE = (1, NUM_NODES, RANKS_PER_NODE)
PACKINGS = (1, 2, 4)
# (hidden size, layers, experts, top-k, tokens of a rank, intermediate size)
SHAPES = [(256, 2, 4, 2, 1024, 64), (256, 2, 4, 1, 64, 1024)]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="by number")
    parser.add_argument("--rates", type=float, nargs="+", default=[100], help="Mbit/s, both directions together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--schedule", default="pipelined", help="of collectives; Lina's is pipelined")
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
        from jmoe.training.step import FusedTrainer

        mesh = make_mesh(packed_shape(SHAPE, config.comm.first_packing))
        self.trainer = FusedTrainer(config, mesh)
        rows = config.batch_size // jax.process_count()
        local = np.random.default_rng(a.rank).integers(0, 256, (1, rows, SEQUENCE_LENGTH + 1)).astype(np.int32)
        sharding = jax.sharding.NamedSharding(mesh, ACCUMULATED_BATCH)
        self.tokens = jax.make_array_from_process_local_data(sharding, local)
        lowered = self.trainer.step.lower(self.trainer.state_shape, self.tokens)
        self.trainer.step = compiled(lowered, Path(a.cache_dir), a.rank)
        self.state = self.trainer.init()
        self.taken = Taken()

    def __call__(self) -> Any:
        self.state, metrics = self.trainer.step(self.state, self.tokens)
        return metrics


def control(config: TrainConfig, packed: dict[int, Packed]) -> tuple[int, list[str]]:
    """Return what the controller chooses in a run of its own, and each of its decisions."""
    import jax

    from jmoe.training.packing import PackingController, moved

    controller, decisions, step = PackingController(config, SHAPE, 1), list[str](), 0
    packed[1].state = packed[1].trainer.init()
    while not controller.done:
        now = packed[controller.packing]
        if controller.is_due(step):
            decision, _ = controller.decide(step, now.trainer, now.state)
            decisions.append(f"step {step}: {decision.reason}")
            after = packed[controller.packing]
            if after is not now:
                after.state = moved(now.state, now.trainer, after.trainer)
            now = after
        begun = time.perf_counter()
        jax.block_until_ready(now())
        controller.note_step(time.perf_counter() - begun, compiled=False)
        step += 1
    return controller.packing, decisions


def measure(a: argparse.Namespace, mesh: Any, clock: Clock) -> list[dict[str, Any]]:
    """Return a row for every shape and packing."""
    return [row for number in a.shapes for row in measure_shape(a, mesh.size, clock, SHAPES[number])]


def measure_shape(a: argparse.Namespace, num_ranks: int, clock: Clock, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    from jmoe.training.packing import agreed, micro_operations

    configs = {p: config_of(a, shape, num_ranks, {"schedule": a.schedule, "packing": p}) for p in (*PACKINGS, "auto")}
    packed = {p: Packed(a, configs[p]) for p in PACKINGS}
    for run in packed.values():
        clock(run)
    for _ in range(a.rounds):
        for run in packed.values():
            run.taken.add(*clock(run))
    measured = {p: agreed(list(micro_operations(run.trainer, run.state))) for p, run in packed.items()}
    chosen, decisions = control(configs["auto"], packed)
    medians = {p: report.median(run.taken.seconds) for p, run in packed.items()}
    names = ("hidden_size", "layers", "experts", "top_k", "tokens_per_rank", "intermediate_size")
    rows = []
    for p, run in packed.items():
        sent_s, experts_s = measured[p]
        rows.append(
            {
                "mbit_per_s": a.rates[0],
                **dict(zip(names, shape, strict=True)),
                "experts_per_device": p,
                **run.taken.row("unpacked", packed[1].taken),
                "all_to_all_ms": round(1e3 * sent_s, 3),
                "experts_ms": round(1e3 * experts_s, 3),
                "pipelining_efficiency": round(min(1.0, experts_s / sent_s), 3) if sent_s else None,
                "controller": p == chosen,
                "off_best": round(medians[p] / min(medians.values()) - 1, 3),
            }
        )
    return [*rows[:-1], rows[-1] | {"decisions": decisions}]


def main() -> None:
    a = parse()
    if a.rank is not None:
        a.ranks_per_node, a.bucket_bytes = RANKS_PER_NODE, 0
        report.finish(measure(a, *join(a, RANKS_PER_NODE)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for rate in a.rates for row in launch(rate, a.cache_dir or folder, RANKS_PER_NODE)]
    decisions = [line for row in rows for line in row.pop("decisions", [])]
    options = report.options(a, "rates", "rank", "port", "cache_dir")
    result = {"benchmark": "expert packing", "nodes": NUM_NODES, "options": options, "rows": rows}
    report.finish(result | {"decisions": decisions, "versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
