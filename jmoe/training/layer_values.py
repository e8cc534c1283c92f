"""What goes in and out of the programs of a layer (`training.streamed_programs`), whose legend holds here too."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jmoe.collectives.exchange import DispatchedTokens
from jmoe.layers.moe import MoEStats

Experts = Mapping[str, jax.Array]  # the experts of a layer, [E, ...] each


class Routed(NamedTuple):
    """A layer with experts, half done: its tokens' rows are where their experts are.

    arrived_E: how many for each expert, int32. stats: this device's, [R] each.
    """

    x_BSD: jax.Array
    h_TD: jax.Array
    arrived: list[DispatchedTokens]
    arrived_E: jax.Array
    topk_idx_TK: jax.Array
    stats: MoEStats


class Layer(NamedTuple):
    """Which layer of its kind, and how far its attention looks. window: int32 scalar, None: all tokens before.

    step, accumulation: int32 scalars, of which a router's jitter is drawn.
    """

    number: jax.Array
    window: jax.Array | None
    step: jax.Array | None = None
    accumulation: jax.Array | None = None


class NextLayer(NamedTuple):
    """A layer whose parameters are to be gathered. flat_NC: the devices' parts, of all layers of its kind."""

    flat_NC: jax.Array
    number: jax.Array


class Overlapped(NamedTuple):
    """What a layer does for its neighbours: gathers the next one's parameters, sums the last one's gradients."""

    unsharded_RC: jax.Array | None
    sum_G: jax.Array | None


class GradAccumulator(NamedTuple):
    """A layer's gradients, summed over accumulation steps but not over devices; rest: [R, N, ...], of all layers.

    rows_RG, experts: None before the first step, or where there are none.
    """

    rows_RG: jax.Array | None
    rest: list[jax.Array]
    experts: Experts | None = None
