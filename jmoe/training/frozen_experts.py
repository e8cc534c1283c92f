"""The frozen experts of a LoRA run whose matrices stay as they are stored: compressed on the
devices, or streamed from a tier below them.

Legend: N layers with experts, E experts.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import TrainConfig
from jmoe.mesh import EXPERTS_PATH
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.offload.slot_arrays import Fields
from jmoe.training.finetune import pretrained_folder
from jmoe.training.state import experts_of, with_experts
from jmoe.types import PyTree
from kernels_pallas.compressed import SCALES, decompressed_or_plain_weight

STACK = "moe_layers"
MATRICES = ("w_up", "w_down")
_ARRAYS = (*MATRICES, *(name + SCALES for name in MATRICES))


def open_frozen_experts(config: TrainConfig) -> LazyCheckpoint:
    """Return the checkpoint of `init_from`, whose experts are read in `lora.expert_dtype`, or in
    the compute dtype if that is "wide".
    """
    folder = pretrained_folder(config.init_from)
    return LazyCheckpoint(folder, config.compute_dtype, config.lora.expert_dtype)


def stored_matrices(fields: Fields) -> Fields:
    """Return the entries of `LazyCheckpoint.expert_fields` for matrices and their scales."""
    return {name: field for name, field in fields.items() if name in _ARRAYS}


def stored_shapes(fields: Fields, config: TrainConfig) -> PyTree:
    """Return shapes and dtypes of all experts' stored matrices, [N, E, ...], in the tree that a
    state holds them in.
    """
    leading = config.model.num_moe_layers, config.model.num_experts
    shapes = {
        name: jax.ShapeDtypeStruct((*leading, *shape), dtype)
        for name, (shape, dtype) in stored_matrices(fields).items()
    }
    return {STACK: {EXPERTS_PATH: shapes}}


def load_stored_matrices(checkpoint: LazyCheckpoint, shapes: PyTree) -> PyTree:
    """Return arrays like `stored_shapes`, with the shardings in `shapes`, read from a checkpoint.
    Each process reads the experts of its own devices.
    """
    places = shapes[STACK][EXPERTS_PATH]
    one = next(iter(places.values()))
    indices = one.sharding.addressable_devices_indices_map(one.shape).values()
    own = sorted({e for index in indices for e in range(*index[1].indices(one.shape[1]))})
    host = {name: np.empty(s.shape, s.dtype) for name, s in places.items()}
    unused = {
        name: np.empty(shape, dtype)
        for name, (shape, dtype) in checkpoint.expert_fields.items()
        if name not in host
    }
    for layer in range(one.shape[0]):
        for expert in own:
            views = {name: array[layer, expert] for name, array in host.items()}
            checkpoint.fill_expert(layer, expert, views | unused)

    def read_shard(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return host[name][index]

    arrays = {
        # a copy in JAX's own memory, since a step donates its state
        name: jnp.copy(jax.make_array_from_callback(s.shape, s.sharding, partial(read_shard, name)))
        for name, s in places.items()
    }
    return {STACK: {EXPERTS_PATH: arrays}}


def decoded_matrices(stored: Mapping[str, jax.Array], dtype: DTypeLike) -> dict[str, jax.Array]:
    """Return the matrices [E, ...] of one layer's experts in `dtype`, from their stored arrays."""
    decode = jax.vmap(
        lambda arrays: {
            name: decompressed_or_plain_weight(arrays, name, dtype).astype(dtype)
            for name in MATRICES
        }
    )
    matrices: dict[str, jax.Array] = decode(dict(stored))
    return matrices


def decoded_zeros(stored: Mapping[str, jax.Array], dtype: DTypeLike) -> dict[str, jax.Array]:
    """Return zeros of the shapes of `decoded_matrices`, on the device of the stored arrays."""
    shapes = jax.eval_shape(partial(decoded_matrices, dtype=dtype), dict(stored))
    (device,) = next(iter(stored.values())).devices()
    return {name: jnp.zeros(s.shape, s.dtype, device=device) for name, s in shapes.items()}


def is_compressed(stored: Mapping[str, jax.Array]) -> bool:
    """Return whether stored arrays of experts hold compressed matrices."""
    return any(name.endswith(SCALES) for name in stored)


def without_matrices(tree: PyTree) -> PyTree:
    """Return a tree of parameters without the matrices of experts; their biases stay."""
    kept = {name: w for name, w in experts_of(tree, STACK).items() if name not in MATRICES}
    return with_experts(tree, kept, STACK)


def with_placeholders(tree: PyTree) -> PyTree:
    """Return `without_matrices` of a tree of arrays, with empty arrays [N, 0] as the matrices."""
    layers = jax.tree.leaves(tree[STACK])[0].shape[0]
    empty = {name: jnp.zeros((layers, 0)) for name in MATRICES}
    return with_experts(tree, experts_of(tree, STACK) | empty, STACK)
