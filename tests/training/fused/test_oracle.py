"""Fine-tuning on masked samples against transformers and PEFT: all parameters, and adapters.

transformers pads four samples of a batch; here two share a row. The references are made by
tests/fixtures/make_fine_tuning.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.config import LoraConfig, OptimizerConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.peft_files import read_adapter_folder
from jmoe.models.pretrained import read_config
from jmoe.models.weights import flatten_by_path
from jmoe.training.finetune import load_pretrained_state, with_pretrained_model
from jmoe.training.fused.adapting import ADAPTERS, AdapterTrainer
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer, make_trainer
from jmoe.types import PyTree
from tests.model_configs import CHECKPOINTS, mesh_of
from tests.training.test_sample_batch import batch as batch_of
from tests.training.test_sample_batch import row

REFERENCES = CHECKPOINTS.parent / "fine_tuning"
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
STEPS, S = 20, 25
TOLERANCE = 1e-4


def expected_of(name: str) -> dict[str, Any]:
    with np.load(REFERENCES / name / "expected.npz") as arrays:
        return dict(arrays)


def config_of(name: str, lora: LoraConfig | None = None) -> TrainConfig:
    """As in make_fine_tuning.py: clipping, no router losses, no decay."""
    plain = {"warmup_steps": 0, "eps": 1e-4, "weight_decay": 0.0, "clip_norm": 1.0}
    tiny = PRESETS["tiny"][1]
    config = with_pretrained_model(
        dataclasses.replace(
            tiny,
            init_from=str(CHECKPOINTS / name),
            lora=lora or LoraConfig(),
            optimizer=OptimizerConfig(2e-3, "constant", **plain),
            data=dataclasses.replace(tiny.data, path=("chats.jsonl",)),
            num_steps=STEPS,
            batch_size=2,
            sequence_length=S,
            compute_dtype="float32",
        )
    )
    router = dataclasses.replace(
        config.model.router, aux_loss_coef=0.0, z_loss_coef=0.0, bias_update_speed=0.0
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, router=router))


def batches_of(expected: dict[str, Any]) -> Iterator[PyTree]:
    """Each batch of the fixture as two rows of two samples."""
    lengths = expected["lengths"]
    ends = np.cumsum(lengths.sum(axis=-1))
    tokens = iter(np.split(expected["tokens"], ends[:-1]))
    for batch in lengths:
        samples = [(next(tokens), int(prompt)) for prompt, _ in batch]
        yield batch_of([row(*samples[:2], length=S), row(*samples[2:], length=S)])


def train(trainer: Trainer, state: TrainState, name: str, run: str) -> TrainState:
    """Return the state after all steps, each checked against the reference's."""
    expected = expected_of(name)
    batches, losses, norms = list(batches_of(expected)), [], []
    for step in range(STEPS):
        state, metrics = trainer.step(state, batches[step % len(batches)])
        assert metrics["ok"]
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(losses, expected[f"{run}_losses"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(norms, expected[f"{run}_grad_norms"], atol=0, rtol=1e-3)
    assert losses[-1] < losses[0] or run == "lora"
    return state


@pytest.mark.parametrize(
    "name",
    [
        name if name == "mixtral" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_all_parameters_train_as_in_transformers(name: str) -> None:
    """Losses, gradient norms, and every parameter after the last step."""
    config = config_of(name)
    trainer = make_trainer(config, mesh_of(1, 1, 1))
    first = load_pretrained_state(trainer, config)
    begun = jax.device_get(flatten_by_path(first.params))
    state = train(trainer, first, name, "full")
    last = load_pretrained_state(
        trainer, dataclasses.replace(config, init_from=str(REFERENCES / name / "last"))
    )
    theirs, ours = map(jax.device_get, map(flatten_by_path, (last.params, state.params)))
    assert theirs.keys() == ours.keys() == begun.keys()
    for path, w in ours.items():
        np.testing.assert_allclose(w, theirs[path], atol=TOLERANCE, rtol=0, err_msg=str(path))
    # the tolerance is far below what training changes
    moved = [np.abs(w - begun[path]).max() for path, w in theirs.items()]
    assert np.median(moved) > 50 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_train_on_samples_as_in_peft(name: str) -> None:
    fields = read_config(CHECKPOINTS / name)
    first = CHECKPOINTS.parent / "lora" / name / "first"
    own = read_adapter_folder(first, model_config(fields), family_of(fields))
    trainer = AdapterTrainer(config_of(name, own.lora), mesh_of(1, 1, 1))
    place = jax.tree.map(lambda s: s.sharding, trainer.saved_shape.params)
    state = dataclasses.replace(
        trainer.init(), params=jax.device_put({ADAPTERS: own.adapters}, place)
    )
    train(trainer, state, name, "lora")
