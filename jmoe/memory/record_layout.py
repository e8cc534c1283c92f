"""Where the arrays of a record lie: a record is the state of one expert on host or NVMe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jmoe.config import check
from jmoe.memory.buffers import PAGE_BYTES, allocate_slots
from jmoe.types import Json

FIELD_ALIGNMENT_BYTES = 64  # a cache line, and the alignment of XLA's CPU buffers


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class RecordField:
    """One array of a record."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """The arrays of a record and their byte offsets: in the order given, each at a multiple of 64.

    Example: `RecordLayout.from_arrays({"w1": ((D, F), np.float32), ...})`. data_bytes: the end of
    the last array. record_bytes: data_bytes rounded up to pages of 4096 bytes, the size and
    alignment of a record on every tier.
    """

    fields: tuple[RecordField, ...]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, tuple[Sequence[int], DTypeLike]]) -> Self:
        """Return the layout of arrays {name: (shape, dtype)}.

        Raises `ValueError` if there are no arrays, a dimension is 0, or a dtype is not a numeric
        type in native byte order.
        """
        fields: list[RecordField] = []
        end_bytes = 0
        for name, (shape, dtype_like) in arrays.items():
            dtype = np.dtype(dtype_like)
            check(
                all(n > 0 for n in shape),
                f"{name}.shape",
                tuple(shape),
                "must have no empty dimension",
            )
            check(
                dtype.isnative and not dtype.hasobject and dtype.names is None,
                f"{name}.dtype",
                dtype,
                "must be a plain numeric type in this machine's byte order",
            )
            offset_bytes = _round_up(end_bytes, FIELD_ALIGNMENT_BYTES)
            fields.append(RecordField(name, tuple(int(n) for n in shape), dtype, offset_bytes))
            end_bytes = offset_bytes + fields[-1].num_bytes
        check(bool(fields), "arrays", dict(arrays), "must name at least one array")
        return cls(tuple(fields))

    @property
    def data_bytes(self) -> int:
        return self.fields[-1].offset_bytes + self.fields[-1].num_bytes

    @property
    def record_bytes(self) -> int:
        return _round_up(self.data_bytes, PAGE_BYTES)

    def views(self, record_R: NDArray[np.uint8]) -> dict[str, np.ndarray]:
        """Return the record's arrays, by name, as views of its `record_bytes` bytes."""
        return {
            f.name: (
                record_R[f.offset_bytes : f.offset_bytes + f.num_bytes]
                .view(f.dtype)
                .reshape(f.shape)
            )
            for f in self.fields
        }

    def zeros(self) -> NDArray[np.uint8]:
        """Return zeros uint8 [R] for one record, page-aligned."""
        return allocate_slots(1, self.record_bytes)[0]

    def describe_arrays(self) -> list[list[Json]]:
        """Return [name, shape, dtype, offset] of every array, for the manifest."""
        return [[f.name, list(f.shape), f.dtype.name, f.offset_bytes] for f in self.fields]
