"""Units of work: every record of every file is in one of them, whatever their size."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prepared_shards import run
from text_corpus import config

from jmoe.data.output_folder import LocalFolder
from jmoe.data.work_units import claim_folder, find_file_pieces, open_piece, plan_units


@pytest.mark.parametrize("unit_bytes", [1, 7, 50, 1000, 10**9])
def test_units_cover_every_byte_once(unit_bytes: int, tmp_path: Path) -> None:
    for name, count in [("a.jsonl", 9), ("b.jsonl", 1), ("c.txt", 30), ("d.ndjson", 4)]:
        (tmp_path / name).write_text('{"text": "x"}\n' * count)
    settings = config(tmp_path)
    pieces, has_samples = find_file_pieces(settings, lambda *progress: None)
    assert not has_samples
    units = plan_units(pieces, unit_bytes, settings)
    assert [unit.number for unit in units] == list(range(len(units)))
    ranges = [(p.name, p.start, p.stop) for unit in units for p in unit.pieces]
    for piece in pieces:
        own = [(start, stop) for name, start, stop in ranges if name == piece.name]
        if own == [(0, None)]:
            continue
        assert Path(piece.location).suffix in (".jsonl", ".ndjson")
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == piece.size_bytes


@pytest.mark.parametrize("unit_bytes", [29, 77, 10**6])
def test_a_record_is_in_the_unit_in_which_it_begins(
    unit_bytes: int, byte_tokenizer: Path, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": f"[{i:03d}]" + "x" * (i % 40)}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))  # without a line end at its end
    out = tmp_path / "shards"
    arguments = ["--tokenizer", byte_tokenizer, "--out", out, "--workers", 1]
    assert run(tmp_path / "a.jsonl", *arguments, "--unit-mb", unit_bytes / 1e6) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["documents"] + manifest["held_out_documents"] == 50
    assert manifest["bad_documents"] == 0


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    (piece,), _ = find_file_pieces(config(path), lambda *progress: None)
    path.write_text('{"text": "xy"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: has changed"), open_piece(piece, "text"):
        pass


def test_two_preparations_that_claim_one_folder(tmp_path: Path) -> None:
    """All starts of one preparation take the time of the first; another one is refused."""
    out = tmp_path / "shards"
    with ThreadPoolExecutor(8) as threads:
        begun = set(threads.map(lambda i: claim_folder(LocalFolder(out), "key", str(i)), range(8)))
    assert len(begun) == 1 and not [path for path in out.iterdir() if path.name.startswith(".")]

    def claim(key: str) -> str:
        try:
            return claim_folder(LocalFolder(tmp_path / "other"), key, "now")
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(claim, "abcdefgh"))
    assert answers.count("now") == 1 and sum("holds shards made from" in a for a in answers) == 7
    (out / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json: is damaged"):
        claim_folder(LocalFolder(out), "key", "now")
