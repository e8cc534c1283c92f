"""Experts per device in training: Lina's expert packing (USENIX ATC '23, section 4.2, Tables 3 and
4).

A layer's all-to-all can only hide behind expert computation that takes longer. With twice the
experts per device, half as many devices share all experts, and the all-to-all spans fewer devices.
Pure functions, called by `jmoe.training.expert_packing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jmoe.config.checks import check

FIRST_STEP = 10
EVERY_STEPS = 4
SLOWER = 1.01  # factor by which a step must be slower than with half the experts; noise is less


@dataclass(frozen=True)
class MemoryShortfall:
    """Bytes that a device and its host lack for an expert packing; 0: it fits.

    lacking_bytes: with experts on the tiers that the configuration names. offloaded_lacking_bytes:
    with experts in host memory. refused: why the run's experts cannot move to host memory; "": they
    can.
    """

    lacking_bytes: int = 0
    offloaded_lacking_bytes: int = 0
    refused: str = ""

    @property
    def must_offload(self) -> bool:
        """Whether the packing fits with experts in host memory and not without."""
        return self.lacking_bytes > 0 and not self.offloaded_lacking_bytes and not self.refused


@dataclass(frozen=True)
class PackingDecision:
    """Result of `decide_packing`. done: no further measurement is needed. reason: one sentence with
    the measured times.
    """

    experts_per_device: int
    done: bool
    reason: str


def is_packing_decided_at(step: int) -> bool:
    """Return True if packing is decided before `step`: step 10, then every 4 steps."""
    return step >= FIRST_STEP and (step - FIRST_STEP) % EVERY_STEPS == 0


def decide_packing(
    all_to_all_s: float,
    ffn_s: float,
    experts_per_device: int,
    *,
    step: int,
    most_experts: int,
    shortfall: MemoryShortfall | None = None,
    step_s: Mapping[int, float] | None = None,
) -> PackingDecision:
    """Return the decision on the experts per device from `step` on: unchanged, doubled, or halved.

    The number changes only at steps for which `is_packing_decided_at` is true.

    all_to_all_s, ffn_s: forward seconds of one layer's dispatch all-to-alls, and of its experts,
    with `experts_per_device`. most_experts: the most that the mesh allows. shortfall: bytes lacking
    for twice the experts, which move to host memory if they fit there alone; None means unlimited
    memory. step_s: measured seconds of a whole step, by
    experts per device.

    Lina doubles while the FFN is shorter than the all-to-all. Unlike Lina, this function also
    halves again if doubling made the step slower, because replicas of experts must all-reduce their
    gradients, which Lina's rule ignores. Raises `ValueError` for negative or nan times, and unless
    0 < experts_per_device <= most_experts.
    """
    check(
        experts_per_device > 0, "experts_per_device", experts_per_device, "must be greater than 0"
    )
    constraint = f"must be at least experts_per_device = {experts_per_device}"
    check(most_experts >= experts_per_device, "most_experts", most_experts, constraint)
    for name, seconds in (("all_to_all_s", all_to_all_s), ("ffn_s", ffn_s)):
        check(seconds >= 0, name, seconds, "must not be negative")  # also rejects nan

    def decision_with_times(experts: int, done: bool, why: str) -> PackingDecision:
        times = f"all-to-all {1e3 * all_to_all_s:.3g} ms, experts {1e3 * ffn_s:.3g} ms"
        return PackingDecision(experts, done, f"{times}: {why}")

    now, times_s = experts_per_device, step_s or {}
    if not is_packing_decided_at(step):
        return decision_with_times(
            now,
            False,
            f"packing is decided before step {FIRST_STEP}, then every {EVERY_STEPS} steps",
        )
    before_s = times_s.get(now // 2) if now % 2 == 0 else None
    if before_s is not None and times_s.get(now, 0.0) > SLOWER * before_s:
        slower = (
            f"a step takes {times_s[now]:.3g} s, {before_s:.3g} s with half the experts on a device"
        )
        return decision_with_times(now // 2, True, f"{slower}: back to {_experts_text(now // 2)}")
    if all_to_all_s <= ffn_s:
        return decision_with_times(
            now, True, f"the experts are not the shorter: it stays at {_experts_text(now)}"
        )
    if 2 * now > most_experts:
        return decision_with_times(now, True, f"the mesh allows no more than {_experts_text(now)}")
    if shortfall is None or not shortfall.lacking_bytes:
        return decision_with_times(2 * now, False, f"{_experts_text(2 * now)} from now on")
    if shortfall.must_offload:
        lacking = f"devices lack {_gigabytes(shortfall.lacking_bytes)} for them"
        why = f"{_experts_text(2 * now)} from now on, in host memory: {lacking}"
        return decision_with_times(2 * now, False, why)
    stays = f"it stays at {_experts_text(now)}: {_shortfall_text(shortfall)}"
    return decision_with_times(now, True, stays)


def _experts_text(count: int) -> str:
    return f"{count} expert{'s' * (count > 1)} a device"


def _shortfall_text(shortfall: MemoryShortfall) -> str:
    needed = _gigabytes(shortfall.lacking_bytes)
    lacking = f"twice as many need {needed} more memory than there is"
    if shortfall.refused:
        return f"{lacking}; {shortfall.refused}"
    short = _gigabytes(shortfall.offloaded_lacking_bytes)
    return f"{lacking}, and with experts in host memory {short} would be lacking"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
