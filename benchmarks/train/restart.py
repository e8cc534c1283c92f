"""Time a restart, from the loss of a rank to the next step.

    python benchmarks/train/restart.py

Runs `train.py` under `jmoe-supervise` and kills a rank with SIGKILL after a checkpoint, --rounds
times. The parts of each restart are taken when lines appear in the log of rank 0: detect (the
supervisor has seen the end, and the other ranks are killed), start (new processes are told what to
run), import_and_meet (Python, JAX and jmoe are imported, the ranks have met), data, restore,
compile_and_step (rank 0 from the cache). Alone: the same number of processes, started together
without a supervisor, import `train` and end (import); and resume from the same checkpoint with the
same cache (restore, compile_and_step). The ratio is that of the whole restart to the sum of the
three. cold_compile_and_step_s: what the run's very first step took, with an empty cache. With
--memory the run has snapshots in /dev/shm after the same numbers of steps, and no checkpoint but
the one that it leaves for the starts alone when it is stopped.

Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lib import report
from benchmarks.lib.train_processes import (
    LIMIT_S,
    started_processes,
    times_of_log_lines,
    wait_until,
)
from jmoe.cluster.remote_process import reserve_port
from jmoe.cluster.restarts import read_progress

PARTS = ("detect", "start", "import_and_meet", "data", "restore", "compile_and_step")
ALONE = ("import", "restore", "compile_and_step")
EVERY = 20  # steps between checkpoints
# Lines of the log of rank 0, each the end of a part; the first comes when the ranks have met.
LINES = {
    "import_and_meet": " active; ",
    "data": "restoring or initialising the state ...",
    "restore": "resuming from step ",
    "compile_and_step": "\nstep ",
}


def options_of(a: argparse.Namespace, run: Path, memory: Path) -> list[str]:
    sizes = ("--batch-size", str(a.batch_size), "--sequence-length", str(a.sequence_length))
    endless = ("--num-steps", "1000000", "--optimizer.schedule", "constant")
    kept = ("--checkpoint.every-steps", str(EVERY))
    if a.memory:
        kept = (
            "--checkpoint.every-steps",
            "1000000",
            "--checkpoint.memory-every-steps",
            str(EVERY),
        )
        kept += ("--checkpoint.memory-dir", str(memory))
    return ["tiny", *sizes, *endless, *kept, "--output-dir", str(run)]


def newest_of(a: argparse.Namespace, run: Path, memory: Path) -> int:
    """Return the newest step that a restart can begin from."""
    if not a.memory:
        return read_progress(run).checkpoint
    return max((int(path.name.partition("-")[0]) for path in memory.glob("*/*-of-0")), default=-1)


def victim_of(run: Path, rank: int) -> int:
    """Return the process id of a rank, found by its command line."""
    words = f"--distributed.process-id\0{rank}\0".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if words in line and str(run).encode() in line:
                return int(entry.name)
    sys.exit(f"rank {rank} is not there")


def restarts(
    a: argparse.Namespace, folder: Path, memory: Path
) -> tuple[list[dict[str, float]], float]:
    """Return (seconds of every restart's parts, the first step with an empty compile cache)."""
    run, rows = folder / "run", []
    command = [
        sys.executable,
        "-m",
        "jmoe.cluster.supervise",
        "--processes",
        str(a.processes),
        "--same-step-limit",
        "99",
    ]
    log, events = run / "supervise" / "rank-0.log", run / "supervise" / "events.jsonl"
    with started_processes(
        [[*command, "--", "train.py", *options_of(a, run, memory)]],
        [folder / "supervisor.log"],
        folder,
    ):
        for _ in range(a.rounds):
            newest = newest_of(a, run, memory)
            wait_until(
                lambda newest=newest: newest_of(a, run, memory) > newest, "a checkpoint or snapshot"
            )
            position, victim = log.stat().st_size, victim_of(run, a.processes - 1)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            times = times_of_log_lines(LINES, log, position)
            last = {
                event["event"]: event["time"]
                for event in map(json.loads, events.read_text().splitlines())
            }
            ends = [killed, last["end"], last["start"], *times.values()]
            seconds = [round(after - before, 3) for before, after in itertools.pairwise(ends)]
            row = dict(zip(PARTS, seconds, strict=True)) | {
                "restart_s": round(ends[-1] - killed, 3)
            }
            rows.append(report.progress(row))
    cold = re.search(r"compiled and run in ([0-9.]+) s", log.read_text())
    assert cold is not None
    return rows, float(cold[1])


def plain_start(a: argparse.Namespace, folder: Path, memory: Path) -> dict[str, float]:
    """Return the seconds of the parts of one start without a supervisor: no restart needs less."""
    run, logs = folder / "run", [folder / f"alone-{rank}.log" for rank in range(a.processes)]
    begun = time.time()
    with started_processes(
        [[sys.executable, "-c", "import train"]] * a.processes, logs, folder
    ) as processes:
        for process in processes:
            process.wait(LIMIT_S)
    imported_s = time.time() - begun
    with reserve_port() as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        together = [
            "--distributed.coordinator-address",
            address,
            "--distributed.num-processes",
            str(a.processes),
        ]
        command = [
            sys.executable,
            "train.py",
            *options_of(a, run, memory),
            *together,
            "--distributed.process-id",
        ]
        with started_processes(
            [[*command, str(rank)] for rank in range(a.processes)], logs, folder
        ):
            times = times_of_log_lines(LINES, logs[0])
            time.sleep(1.0)  # a signal before the first step ends would not save
    restore_s = times["restore"] - times["data"]
    seconds = (imported_s, restore_s, times["compile_and_step"] - times["restore"])
    return {part: round(value, 3) for part, value in zip(ALONE, seconds, strict=True)}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory", action="store_true", help="snapshots in memory instead of checkpoints"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    a = parser.parse_args()
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        rows, cold_s = restarts(a, Path(folder), Path(memory))
        own = [report.progress(plain_start(a, Path(folder), Path(memory))) for _ in range(a.rounds)]
    parts = {f"{part}_s": report.median((row[part] for row in rows), 3) for part in PARTS}
    needed = {f"{part}_alone_s": report.median((row[part] for row in own), 3) for part in ALONE}
    restart_s = report.median((row["restart_s"] for row in rows), 3)
    result = {
        "benchmark": "restart",
        "options": report.options(a),
        "load_before": load,
        "restart_s": restart_s,
    }
    ratio = round(restart_s / sum(needed.values()), 3)
    result |= (
        parts
        | needed
        | {"ratio": ratio, "cold_compile_and_step_s": cold_s, "restarts": rows, "alone": own}
    )
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
