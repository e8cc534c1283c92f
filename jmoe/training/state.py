"""The training state, and functions that take experts out of it or put them in.

Legend:
B sequences
S sequence length
N layers with experts
E experts
P experts that a caller asks for
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.config import EXPERT_STACKS, Layer
from jmoe.mesh import EXPERTS_PATH
from jmoe.offload.expert_state import ReadExperts
from jmoe.optim.loss_scale import LossScale
from jmoe.types import PyTree

Batch = tuple[jax.Array, jax.Array]  # held-out tokens [B, S + 1], and their targets' weights [B, S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The training state: nested dicts of float32 arrays, except `step` (int32 scalar), `cast`,
    `frozen` and moments in 8 bits.

    m, v: the optimizer's moments, trees like `params` without the parameters that `train` and
    `freeze` leave out; v also lacks those that Muon updates. router_bias: the routers'
    load-balancing biases. loss_scale: None unless the run computes in float16. cast: copies of
    stacked weights in their compute dtype (`ShardedDecoder.cast_copies`), never part of a
    checkpoint. frozen: parameters that are not trained, in their compute dtype; None unless the run
    trains adapters, which are then `params`. Never part of a checkpoint. scales: of moments in 8
    bits (`optim.moments.Moments`); None without such moments.
    """

    params: PyTree
    m: PyTree
    v: PyTree
    router_bias: PyTree
    step: jax.Array
    loss_scale: LossScale | None = None
    cast: tuple[jax.Array, ...] = ()
    frozen: PyTree = None
    scales: PyTree = None

    @classmethod
    def at_step_0(
        cls, params: PyTree, router_bias: PyTree, loss_scale: LossScale | None = None
    ) -> Self:
        """Return the state of step 0 with these parameters and zero moments."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return cls(
            params, zeros, jax.tree.map(jnp.copy, zeros), router_bias, jnp.int32(0), loss_scale
        )

    def map_params_and_moments(self, change: Callable[[PyTree], PyTree]) -> Self:
        """Return the state with `change` applied to the parameters and to both moments."""
        return replace(self, params=change(self.params), m=change(self.m), v=change(self.v))

    def map_embedding_table(self, change: Callable[[PyTree], PyTree]) -> Self:
        """Return the state with `change` applied to the embedding table and both of its moments."""

        def change_table(tree: PyTree) -> PyTree:
            return tree | {"embedding": change(tree["embedding"])} if "embedding" in tree else tree

        return self.map_params_and_moments(change_table)


def experts_of(tree: PyTree, stack: str = "moe_layers") -> PyTree:
    """Return the experts' parameters in a stack of layers, [N, E, ...] each; an empty dict if
    `tree` has none.
    """
    return tree[stack]["moe"].get(EXPERTS_PATH, {}) if stack in tree else {}


def with_experts(tree: PyTree, experts: PyTree, stack: str = "moe_layers") -> PyTree:
    """Return `tree` with `experts` as the experts' parameters of a stack of layers."""
    layers = tree[stack]
    return tree | {stack: layers | {"moe": layers["moe"] | {EXPERTS_PATH: experts}}}


def without_experts(tree: PyTree) -> PyTree:
    """Return `tree` without the experts' parameters of any stack."""
    for name in EXPERT_STACKS:
        if name in tree:
            layers = tree[name]
            dense = {path: w for path, w in layers["moe"].items() if path != EXPERTS_PATH}
            tree = tree | {name: layers | {"moe": dense}}
    return tree


def read_experts(
    shapes: Mapping[str, PyTree], read: ReadExperts, prefix: str = ""
) -> dict[str, jax.Array]:
    """Return the experts' parameters [N, E, ...] by name, with the shapes and shardings in
    `shapes`.

    Each process reads only the experts that its devices hold. read: a function of (layer, expert
    numbers [P]) that returns arrays [P, ...] by name. prefix: prepended to a parameter's name in
    the arrays that `read` returns.
    """
    leaf = next(iter(shapes.values()))
    num_layers, num_experts = leaf.shape[:2]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    own = np.unique(np.concatenate([np.arange(num_experts)[index[1]] for index in indices]))
    host: dict[str, NDArray[np.float32]] = {
        name: np.empty((num_layers, own.size, *leaf.shape[2:]), np.float32)
        for name, leaf in shapes.items()
    }
    for layer in range(num_layers):
        arrays = read(layer, own)
        for name, array in host.items():
            array[layer] = arrays[f"{prefix}{name}"]

    def read_shard(name: str, index: tuple[slice, ...]) -> NDArray[np.float32]:
        return host[name][:, np.searchsorted(own, np.arange(num_experts)[index[1]])][
            :, :, *index[2:]
        ]

    return {
        name: jax.make_array_from_callback(leaf.shape, leaf.sharding, partial(read_shard, name))
        for name, leaf in shapes.items()
    }


def read_missing_experts(
    saved: TrainState,
    shape: TrainState,
    layers: Sequence[Layer],
    weights: ReadExperts | None,
    moments: ReadExperts | None,
) -> TrainState:
    """Return `saved` with the experts added that the functions `weights` (for the parameters) and
    `moments` read; None leaves the parameters or the moments unchanged.

    shape: the shapes of the whole state. layers: `ModelConfig.expert_layers`.
    """
    for stack in EXPERT_STACKS:
        shapes = experts_of(shape.params, stack)
        records = [own.record for own in layers if own.stack_name == stack]
        if not shapes:
            continue

        def read_stack(
            source: ReadExperts,
            prefix: str = "",
            shapes: PyTree = shapes,
            records: list[int] = records,
        ) -> PyTree:
            return read_experts(
                shapes, lambda layer, experts: source(records[layer], experts), prefix
            )

        if weights is not None:
            saved = replace(saved, params=with_experts(saved.params, read_stack(weights), stack))
        if moments is not None:
            m, v = (read_stack(moments, prefix) for prefix in ("m.", "v."))
            saved = replace(
                saved, m=with_experts(saved.m, m, stack), v=with_experts(saved.v, v, stack)
            )
    return saved
