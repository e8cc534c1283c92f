"""Experts that change their devices by load during training, equally many on each device.

`Session.rebalance` calls this module between steps; `jmoe.planning.expert_order` decides. A step's
metrics count the tokens of every expert, in the one reduction that sums all metrics over the
devices: the estimate of the next steps' load costs no collective of its own.

An order renumbers the experts of a layer: their weights and moments, the columns of their router
and its biases move together, so that the model computes what it did. Checkpoints hold the new
numbers, and the compiled step stays as it is.

Legend: L layers with experts, E experts of a layer.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from numpy.typing import NDArray

from jmoe.config import TrainConfig
from jmoe.config.layers import STACKS
from jmoe.mesh import EXPERTS_PATH, path_names
from jmoe.planning.expert_order import balanced_orders, busiest_share
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer
from jmoe.types import PyTree


class ExpertOrders(NamedTuple):
    """New orders of experts, and the largest load of a device over the mean, in the mean over
    layers, before and after.

    orders_LE: the expert that comes to each place.
    """

    orders_LE: NDArray[np.int32]
    before: float
    after: float

    @property
    def num_moved(self) -> int:
        """The number of experts that change their places, of all layers."""
        return int((self.orders_LE != np.arange(self.orders_LE.shape[1])).sum())


class LoadBalancer:
    """Counts the tokens of experts, and decides which order they have from a step on."""

    def __init__(self, config: TrainConfig) -> None:
        self.every_steps = config.comm.balance_every_steps
        self._counts_LE: NDArray[np.float64] | None = None

    def note_counts(self, counts_LE: NDArray[np.integer]) -> None:
        """Add the assignments of a step to each expert, of all devices."""
        if not self.every_steps:
            return
        counts = np.asarray(counts_LE, np.float64)
        self._counts_LE = counts if self._counts_LE is None else self._counts_LE + counts

    def choose_orders(self, step: int, num_devices: int) -> ExpertOrders | None:
        """Return the orders for the steps from `step` on by the loads since the last decision; None
        if none is due. Every process decides alike, from counts that all of them have.

        num_devices: the devices that split a layer's experts.
        """
        if not self.every_steps or step % self.every_steps or self._counts_LE is None:
            return None
        load_LE, self._counts_LE = self._counts_LE, None
        orders_LE = balanced_orders(load_LE, num_devices)
        before, after = (
            float(np.mean([busiest_share(load_E, num_devices) for load_E in loads]))
            for loads in (load_LE, np.take_along_axis(load_LE, orders_LE, axis=1))
        )
        return ExpertOrders(orders_LE, before, after)


def reorder_experts(
    state: TrainState, orders_LE: NDArray[np.int32], trainer: Trainer
) -> TrainState:
    """Return the state with the experts of every layer in another order; the arrays of `state` may
    no longer be used. Every process must call this.
    """
    saved = trainer.prepare_state_for_save(state)
    # one array after the other: only one exists twice at a time
    move = partial(jax.tree_util.tree_map_with_path, partial(_reorder_leaf, orders_LE))
    moved = replace(saved.map_params_and_moments(move), router_bias=move(saved.router_bias))
    return trainer.restore_state(moved)


def _reorder_leaf(orders_LE: NDArray[np.int32], path: KeyPath, leaf: PyTree) -> PyTree:
    """Return a parameter with its experts in another order; one that has none as it is."""
    names = path_names(path)
    if names[0] != STACKS["moe"] or not {EXPERTS_PATH, "router"} & set(names):
        return leaf
    axis = 1 if EXPERTS_PATH in names else leaf.ndim - 1
    shape = [1] * leaf.ndim
    shape[0], shape[axis] = orders_LE.shape

    def take(x: jax.Array, orders: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, orders.reshape(shape), axis=axis)

    moved = jax.jit(take, out_shardings=leaf.sharding)(leaf, orders_LE)
    jax.block_until_ready(moved)
    leaf.delete()
    return moved
