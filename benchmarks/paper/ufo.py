"""Compare a super-network of image tasks with one dense model a task (MoESys, section 5.3).

    python benchmarks/paper/ufo.py
    python benchmarks/paper/ufo.py --quick        a smoke test

Two processes, each a device with one core of this machine, learn the four tasks of ufo-tiny from
the same images, in batches of 64, 32, 16 and 16, 16 images at once:
super-network: ufo-tiny, `--layout elastic`, 64 images a device. imbalanced: the same network, whole
tasks dealt out in their order, 80 and 48 images. dense: a model for each task, as deep and as wide
as the task's path through the super-network, with its own optimizer; the models are packed onto the
devices by load, and nothing crosses them.

speeds: contestants take `--turns` turns of `--turn` steps, timed from a barrier to a barrier,
reading images included. paper_batches: the same with eight times the images, which are the paper's
1,024 a step. wide: with layers three times as wide, where experts are more of the work, in turns of
WIDE_STEPS steps. parts_s: of a step, traced on rank 0, by what runs; other_collectives counts where
nothing else does, so it is how long the device waits for what all devices share. accuracies:
super-network and dense models learn for `--steps` steps with the same schedule; every `--check`
steps they are evaluated on held-out images, on a machine that may do other things too.
equal_quality, of each task: after how many steps and
images the super-network is within `--tolerance` of what the dense model reaches in the end (null:
never); and after how many either reaches `both`, the best accuracy that both have reached.
state: bytes of parameters and optimizer on the device. peak: with what the largest step needs
besides.

The paper (UFO, 32 A100): 697 images/s against 425 of PyTorch 1.10, with 18 % less memory, both of
them the same super-network. That baseline lacks much else; it is quoted, and not what is compared
here.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Mesh

from benchmarks.comm import trace
from benchmarks.lib import report
from benchmarks.lib.engine_ranks import pin_to_one_core
from benchmarks.lib.ranks import Clock, add_rank_options, run_ranks
from benchmarks.lib.report import JsonObject
from benchmarks.paper.moesys_table3 import MICRO_BATCH, MODEL, NUM_DEVICES, imbalanced_layout, loads
from jmoe.config import VisionTrainConfig
from jmoe.configs.ufo import ufo_tiny
from jmoe.data.image_batches import ImageBatches, held_out_batches
from jmoe.data.images import ImageTask, load_task
from jmoe.deploy.extract import path_model_config
from jmoe.planning.elastic import TaskLayout, plan_layout

WIDE_STEPS = 4
PAPER_STEPS = 8
PAPER_BATCHES = 8  # times the images of ufo-tiny
PARTS = ("speeds", "accuracies")
TRACED_STEPS = 3
EVALUATION_IMAGES = 256  # on a device at once
PAPER = [
    {"system": "MoESys", "images_per_s": 697, "gpus": 32},
    {"system": "PyTorch 1.10", "images_per_s": 425, "gpus": 32},
]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", type=int, default=ufo_tiny.num_steps)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument(
        "--turn", type=int, default=50, help="steps of a contestant, one after another"
    )
    parser.add_argument("--turns", type=int, default=5, help="and one before, which compiles")
    parser.add_argument(
        "--check", type=int, default=100, help="steps from one evaluation to the next"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="of an accuracy, that counts as equal"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps: is all there?")
    add_rank_options(parser)
    a = parser.parse_args()
    if a.quick:
        a.steps, a.check, a.turn, a.turns = 8, 4, 4, 1
    if a.steps % a.check:
        parser.error(f"--steps = {a.steps}: must be a multiple of --check = {a.check}")
    return a


def config_of(a: argparse.Namespace) -> VisionTrainConfig:
    """Return ufo-tiny, elastic, for this number of steps."""
    warmup = min(ufo_tiny.optimizer.warmup_steps, a.steps // 2)
    optimizer = dataclasses.replace(ufo_tiny.optimizer, warmup_steps=warmup)
    return dataclasses.replace(ufo_tiny, layout="elastic", num_steps=a.steps, optimizer=optimizer)


def with_paper_batches(config: VisionTrainConfig) -> VisionTrainConfig:
    """Return the configuration with the paper's 512, 256, 128 and 128 images a step."""
    tasks = {
        name: dataclasses.replace(task, batch_size=PAPER_BATCHES * task.batch_size)
        for name, task in config.tasks.items()
    }
    return dataclasses.replace(config, tasks=tasks)


def dense_config(config: VisionTrainConfig, name: str) -> VisionTrainConfig:
    """Return one task's dense model, with the parameters that a patch meets on the task's path."""
    layers = tuple(range(config.model.num_hidden_layers))
    model = dataclasses.replace(
        path_model_config(config.model), mlp_only_layers=layers, num_experts=0
    )
    task = dataclasses.replace(config.tasks[name], path=())
    return dataclasses.replace(config, model=model, tasks={name: task})


class Training:
    """One network on some devices: its program, its images, its state."""

    def __init__(
        self,
        config: VisionTrainConfig,
        tasks: Sequence[ImageTask],
        layout: TaskLayout,
        mesh: Mesh,
        first: int,
    ) -> None:
        import jax
        from jax.sharding import NamedSharding

        from jmoe.mesh import BATCH
        from jmoe.training.tasks.step import VisionTrainer

        accumulated = dataclasses.replace(
            config, gradient_accumulation_steps=layout.largest_micro_batch // MICRO_BATCH
        )
        self.tasks, self.layout, self.mesh = tuple(tasks), layout, mesh
        self.batches = ImageBatches(tasks, accumulated, layout, first, first + 1)
        self.trainer = VisionTrainer(
            accumulated, {task.name: len(task.classes) for task in tasks}, mesh, layout
        )
        self.state = self.trainer.init()
        sharding = NamedSharding(mesh, BATCH)
        self.put = lambda a: jax.make_array_from_process_local_data(sharding, a)
        self.place = lambda a: jax.make_array_from_callback(
            a.shape, sharding, lambda index: a[index]
        )

    def step(self) -> None:
        """Read images and take a step."""
        import jax

        batch = jax.tree.map(self.put, next(self.batches))
        self.state, metrics = self.trainer.step(self.state, batch, full_capacity=True)
        assert jax.device_get(metrics["ok"])

    def accuracies(self) -> list[float]:
        """Return each task's accuracy on held-out images."""
        import jax

        sums_3A = np.zeros((3, len(self.tasks)))
        for batch in held_out_batches(
            self.tasks, self.trainer.homes, self.mesh.size, EVALUATION_IMAGES
        ):
            sums_3A += np.asarray(
                self.trainer.evaluate_batches(self.state, [jax.tree.map(self.place, batch)])[0]
            )
        return list(map(float, sums_3A[1] / sums_3A[2]))

    @cached_property
    def compiled(self) -> Any:
        """The compiled step."""
        import jax

        batch = (
            jax.tree.map(self.put, self.batches.peek_micro_batch(0))
            if len(self.tasks) == 1
            else None
        )
        batch = batch or jax.tree.map(self.put, next(self.batches))
        return self.trainer.step.lower(self.state, batch, full_capacity=True).compile()

    def bytes_on_device(self) -> tuple[int, int]:
        """Return the bytes of the state on this device, and those that a step adds."""
        import jax

        leaves = jax.tree.leaves((self.state.params, self.state.m, self.state.v))
        state_bytes = sum(leaf.addressable_data(0).nbytes for leaf in leaves)
        return state_bytes, int(self.compiled.memory_analysis().temp_size_in_bytes)

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of a step by part, the median of TRACED_STEPS; on rank 0."""
        ops, parts = trace.operations(self.compiled.as_text()), []
        for _ in range(TRACED_STEPS):
            with trace.recording(ops, "jit_step") as found:
                self.step()
            parts.append(trace.parts_s(found, ops))
        return {name: report.median(part[name] for part in parts) for name in parts[0]}


class Contestant:
    """Networks that together learn all tasks; this process takes part in those of `own`."""

    def __init__(self, name: str, own: Sequence[Training], images: tuple[int, ...]) -> None:
        self.name, self.own, self.images = name, tuple(own), images
        self.seconds: list[float] = []
        self.accuracies: dict[int, dict[str, float]] = {}  # by step

    def take(self, clock: Clock, steps: int) -> None:
        """Take these steps of every network, timed."""

        def turn() -> None:
            for training in self.own:
                for _ in range(steps):
                    training.step()

        seconds, _ = clock(turn)
        self.seconds.append(seconds)

    def evaluate(self, step: int, names: Sequence[str]) -> None:
        """Record the accuracy of every task, the same on every process."""
        own = {
            task.name: value
            for t in self.own
            for task, value in zip(t.tasks, t.accuracies(), strict=True)
        }
        shared = gathered([own.get(name, 0.0) for name in names]).max(axis=0)
        self.accuracies[step] = {
            name: round(float(value), 4) for name, value in zip(names, shared, strict=True)
        }

    @property
    def steady(self) -> list[float]:
        """Return the seconds of all turns but the first, which compiles."""
        return self.seconds[1:]

    def parts_s(self, rank: int) -> dict[str, float]:
        """Return the seconds of a step of all networks by part, on rank 0; {} on others, which take
        the same steps.
        """
        total = dict[str, float]()
        for training in self.own:
            if rank == 0:
                for name, seconds in training.parts_s().items():
                    total[name] = round(total.get(name, 0.0) + seconds, 4)
            else:
                for _ in range(TRACED_STEPS):
                    training.step()
        return total

    def row(self, turn: int, elastic: "Contestant", rank: int) -> JsonObject:
        """Return the contestant's figures."""
        sizes = [training.bytes_on_device() for training in self.own]
        own = [
            sum(state for state, _ in sizes),
            sum(state for state, _ in sizes) + max(more for _, more in sizes),
        ]
        state, peak = gathered(own).astype(int).T.tolist()
        images = sum(self.images) * turn
        seconds = report.median(self.steady)
        return {
            "contestant": self.name,
            "images_by_device": list(self.images),
            "images_per_s": round(images / seconds, 1),
            "speed_up_of_super_network": report.ratio(self.steady, elastic.steady),
            "state_bytes_by_device": state,
            "peak_bytes_by_device": peak,
            "parts_s": self.parts_s(rank),
            "all_turn_s": [round(s, 3) for s in self.seconds],
        }


def gathered(own: Sequence[float]) -> np.ndarray:
    """Return every process's numbers, [processes, numbers]."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.array(own, np.float32))).reshape(
        NUM_DEVICES, -1
    )


def contestants(config: VisionTrainConfig, rank: int, mesh: Mesh) -> list[Contestant]:
    """Return all three contestants, as this process runs them."""
    import jax

    from jmoe.mesh import make_mesh

    tasks = [
        load_task(name, task.source, config.model, config.images)
        for name, task in config.tasks.items()
    ]
    layouts = {
        "super-network": plan_layout(loads(config), NUM_DEVICES),
        "imbalanced": imbalanced_layout(loads(config), NUM_DEVICES),
    }
    result = [
        Contestant(name, [Training(config, tasks, layout, mesh, rank)], layout.images_per_device)
        for name, layout in layouts.items()
    ]
    packed, alone, own = layouts["super-network"], make_mesh((1, 1, 1), jax.local_devices()), []
    for share in packed.shares[rank]:
        dense = dense_config(config, tasks[share.task].name)
        own.append(Training(dense, [tasks[share.task]], plan_layout(loads(dense), 1), alone, 0))
    return [*result, Contestant("dense", own, packed.images_per_device)]


def measure(a: argparse.Namespace) -> JsonObject:
    """Return speeds, bytes and accuracies of all contestants; called by every rank."""
    import jax

    from jmoe.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{a.port}", NUM_DEVICES, a.rank)
    mesh = make_mesh((NUM_DEVICES, 1, 1))
    clock = Clock(mesh, has_link=False)
    clock.barrier()
    config, result = config_of(a), JsonObject()
    if "speeds" in a.parts:
        wide = dataclasses.replace(config, model=dataclasses.replace(config.model, **MODEL))
        contests = [("rows", config, a.turn)]
        if not a.quick:  # the same programs with other sizes
            contests.append(("wide", wide, WIDE_STEPS))
            contests.append(("paper_batches", with_paper_batches(config), PAPER_STEPS))
        for name, contest, steps in contests:
            runs = contestants(contest, a.rank, mesh)
            for _ in range(1 + a.turns):
                for run in runs:
                    run.take(clock, steps)
            result[name] = [run.row(steps, runs[0], a.rank) for run in runs]
    if "accuracies" in a.parts:
        result |= learned(contestants(config, a.rank, mesh), clock, a)
    return result


def learned(runs: Sequence[Contestant], clock: Clock, a: argparse.Namespace) -> JsonObject:
    """Return both kinds' accuracies as they learn, and the steps that each needs."""
    network, _, dense = runs
    for step in range(a.check, a.steps + 1, a.check):
        for run in (network, dense):
            run.take(clock, a.check)
            run.evaluate(step, list(ufo_tiny.tasks))
    by_step = [
        {"contestant": run.name, "step": step, **accuracy}
        for run in (network, dense)
        for step, accuracy in run.accuracies.items()
    ]
    return {"accuracies": by_step, "equal_quality": equal_quality(network, dense, a.tolerance)}


def equal_quality(network: Contestant, dense: Contestant, tolerance: float) -> list[JsonObject]:
    """Return, by task, what super-network and dense model need to reach each other's accuracy."""
    last, result = max(dense.accuracies), []

    def needs(run: Contestant, name: str, goal: float, what: str) -> dict[str, int | None]:
        steps = next((step for step, own in run.accuracies.items() if own[name] >= goal), None)
        images = None if steps is None else steps * ufo_tiny.tasks[name].batch_size
        return {f"{run.name}_steps_{what}": steps, f"{run.name}_images_{what}": images}

    for name in ufo_tiny.tasks:
        own, goal = (run.accuracies[last][name] for run in (network, dense))
        both = min(
            max(accuracy[name] for accuracy in run.accuracies.values()) for run in (network, dense)
        )
        row = {
            "task": name,
            network.name: own,
            dense.name: goal,
            "above_dense": round(own - goal, 4),
        }
        row |= needs(network, name, goal - tolerance, "as_dense")
        row |= {
            "both": both,
            **needs(network, name, both, "to_both"),
            **needs(dense, name, both, "to_both"),
        }
        result.append(row)
    return result


def main() -> None:
    a = parse()
    if a.rank is not None:
        pin_to_one_core(a.rank)
        report.finish(measure(a))
        return
    measured = run_ranks(NUM_DEVICES, 0)
    for row in [row for rows in measured.values() for row in rows]:
        report.progress(row)
    result = {
        "benchmark": "a super-network against a dense model a task (UFO)",
        "options": report.options(a, "rank", "port") | {"wide_model": MODEL},
    }
    report.finish(
        result | measured | {"paper": PAPER, "versions": report.versions("jax", "jaxlib")}
    )


if __name__ == "__main__":
    main()
