"""A task of a run on images becomes a model of its own that computes what the super-network
does.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.deploy.extract import extract_task, load_task_model
from jmoe.deploy.extract import main as extract
from tests.vision_runs import CLASS_NAMES, CONFIG, saved_run


@pytest.mark.slow
def test_an_extracted_path_computes_what_the_super_network_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = saved_run(tmp_path / "run")
    pixels = jnp.asarray(np.random.default_rng(0).random((5, 8, 8, 1), np.float32))
    first = 0
    for number, (task, classes) in enumerate(CLASS_NAMES.items()):
        extract([str(tmp_path / "run"), str(tmp_path / task), "--task", task])
        assert f"task {task} at step 3" in capsys.readouterr().out
        model = load_task_model(str(tmp_path / task))
        assert model.classes == tuple(classes)
        expected, _ = network(pixels, jnp.full(5, number, jnp.int32), full_capacity=True)
        np.testing.assert_allclose(
            model(pixels), expected[:, first : first + len(classes)], rtol=0, atol=1e-6
        )
        first += len(classes)
        assert (
            tmp_path / task / "model.safetensors"
        ).stat().st_size < 4 * CONFIG.model.total_and_active_parameters()[0]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(
        ValueError, match=r"OUT_DIR = .*: must be an empty folder or none: nothing is written over"
    ):
        extract_task(tmp_path / "run", tmp_path, "digits")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_learned_path_is_extracted(tmp_path: Path) -> None:
    tasks = {
        name: dataclasses.replace(task, path=(3, number + 1))
        for number, (name, task) in enumerate(CONFIG.tasks.items())
    }
    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(CONFIG.model, learn_paths=True), tasks=tasks
    )
    logits = {
        name: jnp.array([number - 1.0, 1.0 - number]) for number, name in enumerate(CLASS_NAMES)
    }
    network = saved_run(tmp_path / "run", config, path_logits=logits)
    pixels = jnp.asarray(np.random.default_rng(0).random((5, 8, 8, 1), np.float32))
    found = []
    for number, task in enumerate(CLASS_NAMES):
        extract_task(tmp_path / "run", tmp_path / task, task)
        expected, _ = network(pixels, jnp.full(5, number, jnp.int32), full_capacity=True)
        model = load_task_model(tmp_path / task)
        np.testing.assert_allclose(
            model(pixels), expected[np.isfinite(expected)].reshape(5, -1), rtol=0, atol=1e-6
        )
        own = np.asarray(model.model.dense_layers.mlp.w_up[...])
        all_of_task = np.asarray(network.task_layers.moe.experts.w_up[...])
        found.append(
            [
                int(np.argmax([np.array_equal(own[i], w) for w in all_of_task[layer]]))
                for layer, i in ((0, 0), (1, 2))
            ]
        )
    assert found == [[0, 1], [0, 0], [3, 0]]


def test_what_cannot_be_extracted_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no checkpoint in"):
        extract_task(tmp_path, tmp_path / "out", "letters")
    saved_run(tmp_path / "run")
    with pytest.raises(ValueError, match="task = 'cats': must be one of digits, letters, others"):
        extract_task(tmp_path / "run", tmp_path / "out", "cats")
    wide = dataclasses.replace(
        CONFIG, model=dataclasses.replace(CONFIG.model, intermediate_size=24)
    )
    saved_run(tmp_path / "wide", wide)
    with pytest.raises(
        ValueError, match=r"model.intermediate_size = 24: must be model.moe_intermediate_size = 12"
    ):
        extract_task(tmp_path / "wide", tmp_path / "out", "letters")
    assert not (tmp_path / "out").exists()


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.json: cannot be read"):
        load_task_model(tmp_path)
    saved_run(tmp_path / "run")
    extract_task(tmp_path / "run", tmp_path / "out", "digits")
    described = json.loads((tmp_path / "out" / "model.json").read_text())
    (tmp_path / "out" / "model.json").write_text(json.dumps(described | {"head_size": 1}))
    with pytest.raises(ValueError, match=r"heads.digits.* has shape \(16, 2\): must be \(16, 1\)"):
        load_task_model(tmp_path / "out")
