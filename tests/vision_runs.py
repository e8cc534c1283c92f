"""A run on images of three tasks, saved without having trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jmoe.config import (
    CheckpointConfig,
    CommConfig,
    RouterConfig,
    TaskConfig,
    VisionModelConfig,
    VisionTrainConfig,
)
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.tasks.run import CLASSES
from jmoe.training.tasks.step import ShardedVision
from tests.model_configs import mesh_of

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


def saved_run(folder: Path, config: VisionTrainConfig = CONFIG, **changes: Any) -> Any:
    """Save a step of `config` with these parameters in place of those drawn; the super-network."""
    counts = {name: len(classes) for name, classes in CLASS_NAMES.items()}
    sharded = ShardedVision(config, counts, mesh_of(1, 1, 1))
    state = sharded.initial_state()
    state = dataclasses.replace(state, params=state.params | changes)
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        files = {CLASSES: json.dumps(CLASS_NAMES).encode()}
        checkpoints.save(3, state, {}, config.to_json(), files)
        checkpoints.wait_for_save()
    return sharded.model_with_params(state.params, state.router_bias)
