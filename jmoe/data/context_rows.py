"""Rows of a batch for devices that share sequences: each device gets two chunks of each of its
group's rows (`layers/context.py`).

Legend: B rows, S positions of a device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.data.sample_rows import SampleRows


def loaded_share(
    size: int, local_devices: int, process_index: int, process_count: int
) -> tuple[int, int]:
    """Return the (index, count) of the share of a batch's rows that a process loads. Processes
    whose devices share sequences load the same rows.

    size: devices that share a sequence. Raises ValueError if a group of them is neither inside a
    process nor made of whole processes.
    """
    whole = size % local_devices == 0 or local_devices % size == 0
    constraint = f"must divide the {local_devices} devices of a process, or be a multiple of them"
    check(whole, "mesh.context", size, constraint)
    processes = max(1, size // local_devices)
    return process_index // processes, process_count // processes


@dataclass(frozen=True)
class ContextRows:
    """How rows are divided over `num_devices` devices of which `size` share each row.

    The first dimension of what `divide` returns is in the order of the devices.
    """

    size: int
    num_devices: int

    def divide(self, batch: Any, *, first: int = 0, count: int | None = None) -> Any:
        """Return the rows of a batch, `SampleRows`, (tokens, weights) or tokens, for all devices,
        or for `count` of them from `first` on.

        Tokens [B, K + 1] become [.., 2 (L + 1)]: the inputs of both chunks, each with the target of
        its last input. Weights become [.., 2 L]. Documents stay whole, [.., K]: attention needs to
        know those of all keys.
        """
        if self.size == 1:
            return batch
        arrays = batch if isinstance(batch, tuple) else (batch,)
        chunk = (arrays[0].shape[-1] - 1) // (2 * self.size)
        chosen = slice(first, None if count is None else first + count)
        parts = [self._by_device(arrays[0], chunk, chunk + 1)[:, chosen]]
        parts += [self._by_device(x, chunk, chunk)[:, chosen] for x in arrays[1:2]]
        for x in arrays[2:]:
            parts.append(np.repeat(self._by_group(x)[:, None], self.size, axis=1)[:, chosen])
        rows = [x.reshape(-1, x.shape[-1]) for x in parts]
        if isinstance(batch, SampleRows):
            return SampleRows(*rows)
        return tuple(rows) if isinstance(batch, tuple) else rows[0]

    def divide_inputs(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return inputs [B, K] without targets for all devices, [.., S]."""
        if self.size == 1:
            return tokens
        chunk = tokens.shape[-1] // (2 * self.size)
        return self._by_device(tokens, chunk, chunk).reshape(-1, 2 * chunk)

    def _by_group(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return [groups, rows of a group, ...]."""
        return x.reshape(self.num_devices // self.size, -1, x.shape[-1])

    def _by_device(self, x: NDArray[Any], chunk: int, width: int) -> NDArray[Any]:
        """Return [groups, devices of a group, rows of a group, 2 width]: `width` columns from the
        beginning of each chunk of `chunk` columns on.
        """
        ranks = np.arange(self.size)
        starts = chunk * np.stack([ranks, 2 * self.size - 1 - ranks], axis=1)
        columns = (starts[..., None] + np.arange(width)).reshape(self.size, -1)
        return np.moveaxis(self._by_group(x)[..., columns], 2, 1)
