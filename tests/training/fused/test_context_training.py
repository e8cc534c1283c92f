"""Training with sequences that lie on several devices: the same losses and states as on one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.config import DataConfig, MeshConfig, TrainConfig
from jmoe.data.context_rows import ContextRows
from jmoe.data.sample_rows import rows_of_windows
from jmoe.training.evaluation import split_over_devices
from jmoe.training.session import place_batch
from jmoe.training.trainer import LanguageTrainer, make_trainer
from tests import model_configs
from tests.arrays import assert_trees_close, on_host
from tests.model_configs import OPTIMIZER, mesh_of

B, S, EOT = 4, 32, 0
# three layers: dense; experts, with a window; experts
CONFIG = TrainConfig(
    model=dataclasses.replace(
        model_configs.MODEL,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        sliding_window=3,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
    ),
    optimizer=OPTIMIZER,
    batch_size=B,
    sequence_length=S,
    num_steps=50,
    compute_dtype="float32",
)


def rows_of(step: int, config: TrainConfig) -> Any:
    """A batch of random text with an end-of-text token every few tokens."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(1, config.model.vocab_size, (B, S + 1)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.1] = EOT
    if not config.data.mask_documents:
        return tokens
    return rows_of_windows(tokens, np.ones((B, S), np.float32), EOT)


@dataclasses.dataclass(frozen=True)
class Run:
    losses: list[float]
    metrics: dict[str, Any]  # of the last step
    state: Any  # as checkpoints store it, on the host
    held_out: float
    logits: Any


@functools.cache
def run(shape: tuple[int, int, int], context: int, steps: int, **changes: Any) -> Run:
    """`steps` steps on a mesh whose devices share sequences in groups of `context`."""
    mesh = mesh_of(*shape)
    config = dataclasses.replace(CONFIG, **changes, mesh=MeshConfig(*shape, context))
    trainer: LanguageTrainer = make_trainer(config, mesh)
    state, losses, metrics = trainer.init(), [], dict[str, Any]()
    for step in range(steps):
        batch = place_batch(config, mesh, rows_of(step, config))
        state, values = jax.block_until_ready(trainer.step(state, batch))
        if values["overflow"]:
            state, values = jax.block_until_ready(trainer.step(state, batch, full_capacity=True))
        metrics = jax.device_get(values)
        assert metrics["ok"]
        losses.append(float(metrics["loss"]))
    rows = rows_of(99, config)
    batch = rows if config.data.mask_documents else (rows, np.ones((B, S), np.float32))
    divided = ContextRows(context, mesh.size)
    place = functools.partial(split_over_devices, mesh=mesh)
    (held_out,) = trainer.evaluate_batches(state, [jax.tree.map(place, divided.divide(batch))])
    prompts = np.resize(rows_of(7, CONFIG)[:1, :S], (mesh.size // context, S))
    logits = trainer.next_logits(state, place(divided.divide_inputs(prompts)), np.int32(21))
    saved = on_host(trainer.prepare_state_for_save(state))
    return Run(losses, metrics, saved, float(held_out), np.asarray(logits))


def assert_same(ours: Run, expected: Run) -> None:
    np.testing.assert_allclose(ours.losses, expected.losses, rtol=0, atol=1e-5)
    for name in ("balance_loss", "z_loss", "counts", "entropy", "grad_norm"):
        np.testing.assert_allclose(ours.metrics[name], expected.metrics[name], rtol=1e-4)
    assert_trees_close(ours.state.params, expected.state.params, 1e-4)
    assert ours.held_out == pytest.approx(expected.held_out, rel=1e-5)
    np.testing.assert_allclose(ours.logits, expected.logits, rtol=1e-4, atol=1e-4)


MASKED = DataConfig(mask_documents=True)


def test_documents_on_two_groups_of_two_devices() -> None:
    """Documents, a window, experts over two devices and replicas: losses, metrics, the updated
    state, the held-out loss and next-token logits.
    """
    assert_same(run((2, 1, 2), 2, 2, data=MASKED), run((1, 1, 1), 1, 2, data=MASKED))
