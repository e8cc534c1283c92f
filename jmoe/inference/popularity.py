"""Estimators of the experts that the next layer's tokens will choose, for prefetching.

`ModelRunner` asks an estimator while a layer's experts run, and passes the guesses to the
residency.

Legend:
T tokens of a step
K choices a token
D hidden
E experts of a layer
N layers with experts
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import numpy as np

from jmoe.inference.path_table import PathTable
from jmoe.layers.router import Router
from jmoe.memory.slot_table import HitCounts
from jmoe.models.block import Block
from jmoe.models.functional import ModuleStructure, split_arrays
from jmoe.offload.policies import Residency

EstimatorName = Literal["router", "counts", "paths"]
RECENT = 0.9  # decay per step of the moving average of experts needed


class Estimator(ABC):
    """Guesses the experts of the next layer. A wrong guess costs a copy, never a wrong result.

    For every layer with experts, in order, the runner calls `start` and then `estimate`. Guesses
    may use hidden states (from `start`), this step's choices (`path`), or earlier steps' choices.
    """

    def start_next_estimate(self, moe_layer: int, hidden: Sequence[jax.Array]) -> None:
        """Launch device work for the guess about layer `moe_layer` + 1, without waiting.

        hidden: the input of layer `moe_layer`'s router, [T, D] for each batch of the step.
        """
        return

    @abstractmethod
    def estimate_next_experts(self, path: Sequence[np.ndarray]) -> np.ndarray:
        """Return the experts that layer len(path) will probably need, in any order.

        After the last layer the guess is for the first layer of the next step. Called while the
        device computes the current layer's experts.

        path: int32 [T, K] for each layer so far, the experts that this step's tokens chose; E for
            padding.
        """


class RouterEstimator(Estimator):
    """Guesses by applying the next layer's router to the current router's input."""

    def __init__(self, routers: Sequence[Router], num_experts: int) -> None:
        self._routers = [split_arrays(router) for router in routers]
        self._num_experts = num_experts
        self._guesses: list[jax.Array] = []

    def start_next_estimate(self, moe_layer: int, hidden: Sequence[jax.Array]) -> None:
        self._guesses = []
        if moe_layer + 1 < len(self._routers):
            self._guesses = [
                _route_other_layer(*self._routers[moe_layer + 1], h_TD) for h_TD in hidden
            ]
        for guess_TK in self._guesses:
            guess_TK.copy_to_host_async()

    def estimate_next_experts(self, path: Sequence[np.ndarray]) -> np.ndarray:
        if not self._guesses:
            return np.zeros(0, np.int32)
        guess_TK = np.concatenate([np.asarray(guess) for guess in self._guesses])
        return guess_TK[path[-1][:, 0] < self._num_experts]


@partial(jax.jit, static_argnums=0)
def _route_other_layer(
    structure: ModuleStructure, arrays: tuple[jax.Array, ...], h_TD: jax.Array
) -> jax.Array:
    """Return int32 [T, K]: the experts that a router chooses for another layer's input."""
    choice: jax.Array = structure.merge(arrays)(h_TD).topk_idx_TK
    return choice


class CountEstimator(Estimator):
    """Guesses the experts that recent steps used most in the next layer, as many as they used.

    Needs no copy from the device beyond the choices.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._counts = [HitCounts(num_experts) for _ in range(num_layers)]
        self._needed = [0.0] * num_layers

    def estimate_next_experts(self, path: Sequence[np.ndarray]) -> np.ndarray:
        layer, following = len(path) - 1, len(path) % len(self._counts)
        counts, chosen = self._counts[layer], np.unique(path[-1])
        chosen = chosen[chosen < counts.num_records]
        if chosen.size:
            counts.count_step(chosen)
            before = self._needed[layer]
            self._needed[layer] = (
                RECENT * before + (1 - RECENT) * chosen.size if before else float(chosen.size)
            )
        scores_E = self._counts[following].scores
        most_used = np.argsort(-scores_E, kind="stable")[: round(self._needed[following])]
        return most_used[scores_E[most_used] > 0]


class PathEstimator(Estimator):
    """Guesses the experts that tokens of the same path chose most often in a profile.

    Needs no copy from the device beyond the choices.
    """

    def __init__(self, table: PathTable) -> None:
        self._table = table

    def estimate_next_experts(self, path: Sequence[np.ndarray]) -> np.ndarray:
        return self._table.most_frequent_experts(path)


def make_estimator(
    name: EstimatorName | None,
    residency: Residency,
    layers: Sequence[Block],
    num_experts: int,
    table: PathTable | None,
) -> Estimator | None:
    """Return the estimator `name`; None if `name` is None or the residency ignores guesses.

    table: the profile for estimator "paths".
    """
    routers = [
        moe.router
        for layer in layers
        if (moe := layer.moe) is not None and isinstance(moe.router, Router)
    ]
    if name is None or not residency.takes_guesses:
        return None
    if name == "paths":
        assert table is not None
        return PathEstimator(table)
    return (
        RouterEstimator(routers, num_experts)
        if name == "router"
        else CountEstimator(len(routers), num_experts)
    )
