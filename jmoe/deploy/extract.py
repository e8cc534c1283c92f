"""Write one task of a run on images as a model of its own: python -m jmoe.deploy.extract RUN_DIR
OUT_DIR --task NAME.

The model is the task's path through the super-network: a layer routed by task becomes dense, with
the weights of the expert on the task's path (learned or given). Experts and heads of other tasks
are left out. (UFO: train a super-network, deploy a small one.)
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import STACKS, CommConfig, TaskConfig, VisionModelConfig, VisionTrainConfig, check
from jmoe.config.vision import HeadKind
from jmoe.deploy.cut import check_empty_or_new, creating_folder
from jmoe.layers.contrastive import l2_normalized
from jmoe.mesh import make_mesh
from jmoe.models.functional import split_parameters
from jmoe.models.safetensors_io import (
    DTYPES,
    NewTensor,
    replace_text_durably,
    write_safetensors,
)
from jmoe.models.vision import VisionTransformer, likeliest_experts
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import Names, flatten_by_path
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.training.tasks.run import read_vision_run, vision_model_config_from_json
from jmoe.training.tasks.step import OF_TASKS

MODEL = "model.json"
SHARD_BYTES = 4 << 30
Arrays = dict[Names, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TaskModel:
    """The model of one task, `logits = task_model(pixels)`, and the names of its classes.

    With a contrastive head it returns embeddings instead of logits.
    """

    task: str
    classes: tuple[str, ...]
    head: HeadKind
    model: VisionTransformer

    def __call__(self, pixels_BPPC: jax.Array) -> jax.Array:
        """Return float32 logits [B, classes] of pixels in [0, 1], [B, image_size, image_size,
        channels].

        With a contrastive head: embeddings of length 1, whose dot products are the similarities of
        images.
        """
        logits, _ = self.model(
            pixels_BPPC, jnp.zeros(pixels_BPPC.shape[0], jnp.int32), full_capacity=True
        )
        return logits if self.head == "classes" else l2_normalized(logits)


def path_model_config(config: VisionModelConfig) -> VisionModelConfig:
    """Return the configuration of one path's model, in which layers routed by task are dense.

    Raises ValueError naming the field if experts do not have the shape of a dense layer.
    """
    if config.task_layers:
        width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        constraint = (
            f"must be model.moe_intermediate_size = {width} to make an expert a dense layer"
        )
        check(
            config.intermediate_size == width,
            "model.intermediate_size",
            config.intermediate_size,
            constraint,
        )
        check(
            shared == 0,
            "model.shared_expert_intermediate_size",
            shared,
            "must be 0 to extract a path",
        )
    dense = tuple(sorted({*config.mlp_only_layers, *config.task_layers}))
    experts = config.num_experts if "moe" in config.layer_kinds else 0
    return dataclasses.replace(
        config, task_layers=(), learn_paths=False, mlp_only_layers=dense, num_experts=experts
    )


def path_model_arrays(
    arrays: Arrays, config: VisionModelConfig, task: str, path: tuple[int, ...]
) -> Arrays:
    """Return the arrays of `path_model_config`'s model, from the arrays of the super-network.

    path: the task's expert in each layer routed by task.
    """
    others = {*STACKS.values(), *OF_TASKS}
    kept = {names: a for names, a in arrays.items() if names[0] not in others}
    kept |= {names: a for names, a in arrays.items() if names[:2] == ("heads", task)}
    kept |= {names: a for names, a in arrays.items() if names[0] == STACKS["moe"]}
    layers: dict[Names, list[np.ndarray]] = {}
    for layer in config.layers:
        for names, a in arrays.items():
            if layer.kind == "moe" or names[0] != layer.stack_name:
                continue
            own, name = a[layer.number], names[1:]
            if name[:2] == ("moe", "experts"):
                own, name = own[path[layer.number]], ("mlp", *name[2:])
            layers.setdefault((STACKS["dense"], *name), []).append(own)
    return kept | {name: np.stack(parts) for name, parts in layers.items()}


def extract_task(run_dir: Path, out_dir: Path, task: str) -> int:
    """Write `task` of a run's newest checkpoint as a model, `model.json` and safetensors; return
    its step.

    Raises ValueError naming the folder if it has no checkpoint of a run on images, `task` if the
    run has no such task, or OUT_DIR if it is not empty.
    """
    check_empty_or_new(out_dir, "OUT_DIR")
    layout = VisionTrainConfig(tasks={"any": TaskConfig("any")}, comm=CommConfig(schedule="none"))
    run = read_vision_run(run_dir, "RUN_DIR", make_mesh((1, 1, 1), jax.devices()[:1]), layout)
    check(task in run.tasks, "task", task, f"must be one of {', '.join(sorted(run.tasks))}")
    small = path_model_config(run.model)
    arrays = {
        names: np.asarray(a)
        for names, a in {**flatten_by_path(run.params), **flatten_by_path(run.router_bias)}.items()
    }
    path = run.tasks[task].path
    if run.model.learn_paths:
        path = likeliest_experts(path, run.params["path_logits"][task])
    own = path_model_arrays(arrays, run.model, task, path)
    tensors = [
        NewTensor(".".join(names), a.dtype, a.shape, partial(np.asarray, a))
        for names, a in own.items()
    ]
    own_task, classes = run.tasks[task], run.classes[task]
    described = {
        "task": task,
        "classes": classes,
        "head": own_task.head,
        "head_size": own_task.head_size(len(classes)),
    }
    described |= {"step": run.step, "model": dataclasses.asdict(small)}
    with creating_folder(out_dir) as partly:
        write_safetensors(partly, tensors, SHARD_BYTES)
        replace_text_durably(partly / MODEL, json.dumps(described, indent=1) + "\n")
    return run.step


def load_task_model(folder: str | Path) -> TaskModel:
    """Return the model that `extract_task` wrote. Raises ValueError naming an unreadable file or a
    tensor that does not fit.
    """
    folder = Path(folder)
    try:
        described = json.loads((folder / MODEL).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / MODEL}: cannot be read: {error}") from error
    config, classes = vision_model_config_from_json(described["model"]), tuple(described["classes"])
    head, size = described.get("head", "classes"), described.get("head_size", len(classes))

    def build_transformer() -> VisionTransformer:
        return VisionTransformer(config, {described["task"]: size}, [()], rngs=nnx.Rngs(0))

    parts = split_parameters(nnx.eval_shape(build_transformer))
    stored = read_weight_headers(folder)

    def read_tensor(names: Names, shape: tuple[int, ...]) -> jax.Array:
        tensor = stored.get(".".join(names))
        if tensor is None:
            raise ValueError(f"{folder}: has no tensor {'.'.join(names)!r}")
        if tensor.shape != shape:
            raise tensor.error(f"has shape {tensor.shape}: must be {shape}")
        count = int(np.prod(shape))
        return jnp.array(
            np.fromfile(tensor.file, DTYPES[tensor.dtype], count, offset=tensor.offset).reshape(
                shape
            )
        )

    trees = []
    for part in parts[1:]:
        leaves = [
            read_tensor(names, leaf.shape)
            for names, leaf in flatten_by_path(nnx.to_pure_dict(part)).items()
        ]
        trees.append(jax.tree.unflatten(jax.tree.structure(part), leaves))
    return TaskModel(described["task"], classes, head, nnx.merge(parts[0], *trees))


def main(arguments: list[str]) -> None:
    """Write the model of the task that the command line names, and print its step."""
    parser = argparse.ArgumentParser(prog="python -m jmoe.deploy.extract", description=__doc__)
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="output folder of a run on images"
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="where the model is written")
    parser.add_argument("--task", required=True, help="which task")
    options = parser.parse_args(arguments)
    step = extract_task(options.run_dir, options.out_dir, options.task)
    print(f"task {options.task} at step {step} of {options.run_dir} is in {options.out_dir}")


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"extract: {error}")
