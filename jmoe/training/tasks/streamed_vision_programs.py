"""A training step on images in parts, compiled each for itself, for a host that runs layer by layer.

Legend: M micro-batches, B images of one, S patches of an image, T = B S tokens, D hidden, C features of all embeddings,
K classes of all tasks, E experts, L experts of a device, N layers of a kind, R devices.

On several devices a program is one `shard_map` over all of them. What differs between devices and has no dimension of
images or experts has a leading one of R. All devices run as many micro-batches; one whose share has fewer images than
others' skips what it has no images for, and waits in reductions only. A layer's backward pass runs the layer again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import LayerKind, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch
from jmoe.layers.moe import MoEStats
from jmoe.mesh import ALL, BATCH, DATA, EXPERT, EXPERTS_PATH, REPLICATED, STACK_PATHS, split_over
from jmoe.models.block import Block, causal
from jmoe.models.functional import FunctionalModule
from jmoe.models.vision import STACK_OF
from jmoe.training.fused.reverse_scan import layer_of
from jmoe.training.gradient_reduction import reduce_gradients_local, squared_norms_local
from jmoe.training.state import TrainState, without_experts
from jmoe.training.streamed.programs import ExpertStacks, RoutedTokens, compiled_on, gradients_to_keep, routed_tokens
from jmoe.training.tasks.losses import Contrast, Metrics, TaskLosses
from jmoe.training.tasks.step import ShardedVision, draw_of, with_ended
from jmoe.training.update import finish_step, over_devices

Choices = Mapping[str, jax.Array]  # of every token, as `Block.route` takes them


class VisionLayer(NamedTuple):
    """Parameters of a layer's program, which it takes beside its inputs."""

    stack: Any  # parameters of all layers of its kind, gathered; but the experts'
    number: jax.Array  # which of them, int32
    weight_B: jax.Array  # of the images: 0 where a device has none
    router_bias: Any = ()
    experts: ExpertStacks | None = None  # this layer's; those that its tokens did not choose may be anything finite


class LayerSums(NamedTuple):
    """Gradients of a layer, summed over micro-batches; stack: of all layers of its kind, [R, N, ...]."""

    stack: Any
    experts: ExpertStacks | None = None  # None before the first micro-batch


class VisionStepResults(NamedTuple):
    """The values that the parts of a step hand to its end."""

    grads: Any  # of all that was gathered, [R, ...]
    expert_squares: Mapping[str, Sequence[jax.Array]]  # of each layer's experts' gradients, by stack, [R]
    metrics: Sequence[Metrics]  # of each micro-batch, [R]
    stats: Sequence[Sequence[MoEStats]]  # [N][M], of layers whose experts tokens choose


def outside_of(gathered: Any) -> Any:
    """Return the parameters that are outside the layers."""
    return {name: tree for name, tree in gathered.items() if name not in STACK_PATHS}


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


class VisionLayerPrograms:
    """The compiled functions of one run on images, each for all layers of a kind.

    A layer with experts is cut in two on its way forward, once its tokens are where their experts are. equal: all
    devices have as many images. Gradients are summed into what is given, which is donated.
    """

    def __init__(self, config: VisionTrainConfig, model: ShardedVision, losses: TaskLosses, *, equal: bool) -> None:
        self.config, self._model, self._losses, self._equal = config, model, losses, equal
        self.mesh, self.dtype, self._slots = model.mesh, model.dtype, model.slots
        self._replicas = model.mesh.shape[DATA] if self._slots is None else 1
        vision: Any = nnx.eval_shape(model.build)
        self._blocks: dict[LayerKind, FunctionalModule] = {}
        self._experts: dict[LayerKind, FunctionalModule] = {}
        for kind, stack in STACK_OF.items():
            layers = getattr(vision, stack)
            if layers is None:
                continue
            if kind != "dense":
                self._experts[kind] = FunctionalModule(layers.moe.experts)
                del layers.moe.experts
            self._blocks[kind] = FunctionalModule(layers)
            setattr(vision, stack, None)
        self._outside = FunctionalModule(vision)
        shapes = next(iter(self._experts.values())).params
        self.expert_shapes = {name: tuple(w.shape[2:]) for name, w in shapes.items()}
        self._compile()

    def _compile(self) -> None:
        specs, make = without_experts(self._model.specs), partial(compiled_on, self.mesh)
        replicated: Any = REPLICATED
        split: Any = BATCH  # of what differs between devices
        experts: Any = split_over(EXPERT if self._slots is None else ALL)
        layer = VisionLayer(replicated, replicated, split, replicated, experts)
        state = self._model.state_specs.map(without_experts)
        kind_of_pass = ["kind", "train", "full_capacity"]
        self.split = make(self._split, split, out=split)
        self.gather = make(self._model.gather_all, specs, out=replicated)
        self.embed = make(self._embed, replicated, split, out=split)
        self.choices = make(self._choices, replicated, replicated, split, out=split, static=["train"])
        self.dense = make(self._dense, layer, split, out=split)
        self.route = make(self._route, layer, split, split, out=split, static=kind_of_pass)
        self.add_experts = make(self._add_experts, layer, split, out=split, static=["kind"])
        self.dropped = make(self._dropped, split, out=replicated)
        self.embeddings = make(self._embeddings, replicated, split, split, out=split)
        self.compare = make(self._compare, split, split, out=split)
        self.zeros = make(self._zeros, replicated, out=split)
        self.loss_gradients = make(self._loss_gradients, replicated, split, split, split, split, out=split, donate=4)
        self.dense_gradients = make(self._dense_gradients, layer, split, split, split, out=split, donate=3)
        self.expert_gradients = make(
            self._expert_gradients,
            *(layer, split, split, split),
            out=split,
            static=["kind", "full_capacity", "last"],
            donate=3,
        )
        self.reduce_experts = make(self._reduce_experts, experts, out=split, static=["number"])
        self.choice_gradients = make(
            self._choice_gradients, replicated, replicated, split, split, split, out=split, donate=4
        )
        self.embed_gradients = make(self._embed_gradients, replicated, split, split, split, out=split, donate=3)
        results = VisionStepResults(split, split, split, split)
        self.finish = make(self._finish, state, results, out=(state, replicated), donate=0)
        self.class_sums = make(self._class_sums, replicated, split, split, out=replicated)
        self.evaluation = make(self._evaluation, replicated, split, split, replicated, out=replicated)

    def _when_any(self, weight_B: jax.Array, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns; zeros where this device has no images."""
        if self._equal:
            return function(*args)
        nothing = _zeros_like(jax.eval_shape(function, *args))
        return lax.cond(weight_B[0] > 0, function, lambda *_: nothing, *args)

    # Forward

    def _split(self, batch: ImageBatch) -> list[ImageBatch]:
        """Return this device's micro-batches."""
        return [jax.tree.map(lambda a, m=m: a[0, m], batch) for m in range(batch.label.shape[1])]

    def _embed(self, outside: Any, part: ImageBatch) -> jax.Array:
        x_BSD: jax.Array = self._outside(outside).embed(part.pixels.astype(jnp.float32) / 255.0, self.dtype)
        return x_BSD

    def _choices(self, outside: Any, step: jax.Array, task_B: jax.Array, *, train: bool) -> list[Choices]:
        """Return the experts of every token in each layer routed by task."""
        module, draw = self._outside(outside), draw_of(self.config, step) if train else None
        slot_NE = None if self._slots is None else self._slots.slots_local()
        layers = range(len(self.config.model.task_layers))
        return [module.choices(layer, task_B, draw, slot_NE) for layer in layers]

    def _dense(self, layer: VisionLayer, x_BSD: jax.Array) -> jax.Array:
        params = layer_of(layer.stack, layer.number)
        y_BSD: jax.Array = self._when_any(layer.weight_B, self._run_dense, params, x_BSD)
        return y_BSD

    def _run_dense(self, params: Any, x_BSD: jax.Array) -> jax.Array:
        block: Block = self._blocks["dense"](params)
        return block.dense(x_BSD, causal(), self.dtype)

    def _route(
        self,
        layer: VisionLayer,
        x_BSD: jax.Array,
        choices: Choices,
        *,
        kind: LayerKind,
        train: bool,
        full_capacity: bool,
    ) -> RoutedTokens:
        """Run a layer until its tokens are where their experts are."""
        function = partial(self._run_route, kind=kind, train=train, full_capacity=full_capacity)
        args = layer_of((layer.stack, layer.router_bias), layer.number)
        routed: RoutedTokens = self._when_any(layer.weight_B, function, *args, x_BSD, choices)
        # What one replica needs, or one device with the expert in a slot, all of them fetch, and so bring it up to date
        # in the same steps.
        if self._slots is not None:
            return routed._replace(arrived_E=self._slots.over_experts_local(routed.arrived_E, layer.number))
        if self._replicas > 1:
            routed = routed._replace(arrived_E=lax.psum(routed.arrived_E, DATA))
        return routed

    def _run_route(
        self,
        params: Any,
        bias: Any,
        x_BSD: jax.Array,
        choices: Choices,
        *,
        kind: LayerKind,
        train: bool,
        full_capacity: bool,
    ) -> RoutedTokens:
        block: Block = self._blocks[kind](params, bias)
        x_BSD = block.attend(x_BSD, causal(), self.dtype)
        h_TD, routing = block.route(x_BSD, self.dtype, train=train, **choices)
        # How many images go to an expert of a task is no surprise: there is room for all of them.
        dispatched = block.dispatch(h_TD, routing, full_capacity=full_capacity or kind == "task")
        return routed_tokens(x_BSD, h_TD, routing, dispatched)

    def _add_experts(self, layer: VisionLayer, routed: RoutedTokens, *, kind: LayerKind) -> jax.Array:
        args = layer_of(layer.stack, layer.number), layer.experts, routed
        y_BSD: jax.Array = self._when_any(layer.weight_B, partial(self._run_experts, kind=kind), *args)
        return y_BSD

    def _run_experts(self, params: Any, experts: ExpertStacks, routed: RoutedTokens, *, kind: LayerKind) -> jax.Array:
        module = self._blocks[kind]
        bias = jax.tree.map(lambda b: jnp.zeros(b.shape[1:], b.dtype), module.bias)  # it has done its work
        block: Block = module(params, bias)
        assert block.moe is not None
        block.moe.experts = self._experts[kind](self._model.cast({EXPERTS_PATH: experts})[EXPERTS_PATH])
        return block.apply_experts(routed.x_BSD, routed.h_TD, routed.dispatched)

    def _dropped(self, stats: Sequence[Sequence[MoEStats]]) -> jax.Array:
        """Return how many assignments of all devices found no row."""
        dropped = jnp.stack([s.dropped[0] for layer in stats for s in layer])
        total: jax.Array = over_devices(self.mesh.size, dropped.sum(dtype=jnp.int32))
        return total

    def _logits(self, outside: Any, x_BSD: jax.Array, task_B: jax.Array) -> jax.Array:
        module = self._outside(outside)
        logits_BY: jax.Array = module.logits(module.norm(x_BSD, self.dtype), task_B)
        return logits_BY

    def _embeddings(self, outside: Any, x_BSD: jax.Array, part: ImageBatch) -> jax.Array:
        return self._losses.embeddings(self._logits(outside, x_BSD, part.task))

    def _compare(self, z_BC: Sequence[jax.Array], parts: Sequence[ImageBatch]) -> list[Contrast]:
        """Return what comparing all images of the step says of each micro-batch."""
        contrast = self._losses.compared(jnp.stack(z_BC), jax.tree.map(lambda *a: jnp.stack(a), *parts))
        return [jax.tree.map(lambda a, m=m: a[m], contrast) for m in range(len(parts))]

    def _class_sums(self, outside: Any, x_BSD: jax.Array, part: ImageBatch) -> jax.Array:
        sums_KC: jax.Array = over_devices(
            self.mesh.size, self._losses.class_sums(self._logits(outside, x_BSD, part.task), part)
        )
        return sums_KC

    def _evaluation(self, outside: Any, x_BSD: jax.Array, part: ImageBatch, means_KC: jax.Array) -> jax.Array:
        values = self._losses.evaluation(self._logits(outside, x_BSD, part.task), part, means_KC)
        total: jax.Array = over_devices(self.mesh.size, values)
        return total

    # Backward

    def _zeros(self, gathered: Any) -> Any:
        return jax.tree.map(lambda w: jnp.zeros((1, *w.shape), jnp.float32), gathered)

    def _added(self, sums: Any, new: Any) -> Any:
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32)[None], sums, new)

    def _added_to_layer(self, sums: Any, number: jax.Array, new: Any) -> Any:
        return jax.tree.map(lambda total, g: total.at[0, number].add(g.astype(jnp.float32)), sums, new)

    def _loss_gradients(
        self, outside: Any, x_BSD: jax.Array, part: ImageBatch, contrast: Contrast | None, sums: Any
    ) -> tuple[Metrics, jax.Array, Any]:
        """Return (this device's part of the losses and accuracies, dx, summed gradients of what is outside)."""

        def loss(outside: Any, x_BSD: jax.Array) -> tuple[jax.Array, Metrics]:
            return self._losses.loss(self._logits(outside, x_BSD, part.task), part, contrast)

        (doutside, dx_BSD), metrics = jax.grad(loss, argnums=(0, 1), has_aux=True)(outside, x_BSD)
        return jax.tree.map(lambda a: a[None], metrics), dx_BSD, self._added(sums, doutside)

    def _dense_gradients(
        self, layer: VisionLayer, x_BSD: jax.Array, dy_BSD: jax.Array, sums: Any
    ) -> tuple[jax.Array, Any]:
        def again(params: Any, x_BSD: jax.Array, dy_BSD: jax.Array) -> Any:
            return jax.vjp(self._run_dense, params, x_BSD)[1](dy_BSD)

        args = layer_of(layer.stack, layer.number), x_BSD, dy_BSD
        dparams, dx_BSD = self._when_any(layer.weight_B, again, *args)
        return dx_BSD, self._added_to_layer(sums, layer.number, dparams)

    def _expert_gradients(
        self,
        layer: VisionLayer,
        x_dy: tuple[jax.Array, jax.Array],
        choices: Choices,
        sums: LayerSums,
        *,
        kind: LayerKind,
        full_capacity: bool,
        last: bool,
    ) -> tuple[jax.Array, jax.Array | None, LayerSums, jax.Array | None]:
        """Return (dx, that of the choices' weights if they have one, summed gradients, square of the experts').

        choices: those that were made. last: no micro-batch follows, so the experts' gradients are as they are to be
        kept, and their square is known.
        """
        params, bias = layer_of((layer.stack, layer.router_bias), layer.number)
        options: dict[str, Any] = {"kind": kind, "train": True, "full_capacity": full_capacity}

        def again(x_BSD: jax.Array, dy_BSD: jax.Array, experts: ExpertStacks, choices: Choices) -> Any:
            def run(params: Any, experts: ExpertStacks, x_BSD: jax.Array, weights_TK: jax.Array | None) -> Any:
                made = {"topk_idx_TK": choices["topk_idx_TK"]}
                made |= {} if weights_TK is None else {"topk_weights_TK": weights_TK}
                routed = self._run_route(params, bias, x_BSD, made, **options)
                z_sum = routed.stats.z_sum
                z = self._losses.z_loss(z_sum) if kind == "moe" else jnp.zeros((), jnp.float32)
                return self._run_experts(params, experts, routed, kind=kind), z

            _, pull = jax.vjp(run, params, experts, x_BSD, choices.get("topk_weights_TK"))
            return pull((dy_BSD, jnp.ones((), jnp.float32)))

        args = *x_dy, layer.experts, choices
        dparams, dexperts, dx_BSD, dweights_TK = self._when_any(layer.weight_B, again, *args)
        if sums.experts is not None:
            dexperts = jax.tree.map(jnp.add, sums.experts, dexperts)
        square = None
        if last:
            if self._replicas > 1:
                dexperts = lax.psum(dexperts, DATA)
            dexperts, squares = gradients_to_keep(dexperts, self.config.tiers.gradient_dtype)
            square = squares.sum()[None]
        stack = self._added_to_layer(sums.stack, layer.number, dparams)
        return dx_BSD, dweights_TK, LayerSums(stack, dexperts), square

    def _reduce_experts(self, experts: ExpertStacks, *, number: int) -> tuple[ExpertStacks, jax.Array]:
        """Return (gradients of a layer's experts in slots as they are to be kept, this device's part of the square)."""
        assert self._slots is not None
        reduced = self._slots.layer_reduced_local(experts, number)
        kept, _ = gradients_to_keep(reduced, self.config.tiers.gradient_dtype)
        owns_S = self._slots.of_device(self._slots.owns_RNS[:, number])
        squares_S = [jnp.square(g).sum(axis=tuple(range(1, g.ndim))) for g in reduced.values()]
        return kept, jnp.where(owns_S, jnp.stack(squares_S).sum(axis=0), 0.0).sum()[None]

    def _choice_gradients(
        self, outside: Any, step: jax.Array, task_B: jax.Array, dweights: Sequence[jax.Array], sums: Any
    ) -> Any:
        """Add the gradients of learned paths, by those of the weights of every layer routed by task."""

        def weights(outside: Any) -> list[jax.Array]:
            return [choices["topk_weights_TK"] for choices in self._choices(outside, step, task_B, train=True)]

        return self._added(sums, jax.vjp(weights, outside)[1](list(dweights))[0])

    def _embed_gradients(self, outside: Any, part: ImageBatch, dx_BSD: jax.Array, sums: Any) -> Any:
        _, pull = jax.vjp(lambda outside: self._embed(outside, part), outside)
        return self._added(sums, pull(dx_BSD)[0])

    # The end of a step

    def _finish(self, state: TrainState, step: VisionStepResults) -> tuple[TrainState, Metrics]:
        """Return (the state after its update, but the experts'; the step's metrics)."""
        metrics = over_devices(self.mesh.size, self._metrics(step))
        gathered, scatter = jax.vjp(self._model.gather_all, state.params)
        (grads,) = scatter(jax.tree.map(lambda g, w: g[0].astype(w.dtype), step.grads, gathered))
        grads = reduce_gradients_local(grads, self._model)
        squares = squared_norms_local(grads, self._model)
        for stack, layers in step.expert_squares.items():
            of_experts = jnp.stack([square[0] for square in layers]) / self._replicas  # which all have it
            squares[stack] = squares[stack] + of_experts
        squares = over_devices(self.mesh.size, squares)
        new, metrics = finish_step(self.config, state, grads, squares, metrics, jnp.bool_(False))
        nothing = jnp.zeros((0, 0), jnp.bool_)  # experts are kept where they are
        return with_ended(self.config, self._losses.active, (state, new), nothing), metrics

    def _metrics(self, step: VisionStepResults) -> Metrics:
        """Return this device's part of the step's losses, and of its routers' statistics."""
        total: Metrics = jax.tree.map(lambda *parts: sum(part[0] for part in parts), *step.metrics)
        if not step.stats:
            return total
        layers = [jax.tree.map(lambda *parts: sum(part[0] for part in parts), *layer) for layer in step.stats]
        stats: MoEStats = jax.tree.map(lambda *values: jnp.stack(values), *layers)
        return total | {
            "balance_loss": jnp.zeros((), jnp.float32),
            "z_loss": self._losses.z_loss(stats.z_sum),
            "counts": stats.counts_E,
            "entropy": stats.entropy_sum / self._losses.step_tokens,
            "dropped": stats.dropped,
        }
