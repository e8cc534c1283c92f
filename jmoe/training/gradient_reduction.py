"""Sum a step's gradients over devices onto the shards of the parameters, and compute their norms.

Both training steps call these functions inside `shard_map`, before `finish_step`. An array that
differs between devices has a leading dimension R when it crosses `shard_map`.

Legend:
N layers of a kind
R devices
G elements of a device's shard of the gradients in one layer's flat buffer
"""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmoe.collectives.fusion import (
    all_reduce_local,
    flatten_gradients,
    reduce_scatter_buffer_local,
    unflatten_gradient_shards,
)
from jmoe.config import STACKS, LayerKind
from jmoe.mesh import EXPERT_COPIES, REPLICA, is_expert, path_names
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.sharded_model import ShardedModel, names_in_layer
from jmoe.types import PyTree


def reduce_gradients_local(
    grads: PyTree, model: ShardedModel, already_reduced: Collection[str] = ()
) -> PyTree:
    """Return `grads` summed over the devices that hold the same parameter.

    The transpose of a gather has summed the gradients of sharded parameters, and of experts split
    over the data axis, inside a replica already; here the replicas' sums are added.
    already_reduced: top-level names whose gradients are reduced already.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(grads)
    sums, everywhere, of_replicas = {}, {}, {}
    for i, (path, g) in enumerate(leaves):
        if path_names(path)[0] in already_reduced or model.num_copies(path) == 1:
            sums[i] = g
        elif model.is_data_split_expert(path) or model.is_fully_sharded(names_in_layer(path)):
            of_replicas[i] = g
        elif is_expert(path):
            sums[i] = lax.psum(g.astype(jnp.float32), EXPERT_COPIES)
        else:
            everywhere[i] = g
    sums |= all_reduce_local(everywhere, model.hierarchy)
    sums |= all_reduce_local(of_replicas, ((REPLICA,),))
    return jax.tree.unflatten(structure, [sums[i] for i in range(len(leaves))])


def squared_norms_local(grads: PyTree, model: ShardedModel) -> dict[str, jax.Array]:
    """Return this device's addend to the squared gradient norms, by top-level name; a `psum`
    completes them.

    A scalar for `embedding`, `head` and other single parameters; [N] for stacks of layers. The
    square of a replicated gradient is divided by its number of copies.
    """
    sums: dict[str, jax.Array] = {}
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        name = path_names(path)[0]
        stacked = name in STACKS.values()
        square = jnp.square(g.astype(jnp.float32)).sum(
            axis=tuple(range(1, g.ndim)) if stacked else None
        )
        square = square / model.num_copies(path)
        sums[name] = sums[name] + square if name in sums else square
    return sums


class StreamedGradients(NamedTuple):
    """The gradients of a layer-by-layer step, for all parameters except experts.
    `outside_buffer` and `rows_G` are by kind of layer.
    """

    outside: PyTree  # [R, ...], parameters outside the layers, not yet summed
    # [R, N, ...], not in the flat buffer, not yet summed
    outside_buffer: dict[LayerKind, list[jax.Array]]
    rows_G: dict[LayerKind, list[jax.Array]]  # flat buffers, one per layer, summed already


def reduce_streamed_gradients_local(
    model: ShardedDecoder, params: PyTree, grads: StreamedGradients
) -> PyTree:
    """Return the gradients as a tree like `params`, summed over all devices, each on the shard that
    this device holds.
    """
    outside = {name: tree for name, tree in params.items() if name not in STACKS.values()}
    layout, split = model.buffer_layout(outside), model.embedding.split_dims
    fused, outside_buffer = layout.split(jax.tree.map(lambda g: g[0], grads.outside))
    stays_split = jax.tree_util.tree_map_with_path(
        lambda path, _: path_names(path)[0] in split, outside
    )
    # A parameter that stays split in use has the gradients of all devices' tokens already.
    is_summed = layout.split(stays_split)[1]
    partial_sums = {"": [g for g, done in zip(outside_buffer, is_summed, strict=True) if not done]}
    for kind, leaves in grads.outside_buffer.items():
        partial_sums[STACKS[kind]] = [g[0] for g in leaves]
    if model.mesh.size > 1:
        partial_sums = all_reduce_local(partial_sums, model.hierarchy)
    if layout.entries:
        row_G = reduce_scatter_buffer_local(
            flatten_gradients(fused, layout.entries, model.hierarchy), model.hierarchy
        )
        fused = unflatten_gradient_shards(row_G, layout.entries)
    others = iter(partial_sums.pop(""))
    reduced = layout.join(
        fused,
        [g if done else next(others) for g, done in zip(outside_buffer, is_summed, strict=True)],
    )
    for kind, rows_G in grads.rows_G.items():
        name = STACKS[kind]
        layout = model.buffer_layout(params[name], stacked=True)
        fused = (
            jax.vmap(partial(unflatten_gradient_shards, entries=layout.entries))(jnp.stack(rows_G))
            if rows_G
            else []
        )
        reduced |= {name: layout.join(fused, partial_sums[name])}
    return reduced
