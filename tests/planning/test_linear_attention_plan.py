"""The plan of a run with gated delta networks, against its compiled gradient and its step."""

from __future__ import annotations

import dataclasses

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest

from jmoe.config import LINEAR_SIZES, MachineConfig, ModelConfig, TrainConfig
from jmoe.layers.gated_delta import GatedDeltaNet
from jmoe.layers.gated_delta_rule import CHUNK
from jmoe.planning import linear_attention
from jmoe.planning.linear_attention import (
    linear_attention_bytes_in_use,
    saved_linear_attention_elements,
)
from jmoe.run.planner import residual_elements, training_plan, training_sizes

MODEL = ModelConfig(
    hidden_size=64,
    num_hidden_layers=4,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    attention_gate=True,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
RUN = TrainConfig(model=MODEL, batch_size=8, sequence_length=128)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param({"linear_key_head_dim": 64}, marks=pytest.mark.slow),
        pytest.param({"linear_value_head_dim": 64}, marks=pytest.mark.slow),
        pytest.param({"linear_num_value_heads": 8}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("full_compilation")
def test_a_networks_gradient_uses_the_planned_bytes(sizes: dict[str, int]) -> None:
    """On a CPU, whose compiler is here; within a quarter."""
    model, tokens = dataclasses.replace(MODEL, **sizes), 2 * 256

    graph, state = nnx.split(nnx.eval_shape(lambda: GatedDeltaNet(model, 0.02, rngs=nnx.Rngs(0))))

    def gradient(state: object, x: jax.Array, g: jax.Array) -> object:
        _, vjp = jax.vjp(lambda s, y: nnx.merge(graph, s)(y), state, x)  # type: ignore[arg-type]
        return vjp(g)

    x = jax.ShapeDtypeStruct((2, 256, model.hidden_size), jnp.float32)
    memory = jax.jit(gradient).lower(state, x, x).compile().memory_analysis()
    assert memory is not None
    planned = tokens * linear_attention_bytes_in_use(model, on_gpu=False)
    assert 0.75 * planned < memory.temp_size_in_bytes < 1.25 * planned


def test_what_is_saved_is_what_the_network_marks() -> None:
    keys, values, heads = 2 * 16, 4 * 16, 4
    projections = 2 * keys + 2 * values + 2 * heads
    assert saved_linear_attention_elements(MODEL) == projections + values
    attention = 3 * 4 * 16 + 2 * 2 * 16  # queries, gates and outputs; keys and values
    tokens = 100
    per_token = 3 * (projections + values) + attention + 4 * MODEL.hidden_size
    assert residual_elements(MODEL, tokens, 1)[0] == tokens * per_token
    assert linear_attention._CHUNK == CHUNK


def test_a_run_is_planned_and_advised_to_change_what_it_may() -> None:
    """Experts stay on the device, where alone a run with networks may have them."""
    model = training_sizes(RUN)
    total, _ = MODEL.total_and_active_parameters()
    assert model.num_all_expert_parameters + model.dense_parameters == total
    assert linear_attention_bytes_in_use(MODEL, on_gpu=True) * RUN.batch_size * 128 <= (
        training_sizes(
            dataclasses.replace(RUN, machine=MachineConfig(accelerator="h100"))
        ).working_bytes
    )
    assert (
        linear_attention_bytes_in_use(
            dataclasses.replace(MODEL, layer_types=(), **dict.fromkeys(LINEAR_SIZES, 0)),
            on_gpu=True,
        )
        == 0
    )
    plan = training_plan(dataclasses.replace(RUN, machine=MachineConfig(device_bytes=1_000_000)))
    advice = plan.advice()
    assert plan.lacking_bytes and advice
    assert not any("tiers." in line or "mesh.context" in line for line in advice)
    assert "experts" in str(plan)
