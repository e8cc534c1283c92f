"""Shards of `python -m jmoe.data.prepare`: each document once, the same bytes from any number of
workers, with workers killed, started again, and read by a run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prepared_shards import UNIT_MB, files_of, run
from text_corpus import REPOSITORY, config

from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.loader import train_batches
from jmoe.data.tokenizer import train_bpe
from jmoe.data.work_units import UNITS
from tests.chat_models import VOCAB_SIZE, say, write_jsonl
from tests.processes import memory_cgroup


def numbers_of(corpus: Corpus) -> Counter[str]:
    """Return how often each document's number is in the training or held-out tokens."""
    assert corpus.tokenizer is not None
    text = corpus.held_out_bytes.decode()
    for source in corpus.sources:
        for ids in source.shards:
            text += corpus.tokenizer.decode([int(i) for i in ids[:]], skip_special_tokens=False)
    return Counter(part[:4] for part in text.split("[")[1:])


def test_every_document_is_in_the_shards_once(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    assert (
        run(mixed_texts, "--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
    )
    corpus = prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert numbers_of(corpus) == Counter({f"{i:04d}": 1 for i in range(400)})
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["documents"] + manifest["held_out_documents"] == 400
    assert manifest["held_out_documents"] > 0
    assert manifest["bad_documents"] == manifest["empty_documents"] == 0
    assert len(manifest["shards"]) > 5
    assert manifest["tokens"] == corpus.num_train_tokens
    assert not (tmp_path / "cache").exists()


def test_two_workers_write_the_same_bytes(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for workers, out in enumerate(folders, 1):
        arguments = [mixed_texts, "--tokenizer", byte_tokenizer, "--out", out, "--workers", workers]
        assert run(*arguments, "--unit-mb", 0.02) == 0
    first, second = ({n: s for n, s in files_of(f).items() if n != UNITS} for f in folders)
    # units name the folder's key, which is the same for the same inputs
    assert first == second
    assert sum(name.endswith(".array_record") for name in first) > 1


def test_windows_are_the_same_on_every_process_and_after_a_resume(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    assert (
        run(mixed_texts, "--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
    )
    corpus = prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    settings: dict[str, Any] = {"batch_size": 4, "sequence_length": 33, "seed": 3}
    whole = train_batches(corpus, **settings)
    halves = [train_batches(corpus, **settings, process_index=i, process_count=2) for i in range(2)]
    batches = [next(whole) for _ in range(5)]
    for batch in batches:
        np.testing.assert_array_equal(np.concatenate([next(half) for half in halves]), batch)
    resumed = train_batches(corpus, **settings)
    resumed.set_state({**whole.get_state(), "next_step": 3})
    np.testing.assert_array_equal(next(resumed), batches[3])
    for iterator in (whole, *halves, resumed):
        iterator.close()


def test_chats_become_shards_of_samples(byte_tokenizer: Path, tmp_path: Path) -> None:
    records = [say(f"question {i}", f"answer {i} " * (i % 5 + 1)) for i in range(120)]
    path = write_jsonl(tmp_path / "chats.jsonl", [*records, say("no answer")])
    folders = [tmp_path / "one", tmp_path / "two"]
    for workers, out in enumerate(folders, 1):
        arguments = [path, "--tokenizer", byte_tokenizer, "--out", out, "--workers", workers]
        assert run(*arguments, *UNIT_MB) == 0
    assert files_of(folders[0]) == files_of(folders[1])
    corpus = prepare_corpus(config(folders[0]), VOCAB_SIZE, tmp_path / "cache")
    assert corpus.held_out_samples is not None
    assert sum(s.num_samples for s in (*corpus.sources, corpus.held_out_samples)) == 120
    assert json.loads((folders[0] / "manifest.json").read_text())["bad_documents"] == 1
    rows = next(train_batches(corpus, batch_size=2, sequence_length=64, seed=0))
    assert rows.weights.sum() > 0


def test_pairs_become_shards_of_preferences(byte_tokenizer: Path, tmp_path: Path) -> None:
    """A bad pair is left out and listed; the text beside is refused."""
    pairs = [
        {"prompt": f"question {i}", "chosen": "y" * (1 + i % 9), "rejected": "n" * (1 + i % 7)}
        for i in range(120)
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", [*pairs, {"prompt": "q", "chosen": "a"}])
    out = tmp_path / "shards"
    arguments = ("--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, *UNIT_MB)
    assert run(path, "--preferences", *arguments) == 0
    problem = "rejected: is missing from a preference"
    assert problem in (out / "bad_documents.jsonl").read_text()
    corpus = prepare_corpus(config(out, preferences=True), VOCAB_SIZE, tmp_path / "cache")
    assert corpus.held_out_samples is not None
    sources = (*corpus.sources, corpus.held_out_samples)
    assert sum(source.num_samples for source in sources) == 240
    assert all(source.has_preferences for source in sources)
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": "a text"}] * 9)
    assert run(text, "--preferences", *arguments[:2], "--out", tmp_path / "other") == 2


def test_an_object_store_is_read_by_its_url(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec")
    out = tmp_path / "shards"
    arguments = ["--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, "--unit-mb", 0.004]
    assert run(f"file://{mixed_texts}", *arguments) == 0
    corpus = prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert numbers_of(corpus) == Counter({f"{i:04d}": 1 for i in range(400)})


def test_mistakes_are_named_before_anything_is_written(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    for arguments, message in [
        ([tmp_path / "none", "--tokenizer", byte_tokenizer], "no such file or folder"),
        ([mixed_texts, "--tokenizer", tmp_path / "none.json"], "data.tokenizer = "),
        ([mixed_texts, mixed_texts / "a.jsonl", "--tokenizer", byte_tokenizer], "is in it twice"),
        ([mixed_texts, "--tokenizer", byte_tokenizer, "--workers", 0], "--workers = 0"),
        (
            [mixed_texts, "--tokenizer", byte_tokenizer, "--chat-template", byte_tokenizer],
            "data.chat_template",
        ),
        (["nowhere://x/y", "--tokenizer", byte_tokenizer], "data.path = 'nowhere://x/y'"),
    ]:
        assert run(*arguments, "--out", out) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert run(mixed_texts, "--tokenizer", byte_tokenizer, "--out", mixed_texts) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert (
        run(mixed_texts / "a.jsonl", "--tokenizer", byte_tokenizer, "--out", out, "--workers", 1)
        == 0
    )
    assert run(mixed_texts / "e00.txt", "--tokenizer", byte_tokenizer, "--out", out) == 2
    assert "made from other inputs or settings" in capsys.readouterr().err
    assert run(out, "--tokenizer", byte_tokenizer, "--out", tmp_path / "more") == 2
    assert "already token shards" in capsys.readouterr().err


THREADS = """
import os, runpy
try:
    runpy.run_module("jmoe.data.prepare", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
print(len(os.listdir("/proc/self/task")))
"""


def test_the_program_is_one_thread(mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path) -> None:
    """A second thread, such as NumPy's, would make malloc take locks."""
    text = mixed_texts / "a.jsonl"  # without Parquet, whose library has threads
    arguments = [text, "--tokenizer", byte_tokenizer, "--out", tmp_path / "shards"]
    hidden = ("OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", THREADS, *map(str, arguments), "--workers", "1"],
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "1"


@pytest.mark.slow
def test_killed_workers_are_replaced(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    expected, out = tmp_path / "expected", tmp_path / "shards"
    arguments = [mixed_texts, "--tokenizer", byte_tokenizer, *UNIT_MB]
    assert run(*arguments, "--out", expected, "--workers", 1) == 0
    command = [sys.executable, "-m", "jmoe.data.prepare", *arguments, "--out", out]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([*map(str, command), "--workers", "3"], env=environment) as program:
        killed = 0
        while program.poll() is None and killed < 2:
            done = len(list((out / UNITS).glob("*.json")))
            with contextlib.suppress(psutil.Error):  # one that has just ended
                workers = [
                    child
                    for child in psutil.Process(program.pid).children()
                    if "spawn_main" in " ".join(child.cmdline())
                ]
                if done > 2 * killed and workers:
                    workers[0].send_signal(signal.SIGKILL)
                    killed += 1
            time.sleep(0.01)
        assert program.wait(120) == 0
    assert killed
    assert files_of(out) == files_of(expected)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # it writes and reads 1.6 GB, with a tenth of a core on a busy machine
def test_a_corpus_of_ten_times_the_memory(tmp_path: Path) -> None:
    """A process in a cgroup of 160 MB prepares 1.6 GB; the page cache is in the same limit."""
    limit_bytes, corpus = 160_000_000, tmp_path / "corpus.jsonl"
    words = [letter * 40 for letter in "abcdefgh"]
    train_bpe([" ".join(words * 50)], 600).save(str(tmp_path / "tokenizer.json"))
    with corpus.open("w") as file:
        for number in itertools.count():
            text = " ".join(words[(number + i) % 8] for i in range(400 + number % 100))
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
            if file.tell() > 10 * limit_bytes:
                break
    out = tmp_path / "shards"
    arguments = [corpus, "--tokenizer", tmp_path / "tokenizer.json", "--out", out]
    command = [sys.executable, "-m", "jmoe.data.prepare", *map(str, arguments), "--workers", "1"]
    with memory_cgroup(limit_bytes) as folder:
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        subprocess.run(
            ["sh", "-c", enter, "sh", *command, "--unit-mb", "8"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            timeout=2300,
            check=True,
        )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["documents"] + manifest["held_out_documents"] == number + 1
