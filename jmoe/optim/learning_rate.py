"""The learning rate of each step."""

import optax

from jmoe.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step.

    The rate rises linearly from `learning_rate / warmup_steps` at step 0 to `learning_rate`. Then
    it stays constant ("constant"), decays along a cosine to `learning_rate *
    final_learning_rate_fraction` at step `num_steps` ("cosine"), or stays constant until the last
    `decay_steps` steps, in which it falls linearly to that rate ("wsd": warm-up, stable, decay).
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "wsd":
        decay = config.decay_steps or max(1, num_steps // 10)
        end = peak * config.final_learning_rate_fraction
        stable = max(0, num_steps - warmup - decay)
        after = optax.linear_schedule(peak, end, decay, transition_begin=stable)
    else:
        steps = max(1, num_steps - warmup)
        after = optax.cosine_decay_schedule(peak, steps, config.final_learning_rate_fraction)
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / warmup, peak, warmup - 1), after], [warmup]
    )
