"""Dense layers split over fake devices give what one device gives, and take the bytes on each
that a formula says.
"""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from tiny_engines import tiny_engine

from jmoe.config import ModelConfig
from jmoe.config.engine import EngineMesh
from jmoe.inference.engine import Engine
from jmoe.inference.mesh.runner import MeshRunner
from tests.inference.mesh.mesh_traffic import (
    MAX_BATCH,
    Traffic,
    assert_logprobs,
    move_at_every_step,
    traffic,
)

FLOAT_BYTES = 4
OTHERS = ("mixtral", "qwen2_moe", "olmoe", "gpt_oss", "deepseek_v3", "deepseek_v3_yarn")
OTHERS += ("granitemoe", "hunyuan_v1_moe", "qwen3_moe_longrope", "phimoe")
OTHERS += ("bailing_moe", "llama4_text")


@pytest.fixture(
    scope="module", params=["qwen3_moe", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def one_device(request: pytest.FixtureRequest) -> Iterator[tuple[str, Traffic, np.ndarray]]:
    """Yield a model and its answers."""
    with tiny_engine(request.param, max_batch=MAX_BATCH, policy="resident") as engine:
        yield request.param, traffic(engine), engine.tokens_per_expert()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_heads_on_several_devices_give_the_tokens_of_one(
    one_device: tuple[str, Traffic, np.ndarray], devices: int
) -> None:
    """With chunks, prefixes and seeds, while experts move too; on four devices some heads of
    keys lie on two.
    """
    name, expected, use = one_device
    mesh = EngineMesh(devices, placement="lina", slots_per_device=4, dense="tensor")
    with tiny_engine(name, max_batch=MAX_BATCH, mesh=mesh) as engine:
        runner = engine._runner
        assert isinstance(runner, MeshRunner)
        assert_bytes(engine, runner, devices)
        runner.enable_swaps(0.0, 0.0)
        move_at_every_step(runner)
        answer = traffic(engine)
        assert engine.tokens_per_expert().tolist() == use.tolist()
    assert answer.tokens == expected.tokens and answer.reused_tokens == expected.reused_tokens > 0
    assert_logprobs(answer.logprobs, expected.logprobs)


def assert_bytes(engine: Engine, runner: MeshRunner, devices: int) -> None:
    """Check what lies on every device against the plan, and the plan against a formula of its
    own.
    """
    weights = [w for _, arrays in (runner._embed_and_head, *runner._layers) for w in arrays]
    plan, config = engine.plan.memory.model, engine.config
    assert bytes_by_device(weights, devices) == [plan.dense_bytes] * devices
    assert bytes_by_device(jax.tree.leaves(runner.caches), devices) == [plan.cache_bytes] * devices
    # norms, routers, projections to latents
    copied_bytes = bytes_of_all(config) - split_bytes(config, 1)
    assert plan.dense_bytes == copied_bytes + split_bytes(config, devices)
    positions = MAX_BATCH * runner.layout.num_table_positions * config.num_hidden_layers
    each = max(1, config.num_key_value_heads // devices) * 2 * config.dim_per_head
    if config.kv_lora_rank is not None:  # latents, which all heads share, on every device
        each = config.kv_lora_rank + config.qk_rope_head_dim
    assert plan.cache_bytes == FLOAT_BYTES * positions * each


def bytes_by_device(arrays: list[jax.Array], devices: int) -> list[int]:
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return [
        sum(s.data.nbytes for s in shards if s.device == device)
        for device in jax.devices()[:devices]
    ]


def bytes_of_all(config: ModelConfig) -> int:
    """Return the bytes of all weights but the experts."""
    experts = config.num_moe_layers * config.num_experts * config.parameters_per_expert
    return FLOAT_BYTES * (config.total_and_active_parameters()[0] - experts)


def split_bytes(config: ModelConfig, devices: int) -> int:
    """Return a device's bytes of what is split: heads, inner dimensions of MLPs, and the
    vocabulary.
    """
    d, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    dim, q = config.dim_per_head, heads // devices
    if config.kv_lora_rank is not None:
        kv = config.kv_lora_rank * q * (config.qk_nope_head_dim + config.v_head_dim)
        attention = (config.q_lora_rank or d) * q * dim + kv + q * config.v_head_dim * d
    else:
        biased = config.attention_bias or config.qkv_bias
        g = max(1, groups // devices)
        attention = (d + biased) * (q + 2 * g) * dim + q * dim * d + q * config.attention_sinks
        attention += (q + g) * dim * (config.qk_norm == "full")
    dense = config.layer_kinds.count("dense") * 3 * d * config.intermediate_size // devices
    shared = config.num_moe_layers * 3 * d * config.shared_expert_intermediate_size // devices
    rows = (1 if config.tie_word_embeddings else 2) * d + config.head_bias
    vocabulary = rows * -(-config.vocab_size // devices)
    return FLOAT_BYTES * (config.num_hidden_layers * attention + dense + shared + vocabulary)
