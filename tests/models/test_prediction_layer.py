"""A checkpoint's layer for multi-token prediction, read as a checkpoint of one layer."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.prediction_layer import PredictionLayer
from tests.checkpoint_variants import Tensors, read_tensors, write_variant
from tests.model_configs import CHECKPOINTS

PREDICTING = CHECKPOINTS.parent / "prediction"
LAYERS = {"deepseek_v3": 3, "glm4_moe": 4}  # of the decoder


@pytest.mark.parametrize("family", LAYERS)
def test_reads_the_layer_behind_the_decoder(family: str) -> None:
    """Its experts are those of its own tensors, and the join is what the paper writes."""
    tensors, own = read_tensors(PREDICTING / family), f"model.layers.{LAYERS[family]}."
    with (
        LazyCheckpoint(PREDICTING / family, "float32") as decoder,
        PredictionLayer(PREDICTING / family, "float32") as layer,
    ):
        around, blocks = layer.load_beside(decoder.load_dense_modules()[0])
        expert, config = layer.read_expert(0, 3), layer.config
    assert len(blocks) == 1 and config.num_moe_layers == 1
    down = np.asarray(tensors[own + "mlp.experts.3.down_proj.weight"], np.float32)
    np.testing.assert_array_equal(expert["w_down"], down.T)
    rng = np.random.default_rng(0)
    x, hidden = rng.normal(size=(2, 1, 5, config.hidden_size)).astype(np.float32)

    def normed(h: np.ndarray, name: str) -> np.ndarray:
        scale = np.asarray(tensors[own + name], np.float32)
        normal = h / np.sqrt((h**2).mean(-1, keepdims=True) + config.norm_eps)
        return np.asarray(normal * scale)

    both = np.concatenate([normed(x, "enorm.weight"), normed(hidden, "hnorm.weight")], axis=-1)
    expected = both @ np.asarray(tensors[own + "eh_proj.weight"], np.float32).T
    joined = around.join(jnp.asarray(x), jnp.asarray(hidden))
    np.testing.assert_allclose(joined, expected, rtol=1e-5, atol=1e-5)


def test_copies_of_embedding_and_head_need_not_be_there(tmp_path: Path) -> None:
    def without(tensors: Tensors) -> Tensors:
        return {n: t for n, t in tensors.items() if ".3.embed_tokens" not in n and ".head" not in n}

    folder = write_variant(PREDICTING / "deepseek_v3", tmp_path / "model", without)
    with PredictionLayer(folder) as lean, PredictionLayer(PREDICTING / "deepseek_v3") as whole:
        assert lean.resident_bytes == whole.resident_bytes > 8 * whole.expert_bytes


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    name = "model.layers.3.hnorm.weight"
    folder = write_variant(
        PREDICTING / "deepseek_v3",
        tmp_path / "model",
        lambda tensors: {n: t for n, t in tensors.items() if n != name},
    )
    with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
        PredictionLayer(folder)
