"""Which part of every parameter a device has, and which models do not divide."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import ModelConfig
from jmoe.layers.norm import Norm
from jmoe.mesh import EXPERT_INTRA, make_mesh, split_over
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.tensor_parallel import ParameterCut, per_device_config, shard_slices
from tests.model_configs import CHECKPOINTS


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (
            {"num_attention_heads": 6},
            "num_attention_heads = 6: must be a multiple of mesh.devices = 4 with mesh.dense",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
            "num_key_value_heads = 6: .*, or divid",
        ),
        (
            {"first_k_dense_replace": 1, "intermediate_size": 30},
            "intermediate_size = 30: must be a multiple of",
        ),
        (
            {"shared_expert_intermediate_size": 6},
            "shared_expert_intermediate_size = 6: must be a multiple of",
        ),
        ({"vocab_size": 3}, "vocab_size = 3: must be at least 4"),
    ],
)
def test_models_that_do_not_divide(model: dict[str, Any], match: str) -> None:
    if model.get("num_attention_heads") == 6:
        model = model | {"num_key_value_heads": 6, "head_dim": 8}
    with pytest.raises(ValueError, match=match):
        per_device_config(ModelConfig(**model), 4)


def test_a_device_of_several_has_a_narrower_decoder() -> None:
    """One head of keys is on all; an unused width does not matter."""
    config = ModelConfig(
        num_attention_heads=8, num_key_value_heads=1, vocab_size=10, intermediate_size=30
    )
    part = per_device_config(config, 4)
    assert (part.num_attention_heads, part.num_key_value_heads, part.dim_per_head) == (
        2,
        1,
        config.dim_per_head,
    )
    assert part.vocab_size == 3


def test_parts_of_a_parameter() -> None:
    """Groups lie side by side; units of which there are too few are shared, and where they end
    parts are shorter.
    """
    qkv = ParameterCut(-1, ((4, 10), (2, 10), (2, 10)))
    assert shard_slices(qkv, 1, 2) == [slice(20, 40), slice(50, 60), slice(70, 80)]
    assert shard_slices(qkv, 2, 4) == [slice(20, 30), slice(50, 60), slice(70, 80)]
    vocabulary = ParameterCut(-2, ((9, 1),))
    assert [shard_slices(vocabulary, n, 4) for n in range(4)] == [
        [slice(0, 3)],
        [slice(3, 6)],
        [slice(6, 9)],
        [slice(9, 9)],
    ]


def test_parts_are_the_whole() -> None:
    """Of attention with biases and of a head; a bias that is added after the sum is on the first
    device.
    """
    with LazyCheckpoint(CHECKPOINTS / "gpt_oss", "float32") as checkpoint:
        embed_and_head, layers = checkpoint.load_dense_modules()
        parts = [checkpoint.load_dense_shard(n, 2) for n in range(2)]
    whole, pieces = layers[0].attention, [part[1][0].attention for part in parts]
    q, k, v = jnp.split(whole.b_qkv[...], [48, 72])
    for n, piece in enumerate(pieces):
        own = [jnp.split(x, 2)[n] for x in (q, k, v)]
        np.testing.assert_array_equal(piece.b_qkv[...], np.concatenate(own))
    np.testing.assert_array_equal(np.concatenate([p.w_out[...] for p in pieces]), whole.w_out[...])
    np.testing.assert_array_equal(np.concatenate([p.sinks[...] for p in pieces]), whole.sinks[...])
    np.testing.assert_array_equal(pieces[0].b_out[...], whole.b_out[...])
    assert np.any(whole.b_out[...]) and not np.any(pieces[1].b_out[...])
    np.testing.assert_array_equal(
        np.concatenate([p[0].head[...] for p in parts], axis=1), embed_and_head.head[...]
    )


def test_a_vocabulary_that_does_not_divide_ends_in_zeros() -> None:
    """64 entries on 5 devices; heads do not matter here."""
    with LazyCheckpoint(CHECKPOINTS / "mixtral", "float32") as checkpoint:
        table = checkpoint.load_dense_modules()[0].embedding[...]
        parameter = next(p for p in checkpoint._parameters if p.path == ("embedding",))
        parts = [checkpoint._load_shard(parameter, n, 5) for n in range(5)]
    assert {part.shape for part in parts} == {(13, 32)}
    np.testing.assert_array_equal(np.concatenate(parts)[:64], table)
    assert not np.any(np.concatenate(parts)[64:])


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_norm_over_several_devices(kind: str) -> None:
    """Means are over all of x."""
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32) + 1
    whole = Norm(16, kind, 1e-6)
    part = Norm(4, kind, 1e-6)
    part.axes = (EXPERT_INTRA,)
    features = split_over((EXPERT_INTRA,), 1)
    mesh = make_mesh((1, 1, 4), jax.devices()[:4])
    run = jax.shard_map(
        lambda x: part(x, jnp.float32), mesh=mesh, in_specs=features, out_specs=features
    )
    np.testing.assert_allclose(
        jax.jit(run)(x), whole(jnp.asarray(x), jnp.float32), rtol=1e-6, atol=1e-6
    )
