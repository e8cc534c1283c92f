"""Training with sequences that lie on several devices: the same losses and states as on one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.config import CommConfig, DataConfig, MeshConfig, ModelConfig, TrainConfig
from jmoe.data.context_rows import ContextRows
from jmoe.data.sample_rows import rows_of_windows
from jmoe.planning.gpu_links import collective_of
from jmoe.planning.hlo import HloComputation, HloModule, parse_hlo
from jmoe.run.planner import training_sizes
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


# attention with latents: keys of 12 = 8 + 4, values of 8
LATENT = dataclasses.replace(
    model_configs.MODEL,
    num_hidden_layers=2,
    num_key_value_heads=2,
    kv_lora_rank=8,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
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


LAYOUTS = [
    ((1, 1, 2), 2, {}),
    ((2, 2, 1), 4, {"data": DataConfig(mask_documents=True)}),
    ((2, 1, 4), 4, {"remat": "layer", "comm": CommConfig(shard_experts="weights")}),
    ((1, 2, 4), 8, {"gradient_accumulation_steps": 2}),
    ((4, 1, 2), 2, {"comm": CommConfig(exchange="dedup", schedule="none")}),
    ((2, 2, 2), 2, {"comm": CommConfig(exchange="ragged"), "remat": "experts"}),
    ((1, 1, 4), 4, {"comm": CommConfig(schedule="pipelined")}),
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("shape", "context", "changes"), LAYOUTS)
def test_fifty_steps(shape: tuple[int, int, int], context: int, changes: dict[str, Any]) -> None:
    """Context x expert x data layouts, exchanges, rematerialization, micro-batches."""
    alone = {
        name: changes[name] for name in ("data", "gradient_accumulation_steps") if name in changes
    }
    assert_same(run(shape, context, 50, **changes), run((1, 1, 1), 1, 50, **alone))


def sent_bytes(module: HloModule, computation: HloComputation, num_devices: int) -> float:
    """Bytes of keys and values, with their gradients, that a device sends in a run of the
    computation: the mean over the devices.
    """
    total = 0.0
    for operation in computation.values():
        collective = collective_of(module, computation, operation)
        if collective is not None and "context" in operation.scope:
            share = 1.0
            if collective.kind == "collective-permute":  # groups are (sender, receiver)
                share = len(collective.groups) / num_devices
            total += share * collective.sent_bytes
        elif operation.kind == "while":
            body = module.called_computation(operation, "body")
            total += (operation.known_trip_count or 1) * sent_bytes(module, body, num_devices)
        elif operation.kind == "call":
            total += sent_bytes(
                module, module.called_computation(operation, "to_apply"), num_devices
            )
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [CONFIG.model, LATENT],
    ids=["windows", "latent"],
)
def test_bytes_of_the_compiled_step_are_the_plans(model: ModelConfig) -> None:
    """Of a group of four: forward, recomputed in the backward pass, and gradients."""
    mesh = mesh_of(1, 1, 4)
    config = dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(1, 1, 4, 4))
    trainer: Any = make_trainer(config, mesh)
    batch = place_batch(config, mesh, rows_of(0, config))
    module = parse_hlo(trainer.step.lower(trainer.state_shape, batch).compile().as_text())
    planned = training_sizes(config).context_bytes
    assert planned > 0
    assert sent_bytes(module, module.entry, 4) == pytest.approx(planned)


MASKED = DataConfig(mask_documents=True)


@pytest.mark.slow  # test_sample_batch.py has documents on two devices
def test_documents_on_two_groups_of_two_devices() -> None:
    """Documents, a window, experts over two devices and replicas: losses, metrics, the updated
    state, the held-out loss and next-token logits.
    """
    assert_same(run((2, 1, 2), 2, 2, data=MASKED), run((1, 1, 1), 1, 2, data=MASKED))


@pytest.mark.slow
def test_latent_attention_gathers_latents() -> None:
    assert_same(run((1, 1, 4), 4, 3, model=LATENT), run((1, 1, 1), 1, 3, model=LATENT))
