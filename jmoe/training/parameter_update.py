"""One optimizer step of all trained parameters of a device, each by the rule for the form of its
moments (`optim.moments`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from jmoe.config import OptimizerConfig, TrainConfig
from jmoe.mesh import path_names
from jmoe.models.weights import flatten_by_path
from jmoe.optim.adamw import OptimizerStepScalars, adamw_update, has_weight_decay
from jmoe.optim.block_codes import decode, encode
from jmoe.optim.muon import muon_update
from jmoe.training.state import TrainState
from jmoe.training.trained_parts import replace_subtree, subtree_like
from jmoe.types import PyTree

Arrays = dict[str, jax.Array]  # of one parameter: w, and those of m, v and their scales it has


def update_parameters(
    config: TrainConfig,
    state: TrainState,
    grads: PyTree,
    step_scalars: OptimizerStepScalars,
    specs: PyTree = None,
) -> TrainState:
    """Return the state with parameters and moments after one step; its other fields stay.

    grads: like `state.m`, reduced over devices. specs: the partition specs of all parameters, which
    Muon needs.
    """
    trained, scales = subtree_like(state.params, state.m), state.scales or {"m": {}, "v": {}}
    trees = {"w": trained, "m": state.m, "v": state.v}
    trees |= {"m_scale": scales["m"], "v_scale": scales["v"]}
    old = {name: flatten_by_path(tree) for name, tree in trees.items()}
    new: dict[str, dict[tuple[str, ...], jax.Array]] = {name: {} for name in trees}
    gradients = flatten_by_path(grads)
    spec_at = {} if specs is None else flatten_by_path(specs)
    for path, _ in jax.tree_util.tree_leaves_with_path(trained):
        names = path_names(path)
        own = {name: arrays[names] for name, arrays in old.items() if names in arrays}
        if "v" not in own:
            split = _split_of_matrix(spec_at[names], own["w"].ndim)
            updated = _muon(config, own, gradients[names], step_scalars, split)
        else:
            updated = _adamw(config.optimizer, path, own, gradients[names], step_scalars)
        for name, array in updated.items():
            new[name][names] = array
    w, m, v, *both = (_like(tree, new[name]) for name, tree in trees.items())
    params = replace_subtree(state.params, w)
    scales = None if state.scales is None else dict(zip("mv", both, strict=True))
    return replace(state, params=params, m=m, v=v, scales=scales)


def _adamw(
    config: OptimizerConfig,
    path: KeyPath,
    own: Arrays,
    g: jax.Array,
    step_scalars: OptimizerStepScalars,
) -> Arrays:
    """Return a parameter's arrays after AdamW, with moments in the form that they had."""
    m, v, coded = own["m"], own["v"], "m_scale" in own
    if coded:
        m = decode(m, own["m_scale"], signed=True)
        v = decode(v, own["v_scale"], signed=False)
    decay = has_weight_decay(path, own["w"])
    w, m, v = adamw_update(own["w"], m, v, g, config=config, decay=decay, step_scalars=step_scalars)
    if not coded:
        return {"w": w, "m": m, "v": v}
    new: Arrays = {"w": w}
    for name, values in (("m", m), ("v", v)):
        scale = own[f"{name}_scale"]
        codes, scales = encode(values, scale.shape[-1], signed=name == "m")
        # a step that is not taken leaves its codes, which need not be those of their values
        new[name] = jnp.where(step_scalars.ok, codes, own[name])
        new[f"{name}_scale"] = jnp.where(step_scalars.ok, scales, scale)
    return new


def _muon(
    config: TrainConfig,
    own: Arrays,
    g: jax.Array,
    step_scalars: OptimizerStepScalars,
    split: tuple[int, Sequence[str]] | None,
) -> Arrays:
    """Return a matrix and its momentum after Muon, whose products run in bfloat16 if the run's do,
    else in float32.
    """
    dtype = jnp.bfloat16 if config.compute_dtype == "bfloat16" else jnp.float32
    w, m = muon_update(
        own["w"],
        own["m"],
        g,
        config=config.optimizer,
        step_scalars=step_scalars,
        split=split,
        dtype=dtype,
    )
    return {"w": w, "m": m}


def _split_of_matrix(spec: PartitionSpec, ndim: int) -> tuple[int, Sequence[str]] | None:
    """Return (dimension, mesh axes) in which devices split the matrices of a parameter; None if
    each device has whole ones.
    """
    for dim in range(ndim - 2, min(ndim, len(spec))):
        axes = spec[dim]
        if axes is not None:
            return dim, (axes,) if isinstance(axes, str) else axes
    return None


def _like(tree: PyTree, arrays: Mapping[tuple[str, ...], jax.Array]) -> PyTree:
    """Return nested dictionaries like `tree` with the arrays at their paths."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [arrays[path_names(path)] for path, _ in leaves])
