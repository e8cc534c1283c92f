"""Placement of the experts of task-routed layers in elastic layouts: each device holds the experts
that its tasks' paths name.

The devices run one SPMD program, so each holds arrays of the same shape: S slots per layer, as many
as the device with the most experts needs. Unused slots are padding, with zero values and gradients.
An expert that several devices need has a copy on each, and its gradients are summed over these
devices only. `ShardedVision`, both image trainers and `VisionSession` use `TaskSlots`.

Legend:
R devices
N task-routed layers
E experts of a layer
S slots of a device in a layer
A tasks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jmoe.config import VisionTrainConfig
from jmoe.mesh import ALL, EXPERTS_PATH
from jmoe.models.vision import SHARED_EXPERT
from jmoe.planning.elastic import TaskLayout
from jmoe.types import PyTree

NONE = -1  # an empty slot
# (groups of devices, the slot of each device)
_GroupsAndSlots = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class TaskSlots:
    """The expert in each slot, [R, N, S]: ascending per device and layer, then `NONE` for padding.

    homes: for each task, the devices that hold all experts of its path.
    """

    experts_RNS: NDArray[np.int32]
    num_experts: int
    homes: tuple[tuple[int, ...], ...]

    @property
    def num_slots(self) -> int:
        """S, the number of slots per device and layer."""
        return int(self.experts_RNS.shape[2])

    @cached_property
    def slot_RNE(self) -> NDArray[np.int32]:
        """The slot of each expert on each device; `NONE` if the device does not hold the expert."""
        is_in_RNSE = self.experts_RNS[..., None] == np.arange(self.num_experts)
        slot = np.where(is_in_RNSE.any(axis=2), is_in_RNSE.argmax(axis=2), NONE)
        return slot.astype(np.int32)

    @cached_property
    def is_first_holder_RNS(self) -> NDArray[np.bool_]:
        """Whether a device is the first of the devices that hold the slot's expert."""
        first_NE = (self.slot_RNE != NONE).argmax(axis=0)
        layers = np.arange(first_NE.shape[0])[:, None]
        device = np.arange(len(self.experts_RNS))[:, None, None]
        return (self.experts_RNS != NONE) & (first_NE[layers, self.experts_RNS] == device)

    def reduction_rounds(self) -> Iterator[tuple[list[int], list[list[int]], NDArray[np.int32]]]:
        """Yield the rounds of group-wise all-reduces that sum every shared expert's gradients.

        Each round is (layers, disjoint groups that together contain every device, the slot [R] that
        each device sums). A group of one device has nothing to sum.
        """
        devices, layers_of = len(self.experts_RNS), dict[_GroupsAndSlots, list[int]]()
        for layer in range(self.experts_RNS.shape[1]):
            waiting = {}
            for expert in range(self.num_experts):
                slots = self.slot_RNE[:, layer, expert]
                if (group := np.flatnonzero(slots != NONE)).size > 1:
                    waiting[expert] = group
            while waiting:
                slot_R, groups, free = np.zeros(devices, np.int32), [], set(range(devices))
                for expert, group in list(waiting.items()):
                    if free.issuperset(group.tolist()):
                        groups.append(waiting.pop(expert).tolist())
                        free -= set(groups[-1])
                        slot_R[group] = self.slot_RNE[group, layer, expert]
                groups += [[device] for device in sorted(free)]
                layers_of.setdefault(
                    (tuple(map(tuple, groups)), tuple(slot_R.tolist())), []
                ).append(layer)
        for (all_groups, all_slots), layers in layers_of.items():
            yield layers, [list(group) for group in all_groups], np.array(all_slots, np.int32)

    # On a device, inside `shard_map`

    def device_row_local(self, table: np.ndarray) -> jax.Array:
        """Return this device's row of a table [R, ...]; call inside `shard_map`."""
        return jnp.asarray(table)[lax.axis_index(ALL)]

    def expert_slots_local(self) -> jax.Array:
        """Return int32 [N, E]: each expert's slot on this device, 0 for experts that it does not
        hold.
        """
        return self.device_row_local(np.maximum(self.slot_RNE, 0))

    def reduce_experts_local(self, grads: PyTree) -> PyTree:
        """Return gradients [N, S, ...] in float32, summed over the devices that hold each
        expert.
        """

        def reduce_array(g: jax.Array) -> jax.Array:
            g = g.astype(jnp.float32)
            for layers, groups, slot_R in self.reduction_rounds():
                at = np.array(layers), self.device_row_local(slot_R)
                g = g.at[at].set(lax.psum(g[at], ALL, axis_index_groups=groups))
            return g

        return jax.tree.map(reduce_array, grads)

    def reduce_layer_local(
        self, grads: Mapping[str, jax.Array], layer: int
    ) -> dict[str, jax.Array]:
        """Return one layer's gradients [S, ...] summed over the devices that hold each expert."""
        reduced = dict(grads)
        for layers, groups, slot_R in self.reduction_rounds():
            if layer in layers:
                slot = self.device_row_local(slot_R)
                summed = {
                    name: lax.psum(g[slot], ALL, axis_index_groups=groups)
                    for name, g in reduced.items()
                }
                reduced = {name: g.at[slot].set(summed[name]) for name, g in reduced.items()}
        return reduced

    def sum_by_expert_local(self, counts_S: jax.Array, layer: jax.Array) -> jax.Array:
        """Return counts [E] by expert, summed over all devices. counts_S: this device's counts by
        slot of the layer.
        """
        experts_S = self.device_row_local(
            np.where(self.experts_RNS == NONE, self.num_experts, self.experts_RNS)
        )[layer]
        counts_E = (
            jnp.zeros(self.num_experts, counts_S.dtype).at[experts_S].add(counts_S, mode="drop")
        )
        total_E: jax.Array = lax.psum(counts_E, ALL)
        return total_E

    def squared_norms_local(self, grads: PyTree) -> jax.Array:
        """Return this device's addend [N] to the squared norm of reduced gradients; each expert
        counts on one device only.
        """
        owns_NS = self.device_row_local(self.is_first_holder_RNS)
        squares_NS = [
            jnp.square(g).sum(axis=tuple(range(2, g.ndim))) for g in jax.tree.leaves(grads)
        ]
        return jnp.where(owns_NS, jnp.stack(squares_NS).sum(axis=0), 0.0).sum(axis=1)

    def to_saved_local(self, w: jax.Array, dim: int) -> jax.Array:
        """Return this device's shard of the checkpoint array [N, E, ...], from its slots [N, S,
        ...].

        dim: the dimension that all devices split; -1 returns the whole array. Experts move one
        after another, which bounds the temporary memory.
        """
        layers, bits = np.arange(w.shape[0]), lax.bitcast_convert_type(w, jnp.int32)
        owns_NE = np.take_along_axis(
            self.is_first_holder_RNS, np.maximum(self.slot_RNE, 0), axis=2
        ) & (self.slot_RNE != NONE)
        slot_NE, own_NE = self.expert_slots_local(), self.device_row_local(owns_NE)

        def saved_expert(expert: jax.Array) -> jax.Array:
            mine_N = own_NE[:, expert].reshape(-1, *[1] * (w.ndim - 2))
            # Only one device adds a value that is not zero, so the integer sum keeps every bit.
            part = jnp.where(mine_N, bits[layers, slot_NE[:, expert]], 0)
            return (
                lax.psum(part, ALL)
                if dim < 0
                else lax.psum_scatter(part, ALL, scatter_dimension=dim - 1, tiled=True)
            )

        saved_EN = lax.map(saved_expert, jnp.arange(self.num_experts, dtype=jnp.int32))
        return lax.bitcast_convert_type(jnp.moveaxis(saved_EN, 0, 1), w.dtype)

    def from_saved_local(self, saved: jax.Array, dim: int) -> jax.Array:
        """Return this device's slots [N, S, ...], from its shard of a checkpoint array; the inverse
        of `to_saved_local`.
        """
        layers = np.arange(saved.shape[0])
        slot_NE = self.device_row_local(
            np.where(self.slot_RNE == NONE, self.num_slots, self.slot_RNE)
        )
        sizes = list(saved.shape[2:])
        if dim >= 0:
            sizes[dim - 2] *= len(self.experts_RNS)
        empty = jnp.zeros((len(layers), self.num_slots, *sizes), saved.dtype)

        def set_expert(expert: jax.Array, w: jax.Array) -> jax.Array:
            whole = saved[:, expert]
            whole = whole if dim < 0 else lax.all_gather(whole, ALL, axis=dim - 1, tiled=True)
            return w.at[layers, slot_NE[:, expert]].set(whole, mode="drop")

        return lax.fori_loop(0, self.num_experts, set_expert, empty)


def has_same_slots(placement: TaskSlots | None, other: TaskSlots | None) -> bool:
    """Return whether both placements put the same expert into every slot."""
    if placement is None or other is None:
        return placement is other
    return np.array_equal(placement.experts_RNS, other.experts_RNS)


def task_experts_of(tree: PyTree) -> PyTree:
    """Return the experts' parameters in the task-routed layers of `tree`."""
    return tree["task_layers"]["moe"][EXPERTS_PATH]


def with_task_experts(tree: PyTree, experts: PyTree) -> PyTree:
    """Return `tree` with `experts` as the experts' parameters of its task-routed layers."""
    layers = tree["task_layers"]
    return tree | {"task_layers": layers | {"moe": layers["moe"] | {EXPERTS_PATH: experts}}}


def places_experts_by_task(config: VisionTrainConfig, num_devices: int) -> bool:
    """Return whether each device may hold only the experts of task-routed layers that its tasks'
    paths name.

    True in an elastic layout on several devices. Experts on tiers also require that no task ends
    before the run, since they cannot move to other devices, and that the model has no learned
    router.
    """
    elastic = config.layout == "elastic" and num_devices > 1 and bool(config.model.task_layers)
    stay = not any(task.num_steps % config.num_steps for task in config.tasks.values())
    return elastic and (config.tiers.all_on_device or (stay and not config.model.num_moe_layers))


def task_slots(config: VisionTrainConfig, layout: TaskLayout) -> TaskSlots | None:
    """Return the placement of the experts of task-routed layers; None if the mesh splits them
    evenly.

    A device holds the experts that the paths of its tasks name. The experts of an ended task, and
    experts that no path names, go to the devices with the fewest experts.
    """
    devices, paths = len(layout.shares), [task.path for task in config.tasks.values()]
    num_layers, num_experts = len(config.model.task_layers), config.model.num_experts
    if not places_experts_by_task(config, devices):
        return None
    needs: list[list[set[int]]] = [[set() for _ in range(num_layers)] for _ in range(devices)]

    def add_path(device: int, path: Sequence[int]) -> None:
        for needed, expert in zip(needs[device], path, strict=True):
            needed |= {expert, SHARED_EXPERT} if config.model.learn_paths else {expert}

    homes = [layout.devices_of(number) for number in range(len(paths))]
    # Tasks that no device runs come last: they fill the devices with the fewest experts.
    for number in sorted(range(len(paths)), key=lambda number: not homes[number]):
        homes[number] = homes[number] or (
            min(range(devices), key=lambda d: sum(map(len, needs[d]))),
        )
        for device in homes[number]:
            add_path(device, paths[number])
    for layer in range(num_layers):
        named = {expert for needed in needs for expert in needed[layer]}
        for expert in sorted(set(range(num_experts)) - named):
            min(needs, key=lambda needed: len(needed[layer]))[layer].add(expert)
    num_slots = max(len(needed) for device in needs for needed in device)
    experts = np.full((devices, num_layers, num_slots), NONE, np.int32)
    for device, needed in enumerate(needs):
        for layer, own in enumerate(needed):
            experts[device, layer, : len(own)] = sorted(own)
    return TaskSlots(experts, num_experts, tuple(homes))
