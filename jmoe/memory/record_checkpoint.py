"""Makes records a part of an Orbax checkpoint: they are pinned on saving, and copied to the step's
folder afterwards.

A pin is a set of hard links (`VersionStore.pin_versions`), so saving costs time per record, not per
byte. The lists of pinned records (`saved_records`) commit with the step, by Orbax's rename. Then
each process K drains: it links or copies its versions into the step's folder and writes
`durable-K.json`. Once all of these files are there, the step needs no process's local folder.
Records in host memory have no files to pin, so they are written into the step at once.
`run/checkpoint.py` calls this.

Legend:
  R  bytes of a record
"""

import contextlib
import errno
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from jmoe.memory.direct_io import Io, choose_io, fsync, try_hard_link, write_file_durably
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.saved_records import (
    Indexed,
    candidate_paths,
    find_undamaged_files,
    flush_files,
    read_record_lists,
    write_records,
)
from jmoe.memory.version_store import (
    PINS,
    Version,
    VersionStore,
    is_pins_folder,
    layout_with_seal,
    remove_store,
    remove_versions,
)
from jmoe.types import JsonObject

ITEM = "records"  # name of the Orbax item, and of its folder in a step


@dataclass(frozen=True)
class VerifiedStepRecords:
    """Files of one process's records in a step, as `RecordCheckpoints.verify_records` returns them.

    files: kind -> record -> an undamaged file. damaged: a sentence for each damaged file. missing:
    a description of each record without an undamaged file.
    """

    files: dict[str, dict[int, Path]]
    damaged: list[str]
    missing: list[str]


def is_record_path(path: Path) -> bool:
    """Return True if a path, relative to the folder of a step, is the file of a record."""
    return (
        len(path.parts) == 3
        and path.parts[0].startswith(ITEM)
        and Version.parse_or_none(path.name) is not None
    )


class RecordCheckpoints:
    """Saves and restores the records of one process with checkpoints.

    `folder` arguments name the records' folder inside a step. Each of several processes has its own
    object, with stores of the same kinds. A failed drain is reported by the next
    `raise_drain_error`, `wait_until_drained` or save.

    stores: by kind of record. memory: layouts of the kinds that are in host memory instead; the
    attribute `memory` maps each kind to a function that yields all records in `owned`.
    stall_limit_s: longest time without a drained record. partial: kinds of which a step holds only
    some records.

    Attributes: save_only: by kind, the records that this process saves, if not all it owns;
    processes with the same records split the saving. replay_json: JSON saved with the list of this
    process's records. settings: AdamW's constants and the gradient dtype; records that lag behind
    can be restored unread only if their checkpoint has equal settings. restored: all processes'
    lists of the step restored last.
    """

    def __init__(
        self,
        stores: Mapping[str, VersionStore],
        *,
        memory: Mapping[str, RecordLayout] | None = None,
        owned: Iterable[int] = (),
        process: int = 0,
        num_processes: int = 1,
        stall_limit_s: float = 3600.0,
        partial: Collection[str] = (),
    ) -> None:
        self.stores, self.process, self.num_processes = dict(stores), process, num_processes
        self.memory: dict[str, Callable[[], Iterable[Indexed]]] = {}
        self._layouts, self._owned, self._token = (
            dict(memory or {}),
            tuple(owned),
            secrets.randbits(32),
        )
        self.partial = frozenset(partial)
        self.save_only: dict[str, Collection[int]] = dict.fromkeys(partial, ())
        self.replay_json: JsonObject = {}
        self.settings: JsonObject = {}
        self.restored: list[JsonObject] | None = None
        self._error: Exception | None = None  # error of a failed drain
        self._stall_limit_s = stall_limit_s
        self._draining: Future[object] | None = None
        self._drained = (0, 0)  # (records drained, records to drain)
        self._counted = 0  # records handled by `verify_records` and `write_memory_records`
        self._found: tuple[Path, VerifiedStepRecords] | None = (
            None  # the result of `verify_records`, for `restore_records`
        )

    def pin_versions(self, step: int) -> JsonObject:
        """Pin the current versions under the step's number; return the list of their names, for
        `write_record_list`.

        Flush caches first. Waits for the drain of the previous step, so that at most one step is
        not durable.
        """
        self.wait_until_drained()
        versions = {
            name: store.pin_versions(str(step), self.save_only.get(name))
            for name, store in self.stores.items()
        }
        for name in self._layouts:
            saved = self.save_only.get(name, self._owned)
            versions[name] = [Version(index, step, self._token).name for index in saved]
        listed = {
            "num_processes": self.num_processes,
            "pins": self._pin_folders(step),
            "versions": versions,
        }
        return listed | ({"beside": self.replay_json} if self.replay_json else {})

    def write_memory_records(self, folder: Path, pinned: JsonObject) -> None:
        """Write the records in host memory into a step that is being saved; they must not change
        meanwhile.
        """
        for name, layout in self._layouts.items():
            saved = self.save_only.get(name)
            records = (
                record for record in self.memory[name]() if saved is None or record[0] in saved
            )
            write_records(
                folder / name, layout, pinned["versions"][name], records, self._count_progress
            )

    def write_record_list(self, folder: Path, pinned: JsonObject) -> None:
        """Write the result of `pin_versions` into a step that is being saved, and make the files of
        `write_memory_records` durable.
        """
        for name in self._layouts:
            flush_files(folder / name, pinned["versions"][name])
        path = folder / f"process-{self.process}.json"
        path.write_text(json.dumps(pinned))

    def begin_drain(self, folder: Path, kept_steps: list[int]) -> None:
        """Begin to link or copy the pinned records of a committed step into `folder`, in the
        background; afterwards remove the pins of all steps except `kept_steps`.
        """
        self.wait_until_drained()
        self._start_drain(
            self._drain_and_remove_old_pins, folder, {str(step) for step in kept_steps}
        )

    def raise_drain_error(self) -> None:
        """Raise the error of a failed drain, if any, without waiting."""
        if self._error is not None or (self._draining is not None and self._draining.done()):
            self.wait_until_drained()

    def wait_until_drained(self) -> None:
        """Wait until this process's records of the step committed last are durable.

        There is no limit on the total time. Raises `TimeoutError` if no record is drained for
        `stall_limit_s`, and the drain's error if it failed, also on every later call until
        `restore_records`.
        """
        if self._error is not None:
            raise self._error
        draining, self._draining = self._draining, None
        if draining is None:
            return
        tick_s = min(1.0, self._stall_limit_s)
        before, waited_s, last_s = self._drained, 0.0, time.monotonic()
        while not wait([draining], tick_s).done:
            now_s = time.monotonic()
            waited_s += min(now_s - last_s, 2 * tick_s)  # time while suspended does not count
            last_s = now_s
            if self._drained != before:
                before, waited_s = self._drained, 0.0
            elif waited_s > self._stall_limit_s:
                done, total = before
                raise TimeoutError(
                    f"drain of records to {self._drains_to}: process {self.process} has copied none"
                    f" for {self._stall_limit_s:g} s; {done} of {total} are there"
                )
        try:
            draining.result()
        except Exception as error:
            self._error = error
            raise

    def progress_counters(self) -> tuple[int, ...]:
        """Return counters that change while records are saved, drained or restored, for a stall
        check.
        """
        return (*self._drained, self._counted)

    def verify_records(self, folder: Path) -> VerifiedStepRecords:
        """Return the files of this process's records in a step; each file is read and checked.

        Pinned files are preferred to copies in the step. The step may come from any number of
        processes. Raises `ValueError` naming a damaged list.
        """
        lists = read_record_lists(folder)
        num_processes = next((listed["num_processes"] for listed in lists.values()), 0)
        records = VerifiedStepRecords({}, [], [])
        if len(lists) != num_processes or not lists:
            records.missing.append(f"{folder}: {len(lists)} lists of {num_processes} processes")
            return records
        kinds = {name: (store.layout, store.owned) for name, store in self.stores.items()}
        kinds |= {
            name: (layout_with_seal(layout), self._owned) for name, layout in self._layouts.items()
        }
        saved = {name for listed in lists.values() for name in listed["versions"]}
        for name in kinds.keys() & saved:  # kinds without records are among the step's arrays
            layout, owned = kinds[name]
            there = candidate_paths(folder, name, lists)
            if name in self.partial:
                owned = tuple(index for index in owned if index in there)
            files, damaged = find_undamaged_files(there, layout, owned, self._count_progress)
            records.files[name] = files
            records.damaged.extend(damaged)
            records.missing.extend(f"{name} {index}" for index in owned if index not in files)
        self._found = folder, records
        return records

    def restore_records(self, folder: Path) -> None:
        """Make the records of a step the current ones, by links to local pins or by copies.

        Continues the drain of the step if a killed process left it unfinished. Raises
        `FileNotFoundError` naming the records that are undamaged neither here nor in the step.
        """
        records = (
            self._found[1]
            if self._found is not None and self._found[0] == folder
            else self.verify_records(folder)
        )
        self._found = self._error = None
        if records.missing:
            what = (
                f"{len(records.missing)} records, the first {records.missing[0]}, are neither on"
                " this machine nor "
            )
            what += (
                f"drained; {' '.join(records.damaged[:8])} delete {folder.parent} to go on from an"
                " older step"
            )
            raise FileNotFoundError(errno.ENOENT, what, str(folder))
        for name, store in self.stores.items():
            partial = name in self.partial
            store.restore_versions(
                records.files.get(name, {}) if partial else records.files[name], partial=partial
            )
        lists = read_record_lists(folder)
        self.restored = list(lists.values())
        own = lists.get(self.process, {"pins": {}})["pins"]
        if own == self._pin_folders(int(folder.parent.name)) and all(
            Path(pins).is_dir() for pins in own.values()
        ):
            self.wait_until_drained()
            self._start_drain(self._drain, folder)

    def _count_progress(self) -> None:
        self._counted += 1

    def close(self) -> None:
        """Wait for the drain under way, unless an earlier drain has failed."""
        if self._error is None:
            self.wait_until_drained()

    def _start_drain(self, drain: Callable[..., object], *arguments: object) -> None:
        """Run a drain in a daemon thread, so that a drain that hangs does not keep the process
        alive.
        """
        self._draining, self._drained = Future(), (0, 0)
        self._drains_to = arguments[0]
        threading.Thread(
            target=_run_into_future,
            args=(self._draining, drain, *arguments),
            name="drain",
            daemon=True,
        ).start()

    def _pin_folders(self, step: int) -> dict[str, str]:
        """Return the absolute path of the step's pins, by kind of record."""
        return {
            name: str((store.path / PINS / str(step)).absolute())
            for name, store in self.stores.items()
        }

    def _drain_and_remove_old_pins(self, folder: Path, kept_steps: set[str]) -> None:
        """Drain the step of `folder`, then remove the pins and records that no kept step needs."""
        if not self._drain(folder):
            return  # the step was deleted meanwhile
        for store in self.stores.values():
            for pins in (store.path / PINS).iterdir():
                if is_pins_folder(pins) and pins.name not in kept_steps:
                    remove_versions(pins)
        if self.stores:
            self._remove_records_of_gone_processes(
                [folder.parent.with_name(step) / folder.name for step in kept_steps]
            )

    def _remove_records_of_gone_processes(self, folders: list[Path]) -> None:
        """Remove the records of processes that no longer exist and that no kept step needs.

        Their folders are `process-NUMBER/KIND` beside this process's folder. Stores with another
        fingerprint, or open ones, stay. folders: the records' folders of the kept steps.
        """
        store = next(iter(self.stores.values()))
        own = store.path.parent
        if own.name != f"process-{self.process}":
            return
        pins = [
            Path(path)
            for kept in folders
            for listed in read_record_lists(kept).values()
            for path in listed["pins"].values()
        ]
        for place in own.parent.iterdir():
            number = place.name.removeprefix("process-")
            if (
                place.name != f"process-{number}"
                or not number.isdigit()
                or int(number) < self.num_processes
            ):
                continue
            if place.is_dir() and not any(path.is_relative_to(place.absolute()) for path in pins):
                # another process of this machine may remove it first
                with contextlib.suppress(FileNotFoundError):
                    removed = [
                        remove_store(kind, store.fingerprint) for kind in list(place.iterdir())
                    ]
                    if any(removed):
                        print(
                            f"{place}: removed records of a process that is no more, unneeded"
                            " by now",
                            flush=True,
                        )
                        with contextlib.suppress(OSError):  # the folder is not empty
                            place.rmdir()

    def _drain(self, folder: Path) -> bool:
        """Link or copy the pinned records into the step's folder, and make them durable.

        Return False if the folder was deleted meanwhile, else True.
        """
        before = _previous_records_folder(folder)
        linked = copied = 0
        try:
            io = choose_io(folder)
            pinned = {
                name: sorted((store.path / PINS / folder.parent.name).iterdir())
                for name, store in self.stores.items()
            }
            for name, store in self.stores.items():
                (folder / name).mkdir(exist_ok=True)
                record_R = store.layout.zeros()
                for source in pinned[name]:
                    self._drained = linked + copied, sum(map(len, pinned.values()))
                    target = folder / name / source.name
                    if target.exists() or any(
                        try_hard_link(file, target)
                        for file in (before / name / source.name, source)
                    ):
                        linked += 1
                    else:
                        _copy_record(store, source, target, record_R, io)
                        copied += 1
                fsync(folder / name)
            mark = folder / f"durable-{self.process}.json"
            mark.with_suffix(".tmp").write_text(json.dumps({"linked": linked, "copied": copied}))
            mark.with_suffix(".tmp").rename(mark)
            fsync(folder)
        except FileNotFoundError:
            if folder.exists():
                raise
            return False
        return True


def _run_into_future(
    future: Future[object], work: Callable[..., object], *arguments: object
) -> None:
    """Call `work`, and set its result or its exception as that of the future."""
    try:
        result = work(*arguments)
    except BaseException as error:  # raised by `wait_until_drained`, in the caller's thread
        future.set_exception(error)
    else:
        future.set_result(result)


def _previous_records_folder(folder: Path) -> Path:
    """Return the records' folder of the previous step; it may not exist."""
    root, step = folder.parent.parent, int(folder.parent.name)
    older = [
        int(entry.name)
        for entry in root.iterdir()
        if entry.name.isdigit() and int(entry.name) < step
    ]
    return root / str(max(older, default=-1)) / folder.name


def _copy_record(
    store: VersionStore, source: Path, target: Path, record_R: NDArray[np.uint8], io: Io
) -> None:
    """Copy a version's file durably to `target`, with `record_R` as the buffer."""
    store.read_version(source, record_R)
    half = target.with_name(f"{target.name}.tmp")
    write_file_durably(half, record_R, io)
    half.rename(target)


class RecordsHandler(ocp.AsyncCheckpointHandler):
    """The Orbax handler that saves records; `RecordCheckpoints.restore_records` restores them."""

    async def async_save(self, directory: Path, args: "RecordsSave") -> list[ocp.future.Future]:
        """Pin versions and write in-memory records now; write the list in the background."""
        pinned = args.records.pin_versions(args.step)
        args.records.write_memory_records(Path(directory), pinned)

        async def write() -> None:
            args.records.write_record_list(Path(directory), pinned)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name=ITEM)]

    def save(self, directory: Path, args: "RecordsSave") -> None:
        raise NotImplementedError("records are saved by async_save")

    def restore(self, directory: Path, args: object = None) -> None:
        raise NotImplementedError("records are restored by RecordCheckpoints.restore")


@ocp.args.register_with_handler(RecordsHandler, for_save=True, for_restore=True)
@dataclass
class RecordsSave(ocp.args.CheckpointArgs):
    """Orbax save arguments: the records to save with step `step`."""

    records: RecordCheckpoints
    step: int
