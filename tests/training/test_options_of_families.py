"""Options that Phi-3.5-MoE and Llama 4 brought: the same training on one device, with experts in host
memory and on four devices.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jmoe.config import CommConfig, MeshConfig, RouterConfig
from tests.model_configs import MODEL
from tests.training.streamed.test_streamed_step import CONFIG, HOST, train

PHI = {
    "num_experts_per_tok": 2,
    "norm": "layernorm",
    "attention_bias": True,
    "head_bias": True,
    "router": RouterConfig(kind="sparsemixer", mask_distance=0.6),
}
# chunks shorter than the sequences, a temperature within them
LLAMA = {
    "layer_types": ("chunked_attention", "full_attention") * (MODEL.num_hidden_layers // 2),
    "attention_chunk_size": 3,
    "attn_scale": 0.5,
    "floor_scale": 2,
    "qk_norm": "rotated_l2",
    "num_experts_per_tok": 1,
    "router": RouterConfig(kind="input_weighted", norm_topk_prob=False, aux_loss_coef=0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [PHI, LLAMA], ids=["phi", "llama"])
def test_training_is_the_same_everywhere(options: dict[str, Any], tied: bool) -> None:
    """Also with the head in rows or columns on four devices, each with its part of the bias."""
    model = dataclasses.replace(MODEL, **options, tie_word_embeddings=tied)
    config = dataclasses.replace(CONFIG, model=model, batch_size=4)
    parts = CommConfig(embedding="rows" if tied else "columns")
    on_mesh = dataclasses.replace(config, mesh=MeshConfig(2, 1, 2), comm=parts)
    alone = train(config, steps=3)
    for other in (train(config, HOST, steps=3), train(on_mesh, steps=3)):
        np.testing.assert_allclose(other.losses, alone.losses, rtol=1e-5)
        np.testing.assert_allclose(other.held_out, alone.held_out, rtol=1e-5)
    assert len(set(alone.losses)) == 3
