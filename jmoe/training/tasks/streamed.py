"""The streamed trainer of image tasks.

Contrastive embeddings come from the step's own forward pass, which keeps the last hidden states of
all micro-batches.

Legend: K classes of all tasks, C features of all embeddings, A tasks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

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
from jmoe.planning.elastic import TaskLayout
from jmoe.training.state import TrainState
from jmoe.training.streamed.model import Params
from jmoe.training.streamed.programs import jit_over_mesh
from jmoe.training.streamed.runner import PassState, StreamedRunner, initial_state_without_experts
from jmoe.training.tasks.experts import task_slots
from jmoe.training.tasks.layouts import layout_notes, tiers_line
from jmoe.training.tasks.losses import ContrastiveTerms
from jmoe.training.tasks.step import ended_expert_mask, task_paths
from jmoe.training.tasks.streamed_model import ImageMicroBatch, StreamedVision, own_micro_batches
from jmoe.types import PyTree


@dataclass(frozen=True)
class _TaskPrograms:
    """The compiled programs specific to image tasks, besides `StepPrograms`."""

    split: Callable[[ImageBatch], list[ImageBatch]]
    embeddings: Callable[..., jax.Array]
    contrastive_terms: Callable[..., list[ContrastiveTerms]]
    class_embedding_sums: Callable[..., jax.Array]
    evaluation_sums: Callable[..., jax.Array]


def _make_task_programs(model: StreamedVision) -> _TaskPrograms:
    make, micro_batch = partial(jit_over_mesh, model), model.micro_batch_spec
    head = REPLICATED, BATCH, micro_batch
    return _TaskPrograms(
        split=make(own_micro_batches, BATCH, out=BATCH),
        embeddings=make(model.embeddings, *head, out=BATCH),
        contrastive_terms=make(model.contrastive_terms, BATCH, BATCH, out=BATCH),
        class_embedding_sums=make(model.class_embedding_sums, *head, out=REPLICATED),
        evaluation_sums=make(model.evaluation_sums, *head, REPLICATED, out=REPLICATED),
    )


class StreamedVisionTrainer(StreamedRunner[ImageMicroBatch]):
    """The `ImageTrainer` of runs with experts on tiers; see `StreamedRunner`.

    A device has slots for the experts of `tiers.device_layers` layers: for the experts that its
    tasks' paths name if `places_experts_by_task`, else for its even share of each layer. before: a
    trainer of the same run and mesh in another layout, whose experts this trainer takes over.
    """

    config: VisionTrainConfig

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        mesh: Mesh,
        layout: TaskLayout,
        run: str = "run",
        before: Self | None = None,
    ) -> None:
        self.layout, self._run, self.slots = layout, run, (slots := task_slots(config, layout))
        streamed = StreamedVision(config, num_classes, mesh, layout, slots)
        self.model, self.losses, self._tasks = (
            streamed.vision,
            streamed.losses,
            _make_task_programs(streamed),
        )
        self.is_contrastive = self.losses.is_contrastive
        everywhere = (tuple(range(mesh.size)),) * len(config.tasks)
        # for each task, the devices that can evaluate it
        self.homes = everywhere if slots is None else slots.homes
        slotted = (
            None
            if slots is None
            else SlottedExperts.from_slot_table(mesh, slots.slot_RNE, slots.num_slots)
        )
        super().__init__(streamed, run, slotted, before)
        # Evaluation then holds as many hidden states as training saves as layer inputs.
        images = max(layout.images_per_device) * config.gradient_accumulation_steps
        self.evaluation_batches = len(self._layers) * images // layout.largest_micro_batch
        if before is not None:
            self._freeze_ended_experts()

    @property
    def notes(self) -> list[str]:
        """The layout, the experts' tiers and their bytes, as lines to print."""
        return [*layout_notes(self.config, self.layout), tiers_line(self.config), self.stores.note]

    def with_layout(self, mesh: Mesh, layout: TaskLayout) -> Self:
        """Return a trainer of the same run with another layout on the same mesh; the state stays
        valid.
        """
        assert mesh is self.mesh and self.slots is None, "experts on tiers stay with their devices"
        args = self.config, self.model.num_classes, mesh, layout, self._run
        return type(self)(*args, before=self)

    # State

    def init(self) -> TrainState:
        """Return the state of step 0, with the same random parameters as `VisionTrainer`; draws
        experts onto their tiers one layer at a time.
        """
        # Small experts save memory; the other parameters' random values do not depend on the size.
        config, small = self.config, replace(self.config.model, moe_intermediate_size=1)
        tasks, counts = config.tasks, self.model.num_classes
        paths = [task.path for task in tasks.values()]
        sizes = {name: tasks[name].head_size(count) for name, count in counts.items()}

        def draw_dense() -> TrainState:
            return initial_state_without_experts(
                VisionTransformer(small, sizes, paths, rngs=nnx.Rngs(config.seed))
            )

        places = jax.tree.map(lambda s: s.sharding, self.saved_shape)
        state: TrainState = jax.jit(draw_dense, out_shardings=places)()
        self._draw_experts()
        return state

    def _random_experts(self, kind: LayerKind, number: jax.Array) -> nnx.Module:
        config = self.config
        return VisionTransformer.init_layer_experts(
            config.model, kind, number, nnx.Rngs(config.seed)
        )

    def prepare_state_for_save(self, state: TrainState) -> TrainState:
        """Return the state for a checkpoint, without experts, and prepare their records; see
        `StreamedTrainer.prepare_state_for_save`.
        """
        with self._loaded_experts.permanent_errors():
            self.stores.prepare_checkpoint(self._loaded_experts)
            return state

    def restore_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the training state, and load experts onto their tiers one layer at a time.
        weights, moments: both None if the records are in place already.
        """
        self._load_experts(int(saved.step), weights, moments)
        self._freeze_ended_experts()
        return saved

    def _freeze_ended_experts(self) -> None:
        """Exclude the experts that only ended tasks name from further optimizer steps."""
        ended_NE = ended_expert_mask(self.config, self.losses.active)
        if self.experts is None or not ended_NE.any():
            return
        records = [
            self.experts.index.record_numbers(layer.record, np.flatnonzero(ended_NE[layer.number]))
            for layer in self._record_layers
            if layer.kind == "task"
        ]
        self.experts.freeze_records(np.concatenate(records))

    # Passes

    def _micro_batches(self, state: TrainState, batch: ImageBatch) -> list[ImageMicroBatch]:
        return [
            ImageMicroBatch(images, state.step)
            for images in self._wait_on_cpu_mesh(self._tasks.split(batch))
        ]

    def _loss_gradients(
        self, pass_state: PassState[ImageMicroBatch], xs: list[jax.Array], sums: Params
    ) -> tuple[list[PyTree], Params]:
        """Return (losses per micro-batch, summed gradients of the parameters outside the layers),
        after computing the contrastive terms of all micro-batches; replaces each entry of `xs` by
        its gradient.
        """
        tasks = list(self.config.tasks)
        if any(self.is_contrastive[tasks.index(name)] for name in self.losses.active):
            each = zip(xs, pass_state.micro_batches, strict=True)
            z = [
                self._wait_on_cpu_mesh(self._tasks.embeddings(pass_state.outside, x, micro_batch))
                for x, micro_batch in each
            ]
            contrasts = self._wait_on_cpu_mesh(
                self._tasks.contrastive_terms(
                    z, [micro_batch.images for micro_batch in pass_state.micro_batches]
                )
            )
            pairs = zip(pass_state.micro_batches, contrasts, strict=True)
            pass_state.micro_batches = [
                micro_batch._replace(contrast=contrast) for micro_batch, contrast in pairs
            ]
        return super()._loss_gradients(pass_state, xs, sums)

    def _iterate_last_hidden_states(
        self, state: TrainState, batches: Sequence[ImageBatch]
    ) -> Iterator[tuple[Params, jax.Array, ImageMicroBatch]]:
        """Yield (unsharded parameters outside the layers, last hidden states, images) for each
        batch.
        """
        each = [self._wait_on_cpu_mesh(self._tasks.split(batch)) for batch in batches]
        micro_batches = [ImageMicroBatch(images) for images in itertools.chain(*each)]
        outside, xs = self._last_hidden_states(state, micro_batches)
        for x_BSD, micro_batch in zip(xs, micro_batches, strict=True):
            yield outside, x_BSD, micro_batch

    def class_mean_embeddings(self, state: TrainState, batches: Iterable[PyTree]) -> jax.Array:
        """Return [K, C], for each class of contrastive tasks a vector in the direction of its mean
        embedding over the images in `batches`.
        """
        sums, rest = np.zeros(self.losses.class_means_shape, np.float32), iter(batches)
        while some := list(itertools.islice(rest, self.evaluation_batches)):
            for args in self._iterate_last_hidden_states(state, some):
                sums += np.asarray(self._wait_on_cpu_mesh(self._tasks.class_embedding_sums(*args)))
        return jnp.asarray(sums)

    def evaluate_batches(
        self,
        state: TrainState,
        batches: Sequence[PyTree],
        class_means: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Return float32 [3, A] for each batch: per task, the summed negative log-likelihood in
        nats, correct images, and images. class_means: from `class_mean_embeddings`.
        """
        means = self.class_mean_embeddings(state, []) if class_means is None else class_means
        hidden = self._iterate_last_hidden_states(state, batches)
        return [jax.block_until_ready(self._tasks.evaluation_sums(*args, means)) for args in hidden]

    def task_paths(self, state: TrainState) -> dict[str, tuple[int, ...]]:
        """Return {task: its path}: its expert in each task-routed layer, learned or configured."""
        return task_paths(self.config, state, self.mesh)
