"""Modules as arguments of jitted functions: a static structure and a flat tuple of arrays.

`nnx.split` gives a graph and a state; hashing the graph and flattening the state take 0.1 ms a
call, as long as one layer of a small model runs. The structures here hash by identity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import flax.nnx as nnx
import jax

from jmoe.layers.router import RouterBias
from jmoe.types import PyTree


@dataclass(frozen=True, eq=False)
class ModuleStructure:
    """A module without its arrays, hashed and compared by identity.

    `split_arrays` returns one object for all modules of equal structure.
    """

    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef

    def merge(self, arrays: Sequence[jax.Array]) -> Any:
        """Return the module with these arrays."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, arrays))


_structure = cache(ModuleStructure)


def split_arrays(module: nnx.Module) -> tuple[ModuleStructure, tuple[jax.Array, ...]]:
    """Return (structure, arrays); `structure.merge(arrays)` restores the module."""
    graph, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return _structure(graph, tree), tuple(arrays)


def split_parameters(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Return (graph, parameters, router biases); `nnx.merge` of the three restores the module."""
    graph, *states = nnx.split(module, nnx.Param, RouterBias)
    params, bias = states
    return graph, params, bias


class FunctionalModule:
    """Rebuilds a module from its parameters, given as nested dictionaries: a call returns the
    module with these parameters, whose methods are then called.

    params, bias: the module's own parameters and router biases, in that form.
    """

    def __init__(self, module: nnx.Module) -> None:
        self.graph, params, bias = split_parameters(module)
        self.params, self.bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
        self._params, self._bias = jax.tree.structure(params), jax.tree.structure(bias)

    def __call__(self, params: PyTree, bias: PyTree = ()) -> PyTree:
        state = jax.tree.unflatten(self._params, jax.tree.leaves(params))
        return nnx.merge(self.graph, state, jax.tree.unflatten(self._bias, jax.tree.leaves(bias)))
