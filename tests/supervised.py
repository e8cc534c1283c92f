"""A stand-in for train.py under a supervisor: it does what a plan says, without JAX.

The plan is a JSON object: "ATTEMPT RANK" to words such as "steps 5; exit 70". What is not in it is
done at once.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
output_dir = Path(options["--output-dir"])
heartbeats = Path(options["--distributed.heartbeat-folder"])
rank, attempt = options["--distributed.process-id"], heartbeats.name.rpartition("-")[2]
told: list[int] = []
# as JAX does where another rank is gone, after and before a rank's own watchdog has begun
ABORTS = {
    "abort": "jmoe: rank {}: no sign of life, dead or stopped",
    "unheard": (
        "The following tasks are unhealthy (stopped sending heartbeats):\n{}\n7\nThe tasks have"
        " crashed."
    ),
}


def act(action: str, number: int) -> None:
    if action == "steps":  # up to this one, of which the last is saved
        with (output_dir / "metrics.jsonl").open("a") as file:
            file.writelines(
                json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(number)
            )
        (output_dir / "checkpoints" / str(number)).mkdir(parents=True)
    elif action == "unsaved":
        with (output_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": number - 1, "loss": 1.0}) + "\n")
    elif action == "beat":
        beat = {"beat": 1, "at": "step 7", "devices": number}
        (heartbeats / f"rank-{rank}.json").write_text(json.dumps(beat))
    elif action == "wait":  # for a signal, which ends a run in order with this code
        while not told:
            time.sleep(0.01)
        print(f"told {told[0]}", flush=True)
        sys.exit(number)
    elif action == "signal":
        os.kill(os.getpid(), number)
    # with the host, whose tether is the parent; this one comes back after "return"
    elif action == "leave":
        Path(os.environ["SUPERVISED_AWAY"]).write_text(os.environ["SUPERVISED_HOST"])
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    elif action == "return":
        Path(os.environ["SUPERVISED_AWAY"]).write_text("")
    elif action in ABORTS:
        print(ABORTS[action].format(number), "    @ 0x7f26 (unknown)", sep="\n", flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    elif action == "sleep":
        time.sleep(number)
    elif action == "exit":
        print(f"rank {rank} ends with {number}", flush=True)
        sys.exit(number)


for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(name, lambda number, _: told.append(number))
print(f"attempt {attempt} rank {rank} of {options['--distributed.num-processes']}", flush=True)
plan = json.loads(Path(os.environ["SUPERVISED_PLAN"]).read_text())
for words in plan.get(f"{attempt} {rank}", "exit 0").split("; "):
    act(words.split()[0], int(words.split()[1]))
