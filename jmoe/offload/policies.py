"""Ways of keeping experts in device slots: all of them, whole layers in a ring, or those that
tokens chose.

Legend: E experts of a layer. `ExpertIndex` numbers their records.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.memory.hot_set import HitCounts
from jmoe.memory.ring import Ring
from jmoe.memory.slot_pool import SlotPool
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.slots import ExpertSlots
from kernels_pallas.native import SlotFinder

WAIT_LIMIT_S = 60.0  # for a copy
# for all copies that a layer of a program waits for: those raise first
PROGRAM_LIMIT_S = 10 * WAIT_LIMIT_S
COPY_THREADS = 2
MIN_TRUST = 0.5  # share of right guesses from which on they are acted on
GUESS_DECAY = 0.95  # what a guess counts for after the next layer's
FIRST_TRUST = 8.0  # right guesses that are assumed at first


@dataclass
class ResidencyStats:
    """Counters since the start.

    waits, waited_s: layers whose experts were not there yet, and for how long they waited in all.

    hits, misses: experts that the tokens of a step chose and that had a slot, or had to be copied
    to one.
    guessed, guessed_right: experts that were copied on a guess, and how many of these were then
    chosen.
    on_host: of the misses those that the host computed instead, where they lie.
    """

    policy: str
    waits: int = 0
    waited_s: float = 0.0
    layers: int = 0
    hits: int = 0
    misses: int = 0
    guessed: int = 0
    guessed_right: int = 0
    on_host: int = 0


class ExpertPlaces(ABC):
    """Knows where a model's experts are: what an engine asks, whether on one device or on
    several.
    """

    streams = False  # slots change while the engine runs, so `release` matters
    takes_guesses = False  # `expect` is of use
    num_slots: int  # on the devices, of one expert each
    num_bytes: int  # of the slots

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        """Begin a step, whose layers are acquired in order, each released before the next.

        whole_layers: bring all experts of every layer, where there is a choice. on_host: leave
        experts to the host, where it can compute them.
        """
        return

    @abstractmethod
    def stats(self) -> ResidencyStats:
        """Return counters since the start."""

    @abstractmethod
    def occupancy(self) -> list[tuple[int, int] | None]:
        """Return (layer, expert) of every slot, also of what is on its way there; None where
        there is nothing.
        """

    def close(self) -> None:
        """Stop the threads."""
        return


class Residency(ExpertPlaces):
    """Decides which experts are in which slots. What does not move (`AllResident`) needs no more
    than a table.
    """

    needs_choices = False  # in this step `acquire` must be told which experts its tokens chose
    # what `acquire` returns for each layer, where that is the same in every step
    tables_NE: np.ndarray | None = None
    # in this step programs may find slots with it, in place of `acquire`
    finder: SlotFinder | None = None

    def __init__(self, slots: ExpertSlots, index: ExpertIndex) -> None:
        self.slots, self.index = slots, index
        self.num_slots, self.num_bytes = slots.num_slots, slots.num_bytes

    @abstractmethod
    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        """Return the table int32 [E] of a layer's slots when its (chosen) experts are in place.

        chosen: expert numbers, in any order and more than once; E for none.
        """

    @contextlib.contextmanager
    def programs(self) -> Iterator[None]:
        """Let programs use `finder` in the block, one at a time; they must have ended when it
        does.
        """
        yield

    def mlp(self, routed: ExpertInputs, table_E: np.ndarray, activation: str) -> jax.Array:
        """Return float32 [T, D]: y + the weighted sum of each token's experts; table_E: what
        `acquire` returned.
        """
        return self.slots.mlp(routed, table_E, activation)

    @property
    def waited_s(self) -> float:
        return self.stats().waited_s

    def release(self, moe_layer: int) -> None:
        """Give a layer's slots back, which no program reads any more."""
        return

    def expect(self, moe_layer: int, guessed: np.ndarray) -> None:
        """Prepare for experts that a later layer will probably ask for."""
        return


def copy_record(store: TieredStore, index: int, slots: ExpertSlots, slot: int) -> None:
    """Copy one expert from host memory (or NVMe) into a slot."""
    with store.get(index) as record:
        slots.write(slot, record)


class AllResident(Residency):
    """Every expert has a slot of its own for good."""

    def __init__(self, slots: ExpertSlots, index: ExpertIndex) -> None:
        super().__init__(slots, index)
        self.tables_NE = np.stack(
            [index.records(layer) for layer in range(index.num_layers)]
        ).astype(np.int32)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        assert self.tables_NE is not None
        table_E: np.ndarray = self.tables_NE[moe_layer]
        return table_E

    def stats(self) -> ResidencyStats:
        return ResidencyStats("resident")

    def occupancy(self) -> list[tuple[int, int] | None]:
        return [self.index.locate(slot) for slot in range(self.slots.num_slots)]


class LayerRing(Residency):
    """K ring slots, each of E expert slots: whole layers pass through them in order (MoESys
    section 3.3.2).
    """

    streams = True

    def __init__(
        self, slots: ExpertSlots, store: TieredStore, index: ExpertIndex, ring_slots: int
    ) -> None:
        super().__init__(slots, index)
        self._store = store
        self.ring = Ring(range(index.num_layers), ring_slots, self._load)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        layer, slot = self.ring.acquire()
        assert layer == moe_layer, (layer, moe_layer)
        return self._slots_of(slot).astype(np.int32)

    def release(self, moe_layer: int) -> None:
        self.ring.release()

    def stats(self) -> ResidencyStats:
        ring = self.ring.stats()
        return ResidencyStats("ring", ring.waits, ring.waited_s)

    def occupancy(self) -> list[tuple[int, int] | None]:
        experts = range(self.index.num_experts)
        return [
            None if layer is None else (layer, expert)
            for layer in self.ring.layers
            for expert in experts
        ]

    def close(self) -> None:
        self.ring.close()

    def _slots_of(self, ring_slot: int) -> NDArray[np.int64]:
        """Return the expert slots of a ring slot: as many as a layer has experts, so numbered
        like its records.
        """
        return self.index.records(ring_slot)

    def _load(self, layer: int, ring_slot: int) -> int:
        for ahead in (layer, (layer + 1) % self.index.num_layers):
            self._store.prefetch(self.index.records(ahead))
        for record, slot in zip(
            self.index.records(layer).tolist(), self._slots_of(ring_slot).tolist(), strict=True
        ):
            copy_record(self._store, record, self.slots, slot)
        return self.index.num_experts * self._store.layout.data_bytes


class ChosenExperts(Residency):
    """M slots for single experts: a hot set by hit counts, and what the step's tokens chose beside
    it.

    `expect` begins to copy experts that a later layer will probably need. A wrong guess costs a
    copy, or less if the choices are known before it has begun. Guesses are only listened to while
    at least half of the recent ones, about experts that were not there, were right: where the link
    is the limit a wrong one costs what a right one saves.

    A step of whole layers gets all experts of each, the next layer's while one computes, and nobody
    asks what its tokens chose. This is a ring some of whose layers stay: the hot set keeps its
    slots, what is left of a layer passes through the others.

    Where programs find slots, what they choose has its slot or is brought by `acquire`, in the
    thread of the finder. Nothing of theirs needs a pin: a layer whose experts are asked for waits,
    and what came before it has ended.
    """

    streams, takes_guesses, needs_choices = True, True, True

    def __init__(
        self, slots: ExpertSlots, store: TieredStore, index: ExpertIndex, *, finds: bool = False
    ) -> None:
        """finds: let programs find slots, with native operations."""
        num_slots, num_experts = slots.num_slots, index.num_experts
        check(
            num_slots >= num_experts,
            "num_slots",
            num_slots,
            f"must hold the {num_experts} experts of a layer",
        )
        super().__init__(slots, index)
        self._store = store
        self.pool = SlotPool(HitCounts(index.num_records), num_slots)
        self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="expert copy")
        self._copies: dict[int, Future[None]] = {}  # records on their way into a slot
        self._pinned: dict[int, set[int]] = {}  # layer -> records
        self._guesses: dict[int, set[int]] = {}
        self._failed: Exception | None = None
        self._used: list[int] = []  # records that the step's tokens chose
        self._stats = ResidencyStats("experts")
        self._ignored: dict[int, set[int]] = {}  # guesses that nothing was copied for
        self._recent_guesses = self._recent_right = FIRST_TRUST
        self._finder: SlotFinder | None = None
        if finds:
            self._finder = SlotFinder(
                self.pool.slot_of, num_experts, self._bring_for_program, PROGRAM_LIMIT_S
            )
        self.finder = self._finder

    @contextlib.contextmanager
    def programs(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if self._failed is not None:
                raise self._failed from error
            raise
        assert self._finder is not None
        # but for layers that had to ask, which are counted
        chosen = np.flatnonzero(self._finder.chosen)
        self._finder.chosen[:] = 0
        self._stats.layers += np.unique(chosen // self.index.num_experts).size
        self._stats.hits += chosen.size
        self._used += chosen.tolist()

    def _bring_for_program(self, moe_layer: int, chosen: np.ndarray) -> None:
        try:
            self.acquire(moe_layer, chosen)
            self.release(moe_layer)
        except Exception as error:
            self._failed = error
            raise
        assert self._finder is not None
        self._finder.chosen[self.index.records(moe_layer)] = 0

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        if self._used:  # counts rise once a step, or layers yet to come look unused
            self.pool.counts.touch(self._used)
            self._store.touch(self._used)
            self._used = []
        self.needs_choices = not whole_layers
        self.finder = None if whole_layers else self._finder
        if whole_layers:
            self._bring(0, self._layer(0))

    def expect(self, moe_layer: int, guessed: np.ndarray) -> None:
        records = self._records(moe_layer, guessed)
        if self._recent_right >= MIN_TRUST * self._recent_guesses:
            self._guesses[moe_layer] = guesses = self._bring_early(moe_layer, records)
            self._stats.guessed += len(guesses)
        else:
            slot_of = self.pool.slot_of
            self._ignored[moe_layer] = {r for r in records if slot_of[r] < 0}

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        self._wait(self._begin(moe_layer, chosen))
        slot_E = self.pool.slot_of[self.index.records(moe_layer)]
        return np.maximum(slot_E, 0)  # an expert without a slot is not asked for

    def _begin(self, moe_layer: int, chosen: np.ndarray | None) -> list[int]:
        """Begin the copies that a layer waits for; return the records that have slots, or will."""
        if self._failed is not None:
            raise self._failed
        records = self._layer(moe_layer) if chosen is None else self._records(moe_layer, chosen)
        guesses, ignored = self._guesses.pop(moe_layer, set()), self._ignored.pop(moe_layer, set())
        self._cancel(moe_layer, guesses.difference(records))
        if chosen is not None:
            self._count(records, guesses, ignored)
            records = self._worth_bringing(records)
        self._bring(moe_layer, records)
        if chosen is None and moe_layer + 1 < self.index.num_layers:
            self._bring_early(moe_layer + 1, self._layer(moe_layer + 1))
        return records

    def _worth_bringing(self, records: list[int]) -> list[int]:
        """Return those of the chosen records that get slots, and keep those that they have."""
        return records

    def _wait(self, records: list[int]) -> None:
        begun = time.perf_counter()
        copies = [self._copies.pop(r) for r in records if r in self._copies]
        self._stats.waits += any(not copy.done() for copy in copies)
        for copy in copies:
            self._finish(copy)
        self._stats.waited_s += time.perf_counter() - begun

    def release(self, moe_layer: int) -> None:
        for record in (pinned := self._pinned.pop(moe_layer)):
            if record in self._copies:  # a wrong guess whose copy had begun when that was known
                self._finish(self._copies.pop(record))
        self.pool.unpin(self.pool.slots_of(sorted(pinned)))

    def stats(self) -> ResidencyStats:
        return replace(self._stats)

    def occupancy(self) -> list[tuple[int, int] | None]:
        return [
            None if record < 0 else self.index.locate(record)
            for record in self.pool.record_in.tolist()
        ]

    def close(self) -> None:
        if self._finder is not None:
            self._finder.close()
        self._threads.shutdown(cancel_futures=True)

    def _finish(self, copy: Future[None]) -> None:
        """Wait for a copy. One that fails ends the service: its slot holds nothing, but is in
        the pool as filled.
        """
        try:
            copy.result(WAIT_LIMIT_S)
        except Exception as error:
            self._failed = error
            raise

    def _count(self, records: list[int], guesses: set[int], ignored: set[int]) -> None:
        """Note which of the chosen records were there, what came on a guess was not, and how
        good guesses are.
        """
        slot_of = self.pool.slot_of
        hits = sum(slot_of[r] >= 0 and r not in guesses for r in records)
        self._stats.layers += 1
        self._stats.hits += hits
        self._stats.misses += len(records) - hits
        self._stats.guessed_right += len(guesses.intersection(records))
        self._used += records
        if judged := guesses or ignored:
            self._recent_guesses = GUESS_DECAY * self._recent_guesses + len(judged)
            self._recent_right = GUESS_DECAY * self._recent_right + len(
                judged.intersection(records)
            )

    def _layer(self, moe_layer: int) -> list[int]:
        return list(map(int, self.index.records(moe_layer)))

    def _records(self, moe_layer: int, experts: np.ndarray) -> list[int]:
        chosen = np.unique(experts)
        return list(
            map(int, self.index.records(moe_layer, chosen[chosen < self.index.num_experts]))
        )

    def _bring(self, moe_layer: int, records: list[int]) -> None:
        """Give the records slots and pins, and begin the copies that are missing."""
        slot_of = self.pool.slot_of
        try:
            self._store.prefetch([r for r in records if slot_of[r] < 0])
        except Exception as error:  # an earlier read that failed
            self._failed = error
            raise
        _, loads = self.pool.plan(records)
        mine = self._pinned.setdefault(moe_layer, set())
        fresh = [r for r in records if r not in mine]
        self.pool.pin(self.pool.slots_of(fresh))
        mine.update(fresh)
        # what was chosen comes one by one, so that a wrong guess can be cancelled; whole layers in
        # a few long copies
        size = 1 if self.needs_choices else max(1, -(-len(loads) // COPY_THREADS))
        for batch in (loads[i : i + size] for i in range(0, len(loads), size)):
            copy = self._threads.submit(self._copy, batch)
            self._copies.update((record, copy) for record, _ in batch)

    def _copy(self, loads: list[tuple[int, int]]) -> None:
        for record, slot in loads:
            copy_record(self._store, record, self.slots, slot)

    def _bring_early(self, moe_layer: int, records: list[int]) -> set[int]:
        """`_bring` of what there is room for while another layer is in use; returns the records to
        be copied.

        Those that have slots are pinned too: they must not make room for the others.
        """
        slot_of = self.pool.slot_of
        there = [r for r in records if slot_of[r] >= 0]
        missing = [r for r in records if slot_of[r] < 0]
        room = self.pool.num_slots - sum(map(len, self._pinned.values()))
        self._bring(moe_layer, (there + missing)[:room])
        return set(missing[: max(0, room - len(there))])

    def _cancel(self, moe_layer: int, wrong: set[int]) -> None:
        """Do not copy, and do not read from NVMe, what was guessed and not chosen, where that
        has not begun.
        """
        stopped = [r for r in sorted(wrong) if r in self._copies and self._copies[r].cancel()]
        if not stopped:
            return
        for record in stopped:
            del self._copies[record]
        self._pinned.setdefault(moe_layer, set()).difference_update(stopped)
        self.pool.unpin(self.pool.slots_of(stopped))
        self.pool.drop(stopped)
        self._store.discard(stopped)
