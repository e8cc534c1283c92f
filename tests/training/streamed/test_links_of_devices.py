"""Training on eight devices whose experts the host updates: every link carries experts at the same
time, in one process and in two, and the training is that of updates on the devices.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from test_streamed_step import N

from jmoe.run.planner import training_plan
from tests.arrays import differing
from tests.links import most_at_once
from tests.train_runs import Start, free_port
from tests.training.streamed.traced_links import DEVICES, ONE_PROCESS, E, Traced, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def updated_on_devices() -> Traced:
    tiers = dataclasses.replace(ONE_PROCESS.tiers, update="device")
    return train(dataclasses.replace(ONE_PROCESS, tiers=tiers))


def bytes_of_a_step() -> float:
    """The formula of the plan, over all devices."""
    planned = training_plan(ONE_PROCESS).expert_traffic_by_pass()
    return N * E * sum(traffic.link_bytes for traffic in planned)


def test_every_link_is_busy_at_once_and_no_bit_changes(updated_on_devices: Traced) -> None:
    here = train(ONE_PROCESS)
    assert here.losses == updated_on_devices.losses
    assert differing(here.state, updated_on_devices.state) == []
    moments = ([link.moments for link in links] for links in (here.to, here.back))
    assert [most_at_once(links) for links in moments] == [DEVICES, DEVICES]
    assert sum(here.moved) == pytest.approx(bytes_of_a_step())


def test_every_link_of_two_processes_is_busy_at_once(
    updated_on_devices: Traced, start_python: Start, tmp_path: Path
) -> None:
    """Both processes read one clock."""
    port, here = str(free_port()), {"JAX_NUM_CPU_DEVICES": str(DEVICES // 2)}
    command = ["-m", "tests.training.streamed.traced_links"]
    ranks = [
        start_python([*command, str(rank), port, tmp_path], tmp_path / f"{rank}.log", here)
        for rank in range(2)
    ]
    for process in ranks:
        process.end(600)
    found: list[dict[str, Any]] = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    ]
    for own in found:
        assert own["losses"] == pytest.approx(updated_on_devices.losses, rel=1e-6, abs=0)
    for direction in ("to", "back"):
        assert most_at_once([link for own in found for link in own[direction]]) == DEVICES
    assert sum(sum(own["moved"]) for own in found) == pytest.approx(bytes_of_a_step())
