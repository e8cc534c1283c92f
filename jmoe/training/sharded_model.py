"""A model on a mesh: where its parameters lie, how they are gathered for use, and their layout in a
checkpoint. `ShardedDecoder` and `ShardedVision` are its subclasses.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmoe.collectives.fusion import (
    BufferLayout,
    ShardInBuffer,
    gather_parameter_local,
    gather_parameters_fused_local,
)
from jmoe.config import STACKS, TrainConfig
from jmoe.mesh import (
    ALL,
    DATA,
    REPLICA,
    REPLICATED,
    SHARDS,
    expert_shard_dim,
    hierarchy,
    inside_replicas,
    is_expert,
    num_shards,
    num_stack_dims,
    param_specs,
    path_names,
    shapes_with_shardings,
    shard_dim,
    shardings,
    split_over,
)
from jmoe.models.functional import split_parameters
from jmoe.optim.loss_scale import LossScale, initial_loss_scale
from jmoe.optim.moments import initial_moments, moment_specs
from jmoe.training.state import TrainState
from jmoe.training.trained_parts import trained_subtree
from jmoe.types import PyTree

# Tables read by row: the lookup's result is cast, so that the rows' gradients add in float32.
LOOKUP_TABLES = ("embedding", "positions")


class ShardedModel(ABC):
    """A model as a pure function of nested dicts of this device's parameter shards.

    split: parameters that stay sharded even in use, by name, each with the dimension that all
    devices split.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, split: Mapping[str, int]) -> None:
        self.config, self.mesh, self._split = config, mesh, split
        self.dtype = jnp.dtype(config.compute_dtype)
        packed = config.mesh.expert_inter > 1 and config.comm.initial_packing > 1
        self.hierarchy = hierarchy(mesh, config.comm.hierarchical, packed=packed)
        # of the collectives that gather and reduce sharded parameters
        self.shard_hierarchy = inside_replicas(self.hierarchy)
        self.fused = config.comm.shard_dense and config.comm.fuse_dense and mesh.size > 1
        self.abstract: PyTree = nnx.eval_shape(self.build_model)
        self._graph, params, bias = split_parameters(self.abstract)
        self._structures = jax.tree.structure(params), jax.tree.structure(bias)
        self.shapes, self._bias_shapes = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
        shard_experts = config.comm.expert_sharding != "none"
        self.specs = param_specs(
            self.shapes, mesh, config.comm.shard_dense, self.fused, shard_experts=shard_experts
        )
        self.specs |= {name: split_over(ALL, dim) for name, dim in split.items()}
        # path inside a layer -> dimension split over the devices of a replica, or over all devices
        # (`split`)
        self._shard_dims = dict(self._fully_sharded_params())
        # path inside a layer -> dimension in which the data axis splits an array of experts
        self._expert_shard_dims = dict(self._data_split_experts()) if shard_experts else {}

    @abstractmethod
    def build_model(self) -> nnx.Module:
        """Return the model with random parameters."""

    def model_with_params(self, params: PyTree, router_bias: PyTree) -> PyTree:
        """Return an `nnx` model with these parameters and router biases, nested dicts."""
        trees = zip(self._structures, (params, router_bias), strict=True)
        return nnx.merge(
            self._graph, *(jax.tree.unflatten(s, jax.tree.leaves(tree)) for s, tree in trees)
        )

    # Where parameters lie

    def _fully_sharded_params(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield (path inside its layer, split dimension) of each parameter split over the devices
        of a replica, or of `split`.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.shapes):
            dim = shard_dim(
                path, leaf.shape, num_shards(self.mesh), self.config.comm.shard_dense, self.fused
            )
            if dim >= 0:
                yield names_in_layer(path), dim - num_stack_dims(path)
        yield from (((name,), dim) for name, dim in self._split.items())

    def _data_split_experts(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield (path inside its layer, split dimension) of each array of experts that the data
        axis can split.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.shapes):
            dim = expert_shard_dim(path, leaf.shape, self.mesh.shape[DATA])
            if dim >= 0:
                yield names_in_layer(path), dim - num_stack_dims(path)

    def is_data_split_expert(self, path: KeyPath) -> bool:
        """Return whether the parameter at `path` is an array of experts that the data axis
        splits.
        """
        return names_in_layer(path) in self._expert_shard_dims

    def is_fully_sharded(self, names: tuple[str, ...]) -> bool:
        """Return whether a parameter is split over the devices of a replica, or over all devices.
        names: its path inside a layer.
        """
        return names in self._shard_dims

    def num_copies(self, path: KeyPath) -> int:
        """Return the number of devices that hold the same elements of the parameter at `path`."""
        names, replicas = names_in_layer(path), self.mesh.shape[REPLICA]
        if is_expert(path):
            return replicas * (1 if self.is_data_split_expert(path) else self.mesh.shape[DATA])
        if names[0] in self._split:
            return 1
        return replicas if self.is_fully_sharded(names) else self.mesh.size

    def _compute_dtype(self, names: tuple[str, ...], ndim: int) -> DTypeLike:
        """Return the compute dtype of a parameter. names: its path. ndim: of one layer, or of one
        expert.
        """
        matrix = ndim >= 2 and "router" not in names and names[-1] not in LOOKUP_TABLES
        return self.dtype if matrix else jnp.float32

    def buffer_layout(self, tree: PyTree, *, stacked: bool = False) -> BufferLayout:
        """Return which parameters of `tree` travel in a flat buffer, and their places in that
        buffer.

        tree: parameters of one layer, of a stack of layers (`stacked`), or outside the layers.
        """

        def place_in_buffer(path: KeyPath, w: jax.Array) -> ShardInBuffer | None:
            names, shape = _path_names(path), w.shape[stacked:]
            dim = -1 if names[0] in self._split else self._shard_dims.get(names, -1)
            return (
                None
                if dim < 0
                else ShardInBuffer(shape, dim, self._compute_dtype(names, len(shape)))
            )

        return BufferLayout(
            tree, [place_in_buffer(*leaf) for leaf in jax.tree_util.tree_leaves_with_path(tree)]
        )

    def expert_buffer_entries(self, stack: PyTree) -> list[ShardInBuffer | None]:
        """Return, for each parameter of a stack of layers that `buffer_layout` leaves outside its
        buffer, its place in the buffer of the experts that the data axis splits, or None.
        """
        entries = list[ShardInBuffer | None]()
        for path, w in jax.tree_util.tree_leaves_with_path(stack):
            names, shape = _path_names(path), w.shape[1:]
            dim = self._expert_shard_dims.get(names, -1)
            if dim >= 0:
                # the experts' own dimension does not make a vector a matrix
                dtype = self._compute_dtype(names, len(shape) - 1)
                entries.append(ShardInBuffer(shape, dim, dtype))
            elif names not in self._shard_dims:
                entries.append(None)
        return entries

    # Parameters in use

    def cast_params(self, tree: PyTree) -> PyTree:
        """Return unsharded parameters in their compute dtype; parameters that stay sharded in use
        are not cast.
        """
        return jax.tree_util.tree_map_with_path(self.cast_param, tree)

    def cast_param(self, path: KeyPath, w: jax.Array) -> jax.Array:
        """Return one parameter in its compute dtype. path: its path in the tree, with or without a
        stack of layers.
        """
        return (
            w
            if _path_names(path)[0] in self._split
            else w.astype(self.compute_dtype_at(path, w.ndim))
        )

    def compute_dtype_at(self, path: KeyPath, ndim: int) -> DTypeLike:
        """Return the compute dtype of the parameter at `path` with `ndim` dimensions, stacked or
        not.

        The model's compute dtype for matrices; float32 for vectors, routers and tables read by row.
        """
        return self._compute_dtype(_path_names(path), ndim - is_expert(path) - num_stack_dims(path))

    def gather_params(self, tree: PyTree) -> PyTree:
        """Return the unsharded parameters, in their compute dtype, gathered from all devices'
        shards.

        Call this inside `shard_map`. tree: this device's shards of one layer, or of the parameters
        outside the layers.
        """
        layout = self.buffer_layout(tree)
        in_use = jax.tree_util.tree_map_with_path(self._cast_or_gather, tree)
        shards, outside_buffer = layout.split(tree)[0], layout.split(in_use)[1]
        if shards and self.fused:
            unsharded = gather_parameters_fused_local(
                shards, tuple(layout.entries), self.shard_hierarchy
            )
        else:
            pairs = zip(shards, layout.entries, strict=True)
            unsharded = [
                gather_parameter_local(w, entry.dim, entry.dtype, SHARDS) for w, entry in pairs
            ]
        return layout.join(unsharded, outside_buffer)

    def _cast_or_gather(self, path: KeyPath, w: jax.Array) -> jax.Array:
        """Return one parameter of a layer, or outside the layers, in its compute dtype; gathered if
        the data axis splits it.
        """
        dim = self._expert_shard_dims.get(_path_names(path), -1)
        if dim < 0:
            return self.cast_param(path, w)
        return gather_parameter_local(w, dim, self.compute_dtype_at(path, w.ndim), (DATA,))

    # The state of training

    @property
    def state_specs(self) -> TrainState:
        """The partition specs of the training state, as a `TrainState` of specs."""
        bias = jax.tree.map(lambda _: REPLICATED, self._bias_shapes)
        step: PyTree = REPLICATED
        scaling = None if self.config.compute_dtype != "float16" else LossScale(step, step)
        shapes, specs = (trained_subtree(self.config, tree) for tree in (self.shapes, self.specs))
        m, v, scales = moment_specs(self.config.optimizer, shapes, specs, self.mesh)
        return TrainState(self.specs, m, v, bias, step, scaling, scales=scales)

    def initial_saved_state(self) -> TrainState:
        """Return the state of step 0 in the layout of a checkpoint."""
        _, params, bias = split_parameters(self.build_model())
        state = TrainState.at_step_0(
            nnx.to_pure_dict(params), nnx.to_pure_dict(bias), initial_loss_scale(self.config)
        )
        trained = trained_subtree(self.config, state.params)
        m, v, scales = initial_moments(self.config.optimizer, trained)
        return replace(state, m=m, v=v, scales=scales)

    def initial_state(self) -> TrainState:
        """Return the state of step 0 in the layout used by training; by default the layout of a
        checkpoint.
        """
        return self.initial_saved_state()

    @cached_property
    def state_shape(self) -> TrainState:
        """Shapes, dtypes and shardings of the training state."""
        placements = shardings(self.state_specs, self.mesh)
        shape: TrainState = shapes_with_shardings(jax.eval_shape(self.initial_state), placements)
        return shape

    @property
    def saved_shape(self) -> TrainState:
        """Shapes, dtypes and shardings of a checkpoint's state; the shapes are the same for every
        mesh.
        """
        return self.state_shape

    def to_saved(self, state: TrainState) -> TrainState:
        """Return `state` in the layout of a checkpoint, which is the same for every mesh; here both
        layouts are equal. `cast` is left as it is.
        """
        return state

    def from_saved(self, state: TrainState) -> TrainState:
        """Return a checkpoint's state in the layout used by training."""
        return state


def names_in_layer(path: KeyPath) -> tuple[str, ...]:
    """Return the names along a parameter's path, without the name of its stack of layers."""
    return tuple(name for name in path_names(path) if name not in STACKS.values())


def _path_names(path: KeyPath) -> tuple[str, ...]:
    """Return the names along a parameter's path, without those of `nnx`'s values."""
    return tuple(name for name in path_names(path) if name != "value")
