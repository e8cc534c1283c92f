"""What ends a step that runs layer by layer: the gradients of all but the experts, on their shards, and their update.

Legend: A accumulation steps, N layers of a kind, E experts, R devices, G elements of a device's part of the gradients
of a layer's flat buffer.

Runs inside `shard_map` over all devices, or on one. What differs between devices has a leading dimension of R.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.fusion import all_reduce_local, pack_gradients, reduce_scatter_rows_local, unpack_gradients
from jmoe.config import TrainConfig
from jmoe.layers.moe import MoEStats
from jmoe.layers.router import balance_loss_local, updated_bias
from jmoe.mesh import ALL, path_names
from jmoe.training.optimizer import advance, decays, learning_rate
from jmoe.training.reverse_scan import Kind
from jmoe.training.step import PureDecoder, TrainState, squared_norms_local

STACKS = {False: "dense_layers", True: "moe_layers"}  # has experts -> the parameters of such layers


class Gradients(NamedTuple):
    """Of everything but the experts. outside: [R, ...]. By kind of layer, rest: [R, N, ...], and rows_G: by layer."""

    outside: Any
    rest: dict[bool, list[jax.Array]]
    rows_G: dict[bool, list[jax.Array]]


def without_stacks(params: Any) -> Any:
    """The parameters outside the layers."""
    return {name: tree for name, tree in params.items() if name not in STACKS.values()}


def kind_of_layers(model: PureDecoder, stack: Any) -> Kind:
    """Of stacked layers as they lie here."""
    leaves = jax.tree_util.tree_leaves_with_path(stack)
    return Kind(stack, [model.part(path, w.shape[1:]) for path, w in leaves])


def kind_of_outside(model: PureDecoder, outside: Any) -> Kind:
    """Of the parameters outside the layers as they lie here."""
    return Kind(outside, [model.part(path, w.shape) for path, w in jax.tree_util.tree_leaves_with_path(outside)])


def over_devices(mesh: Mesh, tree: Any) -> Any:
    """The sum over all devices."""
    return lax.psum(tree, ALL) if mesh.size > 1 else tree


def num_tokens(config: TrainConfig) -> int:
    """Of an accumulation step, on all devices."""
    return config.batch_size * config.sequence_length // config.gradient_accumulation_steps


def auxiliary_losses(
    config: TrainConfig, probs_sum_E: jax.Array, z_sum: jax.Array, counts_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """This device's part of a layer's (weighted) balance and z losses of one accumulation step."""
    model, router = config.model, config.model.router
    parts = model.num_moe_layers * config.gradient_accumulation_steps
    balance = balance_loss_local(
        probs_sum_E, counts_E, num_tokens(config), model.num_experts, model.num_experts_per_tok
    )
    return router.aux_loss_coef * balance / parts, router.z_loss_coef * z_sum / num_tokens(config) / parts


def _on_shards(model: PureDecoder, params: Any, grads: Gradients) -> Any:
    """The gradients of the parameters that lie here, summed over all devices."""
    outside, levels, split = without_stacks(params), model.levels, model.embedding.split
    layers = kind_of_outside(model, outside)
    fused, rest = layers.split(jax.tree.map(lambda g: g[0], grads.outside))
    names = [path_names(path)[0] for path, _ in jax.tree_util.tree_leaves_with_path(outside)]
    summed = [names[i] in split for i in layers.rest]  # what stays in parts has everyone's gradients already
    everywhere = {"": [g for g, done in zip(rest, summed, strict=True) if not done]}
    everywhere |= {STACKS[kind]: [g[0] for g in leaves] for kind, leaves in grads.rest.items()}
    if model.mesh.size > 1:
        everywhere = all_reduce_local(everywhere, levels)
    if layers.parts:
        row_G = reduce_scatter_rows_local(pack_gradients(fused, layers.parts, levels), levels)
        fused = unpack_gradients(row_G, layers.parts)
    others = iter(everywhere.pop(""))
    found = layers.join(fused, [g if done else next(others) for g, done in zip(rest, summed, strict=True)])
    for kind, rows_G in grads.rows_G.items():
        name = STACKS[kind]
        layers = kind_of_layers(model, params[name])
        fused = jax.vmap(partial(unpack_gradients, parts=layers.parts))(jnp.stack(rows_G)) if rows_G else []
        found |= {name: layers.join(fused, everywhere[name])}
    return found


def finish_local(
    config: TrainConfig,
    model: PureDecoder,
    state: TrainState,
    grads: Gradients,
    squares: Sequence[jax.Array],
    losses: Sequence[jax.Array],
    stats: Sequence[Sequence[MoEStats]],
    totals: tuple[jax.Array, jax.Array],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The dense state after its update, and the step's metrics.

    squares: of each layer's experts' gradients. losses: parts to add up. stats: [N][A]. totals: of `_totals`.
    """
    counts_NAE, dropped_N = totals
    metrics = over_devices(model.mesh, _metrics(config, losses, stats, counts_NAE))
    found = _on_shards(model, state.params, grads)
    norms = squared_norms_local(found, model)
    norms["moe_layers"] = norms["moe_layers"] + jnp.stack([square[0] for square in squares])
    norms = over_devices(model.mesh, norms)
    norm = jnp.sqrt(sum(jnp.sum(square) for square in norms.values()))
    ok = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    limit = config.optimizer.clip_norm
    clip = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)) if limit else jnp.float32(1.0)
    lr = jnp.asarray(learning_rate(config.optimizer, config.num_steps)(state.step.astype(jnp.float32)), jnp.float32)
    options: dict[str, Any] = {"config": config.optimizer, "lr": lr, "step": state.step, "clip": clip, "ok": ok}
    leaves, tree = jax.tree_util.tree_flatten_with_path(state.params)
    old = zip(leaves, *(jax.tree.leaves(part) for part in (state.m, state.v, found)), strict=True)
    new = [advance(w, m, v, g, decay=decays(path, w), **options) for (path, w), m, v, g in old]
    params, m, v = (jax.tree.unflatten(tree, part) for part in zip(*new, strict=True))
    speed, counts_NE = config.model.router.bias_update_speed, counts_NAE.sum(axis=1, dtype=jnp.int32)
    bias = jax.tree.map(lambda b: jnp.where(ok, updated_bias(b, counts_NE, speed), b), state.router_bias)
    metrics |= {
        "counts": counts_NE,
        "dropped": dropped_N,
        "grad_norm": norm,
        "grad_norms": jax.tree.map(jnp.sqrt, norms),
        "learning_rate": lr,
        "clip": clip,
        "overflow": jnp.bool_(False),
        "ok": ok,
    }
    return TrainState(params, m, v, bias, state.step + ok.astype(jnp.int32)), metrics


def _metrics(
    config: TrainConfig, losses: Sequence[jax.Array], stats: Sequence[Sequence[MoEStats]], counts_NAE: jax.Array
) -> dict[str, jax.Array]:
    """This device's part of the step's losses and of its routers' entropies."""
    total_tokens = num_tokens(config) * config.gradient_accumulation_steps
    parts = [
        auxiliary_losses(config, s.probs_sum_E[0], s.z_sum[0], counts_NAE[n, a])
        for n, layer in enumerate(stats)
        for a, s in enumerate(layer)
    ]
    zero = jnp.zeros((), jnp.float32)
    return {
        "loss": sum((loss[0] for loss in losses), zero),
        "balance_loss": sum((balance for balance, _ in parts), zero),
        "z_loss": sum((z for _, z in parts), zero),
        "entropy": jnp.stack([sum(s.entropy_sum[0] for s in layer) for layer in stats]) / total_tokens,
    }
