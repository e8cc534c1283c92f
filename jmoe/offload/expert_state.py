"""Experts in training, streamed over tiers: slots on the device for the layers in use, records
below for the others.

Legend: N MoE layers, E experts of a layer, P of them this process's, L on each of its devices, M
rows of a slot there. Experts are numbered here from 0 to P - 1, the first device's first. Each has
up to three records (`ExpertIndex`): weights, moments, and a gradient that is not applied yet. One
that is fetched is first brought up to the present step (`lazy_adamw.catch_up`).

Where several devices of a process have an expert (replicas of each other, or devices whose tasks
share it) it has its records once. The first of them updates it, the others are sent the weights
(`LocalExperts.places`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.memory.record import Record
from jmoe.memory.record_store import RecordLayout
from jmoe.memory.ring import Ring
from jmoe.memory.saved_records import Indexed
from jmoe.memory.tiered_store import TieredStats, TieredStore
from jmoe.memory.version_store import SEAL
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.lazy_adamw import ReplayState
from jmoe.offload.skipped_steps import SkippedSteps
from jmoe.offload.slot_rows import ChosenRows
from jmoe.offload.training_slots import DeviceStacks, Slot, TrainingSlots

log = logging.getLogger(__name__)

MAX_STEPS_BEHIND = 1024  # of an expert in a checkpoint
Method = TypeVar("Method", bound=Callable[..., Any])
ExpertArrays = dict[str, NDArray[np.float32]]
# layer, experts -> arrays [experts, ...] by name
ReadExperts = Callable[[int, NDArray[np.int64]], ExpertArrays]


@dataclass(frozen=True)
class ExpertStats:
    """Counters since the start. weights: None where they never leave the device.

    updates: experts brought up to date. replayed_steps: steps without a gradient that were replayed
    for them.
    waited_s: of the main thread, for layers, for experts that nobody had foreseen, for gradients to
    be kept.
    chosen_share: of a device's experts of a layer, those that a step's tokens choose, on average;
    most_chosen_share: of the device, layer and step with most of them. room: the share that a slot
    has rows for. slot_bytes: of this process's slots on its devices.
    """

    weights: TieredStats | None
    moments: TieredStats
    gradients: TieredStats
    updates: int
    replayed_steps: int
    waited_s: float
    chosen_share: float
    most_chosen_share: float
    room: float
    slot_bytes: int

    @property
    def stores(self) -> list[TieredStats]:
        return [
            store for store in (self.weights, self.moments, self.gradients) if store is not None
        ]


@dataclass(frozen=True)
class RecordTiers:
    """The three kinds of records. weights: None where they are on the device, in as many slots
    as there are layers.
    """

    weights: TieredStore | None
    moments: TieredStore
    gradients: TieredStore

    def all(self) -> list[TieredStore]:
        return [
            store for store in (self.weights, self.moments, self.gradients) if store is not None
        ]


@dataclass(frozen=True)
class DeviceRoom:
    """The room on a device: slots for so many layers, with rows for so many of its experts each;
    None: for all.
    """

    layers: int
    experts: int | None = None


def record_layouts(
    shapes: Mapping[str, Sequence[int]], gradient_dtype: str
) -> dict[str, RecordLayout]:
    """Return the layouts, by kind, of the records of an expert whose parameters have these
    shapes.
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


def _guarded(method: Method) -> Method:
    """Put `ExpertState.guard` around a method."""

    @wraps(method)
    def run(self: "ExpertState", /, *args: Any, **options: Any) -> Any:
        with self.guard():
            return method(self, *args, **options)

    return cast(Method, run)


class ExpertState:
    """Weights and optimizer state of a process's experts, fetched into slots by a ring over the
    layers.

    For each layer, in the order of `begin`, `fetch` gives the slot's arrays, `fetch_more` gives
    them with more experts in place of those given before, and `release` gives the slot back. The
    ring's thread fetches ahead what the layer's tokens chose last time; a choice that nobody
    foresaw is fetched by `fetch`. `keep` takes a layer's gradients to their tier, on a thread of
    its own; `commit` ends a step, and lets the ring's thread update what is in the slots. Each of
    several processes has a state of its own and knows nothing of the others.

    An error is for good, wherever it came up: every later call raises it, since it is no longer
    known which steps an expert has behind it, or a pass over the layers ended half-way. The last
    checkpoint is not touched by it.

    replay_state: of the records as they are, and of the weights. initial: reads weights for slots
    that are never filled from records. room: grows where a step chooses more experts (`make_room`);
    a slot has it from its next fetch on.
    """

    def __init__(
        self,
        stores: RecordTiers,
        *,
        optimizer: OptimizerConfig,
        index: ExpertIndex,
        shapes: Mapping[str, tuple[int, ...]],
        room: DeviceRoom,
        replay_state: ReplayState,
        initial: ReadExperts | None = None,
        wait_limit_s: float = 600.0,
    ) -> None:
        assert index.local is not None and (room.experts is None or initial is None)
        self.stores, self.shapes, self.index, self.local = stores, dict(shapes), index, index.local
        num_slots = min(room.layers, index.num_layers)
        self.slots = TrainingSlots(self.local, self.shapes, num_slots, room.experts)
        self.skipped = SkippedSteps(replay_state, index.num_records, optimizer)
        self._optimizer = optimizer
        # by a layer's tokens, last time
        self._chosen = np.zeros((index.num_layers, self.local.experts.size), np.bool_)
        self._initial = initial
        self._failed: BaseException | None = None
        self._updates = self._replayed = 0
        # of experts that are chosen
        self._sum_of_shares, self._num_shares, self._most_chosen_share = 0.0, 0, 0.0
        self._waited_s = 0.0
        self._counters = threading.Lock()
        dtype = stores.gradients.layout.fields[0].dtype
        self._no_gradient = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        self._order: tuple[int, ...] = tuple(range(index.num_layers))
        self._fetched = (0, 0)  # the layer that `fetch` gave last, and its slot
        self._writer = ThreadPoolExecutor(1, "gradients")
        self._writing: list[Future[None]] = []
        self._ring = Ring(self._order, num_slots, self._load, wait_limit_s=wait_limit_s)

    @property
    def now(self) -> int:
        """Return the number of steps taken."""
        return self.skipped.now

    def _records(
        self, layer: int, experts: NDArray[np.int64] | slice = slice(None)
    ) -> NDArray[np.int64]:
        return self.index.records(layer, self.local.experts[experts])

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Let an error that leaves this block be raised by every later call, too."""
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except BaseException as error:
            if self._failed is None:
                self._failed = error
            raise

    # A pass over the layers

    @_guarded
    def begin(self, order: Sequence[int]) -> None:
        """Begin a pass over these layers; in the order of last time its first ones are being
        fetched already.
        """
        if tuple(order) != self._order:
            self._order = tuple(order)
            self._ring.restart(order)

    @_guarded
    def stop(self) -> None:
        """End the pass before its last layer."""
        self._ring.restart(self._order)

    @property
    def room(self) -> int | None:
        """Return the experts of a device that a slot has rows for; None: all."""
        return self.slots.room

    @_guarded
    def make_room(self, needed: int) -> None:
        """Let slots have rows for so many experts of a device from their next fetch on, if they
        have fewer.

        Every process has to call this with the same number, since the step's programs are compiled
        for the room.
        """
        self.slots.make_room(needed)

    @_guarded
    def fetch(self, layer: int, chosen_P: NDArray[np.bool_]) -> Slot:
        """Return the weights of the pass's next layer; those chosen are there and up to date."""
        acquired, slot = self._ring.acquire()
        assert acquired == layer, (acquired, layer)
        self._fetched = acquired, slot
        self._chosen[layer] = False
        return self.fetch_more(chosen_P)

    @_guarded
    def fetch_more(self, chosen_P: NDArray[np.bool_]) -> Slot:
        """Return the layer fetched last, not released yet, with more experts that are chosen."""
        layer, slot = self._fetched
        chosen_P = chosen_P & self.local.has(layer)
        self._chosen[layer] |= chosen_P
        begun = time.perf_counter()
        self.slots.fit(slot)
        self._bring(layer, slot, np.flatnonzero(chosen_P))
        self._waited_s += time.perf_counter() - begun
        return self.slots.stacks[slot]

    def chosen_rows(self, chosen_P: NDArray[np.bool_], size: int) -> list[ChosenRows]:
        """Return, by device, which rows of the slot fetched last hold these experts, in arrays
        of `size`.
        """
        return self.slots.chosen_rows(self._fetched[1], chosen_P, size)

    @_guarded
    def release(self) -> None:
        """Give back the layer fetched longest ago, which the device does not read any more
        either.
        """
        self._ring.release()

    @_guarded
    def _load(self, layer: int, slot: int) -> int:
        """Fetch, in the ring's thread, what the layer's tokens chose last; only updates where it
        is there already.
        """
        if not self.slots.holds(slot, layer):
            read = self._initial
            self.slots.assign(
                slot, layer, None if read is None else read(layer, self.local.of_layer(layer))
            )
        self.slots.fit(slot)
        foreseen = np.flatnonzero(self._chosen[layer])
        return self._bring(layer, slot, next(self.slots.waves(slot, foreseen), foreseen))

    def _bring(self, layer: int, slot: int, experts: NDArray[np.int64]) -> int:
        """Put these experts' present weights into the slot, which has room for them; return the
        bytes fetched.
        """
        now, records = self.now, self._records(layer, experts)
        missing, stale = self.slots.take_rows(slot, experts), self.skipped.are_behind(records, now)
        stores, fetched_bytes = self.stores, 0
        if stores.weights is not None:
            stores.weights.prefetch(records[missing])
        stores.moments.prefetch(records[stale])
        stores.gradients.prefetch(records[stale & self.skipped.has_gradient(records)])
        for expert, index, is_missing, is_stale in zip(
            experts.tolist(), records.tolist(), missing, stale, strict=True
        ):
            if is_missing:
                assert stores.weights is not None, (layer, expert)
                with stores.weights.get(index) as record:
                    fetched_bytes += self.slots.place(slot, layer, expert, record)
                self.slots.set_present(slot, expert, True)
            if is_stale:
                fetched_bytes += self._catch_up(slot, expert, index, now)
        return fetched_bytes

    # The update

    def _catch_up(self, slot: int, expert: int, index: int, now: int) -> int:
        """Bring a record whose weights are in the slot up to step `now`; return the bytes
        fetched.
        """
        stores, names = self.stores, self.shapes
        steps, pending = self.skipped.steps_of(index, now)
        # all that may fail to come comes before anything changes
        with contextlib.ExitStack() as held:
            places = self.slots.places(slot, self.index.locate(index)[0], expert)
            device = self.slots.devices[places[0][0]]
            moments = held.enter_context(stores.moments.get(index, writable=True))
            fetched_bytes = moments.data_R.nbytes
            g: Mapping[str, NDArray[Any] | jax.Array] = self._no_gradient
            if pending:
                gradient = held.enter_context(stores.gradients.get(index))
                g = gradient.on_device(names, device)
                fetched_bytes += gradient.data_R.nbytes
            weights: Record | None = None
            if stores.weights is not None:
                weights = held.enter_context(stores.weights.get(index, writable=True, empty=True))
            self.slots.set_present(slot, expert, False)  # until slot and records agree again
            both = moments.on_device([f"{part}.{name}" for part in "mv" for name in names], device)
            m, v = ({name: both[f"{part}.{name}"] for name in names} for part in "mv")
            missed = self.skipped.windows(steps, pending=pending)
            w, m, v = self.slots.update(slot, places, (m, v), g, missed, self._optimizer)
            for name in names:
                np.copyto(moments[f"m.{name}"], m[name])
                np.copyto(moments[f"v.{name}"], v[name])
                if weights is not None:
                    np.copyto(weights[name], w[name])
            moments.put()
            if weights is not None:
                weights.put()
            self.skipped.note_caught_up(index, now)
            self.slots.set_present(slot, expert, True)
        if pending:
            stores.gradients.forget(index)
        with self._counters:
            self._updates += 1
            self._replayed += len(steps) - pending
        return fetched_bytes

    # Gradients

    @_guarded
    def keep(
        self, layer: int, chosen_P: NDArray[np.bool_], gradients: Sequence[DeviceStacks]
    ) -> None:
        """Take the gradients, by device, of a layer's chosen experts to their tier; return while
        they are written.

        gradients: by expert, or, with room for some, of those chosen, in the order of
        `chosen_rows`.
        """
        chosen_P = chosen_P & self.local.has(layer)
        experts, shares = np.flatnonzero(chosen_P), self.local.chosen_shares(layer, chosen_P)
        with self._counters:
            self._sum_of_shares += float(shares.sum())
            self._num_shares += shares.size
            self._most_chosen_share = max(self._most_chosen_share, float(np.max(shares)))
        self.skipped.note_gradients(layer, self._records(layer, experts))
        self._wait_for_writer(pending=1)
        self._writing.append(self._writer.submit(self._write_gradients, layer, experts, gradients))

    @_guarded
    def _write_gradients(
        self, layer: int, experts: NDArray[np.int64], gradients: Sequence[DeviceStacks]
    ) -> None:
        firsts = [self.local.places(layer, expert)[0] for expert in experts.tolist()]
        if self.slots.room is not None:  # [M, ...] in ascending order
            devices = np.array([d for d, _ in firsts])
            rows = np.arange(devices.size) - np.searchsorted(devices, devices)
            firsts = list(zip(devices.tolist(), rows.tolist(), strict=True))
        on_host = {
            d: {name: np.asarray(g) for name, g in gradients[d].items()}
            for d in {d for d, _ in firsts}
        }
        for (d, row), index in zip(firsts, self._records(layer, experts).tolist(), strict=True):
            with self.stores.gradients.get(index, writable=True, empty=True) as record:
                for name in self.shapes:
                    np.copyto(record[name], on_host[d][name][row])
                record.put()

    def _wait_for_writer(self, pending: int) -> None:
        begun = time.perf_counter()
        while len(self._writing) > pending:
            self._writing.pop(0).result()
        self._waited_s += time.perf_counter() - begun

    @_guarded
    def commit(self, lr: float, clip: float) -> None:
        """Take the step: the gradients kept are its own, and every expert is one step behind."""
        self._wait_for_writer(pending=0)
        used = self.skipped.commit(lr, clip)
        if used:
            for store in self.stores.all():
                store.touch(np.concatenate(used))
                store.expect(np.concatenate(used))  # most of it is used in the next step too
            self._ring.reload()

    @_guarded
    def abandon(self) -> None:
        """Do not take the step: its gradients are forgotten."""
        self._wait_for_writer(pending=0)
        self.skipped.abandon()

    @_guarded
    def freeze(self, records: NDArray[np.int64]) -> None:
        """Keep these experts from now on as they are after the last step; the others are not
        kept any more.
        """
        self.flush_updates()
        self.skipped.freeze(records)

    # Everything at once

    @_guarded
    def flush_updates(self, most_behind: int = 0) -> None:
        """Bring every expert that is more steps behind up to the present one."""
        own, layers = np.array(self.index.local_records), range(self.index.num_layers)
        records_NP = np.stack([self._records(layer) for layer in layers])
        stale_NP = self.skipped.are_behind(records_NP, self.now - most_behind)
        stale_NP &= np.stack([self.local.has(layer) for layer in layers])
        if np.any(stale_NP):
            self.begin(layers)
            for layer, stale_P in enumerate(stale_NP):
                acquired, slot = self._ring.acquire()
                assert acquired == layer, (acquired, layer)
                self.slots.fit(slot)
                for experts in self.slots.waves(slot, np.flatnonzero(stale_P)):
                    self._bring(layer, slot, experts)
                self._ring.release()
        self._ring.wait()  # for the layers that it fetches ahead
        self.skipped.forget_history(own)

    @_guarded
    def save(self) -> ReplayState:
        """Write back what has changed since it was last written; return how far the records are
        behind.

        Nothing moves until the next pass begins. Experts without a token for `MAX_STEPS_BEHIND`
        steps are brought up to date, so that neither the history nor what is to be replayed grows
        without end.
        """
        self.flush_updates(MAX_STEPS_BEHIND)
        for store in self.stores.all():
            store.flush()
        return self.skipped.state(np.array(self.index.local_records))

    def each_weights(self) -> Iterator[Indexed]:
        """Give the records of all experts' weights, one after the other, as they stand."""
        if self.stores.weights is not None:
            yield from _each(self.stores.weights)
            return
        self._ring.wait()
        for layer, slot in self.slots.layers:
            records = self._records(layer, np.flatnonzero(self.local.has(layer)))
            yield from zip(records.tolist(), self.slots.each_weights(slot, layer), strict=True)

    def each_moments(self) -> Iterator[Indexed]:
        """Give the records of all experts' moments, one after the other, as they stand."""
        return _each(self.stores.moments)

    @_guarded
    def weights(self) -> ExpertArrays:
        """Return [N, P, ...] of all experts, as they stand; zeros for experts this process does
        not own.
        """
        return self._stacked(self.each_weights(), "")

    @_guarded
    def moments(self, part: str) -> ExpertArrays:
        """Return [N, P, ...] of all experts' first ("m") or second ("v") moments, as they stand."""
        return self._stacked(self.each_moments(), f"{part}.")

    def _stacked(self, records: Iterable[Indexed], prefix: str) -> ExpertArrays:
        rows = (self.index.num_layers, self.local.experts.size)
        stacked = {
            name: np.zeros((*rows, *shape), np.float32) for name, shape in self.shapes.items()
        }
        for index, arrays in records:
            layer, expert = self.index.locate(index)
            for name, w in stacked.items():
                w[layer, np.searchsorted(self.local.experts, expert)] = arrays[f"{prefix}{name}"]
        return stacked

    def stats(self) -> ExpertStats:
        weights = self.stores.weights
        with self._counters:
            return ExpertStats(
                None if weights is None else weights.stats(),
                self.stores.moments.stats(),
                self.stores.gradients.stats(),
                self._updates,
                self._replayed,
                self._ring.stats().waited_s + self._waited_s,
                self._sum_of_shares / max(self._num_shares, 1),
                self._most_chosen_share,
                1.0 if self.slots.room is None else self.slots.room / self.local.per_device,
                self.slots.num_bytes,
            )

    def close(self) -> None:
        """End the threads and close the stores; what is dirty is not written."""
        self._ring.close()
        self._writer.shutdown()
        for store in self.stores.all():
            store.close()


def _each(store: TieredStore) -> Iterator[Indexed]:
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
