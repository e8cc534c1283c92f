"""Compressed files and Parquet are read as the same text is when it is plain, by their first bytes."""

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from text_corpus import config

from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.stored_files import Storage, detect_storage, open_text, text_suffix

RECORDS = [{"text": f"record {i}: déjà vu, 漢字 " + "word " * (i % 7)} for i in range(400)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor().compress(content)
    return packed


def write_parquet(path: Path, records: list[Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=100)


def tokens(corpus: Corpus) -> list[int]:
    return corpus.sources[0].shards[0].tolist() + corpus.held_out_tokens.tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "a.jsonl").write_bytes(LINES)
    return tokens(prepare_corpus(config(folder / "a.jsonl", held_out_bytes=100), 300, folder / "c"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.gz", "a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_stored_records_are_those_of_the_plain_file(
    tmp_path: Path, name: str, plain: list[int]
) -> None:
    """Under any name; a file of one record a line that is called .gz only is named."""
    if name == "a.parquet":
        write_parquet(tmp_path / name, RECORDS)
    else:
        packed = zstd(LINES) if name.endswith("zst") else gzip.compress(LINES)
        (tmp_path / name).write_bytes(packed)
    prepared = prepare_corpus(config(tmp_path / name, held_out_bytes=100), 300, tmp_path / "cache")
    if name == "a.gz":  # nothing says that its lines are records
        assert prepared.held_out_bytes.startswith(b'{"text"')
    else:
        assert tokens(prepared) == plain


def test_parquet_does_not_add_keys_to_tools(tmp_path: Path) -> None:
    """Its objects have the keys of all records, which a chat template would render as null."""

    def record(name: str) -> dict[str, Any]:
        function = {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}
        call = {"function": {"name": name, "arguments": {name: "x"}}}
        message = {"role": "assistant", "tool_calls": [call]}
        return {"messages": [message], "tools": [{"function": function}], "note": None}

    records = [record("city"), record("day")]
    write_parquet(path := tmp_path / "a.parquet", records)
    with open_text(path, "parquet") as file:
        assert [json.loads(line) for line in file] == records


def test_folders_and_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "in" / "b.md").write_bytes(LINES)
    (tmp_path / "in" / "c.log.gz").write_bytes(gzip.compress(LINES))
    prepared = prepare_corpus(config(tmp_path / "in"), 300, tmp_path / "cache")
    assert prepared.sources[0].files == 2 and prepared.sources[0].skipped == {"*.gz": 1}


def test_encodings_and_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(("naïve café\n" * 99).encode("latin-1")))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS).encode("utf-8-sig")))
    paths = tmp_path / "a.txt.gz", tmp_path / "b.json.gz"
    prepared = prepare_corpus(
        config(*paths, encoding=("utf-8", "latin-1")), 300, tmp_path / "cache"
    )
    assert prepared.tokenizer is not None
    ids = [token for source in prepared.sources for shard in source.shards for token in shard]
    text = prepared.tokenizer.decode(ids)
    assert "naïve café" in text and "record 300: déjà vu, 漢字" in text


def test_positions(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(LINES))
    with open_text(path, "gzip") as file:
        assert file.readline() == LINES.splitlines(keepends=True)[0]
        for start in (5000, 100, 9000, 0):
            assert file.seek(start) == start
            assert file.read(300) == LINES[start : start + 300] and file.tell() == start + 300
        file.seek(len(LINES) + 5)
        assert file.read() == b""


@pytest.mark.parametrize(
    ("library", "name", "said"),
    [
        ("zstandard", "a.jsonl.zst", "is compressed with zstd, which needs a library: pip install"),
        ("pyarrow", "a.parquet", "is Parquet, which needs a library: pip install 'jmoe"),
    ],
)
def test_missing_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str, said: str
) -> None:
    content = {"a.jsonl.zst": b"\x28\xb5\x2f\xfd\x24", "a.parquet": b"PAR1" + LINES + b"PAR1"}
    (tmp_path / name).write_bytes(content[name])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"{name}: {said}"):
        prepare_corpus(config(tmp_path / name), 300, tmp_path / "cache")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES)[:-200])
    with pytest.raises(ValueError, match=r"a.jsonl.gz: damaged, or cut"):
        prepare_corpus(config(tmp_path / "a.jsonl.gz"), 300, tmp_path / "cache")
    write_parquet(tmp_path / "a.parquet", RECORDS)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:300] + bytes(100) + whole[400:])
    with pytest.raises(ValueError, match=r"b.parquet: (damaged|not readable Parquet)"):
        prepare_corpus(config(tmp_path / "b.parquet"), 300, tmp_path / "cache")
    shutil.copy(tmp_path / "a.parquet", tmp_path / "c.parquet")
    (tmp_path / "c.parquet").write_bytes(whole[:-8] + b"\xff" * 4 + b"PAR1")
    with pytest.raises(ValueError, match=r"c.parquet: not readable Parquet"):
        prepare_corpus(config(tmp_path / "c.parquet"), 300, tmp_path / "cache")


def test_storage(tmp_path: Path) -> None:
    cases: list[tuple[bytes, Storage]] = [
        (b"text", "plain"),
        (b"", "plain"),
        (b"PAR1 is a word", "plain"),
        (b"PAR1 ... PAR1", "parquet"),
        (b"\x1f\x8b", "gzip"),
    ]
    for content, storage in cases:
        (tmp_path / "a").write_bytes(content)
        assert detect_storage(tmp_path / "a") == storage
    assert detect_storage(tmp_path / "missing") == "plain"
    assert text_suffix(Path("a.JSONL.gz"), "gzip") == ".JSONL"
    assert text_suffix(Path("a.jsonl"), "gzip") == text_suffix(Path("x"), "parquet") == ".jsonl"
