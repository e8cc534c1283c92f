"""The end of every training step, and computations that all training steps share.

Fused, streamed and image steps call `finish_step` after they have reduced the gradients.

Legend: N MoE layers, E experts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jmoe.config import ModelConfig, TrainConfig
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import LossTokens, balance_loss_local, updated_bias
from jmoe.mesh import ALL, REPLICATED, path_names
from jmoe.optim.adamw import OptimizerStepScalars
from jmoe.optim.learning_rate import learning_rate_schedule
from jmoe.optim.loss_scale import MIN_LOSS_SCALE, undo_loss_scale
from jmoe.training.parameter_update import update_parameters
from jmoe.training.state import TrainState
from jmoe.training.trained_parts import is_trained
from jmoe.types import PyTree

T = TypeVar("T")


def tokens_per_accumulation_step(config: TrainConfig) -> int:
    """Return the number of tokens in one accumulation step, over all devices."""
    return config.batch_size * config.sequence_length // config.gradient_accumulation_steps


def tokens_of_layers(config: TrainConfig) -> int | np.ndarray:
    """Return the number of tokens that pass a layer with experts in one accumulation step, over all
    devices; of a model with an encoder one number for each of these layers, float32 [N].
    """
    if not config.model.num_encoder_layers:
        return tokens_per_accumulation_step(config)
    sequences = config.batch_size // config.gradient_accumulation_steps
    layers = config.model.expert_layers
    return np.asarray([sequences * config.positions_of(layer) for layer in layers], np.float32)


def router_key(
    config: TrainConfig, step: jax.Array, device: jax.Array | int, accumulation: jax.Array
) -> jax.Array:
    """Return the PRNG key for a device's routers in one accumulation step; the caller splits it
    over MoE layers.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    return jax.random.fold_in(jax.random.fold_in(key, device), accumulation)


def loss_tokens_of(stats: MoEStats) -> LossTokens:
    """Return the tokens that the router losses of these layers count, on this device."""
    return LossTokens(None, stats.counts_E) if stats.loss_tokens is None else stats.loss_tokens


def auxiliary_losses(
    config: TrainConfig, probs_sum_E: jax.Array, z_sum: jax.Array, loss_tokens: LossTokens
) -> tuple[jax.Array, jax.Array]:
    """Return this device's addends to the weighted (balance, z) losses of one accumulation step.

    Inputs may have leading layer dimensions, which are summed; the losses are means over all MoE
    layers. loss_tokens: summed over all devices; the number of tokens is equal in all layers, but
    for a model with an encoder, whose tokens all count.
    """
    model = config.model
    router = config.model.router
    num_tokens: jax.Array | int | np.ndarray = tokens_of_layers(config)
    if loss_tokens.number is not None:
        num_tokens = jnp.maximum(loss_tokens.number.reshape(-1)[0], 1).astype(jnp.float32)
    balance = balance_loss_local(
        probs_sum_E, loss_tokens.counts_E, num_tokens, model.num_experts, model.num_experts_per_tok
    )
    layers, accumulation = model.num_moe_layers, config.gradient_accumulation_steps
    if isinstance(num_tokens, np.ndarray):
        z = router.z_loss_coef * (z_sum / num_tokens).sum() / layers
    else:
        z = router.z_loss_coef * z_sum.sum() / num_tokens / layers
    return router.aux_loss_coef * balance.sum() / layers / accumulation, z / accumulation


def num_dropped_assignments(stats: MoEStats | None) -> jax.Array:
    """Return the number of token-expert assignments, over all devices, that found no buffer row.

    stats: this device's; None for a model without experts.
    """
    dropped = jnp.int32(0) if stats is None else stats.dropped.sum(dtype=jnp.int32)
    return lax.psum(dropped, ALL)


def evaluation_program(
    sharded: Callable[..., PyTree], local: Callable[..., PyTree], *in_specs: PyTree
) -> PyTree:
    """Return the compiled program of a pass without gradients, in the form that `run_without_drops`
    calls.

    sharded: a function that wraps another in `shard_map`. local: the function of the pass on one
    device, with a keyword `full_capacity`; its results must be replicated.
    """

    def run(*args: PyTree, full_capacity: bool) -> PyTree:
        return sharded(
            partial(local, full_capacity=full_capacity), in_specs=in_specs, out_specs=REPLICATED
        )(*args)

    return jax.jit(run, static_argnames="full_capacity")


def run_without_drops(run: Callable[..., tuple[T, jax.Array]]) -> T:
    """Return the result of a pass without gradients in which no token is dropped.

    run: a function that takes `full_capacity` and returns (result, number of dropped assignments).
    The first call uses training's buffers, which need a fraction of the memory; if they overflow, a
    second call uses buffers that hold every token.
    """
    result, dropped = run(full_capacity=False)
    if int(dropped):
        result, _ = run(full_capacity=True)
    return jax.block_until_ready(result)


def has_overflowed(model: ModelConfig, dropped: jax.Array | np.ndarray | None) -> ArrayLike:
    """Return whether a buffer of a dropless step overflowed; the caller then runs the step again
    with full capacity (`train.train_step`).

    dropped: dropped assignments of each layer with experts, on all devices; None without such
    layers.
    """
    if model.capacity_factor is not None or dropped is None:
        return False
    overflow: ArrayLike = dropped.sum() > 0
    return overflow


def finish_step(
    config: TrainConfig,
    state: TrainState,
    grads: PyTree,
    squares: dict[str, jax.Array],
    metrics: dict[str, jax.Array],
    specs: PyTree = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Clip gradients, update parameters and router biases, and complete the metrics; return (state,
    metrics).

    grads: like `state.m`, this device's shards, reduced over devices. squares: squared global
    norms of the gradients, by name. metrics: summed over devices, including `loss` and, with router
    biases, `counts` [N, E]. specs: see `update_parameters`.

    `metrics["ok"]` is False if the loss or the norm is not finite or a buffer overflowed; the
    returned state is then unchanged except for its loss scale. In float16 `grads` and `squares` are
    multiplied by the loss scale; if that makes the norm overflow, the scale is halved and
    `metrics["skipped"]` is True. `metrics["clip"]` is the factor to apply to `grads` as given,
    which includes the inverse loss scale.
    """
    loss_scale = state.loss_scale
    if loss_scale is not None:
        scale = loss_scale.scale
        squares = {name: square / scale / scale for name, square in squares.items()}
    norm = jnp.sqrt(sum(jnp.sum(square) for square in squares.values()))
    overflow = jnp.asarray(has_overflowed(config.model, metrics.get("dropped")))
    ok = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm) & ~overflow
    limit = config.optimizer.clip_norm
    clip = undo_loss_scale(
        jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)) if limit else jnp.float32(1.0),
        loss_scale,
    )
    schedule = learning_rate_schedule(config.optimizer, config.num_steps)
    lr = jnp.asarray(schedule(state.step.astype(jnp.float32)), jnp.float32)
    now = OptimizerStepScalars(lr, state.step, clip, ok)
    with jax.named_scope("optimizer"):
        state = update_parameters(config, state, grads, now, specs)
    speed = config.model.router.bias_update_speed

    def update_bias(path: KeyPath, bias: jax.Array) -> jax.Array:
        if not is_trained(config, path_names(path)):  # frozen with its router
            return bias
        return jnp.where(ok, updated_bias(bias, metrics["counts"], speed), bias)

    bias = jax.tree_util.tree_map_with_path(update_bias, state.router_bias)
    metrics = metrics | {
        "grad_norm": norm,
        "grad_norms": jax.tree.map(jnp.sqrt, squares),
        "learning_rate": lr,
        "clip": clip,
        "overflow": overflow,
        "ok": ok,
    }
    if loss_scale is not None:
        by_scale = jnp.isfinite(metrics["loss"]) & ~jnp.isfinite(norm) & ~overflow
        skipped = by_scale & (loss_scale.scale > MIN_LOSS_SCALE)
        metrics |= {"loss_scale": loss_scale.scale, "skipped": skipped}
        loss_scale = loss_scale.next_scale(ok, skipped, config.loss_scale)
    step_now = state.step + ok.astype(jnp.int32)
    stepped = replace(state, router_bias=bias, step=step_now, loss_scale=loss_scale, cast=())
    return stepped, metrics


def sum_over_mesh(num_devices: int, tree: PyTree) -> PyTree:
    """Return `tree` summed over all devices of the mesh; `tree` itself on one device."""
    return lax.psum(tree, ALL) if num_devices > 1 else tree
