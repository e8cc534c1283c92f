"""Adapters merged into their model, of PEFT and of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import jmoe
from jmoe.deploy.adapters import merge_adapter_folder
from jmoe.deploy.merge import main
from tests.model_configs import CHECKPOINTS

LORA = CHECKPOINTS.parent / "lora"


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
    ],
)
def test_the_merged_model_has_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    # the checkpoints' bfloat16 would round the sum of weight and adapter
    base = tmp_path / "base"
    jmoe.save_pretrained(jmoe.load_pretrained(CHECKPOINTS / name, dtype="float32"), base)
    main([str(LORA / name / "first"), str(tmp_path / "out"), "--base", str(base)])
    model = jmoe.load_pretrained(tmp_path / "out", dtype="float32")
    with np.load(LORA / name / "expected.npz") as expected:
        logits = model(expected["tokens"][0].astype(np.int32))
        np.testing.assert_allclose(logits, expected["first_logits"], atol=1e-4, rtol=0)


def test_an_adapter_of_another_model_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of another model"):
        merge_adapter_folder(
            LORA / "mixtral" / "first", CHECKPOINTS / "qwen3_moe", tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()
