"""A ring of K slots over an order of layers: while one layer is in use, the next ones are being
loaded.

The ring decides which layer goes into which slot and when; a function of the caller's moves the
bytes. MoESys section 3.3.2 (arXiv 2205.10034).
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


class Acquired(NamedTuple):
    """A layer, and the slot that holds it until it is released."""

    layer: int
    slot: int


@dataclass(frozen=True)
class RingStats:
    """loads: transfers into slots; waits, waited_s: calls of `acquire` whose layer was not there
    yet.
    """

    loads: LinkStats
    waits: int
    waited_s: float


class Ring(Closing):
    """`num_slots` slots that hold the layers of `order` by turns, one round after the other.

    A slot that is released takes the next layer of the order that has none; after the last layer
    come the first ones again, so a new round finds them loaded. A layer that still is in a slot is
    not loaded again, whatever the order (0…N-1…0 turns round without a load). Of several free slots
    the one whose layer is needed last is taken. A slot is never written to between acquire and
    release. One thread acquires and releases.

    load(layer, slot) copies a layer's bytes into a slot and returns how many; it runs in a thread
    of the ring, one call at a time, and must not return before the slot may be used. What it raises
    is raised by every later `acquire`, `restart`, `reload` and `wait`, for good, since what lies in
    that slot is unknown. wait_limit_s: no call waits longer; `TimeoutError` names layer and slot.
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
        # what a slot holds, or will when its load is done
        self._layer_in: list[int | None] = [None] * num_slots
        self._slot_of: dict[int, int] = {}
        self._loaded = [False] * num_slots
        # positions of the order that are planned into a slot and not released
        self._uses = [0] * num_slots
        self._to_load: deque[int] = deque()
        self._reload = set[int]()  # of those, the ones that hold their layer already
        self._loading: int | None = None
        self._error: Exception | None = None
        with self._changed:
            self._begin(order)
        self._thread = threading.Thread(target=self._work, name="ring", daemon=True)
        self._thread.start()

    @property
    def num_slots(self) -> int:
        return len(self._uses)

    @property
    def layers(self) -> list[int | None]:
        """Return the layer of every slot, also one that is being loaded; None for an empty slot."""
        with self._changed:
            return list(self._layer_in)

    def acquire(self) -> Acquired:
        """Return the next layer of the order when it is in its slot."""
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
            self._plan()
            return Acquired(layer, slot)

    def release(self) -> None:
        """Give back the earliest layer acquired; nothing may read its slot any more, the device
        included.
        """
        with self._changed:
            if self._released == self._acquired:
                raise RuntimeError("ring: release() without an acquired layer")
            self._uses[self._planned.popleft()] -= 1
            self._released += 1
            self._plan()

    def restart(self, order: Sequence[int] | None = None) -> None:
        """Begin a round anew, in another order if one is given; what is in the slots stays. All
        must be released.
        """
        with self._changed:
            self._check_between_rounds()
            self._to_load.clear()
            self._reload.clear()
            # only what is loaded, or being loaded, keeps its slot
            for slot in range(self.num_slots):
                self._uses[slot] = 0
                if not self._loaded[slot] and slot != self._loading:
                    self._forget(slot)
            self._begin(self._order if order is None else order)

    def reload(self) -> None:
        """Load once more the layers that stay in their slots for the next round. All must be
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

    def wait(self) -> None:
        """Wait until all loads begun or planned are done; there are no more until the next
        `acquire` or `release`.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_idle, self._wait_limit_s):
                raise TimeoutError(
                    f"ring: slot {self._loading} was not loaded within {self._wait_limit_s} s"
                )
            self._check_loads()

    def stats(self) -> RingStats:
        with self._changed:
            return RingStats(self._link.stats(), self._waits, self._waited_s)

    def close(self) -> None:
        """End the thread, after the load that it is in."""
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
        return (
            self._error is not None
            or self._closing.is_set()
            or not (self._to_load or self._loading is not None)
        )

    def _check_loads(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_between_rounds(self) -> None:
        self._check_loads()
        if self._released != self._acquired:
            raise RuntimeError(
                f"ring: {self._acquired - self._released} layers are acquired; release them first"
            )

    def _begin(self, order: Sequence[int]) -> None:
        """Plan `order` from its first position. The lock is held."""
        check(len(order) > 0, "order", order, "must name at least one layer")
        self._order = tuple(order)
        # positions, counted on from round to round
        self._acquired = self._released = self._planned_to = 0
        self._planned: deque[int] = deque()  # slots of the positions from _released on
        self._plan()

    def _layer_at(self, position: int) -> int:
        return self._order[position % len(self._order)]

    def _plan(self) -> None:
        """Give slots to the positions that come next, as far as slots go, at most one round ahead.

        After an error nothing more is planned.
        """
        while self._error is None and self._planned_to < self._acquired + len(self._order):
            layer = self._layer_at(self._planned_to)
            slot = self._slot_of.get(layer)
            if slot is None:
                slot = self._free_slot()
                if slot is None:
                    break
                self._forget(slot)
                self._layer_in[slot] = layer
                self._slot_of[layer] = slot
                self._to_load.append(slot)
            self._uses[slot] += 1
            self._planned.append(slot)
            self._planned_to += 1
        self._changed.notify_all()

    def _free_slot(self) -> int | None:
        """Return a slot that no planned position needs; the one whose layer the order comes to
        last.
        """
        free = [slot for slot, uses in enumerate(self._uses) if not uses and slot != self._loading]
        return max(free, key=self._distance, default=None)

    def _distance(self, slot: int) -> int:
        """Return the positions from the next one to plan to the next use of a slot's layer, or
        one round.
        """
        round_ = range(len(self._order))
        uses = (
            ahead
            for ahead in round_
            if self._layer_at(self._planned_to + ahead) == self._layer_in[slot]
        )
        return next(uses, len(self._order))

    def _forget(self, slot: int) -> None:
        layer = self._layer_in[slot]
        if layer is not None:
            del self._slot_of[layer]
        self._layer_in[slot] = None
        self._loaded[slot] = False

    def _next_is_ready(self) -> bool:
        if self._closing.is_set():
            raise ValueError("ring: closed")
        self._check_loads()
        if self._acquired < self._planned_to:
            slot = self._planned[self._acquired - self._released]
            return self._loaded[slot] and slot not in self._reload and slot != self._loading
        if self._loading is None and not self._to_load:
            raise RuntimeError(
                f"ring: all {self.num_slots} slots are in use; release() one before the next"
                " acquire()"
            )
        return False

    def _work(self) -> None:
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
                self._link.transfer(partial(self._load, layer, slot))
            except Exception as caught:  # raised by acquire(), where the caller is
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
                        self._forget(slot)
                    self._to_load.clear()
                self._plan()  # a slot that was being loaded may be free now
