"""Scaled rotary positions: what each form multiplies, allows and refuses."""

from typing import Any

import numpy as np
import pytest

from jmoe.config import ModelConfig
from jmoe.config.positions import (
    ROPE_SCALINGS,
    DynamicRopeConfig,
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    NtkAlphaRopeConfig,
    RopeScaling,
    YarnConfig,
)

LLAMA3 = {
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

DYNAMIC = {"factor": 2.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "short_factor": (1.0, 1.5),
    "long_factor": (1.0, 4.0),
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("scaling", "dim", "message"),
    [
        (LongRopeConfig(**LONGROPE), 8, "short_factor = .*: must have 4 numbers"),
        (DynamicRopeConfig(**DYNAMIC), 2, "rope_type = 'dynamic': needs more than the 2 rotated"),
        (NtkAlphaRopeConfig(5.0), 2, "rope_type = 'ntk_alpha': needs more than the 2 rotated"),
    ],
)
def test_heads_that_a_form_cannot_rotate(scaling: RopeScaling, dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(head_dim=dim, rope_scaling=scaling)
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 4, "qk_rope_head_dim": dim}
    with pytest.raises(ValueError, match=message):
        ModelConfig(rope_scaling=scaling, **latent)


def test_yarn_scales() -> None:
    sizes = {"factor": 4.0, "original_max_position_embeddings": 16}
    assert YarnConfig(**sizes).rotary_scale == pytest.approx(0.1 * np.log(4) + 1)
    assert YarnConfig(**sizes, attention_factor=0.5).rotary_scale == 0.5
    both = YarnConfig(**sizes, mscale=0.7, mscale_all_dim=1.0)
    assert both.rotary_scale == pytest.approx((0.07 * np.log(4) + 1) / (0.1 * np.log(4) + 1))
    assert YarnConfig(factor=1.0, original_max_position_embeddings=16).rotary_scale == 1.0
    assert both.score_scale == pytest.approx((0.1 * np.log(4) + 1) ** 2)
    assert YarnConfig(**sizes).score_scale == 1.0


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (LinearRopeConfig(4.0), 400),
        (LinearRopeConfig(0.5), 100),
        (Llama3RopeConfig(**LLAMA3), 128),
        (YarnConfig(factor=2.0, original_max_position_embeddings=16), 100),
        (DynamicRopeConfig(2.0, 100), 100),
        (NtkAlphaRopeConfig(50.0), 100),
        (LongRopeConfig((1.0,), (2.0,), 16, 6.25), 100),
    ],
)
def test_longest_sequences(scaling: RopeScaling, positions: int) -> None:
    assert scaling.max_positions(100) == positions


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("linear", {"factor": 0.0}, "factor = 0.0: must be greater than 0"),
        ("linear", {"factor": 2.0, "rope_type": "yarn"}, "rope_type = 'yarn': must be one of"),
        ("llama3", LLAMA3 | {"factor": -1.0}, "factor = -1.0: must be greater than 0"),
        ("llama3", LLAMA3 | {"low_freq_factor": 0.0}, "low_freq_factor = 0.0: must be greater"),
        (
            "llama3",
            LLAMA3 | {"low_freq_factor": 5.0},
            "low_freq_factor = 5.0: must not exceed high_freq_factor 4.0",
        ),
        ("dynamic", DYNAMIC | {"factor": 0.0}, "factor = 0.0: must be greater than 0"),
        ("ntk_alpha", {"alpha": -1.0}, "alpha = -1.0: must be greater than 0"),
        (
            "longrope",
            LONGROPE | {"long_factor": (1.0,)},
            "long_factor = .*: must have the 2 numbers",
        ),
        ("longrope", LONGROPE | {"short_factor": ()}, "short_factor = .*: must be numbers greater"),
        ("longrope", LONGROPE | {"factor": "4"}, "factor = '4': must be a number"),
        (
            "llama3",
            LLAMA3 | {"original_max_position_embeddings": 0},
            "original_max_position_embeddings = 0: must be greater than 0",
        ),
    ],
)
def test_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ROPE_SCALINGS[kind](**fields)
