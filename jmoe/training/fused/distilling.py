"""Training that learns from the text and from a teacher: `FusedTrainer` with one more part of the
loss.

Legend: A accumulation steps, B batch, S sequence, T = B S local tokens, D hidden, H the teacher's
hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.config import TrainConfig, check
from jmoe.layers.loss import distillation_losses
from jmoe.mesh import ACCUMULATED_BATCH, REPLICATED
from jmoe.training.bandwidth import links_of, measured_chunk_bytes
from jmoe.training.fused.step import FusedTrainer, Metrics
from jmoe.training.state import TrainState


class TaughtTokens(NamedTuple):
    """Tokens [A, B, S + 1], and what the teacher makes of all but the last of each sequence, [A,
    B, S, H]; or specs.
    """

    tokens_ABS: Any
    hidden_ABSH: Any


class DistillingTrainer(FusedTrainer):
    """A `FusedTrainer` whose steps ask a teacher for its hidden states of the batch, and compare
    logits on the device.

    teacher: tokens [B, S] -> hidden states [B, S, H]. head_HV: its logits are hidden @ head. `loss`
    in the metrics is the cross-entropy on the text, as without a teacher; `divergence` is KL at
    `distil.temperature`.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        teacher: Callable[[np.ndarray], jax.Array],
        head_HV: jax.Array,
    ) -> None:
        super().__init__(
            config, mesh, measured_chunk_bytes(config.comm, mesh), links_of(config, mesh)
        )
        plan = self.model.head.plan
        constraint = "splits the output head: must be replicated with distil.teacher"
        check(not plan.parallel_head, "comm.embedding", plan.kind, constraint)
        self._teacher = teacher
        self._head_HV = jax.device_put(head_HV, NamedSharding(mesh, REPLICATED))
        state = self.state_specs

        def step(
            state_now: TrainState, batch: TaughtTokens, head_HV: jax.Array, full_capacity: bool
        ) -> Any:
            def body(state_now: TrainState, batch: TaughtTokens, head_HV: jax.Array) -> Any:
                return self._step_local(
                    state_now, batch, full_capacity=full_capacity, teacher_head=head_HV
                )

            specs = (state, TaughtTokens(ACCUMULATED_BATCH, ACCUMULATED_BATCH), REPLICATED)
            return self.sharded(body, in_specs=specs, out_specs=(state, REPLICATED))(
                state_now, batch, head_HV
            )

        self._taught_step = jax.jit(step, static_argnames="full_capacity", donate_argnums=0)
        self._place = NamedSharding(mesh, ACCUMULATED_BATCH)
        self.step = self.taught_step  # type: ignore[assignment]

    def taught_step(
        self, state: TrainState, tokens_ABS: jax.Array, full_capacity: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Take one step; see `Trainer.step`."""
        host_ABS = np.asarray(tokens_ABS)[:, :, :-1]
        hidden = np.stack([np.asarray(self._teacher(tokens_BS)) for tokens_BS in host_ABS])
        batch = TaughtTokens(tokens_ABS, jax.device_put(hidden, self._place))
        stepped: tuple[TrainState, Metrics] = self._taught_step(
            state, batch, self._head_HV, full_capacity
        )
        return stepped

    def token_loss_local(  # type: ignore[override]
        self,
        hidden_TD: jax.Array,
        head: jax.Array,
        labels_T: jax.Array,
        weights_T: jax.Array,
        part: TaughtTokens,
        *,
        teacher_head: jax.Array,
    ) -> tuple[jax.Array, Metrics]:
        """Return (1 - weight) x cross-entropy + weight x temperature^2 x divergence, and both."""
        distil = self.config.distil
        taught = part.hidden_ABSH.reshape(labels_T.size, -1), teacher_head
        nll, divergence = distillation_losses(
            hidden_TD, head, labels_T, weights_T, taught, distil.temperature
        )
        loss = (1.0 - distil.weight) * nll + distil.weight * distil.temperature**2 * divergence
        return loss, {"loss": nll, "divergence": divergence}
