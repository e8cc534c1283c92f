"""What engines on several devices are asked in tests, and what moves their experts about
meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmoe.inference.engine import Engine
from jmoe.inference.mesh.runner import MeshRunner
from jmoe.inference.path_table import PopularityEstimate
from jmoe.inference.sequence import Completion
from jmoe.planning.placement import EMPTY, placement_from_slots

MAX_BATCH = 8


class Traffic(NamedTuple):
    """What a mixture of requests gave. logprobs: of all outputs, and of the prompts that asked
    for them.
    """

    tokens: list[list[int]]
    logprobs: list[float]
    reused_tokens: int


def prompts() -> list[list[int]]:
    """Return more prompts than there are rows, of many lengths; one begins as a longer one that
    runs beside it.
    """
    rng = np.random.default_rng(0)
    some = [rng.integers(3, 60, n).tolist() for n in (1, 5, 17, 9, 20, 2, 7, 3, 11, 4)]
    return [*some, some[2][:12] + [7, 8]]


def traffic(engine: Engine) -> Traffic:
    """Run sampled requests, and then greedy ones with prefixes that are in the cache or want all
    log-probabilities.
    """
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 1}
    done = engine.generate(prompts(), temperature=0.8, seed=3, **options)
    done += engine.generate([prompt + [9] for prompt in prompts()[2:4]], **options)
    done += engine.generate(prompts()[4:5], prompt_logprobs=1, **options)
    return summary(done, engine)


def summary(done: list[Completion], engine: Engine) -> Traffic:
    logprobs = [lp.logprob for c in done for lp in [*c.logprobs, *c.prompt_logprobs]]
    return Traffic([c.token_ids for c in done], logprobs, engine.scheduler_stats().reused_tokens)


def assert_logprobs(logprobs: Sequence[float], expected: Sequence[float]) -> None:
    """Within 1e-5 of the largest, which is of a logit's size: sums over devices have another
    order.
    """
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def adversarial(num_experts: int, num_devices: int, slots: int, seed: int) -> np.ndarray:
    """Return random experts of each device, each once at least, many on several devices, and a
    slot empty.
    """
    rng = np.random.default_rng(seed)
    experts_NS = np.full((num_devices, slots), EMPTY, np.int32)
    for expert in rng.permutation(num_experts):  # each once
        free = np.flatnonzero((experts_NS == EMPTY).any(axis=1))
        device = rng.choice(free)
        experts_NS[device, np.flatnonzero(experts_NS[device] == EMPTY)[-1]] = expert
    for device in range(num_devices):
        others = rng.permutation(np.setdiff1d(np.arange(num_experts), experts_NS[device]))
        room = np.flatnonzero(experts_NS[device] == EMPTY)[1:]
        experts_NS[device, room[: len(others)]] = others[: len(room)]
    return experts_NS


def move(runner: MeshRunner, seed: int) -> None:
    """Place every layer's experts at random."""
    experts = runner.residency
    for layer, placement in enumerate(experts.placements):
        num_experts = experts.index.num_experts
        shape = num_experts, placement.num_devices, placement.slots_per_device, seed + layer
        experts.apply_copies(
            layer,
            experts.copies_for_placement(
                layer, placement_from_slots(adversarial(*shape), np.ones(num_experts))
            ),
        )


def move_at_every_step(runner: MeshRunner) -> None:
    """Place every layer's experts at random before each step, elsewhere every time; the same in
    every process.
    """
    seeds = iter(range(0, 10**6, 100))
    runner.placer.rebalance_next_layer = lambda: move(runner, next(seeds))  # type: ignore[method-assign]


def estimate_wrongly(runner: MeshRunner) -> None:
    """Let phase one expect that the experts with the lowest numbers get all tokens, then those with
    the highest.

    And go by it, however often that was wrong.
    """
    experts = runner.residency.index.num_experts
    rising_E = np.arange(1.0, experts + 1) ** 4
    runner.placer._table = _Table([rising_E, rising_E[::-1]])  # type: ignore[assignment]
    runner.placer._realized_savings_fraction = lambda layer: 1.0  # type: ignore[method-assign]


def note_popularity(runner: MeshRunner, noted: list[np.ndarray]) -> None:
    """Note how many tokens chose each expert of every layer but the first, step by step."""
    record_choices_and_correct_placement, experts = (
        runner.placer.record_choices_and_correct_placement,
        runner.residency.index.num_experts,
    )

    def noting(layer: int, chosen_TK: np.ndarray) -> None:
        if layer:
            noted.append(np.bincount(chosen_TK.ravel(), minlength=experts + 1)[:-1].astype(float))
        record_choices_and_correct_placement(layer, chosen_TK)

    runner.placer.record_choices_and_correct_placement = noting  # type: ignore[method-assign]


def estimate_rightly(runner: MeshRunner, noted: list[np.ndarray]) -> None:
    """Let phase one expect what was noted when the same requests ran before."""
    runner.placer._table = _Table([*noted[-1:], *noted[:-1]])  # type: ignore[assignment]


class _Table:
    """A path table that says the same of every path, one popularity after the other, from the
    second on.
    """

    def __init__(self, popularities: Sequence[np.ndarray]) -> None:
        self._calls, self._popularities = 0, popularities

    def estimate_popularity(self, path: list[np.ndarray]) -> PopularityEstimate:
        self._calls += 1
        return PopularityEstimate(self._popularities[self._calls % len(self._popularities)], 0.0)


PREPARE: dict[str, Callable[[MeshRunner], None]] = {
    "random": move_at_every_step,
    "wrong": estimate_wrongly,
}
