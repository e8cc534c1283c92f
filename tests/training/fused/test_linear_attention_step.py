"""The fused step of a model whose layers are gated delta networks and attention in turn."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from jmoe.config import RouterConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH
from jmoe.models.decoder import Decoder
from jmoe.training.trainer import make_trainer
from tests import model_configs
from tests.arrays import assert_trees_close, on_host
from tests.model_configs import OPTIMIZER, mesh_of, spread_over

B, S = 8, 24
LINEAR, FULL = "linear_attention", "full_attention"
MODEL = dataclasses.replace(
    model_configs.MODEL,
    num_hidden_layers=5,
    first_k_dense_replace=0,
    layer_types=(LINEAR, FULL, LINEAR, LINEAR, FULL),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=3,
    norm="zero_centered_rmsnorm",
    qk_norm="head",
    attention_gate=True,
    num_experts_per_tok=2,
    router=RouterConfig(kind="softmax", aux_loss_coef=0.1, norm_topk_prob=True),
)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    batch_size=B,
    sequence_length=S,
    num_steps=4,
    compute_dtype="float32",
)


def batch(step: int) -> np.ndarray:
    rng = np.random.default_rng(step)
    return rng.integers(0, MODEL.vocab_size, (1, B, S + 1)).astype(np.int32)


def run(shape: tuple[int, int, int], start: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return (the state after two steps, their metrics) from the state `start` on the host."""
    mesh, metrics = mesh_of(*shape), []
    trainer = make_trainer(spread_over(CONFIG, *shape), mesh)
    state = jax.tree.map(
        lambda x, s: jax.device_put(np.array(x), s.sharding), start, trainer.state_shape
    )
    for i in range(2):
        tokens = jax.device_put(batch(i), NamedSharding(mesh, ACCUMULATED_BATCH))
        state, values = jax.block_until_ready(trainer.step(state, tokens, full_capacity=True))
        metrics.append(jax.device_get(values))
    return on_host(state), metrics


@pytest.fixture(scope="module")
def start() -> Any:
    return on_host(make_trainer(CONFIG, mesh_of(1, 1, 1)).init())


@pytest.fixture(scope="module")
def alone(start: Any) -> tuple[Any, list[dict[str, Any]]]:
    return run((1, 1, 1), start)


def test_gradients_are_those_of_the_plain_decoder(start: Any, alone: Any) -> None:
    """The step's loss and its gradient norms by layer, against JAX's own of the plain scan."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(MODEL, rngs=nnx.Rngs(0))))
    nnx.replace_by_pure_dict(params, start.params)
    tokens = batch(0)[0]

    @jax.jit
    def loss_and_grads(params: Any) -> Any:
        def loss(params: Any) -> Any:
            model: Any = nnx.merge(graph, params)
            hidden, stats = model(tokens[:, :-1], full_capacity=True)
            nll = optax.softmax_cross_entropy_with_integer_labels(
                hidden @ model.lm_head(), tokens[:, 1:]
            ).mean()
            share = stats.counts_E.astype(jnp.float32) / (B * S * 2.0)
            return nll + 0.1 * 8 * (share * stats.probs_sum_E / (B * S)).sum(axis=1).mean(), nll

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, nll), grads = loss_and_grads(params)
    metrics = alone[1][0]
    np.testing.assert_allclose(metrics["loss"], nll, rtol=1e-5)
    for stack, layers in (("moe_layers", 2), ("linear_moe_layers", 3)):
        squares = [
            np.square(np.asarray(g)).reshape(layers, -1).sum(axis=1)
            for g in jax.tree.leaves(nnx.to_pure_dict(grads)[stack])
        ]
        expected = np.sqrt(np.sum(squares, axis=0))
        assert (expected > 0).all()
        np.testing.assert_allclose(metrics["grad_norms"][stack], expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)], ids=str)
def test_meshes_train_alike(shape: tuple[int, int, int], start: Any, alone: Any) -> None:
    state, metrics = run(shape, start)
    for a, b in zip(metrics, alone[1], strict=True):
        assert_trees_close(a, b, 1e-4)
    assert_trees_close(state.params, alone[0].params, 1e-4)
    assert_trees_close(state.m, alone[0].m, 1e-4)
