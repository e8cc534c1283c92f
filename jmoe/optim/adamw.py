"""AdamW for the parameter shards of one device.

`training/update.py` applies `adamw_update` to every parameter of a step; `offload/lazy_adamw.py`
applies it to offloaded experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import KeyPath

from jmoe.config import OptimizerConfig
from jmoe.mesh import is_expert, num_stack_dims


def has_weight_decay(path: KeyPath, w: jax.Array) -> bool:
    """Return True if weight decay applies to the parameter at this path.

    Weight decay applies to matrices, not to norms or biases; leading layer and expert axes do not
    count.
    """
    return w.ndim - num_stack_dims(path) - is_expert(path) >= 2


class OptimizerStepScalars(NamedTuple):
    """Scalars that all parameters share in one optimizer step.

    lr: learning rate. step: number of steps taken before this one. clip: factor that multiplies
    every gradient. ok: if False, the step changes neither parameters nor moments.
    """

    lr: jax.Array
    step: jax.Array
    clip: jax.Array
    ok: jax.Array


def _round_to_float32_on_cpu(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, on CPU behind an optimization barrier, which rounds them to float32 before
    use.

    Other platforms get no barrier, since it would cost a second pass over every parameter.
    """
    barred = lambda *arrays: lax.optimization_barrier(arrays)  # noqa: E731
    separate: tuple[jax.Array, ...] = lax.platform_dependent(
        *arrays, cpu=barred, default=lambda *arrays: arrays
    )
    return separate


def adamw_update(
    w: jax.Array,
    m: jax.Array,
    v: jax.Array,
    g: jax.Array,
    *,
    config: OptimizerConfig,
    decay: bool,
    step_scalars: OptimizerStepScalars,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (w, m, v) of one float32 parameter after one AdamW step (arXiv 1711.05101).

    With gradient g scaled by `step_scalars.clip` and t = `step_scalars.step` + 1:

        m' = b1 m + (1 - b1) g
        v' = b2 v + (1 - b2) g^2
        w' = w - lr (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + weight_decay w)

    decay: whether the weight-decay term applies.
    """
    t = (step_scalars.step + 1).astype(jnp.float32)
    g = g.astype(jnp.float32) * step_scalars.clip
    m_new = config.beta1 * m + (1 - config.beta1) * g
    v_new = config.beta2 * v + (1 - config.beta2) * g * g
    m_new, v_new = _round_to_float32_on_cpu(
        jnp.where(step_scalars.ok, m_new, m), jnp.where(step_scalars.ok, v_new, v)
    )
    update = (m_new / (1 - config.beta1**t)) / (
        jnp.sqrt(v_new / (1 - config.beta2**t)) + config.eps
    )
    if decay:
        update = update + config.weight_decay * w
    return jnp.where(step_scalars.ok, w - step_scalars.lr * update, w), m_new, v_new
