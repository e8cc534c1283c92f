"""Layouts that change between two steps: on measured loads, when a task ends, when a signal asks
for other devices.

No loss changes by that, no image is left out or comes twice, and a task that has ended keeps its
own parameters.
"""

import contextlib
import dataclasses
import math
import signal
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from jmoe.cluster.signals import RequestSignal
from jmoe.config import TiersConfig, VisionTrainConfig
from jmoe.config.vision import ElasticConfig
from jmoe.data.image_batches import ImageBatches
from jmoe.mesh import first_devices, make_mesh
from jmoe.training.expert_packing import PackingController
from jmoe.training.tasks.layouts import plan_task_layout
from jmoe.training.tasks.session import DEVICES_FILE, VisionSession
from jmoe.training.tasks.step import VisionTrainer
from jmoe.training.tasks.trainer import ImageTrainer, make_vision_trainer
from tests.arrays import differing, full_state
from tests.vision_tasks import CLASSES, CONFIG, TASKS

# Layers without experts that tokens choose compile in half of the time.
MODEL = dataclasses.replace(
    CONFIG.model, num_hidden_layers=2, mlp_only_layers=(0,), task_layers=(1,)
)
ELASTIC = dataclasses.replace(CONFIG, model=MODEL, layout="elastic")
Losses = list[dict[str, float]]


def session(folder: Path, num_devices: int, **changes: Any) -> VisionSession:
    config: VisionTrainConfig = dataclasses.replace(ELASTIC, output_dir=str(folder), **changes)
    mesh = make_mesh((num_devices, 1, 1), first_devices(num_devices))
    layout = plan_task_layout(config, num_devices)
    trainer = make_vision_trainer(config, CLASSES, mesh, layout)
    batches = ImageBatches(TASKS, config, layout, 0, num_devices)
    unlimited: Any = types.SimpleNamespace(waiting_for=lambda *_, **__: contextlib.nullcontext())
    none: Any = None
    return VisionSession(
        config=config,
        resolved={},
        mesh=mesh,
        corpus=TASKS,
        batches=batches,
        trainer=trainer,
        checkpoints=none,
        watchdog=unlimited,
        folder=none,
        files={},
        expert_packing=none,
    )


def train(run: VisionSession, num_steps: int, state: Any = None) -> tuple[Any, Losses]:
    """The state after so many steps, and the losses since the state given, or since step 0."""
    state, losses = run.trainer.init() if state is None else state, []
    for step in range(int(state.step), num_steps):
        state = run.rebalance(step, state)
        state, metrics = run.trainer.step(state, run.next_batch())
        assert metrics["ok"]
        losses.append({name: float(loss) for name, loss in metrics["task_loss"].items()})
    assert run.batches.get_state()["next_step"] == num_steps
    return state, losses


def counts(run: VisionSession) -> list[int]:
    """How many devices each task has."""
    assert isinstance(run.trainer, ImageTrainer)
    return [len(run.trainer.layout.devices_of(task)) for task in range(len(TASKS))]


def assert_near(losses: Losses, expected: Losses) -> None:
    assert [step.keys() for step in losses] == [step.keys() for step in expected]
    for step, wanted in zip(losses, expected, strict=True):
        assert step == pytest.approx(wanted, rel=0, abs=1e-5)


@pytest.mark.slow
def test_a_measured_load_changes_the_layout_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(session(tmp_path, 4), 3)[1]
    run = session(tmp_path, 2, elastic=ElasticConfig(replan_every_steps=2))
    monkeypatch.setattr(
        VisionTrainer, "measure_seconds_per_image", lambda *_: [1e-3, 1e-3, 1e-3, 9e-3]
    )
    before = counts(run), run.trainer.layout.shares[1]
    assert_near(train(run, 3)[1], expected)
    assert run.trainer.layout.shares[1] != before[1]
    said = capsys.readouterr().out
    assert (
        "layout before step 2: the busiest device has 1.50 x the mean load: another layout makes"
        " its step" in said
    )


def own_parts(run: VisionSession, state: Any, task: str, expert: int) -> Any:
    """Copies of a task's head and of an expert, with their moments."""
    state = full_state(run.trainer, state)
    host = {"params": state.params, "m": state.m, "v": state.v}
    return {
        name: (
            tree["heads"][task],
            {w: values[:, expert] for w, values in tree["task_layers"]["moe"]["experts"].items()},
        )
        for name, tree in host.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_task_that_ends_leaves_its_devices_and_keeps_its_parameters(
    tmp_path: Path, tier: Any
) -> None:
    tasks = CONFIG.tasks | {"middle": dataclasses.replace(CONFIG.tasks["middle"], num_steps=1)}
    run = session(tmp_path, 4, tasks=tasks, tiers=TiersConfig(experts=tier, optimizer=tier))
    state, first = train(run, 1)
    assert counts(run) == [1, 1, 1, 1]
    kept, other = own_parts(run, state, "middle", 1), own_parts(run, state, "other", 3)
    state, losses = train(run, 3, state)
    assert counts(run) == [2, 0, 1, 1]
    assert [step.keys() for step in losses] == 2 * [CLASSES.keys() - {"middle"}]
    assert differing(kept, own_parts(run, state, "middle", 1)) == []
    assert differing(other, own_parts(run, state, "other", 3)) != []
    run.trainer.close()
    assert_near(first + losses, train(session(tmp_path, 1, tasks=tasks), 3)[1])


@pytest.mark.slow
def test_a_signal_shrinks_and_grows_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    run = session(tmp_path, 4)
    with RequestSignal() as run.resizing:
        state, losses, sizes = None, [], []
        for stop, text in enumerate(("", "2", "999", "many", "4"), 1):
            (tmp_path / DEVICES_FILE).write_text(text) if text else None
            signal.raise_signal(signal.SIGUSR2)
            state, more = train(run, stop, state)
            losses += more
            sizes.append(run.mesh.size)
    signal.signal(signal.SIGUSR2, before)
    assert sizes == [4, 2, 2, 2, 4]
    assert counts(run) == [1, 1, 1, 1]
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("layout before step")
    ]
    path = tmp_path / DEVICES_FILE
    assert said[0].startswith("layout before step 0: warning: SIGUSR2 changes nothing: [Errno 2]")
    assert said[1] == f"layout before step 1: 2 devices, as {path} says"
    refused, most = "warning: SIGUSR2 changes nothing", jax.device_count()
    assert said[2:4] == [
        f"layout before step 2: {refused}: devices = 999: must be between 1 and {most}",
        f"layout before step 3: {refused}: {path} = 'many': must be a number of devices",
    ]
    assert_near(losses, train(session(tmp_path, 1), 5)[1])


def test_idle_time_is_what_a_process_does_not_compute(tmp_path: Path) -> None:
    """Two devices of this process are worth two processors: six seconds of both, of which half
    are used.
    """
    run = session(tmp_path, 2)
    run.expert_packing = PackingController(run.config, (2, 1, 1), 1)
    assert all(map(math.isnan, run.idle.fraction_by_device(2)))
    run.note_step(90.0, 1.0, compiled=True)
    assert all(map(math.isnan, run.idle.fraction_by_device(2)))
    run.note_step(2.0, 3.0, compiled=False)
    run.note_step(4.0, 3.0, compiled=False)
    assert run.idle.fraction_by_device(2) == [0.5, 0.5]
    run.note_step(1.0, 60.0, compiled=False)  # a device may compute with several
    assert run.idle.fraction_by_device(2) == [0.0, 0.0]


def test_an_image_is_timed_a_task(tmp_path: Path) -> None:
    run = session(tmp_path, 1)
    assert isinstance(run.trainer, VisionTrainer)
    measured = run._measure_seconds_per_image(run.trainer, run.trainer.init())
    assert measured.keys() == CLASSES.keys()
    assert all(0 < seconds < 10 for seconds in measured.values())
    assert run.batches.get_state()["next_step"] == 0


def test_experts_on_tiers_stay_with_their_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = session(tmp_path, 2, tiers=TiersConfig(experts="host", optimizer="host"))
    with contextlib.closing(run.trainer), RequestSignal() as run.resizing:
        (tmp_path / DEVICES_FILE).write_text("4")
        signal.raise_signal(signal.SIGUSR2)
        run.rebalance(0, run.trainer.init())
    assert run.mesh.size == 2
    refused = (
        "tiers = ('host', 'host'): must be device for another number of devices while the run"
        " goes on"
    )
    assert (
        f"layout before step 0: warning: SIGUSR2 changes nothing: {refused}"
        in capsys.readouterr().out
    )
