"""Decoding beside llama.cpp under a memory limit that counts the page cache; the last line is one JSON object.

    sudo python benchmarks/peers/oversized.py --node FOLDER --text FILE --limit-mb 1000
        --pair MODEL MODEL-bf16.gguf "--device-bytes 330e6 --host-cache-bytes 80e6"
        --pair MODEL MODEL-q4_0.gguf "--expert-dtype int4 --policy resident --host-cache-bytes 1e6"

--node: the folder in which `llamacpp.mjs` was set up. A pair: a Hugging Face folder, the same weights for llama.cpp,
and options of `benchmarks/oversized.py`. Both decode the same tokens of a text, one sequence, each in a process of its
own under the limit; a round runs both sides of every pair, files dropped from the page cache before. Medians of the
rounds, and of a round's ratios. Needs root, for the limit: a memory cgroup.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # in place of this folder

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.lib import report

HERE = Path(__file__).resolve().parent
CGROUPS = Path("/sys/fs/cgroup")
PROMPT, NEW_TOKENS = 8, 48


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A new memory cgroup, page cache included and without swap; yields the file that takes process ids."""
    first = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if first else CGROUPS) / f"jmoe-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit_bytes))
        if not first:
            (group / "memory.swap.max").write_text("0")
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def last_object(command: list[str], limit_bytes: int, folder: Path | None = None) -> dict[str, Any]:
    """Return the JSON object in the last line that a program prints under the limit."""
    with memory_limit(limit_bytes) as processes:
        enter = ["bash", "-c", 'echo $$ >"$0"; exec "$@"', str(processes)]
        done = subprocess.run([*enter, *command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
    last: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return last


def evict(file: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--limit-mb", type=int, required=True)
    parser.add_argument("--pair", nargs=3, action="append", required=True, metavar=("MODEL", "GGUF", "OPTIONS"))
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    limit, text = a.limit_mb * 2**20, a.text.resolve()
    rounds: list[list[tuple[float, float]]] = [[] for _ in a.pair]
    details: list[dict[str, Any]] = [{} for _ in a.pair]
    with tempfile.TemporaryDirectory() as scratch:
        ids = Path(scratch) / "ids.json"
        for _ in range(a.rounds):
            for n, (model, gguf, options) in enumerate(a.pair):
                tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
                ids.write_text(json.dumps(tokenizer.encode(text.read_text()[:100_000]).ids[: PROMPT + NEW_TOKENS]))
                common = ["--model", model, "--text", str(text), "--prompt", str(PROMPT)]
                ours = [str(HERE.parent / "oversized.py"), *common, "--new-tokens", str(NEW_TOKENS), *options.split()]
                here = last_object([sys.executable, *ours], limit)
                evict(Path(gguf))
                theirs = [str(HERE / "oversized_llamacpp.mjs"), str(Path(gguf).resolve()), str(ids), str(PROMPT)]
                there = last_object(["node", *theirs], limit, a.node)
                rounds[n].append((here["decode_tokens_per_s"], NEW_TOKENS / sum(there["seconds"])))
                details[n] = {k: here[k] for k in ("disk_read_bytes_per_token", "hit_rate", "peak_rss_bytes")}
                report.progress({"gguf": gguf, "here": rounds[n][-1][0], "llama.cpp": round(rounds[n][-1][1], 3)})
    rows = []
    for (model, gguf, options), both, detail in zip(a.pair, rounds, details, strict=True):
        mine, others = zip(*both, strict=True)
        row = {"model": Path(model).name, "llama_cpp": Path(gguf).stem.rpartition("-")[2], "options": options}
        speeds = {"tokens_per_s": report.median(mine, 2), "llama_cpp_tokens_per_s": report.median(others, 2)}
        raw = [[round(value, 2) for value in pair] for pair in both]
        rows.append(row | speeds | {"ratio": report.ratio(mine, others), **detail, "rounds": raw})
    report.finish({"limit_mb": a.limit_mb, "versions": report.versions("jax"), "rows": rows})


if __name__ == "__main__":
    main()
