"""Preparation of a corpus: processor time beside tokenizers alone, memory, time of several workers.

Contestants take turns, and figures are medians of the rounds. Processor seconds, which the load of
the machine changes little, are compared for one process, elapsed seconds for workers; both without
the time of a start, which an empty corpus has. The text is the standard library's source, as JSONL,
repeated with a number in each document; the tokenizer is a byte-level BPE trained on it.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT
from benchmarks.lib.report import (
    JsonObject,
    finish,
    median,
    options,
    parser,
    progress,
    ratio,
    versions,
)
from jmoe.data.text_files import standard_library_files
from jmoe.data.tokenizer import train_bpe

CHILD = """
import resource, runpy
try:
    runpy.run_module("jmoe.data.prepare", run_name="__main__")
except SystemExit as end:
    status = end.code
usage = resource.getrusage(resource.RUSAGE_SELF)
print("usage", usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, 0)
raise SystemExit(status)
"""
ALONE = """
import json, resource, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
tokenizer.encode_special_tokens = True
texts, count = [], 0
def encode():
    global count
    count += sum(len(e.ids) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    texts.clear()
for line in open(sys.argv[1]):
    texts.append(json.loads(line)["text"])
    if len(texts) == 64:
        encode()
encode()
usage = resource.getrusage(resource.RUSAGE_SELF)
print("usage", usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, count)
"""


def write_corpus(path: Path, size_bytes: int) -> None:
    """Write about `size_bytes` of documents as JSONL."""
    texts = [file.path.read_text() for file in standard_library_files()]
    with path.open("w") as out:
        for number, text in enumerate(itertools.cycle(texts)):
            if out.tell() >= size_bytes:
                break
            out.write(json.dumps({"text": f"# {number}\n{text}"}) + "\n")


@dataclass(frozen=True)
class Usage:
    """What a program took: its own processor seconds and peak memory, elapsed seconds, and the
    number of tokens, if it prints it.
    """

    cpu_s: float
    peak_mb: float
    tokens: int
    elapsed_s: float


def run(code: str, *arguments: object) -> Usage:
    """Run a program that prints what it took."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    elapsed_s = time.monotonic() - begun
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("usage ")]
    cpu_s, peak_mb, tokens = map(float, line.split()[1:])
    return Usage(cpu_s, peak_mb, int(tokens), elapsed_s)


def prepare(corpus: Path, tokenizer: Path, workers: int) -> Usage:
    """Prepare a corpus into a new folder, which is deleted; in units of which each worker gets
    several.
    """
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        unit_mb = max(0.1, min(8, corpus.stat().st_size / 1e6 / 4 / workers))
        settings = ["--workers", workers, "--unit-mb", unit_mb, "--held-out-bytes", 1]
        out = Path(folder, "shards")
        return run(CHILD, corpus, "--out", out, "--tokenizer", tokenizer, *settings)


def compare_with_tokenizers(corpora: Sequence[Path], tokenizer: Path, rounds: int) -> JsonObject:
    """Return the figures of each corpus beside those of tokenizers alone. corpora: the first is
    empty.
    """
    ours: dict[Path, list[Usage]] = {corpus: [] for corpus in corpora}
    alone: dict[Path, list[Usage]] = {corpus: [] for corpus in corpora}
    for _ in range(rounds):
        for corpus in corpora:
            ours[corpus].append(prepare(corpus, tokenizer, 1))
            alone[corpus].append(run(ALONE, corpus, tokenizer))
    start, *others = corpora

    def cpu_s(usages: dict[Path, list[Usage]], corpus: Path) -> list[float]:
        pairs = zip(usages[corpus], usages[start], strict=True)
        return [whole.cpu_s - begun.cpu_s for whole, begun in pairs]

    rows = []
    for corpus in others:
        tokens = alone[corpus][0].tokens
        mine, theirs = cpu_s(ours, corpus), cpu_s(alone, corpus)
        row = {
            "corpus_mb": round(corpus.stat().st_size / 1e6, 1),
            "tokens": tokens,
            "prepare_tokens_per_cpu_s": round(tokens / median(mine)),
            "tokenizers_tokens_per_cpu_s": round(tokens / median(theirs)),
            "ratio": ratio(theirs, mine),
            "ratio_by_round": [round(t / m, 3) for t, m in zip(theirs, mine, strict=True)],
            "peak_mb": round(max(usage.peak_mb for usage in ours[corpus])),
        }
        rows.append(progress(row))
    return {"beside tokenizers alone, one process": rows}


def compare_workers(
    empty: Path, corpus: Path, tokenizer: Path, rounds: int, workers: Sequence[int]
) -> JsonObject:
    """Return the elapsed time of each number of workers."""
    elapsed: dict[int, list[float]] = {count: [] for count in workers}
    for _ in range(rounds):
        for count in workers:
            start_s = prepare(empty, tokenizer, count).elapsed_s
            elapsed[count].append(prepare(corpus, tokenizer, count).elapsed_s - start_s)
    first = elapsed[workers[0]]
    return {
        "workers": [
            progress(
                {
                    "workers": count,
                    "elapsed_s": median(elapsed[count]),
                    "speedup": ratio(first, elapsed[count]),
                    "elapsed_s_by_round": [round(seconds, 2) for seconds in elapsed[count]],
                }
            )
            for count in workers
        ]
    }


def main() -> None:
    """Print the figures of a corpus and of one ten times as large."""
    own = parser(__doc__)
    own.add_argument("--mb", type=float, default=4.0, help="size of the smaller corpus")
    own.add_argument("--vocab-size", type=int, default=8192)
    own.add_argument("--rounds", type=int, default=3)
    own.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    a = own.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name, "tokenizer.json")
        texts = [file.path.read_text() for file in standard_library_files()[:200]]
        train_bpe(texts, a.vocab_size).save(str(tokenizer))
        corpora = [Path(name, f"{number}.jsonl") for number in range(3)]
        for corpus, mb in zip(corpora, (0, a.mb, 10 * a.mb), strict=True):
            write_corpus(corpus, max(1, round(mb * 1e6)))
        result = compare_with_tokenizers(corpora, tokenizer, a.rounds)
        result |= compare_workers(corpora[0], corpora[-1], tokenizer, a.rounds, a.workers)
    loads = {"load_before": round(load_before, 1), "load_after": round(os.getloadavg()[0], 1)}
    about = {"benchmark": "prepare", "options": options(a), "versions": versions("tokenizers")}
    finish(about | loads | result)


if __name__ == "__main__":
    main()
