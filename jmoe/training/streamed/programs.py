"""The compiled programs of a streamed step, which `StreamedRunner` calls layer by layer from the
host.

On several devices each program is one `shard_map` over the mesh. Programs that sum gradients add to
an accumulator, which they donate.

Legend: A micro-batches, N layers of a kind, L experts of a device, R devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import STACKS, LayerKind
from jmoe.layers.moe import MoEStats
from jmoe.mesh import ALL, BATCH, EXPERT, REPLICATED, split_over
from jmoe.offload.slot_rows import ChosenRows
from jmoe.optim.loss_scale import LossScale
from jmoe.training.gradient_reduction import StreamedGradients, squared_norms_local
from jmoe.training.native import trace_natively_if
from jmoe.training.state import TrainState, without_experts
from jmoe.training.streamed.layers import LayerFunctions
from jmoe.training.streamed.model import (
    BackwardInputs,
    Choices,
    FinishStepInputs,
    FirstGatheredParams,
    GradAccumulator,
    LayerOptions,
    LayerParams,
    LayerToGather,
    Metrics,
    NeighborLayerCollectives,
    NeighborLayerResults,
    Params,
    RoutedTokens,
    RoutingTotals,
    StreamedModel,
    SummedGradients,
)
from jmoe.training.update import loss_tokens_of, sum_over_mesh
from jmoe.types import PyTree

_SAME: PyTree = REPLICATED
_SPLIT: PyTree = BATCH  # for arrays that differ between devices
_COLUMNS: PyTree = split_over(ALL, 1)
R = TypeVar("R")
Stats = Sequence[Sequence[MoEStats]]  # [N][A]
Programs = dict[str, Callable[..., PyTree]]


@dataclass(frozen=True)
class StepPrograms:
    """The compiled programs of one run. The layer programs (`LayerFunctions`) take a layer's index,
    so that all layers of a kind and attention window share one compilation.
    """

    gather_first_params: Callable[..., FirstGatheredParams]
    embed: Callable[..., tuple[jax.Array, list[Choices]]]
    dense_forward: Callable[..., tuple[jax.Array, PyTree, NeighborLayerResults]]
    route: Callable[..., tuple[RoutedTokens, PyTree, Sequence[jax.Array]]]
    apply_experts: Callable[..., tuple[jax.Array, PyTree, NeighborLayerResults]]
    max_chosen_experts_per_device: Callable[[Sequence[jax.Array]], jax.Array]
    routing_totals: Callable[[Stats], RoutingTotals]
    dropped_assignments: Callable[[Stats], jax.Array]
    zero_gradients: Callable[[dict[str, Params], Params], StreamedGradients]
    loss_gradients: Callable[..., tuple[PyTree, jax.Array, Params]]
    moe_gradients: Callable[..., tuple[PyTree, ...]]
    dense_gradients: Callable[..., tuple[jax.Array, GradAccumulator, NeighborLayerResults]]
    embed_gradients: Callable[..., Params]
    reduce_pending: Callable[..., SummedGradients]
    finish_step: Callable[[TrainState, FinishStepInputs], tuple[TrainState, Metrics]]


def _specs_like(args: PyTree, specs: PyTree) -> PyTree:
    """Return partition specs with the structure of `args`; None maps to a replicated spec."""
    if args is None:
        return REPLICATED
    if type(args) is type(specs) and hasattr(args, "_fields"):
        return type(args)(*map(_specs_like, args, specs))
    return specs


def jit_over_mesh(
    model: StreamedModel[PyTree],
    function: Callable[..., R],
    *specs: PyTree,
    out: PyTree,
    static: Sequence[str] = (),
    donate: int | tuple[int, ...] = (),
) -> Callable[..., R]:
    """Return `function` jitted over the model's mesh.

    specs, out: partition specs of the arguments and the result. static: keyword arguments to
    specialize on. donate: positions of donated arguments.
    """
    mesh, function = model.sharded.mesh, trace_natively_if(model.native, function)
    if mesh.size == 1:
        return jax.jit(function, static_argnames=static, donate_argnums=donate)

    def call_sharded(*args: PyTree, **options: PyTree) -> R:
        in_specs = tuple(map(_specs_like, args, specs))
        sharded = partial(
            jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=False
        )
        result: R = sharded(partial(function, **options))(*args)
        return result

    return jax.jit(call_sharded, static_argnames=static, donate_argnums=donate)


class _StepFunctions:
    """The functions of a step outside its layers, common to all models; traced on each device."""

    def __init__(self, model: StreamedModel[PyTree], layers: LayerFunctions) -> None:
        self._model, self._layers, self._num_devices = model, layers, model.sharded.mesh.size

    def max_chosen_experts_per_device(self, arrived_counts: Sequence[jax.Array]) -> jax.Array:
        """Return the maximum over devices of the number of a device's experts that get a token in
        any micro-batch. arrived_counts: token counts by expert, one array per micro-batch.
        """
        most = (sum(arrived_counts[1:], arrived_counts[0]) > 0).sum(dtype=jnp.int32)
        return lax.pmax(most, ALL) if self._num_devices > 1 else most

    def routing_totals(self, stats: Stats) -> RoutingTotals:
        """Return the routing counts summed over all devices."""
        counts_NAE = jnp.stack([jnp.stack([s.counts_E[0] for s in layer]) for layer in stats])
        dropped_N = jnp.stack([sum(s.dropped[0] for s in layer) for layer in stats])
        tokens_NA = [[loss_tokens_of(s) for s in layer] for layer in stats]
        stack = partial(jax.tree.map, lambda *values: jnp.stack(values))
        loss_tokens = stack(*(stack(*layer) for layer in tokens_NA))
        loss_tokens = jax.tree.map(lambda values: values[:, :, 0], loss_tokens)
        totals = RoutingTotals(counts_NAE, dropped_N, loss_tokens)
        summed: RoutingTotals = sum_over_mesh(self._num_devices, totals)
        return summed

    def dropped_assignments(self, stats: Stats) -> jax.Array:
        """Return the number of token-expert assignments, over all devices, that found no buffer
        row.
        """
        dropped = jnp.stack([s.dropped[0] for layer in stats for s in layer])
        total: jax.Array = sum_over_mesh(self._num_devices, dropped.sum(dtype=jnp.int32))
        return total

    def zero_gradients(self, stacks: dict[str, Params], outside: Params) -> StreamedGradients:
        """Return zero gradient accumulators in float32. stacks: dense parameters by stack; outside:
        parameters outside the layers.
        """
        own = {kind: stacks[name] for kind, name in STACKS.items() if name in stacks}
        outside_buffer = {
            kind: _float32_zeros_with_device_dim(self._layers.buffer_layout(w).split(w)[1])
            for kind, w in own.items()
        }
        return StreamedGradients(
            _float32_zeros_with_device_dim(outside), outside_buffer, {kind: [] for kind in own}
        )

    def loss_gradients(
        self,
        outside: Params,
        x_BSD: jax.Array,
        micro_batch: PyTree,
        sums: Params,
        loss_scale: LossScale | None,
    ) -> tuple[PyTree, jax.Array, Params]:
        """Return (this device's addends to the losses, dx, `sums` plus the gradients of
        `outside`).
        """
        losses, dx_BSD, new = self._model.loss_gradients(outside, x_BSD, micro_batch, loss_scale)
        return losses, dx_BSD, _add_in_float32(sums, new)

    def embed_gradients(
        self,
        outside: Params,
        micro_batch: PyTree,
        dx_BSD: jax.Array,
        sums: Params,
        dweights: Sequence[jax.Array],
    ) -> Params:
        """Return `sums` plus the gradients of `outside` through the embedding."""
        return _add_in_float32(
            sums, self._model.embed_gradients(outside, micro_batch, dx_BSD, dweights)
        )

    def finish_step(self, state: TrainState, step: FinishStepInputs) -> tuple[TrainState, Metrics]:
        """Return (the updated state, the step's metrics). Experts are not updated here:
        `ExpertState` applies their gradients.
        """
        model, mesh, (counts_NAE, dropped_N, _) = self._model, self._model.sharded.mesh, step.totals
        metrics = sum_over_mesh(mesh.size, model.local_metric_addends(step))
        if counts_NAE is not None:
            metrics |= {"counts": counts_NAE.sum(axis=1, dtype=jnp.int32), "dropped": dropped_N}
        grads = model.reduce_gradients(state.params, step.grads)
        squares = squared_norms_local(grads, model.sharded)
        for kind, layers in step.expert_squares.items():
            expert_squares = jnp.stack([square.sum() for square in layers])
            # every replica adds the same squares
            expert_squares = expert_squares / self._layers.replicas
            squares[STACKS[kind]] = squares[STACKS[kind]] + expert_squares
        squares = sum_over_mesh(mesh.size, squares)
        return model.update_state(state, grads, squares, metrics)


def _float32_zeros_with_device_dim(tree: Params) -> PyTree:
    """Return float32 zeros with the shapes of `tree` and a leading dimension R of 1."""
    return jax.tree.map(lambda w: jnp.zeros((1, *w.shape), jnp.float32), tree)


def _add_in_float32(sums: Params, new: Params) -> Params:
    """Return `sums` [1, ...] with `new` added in float32, leaf by leaf."""
    return jax.tree.map(lambda total, g: total + g.astype(jnp.float32)[None], sums, new)


class _LayerSpecs(NamedTuple):
    """Partition specs of the arguments and results that layer programs share."""

    layer: LayerOptions
    work: NeighborLayerCollectives
    forward: tuple[PyTree, ...]  # (output, residuals, results of `work`)
    inputs: BackwardInputs


def _layer_specs() -> _LayerSpecs:
    """Return the partition specs that the programs of all kinds of layers share."""
    same, split = _SAME, _SPLIT
    return _LayerSpecs(
        layer=LayerOptions(same, same, same, same, split, split, split),
        work=NeighborLayerCollectives(LayerToGather(_COLUMNS, same), split, same),
        forward=(split, split, NeighborLayerResults(same, split)),
        inputs=BackwardInputs(split, split, split, split, same, same),
    )


def _layer_params_spec(model: StreamedModel[PyTree], kind: LayerKind) -> LayerParams:
    """Return the partition specs of the parameters of a layer of this kind."""
    experts: PyTree = split_over(EXPERT if model.slots is None else ALL)
    chosen = ChosenRows(experts, experts)
    return LayerParams(model.stack_specs.get(STACKS[kind]), _SAME, _SAME, experts, chosen)


def _layer_programs(model: StreamedModel[PyTree], layers: LayerFunctions) -> Programs:
    """Return the programs that run one layer, by their names in `StepPrograms`."""
    make, same, split = partial(jit_over_mesh, model), _SAME, _SPLIT
    layer, work, forward, inputs = _layer_specs()
    dense = _layer_params_spec(model, "dense")
    moe = _layer_params_spec(model, next(iter(model.modules.experts)))
    return {
        "dense_forward": make(
            *(layers.dense_forward, dense, layer, split, work),
            out=forward,
            static=["saves_residuals"],
        ),
        "route": make(
            *(layers.route, moe, layer, split, work),
            out=(split, split, same),
            static=["kind", "train", "full_capacity", "saves_residuals"],
        ),
        "apply_experts": make(
            *(layers.apply_experts, moe, split, layer, work),
            out=forward,
            static=["kind", "saves_residuals"],
        ),
        "moe_gradients": make(
            *(layers.moe_gradients, moe, layer, inputs, split, work),
            out=(*forward, split, split),
            static=["kind", "full_capacity", "is_last_micro_batch"],
            donate=3,
        ),
        "dense_gradients": make(
            *(layers.dense_gradients, dense, layer, inputs, split, work), out=forward, donate=3
        ),
        "reduce_pending": make(layers.reduce_pending, split, out=split, static=["number"]),
    }


def _programs_outside_layers(model: StreamedModel[PyTree], layers: LayerFunctions) -> Programs:
    """Return the programs that run no layer, by their names in `StepPrograms`."""
    make, step, same, split = (
        partial(jit_over_mesh, model),
        _StepFunctions(model, layers),
        _SAME,
        _SPLIT,
    )
    outside, micro_batch = model.outside_spec, model.micro_batch_spec
    state = model.sharded.state_specs.map_params_and_moments(without_experts)
    results = FinishStepInputs(split, split, split, split, same)
    return {
        "gather_first_params": make(
            *(model.gather_first_params, without_experts(model.sharded.specs)),
            out=FirstGatheredParams(outside, same, _COLUMNS, same),
            static=["first_kind"],
        ),
        "embed": make(model.embed, outside, micro_batch, out=split),
        "max_chosen_experts_per_device": make(step.max_chosen_experts_per_device, split, out=same),
        "routing_totals": make(step.routing_totals, split, out=same),
        "dropped_assignments": make(step.dropped_assignments, split, out=same),
        "zero_gradients": make(step.zero_gradients, model.stack_specs, outside, out=split),
        "loss_gradients": make(
            step.loss_gradients, outside, split, micro_batch, split, same, out=split, donate=3
        ),
        "embed_gradients": make(
            step.embed_gradients, outside, micro_batch, split, split, split, out=split, donate=3
        ),
        "finish_step": make(step.finish_step, state, results, out=(state, same), donate=0),
    }


def make_step_programs(model: StreamedModel[PyTree]) -> StepPrograms:
    """Return the programs of a model's step. Each compiles at its first call."""
    layers = LayerFunctions(model)
    return StepPrograms(**_layer_programs(model, layers), **_programs_outside_layers(model, layers))
