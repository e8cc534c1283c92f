"""A ring of K slots over a cyclic order of layers: the next layers load while one is in use.

The caller gives the order: for training `offload/expert_state.py`, for inference
`offload/layer_ring.py` and `mesh_ring.py`. The ring decides which layer goes into which slot and
when; a function of the caller moves the bytes. After MoESys, section 3.3.2 (arXiv 2205.10034).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jmoe.config import check
from jmoe.memory.closing import Closing
from jmoe.memory.link import Link, LinkStats


class AcquiredLayer(NamedTuple):
    """A layer, and the slot that holds it until `release`."""

    layer: int
    slot: int


@dataclass(frozen=True)
class RingStats:
    """Counters since the start.

    loads: transfers into slots. waits, waited_s: calls of `acquire` that had to wait for their
    layer, and the seconds they waited in all.
    """

    loads: LinkStats
    waits: int
    waited_s: float


class Ring(Closing):
    """`num_slots` slots through which the layers of `order` pass, round after round.

    A released slot loads the next layer of the order that has no slot, across the end of a round,
    so that a new round finds its first layers loaded. A layer that is still in a slot is not loaded
    again: the order 0, ..., N-1, ..., 0 turns around without a load. Of several free slots the ring
    takes the one whose layer is needed last. No slot is written between acquire and release. One
    thread acquires and releases.

    load(layer, slot) copies a layer into a slot and returns the bytes copied, when the slot is
    ready. It runs in a thread of the ring, one call at a time. Its error is permanent, because the
    slot's content is then unknown: every later `acquire`, `begin_round`, `reload_slots` and
    `wait_for_loads` raises it. wait_limit_s: longest wait of a call; then `TimeoutError` names
    layer and slot.
    """

    def __init__(
        self,
        order: Sequence[int],
        num_slots: int,
        load: Callable[[int, int], int],
        *,
        wait_limit_s: float = 300.0,
    ) -> None:
        check(num_slots > 0, "num_slots", num_slots, "must be greater than 0")
        check(wait_limit_s > 0, "wait_limit_s", wait_limit_s, "must be greater than 0")
        self._load, self._wait_limit_s = load, wait_limit_s
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._link = Link()
        self._waits, self._waited_s = 0, 0.0
        # slot -> its layer, loaded or being loaded
        self._layer_in: list[int | None] = [None] * num_slots
        self._slot_of: dict[int, int] = {}
        self._loaded = [False] * num_slots
        # slot -> positions of the order that are planned into it and not released
        self._uses = [0] * num_slots
        self._to_load: deque[int] = deque()
        self._reload = set[int]()  # slots of _to_load that hold their layer already
        self._loading: int | None = None
        self._error: Exception | None = None
        with self._changed:
            self._start_round(order)
        self._thread = threading.Thread(target=self._load_until_closed, name="ring", daemon=True)
        self._thread.start()

    @property
    def num_slots(self) -> int:
        return len(self._uses)

    @property
    def layer_by_slot(self) -> list[int | None]:
        """Return the layer of every slot, loaded or being loaded; None for an empty slot."""
        with self._changed:
            return list(self._layer_in)

    def acquire(self) -> AcquiredLayer:
        """Return the next layer of the order and its slot, once it is loaded.

        Raises `TimeoutError` if that takes longer than `wait_limit_s`, `RuntimeError` if all slots
        are acquired.
        """
        with self._changed:
            layer = self._layer_at(self._acquired)
            if not self._next_is_ready():
                start_s = time.monotonic()
                if not self._changed.wait_for(self._next_is_ready, self._wait_limit_s):
                    name = f"layer {layer} (slot {self._slot_of.get(layer)})"
                    raise TimeoutError(f"ring: {name} was not loaded within {self._wait_limit_s} s")
                self._waits += 1
                self._waited_s += time.monotonic() - start_s
            slot = self._planned[self._acquired - self._released]
            self._acquired += 1
            self._plan_slots()
            return AcquiredLayer(layer, slot)

    def release(self) -> None:
        """Release the layer that was acquired first; nothing may read its slot any more, neither
        host nor device. Raises `RuntimeError` if no layer is acquired.
        """
        with self._changed:
            if self._released == self._acquired:
                raise RuntimeError("ring: release() without an acquired layer")
            self._uses[self._planned.popleft()] -= 1
            self._released += 1
            self._plan_slots()

    def begin_round(self, order: Sequence[int] | None = None) -> None:
        """Begin a new round, in a new order if one is given; loaded layers keep their slots.

        All layers must be released.
        """
        with self._changed:
            self._check_between_rounds()
            self._to_load.clear()
            self._reload.clear()
            # a layer keeps its slot only if it is loaded or being loaded
            for slot in range(self.num_slots):
                self._uses[slot] = 0
                if not self._loaded[slot] and slot != self._loading:
                    self._clear_slot(slot)
            self._start_round(self._order if order is None else order)

    def reload_slots(self) -> None:
        """Load again the layers that are already in slots for the next round; all layers must be
        released.
        """
        with self._changed:
            self._check_between_rounds()
            stay = [
                slot
                for slot in dict.fromkeys(self._planned)
                if self._loaded[slot] and slot != self._loading
            ]
            self._reload.update(stay)
            self._to_load.extend(stay)
            self._changed.notify_all()

    def wait_for_loads(self) -> None:
        """Wait until all planned loads are done; no other load begins before the next `acquire` or
        `release`. Raises `TimeoutError` after `wait_limit_s`.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_idle, self._wait_limit_s):
                raise TimeoutError(
                    f"ring: slot {self._loading} was not loaded within {self._wait_limit_s} s"
                )
            self._raise_load_error()

    def stats(self) -> RingStats:
        with self._changed:
            return RingStats(self._link.stats(), self._waits, self._waited_s)

    def close(self) -> None:
        """End the thread after its current load; raise `TimeoutError` if the load does not end in
        time.
        """
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._thread.join(self._wait_limit_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"ring: slot {self._loading} is still being loaded {self._wait_limit_s} s after"
                " close()"
            )

    def _is_idle(self) -> bool:
        """Return whether no load is planned or under way; also after an error or `close`."""
        return (
            self._error is not None
            or self._closing.is_set()
            or not (self._to_load or self._loading is not None)
        )

    def _raise_load_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_between_rounds(self) -> None:
        """Raise an earlier load error, or `RuntimeError` if a layer is still acquired."""
        self._raise_load_error()
        if self._released != self._acquired:
            raise RuntimeError(
                f"ring: {self._acquired - self._released} layers are acquired; release them first"
            )

    def _start_round(self, order: Sequence[int]) -> None:
        """Plan `order` from its first position on; the caller holds the lock."""
        check(len(order) > 0, "order", order, "must name at least one layer")
        self._order = tuple(order)
        # positions of the order, counted across rounds
        self._acquired = self._released = self._planned_to = 0
        self._planned: deque[int] = deque()  # slots of the positions from _released on
        self._plan_slots()

    def _layer_at(self, position: int) -> int:
        """Return the layer at a position of the endless repetition of the order."""
        return self._order[position % len(self._order)]

    def _plan_slots(self) -> None:
        """Assign slots to the next positions of the order, at most one round ahead, while slots are
        free.

        After an error nothing more is planned. The caller holds the lock.
        """
        while self._error is None and self._planned_to < self._acquired + len(self._order):
            layer = self._layer_at(self._planned_to)
            slot = self._slot_of.get(layer)
            if slot is None:
                slot = self._find_free_slot()
                if slot is None:
                    break
                self._clear_slot(slot)
                self._layer_in[slot] = layer
                self._slot_of[layer] = slot
                self._to_load.append(slot)
            self._uses[slot] += 1
            self._planned.append(slot)
            self._planned_to += 1
        self._changed.notify_all()

    def _find_free_slot(self) -> int | None:
        """Return the slot, among those that no planned position needs, whose layer is needed last;
        None if none is free.
        """
        free = [slot for slot, uses in enumerate(self._uses) if not uses and slot != self._loading]
        return max(free, key=self._positions_until_needed, default=None)

    def _positions_until_needed(self, slot: int) -> int:
        """Return the number of positions until the order needs a slot's layer again, at most one
        round.
        """
        round_ = range(len(self._order))
        uses = (
            ahead
            for ahead in round_
            if self._layer_at(self._planned_to + ahead) == self._layer_in[slot]
        )
        return next(uses, len(self._order))

    def _clear_slot(self, slot: int) -> None:
        layer = self._layer_in[slot]
        if layer is not None:
            del self._slot_of[layer]
        self._layer_in[slot] = None
        self._loaded[slot] = False

    def _next_is_ready(self) -> bool:
        """Return whether the next layer of the order is loaded. Raises an earlier load error,
        `ValueError` if the ring is closed, and `RuntimeError` if no slot is left to load it into.
        """
        if self._closing.is_set():
            raise ValueError("ring: closed")
        self._raise_load_error()
        if self._acquired < self._planned_to:
            slot = self._planned[self._acquired - self._released]
            return self._loaded[slot] and slot not in self._reload and slot != self._loading
        if self._loading is None and not self._to_load:
            raise RuntimeError(
                f"ring: all {self.num_slots} slots are in use; release() one before the next"
                " acquire()"
            )
        return False

    def _load_until_closed(self) -> None:
        """Run the ring's thread: load the planned layers until the ring closes or a load fails."""
        while True:
            with self._changed:
                while not self._to_load and not self._closing.is_set():
                    self._changed.wait()
                if self._closing.is_set():
                    return
                self._loading = slot = self._to_load.popleft()
                layer = self._layer_in[slot]
                assert layer is not None
            error: Exception | None = None
            try:
                self._link.run_transfer(partial(self._load, layer, slot))
            except Exception as caught:  # acquire() raises it in the caller's thread
                caught.add_note(f"while the ring loaded layer {layer} into slot {slot}")
                error = caught
            with self._changed:
                self._loading = None
                self._reload.discard(slot)
                if error is None:
                    self._loaded[slot] = True
                else:
                    self._error = error
                    if not self._loaded[slot]:
                        self._clear_slot(slot)
                    self._to_load.clear()
                self._plan_slots()  # the slot just loaded may be free now
