"""A Hugging Face checkpoint whose experts stay on disk and are read one at a time.

The inference engine loads everything but the experts at once (`load_dense_modules`,
`load_dense_shard`), and fills its expert records from `fill_expert`.

Legend:
T tokens
D hidden
V vocabulary
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import ModelConfig, check
from jmoe.config.engine import CACHE_BLOCK
from jmoe.layers.embedding import Lookup, lookup, scale_embeddings
from jmoe.layers.latent_attention import LatentAttention
from jmoe.memory.closing import Closing
from jmoe.models.announced import AnnouncedCheckpoint
from jmoe.models.block import Block
from jmoe.models.cache_scales import Exponents, fold_cache_scales, read_cache_exponents
from jmoe.models.decoder import Decoder, output_logits
from jmoe.models.generation_config import GenerationConfig
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.pretrained import abstract_decoder, build_decoder, check_dtype, read_config
from jmoe.models.safetensors_io import StoredTensor, TensorReader, weights_identity
from jmoe.models.tensor_parallel import (
    ADDED_ONCE,
    average_norms_over_devices,
    parameter_cuts,
    per_device_config,
    shard_slices,
)
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import (
    Names,
    Parameter,
    ParameterLoader,
    check_tensors,
    flatten_by_path,
    list_parameters,
)
from jmoe.types import JsonObject, PyTree
from kernels_pallas.compressed import SCALES, compress, stored_fields
from kernels_pallas.formats import FORMATS, MXFP4, Format

DEFAULT_MAX_SEQ_LEN = 2048
Module = TypeVar("Module", bound=nnx.Module)


class EmbedAndHead(nnx.Module):
    """The embedding before the first layer, and the norm and head after the last one."""

    def __init__(self, decoder: Decoder) -> None:
        self.embedding, self.positions = decoder.embedding, decoder.positions
        self.norm, self.head, self.head_bias = decoder.norm, decoder.head, decoder.head_bias
        self.stream_scale = decoder.config.stream_scale

    def embed(
        self, tokens: jax.Array, positions: jax.Array, dtype: DTypeLike, lookup: Lookup = lookup
    ) -> jax.Array:
        """Return the first layer's input, [..., D] in `dtype`.

        lookup: a function that reads the tokens' rows from the whole table, or from this device's
        block of it.
        """
        x = scale_embeddings(lookup(self.embedding[...], tokens, dtype), self.stream_scale)
        if self.positions is None:
            return x
        x = x + self.positions[...][positions].astype(dtype)
        # rounds explicitly: XLA may otherwise keep excess precision for a layer fused into the same
        # program, and programs of different size would differ in their last bits
        bits = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x, exponent_bits=bits.nexp, mantissa_bits=bits.nmant)

    def logits(self, x_TD: jax.Array) -> jax.Array:
        """Return the logits of hidden states before the last norm, float32 [T, V]."""
        return output_logits(self, self.norm(x_TD, x_TD.dtype))


def split_decoder(decoder: Decoder) -> tuple[EmbedAndHead, list[Block]]:
    """Return (embedding and head, the layers in order), as inference runs them.

    The layers' routed experts are removed, and latent attention has its key and value weights
    apart.
    """
    blocks = []
    for layer in decoder.config.layers:
        graph, state = nnx.split(getattr(decoder, layer.stack_name))
        block = nnx.merge(graph, jax.tree.map(lambda w, i=layer.number: w[i], state))
        assert isinstance(block, Block)
        if block.moe is not None:
            del block.moe.experts
        if isinstance(block.attention, LatentAttention):
            block.attention.split_w_kv_b()
        blocks.append(block)
    return EmbedAndHead(decoder), blocks


def copy_to_default_device(module: Module) -> Module:
    """Return a module whose arrays are in host memory, with copies of them on the default
    device.
    """
    graph, state = nnx.split(module)
    copied: Module = nnx.merge(graph, jax.device_put(state))
    return copied


class LazyCheckpoint(Closing):
    """A checkpoint whose experts are read on demand; a context manager.

    dtype: dtype of all weights; None keeps the stored ones.
    expert_dtype: format of the experts' matrices, a name of `FORMATS`, or "wide" for `dtype`. None
        keeps a compressed format in which the checkpoint stores them, and is "wide" otherwise.
    announced: what the folder is said to hold; its sizes are then known and no weight can be read.

    Raises ValueError as `load_pretrained` does, before it allocates memory for weights.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        dtype: DTypeLike | None = None,
        expert_dtype: str | None = None,
        *,
        announced: AnnouncedCheckpoint | None = None,
    ) -> None:
        folder = Path(path).expanduser()
        check_dtype(dtype)
        self._given_dtypes = dtype, expert_dtype
        fields = read_config(folder) if announced is None else announced.fields
        self.folder, self.fields = folder, fields
        self.config: ModelConfig = self._read_config(fields)
        check(
            self.config.num_moe_layers > 0,
            "num_experts",
            self.config.num_experts,
            "no layer has experts",
        )
        stored = read_weight_headers(folder) if announced is None else announced.tensors
        self._parameters = self._list_parameters(stored)
        self._dtypes = check_tensors(self._parameters, stored, folder, self.config, dtype)
        self._reader, self._stored = TensorReader(), stored
        self._loader = ParameterLoader(stored, self._reader)
        self.dtype = self._dtypes[("embedding",)]
        self._stored_formats: dict[Names, Format | None] = {}
        self._expert_stacks = {(p.path[0], p.path[-1]): p for p in self._parameters if p.experts}
        # those of one stack; those of another have the same shapes
        self._experts = {p.path[-1]: p for p in self._expert_stacks.values()}
        self.stored_format = self._common_stored_format(stored)
        self.expert_format = FORMATS.get(expert_dtype) if expert_dtype else self.stored_format
        self._cache_exponents: dict[int, Exponents] = {}
        self._check_inputs_fill_blocks(expert_dtype)

    def _read_config(self, fields: JsonObject) -> ModelConfig:
        """Return the configuration that the fields of `config.json` describe."""
        return model_config(fields)

    def apply_cache_scales(self) -> str:
        """Let layers that are loaded from now on have the scales of the checkpoint's keys and
        values for a cache in FP8. Returns a sentence about them, or "" if there are none.
        """
        self._cache_exponents = read_cache_exponents(self._stored)
        count = len(self._cache_exponents)
        words = "keys and values have the checkpoint's scales in FP8, rounded up to powers of two"
        return f"{words}, in {count} layers" if count else ""

    def _fold_cache_scales(self, layers: list[Block]) -> list[Block]:
        """Return layers in host memory with the scales of `apply_cache_scales`."""
        for number, exponents in self._cache_exponents.items():
            if number < len(layers):
                fold_cache_scales(layers[number], exponents)
        return layers

    def _list_parameters(self, stored: Mapping[str, StoredTensor]) -> list[Parameter]:
        """Return the parameters with the tensors that they are made of."""
        shapes = abstract_decoder(self.config)[2]
        return list_parameters(shapes, self.config, family_of(self.fields), stored)

    def _check_inputs_fill_blocks(self, expert_dtype: str | None) -> None:
        """Raise ValueError if the experts' inputs do not fill the blocks of their format."""
        kind = self.expert_format
        if kind is None or kind.partial_block:
            return
        others = [other.name for other in FORMATS.values() if other.partial_block]
        for name, p in self._experts.items():
            if len(p.matrix_shape) == 2:
                words = (
                    f"needs inputs of {name} to be a multiple of {kind.block}, not"
                    f" {p.matrix_shape[0]}:"
                    f" must be {' or '.join(['wide', *others])}"
                )
                check(p.matrix_shape[0] % kind.block == 0, "expert_dtype", expert_dtype, words)

    def _common_stored_format(self, stored: Mapping[str, StoredTensor]) -> Format | None:
        """Return the compressed format in which all experts' matrices are stored and can be kept
        exactly.

        None if they are plain numbers, of several formats, or have no exact form in memory.
        """
        matrices = [p for p in self._expert_stacks.values() if len(p.matrix_shape) == 2]
        if any(f"{piece.name}_blocks" in stored for p in matrices for piece in p.pieces()):
            return MXFP4
        kinds = {self._loader.memory_format(p) for p in matrices}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def expert_conversion_note(self) -> str:
        """A sentence if experts stored in a compressed format are held in another one; "" if not.

        Experts that were asked for wide are not mentioned.
        """
        stored, kind = self.stored_expert_label, self.expert_format
        if not stored or self._given_dtypes[1] == "wide":
            return ""
        layers, experts = self.config.num_moe_layers, self.config.num_experts
        gigabytes = layers * experts * self.expert_bytes / 1e9
        if kind is None:
            return (
                f"experts are stored in {stored}, which no format in memory holds exactly: they are"
                f" widened to {self.dtype}, {gigabytes:,.1f} GB; --expert-dtype"
                f" ({', '.join(FORMATS)}) takes less and rounds"
            )
        if kind is self.stored_format:
            return ""
        matrices = [p for p in self._expert_stacks.values() if len(p.matrix_shape) == 2]
        kept = all(self._stays_compressed(p) for p in matrices)
        loss = "their scales are rounded to bfloat16" if kept else "every weight is rounded again"
        return f"experts are stored in {stored} and held in {kind.name}: {loss}"

    @property
    def stored_expert_label(self) -> str:
        """The name of the compressed format in which experts' matrices are stored, such as "NVFP4";
        "" for plain numbers.
        """
        matrices = [p for p in self._expert_stacks.values() if len(p.matrix_shape) == 2]
        labels = {self._loader.stored_label(p) for p in matrices} - {""}
        return " and ".join(sorted(labels))

    def reopen(self) -> "LazyCheckpoint":
        """Return a new reader of the same folder with the same options and its own file handles."""
        return LazyCheckpoint(self.folder, *self._given_dtypes)

    @property
    def max_positions(self) -> int:
        """The maximum number of tokens of a sequence, including positions that `rope_scaling`
        adds. Of a model whose attention has chunks that end inside a block of the cache, it is one
        chunk.
        """
        limit, scaling = self.config.max_position_embeddings, self.config.rope_scaling
        limit = limit if scaling is None else scaling.max_positions(limit)
        chunk = self.config.attention_chunk_size
        return min(limit, chunk) if chunk is not None and chunk % CACHE_BLOCK else limit

    def fix_sequence_length(self, length: int) -> str:
        """Choose the form of positions whose frequencies depend on the length: that of sequences
        of `length` tokens, for all keys that a cache will hold. Returns a sentence about it, or "".
        """
        scaling = self.config.rope_scaling
        if scaling is None or scaling.at_length(length) == scaling:
            return ""
        self.config = replace(self.config, rope_scaling=scaling.at_length(length))
        return (
            "rope_scaling: sequences of every length have the frequencies of"
            f" max_seq_len = {length} tokens"
        )

    def choose_sequence_length(self, asked: int | None) -> int:
        """Return the maximum number of tokens of a sequence: `asked`, or by default up to 2048.

        The default is less if the model has fewer positions; engines raise it where memory allows
        (`resolve_sequence_length`). Raises ValueError if `asked` exceeds the model's positions.
        """
        limit, chunk = self.max_positions, self.config.attention_chunk_size
        is_one_chunk = limit == chunk and chunk % CACHE_BLOCK > 0
        if asked is None:
            return min(DEFAULT_MAX_SEQ_LEN, limit)
        check(
            asked >= 2,
            "max_seq_len",
            asked,
            "must be at least 2, a token of prompt and one of output",
        )
        what = f"model's {limit} positions"
        if is_one_chunk:
            what = (
                f"{limit} positions of a chunk: attention_chunk_size is no multiple of"
                f" {CACHE_BLOCK}, the positions of a block of the cache"
            )
        check(asked <= limit, "max_seq_len", asked, f"must not exceed the {what}")
        return asked

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text; see `GenerationConfig`.

        Raises ValueError if one of them is outside the vocabulary.
        """
        tokens = GenerationConfig.read(self.folder, self.fields).eos_token_ids
        size = self.config.vocab_size
        place = f"correct generation_config.json or config.json in {self.folder}"
        check(
            all(t < size for t in tokens),
            "eos_token_id",
            tokens,
            f"must be below vocab_size = {size}: {place}",
        )
        return tokens

    @property
    def expert_fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """(shape, dtype) of each array of one expert in memory, by name; bfloat16 is stored as
        uint16 bits.
        """
        fields: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for name, p in self._experts.items():
            if self.expert_format is not None and len(p.matrix_shape) == 2:
                fields |= stored_fields(self.expert_format, name, p.matrix_shape)
            else:
                dtype = self._dtypes[p.path]
                fields[name] = (
                    p.matrix_shape,
                    np.dtype(np.uint16) if dtype == jnp.bfloat16 else dtype,
                )
        return fields

    @property
    def expert_bytes(self) -> int:
        """The bytes of one expert in memory."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.expert_fields.values()
        )

    def dense_bytes_per_device(self, num_devices: int = 1) -> int:
        """Return the bytes of all parameters but the experts on one of `num_devices` devices.

        With several devices these are its shards, as `load_dense_shard` returns them.
        """
        config = self.config if num_devices == 1 else per_device_config(self.config, num_devices)
        parts = flatten_by_path(abstract_decoder(config)[2])
        sizes = {p.path: math.prod(parts[p.path].shape) for p in self._parameters if not p.experts}
        return sum(size * self._dtypes[path].itemsize for path, size in sizes.items())

    @property
    def content_hash(self) -> str:
        """A hash of configuration and weights, equal for all copies of a checkpoint.

        Large files are sampled; see `sampled_content_hash`.
        """
        what = [self.fields, weights_identity(self._stored)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """A hash that identifies files of experts that were converted from this checkpoint.

        It covers `content_hash`, the files' modification times and the experts' format in memory.
        The times reveal a change between the sampled blocks of a tensor.
        """
        times = sorted({(t.file.name, t.file.stat().st_mtime_ns) for t in self._stored.values()})
        dtypes = {name: self._dtypes[p.path].name for name, p in self._experts.items()}
        kept = None if self.expert_format is None else self.expert_format.name
        return hashlib.sha256(
            json.dumps([self.content_hash, times, dtypes, kept], sort_keys=True).encode()
        ).hexdigest()

    @property
    def routing_fingerprint(self) -> str:
        """A SHA-256 of the routers' weights, equal for all copies of a checkpoint and for every
        `dtype`.
        """
        digest = hashlib.sha256(str(self.config.num_experts_per_tok).encode())
        for p in (p for p in self._parameters if "router" in p.path):
            digest.update(json.dumps([p.path, p.shape]).encode())
            whole = (slice(None),) * len(p.shape)
            digest.update(self._loader.read_slice(p, np.dtype(np.float32), whole).tobytes())
        return digest.hexdigest()

    def fill_expert(self, layer: int, expert: int, views: dict[str, np.ndarray]) -> None:
        """Read one expert into preallocated arrays of the shapes and dtypes of `expert_fields`.

        layer: index among the layers with experts.
        """
        kind = self.expert_format
        for name in self._experts:
            parameter, number = self._expert_parameter(name, layer)
            if kind and len(parameter.matrix_shape) == 2 and self._stays_compressed(parameter):
                views[name][...], views[name + SCALES][...] = self._loader.read_compressed(
                    parameter, number, expert, kind
                )
                continue
            part = self.read_expert_array(name, layer, expert)
            if self.expert_format is not None and part.ndim == 2:
                views[name][...], views[name + SCALES][...] = compress(part, self.expert_format)
            else:
                views[name][...] = part.view(views[name].dtype)

    def _expert_parameter(self, name: str, layer: int) -> tuple[Parameter, int]:
        """Return (the parameter that holds an array of a layer's experts, the layer's entry in it).

        layer: index among the layers with experts.
        """
        own = self.config.expert_layers[layer]
        return self._expert_stacks[own.stack_name, name], own.number

    def _stays_compressed(self, parameter: Parameter) -> bool:
        """Return whether `expert_format` holds the stored matrices exactly, so that they are copied
        into records without being decompressed. An `expert_dtype` that was asked for may round the
        scales.
        """
        if parameter.path not in self._stored_formats:
            self._stored_formats[parameter.path] = self._loader.memory_format(
                parameter, rounded=self._given_dtypes[1] is not None
            )
        return self._stored_formats[parameter.path] is self.expert_format

    def read_expert(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """Return one expert's arrays by name, decompressed.

        layer: index among the layers with experts.
        """
        return {name: self.read_expert_array(name, layer, expert) for name in self._experts}

    def read_expert_array(self, name: str, layer: int, expert: int) -> np.ndarray:
        """Return one array of an expert, decompressed.

        layer: index among the layers with experts.
        """
        p, number = self._expert_parameter(name, layer)
        at = (
            slice(number, number + 1),
            slice(expert, expert + 1),
            *(slice(None),) * len(p.matrix_shape),
        )
        part: np.ndarray = self._loader.read_slice(p, self._dtypes[p.path], at)[0, 0]
        return part

    @property
    def decompressed_expert_dtypes(self) -> dict[Names, np.dtype]:
        """The dtype of each expert parameter when decompressed, by path in the decoder."""
        return {p.path: self._dtypes[p.path] for p in self._expert_stacks.values()}

    def load_dense_arrays(self) -> dict[Names, jax.Array]:
        """Return {path: array} of all parameters but the experts, on the default device."""
        return {
            p.path: self._loader.load(p, self._dtypes[p.path], None)
            for p in self._parameters
            if not p.experts
        }

    def load_dense_modules(self) -> tuple[EmbedAndHead, list[Block]]:
        """Return (embedding and head, the layers in order) without experts, on the default device.

        The stacks of layers are split in host memory, which needs no programs.
        """
        arrays: dict[Names, PyTree] = {
            p.path: self._read_dense_or_empty(p) for p in self._parameters
        }
        embed_and_head, layers = split_decoder(build_decoder(self.config, arrays))
        layers = self._fold_cache_scales(layers)
        return copy_to_default_device(embed_and_head), list(map(copy_to_default_device, layers))

    def _read_dense_or_empty(self, p: Parameter) -> np.ndarray:
        """Return a parameter in host memory, empty if it holds experts."""
        dtype = self._dtypes[p.path]
        if p.experts:
            return np.zeros((p.shape[0], 0), dtype)
        return self._loader.read_slice(p, dtype, (slice(None),) * len(p.shape))

    def load_dense_shard(self, device: int, num_devices: int) -> tuple[EmbedAndHead, list[Block]]:
        """Return (embedding and head, the layers in order) without experts: one device's
        tensor-parallel shards, in host memory.

        Reads only these shards from disk. See `models/tensor_parallel.py`.
        """
        config = per_device_config(self.config, num_devices)
        arrays: dict[Names, PyTree] = {}
        for p in self._parameters:
            dtype = self._dtypes[p.path]
            arrays[p.path] = (
                np.zeros((p.shape[0], 0), dtype)
                if p.experts
                else self._load_shard(p, device, num_devices)
            )
        embed_and_head, layers = split_decoder(build_decoder(config, arrays))
        layers = self._fold_cache_scales(layers)
        for layer in layers:
            average_norms_over_devices(layer)
        return embed_and_head, layers

    def _load_shard(self, p: Parameter, device: int, num_devices: int) -> np.ndarray:
        """Return one device's shard of a parameter, padded with zeros to the shape of the first
        device's.
        """
        dtype, whole = self._dtypes[p.path], (slice(None),) * len(p.shape)
        cuts = parameter_cuts(self.config)
        cut = cuts.get(p.path[-2:], cuts.get(p.path[-1:]))
        if p.path[-1] in ADDED_ONCE and device > 0:
            return np.zeros(p.shape, dtype)
        if cut is None:
            return self._loader.read_slice(p, dtype, whole)
        pieces = []
        for span in shard_slices(cut, device, num_devices):
            pieces.append(
                self._loader.read_slice(p, dtype, (*whole[: cut.dim], span, *whole[: -cut.dim - 1]))
            )
        part = np.concatenate(pieces, axis=cut.dim)
        missing = (
            sum(-(-units // num_devices) * size for units, size in cut.groups) - part.shape[cut.dim]
        )
        padding = [
            (0, missing if dim == len(p.shape) + cut.dim else 0) for dim in range(len(p.shape))
        ]
        return np.pad(part, padding) if missing else part

    def close(self) -> None:
        self._reader.close()
