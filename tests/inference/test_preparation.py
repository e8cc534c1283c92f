"""Programs that are compiled between requests, and the machine measured after the first answer."""

import dataclasses
import threading
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
from tiny_engines import tiny_engine

from jmoe.inference.engine import Engine
from jmoe.inference.preparation import _SamplingPrograms
from jmoe.inference.sampler import SAMPLING_VARIANTS, Sampler, SamplingVariant
from jmoe.offload.policies import ChosenExperts
from jmoe.planning.streaming import StreamingPlan
from tests.compiled import compilations
from tests.inference.test_calibration import PROMPTS, layer_bytes, run


def prepare(engine: Engine) -> int:
    """Prepare an engine until nothing is left; return the number of calls that did something."""
    calls = 0
    while engine.run_next_preparation_task():
        calls += 1
    return calls


def test_requests_between_preparations_get_their_own_programs_first() -> None:
    """A request runs after any number of tasks, compiles only its own programs, and later ones
    none.
    """
    said: list[str] = []
    with tiny_engine("mixtral", policy="resident", max_batch=4) as engine:
        engine._say = said.append
        assert engine.run_next_preparation_task()
        with compilations() as own:
            engine.generate([[5, 6, 7]], max_new_tokens=2, ignore_eos=True)
        with compilations() as others:
            assert prepare(engine) > 5
        with compilations() as service:
            engine.generate([[5], [11, 3], list(range(5, 20))], max_new_tokens=10, logprobs=2)
        assert not engine.run_next_preparation_task()
    assert 0 < len(own) < len(others) and service == []
    assert len(said) == 1 and said[0].startswith("the programs of all requests are compiled: ")


@pytest.mark.parametrize("options", [{"policy": "resident"}, {"policy": "ring", "ring_slots": 1}])
def test_preparing_leaves_no_trace(options: dict[str, Any]) -> None:
    """Of counters, of the experts' use and of the cache, whose prefixes are reused."""
    with tiny_engine("mixtral", **options) as engine:
        first = engine.generate([PROMPTS[0]], max_new_tokens=6, ignore_eos=True, logprobs=1)
        stats, use = engine.stats(), engine.tokens_per_expert()
        prepare(engine)
        # a copy ahead of the next step may end after the statistics were read
        times = {"streamed_s": 0.0, "roofline_fraction": 0.0}
        assert dataclasses.replace(engine.stats(), **times) == dataclasses.replace(stats, **times)
        np.testing.assert_array_equal(engine.tokens_per_expert(), use)
        again = engine.generate([PROMPTS[0]], max_new_tokens=6, ignore_eos=True, logprobs=1)
        assert engine.scheduler_stats().reused_tokens == len(PROMPTS[0]) - 1
    assert again[0].token_ids == first[0].token_ids


@pytest.mark.parametrize("estimator", ["auto", "router"])
def test_the_machine_is_measured_after_the_first_answer(estimator: str) -> None:
    """Slots and cached prefixes, which the measurement overwrites, are not used afterwards; nor
    are experts that were guessed for a step to come.
    """
    with tiny_engine("mixtral") as resident:
        expected = [run(resident), run(resident)]
    options = {"device_bytes": layer_bytes("mixtral") * 7 // 4, "estimator": estimator}
    with tiny_engine("mixtral", **options) as engine:
        prepare(engine)
        assert engine.plan.calibration is None  # nobody has had an answer yet
        found = run(engine)
        residency = engine.residency
        assert isinstance(residency, ChosenExperts) and engine.plan.calibration is None
        residency.prefetch_guessed(0, np.arange(engine.config.num_experts))
        wait(residency._copies.values())
        stats = engine.stats()
        assert prepare(engine) == 1
        assert engine.plan.calibration is not None and engine.stats().steps == stats.steps
        assert engine.stats().streamed_bytes == stats.streamed_bytes
        assert [c.token_ids for c in found] == [c.token_ids for c in expected[0]]
        reused = engine.scheduler_stats().reused_tokens
        found = run(engine)
        assert engine.scheduler_stats().reused_tokens == reused, "the rows were overwritten"
    for a, b in zip(found, expected[1], strict=True):
        assert a.token_ids == b.token_ids


def test_a_second_call_of_generate_measures() -> None:
    """Of an engine without a server, which has no idle time of its own."""
    with tiny_engine("mixtral", device_bytes=layer_bytes("mixtral") * 7 // 4) as engine:
        plans: list[StreamingPlan] = []
        for _ in range(2):
            run(engine)
            plans.append(engine.plan)
    assert [plan.calibration is not None for plan in plans] == [False, True]


def test_a_last_step_of_whole_layers_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared and measured after it is that of steps with chosen experts, too."""
    options = {"device_bytes": layer_bytes("mixtral") * 7 // 4, "estimator": "router"}
    with tiny_engine("mixtral", **options) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(StreamingPlan, "choose_policy", lambda *_: "ring")
            engine.generate([[5]], max_new_tokens=1)
        residency = engine.residency
        assert isinstance(residency, ChosenExperts) and not residency.needs_choices
        engine._measure_machine()
        calibration = engine.plan.calibration
        assert calibration is not None and calibration.sync_s > 0, "choices were read back"
        residency.begin_step(whole_layers=True)
        residency.acquire(0, None)
        residency.release(0)
        assert engine.run_next_preparation_task() and residency.needs_choices


def test_failures_of_preparation_are_no_failures_of_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left is skipped; the plan stays as it was, and so do the experts' slots."""
    with tiny_engine("mixtral", device_bytes=layer_bytes("mixtral") * 7 // 4) as engine:
        expected, residency = run(engine), engine.residency
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "warm_up", lambda *_: 1 / 0)
            patch.setattr(Sampler, "greedy_tokens_on_host", lambda *_: 1 / 0)
            assert prepare(engine) == 2
            assert engine._runner.residency is residency and engine.plan.calibration is None
        assert [c.token_ids for c in run(engine)] == [c.token_ids for c in expected]
    assert "compiling before requests come has failed" in caplog.text
    assert "measuring how fast this machine runs steps has failed" in caplog.text


def test_a_failure_of_the_thread_that_compiles_is_not_the_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    programs = _SamplingPrograms()
    try:
        programs.start_compiling_next(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
        programs.wait_or_claim(SAMPLING_VARIANTS[0])
    finally:
        programs.close()
    assert "was not compiled early" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_program_of_sampling_is_compiled_once() -> None:
    """By the thread, whose program a step waits for, or by the step that needs it earlier."""
    begun, may_end = threading.Event(), threading.Event()
    compiled: list[SamplingVariant] = []

    def compile_variant(variant: SamplingVariant) -> None:
        begun.set()
        assert may_end.wait(60)
        compiled.append(variant)

    programs, (first, second, *others) = _SamplingPrograms(), SAMPLING_VARIANTS
    try:
        programs.start_compiling_next(compile_variant)
        assert begun.wait(60)
        programs.start_compiling_next(compile_variant)  # the thread is busy
        programs.wait_or_claim(second)  # returns at once: the step compiles it
        step = threading.Thread(target=programs.wait_or_claim, args=(first,))
        step.start()
        step.join(0.1)
        assert step.is_alive()
        may_end.set()
        step.join(60)
        assert not step.is_alive() and compiled == [first]
        for variant in others:
            programs.start_compiling_next(compile_variant)
            programs.wait_or_claim(variant)
        programs.start_compiling_next(compile_variant)  # none is left
    finally:
        may_end.set()
        programs.close()
    assert compiled == [first, *others]
