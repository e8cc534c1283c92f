"""The interface between a streamed step and its model (`StreamedModel`), and the values that its
programs exchange.

A micro-batch is one accumulation step of text, or one micro-batch of an image layout. An array that
differs between devices and has no token, image or expert dimension has a leading dimension R.

Legend:
A micro-batches
L experts of a device
M experts that a slot holds
N layers of a kind
R devices
C elements of a device's shard of a layer's flat buffer
G elements of a device's shard of its gradients
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.collectives.exchange import DispatchedTokens
from jmoe.config import STACKS, Layer, LayerKind, TrainConfig
from jmoe.layers.documents import Documents
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import LossTokens
from jmoe.models.functional import FunctionalModule
from jmoe.offload.slot_rows import ChosenRows
from jmoe.optim.loss_scale import LossScale
from jmoe.training.fused.reverse_scan import ReverseScan
from jmoe.training.gradient_reduction import StreamedGradients
from jmoe.training.sharded_model import ShardedModel
from jmoe.training.state import TrainState
from jmoe.types import PyTree

Params = PyTree  # nested dicts of arrays
ExpertStacks = Mapping[str, jax.Array]  # of one layer, [E, ...] each
Choices = Mapping[str, jax.Array]  # each token's experts: keyword arguments of `Block.route`
Metrics = dict[str, jax.Array]
MicroBatch = TypeVar("MicroBatch")  # a micro-batch
MicroBatchIn = TypeVar("MicroBatchIn", contravariant=True)


@jax.tree_util.register_static
@dataclass(frozen=True)
class AttentionWindow:
    """The number of tokens that a token of a layer sees, itself included; None for all earlier
    ones. A layer's programs compile once for each window.
    """

    size: int | None = None


class LayerOptions(NamedTuple):
    """The inputs of a layer's programs for one micro-batch, apart from parameters and hidden
    states.

    number: the layer's index among layers of its kind. step, accumulation: seed the router's draws.
    choices: the experts of each token, if the router does not choose them. weight_B: weights of
    images, 0 for padding; a device whose first weight is 0 skips the layer. None if every device
    always has images. documents: of rows of samples; None for windows of text, and for images.
    """

    number: jax.Array
    window: AttentionWindow = AttentionWindow()
    step: jax.Array | None = None
    accumulation: jax.Array | None = None
    choices: Choices | None = None
    weight_B: jax.Array | None = None
    documents: Documents | None = None


class LayerParams(NamedTuple):
    """The parameters that a layer's program takes."""

    stack: Params  # dense parameters of all layers of its kind, sharded or gathered
    unsharded_RC: jax.Array | None  # this layer's gathered flat buffer
    router_bias: Params | None = None  # of all MoE layers with a learned router
    experts: ExpertStacks | None = None  # this layer's; unchosen rows hold any finite values
    chosen: ChosenRows[jax.Array] | None = (
        None  # None: `experts` has a row for each expert, in order
    )

    def chosen_experts(self) -> tuple[ExpertStacks | None, jax.Array | None]:
        """Return (the chosen experts' arrays [M, ...], their ids [M]); (all experts' arrays, None)
        if the slot has a row for each expert.
        """
        if self.chosen is None or self.experts is None:
            return self.experts, None
        take = lambda w: jnp.take(w, self.chosen.rows_M, axis=0, mode="clip")  # noqa: E731
        return {name: take(w) for name, w in self.experts.items()}, self.chosen.ids_M


class FirstGatheredParams(NamedTuple):
    """The result of gathering parameters before the first layer."""

    outside: Params  # parameters outside the layers
    stacks: dict[str, Params] | None  # all layers' dense parameters; None: gathered layer by layer
    flat: dict[LayerKind, jax.Array]  # shards of all layers' flat buffers, [N, C]
    first_RC: jax.Array | None  # the first layer's flat buffer


class RoutedTokens(NamedTuple):
    """An MoE layer after routing: its tokens are on their experts' devices, the experts have not
    run.
    """

    x_BSD: jax.Array
    h_TD: jax.Array
    dispatched: DispatchedTokens
    arrived_E: jax.Array  # int32, token counts by expert, over all devices that hold the expert
    topk_idx_TK: jax.Array
    stats: MoEStats  # this device's, with a leading dimension R


class LayerToGather(NamedTuple):
    """The layer whose parameters a program gathers for the program after it."""

    flat_NC: jax.Array  # shards of the flat buffers of all layers of its kind
    number: jax.Array


class PendingGradients(NamedTuple):
    """A layer's gradients before their sum over devices."""

    rows_RG: jax.Array | None = None  # of its flat buffer
    experts: ExpertStacks | None = None  # only if several devices may hold the same experts
    ids_M: jax.Array | None = None  # the experts' ids, see `ChosenRows`


class SummedGradients(NamedTuple):
    """A layer's `PendingGradients` after their sum over devices; a field that was None there is
    None here.
    """

    row_G: jax.Array | None = None  # this device's shard of the flat buffer's gradients
    experts: ExpertStacks | None = None  # in the dtype of their tier
    square: jax.Array | None = None  # squared gradient norms by expert, [R, L]


class NeighborLayerCollectives(NamedTuple):
    """The collectives that a program runs for neighbouring layers beside its own layer."""

    next_layer: LayerToGather | None = None  # to gather
    pending: PendingGradients = PendingGradients()  # to reduce, of the layer that ran before
    gathered: Sequence[jax.Array] = ()  # the next layer's chunks that `route` has gathered


class NeighborLayerResults(NamedTuple):
    """The results of a program's `NeighborLayerCollectives`."""

    unsharded_RC: jax.Array | None = None  # the next layer's parameters
    summed: SummedGradients = SummedGradients()  # of the layer that ran before


class GradAccumulator(NamedTuple):
    """A layer's gradients, summed over micro-batches but not over devices."""

    rows_RG: jax.Array | None  # None before the first micro-batch, or without a flat buffer
    outside_buffer: list[jax.Array]  # gradients outside the flat buffer, [R, N, ...], of all layers
    experts: ExpertStacks | None = None  # None before the first micro-batch, or without experts
    ids_M: jax.Array | None = None  # the experts' ids, see `ChosenRows`; None: all in order


class BackwardInputs(NamedTuple):
    """The inputs of a layer's backward pass for one micro-batch: the layer's input, its output's
    gradient, and saved values.

    choices: the routing of the forward pass; None for a dense layer. residuals: None reruns the
    layer from x. loss_scale: multiplies the router losses. loss_tokens: see `RoutingTotals`.
    """

    x_BSD: jax.Array
    dy_BSD: jax.Array
    choices: Choices | None
    residuals: PyTree
    loss_scale: LossScale | None = None
    loss_tokens: LossTokens | None = None


class RoutingTotals(NamedTuple):
    """Routing counts over all devices: tokens per expert [N, A, E], assignments without a buffer
    row [N], and the tokens of the router losses, [N, A] and [N, A, E].
    """

    counts_NAE: jax.Array | None = None  # None: the model has no learned router
    dropped_N: jax.Array | None = None
    loss_tokens: LossTokens | None = None


class FinishStepInputs(NamedTuple):
    """The inputs of the program that finishes a step: gradients, norms, losses and routing
    statistics.
    """

    grads: StreamedGradients
    expert_squares: Mapping[LayerKind, Sequence[jax.Array]]  # per layer, [R, L]
    losses: Sequence[PyTree]  # per micro-batch, the losses that `loss_gradients` returned
    stats: Sequence[Sequence[MoEStats]]  # [N][A]
    totals: RoutingTotals


def common_layer_options(layers: Sequence[Layer]) -> dict[Layer, LayerOptions]:
    """Return {layer: its options} with the options that are the same for all micro-batches."""
    return {
        layer: LayerOptions(jnp.int32(layer.number), AttentionWindow(layer.window))
        for layer in layers
    }


class ModelModules(NamedTuple):
    """A model split into pure functions: layers without experts, the experts, and the modules
    outside the layers.
    """

    blocks: dict[LayerKind, FunctionalModule]
    experts: dict[LayerKind, FunctionalModule]
    outside: FunctionalModule

    @classmethod
    def from_sharded(cls, sharded: ShardedModel) -> "ModelModules":
        """Return the modules of `sharded`'s model; no parameters are computed."""
        model: PyTree = nnx.eval_shape(sharded.build_model)
        blocks, experts = dict[LayerKind, FunctionalModule](), dict[LayerKind, FunctionalModule]()
        for kind, stack in STACKS.items():
            if (layers := getattr(model, stack, None)) is None:
                continue
            if kind != "dense":
                experts[kind] = FunctionalModule(layers.moe.experts)
                del layers.moe.experts
            blocks[kind] = FunctionalModule(layers)
            setattr(model, stack, None)
        return cls(blocks, experts, FunctionalModule(model))

    @property
    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one expert's parameters, by name."""
        params = next(iter(self.experts.values())).params
        return {name: tuple(w.shape[2:]) for name, w in params.items()}


class SlotPlacement(Protocol):
    """Which slots of which devices hold each expert, where a device holds only the experts it
    needs; `TaskSlots` implements it.
    """

    @property
    def is_first_holder_RNS(self) -> NDArray[np.bool_]:
        """Whether a device is the first of the devices that hold the slot's expert."""

    def device_row_local(self, table: NDArray[np.bool_]) -> jax.Array:
        """Return this device's row of a table [R, ...]; call inside `shard_map`."""

    def sum_by_expert_local(self, counts_S: jax.Array, layer: jax.Array) -> jax.Array:
        """Return counts [E] by expert, summed over all devices. counts_S: this device's counts by
        slot of the layer.
        """

    def reduce_layer_local(self, grads: ExpertStacks, layer: int) -> dict[str, jax.Array]:
        """Return one layer's gradients [S, ...] summed over the devices that hold each expert."""


class StreamedModel(Protocol[MicroBatchIn]):
    """The model-specific parts of a streamed step; `StreamedRunner` runs the layers between them.

    All methods except `layer_options` are traced, on each device. outside: the unsharded parameters
    outside the layers. micro_batch: this device's. The runner's programs sum gradients over
    micro-batches and devices.
    """

    config: TrainConfig
    sharded: ShardedModel
    modules: ModelModules
    outside_spec: PyTree  # of `FirstGatheredParams.outside`
    stack_specs: Mapping[str, PyTree]  # of `LayerParams.stack`, by name of the stack
    micro_batch_spec: PyTree
    scan: ReverseScan | None = None  # makes the collectives beside layers; None: there are none
    slots: SlotPlacement | None = None  # None: the mesh splits experts evenly
    native: bool = False  # whether programs are traced with native CPU operations
    saves_residuals: bool = False  # False: the backward pass reruns each layer

    def gather_first_params(self, params: Params, *, first_kind: LayerKind) -> FirstGatheredParams:
        """Return the parameters outside the layers, and those of layers that the model gathers
        ahead: all layers' dense parameters, the first layer's flat buffer, or none.

        first_kind: kind of the first layer, to choose its buffer.
        """

    def embed(self, outside: Params, micro_batch: MicroBatchIn) -> tuple[jax.Array, list[Choices]]:
        """Return (the first layer's input, the routing choices for each task-routed layer)."""

    def layer_options(
        self,
        kind: LayerKind,
        common: LayerOptions,
        step: jax.Array,
        micro_batch: MicroBatchIn,
        number: int,
    ) -> LayerOptions:
        """Return the options of a layer for micro-batch `number`. Runs on the host, untraced.
        common: the options that are the same for all micro-batches.
        """

    def auxiliary_loss(
        self, kind: LayerKind, stats: MoEStats, loss_tokens: LossTokens | None
    ) -> jax.Array:
        """Return this device's addend to a layer's router losses. loss_tokens: the tokens that they
        count, over all devices; None for a layer routed by task.
        """

    def loss_gradients(
        self,
        outside: Params,
        x_BSD: jax.Array,
        micro_batch: MicroBatchIn,
        loss_scale: LossScale | None,
    ) -> tuple[PyTree, jax.Array, Params]:
        """Return (this device's addends to the losses, the gradient of x, gradients of
        `outside`).
        """

    def embed_gradients(
        self,
        outside: Params,
        micro_batch: MicroBatchIn,
        dx_BSD: jax.Array,
        dweights: Sequence[jax.Array],
    ) -> Params:
        """Return the gradients of `outside` through `embed`. dx_BSD: of its hidden states.
        dweights: of its choices' routing weights.
        """

        def embed_float_outputs(outside: Params) -> tuple[jax.Array, list[jax.Array]]:
            x_BSD, choices = self.embed(outside, micro_batch)
            weights = [c["topk_weights_TK"] for c in choices if "topk_weights_TK" in c]
            return x_BSD, weights

        return jax.vjp(embed_float_outputs, outside)[1]((dx_BSD, list(dweights)))[0]

    def local_metric_addends(self, step: FinishStepInputs) -> Metrics:
        """Return this device's addends to the step's losses and router statistics."""

    def reduce_gradients(self, params: Params, grads: StreamedGradients) -> Params:
        """Return `grads` as a tree like `params`, summed over all devices, on this
        device's shards.
        """

    def update_state(
        self, state: TrainState, grads: Params, squares: dict[str, jax.Array], metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Clip gradients and apply AdamW; return (the updated state, the step's metrics)."""
