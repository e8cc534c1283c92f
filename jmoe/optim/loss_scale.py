"""Dynamic loss scaling for float16: the loss is multiplied by a scale, so that small gradients are
not rounded to 0.

The scale is a power of two, so multiplying by it and dividing by it again rounds nothing in
float32. Gradients stay scaled until the update, which divides by the scale of the step that they
belong to.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmoe.config import LossScaleConfig, TrainConfig
from jmoe.config.train import MAX_LOSS_SCALE

MIN_LOSS_SCALE = 1.0  # gradients that overflow with it do not overflow because of it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The part of a training state that says how the loss is scaled; two scalars, the same on
    all devices.
    """

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32, steps without an overflow since the scale was changed last

    def after(self, ok: jax.Array, skipped: jax.Array, config: LossScaleConfig) -> "LossScale":
        """Return the scale of the next step: half of this one if a step was skipped, twice if
        enough were taken.
        """
        good_steps = self.good_steps + ok.astype(jnp.int32)
        grows = good_steps >= config.steps_to_grow
        grown = jnp.where(grows, jnp.minimum(2 * self.scale, MAX_LOSS_SCALE), self.scale)
        scale = jnp.where(skipped, self.scale / 2, grown)
        return LossScale(scale, jnp.where(skipped | grows, 0, good_steps))


def first_loss_scale(config: TrainConfig) -> LossScale | None:
    """Return the scale of step 0; None where the loss is not scaled."""
    if config.compute_dtype != "float16":
        return None
    return LossScale(jnp.float32(config.loss_scale.first), jnp.int32(0))


def scaled(loss: jax.Array, loss_scale: LossScale | None) -> jax.Array:
    """Return the loss, or what it is linear in, as it is differentiated."""
    return loss if loss_scale is None else loss * loss_scale.scale


def unscaled(loss: jax.Array, loss_scale: LossScale | None) -> jax.Array:
    """Undo `scaled`."""
    return loss if loss_scale is None else loss / loss_scale.scale
