"""Slots of experts in training: which weights are in them, and that a larger room empties them.

Legend: P experts of this process, L on each device.
"""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.config import OptimizerConfig
from jmoe.offload.expert_index import LocalExperts
from jmoe.offload.lazy_adamw import StepHistory
from jmoe.offload.training_slots import SlotPlace, TrainingSlots

P, SHAPES = 4, {"w": (3, 2)}
FIRST, SECOND, THIRD = jax.devices()[:3]
# 0 and 1 on the first device and its replica, 2 and 3 on the third one
LOCAL = LocalExperts(np.arange(P), ((FIRST, SECOND), (THIRD,)), np.arange(P))


def record(value: float) -> Any:
    w = np.full(SHAPES["w"], value, np.float32)
    copy_to_device = lambda names, device: {name: jax.device_put(w, device) for name in names}  # noqa: E731
    return SimpleNamespace(data_R=w.view(np.uint8).reshape(-1), copy_to_device=copy_to_device)


def weights(slots: TrainingSlots, slot: int) -> list[list[float]]:
    """One element of each row, device by device."""
    return [np.asarray(stacks["w"])[:, 0, 0].tolist() for stacks in slots.stacks[slot]]


def test_experts_are_placed_on_every_device_that_has_them() -> None:
    slots = TrainingSlots(LOCAL, SHAPES, 2, None)
    assert slots.num_bytes == 2 * 3 * 2 * 24 and slots.layers_and_slots == []
    slots.assign_layer(1, 5, None)
    assert (
        slots.holds_layer(1, 5)
        and not slots.holds_layer(0, 5)
        and slots.layers_and_slots == [(5, 1)]
    )
    assert slots.assign_rows_and_find_absent(1, np.array([1, 2])).tolist() == [True, True]
    for expert, value in ((1, 7.0), (2, 8.0)):
        copies = 2 if expert == 1 else 1
        assert slots.write_weights(SlotPlace(1, 5, expert), record(value)) == 24 * copies
        slots.set_present(1, expert, True)
    assert weights(slots, 1) == [[0, 7], [0, 7], [8, 0]]
    assert slots.assign_rows_and_find_absent(1, np.arange(P)).tolist() == [True, False, False, True]
    assert [w["w"][0, 0] for w in slots.iterate_weights(1, 5)] == [0, 7, 8, 0]


def test_a_layers_weights_are_all_there_where_they_are_given() -> None:
    slots = TrainingSlots(LOCAL, SHAPES, 1, None)
    slots.assign_layer(
        0, 2, {"w": np.arange(P, dtype=np.float32)[:, None, None] * np.ones((P, 3, 2), np.float32)}
    )
    assert weights(slots, 0) == [[0, 1], [0, 1], [2, 3]]
    assert not slots.assign_rows_and_find_absent(0, np.arange(P)).any()


def test_a_larger_room_empties_a_slot_when_it_is_next_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = TrainingSlots(LOCAL, SHAPES, 1, 1)
    assert slots.assign_rows_and_find_absent(0, np.array([1])).tolist() == [True]
    slots.write_weights(SlotPlace(0, 0, 1), record(7.0))
    slots.set_present(0, 1, True)
    slots.request_slot_size(1)
    slots.grow_if_requested(0)
    assert weights(slots, 0) == [[7], [7], [0]] and not caplog.records
    slots.request_slot_size(2)
    assert "tokens chose 2 of a device's 2 experts; there is room for 2 from now on" in caplog.text
    assert weights(slots, 0) == [[7], [7], [0]]
    slots.grow_if_requested(0)
    assert weights(slots, 0) == [[0, 0], [0, 0], [0, 0]] and slots.assign_rows_and_find_absent(
        0, np.array([1])
    ).tolist() == [True]


def test_an_update_reaches_all_replicas() -> None:
    slots = TrainingSlots(LOCAL, SHAPES, 1, None)
    config = OptimizerConfig(weight_decay=0.0, warmup_steps=0)
    slots.write_weights(SlotPlace(0, 0, 1), record(1.0))
    zeros = {"w": np.zeros(SHAPES["w"], np.float32)}
    gradient = {"w": np.ones(SHAPES["w"], np.float32)}
    missed = StepHistory(0, [0.5], [1.0]).missed_windows(range(1), pending=True)
    w, m, v = slots.catch_up_expert(SlotPlace(0, 0, 1), (zeros, zeros), gradient, missed, config)
    assert weights(slots, 0)[0] == weights(slots, 0)[1] == [0, np.asarray(w["w"])[0, 0]]
    assert (
        np.asarray(w["w"])[0, 0] == pytest.approx(0.5) and np.all(m["w"] > 0) and np.all(v["w"] > 0)
    )
