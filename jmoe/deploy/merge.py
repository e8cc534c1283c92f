"""Write a run's newest checkpoint as a Hugging Face folder: python -m jmoe.deploy.merge RUN_DIR
OUT_DIR.

Of a LoRA run, the folder holds the model with its adapter added, or with `--adapter` the adapter
alone. `--base MODEL` adds an adapter that PEFT trained. OUT_DIR must be empty or new. It appears
once it is complete.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jmoe.config import (
    ROPE_SCALINGS,
    CheckpointConfig,
    ModelConfig,
    RouterConfig,
    TrainConfig,
)
from jmoe.data.tokenizer import load_tokenizer
from jmoe.deploy.adapters import merge_adapter_folder, merge_adapter_run, write_run_adapter
from jmoe.deploy.cut import check_empty_or_new, copy_files, creating_folder
from jmoe.mesh import make_mesh
from jmoe.models.huggingface import hf_config
from jmoe.models.pretrained import write_pretrained
from jmoe.models.tokenizer_file import (
    SETTINGS,
    TOKENIZER,
    companion_file_names,
    read_json_if_present,
)
from jmoe.models.weights import Names, StoredExperts, flatten_by_path
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.saved_experts import SavedExperts, expert_array_names
from jmoe.run.checkpoint import Checkpoints
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.training.finetune import INITIAL_CONFIG
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import TrainState, experts_of, without_experts
from jmoe.types import JsonObject

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of config.json


def saved_model_config(fields: JsonObject) -> ModelConfig:
    """Return `ModelConfig` from a run's saved JSON. Raises ValueError naming fields that this
    version of jmoe does not have.
    """
    unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(ModelConfig)})
    if unknown:
        raise ValueError(
            "the run's model has fields that this version of jmoe does not know:"
            f" {', '.join(unknown)}"
        )
    values: JsonObject = {
        name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()
    }
    scaling = values.get("rope_scaling")
    if scaling is not None:  # runs of older versions have no rope_type: all were YaRN
        stored = {name: tuple(v) if isinstance(v, list) else v for name, v in scaling.items()}
        values["rope_scaling"] = ROPE_SCALINGS[scaling.get("rope_type", "yarn")](**stored)
    return ModelConfig(**(values | {"router": RouterConfig(**values["router"])}))


def saved_parameters(
    checkpoints: Checkpoints, step: int, config: TrainConfig
) -> dict[Names, jax.Array | StoredExperts]:
    """Return the parameters {path: array} of one step's checkpoint. Experts are read one at a time,
    when they are used.
    """
    shape = ShardedDecoder(config, make_mesh((1, 1, 1), jax.devices()[:1])).saved_shape
    names = checkpoints.array_names(step)
    experts = experts_of(shape.params)
    params = without_experts(shape.params) if experts else shape.params
    but = [
        *expert_array_names(names),
        *(name for name in names if name.startswith(("m.", "v.", "scales.", "loss_scale."))),
    ]
    state, _, _ = checkpoints.restore(
        step, TrainState(params, {}, {}, shape.router_bias, shape.step), skipped_arrays=but
    )
    arrays: dict[Names, jax.Array | StoredExperts] = {
        **flatten_by_path(state.params),
        **flatten_by_path(state.router_bias),
    }
    if experts:
        shapes = {name: tuple(leaf.shape[2:]) for name, leaf in experts.items()}
        saved = SavedExperts(
            checkpoints.step_folder(step),
            shapes,
            ExpertIndex.from_model(config.model),
            config.model.expert_layers,
        )
        for path, leaf in flatten_by_path(shape.params).items():
            if path not in arrays:
                arrays[path] = StoredExperts(
                    partial(saved.read_parameter, path[-1]), np.dtype(leaf.dtype)
                )
    return arrays


def merge_run_to_hugging_face(run_dir: Path, out_dir: Path) -> int:
    """Write a run's newest checkpoint, with its tokenizer, as a folder that transformers loads;
    return its step.

    If the run started from a pretrained model, the folder also has that model's chat templates and
    special token ids. Raises ValueError naming the folder if it has no checkpoint or is a run on
    images, or naming options that no Hugging Face family supports.
    """
    with Checkpoints(run_dir / "checkpoints", CheckpointConfig()) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise ValueError(
                f"RUN_DIR = {str(run_dir)!r}: has no checkpoint in {checkpoints.directory}"
            )
        saved = checkpoints.saved_config(step)
        if "tasks" in saved:
            raise ValueError(
                f"RUN_DIR = {str(run_dir)!r}: learned image tasks: must be a run of a language"
                " model"
            )
        if (saved.get("lora") or {}).get("rank") is not None:
            return merge_adapter_run(checkpoints, step, saved, out_dir)
        model = saved_model_config(saved["model"])
        described_model = hf_config(model)  # raises before anything is read
        # the default may exceed the model's positions, which is an error
        length = min(TrainConfig.sequence_length, model.max_position_embeddings)
        # no step runs, so native operations need not be built
        config = TrainConfig(model=model, sequence_length=length, native="off")
        arrays = saved_parameters(checkpoints, step, config)
    saved_files = checkpoints.directory / str(step)
    tokenizer = saved_files / TOKENIZER
    # the run trained on token shards without a tokenizer, or an older jmoe saved it
    if not tokenizer.is_file():
        trained_with = saved["data"]["tokenizer"]
        tokenizer = (
            Path(trained_with).expanduser() if trained_with else run_dir / "data" / TOKENIZER
        )
    fields = {}
    if tokenizer.is_file():
        fields["eos_token_id"] = load_tokenizer(tokenizer, config.model.vocab_size).eot
    initial = read_json_if_present(saved_files / INITIAL_CONFIG)
    fields |= {name: initial[name] for name in TOKEN_IDS if name in initial}
    write_pretrained(out_dir, config.model, arrays, described_model | fields)
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, out_dir / TOKENIZER)
        copy_files(saved_files, out_dir, companion_file_names(saved_files))
        if not (out_dir / SETTINGS).is_file():
            described = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.model.max_position_embeddings,
            }
            (out_dir / SETTINGS).write_text(json.dumps(described, indent=2) + "\n")
    return int(step)


def main(arguments: list[str]) -> None:
    """Write what the command line names as a Hugging Face folder or an adapter's, and print it."""
    parser = argparse.ArgumentParser(prog="python -m jmoe.deploy.merge", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's output folder")
    parser.add_argument(
        "out_dir", metavar="OUT_DIR", type=Path, help="where the Hugging Face folder is written"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--adapter",
        action="store_true",
        help="of a LoRA run: write its adapter alone, as PEFT does",
    )
    either.add_argument(
        "--base",
        type=Path,
        help="RUN_DIR is an adapter of PEFT: merge it into this Hugging Face folder",
    )
    options = parser.parse_args(arguments)
    check_empty_or_new(options.out_dir, "OUT_DIR")
    if options.base is not None:
        with creating_folder(options.out_dir) as partly:
            merge_adapter_folder(options.run_dir, options.base, partly)
        print(f"{options.base} with {options.run_dir} is in {options.out_dir}")
        return
    with creating_folder(options.out_dir) as partly:
        if options.adapter:
            step = write_run_adapter(options.run_dir, partly)
        else:
            step = merge_run_to_hugging_face(options.run_dir, partly)
    print(f"step {step} of {options.run_dir} is in {options.out_dir}")


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"merge: {error}")
