"""Decide when a layer's experts move between devices: Lina's two phases, or EPLB every few steps.

`MeshRunner` calls `ExpertPlacer` in every step. All processes reach the same decisions from the
same choices; clocks are read for counters only.

Legend:
T tokens of a step
K choices a token
E experts of a layer
L layers with experts
N devices
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from jmoe.config.engine import EngineMesh
from jmoe.inference.path_table import PathTable
from jmoe.offload.placed_experts import MeshExperts, PlacedExperts
from jmoe.planning.placement import Placement, PlacementChanges, place_experts
from jmoe.planning.placement_policies import ROUNDING

RECENT = 0.9  # decay per step of the moving averages


class SwapCosts(NamedTuple):
    """The costs that a change of placement weighs.

    row_s: seconds that an expert takes for one token.
    copy_s: seconds to copy one expert's weights to a device.
    """

    row_s: float
    copy_s: float


@dataclass
class PlacementStats:
    """Counters of the experts' placement on a mesh.

    balancedness: for each layer, mean / maximum over devices of the tokens computed, over all
        steps.
    loads: for each device, the number of (token, choice) pairs that it computed.
    copies: for each device, the number of experts copied to it.
    estimates: number of placements estimated before the gate (Lina's phase one).
    replans: number of those that were wrong, so that the gate's choices were planned for (phase
        two).
    swaps: number of changed placements.
    swapped_bytes: bytes of experts copied to this process's devices.
    planning_s: seconds of estimates and plans on the host.
    swap_s: seconds of copies.
    waited_s: seconds of copies after a gate, while the devices idle.
    """

    balancedness: tuple[float, ...]
    loads: tuple[float, ...]
    copies: tuple[int, ...]
    estimates: int
    replans: int
    swaps: int
    swapped_bytes: int
    planning_s: float
    swap_s: float
    waited_s: float


class ExpertPlacer:
    """Decides from the tokens' choices when a layer's experts move, and has `experts` copy them.

    Lina (section 5.2). Phase one (`place_by_estimate`) plans a layer's placement while its
    attention runs, from the popularity that the path table predicts for the step's tokens, or
    without a table from recent steps. Phase two (`record_choices_and_correct_placement`) plans
    again from the gate's actual counts if the estimate was wrong: the 2 K most popular experts (at
    most half of all) differ, or the busiest device has more tokens than predicted, by at least the
    time of one copy. The second test is needed since the table predicts nothing for a path's less
    likely experts.

    EPLB (`rebalance_next_layer`). Every `rebalance_every` steps all layers are placed by the
    choices of a window of steps, one layer between two steps.

    A placement changes only if it saves more time on the busiest device than its copies take. No
    plan is made if even a perfect balance would save less than one copy, as in most steps of few
    tokens. What an estimate promises to save is scaled by the fraction of earlier promises that
    were kept (`_realized_savings_fraction`).
    """

    def __init__(
        self,
        mesh: EngineMesh,
        experts: MeshExperts,
        num_experts_per_tok: int,
        estimates: bool,
        table: PathTable | None,
    ) -> None:
        """Begin with the placement that `experts` has.

        estimates: whether Lina's phase one runs.
        table: predicts popularity; None uses recent choices.
        """
        self._mesh, self._experts, self._table = mesh, experts, table
        index = experts.index
        self._top = min(2 * num_experts_per_tok, max(1, index.num_experts // 2))
        self._estimates = mesh.placement == "lina" and estimates
        self.costs = SwapCosts(0.0, float("inf"))  # no expert moves before costs are measured
        self._recent_LE = np.zeros((index.num_layers, index.num_experts))
        self._window: deque[np.ndarray] = deque(maxlen=mesh.rebalance_window)
        # decayed sums of the tokens that phase one's plans take off the busiest device, by the
        # estimates and by the actual counts
        self._promised_L, self._kept_L = np.zeros((2, index.num_layers))
        self._counts: list[np.ndarray] = []  # [E] of each layer of this step so far
        # of the layer that phase one has placed and phase two has not
        self._estimated_E: np.ndarray | None = None
        # of that layer: (placement before phase one, placement that phase one planned)
        self._thought_of: tuple[Placement, Placement] | None = None
        self._to_place: deque[int] = deque()
        self._steps = 0
        self.estimate_s = 0.0  # seconds of estimates without plans, since the start
        self.reset()

    def reset(self) -> None:
        """Reset the counters of `stats` to zero."""
        self._mean_L, self._busiest_L = (np.zeros(self._experts.index.num_layers) for _ in range(2))
        self._loads_N = np.zeros(self._mesh.devices)
        self._copied_since = self._experts.copied_bytes, self._experts.copied_s
        self._copies_since_N = self._experts.copies_N.copy()
        self._num_estimates = self._replans = self._swaps = 0
        self._planning_s = self._waited_s = 0.0

    def stats(self) -> PlacementStats:
        """Return counters since the start, or since `reset`."""
        pairs = zip(self._mean_L, self._busiest_L, strict=True)
        copied_bytes, copied_s = self._copied_since
        return PlacementStats(
            tuple(float(mean / busiest) if busiest else 1.0 for mean, busiest in pairs),
            tuple(self._loads_N.tolist()),
            tuple((self._experts.copies_N - self._copies_since_N).tolist()),
            self._num_estimates,
            self._replans,
            self._swaps,
            self._experts.copied_bytes - copied_bytes,
            self._planning_s,
            self._experts.copied_s - copied_s,
            self._waited_s,
        )

    def place_by_estimate(self, layer: int, path: Sequence[np.ndarray]) -> None:
        """Phase one: place a layer by an estimate, while its attention runs.

        path: int32 [T, K] for each layer with experts before it, the tokens' choices; E for
            padding.
        """
        self._estimated_E = self._thought_of = None
        if not self._estimates:
            return
        begun = time.perf_counter()
        if self._table is not None and path:
            self._estimated_E = self._table.estimate_popularity(path).popularity_E
        else:
            self._estimated_E = self._recent_LE[layer].copy()
        self._num_estimates += 1
        seconds = time.perf_counter() - begun
        self.estimate_s += seconds
        self._planning_s += seconds
        held = self._experts.placements[layer]
        planned = self._plan_and_apply_if_worthwhile(
            layer, self._estimated_E, steps=1, trust=self._realized_savings_fraction(layer)
        )
        self._thought_of = None if planned is None else (held, planned)

    def record_choices_and_correct_placement(self, layer: int, chosen_TK: np.ndarray) -> None:
        """Phase two: record the gate's choices of a layer, and place it again if the estimate was
        wrong.

        Called before the layer's experts run.
        """
        counts_E = np.bincount(chosen_TK.reshape(-1), minlength=self._recent_LE.shape[1] + 1)[
            :-1
        ].astype(np.float64)
        self._counts.append(counts_E)
        if not counts_E.any():
            return
        if self._thought_of is not None:
            self._record_planned_and_actual_savings(layer, counts_E, *self._thought_of)
        if self._mesh.placement == "lina" and not self._estimate_was_right(layer, counts_E):
            self._replans += self._estimated_E is not None
            begun, planning_s = time.perf_counter(), self._planning_s
            self._plan_and_apply_if_worthwhile(layer, counts_E, steps=1)
            self._waited_s += time.perf_counter() - begun - (self._planning_s - planning_s)
        loads_N = _device_loads(self._experts.placements[layer], counts_E)
        self._loads_N += loads_N
        self._mean_L[layer] += loads_N.mean()
        self._busiest_L[layer] += loads_N.max()
        self._recent_LE[layer] = RECENT * self._recent_LE[layer] + (1 - RECENT) * counts_E

    def end_step(self) -> None:
        """Record that all layers have run; with EPLB, schedule a new placement of all layers when
        due.
        """
        counts_LE, self._counts = np.asarray(self._counts), []
        if self._mesh.placement != "eplb" or not counts_LE.any():
            return
        self._window.append(counts_LE)
        self._steps += 1
        if self._steps % self._mesh.rebalance_every == 0:
            self._to_place = deque(range(len(counts_LE)))

    def rebalance_next_layer(self) -> None:
        """Place the next layer for which EPLB has scheduled a new placement, if any."""
        if self._to_place:
            layer = self._to_place.popleft()
            popularity_E = np.sum([counts_LE[layer] for counts_LE in self._window], axis=0) / len(
                self._window
            )
            self._plan_and_apply_if_worthwhile(
                layer, popularity_E, steps=self._mesh.rebalance_every
            )

    def _estimate_was_right(self, layer: int, counts_E: np.ndarray) -> bool:
        """Return whether the estimate predicted the most popular experts and the busiest device's
        load.

        The load may exceed the prediction by as much as one copy of an expert takes.
        """
        estimated_E = self._estimated_E
        if estimated_E is None or _most_popular_experts(
            estimated_E, self._top
        ) != _most_popular_experts(counts_E, self._top):
            return False
        held = self._experts.placements[layer]
        foreseen = _device_loads(held, estimated_E).max() / estimated_E.sum() * counts_E.sum()
        more = _device_loads(held, counts_E).max() - foreseen * (1 + ROUNDING)
        return bool(more * self.costs.row_s <= self.costs.copy_s)

    def _realized_savings_fraction(self, layer: int) -> float:
        """Return the fraction of a layer's estimated savings that recent steps saved; 1 without
        estimates.
        """
        promised = self._promised_L[layer]
        return float(self._kept_L[layer] / promised) if promised > 0 else 1.0

    def _record_planned_and_actual_savings(
        self, layer: int, counts_E: np.ndarray, held: Placement, planned: Placement
    ) -> None:
        """Record the tokens that phase one's plan, applied or not, takes off the busiest device: as
        estimated, and by the gate's counts.
        """
        assert self._estimated_E is not None
        for sums_L, popularity_E in (
            (self._promised_L, self._estimated_E),
            (self._kept_L, counts_E),
        ):
            saved = (
                _device_loads(held, popularity_E).max() - _device_loads(planned, popularity_E).max()
            )
            sums_L[layer] = RECENT * sums_L[layer] + saved

    def _plan_and_apply_if_worthwhile(
        self, layer: int, popularity_E: np.ndarray, *, steps: int, trust: float = 1.0
    ) -> Placement | None:
        """Plan a layer's placement, and apply it if `steps` steps save more time than its copies
        take.

        Returns the planned placement, applied or not; None if no plan could pay.

        trust: fraction of the planned savings to expect.
        """
        begun = time.perf_counter()
        # `EngineConfig` allows only even placements for a ring, so these are `PlacedExperts`
        experts = cast("PlacedExperts", self._experts)
        held, costs = experts.placements[layer], self.costs
        loads_N = _device_loads(held, popularity_E)
        row_s = costs.row_s * steps
        changed, is_worth = None, False
        # the most that any placement could save
        if (loads_N.max() - loads_N.mean()) * row_s > costs.copy_s:
            changed = self._plan_changes(experts, layer, popularity_E)
            saved_s = trust * (loads_N.max() - changed.placement.device_loads.max()) * row_s
            copies = np.bincount(
                experts.process_of_N[[fill.device for fill in changed.fills]], minlength=1
            )
            is_worth = saved_s > np.max(copies) * costs.copy_s
        self._planning_s += time.perf_counter() - begun
        if changed is None:
            return None
        if is_worth:
            self._swaps += 1
            experts.apply_copies(layer, changed)
        return changed.placement

    def _plan_changes(
        self, experts: PlacedExperts, layer: int, popularity_E: np.ndarray
    ) -> PlacementChanges:
        """Return the changes to the policy's placement for this popularity.

        A device may use all its slots for replicas; Lina's paper stops at four experts a device.
        """
        held = experts.placements[layer]
        slots = held.slots_per_device
        placement = place_experts(
            popularity_E,
            held.num_devices,
            slots_per_device=slots,
            max_packed=slots,
            policy=self._mesh.placement,
        )
        return experts.copies_for_placement(layer, placement)


def _device_loads(placement: Placement, popularity_E: np.ndarray) -> np.ndarray:
    """Return each device's load under this popularity, float64 [N]."""
    loads_N: np.ndarray = replace(placement, popularity_E=popularity_E).device_loads
    return loads_N


def _most_popular_experts(popularity_E: np.ndarray, count: int) -> set[int]:
    """Return the `count` most popular experts, fewer if the others have no tokens."""
    first = np.argsort(-popularity_E, kind="stable")[:count]
    return set(first[popularity_E[first] > 0].tolist())
