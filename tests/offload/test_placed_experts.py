"""Slots of several fake devices, filled from records whose numbers say which expert they are of."""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.mesh import expert_mesh
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.placed_experts import PlacedExperts
from jmoe.planning.placement import EMPTY, placement_from_slots

FIELDS = {"w_up": ((2, 6), np.dtype(np.float32)), "w_down": ((3, 2), np.dtype(np.uint16))}
EXPERT_BYTES = 2 * 6 * 4 + 3 * 2 * 2
INDEX = ExpertIndex(num_layers=2, num_experts=5)


class Records:
    """One memory for all records, as where they are read from disk. opened: their numbers."""

    def __init__(self) -> None:
        self.memory = {name: np.zeros(shape, dtype) for name, (shape, dtype) in FIELDS.items()}
        self.opened: list[int] = []

    @contextlib.contextmanager
    def read(self, number: int) -> Iterator[dict[str, np.ndarray]]:
        self.opened.append(number)
        self.memory["w_up"][...] = number
        self.memory["w_down"][...] = np.asarray(number, jnp.bfloat16).view(np.uint16)
        yield self.memory
        self.memory["w_up"][...] = np.nan


def check_weights(experts: PlacedExperts) -> None:
    """Each slot of a placement holds its expert's weights."""
    for layer, placement in enumerate(experts.placements):
        weights, where = experts.layer_weights(layer), placement.physical_to_logical.ravel()
        numbers = INDEX.record_numbers(layer, where)
        for values, dtype in ((weights["w_up"], jnp.float32), (weights["w_down"], jnp.bfloat16)):
            assert values.dtype == dtype and len(values.addressable_shards) == 4
            for slot in np.flatnonzero(where != EMPTY):
                assert (np.asarray(values[slot], np.float32) == numbers[slot]).all()
        assert np.array_equal(experts.replica_of_row(layer), placement.replica_of_row)


def test_only_what_is_new_is_copied() -> None:
    records = Records()
    experts = PlacedExperts(expert_mesh(4), INDEX, FIELDS, 3, records.read)
    assert sorted(records.opened) == list(range(10)) and experts.copied_experts == 0
    assert experts.num_slots == 6 and experts.num_bytes == 6 * EXPERT_BYTES
    check_weights(experts)
    places = experts.placements[1].physical_to_logical.copy()
    assert (places == EMPTY).sum() == 7
    places[3] = [0, EMPTY, 2]
    missing = sorted(set(range(5)) - set(places.ravel().tolist()))
    places[0, : len(missing)] = missing
    changed = experts.copies_for_placement(1, placement_from_slots(places, np.ones(5)))
    records.opened.clear()
    experts.apply_copies(1, changed)
    assert sorted(records.opened) == sorted(5 + fill.expert for fill in changed.fills)
    assert (
        experts.copied_experts == len(changed.fills)
        and experts.copied_bytes == len(changed.fills) * EXPERT_BYTES
    )
    assert experts.copies_N.tolist() == [
        sum(fill.device == n for fill in changed.fills) for n in range(4)
    ]
    check_weights(experts)
    assert (1, 0) in experts.occupancy()
    experts.apply_copies(1, experts.copies_for_placement(1, experts.placements[1]))
    assert experts.copied_experts == len(changed.fills)
    experts.recopy_one_expert()
    check_weights(experts)


@pytest.mark.parametrize("num_devices", [9, 16])
def test_too_few_devices(num_devices: int) -> None:
    with pytest.raises(ValueError, match=f"mesh.devices = {num_devices}: must be at most the 8"):
        expert_mesh(num_devices)
