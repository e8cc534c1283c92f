"""The decoder on a mesh: a split embedding and output head, and layers run by `scan_layers` or
`ReverseScan`.

`FusedTrainer` and `StreamedDecoder` hold one `ShardedDecoder` each.

Legend: B local batch, S sequence, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import KeyPath

from jmoe.collectives.schedule import MAX_CHUNK_BYTES, SCHEDULES, CollectiveSchedule
from jmoe.config import STACKS, Remat, TrainConfig
from jmoe.config.cluster import LinksConfig
from jmoe.config.parallel import ExpertSharding
from jmoe.layers.context import SplitSequences
from jmoe.layers.embedding import Embedding
from jmoe.layers.loss import HeadWeight
from jmoe.layers.moe import ExpertParallel
from jmoe.mesh import (
    ALL,
    DATA,
    EXPERT,
    REPLICA,
    is_expert,
    num_expert_copies,
    num_shards,
    path_names,
    shardings,
    split_over,
)
from jmoe.models.decoder import Decoder, DecoderExecution, LayerScan, scan_layers
from jmoe.planning.embedding import EmbeddingSizes, plan_embedding
from jmoe.planning.exchange import ExchangeLoad
from jmoe.training.fused.layer_buffers import LayerBuffers
from jmoe.training.fused.reverse_scan import ReverseScan
from jmoe.training.native import steps_are_native
from jmoe.training.sharded_model import ShardedModel
from jmoe.training.state import TrainState
from jmoe.types import JsonObject, PyTree

_EXPERT_SHARDING_NOTES: dict[ExpertSharding, str] = {
    "optimizer": (
        "experts: float32 weights, moments and gradients split over the data axis of {replicas},"
        " weights in the compute dtype kept by each device for a step"
    ),
    "weights": (
        "experts: weights, moments and gradients split over the data axis of {replicas}, weights"
        " gathered one layer ahead"
    ),
}


def _tokens_per_device(config: TrainConfig, mesh: Mesh, positions: int) -> int:
    """Return the number of tokens per device in one accumulation step, of sequences with so many
    positions.
    """
    return config.batch_size * positions // config.gradient_accumulation_steps // mesh.size


def _plan_embedding(config: TrainConfig, mesh: Mesh) -> Embedding:
    """Return the embedding, with its layout over devices as planned from sizes and nodes."""
    model, inside = config.model, mesh.shape[ALL[-1]]
    tokens = _tokens_per_device(config, mesh, sum(config.text_parts))
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    tied, sharded = model.tie_word_embeddings, config.comm.shard_dense
    vocabulary = EmbeddingSizes(
        model.vocab_size, model.hidden_size, tied, tokens, itemsize, sharded
    )
    plan = plan_embedding(
        config.comm.embedding, vocabulary, num_nodes=mesh.size // inside, devices_per_node=inside
    )
    return Embedding(plan, ALL, tied)


class ShardedDecoder(ShardedModel):
    """The decoder as a pure function of nested dicts of this device's parameter shards.

    links: the mesh's bandwidths and latencies, for choosing the expert exchange; None if unknown.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, links: LinksConfig | None = None) -> None:
        self._links = links
        self.embedding = _plan_embedding(config, mesh)
        self.head = self.embedding.output_head
        super().__init__(config, mesh, self.embedding.split_dims)
        self.native = steps_are_native(config, mesh)  # read by trainers when they compile

    def build_model(self) -> Decoder:
        """Return a `Decoder` with random parameters, seeded by `config.seed`."""
        config = self.config
        load = None
        if self._links is not None:
            row_bytes = self.dtype.itemsize * config.model.hidden_size
            tokens = _tokens_per_device(config, self.mesh, max(config.text_parts))
            load = ExchangeLoad(self._links, tokens, row_bytes, config.model.capacity_factor)
        options: JsonObject = {"num_chunks": self.comm_schedule.num_chunks, "load": load}
        parallel = ExpertParallel(self.mesh, EXPERT, exchange=config.comm.exchange, **options)
        return Decoder(config.model, parallel, rngs=nnx.Rngs(config.seed))

    @property
    def comm_schedule(self) -> CollectiveSchedule:
        """How the expert exchange and the other collectives share the network."""
        schedule, chunks = SCHEDULES[self.config.comm.schedule], self.config.comm.exchange_chunks
        return replace(schedule, num_chunks=chunks) if chunks else schedule

    @property
    def needs_layer_all_reduce(self) -> bool:
        """True if some layer's gradient needs an all-reduce, instead of or after a
        reduce-scatter.
        """
        leaves = jax.tree_util.tree_leaves_with_path(
            {name: self.shapes.get(name) for name in STACKS.values()}
        )
        if self.mesh.shape[REPLICA] > 1:
            return True
        whole = (
            not self.is_fully_sharded(path_names(path)[1:])
            for path, _ in leaves
            if not is_expert(path)
        )
        summed = (is_expert(path) and not self.is_data_split_expert(path) for path, _ in leaves)
        return any(whole) or (num_expert_copies(self.mesh) > 1 and any(summed))

    @property
    def casts_once_per_step(self) -> bool:
        """Whether stacked weights are cast to the compute dtype once per step, instead of once per
        layer use.

        With one cast, the forward pass, the backward pass and rematerialization read one copy, and
        gradients are stacked in the compute dtype, to which a layer's matmuls have rounded them
        already. False on CPUs, where slicing one layer out of a bfloat16 stack converts the whole
        stack.
        """
        return self.mesh.devices.flat[0].platform != "cpu"

    def _has_cast_copy(self, path: KeyPath, w: jax.Array) -> bool:
        """Return whether `cast_copies` copies the parameter."""
        narrows = (
            path_names(path)[0] in STACKS.values()
            and self.compute_dtype_at(path, w.ndim) != w.dtype
        )
        return self.casts_once_per_step and self.mesh.size == 1 and narrows

    def cast_copies(self, params: PyTree) -> tuple[jax.Array, ...]:
        """Return copies of the stacked weights in their compute dtype, in tree order; empty if a
        step casts weights itself.

        AdamW writes these copies in the pass that updates the weights.
        """
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return tuple(self.cast_param(path, w) for path, w in leaves if self._has_cast_copy(path, w))

    def with_cast_copies(self, params: PyTree, copies: tuple[jax.Array, ...]) -> PyTree:
        """Return `params` with each weight that `cast_copies` copied replaced by its copy; `params`
        itself if `copies` is empty.
        """
        left = iter(copies)
        return jax.tree_util.tree_map_with_path(
            lambda path, w: next(left) if copies and self._has_cast_copy(path, w) else w, params
        )

    def _cast_stacks(self, stacks: PyTree, layer_runner: LayerScan | None) -> PyTree:
        """Return the stacks of layers with weights cast to their compute dtype.

        On several devices only experts are cast, and only if `ReverseScan` adds no other gradients
        (of replicas or earlier accumulation steps) to theirs.
        """
        alone = layer_runner is None or (
            num_expert_copies(self.mesh) == 1 and self.config.gradient_accumulation_steps == 1
        )

        def cast_weight(path: KeyPath, w: jax.Array) -> jax.Array:
            cast_experts = is_expert(path) and alone and not self.is_data_split_expert(path)
            is_cast = self.mesh.size == 1 or cast_experts
            return self.cast_param(path, w) if is_cast else w

        with jax.named_scope("cast"):
            return jax.tree_util.tree_map_with_path(cast_weight, stacks)

    @property
    def notes(self) -> list[str]:
        """One sentence for each planned choice with its reason: the expert exchange, and how the
        embedding is split.
        """
        notes, layers = [], self.abstract.moe_layers or self.abstract.linear_moe_layers
        if layers is not None and layers.moe.exchange_plan.num_devices > 1:
            notes.append(
                f"{layers.moe.exchange_plan.kind} exchange: {layers.moe.exchange_plan.reason}"
            )
        if self.mesh.shape[REPLICA] > 1:
            notes.append(
                f"{self.mesh.shape[REPLICA]} replicas of the state, each split over"
                f" {num_shards(self.mesh)} devices (mesh.replicate)"
            )
        if self._expert_shard_dims:
            notes.append(
                _EXPERT_SHARDING_NOTES[self.config.comm.expert_sharding].format(
                    replicas=self.mesh.shape[DATA]
                )
            )
        if self.mesh.size > 1:
            notes.append(f"{self.embedding.plan.kind} embedding: {self.embedding.plan.reason}")
        return notes

    def reverse_scan(self, chunk_bytes: int | None = None) -> ReverseScan | None:
        """Return the `ReverseScan` that runs the layers in training.

        None on one device, or if dense parameters are gathered one by one (`comm.shard_dense`
        without `comm.fuse_dense`). chunk_bytes: the bytes of one chunk of a chunked collective;
        None takes `comm.chunk_bytes`, or `MAX_CHUNK_BYTES` if that is 0.
        """
        comm = self.config.comm
        if self.mesh.size == 1 or (comm.shard_dense and not comm.fuse_dense):
            return None
        limit_bytes = chunk_bytes or comm.chunk_bytes or MAX_CHUNK_BYTES

        def buffers_of(stack: PyTree) -> LayerBuffers:
            dense, experts = (
                self.buffer_layout(stack, stacked=True),
                self.expert_buffer_entries(stack),
            )
            return LayerBuffers(stack, dense, experts, self.shard_hierarchy)

        return ReverseScan(
            buffers_of,
            self.shard_hierarchy,
            self.comm_schedule,
            comm.bucket_bytes,
            limit_bytes,
            keeps_experts=comm.expert_sharding == "optimizer",
            replica_axes=(REPLICA,) if self.mesh.shape[REPLICA] > 1 else (),
        )

    def __call__(
        self,
        params: PyTree,
        router_bias: PyTree,
        tokens_BS: jax.Array,
        layer_runner: LayerScan | None = None,
        *,
        remat: Remat = "none",
        split: SplitSequences | None = None,
        **options: PyTree,
    ) -> tuple[jax.Array, HeadWeight, PyTree]:
        """Return (hidden states [B, S, D], the output head, router statistics) of this
        device's tokens.

        layer_runner: runs the layers; None uses `scan_layers`, which gathers one layer's parameters
        at a time. split: of sequences that lie on several devices. options: keyword arguments of
        `Decoder.__call__`. The statistics are None for a model without experts.
        """
        stacks = {name: tree for name, tree in params.items() if name.endswith("_layers")}
        if self.casts_once_per_step:
            stacks = self._cast_stacks(stacks, layer_runner)
        with jax.named_scope("gather"):
            outside = self.gather_params(
                {name: tree for name, tree in params.items() if name not in stacks}
            )
        model = self.model_with_params(outside | stacks, router_bias)
        if layer_runner is None:
            execution = DecoderExecution(
                scan_layers, self.embedding.lookup, self.gather_params, remat, split
            )
        else:
            execution = DecoderExecution(
                layer_runner, self.embedding.lookup, remat=remat, split=split
            )
        execution = replace(execution, encoder_length=self.config.text_parts.encoder)
        hidden, stats = model(tokens_BS, dtype=self.dtype, execution=execution, **options)
        return hidden, self.head_weight(model), stats

    def head_weight(self, model: Decoder) -> HeadWeight:
        """Return the output head of a decoder with this device's shards of embedding and head."""
        head = None if model.head is None else model.head[...]
        bias = None if model.head_bias is None else model.head_bias[...]
        return self.head.weight(model.embedding[...], head, self.dtype, bias)

    # The state of training

    def initial_state(self) -> TrainState:
        """Return the state of step 0 in the layout used by training."""
        return self.initial_saved_state().map_embedding_table(self.embedding.to_parameter_shape)

    @cached_property
    def _table_conversions_and_saved_shape(
        self,
    ) -> (
        tuple[
            Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array], jax.ShapeDtypeStruct
        ]
        | None
    ):
        """Return (save, restore, saved shape) for an embedding table that training keeps in
        stripes; None for other tables.

        A checkpoint holds the table in one piece, split evenly over all devices, independent of the
        mesh's nodes.
        """
        if not self.embedding.is_striped:
            return None
        table = self.shapes["embedding"]
        dim = next(d for d in (1, 0) if table.shape[d] % self.mesh.size == 0)
        place = shardings(split_over(ALL, dim), self.mesh)
        save = jax.jit(lambda table: table.reshape(-1, table.shape[-1]), out_shardings=place)
        restore = jax.jit(
            self.embedding.to_parameter_shape,
            out_shardings=shardings(self.specs["embedding"], self.mesh),
        )
        return save, restore, jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=place)

    @property
    def saved_shape(self) -> TrainState:
        """Shapes, dtypes and shardings of a checkpoint's state; the shapes are the same for every
        mesh.
        """
        shape, form = self.state_shape, self._table_conversions_and_saved_shape
        return shape if form is None else shape.map_embedding_table(lambda _: form[2])

    def to_saved(self, state: TrainState) -> TrainState:
        """Return `state` in the layout of a checkpoint, which is the same for every mesh."""
        return (
            state
            if self._table_conversions_and_saved_shape is None
            else state.map_embedding_table(self._table_conversions_and_saved_shape[0])
        )

    def from_saved(self, state: TrainState) -> TrainState:
        """Return a checkpoint's state in the layout used by training."""
        return (
            state
            if self._table_conversions_and_saved_shape is None
            else state.map_embedding_table(self._table_conversions_and_saved_shape[1])
        )
