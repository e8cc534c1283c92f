"""The ring: order, slots and bytes, with loads that take their time."""

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jmoe.memory.ring import Ring
from tests.fakes import wait_for

LAYER_BYTES = 1000


class Slots:
    """The device: slots of memory that `load` writes to, with checks that nobody writes where
    somebody reads.
    """

    def __init__(self, num_slots: int, seed: int | None = None) -> None:
        self.memory = np.full((num_slots, 16), -1)
        self.reading = [False] * num_slots
        self.loads: list[tuple[int, int]] = []
        self.rng = None if seed is None else np.random.default_rng(seed)
        self.violations: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_layer: int | None = None

    def load(self, layer: int, slot: int) -> int:
        assert self.gate.wait(240)
        if layer == self.fail_layer:
            raise OSError("bad sector")
        for part in range(16):  # in pieces, so that a reader would see a half-written slot
            if self.reading[slot]:
                self.violations.append(f"layer {layer} written to slot {slot} while it was in use")
            self.memory[slot, part] = layer
            if self.rng is not None and part % 8 == 0:
                time.sleep(self.rng.exponential(0.0002))
        self.loads.append((layer, slot))
        return LAYER_BYTES

    def use(self, ring: Ring, expected_layer: int) -> int:
        """Acquire, read, release; returns the slot."""
        layer, slot = ring.acquire()
        assert layer == expected_layer
        self.reading[slot] = True
        assert (self.memory[slot] == layer).all()
        self.reading[slot] = False
        ring.release()
        return slot

    def use_all(self, ring: Ring, order: Iterable[int]) -> None:
        for layer in order:
            self.use(ring, layer)


@pytest.mark.parametrize(("num_layers", "num_slots"), [(8, 4), (7, 3), (5, 2), (4, 1), (6, 5)])
def test_slot_i_mod_k_takes_layer_i_plus_k(num_layers: int, num_slots: int) -> None:
    slots = Slots(num_slots)
    with Ring(range(num_layers), num_slots, slots.load) as ring:
        rounds = 4
        for position in range(rounds * num_layers):
            assert slots.use(ring, position % num_layers) == position % num_slots
        total = rounds * num_layers + num_slots  # the first of the next round are loaded already
        wait_for(lambda: len(slots.loads) == total)
        assert slots.loads == [(p % num_layers, p % num_slots) for p in range(total)]
        stats = ring.stats()
        assert stats.loads.num_bytes == total * LAYER_BYTES
        assert stats.loads.transfers == total


def test_loads_stop_until_a_release() -> None:
    slots = Slots(3)
    with Ring(range(6), 3, slots.load) as ring:
        wait_for(lambda: len(slots.loads) == 3)
        first, second = ring.acquire(), ring.acquire()
        assert (first, second) == ((0, 0), (1, 1))
        time.sleep(0.05)
        assert len(slots.loads) == 3
        ring.release()
        wait_for(lambda: slots.loads[3:] == [(3, 0)])
        assert ring.acquire() == (2, 2)
        assert ring.acquire() == (3, 0)
        with pytest.raises(RuntimeError, match=r"all 3 slots are in use; release\(\) one before"):
            ring.acquire()


@pytest.mark.parametrize("num_slots", [6, 9])
def test_nothing_moves_when_all_fit(num_slots: int) -> None:
    slots = Slots(num_slots)
    with Ring(range(6), num_slots, slots.load) as ring:
        slots.use_all(ring, 5 * list(range(6)))
        ring.begin_round()
        slots.use_all(ring, range(6))
        assert [layer for layer, _ in slots.loads] == list(range(6))


def test_turning_round_loads_nothing_twice() -> None:
    """0 … N-1 … 0, as a training step goes: 2 (N - K) loads a step once it runs."""
    order = [*range(8), *reversed(range(8))]
    slots = Slots(3)
    with Ring(order, 3, slots.load) as ring:
        slots.use_all(ring, order)
        first_step = len(slots.loads)
        slots.use_all(ring, 3 * order)
        wait_for(lambda: len(slots.loads) == first_step + 3 * 2 * (8 - 3))


def test_restart_in_the_middle() -> None:
    slots = Slots(3)
    with Ring(range(6), 3, slots.load) as ring:
        slots.use_all(ring, (0, 1))
        wait_for(lambda: len(slots.loads) == 5)  # 2, 3 and 4 are there
        ring.begin_round()
        # 0 and 1 take the places of 4 and 3; 2 is needed soonest and stays
        wait_for(lambda: len(slots.loads) == 7)
        assert [layer for layer, _ in slots.loads[5:]] == [0, 1]
        ring.begin_round([2, 3, 0])
        slots.use_all(ring, (2, 3, 0, 2))
        assert not slots.violations
        ring.acquire()
        with pytest.raises(RuntimeError, match="1 layers are acquired; release them first"):
            ring.begin_round()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_restart_while_a_load_is_under_way(num_slots: int) -> None:
    slots = Slots(num_slots)
    slots.gate.clear()
    with Ring(range(4), num_slots, slots.load) as ring:
        wait_for(lambda: ring._loading is not None)
        ring.begin_round([3, 2])
        slots.gate.set()
        slots.use_all(ring, (3, 2, 3, 2, 3))
        assert slots.loads[0] == (0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_any_delay(seed: int) -> None:
    """Random orders, slots, delays and depths of use: the order is kept and no slot is written
    while held.
    """
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(2, 9))
    num_slots = int(rng.integers(1, 6))
    slots = Slots(num_slots, seed)
    order: Sequence[int] = rng.integers(num_layers, size=rng.integers(1, 12)).tolist()
    with Ring(order, num_slots, slots.load) as ring:
        for _ in range(4):
            expected = itertools.cycle(order)
            held: list[tuple[int, int]] = []
            for _ in range(40):
                if held and (len(held) == min(num_slots, 3) or rng.integers(2)):
                    layer, slot = held.pop(0)
                    assert (slots.memory[slot] == layer).all()
                    slots.reading[slot] = any(slot == other for _, other in held)
                    ring.release()
                else:
                    held.append(ring.acquire())
                    layer, slot = held[-1]
                    assert layer == next(expected)
                    slots.reading[slot] = True
                for layer, slot in held:
                    assert (slots.memory[slot] == layer).all()
            for position, (_, slot) in enumerate(held):
                slots.reading[slot] = any(slot == other for _, other in held[position + 1 :])
                ring.release()
            order = rng.integers(num_layers, size=rng.integers(1, 12)).tolist()
            ring.begin_round(order)
        assert not slots.violations
        ring.close()
        stats = ring.stats()
        assert stats.loads.transfers == len(slots.loads)
        assert stats.loads.num_bytes == len(slots.loads) * LAYER_BYTES
    held_layers = {layer for layer in ring._layer_in if layer is not None}
    assert len(held_layers) == sum(layer is not None for layer in ring._layer_in)


def test_an_error_is_raised_at_acquire() -> None:
    slots = Slots(2)
    slots.fail_layer = 3
    with Ring(range(5), 2, slots.load) as ring:
        slots.use_all(ring, (0, 1))
        with pytest.raises(OSError, match="bad sector"):
            list(iter(ring.acquire, None))
        for _ in range(2):
            with pytest.raises(OSError, match="bad sector") as caught:
                ring.acquire()
            assert caught.value.__notes__ == ["while the ring loaded layer 3 into slot 1"]
        while ring._released < ring._acquired:
            ring.release()
        slots.fail_layer = None
        for call in (
            ring.begin_round,
            ring.reload_slots,
            ring.wait_for_loads,
            ring.acquire,
        ):  # it is never forgotten
            with pytest.raises(OSError, match="bad sector"):
                call()


def test_waits_are_counted_and_limited() -> None:
    slots = Slots(2)
    slots.gate.clear()
    with Ring(range(5), 2, slots.load, wait_limit_s=0.2) as ring:
        with pytest.raises(TimeoutError, match=r"layer 0 \(slot 0\) was not loaded within 0.2 s"):
            ring.acquire()
        with pytest.raises(TimeoutError, match=r"slot 0 is still being loaded 0.2 s after close"):
            ring.close()
        ring._wait_limit_s = 240.0  # from here on it guards against what hangs
        slots.gate.set()
    slots = Slots(2)
    with Ring(range(2), 2, slots.load) as ring:
        wait_for(lambda: len(slots.loads) == 2 and ring._loading is None)
        slots.use_all(ring, range(2))
        assert (ring.stats().waits, ring.stats().waited_s) == (0, 0.0)


def test_close_ends_a_wait() -> None:
    slots = Slots(2)
    slots.gate.clear()
    ring = Ring(range(5), 2, slots.load)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(ring.acquire)
        closing = pool.submit(ring.close)
        with pytest.raises(ValueError, match="closed"):
            waiting.result(240)
        slots.gate.set()
        closing.result(240)
    with pytest.raises(ValueError, match="closed"):
        ring.acquire()


def test_mistakes() -> None:
    slots = Slots(2)
    with pytest.raises(ValueError, match="num_slots = 0"):
        Ring(range(4), 0, slots.load)
    with pytest.raises(ValueError, match=r"order = .*: must name at least one layer"):
        Ring([], 2, slots.load)
    with Ring(range(2), 2, slots.load) as ring, pytest.raises(RuntimeError, match=r"release\(\)"):
        ring.release()


def test_wait_is_for_all_that_is_planned() -> None:
    slots = Slots(2)
    slots.gate.clear()
    with Ring(range(5), 2, slots.load, wait_limit_s=0.2) as ring:
        with pytest.raises(TimeoutError, match=r"was not loaded within 0.2 s"):
            ring.wait_for_loads()
        ring._wait_limit_s = 240.0  # from here on it guards against what hangs
        slots.gate.set()
        ring.wait_for_loads()
        assert [layer for layer, _ in slots.loads] == [0, 1]
        assert ring._loading is None


def test_what_stays_is_loaded_again_when_told_to() -> None:
    slots = Slots(2)
    with Ring([0, 1, 2, 2, 1, 0], 2, slots.load) as ring:
        slots.use_all(ring, (0, 1, 2, 2, 1, 0))
        assert sorted(layer for layer in ring.layer_by_slot if layer is not None) == [0, 1]
        slots.loads.clear()
        slots.gate.clear()
        ring.reload_slots()
        reader = threading.Thread(target=slots.use, args=(ring, 0))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive()  # it waits, although the layer is there
        slots.gate.set()
        reader.join(240)
        slots.use(ring, 1)
        assert [layer for layer, _ in slots.loads[:2]] == [0, 1]
        slots.use(ring, 2)
        assert slots.violations == []
        ring.acquire()
        with pytest.raises(RuntimeError, match="1 layers are acquired"):
            ring.reload_slots()
        ring.release()


def test_an_error_of_a_reload_stays() -> None:
    slots = Slots(2)
    with Ring([0, 1], 2, slots.load) as ring:
        slots.use_all(ring, (0, 1))
        slots.fail_layer = 0
        ring.reload_slots()
        for call in (ring.wait_for_loads, ring.acquire, ring.begin_round):
            with pytest.raises(OSError, match="bad sector"):
                call()


def test_a_reload_that_is_given_up_leaves_the_layer_where_it_is() -> None:
    slots = Slots(2)
    with Ring([0, 1], 2, slots.load) as ring:
        slots.use_all(ring, (0, 1))
        slots.loads.clear()
        slots.gate.clear()
        ring.reload_slots()
        ring.begin_round()
        slots.gate.set()
        slots.use_all(ring, (0, 1))
        assert [layer for layer, _ in slots.loads] in ([], [0])  # but for what had begun
