"""Training on eight devices of one process whose experts the host updates: every link carries
experts at the same time, and the training is that of updates on the devices.
"""

import contextlib
import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from test_streamed_step import BY_XLA, MODEL, UPDATED_ON_HOST, N, batch

from jmoe.config import TrainConfig
from jmoe.offload.expert_updates import HostUpdate
from jmoe.run.planner import training_plan
from jmoe.training.streamed.step import StreamedTrainer
from tests.arrays import differing, full_state
from tests.links import TracedLink, most_at_once
from tests.model_configs import mesh_of, spread_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEVICES, E, STEPS = 8, 16, 4
EVERY_EXPERT = dataclasses.replace(MODEL, num_experts=E, num_experts_per_tok=E)
CONFIG = dataclasses.replace(spread_over(BY_XLA, 1, 1, DEVICES), model=EVERY_EXPERT, batch_size=8)


def train(config: TrainConfig, links: dict[str, list[TracedLink]] | None = None) -> Any:
    """Losses, the last state, and bytes to devices and back of the last step."""
    with contextlib.closing(StreamedTrainer(config, mesh_of(1, 1, DEVICES))) as program:
        state, losses, moved = program.init(), [], []
        experts = program._loaded_experts
        for step in range(STEPS):
            state, metrics = program.step(state, batch(config, step))
            losses.append(float(metrics["loss"]))
            experts._ring.wait_for_loads()  # until the next step begins
            moved.append(program.expert_stats().link)
            if links is not None and step == 0:
                links["to"] = [TracedLink(2e4) for _ in range(DEVICES)]
                links["from"] = [TracedLink(2e4) for _ in range(DEVICES)]
                update = cast(HostUpdate, experts._update)
                update.links.update(zip(update.links, links["to"], strict=True))
                moved[0] = moved[0]._replace(from_device=0)  # new links count anew
                experts._gradients.links = list(links["from"])
        return losses, full_state(program, state), np.subtract(moved[-1], moved[-2])


def test_every_link_is_busy_at_once_and_no_bit_changes() -> None:
    links: dict[str, list[TracedLink]] = {}
    tiers = dataclasses.replace(UPDATED_ON_HOST, device_layers=1)
    config = dataclasses.replace(CONFIG, tiers=tiers)
    here = train(config, links)
    there = train(dataclasses.replace(config, tiers=dataclasses.replace(tiers, update="device")))
    assert here[0] == there[0]
    assert differing(here[1], there[1]) == []
    assert most_at_once(links["to"]) == most_at_once(links["from"]) == DEVICES
    planned = training_plan(config).expert_traffic_by_pass()
    assert sum(here[2]) == pytest.approx(N * E * sum(traffic.link_bytes for traffic in planned))
