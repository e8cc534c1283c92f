"""The decoder on a mesh: where its parameters lie, how they are gathered for use, and the form they are saved in.

Legend: B local batch, S sequence, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmoe.collectives.fusion import BufferLayout, ShardInBuffer, gather_fused_local, gather_local
from jmoe.collectives.schedule import MAX_CHUNK_BYTES, SCHEDULES
from jmoe.config import TrainConfig
from jmoe.layers.embedding import Embedding
from jmoe.layers.moe import ExpertParallel
from jmoe.layers.router import RouterBias
from jmoe.mesh import (
    ALL,
    EXPERT,
    REPLICATED,
    hierarchy,
    is_expert,
    param_specs,
    path_names,
    shard_dim,
    shardings,
    split_over,
)
from jmoe.models.decoder import Decoder, Execution, scan_layers
from jmoe.planning.embedding import Vocabulary, plan_embedding
from jmoe.training.reverse_scan import ReverseScan
from jmoe.training.state import TrainState

LOOKUP_TABLES = ("embedding", "positions")  # read by row: cast after the lookup, so that gradients add in float32


def _plan_embedding(config: TrainConfig, mesh: Mesh) -> Embedding:
    model, inside = config.model, mesh.shape[ALL[-1]]
    tokens = config.batch_size * config.sequence_length // config.gradient_accumulation_steps // mesh.size
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    tied, sharded = model.tie_word_embeddings, config.comm.shard_dense
    vocabulary = Vocabulary(model.vocab_size, model.hidden_size, tied, tokens, itemsize, sharded)
    plan = plan_embedding(config.comm.embedding, vocabulary, num_nodes=mesh.size // inside, devices_per_node=inside)
    return Embedding(plan, ALL, tied)


class ShardedDecoder:
    """The decoder as a pure function of nested dicts of this device's parameters."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.dtype = jnp.dtype(config.compute_dtype)
        packed = config.mesh.expert_inter > 1 and config.comm.first_packing > 1
        self.hierarchy = hierarchy(mesh, config.comm.hierarchical, packed=packed)
        self.fused = config.comm.shard_dense and config.comm.fuse_dense and mesh.size > 1
        self.abstract: Any = nnx.eval_shape(self.build)
        split: Any = nnx.split(self.abstract, nnx.Param, RouterBias)
        self._graph, params, bias = split
        self._structures = jax.tree.structure(params), jax.tree.structure(bias)
        self.shapes, self._bias_shapes = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
        self.embedding = _plan_embedding(config, mesh)
        self.head = self.embedding.output_head
        self.specs = param_specs(self.shapes, mesh, config.comm.shard_dense, self.fused)
        self.specs |= {name: split_over(ALL, dim) for name, dim in self.embedding.split.items()}
        self._shard_dims = dict(self._sharded_over_all())  # path inside a layer -> dimension split over all devices

    def build(self) -> Decoder:
        """Draw the decoder's parameters."""
        config = self.config
        num_chunks = SCHEDULES[config.comm.schedule].num_chunks if self.fused else 1
        parallel = ExpertParallel(self.mesh, EXPERT, exchange=config.comm.exchange, num_chunks=num_chunks)
        return Decoder(config.model, parallel, rngs=nnx.Rngs(config.seed))

    @property
    def notes(self) -> list[str]:
        """The plan, and its reasons: which exchange takes tokens to other devices, how the embedding is split."""
        notes, layers = [], self.abstract.moe_layers
        if layers is not None and layers.moe.exchange_plan.num_devices > 1:
            notes.append(f"{layers.moe.exchange_plan.kind} exchange: {layers.moe.exchange_plan.reason}")
        if self.mesh.size > 1:
            notes.append(f"{self.embedding.plan.kind} embedding: {self.embedding.plan.reason}")
        return notes

    # Where parameters lie

    def _sharded_over_all(self) -> Iterator[tuple[tuple[str, ...], int]]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.shapes):
            dim = shard_dim(path, leaf.shape, self.mesh.size, self.config.comm.shard_dense, self.fused)
            names = tuple(name for name in path_names(path) if not name.endswith("_layers"))
            if dim >= 0:
                yield names, dim - (len(path_names(path)) - len(names))
        yield from (((name,), dim) for name, dim in self.embedding.split.items())

    def is_sharded(self, names: tuple[str, ...]) -> bool:
        """Whether the parameter, by its path inside a layer, is split over all devices."""
        return names in self._shard_dims

    def _compute_dtype(self, names: tuple[str, ...], ndim: int) -> Any:
        matrix = ndim >= 2 and "router" not in names and names[-1] not in LOOKUP_TABLES
        return self.dtype if matrix else jnp.float32

    def layout(self, tree: Any, *, stacked: bool = False) -> BufferLayout:
        """Say which parameters (of one layer, of stacked layers, or outside the layers) travel in a flat buffer."""

        def place(path: Any, w: jax.Array) -> ShardInBuffer | None:
            names, shape = _names(path), w.shape[stacked:]
            dim = -1 if names[0] in self.embedding.split else self._shard_dims.get(names, -1)
            return None if dim < 0 else ShardInBuffer(shape, dim, self._compute_dtype(names, len(shape)))

        return BufferLayout(tree, [place(*leaf) for leaf in jax.tree_util.tree_leaves_with_path(tree)])

    # Parameters as they are used

    def cast(self, tree: Any) -> Any:
        """Cast unsharded parameters to the dtype of their use; those that stay in parts are left as they are."""

        def used(path: Any, w: jax.Array) -> jax.Array:
            names = _names(path)
            stays = names[0] in self.embedding.split
            return w if stays else w.astype(self._compute_dtype(names, w.ndim - is_expert(path)))

        return jax.tree_util.tree_map_with_path(used, tree)

    def gather(self, tree: Any) -> Any:
        """Gather this device's parameters (of one layer, or outside the layers), in the dtype of their use."""
        layout = self.layout(tree)
        shards, rest = layout.split(tree)[0], layout.split(self.cast(tree))[1]
        if shards and self.fused:
            unsharded = gather_fused_local(shards, tuple(layout.parts), self.hierarchy)
        else:
            pairs = zip(shards, layout.parts, strict=True)
            unsharded = [gather_local(w, part.dim, part.dtype, ALL) for w, part in pairs]
        return layout.join(unsharded, rest)

    def reverse_scan(self, chunk_bytes: int | None = None) -> ReverseScan | None:
        """Make what runs the layers in training where their parameters travel as one buffer.

        chunk_bytes: how much the network takes at once; None: `comm.chunk_bytes`, or as much as is ever useful.
        """
        comm, layout = self.config.comm, lambda stack: self.layout(stack, stacked=True)
        limit_bytes = chunk_bytes or comm.chunk_bytes or MAX_CHUNK_BYTES
        schedule = SCHEDULES[comm.schedule]
        return ReverseScan(layout, self.hierarchy, schedule, comm.bucket_bytes, limit_bytes) if self.fused else None

    def __call__(
        self,
        params: Any,
        router_bias: Any,
        tokens_BS: jax.Array,
        layers: ReverseScan | None = None,
        *,
        remat: bool = False,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return (hidden [B, S, D], the head's weight as `OutputHead.weight` makes it, statistics) of local tokens.

        layers: what runs the layers; None: a plain scan, which gathers each by itself. options: of `Decoder`.
        """
        stacks = {name: tree for name, tree in params.items() if name.endswith("_layers")}
        with jax.named_scope("gather"):
            outside = self.gather({name: tree for name, tree in params.items() if name not in stacks})
        trees = zip(self._structures, (outside | stacks, router_bias), strict=True)
        model = nnx.merge(self._graph, *(jax.tree.unflatten(s, jax.tree.leaves(tree)) for s, tree in trees))
        if layers is None:
            execution = Execution(scan_layers, self.embedding.lookup, self.gather, remat=remat)
        else:
            execution = Execution(layers, self.embedding.lookup, remat=remat)
        hidden, stats = model(tokens_BS, dtype=self.dtype, execution=execution, **options)
        head = None if model.head is None else model.head[...]
        return hidden, self.head.weight(model.embedding[...], head, self.dtype), stats

    # The state of training

    @property
    def state_specs(self) -> TrainState:
        """Return where every array of the state lies."""
        bias: Any = jax.tree.map(lambda _: REPLICATED, self._bias_shapes)
        step: Any = REPLICATED
        return TrainState(self.specs, self.specs, self.specs, bias, step)

    def fresh_state(self) -> TrainState:
        """Draw step 0, in the form that is saved."""
        split: Any = nnx.split(self.build(), nnx.Param, RouterBias)
        return TrainState.at_step_0(nnx.to_pure_dict(split[1]), nnx.to_pure_dict(split[2]))

    def initial_state(self) -> TrainState:
        """Draw step 0, in the form that training uses."""
        return self.fresh_state().map_table(self.embedding.kept)

    @cached_property
    def state_shape(self) -> TrainState:
        """The shapes and shardings of the state in training."""
        place = lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)  # noqa: E731
        state: TrainState = jax.eval_shape(self.initial_state)
        placed: TrainState = jax.tree.map(place, state, shardings(self.state_specs, self.mesh))
        return placed

    @cached_property
    def _saved_form(self) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array], Any] | None:
        """(to the saved form, from it, its shape) of a table kept in stripes, which is saved split by columns."""
        if not self.embedding.striped:
            return None
        table = self.shapes["embedding"]
        dim = next(d for d in (1, 0) if table.shape[d] % self.mesh.size == 0)
        place = shardings(split_over(ALL, dim), self.mesh)
        save = jax.jit(lambda table: table.reshape(-1, table.shape[-1]), out_shardings=place)
        restore = jax.jit(self.embedding.kept, out_shardings=self.state_shape.params["embedding"].sharding)
        return save, restore, jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=place)

    @property
    def saved_shape(self) -> TrainState:
        """Return what a checkpoint holds, the same whatever the mesh."""
        shape, form = self.state_shape, self._saved_form
        return shape if form is None else shape.map_table(lambda _: form[2])

    def to_saved(self, state: TrainState) -> TrainState:
        """Bring a state into the form in which it is saved."""
        return state if self._saved_form is None else state.map_table(self._saved_form[0])

    def from_saved(self, state: TrainState) -> TrainState:
        """Bring a saved state into the form in which it is used."""
        return state if self._saved_form is None else state.map_table(self._saved_form[1])


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(name for name in path_names(path) if name != "value")
