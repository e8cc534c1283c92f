"""Rows of a slot with room for a part of a device's experts.

Legend: P experts of this process, M rows.
"""

import jax
import numpy as np
import pytest

from jmoe.offload.expert_index import LocalExperts
from jmoe.offload.slot_rows import SlotRows, grown_num_rows

P, M = 8, 2
FIRST, SECOND, THIRD = jax.devices()[:3]
# 0 … 3 on the first device and its replica, 4 … 7 on the third one
LOCAL = LocalExperts(np.arange(P), ((FIRST, SECOND), (THIRD,)), np.arange(P))


def experts(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def rows_of(slot: SlotRows, numbers: np.ndarray) -> list[int]:
    """The row of each expert, which replicas have in the same place."""
    places = [slot.replica_rows(0, number) for number in numbers.tolist()]
    assert [[device for device, _ in place] for place in places] == [
        [0, 1] if n < 4 else [2] for n in numbers
    ]
    assert all(len({row for _, row in place}) == 1 for place in places)
    return [place[0][1] for place in places]


def test_experts_have_rows_of_their_own() -> None:
    slot = SlotRows(LOCAL, M)
    assert slot.assign_rows_and_list_evicted(experts(1, 3, 6)) == []
    rows = rows_of(slot, experts(1, 3, 6))
    assert sorted(rows[:2]) == [0, 1] and rows[2] in (0, 1)
    assert (
        slot.assign_rows_and_list_evicted(experts(1, 3)) == []
        and rows_of(slot, experts(1, 3, 6)) == rows
    )


def test_who_is_not_needed_makes_room() -> None:
    slot = SlotRows(LOCAL, M)
    slot.assign_rows_and_list_evicted(experts(0, 1, 4))
    kept = rows_of(slot, experts(1))
    assert slot.assign_rows_and_list_evicted(experts(1, 2)) == [0]
    assert rows_of(slot, experts(1)) == kept and sorted(rows_of(slot, experts(1, 2))) == [0, 1]
    assert slot.assign_rows_and_list_evicted(experts(0, 3, 7)) == [
        1,
        2,
    ]  # the third device has a row that is free


def test_more_than_there_is_room_for_comes_in_waves() -> None:
    slot = SlotRows(LOCAL, M)
    chosen = experts(0, 1, 2, 4, 5, 6, 7)
    waves = list(slot.groups_that_fit(chosen))
    assert [wave.tolist() for wave in waves] == [[0, 1, 4, 5], [2, 6, 7]]
    for wave in waves:
        slot.assign_rows_and_list_evicted(wave)
    assert list(slot.groups_that_fit(experts())) == []
    with pytest.raises(AssertionError, match="3 experts for 2 rows"):
        slot.assign_rows_and_list_evicted(experts(0, 1, 2))


def test_what_programs_are_told() -> None:
    slot = SlotRows(LOCAL, M)
    slot.assign_rows_and_list_evicted(experts(3))
    slot.assign_rows_and_list_evicted(experts(1, 3, 6))
    chosen_P = np.isin(np.arange(P), (1, 3, 6))
    one, other = slot.chosen_rows(chosen_P, 3)
    assert one.ids_M.tolist() == [1, 3, 4] and one.rows_M.tolist() == [
        *rows_of(slot, experts(1, 3)),
        0,
    ]
    assert other.ids_M.tolist() == [2, 4, 4] and other.rows_M.tolist() == [
        *rows_of(slot, experts(6)),
        0,
        0,
    ]
    assert one.ids_M.dtype == one.rows_M.dtype == np.int32


def test_room_for_all() -> None:
    slot = SlotRows(LOCAL, None)
    assert slot.assign_rows_and_list_evicted(np.arange(P)) == []
    assert rows_of(slot, np.arange(P)) == [0, 1, 2, 3] * 2
    assert [wave.tolist() for wave in slot.groups_that_fit(np.arange(P))] == [list(range(P))]


@pytest.mark.parametrize(
    ("room", "needed", "per_device", "expected"),
    [(2, 2, 32, 2), (2, 3, 32, 4), (5, 13, 32, 16), (1, 3, 4, 3), (1, 31, 33, 33), (1, 32, 33, 33)],
)
def test_room_grows_by_eighths(room: int, needed: int, per_device: int, expected: int) -> None:
    assert grown_num_rows(room, needed, per_device) == expected
