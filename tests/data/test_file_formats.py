"""Binary files under any name are refused by their format; text that begins like one is text."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from text_corpus import config

from jmoe.data.corpus import prepare_corpus
from jmoe.data.file_formats import binary_format_advice


def tarred(name: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def zipped(name: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(name, content)
    return archive.getvalue()


def saved_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(100))
    return file.getvalue()


LINES = b'{"text": "some text of no importance"}\n' * 50


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"PAR1\x15\x04\x15\x0c" + LINES, "is Parquet that was cut, not text; get the whole file"),
        ("a.gz", gzip.compress(gzip.compress(LINES, mtime=0)), "is compressed twice, with gzip inside, not text; gunz"),
        ("a.jsonl.gz", gzip.compress(tarred("a.txt", LINES)), "is a tar archive, not text; tar xf FILE"),
        ("a.txt", gzip.compress(LINES, mtime=0)[:-9], "damaged, or cut: "),
        ("a.json.xz", lzma.compress(LINES), "is compressed with xz, not text; unxz -k FILE"),
        ("a.bz2", bz2.compress(LINES), "is compressed with bzip2, not text; bunzip2 -k FILE"),
        ("a.zip", zipped("a.txt", LINES), "is a zip archive, not text; unzip FILE"),
        ("a.tar", tarred("a.txt", LINES), "is a tar archive, not text; tar xf FILE"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x01\0\0" + LINES, "is an Arrow stream, not text; write its records as "),
        ("a.pkl", pickle.dumps([1, "x"]), "is a pickle, not text; write its records as JSONL"),
        ("a.npy", saved_array(), "is a NumPy array, not text; python -m jmoe.data"),
        ("a.pdf", b"%PDF-1.7\n" + LINES, "is PDF, not text; pdftotext"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",
)  # fmt: skip
@pytest.mark.parametrize("encoding", [("utf-8",), ("utf-8", "latin-1")], ids=str)
def test_binary_files_are_refused_by_their_format(
    tmp_path: Path, name: str, content: bytes, said: str, encoding: tuple[str, ...]
) -> None:
    """Whatever the name and the encodings, and nobody is told to read them as latin-1."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="1 problem") as error:
        prepare_corpus(config(tmp_path / name, encoding=encoding), 300, tmp_path / "cache")
    assert f"{tmp_path / name}: {said}" in str(error.value) and "--data.encoding" not in str(
        error.value
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["a.csv", "a.TSV"])
def test_tables_are_refused(tmp_path: Path, name: str) -> None:
    """The model would learn commas and quotes, and `data.field` would say nothing."""
    (tmp_path / name).write_text('id,text\n1,"a"\n' * 100)
    with pytest.raises(ValueError, match=rf"{name}: is a table, not text; write its records as J"):
        prepare_corpus(config(tmp_path / name), 300, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "begin", ["PAR1 is a word", "BZh91 too", "7zip", "Obj", "PK", "GIF87", "%PDF"]
)
def test_text_that_begins_like_a_binary_file_is_text(begin: str) -> None:
    assert binary_format_advice(io.BytesIO(f"{begin} in a line\n".encode() * 50)) is None
