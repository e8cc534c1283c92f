"""Groups of experts on their way to devices."""

import threading
import time
from functools import partial

import jax
import numpy as np
import pytest

from jmoe.memory.buffers import allocate_slots
from jmoe.memory.link import Link
from jmoe.memory.pinned import PinnedSlots
from jmoe.offload.device_workers import DeviceWorkers
from jmoe.offload.expert_index import LocalExperts
from jmoe.offload.training_slots import TrainingSlots
from jmoe.offload.weight_staging import GROUP_BYTES, StagedGroups
from tests.links import WaitingLink

SHAPE = (40, 30)
FLOAT = np.dtype(np.float32)
DEVICES = jax.devices()[:8]


def groups_of(device: jax.Device, link: Link, *, pinned: bool = False) -> StagedGroups:
    fields = {"w": (SHAPE, FLOAT), "b": ((3,), FLOAT)}
    allocate = partial(_pinned, device=device) if pinned else allocate_slots
    return StagedGroups(fields, allocate, {device: link})


def _pinned(num_slots: int, slot_bytes: int, *, device: jax.Device) -> PinnedSlots:
    return PinnedSlots(num_slots, slot_bytes, device)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_group_that_was_sent_may_be_written_again(pinned: bool) -> None:
    link = Link()
    groups, sent = groups_of(DEVICES[1], link, pinned=pinned), []
    for value in range(6):  # more than there are groups
        with groups.borrow(2) as group:
            group.arrays["w"][:], group.arrays["b"][:] = value, -value
            sent.append(group.send(DEVICES[1]))
    for value, (arrays, transfer) in enumerate(sent):
        transfer.wait()
        assert arrays["w"].devices() == {DEVICES[1]} and arrays["w"].shape == (2, *SHAPE)
        assert np.all(np.asarray(arrays["w"]) == value)
        assert np.all(np.asarray(arrays["b"]) == -value)
    stats = link.stats()
    assert (stats.transfers, stats.num_bytes) == (6, 6 * 2 * 4 * (40 * 30 + 3))


def test_sizes_hold_exactly_the_experts() -> None:
    groups, left, sizes = groups_of(DEVICES[0], Link()), 27, []
    while left:
        sizes.append(groups.largest_group_size(left))
        left -= sizes[-1]
    assert sizes == [8, 8, 8, 2, 1]
    large = StagedGroups(
        {"w": ((GROUP_BYTES // 4, 1), FLOAT)}, allocate_slots, {DEVICES[0]: Link()}
    )
    assert large.largest_group_size(27) == 1


def test_a_group_waits_for_its_transfer_and_others_do_not() -> None:
    may_end = threading.Event()
    slow = WaitingLink(lambda: may_end.wait(60))
    groups = groups_of(DEVICES[0], slow)
    for _ in range(2):
        with groups.borrow(1) as group:
            _, transfer = group.send(DEVICES[0])
    with groups.borrow(2):
        pass
    assert slow.num_ended == 0
    threading.Timer(0.1, may_end.set).start()
    with groups.borrow(1):
        assert slow.num_ended >= 1
    transfer.wait()


def test_a_group_is_free_after_an_error() -> None:
    groups = groups_of(DEVICES[0], Link())
    for _ in range(4):
        with pytest.raises(OSError, match="broken"), groups.borrow(1):
            raise OSError("broken")


def test_all_links_are_busy_at_once() -> None:
    """Eight devices, each with experts of its own, and links that wait for each other."""
    shapes = {"w": SHAPE}
    local = LocalExperts(np.arange(16), tuple((d,) for d in DEVICES), np.arange(16))
    barrier = threading.Barrier(len(DEVICES))  # broken after a minute if links carry in turn
    links = [WaitingLink(lambda: barrier.wait(60)) for _ in DEVICES]
    slots = TrainingSlots(local, shapes, 1, None)
    by_link = dict(zip(DEVICES, links, strict=True))
    staging = [StagedGroups({"w": (SHAPE, FLOAT)}, allocate_slots, by_link) for _ in DEVICES]
    workers = DeviceWorkers(len(DEVICES))
    parts = slots.groups_by_device(0, 0, np.arange(16))
    assert [part.tolist() for part in parts] == [[2 * d, 2 * d + 1] for d in range(8)]

    def load(d: int) -> None:
        with staging[d].borrow(2) as group:
            group.arrays["w"][:] = parts[d][:, None, None]
            (transfer,) = slots.write_group(0, 0, parts[d].tolist(), group)
        transfer.wait()

    workers.run([partial(load, d) for d in range(8)])
    slots.finish_writes(0)
    workers.close()
    assert [link.num_ended for link in links] == [1] * len(DEVICES)
    assert [w["w"][0, 0] for w in slots.iterate_weights(0, 0)] == list(range(16))


def test_workers_end_all_jobs_before_they_raise() -> None:
    workers, ended = DeviceWorkers(2), list[int]()
    other_began = threading.Event()

    def fail() -> None:
        other_began.wait(60)
        raise OSError("broken")

    def succeed() -> None:
        other_began.set()
        time.sleep(0.05)
        ended.append(1)

    with pytest.raises(OSError, match="broken"):
        workers.run([fail, succeed])
    assert ended == [1]
    here = threading.current_thread()
    assert workers.run([threading.current_thread]) == [here]
    assert DeviceWorkers(1).run(2 * [threading.current_thread]) == 2 * [here]
    workers.close()
