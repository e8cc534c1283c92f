"""What becomes of the documents of a unit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from prepared_shards import UNIT_MB, run


def test_bad_documents_are_counted_and_listed(
    byte_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    good = json.dumps({"text": "a good document " * 9}).encode()
    lines = [good, b'{"text": 3}', b"{", b'{"body": "x"}', b'{"text": ""}', b'{"text": "\xff"}']
    (texts / "a.jsonl").write_bytes(b"\n".join([*lines, good, good]) + b"\n")
    (texts / "cut.jsonl.gz").write_bytes(gzip.compress(good * 50)[:-9])
    (texts / "latin.txt").write_bytes("café".encode("latin-1"))
    out = tmp_path / "shards"
    assert run(texts, "--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
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
