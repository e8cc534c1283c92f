"""A small corpus for the tests of the data."""

import gzip
import json
from pathlib import Path

import pytest
from text_corpus import config, write_texts

from jmoe.data.corpus import Corpus, prepare_corpus
from tests.chat_models import write_chat_tokenizer


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def corpus(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(config(texts), 400, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("model")) / "tokenizer.json"


@pytest.fixture(scope="module")
def mixed_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of all forms, each with a number of its own: NUMBER."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path_factory.mktemp("mixed")
    documents = [f"[{i:04d}] " + "word déjà " * (i % 37 + 1) for i in range(400)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in documents]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:200]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[200:260])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[260:320])))
    parquet.write_table(pa.table({"text": documents[320:380]}), folder / "d.parquet")
    for i, text in enumerate(documents[380:]):
        (folder / f"e{i:02d}.txt").write_text(text)
    return folder
