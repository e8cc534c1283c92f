"""Preparation of a corpus: processor time beside tokenizers alone, memory, time of several workers.

Contestants take turns, and figures are medians of the rounds. Processor seconds of all processes
are compared, which the load of the machine changes little, without those of a start, which a corpus
of a few documents has. Elapsed seconds of several workers depend on the load. The text is the
standard library's source, as JSONL, repeated with a number in each document; the tokenizer is a
byte-level BPE trained on it.
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
from datetime import date
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.lib.report import (
    JsonObject,
    finish,
    median,
    options,
    parser,
    progress,
    ratio,
    versions,
    write,
)
from jmoe.data.text_files import standard_library_files
from jmoe.data.tokenizer import train_bpe

CHILD = """
import resource, runpy
try:
    runpy.run_module("jmoe.data.prepare", run_name="__main__")
except SystemExit as end:
    status = end.code
own, workers = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
cpu_s = own.ru_utime + own.ru_stime + workers.ru_utime + workers.ru_stime
print("usage", cpu_s, max(own.ru_maxrss, workers.ru_maxrss) / 1024, 0)
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


NOTES = {
    "tokens per cpu s": "processor seconds, user and system, of all processes, without those of a"
    " start; ours and tokenizers alone take turns, each in a new process of one thread",
    "ratio": "median, round by round, of our tokens per processor second beside tokenizers alone",
    "tokenizers alone": "reads the JSONL, encodes 64 documents a call, counts the ids, writes"
    " nothing",
    "speedup": "of elapsed seconds, which other processes share: see the load",
}
START_MB = 0.04  # of a corpus for starts
RESULT = RESULTS / "prepare_cpu.json"


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
    """What a program took: processor seconds of all its processes, peak memory of the largest one,
    elapsed seconds, and the number of tokens, if it prints it.
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
    """Prepare a corpus into a new folder, which is deleted. Each worker gets four units; one, if
    the corpus is for starts.
    """
    size_mb = corpus.stat().st_size / 1e6
    units = workers * (4 if size_mb > 2 * START_MB else 1)
    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        settings = ["--workers", workers, "--unit-mb", min(8, 1.001 * size_mb / units)]
        arguments = [corpus, "--out", Path(folder, "shards"), "--tokenizer", tokenizer, *settings]
        return run(CHILD, *arguments, "--held-out-bytes", 1)


def compare_with_tokenizers(corpora: Sequence[Path], tokenizer: Path, rounds: int) -> JsonObject:
    """Return the figures of each corpus beside those of tokenizers alone. corpora: the first
    is for starts.
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
    start: Path, corpus: Path, tokenizer: Path, rounds: int, workers: Sequence[int]
) -> JsonObject:
    """Return the processor and the elapsed seconds of each number of workers."""
    whole: dict[int, list[Usage]] = {count: [] for count in workers}
    begun: dict[int, list[Usage]] = {count: [] for count in workers}
    for _ in range(rounds):
        for count in workers:
            begun[count].append(prepare(start, tokenizer, count))
            whole[count].append(prepare(corpus, tokenizer, count))

    def seconds(count: int, field: str) -> list[float]:
        pairs = zip(whole[count], begun[count], strict=True)
        return [getattr(both, field) - getattr(first, field) for both, first in pairs]

    rows = []
    for count in workers:
        cpu_s, elapsed_s = seconds(count, "cpu_s"), seconds(count, "elapsed_s")
        row = {
            "workers": count,
            "cpu_s": median(cpu_s),
            "tokens_per_cpu_s_beside_first": ratio(seconds(workers[0], "cpu_s"), cpu_s),
            "elapsed_s": median(elapsed_s),
            "speedup": ratio(seconds(workers[0], "elapsed_s"), elapsed_s),
            "peak_mb_of_a_process": round(max(usage.peak_mb for usage in whole[count])),
        }
        rows.append(progress(row))
    return {"workers": rows}


def main() -> None:
    """Print the figures of a corpus and of one ten times as large."""
    own = parser(__doc__)
    own.add_argument("--mb", type=float, default=4.0, help="size of the smaller corpus")
    own.add_argument("--vocab-size", type=int, default=8192)
    own.add_argument("--rounds", type=int, default=5)
    own.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    own.add_argument("--machine", default="", help="the processor, for the result")
    own.add_argument("--write", action="store_true", help=f"into benchmarks/results/{RESULT.name}")
    a = own.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name, "tokenizer.json")
        texts = [file.path.read_text() for file in standard_library_files()[:200]]
        train_bpe(texts, a.vocab_size).save(str(tokenizer))
        corpora = [Path(name, f"{number}.jsonl") for number in range(3)]
        for corpus, mb in zip(corpora, (START_MB, a.mb, 10 * a.mb), strict=True):
            write_corpus(corpus, round(mb * 1e6))
        result = compare_with_tokenizers(corpora, tokenizer, a.rounds)
        result |= compare_workers(corpora[0], corpora[-1], tokenizer, a.rounds, a.workers)
    about = {
        "benchmark": "prepare",
        "date": date.today().isoformat(),
        "machine": a.machine,
        "options": options(a, "machine", "write"),
        "versions": versions("tokenizers", "numpy"),
        "notes": NOTES,
        "load_before": round(load_before, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    if a.write:
        write(about | result, RESULT)
    finish(about | result)


if __name__ == "__main__":
    main()
