"""Experts on other tiers than the device: the same training, whatever lies where.

Legend: A accumulation steps, B batch, S sequence, E experts, N MoE layers.
"""

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import CheckpointConfig, LongRopeConfig, RouterConfig, TiersConfig, TrainConfig
from jmoe.config.parallel import packed_shape
from jmoe.memory import version_store
from jmoe.offload.expert_state import ExpertState
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.planner import training_plan
from jmoe.training.resume import restore_checkpoint
from jmoe.training.state import Batch, TrainState, without_experts
from jmoe.training.streamed.step import StreamedTrainer
from jmoe.training.trainer import Trainer, make_trainer
from tests.arrays import differing, full_state
from tests.model_configs import MODEL, OPTIMIZER, mesh_of, stored_in

B, S, E, N, STEPS = 2, 8, 8, 3, 6
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    batch_size=B,
    sequence_length=S,
    num_steps=10,
    compute_dtype="float32",
)
HOST = TiersConfig(experts="host", optimizer="host")
UPDATED_ON_HOST = dataclasses.replace(HOST, update="host")
# Tests compile with few of XLA's optimizations: only XLA's own update on the host then has the
# bits of the device's. `test_host_update.py` compiles as users do.
BY_XLA = dataclasses.replace(CONFIG, native="off")


def batch(config: TrainConfig, step: int) -> jax.Array:
    rng = np.random.default_rng(100 + step)
    tokens = rng.integers(
        0, config.model.vocab_size, (config.batch_size, config.sequence_length + 1)
    ).astype(np.int32)
    return jnp.asarray(
        tokens.reshape(config.gradient_accumulation_steps, -1, config.sequence_length + 1)
    )


def held_out_batches(config: TrainConfig) -> list[Batch]:
    tokens = [batch(config, step)[0] for step in (97, 98, 99)]
    return [(t, jnp.full(t[:, 1:].shape, 1.0 + i)) for i, t in enumerate(tokens)]


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    metrics: list[dict[str, Any]]
    state: TrainState
    held_out: list[float]
    stats: Any


def train(
    config: TrainConfig,
    tiers: TiersConfig | None = None,
    steps: int = STEPS,
    flush_updates: bool = False,
    reopen_after: int | None = None,
) -> Trained:
    """`steps` steps and an evaluation. flush_updates: after every step. reopen_after: from a
    checkpoint of that step.

    A step whose buffers overflow is run again with room for everything.
    """
    config = dataclasses.replace(config, tiers=tiers or TiersConfig())
    shape = max(1, config.mesh.data), config.mesh.expert_inter, config.mesh.expert_intra
    shape = packed_shape(shape, config.comm.initial_packing)
    with contextlib.closing(make_trainer(config, mesh_of(*shape))) as program:
        state, metrics = program.init(), []
        for step in range(steps):
            state, values = program.step(state, batch(config, step))
            if values["overflow"]:
                state, values = program.step(state, batch(config, step), full_capacity=True)
            metrics.append(jax.device_get(values))
            if flush_updates:
                program.prepare_state_for_save(state)
            if step + 1 == reopen_after:
                state = saved_and_restored(program, state, step + 1)
        held_out = [float(nll) for nll in program.evaluate_batches(state, held_out_batches(config))]
        whole = full_state(program, state)
        return Trained(
            [float(m["loss"]) for m in metrics], metrics, whole, held_out, program.expert_stats()
        )


def saved_and_restored(program: Trainer, state: TrainState, step: int) -> TrainState:
    """The state from a checkpoint that is made of it."""
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(Path(folder), CheckpointConfig(), records=program.records) as checkpoints:
            checkpoints.save(step, program.prepare_state_for_save(state), {}, "{}")
        with Checkpoints(Path(folder), CheckpointConfig(), records=program.records) as checkpoints:
            return restore_checkpoint(program, checkpoints, step)[0]


def close(a: TrainState, b: TrainState) -> None:
    for (path, x), (_, y) in zip(
        jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def ordinary() -> Trained:
    return train(CONFIG)


@pytest.fixture(scope="module")
def on_host() -> Trained:
    return train(CONFIG, HOST)


def same_training(
    ours: Trained, theirs: Trained, losses_rtol: float = 1e-5, metrics_rtol: float = 1e-4
) -> None:
    """Compare two programs, which add up in different orders here and there."""
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=losses_rtol)
    np.testing.assert_allclose(ours.held_out, theirs.held_out, rtol=losses_rtol)
    close(ours.state, theirs.state)
    for mine, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert mine.keys() == other.keys()
        np.testing.assert_array_equal(mine["counts"], other["counts"])
        for name in ("grad_norm", "balance_loss", "z_loss", "entropy", "learning_rate", "clip"):
            np.testing.assert_allclose(mine[name], other[name], rtol=metrics_rtol, err_msg=name)
        for name, norm in other["grad_norms"].items():
            np.testing.assert_allclose(
                mine["grad_norms"][name], norm, rtol=10 * metrics_rtol, err_msg=name
            )


def test_the_losses_are_those_of_the_ordinary_step(ordinary: Trained, on_host: Trained) -> None:
    same_training(on_host, ordinary, losses_rtol=2e-6, metrics_rtol=1e-5)


def test_it_starts_from_the_same_parameters() -> None:
    assert differing(train(CONFIG, HOST, steps=0).state, train(CONFIG, steps=0).state) == []


@pytest.mark.parametrize(
    ("tiers", "slots"),
    [
        (TiersConfig(experts="device", optimizer="host"), 2),
        pytest.param(TiersConfig(experts="host", optimizer="host"), 1, marks=pytest.mark.slow),
        pytest.param(TiersConfig(experts="host", optimizer="nvme"), 2, marks=pytest.mark.slow),
        (TiersConfig(experts="host", optimizer="nvme", pin_host_memory="on"), 2),
        (
            TiersConfig(
                experts="nvme", optimizer="nvme", gradients="nvme", host_cache_bytes=150_000
            ),
            3,
        ),
        pytest.param(
            TiersConfig(
                *("nvme", "nvme", "nvme"),
                host_cache_bytes=150_000,
                cache_policy="moesys",
                cache_threshold=0.5,
            ),
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_where_it_lies_changes_no_bit(
    on_host: Trained, tiers: TiersConfig, slots: int, tmp_path: Path
) -> None:
    tiers = stored_in(tiers, tmp_path, device_layers=slots)
    there = train(CONFIG, tiers)
    assert there.losses == on_host.losses
    assert there.held_out == on_host.held_out
    assert differing(there.state, on_host.state) == []
    if tiers.optimizer == "nvme":
        moments = there.stats.moments
        assert moments.nvme.num_bytes > 0 and moments.nvme_writes.num_bytes > 0


@pytest.mark.parametrize(
    ("tiers", "slots"),
    [
        pytest.param(UPDATED_ON_HOST, 1, marks=pytest.mark.slow),
        pytest.param(UPDATED_ON_HOST, 3, marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(UPDATED_ON_HOST, optimizer="nvme"), 2, marks=pytest.mark.slow
        ),
        (
            TiersConfig("nvme", "nvme", "nvme", update="host", host_cache_bytes=150_000),
            2,
        ),
    ],
)
def test_an_update_on_the_host_changes_no_bit(
    on_host: Trained, tiers: TiersConfig, slots: int, tmp_path: Path
) -> None:
    there = train(BY_XLA, stored_in(tiers, tmp_path, device_layers=slots), reopen_after=3)
    assert there.losses == on_host.losses
    assert there.held_out == on_host.held_out
    assert differing(there.state, on_host.state) == []
    assert there.stats.replayed_steps > 0


@pytest.mark.slow
def test_the_host_updates_records_in_files_that_are_memory(
    on_host: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that change are copied, as those of moments always are."""
    monkeypatch.setattr(version_store, "choose_io", lambda folder: "mapped")
    tiers = TiersConfig("nvme", "nvme", "nvme", update="host", host_cache_bytes=150_000)
    there = train(BY_XLA, stored_in(tiers, tmp_path))
    assert there.losses == on_host.losses and there.held_out == on_host.held_out
    assert differing(there.state, on_host.state) == []


def test_the_native_update_is_the_devices_but_for_rounding(on_host: Trained) -> None:
    same_training(train(CONFIG, UPDATED_ON_HOST), on_host, losses_rtol=1e-6, metrics_rtol=1e-5)


@pytest.mark.parametrize(
    ("compute_dtype", "gradient_dtype"),
    [
        ("bfloat16", "float32"),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", "float32", marks=pytest.mark.slow),
    ],
)
def test_an_update_on_the_host_moves_few_bytes(
    compute_dtype: Literal["bfloat16", "float32"], gradient_dtype: Literal["float32", "bfloat16"]
) -> None:
    """Of every expert a step moves what the planner says: weights in the dtype of the products,
    twice where the backward pass fetches them again, and the gradient.
    """
    model = dataclasses.replace(MODEL, num_experts_per_tok=E)  # every expert, in every step
    tiers = dataclasses.replace(UPDATED_ON_HOST, gradient_dtype=gradient_dtype, device_layers=1)
    config = dataclasses.replace(CONFIG, model=model, compute_dtype=compute_dtype, tiers=tiers)
    with contextlib.closing(StreamedTrainer(config, mesh_of(1, 1, 1))) as program:
        state, links = program.init(), []
        for step in range(3):
            state, _ = program.step(state, batch(config, step))
            program._loaded_experts._ring.wait_for_loads()  # until the next step begins
            links.append(program.expert_stats().link)
    per_parameter = [
        np.subtract(links[2], links[1])[i] / (N * E * model.parameters_per_expert) for i in (0, 1)
    ]
    weight, gradient = (4 if d == "float32" else 2 for d in (compute_dtype, gradient_dtype))
    assert per_parameter == [pytest.approx(weight * (1 + (N - 1) / N)), gradient]
    planned = training_plan(config).expert_traffic_by_pass()
    assert sum(per_parameter) * model.parameters_per_expert == pytest.approx(
        sum(traffic.link_bytes for traffic in planned)
    )


def test_weights_come_from_files_that_are_memory(
    on_host: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a byte of weights and gradients is read into host memory; moments are, since they
    change there.
    """
    monkeypatch.setattr(version_store, "choose_io", lambda folder: "mapped")
    tiers = TiersConfig("nvme", "nvme", "nvme", path=str(tmp_path), host_cache_bytes=150_000)
    there = train(CONFIG, tiers)
    assert there.losses == on_host.losses and there.held_out == on_host.held_out
    assert differing(there.state, on_host.state) == []
    for stats in (there.stats.weights, there.stats.gradients):
        assert (
            stats.nvme.num_bytes == 0
            and stats.host.num_bytes > 0
            and stats.nvme_writes.num_bytes > 0
        )
    assert there.stats.moments.nvme.num_bytes > 0


@pytest.mark.slow  # test_sample_batch.py accumulates with experts on the host too
def test_accumulation_steps() -> None:
    config = dataclasses.replace(CONFIG, gradient_accumulation_steps=2)
    ours, theirs = train(config, HOST, steps=3), train(config, steps=3)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=2e-6)
    close(ours.state, theirs.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "router"),
    [
        (1, RouterConfig(kind="switch", jitter_noise=0.3)),
        (2, RouterConfig(kind="gshard", second_expert_policy="random")),
    ],
    ids=["jitter", "second expert"],
)
def test_what_routers_draw_is_the_same(k: int, router: RouterConfig) -> None:
    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(MODEL, num_experts_per_tok=k, router=router)
    )
    np.testing.assert_allclose(
        train(config, HOST, steps=2).losses, train(config, steps=2).losses, rtol=2e-6
    )


@pytest.mark.slow
def test_factors_of_granite_and_positions_by_length() -> None:
    """Embeddings, residuals, scores and logits times constants, LongRoPE, and queries and keys that
    are normed once they are rotated.
    """
    scaling = LongRopeConfig((1.0, 1.5, 2.0, 3.0), (1.0, 2.0, 4.0, 8.0), 4, factor=4.0)
    model = dataclasses.replace(
        MODEL,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.5,
        logits_scaling=2.5,
        qk_norm="rotated_head",
        rope_scaling=scaling,
    )
    config = dataclasses.replace(CONFIG, model=model)
    ours, theirs = (train(config, tiers, steps=2).losses for tiers in (HOST, None))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


@pytest.mark.slow
def test_layers_with_and_without_a_window() -> None:
    """Layers of one kind that differ in their window."""
    types = ("sliding_attention", "full_attention") * 2
    model = dataclasses.replace(MODEL, sliding_window=2, layer_types=types)
    config = dataclasses.replace(CONFIG, model=model)
    ours, theirs = (train(config, tiers, steps=2).losses for tiers in (HOST, None))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def test_idle_experts_catch_up_to_the_bit(on_host: Trained) -> None:
    eager = train(CONFIG, HOST, flush_updates=True)
    assert on_host.stats.replayed_steps > 0
    assert on_host.losses == eager.losses
    assert differing(on_host.state, eager.state) == []


def test_a_saved_state_goes_on_to_the_bit(on_host: Trained, tmp_path: Path) -> None:
    tiers = TiersConfig(experts="host", optimizer="nvme", path=str(tmp_path))
    reopened = train(CONFIG, tiers, reopen_after=3)
    assert reopened.losses == on_host.losses
    assert differing(reopened.state, on_host.state) == []


def test_only_chosen_experts_move(on_host: Trained) -> None:
    chosen = sum(int((m["counts"] > 0).sum()) for m in on_host.metrics)
    assert chosen < STEPS * N * E
    assert on_host.stats.gradients.host.transfers == 2 * chosen  # written once, read once


def test_an_evaluation_fetches_experts_once_for_all_its_batches() -> None:
    tiers = dataclasses.replace(HOST, device_layers=1)
    with contextlib.closing(
        make_trainer(dataclasses.replace(CONFIG, tiers=tiers), mesh_of(1, 1, 1))
    ) as program:
        state, batches = program.init(), held_out_batches(CONFIG)

        def evaluate(*some: Batch) -> tuple[list[float], int]:
            before = program.expert_stats().weights.host.transfers
            losses = [float(nll) for nll in program.evaluate_batches(state, some)]
            return losses, program.expert_stats().weights.host.transfers - before

        alone = [evaluate(batch) for batch in batches]
        together, fetched = evaluate(*batches)
        assert program.evaluation_batches >= len(batches)
        assert together == [losses[0] for losses, _ in alone]
        assert len(set(together)) == len(batches)
        most = (N + 1) * E  # the next pass's first layer is fetched ahead
        assert 0 < fetched <= most < sum(transfers for _, transfers in alone)


def test_a_cache_that_is_too_small_is_refused_by_its_name(tmp_path: Path) -> None:
    tiers = TiersConfig(
        experts="nvme", optimizer="nvme", path=str(tmp_path / "tiers"), host_cache_bytes=1000
    )
    config = dataclasses.replace(CONFIG, tiers=tiers)
    with pytest.raises(
        ValueError,
        match=r"tiers.host_cache_bytes = 1000: must be 0 or hold two records of every kind",
    ):
        make_trainer(config, mesh_of(1, 1, 1))
    assert not (tmp_path / "tiers").exists()


@pytest.mark.slow
def test_gradients_kept_in_bfloat16_change_little(on_host: Trained) -> None:
    tiers = dataclasses.replace(HOST, gradient_dtype="bfloat16")
    trained = train(CONFIG, tiers)
    np.testing.assert_allclose(trained.losses, on_host.losses, rtol=1e-3)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    config = dataclasses.replace(CONFIG, tiers=HOST)
    with contextlib.closing(StreamedTrainer(config, mesh_of(1, 1, 1))) as program:
        state = program.init()
        state, _ = program.step(state, batch(config, 0))
        before = full_state(program, state)
        broken = dataclasses.replace(state, params=jax.tree.map(jnp.copy, state.params))
        broken.params["norm"]["scale"] = broken.params["norm"]["scale"] * jnp.float32(jnp.nan)
        broken, metrics = program.step(broken, batch(config, 1))
        assert not metrics["ok"]
        assert int(broken.step) == 1
        repaired = dataclasses.replace(
            broken, params=jax.tree.map(jnp.array, without_experts(before.params))
        )
        after = full_state(program, repaired)
        assert differing(after, before) == []


def test_an_error_below_is_raised_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ExpertState, *_: Any) -> int:
        raise OSError("the disk is gone")

    config = dataclasses.replace(CONFIG, tiers=HOST)
    with contextlib.closing(StreamedTrainer(config, mesh_of(1, 1, 1))) as program:
        state = program.init()
        monkeypatch.setattr(ExpertState, "_apply_skipped_steps", fails)
        state, _ = program.step(state, batch(config, 0))
        with pytest.raises(OSError, match="the disk is gone"):
            program.step(state, batch(config, 1))


def test_tiers_need_experts() -> None:
    dense = dataclasses.replace(MODEL, num_experts=0)
    with pytest.raises(ValueError, match=r"tiers = .*must be device for a model without experts"):
        TrainConfig(model=dense, tiers=HOST)
