"""The layer with which a checkpoint predicts the token after the next one (multi-token prediction).

DeepSeek-V3 and GLM-4.5 publish it behind their decoder, as `model.layers.{num_hidden_layers}`,
Qwen3-Next and Qwen3.5 beside it, under `mtp.`. It joins the decoder's last hidden state with the
embedding of the token sampled from it, by two norms and a projection, runs one block with attention
and experts, and predicts the following token with the decoder's head behind a norm of its own
(DeepSeek-V3, arXiv:2412.19437, section 2.2). It is read as a decoder of one layer, which the
engine's runner and slots take as any other.

Legend:
P rows of a step
C tokens a row
T tokens, P * C
D hidden
"""

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import LINEAR_SIZES, ModelConfig, check
from jmoe.layers.norm import Norm
from jmoe.models.announced import AnnouncedCheckpoint
from jmoe.models.block import Block
from jmoe.models.families.tensors import TensorSource, as_stored_source, transposed_source
from jmoe.models.huggingface import model_config
from jmoe.models.lazy_checkpoint import (
    EmbedAndHead,
    LazyCheckpoint,
    copy_to_default_device,
    split_decoder,
)
from jmoe.models.pretrained import build_decoder, read_config
from jmoe.models.safetensors_io import StoredTensor
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import Names, Parameter
from jmoe.types import JsonObject, PyTree
from kernels_pallas.matmul import dot

# parameters of the decoder that the layer uses; of some it stores copies, which are not read
SHARED = (("embedding",), ("positions",), ("head",), ("head_bias",))
OWN_COPIES = ("embed_tokens.", "shared_head.head.")
LAYERS = "model.layers.{layer}."
TOKEN_NORM, HIDDEN_NORM, W_JOIN = ("token_norm",), ("hidden_norm",), ("w_join",)


class TensorNames(NamedTuple):
    """The names of a prediction layer's tensors in a checkpoint.

    block: what the names of its block's tensors begin with. w_join, token_norm, hidden_norm: of the
    join. norm: before the decoder's head.
    """

    block: str
    w_join: str
    token_norm: str
    hidden_norm: str
    norm: str

    @classmethod
    def behind_decoder(cls, number: int) -> Self:
        """Return the names of the layer that follows the decoder's `number` layers."""
        prefix = LAYERS.format(layer=number)
        own = ("", "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
        return cls(*(prefix + name for name in own))


BESIDE_DECODER = TensorNames(
    "mtp.layers.0.",
    "mtp.fc.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
)


def _check_named_layer(
    fields: JsonObject, stored: Mapping[str, StoredTensor], used: Collection[str]
) -> None:
    """Raise ValueError naming what a layer under `mtp.` has and `PredictionLayer` lacks.

    used: the names of the tensors that it reads.
    """
    name = "mtp_use_dedicated_embeddings"
    words = "must be false with speculation = 'mtp'"
    check(not fields.get(name), name, fields.get(name), words)
    for name, tensor in stored.items():
        is_further = re.match(r"mtp\.layers\.[1-9]", name)  # a model's first layer drafts
        if name.startswith("mtp.") and not is_further and name not in used:
            raise tensor.error("is unexpected: a prediction layer has no place for it")


class JoinAndHead(EmbedAndHead):
    """The modules before and after a prediction layer: the join of hidden states with embeddings,
    and the layer's norm before the decoder's head.
    """

    def __init__(
        self, norm: Norm, decoder: EmbedAndHead, norms: tuple[Norm, Norm], w_join: jax.Array
    ) -> None:
        """Share the decoder's embedding and head.

        norm: behind the layer. norms: of embeddings, and of hidden states. w_join: [2 D, D].
        """
        self.embedding, self.positions = decoder.embedding, decoder.positions
        self.norm, self.head, self.head_bias = norm, decoder.head, decoder.head_bias
        self.stream_scale = decoder.stream_scale
        self.token_norm, self.hidden_norm = norms
        self.w_join = nnx.Param(w_join)

    def join(self, x_PCD: jax.Array, hidden_PCD: jax.Array) -> jax.Array:
        """Return the layer's input, in the shape and dtype of `x_PCD`.

        x_PCD: embeddings of the tokens that follow those of `hidden_PCD`.
        """
        dtype, width = x_PCD.dtype, x_PCD.shape[-1]
        both = self.token_norm(x_PCD, dtype), self.hidden_norm(hidden_PCD, dtype)
        joined_TD = dot(
            jnp.concatenate(both, axis=-1).reshape(-1, 2 * width), self.w_join[...].astype(dtype)
        )
        return joined_TD.astype(dtype).reshape(x_PCD.shape)


class PredictionLayer(LazyCheckpoint):
    """A checkpoint's first prediction layer, as a checkpoint of one layer.

    is_beside_decoder: the layer is one of Qwen3-Next or Qwen3.5, which for longer drafts joins its
    own hidden state behind its last norm, as it does the decoder's.

    Raises ValueError naming the tensor that a checkpoint without such a layer lacks, or that such a
    layer has and this one does not, and as `LazyCheckpoint` does.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        dtype: DTypeLike | None = None,
        expert_dtype: str | None = None,
    ) -> None:
        folder = Path(path).expanduser()
        fields, stored = read_config(folder), read_weight_headers(folder)
        self.is_beside_decoder = model_config(fields).has_linear_attention
        self._names = (
            BESIDE_DECODER
            if self.is_beside_decoder
            else TensorNames.behind_decoder(int(fields["num_hidden_layers"]))
        )
        if self._names.w_join not in stored:
            raise ValueError(
                f"speculation = 'mtp': must be off or lookup: {folder} has no tensor"
                f" {self._names.w_join!r} of a layer that predicts further tokens"
            )
        tensors = {name: t for name, t in stored.items() if self._is_used(name)}
        if self.is_beside_decoder:
            _check_named_layer(fields, stored, tensors.keys())
        super().__init__(
            folder, dtype, expert_dtype, announced=AnnouncedCheckpoint(fields, tensors)
        )

    def _is_used(self, name: str) -> bool:
        """Return whether a tensor is of the layer, or of the decoder's embedding or head."""
        if name.startswith(self._names.block):
            return not name.removeprefix(self._names.block).startswith(OWN_COPIES)
        return name.startswith((*self._names[1:], "model.embed_tokens.", "lm_head."))

    def _read_config(self, fields: JsonObject) -> ModelConfig:
        """Return the configuration of a decoder of one layer, with attention and experts."""
        if not self.is_beside_decoder:
            return model_config(fields | {"num_hidden_layers": 1, "first_k_dense_replace": 0})
        alone: dict[str, Any] = dict.fromkeys(LINEAR_SIZES, 0)
        alone |= {"num_hidden_layers": 1, "layer_types": (), "linear_projections_by_head": False}
        return replace(model_config(fields), **alone)

    def _list_parameters(self, stored: Mapping[str, StoredTensor]) -> list[Parameter]:
        """Return the parameters of the layer and those around it, with the names of its tensors."""
        sources: dict[Names, TensorSource] = {("norm", "scale"): as_stored_source(self._names.norm)}

        def renamed(source: TensorSource) -> TensorSource:
            return replace(
                source, names=tuple(n.replace(LAYERS, self._names.block) for n in source.names)
            )

        parameters = [
            replace(p, source=sources.get(p.path, renamed(p.source)))
            for p in super()._list_parameters(stored)
        ]
        size = self.config.hidden_size

        def outside(path: Names, shape: tuple[int, ...], source: TensorSource) -> Parameter:
            return Parameter(path, shape, source, layers=(), experts=0)

        norms = {TOKEN_NORM: self._names.token_norm, HIDDEN_NORM: self._names.hidden_norm}
        return [
            *parameters,
            *(outside(path, (size,), as_stored_source(name)) for path, name in norms.items()),
            outside(W_JOIN, (2 * size, size), transposed_source(self._names.w_join)),
        ]

    @property
    def resident_bytes(self) -> int:
        """The bytes of the layer on a device with all of its experts, without what it shares."""
        dense = sum(
            math.prod(p.shape) * self._dtypes[p.path].itemsize
            for p in self._parameters
            if not p.experts and p.path not in SHARED
        )
        return dense + self.config.num_experts * self.expert_bytes

    def load_beside(self, decoder: EmbedAndHead) -> tuple[JoinAndHead, list[Block]]:
        """Return (modules around the layer, the layer) without experts, on the default device.

        decoder: has the embedding and the head that the layer uses too.
        """
        arrays: dict[Names, PyTree] = {
            p.path: np.zeros((0,) * len(p.shape), self._dtypes[p.path])
            if p.path in SHARED
            else self._read_dense_or_empty(p)
            for p in self._parameters
        }
        own, layers = split_decoder(build_decoder(self.config, arrays))

        def norm_of(path: Names) -> Norm:
            graph, state = nnx.split(own.norm)
            norm: Norm = nnx.merge(graph, jax.tree.map(lambda _: arrays[path], state))
            return norm

        norms = norm_of(TOKEN_NORM), norm_of(HIDDEN_NORM)
        around = JoinAndHead(own.norm, decoder, norms, arrays[W_JOIN])
        return copy_to_default_device(around), list(map(copy_to_default_device, layers))
