"""Shards in an object store: the bytes that a local folder would have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared_shards import download, files_of, run

from jmoe.data.output_folder import LocalFolder, StoredFolder, open_output_folder
from tests.chat_models import say, write_jsonl


@pytest.fixture
def memory_url() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec")
    yield "memory://bucket/shards"
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_a_store_has_the_bytes_of_a_folder(
    kind: str,
    mixed_texts: Path,
    byte_tokenizer: Path,
    memory_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A deleted shard is written again."""
    chats = [say(f"question {i}", f"answer {i} " * (i % 5 + 1)) for i in range(120)]
    source = mixed_texts if kind == "texts" else write_jsonl(tmp_path / "chats.jsonl", chats)
    arguments = [source, "--tokenizer", byte_tokenizer, "--workers", 1, "--unit-mb", 0.004]
    assert run(*arguments, "--out", tmp_path / "local") == 0
    assert run(*arguments, "--out", memory_url) == 0
    expected = files_of(tmp_path / "local")
    assert download(memory_url, tmp_path / "first") == expected
    capsys.readouterr()
    assert run(*arguments, "--out", memory_url) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    pytest.importorskip("fsspec").filesystem("memory").rm("/bucket/shards/train-00001.array_record")
    assert run(*arguments, "--out", memory_url) == 0
    assert download(memory_url, tmp_path / "second") == expected


def test_a_used_folder_of_a_store_is_refused(
    mixed_texts: Path, byte_tokenizer: Path, memory_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fs = pytest.importorskip("fsspec").filesystem("memory")
    fs.pipe_file("/bucket/shards/other.txt", b"other")
    arguments = [mixed_texts / "a.jsonl", "--tokenizer", byte_tokenizer, "--workers", 1]
    assert run(*arguments, "--out", memory_url) == 2
    assert f"--out = '{memory_url}': must be a new or empty folder" in capsys.readouterr().err
    assert run(*arguments, "--out", f"{memory_url}/more") == 0
    assert run(*arguments, "--out", f"{memory_url}/more", "--unit-mb", 7) == 2
    assert "holds shards made from other inputs or settings" in capsys.readouterr().err
    assert run(*arguments, "--out", "nowhere://x") == 2
    assert "--out = 'nowhere://x': " in capsys.readouterr().err


def test_where_a_folder_lies(tmp_path: Path) -> None:
    """A URL of this machine's files is a path, whose files appear by renames."""
    pytest.importorskip("fsspec")
    assert open_output_folder(str(tmp_path)) == LocalFolder(tmp_path)
    assert open_output_folder(f"file://{tmp_path}") == LocalFolder(tmp_path)
    assert open_output_folder("memory://x/y/") == StoredFolder("memory://x/y")
