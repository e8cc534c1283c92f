"""Records that change behind a cache: what is put comes back, dirty records are written once and
in time.
"""

import errno
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory import version_store
from jmoe.memory.link import SLACK_S
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords, RecordStore
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore
from tests.damage import flip
from tests.fakes import Gate, run_in_threads, wait_for

NUM_RECORDS = 24
LAYOUT = RecordLayout.from_arrays({"w": ((3, 100), np.float32), "n": ((), np.int64)})
RECORD_BYTES = 4096


def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
    views["w"][:] = index
    views["n"][...] = 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VersionStore]:
    with VersionStore.open(tmp_path / "store", LAYOUT, NUM_RECORDS, fingerprint="a") as store:
        assert store.layout.record_bytes == RECORD_BYTES
        store.write_all_records(fill)
        yield store


@pytest.fixture
def gate(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(store, "write", monkeypatch)


def add(tiers: TieredStore, index: int, amount: float = 1.0) -> int:
    """Change a record; returns how often it has been changed."""
    with tiers.get(index, writable=True) as record:
        record["w"][:] += amount
        record["n"][...] += 1
        count = int(record["n"])
        record.close_as_changed()
    return count


def add_all(tiers: TieredStore) -> None:
    for index in range(NUM_RECORDS):
        add(tiers, index)


def check_record(tiers: TieredStore, index: int, count: int) -> None:
    with tiers.get(index) as record:
        assert int(record["n"]) == count
        assert (record["w"] == index + count).all()


def test_a_limit_of_nvme_is_one_of_each_direction(store: VersionStore) -> None:
    """Neither reads nor writes exceed it."""
    limit, begun_s = 1e6, time.monotonic()
    with TieredStore(
        store, cache_bytes=4 * RECORD_BYTES, bandwidth_limit_bytes_per_s={"nvme": limit}
    ) as tiers:
        add_all(tiers)
        tiers.flush()
        stats, took_s = tiers.stats(), time.monotonic() - begun_s
    assert stats.nvme.num_bytes == stats.nvme_writes.num_bytes == NUM_RECORDS * RECORD_BYTES
    assert stats.nvme.num_bytes <= limit * (took_s + SLACK_S)


@pytest.mark.parametrize("slots", [4, 9, NUM_RECORDS])
@pytest.mark.parametrize("every", [None, 3])
def test_what_is_put_comes_back(store: VersionStore, slots: int, every: int | None) -> None:
    rng = np.random.default_rng(slots)
    counts = [0] * NUM_RECORDS
    with TieredStore(
        store, cache_bytes=slots * RECORD_BYTES, write_back_every_steps=every
    ) as tiers:
        for step in range(40):
            ids = rng.choice(NUM_RECORDS, 6, replace=False).tolist()
            tiers.prefetch(ids)
            for index in ids:
                if step % 3:
                    check_record(tiers, index, counts[index])
                else:
                    counts[index] += 1
                    assert add(tiers, index) == counts[index]
            tiers.count_step(ids)
        tiers.flush()
        stats = tiers.stats()
    written = store.stats()
    assert written.writes - NUM_RECORDS <= sum(counts)  # none twice without a change between
    assert stats.nvme_writes.num_bytes == stats.cache.written_back * RECORD_BYTES
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES) as tiers:
        for index in range(NUM_RECORDS):
            check_record(tiers, index, counts[index])


def test_dirty_records_leave_the_cache_while_others_are_held(store: VersionStore) -> None:
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES, wait_limit_s=20) as tiers:
        for index in (0, 1, 2):
            add(tiers, index)
        for _ in range(5):
            tiers.count_step([3, 4])
        time.sleep(0.2)  # the threads that write are asleep by then
        # the second waits for the write of the first one's victim
        with tiers.get(3) as first, tiers.get(4) as second:
            assert (first["w"] == 3).all() and (second["w"] == 4).all()


def test_files_that_are_memory_are_read_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is changed is copied to host memory; it is read there until it is written back
    and has left.
    """
    monkeypatch.setattr(version_store, "choose_io", lambda folder: "mapped")
    with VersionStore.open(tmp_path / "store", LAYOUT, NUM_RECORDS, fingerprint="a") as store:
        store.write_all_records(fill)
        with TieredStore(store, cache_bytes=6 * RECORD_BYTES, wait_limit_s=20) as tiers:
            tiers.prefetch(range(NUM_RECORDS))
            held = [tiers.get(index) for index in range(NUM_RECORDS)]
            for index, record in enumerate(held):
                assert (record["w"] == index).all() and not record["w"].flags.writeable
                assert not np.shares_memory(record.data_R, tiers._slots_MR)
            stats = tiers.stats()
            assert (stats.nvme.num_bytes, stats.waits) == (0, 0)
            assert add(tiers, 3) == 1  # others may still read the version before
            assert tiers.stats().nvme.num_bytes == RECORD_BYTES
            check_record(tiers, 3, 1)
            assert (held[3]["w"] == 3).all()
            with (
                tiers.get(4, writable=True),
                pytest.raises(ValueError, match="record 4: is open elsewhere"),
            ):
                tiers.get(4)
            for record in held:
                record.close()
            assert tiers.stats().host.num_bytes == (NUM_RECORDS + 3) * RECORD_BYTES
            for _ in range(5):
                add_all(tiers)
            for index in range(NUM_RECORDS):
                check_record(tiers, index, 5 + (index == 3))
            add_all(tiers)
            tiers.flush()
            gone = next(
                i
                for i in range(NUM_RECORDS)
                if tiers._cache is not None and tiers._cache.slot_of(i) is None
            )
            flip(tmp_path / "store" / store._current[gone].name, 100, 4)
            with pytest.raises(OSError, match=f"record {gone}: damaged"):
                tiers.get(gone)


def test_all_in_host_memory() -> None:
    with TieredStore(HostRecords.allocate_and_fill(LAYOUT, NUM_RECORDS, fill)) as tiers:
        assert [add(tiers, 3), add(tiers, 3), add(tiers, 4)] == [1, 2, 1]
        tiers.flush()
        check_record(tiers, 3, 2)
        with (
            tiers.get(5, writable=True),
            pytest.raises(ValueError, match="record 5: is open elsewhere"),
        ):
            tiers.get(5)


def test_flush_makes_it_durable(store: VersionStore, gate: Gate) -> None:
    with TieredStore(store, cache_bytes=12 * RECORD_BYTES) as tiers:
        for index in (1, 2, 3):
            add(tiers, index)
        assert not gate.begun  # they have slots in the cache
        tiers.flush()
        assert sorted(gate.begun) == [1, 2, 3]
        tiers.flush()
        assert len(gate.begun) == 3
        with (
            tiers.get(2, writable=True) as record,
            pytest.raises(ValueError, match=r"records \[2\]: must be put"),
        ):
            tiers.flush()
        record.close()
        tiers.close()
    assert store.stats().writes == NUM_RECORDS + 3


def test_write_back_at_the_period(store: VersionStore, gate: Gate) -> None:
    with TieredStore(store, cache_bytes=12 * RECORD_BYTES, write_back_every_steps=2) as tiers:
        add(tiers, 1)
        tiers.count_step([1])
        add(tiers, 2)
        assert not gate.begun
        tiers.count_step([2])
        wait_for(lambda: sorted(gate.begun) == [1, 2])
        wait_for(lambda: tiers.stats().cache.written_back == 2)


def test_a_dirty_victim_makes_nobody_wait(store: VersionStore, gate: Gate) -> None:
    """While writes stand still, hotter records take the places of dirty ones, as long as staging
    slots last.
    """
    # 6 + 2 slots
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES, threads=1, write_threads=1) as tiers:
        for index in range(6):
            add(tiers, index)
        gate.open.clear()
        for hot in (10, 11):
            tiers.count_step([hot])
            check_record(tiers, hot, 0)
        assert tiers.stats().cache.evictions == 2
        wait_for(lambda: len(gate.begun) == 1)
        gate.open.set()
        for index in range(6):
            check_record(tiers, index, 1)
        check_record(tiers, 10, 0)


def test_a_record_being_written_is_not_changed(
    store: VersionStore, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredStore(store, cache_bytes=2 * RECORD_BYTES) as tiers:
        add(tiers, 1)
        gate.open.clear()
        tiers.count_step([2])
        # takes the place of 1, which keeps its memory until it is written
        check_record(tiers, 2, 0)
        wait_for(lambda: gate.begun == [1])
        check_record(tiers, 1, 1)  # reading is allowed
        waits, wait, waiting = tiers.stats().waits, tiers._wait_and_count, threading.Event()
        monkeypatch.setattr(tiers, "_wait_and_count", lambda *words: (waiting.set(), wait(*words)))
        changer = threading.Thread(target=add, args=(tiers, 1))
        changer.start()
        assert waiting.wait(240) and changer.is_alive()
        gate.open.set()
        changer.join(240)
        check_record(tiers, 1, 2)
        assert tiers.stats().waits == waits + 1
        tiers.flush()
        assert gate.begun == [1, 1]


def test_one_holder_alone(store: VersionStore) -> None:
    with TieredStore(store, cache_bytes=12 * RECORD_BYTES) as tiers:
        with (
            tiers.get(1, writable=True),
            pytest.raises(ValueError, match="record 1: is open elsewhere"),
        ):
            tiers.get(1)
        with tiers.get(1) as first, tiers.get(1):
            with pytest.raises(ValueError, match="record 1: is open elsewhere"):
                tiers.get(1, writable=True)
            with pytest.raises(ValueError, match="writable = False"):
                first.close_as_changed()
        add(tiers, 1)


def test_not_read_where_all_is_replaced(
    store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Gate(store, "read_into", monkeypatch)
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES) as tiers:
        for index in range(NUM_RECORDS):
            with tiers.get(index, writable=True, will_overwrite=True) as record:
                record["w"][:] = index + 5
                record["n"][...] = 5
                record.close_as_changed()
        tiers.flush()
        assert not reads.begun
        with tiers.get(20, writable=True, will_overwrite=True) as record:  # it has left the cache
            record["w"][:] = -1  # and then thinks better of it
        check_record(tiers, 20, 5)
        with pytest.raises(ValueError, match="will_overwrite = True: needs writable"):
            tiers.get(0, will_overwrite=True)


def test_what_is_forgotten_is_not_written(store: VersionStore, gate: Gate) -> None:
    with TieredStore(store, cache_bytes=6 * RECORD_BYTES, threads=1, write_threads=1) as tiers:
        for index in range(NUM_RECORDS):
            with tiers.get(index, writable=True, will_overwrite=True) as record:
                record["n"][...] = 1
                record.close_as_changed()
            if index % 2:
                tiers.cancel_write_back(index)
        tiers.flush()
        assert set(range(0, NUM_RECORDS, 2)) <= set(gate.begun)
        # but for what was being written already
        assert len(gate.begun) == len(set(gate.begun)) < NUM_RECORDS
        gate.begun.clear()
        with tiers.get(1, writable=True, will_overwrite=True) as record:
            record["w"][:] = 1 + 5
            record["n"][...] = 5
            record.close_as_changed()
        tiers.flush()
        assert gate.begun == [1]
        check_record(tiers, 1, 5)


def test_a_failed_write_is_raised_from_then_on(store: VersionStore, gate: Gate) -> None:
    for failing in (7, 8):
        gate.fail[failing] = OSError(errno.ENOSPC, "No space left on device")
        tiers = TieredStore(store, cache_bytes=4 * RECORD_BYTES, threads=1, write_threads=1)
        with pytest.raises(OSError, match="No space left"):
            add_all(tiers)
        written = len(gate.begun)
        for _ in range(2):  # it has room now, but what went wrong is never forgotten
            for call in (tiers.flush, partial(tiers.get, 7), partial(tiers.prefetch, [7])):
                with pytest.raises(OSError, match="No space left"):
                    call()
        tiers.close()
        assert len(gate.begun) == written


def test_the_first_of_several_errors_is_raised(store: VersionStore, gate: Gate) -> None:
    tiers = TieredStore(store, cache_bytes=12 * RECORD_BYTES, write_threads=2)
    for index in (3, 4):
        add(tiers, index)
        gate.fail[index] = OSError(errno.EIO, f"bad sector {index}")
    gate.open.clear()
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(tiers.flush)
        wait_for(lambda: len(gate.begun) == 2)
        gate.open.set()
        first = flushing.exception(240)
    wait_for(lambda: not gate.fail and not any(map(tiers._cache.is_writing, (3, 4))))
    with pytest.raises(OSError, match="bad sector") as again:
        tiers.flush()
    assert first is again.value
    tiers.close()


def test_mistakes(store: VersionStore, tmp_path: Path) -> None:
    with (
        RecordStore.open_or_pack(
            tmp_path / "pack", LAYOUT, NUM_RECORDS, fill, fingerprint="a"
        ) as pack,
        TieredStore(pack, cache_bytes=4 * RECORD_BYTES) as tiers,
    ):
        with pytest.raises(ValueError, match="writable = True: needs a VersionStore"):
            tiers.get(0, writable=True)
        tiers.flush()
    for options in ({"write_threads": 0}, {"write_back_every_steps": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} = 0"):
            TieredStore(store, cache_bytes=4 * RECORD_BYTES, **options)


def test_many_threads_change_records(store: VersionStore) -> None:
    """6 threads add to records of their own and read those of others, through a few slots, with
    a period of 5.
    """
    with TieredStore(
        store, cache_bytes=14 * RECORD_BYTES, threads=3, write_back_every_steps=5
    ) as tiers:

        def work(first: int) -> None:
            rng = np.random.default_rng(first)
            counts = dict.fromkeys(range(first, NUM_RECORDS, 6), 0)
            for _ in range(150):
                index = int(rng.choice(list(counts)))
                tiers.prefetch(rng.choice(list(counts), 1))
                counts[index] += 1
                assert add(tiers, index) == counts[index]
                check_record(tiers, index, counts[index])
                tiers.count_step([index])

        run_in_threads(work, 6)
        tiers.flush()
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES) as tiers:
        total = 0
        for index in range(NUM_RECORDS):
            with tiers.get(index) as record:
                total += int(record["n"])
        assert total == 6 * 150
