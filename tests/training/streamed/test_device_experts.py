"""Room on the device for a share of a layer's experts: the training of room for all, bit for
bit.
"""

import contextlib
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_streamed_step import HOST, Trained, held_out_batches, same_training, train

from jmoe.config import TiersConfig
from jmoe.offload.expert_state import ExpertState
from jmoe.offload.training_slots import Slot
from jmoe.training.trainer import make_trainer
from tests.model_configs import mesh_of
from tests.train_runs import Run
from tests.training.streamed.room_for_experts import CASES, MANY, E

ENOUGH, STEPS = 0.5, 4  # 16 of 32 experts


def with_room(share: float) -> TiersConfig:
    return dataclasses.replace(HOST, device_experts=share)


def compared(run_python: Run, case: str, share: float, folder: Path) -> dict[str, Any]:
    """What `room_for_experts` says of a case, with the emitters of a run of `train.py`."""
    arguments = ["-m", "tests.training.streamed.room_for_experts", case, str(share), str(folder)]
    done = run_python(arguments, {"XLA_FLAGS": ""}, timeout=600)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["same_losses"] and result["differing"] == []
    assert result["room"] >= result["most_chosen_share"] > result["chosen_share"] > 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", ["host", "nvme"])
def test_room_for_those_that_are_chosen_changes_no_bit(
    run_python: Run, case: str, tmp_path: Path
) -> None:
    """With an evaluation and a checkpoint in between."""
    assert compared(run_python, case, ENOUGH, tmp_path)["room"] == ENOUGH


@pytest.mark.slow
@pytest.mark.parametrize("share", [1 / E, 0.75])
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0].mesh.expert_intra > 1])
def test_eight_devices(run_python: Run, case: str, share: float, tmp_path: Path) -> None:
    """Each has a part of the experts, and all have as much room as the one that needs most."""
    assert compared(run_python, case, share, tmp_path)["room"] >= share


@pytest.fixture(scope="module")
def room_for_all() -> Trained:
    return train(MANY, HOST, STEPS)


@pytest.mark.slow
def test_slots_grow_where_there_is_no_room(
    room_for_all: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    """One row at first, and a growth in the middle of a pass: layers before it go back with
    fewer rows.
    """
    there = train(MANY, with_room(1 / E), STEPS, flush_updates=True)
    same_training(there, room_for_all, losses_rtol=1e-6, metrics_rtol=1e-5)
    assert there.stats.most_chosen_share == room_for_all.stats.most_chosen_share
    assert (
        there.stats.most_chosen_share <= there.stats.room <= there.stats.most_chosen_share + 1 / 8
    )
    assert caplog.records[0].levelno == logging.WARNING
    assert "tiers.device_experts is too small: a layer's tokens chose" in caplog.text


def test_gradients_of_those_chosen_move_alone(room_for_all: Trained) -> None:
    there = train(MANY, with_room(ENOUGH), STEPS)
    same_training(there, room_for_all, losses_rtol=1e-6, metrics_rtol=1e-5)
    chosen = sum(int((m["counts"] > 0).sum()) for m in there.metrics)
    assert there.stats.gradients.host.transfers == 2 * chosen  # written once, read once
    np.testing.assert_allclose(there.stats.chosen_share, chosen / (STEPS * 3 * E))


@pytest.mark.slow
def test_the_host_updates_experts_in_few_slots(room_for_all: Trained) -> None:
    there = train(MANY, dataclasses.replace(with_room(ENOUGH), update="host"), STEPS)
    same_training(there, room_for_all, losses_rtol=1e-6, metrics_rtol=1e-5)
    assert there.stats.room == ENOUGH and there.stats.replayed_steps > 0


def test_batches_of_an_evaluation_take_turns_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they choose more experts than there is room for, each alone does not."""
    given, fetch_more = list[tuple[int, Any]](), ExpertState.fetch_more_experts

    def noting(self: ExpertState, chosen_P: Any) -> Slot:
        slot = fetch_more(self, chosen_P)
        given.append((slot[0]["w_up"].shape[0], chosen_P))
        return slot

    monkeypatch.setattr(ExpertState, "fetch_more_experts", noting)
    losses, batches = list[list[float]](), held_out_batches(MANY)
    for share in (1.0, ENOUGH):
        given.clear()
        config = dataclasses.replace(MANY, tiers=with_room(share))
        with contextlib.closing(make_trainer(config, mesh_of(1, 1, 1))) as program:
            losses.append([float(nll) for nll in program.evaluate_batches(program.init(), batches)])
    room = int(ENOUGH * E)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert {rows for rows, _ in given} == {room}
    of_first_layer = [chosen_P for _, chosen_P in given[: len(batches)]]
    assert (
        max(chosen_P.sum() for chosen_P in of_first_layer)
        <= room
        < np.any(of_first_layer, axis=0).sum()
    )
