"""AdamW on the shards a device owns, one step at a time, with the learning-rate schedule of
optax.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmoe.config import OptimizerConfig
from jmoe.mesh import is_expert, stack_dims


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up, then a cosine to `final_learning_rate_fraction` at `num_steps`, or
    constant.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        steps = max(1, num_steps - warmup)
        after = optax.cosine_decay_schedule(peak, steps, config.final_learning_rate_fraction)
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / warmup, peak, warmup - 1), after], [warmup]
    )


def decays(path: tuple[Any, ...], w: jax.Array) -> bool:
    """Matrices decay; norms and biases do not."""
    return w.ndim - stack_dims(path) - is_expert(path) >= 2


class StepValues(NamedTuple):
    """Scalars that all parameters share in a step: gradients are scaled by `clip`; nothing
    changes unless `ok`.
    """

    lr: jax.Array
    step: jax.Array
    clip: jax.Array
    ok: jax.Array


def _apart(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays, on a CPU rounded before they are used; a GPU would go over every
    parameter twice for it.
    """
    barred = lambda *arrays: lax.optimization_barrier(arrays)  # noqa: E731
    separate: tuple[jax.Array, ...] = lax.platform_dependent(
        *arrays, cpu=barred, default=lambda *arrays: arrays
    )
    return separate


def advance(
    w: jax.Array,
    m: jax.Array,
    v: jax.Array,
    g: jax.Array,
    *,
    config: OptimizerConfig,
    decay: bool,
    now: StepValues,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Take one AdamW step (arXiv 1711.05101) of one float32 parameter; returns (w, m, v).

    m' = b1 m + (1 - b1) g;  v' = b2 v + (1 - b2) g^2;
    w' = w - lr (m' / (1 - b1^t) / (sqrt(v' / (1 - b2^t)) + eps) + weight_decay w),  g scaled by
                                                                                     `clip`, t =
                                                                                     step + 1.
    """
    t = (now.step + 1).astype(jnp.float32)
    g = g.astype(jnp.float32) * now.clip
    m_new = config.beta1 * m + (1 - config.beta1) * g
    v_new = config.beta2 * v + (1 - config.beta2) * g * g
    m_new, v_new = _apart(jnp.where(now.ok, m_new, m), jnp.where(now.ok, v_new, v))
    update = (m_new / (1 - config.beta1**t)) / (
        jnp.sqrt(v_new / (1 - config.beta2**t)) + config.eps
    )
    if decay:
        update = update + config.weight_decay * w
    return jnp.where(now.ok, w - now.lr * update, w), m_new, v_new
