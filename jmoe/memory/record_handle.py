"""The handle of a record in host memory.

Legend:
  R  bytes of a record
"""

from collections.abc import Callable, Collection

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.memory.closing import Closing
from jmoe.memory.link import Link

# names -> arrays in the device's memory, by name
Send = Callable[[Collection[str]], dict[str, jax.Array]]


class Record(Closing):
    """A record in host memory, valid while open: use it in a `with` statement.

    `record[name]` is one array of the record's layout, `data_R` all its bytes; both are read-only
    unless the record was opened as writable. After `close` their memory holds another record, so
    copy them and wait for the copy. (On CPU `jax.device_put` of such an array makes no copy.)

    link: counts the record's bytes when it closes. give_back: a function called once on closing,
    with True if the record was changed. send: a function that copies arrays from pinned memory to
    the device.
    """

    def __init__(
        self,
        index: int,
        data_R: NDArray[np.uint8],
        views: dict[str, np.ndarray],
        link: Link,
        give_back: Callable[[bool], None],
        send: Send | None = None,
    ) -> None:
        self.index, self.data_R, self._views = index, data_R, views
        self._link, self._start_s = link, link.start_transfer()
        self._give_back: Callable[[bool], None] | None = give_back
        self._send = send

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    @property
    def is_pinned(self) -> bool:
        """Whether the record lies in pinned memory, from which `copy_to_device` copies directly."""
        return self._send is not None

    def copy_to_device(self, names: Collection[str], device: jax.Device) -> dict[str, jax.Array]:
        """Return arrays, by name, in the device's memory, after the transfer has ended.

        On CPU they may alias the record's memory.
        """
        if self._send is not None:
            return self._send(names)
        return jax.block_until_ready({name: jax.device_put(self[name], device) for name in names})

    def close_as_changed(self) -> None:
        """Close the record and mark it as changed; raise `ValueError` if it is not writable."""
        check(
            self.data_R.flags.writeable, "writable", False, "must be True in `get` to put a record"
        )
        self._close(True)

    def close(self) -> None:
        """Close the record unchanged; repeated calls do nothing."""
        self._close(False)

    def _close(self, dirty: bool) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self._link.finish_transfer(self._start_s, self.data_R.nbytes)
            give_back(dirty)
