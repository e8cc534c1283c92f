"""The table of a model's layers, which `ModelConfig.layers` computes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# one feed-forward; experts by token; experts by the image's task; experts by token after a gated
# delta network in place of attention; and a decoder's beside an encoder, to which it attends
LayerKind = Literal["dense", "moe", "task", "linear_moe", "cross_dense", "cross_moe"]
# the attribute of a model that holds the stacked parameters of each kind of layer
STACKS: dict[LayerKind, str] = {
    "dense": "dense_layers",
    "moe": "moe_layers",
    "task": "task_layers",
    "linear_moe": "linear_moe_layers",
    "cross_dense": "cross_dense_layers",
    "cross_moe": "cross_moe_layers",
}
# a router chooses each token's experts
TOKEN_ROUTED: tuple[LayerKind, ...] = ("moe", "linear_moe", "cross_moe")
WITHOUT_EXPERTS: tuple[LayerKind, ...] = ("dense", "cross_dense")
EXPERT_STACKS = tuple(stack for kind, stack in STACKS.items() if kind not in WITHOUT_EXPERTS)
# the kind of a decoder's layer that attends to an encoder's output, by its kind without an encoder
CROSS_KINDS: dict[LayerKind, LayerKind] = {"dense": "cross_dense", "moe": "cross_moe"}


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    number: its index in the stack of its kind.
    record: the number of layers with experts before it; in a layer with experts, this is its index
        in `ExpertIndex`.
    window: how many tokens a token sees, `NO_WINDOW` for all; None if no layer has a window.
    """

    kind: LayerKind
    number: int
    record: int
    window: int | None

    @property
    def stack_name(self) -> str:
        """Return the name of the stack that holds this layer's parameters."""
        return STACKS[self.kind]

    @property
    def has_experts(self) -> bool:
        return self.kind not in WITHOUT_EXPERTS


def layer_table(kinds: Sequence[LayerKind], windows: Sequence[int | None]) -> tuple[Layer, ...]:
    """Return the layers in the order of the forward pass, from the kind and the window of each."""
    layers: list[Layer] = []
    sizes, record = dict.fromkeys(STACKS, 0), 0
    for kind, window in zip(kinds, windows, strict=True):
        layers.append(Layer(kind, sizes[kind], record, window))
        sizes[kind] += 1
        record += layers[-1].has_experts
    return tuple(layers)
