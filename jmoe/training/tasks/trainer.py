"""The choice of an image run's trainer: `VisionTrainer` with all experts on the devices, else
`StreamedVisionTrainer`.
"""

from collections.abc import Mapping

from jax.sharding import Mesh

from jmoe.config import VisionTrainConfig
from jmoe.planning.elastic import TaskLayout
from jmoe.training.tasks.step import VisionTrainer
from jmoe.training.tasks.streamed import StreamedVisionTrainer

ImageTrainer = VisionTrainer | StreamedVisionTrainer


def make_vision_trainer(
    config: VisionTrainConfig,
    num_classes: Mapping[str, int],
    mesh: Mesh,
    layout: TaskLayout,
    run: str = "run",
) -> ImageTrainer:
    """Return the trainer of an image run, with experts on the tiers that `config.tiers` names.
    Compiles nothing yet.

    num_classes: by task. run: the folder name of the experts' records below `tiers.path`.
    """
    if config.tiers.all_on_device:
        return VisionTrainer(config, num_classes, mesh, layout)
    return StreamedVisionTrainer(config, num_classes, mesh, layout, run)
