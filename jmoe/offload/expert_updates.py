"""Where AdamW updates an offloaded expert: on its device (`DeviceUpdate`) or on the host's cores
(`HostUpdate`).

`expert_state.py` decides which expert takes which steps, and opens its records. On the device the
float32 weights and moments travel there and back. On the host they stay, and only weights in the
dtype of the products go to the device. Both ways give the same bits on a CPU.

Legend:
  W  steps of one call
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import OptimizerConfig, check
from jmoe.memory.buffers import Allocate, allocate_slots
from jmoe.memory.link import Link
from jmoe.memory.record_handle import Record
from jmoe.offload.lazy_adamw import NO_GRADIENT, MissedSteps, Params, catch_up_arrays
from jmoe.offload.training_slots import Moments, SlotPlace, TrainingSlots
from jmoe.offload.weight_staging import ExpertGroup, StagedGroups, Transfer
from jmoe.status import status
from kernels_pallas import native

BFLOAT16 = np.dtype(jnp.bfloat16)

log = logging.getLogger(__name__)


class ExpertRecords(NamedTuple):
    """The open records of one expert.

    weights: None if the weights stay on the device. gradient: None if no gradient waits.
    """

    weights: Record | None
    moments: Record
    gradient: Record | None


class LinkBytes(NamedTuple):
    """Bytes moved between host and devices."""

    to_device: int = 0
    from_device: int = 0

    def plus(self, other: "LinkBytes") -> "LinkBytes":
        """Return the sums of both."""
        return LinkBytes(self[0] + other[0], self[1] + other[1])


class SlotLoad(Protocol):
    """Brings experts of a slot up to date, all held by the same devices.

    moved: bytes so far.
    """

    moved: LinkBytes

    def write_weights(self, expert: int, weights: Record) -> None:
        """Copy an up-to-date record of weights to the slot."""

    def catch_up(self, expert: int, records: ExpertRecords, missed: Iterable[MissedSteps]) -> None:
        """Apply the missed steps to the records and to the slot; the first missed step takes the
        gradient.
        """


class ExpertUpdate(Protocol):
    """Moves experts' weights to their slots, and applies missed AdamW steps to experts."""

    optimizer: OptimizerConfig
    on_host: bool  # whether `catch_up` reads the weights' record, not the slot
    slot_dtypes: Mapping[str, np.dtype]  # of the weights in the slots, by parameter

    def load_slot(
        self, slots: TrainingSlots, slot: int, layer: int, num_experts: int
    ) -> AbstractContextManager[SlotLoad]:
        """Return a context in which exactly `num_experts` experts of a layer reach a slot; its
        end waits until their transfers have ended.
        """


class DeviceUpdate:
    """AdamW on the device: float32 weights, moments and gradient go there; weights and moments
    return.
    """

    on_host = False

    def __init__(
        self, optimizer: OptimizerConfig, shapes: Mapping[str, tuple[int, ...]], gradient_dtype: str
    ) -> None:
        self.optimizer = optimizer
        self.slot_dtypes: Mapping[str, np.dtype] = dict.fromkeys(shapes, np.dtype(np.float32))
        dtype = jnp.dtype(gradient_dtype)
        self.no_gradient = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}

    def load_slot(
        self, slots: TrainingSlots, slot: int, layer: int, num_experts: int
    ) -> AbstractContextManager[SlotLoad]:
        return contextlib.nullcontext(_DeviceLoad(self, slots, slot, layer))


class _DeviceLoad:
    """The `SlotLoad` of `DeviceUpdate`."""

    def __init__(self, update: DeviceUpdate, slots: TrainingSlots, slot: int, layer: int) -> None:
        self._update, self._slots, self._slot, self._layer = update, slots, slot, layer
        self.moved = LinkBytes()

    def write_weights(self, expert: int, weights: Record) -> None:
        place = SlotPlace(self._slot, self._layer, expert)
        self.moved = self.moved.plus(LinkBytes(self._slots.write_weights(place, weights)))

    def catch_up(self, expert: int, records: ExpertRecords, missed: Iterable[MissedSteps]) -> None:
        slots, place = self._slots, SlotPlace(self._slot, self._layer, expert)
        names, (weights, moments, gradient) = list(slots.shapes), records
        device = slots.first_device(place)
        both = moments.copy_to_device([f"{part}.{name}" for part in "mv" for name in names], device)
        m, v = ({name: both[f"{part}.{name}"] for name in names} for part in "mv")
        g: Moments = self._update.no_gradient
        if gradient is not None:
            g = gradient.copy_to_device(names, device)
        w, m, v = slots.catch_up_expert(place, (m, v), g, missed, self._update.optimizer)
        for name in names:
            np.copyto(moments[f"m.{name}"], m[name])
            np.copyto(moments[f"v.{name}"], v[name])
            if weights is not None:
                np.copyto(weights[name], w[name])
        returned = [m, v] if weights is None else [w, m, v]
        self.moved = self.moved.plus(LinkBytes(_num_bytes(both, g), _num_bytes(*returned)))


class HostUpdate:
    """AdamW on the host's cores, in the records themselves; the updated weights go to the slot in
    the dtype of the products, in groups.

    slot_dtypes: dtype of each parameter in the products. devices: those of this process. is_native:
    whether the native operation updates, not XLA:CPU; both give the same bits. allocate: a
    function that returns the allocator of the memory from which a device gets its weights. links:
    count the transfers to each device.

    Raises `ValueError` if JAX has no CPU backend.
    """

    on_host = True

    def __init__(
        self,
        optimizer: OptimizerConfig,
        shapes: Mapping[str, tuple[int, ...]],
        slot_dtypes: Mapping[str, np.dtype],
        devices: Sequence[jax.Device],
        *,
        is_native: bool,
        allocate: Callable[[jax.Device], Allocate] = lambda device: allocate_slots,
    ) -> None:
        self.optimizer = optimizer
        self.slot_dtypes: Mapping[str, np.dtype] = dict(slot_dtypes)
        self._names, self._is_native, self._cpu = list(shapes), is_native, _cpu_device()
        self._settings = native.AdamWSettings(
            optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.weight_decay
        )
        # parameters whose copies for the slot the native operation writes
        self._natively_rounded = {
            name for name, dtype in slot_dtypes.items() if is_native and dtype == BFLOAT16
        }
        self.links = {device: Link() for device in devices}
        fields = {name: (shape, slot_dtypes[name]) for name, shape in shapes.items()}
        self.staging = {
            device: StagedGroups(fields, allocate(device), self.links) for device in devices
        }

    @contextlib.contextmanager
    def load_slot(
        self, slots: TrainingSlots, slot: int, layer: int, num_experts: int
    ) -> Iterator[SlotLoad]:
        with contextlib.ExitStack() as held:
            load = _HostLoad(self, slots, slot, layer, num_experts, held)
            yield load
            load.wait_for_transfers()

    def write_copies(self, w: Mapping[str, np.ndarray], copies: Mapping[str, np.ndarray]) -> None:
        """Write the weights to these arrays, in the arrays' dtypes."""
        rounded = self._natively_rounded & copies.keys()
        for name in copies.keys() - rounded:
            np.copyto(copies[name], w[name], casting="same_kind")
        if rounded:
            native.round_to_bfloat16([(w[name], copies[name]) for name in rounded])

    def apply_steps(
        self,
        records: ExpertRecords,
        missed: Iterable[MissedSteps],
        copies: Mapping[str, np.ndarray],
    ) -> None:
        """Apply the missed steps to the records, and write the updated weights to `copies`."""
        weights, moments, gradient = records
        assert weights is not None
        w = {name: weights[name] for name in self._names}
        m, v = ({n: moments[f"{part}.{n}"] for n in self._names} for part in "mv")
        g = None if gradient is None else {name: gradient[name] for name in self._names}
        for window in missed:
            if self._is_native:
                self._apply_natively((w, m, v), g, window, copies)
            else:
                self._apply_by_xla((w, m, v), g, window)
        self.write_copies(w, {n: c for n, c in copies.items() if n not in self._natively_rounded})

    def _apply_natively(
        self,
        state: tuple[Params, Params, Params],
        g: Params | None,
        window: MissedSteps,
        copies: Mapping[str, np.ndarray],
    ) -> None:
        """Apply one window of steps to (w, m, v), and write the copies in bfloat16."""
        w, m, v = state
        count, first, gradient_at = (
            int(np.asarray(n)) for n in (window.num_steps, window.step, window.gradient_at)
        )
        with jax.default_device(self._cpu):
            factors_W2 = np.array(
                [_bias_corrections(self.optimizer, t) for t in range(first, first + count)],
                np.float32,
            )
        lr_W, clip = np.asarray(window.lr_W)[:count], float(np.asarray(window.clip))
        steps = native.HostAdamWSteps(lr_W, factors_W2[:, 0], factors_W2[:, 1], clip)
        if gradient_at == NO_GRADIENT:
            g = None
        parameters = [
            native.HostParameter(
                *(w[n], m[n], v[n], None if g is None else g[n]),
                copy=copies[n] if n in self._natively_rounded else None,
                decay=w[n].ndim >= 2,
            )
            for n in self._names
        ]
        native.adamw_in_place(parameters, steps, self._settings)

    def _apply_by_xla(
        self,
        state: tuple[Params, Params, Params],
        g: Params | None,
        window: MissedSteps,
    ) -> None:
        """Apply one window of steps to (w, m, v) without the native operation."""
        w, m, v = state
        with jax.default_device(self._cpu):
            updated = catch_up_arrays(w, m, v, g, [window], config=self.optimizer)
        for arrays, news in zip(state, updated, strict=True):
            for name, array in arrays.items():
                np.copyto(array, news[name])


class _HostLoad:
    """The `SlotLoad` of `HostUpdate`: writes experts to groups, and sends each group when it is
    full.

    held: holds the group that is being written.
    """

    def __init__(
        self,
        update: HostUpdate,
        slots: TrainingSlots,
        slot: int,
        layer: int,
        num_experts: int,
        held: contextlib.ExitStack,
    ) -> None:
        self._update, self._slots, self._slot, self._layer = update, slots, slot, layer
        self._left, self._held, self._size = num_experts, held, 0
        self._group: ExpertGroup | None = None
        self._experts = list[int]()  # of the group
        self._transfers = list[Transfer]()
        self.moved = LinkBytes()

    def write_weights(self, expert: int, weights: Record) -> None:
        with self._next_copies(expert) as copies:
            self._update.write_copies({name: weights[name] for name in copies}, copies)

    def catch_up(self, expert: int, records: ExpertRecords, missed: Iterable[MissedSteps]) -> None:
        with self._next_copies(expert) as copies:
            self._update.apply_steps(records, missed, copies)

    @contextlib.contextmanager
    def _next_copies(self, expert: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the expert's arrays of the group; afterwards send the group if it is full."""
        if self._group is None:
            device = self._slots.first_device(SlotPlace(self._slot, self._layer, expert))
            staging = self._update.staging[device]
            self._size = staging.largest_group_size(self._left)
            self._left -= self._size
            self._group = self._held.enter_context(staging.borrow(self._size))
        self._experts.append(expert)
        group = self._group
        yield {name: array[len(self._experts) - 1] for name, array in group.arrays.items()}
        if len(self._experts) == self._size:
            sent = self._slots.write_group(self._slot, self._layer, self._experts, group)
            self._transfers += sent
            self.moved = self.moved.plus(LinkBytes(sum(transfer.num_bytes for transfer in sent)))
            self._experts, self._group = [], None
            self._held.close()

    def wait_for_transfers(self) -> None:
        """Wait until all transfers have ended."""
        assert self._group is None and not self._left, (self._experts, self._left)
        for transfer in self._transfers:
            transfer.wait()


def _num_bytes(*trees: Moments) -> int:
    """Return the bytes of all arrays of the dicts."""
    return sum(array.nbytes for tree in trees for array in tree.values())


def _cpu_device() -> jax.Device:
    """Return a CPU of JAX's. Raises `ValueError` if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ValueError(
            "tiers.update = 'host': must be device without JAX's CPU backend: add cpu to"
            f" $JAX_PLATFORMS ({error})"
        ) from error


@lru_cache(maxsize=4096)
def _bias_corrections(config: OptimizerConfig, step: int) -> tuple[float, float]:
    """Return AdamW's bias corrections 1 / (1 - beta^t) of both moments, t = `step` + 1, as XLA:CPU
    computes them.
    """
    m_factor, v_factor = _compute_bias_corrections(config, np.int32(step))
    return float(m_factor), float(v_factor)


@partial(jax.jit, static_argnums=0)
def _compute_bias_corrections(
    config: OptimizerConfig, step: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the two corrections of `_bias_corrections`, float32; compiled once per config."""
    t = (step + 1).astype(jnp.float32)
    return 1 / (1 - config.beta1**t), 1 / (1 - config.beta2**t)


def load_native_adamw(setting: Literal["auto", "on", "off"]) -> bool:
    """Load the native operations for updates on the host, built first if necessary; return whether
    they may be used.

    setting: `TrainConfig.native`. Raises `ValueError` if it is "on" and they cannot be built.
    """
    if setting == "off":
        return False
    try:
        with contextlib.ExitStack() as stack:
            if not native.is_built():
                words = "building the native operations, once on this machine"
                stack.enter_context(status(words, log.info, timed=True))
            native.load()
    except native.NotBuiltError as error:
        check(setting != "on", "native", setting, f"cannot be had here: {error}")
        log.warning("XLA updates the experts on the host, more slowly: %s", error)
        return False
    return True
