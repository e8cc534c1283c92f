"""A small model of the gpt-moe-* presets with every parameter random, and what it computes, in
numpy.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jmoe
from jmoe.config import ModelConfig
from jmoe.configs import PRESETS
from jmoe.models.pretrained import LanguageModel, abstract_decoder, build_decoder
from jmoe.models.safetensors_io import read_headers
from jmoe.models.weights import flatten_by_path

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
}


def gpt_moe_config(**changes: Any) -> ModelConfig:
    """Return the model of the preset gpt-moe-8e at a small size."""
    preset = PRESETS["gpt-moe-8e"][1].model
    return dataclasses.replace(preset, **(SIZES | changes))  # type: ignore[arg-type]


def random_model(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """Return a model whose norms and biases are random too."""
    rng, arrays = np.random.default_rng(seed), {}
    for path, shape in flatten_by_path(abstract_decoder(config)[2]).items():
        noise = rng.normal(0.0, 0.2, shape.shape).astype(np.float32)
        arrays[path] = jnp.asarray(noise + (path[-1] == "scale"), jnp.float32)
    return LanguageModel(build_decoder(config, arrays))


def write_model(folder: Path, **changes: Any) -> LanguageModel:
    """Write a random model as a folder and return it."""
    model = random_model(gpt_moe_config(**changes))
    jmoe.save_pretrained(model, folder)
    return model


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def layer_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * w + b


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def routed_experts(
    h: np.ndarray, w: dict[str, np.ndarray], at: str, k: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Return (gates [T, E], 0 for experts not chosen; every expert's output of every token, [T,
    E, D]).
    """
    p = softmax(h @ w[f"{at}.gate.weight"].T)
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, :k]
    gates = np.zeros_like(p)
    np.put_along_axis(gates, chosen, np.take_along_axis(p, chosen, axis=-1), axis=-1)
    if k > 1:
        gates /= gates.sum(axis=-1, keepdims=True)
    outputs = []
    for e in range(p.shape[1]):
        name = f"{at}.experts.{e}"
        up = gelu(h @ w[f"{name}.up_proj.weight"].T + w[f"{name}.up_proj.bias"])
        outputs.append(up @ w[f"{name}.down_proj.weight"].T + w[f"{name}.down_proj.bias"])
    return gates, np.stack(outputs, axis=1)


def in_numpy(
    config: ModelConfig, w: dict[str, np.ndarray], tokens_S: np.ndarray
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Return (logits [S, V], what `routed_experts` says of every layer) of one row of tokens, by
    stored tensors.
    """
    length, heads, dim = len(tokens_S), config.num_attention_heads, config.dim_per_head
    x = w["model.embed_tokens.weight"][tokens_S] + w["model.embed_positions.weight"][:length]
    routed = []
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"

        def norm(x, name, layer=layer):  # type: ignore[no-untyped-def]
            return layer_norm(x, w[f"{layer}.{name}.weight"], w[f"{layer}.{name}.bias"])

        def linear(x, name, layer=layer):  # type: ignore[no-untyped-def]
            return x @ w[f"{layer}.{name}.weight"].T + w[f"{layer}.{name}.bias"]

        h = norm(x, "input_layernorm")
        q, k, v = (linear(h, f"self_attn.{n}_proj").reshape(length, heads, dim) for n in "qkv")
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(length, -1)
        x = x + linear(mixed, "self_attn.o_proj")
        h = norm(x, "post_attention_layernorm")
        if config.layer_kinds[i] == "dense":
            x = x + linear(gelu(linear(h, "mlp.up_proj")), "mlp.down_proj")
        else:
            routed.append(routed_experts(h, w, f"{layer}.mlp", config.num_experts_per_tok))
            x = x + np.einsum("te,ted->td", *routed[-1])
    x = layer_norm(x, w["model.norm.weight"], w["model.norm.bias"])
    return x @ w["model.embed_tokens.weight"].T, routed


def stored_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a folder in float64."""
    arrays = {}
    for tensor in read_headers(folder).values():
        data = np.fromfile(
            tensor.file, np.float32, int(np.prod(tensor.shape)), offset=tensor.offset
        )
        arrays[tensor.name] = data.reshape(tensor.shape).astype(np.float64)
    return arrays
