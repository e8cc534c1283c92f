"""Training in float16: an overflow changes the loss scale and nothing else, and resuming changes no
bit.

Legend: B batch, S sequence.
"""

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import train
from jmoe.config import CheckpointConfig, LossScaleConfig, MeshConfig, TiersConfig, TrainConfig
from jmoe.deploy.merge import saved_parameters
from jmoe.mesh import ACCUMULATED_BATCH, ALL
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import TrainState, experts_of, with_experts
from jmoe.training.streamed.step import StreamedTrainer
from jmoe.training.trainer import Trainer, make_trainer
from tests.arrays import differing, full_state, on_host
from tests.model_configs import MODEL, OPTIMIZER, mesh_of
from tests.train_runs import Run

B, S = 8, 8
ONE = (1, 1, 1)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    # overflows in the first step, and again while the test goes on
    loss_scale=LossScaleConfig(2**32, 3),
    batch_size=B,
    sequence_length=S,
    num_steps=10,
    compute_dtype="float16",
)
HOST = TiersConfig(experts="host", optimizer="host")
NVME = TiersConfig(experts="nvme", optimizer="nvme")


def trainer_of(
    shape: tuple[int, int, int], tiers: TiersConfig | None = None, **changes: Any
) -> Trainer:
    config = dataclasses.replace(
        CONFIG, mesh=MeshConfig(*shape), tiers=tiers or TiersConfig(), **changes
    )
    return make_trainer(config, mesh_of(*shape))


@functools.cache
def on_device(dtype: str = "float16") -> Trainer:
    return trainer_of(
        ONE,
        compute_dtype=dtype,
        loss_scale=CONFIG.loss_scale if dtype == "float16" else LossScaleConfig(),
    )


@pytest.fixture(scope="module")
def in_host_memory() -> Iterator[Trainer]:
    with contextlib.closing(trainer_of(ONE, HOST)) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def updated_on_host() -> Iterator[Trainer]:
    with contextlib.closing(trainer_of(ONE, dataclasses.replace(HOST, update="host"))) as trainer:
        yield trainer


@pytest.fixture
def trainer(request: pytest.FixtureRequest, in_host_memory: Trainer) -> Trainer:
    """The trainer with experts where the test's parameter says."""
    if request.param == "updated on the host":
        return request.getfixturevalue("updated_on_host")  # type: ignore[no-any-return]
    return on_device() if request.param == "device" else in_host_memory


PLACES = pytest.mark.parametrize(
    "trainer",
    ["device", pytest.param("host", marks=pytest.mark.slow), "updated on the host"],
    indirect=True,
)


def step(
    trainer: Trainer, state: TrainState, number: int, once: bool = False
) -> tuple[TrainState, dict[str, Any]]:
    """Take a step as a run does; once: though it be skipped."""
    rng, mesh = np.random.default_rng(100 + number), trainer.config.mesh
    tokens = jnp.asarray(rng.integers(0, MODEL.vocab_size, (1, B, S + 1)).astype(np.int32))
    tokens = jax.device_put(
        tokens,
        NamedSharding(mesh_of(mesh.data, mesh.expert_inter, mesh.expert_intra), ACCUMULATED_BATCH),
    )
    if not once:
        return train.train_step(trainer, state, tokens)
    state, metrics = trainer.step(state, tokens)
    return state, jax.device_get(metrics)


def with_scale(state: TrainState, scale: float) -> TrainState:
    assert state.loss_scale is not None
    there = state.loss_scale.scale.sharding
    scaling = dataclasses.replace(state.loss_scale, scale=jax.device_put(jnp.float32(scale), there))
    return dataclasses.replace(state, loss_scale=scaling)


def scale_of(state: TrainState) -> tuple[float, int]:
    assert state.loss_scale is not None
    return float(state.loss_scale.scale), int(state.loss_scale.good_steps)


def but_for_scale(state: TrainState) -> TrainState:
    return dataclasses.replace(state, loss_scale=None)


@pytest.mark.slow
def test_it_stays_near_float32() -> None:
    runs = []
    for dtype in ("float16", "float32"):
        trainer = on_device(dtype)
        state, metrics = trainer.init(), []
        for number in range(3):
            state, values = step(trainer, state, number)
            metrics.append(values)
        assert all(
            leaf.dtype == np.float32 for leaf in jax.tree.leaves((state.params, state.m, state.v))
        )
        runs.append(metrics)
    for low, full in zip(*runs, strict=True):
        assert low["ok"] and low["loss_scale"] > 256
        for name in ("loss", "balance_loss", "z_loss", "learning_rate"):
            assert low[name] == pytest.approx(float(full[name]), rel=1e-2), name
        assert low["grad_norm"] == pytest.approx(float(full["grad_norm"]), rel=2e-2)


def assert_overflow_changes_the_scale_alone(trainer: Trainer) -> None:
    state, values = step(trainer, trainer.init(), 0)
    scale, good_steps = scale_of(state)
    assert values["ok"] and int(state.step) == good_steps == 1
    assert scale == values["loss_scale"] == 2.0 ** (32 - values["skipped_steps"]) < 2**31
    before = but_for_scale(full_state(trainer, state))
    experts = trainer.experts if isinstance(trainer, StreamedTrainer) else None
    taken = None if experts is None else (experts.steps_taken, experts.stats().replayed_steps)
    state, values = step(trainer, with_scale(state, 2.0**32), 1, once=True)
    assert values["skipped"] and not values["ok"] and np.isfinite(values["loss"])
    assert scale_of(state) == (2.0**31, 0)
    assert differing(but_for_scale(full_state(trainer, state)), before) == []
    if experts is not None:
        assert (experts.steps_taken, experts.stats().replayed_steps) == taken
    state, values = step(trainer, state, 1)
    assert (
        values["ok"]
        and int(state.step) == 2
        and differing(but_for_scale(full_state(trainer, state)), before)
    )


@pytest.mark.parametrize(
    "trainer", ["device", pytest.param("host", marks=pytest.mark.slow)], indirect=True
)
def test_an_overflow_changes_the_scale_and_nothing_else(trainer: Trainer) -> None:
    assert_overflow_changes_the_scale_alone(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 1, 1)])
def test_an_overflow_on_two_devices_with_experts_in_host_memory(
    shape: tuple[int, int, int],
) -> None:
    with contextlib.closing(trainer_of(shape, HOST)) as trainer:
        assert_overflow_changes_the_scale_alone(trainer)


@pytest.mark.slow
@PLACES
def test_skipped_steps_leave_no_trace(trainer: Trainer) -> None:
    """A run that skips steps ends where one ends that takes the others with the same scales, bit
    for bit.
    """
    ends = []
    for skips in (True, False):
        state = trainer.init()
        for number in range(4):
            if skips and number:
                state, values = step(trainer, with_scale(state, 2.0**32), number, once=True)
                assert values["skipped"]
            state, values = step(trainer, with_scale(state, 2.0**12), number)
            assert values["skipped_steps"] == 0
        ends.append(but_for_scale(full_state(trainer, state)))
    assert differing(*ends) == []


@pytest.mark.slow
def test_gradients_wait_with_the_scale_of_their_step(
    in_host_memory: Trainer, updated_on_host: Trainer
) -> None:
    """The scale has changed when they are applied."""
    ends = []
    for trainer in (on_device(), in_host_memory, updated_on_host):
        state = trainer.init()
        for number in range(6):
            state, values = step(trainer, with_scale(state, 2.0 ** (6 + number)), number)
            assert values["loss_scale"] == 2 ** (6 + number) and values["skipped_steps"] == 0
        ends.append(but_for_scale(full_state(trainer, state)))
    of_device, *others = map(jax.tree.leaves, ends)
    for other in others:
        for ours, expected in zip(other, of_device, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=2e-5)


class OneOverflows(FusedTrainer):
    """A trainer of which one device's gradients of its own experts are infinite while the scale
    is above 2^10.
    """

    def gradients_local(self, state: TrainState, batch: Any, **options: Any) -> tuple[Any, Any]:
        grads, metrics = super().gradients_local(state, batch, **options)
        assert state.loss_scale is not None
        bad = (lax.axis_index(ALL) == 3) & (state.loss_scale.scale > 1024)
        return with_experts(
            grads, jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), experts_of(grads))
        ), metrics


@pytest.mark.slow
def test_an_overflow_on_one_device_skips_the_step_on_all() -> None:
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(2, 2, 2), loss_scale=LossScaleConfig(4096))
    trainer = OneOverflows(config, mesh_of(2, 2, 2))
    state = trainer.init()
    before = on_host(state)
    for scale in (2048, 1024):
        state, values = step(trainer, state, 0, once=True)
        assert values["skipped"] and scale_of(state) == (scale, 0)
        assert differing(but_for_scale(on_host(state)), but_for_scale(before)) == []
    state, values = step(trainer, state, 0, once=True)
    assert values["ok"] and scale_of(state) == (1024, 1)


def test_what_overflows_with_a_scale_of_1_is_not_tried_for_ever() -> None:
    trainer = on_device()
    state = trainer.init()
    broken = with_experts(
        state.params, jax.tree.map(lambda w: w * np.inf, experts_of(state.params))
    )
    state, values = step(trainer, with_scale(dataclasses.replace(state, params=broken), 1), 0)
    assert not values["ok"] and values["skipped_steps"] == 0 and scale_of(state) == (1, 0)


# ---- Checkpoints


def carried_over(source: Trainer, state: TrainState, target: Trainer) -> TrainState:
    """Return the state that `target` goes on from, by way of a checkpoint; both have their
    records open.
    """
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(Path(folder), CheckpointConfig(), records=source.records) as checkpoints:
            checkpoints.save(int(state.step), source.prepare_state_for_save(state), {}, "{}")
        with Checkpoints(Path(folder), CheckpointConfig(), records=target.records) as checkpoints:
            return restore_checkpoint(target, checkpoints, int(state.step))[0]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "nvme"])
def test_a_checkpoint_goes_on_to_the_bit(place: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        trainer = on_device()
        if place == "nvme":
            tiers = dataclasses.replace(NVME, path=str(tmp_path))
            trainer = stack.enter_context(contextlib.closing(trainer_of(ONE, tiers)))
        ends = []
        for resumes in (False, True):
            state, seen = trainer.init(), []
            for number in range(6):
                if number == 4 and resumes:
                    scaling = scale_of(state)
                    state = carried_over(trainer, state, trainer)
                    assert scale_of(state) == scaling and scaling[0] < 2**32
                state, values = step(trainer, state, number)
                seen.append((float(values["loss"]), *scale_of(state)))
            ends.append((seen, full_state(trainer, state)))
    assert ends[0][0] == ends[1][0] and len({scale for _, scale, _ in ends[0][0]}) > 1
    assert differing(ends[0][1], ends[1][1]) == []


def test_a_run_may_go_to_float16_and_leave_it() -> None:
    half, full = on_device(), on_device("float32")
    state, _ = step(half, half.init(), 0)
    before = but_for_scale(on_host(state))
    wide = carried_over(half, state, full)
    assert wide.loss_scale is None and differing(on_host(wide), before) == []
    again = carried_over(full, wide, half)
    assert (
        scale_of(again) == (2.0**32, 0) and differing(but_for_scale(on_host(again)), before) == []
    )


def test_its_checkpoint_gives_its_parameters_alone(tmp_path: Path) -> None:
    trainer = on_device()
    state = trainer.init()
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(0, trainer.prepare_state_for_save(state), {}, "{}")
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        parameters = saved_parameters(checkpoints, 0, TrainConfig(model=MODEL))
    np.testing.assert_array_equal(np.asarray(parameters["embedding",]), state.params["embedding"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_curve_of_300_steps_is_that_of_float32(run_python: Run, tmp_path: Path) -> None:
    """The means of 25 losses of the preset `tiny` differ by at most 1 %."""
    curves = []
    for dtype in ("float16", "float32"):
        folder = tmp_path / dtype
        arguments = (
            "--compute-dtype",
            dtype,
            "--output-dir",
            str(folder),
            "--data.held-out-bytes",
            "20000",
        )
        as_users_have_it = {"JAX_DISABLE_MOST_OPTIMIZATIONS": None, "XLA_FLAGS": None}
        done = run_python(
            ["train.py", "tiny", "--num-steps", "300", *arguments], as_users_have_it, timeout=1500
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "event" not in line]
        curves.append(np.array(losses).reshape(-1, 25).mean(axis=1))
    assert curves[0].size == 12 and curves[1][-1] < 0.8 * curves[1][0]
    np.testing.assert_allclose(curves[0], curves[1], rtol=0.01)
