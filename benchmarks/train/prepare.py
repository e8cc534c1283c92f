"""Preparation of a corpus: processor time beside tokenizers alone, and peak memory by its size.

Times are processor seconds of one process, which the load of the machine changes little. The text
is the standard library's source, as JSONL, repeated with a number in each document; the tokenizer
is a byte-level BPE trained on it.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT
from jmoe.data.text_files import standard_library_files
from jmoe.data.tokenizer import train_bpe

CHILD = """
import resource, sys, time
from jmoe.data.prepare import main
status = main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
print("usage", usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
sys.exit(status)
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


def run(code: str, *arguments: object) -> list[float]:
    """Return the figures that a program prints: processor seconds, peak MB, and more."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("usage ")]
    return [float(word) for word in line.split()[1:]]


def measure(folder: Path, mb: float, tokenizer: Path) -> dict[str, float]:
    """Return the figures for one size of corpus, without the time of a start."""
    corpus, empty = folder / f"{mb}.jsonl", folder / "small.jsonl"
    write_corpus(corpus, round(mb * 1e6))
    write_corpus(empty, 1)
    options = ["--tokenizer", tokenizer, "--workers", 1, "--unit-mb", 8, "--held-out-bytes", 1]
    spent = []
    for path in (empty, corpus):
        out = folder / f"shards-{path.stem}-{time.monotonic_ns()}"
        prepared = run(CHILD, path, "--out", out, *options)
        alone = run(ALONE, path, tokenizer)
        spent.append((prepared[0], alone[0]))
    (start, alone_start), (seconds, alone_seconds) = spent
    ours, theirs = seconds - start, alone_seconds - alone_start
    return {
        "corpus_mb": mb,
        "tokens": alone[2],
        "prepare_tokens_per_cpu_s": alone[2] / ours,
        "tokenizers_tokens_per_cpu_s": alone[2] / theirs,
        "ratio": theirs / ours,
        "peak_mb": prepared[1],
    }


def main() -> None:
    """Print the figures of a corpus and of one ten times as large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=8.0, help="size of the smaller corpus")
    parser.add_argument("--vocab-size", type=int, default=8192)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = folder / "tokenizer.json"
        texts = [file.path.read_text() for file in standard_library_files()[:200]]
        train_bpe(texts, options.vocab_size).save(str(tokenizer))
        sizes = [measure(folder, mb, tokenizer) for mb in (options.mb, 10 * options.mb)]
        load = os.getloadavg()[0]
        print(json.dumps({"sizes": sizes, "load": round(load, 1)}))


if __name__ == "__main__":
    main()
