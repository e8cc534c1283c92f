"""Trains experts that do not fit the devices: slots on the device hold the layers in use, host
memory or NVMe holds the rest.

`training/streamed` calls this state layer by layer. Each expert has up to three records
(`ExpertIndex`): weights, AdamW moments, and a gradient that is not applied yet. The update is lazy:
an expert's pending gradient and the steps it skipped are applied when the expert is next fetched
(`lazy_adamw.catch_up`), on its device or on the host (`expert_updates.py`).

If several devices of a process hold one expert (replicas, or devices whose tasks share the expert),
the expert has one set of records. The first of these devices, or the host, computes the update, and
all of them get the weights (`LocalExperts.replica_rows`).

Legend:
  N  MoE layers
  P  experts of this process in a layer, numbered from 0, device by device
  L  experts of one device in a layer
  M  rows of a slot on a device, M <= L
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.ring import Ring
from jmoe.memory.saved_records import Indexed
from jmoe.memory.tiered_store import TieredStats, TieredStore
from jmoe.memory.version_store import SEAL
from jmoe.offload.device_workers import DeviceWorkers
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.expert_updates import ExpertRecords, ExpertUpdate, LinkBytes, SlotLoad
from jmoe.offload.gradient_writer import GradientWriter
from jmoe.offload.lazy_adamw import ReplayState
from jmoe.offload.skipped_steps import SkippedSteps
from jmoe.offload.slot_rows import ChosenRows
from jmoe.offload.training_slots import DeviceStacks, Slot, TrainingSlots

log = logging.getLogger(__name__)

MAX_STEPS_BEHIND = 1024  # the steps an expert of a checkpoint may lag
Method = TypeVar("Method", bound=Callable[..., Any])
ExpertArrays = dict[str, NDArray[np.float32]]
# (layer, expert numbers) -> arrays [experts, ...] by parameter
ReadExperts = Callable[[int, NDArray[np.int64]], ExpertArrays]


@dataclass(frozen=True)
class ExpertStats:
    """Counters since the start.

    weights: None if the weights never leave the device. updates: catch-ups of one expert.
    replayed_steps: steps without a gradient that those catch-ups replayed.

    waited_s: seconds that the main thread waited for layers, for experts that were not prefetched,
    and for gradients to be written. step_waited_s: those of them in training steps. chosen_share:
    the mean fraction of a device's experts of a layer that a step's tokens choose;
    most_chosen_share: the largest such fraction. room: the fraction of a device's experts that fits
    a slot. slot_bytes: bytes of all slots on this process's devices. link: bytes of weights,
    moments and gradients moved between host and devices.
    """

    weights: TieredStats | None
    moments: TieredStats
    gradients: TieredStats
    updates: int
    replayed_steps: int
    waited_s: float
    step_waited_s: float
    chosen_share: float
    most_chosen_share: float
    room: float
    slot_bytes: int
    link: LinkBytes

    @property
    def store_stats(self) -> list[TieredStats]:
        return [
            store for store in (self.weights, self.moments, self.gradients) if store is not None
        ]


@dataclass(frozen=True)
class RecordTiers:
    """The stores of the three kinds of records.

    weights: None if the weights stay on the device, in one slot per layer.
    """

    weights: TieredStore | None
    moments: TieredStore
    gradients: TieredStore

    def present_stores(self) -> list[TieredStore]:
        return [
            store for store in (self.weights, self.moments, self.gradients) if store is not None
        ]


@dataclass(frozen=True)
class SlotSizes:
    """The slots of a device: how many layers they hold, and how many of the device's experts in
    each.

    experts: None means all of the device's experts.
    """

    layers: int
    experts: int | None = None


def record_layouts(
    shapes: Mapping[str, Sequence[int]], gradient_dtype: str
) -> dict[str, RecordLayout]:
    """Return the record layouts {"weights", "moments", "gradients"} of an expert.

    shapes: of the expert's parameters, by name. Weights and moments are float32; the moments of
    parameter `x` are named `m.x` and `v.x`. gradient_dtype: dtype of the gradient records.
    """
    return {
        "weights": RecordLayout.from_arrays(
            {name: (shape, np.float32) for name, shape in shapes.items()}
        ),
        "moments": RecordLayout.from_arrays(
            {f"{p}.{name}": (shape, np.float32) for p in "mv" for name, shape in shapes.items()}
        ),
        "gradients": RecordLayout.from_arrays(
            {name: (shape, jnp.dtype(gradient_dtype)) for name, shape in shapes.items()}
        ),
    }


def _with_permanent_errors(method: Method) -> Method:
    """Return a method of `ExpertState` that runs `method` inside `ExpertState.permanent_errors`."""

    @wraps(method)
    def run(self: "ExpertState", /, *args: Any, **options: Any) -> Any:
        with self.permanent_errors():
            return method(self, *args, **options)

    return cast(Method, run)


class ExpertState:
    """Weights and optimizer state of one process's experts, streamed through device slots.

    One step: `begin_pass` starts a pass over layers; for each layer `fetch_layer` returns the
    slot's arrays, `fetch_more_experts` adds experts to them, and `release_layer` frees the slot.
    `store_gradients` stores a layer's gradients on their tier, in a thread of its own.
    `commit_step` or `abandon_step` ends the step. A ring (`memory/ring.py`) prefetches the experts
    that each layer's tokens chose last time, and updates the experts in the slots after
    `commit_step`; `fetch_layer` loads any expert that was not prefetched. Processes do not
    communicate: each has its own state.

    Any error is permanent: every later call raises the same error, because the number of steps
    applied to an expert, or the position of the pass, is then unknown. The last checkpoint stays
    valid.

    update: where AdamW updates the experts. replay_state: the steps that the records, and the
    weights that `initial` reads, have skipped.
    initial: a function of a layer and its local experts that returns their weights, for slots that
    have no weight records. slot_sizes: initial size of the slots; it grows if a step chooses more
    experts (`grow_slots`), and a slot takes the new size at its next fetch. wait_limit_s: longest
    wait for a layer.
    """

    def __init__(
        self,
        stores: RecordTiers,
        *,
        update: ExpertUpdate,
        index: ExpertIndex,
        shapes: Mapping[str, tuple[int, ...]],
        slot_sizes: SlotSizes,
        replay_state: ReplayState,
        initial: ReadExperts | None = None,
        wait_limit_s: float = 600.0,
    ) -> None:
        assert index.local_experts is not None and (slot_sizes.experts is None or initial is None)
        assert stores.weights is not None or not update.on_host
        self.stores, self.shapes = stores, dict(shapes)
        self.index, self.local = index, index.local_experts
        num_slots = min(slot_sizes.layers, index.num_layers)
        self.slots = TrainingSlots(
            *(self.local, self.shapes, num_slots, slot_sizes.experts, update.slot_dtypes)
        )
        self.skipped = SkippedSteps(replay_state, index.num_records, update.optimizer)
        self._update = update
        # the experts that each layer's tokens chose in its last pass
        self._chosen = np.zeros((index.num_layers, self.local.experts.size), np.bool_)
        self._initial = initial
        self._failed: BaseException | None = None
        self._updates = self._replayed = 0
        self._link = LinkBytes()
        # fractions of a device's experts that tokens chose
        self._sum_of_shares, self._num_shares, self._most_chosen_share = 0.0, 0, 0.0
        self._waited_s = self.step_waited_s = 0.0
        self._counters = threading.Lock()
        self._order: tuple[int, ...] = tuple(range(index.num_layers))
        self._fetched = (0, 0)  # the layer fetched last, and its slot
        self._workers = DeviceWorkers(len(self.local.all_devices))
        self._gradients = GradientWriter(stores.gradients, index, self.slots, self.permanent_errors)
        self._ring = Ring(self._order, num_slots, self._prefetch_layer, wait_limit_s=wait_limit_s)

    @property
    def waited_s(self) -> float:
        """Return `ExpertStats.waited_s`."""
        return self._ring.stats().waited_s + self._gradients.waited_s + self._waited_s

    @property
    def steps_taken(self) -> int:
        """Return the number of optimizer steps taken."""
        return self.skipped.now

    def _record_numbers(
        self, layer: int, experts: NDArray[np.int64] | slice = slice(None)
    ) -> NDArray[np.int64]:
        """Return the record numbers of experts of a layer by their positions among the local
        experts.
        """
        return self.index.record_numbers(layer, self.local.experts[experts])

    @contextlib.contextmanager
    def permanent_errors(self) -> Iterator[None]:
        """Return a context manager that makes an error permanent: every later call raises the
        error.
        """
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except BaseException as error:
            if self._failed is None:
                self._failed = error
            raise

    # A pass over the layers

    @_with_permanent_errors
    def begin_pass(self, order: Sequence[int]) -> None:
        """Begin a pass over these MoE layers, to be fetched in this order.

        If the order is that of the previous pass, the ring has already prefetched its first layers.
        """
        if tuple(order) != self._order:
            self._order = tuple(order)
            self._ring.begin_round(order)

    @_with_permanent_errors
    def end_pass(self) -> None:
        """End the pass before its last layer; all fetched layers must be released."""
        self._ring.begin_round(self._order)

    @property
    def experts_per_slot(self) -> int | None:
        """Return the number of experts of a device that fits a slot; None means all."""
        return self.slots.num_rows

    @_with_permanent_errors
    def grow_slots(self, needed: int) -> None:
        """Grow the slots to hold `needed` experts of a device, from their next fetch on.

        Slots that are large enough stay as they are. All processes must call this with the same
        number, since the step's programs are compiled for the slot size.
        """
        self.slots.request_slot_size(needed)

    @_with_permanent_errors
    def fetch_layer(self, layer: int, chosen_P: NDArray[np.bool_]) -> Slot:
        """Return the slot's arrays of the next layer, by device, with up-to-date weights of the
        chosen experts.

        Waits for the layer. layer: must be the pass's next layer. chosen_P: the experts that this
        step's tokens chose.
        """
        acquired, slot = self._ring.acquire()
        assert acquired == layer, (acquired, layer)
        self._fetched = acquired, slot
        self._chosen[layer] = False
        return self.fetch_more_experts(chosen_P)

    @_with_permanent_errors
    def fetch_more_experts(self, chosen_P: NDArray[np.bool_]) -> Slot:
        """Return the slot's arrays of the layer fetched last, with up-to-date weights of more
        chosen experts.

        The arrays replace those of the previous call; the layer must not be released yet.
        """
        layer, slot = self._fetched
        chosen_P = chosen_P & self.local.local_mask(layer)
        self._chosen[layer] |= chosen_P
        begun = time.perf_counter()
        self.slots.grow_if_requested(slot)
        self._fetch_up_to_date(layer, slot, np.flatnonzero(chosen_P))
        self._waited_s += time.perf_counter() - begun
        return self.slots.stacks[slot]

    def chosen_slot_rows(
        self, chosen_P: NDArray[np.bool_], size: int
    ) -> list[ChosenRows[np.ndarray]]:
        """Return, by device, the rows of the slot fetched last that hold these experts, in arrays
        of `size` entries.
        """
        return self.slots.chosen_rows(self._fetched[1], chosen_P, size)

    @_with_permanent_errors
    def release_layer(self) -> None:
        """Release the layer that was fetched first; no device program may still read its slot."""
        self._ring.release()

    @_with_permanent_errors
    def _prefetch_layer(self, layer: int, slot: int) -> int:
        """Prefetch, in the ring's thread, the experts that the layer's tokens chose last time;
        return the bytes fetched.

        If the slot holds the layer already, only its stale experts are updated.
        """
        if not self.slots.holds_layer(slot, layer):
            read = self._initial
            self.slots.assign_layer(
                slot,
                layer,
                None if read is None else read(layer, self.local.local_experts_in_layer(layer)),
            )
        self.slots.grow_if_requested(slot)
        foreseen = np.flatnonzero(self._chosen[layer])
        return self._fetch_up_to_date(
            layer, slot, next(self.slots.groups_that_fit(slot, foreseen), foreseen)
        )

    def _fetch_up_to_date(self, layer: int, slot: int, experts: NDArray[np.int64]) -> int:
        """Put up-to-date weights of these experts into the slot; return the bytes fetched.

        The slot must have rows for all of them at once.
        """
        now, records = self.steps_taken, self._record_numbers(layer, experts)
        missing, stale = (
            self.slots.assign_rows_and_find_absent(slot, experts),
            self.skipped.are_behind(records, now),
        )
        stores, on_host = self.stores, self._update.on_host
        needed = missing | stale
        by_device = self.slots.groups_by_device(slot, layer, experts)
        by_device = [own[needed[own]] for own in by_device if np.any(needed[own])]
        in_turn = _interleave_groups(by_device)  # of each device in turn
        if stores.weights is not None:
            stores.weights.prefetch(records[in_turn][(missing | (stale & on_host))[in_turn]])
        stores.moments.prefetch(records[in_turn][stale[in_turn]])
        pending = stale & self.skipped.has_gradient(records)
        stores.gradients.prefetch(records[in_turn][pending[in_turn]])
        for expert in experts[stale].tolist():  # until slot and records agree
            self.slots.set_present(slot, expert, False)

        def load(own: NDArray[np.int64]) -> LinkBytes:
            each = zip(experts[own].tolist(), records[own].tolist(), strict=True)
            with self._update.load_slot(self.slots, slot, layer, own.size) as load:
                for (expert, index), is_missing, is_stale in zip(
                    each, missing[own], stale[own], strict=True
                ):
                    # the host sends updated weights itself
                    if is_missing and not (is_stale and on_host):
                        assert stores.weights is not None, (layer, expert)
                        with stores.weights.get(index) as record:
                            load.write_weights(expert, record)
                    if is_stale:
                        self._apply_skipped_steps(load, expert, index, now)
            return load.moved

        link = LinkBytes()
        for moved in self._workers.run([partial(load, own) for own in by_device]):
            link = link.plus(moved)
        self.slots.finish_writes(slot)
        for expert in experts[needed].tolist():
            self.slots.set_present(slot, expert, True)
        with self._counters:
            self._link = self._link.plus(link)
        return link.to_device

    # The update

    def _apply_skipped_steps(self, load: SlotLoad, expert: int, index: int, now: int) -> None:
        """Apply the steps that an expert has skipped, up to step `now`, to its records and to the
        slot.

        The slot must hold the expert's weights, unless the host updates.
        """
        stores = self.stores
        steps, pending = self.skipped.skipped_steps_of(index, now)
        # every read that may fail comes before the first change
        with contextlib.ExitStack() as held:
            moments = held.enter_context(stores.moments.get(index, writable=True))
            gradient = held.enter_context(stores.gradients.get(index)) if pending else None
            weights = None
            if stores.weights is not None:
                will_overwrite = not self._update.on_host
                weights = held.enter_context(
                    stores.weights.get(index, writable=True, will_overwrite=will_overwrite)
                )
            missed = self.skipped.missed_windows(steps, pending=pending)
            load.catch_up(expert, ExpertRecords(weights, moments, gradient), missed)
            moments.close_as_changed()
            if weights is not None:
                weights.close_as_changed()
            self.skipped.note_caught_up(index, now)
        if pending:
            stores.gradients.cancel_write_back(index)
        with self._counters:
            self._updates += 1
            self._replayed += len(steps) - pending

    # Gradients

    @_with_permanent_errors
    def store_gradients(
        self, layer: int, chosen_P: NDArray[np.bool_], gradients: Sequence[DeviceStacks]
    ) -> None:
        """Store the gradients of a layer's chosen experts on their tier; return while a thread
        writes them.

        Waits until at most one earlier layer is still being written. gradients: by device, then by
        parameter: [L, ...], or, if the slots hold a part of the experts, [M, ...] of the chosen
        experts in the order of `chosen_slot_rows`.
        """
        chosen_P = chosen_P & self.local.local_mask(layer)
        experts, shares = np.flatnonzero(chosen_P), self.local.chosen_fractions(layer, chosen_P)
        with self._counters:
            self._sum_of_shares += float(shares.sum())
            self._num_shares += shares.size
            self._most_chosen_share = max(self._most_chosen_share, float(np.max(shares)))
        self.skipped.note_gradients(layer, self._record_numbers(layer, experts))
        self._gradients.start_write(layer, experts, gradients)

    @_with_permanent_errors
    def commit_step(self, lr: float, clip: float) -> None:
        """End the step: its stored gradients become pending, and every expert that is not frozen
        falls one step further behind.

        lr, clip: the step's learning rate and the factor of its gradients.
        """
        self._gradients.wait_for_writes()
        used = self.skipped.record_step(lr, clip)
        if used:
            for store in self.stores.present_stores():
                store.count_step(np.concatenate(used))
                store.keep_cached(
                    np.concatenate(used)
                )  # the next step uses most of these records again
            self._ring.reload_slots()

    @_with_permanent_errors
    def abandon_step(self) -> None:
        """End the step without an update: drop the gradients that it stored."""
        self._gradients.wait_for_writes()
        self.skipped.abandon_step()

    @_with_permanent_errors
    def freeze_records(self, records: NDArray[np.int64]) -> None:
        """Apply all pending updates, then exclude these records from later steps; all other records
        take part.
        """
        self.apply_pending_updates()
        self.skipped.freeze_records(records)

    # All experts

    @_with_permanent_errors
    def apply_pending_updates(self, steps_behind_allowed: int = 0) -> None:
        """Bring every local expert that is more than `steps_behind_allowed` steps behind up to the
        present step.
        """
        own, layers = np.array(self.index.local_records), range(self.index.num_layers)
        records_NP = np.stack([self._record_numbers(layer) for layer in layers])
        stale_NP = self.skipped.are_behind(records_NP, self.steps_taken - steps_behind_allowed)
        stale_NP &= np.stack([self.local.local_mask(layer) for layer in layers])
        if np.any(stale_NP):
            self.begin_pass(layers)
            for layer, stale_P in enumerate(stale_NP):
                acquired, slot = self._ring.acquire()
                assert acquired == layer, (acquired, layer)
                self.slots.grow_if_requested(slot)
                for experts in self.slots.groups_that_fit(slot, np.flatnonzero(stale_P)):
                    self._fetch_up_to_date(layer, slot, experts)
                self._ring.release()
        self._ring.wait_for_loads()  # the ring may still prefetch the first layers
        self.skipped.forget_history(own)

    @_with_permanent_errors
    def flush_records(self) -> ReplayState:
        """Write all dirty records to their store; return the optimizer steps that each record still
        lacks.

        Experts more than `MAX_STEPS_BEHIND` steps behind are updated first, which bounds the saved
        history and the later replay. The ring loads nothing until the next pass begins, so the
        records stay unchanged.
        """
        self.apply_pending_updates(MAX_STEPS_BEHIND)
        for store in self.stores.present_stores():
            store.flush()
        return self.skipped.replay_state_of(np.array(self.index.local_records))

    def iterate_weights(self) -> Iterator[Indexed]:
        """Yield (record number, arrays) of every local expert's weights, without applying pending
        updates.
        """
        if self.stores.weights is not None:
            yield from _iterate_records(self.stores.weights)
            return
        self._ring.wait_for_loads()
        for layer, slot in self.slots.layers_and_slots:
            records = self._record_numbers(layer, np.flatnonzero(self.local.local_mask(layer)))
            yield from zip(records.tolist(), self.slots.iterate_weights(slot, layer), strict=True)

    def iterate_moments(self) -> Iterator[Indexed]:
        """Yield (record number, arrays) of every local expert's moments, without applying pending
        updates.
        """
        return _iterate_records(self.stores.moments)

    def stats(self) -> ExpertStats:
        weights = self.stores.weights
        with self._counters:
            return ExpertStats(
                None if weights is None else weights.stats(),
                self.stores.moments.stats(),
                self.stores.gradients.stats(),
                self._updates,
                self._replayed,
                self.waited_s,
                self.step_waited_s,
                self._sum_of_shares / max(self._num_shares, 1),
                self._most_chosen_share,
                1.0
                if self.slots.num_rows is None
                else self.slots.num_rows / self.local.max_experts_per_device,
                self.slots.num_bytes,
                self._link.plus(LinkBytes(from_device=self._gradients.received_bytes)),
            )

    def close(self) -> None:
        """End the threads and close the stores; dirty records are not written."""
        self._ring.close()
        self._gradients.close()
        self._workers.close()
        for store in self.stores.present_stores():
            store.close()


def _interleave_groups(groups: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the entries of all groups: the first of each, then the second of each, and so on."""
    turns = np.concatenate([np.arange(0), *(np.arange(group.size) for group in groups)])
    return np.concatenate([np.arange(0), *groups])[np.argsort(turns, kind="stable")]


def _iterate_records(store: TieredStore) -> Iterator[Indexed]:
    """Yield (record number, arrays without the seal) of every record that the store owns."""
    for index in store.owned:
        with store.get(index) as record:
            yield (
                index,
                {
                    field.name: record[field.name]
                    for field in store.layout.fields
                    if field.name != SEAL
                },
            )
