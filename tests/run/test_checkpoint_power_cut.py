"""Checkpoints after a power cut: what has its final name is whole, and no step that was waited
for is lost.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import CheckpointConfig
from jmoe.memory.record_checkpoint import ITEM, RecordCheckpoints
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.version_store import VersionStore
from jmoe.run.checkpoint import Checkpoints
from tests.power_cut import Image, PowerCut

LAYOUT = RecordLayout.from_arrays({"w": ((500,), np.float32)})
NUM_RECORDS = 3


def open_store(root: Path) -> VersionStore:
    return VersionStore.open(root / "local", LAYOUT, NUM_RECORDS, fingerprint="a")


def open_checkpoints(root: Path, store: VersionStore) -> Checkpoints:
    records = RecordCheckpoints({"experts": store})
    return Checkpoints(
        root / "checkpoints", CheckpointConfig(keep=2), records=records, timeout_s=60
    )


def train(store: VersionStore, step: int) -> None:
    record_R = store.layout.zeros()
    for index in range(NUM_RECORDS):
        store.layout.views(record_R)["w"][:] = 100 * index + step
        store.write(index, record_R)


def values(store: VersionStore) -> list[float]:
    record_R = store.layout.zeros()
    found = []
    for index in range(NUM_RECORDS):
        store.read_into(index, record_R)
        found.append(float(store.layout.views(record_R)["w"][0]))
    return found


def do_nothing(*_: Any) -> None:
    pass


def save_three(root: Path, without: str | None = None) -> PowerCut:
    """Three steps saved; the promise is the step that was waited for last. without: a function
    that does nothing.
    """
    cut = PowerCut(root)
    missing = mock.patch(without, do_nothing) if without else contextlib.nullcontext()
    with (
        cut.recording(),
        missing,
        open_store(root) as store,
        open_checkpoints(root, store) as checkpoints,
    ):
        for step in (1, 2, 3):
            train(store, step)
            checkpoints.save(step, {"w": jnp.full(8, step, jnp.float32)}, step, "{}")
            checkpoints.wait_for_save()
            cut.promise = step
        train(store, 4)
    return cut


def check(cut: PowerCut, without_local: bool = False, every: int = 1) -> int:
    """Look at the newest step of every image (or of one in `every`), its files' sums and its
    records.
    """

    def test(image: Image) -> None:
        if without_local:
            shutil.rmtree(cut.root / "local", ignore_errors=True)
        with open_store(cut.root) as store, open_checkpoints(cut.root, store) as checkpoints:
            for step in checkpoints.steps():
                assert checkpoints._find_damage(step) is None
            least = (image.promise or 0) - without_local
            if least <= 0:  # there may be steps of which none can be restored
                with contextlib.suppress(ValueError):
                    checkpoints.latest_step()
                return
            newest = checkpoints.latest_step()
            assert newest is not None and newest >= least
            records = RecordCheckpoints({"experts": store})
            records.restore_records(cut.root / "checkpoints" / str(newest) / ITEM)
            records.close()
            assert values(store) == [100 * index + newest for index in range(NUM_RECORDS)]

    drained = [image for image in cut.images if (image.promise or 0) > 1]
    return cut.check(test, (drained if without_local else cut.images)[::every])


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> PowerCut:
    return save_three(tmp_path_factory.mktemp("cut") / "run")


# Images come in pairs: a step of an odd number takes both kinds.
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_survive_a_power_cut_at_any_moment(cut: PowerCut, every: int) -> None:
    assert check(cut, every=every) > 100 // every
    with open_store(cut.root) as store, open_checkpoints(cut.root, store) as checkpoints:
        state, _, _ = checkpoints.restore(3, jax.eval_shape(lambda: {"w": jnp.zeros(8)}))
        assert float(state["w"][0]) == 3 and values(store) == [3, 103, 203]


@pytest.mark.slow
def test_copies_of_records_survive_a_power_cut_where_the_node_is_lost(cut: PowerCut) -> None:
    """Of two steps kept one is whole without the pins: `durable` is said after the copies are on
    disk.
    """
    assert check(cut, without_local=True) > 50


@pytest.mark.parametrize(
    "flush", ["jmoe.run.checkpoint.fsync", "jmoe.memory.version_store.fsync", "os.fdatasync"]
)
def test_a_missing_flush_shows(tmp_path: Path, flush: str) -> None:
    """The tests above can fail: without a flush of files or folders, a step that was waited for
    is not whole.
    """
    cut = save_three(tmp_path / "run", without=flush)
    with pytest.raises((OSError, ValueError, AssertionError)):
        check(cut)
