"""A run that goes on with its experts on other tiers, or on other devices: the same state, bit for
bit.

Legend: N MoE layers, E experts.
"""

import contextlib
import dataclasses
import gc
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import pytest
from test_finetune import config_of as pretrained_config

from jmoe.config import CheckpointConfig, MeshConfig, ModelConfig, TiersConfig, TrainConfig
from jmoe.deploy.merge import saved_parameters
from jmoe.models.weights import StoredExperts, flatten_by_path
from jmoe.offload.train_stores import ExpertStores
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.finetune import load_pretrained_state
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer, make_trainer
from tests.arrays import differing, full_state
from tests.model_configs import mesh_of, stored_in
from tests.training.streamed.test_streamed_step import CONFIG, batch

DEVICE = TiersConfig()
MIXED = TiersConfig(experts="device", optimizer="host")
HOST = TiersConfig(experts="host", optimizer="host")
HALF = TiersConfig(experts="host", optimizer="nvme")
NVME = TiersConfig(experts="nvme", optimizer="nvme", gradients="nvme")
TIERS = {"device": DEVICE, "mixed": MIXED, "host": HOST, "half": HALF, "nvme": NVME}


@contextlib.contextmanager
def opened(
    tiers: TiersConfig, folder: Path, devices: int = 1, replicas: int = 1
) -> Iterator[tuple[Trainer, Checkpoints]]:
    """The program of a run in this folder and its checkpoints, as train.py opens them."""
    tiers = stored_in(tiers, folder / "records")
    mesh = MeshConfig(replicas, devices, 1)
    config = dataclasses.replace(CONFIG, tiers=tiers, mesh=mesh, output_dir=str(folder))
    with (
        contextlib.closing(make_trainer(config, mesh_of(replicas, devices, 1))) as program,
        Checkpoints(
            folder / "checkpoints", CheckpointConfig(), records=program.records
        ) as checkpoints,
    ):
        yield program, checkpoints


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, TrainState]]:
    """`trained(tiers)` -> the folder of a run with a checkpoint of step 3, and its whole state."""
    made = dict[str, tuple[Path, TrainState]]()

    def train(name: str) -> tuple[Path, TrainState]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            with opened(TIERS[name], folder) as (program, checkpoints):
                state = program.init()
                for step in range(3):
                    state, values = program.step(state, batch(CONFIG, step))
                    assert values["ok"]
                checkpoints.save(
                    3, program.prepare_state_for_save(state), {"at": 3}, CONFIG.to_json()
                )
                made[name] = folder, full_state(program, state)
        return made[name]

    return train


# Quick: from NVMe. A restore onto the device compiles the ordinary step once more; training in host
# memory, to move from there, compiles its own step.
QUICK_MOVES = {("nvme", "host"), ("nvme", "device")}
MOVES = [
    pytest.param(*move, marks=() if move in QUICK_MOVES else pytest.mark.slow)
    for move in itertools.product(TIERS, TIERS)
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_experts_move_to_other_tiers(
    trained: Callable[[str], tuple[Path, TrainState]], tmp_path: Path, before: str, after: str
) -> None:
    source, expected = trained(before)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    with opened(TIERS[after], tmp_path) as (program, checkpoints):
        assert checkpoints.latest_step() == 3
        state, data = restore_checkpoint(program, checkpoints, 3)
        assert data == {"at": 3}
        assert differing(expected, full_state(program, state)) == []
        checkpoints.save(4, program.prepare_state_for_save(state), {"at": 4}, "{}")
    with opened(TIERS[after], tmp_path) as (program, checkpoints):  # what it saves is its own again
        state, data = restore_checkpoint(program, checkpoints, 4)
        assert data == {"at": 4}
        assert differing(expected, full_state(program, state)) == []


SLOW_WITH_REPLICAS = [pytest.param(name, marks=pytest.mark.slow) for name in ("half", "mixed")]


@pytest.mark.parametrize("name", ["host", "nvme", *SLOW_WITH_REPLICAS])
def test_replicas_come_and_go(
    trained: Callable[[str], tuple[Path, TrainState]], tmp_path: Path, name: str
) -> None:
    """From one device to four with two replicas of each expert and back."""
    source, expected = trained(name)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    for step, devices, replicas in ((3, 2, 2), (4, 1, 1)):
        with opened(TIERS[name], tmp_path, devices, replicas) as (program, checkpoints):
            state, _ = restore_checkpoint(program, checkpoints, step)
            checkpoints.save(step + 1, program.prepare_state_for_save(state), {}, "{}")
            assert differing(expected, full_state(program, state)) == []


# Quick: nothing is behind.
SLOW_MERGES = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("half", "mixed", "host", "nvme")
]


@pytest.mark.parametrize("before", ["device", *SLOW_MERGES])
def test_a_merge_reads_experts_one_by_one(
    trained: Callable[[str], tuple[Path, TrainState]], before: str
) -> None:
    folder, expected = trained(before)
    with (
        ExpertsOnDevices() as count,
        Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints,
    ):
        arrays = saved_parameters(checkpoints, 3, TrainConfig(model=CONFIG.model))
        for path, whole in (
            flatten_by_path(expected.params) | flatten_by_path(expected.router_bias)
        ).items():
            array = arrays[path]
            if isinstance(array, StoredExperts):
                for layer, expert in np.ndindex(whole.shape[:2]):
                    np.testing.assert_array_equal(array.read(layer, expert), whole[layer, expert])
            else:
                np.testing.assert_array_equal(array, whole)
        count.look()
    # brought up to date: gradient, weights and moments, before and after, of one
    behind = before in ("half", "nvme")
    assert count.most_bytes <= (7 * 4 * CONFIG.model.parameters_per_expert if behind else 0)


class ExpertsOnDevices:
    """Context manager that counts the bytes of experts' parameters and moments on all devices
    together, the most.
    """

    def __init__(self, config: ModelConfig = CONFIG.model) -> None:
        h, f = config.hidden_size, config.moe_intermediate_size
        self.all_bytes = (
            12 * config.num_moe_layers * config.num_experts * config.parameters_per_expert
        )
        self._shapes = ((h, 2 * f), (f, h))
        self.most_bytes = 0
        self._before: dict[int, jax.Array] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def look(self) -> None:
        live = [
            a
            for a in jax.live_arrays()
            if a.shape[-2:] in self._shapes and id(a) not in self._before
        ]
        self.most_bytes = max(self.most_bytes, sum(array.nbytes for array in live))

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.look()

    def __enter__(self) -> Self:
        gc.collect()  # what earlier programs had
        # what other tests still hold
        self._before = {id(array): array for array in jax.live_arrays()}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("half", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("half", 1), ("host", 1), ("host", 2))
        ),
    ],
)
def test_experts_are_saved_restored_and_begun_off_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, devices: int
) -> None:
    """One layer of weights at a time, where all layers' weights and moments are nine times as
    many bytes.
    """
    fill = ExpertStores.fill_tiers
    counted: list[ExpertsOnDevices] = []

    def look_and_fill(*args: Any) -> Any:
        counted[-1].look()  # all that is to be filled in has been read by now
        return fill(*args)

    monkeypatch.setattr(ExpertStores, "fill_tiers", look_and_fill)
    tiers = stored_in(TIERS[name], tmp_path / "records", device_layers=1)
    with opened(tiers, tmp_path, devices) as (program, checkpoints):
        with ExpertsOnDevices() as count:
            counted.append(count)
            state = program.init()
            saved = program.prepare_state_for_save(state)
            count.look()
            checkpoints.save(1, saved, {}, "{}")
            checkpoints.wait_for_save()
        assert 0 < count.most_bytes <= 4 * count.all_bytes // 9
        expected = full_state(program, state)
    del program, checkpoints, state, saved
    with opened(tiers, tmp_path, devices) as (program, checkpoints):
        with ExpertsOnDevices() as count:
            counted.append(count)
            state, _ = restore_checkpoint(program, checkpoints, 1)
        assert count.most_bytes <= 4 * count.all_bytes // 9
        assert differing(expected, full_state(program, state)) == []


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("nvme", 2),
        ("mixed", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(("host", "half", "nvme", "mixed"), (1, 2))
            if case not in (("nvme", 2), ("mixed", 2))
        ),
    ],
)
def test_a_pretrained_model_is_begun_off_the_device(
    tmp_path: Path, name: str, devices: int
) -> None:
    tiers = stored_in(TIERS[name], tmp_path / "records", device_layers=1)
    config = pretrained_config(
        "mixtral", tiers=tiers, mesh=MeshConfig(1, devices, 1), output_dir=str(tmp_path)
    )
    mesh = mesh_of(1, devices, 1)
    ordinary = make_trainer(dataclasses.replace(config, tiers=DEVICE), mesh)
    expected = full_state(ordinary, load_pretrained_state(ordinary, config))
    with contextlib.closing(make_trainer(config, mesh)) as program:
        with ExpertsOnDevices(config.model) as count:
            state = load_pretrained_state(program, config)
            count.look()
        assert 0 < count.most_bytes <= count.all_bytes // (1 if name == "mixed" else 2)
        assert differing(expected, full_state(program, state)) == []
