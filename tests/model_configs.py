"""Models, runs and meshes so small that a step takes milliseconds, and the checkpoints of
fixtures/.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jmoe.config import (
    CommConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TiersConfig,
    TrainConfig,
)
from jmoe.mesh import make_mesh

# Hugging Face folders, by architecture
CHECKPOINTS = Path(__file__).parent / "fixtures" / "checkpoints"
# One dense layer and three with experts; a router with a bias and every loss.
MODEL = ModelConfig(
    vocab_size=128,
    hidden_size=16,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    moe_intermediate_size=12,
    num_experts=8,
    num_experts_per_tok=1,
    initializer_range=0.2,
    router=RouterConfig(
        kind="sigmoid", aux_loss_coef=0.1, z_loss_coef=0.01, bias_update_speed=0.01
    ),
)
# A large eps: where AdamW divides 0 by nearly 0, the last bit of a gradient would decide the sign
# of an update.
OPTIMIZER = OptimizerConfig(learning_rate=0.005, warmup_steps=2, eps=1e-3, clip_norm=0.5)


def mesh_of(*shape: int, replicas: int = 1) -> Mesh:
    """Return a mesh of the first of the fake devices."""
    return make_mesh(shape, jax.devices()[: math.prod(shape)], replicas=replicas)


def stored_in(tiers: TiersConfig, folder: Path, **changes: Any) -> TiersConfig:
    """Return the tiers with those changes that they honour, and the folder of what is on NVMe,
    if something is.
    """
    nvme = "nvme" in (tiers.experts, tiers.optimizer, tiers.gradients)
    if tiers.experts == "device":  # where all layers are at once
        changes.pop("device_layers", None)
    return dataclasses.replace(tiers, path=str(folder) if nvme else "", **changes)


def spread_over(config: TrainConfig, *shape: int, **comm: Any) -> TrainConfig:
    """Return `config` on a mesh of this shape, with these fields of `CommConfig`."""
    return dataclasses.replace(config, mesh=MeshConfig(*shape), comm=CommConfig(**comm))
