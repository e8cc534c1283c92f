"""Distillation: a `FusedTrainer` whose loss also compares logits with a teacher model's.

`train.py` makes this trainer if `distil.teacher` is set.

Legend:
A accumulation steps
B batch
S sequence
T = B S local tokens
D hidden
H the teacher's hidden
V vocabulary
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.config import TrainConfig, check
from jmoe.layers.loss import HeadWeight, distillation_losses
from jmoe.mesh import ACCUMULATED_BATCH, REPLICATED
from jmoe.training.bandwidth import measure_chunk_bytes, read_or_measure_links
from jmoe.training.fused.step import FusedTrainer, Metrics
from jmoe.training.state import TrainState
from jmoe.types import PyTree


class DistillationBatch(NamedTuple):
    """Tokens [A, B, S + 1], and the teacher's hidden states [A, B, S, H] for every token except the
    last of each sequence.

    Both fields hold partition specs where a `DistillationBatch` describes a program's arguments.
    """

    tokens_ABS: jax.Array
    hidden_ABSH: jax.Array


class DistillingTrainer(FusedTrainer):
    """A `FusedTrainer` whose steps fetch a teacher's hidden states and compare logits on the
    device.

    teacher: a function from tokens [B, S] to hidden states [B, S, H]. head: the teacher's output
    head, so that its logits are `head.logits(hidden)`. In the metrics, `loss` is the cross-entropy
    on the text, and `divergence` the KL divergence from the teacher at `distil.temperature`. Raises
    ValueError if the student's output head is split over devices.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        teacher: Callable[[np.ndarray], jax.Array],
        head: HeadWeight,
    ) -> None:
        super().__init__(
            config,
            mesh,
            measure_chunk_bytes(config.comm, mesh),
            read_or_measure_links(config, mesh),
        )
        plan = self.model.head.plan
        constraint = "splits the output head: must be replicated with distil.teacher"
        check(not plan.parallel_head, "comm.embedding", plan.kind, constraint)
        self._teacher = teacher
        self._head = jax.device_put(head, NamedSharding(mesh, REPLICATED))
        state = self.state_specs

        def step(
            state_now: TrainState, batch: DistillationBatch, head: HeadWeight, full_capacity: bool
        ) -> PyTree:
            def step_local(
                state_now: TrainState, batch: DistillationBatch, head: HeadWeight
            ) -> PyTree:
                return self._step_local(
                    state_now, batch, full_capacity=full_capacity, teacher_head=head
                )

            split: PyTree = ACCUMULATED_BATCH
            specs = (state, DistillationBatch(split, split), REPLICATED)
            return self.shard_over_mesh(step_local, in_specs=specs, out_specs=(state, REPLICATED))(
                state_now, batch, head
            )

        self._taught_step = self._compiled_step(step)
        self._place = NamedSharding(mesh, ACCUMULATED_BATCH)
        self.step = self.step_with_teacher  # type: ignore[assignment]

    def step_with_teacher(
        self, state: TrainState, tokens_ABS: jax.Array, full_capacity: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Return (new state, metrics) after one optimizer step, like `Trainer.step`. The teacher
        runs first, over the whole batch.
        """
        host_ABS = np.asarray(tokens_ABS)[:, :, :-1]
        hidden = np.stack([np.asarray(self._teacher(tokens_BS)) for tokens_BS in host_ABS])
        batch = DistillationBatch(tokens_ABS, jax.device_put(hidden, self._place))
        stepped: tuple[TrainState, Metrics] = self._taught_step(
            state, batch, self._head, full_capacity
        )
        return stepped

    def token_loss_local(  # type: ignore[override]
        self,
        hidden_TD: jax.Array,
        head: HeadWeight,
        labels_T: jax.Array,
        weights_T: jax.Array,
        micro_batch: DistillationBatch,
        *,
        teacher_head: HeadWeight,
    ) -> tuple[jax.Array, Metrics]:
        """Return (this device's addend to the loss, (1 - weight) x cross-entropy + weight x
        temperature^2 x divergence; metrics with these two terms, `loss` and `divergence`).
        """
        distil = self.config.distil
        taught = micro_batch.hidden_ABSH.reshape(labels_T.size, -1), teacher_head
        nll, divergence = distillation_losses(
            hidden_TD, head, labels_T, weights_T, taught, distil.temperature
        )
        loss = (1.0 - distil.weight) * nll + distil.weight * distil.temperature**2 * divergence
        return loss, {"loss": nll, "divergence": divergence}
