"""Load Hugging Face checkpoints as models that run, and save models as Hugging Face checkpoints.

Legend:
B batch
S sequence
T tokens, B * S
D hidden
V vocabulary
N layers with experts
E experts of a layer
K experts that a token chooses
"""

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jmoe.config import ModelConfig, check
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import Routing
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.mesh import ALL, EXPERT, param_specs, shapes_with_shardings, shardings
from jmoe.models.decoder import Decoder, output_logits
from jmoe.models.folder import has_file
from jmoe.models.gguf.folder import gguf_folder
from jmoe.models.huggingface import family_of, hf_config, model_config
from jmoe.models.quantization import COMPRESSION_FIELDS, MODELOPT_FILE
from jmoe.models.safetensors_io import (
    INDEX,
    SINGLE,
    replace_text_durably,
    write_safetensors,
)
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import (
    Names,
    StoredExperts,
    flatten_by_path,
    has_untied_head,
    load_arrays,
    new_tensors,
)
from jmoe.types import JsonObject, PyTree

MAX_SHARD_BYTES = 5_000_000_000
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
log = logging.getLogger(__name__)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _logits_and_stats(
    graph: nnx.GraphDef,
    dtype: str,
    keep_routing: bool,
    state: PyTree,
    tokens_BS: jax.Array,
    mask_BS: jax.Array | None,
) -> tuple[jax.Array, MoEStats | None]:
    """Return (float32 logits [B, S, V], statistics of all layers, or None without experts).

    keep_routing: the statistics include the routing of every token.
    """
    decoder: Decoder = nnx.merge(graph, state)
    order_BS = None
    # moves the tokens of each row to its front, so that the causal mask hides the padding
    if mask_BS is not None:
        order_BS = jnp.argsort(~mask_BS, axis=1, stable=True)
        tokens_BS = jnp.take_along_axis(tokens_BS, order_BS, axis=1)
    x_BSD, stats = decoder(tokens_BS, dtype=dtype, full_capacity=True, keep_routing=keep_routing)
    if order_BS is not None:
        x_BSD = jnp.take_along_axis(x_BSD, jnp.argsort(order_BS, axis=1)[..., None], axis=1)
    return output_logits(decoder, x_BSD), stats


class LanguageModel(nnx.Module):
    """A decoder with its head: `model(tokens_BS)` returns float32 logits [B, S, V].

    config_json: the text of the `config.json` that it was loaded with, or "".
    dtype: the compute dtype, independent of the parameters' dtype.
    """

    def __init__(self, decoder: Decoder, config_json: str = "", *, dtype: str = "float32") -> None:
        self.decoder = decoder
        self.config_json = config_json
        self.dtype = dtype

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    def __call__(self, tokens_BS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        """Return the logits after each token, float32 [B, S, V].

        mask_BS: 1 or True for tokens, 0 for padding on either side; logits of padding are
            undefined. Positions count the tokens of a row without padding.

        Raises ValueError if tokens are not [B, S] integers below vocab_size, if the mask has
        another shape, or if S exceeds the number of learned positions.
        """
        return self._forward_checked(tokens_BS, mask_BS, keep_routing=False)[0]

    def routing(self, tokens_BS: jax.Array) -> Routing:
        """Return every layer's router logits [N, T, E], and its chosen experts and weights [N, T,
        K].

        Raises ValueError if no layer has experts.
        """
        check(
            self.config.num_moe_layers > 0,
            "num_experts",
            self.config.num_experts,
            "no layer has experts",
        )
        _, stats = self._forward_checked(tokens_BS, None, keep_routing=True)
        assert stats is not None and stats.routing is not None
        return stats.routing

    def _forward_checked(
        self, tokens: jax.typing.ArrayLike, mask: jax.typing.ArrayLike | None, *, keep_routing: bool
    ) -> tuple[jax.Array, MoEStats | None]:
        tokens_BS, config = jnp.asarray(tokens), self.config
        whole = tokens_BS.ndim == 2 and jnp.issubdtype(tokens_BS.dtype, jnp.integer)
        check(
            whole,
            "tokens_BS",
            f"{tokens_BS.dtype}{list(tokens_BS.shape)}",
            "must be integers [batch, sequence]",
        )
        longest = (
            config.max_position_embeddings if config.position == "learned" else tokens_BS.shape[1]
        )
        check(
            tokens_BS.shape[1] <= longest,
            "tokens_BS.shape",
            tokens_BS.shape,
            f"has more than {longest} positions",
        )
        if tokens_BS.size and not isinstance(tokens_BS, jax.core.Tracer):
            for token in (int(tokens_BS.min()), int(tokens_BS.max())):
                inside = 0 <= token < config.vocab_size
                check(
                    inside,
                    "tokens_BS",
                    token,
                    f"must be between 0 and vocab_size - 1 = {config.vocab_size - 1}",
                )
        if mask is not None:
            mask = jnp.asarray(mask).astype(bool)
            check(
                mask.shape == tokens_BS.shape,
                "mask_BS.shape",
                mask.shape,
                f"must be {tokens_BS.shape}",
            )
        graph, state = nnx.split(self.decoder)
        return _logits_and_stats(graph, self.dtype, keep_routing, state, tokens_BS, mask)


def check_dtype(dtype: DTypeLike | None) -> None:
    """Raise ValueError unless `dtype` is float32, bfloat16 or None."""
    name = None if dtype is None else jnp.dtype(dtype).name
    check(
        name in (None, "float32", "bfloat16"),
        "dtype",
        name,
        "must be float32 or bfloat16, or None for as stored",
    )


def read_config_file(folder: Path) -> JsonObject:
    """Return the `config.json` of a Hugging Face folder as it is written.

    NVIDIA's releases describe their quantization in `hf_quant_config.json`, which is then returned
    as `quantization_config`. Raises ValueError naming the file if it is missing or damaged.
    """
    file = folder / "config.json"
    if not has_file(file):
        hint = unreadable_model_hint(folder) or "a Hugging Face checkpoint has one"
        raise ValueError(f"{file}: is missing; {hint}")
    fields, beside = read_json_object(file), folder / MODELOPT_FILE
    if not fields.get("quantization_config") and has_file(beside):
        described = read_json_object(beside).get("quantization")
        if not isinstance(described, dict):
            raise ValueError(f"{beside}: quantization = {described!r}: must be a table")
        fields["quantization_config"] = {"quant_method": "modelopt", **described}
    return fields


def read_config(folder: Path) -> JsonObject:
    """Return the `config.json` of a Hugging Face folder as a dictionary.

    If it sets tie_word_embeddings but the weights have a head that differs from the embedding, the
    flag is returned as False: transformers 5 uses such a head too. Raises ValueError naming the
    file if it is missing or damaged.
    """
    file, fields = folder / "config.json", read_config_file(folder)
    has_weights = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    if (
        fields.get("tie_word_embeddings") is True
        and has_weights
        and has_untied_head(read_weight_headers(folder))
    ):
        _warn_once(
            f"{file}: tie_word_embeddings = True, but the weights have a head that differs: it is"
            " used"
        )
        fields["tie_word_embeddings"] = False
    return fields


@cache
def _warn_once(text: str) -> None:
    """Log a warning, the same text only once in a process."""
    log.warning(text)


def unreadable_model_hint(path: Path) -> str:
    """Return a hint for a path that holds no readable model, e.g. a GGUF file; "" if there is
    none.
    """
    if path.suffix == ".gguf" or any(path.glob("*.gguf")):
        return "a GGUF file is given itself, not its folder: serve.py FILE.gguf"
    if (path / "adapter_config.json").is_file():
        return (
            "an adapter is no model: give the folder that it was merged into, such as by peft's"
            " merge_and_unload"
        )
    if not path.is_absolute() and not path.parent.exists() and HUB_ID.fullmatch(str(path)):
        return f"a model of the Hub must be here first: hf download {path} --local-dir {path.name}"
    return ""


def read_json_object(file: Path) -> JsonObject:
    """Return the JSON object in a file. Raises ValueError naming the file if it holds none."""
    try:
        with name_file_in_errors(file):
            fields = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: must hold a table, holds {type(fields).__name__}")
    return fields


def abstract_decoder(config: ModelConfig) -> tuple[PyTree, PyTree, PyTree]:
    """Return (graph, tree structure of the state, nested dictionary of parameter shapes) of a
    decoder.

    Allocates and computes nothing.
    """
    graph, structure, shapes = _abstract_decoder(config)
    return graph, structure, jax.tree.map(lambda shape: shape, shapes)  # dictionaries of its own


@cache
def _abstract_decoder(config: ModelConfig) -> tuple[PyTree, PyTree, PyTree]:
    """Return what `abstract_decoder` does, the same objects at every call; tracing takes 0.1 s."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return graph, jax.tree.structure(state), nnx.to_pure_dict(state)


def build_decoder(config: ModelConfig, arrays: dict[tuple[str, ...], jax.Array]) -> Decoder:
    """Return a decoder with the parameters {path: array}."""
    graph, structure, shapes = abstract_decoder(config)
    decoder: Decoder = nnx.merge(
        graph, jax.tree.unflatten(structure, [arrays[path] for path in flatten_by_path(shapes)])
    )
    return decoder


def load_pretrained(
    path: str | os.PathLike, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> LanguageModel:
    """Return the model in a Hugging Face folder, or of a GGUF file.

    The families are those of `models/families`.
    Tensors are read one at a time into their final arrays, so peak memory is little more than the
    parameters'.

    dtype: float32 or bfloat16, for parameters and computation; None keeps the parameters' stored
        dtype (MXFP4 becomes bfloat16) and computes in float32.
    mesh: a mesh of `make_mesh` over which parameters are sharded; None puts them on the default
        device. With jaxlib 0.11.2 a call of such a model aborts in XLA's partitioner; 0.10 and
        0.12 run it.

    Raises ValueError naming the file and the field or tensor that is missing, damaged or
    unsupported, before it allocates memory for weights.
    """
    folder = Path(path).expanduser()
    check_dtype(dtype)
    if folder.suffix == ".gguf" and folder.is_file():
        folder = gguf_folder(folder)
    fields = read_config(folder)
    config = model_config(fields)
    shapes = abstract_decoder(config)[2]
    if mesh is not None:
        check(mesh.axis_names == ALL, "mesh.axis_names", mesh.axis_names, f"must be {ALL}")
        experts = math.prod(mesh.shape[axis] for axis in EXPERT)
        check(
            config.num_experts % experts == 0,
            "num_experts",
            config.num_experts,
            f"must be a multiple of {experts}",
        )
        places = shardings(param_specs(shapes, mesh, shard_dense=True), mesh)
        shapes = shapes_with_shardings(shapes, places)
    arrays = load_arrays(folder, config, family_of(fields), shapes, dtype)
    return LanguageModel(
        build_decoder(config, arrays),
        json.dumps(fields),
        dtype=jnp.dtype(dtype or jnp.float32).name,
    )


def save_pretrained(
    model: LanguageModel,
    path: str | os.PathLike,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **fields: Any,
) -> None:
    """Write `config.json` and safetensors files that transformers loads, in the parameters' dtypes.

    The configuration is the one that the model was loaded with; otherwise that of the first Hugging
    Face family that computes the same function.
    fields: further fields of `config.json`, e.g. eos_token_id.

    Raises ValueError with the options that no family has.
    """
    check(max_shard_bytes > 0, "max_shard_bytes", max_shard_bytes, "must be greater than 0")
    config_json = json.loads(model.config_json) if model.config_json else hf_config(model.config)
    for name in COMPRESSION_FIELDS:  # loading has decompressed the weights
        config_json.pop(name, None)
    arrays = flatten_by_path(nnx.to_pure_dict(nnx.state(model.decoder)))
    write_pretrained(
        Path(path).expanduser(), model.config, arrays, config_json | fields, max_shard_bytes
    )


def write_pretrained(
    folder: Path,
    config: ModelConfig,
    arrays: Mapping[Names, jax.Array | StoredExperts],
    config_json: JsonObject,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write parameters {path: array} as safetensors files, and `config_json` as their
    `config.json`.
    """
    config_json = {name: value for name, value in config_json.items() if name != "torch_dtype"}
    if config.kv_lora_rank is not None or "num_nextn_predict_layers" in config_json:
        # the multi-token-prediction layers were not loaded
        config_json["num_nextn_predict_layers"] = 0
    config_json["dtype"] = np.dtype(arrays[("embedding",)].dtype).name
    tensors = new_tensors(arrays, abstract_decoder(config)[2], config, family_of(config_json))
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder, tensors, max_shard_bytes)
    replace_text_durably(folder / "config.json", json.dumps(config_json, indent=2) + "\n")
