"""Parts of the decoder, for programs that run them each for itself."""

from typing import Any

import flax.nnx as nnx
import jax

from jmoe.layers.router import RouterBias
from jmoe.mesh import EXPERTS_PATH


class Part:
    """A module of the decoder as a function of its parameters in nested dictionaries."""

    def __init__(self, module: nnx.Module) -> None:
        split: Any = nnx.split(module, nnx.Param, RouterBias)
        self.graph, params, bias = split
        self.params, self.bias = nnx.to_pure_dict(params), nnx.to_pure_dict(bias)
        self._params, self._bias = jax.tree.structure(params), jax.tree.structure(bias)

    def __call__(self, params: Any, bias: Any = ()) -> Any:
        state = jax.tree.unflatten(self._params, jax.tree.leaves(params))
        return nnx.merge(self.graph, state, jax.tree.unflatten(self._bias, jax.tree.leaves(bias)))


def experts_of(tree: Any) -> Any:
    """The experts' parameters; nothing where they are not in the tree."""
    return tree["moe_layers"]["moe"].get(EXPERTS_PATH, {}) if "moe_layers" in tree else {}


def with_experts(tree: Any, experts: Any) -> Any:
    """The parameters with these of the experts."""
    layers = tree["moe_layers"]
    return tree | {"moe_layers": layers | {"moe": layers["moe"] | {EXPERTS_PATH: experts}}}


def without_experts(tree: Any) -> Any:
    """The parameters but the experts'."""
    layers = tree["moe_layers"]
    rest = {name: part for name, part in layers["moe"].items() if name != EXPERTS_PATH}
    return tree | {"moe_layers": layers | {"moe": rest}}
