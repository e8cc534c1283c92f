"""The `config.json` of models as their authors publish them: read as it is, with the number of
parameters that the model has.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import jmoe
from jmoe.config.engine import EngineConfig
from jmoe.deploy.check import check_model
from jmoe.inference.loading import this_machine
from jmoe.models.families.unsupported import MISSING_PARTS
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import abstract_decoder, read_config
from tests.checkpoint_variants import write_variant
from tests.model_configs import CHECKPOINTS

RELEASES = json.loads((Path(__file__).parents[1] / "fixtures" / "releases.json").read_text())


@pytest.mark.parametrize(
    "name",
    [n for n, release in RELEASES.items() if release["config"]["model_type"] not in MISSING_PARTS],
)
def test_as_published(name: str) -> None:
    """As many parameters as transformers' class has. Layers that predict further tokens are not
    counted, with which GLM-4.5-Air's page counts 110 billion.
    """
    fields = RELEASES[name]["config"] | {"quantization_config": None}
    shapes = abstract_decoder(model_config(fields))[2]
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert elements == RELEASES[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("glm4_moe", ("model.layers.4.eh_proj.weight", "model.layers.4.shared_head.norm.weight")),
        (
            "ernie4_5_moe",
            ("model.mtp_block.0.input_layernorm.weight", "model.mtp_linear_proj.0.weight"),
        ),
        ("qwen3_next", ("mtp.fc.weight", "mtp.layers.0.input_layernorm.weight")),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    name: str, further: tuple[str, ...], tmp_path: Path
) -> None:
    """Their tensors change no logits; a folder that is written anew says that it has none."""

    def predicting(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | dict.fromkeys(further, np.ones((4, 4), np.float32))

    folder = write_variant(
        CHECKPOINTS / name, tmp_path / "with", predicting, num_nextn_predict_layers=1
    )
    notes = check_model(folder, EngineConfig(max_seq_len=64), this_machine()).notes
    assert (
        "2 tensors of layers that predict further tokens: only --speculation mtp reads them"
        in notes
    )
    model = jmoe.load_pretrained(folder)
    tokens = np.arange(12, dtype=np.int32)[None]
    np.testing.assert_array_equal(model(tokens), jmoe.load_pretrained(CHECKPOINTS / name)(tokens))
    jmoe.save_pretrained(model, tmp_path / "again")
    if name != "qwen3_next":  # whose class has no such field
        assert read_config(tmp_path / "again")["num_nextn_predict_layers"] == 0
