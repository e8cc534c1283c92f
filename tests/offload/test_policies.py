"""Which experts lie in which slots, and what is copied for it: real records, real slots, bytes
counted.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords, RecordStore
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.layer_ring import LayerRing
from jmoe.offload.policies import AllResident, ChosenExperts
from jmoe.offload.slots import HostSlots

LAYERS, E = 3, 8
# 4096 bytes, a page
FIELDS = {"w_up": ((16, 32), np.dtype(np.float32)), "w_down": ((16, 32), np.dtype(np.float32))}
LAYOUT = RecordLayout.from_arrays(FIELDS)
INDEX = ExpertIndex(LAYERS, E)


def fill(index: int, views: dict[str, np.ndarray]) -> None:
    for view in views.values():
        view[...] = index


def store() -> TieredStore:
    return TieredStore(HostRecords.allocate_and_fill(LAYOUT, LAYERS * E, fill))


def held(slots: HostSlots, slot: int) -> int:
    """The record whose bytes are in a slot."""
    return int(slots.slot_views(slot)["w_up"][0, 0])


@pytest.fixture
def slots() -> HostSlots:
    return HostSlots(20, FIELDS)  # two and a half layers


@pytest.fixture
def chosen(slots: HostSlots) -> Iterator[ChosenExperts]:
    with store() as records:
        residency = ChosenExperts(slots, records, INDEX)
        yield residency
        residency.close()


def test_chosen_experts_are_in_their_slots(chosen: ChosenExperts, slots: HostSlots) -> None:
    for step in range(6):
        chosen.begin_step(whole_layers=False)
        assert chosen.needs_choices
        for layer in range(LAYERS):
            experts = np.array([[step, layer], [E, E], [layer, 7 - step]])
            table_E = chosen.acquire(layer, experts)
            for expert in set(experts.ravel().tolist()) - {E}:
                assert held(slots, table_E[expert]) == layer * E + expert
            chosen.prefetch_guessed((layer + 1) % LAYERS, np.array([step, layer + 1]))
            chosen.release(layer)
    stats = chosen.stats()
    assert stats.layers == 6 * LAYERS
    assert 0 < stats.guessed_right <= stats.guessed
    chosen.acquire(0, np.array([5, 3]))  # so that the last guess has arrived
    chosen.release(0)
    occupancy = chosen.occupancy()
    assert len(occupancy) == 20
    for slot, place in enumerate(occupancy):
        if place is not None:
            assert held(slots, slot) == place[0] * E + place[1]


def test_hits_are_what_was_there_before_any_copy(chosen: ChosenExperts) -> None:
    for guess, choice, hits, misses, right in [
        ([], [0, 1], 0, 2, 0),
        ([], [0, 1], 2, 0, 0),
        ([2, 3], [0, 2], 1, 1, 1),  # 0 was there, 2 came on a guess
        ([1, 0], [0, 1], 2, 0, 0),  # nothing to copy for this guess
    ]:
        before = chosen.stats()
        chosen.begin_step(whole_layers=False)
        chosen.prefetch_guessed(0, np.array(guess, np.int64))
        chosen.acquire(0, np.array(choice))
        chosen.release(0)
        now = chosen.stats()
        assert (now.hits - before.hits, now.misses - before.misses) == (hits, misses)
        assert now.guessed_right - before.guessed_right == right
    assert chosen.stats().guessed == 2


def test_guesses_that_turn_out_wrong_are_not_listened_to(chosen: ChosenExperts) -> None:
    def step(guess: int, choice: int) -> int:
        """How many experts were copied for a guess about layer 2, of which `choice` was then
        chosen.
        """
        before = chosen.stats().guessed
        chosen.begin_step(whole_layers=False)
        for layer in range(2):  # so much else that nothing of layer 2 keeps its slot
            chosen.acquire(layer, np.arange(E))
            chosen.release(layer)
        chosen.pool.drop_records([r for r in chosen.pool.record_in.tolist() if r >= 2 * E])
        chosen.prefetch_guessed(2, np.array([guess]))
        chosen.acquire(2, np.array([choice]))
        chosen.release(2)
        return chosen.stats().guessed - before

    wrong = [step(1, 0) for _ in range(20)]
    assert wrong[0] == 1 and wrong[-1] == 0
    right = [step(1, 1) for _ in range(20)]
    assert right[0] == 0 and right[-1] == 1


def test_whole_layers(chosen: ChosenExperts, slots: HostSlots) -> None:
    """Steps of many tokens: every expert of every layer, nobody asked; what stays in slots is
    not copied again.
    """
    streamed = []
    for _ in range(5):
        before = chosen._store.stats().host.num_bytes
        chosen.begin_step(whole_layers=True)
        assert not chosen.needs_choices
        for layer in range(LAYERS):
            table_E = chosen.acquire(layer, None)
            assert [held(slots, slot) for slot in table_E] == list(
                range(layer * E, (layer + 1) * E)
            )
            chosen.release(layer)
        streamed.append((chosen._store.stats().host.num_bytes - before) // LAYOUT.data_bytes)
    # 20 slots: 2 layers' worth passes experts through, the other 4 experts stay, as `predict_ring`
    # says
    assert streamed[0] == LAYERS * E
    assert all(LAYERS * E - 20 <= copied <= LAYERS * E - 4 for copied in streamed[1:])
    assert chosen.stats().layers == 0  # no choices were known
    chosen.begin_step(whole_layers=False)
    assert chosen.needs_choices


def test_a_wrong_guess_is_neither_copied_nor_read(tmp_path: Path) -> None:
    """Once the choices are known, reads and copies that have not begun do not begin."""
    with RecordStore.open_or_pack(tmp_path, LAYOUT, LAYERS * E, fill, fingerprint="a") as packed:
        slow = {"nvme": LAYOUT.record_bytes / 0.2}  # 200 ms a record
        with TieredStore(
            packed, cache_bytes=8 * LAYOUT.record_bytes, bandwidth_limit_bytes_per_s=slow
        ) as records:
            slots = HostSlots(20, FIELDS)
            residency = ChosenExperts(slots, records, INDEX)
            residency.begin_step(whole_layers=False)
            residency.prefetch_guessed(1, np.arange(1, E))
            table_E = residency.acquire(1, np.array([0]))
            assert held(slots, table_E[0]) == E
            residency.release(1)
            assert records.stats().host.transfers < E  # begun copies end; 2 threads of 7 guesses
            # what was given up comes when it is asked for
            table_E = residency.acquire(1, np.arange(E))
            assert [held(slots, slot) for slot in table_E] == list(range(E, 2 * E))
            residency.release(1)
            residency.close()


def test_occupancy_of_what_does_not_choose(slots: HostSlots) -> None:
    everything = HostSlots(LAYERS * E, FIELDS)
    assert AllResident(everything, INDEX).occupancy()[E + 3] == (1, 3)
    with store() as records:
        ring = LayerRing(slots, records, INDEX, 2)
        for layer in range(2):
            table_E = ring.acquire(layer, None)
            places = ring.occupancy()
            assert [places[slot] for slot in table_E] == [(layer, expert) for expert in range(E)]
            ring.release(layer)
        ring.close()
