"""Residency policies of inference on one device: all experts, whole layers in a ring, or chosen
experts.

`residency.open_experts` makes a policy; the runner calls `begin_step`, then `acquire`, `mlp` and
`release` for each MoE layer.

Legend:
  T  tokens
  D  hidden size
  E  experts of a layer
  M  expert slots of a device
  K  ring slots
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np

from jmoe.config import check
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.memory.slot_pool import SlotPool
from jmoe.memory.slot_table import HitCounts
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.slots import ExpertSlots
from kernels_pallas.expert_choices import WeightedOutputs
from kernels_pallas.native import SlotFinder

WAIT_LIMIT_S = 60.0  # longest wait for one copy
# longest wait of a program for a layer; longer, so that the copy's own error comes first
PROGRAM_LIMIT_S = 10 * WAIT_LIMIT_S
COPY_THREADS = 2
MIN_TRUST = 0.5  # guesses are followed while at least this fraction is right
GUESS_DECAY = 0.95  # decay per layer of the counts of guesses
FIRST_TRUST = 8.0  # guesses assumed right at the start


@dataclass
class ResidencyStats:
    """Counters since the start.

    waits, waited_s: layers that had to wait for their experts, and the seconds they waited in all.
    layers: layers whose choices were counted. hits, misses: experts that a step's tokens chose and
    that had a slot, or did not. guessed: experts copied because a guess named them; guessed_right:
    those among them that tokens then chose. on_host: misses that the CPU computed instead.
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


class ExpertResidency(ABC):
    """Where a model's experts are: the interface of an engine to one or several devices."""

    streams = False  # whether slots change while the engine runs
    takes_guesses = False  # whether `prefetch_guessed` has an effect
    num_slots: int  # expert slots on all devices
    num_bytes: int  # bytes of all expert slots

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        """Begin a step, which acquires its layers in order and releases each before the next.

        whole_layers: bring all experts of every layer instead of the chosen ones, if the policy
        distinguishes. on_host: let the CPU compute experts, if the policy can.
        """
        return

    @abstractmethod
    def stats(self) -> ResidencyStats:
        """Return counters since the start."""

    @abstractmethod
    def occupancy(self) -> list[tuple[int, int] | None]:
        """Return (layer, expert) of every slot, None for an empty slot; a copy under way counts as
        present.
        """

    def close(self) -> None:
        """Stop the threads that this object started, if any."""
        return


class Residency(ExpertResidency):
    """Decides which experts of a single device are in which slots.

    needs_choices: whether `acquire` needs the tokens' choices in this step. tables_NE: int32
    [layers, E], the tables that `acquire` returns, if they never change. finder: if not None,
    compiled programs of this step look slots up with it instead of calling `acquire`.
    """

    needs_choices = False  # see the class docstring
    tables_NE: np.ndarray | None = None
    finder: SlotFinder | None = None

    def __init__(self, slots: ExpertSlots, index: ExpertIndex) -> None:
        self.slots, self.index = slots, index
        self.num_slots, self.num_bytes = slots.num_slots, slots.num_bytes

    @abstractmethod
    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        """Return the table int32 [E] of the layer's slots, once the chosen experts are in their
        slots.

        chosen: expert numbers in any order, repeats allowed, E for no expert; None means all
        experts.
        """

    @contextlib.contextmanager
    def let_programs_use_finder(self) -> Iterator[None]:
        """Return a context manager inside which programs may use `finder`, one at a time.

        All programs must have ended when the block does.
        """
        yield

    def add_expert_outputs(
        self, routed: ExpertInputs, table_E: np.ndarray, activation: str
    ) -> jax.Array | WeightedOutputs:
        """Return the result of `ExpertSlots.add_expert_outputs`.

        table_E: the table that `acquire` returned.
        """
        return self.slots.add_expert_outputs(routed, table_E, activation)

    @property
    def waited_s(self) -> float:
        return self.stats().waited_s

    def release(self, moe_layer: int) -> None:
        """Release a layer's slots; no program may still read them."""
        return

    def prefetch_guessed(self, moe_layer: int, guessed: np.ndarray) -> None:
        """Prefetch the experts `guessed`, which the tokens of a later layer will probably choose;
        nothing happens unless `takes_guesses`.
        """
        return

    def forget_slots(self) -> None:
        """Treat all slots as empty, because something else overwrites them; no step may run."""
        raise NotImplementedError


def copy_record(store: TieredStore, index: int, slots: ExpertSlots, slot: int) -> None:
    """Copy one expert's record from the store into a slot."""
    with store.get(index) as record:
        slots.write(slot, record)


class AllResident(Residency):
    """Every expert has a permanent slot."""

    def __init__(self, slots: ExpertSlots, index: ExpertIndex) -> None:
        super().__init__(slots, index)
        self.tables_NE = np.stack(
            [index.record_numbers(layer) for layer in range(index.num_layers)]
        ).astype(np.int32)

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        assert self.tables_NE is not None
        table_E: np.ndarray = self.tables_NE[moe_layer]
        return table_E

    def stats(self) -> ResidencyStats:
        return ResidencyStats("resident")

    def occupancy(self) -> list[tuple[int, int] | None]:
        return [self.index.layer_and_expert_of(slot) for slot in range(self.slots.num_slots)]


class ChosenExperts(Residency):
    """M expert slots: a hot set by hit counts, plus the other experts that a step's tokens choose.

    `prefetch_guessed` starts copies of guessed experts. A wrong guess costs a copy, unless the
    choices arrive before the copy has begun. Guesses are followed only while at least half of the
    recent guesses about absent experts were right: if the link is the bottleneck, a wrong guess
    costs as much as a right one saves.

    A step of whole layers brings all experts of a layer while the previous layer computes, and
    needs no choices. The hot set keeps its slots; the rest of each layer passes through the others.

    If programs look slots up themselves (`finder`), `acquire` runs in the finder's thread for
    layers with missing experts. These experts need no pins: the layer waits for `acquire`, and all
    earlier layers have ended.
    """

    streams, takes_guesses, needs_choices = True, True, True

    def __init__(
        self,
        slots: ExpertSlots,
        store: TieredStore,
        index: ExpertIndex,
        *,
        finds: bool = False,
        experts: np.ndarray | None = None,
    ) -> None:
        """Make the policy over empty slots.

        finds: let programs look slots up themselves, with native operations. experts: the experts
        of every layer that this device computes, if it shares the store with others; None for all.
        Raises `ValueError` if the slots do not hold these of one layer.
        """
        num_slots, num_experts = slots.num_slots, index.num_experts
        needed = num_experts if experts is None else experts.size
        check(
            num_slots >= needed,
            "num_slots",
            num_slots,
            f"must hold the {needed} experts of a layer",
        )
        super().__init__(slots, index)
        self._experts = experts
        self._store = store
        self.pool = SlotPool(HitCounts(index.num_records), num_slots)
        self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="expert copy")
        self._copies: dict[int, Future[None]] = {}  # records on their way into a slot
        self._pinned: dict[int, set[int]] = {}  # layer -> records
        self._guesses: dict[int, set[int]] = {}
        self._failed: Exception | None = None
        self._used: list[int] = []  # records that the step's tokens chose
        self._stats = ResidencyStats("experts")
        self._ignored: dict[int, set[int]] = {}  # layer -> guessed records that were not copied
        self._recent_guesses = self._recent_right = FIRST_TRUST
        self._finder: SlotFinder | None = None
        if finds:
            self._finder = SlotFinder(
                self.pool.slot_of, num_experts, self._acquire_for_program, PROGRAM_LIMIT_S
            )
        self.finder = self._finder

    @contextlib.contextmanager
    def let_programs_use_finder(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if self._failed is not None:
                raise self._failed from error
            raise
        assert self._finder is not None
        # layers that went through `acquire` are counted there
        chosen = np.flatnonzero(self._finder.chosen)
        self._finder.chosen[:] = 0
        self._stats.layers += np.unique(chosen // self.index.num_experts).size
        self._stats.hits += chosen.size
        self._used += chosen.tolist()

    def _acquire_for_program(self, moe_layer: int, chosen: np.ndarray) -> None:
        """Bring missing experts into slots for a running program; called by the finder's thread."""
        try:
            self.acquire(moe_layer, chosen)
            self.release(moe_layer)
        except Exception as error:
            self._failed = error
            raise
        assert self._finder is not None
        self._finder.chosen[self.index.record_numbers(moe_layer)] = 0

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        if self._used:  # once per step: counted layer by layer, later layers would look unused
            self.pool.counts.count_step(self._used)
            if self._experts is None:  # else `MeshChosenExperts` counts those of all devices
                self._store.count_step(self._used)
            self._used = []
        self.needs_choices = not whole_layers
        self.finder = None if whole_layers else self._finder
        if whole_layers:
            self._assign_slots_and_copy(0, self._layer_records(0))

    def prefetch_guessed(self, moe_layer: int, guessed: np.ndarray) -> None:
        records = self._distinct_records(moe_layer, guessed)
        if self._recent_right >= MIN_TRUST * self._recent_guesses:
            self._guesses[moe_layer] = guesses = self._copy_before_acquire(moe_layer, records)
            self._stats.guessed += len(guesses)
        else:
            slot_of = self.pool.slot_of
            self._ignored[moe_layer] = {r for r in records if slot_of[r] < 0}

    def acquire(self, moe_layer: int, chosen: np.ndarray | None) -> np.ndarray:
        return self.finish_acquire(moe_layer, self.begin_acquire(moe_layer, chosen))

    def finish_acquire(self, moe_layer: int, records: list[int]) -> np.ndarray:
        """Return what `acquire` does, for the records that `begin_acquire` returned."""
        self._wait_for_copies(records)
        slot_E = self.pool.slot_of[self.index.record_numbers(moe_layer)]
        return np.maximum(slot_E, 0)  # programs do not read the entries of experts without a slot

    @property
    def used_records(self) -> list[int]:
        """The records that the step's tokens have chosen so far."""
        return self._used

    def begin_acquire(self, moe_layer: int, chosen: np.ndarray | None) -> list[int]:
        """Begin the copies that a layer waits for; return the records that have, or will have, a
        slot.
        """
        if self._failed is not None:
            raise self._failed
        records = (
            self._layer_records(moe_layer)
            if chosen is None
            else self._distinct_records(moe_layer, chosen)
        )
        guesses, ignored = self._guesses.pop(moe_layer, set()), self._ignored.pop(moe_layer, set())
        self._cancel_wrong_guesses(moe_layer, guesses.difference(records))
        if chosen is not None:
            self._count_hits_and_guesses(records, guesses, ignored)
            records = self._records_to_copy(records)
        self._assign_slots_and_copy(moe_layer, records)
        if chosen is None and moe_layer + 1 < self.index.num_layers:
            self._copy_before_acquire(moe_layer + 1, self._layer_records(moe_layer + 1))
        return records

    def _records_to_copy(self, records: list[int]) -> list[int]:
        """Return the chosen records to put into slots; subclasses may leave some to the CPU."""
        return records

    def _wait_for_copies(self, records: list[int]) -> None:
        """Wait until these records are in their slots, and count the wait."""
        begun = time.perf_counter()
        copies = [self._copies.pop(r) for r in records if r in self._copies]
        self._stats.waits += any(not copy.done() for copy in copies)
        for copy in copies:
            self._finish_copy(copy)
        self._stats.waited_s += time.perf_counter() - begun

    def release(self, moe_layer: int) -> None:
        for record in (pinned := self._pinned.pop(moe_layer)):
            if record in self._copies:  # a wrong guess whose copy had already begun
                self._finish_copy(self._copies.pop(record))
        self.pool.unpin(self.pool.slots_of(sorted(pinned)))

    def forget_slots(self) -> None:
        for moe_layer in list(self._pinned):  # guesses for the next step
            self.release(moe_layer)
        self._guesses.clear()
        self._ignored.clear()
        self.pool.drop_records(self.pool.record_in[self.pool.record_in >= 0])

    def stats(self) -> ResidencyStats:
        return replace(self._stats)

    def occupancy(self) -> list[tuple[int, int] | None]:
        return [
            None if record < 0 else self.index.layer_and_expert_of(record)
            for record in self.pool.record_in.tolist()
        ]

    def close(self) -> None:
        if self._finder is not None:
            self._finder.close()
        self._threads.shutdown(cancel_futures=True)

    def _finish_copy(self, copy: Future[None]) -> None:
        """Wait for a copy.

        A failed copy is permanent, because the pool counts its slot as filled: every later call
        raises its error.
        """
        try:
            copy.result(WAIT_LIMIT_S)
        except Exception as error:
            self._failed = error
            raise

    def _count_hits_and_guesses(
        self, records: list[int], guesses: set[int], ignored: set[int]
    ) -> None:
        """Count hits and misses of the chosen records, and the accuracy of the guesses.

        A record that a guess brought counts as a miss.
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

    def _layer_records(self, moe_layer: int) -> list[int]:
        """Return the record numbers of all of the layer's experts that this object holds."""
        return list(map(int, self.index.record_numbers(moe_layer, self._experts)))

    def _distinct_records(self, moe_layer: int, experts: np.ndarray) -> list[int]:
        """Return the record numbers of these experts without repeats, and without "no expert"."""
        chosen = np.unique(experts)
        if self._experts is not None:
            chosen = np.intersect1d(chosen, self._experts)
        return list(
            map(int, self.index.record_numbers(moe_layer, chosen[chosen < self.index.num_experts]))
        )

    def _assign_slots_and_copy(self, moe_layer: int, records: list[int]) -> None:
        """Give the records slots and pins, and begin the missing copies."""
        slot_of = self.pool.slot_of
        try:
            self._store.prefetch([r for r in records if slot_of[r] < 0])
        except Exception as error:  # an earlier prefetch failed
            self._failed = error
            raise
        _, loads = self.pool.plan_loads(records)
        mine = self._pinned.setdefault(moe_layer, set())
        fresh = [r for r in records if r not in mine]
        self.pool.pin(self.pool.slots_of(fresh))
        mine.update(fresh)
        # chosen experts are copied one by one, so that a wrong guess can be cancelled;
        # whole layers are copied in a few long batches
        size = 1 if self.needs_choices else max(1, -(-len(loads) // COPY_THREADS))
        for batch in (loads[i : i + size] for i in range(0, len(loads), size)):
            copy = self._threads.submit(self._copy_records, batch)
            self._copies.update((record, copy) for record, _ in batch)

    def _copy_records(self, loads: list[tuple[int, int]]) -> None:
        """Copy each (record, slot) from the store; run by a copy thread."""
        for record, slot in loads:
            copy_record(self._store, record, self.slots, slot)

    def _copy_before_acquire(self, moe_layer: int, records: list[int]) -> set[int]:
        """Pin or begin to copy as many of a layer's records as fit while another layer is in use;
        return the records that are copied.

        Records that have slots are pinned first, so that new records do not evict them.
        """
        slot_of = self.pool.slot_of
        there = [r for r in records if slot_of[r] >= 0]
        missing = [r for r in records if slot_of[r] < 0]
        room = self.pool.num_slots - sum(map(len, self._pinned.values()))
        self._assign_slots_and_copy(moe_layer, (there + missing)[:room])
        return set(missing[: max(0, room - len(there))])

    def _cancel_wrong_guesses(self, moe_layer: int, wrong: set[int]) -> None:
        """Cancel the copies and NVMe reads of wrong guesses, unless they have begun."""
        stopped = [r for r in sorted(wrong) if r in self._copies and self._copies[r].cancel()]
        if not stopped:
            return
        for record in stopped:
            del self._copies[record]
        self._pinned.setdefault(moe_layer, set()).difference_update(stopped)
        self.pool.unpin(self.pool.slots_of(stopped))
        self.pool.drop_records(stopped)
        self._store.cancel_prefetch(stopped)
