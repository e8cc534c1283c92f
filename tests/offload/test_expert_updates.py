"""AdamW on the host or on the device: the same bits in the records, and less traffic.

Legend: P experts of this process.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import OptimizerConfig
from jmoe.memory.buffers import Allocate
from jmoe.memory.link import Link
from jmoe.memory.pinned import PinnedSlots
from jmoe.memory.record_handle import Record
from jmoe.offload import expert_updates
from jmoe.offload.expert_index import LocalExperts
from jmoe.offload.expert_state import record_layouts
from jmoe.offload.expert_updates import (
    DeviceUpdate,
    ExpertRecords,
    ExpertUpdate,
    HostUpdate,
    LinkBytes,
    load_native_adamw,
)
from jmoe.offload.lazy_adamw import StepHistory
from jmoe.offload.training_slots import SlotPlace, TrainingSlots
from kernels_pallas import native
from tests.arrays import differing

pytestmark = pytest.mark.usefixtures("full_compilation")  # whose bits the native operation has
SHAPES = {"w_up": (7, 12), "w_down": (6, 7), "b_up": (12,)}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())
CONFIG = OptimizerConfig(weight_decay=0.2)
STEPS = 70  # more than one call takes
PLACE = SlotPlace(0, 0, 1)
Arrays = dict[str, np.ndarray]


def dtypes(matrix: str) -> dict[str, np.dtype]:
    return {n: jnp.dtype(matrix if len(shape) > 1 else "float32") for n, shape in SHAPES.items()}


class Expert:
    """Open records of one expert with the same numbers every time, and a slot."""

    def __init__(
        self, update: ExpertUpdate, gradient_dtype: str = "float32", replicas: int = 1
    ) -> None:
        rng = np.random.default_rng(0)
        made = {}
        for kind, layout in record_layouts(SHAPES, gradient_dtype).items():
            record_R = layout.zeros()
            views = layout.views(record_R)
            for name, array in views.items():
                array[...] = rng.normal(size=array.shape) * 0.1
                if name.startswith("v."):
                    array[...] = np.square(array)
            made[kind] = Record(0, record_R, views, Link(), lambda dirty: None)
        self.records = ExpertRecords(made["weights"], made["moments"], made["gradients"])
        devices = tuple(jax.devices()[:replicas])
        local = LocalExperts(np.arange(2), (devices,), np.arange(2))
        self.update, self.slots = update, TrainingSlots(local, SHAPES, 1, None, update.slot_dtypes)

    def catch_up(self, *, pending: bool, steps: int = STEPS) -> LinkBytes:
        """As `ExpertState` does it: the device needs the weights in its slot."""
        history = StepHistory(5, np.linspace(0.01, 0.02, steps).tolist(), [0.7] * steps)
        missed = history.missed_windows(range(5, 5 + steps), pending=pending)
        records = self.records._replace(weights=self.weights)
        if not pending:
            records = records._replace(gradient=None)
        with self.update.load_slot(self.slots, PLACE.slot, PLACE.layer, 1) as load:
            if not self.update.on_host:
                load.write_weights(PLACE.expert, self.weights)
            load.catch_up(PLACE.expert, records, missed)
        return load.moved

    def write_weights(self) -> LinkBytes:
        with self.update.load_slot(self.slots, PLACE.slot, PLACE.layer, 1) as load:
            load.write_weights(PLACE.expert, self.weights)
        return load.moved

    @property
    def weights(self) -> Record:
        assert self.records.weights is not None
        return self.records.weights

    def state(self) -> Arrays:
        """Copies of weights and moments."""
        moments = [f"{part}.{name}" for part in "mv" for name in SHAPES]
        return {n: self.weights[n].copy() for n in SHAPES} | {
            n: self.records.moments[n].copy() for n in moments
        }

    def in_slot(self, device: int = 0) -> Arrays:
        stacks = self.slots.stacks[PLACE.slot][device]
        return {name: np.asarray(stacks[name][PLACE.expert]) for name in SHAPES}


def host_update(matrix: str = "float32", **options: Any) -> HostUpdate:
    options = {"is_native": load_native_adamw("auto")} | options
    return HostUpdate(CONFIG, SHAPES, dtypes(matrix), jax.devices()[:2], **options)


@pytest.mark.parametrize("pending", [True, False])
@pytest.mark.parametrize("gradient_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_native", [True, False])
def test_the_bits_are_those_of_the_device(
    is_native: bool, gradient_dtype: str, pending: bool
) -> None:
    if is_native and not load_native_adamw("auto"):
        pytest.skip("no native operations here")
    there = Expert(DeviceUpdate(CONFIG, SHAPES, gradient_dtype), gradient_dtype)
    here = Expert(host_update(is_native=is_native), gradient_dtype)
    before = here.state()
    for expert in (there, here):
        expert.catch_up(pending=pending)
    assert differing(here.state(), there.state()) == []
    assert differing(here.in_slot(), there.in_slot()) == []
    assert len(differing(here.state(), before)) == len(before)


@pytest.mark.parametrize("matrix", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("is_native", [True, False])
def test_the_slot_has_the_weights_in_the_dtype_of_the_products(
    is_native: bool, matrix: str
) -> None:
    """After an update, and where they are fetched again without one; on every replica."""
    if is_native and not load_native_adamw("auto"):
        pytest.skip("no native operations here")
    expert = Expert(host_update(matrix, is_native=is_native), replicas=2)
    sizes = {n: math.prod(shape) * dtypes(matrix)[n].itemsize for n, shape in SHAPES.items()}
    for change in (
        lambda: expert.catch_up(pending=True, steps=2),
        expert.write_weights,
    ):
        expert.slots.stacks[0] = expert.slots._make_empty_slot(None)
        assert change() == LinkBytes(2 * sum(sizes.values()), 0)
        for device in range(2):
            want = {
                n: np.asarray(jnp.asarray(expert.weights[n]).astype(dtypes(matrix)[n]))
                for n in SHAPES
            }
            assert differing(expert.in_slot(device), want) == []
    assert expert.slots.num_bytes == 2 * 2 * sum(sizes.values())


def test_bytes_between_host_and_device() -> None:
    """Of an update: float32 weights, moments and a gradient go, weights and moments come back; or
    the weights in bfloat16 go.
    """
    there = Expert(DeviceUpdate(CONFIG, SHAPES, "float32")).catch_up(pending=True)
    assert there == LinkBytes((4 + 8 + 4) * SIZE, (4 + 8) * SIZE)
    biases = math.prod(SHAPES["b_up"])
    here = Expert(host_update("bfloat16")).catch_up(pending=True)
    assert here == LinkBytes(2 * SIZE + 2 * biases, 0)


def test_it_sends_from_pinned_memory() -> None:
    sent = list[int]()

    def allocate(device: jax.Device) -> Allocate:
        def allocate_pinned(num_slots: int, slot_bytes: int) -> PinnedSlots:
            sent.append(slot_bytes)
            return PinnedSlots(num_slots, slot_bytes, device)

        return allocate_pinned

    pinned = Expert(host_update("bfloat16", allocate=allocate))
    ordinary = Expert(host_update("bfloat16"))
    for expert in (pinned, ordinary):
        expert.catch_up(pending=True)
    assert differing(pinned.in_slot(), ordinary.in_slot()) == [] and sent


def test_it_is_refused_without_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cpu(*, backend: str) -> list[jax.Device]:
        raise RuntimeError(f"unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", no_cpu)
    with pytest.raises(
        ValueError, match=r"tiers.update = 'host': must be device without JAX's CPU"
    ):
        host_update()


def test_without_a_compiler_xla_updates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> bool:
        raise native.NotBuiltError("there is no g++")

    assert not load_native_adamw("off")
    monkeypatch.setattr(expert_updates.native, "is_built", missing)
    assert not load_native_adamw("auto")
    assert "XLA updates the experts on the host, more slowly: there is no g++" in caplog.text
    with pytest.raises(ValueError, match="native = 'on': cannot be had here: there is no g"):
        load_native_adamw("on")
