"""Shards of `python -m jmoe.data.prepare`: each document once, the same bytes from any number of
workers, with workers killed, started again, and read by a run.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
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
from text_corpus import REPOSITORY, config

from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.loader import train_batches
from jmoe.data.preparation import UNITS
from jmoe.data.prepare import main
from tests.chat_models import VOCAB_SIZE, say, write_chat_tokenizer, write_jsonl

UNIT_MB = ("--unit-mb", "0.004")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("model")) / "tokenizer.json"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of all forms, each with a number of its own: NUMBER."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path_factory.mktemp("texts")
    documents = [f"[{i:04d}] " + "word déjà " * (i % 37 + 1) for i in range(400)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in documents]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:200]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[200:260])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[260:320])))
    parquet.write_table(pa.table({"text": documents[320:380]}), folder / "d.parquet")
    for i, text in enumerate(documents[380:]):
        (folder / f"e{i:02d}.txt").write_text(text)
    return folder


def run(*arguments: object) -> int:
    return main(list(map(str, arguments)))


def files_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a prepared folder, but the plan, which has times."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "plan.json"
    }


def numbers_of(corpus: Corpus) -> Counter[str]:
    """Return how often each document's number is in the training or held-out tokens."""
    assert corpus.tokenizer is not None
    text = corpus.held_out_bytes.decode()
    for source in corpus.sources:
        for ids in source.shards:
            text += corpus.tokenizer.decode([int(i) for i in ids[:]], skip_special_tokens=False)
    return Counter(part[:4] for part in text.split("[")[1:])


def test_every_document_is_in_the_shards_once(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    assert run(texts, "--tokenizer", tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
    corpus = prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert numbers_of(corpus) == Counter({f"{i:04d}": 1 for i in range(400)})
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["documents"] + manifest["held_out_documents"] == 400
    assert manifest["held_out_documents"] > 0
    assert manifest["bad_documents"] == manifest["empty_documents"] == 0
    assert len(manifest["shards"]) > 5
    assert manifest["tokens"] == corpus.num_train_tokens
    assert not (tmp_path / "cache").exists()


def test_two_workers_write_the_same_bytes(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for workers, out in enumerate(folders, 1):
        arguments = [texts, "--tokenizer", tokenizer, "--out", out, "--workers", workers]
        assert run(*arguments, "--unit-mb", 0.02) == 0
    first, second = ({n: s for n, s in files_of(f).items() if n != UNITS} for f in folders)
    # units name the folder's key, which is the same for the same inputs
    assert first == second
    assert sum(name.endswith(".array_record") for name in first) > 1


def test_a_deleted_shard_is_written_again(
    texts: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    arguments = [texts, "--tokenizer", tokenizer, "--out", out, "--workers", 1, *UNIT_MB]
    assert run(*arguments) == 0
    expected = files_of(out)
    (out / "train-00003.array_record").unlink()
    with pytest.raises(ValueError, match=r"lacks train-00003\.array_record, which its manifest"):
        prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert run(*arguments) == 0
    assert files_of(out) == expected
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "nothing is left to do" in capsys.readouterr().out


def test_windows_are_the_same_on_every_process_and_after_a_resume(
    texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    assert run(texts, "--tokenizer", tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
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


def test_bad_documents_are_counted_and_listed(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    good = json.dumps({"text": "a good document " * 9}).encode()
    lines = [good, b'{"text": 3}', b"{", b'{"body": "x"}', b'{"text": ""}', b'{"text": "\xff"}']
    (texts / "a.jsonl").write_bytes(b"\n".join([*lines, good, good]) + b"\n")
    (texts / "cut.jsonl.gz").write_bytes(gzip.compress(good * 50)[:-9])
    (texts / "latin.txt").write_bytes("café".encode("latin-1"))
    out = tmp_path / "shards"
    assert run(texts, "--tokenizer", tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
    assert "6 BAD ones left out" in capsys.readouterr().out
    manifest = json.loads((out / "manifest.json").read_text())
    counts = [manifest[f"{kind}documents"] for kind in ("", "held_out_", "empty_", "bad_")]
    assert [counts[0] + counts[1], *counts[2:]] == [3, 1, 6]
    bad = [json.loads(line) for line in (out / "bad_documents.jsonl").read_text().splitlines()]
    problems = {(Path(entry["file"]).name, entry["byte"]): entry["problem"] for entry in bad}
    first = len(good) + 1
    assert "not text" in problems["a.jsonl", first]
    assert "not JSON" in problems["a.jsonl", first + 12]
    assert "not in this line" in problems["a.jsonl", first + 14]
    assert "damaged, or cut" in problems["cut.jsonl.gz", None]
    assert "not UTF-8 at byte 3" in problems["latin.txt", None]


def test_chats_become_shards_of_samples(tokenizer: Path, tmp_path: Path) -> None:
    records = [say(f"question {i}", f"answer {i} " * (i % 5 + 1)) for i in range(120)]
    path = write_jsonl(tmp_path / "chats.jsonl", [*records, say("no answer")])
    folders = [tmp_path / "one", tmp_path / "two"]
    for workers, out in enumerate(folders, 1):
        arguments = [path, "--tokenizer", tokenizer, "--out", out, "--workers", workers]
        assert run(*arguments, *UNIT_MB) == 0
    assert files_of(folders[0]) == files_of(folders[1])
    corpus = prepare_corpus(config(folders[0]), VOCAB_SIZE, tmp_path / "cache")
    assert corpus.held_out_samples is not None
    assert sum(s.num_samples for s in (*corpus.sources, corpus.held_out_samples)) == 120
    assert json.loads((folders[0] / "manifest.json").read_text())["bad_documents"] == 1
    rows = next(train_batches(corpus, batch_size=2, sequence_length=64, seed=0))
    assert rows.weights.sum() > 0


def test_an_object_store_is_read_by_its_url(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    out = tmp_path / "shards"
    arguments = ["--tokenizer", tokenizer, "--out", out, "--workers", 1, "--unit-mb", 0.004]
    assert run(f"file://{texts}", *arguments) == 0
    corpus = prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert numbers_of(corpus) == Counter({f"{i:04d}": 1 for i in range(400)})


def test_mistakes_are_named_before_anything_is_written(
    texts: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    for arguments, message in [
        ([tmp_path / "none", "--tokenizer", tokenizer], "no such file or folder"),
        ([texts, "--tokenizer", tmp_path / "none.json"], "data.tokenizer = "),
        ([texts, texts / "a.jsonl", "--tokenizer", tokenizer], "is in it twice"),
        ([texts, "--tokenizer", tokenizer, "--workers", 0], "--workers = 0"),
        ([texts, "--tokenizer", tokenizer, "--chat-template", tokenizer], "data.chat_template"),
        (["nowhere://x/y", "--tokenizer", tokenizer], "data.path = 'nowhere://x/y'"),
    ]:
        assert run(*arguments, "--out", out) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert run(texts, "--tokenizer", tokenizer, "--out", texts) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert run(texts / "a.jsonl", "--tokenizer", tokenizer, "--out", out, "--workers", 1) == 0
    assert run(texts / "e00.txt", "--tokenizer", tokenizer, "--out", out) == 2
    assert "made from other inputs or settings" in capsys.readouterr().err
    assert run(out, "--tokenizer", tokenizer, "--out", tmp_path / "more") == 2
    assert "already token shards" in capsys.readouterr().err


def test_a_run_refuses_damaged_and_unfinished_shards(
    texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    out, cache = tmp_path / "shards", tmp_path / "cache"
    assert run(texts, "--tokenizer", tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
    other = write_chat_tokenizer(tmp_path / "other") / "tokenizer.json"
    other.write_text(other.read_text().replace("}", "} ", 1))
    with pytest.raises(ValueError, match="were made with another tokenizer"):
        prepare_corpus(config(out, tokenizer=str(other)), VOCAB_SIZE, cache)
    shard = out / "train-00001.array_record"
    content = shard.read_bytes()
    ids_end = content.index(b'{"dtype"') - 100
    flipped = content[:ids_end] + bytes([content[ids_end] ^ 1]) + content[ids_end + 1 :]
    for damaged in (content[:-7], b"", flipped):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"train-00001\.array_record: this token shard is dam"):
            prepare_corpus(config(out), VOCAB_SIZE, cache)
    shard.write_bytes(content)
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="its preparation was interrupted"):
        prepare_corpus(config(out), VOCAB_SIZE, cache)


@pytest.mark.slow
def test_killed_workers_are_replaced(texts: Path, tokenizer: Path, tmp_path: Path) -> None:
    expected, out = tmp_path / "expected", tmp_path / "shards"
    arguments = [texts, "--tokenizer", tokenizer, *UNIT_MB]
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
