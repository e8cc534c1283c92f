"""Records through a cache in host memory: real files, real threads, no timing asserted."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory.link import SLACK_S
from jmoe.memory.record_handle import Record
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords, RecordStore
from jmoe.memory.ring import Ring
from jmoe.memory.tiered_store import TieredStore
from tests.fakes import Gate, run_in_threads, wait_for

NUM_RECORDS = 24
LAYOUT = RecordLayout.from_arrays({"w": ((3, 1000), np.float32), "b": ((7,), np.int64)})
RECORD_BYTES = LAYOUT.record_bytes


def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
    views["w"][...] = np.arange(3000).reshape(3, 1000) + index * 10_000
    views["b"][...] = index


def check_record(record: Record, index: int) -> None:
    assert record.index == index
    assert (record["b"] == index).all()
    np.testing.assert_array_equal(
        record["w"].reshape(-1), np.arange(3000, dtype=np.float32) + index * 10_000
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    with RecordStore.open_or_pack(tmp_path, LAYOUT, NUM_RECORDS, fill, fingerprint="f") as store:
        yield store


@pytest.fixture
def gate(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(store, "read_into", monkeypatch)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("slots", [2, 6, NUM_RECORDS - 1, NUM_RECORDS, 100])
def test_records_come_back_right(store: RecordStore, threads: int, slots: int) -> None:
    rng = np.random.default_rng(0)
    with TieredStore(store, cache_bytes=slots * RECORD_BYTES + 100, threads=threads) as tiers:
        assert tiers.host_bytes == min(slots, NUM_RECORDS) * RECORD_BYTES
        gets = 0
        for _ in range(40):
            wanted = rng.choice(NUM_RECORDS, rng.integers(1, 7), replace=False)
            tiers.prefetch(wanted)
            for index in rng.permutation(wanted).tolist():  # not in the order that was announced
                with tiers.get(index) as record:
                    check_record(record, index)
                gets += 1
            tiers.count_step(wanted)
        stats = tiers.stats()
        assert stats.cache.hits + stats.cache.misses == stats.host.transfers == gets
        assert stats.host.num_bytes == gets * RECORD_BYTES
        assert stats.nvme.num_bytes == stats.nvme.transfers * RECORD_BYTES
        assert stats.nvme.transfers >= stats.cache.misses
        assert stats.nvme.seconds > 0
        if slots >= NUM_RECORDS:
            assert (stats.nvme.transfers, stats.cache.passed_through) == (NUM_RECORDS, 0)


def test_all_in_host_memory() -> None:
    records = HostRecords.allocate_and_fill(LAYOUT, NUM_RECORDS, fill)
    with TieredStore(records) as tiers:
        assert tiers.num_records == NUM_RECORDS
        assert tiers.host_bytes == NUM_RECORDS * RECORD_BYTES
        tiers.prefetch(range(NUM_RECORDS))
        tiers.cancel_prefetch([0])
        tiers.count_step([0])
        for index in (5, 0, 5):
            with tiers.get(index) as record:
                check_record(record, index)
        stats = tiers.stats()
        assert (stats.nvme.num_bytes, stats.host.num_bytes, stats.waits) == (0, 3 * RECORD_BYTES, 0)


def test_what_a_record_is(store: RecordStore) -> None:
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES) as tiers:
        record = tiers.get(3)
        assert record.data_R.nbytes == RECORD_BYTES
        assert record.data_R.ctypes.data % 4096 == 0
        for array in (record["w"], record["b"], record.data_R):
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
        record.close()
        record.close()
        assert tiers.stats().host.transfers == 1


def test_an_open_record_is_never_overwritten(store: RecordStore) -> None:
    """3 + 1 slots, 3 records held open, the others come and go through what is left."""
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES, threads=2) as tiers:
        held = [tiers.get(index) for index in (1, 2, 3)]
        for _ in range(2):
            for index in range(4, NUM_RECORDS):
                tiers.count_step([index])
                with tiers.get(index) as record:
                    check_record(record, index)
        for record, index in zip(held, (1, 2, 3)):
            check_record(record, index)
            record.close()


def test_one_read_for_many_that_wait(store: RecordStore, gate: Gate) -> None:
    gate.open.clear()
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES, threads=4) as tiers:

        def work(_: int) -> None:
            with tiers.get(7) as record:
                check_record(record, 7)

        tiers.prefetch([7])
        with ThreadPoolExecutor(5) as pool:
            done = pool.map(work, range(5))
            wait_for(lambda: gate.begun == [7] and tiers._reads[7].waiters == 5)
            gate.open.set()
            assert len(list(done)) == 5
        assert gate.begun == [7]
        stats = tiers.stats()
        assert (stats.cache.hits, stats.cache.misses) == (4, 1)
        assert stats.waits == 5
        assert stats.waited_s > 0


def test_who_waits_goes_before_what_is_read_ahead(store: RecordStore, gate: Gate) -> None:
    gate.open.clear()
    with TieredStore(store, cache_bytes=16 * RECORD_BYTES, threads=1) as tiers:
        tiers.prefetch([0, 1, 2, 3])
        wait_for(lambda: gate.begun == [0])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(tiers.get, 3)
            wait_for(lambda: tiers._reads[3].waiters == 1)
            gate.open.set()
            waiting.result(240).close()
        wait_for(lambda: len(gate.begun) == 4)
        assert gate.begun == [0, 3, 1, 2]


def test_reading_ahead_does_not_push_out_what_was_read_ahead(
    store: RecordStore, gate: Gate
) -> None:
    """6 cache and 2 staging slots: once all are taken, a read ahead waits until a record was
    used.
    """
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES, threads=4) as tiers:
        tiers.prefetch(range(12))
        wait_for(lambda: tiers.stats().nvme.transfers == 8)
        for index in range(12):
            with tiers.get(index) as record:
                check_record(record, index)
        stats = tiers.stats()
        assert gate.begun == list(range(12))
        assert (stats.cache.misses, stats.cache.unused, stats.nvme.transfers) == (12, 0, 12)


def test_a_demand_may_push_out_what_was_read_ahead(store: RecordStore, gate: Gate) -> None:
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES, threads=1) as tiers:
        tiers.prefetch(range(8))
        wait_for(lambda: tiers.stats().nvme.transfers == 8)
        with tiers.get(20) as record:
            check_record(record, 20)
        assert tiers.stats().cache.unused == 1


def test_discard(store: RecordStore, gate: Gate) -> None:
    gate.open.clear()
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES, threads=1) as tiers:
        tiers.prefetch(range(8))
        wait_for(lambda: gate.begun == [0])
        tiers.cancel_prefetch([0, 3, 4, 20])
        gate.open.set()
        wait_for(lambda: tiers.stats().nvme.transfers == 6)
        assert gate.begun == [0, 1, 2, 5, 6, 7]
        tiers.prefetch([10, 11])
        wait_for(lambda: len(gate.begun) == 8)
        assert tiers.stats().cache.unused == 1  # record 0
        with tiers.get(3) as record:
            check_record(record, 3)


def test_an_error_is_raised_where_it_is_waited_for(store: RecordStore, gate: Gate) -> None:
    gate.fail[5] = OSError("bad sector")
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES) as tiers:
        with pytest.raises(OSError, match="bad sector"):
            tiers.get(5)
        with tiers.get(5) as record:  # and it may be asked for again
            check_record(record, 5)
        assert tiers.stats().nvme.transfers == 1


@pytest.mark.parametrize("error", [OSError("bad sector"), MemoryError("none left")])
def test_an_error_that_nobody_waits_for_is_raised_by_every_later_call(
    store: RecordStore, gate: Gate, error: Exception
) -> None:
    for call in ("get", "prefetch"):
        gate.fail[5] = error
        with TieredStore(store, cache_bytes=4 * RECORD_BYTES) as tiers:
            tiers.prefetch([5])
            wait_for(lambda: tiers._error is not None)
            for _ in range(2):
                with pytest.raises(type(error), match=str(error)):
                    tiers.get(6) if call == "get" else tiers.prefetch([6])


def test_every_wait_has_a_limit(store: RecordStore, gate: Gate) -> None:
    gate.open.clear()
    with TieredStore(store, cache_bytes=4 * RECORD_BYTES, threads=1, wait_limit_s=0.2) as tiers:
        with pytest.raises(
            TimeoutError,
            match=r"record 5 of .*records-.*\.bin: not there after 0.2 s; the read has",
        ):
            tiers.get(5)
        with pytest.raises(TimeoutError, match="'read-0-records"):
            tiers.close()
        tiers._wait_limit_s = 240.0  # from here on it guards against what hangs
        gate.open.set()


def test_too_many_open_records(store: RecordStore) -> None:
    with TieredStore(store, cache_bytes=2 * RECORD_BYTES, wait_limit_s=0.2) as tiers:
        held = [tiers.get(0), tiers.get(1)]
        with pytest.raises(TimeoutError, match=r"record 2 .* every staging slot is held open"):
            tiers.get(2)
        tiers._wait_limit_s = 240.0  # from here on it guards against what hangs
        held[1].close()
        with tiers.get(2) as record:
            check_record(record, 2)


def test_close_wakes_who_waits(store: RecordStore, gate: Gate) -> None:
    gate.open.clear()
    tiers = TieredStore(store, cache_bytes=4 * RECORD_BYTES, threads=1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(tiers.get, 5)
        wait_for(lambda: gate.begun == [5])
        closing = pool.submit(tiers.close)
        with pytest.raises(ValueError, match="closed while record 5 of"):
            waiting.result(240)
        gate.open.set()
        closing.result(240)
    with pytest.raises(ValueError, match="the store is closed"):
        tiers.get(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_bytes": RECORD_BYTES}, "cache_bytes = 12288: must hold at least two records"),
        ({"cache_bytes": 10**6, "threads": 0}, "threads = 0"),
        ({"cache_bytes": 10**6, "wait_limit_s": 0}, "wait_limit_s = 0"),
        (
            {"cache_bytes": 10**6, "bandwidth_limit_bytes_per_s": {"disk": 1.0}},
            "links are nvme and host",
        ),
        (
            {"cache_bytes": 10**6, "bandwidth_limit_bytes_per_s": {"nvme": 0}},
            "bandwidth_limit_bytes_per_s = 0",
        ),
        ({}, "cache_bytes = None: a store needs a cache"),
    ],
)
def test_settings_that_make_no_sense(
    store: RecordStore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TieredStore(store, **options)


def test_more_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="records in host memory need none"):
        TieredStore(HostRecords.allocate_and_fill(LAYOUT, 1, fill), cache_bytes=1)
    with TieredStore(HostRecords.allocate_and_fill(LAYOUT, 2, fill)) as tiers:
        for bad in (-1, 2):
            for call in (tiers.get, tiers.prefetch, tiers.count_step, tiers.cancel_prefetch):
                with pytest.raises(ValueError, match=f"index = {bad}"):
                    call(bad)


def test_many_threads_many_records(store: RecordStore, gate: Gate) -> None:
    """8 threads get, prefetch and discard at random through 5 slots; every byte they see is
    right.
    """
    with TieredStore(store, cache_bytes=12 * RECORD_BYTES, threads=3) as tiers:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(150):
                index = int(rng.integers(NUM_RECORDS))
                tiers.prefetch(rng.integers(NUM_RECORDS, size=2))
                with tiers.get(index) as record:
                    check_record(record, index)
                tiers.cancel_prefetch(rng.integers(NUM_RECORDS, size=1))
                tiers.count_step([index])

        run_in_threads(work, 8)
        # what was read ahead may still be coming
        wait_for(lambda: tiers.stats().nvme.transfers == len(gate.begun))
        stats = tiers.stats()
        assert stats.cache.hits + stats.cache.misses == stats.host.transfers == 8 * 150


def test_limited_reads_are_all_counted(store: RecordStore) -> None:
    with TieredStore(
        store, cache_bytes=4 * RECORD_BYTES, bandwidth_limit_bytes_per_s={"nvme": 1e8, "host": 1e9}
    ) as tiers:
        for index in range(NUM_RECORDS):
            tiers.get(index).close()
        stats = tiers.stats()
        assert stats.nvme.num_bytes == stats.host.num_bytes == NUM_RECORDS * RECORD_BYTES
        assert stats.nvme.num_bytes <= 1e8 * (stats.nvme.seconds + SLACK_S)


def test_layers_from_disk_through_a_ring(store: RecordStore) -> None:
    """8 layers of 3 records: disk -> 8 slots of host memory -> 4 slots of a ring; the bytes of
    every tier add up.
    """
    layers, per_layer = 8, 3
    slots = [[np.zeros((3, 1000), np.float32) for _ in range(per_layer)] for _ in range(4)]
    with TieredStore(store, cache_bytes=8 * RECORD_BYTES, threads=2) as tiers:

        def load(layer: int, slot: int) -> int:
            records = range(layer * per_layer, (layer + 1) * per_layer)
            tiers.prefetch(records)
            for record_index, target in zip(records, slots[slot]):
                with tiers.get(record_index) as record:
                    np.copyto(target, record["w"])
            return per_layer * RECORD_BYTES

        with Ring(range(layers), 4, load) as ring:
            for _ in range(5):
                for expected in range(layers):
                    layer, slot = ring.acquire()
                    assert layer == expected
                    for place, target in enumerate(slots[slot]):
                        assert target[0, 0] == (layer * per_layer + place) * 10_000
                    ring.release()
                tiers.count_step(range(NUM_RECORDS))
        loaded = ring.stats().loads
        stats = tiers.stats()
    assert loaded.num_bytes == stats.host.num_bytes == stats.host.transfers * RECORD_BYTES
    assert 5 * layers <= loaded.transfers <= 5 * layers + 4
    assert stats.cache.hits + stats.cache.misses == stats.host.transfers
    # 6 of the 8 slots are the cache and keep their records, round after round
    assert stats.cache.hits >= 4 * 5
    assert stats.nvme.num_bytes >= stats.cache.misses * RECORD_BYTES


@pytest.mark.parametrize("expected", [4, 7])
def test_what_is_expected_is_kept_where_it_fits(store: RecordStore, expected: int) -> None:
    """4 slots of 6 are the cache's; others have the higher counts."""
    with TieredStore(store, cache_bytes=6 * RECORD_BYTES, threads=1) as tiers:
        assert tiers._cache is not None and tiers._cache.num_slots == 4
        for _ in range(3):
            tiers.count_step(range(8, 12))
        tiers.keep_cached(range(expected))
        for _ in range(2):
            for index in (*range(expected), *range(8, 12)):
                tiers.get(index).close()
        kept = {index for index in range(NUM_RECORDS) if tiers._cache._table.slot_of[index] >= 0}
        assert kept == set(range(4) if expected == 4 else range(8, 12))
