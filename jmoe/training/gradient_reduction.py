"""The gradients of a step that runs layer by layer, all but the experts', and how they come onto their shards.

Legend: A accumulation steps, N layers of a kind, E experts, R devices, G elements of a device's part of the gradients
of a layer's flat buffer.

Runs inside `shard_map` over all devices, or on one. What differs between devices has a leading dimension of R.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmoe.collectives.fusion import all_reduce_local, pack_gradients, reduce_scatter_rows_local, unpack_gradients
from jmoe.config import LayerKind, TrainConfig
from jmoe.layers.moe import MoEStats
from jmoe.mesh import path_names
from jmoe.models.decoder import STACKS
from jmoe.training.reverse_scan import Kind
from jmoe.training.state import TrainState
from jmoe.training.step import PureDecoder, squared_norms_local
from jmoe.training.update import auxiliary_losses, finish_step, over_devices, tokens_per_accumulation_step


class Gradients(NamedTuple):
    """Of everything but the experts. outside: [R, ...]. By kind of layer, rest: [R, N, ...], and rows_G: by layer."""

    outside: Any
    rest: dict[LayerKind, list[jax.Array]]
    rows_G: dict[LayerKind, list[jax.Array]]


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


def _on_shards(model: PureDecoder, params: Any, grads: Gradients) -> Any:
    """The gradients of the parameters that lie here, summed over all devices."""
    outside, hierarchy, split = without_stacks(params), model.hierarchy, model.embedding.split
    layers = kind_of_outside(model, outside)
    fused, rest = layers.split(jax.tree.map(lambda g: g[0], grads.outside))
    names = [path_names(path)[0] for path, _ in jax.tree_util.tree_leaves_with_path(outside)]
    summed = [names[i] in split for i in layers.rest]  # what stays in parts has everyone's gradients already
    everywhere = {"": [g for g, done in zip(rest, summed, strict=True) if not done]}
    everywhere |= {STACKS[kind]: [g[0] for g in leaves] for kind, leaves in grads.rest.items()}
    if model.mesh.size > 1:
        everywhere = all_reduce_local(everywhere, hierarchy)
    if layers.parts:
        row_G = reduce_scatter_rows_local(pack_gradients(fused, layers.parts, hierarchy), hierarchy)
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
    metrics = over_devices(model.mesh.size, _metrics(config, losses, stats, counts_NAE))
    metrics |= {"counts": counts_NAE.sum(axis=1, dtype=jnp.int32), "dropped": dropped_N}
    reduced = _on_shards(model, state.params, grads)
    norms = squared_norms_local(reduced, model)
    norms["moe_layers"] = norms["moe_layers"] + jnp.stack([square[0] for square in squares])
    norms = over_devices(model.mesh.size, norms)
    return finish_step(config, state, reduced, norms, metrics, jnp.bool_(False))


def _metrics(
    config: TrainConfig, losses: Sequence[jax.Array], stats: Sequence[Sequence[MoEStats]], counts_NAE: jax.Array
) -> dict[str, jax.Array]:
    """This device's part of the step's losses and of its routers' entropies."""
    total_tokens = tokens_per_accumulation_step(config) * config.gradient_accumulation_steps
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
