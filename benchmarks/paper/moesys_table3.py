"""Time elastic multi-task training against imbalanced data parallelism (MoESys, Table 3).

    python benchmarks/paper/moesys_table3.py
    python benchmarks/paper/moesys_table3.py --quick        a smoke test

Two processes, each a device with one core of this machine, train four image tasks with batches of
512, 256, 128 and 128 images / 8. imbalanced: tasks are dealt out whole in their order, so that one
device has 80 images and the other 48. elastic: `--layout elastic`, by load. even: `--layout even`,
each device as many images of the joint batch. All take 16 images at once and compute the same
losses. Steps are timed in turn, from a barrier to a barrier. idle: the part of a step in which a
device does not compute. traced_idle: from a trace of --traced more steps of each layout, on either
process; the part of a step, from its first operation to its last, in which it is in a collective,
waiting for the other process or talking to it, and computes nothing. idle_by_device: without a
trace, 1 - processor time / wall time of the device's process.

Simulated rows: a step takes fixed_s + image_s x the images of the busiest device, fitted to the
imbalanced row and to a step with half of the images; `simulator_error` is how far that is off the
elastic row, which it has not seen. The paper (V100s): 62.6 samples/s a GPU on 4 GPUs, a task each;
74.0 on 8, shared 4, 2, 1 and 1.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import dataclasses
import time

import numpy as np
from jax.sharding import Mesh

from benchmarks.comm import trace
from benchmarks.lib import report
from benchmarks.lib.engine_ranks import pin_to_one_core
from benchmarks.lib.ranks import Clock, add_rank_options, run_ranks
from benchmarks.lib.report import JsonObject
from jmoe.config import VisionTrainConfig
from jmoe.configs.ufo import ufo_tiny
from jmoe.data.image_batches import ImageBatches
from jmoe.data.images import ImageSplit, ImageTask
from jmoe.planning.elastic import TaskImageRange, TaskLayout, TaskLoad, plan_layout

NUM_DEVICES = 2
MICRO_BATCH = 16  # images at once, the same for all, so that only who has how many of them differs
NUM_CLASSES = 10
MODEL = {"hidden_size": 192, "intermediate_size": 768, "moe_intermediate_size": 768}
PAPER = [
    {"gpus": 4, "layout": "1/1/1/1", "samples_per_s_a_gpu": 62.6},
    {"gpus": 8, "layout": "4/2/1/1", "samples_per_s_a_gpu": 74.0},
]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--traced", type=int, default=3, help="steps of each layout")
    parser.add_argument(
        "--quick", action="store_true", help="a small model and one round: is all there?"
    )
    add_rank_options(parser)
    a = parser.parse_args()
    a.rounds, a.traced = (1, 1) if a.quick else (a.rounds, a.traced)
    return a


def config_of(a: argparse.Namespace) -> VisionTrainConfig:
    """Return ufo-tiny with wider layers, so that computing takes most of a step."""
    model = ufo_tiny.model if a.quick else dataclasses.replace(ufo_tiny.model, **MODEL)
    return dataclasses.replace(ufo_tiny, model=model, layout="elastic")


def halved(config: VisionTrainConfig) -> VisionTrainConfig:
    tasks = {
        name: dataclasses.replace(task, batch_size=task.batch_size // 2)
        for name, task in config.tasks.items()
    }
    return dataclasses.replace(config, tasks=tasks)


def loads(config: VisionTrainConfig) -> tuple[TaskLoad, ...]:
    return tuple(TaskLoad(name, task.batch_size) for name, task in config.tasks.items())


def imbalanced_layout(tasks: tuple[TaskLoad, ...], num_devices: int) -> TaskLayout:
    """Return the layout that gives each device whole tasks in order, regardless of size."""
    shares = [
        [TaskImageRange(i, 0, task.batch_size) for i, task in enumerate(tasks)][d::num_devices]
        for d in range(num_devices)
    ]
    return TaskLayout(tasks, tuple(map(tuple, shares)))


def layouts(config: VisionTrainConfig) -> dict[str, tuple[VisionTrainConfig, TaskLayout]]:
    tasks, half = loads(config), halved(config)
    return {
        "imbalanced": (config, imbalanced_layout(tasks, NUM_DEVICES)),
        "elastic": (config, plan_layout(tasks, NUM_DEVICES)),
        "even": (config, plan_layout(tasks, NUM_DEVICES, mode="even")),
        "half": (half, plan_layout(loads(half), NUM_DEVICES)),
    }


def random_task(name: str, config: VisionTrainConfig, seed: int) -> ImageTask:
    """Return a task of random images, which cost no time to read."""
    side, rng = config.model.image_size, np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (256, side, side, config.model.channels)).astype(np.uint8)
    split = ImageSplit(pixels, np.arange(256, dtype=np.int32) % NUM_CLASSES)
    return ImageTask(name, tuple(map(str, range(NUM_CLASSES))), split, split)


class Training:
    """The program of one layout, its state and the seconds of its steps."""

    def __init__(
        self, config: VisionTrainConfig, layout: TaskLayout, mesh: Mesh, rank: int
    ) -> None:
        import jax
        from jax.sharding import NamedSharding

        from jmoe.mesh import BATCH
        from jmoe.training.tasks.step import VisionTrainer

        accumulated = dataclasses.replace(
            config, gradient_accumulation_steps=layout.largest_micro_batch // MICRO_BATCH
        )
        tasks = [random_task(name, config, seed) for seed, name in enumerate(config.tasks)]
        batches = ImageBatches(tasks, accumulated, layout, rank, rank + 1)
        sharding = NamedSharding(mesh, BATCH)
        put = lambda array: jax.make_array_from_process_local_data(sharding, array)  # noqa: E731
        self.batch = jax.tree.map(put, next(batches))
        self.layout = layout
        self.trainer = VisionTrainer(
            accumulated, dict.fromkeys(config.tasks, NUM_CLASSES), mesh, layout
        )
        self.state = self.trainer.init()
        self.step = self.trainer.step.lower(self.state, self.batch, full_capacity=True).compile()
        self.ops = trace.operations(self.step.as_text())
        self.seconds: list[float] = []
        self.processor_s: list[float] = []

    def __call__(self) -> object:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics

    def traced_idle(self, clock: Clock) -> float:
        """Return the share of a traced step in which this process only waits for the other."""
        clock.barrier()
        with trace.recording(self.ops, "jit_step") as found:
            clock(self)
        return trace.idle_share(found, self.ops)

    def time(self, clock: Clock) -> None:
        before = time.process_time()
        seconds, _ = clock(self)
        self.seconds.append(seconds)
        self.processor_s.append(time.process_time() - before)


def measure(a: argparse.Namespace) -> list[JsonObject]:
    """Return a row for each layout; called by every rank."""
    import jax
    from jax.experimental import multihost_utils

    from jmoe.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{a.port}", NUM_DEVICES, a.rank)
    mesh = make_mesh((NUM_DEVICES, 1, 1))
    clock = Clock(mesh, has_link=False)
    clock.barrier()
    runs = {name: Training(*what, mesh, a.rank) for name, what in layouts(config_of(a)).items()}
    for run in runs.values():
        clock(run)
    for _ in range(a.rounds):
        for run in runs.values():
            run.time(clock)
    rows = []
    for name, run in runs.items():
        busy = np.median(np.array(run.processor_s) / np.array(run.seconds))
        own = [1 - busy, np.median([run.traced_idle(clock) for _ in range(a.traced)])]
        every = np.asarray(multihost_utils.process_allgather(np.array(own, np.float32))).reshape(
            NUM_DEVICES, 2
        )
        idle, traced = (
            [round(max(0.0, float(share)), 3) for share in shares] for shares in every.T
        )
        seconds, images = report.median(run.seconds), sum(run.layout.images_per_device)
        rows.append(
            {
                "layout": name,
                "images_by_device": list(run.layout.images_per_device),
                "step_s": seconds,
                "samples_per_s": round(images / seconds, 1),
                "samples_per_s_a_device": round(images / seconds / NUM_DEVICES, 1),
                "speed_up": report.ratio(runs["imbalanced"].seconds, run.seconds)
                if name != "half"
                else None,
                "traced_idle_by_device": traced,
                "idle_by_device": idle,
                "planned_idle_by_device": [
                    round(share, 3) for share in run.layout.idle_fractions()
                ],
                "all_step_s": [round(s, 4) for s in run.seconds],
            }
        )
    return rows


def simulated(
    rows: list[JsonObject], config: VisionTrainConfig
) -> tuple[list[JsonObject], dict[str, float]]:
    """Return rows for more devices than this machine has cores, and the model behind them."""
    by_name = {row["layout"]: row for row in rows}
    at = {name: (max(row["images_by_device"]), row["step_s"]) for name, row in by_name.items()}
    (many, long), (few, short) = at["imbalanced"], at["half"]
    image_s = (long - short) / (many - few)
    fixed_s = long - many * image_s
    predicted = fixed_s + image_s * at["elastic"][0]
    about = {
        "image_s": image_s,
        "fixed_s": fixed_s,
        "elastic_step_s_predicted": predicted,
        "simulator_error": round(predicted / at["elastic"][1] - 1, 4),
    }
    tasks, result = loads(config), []
    for devices in (4, 8, 16):
        layout = plan_layout(tasks, devices)
        step_s = fixed_s + image_s * max(layout.images_per_device)
        result.append(
            {
                "devices": devices,
                "devices_by_task": [len(layout.devices_of(i)) for i in range(len(tasks))],
                "step_s": round(step_s, 4),
                "samples_per_s_a_device": round(
                    sum(layout.images_per_device) / step_s / devices, 1
                ),
                "mean_idle": round(float(np.mean(layout.idle_fractions())), 3),
            }
        )
    for row in result:
        row["compared_to_4_devices"] = round(
            row["samples_per_s_a_device"] / result[0]["samples_per_s_a_device"], 3
        )
    return result, about


def main() -> None:
    a = parse()
    if a.rank is not None:
        pin_to_one_core(a.rank)
        report.finish(measure(a))
        return
    rows = [report.progress(row) for row in run_ranks(NUM_DEVICES, 0)]
    simulation, about = simulated(rows, config_of(a))
    result = {
        "benchmark": "elastic multi-task training (MoESys, Table 3)",
        "options": report.options(a, "rank", "port") | MODEL,
        "rows": rows,
        "simulated": simulation,
        "simulator": about,
        "paper": PAPER,
    }
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
