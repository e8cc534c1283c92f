"""Records that tests write, read back and damage: one value says which version a record is,
every number is checked.
"""

from pathlib import Path

import numpy as np

from jmoe.memory.version_store import PINS, SEAL, Version, VersionStore


def put(store: VersionStore, index: int, value: float) -> None:
    """Write a record whose arrays are this value and a ramp."""
    record_R = store.layout.zeros()
    for name, array in store.layout.views(record_R).items():
        if name != SEAL:
            array[:] = value + np.arange(array.size) / 1024
    store.write(index, record_R)


def got(store: VersionStore, index: int, path: Path | None = None) -> float:
    """Return the value of a record, or of a file of one; all of it must be there."""
    record_R = store.layout.zeros()
    if path is None:
        store.read_into(index, record_R)
    else:
        store.read_version(path, record_R)
    arrays = [array for name, array in store.layout.views(record_R).items() if name != SEAL]
    value = float(arrays[0][0])
    for array in arrays:
        np.testing.assert_array_equal(array, np.float32(value + np.arange(array.size) / 1024))
    return value


def missing(store: VersionStore) -> list[int]:
    """Return the owned records that have no version yet."""
    return [index for index in store.owned if index not in store._current]


def pinned(folder: Path, name: str) -> dict[int, Path]:
    """Return the files of a store's pin, by record."""
    return {Version.from_name(path.name).index: path for path in (folder / PINS / name).iterdir()}
