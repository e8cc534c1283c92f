"""Read the newest checkpoint of an image run: to extract one task for serving, or to start another
run with more tasks (`init_from`).
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from jmoe.config import (
    CheckpointConfig,
    RouterConfig,
    TaskConfig,
    VisionModelConfig,
    VisionTrainConfig,
    check,
)
from jmoe.data.images import ImageTask
from jmoe.offload.expert_state import ReadExperts
from jmoe.offload.saved_experts import expert_array_names
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.resume import open_saved_experts
from jmoe.training.state import TrainState, read_missing_experts, without_experts
from jmoe.training.tasks.step import OF_TASKS, ShardedVision
from jmoe.training.tasks.trainer import ImageTrainer
from jmoe.types import JsonObject, PyTree

CLASSES = "classes.json"  # in every checkpoint: the names of each task's classes


class VisionRun(NamedTuple):
    """The learned parameters of an image run, with its configuration.

    classes: names of classes, by task. params, router_bias: nested dicts of arrays. experts: a
    function that reads the experts that `params` lacks; None if `params` has all.
    """

    step: int
    model: VisionModelConfig
    tasks: dict[str, TaskConfig]
    classes: dict[str, list[str]]
    params: PyTree
    router_bias: PyTree
    experts: ReadExperts | None = None


def vision_model_config_from_json(fields: JsonObject) -> VisionModelConfig:
    """Return the model configuration from its JSON fields in a checkpoint."""
    values: JsonObject = {
        name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()
    }
    return VisionModelConfig(**(values | {"router": RouterConfig(**fields["router"])}))


def read_vision_run(
    run_dir: Path,
    option: str,
    mesh: Mesh,
    config: VisionTrainConfig,
    *,
    leaves_out_experts: bool = False,
) -> VisionRun:
    """Return the parameters of a run's newest checkpoint, split over `mesh` as `config` says.

    leaves_out_experts: leave the experts out of `params`, and return a function that reads them.
    Raises ValueError, naming the `option` that the user set, if the folder has no checkpoint of an
    image run.
    """
    with Checkpoints(run_dir / "checkpoints", CheckpointConfig()) as checkpoints:
        step, said = checkpoints.latest_step(), f"{option} = {str(run_dir)!r}"
        if step is None:
            raise ValueError(f"{said}: has no checkpoint in {checkpoints.directory}")
        saved = checkpoints.saved_config(step)
        if "tasks" not in saved:
            raise ValueError(f"{said}: learned text: must be a run on images")
        tasks = {
            name: TaskConfig(**(v | {"path": tuple(v["path"])}))
            for name, v in saved["tasks"].items()
        }
        model = vision_model_config_from_json(saved["model"])
        classes = json.loads((checkpoints.directory / str(step) / CLASSES).read_text())
        counts = {name: len(names) for name, names in classes.items()}
        own = dataclasses.replace(
            config, model=model, tasks=tasks, init_from="", gradient_accumulation_steps=1
        )
        shape = ShardedVision(own, counts, mesh).saved_shape
        moments = [name for name in checkpoints.array_names(step) if name.startswith(("m.", "v."))]
        experts = open_saved_experts(model, shape, checkpoints.step_folder(step))
        later = experts is not None and (leaves_out_experts or "weights" in experts.kinds)
        params = without_experts(shape.params) if later else shape.params
        names = expert_array_names(checkpoints.array_names(step)) if later else []
        wanted = TrainState(params, {}, {}, shape.router_bias, shape.step)
        state, _, _ = checkpoints.restore(
            step,
            wanted,
            skipped_arrays=[*moments, *(name for name in names if name not in moments)],
        )
        if experts is None or not later:
            return VisionRun(int(step), model, tasks, classes, state.params, state.router_bias)
        if not leaves_out_experts:
            state = read_missing_experts(
                state, shape, model.expert_layers, experts.read_weights, None
            )
    read = experts.read_weights if leaves_out_experts else None
    return VisionRun(int(step), model, tasks, classes, state.params, state.router_bias, read)


def state_from_run(trainer: ImageTrainer, tasks: tuple[ImageTask, ...]) -> TrainState:
    """Return the state of step 0 with the parameters of the run in `init_from`; new tasks get
    random heads and paths.

    The run's own tasks produce bit-identical logits. Raises ValueError naming the field if the
    model, or a task's path, head or classes, differs from that run's.
    """
    config = trainer.config
    folder, later = Path(config.init_from).expanduser(), not config.tiers.all_on_device
    run = read_vision_run(folder, "init_from", trainer.model.mesh, config, leaves_out_experts=later)
    where = f"in init_from = {config.init_from!r}"
    for name in (field.name for field in dataclasses.fields(run.model)):
        now, then = getattr(config.model, name), getattr(run.model, name)
        check(now == then, f"model.{name}", now, f"must be {then} as {where}")
    for task in tasks:
        if (known := run.tasks.get(task.name)) is not None:
            path = config.tasks[task.name].path
            for name in ("head", "embedding_size"):
                now, then = getattr(config.tasks[task.name], name), getattr(known, name)
                check(now == then, f"tasks.{task.name}.{name}", now, f"must be {then} {where}")
            check(
                path == known.path,
                f"tasks.{task.name}.path",
                path,
                f"must be {known.path} as {where}",
            )
            same = list(task.classes) == run.classes[task.name]
            check(
                same,
                f"tasks.{task.name}.source",
                config.tasks[task.name].source,
                f"must have the classes {where}",
            )
    state = trainer.prepare_state_for_save(trainer.init())
    own = {
        kind: {
            name: run.params[kind].get(name, drawn) for name, drawn in state.params[kind].items()
        }
        for kind in OF_TASKS
        if kind in state.params
    }
    state = dataclasses.replace(state, params=run.params | own, router_bias=run.router_bias)
    if run.experts is None:
        return trainer.restore_state(state)
    return trainer.restore_state(state, run.experts, lambda layer, experts: {})
