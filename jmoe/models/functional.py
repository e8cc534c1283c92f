"""A module as arguments of a jitted function that is called very often: a static structure and its
arrays.

`nnx.split` gives a graph and a state; hashing the one and flattening the other takes a tenth of a
millisecond a call, as long as a layer of a small model runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import flax.nnx as nnx
import jax

from jmoe.layers.router import RouterBias


@dataclass(frozen=True, eq=False)
class Structure:
    """All of a module but its arrays. Equal modules share one object, so that comparing them is
    free.
    """

    graph: Any
    tree: Any

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """The module."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays))


_structure = cache(Structure)


def split(module: nnx.Module) -> tuple[Structure, tuple[jax.Array, ...]]:
    """(structure, arrays): structure.merge(arrays) is the module again."""
    graph, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return _structure(graph, tree), tuple(arrays)


class FunctionalModule:
    """A module of the decoder as a function of its parameters in nested dictionaries."""

    def __init__(self, module: nnx.Module) -> None:
        split: Any = nnx.split(module, nnx.Param, RouterBias)
        self.graph, params, bias = split
        self.params, self.bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
        self._params, self._bias = jax.tree.structure(params), jax.tree.structure(bias)

    def __call__(self, params: Any, bias: Any = ()) -> Any:
        state = jax.tree.unflatten(self._params, jax.tree.leaves(params))
        return nnx.merge(self.graph, state, jax.tree.unflatten(self._bias, jax.tree.leaves(bias)))
