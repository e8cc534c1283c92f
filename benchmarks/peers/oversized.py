"""Compare decoding with llama.cpp and accelerate in less memory than the model needs.

    sudo python benchmarks/peers/oversized.py --node FOLDER --text FILE --limit-mb 1000
        --pair MODEL MODEL-bf16.gguf "--device-bytes 330e6 --host-cache-bytes 80e6"
        --pair MODEL MODEL-q4_0.gguf "--expert-dtype int4 --policy resident --host-cache-bytes 1e6"

--node: the folder in which `llamacpp.mjs` was set up. A pair: a Hugging Face folder, the same
weights for llama.cpp, and options of `serve/oversized`. Both decode the same tokens of a text, one
sequence, each in a process of its own under the limit, llama.cpp once with each number of
`--threads`: the faster one counts, figure by figure. A round runs both sides of every pair, files
dropped from the page cache before. By all steps, and by the median step, which leaves out the first
reads of a model that fits. Medians of the rounds, and of a round's ratios. Needs root, for the
limit: a memory cgroup.

--accelerate: the Python of an environment that `setup.py transformers` has made. Accelerate then
decodes the same tokens of every pair, too, in bfloat16 whatever the pair has, with the weights on
disk but for each of --accelerate-mb (`accelerate_decoding.py`). A run writes the model's experts
beside the model first and removes them.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.lib import report
from benchmarks.lib.memory_limit import memory_limit
from benchmarks.lib.page_cache import evict_from_page_cache
from benchmarks.lib.peers import fastest_figures
from benchmarks.lib.report import JsonObject
from jmoe.models.tokenizer_file import open_tokenizer

HERE = Path(__file__).resolve().parent
OURS = BENCHMARKS / "serve" / "oversized.py"
PROMPT, NEW_TOKENS = 8, 48


def run_for_last_object(
    command: list[str], limit_bytes: int, folder: Path | None = None
) -> JsonObject:
    """Return the JSON object in the last line of a program that runs under the limit."""
    with memory_limit(limit_bytes) as processes:
        enter = ["bash", "-c", 'echo $$ >"$0"; exec "$@"', str(processes)]
        done = subprocess.run(
            [*enter, *command], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
    last: JsonObject = json.loads(done.stdout.strip().splitlines()[-1])
    return last


def speeds(seconds: list[float]) -> dict[str, float]:
    """Return tokens per second over all steps, and of the median step."""
    return {
        "tokens_per_s": round(len(seconds) / sum(seconds), 3),
        "median_step_tokens_per_s": round(1 / statistics.median(seconds), 3),
    }


def accelerate_run(
    python: str, model: str, ids: Path, memory_mb: int, limit_bytes: int
) -> JsonObject:
    """Return accelerate's figures on a text with this many bytes of weights in memory."""
    with tempfile.TemporaryDirectory(
        prefix="accelerate-", dir=Path(model).resolve().parent
    ) as offloaded:
        command = [
            python,
            str(HERE / "accelerate_decoding.py"),
            "--model",
            model,
            "--memory-mb",
            str(memory_mb),
        ]
        command += ["--offload-folder", offloaded, "--ids", str(ids)]
        command += ["--prompt", str(PROMPT), "--new-tokens", str(NEW_TOKENS)]
        run = run_for_last_object(command, limit_bytes)
    [figures] = run["rounds"]
    kept = {name: run[name] for name in ("bytes_in_memory", "peak_rss_bytes", "versions")}
    return figures | kept


def accelerate_row(ours: Sequence[dict[str, float]], runs: Sequence[JsonObject]) -> JsonObject:
    """Return accelerate's medians, and ours as a multiple of them, round by round."""
    row: JsonObject = {}
    for name in ours[0]:
        mine, others = [side[name] for side in ours], [run[name] for run in runs]
        row[name] = {
            "accelerate": report.median(others, 3),
            "ratio": report.ratio(mine, others),
            "rounds": others,
        }
    return row | {
        name: runs[-1][name]
        for name in ("disk_read_bytes_per_token", "bytes_in_memory", "peak_rss_bytes")
    }


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--limit-mb", type=int, required=True)
    parser.add_argument(
        "--pair", nargs=3, action="append", required=True, metavar=("MODEL", "GGUF", "OPTIONS")
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of llama.cpp")
    parser.add_argument("--accelerate", metavar="PYTHON", help="of its environment: a third side")
    parser.add_argument(
        "--accelerate-mb", type=int, nargs="+", default=[0, 400], help="of weights in memory"
    )
    a = parser.parse_args()
    if a.accelerate and shutil.which(a.accelerate) is None:
        parser.error(f"--accelerate {a.accelerate}: is not a program")
    if min(a.accelerate_mb) < 0:
        parser.error(f"--accelerate-mb {min(a.accelerate_mb)}: must be at least 0")
    return a


def write_ids(model: str, text: Path, ids: Path) -> None:
    """Write the token ids of the text's beginning, which all sides get."""
    tokenizer = open_tokenizer(Path(model) / "tokenizer.json")
    tokens = tokenizer.encode(text.read_text()[:100_000]).ids[: PROMPT + NEW_TOKENS]
    ids.write_text(json.dumps(tokens))


def llamacpp_runs(a: argparse.Namespace, gguf: str, ids: Path) -> list[dict[str, float]]:
    """Return llama.cpp's speeds with each number of threads, from a cold page cache."""
    script = str(HERE / "oversized_llamacpp.mjs")
    theirs = [script, str(Path(gguf).resolve()), str(ids), str(PROMPT)]
    found = []
    for threads in a.threads:
        evict_from_page_cache(Path(gguf))
        run = run_for_last_object(["node", *theirs, str(threads)], a.limit_mb * 2**20, a.node)
        found.append(speeds(run["seconds"]))
    return found


def compared(both: Sequence[tuple[dict[str, float], dict[str, float]]]) -> JsonObject:
    """Return the medians of (our, llama.cpp's) speeds and their ratios, round by round."""
    row: JsonObject = {}
    for name in both[0][0]:
        mine, others = ([side[name] for side in sides] for sides in zip(*both, strict=True))
        row[name] = {
            "jmoe": report.median(mine, 2),
            "llama.cpp": report.median(others, 2),
            "ratio": report.ratio(mine, others),
            "rounds": [list(pair) for pair in zip(mine, others, strict=True)],
        }
    return row


def main() -> None:
    a = parse()
    limit, text = a.limit_mb * 2**20, a.text.resolve()
    rounds: list[list[tuple[dict[str, float], dict[str, float]]]] = [[] for _ in a.pair]
    details: list[JsonObject] = [{} for _ in a.pair]
    accelerate: list[dict[int, list[JsonObject]]] = [{} for _ in a.pair]
    if a.accelerate:
        accelerate = [{mb: [] for mb in a.accelerate_mb} for _ in a.pair]
    with tempfile.TemporaryDirectory() as scratch:
        ids = Path(scratch) / "ids.json"
        for _ in range(a.rounds):
            for n, (model, gguf, options) in enumerate(a.pair):
                write_ids(model, text, ids)
                common = ["--model", model, "--text", str(text), "--prompt", str(PROMPT)]
                ours = [str(OURS), *common, "--new-tokens", str(NEW_TOKENS), *options.split()]
                here = run_for_last_object([sys.executable, *ours], limit)
                there = llamacpp_runs(a, gguf, ids)
                rounds[n].append((speeds(here["seconds"]), fastest_figures(there)))
                details[n] = {
                    k: here[k] for k in ("disk_read_bytes_per_token", "hit_rate", "peak_rss_bytes")
                }
                report.progress({"gguf": gguf, "here": rounds[n][-1][0], "llama.cpp": there})
                for mb, runs in accelerate[n].items():
                    runs.append(accelerate_run(a.accelerate, model, ids, mb, limit))
                    report.progress({"accelerate": model, "memory_mb": mb} | runs[-1])
    rows: list[JsonObject] = []
    versions = report.versions("jax")
    for (model, gguf, options), both, detail, others_mb in zip(
        a.pair, rounds, details, accelerate, strict=True
    ):
        row: JsonObject = {
            "model": Path(model).name,
            "llama_cpp": Path(gguf).stem.rpartition("-")[2],
            "options": options,
        }
        row |= compared(both)
        for mb, runs in others_mb.items():
            row.setdefault("accelerate", {})[f"{mb} MB"] = accelerate_row(
                [sides[0] for sides in both], runs
            )
            versions = runs[-1]["versions"] | versions
        rows.append(row | detail)
    report.finish({"limit_mb": a.limit_mb, "versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
