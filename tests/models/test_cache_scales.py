"""Scales of keys and values in a checkpoint: an engine with a cache in FP8 honours them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jmoe.inference.sequence import Completion
from tests.checkpoint_variants import Tensors, write_variant
from tests.model_configs import CHECKPOINTS
from tests.tiny_engines import tiny_engine

PROMPTS = [[1, 5, 9, 2, 7, 33, 12, 4, 8], [3, 8, 4]]
K, V = 1024.0, 64.0


def answers(folder: Path, **options: Any) -> list[Completion]:
    options = {"policy": "resident", "native": "off", "kv_cache_dtype": "fp8"} | options
    with tiny_engine(folder, **options) as served:
        return served.generate(PROMPTS, max_new_tokens=8, ignore_eos=True, logprobs=4)


def by_rows(factors: list[tuple[int, float]], times: int = 1) -> np.ndarray:
    """Return factors of rows: each as often as its number says, all of them `times` times."""
    return np.tile(np.repeat([f for _, f in factors], [n for n, _ in factors]), times)


def scaled(tensors: Tensors, fields: dict[str, Any]) -> Tensors:
    """Return weights of equal results, whose keys are K and whose values are V times as large."""
    made = dict(tensors)

    def multiply(name: str, factors: float | np.ndarray) -> None:
        for whole in (f"{name}.weight", f"{name}.bias"):
            if whole in made:
                x, by = made[whole], np.asarray(factors)
                by = by[:, None] if by.ndim and x.ndim == 2 else by
                made[whole] = (x.astype(np.float32) * by).astype(x.dtype)

    for layer in range(fields["num_hidden_layers"]):
        own = f"model.layers.{layer}.self_attn."
        if "kv_lora_rank" in fields:
            nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
            multiply(own + "kv_a_layernorm", K)
            shared = by_rows([(fields["kv_lora_rank"], 1), (rope, K)])
            multiply(own + "kv_a_proj_with_mqa", shared)
            multiply(own + "kv_b_proj", 1 / K)
            a_head = by_rows([(nope, 1), (rope, 1 / K)], fields["num_attention_heads"])
            multiply(own + "q_b_proj", a_head)
            continue
        has_norms = own + "k_norm.weight" in made
        multiply(own + ("k_norm" if has_norms else "k_proj"), K)
        multiply(own + ("q_norm" if has_norms else "q_proj"), 1 / K)
        multiply(own + "v_proj", V)
        made[own + "o_proj.weight"] = (made[own + "o_proj.weight"].astype(np.float32) / V).astype(
            made[own + "o_proj.weight"].dtype
        )
    return made


def with_scales(tensors: Tensors, layers: int, k: float, v: float, k_name: str) -> Tensors:
    made = dict(tensors)
    for layer in range(layers):
        own = f"model.layers.{layer}.self_attn."
        made[own + k_name] = np.asarray([k], np.float32)
        made[own + k_name.replace("k_", "v_")] = np.asarray([v], np.float32)
    return made


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        "gpt_oss",
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_scales_recover_what_they_divide(name: str, tmp_path: Path) -> None:
    """Keys and values beyond 448 are cut without scales; with them, tokens and log-probabilities
    are those of weights whose keys and values fit, bit for bit.
    """
    fields = json.loads((CHECKPOINTS / name / "config.json").read_text())
    layers = fields["num_hidden_layers"]
    large = write_variant(CHECKPOINTS / name, tmp_path / "large", lambda t: scaled(t, fields))
    known = write_variant(
        large, tmp_path / "known", lambda t: with_scales(t, layers, 0.7 * K, V, "k_scale")
    )
    modelopt = write_variant(
        large, tmp_path / "modelopt", lambda t: with_scales(t, layers, K, V, "k_proj.k_scale")
    )
    expected = answers(CHECKPOINTS / name)
    assert answers(large) != expected
    assert answers(known) == expected == answers(modelopt)
    # without FP8 nothing is divided
    wide = {"kv_cache_dtype": "auto"}
    assert answers(known, **wide) == answers(large, **wide)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (np.zeros(1, np.float32), "k_scale.* is 0.0: with kv_cache_dtype = 'fp8' must be greater"),
        (np.full(1, np.inf, np.float32), "k_scale.* is inf: with kv_cache_dtype"),
        (np.ones(2, np.float32), r"k_scale.* is F32\[2\]: with kv_cache_dtype = 'fp8' must be one"),
    ],
)
def test_other_scales_are_refused(scale: np.ndarray, error: str, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_scale"
    folder = write_variant(CHECKPOINTS / "mixtral", tmp_path / "model", lambda t: t | {name: scale})
    with pytest.raises(ValueError, match=error):
        answers(folder)
    answers(folder, kv_cache_dtype="auto")


def test_adapters_beside_scales_are_refused(tmp_path: Path) -> None:
    folder = write_variant(
        CHECKPOINTS / "mixtral", tmp_path / "model", lambda t: with_scales(t, 2, K, V, "k_scale")
    )
    with pytest.raises(ValueError, match="kv_cache_dtype = 'fp8': must be auto with lora"):
        answers(folder, lora=("name=folder",))


def test_norms_around_one_are_refused(tmp_path: Path) -> None:
    folder = write_variant(
        CHECKPOINTS / "qwen3_next", tmp_path / "model", lambda t: with_scales(t, 4, K, V, "k_scale")
    )
    with pytest.raises(ValueError, match="kv_cache_dtype = 'fp8': must be auto for this model"):
        answers(folder)
