"""The image model of a streamed step: `StreamedVision`, used by `StreamedVisionTrainer`.

Dense parameters are gathered once per step. Every device runs the same number of micro-batches; a
device with fewer images skips the layers of the empty ones and only takes part in
collectives.

Legend:
M micro-batches
B images of a micro-batch
D hidden
C features of all embeddings
K classes of all tasks
R devices
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmoe.config import STACKS, LayerKind, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import LossTokens
from jmoe.mesh import BATCH, REPLICATED
from jmoe.optim.loss_scale import LossScale
from jmoe.planning.elastic import TaskLayout
from jmoe.training.gradient_reduction import StreamedGradients, reduce_gradients_local
from jmoe.training.state import TrainState
from jmoe.training.streamed.model import (
    Choices,
    FinishStepInputs,
    FirstGatheredParams,
    LayerOptions,
    ModelModules,
    Params,
    StreamedModel,
)
from jmoe.training.tasks.experts import TaskSlots
from jmoe.training.tasks.losses import ContrastiveTerms, Metrics, TaskLosses
from jmoe.training.tasks.step import (
    ShardedVision,
    active_tasks,
    draw_step_paths,
    restore_ended_tasks,
)
from jmoe.training.update import finish_step, sum_over_mesh
from jmoe.types import PyTree


class ImageMicroBatch(NamedTuple):
    """One micro-batch of images.

    step: seeds the draw of learned paths; None takes each task's likelier expert. contrast: see
    `TaskLosses.loss`; None if no task is contrastive, or before the comparison.
    """

    images: ImageBatch
    step: jax.Array | None = None
    contrast: ContrastiveTerms | None = None


def _outside_params(params: Params) -> Params:
    return {name: tree for name, tree in params.items() if name not in STACKS.values()}


class StreamedVision(StreamedModel[ImageMicroBatch]):
    """The `StreamedModel` of a run of image tasks in one layout. num_classes: by task. slots: see
    `ShardedVision`.
    """

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        mesh: Mesh,
        layout: TaskLayout,
        slots: TaskSlots | None,
    ) -> None:
        self.config, self.slots = config, slots
        # The same under the types of images, which the protocol's attributes do not have.
        self._config, self._slots = config, slots
        self.vision = self.sharded = ShardedVision(config, num_classes, mesh, slots)
        self.modules, self.dtype = ModelModules.from_sharded(self.sharded), self.sharded.dtype
        self.losses = TaskLosses(config, num_classes, mesh.size, active_tasks(config, layout))
        # all devices have equally many images
        self._equal = len(set(layout.images_per_device)) == 1
        self.outside_spec = REPLICATED
        self.stack_specs = {STACKS[kind]: REPLICATED for kind in self.modules.blocks}
        split: PyTree = BATCH
        step: PyTree = REPLICATED
        self.micro_batch_spec = ImageMicroBatch(split, step, split)

    def gather_first_params(self, params: Params, *, first_kind: LayerKind) -> FirstGatheredParams:
        gathered = self.vision.gather_all_params(params)
        stacks = {name: tree for name, tree in gathered.items() if name in STACKS.values()}
        return FirstGatheredParams(_outside_params(gathered), stacks, {}, None)

    def embed(
        self, outside: Params, micro_batch: ImageMicroBatch
    ) -> tuple[jax.Array, list[Choices]]:
        module, task_B = self.modules.outside(outside), micro_batch.images.task
        x_BSD = module.embed(micro_batch.images.pixels.astype(jnp.float32) / 255.0, self.dtype)
        draw = None if micro_batch.step is None else draw_step_paths(self._config, micro_batch.step)
        slot_NE = None if self._slots is None else self._slots.expert_slots_local()
        layers = range(len(self._config.model.task_layers))
        return x_BSD, [module.route_by_task(layer, task_B, draw, slot_NE) for layer in layers]

    def layer_options(
        self,
        kind: LayerKind,
        common: LayerOptions,
        step: jax.Array,
        micro_batch: ImageMicroBatch,
        number: int,
    ) -> LayerOptions:
        weight_B = None if self._equal else micro_batch.images.weight
        return common._replace(weight_B=weight_B)

    def auxiliary_loss(
        self, kind: LayerKind, stats: MoEStats, loss_tokens: LossTokens | None
    ) -> jax.Array:
        return (
            self.losses.weighted_z_loss(stats.z_sum)
            if kind == "moe"
            else jnp.zeros((), jnp.float32)
        )

    def _logits(self, outside: Params, x_BSD: jax.Array, micro_batch: ImageMicroBatch) -> jax.Array:
        module = self.modules.outside(outside)
        logits_BY: jax.Array = module.logits(
            module.norm(x_BSD, self.dtype), micro_batch.images.task
        )
        return logits_BY

    def loss_gradients(
        self,
        outside: Params,
        x_BSD: jax.Array,
        micro_batch: ImageMicroBatch,
        loss_scale: LossScale | None,
    ) -> tuple[Metrics, jax.Array, Params]:
        def loss(outside: Params, x_BSD: jax.Array) -> tuple[jax.Array, Metrics]:
            logits_BY = self._logits(outside, x_BSD, micro_batch)
            return self.losses.loss(logits_BY, micro_batch.images, micro_batch.contrast)

        gradients = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (doutside, dx_BSD), metrics = gradients(outside, x_BSD)
        return jax.tree.map(lambda a: a[None], metrics), dx_BSD, doutside

    def local_metric_addends(self, step: FinishStepInputs) -> Metrics:
        added = partial(jax.tree.map, lambda *addends: sum(addend[0] for addend in addends))
        total: Metrics = added(*step.losses)
        if not step.stats:
            return total
        layers = [added(*layer) for layer in step.stats]
        stats: MoEStats = jax.tree.map(lambda *values: jnp.stack(values), *layers)
        return total | {
            "balance_loss": jnp.zeros((), jnp.float32),
            "z_loss": self.losses.weighted_z_loss(stats.z_sum),
            "entropy": stats.entropy_sum / self.losses.patches_per_step,
        }

    def reduce_gradients(self, params: Params, grads: StreamedGradients) -> Params:
        gathered, scatter = jax.vjp(self.vision.gather_all_params, params)
        stacks = {
            STACKS[kind]: jax.tree.unflatten(jax.tree.structure(gathered[STACKS[kind]]), leaves)
            for kind, leaves in grads.outside_buffer.items()
        }
        own = grads.outside | stacks
        (reduced,) = scatter(jax.tree.map(lambda g, w: g[0].astype(w.dtype), own, gathered))
        return reduce_gradients_local(reduced, self.vision)

    def update_state(
        self, state: TrainState, grads: Params, squares: dict[str, jax.Array], metrics: Metrics
    ) -> tuple[TrainState, Metrics]:
        new, metrics = finish_step(self.config, state, grads, squares, metrics)
        nothing = jnp.zeros((0, 0), jnp.bool_)  # experts are frozen by `StreamedVisionTrainer`
        return restore_ended_tasks(self._config, self.losses.active, (state, new), nothing), metrics

    # Contrastive losses and evaluation

    def embeddings(
        self, outside: Params, x_BSD: jax.Array, micro_batch: ImageMicroBatch
    ) -> jax.Array:
        """Return the images' unit embeddings [B, C], zero in the features of other tasks."""
        return self.losses.embeddings(self._logits(outside, x_BSD, micro_batch))

    def contrastive_terms(
        self, z_BC: Sequence[jax.Array], images: Sequence[ImageBatch]
    ) -> list[ContrastiveTerms]:
        """Return this device's contrastive-loss terms for each micro-batch. z_BC: embeddings of
        each micro-batch.
        """
        batch = jax.tree.map(lambda *a: jnp.stack(a), *images)
        contrast = self.losses.contrastive_terms(jnp.stack(z_BC), batch)
        return [jax.tree.map(lambda a, m=m: a[m], contrast) for m in range(len(images))]

    def class_embedding_sums(
        self, outside: Params, x_BSD: jax.Array, micro_batch: ImageMicroBatch
    ) -> jax.Array:
        """Return [K, C]: the sum of the embeddings of each class's images, over all devices."""
        own = self.losses.class_embedding_sums(
            self._logits(outside, x_BSD, micro_batch), micro_batch.images
        )
        total: jax.Array = sum_over_mesh(self.vision.mesh.size, own)
        return total

    def evaluation_sums(
        self, outside: Params, x_BSD: jax.Array, micro_batch: ImageMicroBatch, means_KC: jax.Array
    ) -> jax.Array:
        """Return [3, A]: per task, the summed negative log-likelihood in nats, correct images, and
        images, over all devices.

        means_KC: see `TaskLosses.evaluation_sums`.
        """
        logits_BY = self._logits(outside, x_BSD, micro_batch)
        own = self.losses.evaluation_sums(logits_BY, micro_batch.images, means_KC)
        total: jax.Array = sum_over_mesh(self.vision.mesh.size, own)
        return total


def own_micro_batches(batch: ImageBatch) -> list[ImageBatch]:
    """Return this device's micro-batches as a list, without the device dimension."""
    number = batch.label.shape[1]
    return [jax.tree.map(lambda a, m=m: a[0, m], batch) for m in range(number)]
