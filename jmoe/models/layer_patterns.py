"""The grouping of a model's layers into repeated patterns, for the scans over layers: `scan_layers`
and `ReverseScan`. A repeated pattern compiles once.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax

from jmoe.config import TOKEN_ROUTED, Layer, LayerKind

Repeat = TypeVar("Repeat", int, jax.Array, int | jax.Array)


@dataclass(frozen=True)
class LayerPattern:
    """Consecutive layers whose kinds and windows repeat. period: number of layers in one repeat."""

    layers: tuple[Layer, ...]
    period: int

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of the layers of one repeat."""
        return tuple(layer.kind for layer in self.layers[: self.period])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the attention windows of the layers of one repeat, as in `Layer.window`."""
        return tuple(layer.window for layer in self.layers[: self.period])

    @property
    def repeats(self) -> int:
        return len(self.layers) // self.period

    def num_layers_per_repeat(self, kind: LayerKind) -> int:
        """Return the number of layers of this kind in one repeat."""
        return sum(layer.kind == kind for layer in self.layers[: self.period])

    def layer_index(self, position: int, repeat: Repeat) -> Repeat:
        """Return the layer's index in its stack. position: in the repeat, -1 for its last layer.
        repeat: number of the repeat, which may be traced.
        """
        layer = self.layers[: self.period][position]
        return layer.number + repeat * self.num_layers_per_repeat(layer.kind)

    def record_index(self, position: int, repeat: Repeat) -> Repeat:
        """Return `Layer.record` of a layer with experts; arguments as of `layer_index`."""
        layers = self.layers[: self.period]
        return layers[position].record + repeat * sum(layer.has_experts for layer in layers)

    def join_repeats(self, num_layers: int) -> "LayerPattern":
        """Return the same layers with a longer period: as many repeats joined into one as make
        `num_layers` layers, or the next smaller number that divides the number of repeats.
        """
        wanted = min(-(-num_layers // self.period), self.repeats)
        joined = next(n for n in range(wanted, 0, -1) if self.repeats % n == 0)
        return replace(self, period=joined * self.period)

    def runs(self) -> list["LayerRun"]:
        """Return the runs of one repeat: consecutive layers of one kind and window."""
        runs, position = [], 0
        for _, group in itertools.groupby(zip(self.kinds, self.windows, strict=True)):
            runs.append(LayerRun(self, position, count := len(list(group))))
            position += count
        return runs


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers of one kind and window in a pattern. position: of the first one in a
    repeat.
    """

    pattern: LayerPattern
    position: int
    count: int

    @property
    def kind(self) -> LayerKind:
        return self.pattern.kinds[self.position]

    @property
    def window(self) -> int | None:
        return self.pattern.windows[self.position]

    @property
    def is_single(self) -> bool:
        """Return whether the run is one layer that needs no scan of its own."""
        return self.count == 1 and (self.kind in TOKEN_ROUTED or self.pattern.period == 1)

    def select(self, w: jax.Array) -> jax.Array:
        """Return the run's entries of stacked parameters: [repeats, count, ...], or [repeats, ...]
        for a single layer.
        """
        repeats, each = self.pattern.repeats, self.pattern.num_layers_per_repeat(self.kind)
        start = self.pattern.layer_index(self.pattern.kinds.index(self.kind), 0)
        end, first = start + repeats * each, self.pattern.layer_index(self.position, 0) - start
        w = w if (start, end) == (0, w.shape[0]) else w[start:end]
        if self.is_single and each == 1:
            return w
        w = w.reshape(repeats, each, *w.shape[1:])
        return w[:, first] if self.is_single else w[:, first : first + self.count]


def find_patterns(layers: Sequence[Layer]) -> list[LayerPattern]:
    """Return the layers in order as few repeated patterns of kinds and windows.

    Greedy: from each layer, takes the pattern whose repeats cover the most layers, and the shortest
    of equal ones.
    """
    patterns, at = [], 0
    while at < len(layers):
        kinds = [(layer.kind, layer.window) for layer in layers[at:]]
        covered, best = 1, 1
        for period in range(1, len(kinds) // 2 + 1):
            repeats = 1
            while kinds[repeats * period : (repeats + 1) * period] == kinds[:period]:
                repeats += 1
            if repeats > 1 and repeats * period > covered:
                covered, best = repeats * period, period
        patterns.append(LayerPattern(tuple(layers[at : at + covered]), best))
        at += covered
    return patterns
