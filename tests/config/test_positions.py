"""Scaled rotary positions: what each form multiplies, allows and refuses."""

from typing import Any

import numpy as np
import pytest

from jmoe.config.positions import (
    ROPE_SCALINGS,
    LinearRopeConfig,
    Llama3RopeConfig,
    RopeScaling,
    YarnConfig,
)

LLAMA3 = {
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


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
            LLAMA3 | {"low_freq_factor": 4.0},
            "low_freq_factor = 4.0: must be less than high_freq_factor 4.0",
        ),
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
