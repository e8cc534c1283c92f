"""What a training step changes."""

from dataclasses import dataclass
from typing import Any

import jax

from jmoe.mesh import EXPERTS_PATH


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. Nested dicts of arrays; float32 but for `step` (int32 scalar)."""

    params: Any
    m: Any
    v: Any
    router_bias: Any
    step: jax.Array


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
