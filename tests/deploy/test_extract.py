"""A task of a run on images becomes a model of its own that computes what the super-network does."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import CheckpointConfig, CommConfig, RouterConfig, TaskConfig, VisionModelConfig, VisionTrainConfig
from jmoe.deploy.extract import extract_task, load_task_model
from jmoe.deploy.extract import main as extract
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.vision_session import CLASSES
from jmoe.training.vision_step import ShardedVision
from tests.model_configs import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
CLASS_NAMES = {"letters": ["a", "b", "c"], "digits": ["1", "2"], "others": ["x", "y"]}
CONFIG = VisionTrainConfig(
    model=VisionModelConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=12,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(1,),
        task_layers=(0, 3),
        position="learned",
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0),
    ),
    tasks={
        "letters": TaskConfig("glyphs", path=(0, 2)),
        "digits": TaskConfig("digits", path=(1, 3)),
        "others": TaskConfig("fonts", path=(0, 1)),
    },
    comm=CommConfig(schedule="none"),
)


def saved_run(folder: Path, config: VisionTrainConfig = CONFIG) -> Any:
    """Save a step of `config`; the super-network."""
    counts = {name: len(classes) for name, classes in CLASS_NAMES.items()}
    sharded = ShardedVision(config, counts, mesh_of(1, 1, 1))
    state = sharded.initial_state()
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        files = {CLASSES: json.dumps(CLASS_NAMES).encode()}
        checkpoints.save(3, state, {}, config.to_json(), files)
        checkpoints.wait()
    return sharded.merge(state.params, state.router_bias)


def test_an_extracted_path_computes_what_the_super_network_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = saved_run(tmp_path / "run")
    pixels = jnp.asarray(np.random.default_rng(0).random((5, 8, 8, 1), np.float32))
    first = 0
    for number, (task, classes) in enumerate(CLASS_NAMES.items()):
        extract([str(tmp_path / "run"), str(tmp_path / task), "--task", task])
        assert f"task {task} at step 3" in capsys.readouterr().out
        model = load_task_model(tmp_path / task)
        assert model.classes == tuple(classes)
        expected, _ = network(pixels, jnp.full(5, number, jnp.int32), full_capacity=True)
        np.testing.assert_allclose(model(pixels), expected[:, first : first + len(classes)], rtol=0, atol=1e-6)
        first += len(classes)
        assert (tmp_path / task / "model.safetensors").stat().st_size < 4 * CONFIG.model.num_parameters()[0]


def test_what_cannot_be_extracted_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint in"):
        extract_task(tmp_path, tmp_path / "out", "letters")
    saved_run(tmp_path / "run")
    with pytest.raises(ValueError, match="task = 'cats': must be one of digits, letters, others"):
        extract_task(tmp_path / "run", tmp_path / "out", "cats")
    wide = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, intermediate_size=24))
    saved_run(tmp_path / "wide", wide)
    with pytest.raises(ValueError, match=r"model.intermediate_size = 24: must be model.moe_intermediate_size = 12"):
        extract_task(tmp_path / "wide", tmp_path / "out", "letters")
    assert not (tmp_path / "out").exists()


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.json: cannot be read"):
        load_task_model(tmp_path)
    saved_run(tmp_path / "run")
    extract_task(tmp_path / "run", tmp_path / "out", "digits")
    described = json.loads((tmp_path / "out" / "model.json").read_text())
    (tmp_path / "out" / "model.json").write_text(json.dumps(described | {"classes": ["only"]}))
    with pytest.raises(ValueError, match=r"heads.digits.* has shape \(16, 2\): must be \(16, 1\)"):
        load_task_model(tmp_path / "out")
