"""The streamed trainer of image tasks. Legend: K classes of all tasks, C features of all
embeddings, A tasks.

Embeddings that are compared come from the same forward pass as everything else.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmoe.config import LayerKind, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch
from jmoe.mesh import BATCH, REPLICATED
from jmoe.models.vision import VisionTransformer
from jmoe.offload.expert_index import SlottedExperts
from jmoe.offload.expert_state import ReadExperts
from jmoe.planning.elastic import Layout
from jmoe.training.state import TrainState
from jmoe.training.streamed.model import Params
from jmoe.training.streamed.programs import compiled_for
from jmoe.training.streamed.runner import Pass, StreamedRunner, first_state
from jmoe.training.tasks.experts import task_slots
from jmoe.training.tasks.layouts import notes_of, tiers_line
from jmoe.training.tasks.losses import Contrast
from jmoe.training.tasks.step import ended_experts, paths_of
from jmoe.training.tasks.streamed_model import StreamedVision, TaskPart, micro_batches


@dataclass(frozen=True)
class _TaskPrograms:
    """The compiled functions of image tasks beside those of every streamed step."""

    split: Callable[[ImageBatch], list[ImageBatch]]
    embeddings: Callable[..., jax.Array]
    compare: Callable[..., list[Contrast]]
    class_sums: Callable[..., jax.Array]
    evaluation: Callable[..., jax.Array]


def _compile_tasks(model: StreamedVision) -> _TaskPrograms:
    make, part = partial(compiled_for, model), model.part_spec
    head = REPLICATED, BATCH, part
    return _TaskPrograms(
        split=make(micro_batches, BATCH, out=BATCH),
        embeddings=make(model.embeddings, *head, out=BATCH),
        compare=make(model.compare, BATCH, BATCH, out=BATCH),
        class_sums=make(model.class_sums, *head, out=REPLICATED),
        evaluation=make(model.evaluation, *head, REPLICATED, out=REPLICATED),
    )


class StreamedVisionTrainer(StreamedRunner[TaskPart]):
    """The `ImageTrainer` of runs whose experts lie on several tiers; see `StreamedRunner`.

    A device has places for the experts of `tiers.device_layers` layers: for those that the tasks
    name that it runs, or, where these may change or tokens choose experts too (`may_lie_apart`),
    for all of a layer. before: a trainer of the run in another layout on the same mesh, whose
    experts this one goes on with.
    """

    config: VisionTrainConfig

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        mesh: Mesh,
        layout: Layout,
        run: str = "run",
        before: Self | None = None,
    ) -> None:
        self.layout, self._run, self.slots = layout, run, (slots := task_slots(config, layout))
        streamed = StreamedVision(config, num_classes, mesh, layout, slots)
        self.model, self.losses, self._tasks = (
            streamed.vision,
            streamed.losses,
            _compile_tasks(streamed),
        )
        self.compares = self.losses.compares
        everywhere = (tuple(range(mesh.size)),) * len(config.tasks)
        # devices that can evaluate each task
        self.homes = everywhere if slots is None else slots.homes
        slotted = (
            None if slots is None else SlottedExperts.on(mesh, slots.slot_RNE, slots.num_slots)
        )
        super().__init__(streamed, run, slotted, before)
        # as many hidden states as a training step keeps of its layers' inputs
        images = max(layout.images) * config.gradient_accumulation_steps
        self.evaluation_batches = len(self._layers) * images // layout.micro_batch
        if before is not None:
            self._freeze()

    @property
    def notes(self) -> list[str]:
        """The layout, where devices differ, and where the experts are."""
        return [*notes_of(self.config, self.layout), tiers_line(self.config), self.stores.note]

    def in_layout(self, mesh: Mesh, layout: Layout) -> Self:
        """Return the trainer of the run in another layout; its state stays where it is."""
        assert mesh is self.mesh and self.slots is None, "experts on tiers stay with their devices"
        args = self.config, self.model.num_classes, mesh, layout, self._run
        return type(self)(*args, before=self)

    # State

    def init(self) -> TrainState:
        """Draw step 0, with the parameters of `VisionTrainer`; experts are drawn one layer at a
        time.
        """
        # no other draw depends on the size of experts
        config, small = self.config, replace(self.config.model, moe_intermediate_size=1)
        tasks, counts = config.tasks, self.model.num_classes
        paths = [task.path for task in tasks.values()]
        sizes = {name: tasks[name].head_size(count) for name, count in counts.items()}

        def rest() -> TrainState:
            return first_state(VisionTransformer(small, sizes, paths, rngs=nnx.Rngs(config.seed)))

        places = jax.tree.map(lambda s: s.sharding, self.saved_shape)
        state: TrainState = jax.jit(rest, out_shardings=places)()
        self._draw_experts()
        return state

    def _experts_drawn(self, kind: LayerKind, number: jax.Array) -> nnx.Module:
        config = self.config
        return VisionTransformer.experts_of(config.model, kind, number, nnx.Rngs(config.seed))

    def save_state(self, state: TrainState) -> TrainState:
        """Return what a checkpoint holds besides records, see `StreamedTrainer.save_state`."""
        with self._opened.guard():
            self.stores.save(self._opened)
            return state

    def load_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the state; experts go to their tiers layer by layer. None: they are there
        already.
        """
        self._load(int(saved.step), weights, moments)
        self._freeze()
        return saved

    def _freeze(self) -> None:
        """Keep experts as they are that only tasks name which have ended."""
        ends_NE = ended_experts(self.config, self.losses.active)
        if self.experts is None or not ends_NE.any():
            return
        records = [
            self.experts.index.records(layer.record, np.flatnonzero(ends_NE[layer.number]))
            for layer in self._record_layers
            if layer.kind == "task"
        ]
        self.experts.freeze(np.concatenate(records))

    # Passes

    def _parts(self, state: TrainState, batch: ImageBatch) -> list[TaskPart]:
        return [TaskPart(images, state.step) for images in self._done(self._tasks.split(batch))]

    def _loss_gradients(
        self, run: Pass[TaskPart], xs: list[jax.Array], sums: Params
    ) -> tuple[list[Any], Params]:
        """Compare the images of tasks that do that; then see `StreamedRunner`."""
        tasks = list(self.config.tasks)
        if any(self.compares[tasks.index(name)] for name in self.losses.active):
            each = zip(xs, run.parts, strict=True)
            z = [self._done(self._tasks.embeddings(run.outside, x, part)) for x, part in each]
            contrasts = self._done(self._tasks.compare(z, [part.images for part in run.parts]))
            pairs = zip(run.parts, contrasts, strict=True)
            run.parts = [part._replace(contrast=contrast) for part, contrast in pairs]
        return super()._loss_gradients(run, xs, sums)

    def _last_hidden(
        self, state: TrainState, batches: Sequence[ImageBatch]
    ) -> Iterator[tuple[Params, jax.Array, TaskPart]]:
        """Yield (what is outside the layers, the last hidden states, the images) of each batch."""
        each = [self._done(self._tasks.split(batch)) for batch in batches]
        parts = [TaskPart(images) for images in itertools.chain(*each)]
        outside, xs = self._hidden(state, parts)
        for x_BSD, part in zip(xs, parts, strict=True):
            yield outside, x_BSD, part

    def class_means(self, state: TrainState, batches: Iterable[Any]) -> jax.Array:
        """Return [K, C], see `VisionTrainer.class_means`."""
        sums, rest = np.zeros(self.losses.class_means_shape, np.float32), iter(batches)
        while some := list(itertools.islice(rest, self.evaluation_batches)):
            for args in self._last_hidden(state, some):
                sums += np.asarray(self._done(self._tasks.class_sums(*args)))
        return jnp.asarray(sums)

    def evaluate(
        self,
        state: TrainState,
        batches: Sequence[Any],
        class_means: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Return float32 [3, A] of each batch, see `VisionTrainer.evaluate`."""
        means = self.class_means(state, []) if class_means is None else class_means
        hidden = self._last_hidden(state, batches)
        return [jax.block_until_ready(self._tasks.evaluation(*args, means)) for args in hidden]

    def paths(self, state: TrainState) -> dict[str, tuple[int, ...]]:
        """Return the expert that each task takes in each layer routed by task, learned or given."""
        return paths_of(self.config, state, self.mesh)
