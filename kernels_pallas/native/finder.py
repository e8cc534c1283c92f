"""The host's side of `find_slots`: a thread that brings experts into slots when a running program
asks for them.

`jmoe/offload/policies.py` uses `SlotFinder`, so that a decoding step is one program without a
return to Python for each layer.
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
def _load_library() -> ctypes.CDLL:
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
    """A table of slots that running programs read through `find_slots`, and a thread that brings
    missing experts.

    slot_of: int32 per record, -1 for no slot. Programs read it while they run; it changes only in
    `bring`, or while no program runs.

    bring: called in the thread with a layer and the distinct experts that its tokens chose, at
    least one of them without a slot. All of them must have a slot when it returns. `bring` must
    also store an exception that it raises: the waiting program and all later ones end with an error
    that does not contain it.

    wait_limit_s: seconds that a program waits for `bring` before it ends with an error.
    """

    def __init__(
        self,
        slot_of: NDArray[np.int32],
        num_experts: int,
        bring: Callable[[int, NDArray[np.int32]], object],
        wait_limit_s: float,
    ) -> None:
        assert slot_of.dtype == np.int32 and slot_of.flags.c_contiguous
        # 1 for each record that programs chose; the owner clears it
        self.chosen = np.zeros(slot_of.size, np.uint8)
        self._slot_of, self._num_experts, self._bring = slot_of, num_experts, bring
        addresses = slot_of.ctypes.data, self.chosen.ctypes.data
        self.number: int = _load_library().jmoe_finder_open(*addresses, slot_of.size, wait_limit_s)
        self._thread = threading.Thread(
            target=self._serve_program_requests, name="experts for programs", daemon=True
        )
        self._thread.start()

    def find_slots_operand(self, layer: int) -> NDArray[np.int32]:
        """Return the `where_2` argument of `find_slots` for a program whose first layer with
        experts is `layer`.
        """
        return np.array([self.number, layer], np.int32)

    def close(self) -> None:
        """End the thread. A program that waits, or asks later, ends with an error."""
        _load_library().jmoe_finder_close(self.number)
        self._thread.join(JOIN_LIMIT_S)

    def _serve_program_requests(self) -> None:
        layer, experts_E = ctypes.c_int32(), (ctypes.c_int32 * self._num_experts)()
        while (
            count := _load_library().jmoe_finder_next(self.number, ctypes.byref(layer), experts_E)
        ) >= 0:
            try:
                self._bring(layer.value, np.array(experts_E[:count], np.int32))
                failed = False
            except Exception:  # `bring` stores it; the caller of the program raises it
                failed = True
            _load_library().jmoe_finder_end(self.number, failed)
