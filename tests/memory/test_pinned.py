"""Pinned host memory: the same bytes, sent to the device from where they were read to."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from jmoe.memory import pinned
from jmoe.memory.buffers import allocate_slots
from jmoe.memory.pinned import PinnedSlots, choose_host_allocator
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords, RecordStore
from jmoe.memory.tiered_store import TieredStore
from jmoe.memory.version_store import VersionStore

ARRAYS = {
    "w": ((3, 100), np.float32),
    "b": ((7,), ml_dtypes.bfloat16),
    "q": ((9, 2), np.uint8),
    "s": ((), np.int32),
}
LAYOUT = RecordLayout.from_arrays(ARRAYS)
NUM_RECORDS = 6
CPU = jax.devices("cpu")[0]


def content(index: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(index)
    return {
        f.name: np.asarray(rng.integers(0, 100, f.shape)).astype(f.dtype) for f in LAYOUT.fields
    }


def fill(index: int, views: dict[str, NDArray[Any]]) -> None:
    for name, array in content(index).items():
        views[name][...] = array


def check_sent(sent: dict[str, jax.Array], index: int, names: Any = ARRAYS) -> None:
    assert set(sent) == set(names)
    for name, array in sent.items():
        expected = content(index)[name]
        assert (
            array.dtype == expected.dtype
            and array.sharding.memory_kind == CPU.default_memory().kind
        )
        np.testing.assert_array_equal(np.asarray(array), expected)


def pinned_here(setting: Any = "on") -> Any:
    return choose_host_allocator(setting, "pin_host_memory", [CPU]).allocate


def test_what_is_sent_is_a_copy() -> None:
    slots = PinnedSlots(NUM_RECORDS, LAYOUT.record_bytes, CPU)
    for index, slot in enumerate(slots):
        assert slot.ctypes.data % 4096 == 0 and not slot.any()
        fill(index, LAYOUT.views(slot))
    sent = [slots.copy_to_device(index, LAYOUT, ["b", "w"]) for index in range(NUM_RECORDS)]
    for slot in slots:
        slot[:] = 255
    for index, arrays in enumerate(sent):
        check_sent(arrays, index, ("b", "w"))


@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_records_in_pinned_memory(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened:
        if kind == "host":
            tiers = TieredStore(
                HostRecords.allocate_and_fill(LAYOUT, NUM_RECORDS, fill, allocate=pinned_here())
            )
        else:
            store = opened.enter_context(
                RecordStore.open_or_pack(tmp_path, LAYOUT, NUM_RECORDS, fill, fingerprint="a")
            )
            tiers = TieredStore(store, cache_bytes=4 * LAYOUT.record_bytes, allocate=pinned_here())
        opened.enter_context(tiers)
        assert isinstance(tiers._slots_MR, PinnedSlots)
        assert tiers.host_bytes == (NUM_RECORDS if kind == "host" else 4) * LAYOUT.record_bytes
        for index in (*range(NUM_RECORDS), 0):
            with tiers.get(index) as record:
                assert not record.data_R.flags.writeable
                np.testing.assert_array_equal(record["w"], content(index)["w"])
                check_sent(record.copy_to_device(ARRAYS, CPU), index)


def test_records_that_change_in_pinned_memory(tmp_path: Path) -> None:
    with VersionStore.open(tmp_path, LAYOUT, NUM_RECORDS, fingerprint="a") as store:
        store.write_all_records(fill)
        with TieredStore(
            store, cache_bytes=3 * LAYOUT.record_bytes, allocate=pinned_here()
        ) as tiers:
            for index in range(NUM_RECORDS):
                with tiers.get(index, writable=True) as record:
                    check_sent(record.copy_to_device(ARRAYS, CPU), index)
                    record["s"][...] = -index
                    record.close_as_changed()
            for index in range(NUM_RECORDS):
                with tiers.get(index) as record:
                    assert int(record.copy_to_device(["s"], CPU)["s"]) == -index


def test_ordinary_memory_is_sent_too() -> None:
    with (
        TieredStore(HostRecords.allocate_and_fill(LAYOUT, NUM_RECORDS, fill)) as tiers,
        tiers.get(2) as record,
    ):
        check_sent(record.copy_to_device(["w", "s"], CPU), 2, ("w", "s"))


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device with these kinds of memory."""

    kinds: tuple[str, ...] = ("device",)
    platform: str = "gpu"

    def addressable_memories(self) -> list[Any]:
        return [type("Memory", (), {"kind": kind}) for kind in self.kinds]


PINS = Accelerator(("device", "pinned_host"))


@pytest.mark.parametrize(
    ("setting", "devices", "is_pinned"),
    [
        ("auto", [PINS], True),
        ("off", [PINS], False),
        ("auto", [PINS, PINS], False),
        ("auto", [Accelerator()], False),
        ("auto", [CPU], False),
        ("on", [CPU], True),
    ],
)
def test_which_memory_is_used(setting: Any, devices: Any, is_pinned: bool) -> None:
    chosen = choose_host_allocator(setting, "pin", devices)
    assert (chosen.allocate is not allocate_slots) == is_pinned
    assert chosen.note.startswith("records in pinned" if is_pinned else "records in ordinary")


def test_each_device_pins_its_own_records() -> None:
    """A record arrives on the device that pins it; a device may have none."""
    devices = jax.devices()[:3]
    counts = [2, 0, NUM_RECORDS - 2]
    chosen = choose_host_allocator("on", "pin", devices, counts)
    assert chosen.note == "records in pinned host memory of 3 devices, each its own"
    memory = HostRecords.allocate_and_fill(LAYOUT, NUM_RECORDS, fill, allocate=chosen.allocate)
    assert isinstance(memory.slots_MR, pinned.PinnedSlotsOfDevices)
    with TieredStore(memory) as tiers:
        for index in range(NUM_RECORDS):
            device = devices[0 if index < 2 else 2]
            with tiers.get(index) as record:
                sent = record.copy_to_device(ARRAYS, device)
                check_sent(sent, index)
                assert all(array.devices() == {device} for array in sent.values())


@pytest.mark.parametrize("devices", [[Accelerator()], [PINS, PINS]])
def test_what_cannot_be_pinned_is_refused(devices: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"tiers\.pin_host_memory = 'on': must be auto or off unless a process has one",
    ):
        choose_host_allocator("on", "tiers.pin_host_memory", devices)


@pytest.mark.parametrize("why", ["no memory", "no address"])
def test_where_it_fails_ordinary_memory_is_used(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nand a trace")

    if why == "no memory":
        monkeypatch.setattr(jax, "device_put", refuse)
    else:  # what is written is elsewhere than what is sent
        monkeypatch.setattr(
            pinned.PinnedSlots, "copy_to_device", lambda *_: {"probe": np.zeros(4096, np.uint8)}
        )
    slots = pinned_here()(2, 4096)
    assert isinstance(slots, np.ndarray) and slots.shape == (2, 4096)
    reason = "no room" if why == "no memory" else "does not arrive"
    assert (
        "8192 bytes of pinned host memory cannot be had, ordinary memory is used: " in caplog.text
    )
    assert reason in caplog.text and "trace" not in caplog.text
