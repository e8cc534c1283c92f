"""Dynamic loss scaling for float16: the loss is multiplied by a scale, so that small gradients do
not underflow to 0.

The scale is a power of two, so multiplying by it and dividing by it is exact in float32. Gradients
stay scaled until the optimizer update, which divides them by the scale of their own step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmoe.config import LossScaleConfig, TrainConfig
from jmoe.config.train import MAX_LOSS_SCALE

MIN_LOSS_SCALE = 1.0  # an overflow at scale 1 is not due to scaling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The loss scale as a part of the training state: two scalars, replicated on all devices."""

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32, steps without an overflow since the scale last changed

    def next_scale(
        self, applied: jax.Array, overflowed: jax.Array, config: LossScaleConfig
    ) -> "LossScale":
        """Return the loss scale of the next step.

        A skipped step halves the scale and restarts the count of good steps. After
        `config.steps_to_grow` good steps the scale doubles, up to `MAX_LOSS_SCALE`.

        applied: bool scalar, whether the update was applied. overflowed: bool scalar, whether the
        scaled gradients overflowed, so that the update was skipped.
        """
        good_steps = self.good_steps + applied.astype(jnp.int32)
        grows = good_steps >= config.steps_to_grow
        grown = jnp.where(grows, jnp.minimum(2 * self.scale, MAX_LOSS_SCALE), self.scale)
        scale = jnp.where(overflowed, self.scale / 2, grown)
        return LossScale(scale, jnp.where(overflowed | grows, 0, good_steps))


def initial_loss_scale(config: TrainConfig) -> LossScale | None:
    """Return the loss scale of step 0; None unless the compute dtype is float16."""
    if config.compute_dtype != "float16":
        return None
    return LossScale(jnp.float32(config.loss_scale.initial_scale), jnp.int32(0))


def scale_loss(loss: jax.Array, loss_scale: LossScale | None) -> jax.Array:
    """Return the loss, or a term that the loss is linear in, times the scale; unchanged if the
    scale is None.
    """
    return loss if loss_scale is None else loss * loss_scale.scale


def undo_loss_scale(scaled: jax.Array, loss_scale: LossScale | None) -> jax.Array:
    """Return a scaled loss or gradient divided by the scale; unchanged if the scale is None."""
    return scaled if loss_scale is None else scaled / loss_scale.scale
