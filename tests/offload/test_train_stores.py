"""Checkpoints of experts as they stand: nothing is written but what changed, and a run goes on
from them to the bit.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest

import jmoe.offload.expert_state
from jmoe.config import CheckpointConfig, TiersConfig, TrainConfig
from jmoe.memory.closing import Closing
from jmoe.memory.record_checkpoint import ITEM, RecordCheckpoints
from jmoe.memory.version_store import VersionStore
from jmoe.offload.expert_state import ExpertState
from jmoe.offload.lazy_adamw import ReplayState
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState
from jmoe.training.streamed.step import StreamedTrainer
from tests.arrays import differing, full_state
from tests.fakes import wait_for
from tests.model_configs import mesh_of, stored_in
from tests.training.streamed.test_streamed_step import (
    CONFIG,
    HOST,
    STEPS,
    E,
    N,
    Trained,
    batch,
    held_out_batches,
    train,
)

SAVED = 3
NVME = TiersConfig("nvme", "nvme", "nvme", host_cache_bytes=150_000)


class Opened(Closing):
    """A run's program, with its checkpoints in a folder."""

    def __init__(self, folder: Path, tiers: TiersConfig, config: TrainConfig = CONFIG) -> None:
        tiers = stored_in(tiers, folder / "records")
        self.folder, self.config = folder / "checkpoints", dataclasses.replace(config, tiers=tiers)
        shape = (1, config.mesh.expert_inter, config.mesh.expert_intra)
        self.program = StreamedTrainer(self.config, mesh_of(*shape))
        self.losses: list[float] = []

    def close(self) -> None:
        self.program.close()

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.folder, CheckpointConfig(keep=9), records=self.program.records, timeout_s=60
        )

    def steps(self, state: TrainState, until: int) -> TrainState:
        for step in range(int(state.step), until):
            state, metrics = self.program.step(state, batch(self.config, step))
            self.losses.append(float(metrics["loss"]))
        return state

    def save(self, state: TrainState) -> None:
        with self.checkpoints() as checkpoints:
            if int(state.step) not in checkpoints.steps():
                checkpoints.save(
                    int(state.step), self.program.prepare_state_for_save(state), 0, "{}"
                )

    def restore(self, step: int) -> TrainState:
        with self.checkpoints() as checkpoints:
            return restore_checkpoint(self.program, checkpoints, step)[0]

    def whole(self, state: TrainState) -> TrainState:
        return full_state(self.program, state)

    def listed(self, step: int) -> dict[str, Any]:
        """What process 0 has listed of a step."""
        listed: dict[str, Any] = json.loads(
            (self.folder / str(step) / ITEM / "process-0.json").read_text()
        )
        return listed


@pytest.fixture(scope="module")
def undisturbed() -> Trained:
    """In host memory, and never saved."""
    return train(CONFIG, HOST)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A run on NVMe with a checkpoint after `SAVED` steps."""
    with Opened(tmp_path_factory.mktemp("lazy"), NVME) as run:
        run.save(run.steps(run.program.init(), SAVED))
        yield run


@pytest.mark.parametrize(
    "tiers",
    [
        NVME,
        pytest.param(dataclasses.replace(NVME, write_back_every_steps=1), marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(NVME, gradients="host"), marks=pytest.mark.slow),
        pytest.param(
            TiersConfig(experts="host", optimizer="nvme", gradients="nvme"), marks=pytest.mark.slow
        ),
        pytest.param(TiersConfig(experts="device", optimizer="nvme"), marks=pytest.mark.slow),
    ],
    ids=["nvme", "written-back", "gradients-host", "weights-host", "weights-device"],
)
def test_it_goes_on_to_the_bit(undisturbed: Trained, tiers: TiersConfig, tmp_path: Path) -> None:
    """Gradients wait and experts were idle; the run had gone on for a while from where it saved."""
    check_that_it_goes_on(undisturbed, tiers, tmp_path)


@pytest.mark.slow  # test_streamed_step.py restores one of these checkpoints too
def test_updated_on_the_host_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    undisturbed = train(CONFIG, dataclasses.replace(HOST, update="host"))
    check_that_it_goes_on(undisturbed, dataclasses.replace(NVME, update="host"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [("host", "device"), ("device", "host")],
)
def test_the_update_may_move_between_device_and_host(
    undisturbed: Trained,
    first: Literal["host", "device"],
    then: Literal["host", "device"],
    tmp_path: Path,
) -> None:
    """With gradients that wait, to another tier and back again."""
    config = dataclasses.replace(CONFIG, native="off")  # XLA: the bits of the device's update
    with Opened(tmp_path, dataclasses.replace(NVME, update=first), config) as run:
        run.save(run.steps(run.program.init(), SAVED))
        assert run.listed(SAVED)["beside"]["applied"]
    with Opened(tmp_path, dataclasses.replace(HOST, update=then), config) as run:
        run.save(run.steps(run.restore(SAVED), SAVED + 1))
    with Opened(tmp_path, dataclasses.replace(NVME, update=then), config) as run:
        state = run.steps(run.restore(SAVED + 1), STEPS)
        assert run.losses == undisturbed.losses[SAVED + 1 :]
        assert differing(run.whole(state), undisturbed.state) == []


def check_that_it_goes_on(undisturbed: Trained, tiers: TiersConfig, tmp_path: Path) -> None:
    """See `test_it_goes_on_to_the_bit`."""
    with Opened(tmp_path, tiers) as run:
        state = run.steps(run.program.init(), SAVED)
        run.save(state)
        run.steps(state, SAVED + 1)
        listed = run.listed(SAVED)
        waiting = {int(name.split(".")[0]) for name in listed["versions"]["gradients"]}
        behind = {int(index) for index in listed["beside"]["applied"]}
        assert waiting < behind
        assert waiting or tiers.experts == "device"  # there all are in slots, and updated at once
        assert run.losses == undisturbed.losses[: SAVED + 1]
    with Opened(tmp_path, tiers) as run:
        state = run.steps(run.restore(SAVED), SAVED + 2)
        run.save(state)
        run.steps(state, SAVED + 3)
        del run.losses[2:]
        state = run.steps(run.restore(SAVED + 2), STEPS)
        assert run.losses == undisturbed.losses[SAVED:]
        held_out = [
            float(nll) for nll in run.program.evaluate_batches(state, held_out_batches(CONFIG))
        ]
        assert held_out == undisturbed.held_out
        assert differing(run.whole(state), undisturbed.state) == []


def test_what_the_last_step_left_under_way_is_not_restored_over(
    undisturbed: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring still brings experts up to date for a next step as a checkpoint of before becomes
    current.
    """
    catch_up = ExpertState._apply_skipped_steps

    def slow(experts: ExpertState, *args: Any) -> int:
        if threading.current_thread().name == "ring":
            time.sleep(0.1)
        return catch_up(experts, *args)

    with Opened(tmp_path, NVME) as run:
        state = run.steps(run.program.init(), SAVED)
        run.save(state)
        monkeypatch.setattr(ExpertState, "_apply_skipped_steps", slow)
        run.steps(state, SAVED + 1)
        state = run.restore(SAVED)
        monkeypatch.undo()
        del run.losses[SAVED:]
        run.steps(state, STEPS)
        assert run.losses == undisturbed.losses


def test_a_save_writes_what_changed_and_nothing_else(tmp_path: Path) -> None:
    """Half of the experts never get a token: their records are those of the save before."""
    with Opened(tmp_path, dataclasses.replace(NVME, gradients="host")) as run:
        state = run.program.init()
        away = -100.0 * (np.arange(E) % 2).astype(np.float32)
        state = dataclasses.replace(
            state, router_bias=jax.tree.map(lambda b: b + away, state.router_bias)
        )
        run.save(state)
        used = {layer * E + expert for layer in range(N) for expert in range(0, E, 2)}
        versions = [run.listed(0)["versions"]]
        for step in (4, 8):
            state = run.steps(state, step)
            experts = run.program._loaded_experts
            experts._ring.wait_for_loads()
            updates = experts.stats().updates
            run.save(state)
            assert experts.stats().updates == updates  # nobody was brought up to date for it
            versions.append(run.listed(step)["versions"])
            for kind in ("weights", "moments"):
                changed = {
                    int(n.split(".")[0]) for n in set(versions[-1][kind]) - set(versions[-2][kind])
                }
                assert changed and changed <= used
                assert len(versions[-1][kind]) == N * E
            assert {int(n.split(".")[0]) for n in versions[-1]["gradients"]} <= used
        stores = run.program.stores._versions.values()
        writes = [store.stats().writes for store in stores]
        run.program.prepare_state_for_save(state)
        # also those of gradients that still wait
        assert [store.stats().writes for store in stores] == writes


@pytest.mark.parametrize("every", [0, 2])
def test_what_changed_is_written_back_every_few_steps(every: int, tmp_path: Path) -> None:
    """The cache holds everything, so that before a save nothing else makes a record be written."""
    tiers = dataclasses.replace(NVME, host_cache_bytes=10_000_000, write_back_every_steps=every)
    with Opened(tmp_path, tiers) as run:
        state = run.steps(run.program.init(), 1)
        experts = run.program._loaded_experts

        def written() -> list[int]:
            return [
                store.stats().nvme_writes.num_bytes for store in experts.stores.present_stores()
            ]

        assert written() == [0, 0, 0]
        state = run.steps(state, 2)
        if every:
            wait_for(lambda: all(written()), "nothing was written after the second step")
        else:
            experts._ring.wait_for_loads()
            assert written() == [0, 0, 0]
            run.save(state)
            assert all(written())


def records_of(
    folder: Path, layouts: dict[str, VersionStore], listed: dict[str, Any]
) -> dict[str, dict[int, Any]]:
    """Every file of a checkpoint: kind -> record -> arrays."""
    found: dict[str, dict[int, Any]] = {}
    for kind, store in layouts.items():
        for name in listed["versions"][kind]:
            record_R = store.layout.zeros()
            store.read_version(folder / kind / name, record_R)
            found.setdefault(kind, {})[int(name.split(".")[0])] = store.layout.views(record_R)
    return found


def test_a_record_is_brought_up_to_date_alone(saved: Opened) -> None:
    """From the checkpoint's files, without the run: to the bit what the run makes of it."""
    whole = saved.whole(saved.restore(SAVED))
    listed = saved.listed(SAVED)
    replay_state = ReplayState.from_record_lists([listed])
    assert replay_state is not None and replay_state.pending
    files = records_of(saved.folder / str(SAVED) / ITEM, saved.program.stores._versions, listed)
    assert len(files["weights"]) == len(files["moments"]) == N * E
    experts = [tree["moe_layers"]["moe"]["experts"] for tree in (whole.params, whole.m, whole.v)]
    for index in range(N * E):
        w = {name: files["weights"][index][name] for name in experts[0]}
        m, v = ({name: files["moments"][index][f"{part}.{name}"] for name in w} for part in "mv")
        g = (
            {name: files["gradients"][index][name] for name in w}
            if index in replay_state.pending
            else None
        )
        for ours, theirs in zip(replay_state.catch_up(index, w, m, v, g), experts, strict=True):
            for name, array in ours.items():
                np.testing.assert_array_equal(array, theirs[name][divmod(index, E)])


@pytest.mark.parametrize("change", [{"weight_decay": 0.9}, {"gradient_dtype": "bfloat16"}], ids=str)
def test_missed_steps_keep_the_settings_of_their_time(
    saved: Opened, change: dict[str, Any], tmp_path: Path
) -> None:
    expected = saved.whole(saved.restore(SAVED))
    known = {field.name for field in dataclasses.fields(CONFIG.optimizer)}
    optimizer = dataclasses.replace(
        CONFIG.optimizer, **{k: v for k, v in change.items() if k in known}
    )
    tiers = dataclasses.replace(NVME, **{k: v for k, v in change.items() if k not in known})
    with Opened(tmp_path, tiers, dataclasses.replace(CONFIG, optimizer=optimizer)) as run:
        run.folder = saved.folder
        assert differing(run.whole(run.restore(SAVED)), expected) == []


def test_nobody_is_behind_for_ever(saved: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jmoe.offload.expert_state, "MAX_STEPS_BEHIND", 1)
    state = saved.steps(saved.restore(SAVED), SAVED + 2)
    saved.save(state)
    listed = saved.listed(SAVED + 2)
    beside = listed["beside"]
    assert set(beside["applied"].values()) == {SAVED + 1}
    assert (beside["first"], len(beside["lr"]), len(beside["clip"])) == (SAVED + 1, 1, 1)
    expected = saved.whole(state)
    assert differing(saved.whole(saved.restore(SAVED + 2)), expected) == []


def test_a_checkpoint_of_before_has_nothing_behind(
    saved: Opened, undisturbed: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lists name weights and moments only, all of them up to date."""
    pin = RecordCheckpoints.pin_versions

    def pin_as_before(records: RecordCheckpoints, step: int) -> dict[str, Any]:
        pinned = pin(records, step)
        del pinned["beside"], pinned["pins"]["gradients"], pinned["versions"]["gradients"]
        return pinned

    state = saved.steps(saved.restore(SAVED), SAVED + 1)
    expected = saved.whole(state)
    monkeypatch.setattr(RecordCheckpoints, "pin_versions", pin_as_before)
    saved.folder = saved.folder.with_name("before")
    saved.save(state)
    state = saved.restore(SAVED + 1)
    saved.folder = saved.folder.with_name("checkpoints")
    assert differing(saved.whole(state), expected) == []
    losses = len(saved.losses)
    saved.steps(state, STEPS)
    assert saved.losses[losses:] == undisturbed.losses[SAVED + 1 :]
