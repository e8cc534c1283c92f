"""A record in host memory, in use. Axes: R bytes of a record."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.memory.closing import Closing
from jmoe.memory.link import Link

# names of arrays -> those in the device's memory
Send = Callable[[Collection[str]], dict[str, jax.Array]]


class Record(Closing):
    """A record in host memory, for as long as it is open: use it in a `with` statement.

    record[name] is an array of the record's layout, `data_R` all its bytes, read-only unless it was
    got as writable. Both lie in memory that is used for another record after `close`: copy them,
    and wait for the copy (on CPU, `jax.device_put` of such an array makes no copy at all). link:
    counts its bytes while it is open. give_back: is called once, with whether the record was put.
    send: copies arrays to the device where they lie in pinned memory.
    """

    def __init__(
        self,
        index: int,
        data_R: NDArray[np.uint8],
        views: dict[str, NDArray[Any]],
        link: Link,
        give_back: Callable[[bool], None],
        send: Send | None = None,
    ) -> None:
        self.index, self.data_R, self._views = index, data_R, views
        self._link, self._start_s = link, link.start()
        self._give_back: Callable[[bool], None] | None = give_back
        self._send = send

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def on_device(self, names: Collection[str], device: jax.Device) -> dict[str, jax.Array]:
        """Return arrays in the device's memory, when they are there. On CPU they may be the
        record's own memory.
        """
        if self._send is not None:
            return self._send(names)
        return jax.block_until_ready({name: jax.device_put(self[name], device) for name in names})

    def put(self) -> None:
        """Give the record back as changed: it is dirty from now on."""
        check(
            self.data_R.flags.writeable, "writable", False, "must be True in `get` to put a record"
        )
        self._close(True)

    def close(self) -> None:
        """Give the memory back, which has not been changed since `get`; more than once does
        nothing.
        """
        self._close(False)

    def _close(self, dirty: bool) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            self._link.finish(self._start_s, self.data_R.nbytes)
            give_back(dirty)
