"""A checkpoint's step as the state of a run, whatever tiers its experts were saved from and go to."""

from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jmoe.offload.saved_experts import OfExperts, SavedExperts, expert_arrays
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.state import experts_of, with_experts, without_experts
from jmoe.training.step import Program, TrainState

LINKED = {"weights", "moments"}  # kinds of records that a run can take over as they are, with gradients that wait


def restored(program: Program, checkpoints: Checkpoints, step: int) -> tuple[TrainState, Any]:
    """Return (the state, the data's state) of `step`; records that stay on the tier nvme become current."""
    names = checkpoints.arrays(step)
    if not program.has_experts:
        state, data, _ = checkpoints.restore(step, program.saved_shape)
        return program.from_saved(state), data
    shapes = {name: tuple(leaf.shape[2:]) for name, leaf in experts_of(program.full_shape.params).items()}
    num_experts = next(iter(experts_of(program.full_shape.params).values())).shape[1]
    saved = SavedExperts(checkpoints.folder_of(step), shapes, num_experts)
    if program.from_layers is not None:
        linked = saved.kinds == LINKED and _as_here(program, saved)
        rest, data, _ = checkpoints.restore(step, program.saved_shape, but=expert_arrays(names), records=linked)
        weights, moments = (None, None) if linked else (saved.weights, saved.moments)
        return program.from_layers(rest, weights, moments), data
    shape = program.saved_shape
    kinds = {"params": "weights", "m": "moments", "v": "moments"}
    trees = {part: getattr(shape, part) for part in kinds}
    absent = {part for part, kind in kinds.items() if kind in saved.kinds}
    trees |= {part: without_experts(trees[part]) for part in absent}
    wanted = TrainState(trees["params"], trees["m"], trees["v"], shape.router_bias, shape.step)
    rest, data, _ = checkpoints.restore(step, wanted)
    filled = {part: getattr(rest, part) for part in kinds}
    if "params" in absent:
        filled["params"] = with_experts(filled["params"], _placed(experts_of(shape.params), saved.weights, ""))
    for part in sorted(absent & {"m", "v"}):
        filled[part] = with_experts(filled[part], _placed(experts_of(getattr(shape, part)), saved.moments, f"{part}."))
    state = TrainState(filled["params"], filled["m"], filled["v"], rest.router_bias, rest.step)
    return program.from_saved(state), data


def _as_here(program: Program, saved: SavedExperts) -> bool:
    """Whether the run keeps its experts as they were saved; what they are behind is then the same as before."""
    records = program.records
    if records is None or not records.stores.keys() >= LINKED:
        return False
    return saved.laziness is None or saved.laziness.settings.items() <= records.settings.items()


def _placed(shapes: Any, read: OfExperts, prefix: str) -> dict[str, jax.Array]:
    """Return the arrays [N, E, ...] of all layers' experts where `shapes` has them; this process reads its own."""
    leaf = next(iter(shapes.values()))
    num_layers, num_experts = leaf.shape[:2]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    own = np.unique(np.concatenate([np.arange(num_experts)[index[1]] for index in indices]))
    host: dict[str, NDArray[np.float32]] = {
        name: np.empty((num_layers, own.size, *leaf.shape[2:]), np.float32) for name, leaf in shapes.items()
    }
    for layer in range(num_layers):
        arrays = read(layer, own)
        for name, array in host.items():
            array[layer] = arrays[f"{prefix}{name}"]

    def part(name: str, index: tuple[slice, ...]) -> NDArray[np.float32]:
        return host[name][:, np.searchsorted(own, np.arange(num_experts)[index[1]])]

    return {
        name: jax.make_array_from_callback(leaf.shape, leaf.sharding, partial(part, name))
        for name, leaf in shapes.items()
    }
