"""Reads and writes the records' folder of a checkpoint step.

For each process K the folder has a list `process-K.json`: `versions`, file names by kind of record,
and `pins`, the folders on that process's machine that hold these files. Records that are not (or no
longer) pinned are in the step's folder itself, as `KIND/INDEX.COUNTER.TOKEN`. All record files are
sealed (`version_store`).

Legend:
  R  bytes of a record
"""

import errno
import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jmoe.memory.buffers import allocate_slots
from jmoe.memory.direct_io import fsync, name_free_space_in_errors
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.version_store import Version, check_version_file, layout_with_seal, write_seal
from jmoe.types import JsonObject

THREADS = 4  # threads that read or write the records of one kind
Lists = dict[int, JsonObject]  # each process's list, by process number
Indexed = tuple[int, Mapping[str, np.ndarray]]  # a record's number and its arrays


def read_record_lists(folder: Path) -> Lists:
    """Return each process's list, by process number; raise `ValueError` naming a damaged list."""
    return {
        int(path.stem.removeprefix("process-")): _read_list(path)
        for path in folder.glob("process-*.json")
    }


def _read_list(path: Path) -> JsonObject:
    """Return a process's list of records; raise `ValueError` if it is damaged."""
    try:
        listed = json.loads(path.read_text())
        whole = (
            isinstance(listed["num_processes"], int)
            and listed["pins"].keys() <= listed["versions"].keys()
        )
        whole = whole and all(Path(pins).is_absolute() for pins in listed["pins"].values())
        whole = whole and all(
            Version.parse_or_none(v) is not None
            for names in listed["versions"].values()
            for v in names
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(
            f"{path}: is damaged; delete {path.parent.parent} to go on from an older step"
        )
    return dict(listed)


def candidate_paths(folder: Path, kind: str, lists: Lists) -> dict[int, list[Path]]:
    """Return {record: paths where its file may be, in order of preference} of a kind of record."""
    files = {}
    for listed in lists.values():
        for name in listed["versions"].get(kind, []):
            pinned = [Path(listed["pins"][kind]) / name] if kind in listed["pins"] else []
            files[Version.from_name(name).index] = [*pinned, folder / kind / name]
    return files


def find_undamaged_files(
    paths_by_record: Mapping[int, list[Path]],
    layout: RecordLayout,
    owned: Sequence[int],
    count_record: Callable[[], None],
) -> tuple[dict[int, Path], list[str]]:
    """Return (record -> its first undamaged file, a sentence for each damaged file).

    paths_by_record: the result of `candidate_paths`. layout: the result of `layout_with_seal`.
    owned: the records to look for. count_record: called once per record.
    """
    files: dict[int, Path] = {}
    damaged: list[str] = []

    def verify_share(first: int) -> None:
        record_R = layout.zeros()
        for index in owned[first::THREADS]:
            count_record()
            path, lines = read_first_undamaged(paths_by_record.get(index, []), layout, record_R)
            if path is not None:
                files[index] = path
            damaged.extend(lines)

    with ThreadPoolExecutor(THREADS, "verify") as pool:
        list(pool.map(verify_share, range(THREADS)))
    return files, sorted(damaged)


def read_first_undamaged(
    paths: list[Path], layout: RecordLayout, record_R: NDArray[np.uint8]
) -> tuple[Path | None, list[str]]:
    """Read the first undamaged file of `paths` into `record_R`.

    Return (its path or None, a sentence for each damaged file). Missing files are skipped.
    """
    errors: list[tuple[Path, OSError]] = []
    whole = None
    for path in paths:
        try:
            check_version_file(path, layout, record_R, "buffered")
        except FileNotFoundError:
            continue
        except OSError as error:
            errors.append((path, error))
        else:
            whole = path
            break
    instead = f"{whole} is used instead" if whole is not None else "no other file has this record"
    return whole, [f"{path}: {error.strerror}; {instead}, delete {path}." for path, error in errors]


class SavedRecords:
    """Reads the records of all processes in a step's folder; thread-safe.

    layouts: by kind, without the seal. kinds: the kinds that the step has.
    """

    def __init__(self, folder: Path, layouts: Mapping[str, RecordLayout]) -> None:
        self.folder, self.lists = folder, read_record_lists(folder)
        self.kinds = sorted({kind for listed in self.lists.values() for kind in listed["versions"]})
        self._layouts = {kind: layout_with_seal(layout) for kind, layout in layouts.items()}
        self._places = {kind: candidate_paths(folder, kind, self.lists) for kind in self.kinds}
        self._own = threading.local()

    def read_record(self, kind: str, index: int) -> dict[str, np.ndarray]:
        """Return a record's arrays, by name, valid until this thread reads another record of the
        same kind.

        Raises `OSError` naming the record and its damaged files if no file is undamaged.
        """
        layout = self._layouts[kind]
        buffers = self._own.__dict__.setdefault("buffers", {})
        if kind not in buffers:
            buffers[kind] = layout.zeros()
        record_R = buffers[kind]
        path, damaged = read_first_undamaged(self._places[kind].get(index, []), layout, record_R)
        if path is None:
            why = f"record {index} of {kind} is whole neither on this machine nor in the step"
            advice = f"delete {self.folder.parent} to go on from an older step"
            raise OSError(errno.EIO, f"{why}; {' '.join(damaged)} {advice}", str(self.folder))
        return layout.views(record_R)


def write_records(
    folder: Path,
    layout: RecordLayout,
    names: Iterable[str],
    records: Iterable[Indexed],
    count_record: Callable[[], None] = lambda: None,
) -> None:
    """Write records from memory as files in a step's folder; call `flush_files` to make them
    durable.

    layout: without the seal. names: file names, one per record. count_record: called once per
    record. At most 2 `THREADS` records are copied at a time.
    """
    folder.mkdir(exist_ok=True)
    layout = layout_with_seal(layout)
    versions = {version.index: version for version in map(Version.from_name, names)}
    free = queue.SimpleQueue[NDArray[np.uint8]]()
    for record_R in allocate_slots(2 * THREADS, layout.record_bytes):
        free.put(record_R)

    def write_and_free(record_R: NDArray[np.uint8], version: Version) -> None:
        try:
            path = folder / version.name
            write_seal(version, layout, record_R)
            with (
                name_free_space_in_errors(path, f"{path.name} needs {record_R.nbytes} bytes"),
                path.open("xb") as file,
            ):
                file.write(record_R.data)
        finally:
            free.put(record_R)

    with ThreadPoolExecutor(THREADS, "save") as pool:
        writing = []
        for index, arrays in records:
            count_record()
            record_R = free.get()
            record_R[:] = 0
            views = layout.views(record_R)
            for name, array in arrays.items():
                np.copyto(views[name], array)
            writing.append(pool.submit(write_and_free, record_R, versions[index]))
    for done in writing:
        done.result()


def flush_files(folder: Path, names: Iterable[str]) -> None:
    """Make files of a folder durable, content and names."""
    for name in names:
        with name_free_space_in_errors(folder / name, name):
            fsync(folder / name)
    fsync(folder)
