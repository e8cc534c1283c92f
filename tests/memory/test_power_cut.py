"""Records after a power cut: whole, and none older than what was promised; see
`tests/power_cut.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import PackError, RecordStore
from jmoe.memory.version_store import VersionStore
from tests.power_cut import Image, PowerCut
from tests.records import got, missing, pinned, put

LAYOUT = RecordLayout.from_arrays({"w": ((700,), np.float32)})
NUM_RECORDS = 5


def open_store(folder: Path) -> VersionStore:
    return VersionStore.open(folder, LAYOUT, NUM_RECORDS, fingerprint="a")


def exercise(cut: PowerCut) -> None:
    """Records written, synced, pinned and restored; the promise: least value of each record,
    values by pin.
    """
    least, pins = dict.fromkeys(range(NUM_RECORDS), -1.0), dict[str, float]()
    with open_store(cut.root) as store:
        for round_ in range(9):
            for index in range(NUM_RECORDS):
                put(store, index, round_)
            if round_ % 3 == 1:
                store.sync()
                least = dict.fromkeys(range(NUM_RECORDS), float(round_))
            if round_ in (4, 7):
                store.pin_versions(str(round_))
                files = pinned(cut.root, str(round_))
                pins = pins | {str(round_): float(round_)}
            cut.promise = (dict(least), dict(pins))
        least = dict.fromkeys(range(NUM_RECORDS), 7.0)
        cut.promise = (dict(least), dict(pins))
        store.restore_versions(files)
        for index in range(3):
            put(store, index, 20)
        assert store.stats().recycled > 10


def check(cut: PowerCut, every: int = 1) -> int:
    """Open the store of every image, or of one in `every`; returns how many there were."""

    def test(image: Image) -> None:
        least, pins = image.promise or ({}, {})
        with open_store(cut.root) as store:
            lost = missing(store)
            assert not (lost and least.get(0, -1.0) >= 0), f"records {lost} are lost"
            for index in set(range(NUM_RECORDS)) - set(lost):
                assert got(store, index) >= least.get(index, -1.0)
            for name, value in pins.items():
                files = pinned(store.path, name)
                assert len(files) == NUM_RECORDS
                assert {got(store, index, path) for index, path in files.items()} == {value}

    return cut.check(test, cut.images[::every])


def recorded(root: Path, program: Callable[[PowerCut], None]) -> PowerCut:
    cut = PowerCut(root)
    with cut.recording():
        program(cut)
    return cut


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_records_survive_a_power_cut_at_any_moment(tmp_path: Path, every: int) -> None:
    """Content is flushed before it gets its name, and names before the files of dead versions
    are written into.
    """
    assert check(recorded(tmp_path / "store", exercise), every) > 150 // every


def do_nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("missing", ["content", "folder"])
def test_a_missing_flush_shows(tmp_path: Path, missing: str) -> None:
    """The test above can fail: without one of the two flushes of a store, records are lost."""
    target = "os.fdatasync" if missing == "content" else "jmoe.memory.version_store.fsync"
    cut = PowerCut(tmp_path / "store")
    with cut.recording(), mock.patch(target, do_nothing):
        exercise(cut)
    with pytest.raises((OSError, AssertionError, PackError)):
        check(cut)


def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
    views["w"][:] = index + np.arange(700) / 1024


def holds_pack(folder: Path, source: str) -> bool:
    """Whether the folder has a pack of this source, all of whose records are whole."""
    with (
        contextlib.suppress(PackError),
        RecordStore.open(folder, LAYOUT, NUM_RECORDS, fingerprint=source) as store,
    ):
        record_R, expected_R = LAYOUT.zeros(), LAYOUT.zeros()
        for index in range(NUM_RECORDS):
            store.read_into(index, record_R)
            fill(index, LAYOUT.views(expected_R))
            np.testing.assert_array_equal(record_R, expected_R)
        return True
    return False


def test_a_pack_survives_a_power_cut_at_any_moment(tmp_path: Path) -> None:
    """What has a manifest is whole; what had one before has one now."""

    def pack(cut: PowerCut) -> None:
        for source in ("a", "b"):
            RecordStore.open_or_pack(
                cut.root, LAYOUT, NUM_RECORDS, fill, fingerprint=source
            ).close()
            cut.promise = source

    cut = recorded(tmp_path / "pack", pack)

    def test(image: Image) -> None:
        found = [source for source in ("a", "b") if holds_pack(cut.root, source)]
        assert found or image.promise is None
        assert image.promise != "b" or found == ["b"]

    assert cut.check(test) > 5
