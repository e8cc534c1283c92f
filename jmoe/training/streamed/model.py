"""What a streamed step asks of a model beside its layers, and what its programs hand to each other.

Legend: A micro-batches, L experts of a device, M that its slot has room for, N layers of a kind, R
devices, C elements of a device's part of a layer's flat buffer, G the same for gradients.

A micro-batch is one accumulation step of text, or one of the layout's of images. Arrays that differ
between devices and have no dimension of tokens, images or experts have a leading one of R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.collectives.exchange import DispatchedTokens
from jmoe.config import LayerKind, ModelConfig, TrainConfig
from jmoe.layers.moe import MoEStats
from jmoe.models.functional import FunctionalModule
from jmoe.models.vision import STACK_OF
from jmoe.offload.slot_rows import ChosenRows
from jmoe.optim.loss_scale import LossScale
from jmoe.training.fused.reverse_scan import ReverseScan
from jmoe.training.gradient_reduction import StreamedGradients
from jmoe.training.sharded_model import ShardedModel
from jmoe.training.state import TrainState

Params = Any  # nested dicts of arrays
ExpertStacks = Mapping[str, jax.Array]  # of one layer, [E, ...] each
Choices = Mapping[str, jax.Array]  # of every token, as `Block.route` takes them
Metrics = dict[str, Any]
Part = TypeVar("Part")  # a micro-batch
PartIn = TypeVar("PartIn", contravariant=True)


class LayerOptions(NamedTuple):
    """What a layer's programs are given of one micro-batch beside its hidden states.

    number: of the layer among its kind. window: how far attention looks; None: to all tokens
    before.
    step, accumulation: what its router draws from. choices: its tokens' experts, where the router
    does not choose them. weight_B: of the images, 0 where a device has none, whose layers it then
    skips; None: every device has some.
    """

    number: jax.Array
    window: jax.Array | None = None
    step: jax.Array | None = None
    accumulation: jax.Array | None = None
    choices: Choices | None = None
    weight_B: jax.Array | None = None


class LayerParams(NamedTuple):
    """Parameters that a layer's program is given."""

    stack: Params  # dense ones of all layers of its kind, as they lie on the devices or unsharded
    unsharded_RC: jax.Array | None  # the layer's flat buffer
    router_bias: Params = None  # of all layers whose experts tokens choose
    experts: ExpertStacks | None = None  # this layer's; what no token chose may be anything finite
    chosen: ChosenRows | None = None  # None: `experts` has a row for each expert, in order

    def of_chosen(self) -> tuple[ExpertStacks | None, jax.Array | None]:
        """Return (arrays of the chosen experts [M, ...], which they are), or (of all, None)."""
        if self.chosen is None or self.experts is None:
            return self.experts, None
        take = lambda w: jnp.take(w, self.chosen.rows_M, axis=0, mode="clip")  # noqa: E731
        return {name: take(w) for name, w in self.experts.items()}, self.chosen.ids_M


class Unsharded(NamedTuple):
    """Parameters that are gathered before the first layer."""

    outside: Params  # of what is outside the layers
    stacks: dict[str, Params] | None  # of all layers; None: each is gathered beside the one before
    flat: dict[LayerKind, jax.Array]  # the devices' parts of all layers, [N, C]
    first_RC: jax.Array | None  # the first layer's flat buffer


class RoutedTokens(NamedTuple):
    """A layer with experts, half done: its tokens' rows are where their experts are."""

    x_BSD: jax.Array
    h_TD: jax.Array
    dispatched: DispatchedTokens
    arrived_E: jax.Array  # how many rows for each expert, on all devices that fetch it, int32
    topk_idx_TK: jax.Array
    stats: MoEStats  # this device's, [R] each


class NextLayer(NamedTuple):
    """The layer whose parameters are to be gathered."""

    flat_NC: jax.Array  # the devices' parts, of all layers of its kind
    number: jax.Array


class PendingGradients(NamedTuple):
    """A layer's gradients that are still to be summed over devices."""

    rows_RG: jax.Array | None = None  # of its flat buffer
    experts: ExpertStacks | None = None  # where devices have the same experts
    ids_M: jax.Array | None = None  # which experts these are, as `ChosenRows` has them


class SummedGradients(NamedTuple):
    """The sums of `PendingGradients`; what those do not have is None."""

    row_G: jax.Array | None = None  # this device's part of the flat buffer's
    experts: ExpertStacks | None = None  # as they are to be kept
    square: jax.Array | None = None  # of each of this device's experts', [R, L]


class NeighborWork(NamedTuple):
    """The work that a program does for neighbouring layers beside its own work."""

    next_layer: NextLayer | None = None  # to be gathered
    pending: PendingGradients = PendingGradients()  # of the last layer
    gathered: Sequence[jax.Array] = ()  # the next layer's first chunks, which are there already


class Overlapped(NamedTuple):
    """The results of `NeighborWork`."""

    unsharded_RC: jax.Array | None = None  # the next layer's parameters
    summed: SummedGradients = SummedGradients()  # gradients of the last layer


class GradAccumulator(NamedTuple):
    """A layer's gradients, summed over micro-batches but not over devices."""

    rows_RG: jax.Array | None  # None before the first one, or where there are none; so are experts
    rest: list[jax.Array]  # [R, N, ...], of all layers
    experts: ExpertStacks | None = None
    ids_M: jax.Array | None = None  # which experts these are; None: all


class ForBackward(NamedTuple):
    """A layer's inputs, the gradient of its output, and what its forward pass left for this one.

    choices: those that were made; None of a dense layer. kept: residuals; None: the layer runs
    again from x. loss_scale: of its routers' losses. counts_NAE: of `ExpertTotals`.
    """

    x_BSD: jax.Array
    dy_BSD: jax.Array
    choices: Choices | None
    kept: Any
    loss_scale: LossScale | None = None
    counts_NAE: jax.Array | None = None


class ExpertTotals(NamedTuple):
    """Assignments to each expert [N, A, E] and those that found no row [N], of all devices."""

    counts_NAE: jax.Array | None = None  # None: tokens choose no experts
    dropped_N: jax.Array | None = None


class StepResults(NamedTuple):
    """The values that the parts of a step hand to its end."""

    grads: StreamedGradients
    expert_squares: Mapping[LayerKind, Sequence[jax.Array]]  # of layers' gradients, [R, L]
    losses: Sequence[Any]  # of each micro-batch, as the model's `loss_gradients` returns them
    stats: Sequence[Sequence[MoEStats]]  # [N][A]
    totals: ExpertTotals


@dataclass(frozen=True)
class StreamedLayer:
    """A layer: its number among its kind and among those with records (-1: it has no experts)."""

    kind: LayerKind
    number: int
    record: int
    options: LayerOptions  # the same for all micro-batches

    @property
    def stack(self) -> str:
        """Return the name of its parameters' stack."""
        return STACK_OF[self.kind]


def streamed_layers(model: ModelConfig) -> list[StreamedLayer]:
    """Return a model's layers in order."""
    layers, records, windows = list[StreamedLayer](), 0, model.windows
    for i, kind in enumerate(model.layer_kinds):
        number = model.layer_kinds[:i].count(kind)
        options = LayerOptions(
            jnp.int32(number), None if windows is None else jnp.int32(windows[i])
        )
        layers.append(StreamedLayer(kind, number, -1 if kind == "dense" else records, options))
        records += kind != "dense"
    return layers


class ModelParts(NamedTuple):
    """A model's layers without their experts, their experts, and what is outside the layers."""

    blocks: dict[LayerKind, FunctionalModule]
    experts: dict[LayerKind, FunctionalModule]
    outside: FunctionalModule

    @classmethod
    def taken_from(cls, sharded: ShardedModel) -> "ModelParts":
        """Return the parts of a model, each a function of its parameters."""
        model: Any = nnx.eval_shape(sharded.build)
        blocks, experts = dict[LayerKind, FunctionalModule](), dict[LayerKind, FunctionalModule]()
        for kind, stack in STACK_OF.items():
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
        """Return the shapes of an expert's parameters."""
        params = next(iter(self.experts.values())).params
        return {name: tuple(w.shape[2:]) for name, w in params.items()}


class LocalSlots(Protocol):
    """Where experts lie on devices that have only those that they need; see `TaskSlots`."""

    @property
    def owns_RNS(self) -> NDArray[np.bool_]:
        """Whether a device is the first of those that have the expert of the slot."""

    def of_device(self, table: NDArray[Any]) -> jax.Array:
        """Return this device's row of a table [R, ...]."""

    def over_experts_local(self, counts_S: jax.Array, layer: jax.Array) -> jax.Array:
        """Return [E], what all devices have counted of each expert in their slots of a layer."""

    def layer_reduced_local(self, grads: ExpertStacks, layer: int) -> dict[str, jax.Array]:
        """Return gradients [S, ...] of a layer summed over the devices that have the expert."""


class StreamedModel(Protocol[PartIn]):
    """The parts of a step that are a model's own; `StreamedRunner` runs the layers between them.

    All but `layer_options` are traced, on each device: `outside` is what is outside the layers,
    unsharded, and `part` this device's micro-batch. Gradients are summed over micro-batches and
    devices by the runner's programs.
    """

    config: TrainConfig
    sharded: ShardedModel
    parts: ModelParts
    outside_spec: Any  # of `Unsharded.outside`
    stack_specs: Mapping[str, Any]  # of the dense parameters that layers' programs are given
    part_spec: Any
    scan: ReverseScan | None = None  # gathers and reduces beside layers; None: nothing does
    slots: LocalSlots | None = None  # None: experts lie as the mesh splits them
    native: bool = False  # whether programs are traced with native operations
    keeps_residuals: bool = False  # of layers that do not run again on the way back

    def unsharded(self, params: Params, *, first: LayerKind) -> Unsharded:
        """Gather what the first layer needs, and all that is not gathered layer by layer."""

    def embed(self, outside: Params, part: PartIn) -> tuple[jax.Array, list[Choices]]:
        """Return (the first layer's input, choices in each layer whose experts it names)."""

    def layer_options(
        self, layer: StreamedLayer, step: jax.Array, part: PartIn, number: int
    ) -> LayerOptions:
        """Return what a layer is given of micro-batch `number`."""

    def auxiliary_loss(
        self, kind: LayerKind, stats: MoEStats, counts_E: jax.Array | None
    ) -> jax.Array:
        """Return this device's part of a layer's router losses; counts_E: of all devices."""

    def loss_gradients(
        self, outside: Params, x_BSD: jax.Array, part: PartIn, loss_scale: LossScale | None
    ) -> tuple[Any, jax.Array, Params]:
        """Return (this device's part of the losses, gradients of x, of what is outside)."""

    def embed_gradients(
        self, outside: Params, part: PartIn, dx_BSD: jax.Array, dweights: Sequence[jax.Array]
    ) -> Params:
        """Return the gradients of what is outside by those of `embed`'s input and its choices."""

        def differentiable(outside: Params) -> tuple[jax.Array, list[jax.Array]]:
            x_BSD, choices = self.embed(outside, part)
            weights = [c["topk_weights_TK"] for c in choices if "topk_weights_TK" in c]
            return x_BSD, weights

        return jax.vjp(differentiable, outside)[1]((dx_BSD, list(dweights)))[0]

    def metrics(self, step: StepResults) -> Metrics:
        """Return this device's part of the step's losses and of its routers' statistics."""

    def reduced(self, params: Params, grads: StreamedGradients) -> Params:
        """Return gradients like the parameters on this device, summed over all devices."""

    def finish(
        self, state: TrainState, grads: Params, squares: dict[str, jax.Array], metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        """Return (the state after its update, the step's metrics); see `finish_step`."""
