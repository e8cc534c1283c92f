"""Make a model with experts of a dense one: python -m jmoe.deploy.upcycle DENSE OUT_DIR
--num-experts 8.

Each expert is a copy of its layer's MLP, and the router's weights are random. A token's routing
weights sum to 1, so the new model computes what the dense one does until it is trained (sparse
upcycling, arXiv 2212.05055).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import ModelConfig, TrainConfig, check
from jmoe.deploy.cut import check_empty_or_new, copy_files, creating_folder
from jmoe.memory.record_store import folder_lock
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import abstract_decoder, read_config, write_pretrained
from jmoe.models.safetensors_io import weights_identity
from jmoe.models.tokenizer_file import TOKENIZER, companion_file_names
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import Names, StoredExperts, load_arrays
from jmoe.runtime import end_at_once_on_interrupt
from jmoe.training.finetune import pretrained_folder
from jmoe.types import JsonObject

# model_type of a dense model -> of the models with experts whose attention is the same
DENSE_FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
# the family in which dense layers have the names of all `DENSE_FAMILIES`
NAMES_OF_DENSE_LAYERS = "qwen3_moe"
BIASES = ("attention_bias", "mlp_bias")  # fields of parts that the models with experts lack
UPCYCLED = "upcycled"  # in a run's output folder: the model with experts that it starts from
ORIGIN = "upcycled.json"  # in that model's folder: what it was made of
LOCK, LOCK_LIMIT_S = "upcycle.lock", 3600.0  # another process may be writing a large model
_NOT_KEPT = (*BIASES, "architectures", "model_type", "pretraining_tp", "layer_types")


def upcycled_fields(fields: JsonObject, num_experts: int, num_experts_per_tok: int) -> JsonObject:
    """Return the `config.json` of the model with experts that a dense model becomes.

    Raises ValueError for another model_type, for biases, and for numbers of experts that cannot be.
    """
    kind = str(fields.get("model_type"))
    known = f"must be a dense model: {', '.join(DENSE_FAMILIES)}"
    check(kind in DENSE_FAMILIES, "model_type", kind, known)
    check(num_experts >= 2, "num_experts", num_experts, "must be at least 2")
    fits = 2 <= num_experts_per_tok <= num_experts
    least = f"must be from 2 to num_experts = {num_experts}, so that weights sum to 1"
    check(fits, "num_experts_per_tok", num_experts_per_tok, least)
    for name in BIASES:
        check(not fields.get(name), name, fields.get(name), "must be false to become experts")
    kept = {name: value for name, value in fields.items() if name not in _NOT_KEPT}
    experts: JsonObject = {"num_experts_per_tok": num_experts_per_tok}
    experts["model_type"] = family = DENSE_FAMILIES[kind]
    if family == "mixtral":
        experts |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": num_experts}
        return kept | experts
    experts |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": num_experts}
    size = fields.get("intermediate_size")
    return kept | experts | {"norm_topk_prob": True, "moe_intermediate_size": size}


def upcycle(dense: Path, out: Path, num_experts: int, num_experts_per_tok: int, seed: int) -> None:
    """Write the model with experts that a dense model becomes, in its dtype, with its tokenizer.

    seed: of the routers. Raises ValueError before anything is written.
    """
    fields = upcycled_fields(read_config(dense), num_experts, num_experts_per_tok)
    config = model_config(fields)
    own = replace(config, num_experts=0)
    arrays = load_arrays(dense, own, NAMES_OF_DENSE_LAYERS, abstract_decoder(own)[2], None)
    with creating_folder(out) as partly:
        write_pretrained(partly, config, _with_experts(arrays, config, seed), fields)
        if (dense / TOKENIZER).is_file():
            shutil.copyfile(dense / TOKENIZER, partly / TOKENIZER)
        copy_files(dense, partly, companion_file_names(dense))
        origin = _origin(dense, num_experts, num_experts_per_tok, seed)
        (partly / ORIGIN).write_text(json.dumps(origin))


def _origin(dense: Path, num_experts: int, num_experts_per_tok: int, seed: int) -> JsonObject:
    """Return what a model with experts was made of, as `ORIGIN` holds it."""
    weights = weights_identity(read_weight_headers(dense))
    experts = {"num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
    return {"dense": weights, **experts, "seed": seed}


def with_upcycled_model(config: TrainConfig) -> TrainConfig:
    """Return the run with `init_from` as the model with experts in its output folder; it is made
    there, in a separate process, unless an earlier start or another process of the run did that.

    JAX stays uninitialised in this process, which may still have to join a distributed run. Raises
    ValueError if the model there was made of another one, or with other options.
    """
    own = config.upcycle
    if own.num_experts is None:
        return config
    dense, made = pretrained_folder(config.init_from), Path(config.output_dir) / UPCYCLED
    numbers = own.num_experts, own.num_experts_per_tok, config.seed
    upcycled_fields(read_config(dense), *numbers[:2])
    made.parent.mkdir(parents=True, exist_ok=True)
    with folder_lock(made.parent, LOCK_LIMIT_S, LOCK):
        if not (made / ORIGIN).is_file():
            _upcycle_in_subprocess(dense, made, *numbers)
    origin, now = json.loads((made / ORIGIN).read_text()), _origin(dense, *numbers)
    differ = [f"{name}: {origin[name]} -> {now[name]}" for name in now if origin[name] != now[name]]
    anew = f"{made} was made of another model (then -> now): {'; '.join(differ)}"
    check(not differ, "init_from", config.init_from, f"{anew}; another output_dir starts anew")
    return replace(config, init_from=str(made))


def _upcycle_in_subprocess(
    dense: Path, made: Path, num_experts: int, num_experts_per_tok: int, seed: int
) -> None:
    options = {"num-experts": num_experts, "num-experts-per-tok": num_experts_per_tok}
    command = [sys.executable, "-m", "jmoe.deploy.upcycle", str(dense), str(made)]
    command += [f"--{name}={value}" for name, value in (options | {"seed": seed}).items()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # the caller uses the accelerators
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"upcycling ended with {done.returncode}"]
        raise ValueError(f"init_from = {str(dense)!r}: {lines[-1].removeprefix('upcycle: ')}")


def _with_experts(
    arrays: Mapping[Names, jax.Array], config: ModelConfig, seed: int
) -> dict[Names, jax.Array | StoredExperts]:
    """Return the parameters of the model with experts, from those of the dense one."""
    grown: dict[Names, Any] = {}
    for path, array in arrays.items():
        if path[:2] == ("dense_layers", "mlp"):
            host = np.asarray(array)
            read = lambda layer, _, host=host: host[layer]  # noqa: E731
            grown["moe_layers", "moe", "experts", path[2]] = StoredExperts(read, host.dtype)
        elif path[0] == "dense_layers":
            grown["moe_layers", *path[1:]] = array
        else:
            grown[path] = array
    shape = config.num_hidden_layers, config.hidden_size, config.num_experts
    router = config.initializer_range * jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    grown["moe_layers", "moe", "router", "kernel"] = router.astype(arrays["embedding",].dtype)
    return grown


def main(arguments: list[str]) -> None:
    """Write the model with experts that the command line asks for, and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m jmoe.deploy.upcycle", description=__doc__)
    parser.add_argument("dense", metavar="DENSE", type=Path, help="a dense Hugging Face folder")
    parser.add_argument(
        "out_dir", metavar="OUT_DIR", type=Path, help="where the model with experts is written"
    )
    parser.add_argument("--num-experts", type=int, default=8, help="of each layer")
    parser.add_argument("--num-experts-per-tok", type=int, default=2, help="that a token chooses")
    parser.add_argument("--seed", type=int, default=0, help="of the routers' weights")
    options = vars(parser.parse_args(arguments))
    dense, out = options.pop("dense").expanduser(), options.pop("out_dir")
    check_empty_or_new(out, "OUT_DIR")
    upcycle(dense, out, **options)
    print(f"{dense} with {options['num_experts']} experts a layer is in {out}")


if __name__ == "__main__":
    end_at_once_on_interrupt()
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"upcycle: {error}")
