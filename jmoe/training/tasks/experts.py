"""Where the experts of layers routed by task lie in elastic layouts: on the devices whose tasks
name them.

Legend: R devices, N layers routed by task, E experts of a layer, S slots of a device in a layer, A
tasks.

One program runs on all devices, so that each has an array of the same shape: S slots a layer, as
many as the device that needs most. What a device does not need of them is padding: its values stay
0, and so do its gradients. An expert that several devices need has a copy on each; gradients are
summed over these devices alone, so that copies stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jmoe.config import VisionTrainConfig
from jmoe.mesh import ALL, EXPERTS_PATH
from jmoe.models.vision import SHARED_EXPERT
from jmoe.planning.elastic import Layout

NONE = -1  # an empty slot


@dataclass(frozen=True, eq=False)
class TaskSlots:
    """Which expert is in each slot, [R, N, S], in rising order, then `NONE`; homes: [A], devices
    with all of a path.
    """

    experts_RNS: NDArray[np.int32]
    num_experts: int
    homes: tuple[tuple[int, ...], ...]

    @property
    def num_slots(self) -> int:
        """Return the slots of a device in a layer."""
        return int(self.experts_RNS.shape[2])

    @cached_property
    def slot_RNE(self) -> NDArray[np.int32]:
        """The slot of each expert on each device; `NONE` where it has none."""
        is_in_RNSE = self.experts_RNS[..., None] == np.arange(self.num_experts)
        slot = np.where(is_in_RNSE.any(axis=2), is_in_RNSE.argmax(axis=2), NONE)
        return slot.astype(np.int32)

    @cached_property
    def owns_RNS(self) -> NDArray[np.bool_]:
        """Whether a device is the first of those that have the expert of the slot."""
        first_NE = (self.slot_RNE != NONE).argmax(axis=0)
        layers = np.arange(first_NE.shape[0])[:, None]
        device = np.arange(len(self.experts_RNS))[:, None, None]
        return (self.experts_RNS != NONE) & (first_NE[layers, self.experts_RNS] == device)

    def rounds(self) -> Iterator[tuple[list[int], list[list[int]], NDArray[np.int32]]]:
        """Yield (layers, groups of devices, slot [R] of each device): sums over groups that can be
        taken at once.

        Every device is in one group; one alone has nothing to sum.
        """
        devices, layers_of = len(self.experts_RNS), dict[Any, list[int]]()
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
        for (groups, slots), layers in layers_of.items():
            yield layers, [list(group) for group in groups], np.array(slots, np.int32)

    # On a device, inside `shard_map`

    def of_device(self, table: NDArray[Any]) -> jax.Array:
        """Return this device's row of a table [R, ...]."""
        return jnp.asarray(table)[lax.axis_index(ALL)]

    def slots_local(self) -> jax.Array:
        """Return int32 [N, E]: the slot of each expert on this device, 0 where it has none."""
        return self.of_device(np.maximum(self.slot_RNE, 0))

    def reduced_local(self, grads: Any) -> Any:
        """Return gradients [N, S, ...] summed over the devices that have the expert."""

        def reduced(g: jax.Array) -> jax.Array:
            g = g.astype(jnp.float32)
            for layers, groups, slot_R in self.rounds():
                at = np.array(layers), self.of_device(slot_R)
                g = g.at[at].set(lax.psum(g[at], ALL, axis_index_groups=groups))
            return g

        return jax.tree.map(reduced, grads)

    def layer_reduced_local(
        self, grads: Mapping[str, jax.Array], layer: int
    ) -> dict[str, jax.Array]:
        """Return gradients [S, ...] of one layer summed over the devices that have the expert."""
        reduced = dict(grads)
        for layers, groups, slot_R in self.rounds():
            if layer in layers:
                slot = self.of_device(slot_R)
                summed = {
                    name: lax.psum(g[slot], ALL, axis_index_groups=groups)
                    for name, g in reduced.items()
                }
                reduced = {name: g.at[slot].set(summed[name]) for name, g in reduced.items()}
        return reduced

    def over_experts_local(self, counts_S: jax.Array, layer: jax.Array) -> jax.Array:
        """Return [E], what all devices have counted of each expert in their slots of a layer."""
        experts_S = self.of_device(
            np.where(self.experts_RNS == NONE, self.num_experts, self.experts_RNS)
        )[layer]
        counts_E = (
            jnp.zeros(self.num_experts, counts_S.dtype).at[experts_S].add(counts_S, mode="drop")
        )
        total_E: jax.Array = lax.psum(counts_E, ALL)
        return total_E

    def squares_local(self, grads: Any) -> jax.Array:
        """Return [N], this device's part of the squared norm of reduced gradients: each expert
        counts once.
        """
        owns_NS = self.of_device(self.owns_RNS)
        squares_NS = [
            jnp.square(g).sum(axis=tuple(range(2, g.ndim))) for g in jax.tree.leaves(grads)
        ]
        return jnp.where(owns_NS, jnp.stack(squares_NS).sum(axis=0), 0.0).sum(axis=1)

    def to_saved_local(self, w: jax.Array, dim: int) -> jax.Array:
        """Return this device's part of [N, E, ...] out of [N, S, ...]: split over all in `dim`; -1:
        the whole.

        Expert by expert, so that one more of each layer is there at once.
        """
        layers, bits = np.arange(w.shape[0]), lax.bitcast_convert_type(w, jnp.int32)
        owns_NE = np.take_along_axis(self.owns_RNS, np.maximum(self.slot_RNE, 0), axis=2) & (
            self.slot_RNE != NONE
        )
        slot_NE, own_NE = self.slots_local(), self.of_device(owns_NE)

        def one(expert: jax.Array) -> jax.Array:
            mine_N = own_NE[:, expert].reshape(-1, *[1] * (w.ndim - 2))
            # the sum with zeros keeps all bits
            part = jnp.where(mine_N, bits[layers, slot_NE[:, expert]], 0)
            return (
                lax.psum(part, ALL)
                if dim < 0
                else lax.psum_scatter(part, ALL, scatter_dimension=dim - 1, tiled=True)
            )

        saved_EN = lax.map(one, jnp.arange(self.num_experts, dtype=jnp.int32))
        return lax.bitcast_convert_type(jnp.moveaxis(saved_EN, 0, 1), w.dtype)

    def from_saved_local(self, saved: jax.Array, dim: int) -> jax.Array:
        """Return [N, S, ...] out of what `to_saved_local` returned."""
        layers = np.arange(saved.shape[0])
        slot_NE = self.of_device(np.where(self.slot_RNE == NONE, self.num_slots, self.slot_RNE))
        sizes = list(saved.shape[2:])
        if dim >= 0:
            sizes[dim - 2] *= len(self.experts_RNS)
        empty = jnp.zeros((len(layers), self.num_slots, *sizes), saved.dtype)

        def put(expert: jax.Array, w: jax.Array) -> jax.Array:
            whole = saved[:, expert]
            whole = whole if dim < 0 else lax.all_gather(whole, ALL, axis=dim - 1, tiled=True)
            return w.at[layers, slot_NE[:, expert]].set(whole, mode="drop")

        return lax.fori_loop(0, self.num_experts, put, empty)


def same_slots(one: TaskSlots | None, other: TaskSlots | None) -> bool:
    """Return whether all experts lie in the same places."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one.experts_RNS, other.experts_RNS)


def task_experts_of(tree: Any) -> Any:
    """Return the experts of the layers routed by task."""
    return tree["task_layers"]["moe"][EXPERTS_PATH]


def with_task_experts(tree: Any, experts: Any) -> Any:
    """Return parameters with these experts in the layers routed by task."""
    layers = tree["task_layers"]
    return tree | {"task_layers": layers | {"moe": layers["moe"] | {EXPERTS_PATH: experts}}}


def may_lie_apart(config: VisionTrainConfig, num_devices: int) -> bool:
    """Return whether a device has only those experts of layers routed by task that its tasks name.

    That is so in elastic layouts. Experts on tiers also have to stay where they are until the end,
    and their devices have all experts of a layer if tokens choose those of any.
    """
    elastic = config.layout == "elastic" and num_devices > 1 and bool(config.model.task_layers)
    stay = not any(task.num_steps % config.num_steps for task in config.tasks.values())
    return elastic and (config.tiers.on_device or (stay and not config.model.num_moe_layers))


def task_slots(config: VisionTrainConfig, layout: Layout) -> TaskSlots | None:
    """Return where the experts of layers routed by task lie; None where all devices have all, or a
    part by the mesh.

    A device has what the paths of its tasks name. A task that no device runs, since it has ended,
    keeps its path on the device with the fewest experts; so does an expert that no path names.
    """
    devices, paths = len(layout.shares), [task.path for task in config.tasks.values()]
    num_layers, num_experts = len(config.model.task_layers), config.model.num_experts
    if not may_lie_apart(config, devices):
        return None
    needs: list[list[set[int]]] = [[set() for _ in range(num_layers)] for _ in range(devices)]

    def add(device: int, path: Sequence[int]) -> None:
        for needed, expert in zip(needs[device], path, strict=True):
            needed |= {expert, SHARED_EXPERT} if config.model.learn_paths else {expert}

    homes = [layout.devices_of(number) for number in range(len(paths))]
    # ended tasks come last
    for number in sorted(range(len(paths)), key=lambda number: not homes[number]):
        homes[number] = homes[number] or (
            min(range(devices), key=lambda d: sum(map(len, needs[d]))),
        )
        for device in homes[number]:
            add(device, paths[number])
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
