"""What a training step changes."""

from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. Nested dicts of arrays; float32 but for `step` (int32 scalar)."""

    params: Any
    m: Any
    v: Any
    router_bias: Any
    step: jax.Array
