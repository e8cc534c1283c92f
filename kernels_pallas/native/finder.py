"""The host's side of `find_slots`: programs find experts' slots by themselves and ask for what
has none.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kernels_pallas.native.library import load

JOIN_LIMIT_S = 10.0


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(load()))
    int_p = ctypes.POINTER(ctypes.c_int32)
    library.jmoe_finder_open.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_double,
    ]
    library.jmoe_finder_next.argtypes = [ctypes.c_int32, int_p, int_p]
    library.jmoe_finder_next.restype = ctypes.c_int64
    library.jmoe_finder_end.argtypes = [ctypes.c_int32, ctypes.c_int32]
    library.jmoe_finder_close.argtypes = [ctypes.c_int32]
    return library


class SlotFinder:
    """A table of slots that programs read (`find_slots`), and a thread that answers for what it
    lacks.

    slot_of: int32, of each record, -1 for none; read while programs run, changed only in `bring`,
    or while none runs.
    bring: called in the thread with a layer and the distinct experts that its tokens chose, one of
    which at least has no slot; when it returns all have one. What it raises it also keeps, for the
    waiting program, and all later ones, end with an error that does not say why.
    wait_limit_s: a program waits no longer for it.
    """

    def __init__(
        self,
        slot_of: NDArray[np.int32],
        num_experts: int,
        bring: Callable[[int, NDArray[np.int32]], object],
        wait_limit_s: float,
    ) -> None:
        assert slot_of.dtype == np.int32 and slot_of.flags.c_contiguous
        # records that programs have chosen, until somebody clears them
        self.chosen = np.zeros(slot_of.size, np.uint8)
        self._slot_of, self._num_experts, self._bring = slot_of, num_experts, bring
        addresses = slot_of.ctypes.data, self.chosen.ctypes.data
        self.number: int = _library().jmoe_finder_open(*addresses, slot_of.size, wait_limit_s)
        self._thread = threading.Thread(
            target=self._answer, name="experts for programs", daemon=True
        )
        self._thread.start()

    def where(self, layer: int) -> NDArray[np.int32]:
        """Return what `find_slots` takes, in a program whose first layer with experts is this
        one.
        """
        return np.array([self.number, layer], np.int32)

    def close(self) -> None:
        """End the thread; a program that waits, or asks later, ends with an error."""
        _library().jmoe_finder_close(self.number)
        self._thread.join(JOIN_LIMIT_S)

    def _answer(self) -> None:
        layer, experts_E = ctypes.c_int32(), (ctypes.c_int32 * self._num_experts)()
        while (
            count := _library().jmoe_finder_next(self.number, ctypes.byref(layer), experts_E)
        ) >= 0:
            try:
                self._bring(layer.value, np.array(experts_E[:count], np.int32))
                failed = False
            except Exception:  # `bring` keeps it, and whoever runs the program raises it
                failed = True
            _library().jmoe_finder_end(self.number, failed)
