"""Counters of an engine: steps, tokens, and bytes moved. `Engine.stats` reads them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jmoe.inference.mesh.expert_placer import ExpertPlacer, PlacementStats
from jmoe.inference.runner_protocol import Runner
from jmoe.memory.link import LinkStats
from jmoe.memory.tiered_store import TieredStore
from jmoe.planning.streaming import RoutingStats, StreamingPlan

ROUTING_STEPS = 32  # consecutive decode steps needed for an estimate of the routing
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class PhaseStats:
    """Counters of the steps with a prompt chunk (prefill), or of those without (decode).

    policy: how a step of the mean number of tokens gets its experts.
    tokens: number of tokens run in these steps.
    step_s: mean seconds of `Engine.step`; less for a step that began ahead.
    predicted_step_s: the plan's prediction for a step of the mean number of tokens; None if nothing
        was calibrated.
    streamed_bytes: bytes copied from host memory to the device.
    """

    policy: str
    steps: int
    tokens: int
    step_s: float
    predicted_step_s: float | None
    streamed_bytes: int


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine's work and of the bytes that it moved.

    steps, step_s: number of steps, and their total seconds.
    tokens: tokens run through the model, of prompts and outputs.
    streamed_bytes, streamed_s: bytes copied from host memory to the device, and the seconds in
        which at least one copy was running.
    nvme_bytes, nvme_s: the same for reads from NVMe.
    bytes_per_token: streamed_bytes / tokens.
    waited_s: seconds in which the device idled because experts were still being copied.
    hit_rate: fraction of the distinct experts chosen in a step's layer that were on the device
        already, expert_hits / experts_chosen; only if choices are read back (policy `experts`).
    guessed, guessed_right: experts copied on a guess, and those of them that tokens then chose.
    on_host: experts that the host computed in place of a copy to the device (policy `hybrid`).
    readback_s: seconds to copy the routers' choices to the host and find the experts' slots,
        without waited_s; the device waits meanwhile.
    estimate_s: the host's seconds for guesses about the next layer, while the device computes.
    roofline_fraction: streamed_s / step_s; 1 if the link is always busy and so the bottleneck.
    drafts: drafts that steps verified. drafted, accepted: tokens of these drafts, and those of them
        that became output.
    accepted_share: accepted / drafted; 0 without drafts.
    """

    policy: str
    device_expert_bytes: int
    host_expert_bytes: int
    steps: int
    step_s: float
    tokens: int
    streamed_bytes: int
    streamed_s: float
    nvme_bytes: int
    nvme_s: float
    bytes_per_token: float
    waited_s: float
    hit_rate: float
    expert_hits: int
    experts_chosen: int
    guessed: int
    guessed_right: int
    on_host: int
    readback_s: float
    estimate_s: float
    roofline_fraction: float
    prefill: PhaseStats
    decode: PhaseStats
    placement: PlacementStats | None = None  # of experts on several devices
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accepted_share(self) -> float:
        """The fraction of drafted tokens that became output; 0 without drafts."""
        return self.accepted / max(1, self.drafted)


@dataclass
class _PhaseSums:
    """Sums over the steps of a phase."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    streamed_bytes: int = 0


class StatsCollector:
    """Counts an engine's steps, and reads the counters of runner, residency and stores."""

    def __init__(
        self,
        runner: Runner,
        store: TieredStore | None,
        plan: StreamingPlan,
        placer: ExpertPlacer | None = None,
    ) -> None:
        self._placer = placer
        self._runner = runner
        self._residency = runner.residency
        self._store = store
        self.plan = plan
        self._reset_routing_window()
        self.reset()

    def reset(self) -> None:
        """Reset the counters of `stats` to zero."""
        self._since = self._running_totals()
        if self._placer is not None:
            self._placer.reset()
        self._streamed_bytes = self._since["streamed_bytes"]
        self._drafts = self._drafted = self._accepted = 0
        self._phases: dict[Phase, _PhaseSums] = {"prefill": _PhaseSums(), "decode": _PhaseSums()}

    @contextlib.contextmanager
    def excluding_work(self) -> Iterator[None]:
        """Return a context manager that leaves out of the counters what runs inside it."""
        before = self._running_totals()
        try:
            yield
        finally:
            after = self._running_totals()
            self._since = {
                name: since + after[name] - before[name] for name, since in self._since.items()
            }
            self._streamed_bytes = after["streamed_bytes"]
            self._reset_routing_window()

    def record_step(self, phase: Phase, tokens: int, seconds: float) -> None:
        """Count a step of a phase: its tokens, its seconds, and the bytes copied since the last."""
        if phase == "decode":
            self._decode_steps += 1
            self._decode_tokens += tokens
        else:  # a prompt's choices would distort the statistics of decode steps
            self._reset_routing_window()
        steps = self._phases[phase]
        steps.steps += 1
        steps.tokens += tokens
        steps.seconds += seconds
        if self._store is not None:
            now = self._store.stats().host.num_bytes
            steps.streamed_bytes += now - self._streamed_bytes
            self._streamed_bytes = now

    def record_draft(self, drafted: int, accepted: int) -> None:
        """Count a sequence's draft. accepted: how many of its `drafted` tokens became output."""
        self._drafts += 1
        self._drafted += drafted
        self._accepted += accepted

    def take_decode_routing_stats(self, max_tokens: int) -> RoutingStats | None:
        """Return routing statistics of the decode steps since the last result; None if there were
        fewer than `ROUTING_STEPS`, or none chose an expert.

        max_tokens: maximum number of tokens of a decode step.
        """
        if self._decode_steps < ROUTING_STEPS:
            return None
        now, then = self._residency.stats(), self._routing_since
        tokens, steps = self._decode_tokens, self._decode_steps
        self._reset_routing_window()
        layers, misses = now.layers - then.layers, now.misses - then.misses
        chosen = now.hits - then.hits + misses
        if chosen == 0:
            return None
        early = (now.guessed_right - then.guessed_right) / misses if misses else 0.0
        return RoutingStats(max_tokens, tokens / steps, chosen / layers, 1 - misses / chosen, early)

    def _reset_routing_window(self) -> None:
        """Begin anew to count the decode steps of `take_decode_routing_stats`."""
        self._decode_steps = self._decode_tokens = 0
        self._routing_since = self._residency.stats()

    def stats(self) -> EngineStats:
        """Return the counters since `reset`."""
        counters = {
            name: value - self._since[name] for name, value in self._running_totals().items()
        }
        hits, chosen = counters["expert_hits"], counters["experts_chosen"]
        phases = self._phases.values()
        step_s, tokens = sum(p.seconds for p in phases), sum(p.tokens for p in phases)
        return EngineStats(
            policy=self.plan.memory.policy,
            device_expert_bytes=self._residency.num_bytes,
            host_expert_bytes=0 if self._store is None else self._store.host_bytes,
            steps=sum(p.steps for p in phases),
            step_s=step_s,
            tokens=tokens,
            bytes_per_token=counters["streamed_bytes"] / tokens if tokens else 0.0,
            hit_rate=hits / chosen if chosen else 0.0,
            roofline_fraction=counters["streamed_s"] / step_s if step_s else 0.0,
            prefill=self._phase_stats("prefill"),
            decode=self._phase_stats("decode"),
            placement=None if self._placer is None else self._placer.stats(),
            drafts=self._drafts,
            drafted=self._drafted,
            accepted=self._accepted,
            **counters,
        )

    def _phase_stats(self, phase: Phase) -> PhaseStats:
        """Return the counters of a phase's steps."""
        p = self._phases[phase]
        mean_tokens = max(1, round(p.tokens / max(1, p.steps)))
        return PhaseStats(
            policy=self.plan.choose_policy(mean_tokens),
            steps=p.steps,
            tokens=p.tokens,
            step_s=p.seconds / max(1, p.steps),
            predicted_step_s=self.plan.predicted_step_s(mean_tokens),
            streamed_bytes=p.streamed_bytes,
        )

    def _running_totals(self) -> dict[str, Any]:
        """Return the running totals of counters of `EngineStats`."""
        residency, host, nvme = self._residency.stats(), LinkStats(), LinkStats()
        if self._store is not None:
            tiers = self._store.stats()
            host, nvme = tiers.host, tiers.nvme
        return {
            "streamed_bytes": host.num_bytes,
            "streamed_s": host.seconds,
            "nvme_bytes": nvme.num_bytes,
            "nvme_s": nvme.seconds,
            "waited_s": residency.waited_s,
            "expert_hits": residency.hits,
            "experts_chosen": residency.hits + residency.misses,
            "guessed": residency.guessed,
            "guessed_right": residency.guessed_right,
            "on_host": residency.on_host,
            "readback_s": self._runner.readback_s,
            "estimate_s": self._runner.estimate_s,
        }
