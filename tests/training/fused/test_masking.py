"""Encoders trained on masked tokens: the loss beside a plain one, on one device and on several, and
attention to later tokens.
"""

import dataclasses
import functools
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import EvaluationConfig, MaskingConfig, MeshConfig, TrainConfig
from jmoe.layers.masked_tokens import mask_rows
from jmoe.mesh import ACCUMULATED_BATCH, BATCH
from jmoe.models.decoder import Decoder
from jmoe.training.fused.masking import MaskedTrainer
from jmoe.training.trainer import make_trainer
from tests import model_configs
from tests.config.test_honoured import changed
from tests.model_configs import OPTIMIZER, mesh_of

SEQUENCE, BATCH_SIZE = 16, 8
MODEL = dataclasses.replace(model_configs.MODEL, bidirectional=True)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    masking=MaskingConfig(share=0.25),
    evaluation=EvaluationConfig(sample_tokens=0),
    batch_size=BATCH_SIZE,
    sequence_length=SEQUENCE,
    gradient_accumulation_steps=2,
    compute_dtype="float32",
)
TOKENS = np.random.default_rng(0).integers(0, 127, (2, BATCH_SIZE // 2, SEQUENCE + 1), np.int32)


@functools.cache
def trainer_on(shape: tuple[int, int, int], replicas: int = 1) -> MaskedTrainer:
    mesh = MeshConfig(*shape, replicate=replicas)
    config = dataclasses.replace(CONFIG, mesh=mesh)
    trainer = make_trainer(config, mesh_of(*shape, replicas=replicas))
    assert isinstance(trainer, MaskedTrainer)
    return trainer


@functools.cache
def losses_on(shape: tuple[int, int, int], replicas: int = 1) -> tuple[list[float], float]:
    """The losses of three steps, and the held-out loss after them."""
    trainer, losses = trainer_on(shape, replicas), []
    mesh, state = trainer.model.mesh, trainer.init()
    batch = jax.device_put(TOKENS, NamedSharding(mesh, ACCUMULATED_BATCH))
    for _ in range(3):
        state, metrics = trainer.step(state, batch, full_capacity=True)
        losses.append(float(metrics["loss"]))
    ones = np.ones((BATCH_SIZE // 2, SEQUENCE), np.float32)
    held_out = jax.device_put((TOKENS[0], ones), NamedSharding(mesh, BATCH))
    first, again = (float(trainer.evaluate_batches(state, [held_out])[0]) for _ in range(2))
    assert first == again
    return losses, first


def plain_loss(step: int) -> float:
    """The mean cross-entropy of masked tokens with the initial parameters, by a decoder called by
    itself.
    """
    decoder = Decoder(MODEL, rngs=nnx.Rngs(CONFIG.seed))
    key = jax.random.fold_in(jax.random.key(CONFIG.seed), step)
    nll = []
    for tokens_BS in TOKENS[..., 1:]:
        rows = mask_rows(jnp.asarray(tokens_BS), key, CONFIG.masking, MODEL.vocab_size)
        hidden, _ = decoder(rows.inputs_BS, full_capacity=True)
        logs = np.asarray(jax.nn.log_softmax(hidden @ decoder.lm_head()))
        chosen = np.asarray(rows.weights_BS) > 0
        nll += [-logs[b, s, tokens_BS[b, s]] for b, s in np.argwhere(chosen)]
    assert len(nll) == BATCH_SIZE * 4
    return float(np.mean(nll))


def test_the_loss_is_that_of_masked_tokens() -> None:
    losses, _ = losses_on((1, 1, 1))
    assert losses[0] == pytest.approx(plain_loss(0), rel=1e-5)
    assert losses[0] != pytest.approx(plain_loss(1), rel=1e-5)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_devices_mask_alike(replicas: int) -> None:
    for one, several in zip(losses_on((1, 1, 1)), losses_on((2, 1, 2), replicas), strict=True):
        np.testing.assert_allclose(several, one, rtol=2e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_tokens_see_later_ones(bidirectional: bool) -> None:
    model = dataclasses.replace(MODEL, bidirectional=bidirectional)
    decoder, tokens = Decoder(model, rngs=nnx.Rngs(0)), jnp.asarray(TOKENS[0][:1, 1:])
    other = tokens.at[0, -1].add(1)
    first, changed = (decoder(x, full_capacity=True)[0][0, 0] for x in (tokens, other))
    assert bool((first == changed).all()) != bidirectional


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.sliding_window": 4}, "sliding_window = 4: must be None with bidirectional"),
        ({"model.attention_sinks": True}, "attention_sinks = True: must be False with"),
        ({"tiers.experts": "host", "tiers.optimizer": "host"}, "tiers.experts = 'host': is not"),
        ({"evaluation.sample_tokens": 4}, "evaluation.sample_tokens = 4: is not supported with"),
        ({"data.mask_documents": True}, "data.mask_documents = True: is not supported with"),
        ({"init_from": "model"}, "init_from = 'model': is not supported with model.bidirectional"),
        ({"mesh.context": 2}, "mesh.context = 2: must be 0 or 1 with attention in both directions"),
        ({"masking.share": 0.0}, "masking.share = 0.0: must be greater than 0 and at most 1"),
        ({"masking.as_mask": 0.95}, r"masking.as_mask \+ masking.as_random = 1.05: must be at"),
    ],
)
def test_what_an_encoder_does_not_support_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(CONFIG, changes)
