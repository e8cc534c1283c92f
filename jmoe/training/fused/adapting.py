"""LoRA: the step of `FusedTrainer`, in which adapters are the parameters and the model is frozen.

Legend: A accumulation steps, B batch, S sequence.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmoe.config import STACKS, LayerKind, TrainConfig
from jmoe.config.cluster import LinksConfig
from jmoe.layers.documents import Documents
from jmoe.layers.experts import Experts
from jmoe.layers.loss import HeadWeight
from jmoe.layers.moe import MoEStats
from jmoe.mesh import EXPERTS_PATH, is_expert, num_stack_dims, param_specs, path_names
from jmoe.models.block import ApplyBlock, Block
from jmoe.models.decoder import Decoder, LayerScan, StackedLayers, scan_layers
from jmoe.models.huggingface import family_of
from jmoe.models.layer_patterns import LayerPattern
from jmoe.models.lora import (
    DROPOUT_KEY,
    AdapterApplier,
    adapted_parameters,
    expert_low_rank,
    initial_adapters,
    install_dropout_adapters,
    num_adapter_elements,
)
from jmoe.models.pretrained import read_config
from jmoe.models.weights import flatten_by_path
from jmoe.offload.expert_state import ReadExperts
from jmoe.training.bandwidth import read_or_measure_links
from jmoe.training.finetune import load_pretrained_parameters, pretrained_folder
from jmoe.training.frozen_experts import (
    decoded_matrices,
    load_stored_matrices,
    open_frozen_experts,
    stored_shapes,
    with_placeholders,
    without_matrices,
)
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import TrainState
from jmoe.training.update import auxiliary_losses, loss_tokens_of
from jmoe.types import PyTree

ADAPTERS = "adapters"  # the one entry of the trained parameters: adapters by path of their weight
STORED = "stored"  # entry of the frozen parameters: experts' matrices as they are stored


class FrozenModel(NamedTuple):
    """The frozen parameters and the router biases, which no step changes."""

    params: PyTree
    router_bias: PyTree


class LayerInputs(NamedTuple):
    """The inputs of one layer apart from its adapters and hidden states.

    stored: arrays [E, ...] of its experts' matrices, {} for a dense layer. number: among layers of
    its kind. key: PRNG key of the micro-batch; None if nothing is drawn.
    """

    model: FrozenModel
    stored: dict[str, jax.Array]
    number: jax.Array
    key: jax.Array | None
    documents: Documents | None


class LayerResults(NamedTuple):
    """A layer's output, its router losses (balance, z) and routing statistics; the last two are
    None for a dense layer.
    """

    y_BSD: jax.Array
    losses: tuple[jax.Array, jax.Array] | None
    stats: MoEStats | None


class AdaptedDecoder(ShardedDecoder):
    """A `ShardedDecoder` whose parameters are adapters; its own parameters are an argument.

    Adapters of experts lie with their experts; the others lie on every device. With
    `lora.expert_dtype`, a layer decodes its experts' matrices when it runs, and the adapters'
    low-rank products are added to those of the decoded matrices.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, links: LinksConfig | None = None) -> None:
        super().__init__(config, mesh, links)
        self.lora, family = config.lora, family_of(read_config(pretrained_folder(config.init_from)))
        self.adapted = adapted_parameters(config.model, family, config.lora.targets)
        self.streams_experts = not config.tiers.all_on_device
        self.keeps_stored = config.lora.expert_dtype != "wide" or self.streams_experts
        summed = [p for p in self.adapted if not (self.keeps_stored and p.experts)]
        self._applied = AdapterApplier.make(summed, config.lora.scale)
        self._stored_shapes: PyTree = {}
        if self.keeps_stored and not self.streams_experts:
            with open_frozen_experts(config) as checkpoint:
                self._stored_shapes = {STORED: stored_shapes(checkpoint.expert_fields, config)}

    @property
    def rank(self) -> int:
        """The adapters' rank."""
        assert self.lora.rank is not None
        return self.lora.rank

    @property
    def notes(self) -> list[str]:
        """The notes of `ShardedDecoder`, and the sizes of adapters and frozen parameters."""
        frozen = jax.tree.leaves(self.saved_frozen_shape)
        trained, gib = num_adapter_elements(self.adapted, self.rank), 2**30
        frozen_bytes = sum(w.size * w.dtype.itemsize for w in frozen)
        elements = sum(w.size for w in jax.tree.leaves(self.shapes))
        experts = f", of experts in {self.lora.expert_dtype}" if self.keeps_stored else ""
        return [
            *super().notes,
            f"LoRA of rank {self.rank} on {', '.join(self.lora.targets)}: {trained:,} trained"
            f" parameters ({12 * trained / gib:.3f} GiB with moments); {elements:,}"
            f" frozen ({frozen_bytes / gib:.3f} GiB, matrices in {self.dtype.name}{experts})",
        ]

    def reverse_scan(self, chunk_bytes: int | None = None) -> None:
        """Return None: frozen parameters have no gradients to reduce, and adapters' are small."""
        return

    def cast_copies(self, params: PyTree) -> tuple[jax.Array, ...]:
        """Return (): frozen parameters are in their compute dtype, adapters are used in float32."""
        return ()

    def __call__(
        self,
        params: PyTree,
        router_bias: PyTree,
        tokens_BS: jax.Array,
        layer_runner: LayerScan | None = None,
        *,
        frozen: PyTree = None,
        **options: PyTree,
    ) -> tuple[jax.Array, HeadWeight, PyTree]:
        """Return what `ShardedDecoder` does for the frozen parameters with adapters added.

        params: the adapters. layer_runner: None, as of a `FusedTrainer` without `ReverseScan`.
        """
        stored = None
        if self.keeps_stored:
            stored = frozen[STORED]
            rest = {name: tree for name, tree in frozen.items() if name != STORED}
            frozen = with_placeholders(rest)

        def run_layers(
            patterns: Sequence[LayerPattern],
            apply_block: ApplyBlock,
            inputs: dict[LayerKind, StackedLayers],
            x_BSD: jax.Array,
        ) -> tuple[jax.Array, MoEStats | None]:
            adapted = {
                kind: StackedLayers(
                    (
                        stack.params,
                        params[ADAPTERS].get(STACKS[kind], {}),
                        self._dropout_keys(kind, stack.params, options),
                        None if stored is None else stored.get(STACKS[kind]),
                    ),
                    stack.keys,
                )
                for kind, stack in inputs.items()
            }
            changed = replace(apply_block, gather=self._gather, prepare=self._prepare)
            return scan_layers(patterns, changed, adapted, x_BSD)

        return super().__call__(frozen, router_bias, tokens_BS, run_layers, **options)

    # Layer by layer, on one device

    def _merge(self, model: FrozenModel) -> Decoder:
        """Return the frozen model without its experts' matrices, in the compute dtype."""
        layers = {name: tree for name, tree in model.params.items() if name in STACKS.values()}
        outside = {name: tree for name, tree in model.params.items() if name not in layers}
        whole = with_placeholders(layers) | self.gather_params(outside)
        decoder: Decoder = self.model_with_params(whole, model.router_bias)
        return decoder

    def embed_tokens(
        self, model: FrozenModel, tokens_BS: jax.Array, documents: Documents | None
    ) -> jax.Array:
        """Return the first layer's input [B, S, D]."""
        return self._merge(model).embed(tokens_BS, self.dtype, self.embedding.lookup, documents)

    def apply_layer(
        self,
        kind: LayerKind,
        window: int | None,
        adapters: PyTree,
        x_BSD: jax.Array,
        inputs: LayerInputs,
        *,
        train: bool,
    ) -> LayerResults:
        """Return the results of one layer with its adapters, from its experts' stored matrices."""
        graphs, stacks = self._merge(inputs.model).graphs_and_scan_inputs(inputs.key)
        stack, number = stacks[kind], inputs.number
        drawn = self._dropout_keys(kind, stack.params, {"train": train, "key": inputs.key})
        keys = [None if each is None else each[number] for each in (stack.keys, drawn)]
        pick = partial(lax.dynamic_index_in_dim, index=number, axis=0, keepdims=False)
        stored = {EXPERTS_PATH: inputs.stored} if inputs.stored else None
        layer = jax.tree.map(pick, stack.params), adapters, keys[1], stored
        block: Block = nnx.merge(graphs[kind], self._gather(layer))
        self._prepare(block, layer)
        options: PyTree = {"train": train, "full_capacity": not train}
        options |= {"dtype": self.dtype, "documents": inputs.documents}
        y_BSD, stats = block(x_BSD, window, key=keys[0], **options)
        if stats is None:
            return LayerResults(y_BSD, None, None)
        sums = stats.probs_sum_E, stats.z_sum, loss_tokens_of(stats)
        return LayerResults(y_BSD, auxiliary_losses(self.config, *sums), stats)

    def norm_and_head(self, model: FrozenModel, x_BSD: jax.Array) -> tuple[jax.Array, HeadWeight]:
        """Return (the last norm's output [T, D], the output head)."""
        whole = self._merge(model)
        hidden_TD = whole.norm(x_BSD, self.dtype).reshape(-1, x_BSD.shape[-1])
        return hidden_TD, self.head_weight(whole)

    # The state of training

    def _frozen_dtype(self, path: KeyPath, ndim: int) -> DTypeLike:
        """Return the dtype of a frozen parameter: the compute dtype for matrices and the embedding,
        float32 for vectors and routers.
        """
        matrix = ndim - is_expert(path) - num_stack_dims(path) >= 2
        return self.dtype if matrix and "router" not in path_names(path) else jnp.float32

    def _cast_frozen(self, params: PyTree) -> PyTree:
        """Return parameters in the dtypes in which they are frozen."""
        frozen = jax.tree_util.tree_map_with_path(
            lambda path, w: w.astype(self._frozen_dtype(path, w.ndim)), params
        )
        if not self.keeps_stored:
            return frozen
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._stored_shapes)
        return without_matrices(frozen) | empty

    @property
    def state_specs(self) -> TrainState:
        """The partition specs of the training state, as a `TrainState` of specs."""
        whole = super().state_specs
        shapes = jax.eval_shape(self._initial_adapters)
        adapters = param_specs(shapes, self.mesh, shard_dense=False)
        frozen = self.specs
        if self.keeps_stored:
            stored = param_specs(self._stored_shapes, self.mesh, shard_dense=False)
            frozen = without_matrices(frozen) | stored
        return replace(whole, params=adapters, m=adapters, v=adapters, frozen=frozen)

    def _initial_adapters(self) -> PyTree:
        """Return the adapters of step 0, drawn from `config.seed`, in a dict under `ADAPTERS`."""
        key = jax.random.key(self.config.seed)
        return {ADAPTERS: initial_adapters(key, self.adapted, self.rank)}

    def initial_state(self) -> TrainState:
        """Return the state of step 0: new adapters of a model with random parameters."""
        whole = super().initial_state()
        adapted = TrainState.at_step_0(self._initial_adapters(), whole.router_bias)
        return replace(adapted, frozen=self._cast_frozen(whole.params))

    @cached_property
    def saved_frozen_shape(self) -> PyTree:
        """Shapes, dtypes and shardings of the frozen parameters in the layout of a checkpoint,
        which is the same for every mesh.
        """
        shape = self.state_shape.frozen
        if (form := self._table_conversions_and_saved_shape) is None:
            return shape
        table = form[2].update(dtype=shape["embedding"].dtype)
        return shape | {"embedding": table}

    @property
    def saved_shape(self) -> TrainState:
        """Shapes, dtypes and shardings of a checkpoint's state: the adapters, without the model."""
        return replace(self.state_shape, frozen=None)

    def to_saved(self, state: TrainState) -> TrainState:
        """Return `state` without the frozen parameters."""
        return replace(state, frozen=None)

    def from_saved(self, state: TrainState) -> TrainState:
        """Return a checkpoint's state as it is; `AdapterTrainer.restore_state` adds what
        is frozen.
        """
        return state

    def frozen_from_saved(self, frozen: PyTree) -> PyTree:
        """Return frozen parameters, read in the layout of a checkpoint, in the layout of
        training.
        """
        if (form := self._table_conversions_and_saved_shape) is None:
            return frozen
        return frozen | {"embedding": form[1](frozen["embedding"])}

    def _gather(self, layer: PyTree) -> PyTree:
        """Return the unsharded parameters of one layer, with its adapters added unless their
        inputs are dropped or its experts' matrices are stored ones.
        """
        shards, adapters, key, stored = layer
        if stored is not None:
            matrices = decoded_matrices(stored[EXPERTS_PATH], self.dtype)
            shards = jax.tree_util.tree_map_with_path(
                lambda path, w: matrices.get(_expert_name(path), w), shards
            )
        whole = self.gather_params(shards)
        return self._applied.add_to_layer(whole, adapters) if key is None else whole

    def _prepare(self, block: Block, layer: PyTree) -> None:
        """Give a layer's weights the adapters that are not added to them: of dropped inputs, where
        the layer has a key, and of experts whose matrices are stored ones.
        """
        _, adapters, key, stored = layer
        if key is not None:
            install_dropout_adapters(block, adapters, self._applied, self.lora.dropout, key)
        of_experts = adapters.get("moe", {}).get(EXPERTS_PATH, {})
        if stored is not None and of_experts:
            assert block.moe is not None and isinstance(block.moe.experts, Experts)
            block.moe.experts.low_rank = expert_low_rank(of_experts, self.lora.scale)

    def _dropout_keys(self, kind: LayerKind, stack: PyTree, options: PyTree) -> jax.Array | None:
        """Return a PRNG key for each layer of a stack; None without dropout, as in evaluation."""
        if not (self.lora.dropout and options.get("train")):
            return None
        own = jax.random.fold_in(options["key"], DROPOUT_KEY + (kind == "moe"))
        return jax.random.split(own, jax.tree.leaves(stack)[0].shape[0])


def _expert_name(path: KeyPath) -> str:
    """Return the name of an array of experts; "" for other parameters of a layer."""
    names = [name for name in path_names(path) if name != "value"]
    return names[-1] if EXPERTS_PATH in names else ""


class AdapterTrainer(FusedTrainer):
    """A `FusedTrainer` that trains LoRA adapters of `init_from`, all of it on the devices.

    Checkpoints hold the adapters, their moments and the router biases. Raises ValueError if the
    model has none of `lora.targets`.
    """

    decoder = AdaptedDecoder
    model: AdaptedDecoder

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh, links=read_or_measure_links(config, mesh))
        adapters = self.saved_shape.params
        place = jax.tree.map(lambda s: s.sharding, adapters)
        self._init_adapters = jax.jit(self.model._initial_adapters, out_shardings=place)
        self.init = self.init_from_pretrained  # type: ignore[assignment]

    def init_from_pretrained(self) -> TrainState:
        """Return the state of step 0: new adapters of the model in `init_from`."""
        frozen, bias = self._load_frozen()
        adapters, shape = self._init_adapters(), self.saved_shape
        m, v = (
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shape.m)
            for _ in range(2)
        )
        step = jnp.zeros((), jnp.int32, device=shape.step.sharding)
        return TrainState(adapters, m, v, bias, step, frozen=frozen)

    def restore_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the training state for a checkpoint's state, with the model of `init_from`."""
        return replace(saved, frozen=self._load_frozen()[0])

    def _load_frozen(self) -> tuple[PyTree, PyTree]:
        """Return (frozen parameters, router biases) of `init_from`, each on its devices."""
        shape, bias = dict(self.model.saved_frozen_shape), self.saved_shape.router_bias
        stored: PyTree = {}
        if STORED in shape:
            with open_frozen_experts(self.config) as checkpoint:
                stored = {STORED: load_stored_matrices(checkpoint, shape.pop(STORED))}
        arrays = load_pretrained_parameters(
            self.config, flatten_by_path(shape) | flatten_by_path(bias)
        )

        def take(tree: PyTree) -> PyTree:
            # a copy in JAX's own memory, since a step donates its state
            paths = flatten_by_path(tree)
            leaves = [jnp.copy(arrays.pop(path)) for path in paths]
            return jax.tree.unflatten(jax.tree.structure(tree), leaves)

        return self.model.frozen_from_saved(take(shape)) | stored, take(bias)
