"""Trainers of runs on images, for experts on the device and off it."""

from collections.abc import Mapping

from jax.sharding import Mesh

from jmoe.config import VisionTrainConfig
from jmoe.planning.elastic import Layout
from jmoe.training.tasks.step import VisionTrainer
from jmoe.training.tasks.streamed import StreamedVisionTrainer

ImageTrainer = VisionTrainer | StreamedVisionTrainer


def make_vision_trainer(
    config: VisionTrainConfig,
    num_classes: Mapping[str, int],
    mesh: Mesh,
    layout: Layout,
    run: str = "run",
) -> ImageTrainer:
    """Make the trainer of a run on images, with experts where `config.tiers` wants them; compiles
    nothing yet.

    num_classes: by task. run: names the folder of the experts' records in `tiers.path`.
    """
    if config.tiers.on_device:
        return VisionTrainer(config, num_classes, mesh, layout)
    return StreamedVisionTrainer(config, num_classes, mesh, layout, run)
