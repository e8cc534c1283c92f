"""When experts change places on several devices: Lina's two phases around a gate, and EPLB's pace
of many steps.

Legend: T tokens of a step, K choices a token, E experts of a layer, L layers with experts, N
devices. Every process computes the same from the same choices: nothing here looks at a clock but to
count.
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
from jmoe.planning.placement import Changes, Placement, place
from jmoe.planning.placement_policies import ROUNDING

RECENT = 0.9  # what a step's choices keep of their weight a step later


class SwapCosts(NamedTuple):
    """Seconds of an expert for one token, and of the copy of an expert's weights to a device."""

    row_s: float
    copy_s: float


@dataclass
class PlacementStats:
    """Counters of a mesh of devices.

    balancedness: of every layer, tokens of the mean device / of the busiest one, over all steps.
    loads: of every device, choices of tokens that it computed; copies: experts copied to it.
    estimates: phase ones of Lina, replans: those that were wrong, so that the placement was planned
    again after the gate.
    swaps: placements that were changed; swapped_bytes: copied to this process's devices.
    planning_s: the host's time for estimates and plans, swap_s: for copies, of which waited_s after
    a gate, while nothing else could run.
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
    """Decides, from what tokens chose, when a layer's experts change places, and lets `experts`
    copy them.

    Lina (section 5.2): phase one (`before`) places a layer while its attention runs, by the
    popularity that the path table gives for the step's tokens, or without a table what recent steps
    chose. Phase two (`after`) compares the 2 K most popular experts (at most half of all, as all
    are always the same) with those that the gate chose; if they differ, it plans again from the
    actual counts. So it does where the experts are the same and their tokens are not: a table of
    the likeliest experts of a path says nothing of the others, which have tokens too; then the
    busiest device has more than was foreseen, by a copy's time. EPLB (`between_steps`): every
    `rebalance_every` steps all layers are placed by the choices of a window of steps, one layer
    between two steps.

    A placement is changed only where the time that it saves, by the busiest device, exceeds that of
    the copies; where all that could be saved is less than a single copy, as in most steps of a few
    tokens, none is looked for. What an estimate promises to save counts for as much as such
    promises for this layer were kept (`_trust`).
    """

    def __init__(
        self,
        mesh: EngineMesh,
        experts: MeshExperts,
        num_experts_per_tok: int,
        estimates: bool,
        table: PathTable | None,
    ) -> None:
        """estimates: whether there is a phase one. table: None to go by recent choices."""
        self._mesh, self._experts, self._table = mesh, experts, table
        index = experts.index
        self._top = min(2 * num_experts_per_tok, max(1, index.num_experts // 2))
        self._estimates = mesh.placement == "lina" and estimates
        self.costs = SwapCosts(0.0, float("inf"))  # until they are known nothing moves
        self._recent_LE = np.zeros((index.num_layers, index.num_experts))
        self._window: deque[np.ndarray] = deque(maxlen=mesh.rebalance_window)
        # tokens that estimates said, and that were
        self._promised_L, self._kept_L = np.zeros((2, index.num_layers))
        self._counts: list[np.ndarray] = []  # of this step's layers
        self._estimated_E: np.ndarray | None = None  # of the layer that comes
        # of that layer in phase one: before, planned
        self._thought_of: tuple[Placement, Placement] | None = None
        self._to_place: deque[int] = deque()
        self._steps = 0
        self.estimate_s = 0.0  # for estimates alone, since the start
        self.reset()

    def reset(self) -> None:
        """Let `stats` count from here on."""
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

    def before(self, layer: int, path: Sequence[np.ndarray]) -> None:
        """Place a layer whose attention runs, by an estimate. path: int32 [T, K] of the layers
        before; E for none.
        """
        self._estimated_E = self._thought_of = None
        if not self._estimates:
            return
        begun = time.perf_counter()
        if self._table is not None and path:
            self._estimated_E = self._table.popularity(path).popularity_E
        else:
            self._estimated_E = self._recent_LE[layer].copy()
        self._num_estimates += 1
        seconds = time.perf_counter() - begun
        self.estimate_s += seconds
        self._planning_s += seconds
        held = self._experts.placements[layer]
        planned = self._improve(layer, self._estimated_E, steps=1, trust=self._trust(layer))
        self._thought_of = None if planned is None else (held, planned)

    def after(self, layer: int, chosen_TK: np.ndarray) -> None:
        """Take in what a layer's gate chose; place it again where the estimate was wrong, before
        its experts run.
        """
        counts_E = np.bincount(chosen_TK.reshape(-1), minlength=self._recent_LE.shape[1] + 1)[
            :-1
        ].astype(np.float64)
        self._counts.append(counts_E)
        if not counts_E.any():
            return
        if self._thought_of is not None:
            self._learn(layer, counts_E, *self._thought_of)
        if self._mesh.placement == "lina" and not self._was_right(layer, counts_E):
            self._replans += self._estimated_E is not None
            begun, planning_s = time.perf_counter(), self._planning_s
            self._improve(layer, counts_E, steps=1)
            self._waited_s += time.perf_counter() - begun - (self._planning_s - planning_s)
        loads_N = _loads(self._experts.placements[layer], counts_E)
        self._loads_N += loads_N
        self._mean_L[layer] += loads_N.mean()
        self._busiest_L[layer] += loads_N.max()
        self._recent_LE[layer] = RECENT * self._recent_LE[layer] + (1 - RECENT) * counts_E

    def end_step(self) -> None:
        """Take in that all layers have run."""
        counts_LE, self._counts = np.asarray(self._counts), []
        if self._mesh.placement != "eplb" or not counts_LE.any():
            return
        self._window.append(counts_LE)
        self._steps += 1
        if self._steps % self._mesh.rebalance_every == 0:
            self._to_place = deque(range(len(counts_LE)))

    def between_steps(self) -> None:
        """Place one layer whose turn it is."""
        if self._to_place:
            layer = self._to_place.popleft()
            popularity_E = np.sum([counts_LE[layer] for counts_LE in self._window], axis=0) / len(
                self._window
            )
            self._improve(layer, popularity_E, steps=self._mesh.rebalance_every)

    def _was_right(self, layer: int, counts_E: np.ndarray) -> bool:
        """Return whether the estimate had the most popular experts right, and the busiest
        device's tokens about.
        """
        estimated_E = self._estimated_E
        if estimated_E is None or _most_popular(estimated_E, self._top) != _most_popular(
            counts_E, self._top
        ):
            return False
        held = self._experts.placements[layer]
        foreseen = _loads(held, estimated_E).max() / estimated_E.sum() * counts_E.sum()
        more = _loads(held, counts_E).max() - foreseen * (1 + ROUNDING)
        return bool(more * self.costs.row_s <= self.costs.copy_s)

    def _trust(self, layer: int) -> float:
        """Return which part of what estimates promised to save for a layer would have been saved
        lately; 1 at first.
        """
        promised = self._promised_L[layer]
        return float(self._kept_L[layer] / promised) if promised > 0 else 1.0

    def _learn(self, layer: int, counts_E: np.ndarray, held: Placement, planned: Placement) -> None:
        """Take in what phase one's plan saves by the actual counts, whether or not it was
        carried out.
        """
        assert self._estimated_E is not None
        for sums_L, popularity_E in (
            (self._promised_L, self._estimated_E),
            (self._kept_L, counts_E),
        ):
            saved = _loads(held, popularity_E).max() - _loads(planned, popularity_E).max()
            sums_L[layer] = RECENT * sums_L[layer] + saved

    def _improve(
        self, layer: int, popularity_E: np.ndarray, *, steps: int, trust: float = 1.0
    ) -> Placement | None:
        """Change a layer's placement for one that is worth its copies in so many steps.

        Return what was planned, worth it or not; None where nothing was. trust: what part of the
        tokens that it takes from the busiest device it will take indeed.
        """
        begun = time.perf_counter()
        # `EngineConfig`: what is in a ring is placed evenly
        experts = cast("PlacedExperts", self._experts)
        held, costs = experts.placements[layer], self.costs
        loads_N = _loads(held, popularity_E)
        row_s = costs.row_s * steps
        changed, is_worth = None, False
        # what the best placement of all would save
        if (loads_N.max() - loads_N.mean()) * row_s > costs.copy_s:
            changed = self._planned(experts, layer, popularity_E)
            saved_s = trust * (loads_N.max() - changed.placement.loads.max()) * row_s
            copies = np.bincount(
                experts.process_of_N[[fill.device for fill in changed.fills]], minlength=1
            )
            is_worth = saved_s > np.max(copies) * costs.copy_s
        self._planning_s += time.perf_counter() - begun
        if changed is None:
            return None
        if is_worth:
            self._swaps += 1
            experts.apply(layer, changed)
        return changed.placement

    def _planned(self, experts: PlacedExperts, layer: int, popularity_E: np.ndarray) -> Changes:
        """Return the policy's placement by this popularity.

        A device may fill all its slots, of which there is memory and which replicas need, where
        Lina stops at four.
        """
        held = experts.placements[layer]
        slots = held.slots_per_device
        placement = place(
            popularity_E,
            held.num_devices,
            slots_per_device=slots,
            max_packed=slots,
            policy=self._mesh.placement,
        )
        return experts.changes(layer, placement)


def _loads(placement: Placement, popularity_E: np.ndarray) -> np.ndarray:
    """Return float64 [N], the load of each device by another popularity than the placement was
    made for.
    """
    loads_N: np.ndarray = replace(placement, popularity_E=popularity_E).loads
    return loads_N


def _most_popular(popularity_E: np.ndarray, top: int) -> set[int]:
    first = np.argsort(-popularity_E, kind="stable")[:top]
    return set(first[popularity_E[first] > 0].tolist())
