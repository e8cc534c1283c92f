"""Experts in training, streamed over tiers: slots on the device for the layers in use, records below for the others.

Legend: N MoE layers, E experts of a layer, P of them this process's, L on each of its devices, M rows of a slot there.
Experts are numbered here from 0 to P - 1, the first device's first. Each has up to three records (`ExpertIndex`):
weights, moments, and a gradient that is not applied yet. One that is fetched is first brought up to the present step
(`lazy_adamw.catch_up`).

Where several devices of a process have an expert (replicas of each other, or devices whose tasks share it) it has its
records once. The first of them updates it, the others are sent the weights (`LocalExperts.places`).
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.memory.record import Record
from jmoe.memory.record_store import RecordLayout
from jmoe.memory.ring import Ring
from jmoe.memory.saved_records import Indexed
from jmoe.memory.tiered_store import TieredStats, TieredStore
from jmoe.memory.version_store import SEAL
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.lazy_adamw import MissedSteps, ReplayState, catch_up, constants
from jmoe.offload.slot_rows import ChosenRows, SlotRows, larger_room

log = logging.getLogger(__name__)

MAX_STEPS_BEHIND = 1024  # of an expert in a checkpoint
Method = TypeVar("Method", bound=Callable[..., Any])
ExpertArrays = dict[str, NDArray[np.float32]]
ReadExperts = Callable[[int, NDArray[np.int64]], ExpertArrays]  # layer, experts -> arrays [experts, ...] by name
DeviceStacks = dict[str, jax.Array]  # [L, ...] each, on one device; [M, ...] with room for a part of the experts
Slot = list[DeviceStacks]  # of each of this process's devices


@dataclass(frozen=True)
class ExpertStats:
    """Counters since the start. weights: None where they never leave the device.

    updates: experts brought up to date. replayed_steps: steps without a gradient that were replayed for them.
    waited_s: of the main thread, for layers, for experts that nobody had foreseen, for gradients to be kept.
    chosen_share: of a device's experts of a layer, those that a step's tokens choose, on average; most_chosen_share: of
    the device, layer and step with most of them. room: the share that a slot has rows for. slot_bytes: of this
    process's slots on its devices.
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
        return [store for store in (self.weights, self.moments, self.gradients) if store is not None]


@dataclass(frozen=True)
class RecordTiers:
    """The three kinds of records. weights: None where they are on the device, in as many slots as there are layers."""

    weights: TieredStore | None
    moments: TieredStore
    gradients: TieredStore

    def all(self) -> list[TieredStore]:
        return [store for store in (self.weights, self.moments, self.gradients) if store is not None]


@dataclass(frozen=True)
class DeviceRoom:
    """The room on a device: slots for so many layers, with rows for so many of its experts each; None: for all."""

    layers: int
    experts: int | None = None


def record_layouts(shapes: Mapping[str, Sequence[int]], gradient_dtype: str) -> dict[str, RecordLayout]:
    """Return the layouts, by kind, of the records of an expert whose parameters have these shapes."""
    return {
        "weights": RecordLayout.from_arrays({name: (shape, np.float32) for name, shape in shapes.items()}),
        "moments": RecordLayout.from_arrays(
            {f"{p}.{name}": (shape, np.float32) for p in "mv" for name, shape in shapes.items()}
        ),
        "gradients": RecordLayout.from_arrays(
            {name: (shape, jnp.dtype(gradient_dtype)) for name, shape in shapes.items()}
        ),
    }


@partial(jax.jit, donate_argnums=0)
def _place(stacks: DeviceStacks, row: jax.Array, weights: Mapping[str, jax.Array]) -> DeviceStacks:
    return {name: lax.dynamic_update_index_in_dim(w, weights[name], row, 0) for name, w in stacks.items()}


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(
    config: OptimizerConfig,
    stacks: DeviceStacks,
    row: jax.Array,
    m: Mapping[str, jax.Array],
    v: Mapping[str, jax.Array],
    g: Mapping[str, jax.Array],
    missed: MissedSteps,
) -> tuple[DeviceStacks, dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Run `catch_up` for one row of a slot; return (slot, w, m, v)."""
    w = {name: lax.dynamic_index_in_dim(stack, row, 0, keepdims=False) for name, stack in stacks.items()}
    w, m, v = catch_up(w, m, v, g, missed, config=config)
    stacks = {name: lax.dynamic_update_index_in_dim(stack, w[name], row, 0) for name, stack in stacks.items()}
    return stacks, w, m, v


def _guarded(method: Method) -> Method:
    """Put `ExpertState.guard` around a method."""

    @wraps(method)
    def run(self: "ExpertState", /, *args: Any, **options: Any) -> Any:
        with self.guard():
            return method(self, *args, **options)

    return cast(Method, run)


class ExpertState:
    """Weights and optimizer state of a process's experts, fetched into slots by a ring over the layers.

    For each layer, in the order of `begin`, `fetch` gives the slot's arrays, `fetch_more` gives them with more
    experts in place of those given before, and `release` gives the slot back. The ring's thread fetches ahead what
    the layer's tokens chose last time; a choice that nobody foresaw is fetched by `fetch`. `keep` takes a layer's
    gradients to their tier, on a thread of its own; `commit` ends a step, and lets the ring's thread update what is in
    the slots. Each of several processes has a state of its own and knows nothing of the others.

    An error is for good, wherever it came up: every later call raises it, since it is no longer known which steps an
    expert has behind it, or a pass over the layers ended half-way. The last checkpoint is not touched by it.

    replay_state: of the records as they are, and of the weights. initial: reads weights for slots that are never filled
    from records. room: grows where a step chooses more experts (`make_room`); a slot has it from its next fetch on.
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
        num_local = self.local.experts.size
        self.now, self._history = replay_state.step, replay_state.history  # steps taken
        self._applied = np.full(index.num_records, self.now, np.int64)  # steps that a record has behind it
        self._applied[list(replay_state.applied)] = list(replay_state.applied.values())
        self._pending = np.zeros(index.num_records, np.bool_)  # whether the gradient of step `_applied` waits
        self._pending[list(replay_state.pending)] = True
        self._gradient_dtype = replay_state.gradient_dtype
        self._chosen = np.zeros((index.num_layers, num_local), np.bool_)  # by the layer's tokens, last time
        self._frozen = np.zeros(index.num_records, np.bool_)  # experts that stay as they are
        self._kept: dict[int, NDArray[np.int64]] = {}  # layer -> experts whose gradients this step keeps
        self._initial = initial
        self._failed: BaseException | None = None
        self._updates = self._replayed = 0
        self._sum_of_shares, self._num_shares, self._most_chosen_share = 0.0, 0, 0.0  # of experts that are chosen
        self._waited_s = 0.0
        self._counters = threading.Lock()
        self._optimizer = optimizer
        dtype = stores.gradients.layout.fields[0].dtype
        self._no_gradient = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        num_slots = min(room.layers, index.num_layers)
        self._devices = self.local.all_devices
        self._room = room.experts
        self._rows = [SlotRows(self.local, room.experts) for _ in range(num_slots)]
        self._slots = [self._empty(room.experts) for _ in range(num_slots)]
        self._present = [np.zeros(num_local, np.bool_) for _ in self._slots]  # experts whose weights are in the slot
        self._layer_in: list[int | None] = [None for _ in self._slots]
        self._order: tuple[int, ...] = tuple(range(index.num_layers))
        self._fetched = (0, 0)  # the layer that `fetch` gave last, and its slot
        self._writer = ThreadPoolExecutor(1, "gradients")
        self._writing: list[Future[None]] = []
        self._ring = Ring(self._order, num_slots, self._load, wait_limit_s=wait_limit_s)

    @property
    def _slot_bytes(self) -> int:
        expert_bytes = sum(4 * math.prod(shape) for shape in self.shapes.values())
        rows = sum(self.local.per_device if slot.room is None else slot.room for slot in self._rows)
        return rows * len(self._devices) * expert_bytes

    def _empty(self, room: int | None) -> Slot:
        rows = self.local.per_device if room is None else room
        return [
            {name: jnp.zeros((rows, *shape), jnp.float32, device=device) for name, shape in self.shapes.items()}
            for device in self._devices
        ]

    def _records(self, layer: int, experts: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.int64]:
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
        """Begin a pass over these layers; in the order of last time its first ones are being fetched already."""
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
        return self._room

    @_guarded
    def make_room(self, needed: int) -> None:
        """Let slots have rows for so many experts of a device from their next fetch on, if they have fewer.

        Every process has to call this with the same number, since the step's programs are compiled for the room.
        """
        per_device = self.local.per_device
        if self._room is None or needed <= self._room:
            return
        self._room = larger_room(self._room, needed, per_device)
        log.warning(
            "tiers.device_experts is too small: a layer's tokens chose %d of a device's %d experts; there is room for "
            "%d from now on, and the step is compiled anew",
            *(needed, per_device, self._room),
        )

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
        self._fit(slot)
        self._bring(layer, slot, np.flatnonzero(chosen_P))
        self._waited_s += time.perf_counter() - begun
        return self._slots[slot]

    def chosen_rows(self, chosen_P: NDArray[np.bool_], size: int) -> list[ChosenRows]:
        """Return, by device, which rows of the slot fetched last hold these experts, in arrays of `size`."""
        parts = self._rows[self._fetched[1]].chosen(chosen_P, size)
        return [part for part, replicas in zip(parts, self.local.devices, strict=True) for _ in replicas]

    @_guarded
    def release(self) -> None:
        """Give back the layer fetched longest ago, which the device does not read any more either."""
        self._ring.release()

    @_guarded
    def _load(self, layer: int, slot: int) -> int:
        """Fetch, in the ring's thread, what the layer's tokens chose last; only updates where it is there already."""
        if self._layer_in[slot] != layer:
            self._present[slot][:] = False
            if self._initial is not None:
                stacks = self.local.arranged(layer, self._initial(layer, self.local.of_layer(layer)))
                self._slots[slot] = [
                    {name: jnp.array(w, device=device) for name, w in own.items()}
                    for own, device in zip(stacks, self._devices, strict=True)
                ]
                self._present[slot][:] = True
            self._layer_in[slot] = layer
        self._fit(slot)
        foreseen = np.flatnonzero(self._chosen[layer])
        return self._bring(layer, slot, next(self._rows[slot].waves(foreseen), foreseen))

    def _fit(self, slot: int) -> None:
        """Empty a slot that has not the room that slots now have."""
        room = self._room
        if self._rows[slot].room != room:
            self._slots[slot] = []  # free before the new one is there
            self._rows[slot], self._slots[slot] = SlotRows(self.local, room), self._empty(room)
            self._present[slot][:] = False

    def _bring(self, layer: int, slot: int, experts: NDArray[np.int64]) -> int:
        """Put these experts' present weights into the slot, which has room for them; return the bytes fetched."""
        now, records = self.now, self._records(layer, experts)
        self._present[slot][self._rows[slot].take(experts)] = False
        missing, stale = ~self._present[slot][experts], self._applied[records] < now
        stores, fetched_bytes = self.stores, 0
        if stores.weights is not None:
            stores.weights.prefetch(records[missing])
        stores.moments.prefetch(records[stale])
        stores.gradients.prefetch(records[stale & self._pending[records]])
        for expert, index, is_missing, is_stale in zip(experts.tolist(), records.tolist(), missing, stale, strict=True):
            if is_missing:
                assert stores.weights is not None, (layer, expert)
                with stores.weights.get(index) as record:
                    stacks, places = self._slots[slot], self._rows[slot].places(layer, expert)
                    for d, row in places:
                        stacks[d] = _place(stacks[d], np.int32(row), record.on_device(self.shapes, self._devices[d]))
                    jax.block_until_ready([stacks[d] for d, _ in places])
                    fetched_bytes += record.data_R.nbytes * len(places)
                self._present[slot][expert] = True
            if is_stale:
                fetched_bytes += self._catch_up(slot, expert, index, now)
        return fetched_bytes

    # The update

    def _catch_up(self, slot: int, expert: int, index: int, now: int) -> int:
        """Bring a record whose weights are in the slot up to step `now`; return the bytes fetched."""
        stores, names = self.stores, self.shapes
        start, pending = int(self._applied[index]), bool(self._pending[index])
        with contextlib.ExitStack() as held:  # all that may fail to come comes before anything changes
            places = self._rows[slot].places(self.index.locate(index)[0], expert)
            device = self._devices[places[0][0]]
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
            self._present[slot][expert] = False  # until slot and records agree again
            both = moments.on_device([f"{part}.{name}" for part in "mv" for name in names], device)
            m, v = ({name: both[f"{part}.{name}"] for name in names} for part in "mv")
            w, m, v = self._run_update(slot, places, (m, v, g), range(start, now), pending=pending)
            for name in names:
                np.copyto(moments[f"m.{name}"], m[name])
                np.copyto(moments[f"v.{name}"], v[name])
                if weights is not None:
                    np.copyto(weights[name], w[name])
            moments.put()
            if weights is not None:
                weights.put()
            self._applied[index], self._pending[index] = now, False
            self._present[slot][expert] = True
        if pending:
            stores.gradients.forget(index)
        with self._counters:
            self._updates += 1
            self._replayed += now - start - pending
        return fetched_bytes

    def _run_update(
        self, slot: int, places: Sequence[tuple[int, int]], m_v_g: Any, steps: range, *, pending: bool
    ) -> tuple[Any, Any, Any]:
        """Return (w, m, v) after these steps, in the first device's memory; the slot has w too, in all its places."""
        w: Any = None
        m, v, g = m_v_g
        stacks, (first, first_row) = self._slots[slot], places[0]
        for window in self._history.windows(steps, pending=pending):
            stacks[first], w, m, v = _update(self._optimizer, stacks[first], np.int32(first_row), m, v, g, window)
        for d, row in places[1:]:
            sent = jax.device_put(w, self._devices[d])
            stacks[d] = jax.block_until_ready(_place(stacks[d], np.int32(row), sent))
        return jax.block_until_ready((w, m, v))

    # Gradients

    @_guarded
    def keep(self, layer: int, chosen_P: NDArray[np.bool_], gradients: Sequence[DeviceStacks]) -> None:
        """Take the gradients, by device, of a layer's chosen experts to their tier; return while they are written.

        gradients: by expert, or, with room for some, of those chosen, in the order of `chosen_rows`.
        """
        chosen_P = chosen_P & self.local.has(layer)
        experts, shares = np.flatnonzero(chosen_P), self.local.chosen_shares(layer, chosen_P)
        with self._counters:
            self._sum_of_shares += float(shares.sum())
            self._num_shares += shares.size
            self._most_chosen_share = max(self._most_chosen_share, float(np.max(shares)))
        self._kept[layer] = experts
        self._wait_for_writer(pending=1)
        self._writing.append(self._writer.submit(self._write_gradients, layer, experts, gradients))

    @_guarded
    def _write_gradients(self, layer: int, experts: NDArray[np.int64], gradients: Sequence[DeviceStacks]) -> None:
        firsts = [self.local.places(layer, expert)[0] for expert in experts.tolist()]
        if self._room is not None:  # [M, ...] in ascending order
            devices = np.array([d for d, _ in firsts])
            rows = np.arange(devices.size) - np.searchsorted(devices, devices)
            firsts = list(zip(devices.tolist(), rows.tolist(), strict=True))
        on_host = {d: {name: np.asarray(g) for name, g in gradients[d].items()} for d in {d for d, _ in firsts}}
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
        used = [self._records(layer, experts) for layer, experts in self._kept.items()]
        for records in used:
            self._pending[records] = True
        self._kept.clear()
        self._history.add(lr, clip)
        self.now += 1
        self._applied[self._frozen] = self.now
        if used:
            for store in self.stores.all():
                store.touch(np.concatenate(used))
                store.expect(np.concatenate(used))  # most of it is used in the next step too
            self._ring.reload()

    @_guarded
    def abandon(self) -> None:
        """Do not take the step: its gradients are forgotten."""
        self._wait_for_writer(pending=0)
        self._kept.clear()

    @_guarded
    def freeze(self, records: NDArray[np.int64]) -> None:
        """Keep these experts from now on as they are after the last step; the others are not kept any more."""
        self.flush_updates()
        self._frozen[:] = False
        self._frozen[records] = True

    # Everything at once

    @_guarded
    def flush_updates(self, most_behind: int = 0) -> None:
        """Bring every expert that is more steps behind up to the present one."""
        own, layers = np.array(self.index.local_records), range(self.index.num_layers)
        records_NP = np.stack([self._records(layer) for layer in layers])
        stale_NP = self.now - self._applied[records_NP] > most_behind
        stale_NP &= np.stack([self.local.has(layer) for layer in layers])
        if np.any(stale_NP):
            self.begin(layers)
            for layer, stale_P in enumerate(stale_NP):
                acquired, slot = self._ring.acquire()
                assert acquired == layer, (acquired, layer)
                self._fit(slot)
                for experts in self._rows[slot].waves(np.flatnonzero(stale_P)):
                    self._bring(layer, slot, experts)
                self._ring.release()
        self._ring.wait()  # for the layers that it fetches ahead
        self._history.forget_before(int(np.min(self._applied[own])))

    @_guarded
    def save(self) -> ReplayState:
        """Write back what has changed since it was last written; return how far the records are behind.

        Nothing moves until the next pass begins. Experts without a token for `MAX_STEPS_BEHIND` steps are brought up
        to date, so that neither the history nor what is to be replayed grows without end.
        """
        self.flush_updates(MAX_STEPS_BEHIND)
        for store in self.stores.all():
            store.flush()
        own = np.array(self.index.local_records)
        behind, pending = own[self._applied[own] < self.now].tolist(), own[self._pending[own]].tolist()
        return ReplayState(
            step=self.now,
            history=self._history.copy(),
            applied={index: int(self._applied[index]) for index in behind},
            pending=frozenset(pending),
            optimizer=constants(self._optimizer),
            gradient_dtype=self._gradient_dtype,
        )

    def each_weights(self) -> Iterator[Indexed]:
        """Give the records of all experts' weights, one after the other, as they stand."""
        if self.stores.weights is not None:
            yield from _each(self.stores.weights)
            return
        self._ring.wait()
        for layer, slot in sorted((layer, slot) for slot, layer in enumerate(self._layer_in) if layer is not None):
            experts = np.flatnonzero(self.local.has(layer))
            firsts = [self.local.places(layer, expert)[0] for expert in experts.tolist()]
            stacks = self._slots[slot]
            on_host = {d: {name: np.asarray(w) for name, w in stacks[d].items()} for d in {d for d, _ in firsts}}
            for (d, row), index in zip(firsts, self._records(layer, experts).tolist(), strict=True):
                yield index, {name: w[row] for name, w in on_host[d].items()}

    def each_moments(self) -> Iterator[Indexed]:
        """Give the records of all experts' moments, one after the other, as they stand."""
        return _each(self.stores.moments)

    @_guarded
    def weights(self) -> ExpertArrays:
        """Return [N, P, ...] of all experts, as they stand; 0 where this process has one not."""
        return self._stacked(self.each_weights(), "")

    @_guarded
    def moments(self, part: str) -> ExpertArrays:
        """Return [N, P, ...] of all experts' first ("m") or second ("v") moments, as they stand."""
        return self._stacked(self.each_moments(), f"{part}.")

    def _stacked(self, records: Iterable[Indexed], prefix: str) -> ExpertArrays:
        rows = (self.index.num_layers, self.local.experts.size)
        stacked = {name: np.zeros((*rows, *shape), np.float32) for name, shape in self.shapes.items()}
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
                1.0 if self._room is None else self._room / self.local.per_device,
                self._slot_bytes,
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
            yield index, {field.name: record[field.name] for field in store.layout.fields if field.name != SEAL}
