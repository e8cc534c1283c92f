"""Three ways of keeping experts in device slots: all of them, whole layers in a ring, or those that tokens chose.

Legend: E experts of a layer. Record number = layer * E + expert, over layers with experts.
"""

import itertools
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jmoe.config import check
from jmoe.inference.expert_slots import ExpertSlots
from jmoe.memory.hot_set import HitCounts
from jmoe.memory.ring import Ring
from jmoe.memory.slot_pool import SlotPool
from jmoe.memory.tiered_store import TieredStore

WAIT_LIMIT_S = 60.0


@dataclass(frozen=True)
class ResidencyStats:
    """waits, waited_s: layers whose experts were not there yet, and for how long they waited in all.

    hits, misses: experts that the tokens of a step chose and that had a slot, or had to be copied to one.
    guessed, guessed_right: experts that were copied on a guess, and how many of these were then chosen.
    """

    policy: str
    waits: int = 0
    waited_s: float = 0.0
    hits: int = 0
    misses: int = 0
    guessed: int = 0
    guessed_right: int = 0


class Residency(ABC):
    """Which experts are in which slots. What does not move (`AllResident`) needs no more than a table."""

    streams = False  # slots change while the engine runs, so `release` matters
    needs_choices = False  # `acquire` must be told which experts the step's tokens chose, and may be told guesses

    def __init__(self, slots: ExpertSlots, num_experts: int) -> None:
        self.slots, self._num_experts = slots, num_experts

    @abstractmethod
    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        """The table int32 [E] of a layer whose (chosen) experts are in place; waits until they are.

        chosen: expert numbers, in any order and more than once; E for none.
        """

    @abstractmethod
    def stats(self) -> ResidencyStats:
        """Counters since the start."""

    def release(self, moe_layer: int) -> None:
        """No program reads this layer's slots any more."""
        return

    def expect(self, moe_layer: int, guessed: np.ndarray) -> None:
        """Experts that a later layer will probably ask for."""
        return

    def close(self) -> None:
        """Stop the threads."""
        return


def copy_record(store: TieredStore, index: int, slots: ExpertSlots, slot: int) -> None:
    """One expert from host memory (or NVMe) into a slot."""
    with store.get(index) as record:
        slots.write(slot, record)


class AllResident(Residency):
    """Every expert has a slot of its own for good."""

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        return np.arange(self._num_experts, dtype=np.int32) + np.int32(moe_layer * self._num_experts)

    def stats(self) -> ResidencyStats:
        return ResidencyStats("resident")


class LayerRing(Residency):
    """K ring slots, each of E expert slots: whole layers pass through them in order (MoESys section 3.3.2)."""

    streams = True

    def __init__(
        self, slots: ExpertSlots, store: TieredStore, num_layers: int, num_experts: int, ring_slots: int
    ) -> None:
        super().__init__(slots, num_experts)
        self._store, self._num_layers = store, num_layers
        self.ring = Ring(range(num_layers), ring_slots, self._load)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        layer, slot = self.ring.acquire()
        assert layer == moe_layer, (layer, moe_layer)
        return np.arange(self._num_experts, dtype=np.int32) + np.int32(slot * self._num_experts)

    def release(self, moe_layer: int) -> None:
        self.ring.release()

    def stats(self) -> ResidencyStats:
        ring = self.ring.stats()
        return ResidencyStats("ring", ring.waits, ring.waited_s)

    def close(self) -> None:
        self.ring.close()

    def _load(self, layer: int, slot: int) -> int:
        e = self._num_experts
        for ahead in (layer, (layer + 1) % self._num_layers):
            self._store.prefetch(np.arange(ahead * e, (ahead + 1) * e))
        for i in range(e):
            copy_record(self._store, layer * e + i, self.slots, slot * e + i)
        return e * self._store.layout.data_bytes


class ChosenExperts(Residency):
    """M slots for single experts: a hot set by decayed hit counts, and what the step's tokens chose beside it.

    `expect` begins to copy experts that a later layer will probably need. A wrong guess costs a copy.
    """

    streams, needs_choices = True, True

    def __init__(
        self,
        slots: ExpertSlots,
        store: TieredStore,
        num_layers: int,
        num_experts: int,
        num_slots: int,
        *,
        threads: int = 2,
    ) -> None:
        check(num_slots >= num_experts, "num_slots", num_slots, f"must hold the {num_experts} experts of a layer")
        super().__init__(slots, num_experts)
        self._store = store
        self.pool = SlotPool(HitCounts(num_layers * num_experts), num_slots)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="expert copy")
        self._copies: dict[int, Future[None]] = {}  # records on their way into a slot
        self._pinned: dict[int, set[int]] = {}  # layer -> records
        self._guesses: dict[int, set[int]] = {}
        self._failed: Exception | None = None
        self._used: dict[int, list[int]] = {}  # layer -> records, of the step that runs
        self._waits, self._waited_s, self._guessed, self._guessed_right = 0, 0.0, 0, 0

    def expect(self, moe_layer: int, guessed: np.ndarray) -> None:
        records = self._records(moe_layer, guessed)
        room = self.pool.num_slots - sum(map(len, self._pinned.values())) - self._num_experts
        missing = [r for r in records if self.pool.slot_of[r] < 0][: max(0, room)]
        self._guesses[moe_layer] = set(missing)
        self._guessed += len(missing)
        self._bring(moe_layer, missing)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        assert chosen is not None
        if self._failed is not None:
            raise self._failed
        records = self._records(moe_layer, chosen)
        self._guessed_right += len(self._guesses.pop(moe_layer, set()) & set(records))
        if moe_layer in self._used:  # a new step: counts rise once a step, or layers yet to come look unused
            self._touch()
        self._used[moe_layer] = records
        self._bring(moe_layer, records)
        begun = time.perf_counter()
        copies = [self._copies.pop(r) for r in records if r in self._copies]
        self._waits += any(not copy.done() for copy in copies)
        for copy in copies:
            self._finish(copy)
        self._waited_s += time.perf_counter() - begun
        slot_E = self.pool.slot_of[self._records(moe_layer, np.arange(self._num_experts))]
        return np.maximum(slot_E, 0)  # an expert without a slot is not asked for

    def release(self, moe_layer: int) -> None:
        for record in (pinned := self._pinned.pop(moe_layer)):
            if record in self._copies:  # a wrong guess, still on its way
                self._finish(self._copies.pop(record))
        self.pool.unpin(sorted(pinned))

    def stats(self) -> ResidencyStats:
        pool = self.pool.stats()
        hits, misses = pool.hits, pool.misses
        return ResidencyStats("experts", self._waits, self._waited_s, hits, misses, self._guessed, self._guessed_right)

    def close(self) -> None:
        self._threads.shutdown()

    def _finish(self, copy: Future[None]) -> None:
        """Wait for a copy. One that fails ends the service: its slot holds nothing, but is in the pool as filled."""
        try:
            copy.result(WAIT_LIMIT_S)
        except Exception as error:
            self._failed = error
            raise

    def _touch(self) -> None:
        used = list(itertools.chain.from_iterable(self._used.values()))
        self.pool.touch(used)
        self._store.touch(used)
        self._used.clear()

    def _records(self, moe_layer: int, experts: np.ndarray) -> list[int]:
        chosen = np.unique(experts)
        found: list[int] = (chosen[chosen < self._num_experts] + moe_layer * self._num_experts).tolist()
        return found

    def _bring(self, moe_layer: int, records: list[int]) -> None:
        """Give the records slots and pins, and begin the copies that are missing."""
        _, loads = self.pool.plan(records)
        mine = self._pinned.setdefault(moe_layer, set())
        fresh = [r for r in records if r not in mine]
        self.pool.pin(fresh)
        mine.update(fresh)
        for record, slot in loads:
            self._copies[record] = self._threads.submit(copy_record, self._store, record, self.slots, slot)
