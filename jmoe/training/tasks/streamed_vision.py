"""A training step on images with experts on several tiers: the host runs layer by layer, as `streamed/step.py` does.

Legend: M micro-batches, P experts of this process, K classes of all tasks, C features of all embeddings, A tasks.

Layers go forward and back, each for all micro-batches of the layout at once, so that its experts are fetched once a
pass. Embeddings that are compared come from the same forward pass. Dense parameters are gathered once a step.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jmoe.config import LayerKind, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import RouterBias
from jmoe.models.vision import STACK_OF, VisionTransformer
from jmoe.offload.expert_index import SlottedExperts
from jmoe.offload.expert_state import ExpertArrays, ReadExperts
from jmoe.offload.saved_experts import expert_layers
from jmoe.planning.elastic import Layout
from jmoe.training.state import TrainState, without_experts
from jmoe.training.streamed.experts import StreamedExperts
from jmoe.training.tasks.experts import task_slots
from jmoe.training.tasks.layouts import notes_of, tiers_line
from jmoe.training.tasks.losses import Contrast, Metrics, TaskLosses
from jmoe.training.tasks.step import ShardedVision, active_tasks, ended_experts, paths_of
from jmoe.training.tasks.streamed_vision_programs import (
    Choices,
    LayerSums,
    VisionLayer,
    VisionLayerPrograms,
    VisionStepResults,
    outside_of,
)
from jmoe.training.update import without_drops


@dataclass(frozen=True)
class _ImageLayer:
    """A layer's kind, its stack, its number there, and that of its records; -1: it has no experts."""

    kind: LayerKind
    stack: str
    number: int
    records: int


@dataclass
class _PassedImages:
    """A layer on the way forward, for the way back: of each micro-batch its inputs and its tokens' experts."""

    xs: list[jax.Array]
    choices: list[Choices] = field(default_factory=list)
    chosen_P: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


@dataclass
class _ImagePass:
    """A pass over the layers on its way. choices: of each micro-batch, in each layer routed by task."""

    state: TrainState
    gathered: Any
    parts: list[ImageBatch]
    choices: list[Sequence[Choices]]
    train: bool
    full_capacity: bool
    passed: list[_PassedImages] = field(default_factory=list)
    stats: list[list[MoEStats]] = field(default_factory=list)

    @property
    def outside(self) -> Any:
        """Return what is outside the layers."""
        return outside_of(self.gathered)


@dataclass
class _WayBack:
    """State of the backward pass: gradients of each micro-batch's hidden states, and sums of those of parameters.

    squares: of each layer's experts' gradients, by stack. dweights: gradients of the weights of each micro-batch's
    choices, in each layer routed by task, where paths are learned.
    """

    dxs: list[jax.Array]
    sums: Any
    squares: dict[str, list[jax.Array]]
    dweights: list[list[jax.Array]]


class StreamedVisionTrainer(StreamedExperts):
    """The `ImageTrainer` of runs whose experts lie on several tiers; its state is of everything but the experts.

    A device has places for the experts of `tiers.device_layers` layers: for those that the tasks name that it runs, or,
    where these may change or tokens choose experts too (`may_lie_apart`), for all of a layer. before: a trainer of the
    run in another layout on the same mesh, whose experts this one goes on with.
    """

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        mesh: Mesh,
        layout: Layout,
        run: str = "run",
        before: Self | None = None,
    ) -> None:
        self.config, self.layout, self._run = config, layout, run
        self.slots = slots = task_slots(config, layout)
        self.model = model = ShardedVision(config, num_classes, mesh, slots)
        self.losses = TaskLosses(config, num_classes, mesh.size, active_tasks(config, layout))
        self.compares = self.losses.compares
        everywhere = (tuple(range(mesh.size)),) * len(config.tasks)
        self.homes = everywhere if slots is None else slots.homes  # devices that can evaluate each task
        self.programs = VisionLayerPrograms(config, model, self.losses, equal=len(set(layout.images)) == 1)
        kinds, records = config.model.layer_kinds, expert_layers(config.model.layer_kinds)
        self._layers = []
        for i, kind in enumerate(kinds):
            stack, number = STACK_OF[kind], kinds[:i].count(kind)
            self._layers.append(
                _ImageLayer(kind, stack, number, records.index((stack, number)) if kind != "dense" else -1)
            )
        self._record_layers = records
        self.full_shape = model.saved_shape
        self.saved_shape = self.full_shape.map(without_experts)
        # as many hidden states as a training step keeps of its layers' inputs
        micro_batches = max(layout.images) * config.gradient_accumulation_steps // layout.micro_batch
        self.evaluation_batches = len(self._layers) * micro_batches
        if before is None:
            slotted = None if slots is None else SlottedExperts.on(mesh, slots.slot_RNE, slots.num_slots)
            super().__init__(config, mesh, self.programs.expert_shapes, run, slotted)
        else:
            self._take_over(before)
            self._freeze()

    @property
    def notes(self) -> list[str]:
        """The layout, where devices differ, and where the experts are."""
        return [*notes_of(self.config, self.layout), tiers_line(self.config), self.stores.note]

    def in_layout(self, mesh: Mesh, layout: Layout) -> Self:
        """Return the trainer of the run in another layout; its state stays where it is."""
        assert mesh is self.mesh and self.slots is None, "experts on tiers stay with their devices"
        return type(self)(self.config, self.model.num_classes, mesh, layout, self._run, before=self)

    # State

    def init(self) -> TrainState:
        """Draw step 0, with the parameters of `VisionTrainer`; experts are drawn one layer at a time."""
        seed, model = self.config.seed, self.config.model
        small = replace(model, moe_intermediate_size=1)  # what else is drawn does not depend on their size
        paths = [task.path for task in self.config.tasks.values()]
        tasks = self.config.tasks
        sizes = {name: tasks[name].head_size(count) for name, count in self.model.num_classes.items()}

        def rest() -> TrainState:
            split: Any = nnx.split(VisionTransformer(small, sizes, paths, rngs=nnx.Rngs(seed)), nnx.Param, RouterBias)
            return TrainState.at_step_0(without_experts(nnx.to_pure_dict(split[1])), nnx.to_pure_dict(split[2]))

        places = jax.tree.map(lambda s: s.sharding, self.saved_shape)
        state: TrainState = jax.jit(rest, out_shardings=places)()

        def drawn(layer: jax.Array, *, kind: LayerKind) -> Any:
            return nnx.to_pure_dict(nnx.state(VisionTransformer.experts_of(model, kind, layer, nnx.Rngs(seed))))

        draw, kind_of = jax.jit(drawn, static_argnames="kind"), {stack: kind for kind, stack in STACK_OF.items()}

        def weights(layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
            stack, number = self._record_layers[layer]
            return {name: np.asarray(w)[experts] for name, w in draw(jnp.int32(number), kind=kind_of[stack]).items()}

        self._open(self.stores.up_to_date(0), weights, lambda layer, experts: {})
        return state

    def save_state(self, state: TrainState) -> TrainState:
        """Return what a checkpoint holds besides records, see `StreamedTrainer.save_state`."""
        with self._opened.guard():
            self.stores.save(self._opened)
            return state

    def load_state(
        self, saved: TrainState, weights: ReadExperts | None = None, moments: ReadExperts | None = None
    ) -> TrainState:
        """Return the state; experts go to their tiers layer by layer. None: they are there already."""
        self._load(int(saved.step), weights, moments)
        self._freeze()
        return saved

    def _freeze(self) -> None:
        """Keep experts as they are that only tasks name which have ended."""
        ends_NE = ended_experts(self.config, self.losses.active)
        if self.experts is None or not ends_NE.any():
            return
        records = [
            self.experts.index.records(layer, np.flatnonzero(ends_NE[number]))
            for layer, (stack, number) in enumerate(self._record_layers)
            if stack == STACK_OF["task"]
        ]
        self.experts.freeze(np.concatenate(records))

    # Passes

    def step(
        self, state: TrainState, batch: ImageBatch, full_capacity: bool = False
    ) -> tuple[TrainState, dict[str, Any]]:
        """Take one step; where a buffer overflowed there are no metrics but `overflow` and `ok`."""
        with self._opened.guard():
            return self._step(state, batch, full_capacity)

    def _step(self, state: TrainState, batch: ImageBatch, full_capacity: bool) -> tuple[TrainState, dict[str, Any]]:
        programs, experts = self.programs, self._opened
        down = list(range(len(self._record_layers)))
        experts.begin(down + down[::-1])
        run = self._begun(state, self._done(programs.split(batch)), train=True, full_capacity=full_capacity)
        xs = self._forward(run)
        dropless = self.config.model.capacity_factor is None and bool(run.stats)
        if dropless and int(self._done(programs.dropped(run.stats))) > 0:
            experts.stop()
            return state, {"overflow": jnp.bool_(True), "ok": jnp.bool_(False)}
        sums = self._done(programs.zeros(run.gathered))
        outside, metrics, dxs = outside_of(sums), list[Metrics](), list[jax.Array]()
        for x, part, contrast in zip(xs, run.parts, self._contrasts(run, xs), strict=True):
            values, dx, outside = self._done(programs.loss_gradients(run.outside, x, part, contrast, outside))
            metrics.append(values)
            dxs.append(dx)
        squares = {stack: list[jax.Array]() for stack, _ in self._record_layers}
        back = _WayBack(dxs, sums, squares, [[] for _ in dxs])
        self._backward(run, back)
        for m, (part, dx) in enumerate(zip(run.parts, dxs, strict=True)):
            if self.config.model.learn_paths:
                args = run.outside, state.step, part.task, back.dweights[m], outside
                outside = self._done(programs.choice_gradients(*args))
            outside = self._done(programs.embed_gradients(run.outside, part, dx, outside))
        results = VisionStepResults(back.sums | outside, squares, metrics, run.stats)
        state, finished = self._done(programs.finish(state, results))
        self._end_step(finished)
        return state, finished

    def _begun(self, state: TrainState, parts: list[ImageBatch], *, train: bool, full_capacity: bool) -> _ImagePass:
        """Return a pass over micro-batches that has not run a layer."""
        gathered = self._done(self.programs.gather(state.params))
        outside = outside_of(gathered)
        choices = [self._done(self.programs.choices(outside, state.step, part.task, train=train)) for part in parts]
        return _ImagePass(state, gathered, parts, choices, train, full_capacity)

    def _contrasts(self, run: _ImagePass, xs: Sequence[jax.Array]) -> list[Contrast] | list[None]:
        """Return what comparing all images of the step says of each micro-batch; None if no task does that."""
        tasks = list(self.config.tasks)
        if not any(self.compares[tasks.index(name)] for name in self.losses.active):
            return [None] * len(xs)
        each = [
            self._done(self.programs.embeddings(run.outside, x, part)) for x, part in zip(xs, run.parts, strict=True)
        ]
        contrasts: list[Contrast] = self._done(self.programs.compare(each, run.parts))
        return contrasts

    def _layer_inputs(self, run: _ImagePass, layer: _ImageLayer, m: int) -> VisionLayer:
        """Return what the layer's program is given beside a micro-batch's inputs."""
        bias = run.state.router_bias if layer.kind == "moe" else ()
        return VisionLayer(run.gathered[layer.stack], jnp.int32(layer.number), run.parts[m].weight, bias)

    def _forward(self, run: _ImagePass) -> list[jax.Array]:
        """Return hidden states of each micro-batch."""
        programs = self.programs
        xs = [self._done(programs.embed(run.outside, part)) for part in run.parts]
        for layer in self._layers:
            if not run.train:
                run.passed.clear()  # there is no way back
            run.passed.append(_PassedImages(xs))
            if layer.kind == "dense":
                xs = [self._done(programs.dense(self._layer_inputs(run, layer, m), x)) for m, x in enumerate(xs)]
            else:
                xs = self._forward_experts(run, layer, xs)
        return xs

    def _forward_experts(self, run: _ImagePass, layer: _ImageLayer, xs: Sequence[jax.Array]) -> list[jax.Array]:
        programs, passed, options = self.programs, run.passed[-1], {"kind": layer.kind}
        inputs = [self._layer_inputs(run, layer, m) for m in range(len(xs))]
        named: list[Choices] = [made[layer.number] if layer.kind == "task" else {} for made in run.choices]
        how = {**options, "train": run.train, "full_capacity": run.full_capacity}
        routed = [self._done(programs.route(*args, **how)) for args in zip(inputs, xs, named, strict=True)]
        if layer.kind == "moe":
            run.stats.append([tokens.stats for tokens in routed])
            named = [{"topk_idx_TK": tokens.topk_idx_TK} for tokens in routed]
        passed.choices, passed.chosen_P = named, self._chosen([tokens.arrived_E for tokens in routed])
        experts = self._joined(self._opened.fetch(layer.records, passed.chosen_P))
        ys = [
            self._done(programs.add_experts(of._replace(experts=experts), tokens, **options))
            for of, tokens in zip(inputs, routed, strict=True)
        ]
        jax.block_until_ready(ys)  # the slot may change then
        self._opened.release()
        return ys

    def _backward(self, run: _ImagePass, back: _WayBack) -> None:
        """Run all layers backwards."""
        for layer in reversed(self._layers):
            passed = run.passed.pop()
            if layer.kind == "dense":
                for m, x in enumerate(passed.xs):
                    args = self._layer_inputs(run, layer, m), x, back.dxs[m], back.sums[layer.stack]
                    back.dxs[m], back.sums[layer.stack] = self._done(self.programs.dense_gradients(*args))
            else:
                self._backward_experts(run, layer, passed, back)
        for of_stack in (*back.squares.values(), *back.dweights):
            of_stack.reverse()

    def _backward_experts(self, run: _ImagePass, layer: _ImageLayer, passed: _PassedImages, back: _WayBack) -> None:
        """Run one layer backwards, whose experts' gradients go to their tier."""
        experts = self._joined(self._opened.fetch(layer.records, passed.chosen_P))
        sums, square = LayerSums(back.sums[layer.stack]), None
        for m, (x, choices) in enumerate(zip(passed.xs, passed.choices, strict=True)):
            args = self._layer_inputs(run, layer, m)._replace(experts=experts), (x, back.dxs[m]), choices, sums
            last = self.slots is None and m == len(passed.xs) - 1
            options = {"kind": layer.kind, "full_capacity": run.full_capacity, "last": last}
            back.dxs[m], dweights, sums, square = self._done(self.programs.expert_gradients(*args, **options))
            if dweights is not None:
                back.dweights[m].append(dweights)
        jax.block_until_ready(back.dxs)
        del experts, args  # the slot may change now
        self._opened.release()
        if self.slots is not None:
            reduced, square = self._done(self.programs.reduce_experts(sums.experts, number=layer.number))
            sums = sums._replace(experts=reduced)
        assert square is not None and sums.experts is not None
        back.sums[layer.stack] = sums.stack
        back.squares[layer.stack].append(square)
        self._keep(layer.records, passed.chosen_P, sums.experts)

    # Without gradients

    def _hidden(self, state: TrainState, batches: Sequence[ImageBatch]) -> Iterator[tuple[Any, jax.Array, ImageBatch]]:
        """Yield (what is outside the layers, the last hidden states, the images) of each batch of one micro-batch.

        Experts are fetched once for all of them.
        """
        parts = [part for batch in batches for part in self._done(self.programs.split(batch))]

        def forward(*, full_capacity: bool) -> tuple[tuple[Any, list[jax.Array]], jax.Array]:
            self._opened.begin(range(len(self._record_layers)))
            run = self._begun(state, parts, train=False, full_capacity=full_capacity)
            xs = self._forward(run)
            return (run.outside, xs), self._done(self.programs.dropped(run.stats)) if run.stats else jnp.int32(0)

        with self._opened.guard():
            outside, xs = without_drops(forward)
        for x_BSD, part in zip(xs, parts, strict=True):
            yield outside, x_BSD, part

    def class_means(self, state: TrainState, batches: Iterable[Any]) -> jax.Array:
        """Return [K, C], see `VisionTrainer.class_means`."""
        sums, rest = np.zeros(self.losses.class_means_shape, np.float32), iter(batches)
        while some := list(itertools.islice(rest, self.evaluation_batches)):
            for args in self._hidden(state, some):
                sums += np.asarray(self._done(self.programs.class_sums(*args)))
        return jnp.asarray(sums)

    def evaluate(
        self, state: TrainState, batches: Sequence[Any], class_means: jax.Array | None = None
    ) -> list[jax.Array]:
        """Return float32 [3, A] of each batch, see `VisionTrainer.evaluate`."""
        means = self.class_means(state, []) if class_means is None else class_means
        return [jax.block_until_ready(self.programs.evaluation(*args, means)) for args in self._hidden(state, batches)]

    def paths(self, state: TrainState) -> dict[str, tuple[int, ...]]:
        """Return the expert that each task takes in each layer routed by task, as learned or as given."""
        return paths_of(self.config, state, self.mesh)
