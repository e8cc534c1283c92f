"""Train ufo-tiny to its end and evaluate every task.

    python benchmarks/train/ufo_tiny.py

Runs `train.py ufo-tiny` as one process on one device (what `make train PRESET=ufo-tiny` does), and
as two processes with `--layout elastic`, from the same seed. Of each task: accuracy on held-out
images before and after, that of a linear model on the same pixels, and images a second in training
(median step). Of each run: seconds from its start to its end, images a second, and the idle time of
each device, by the plan and measured: 1 - processor time / time of its process. Processes share
this machine's cores, so one that waits may lend its core to the other.

Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lib import report
from benchmarks.lib.ranks import free_port, wait_for_all
from benchmarks.lib.report import JsonObject
from benchmarks.lib.train_processes import one_device_environment
from jmoe.config import VisionTrainConfig
from jmoe.configs.ufo import ufo_tiny
from jmoe.data.images import ImageTask, load_task
from jmoe.run.metrics import METRICS_FILE, read_events, read_step_records
from jmoe.training.tasks.summary import linear_baseline_accuracy

RUNS = {1: (), 2: ("--layout", "elastic")}  # options by number of processes


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--num-steps", type=int, default=ufo_tiny.num_steps)
    parser.add_argument("--seed", type=int, default=ufo_tiny.seed)
    parser.add_argument("--quick", action="store_true", help="a few steps: is all there?")
    a = parser.parse_args()
    a.num_steps = 60 if a.quick else a.num_steps
    return a


def trained(a: argparse.Namespace, processes: int, folder: Path) -> float:
    """Train in this number of processes; return the seconds from their start to their end."""
    options = [
        "--num-steps",
        str(a.num_steps),
        "--seed",
        str(a.seed),
        "--output-dir",
        str(folder / "run"),
    ]
    command = [sys.executable, "train.py", "ufo-tiny", *RUNS[processes], *options]
    begun = time.time()
    ranks = []
    address = f"127.0.0.1:{free_port()}"
    together = [
        "--distributed.coordinator-address",
        address,
        "--distributed.num-processes",
        str(processes),
    ]
    for rank in range(processes):
        own = [*together, "--distributed.process-id", str(rank)] if processes > 1 else []
        with (folder / f"rank-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [*command, *own], stdout=log, stderr=log, env=one_device_environment(folder)
                )
            )
    codes = wait_for_all(ranks)
    if any(codes):
        raise RuntimeError(
            f"the ranks ended with {codes}: {(folder / 'rank-0.log').read_text()[-2000:]}"
        )
    return time.time() - begun


def rows_of(
    processes: int,
    seconds: float,
    metrics: Path,
    config: VisionTrainConfig,
    linear: dict[str, float],
) -> tuple[JsonObject, list[JsonObject]]:
    """Return the row of a run and those of its tasks, from its records."""
    events = read_events(metrics)
    first, *_, last = [event for event in events if event["event"] == "evaluation"]
    idle = [event for event in events if event["event"] == "idle"][-1]
    step_s = report.median(
        line["step_s"] for line in read_step_records(metrics) if not line.get("compiled")
    )
    images = sum(task.batch_size for task in config.tasks.values())
    run = {
        "processes": processes,
        "layout": "elastic" if processes > 1 else "one device",
        "seconds": round(seconds),
        "step_s": step_s,
        "images_per_s": round(images / step_s),
        "idle_by_device": [round(share, 3) for share in idle["idle"]],
        "planned_idle_by_device": [round(share, 3) for share in idle["planned"]],
    }
    tasks = [
        {
            "processes": processes,
            "task": name,
            "before": round(first["task_accuracy"][name], 4),
            "accuracy": round(last["task_accuracy"][name], 4),
            "linear_model": round(linear[name], 4),
            "images_per_s": round(task.batch_size / step_s),
        }
        for name, task in config.tasks.items()
    ]
    return run, tasks


def sizes(task: ImageTask) -> JsonObject:
    """Return a task's numbers of classes and images."""
    counts = {
        "classes": len(task.classes),
        "train": len(task.train.labels),
        "held_out": len(task.held_out.labels),
    }
    return {"task": task.name} | counts


def main() -> None:
    a = parse()
    config = dataclasses.replace(ufo_tiny, num_steps=a.num_steps, seed=a.seed)
    tasks = [
        load_task(name, task.source, config.model, config.images)
        for name, task in config.tasks.items()
    ]
    linear = {task.name: linear_baseline_accuracy(task) for task in tasks}
    runs, accuracies = [], []
    for processes in a.processes:
        with tempfile.TemporaryDirectory() as folder:
            seconds = trained(a, processes, Path(folder))
            run, rows = rows_of(
                processes, seconds, Path(folder) / "run" / METRICS_FILE, config, linear
            )
        runs.append(report.progress(run))
        accuracies += [report.progress(row) for row in rows]
    result = {
        "benchmark": "ufo-tiny trained to its end",
        "options": report.options(a),
        "tasks": [sizes(task) for task in tasks],
        "accuracies": accuracies,
        "runs": runs,
    }
    packages = ("jax", "jaxlib", "scikit-learn", "scikit-image", "matplotlib")
    report.finish(result | {"versions": report.versions(*packages)})


if __name__ == "__main__":
    main()
