"""Losses and accuracies of several image tasks, independent of which device has which images.

Each image's loss is divided by the number of its task's images on all devices, so that the layout
does not change the loss. A contrastive task compares each image with all of the task's images in
the step: every device computes this loss and the embeddings' gradients, and then differentiates its
own micro-batches with them (GradCache, arXiv:2101.06983). `VisionTrainer` and `StreamedVision` use
`TaskLosses`.

Legend:
R devices
M micro-batches
B images of a micro-batch
G images of a step
Y outputs of all heads
C features of all embeddings
K classes of all tasks
A tasks
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.config import VisionTrainConfig
from jmoe.data.image_batches import ImageBatch
from jmoe.layers.contrastive import contrastive_losses, cosine_class_logits, l2_normalized
from jmoe.mesh import ALL
from jmoe.types import JsonObject, PyTree

Metrics = JsonObject


class ContrastiveTerms(NamedTuple):
    """The contrastive loss of this device's images against all images of the step; [M, B, ...] or
    [B, ...].
    """

    gradient: jax.Array  # of the loss with respect to the embedding, [C]
    loss: jax.Array
    is_right: jax.Array  # 1.0 if the nearest other image has the same class


class TaskLosses:
    """One device's addends to the losses and accuracies of a run's tasks; runs inside `shard_map`,
    or on one device.

    num_classes: by task. active: names of the tasks that have not ended.
    """

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        num_devices: int,
        active: Collection[str],
    ) -> None:
        self._config, self._num_devices, self.active = config, num_devices, list(active)
        self._num_classes = np.array(list(num_classes.values()), np.int32)
        tasks = [config.tasks[name] for name in num_classes]
        sizes = [
            task.head_size(count) for task, count in zip(tasks, num_classes.values(), strict=True)
        ]
        self._outputs = np.cumsum([0, *sizes])[:-1].astype(np.int32)  # each task's first output
        self._classes = np.cumsum([0, *num_classes.values()])[:-1].astype(np.int32)
        # whether a task is contrastive, by its number
        self.is_contrastive = np.array([task.head == "contrastive" for task in tasks])
        self._embeds = np.repeat(self.is_contrastive, sizes)  # outputs that are embeddings
        self._temperature = np.array([task.contrastive_temperature for task in tasks], np.float32)

    @property
    def total_embedding_size(self) -> int:
        """C, the total number of embedding features over all contrastive tasks."""
        return int(self._embeds.sum())

    @property
    def class_means_shape(self) -> tuple[int, int]:
        """Shape of the class means: (K, C)."""
        return int(self._num_classes.sum()), self.total_embedding_size

    def embeddings(self, logits_BY: jax.Array) -> jax.Array:
        """Return unit vectors [B, C], zero in other tasks' features; zero vectors for images of
        classification tasks.
        """
        own_BC = logits_BY[:, np.flatnonzero(self._embeds)]
        return l2_normalized(jnp.where(jnp.isfinite(own_BC), own_BC, 0.0))

    def contrastive_terms(self, z_MBC: jax.Array, batch: ImageBatch) -> ContrastiveTerms:
        """Return the contrastive loss terms of this device's images. z_MBC: their embeddings.
        batch: the images.
        """
        several = self._num_devices > 1
        own = z_MBC, batch.task, batch.label, batch.weight
        every = [lax.all_gather(a, ALL) if several else a[None] for a in own]
        z_GC, task_G, label_G, weight_G = (a.reshape(-1, *a.shape[3:]) for a in every)
        tasks = self._config.tasks.values()
        share_A = (
            np.array([task.loss_weight / task.batch_size for task in tasks], np.float32)
            * self.is_contrastive
        )
        weight_G = weight_G * jnp.asarray(self.is_contrastive)[task_G].astype(jnp.float32)
        share_G = jnp.asarray(share_A)[task_G]
        temperature_G = jnp.asarray(self._temperature)[task_G]

        def total_loss(z_GC: jax.Array) -> PyTree:
            loss_G, is_right_G = contrastive_losses(z_GC, task_G, label_G, weight_G, temperature_G)
            return (loss_G * share_G).sum(), (loss_G, is_right_G)

        gradient_GC, (loss_G, is_right_G) = jax.grad(total_loss, has_aux=True)(z_GC)
        device = lax.axis_index(ALL) if several else 0
        parts = (
            a.reshape(*every[0].shape[:3], *a.shape[1:]) for a in (gradient_GC, loss_G, is_right_G)
        )
        return ContrastiveTerms(*(part[device] for part in parts))

    def loss(
        self, logits_BY: jax.Array, batch: ImageBatch, contrast: ContrastiveTerms | None
    ) -> tuple[jax.Array, Metrics]:
        """Return (this device's addend to the loss, its terms as metrics) for one micro-batch.

        The values and gradients of contrastive tasks come from `contrast`.
        """
        tasks = self._config.tasks
        nll_B, correct_B = self._task_nll_and_is_correct(logits_BY, batch)
        with jax.named_scope("loss"):
            compared = jnp.zeros((), jnp.float32)
            if contrast is not None:
                is_contrastive_B = jnp.asarray(self.is_contrastive)[batch.task]
                nll_B = jnp.where(is_contrastive_B, contrast.loss, nll_B)
                correct_B = jnp.where(is_contrastive_B, contrast.is_right, correct_B)
                compared = (self.embeddings(logits_BY) * contrast.gradient).sum()
                compared = compared - lax.stop_gradient(compared)  # a gradient without a value
            images_A = np.array([task.batch_size for task in tasks.values()], np.float32)
            weights_A = np.array([task.loss_weight for task in tasks.values()], np.float32)
            of_task_AB = batch.task == np.arange(len(tasks), dtype=np.int32)[:, None]
            loss_A = jnp.where(of_task_AB, nll_B * batch.weight, 0.0).sum(axis=1) / images_A
            correct_A = jnp.where(of_task_AB, correct_B * batch.weight, 0.0).sum(axis=1) / images_A
            loss = (loss_A * weights_A).sum() + compared
        metrics: Metrics = {
            "loss": loss,
            "task_loss": {
                name: loss_A[number] for number, name in enumerate(tasks) if name in self.active
            },
            "task_accuracy": {
                name: correct_A[number] for number, name in enumerate(tasks) if name in self.active
            },
        }
        return loss, lax.stop_gradient(metrics)

    @property
    def patches_per_step(self) -> int:
        """Number of image patches in a step, over all devices."""
        return (
            sum(self._config.tasks[name].batch_size for name in self.active)
            * self._config.sequence_length
        )

    def weighted_z_loss(self, z_sum: jax.Array) -> jax.Array:
        """Return this device's and micro-batch's addend to the weighted z-loss, a mean over the
        step's patches and the MoE layers. z_sum: sums of squared log-partition functions, by layer.
        """
        model = self._config.model
        return model.router.z_loss_coef * z_sum.sum() / self.patches_per_step / model.num_moe_layers

    def evaluation_sums(
        self, logits_BY: jax.Array, batch: ImageBatch, means_KC: jax.Array
    ) -> jax.Array:
        """Return [3, A]: per task, the summed negative log-likelihood in nats, correct images, and
        images.

        means_KC: the mean embedding of each class; an image of a contrastive task is classified by
        the most similar mean.
        """
        nll_B, correct_B = self._task_nll_and_is_correct(logits_BY, batch)
        if self.is_contrastive.any():
            owner_K = np.repeat(
                np.arange(len(self.is_contrastive), dtype=np.int32), self._num_classes
            )
            z_BC = self.embeddings(logits_BY)
            temperature_B = jnp.asarray(self._temperature)[batch.task]
            near_BK = jnp.where(
                batch.task[:, None] == owner_K,
                cosine_class_logits(z_BC, means_KC, temperature_B),
                -jnp.inf,
            )
            compared = _nll_and_is_correct(
                near_BK, batch.label + jnp.asarray(self._classes)[batch.task]
            )
            is_contrastive_B = jnp.asarray(self.is_contrastive)[batch.task]
            nll_B, correct_B = (
                jnp.where(is_contrastive_B, *pair)
                for pair in zip(compared, (nll_B, correct_B), strict=True)
            )
        of_task_AB = batch.task == np.arange(len(self._config.tasks), dtype=np.int32)[:, None]
        values = jnp.stack([nll_B, correct_B, jnp.ones_like(nll_B)]) * batch.weight
        return jnp.where(of_task_AB, values[:, None], 0.0).sum(axis=-1)

    def class_embedding_sums(self, logits_BY: jax.Array, batch: ImageBatch) -> jax.Array:
        """Return [K, C]: the sum of the embeddings of each class's images."""
        class_B = batch.label + jnp.asarray(self._classes)[batch.task]
        of_class_KB = class_B == jnp.arange(self._num_classes.sum(), dtype=jnp.int32)[:, None]
        weight_KB = jnp.where(of_class_KB, batch.weight, 0.0)
        return jnp.dot(weight_KB, self.embeddings(logits_BY), precision=lax.Precision.HIGHEST)

    def _task_nll_and_is_correct(
        self, logits_BY: jax.Array, batch: ImageBatch
    ) -> tuple[jax.Array, jax.Array]:
        """Return (negative log-likelihood in nats [B], 1.0 for a correct class [B]); finite but
        meaningless for contrastive tasks.
        """
        label_B = jnp.where(jnp.asarray(self.is_contrastive)[batch.task], 0, batch.label)
        return _nll_and_is_correct(logits_BY, label_B + jnp.asarray(self._outputs)[batch.task])


def _nll_and_is_correct(logits_BY: jax.Array, label_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (negative log-likelihood in nats [B], 1.0 if the label has the largest logit [B])."""
    log_p_BY = logits_BY - jax.nn.logsumexp(logits_BY, axis=1, keepdims=True)
    is_label_BY = label_B[:, None] == jnp.arange(logits_BY.shape[1], dtype=jnp.int32)
    nll_B = -jnp.where(is_label_BY, log_p_BY, 0.0).sum(axis=1)
    return nll_B, (jnp.argmax(logits_BY, axis=1).astype(jnp.int32) == label_B).astype(jnp.float32)
