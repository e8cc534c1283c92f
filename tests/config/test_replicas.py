"""Copies of the state that a run may not have, and meshes that they do not divide."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jmoe.config import CommConfig, LoraConfig, MeshConfig, ModelConfig, TiersConfig, TrainConfig
from jmoe.configs import PRESETS

COPIES = MeshConfig(4, 1, 1, replicate=2)
CONFIG = TrainConfig(mesh=COPIES, batch_size=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tiers": TiersConfig(experts="host", optimizer="host")},
            "must be 1 with experts on other tiers",
        ),
        (
            {"model": ModelConfig(), "init_from": "folder", "lora": LoraConfig(rank=2)},
            "must be 1 with lora.rank",
        ),
        ({"comm": CommConfig(packing=2)}, "must be 1 with comm.packing = 2"),
    ],
    ids=["tiers", "lora", "packing"],
)
def test_runs_that_have_one_copy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^mesh.replicate = 2: {words}$"):
        dataclasses.replace(CONFIG, **changes)


def test_image_tasks_have_one_copy() -> None:
    config = PRESETS["ufo-tiny"][1]
    with pytest.raises(ValueError, match=r"^mesh\.replicate = 2: must be 1 for image tasks$"):
        dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, replicate=2))


def test_copies_divide_the_data_axis() -> None:
    assert CONFIG.checked_mesh_shape(4) == (4, 1, 1)
    three = dataclasses.replace(CONFIG, mesh=MeshConfig(4, 1, 1, replicate=3))
    with pytest.raises(ValueError, match=r"^mesh\.replicate = 3: must divide mesh.data = 4$"):
        three.checked_mesh_shape(4)
    with pytest.raises(ValueError, match=r"^replicate = 0: must be greater than 0$"):
        MeshConfig(replicate=0)
