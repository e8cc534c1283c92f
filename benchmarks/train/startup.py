"""Time the start of many processes, part by part.

    python benchmarks/train/startup.py

Runs `jmoe-supervise` with --processes processes of `train.py`, which take two steps and end, twice:
with an empty compile cache and with the one of the first time. Parts, as lines appear in the log of
rank 0: start (the far end of every line to the supervisor is there, processes are told what to
run), import_and_meet (Python, JAX and jmoe are imported, all ranks have met), data, initialise,
evaluate, compile_and_step (the first one), step (the second one), save_and_end. XLA compiles with
few optimisations: the processes share the cores of one machine, and each compiles.

Then --callers processes without JAX meet at the rendezvous alone: import (until the last of them
calls) and meet (from there until the last of them has been told that all are there). At last all
but the last one of them, with a limit of --limit-s: missing_s is when every one that has come has
named the one that has not, by its own clock.

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
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.lib.train_processes import LIMIT_S, started_processes, times_of_log_lines
from jmoe.cluster.remote_process import reserve_port

LINES = {  # of the log of rank 0, each the end of a part
    "import_and_meet": " active; ",
    "data": "restoring or initialising the state ...",
    "initialise": "evaluating on ",
    "evaluate": "held-out loss after 0 steps",
    "compile_and_step": "\nstep 0 ",
    "step": "\nstep 1 ",
}
PARTS = ("start", *LINES, "save_and_end")
MODEL = (
    *("--model.vocab-size", "512", "--model.hidden-size", "32", "--model.num-hidden-layers", "2"),
    *(
        "--model.num-attention-heads",
        "2",
        "--model.num-key-value-heads",
        "1",
        "--model.moe-intermediate-size",
        "32",
    ),
)
MODULES = (
    "argparse",
    "ast",
    "difflib",
    "pickle",
    "random",
    "subprocess",
    "textwrap",
    "threading",
)  # the text
CALL = """
import json, sys, time
from jmoe.cluster.rendezvous import connect_ranks_to_rank_0
address, processes, rank, limit_s = sys.argv[1], *map(int, sys.argv[2:5])
called, problem = time.time(), ""
try:
    for line in connect_ranks_to_rank_0(address, processes, rank, limit_s).values():
        line.close()
except TimeoutError as error:
    problem = str(error)
print(json.dumps({"called": called, "told": time.time(), "problem": problem}))
"""


class Memory:
    """Samples the memory of this process's children; most_bytes: the largest sum."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.5):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue
            self.most_bytes = max(self.most_bytes, total)


def supervised(a: argparse.Namespace, folder: Path, name: str) -> dict[str, float]:
    """Return the parts of a run's start, in seconds, and the memory of all of its processes."""
    run = folder / name
    options = [
        "tiny",
        *MODEL,
        "--batch-size",
        str(a.processes),
        "--sequence-length",
        "64",
        "--num-steps",
        "2",
    ]
    options += ["--distributed.heartbeat-timeout-s", "120"]
    options += ["--data.path", str(folder / "text"), "--data.held-out-bytes", "10000"]
    options += ["--evaluation.sample-tokens", "0", "--output-dir", str(run)]
    command = [
        sys.executable,
        "-m",
        "jmoe.cluster.supervise",
        "--processes",
        str(a.processes),
        "--",
        "train.py",
        *options,
    ]
    begun, screen = time.time(), folder / f"{name}.log"
    with Memory() as memory, started_processes([command], [screen], folder) as (supervisor,):
        times = times_of_log_lines(LINES, run / "supervise" / "rank-0.log")
        if supervisor.wait(LIMIT_S):
            sys.exit(screen.read_text())
        ended = time.time()
    events = [
        json.loads(line) for line in (run / "supervise" / "events.jsonl").read_text().splitlines()
    ]
    if [event["event"] for event in events] != ["start", "end"]:
        sys.exit(f"the processes were started again: {screen.read_text()}")
    moments = [begun, events[0]["time"], *times.values(), ended]
    parts = {
        part: round(after - before, 3)
        for part, (before, after) in zip(PARTS, itertools.pairwise(moments))
    }
    return parts | {
        "all_s": round(ended - begun, 3),
        "memory_gib": round(memory.most_bytes / 2**30, 2),
    }


def callers(number: int, present: int, limit_s: int) -> tuple[float, list[JsonObject]]:
    """Return when processes started, and what each of the first `present` of `number` printed."""
    with reserve_port() as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        words = [sys.executable, "-c", CALL, address, str(number)]
        begun = time.time()
        processes = [
            subprocess.Popen([*words, str(rank), str(limit_s)], stdout=subprocess.PIPE)
            for rank in range(present)
        ]
        return begun, [json.loads(process.communicate()[0]) for process in processes]


def all_join(number: int) -> dict[str, float]:
    """Return the seconds until all of `number` processes have met."""
    begun, told = callers(number, number, int(LIMIT_S))
    if any(one["problem"] for one in told):
        sys.exit(f"said: {told[0]['problem']}")
    last = max(one["called"] for one in told)
    return {
        "import": round(last - begun, 3),
        "meet": round(max(one["told"] for one in told) - last, 3),
    }


def one_never_joins(number: int, limit_s: int) -> JsonObject:
    """Return when, and in which words, the missing last of `number` processes is named."""
    told = callers(number, number - 1, limit_s)[1]
    words = {one["problem"] for one in told}
    if words != {
        f"rank {number - 1} did not start within distributed.start_timeout_s = {limit_s} s"
    }:
        sys.exit(f"said: {words}")
    waited = sorted(one["told"] - one["called"] for one in told)
    return {
        "limit_s": limit_s,
        "first_s": round(waited[0], 3),
        "missing_s": round(waited[-1], 3),
        "said": words.pop(),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--limit-s", type=int, default=20)
    a = parser.parse_args()
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.mkdir()
        for name in MODULES:
            shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", text)
        starts = [
            report.progress({"compile cache": name} | supervised(a, Path(folder), name))
            for name in ("empty", "filled")
        ]
    met = report.progress(all_join(a.callers))
    missing = report.progress(one_never_joins(a.callers, a.limit_s))
    result = {
        "benchmark": "startup",
        "options": report.options(a),
        "load_before": load,
        "start and two steps": starts,
    }
    result |= {"rendezvous alone": met, "a rank that never comes": missing}
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
