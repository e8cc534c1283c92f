"""What the tests of the data share: small texts, shards and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from jmoe.config import DataConfig
from jmoe.data.shards import writing_shard

REPOSITORY = Path(__file__).parents[2]
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "dogs",
    "while",
    "déjà",
    "vu",
    "漢字",
    "return",
    "None",
    "12",
)


def write_texts(folder: Path, count: int = 20, seed: int = 0, lines: int = 60) -> Path:
    rng = np.random.default_rng(seed)
    for i in range(count):
        path = folder / f"part{i % 3}" / f"doc{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(
            " ".join(rng.choice(WORDS, 8)) + f" {rng.integers(10**6)}" for _ in range(lines)
        )
        path.write_text(f"document {i}\n{text}\n")
    return folder


def config(*paths: Path | str, **settings: object) -> DataConfig:
    return DataConfig(path=tuple(map(str, paths)), **settings)  # type: ignore[arg-type]


def write_shard(
    path: Path, ids: list[int], vocab_size: int = 300, split: str = "train", text_bytes: int = 7
) -> Path:
    with writing_shard(path, vocab_size=vocab_size, eot=0, tokenizer="t", split=split) as writer:
        writer.append(ids, text_bytes=text_bytes)
    return path


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    with process:
        try:
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, err
    return out.strip()
