"""Gives access to records on NVMe through a cache in host memory, or to records all in host memory.

Reader threads fill page-aligned host memory, on demand of `get` or ahead (`prefetch`). If the store
is a `VersionStore`, writer threads write changed records (`Record.close_as_changed`) back.
`offload` uses this for training and inference.

Legend:
  M  slots in host memory
  R  bytes of a record
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.config import check
from jmoe.memory.buffers import Allocate, Slots, allocate_slots
from jmoe.memory.closing import Closing
from jmoe.memory.lfu_cache import CacheStats, LFUCache
from jmoe.memory.link import Link, LinkStats
from jmoe.memory.pinned import PinnedSlots, PinnedSlotsOfDevices
from jmoe.memory.record_handle import Record
from jmoe.memory.record_store import HostRecords, RecordStore
from jmoe.memory.slot_table import HitCounts, RecordRanks, checked_record_ids
from jmoe.memory.version_store import VersionStore

# expected records per cache slot; measured: at 1.4 `keep_cached` saves reads, at 2.4 it adds some
MOST_EXPECTED = 1.5
LinkName = Literal["nvme", "host"]
Work = TypeVar("Work")


@dataclass(frozen=True)
class TieredStats:
    """Counters since the start.

    nvme: reads into host memory. host: records returned by `get`, each for as long as it was open.
    nvme_writes: records written back. waits, waited_s: waits for a read or a write-back, and the
    seconds they took in all.
    """

    nvme: LinkStats
    host: LinkStats
    cache: CacheStats
    waits: int
    waited_s: float
    nvme_writes: LinkStats


@dataclass(eq=False)
class _RecordRead:
    """A read of one record from NVMe that is queued or under way."""

    index: int
    will_overwrite: bool = False  # the caller overwrites the record: only a slot is needed
    slot: int | None = None  # None: no thread has begun the read
    awaited: bool = False
    waiters: int = 0
    done: bool = False
    error: Exception | None = None


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        check(value is None or value > 0, name, value, "must be greater than 0")


class TieredStore(Closing):
    """Records by number: a `RecordStore` or `VersionStore` behind a cache, or `HostRecords`.

    cache_bytes: all host memory used for records, allocated at once; None for `HostRecords`. A part
    of it, two records per thread and at most a third, are staging slots for records that the cache
    (`LFUCache`) does not admit; this limits how many such records can be open or prefetched at
    once. threads: concurrent reads. bandwidth_limit_bytes_per_s: limits for "nvme", in each
    direction (reads and writes do not share it, like the two ways of a PCIe link), and "host"
    (records returned by `get`, counted when they close).
    wait_limit_s: longest wait of a call; then `TimeoutError` names the record and the file.
    allocate: the function that allocates the cache. make_ranks: makes the cache's order of that
    many records.

    With a `VersionStore`, `get(index, writable=True)` gives one caller exclusive access to a
    record, and `Record.close_as_changed` marks it as dirty. One of `write_threads` threads writes a
    dirty record back when the cache evicts it, every `write_back_every_steps` steps (calls of
    `count_step`), and on `flush`. A `VersionStore` whose files are memory (tmpfs, DAX) is not
    prefetched: `get` returns an uncached record as a mapping of its file.

    The `get` that waits for a read raises the read's error, and may be repeated. An error that no
    caller waits for, of a prefetch or a write-back, is permanent: every later call raises it. The
    caller closes the underlying store, after this one.
    """

    def __init__(  # noqa: PLR0913  the store, its cache and its threads
        self,
        store: RecordStore | VersionStore | HostRecords,
        *,
        cache_bytes: int | None = None,
        threads: int = 4,
        write_threads: int = 2,
        write_back_every_steps: int | None = None,
        bandwidth_limit_bytes_per_s: Mapping[LinkName, float] | None = None,
        wait_limit_s: float = 60.0,
        allocate: Allocate = allocate_slots,
        make_ranks: Callable[[int], RecordRanks] = HitCounts,
    ) -> None:
        _check_positive(
            threads=threads,
            write_threads=write_threads,
            wait_limit_s=wait_limit_s,
            write_back_every_steps=write_back_every_steps,
        )
        self._lock = threading.Lock()
        self._to_do = threading.Condition(self._lock)  # wakes reader threads: a read may begin
        self._to_write = threading.Condition(self._lock)  # wakes writer threads: a write may begin
        # wakes callers of get and flush: a read or write has ended
        self._arrived = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._make_links(bandwidth_limit_bytes_per_s or {})
        self._wait_limit_s = wait_limit_s
        self._waits, self._waited_s = 0, 0.0
        self._error: Exception | None = None  # the first error that no caller waited for
        self._write_error = False  # after a failed write-back nothing more is written
        self._reads: dict[int, _RecordRead] = {}
        self._awaited, self._prefetches = deque[_RecordRead](), deque[_RecordRead]()
        self._open: Counter[int] = Counter()  # record -> handles
        self._changing: set[int] = set()  # records that are open as writable
        self._unwritten: set[int] = set()  # writable records that were not read and are not put yet
        self._steps, self._write_back_every_steps = 0, write_back_every_steps
        self.layout, self.num_records, self.owned = store.layout, store.num_records, store.owned
        # set if all records are in host memory
        self.host_records = store if isinstance(store, HostRecords) else None
        self._store = None if isinstance(store, HostRecords) else store
        self._versions = store if isinstance(store, VersionStore) else None
        self._mapped = store if isinstance(store, VersionStore) and store.io == "mapped" else None
        self._threads = self._make_threads(threads, write_threads)
        self._cache, self._slots_MR = self._make_cache(cache_bytes, allocate, make_ranks)
        self._views = [self._read_only_views(slot) for slot in range(len(self._slots_MR))]
        for thread in self._threads:
            thread.start()

    def _make_cache(
        self,
        cache_bytes: int | None,
        allocate: Allocate,
        make_ranks: Callable[[int], RecordRanks],
    ) -> tuple[LFUCache | None, Slots]:
        """Return (the cache, the memory of its slots); (None, the records) if all are in host
        memory.
        """
        needed = "a store needs a cache in host memory, records in host memory need none"
        is_host = self.host_records is not None
        check((cache_bytes is None) == is_host, "cache_bytes", cache_bytes, needed)
        if self.host_records is not None:
            return None, self.host_records.slots_MR
        assert cache_bytes is not None
        # every thread may hold a staging slot
        cache_slots, staging_slots = self._split_slots(cache_bytes, len(self._threads))
        slots_MR = allocate(cache_slots + staging_slots, self.layout.record_bytes)
        return LFUCache(make_ranks(self.num_records), cache_slots, staging_slots), slots_MR

    def _make_threads(self, threads: int, write_threads: int) -> list[threading.Thread]:
        """Return the threads that read records, and those that write them back if the store can be
        written; none has started. Records in host memory need no threads.
        """
        if self._store is None:
            return []
        work = [(self._read_until_closed, f"read-{n}") for n in range(threads)]
        if self._versions is not None:
            work += [(self._write_until_closed, f"write-{n}") for n in range(write_threads)]
        return [
            threading.Thread(target=do, name=f"{name}-{self._store.path.name}", daemon=True)
            for do, name in work
        ]

    def _make_links(self, limits: Mapping[LinkName, float]) -> None:
        """Make the links that count and limit the transfers of records."""
        check(
            limits.keys() <= {"nvme", "host"},
            "bandwidth_limit_bytes_per_s",
            dict(limits),
            "links are nvme and host",
        )
        self._nvme_link = Link(limits.get("nvme"), sleep=self._closing.wait)
        self._write_link = Link(limits.get("nvme"), sleep=self._closing.wait)
        self._host_link = Link(limits.get("host"))

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory that the records take; 0 for a mapped file."""
        held = self.host_records
        return len(self._slots_MR) * self.layout.record_bytes if held is None else held.host_bytes

    def count_step(self, indices: ArrayLike) -> None:
        """Count one step that used these records, for the cache's hit counts.

        May start a periodic write-back of all dirty records.
        """
        ids = checked_record_ids(indices, self.num_records)
        with self._lock:
            if self._cache is not None:
                self._cache.counts.count_step(ids)
                # a higher count may open the cache to a record that found no slot
                self._to_do.notify()
                self._steps += 1
                if self._write_back_every_steps and self._steps % self._write_back_every_steps == 0:
                    self._cache.queue_write_back()
                    self._to_write.notify_all()

    def keep_cached(self, indices: ArrayLike) -> None:
        """Keep these records in the cache before all others, because the next step will probably
        use them.

        If they exceed the cache by more than `MOST_EXPECTED`, the call only cancels the previous
        one: hit counts then choose better.
        """
        ids = np.unique(checked_record_ids(indices, self.num_records))
        with self._lock:
            if self._cache is not None:
                self._cache.counts.rank_first(
                    ids if ids.size <= MOST_EXPECTED * self._cache.num_slots else ids[:0]
                )

    def prefetch(self, indices: ArrayLike) -> None:
        """Begin to read these records, in this order, unless they are in host memory; return at
        once.
        """
        ids = checked_record_ids(indices, self.num_records).tolist()
        with self._lock:
            self._check_usable()
            if self._cache is None or self._mapped is not None:
                return
            for index in ids:
                if index not in self._reads and self._cache.slot_of(index) is None:
                    self._reads[index] = read = _RecordRead(index)
                    self._prefetches.append(read)
                    self._to_do.notify()

    def cancel_prefetch(self, indices: ArrayLike) -> None:
        """Cancel the prefetch of these records; a record that is read already may be evicted
        unused.
        """
        ids = checked_record_ids(indices, self.num_records).tolist()
        with self._lock:
            for index in ids:
                read = self._reads.get(index)
                if self._cache is None or (read is not None and read.waiters):
                    continue
                if read is None or read.slot is not None:
                    self._cache.mark_unneeded(index)
                else:
                    del self._reads[index]
            self._to_do.notify_all()

    def get(self, index: int, *, writable: bool = False, will_overwrite: bool = False) -> Record:
        """Return an open record, once it is in host memory; the caller must close it.

        writable: exclusive access; needs a `VersionStore` or unmapped host memory. will_overwrite:
        the caller overwrites the whole record, so it is not read, and its content is undefined
        until then. Raises `ValueError` if the record is already open and either access is writable,
        `TimeoutError` after `wait_limit_s`.
        """
        check(writable or not will_overwrite, "will_overwrite", will_overwrite, "needs writable")
        check(0 <= index < self.num_records, "index", index, f"must be in [0, {self.num_records})")
        if writable and self._store is not None:
            check(
                self._versions is not None,
                "writable",
                writable,
                "needs a VersionStore, or records in host memory",
            )
        if self.host_records is not None and self.host_records.check is not None:
            check(not writable, "writable", writable, "must be False for a file that is mapped")
            self.host_records.check(index)
        if not writable and (record := self._map_in_place(index)) is not None:
            return record
        with self._lock:
            self._check_usable()
            if self._cache is None:
                assert self.host_records is not None
                slot = self.host_records.slot_of(index)
            else:
                cache = self._cache
                if writable and cache.is_writing(index):
                    self._wait_for_writes(
                        lambda: not cache.is_writing(index), f"record {index} to be written"
                    )
                held = None if index in self._reads else self._cache.pin_record(index)
                slot = self._wait_for_slot(index, will_overwrite) if held is None else held
            taken = index in self._changing or (index in self._unwritten and not will_overwrite)
            if taken or (writable and self._open[index]):
                if self._cache is not None:
                    self._cache.unpin(slot)
                raise ValueError(
                    f"record {index}: is open elsewhere, and may then not be open as writable"
                )
            self._open[index] += 1
            if writable:
                self._changing.add(index)
        data_R, views = self._views[slot]
        if writable:
            data_R = self._slots_MR[slot]
            views = self.layout.views(data_R)
        send = None
        if isinstance(self._slots_MR, PinnedSlots | PinnedSlotsOfDevices):
            send = partial(self._slots_MR.copy_to_device, slot, self.layout)
        return Record(
            index, data_R, views, self._host_link, partial(self._release_record, index), send
        )

    def _map_in_place(self, index: int) -> Record | None:
        """Return the record as a mapping of its file; None if files are not memory or the cache has
        the record.
        """
        if self._mapped is None:
            return None
        with self._lock:
            self._check_usable()
            assert self._cache is not None
            if index in self._reads or self._cache.slot_of(index) is not None:
                return None
        version = self._mapped.map_version(index)
        views = self.layout.views(version.record_R)
        return Record(index, version.record_R, views, self._host_link, lambda _: version.close())

    def cancel_write_back(self, index: int) -> None:
        """Do not write back a dirty record whose content is no longer needed.

        Nobody may read the record before it is written anew.
        """
        with self._lock:
            if self._cache is not None:
                self._cache.cancel_write_back(index)
                self._to_do.notify()  # its slot may be evicted now

    def flush(self) -> None:
        """Write back all dirty records, wait for the writes, and make them durable; no record may
        change meanwhile.

        Raises `ValueError` if a record is open as writable.
        """
        with self._lock:
            self._check_usable()
            if self._changing:
                raise ValueError(
                    f"records {sorted(self._changing)[:8]}: must be put or closed before flush"
                )
            if self._cache is None or self._versions is None:
                return
            cache = self._cache
            cache.queue_write_back()
            self._to_write.notify_all()
            while left := cache.num_dirty:
                self._wait_for_writes(
                    partial(lambda then: cache.num_dirty < then, left),
                    f"{left} records to be written",
                )
        self._versions.sync()

    def stats(self) -> TieredStats:
        with self._lock:
            return TieredStats(
                nvme=self._nvme_link.stats(),
                nvme_writes=self._write_link.stats(),
                host=self._host_link.stats(),
                cache=CacheStats() if self._cache is None else self._cache.stats(),
                waits=self._waits,
                waited_s=self._waited_s,
            )

    def close(self) -> None:
        """Stop the threads after their current reads and writes; the store must not be used
        afterwards.

        Dirty records are not written: call `flush` first, as leaving a `with` block without an
        error does.
        """
        with self._lock:
            self._closing.set()
            self._to_do.notify_all()
            self._to_write.notify_all()
            self._arrived.notify_all()
        deadline_s = time.monotonic() + self._wait_limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise TimeoutError(f"{stuck} did not end within {self._wait_limit_s} s of close()")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None and self._versions is not None and not self._closing.is_set():
                self.flush()
        finally:
            self.close()

    def _split_slots(self, cache_bytes: int, threads: int) -> tuple[int, int]:
        """Return (cache slots, staging slots) that fit `cache_bytes`."""
        record_bytes = self.layout.record_bytes
        slots = cache_bytes // record_bytes
        if slots >= len(self.owned):
            # a store of a part of all records needs a staging slot (`LFUCache`)
            return len(self.owned), int(len(self.owned) < self.num_records)
        check(
            slots >= 2,
            "cache_bytes",
            cache_bytes,
            f"must hold at least two records of {record_bytes} bytes",
        )
        staging_slots = min(2 * threads, max(1, slots // 3))
        return slots - staging_slots, staging_slots

    def _read_only_views(self, slot: int) -> tuple[NDArray[np.uint8], dict[str, np.ndarray]]:
        """Return a slot's bytes and its arrays by name, all read-only."""
        data_R = self._slots_MR[slot][:]
        data_R.flags.writeable = False
        return data_R, self.layout.views(data_R)

    def _check_usable(self) -> None:
        """Raise if the store is closed, or raise its permanent error."""
        if self._closing.is_set():
            raise ValueError("the store is closed")
        if self._error is not None:
            raise self._error

    def _release_record(self, index: int, dirty: bool) -> None:
        """Unpin a record that a caller has closed, and mark it as dirty if the caller
        changed it.
        """
        with self._lock:
            self._open[index] -= 1
            if not self._open[index]:
                del self._open[index]
            self._changing.discard(index)
            if self._cache is None:
                return
            slot = self._cache.slot_of(index)
            assert slot is not None, index
            if dirty:
                self._unwritten.discard(index)
                self._cache.mark_dirty(index)
            if index in self._unwritten:
                self._unwritten.remove(index)
                self._cache.drop_failed_read(index)
            else:
                self._cache.unpin(slot)
            self._to_write.notify()
            if self._awaited or self._prefetches:
                self._to_do.notify()

    def _wait_and_count(
        self, is_done: Callable[[], bool], timeout_message: Callable[[], str]
    ) -> None:
        """Wait, with the lock held, until `is_done()`, and add the wait to the statistics.

        timeout_message: returns the message of the `TimeoutError` raised after `wait_limit_s`.
        """
        start_s = time.monotonic()
        try:
            if not self._arrived.wait_for(is_done, self._wait_limit_s):
                raise TimeoutError(timeout_message())
        finally:
            self._waits += 1
            self._waited_s += time.monotonic() - start_s

    def _wait_for_writes(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held, until `is_done()` or the store is closed or has failed; then
        raise if it is not done.

        what: what is written, for the message of the `TimeoutError`.
        """
        self._wait_and_count(
            lambda: is_done() or self._closing.is_set() or self._error is not None,
            lambda: f"waited {self._wait_limit_s} s for {what} back to {self._location_text()}",
        )
        if not is_done():
            self._check_usable()

    def _wait_for_slot(self, index: int, will_overwrite: bool) -> int:
        """Queue the read of a record that has no slot, and wait for it; return its slot with a pin.
        The caller holds the lock.
        """
        read = self._reads.get(index)
        if read is None:
            self._reads[index] = read = _RecordRead(index, will_overwrite)
        elif read.slot is None:
            read.will_overwrite = read.will_overwrite and will_overwrite
        if not read.awaited:
            read.awaited = True
            self._awaited.append(read)  # threads skip it if its read has begun
            self._to_do.notify()
        read.waiters += 1

        def timeout_message() -> str:
            why = (
                "every staging slot is held open"
                if read.slot is None
                else "the read has not come back"
            )
            return (
                f"record {index} of {self._location_text()}: not there after"
                f" {self._wait_limit_s} s; {why}"
            )

        try:
            # if writes fail, no slot will become free
            self._wait_and_count(
                lambda: (
                    read.done or self._closing.is_set() or (read.slot is None and self._write_error)
                ),
                timeout_message,
            )
        finally:
            if not read.done:
                read.waiters -= 1
        if read.error is not None:
            raise read.error
        if not read.done and self._write_error and not self._closing.is_set():
            self._check_usable()
        if not read.done or read.slot is None:
            raise ValueError(
                f"the store was closed while record {index} of {self._location_text()} was waited"
                " for"
            )
        return read.slot

    def _location_text(self) -> str:
        return str(self._store.path) if self._store is not None else "host memory"

    def _read_until_closed(self) -> None:
        """Run a reading thread: read queued records until the store closes."""
        while (read := self._wait_for_work(self._to_do, self._next_read)) is not None:
            error: Exception | None = None
            try:
                if not read.will_overwrite:
                    assert self._store is not None and read.slot is not None
                    self._nvme_link.run_transfer(
                        partial(self._transfer_record, self._store.read_into, read.index, read.slot)
                    )
            # _finish_read passes it to a caller
            except Exception as caught:
                error = caught
            self._finish_read(read, error)

    def _wait_for_work(
        self, woken: threading.Condition, find: Callable[[], Work | None]
    ) -> Work | None:
        """Return a thread's next work, waiting for it; None when the store is closed."""
        with self._lock:
            while not self._closing.is_set():
                if (work := find()) is not None:
                    return work
                woken.wait()
            return None

    def _next_read(self) -> _RecordRead | None:
        """Return a read to begin now, one that a caller waits for before a prefetch; None if none
        can begin.
        """
        return self._pop_startable_read(self._awaited, awaited=True) or self._pop_startable_read(
            self._prefetches, awaited=False
        )

    def _pop_startable_read(
        self, queue: deque[_RecordRead], *, awaited: bool
    ) -> _RecordRead | None:
        """Remove the first read of the queue that has not begun, give it a slot, and return it;
        None if the queue is empty or no slot is free.
        """
        assert self._cache is not None
        while queue:
            read = queue[0]
            if self._reads.get(read.index) is not read or read.slot is not None:
                queue.popleft()  # begun from the other queue, finished or discarded
                continue
            read.slot = self._cache.reserve_slot(read.index, awaited=awaited)
            self._to_write.notify()  # a dirty record may have been evicted for it
            if read.slot is None:
                return None
            return queue.popleft()
        return None

    def _finish_read(self, read: _RecordRead, error: Exception | None) -> None:
        """Record that a read has ended and wake its waiters; an error without a waiter becomes
        permanent.
        """
        with self._lock:
            assert self._cache is not None and read.slot is not None
            del self._reads[read.index]
            read.done, read.error = True, error
            if error is None:
                if read.will_overwrite:
                    self._unwritten.add(read.index)
                for _ in range(read.waiters):
                    self._cache.pin_record(read.index)
                self._cache.unpin(read.slot)
            else:
                self._cache.drop_failed_read(read.index)
                if not read.waiters and self._error is None:
                    self._error = error
            if read.waiters:
                self._arrived.notify_all()

    def _write_until_closed(self) -> None:
        """Run a writing thread: write dirty records back until the store closes."""
        assert self._versions is not None
        while (work := self._wait_for_work(self._to_write, self._next_write)) is not None:
            index, slot = work
            error: Exception | None = None
            try:
                self._write_link.run_transfer(
                    partial(self._transfer_record, self._versions.write, index, slot)
                )
            except Exception as caught:  # every later call raises it
                error = caught
            with self._lock:
                assert self._cache is not None
                self._cache.end_write(index, ok=error is None)
                if error is not None:
                    self._error, self._write_error = self._error or error, True
                self._to_do.notify_all()
                self._arrived.notify_all()

    def _next_write(self) -> tuple[int, int] | None:
        """Return (record, slot) of the next record to write back; None if there is none or a write
        failed.
        """
        assert self._cache is not None
        return None if self._write_error else self._cache.begin_next_write(self._changing)

    def _transfer_record(
        self, move: Callable[[int, NDArray[np.uint8]], None], index: int, slot: int
    ) -> int:
        """Read or write one record with `move`; return the record's size in bytes."""
        move(index, self._slots_MR[slot])
        return self.layout.record_bytes
