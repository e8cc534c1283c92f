"""Answer a file of requests with python -m jmoe.programs.batch, killed on its way.

    python benchmarks/serve/batch_kills.py --model DIR --requests 1000 --kills 2

SIGKILL ends the program when the next share of the answers is written; the same command then goes
on. The last line of stdout is one JSON object: how many requests have how many answers, and the
seconds and tokens of each start.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import report

POLL_S = 0.05


def write_requests(path: Path, count: int, new_tokens: int) -> None:
    """Write greedy completions and sampled ones of several lengths, each under its own id."""
    with path.open("w") as file:
        for number in range(count):
            body: report.JsonObject = {
                "prompt": f"{number}: " + "the quick brown fox " * (number % 7),
                "max_tokens": 1 + number % new_tokens,
                "temperature": number % 2,
                "seed": number,
            }
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")


def run_until(command: Sequence[str], answers: Path, count: int | None) -> report.JsonObject:
    """Run the program to its end, or kill it once there are `count` lines of answers."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        if count is not None and num_lines(answers) >= count:
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(POLL_S)
    status, seconds = process.returncode, round(time.perf_counter() - begun, 1)
    return report.progress({"status": status, "seconds": seconds, "lines": num_lines(answers)})


def num_lines(path: Path) -> int:
    """Return the number of whole lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16, help="most of an answer")
    parser.add_argument("--options", nargs="*", default=[], help="of the program, without --")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        write_requests(asked, a.requests, a.new_tokens)
        command = [sys.executable, "-m", "jmoe.programs.batch", str(asked), str(answers)]
        command += ["--model", str(a.model)]
        command += [word if i % 2 else f"--{word}" for i, word in enumerate(a.options)]
        shares = [a.requests * (i + 1) // (a.kills + 1) for i in range(a.kills)]
        starts = [run_until(command, answers, count) for count in (*shares, None)]
        if starts[-1]["status"]:
            sys.exit(f"the last start of {' '.join(command)} ended with {starts[-1]['status']}")
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
    times = Counter(Counter(line["custom_id"] for line in lines).values())
    failed = sum(line["error"] is not None for line in lines)
    usages = [line["response"]["body"]["usage"] for line in lines if line["error"] is None]
    report.finish(
        {
            "requests": a.requests,
            "answered": {str(count): num for count, num in sorted(times.items())},
            "failed": failed,
            "completion_tokens": sum(usage["completion_tokens"] for usage in usages),
            "starts": starts,
            "load_average": round(os.getloadavg()[0], 1),
            **report.options(a),
            "versions": report.versions("jax", "jaxlib"),
        }
    )


if __name__ == "__main__":
    main()
