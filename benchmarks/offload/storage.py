"""Rows `store` and `checkpoint` of `offload/tiers`: `VersionStore` beside fio, and the cost of a
checkpoint.

Axes: R bytes of a record.
"""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from benchmarks.lib import fio
from benchmarks.lib.report import JsonObject, median, progress, ratio
from jmoe.memory.buffers import allocate_slots
from jmoe.memory.direct_io import write_file_durably
from jmoe.memory.record_checkpoint import ITEM, RecordCheckpoints, RecordsHandler, RecordsSave
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import PINS, Version, VersionStore

Work = Callable[[int, np.ndarray], None]


def open_store(folder: Path, record_bytes: int, num_records: int) -> VersionStore:
    """Return a store on disk of records with `record_bytes`, seal included."""
    layout = RecordLayout.from_arrays({"w": ((record_bytes - 64,), np.uint8)})
    store = VersionStore.open(folder, layout, num_records, fingerprint="benchmark")
    assert store.layout.record_bytes == record_bytes, store.layout.record_bytes
    store.write_all_records(lambda index, views: views["w"].fill(index % 251))
    return store


def on_threads(work: Work, slots_MR: NDArray[np.uint8], num_records: int) -> float:
    """Return the seconds of `work(index, slot_R)` on all records, one thread a slot."""

    def run(first: int) -> None:
        for index in range(first, num_records, len(slots_MR)):
            work(index, slots_MR[first])

    start_s = time.perf_counter()
    threads = [threading.Thread(target=run, args=(first,)) for first in range(len(slots_MR))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_s


def written_bytes() -> int:
    """Return the bytes that the kernel has written to storage for this process."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"])


def store(folder: Path, total_bytes: int, rounds: int) -> list[JsonObject]:
    """Return GB/s of the store with checksums, and the median ratio to fio or to in_place.

    in_place: records overwritten where they are, each flushed, as fio does. replace: new versions,
    with all renames and folder flushes. Both run in turn. huge_pages: of the memory on both sides;
    `TieredStore` has them.
    """
    has_fio = fio.is_installed()
    rows = []
    sizes = ((12 << 20, 1, True), (12 << 20, 4, True), (12 << 20, 4, False), (1 << 20, 4, False))
    for record_bytes, threads, huge_pages in sizes:
        num_records = total_bytes // record_bytes // threads * threads
        with open_store(folder / "store", record_bytes, num_records) as it:
            slots_MR = allocate_slots(threads, record_bytes, huge_pages=huge_pages)
            scratch = [folder / f"plain-{index}" for index in range(num_records)]
            for path in scratch:
                write_file_durably(path, slots_MR[0], it.io)

            def in_place(index: int, record_R: np.ndarray) -> None:
                write_file_durably(scratch[index], record_R, it.io)  # noqa: B023

            times: dict[str, list[float]] = {}
            before = it.stats()
            before_bytes, replaced_bytes = 0, 0
            for _ in range(rounds):
                files = [entry for entry in it.path.iterdir() if Version.parse_or_none(entry.name)][
                    :num_records
                ]
                took = {"read": on_threads(it.read_into, slots_MR, num_records)}
                if has_fio:
                    took["fio_read"] = fio.measure_transfer_s(
                        files, record_bytes, threads, write=False, huge_pages=huge_pages
                    )
                took["in_place"] = on_threads(in_place, slots_MR, num_records)
                if has_fio:
                    took["fio_write"] = fio.measure_transfer_s(
                        scratch, record_bytes, threads, write=True, huge_pages=huge_pages
                    )
                before_bytes = written_bytes()
                took["replace"] = on_threads(it.write, slots_MR, num_records)
                start_s = time.perf_counter()
                it.sync()
                took["replace"] += time.perf_counter() - start_s
                replaced_bytes += written_bytes() - before_bytes
                for name, seconds in took.items():
                    times.setdefault(name, []).append(seconds)
            writes = it.stats().writes - before.writes
            row: JsonObject = {
                "record_bytes": record_bytes,
                "threads": threads,
                "huge_pages": huge_pages,
            }
            row |= {"io": it.io, "fio": has_fio}
            for name, seconds in times.items():
                row[f"{name}_gb_per_s"] = round(
                    num_records * record_bytes / median(seconds, 9) / 1e9, 3
                )
            pairs = [("read", "fio_read"), ("in_place", "fio_write")] if has_fio else []
            for name, other in [*pairs, ("replace", "in_place")]:
                row[f"{name}_over_{other}"] = ratio(times[other], times[name])
            written = it.stats()
            payload_bytes = written.writes * it.layout.fields[-1].offset_bytes  # without the seal
            row["write_amplification"] = round(written.written_bytes / payload_bytes, 4)
            row["device_write_amplification"] = round(
                replaced_bytes / (writes * (record_bytes - 64)), 4
            )
            rows.append(progress(row))
        shutil.rmtree(folder / "store")
        for path in scratch:
            path.unlink()
    return rows


def checkpoint(folder: Path, total_bytes: int, rounds: int) -> list[JsonObject]:
    """Return seconds of a checkpoint of clean records, of 1 MiB and of larger ones.

    save_s: until training goes on. commit_s: until Orbax has renamed the step. durable_s: until its
    folder has all records (links, here). free_s: of a deleted step, all of whose versions have been
    replaced since. flush_s: beforehand, of `dirty` changed records.
    """
    rows = []
    num_records = 640
    for record_bytes in (1 << 20, total_bytes // num_records // 4096 * 4096):
        with open_store(folder / "store", record_bytes, num_records) as it:
            records = RecordCheckpoints({"experts": it})
            manager = ocp.CheckpointManager(
                folder / "checkpoints",
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=2, enable_async_checkpointing=True
                ),
                item_names=(ITEM, "dense"),
                item_handlers={ITEM: RecordsHandler(), "dense": ocp.JsonCheckpointHandler()},
            )
            times: dict[str, list[float]] = {}
            record_writes = 0
            for step in range(1, rounds + 1):
                before = it.stats().written_bytes
                start_s = time.perf_counter()
                items = {
                    ITEM: RecordsSave(records, step),
                    "dense": ocp.args.JsonSave({"step": step}),
                }
                manager.save(step, args=ocp.args.Composite(**items))
                save_s = time.perf_counter() - start_s
                manager.wait_until_finished()
                commit_s = time.perf_counter() - start_s
                records.begin_drain(
                    folder / "checkpoints" / str(step) / ITEM, list(manager.all_steps())
                )
                records.wait_until_drained()
                durable_s = time.perf_counter() - start_s
                record_writes += it.stats().written_bytes - before
                for name, seconds in {
                    "save_s": save_s,
                    "commit_s": commit_s,
                    "durable_s": durable_s,
                }.items():
                    times.setdefault(name, []).append(seconds)
            manager.close()
            row: JsonObject = {"records": num_records, "bytes": num_records * record_bytes}
            row |= {name: median(seconds) for name, seconds in times.items()}
            row |= {"record_bytes_written": record_writes, "dirty": 64}
            row |= flush_and_free(it, records, folder)
            rows.append(progress(row))
        shutil.rmtree(folder / "store")
    return rows


def flush_and_free(it: VersionStore, records: RecordCheckpoints, folder: Path) -> dict[str, float]:
    """Change 64 records, flush them, then delete the checkpoints that have their old versions."""
    with TieredStore(it, cache_bytes=96 * it.layout.record_bytes) as tiers:
        for index in range(64):
            with tiers.get(index, writable=True) as record:
                record["w"][0] += 1
                record.close_as_changed()
        start_s = time.perf_counter()
        tiers.flush()
        flush_s = time.perf_counter() - start_s
    records.close()
    start_s = time.perf_counter()
    shutil.rmtree(folder / "checkpoints")
    for pins in (it.path / PINS).iterdir():
        shutil.rmtree(pins)
    return {"flush_s": round(flush_s, 4), "free_s": round(time.perf_counter() - start_s, 4)}
