"""Four image tasks of unequal size with images made of noise, and a small network for them."""

import numpy as np

from jmoe.config import CommConfig, RouterConfig, TaskConfig, VisionModelConfig, VisionTrainConfig
from jmoe.data.images import ImageSplit, ImageTask
from tests.model_configs import OPTIMIZER

COMM = {"schedule": "none"}
CONFIG = VisionTrainConfig(
    model=VisionModelConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(0,),
        task_layers=(2,),
        position="learned",
        router=RouterConfig(
            kind="sigmoid", aux_loss_coef=0.0, z_loss_coef=0.01, bias_update_speed=0.01
        ),
    ),
    tasks={
        "large": TaskConfig("large", batch_size=16, path=(0,)),
        "middle": TaskConfig("middle", batch_size=8, path=(1,)),
        "small": TaskConfig("small", batch_size=4, path=(0,)),
        "other": TaskConfig("other", batch_size=4, path=(3,), loss_weight=0.5),
    },
    optimizer=OPTIMIZER,
    comm=CommConfig(**COMM),
    num_steps=10,
    compute_dtype="float32",
)


def split_of(seed: int, images: int, classes: int) -> ImageSplit:
    rng = np.random.default_rng(seed)
    labels = np.arange(images, dtype=np.int32) % classes
    pixels = rng.integers(0, 256, (images, 8, 8, 1)) * (labels[:, None, None, None] + 1) // classes
    return ImageSplit(pixels.astype(np.uint8), labels)


TASKS = tuple(
    ImageTask(name, tuple("abcdef"[: i + 2]), split_of(i, 20, i + 2), split_of(10 + i, 6, i + 2))
    for i, name in enumerate(CONFIG.tasks)
)
CLASSES = {task.name: len(task.classes) for task in TASKS}
