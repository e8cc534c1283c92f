"""A dense model upcycled into experts: the same logits, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import flax.nnx as nnx
import numpy as np
import pytest

import jmoe
from jmoe.config import ModelConfig
from jmoe.deploy.upcycle import main, upcycled_fields
from jmoe.models.decoder import Decoder
from jmoe.models.huggingface import hf_config
from jmoe.models.pretrained import write_pretrained
from jmoe.models.weights import flatten_by_path
from tests.model_configs import CHECKPOINTS

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)


def write_dense(folder: Path, vocab_size: int = SIZES["vocab_size"]) -> np.ndarray:
    """Write a dense model of the family qwen3; return its hidden states for TOKENS."""
    sizes = SIZES | {"vocab_size": vocab_size}
    moe = ModelConfig(**sizes, **HEADS, qk_norm="head", num_experts=2, num_experts_per_tok=2)
    config = dataclasses.replace(moe, num_experts=0, moe_intermediate_size=48)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    fields = hf_config(dataclasses.replace(moe, moe_intermediate_size=48))
    arrays = flatten_by_path(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))
    write_pretrained(folder, config, arrays, fields | {"model_type": "qwen3_moe"})
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers")
    dense = {name: value for name, value in fields.items() if name not in names}
    dense |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(dense))
    return np.asarray(decoder(TOKENS)[0] @ decoder.lm_head())


def test_the_logits_are_those_of_the_dense_model(tmp_path: Path) -> None:
    expected = write_dense(tmp_path / "dense")
    main([str(tmp_path / "dense"), str(tmp_path / "moe"), "--num-experts", "4"])
    model = jmoe.load_pretrained(tmp_path / "moe")
    assert model.decoder.config.num_experts == 4
    np.testing.assert_allclose(np.asarray(model(TOKENS)), expected, atol=1e-5)
    kernel = np.asarray(model.decoder.moe_layers.moe.router.kernel[...])
    assert kernel.std() > 0.01  # tokens choose different experts


def test_refused(tmp_path: Path) -> None:
    fields = json.loads((CHECKPOINTS / "mixtral" / "config.json").read_text())
    with pytest.raises(ValueError, match="model_type = 'mixtral': must be a dense model: llama"):
        upcycled_fields(fields, 8, 2)
    with pytest.raises(ValueError, match="mlp_bias = True: must be false to become experts"):
        upcycled_fields({"model_type": "llama", "mlp_bias": True}, 8, 2)
    with pytest.raises(ValueError, match="num_experts_per_tok = 1: must be from 2 to num_exp"):
        upcycled_fields({"model_type": "llama"}, 8, 1)
    write_dense(tmp_path / "dense")
    for file in (tmp_path / "dense").glob("*.safetensors"):
        file.unlink()
    with pytest.raises((ValueError, OSError)):
        main([str(tmp_path / "dense"), str(tmp_path / "moe")])
    assert not (tmp_path / "moe").exists()
