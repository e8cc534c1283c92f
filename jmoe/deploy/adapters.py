"""LoRA adapters of a run or of PEFT: merge them into their model, or write a run's as PEFT does."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import CheckpointConfig, LoraConfig, check
from jmoe.deploy.cut import copy_files
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.lora import adapted_parameters, get_at_path, initial_adapters, merged_weight
from jmoe.models.peft_files import AdapterFolder, read_adapter_folder, write_adapter_folder
from jmoe.models.pretrained import abstract_decoder, read_config, write_pretrained
from jmoe.models.quantization import COMPRESSION_FIELDS
from jmoe.models.tokenizer_file import TOKENIZER, companion_file_names
from jmoe.models.weights import load_arrays
from jmoe.run.checkpoint import Checkpoints
from jmoe.run.compatibility import BASE
from jmoe.training.finetune import base_model_fingerprint, pretrained_folder
from jmoe.training.fused.adapting import ADAPTERS
from jmoe.training.state import TrainState
from jmoe.types import JsonObject, PyTree


def merge_adapter_folder(adapter: Path, base: Path, out_dir: Path) -> None:
    """Write the model of a Hugging Face folder with an adapter of PEFT added.

    Raises ValueError if the adapter is of another model, or has options that are not supported.
    """
    fields = read_config(base)
    own = read_adapter_folder(adapter, model_config(fields), family_of(fields))
    _write_merged_model(own, base, out_dir)
    _copy_tokenizer(base, out_dir)


def merge_adapter_run(checkpoints: Checkpoints, step: int, saved: JsonObject, out_dir: Path) -> int:
    """Write the model that step `step` of a LoRA run has trained, with its tokenizer; return the
    step. saved: the step's configuration.
    """
    base = _base_of_run(saved)
    _write_merged_model(_saved_adapters(checkpoints, step, saved, base), base, out_dir)
    _copy_tokenizer(checkpoints.directory / str(step), out_dir)
    return step


def write_run_adapter(run_dir: Path, out_dir: Path) -> int:
    """Write the adapter of a LoRA run's newest checkpoint as PEFT does; return its step."""
    with Checkpoints(run_dir / "checkpoints", CheckpointConfig()) as checkpoints:
        step = checkpoints.latest_step()
        has = f"has no checkpoint in {checkpoints.directory}"
        check(step is not None, "RUN_DIR", str(run_dir), has)
        assert step is not None
        saved = checkpoints.saved_config(step)
        rank = (saved.get("lora") or {}).get("rank")
        check(rank is not None, "--adapter", str(run_dir), "must be a run with lora.rank")
        base = _base_of_run(saved)
        own = _saved_adapters(checkpoints, step, saved, base)
    write_adapter_folder(out_dir, own.parameters, own.adapters, own.lora, str(base.resolve()))
    return step


def _base_of_run(saved: JsonObject) -> Path:
    """Return the folder of a run's frozen model. Raises ValueError if its weights have changed."""
    base = pretrained_folder(saved["init_from"])
    same = base.is_dir() and base_model_fingerprint(saved["init_from"]) == saved[BASE]
    must = "must still be the model whose adapters the run trained"
    check(same, "init_from", saved["init_from"], must)
    return base


def _saved_adapters(
    checkpoints: Checkpoints, step: int, saved: JsonObject, base: Path
) -> AdapterFolder:
    """Return the adapters of one step's checkpoint."""
    fields, options = read_config(base), saved["lora"]
    lora = LoraConfig(**(options | {"targets": tuple(options["targets"])}))
    assert lora.rank is not None
    rank = lora.rank
    parameters = adapted_parameters(model_config(fields), family_of(fields), lora.targets)
    shapes = jax.eval_shape(lambda: initial_adapters(jax.random.key(0), parameters, rank))
    step_shape: PyTree = jax.ShapeDtypeStruct((), jnp.int32)
    wanted = TrainState({ADAPTERS: shapes}, {}, {}, {}, step_shape)
    others = ("m.", "v.", "router_bias.", "loss_scale.")
    but = [name for name in checkpoints.array_names(step) if name.startswith(others)]
    state, _, _ = checkpoints.restore(step, wanted, skipped_arrays=but)
    return AdapterFolder(lora, parameters, jax.tree.map(np.asarray, state.params[ADAPTERS]))


def _write_merged_model(own: AdapterFolder, base: Path, out_dir: Path) -> None:
    """Write the model `base`, with adapters added, in the dtypes in which it is stored."""
    fields = read_config(base)
    config = model_config(fields)
    arrays = load_arrays(base, config, family_of(fields), abstract_decoder(config)[2], None)
    for parameter in own.parameters:
        adapter, spans = (
            get_at_path(own.adapters, parameter.path),
            parameter.source.column_spans(parameter.shape[-1]),
        )
        merged = np.array(arrays[parameter.path])
        for entry in range(len(merged)):  # float32 copies of one layer at a time
            of_layer = {name: x[entry] for name, x in adapter.items()}
            merged[entry] = merged_weight(merged[entry], of_layer, spans, own.lora.scale)
        arrays[parameter.path] = jnp.asarray(merged)
    plain = {name: value for name, value in fields.items() if name not in COMPRESSION_FIELDS}
    write_pretrained(out_dir, config, arrays, plain)


def _copy_tokenizer(source: Path, out_dir: Path) -> None:
    """Copy the tokenizer, if there is one, and the files that belong to it."""
    if (source / TOKENIZER).is_file():
        shutil.copyfile(source / TOKENIZER, out_dir / TOKENIZER)
    copy_files(source, out_dir, companion_file_names(source))
