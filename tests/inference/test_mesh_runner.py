"""An engine on several fake devices gives what it gives on one, wherever its experts are and while they move."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from tiny_engines import tiny_engine

from jmoe.config.engine import EngineMesh
from jmoe.inference.engine import Engine
from jmoe.inference.mesh_runner import MeshRunner
from jmoe.inference.path_table import LayerEstimate
from jmoe.inference.sequence import Completion
from jmoe.planning.placement import EMPTY, place_as

pytestmark = pytest.mark.usefixtures("quick_compilation")
DEVICES = 8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # of log-probabilities: sums over experts have another order


class Traffic(NamedTuple):
    """What a mixture of requests gave. logprobs: of all outputs, and of the prompts that asked for them."""

    tokens: list[list[int]]
    logprobs: list[float]
    reused_tokens: int


def on_mesh(name: str, **options: Any) -> Engine:
    return tiny_engine(name, max_batch=DEVICES, mesh=EngineMesh(**options))


def runner_of(engine: Engine) -> MeshRunner:
    assert isinstance(engine._runner, MeshRunner)
    return engine._runner


def prompts() -> list[list[int]]:
    """Return more prompts than there are rows, of many lengths; one begins as a longer one that runs beside it."""
    rng = np.random.default_rng(0)
    some = [rng.integers(3, 60, n).tolist() for n in (1, 5, 17, 9, 20, 2, 7, 3, 11, 4)]
    return [*some, some[2][:12] + [7, 8]]


def traffic(engine: Engine) -> Traffic:
    """Run sampled requests, and then greedy ones with prefixes that are in the cache or want all log-probabilities."""
    options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 1}
    done = engine.generate(prompts(), temperature=0.8, seed=3, **options)
    done += engine.generate([prompt + [9] for prompt in prompts()[2:4]], **options)
    done += engine.generate(prompts()[4:5], prompt_logprobs=1, **options)
    return summary(done, engine)


def summary(done: list[Completion], engine: Engine) -> Traffic:
    logprobs = [lp.logprob for c in done for lp in [*c.logprobs, *c.prompt_logprobs]]
    return Traffic([c.token_ids for c in done], logprobs, engine.scheduler_stats().reused_tokens)


def adversarial(num_experts: int, slots: int, seed: int) -> np.ndarray:
    """Return random experts of each device, each once at least, many on several devices, and a slot empty."""
    rng = np.random.default_rng(seed)
    experts_NS = np.full((DEVICES, slots), EMPTY, np.int32)
    for expert in rng.permutation(num_experts):  # each once
        free = np.flatnonzero((experts_NS == EMPTY).any(axis=1))
        device = rng.choice(free)
        experts_NS[device, np.flatnonzero(experts_NS[device] == EMPTY)[-1]] = expert
    for device in range(DEVICES):
        others = rng.permutation(np.setdiff1d(np.arange(num_experts), experts_NS[device]))
        room = np.flatnonzero(experts_NS[device] == EMPTY)[1:]
        experts_NS[device, room[: len(others)]] = others[: len(room)]
    return experts_NS


def adversary(seed: int) -> Callable[[MeshRunner], None]:
    def move(runner: MeshRunner) -> None:
        experts = runner.residency
        for layer, placement in enumerate(experts.placements):
            shape = experts.index.num_experts, placement.slots_per_device, seed + layer
            experts.apply(layer, experts.changes(layer, place_as(adversarial(*shape), np.ones(shape[0]))))

    return move


@pytest.fixture(
    scope="module",
    params=["deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "qwen2_moe", "gpt_oss"))],
)
def one_device(request: pytest.FixtureRequest) -> Iterator[tuple[str, Traffic, np.ndarray]]:
    """Yield a model and its answers; the first has latent attention, a dense layer and shared experts."""
    with tiny_engine(request.param, max_batch=DEVICES, policy="resident") as engine:
        yield request.param, traffic(engine), engine.expert_use()


def test_every_placement_gives_the_tokens_of_one_device(one_device: tuple[str, Traffic, np.ndarray]) -> None:
    """Even, random, Lina's and EPLB's, with chunks, prefixes from other devices and seeds; bit for bit each other."""
    name, expected, use = one_device
    answers = []
    lina = {"placement": "lina", "slots_per_device": 3}
    eplb = {"placement": "eplb", "slots_per_device": 3, "rebalance_every": 2, "rebalance_window": 3}
    for options, move in (({}, None), (lina, adversary(1)), (lina, adversary(20)), (lina, None), (eplb, None)):
        with on_mesh(name, devices=DEVICES, **options) as engine:
            runner = runner_of(engine)
            if move is not None:
                move(runner)
                engine.reset_stats()
                assert any(len(np.unique(experts)) > 1 for experts in runner.residency._held[0].T)
            runner.set_costs(0.0 if move else 1.0, 0.0)  # what was moved stays; else every gain is worth a swap
            answers.append(traffic(engine))
            assert engine.expert_use().tolist() == use.tolist()
            stats = engine.stats()
            assert stats.placement is not None
            assert (stats.placement.swaps > 0) == (bool(options) and move is None)
            assert (stats.placement.swapped_bytes > 0) == (stats.placement.swaps > 0)
            assert all(0 < balance <= 1 for balance in stats.placement.balancedness)
    for answer in answers:
        assert answer.tokens == expected.tokens and answer.reused_tokens == expected.reused_tokens > 0
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, **TOLERANCE)
    assert all(answer == answers[0] for answer in answers)


class _Wrong:
    """A path table that expects the experts that are least chosen."""

    def __init__(self, popularity_E: np.ndarray) -> None:
        self._popularity_E = popularity_E

    def popularity(self, path: list[np.ndarray]) -> LayerEstimate:
        return LayerEstimate(self._popularity_E, 0.0)


def test_wrong_estimates_change_nothing_but_time() -> None:
    """Every estimate is wrong, so that each layer is placed a second time, after its gate."""
    with on_mesh("deepseek_v3", devices=DEVICES) as engine:
        expected = traffic(engine)
        wrong_E = 1.0 / (1 + engine.expert_use().sum(axis=0))
    with on_mesh("deepseek_v3", devices=DEVICES, placement="lina", slots_per_device=3) as engine:
        runner = runner_of(engine)
        runner.set_costs(1.0, 0.0)
        runner.placer._table = _Wrong(wrong_E)  # type: ignore[assignment]
        assert traffic(engine) == expected
        stats = engine.stats().placement
        assert stats is not None
        assert stats.estimates > stats.replans > 0
        assert stats.swaps > stats.replans  # phase one made room for the wrong ones
        assert stats.waited_s > 0 and stats.planning_s > 0


def test_rows_of_several_sequences_on_a_device() -> None:
    """Four rows on each of two devices, prefixes that cross from one to the other; nothing is compiled meanwhile."""
    compiled: list[str] = []
    listens = False

    def listen(event: str, duration_s: float, **_: Any) -> None:
        if listens and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    with tiny_engine("mixtral", max_batch=8, policy="resident") as engine:
        expected = traffic(engine)
    jax.monitoring.register_event_duration_secs_listener(listen)
    options = {"placement": "eplb", "slots_per_device": 3, "rebalance_every": 2}
    with on_mesh("mixtral", devices=2, **options) as engine:
        engine.compile_for_service()
        runner_of(engine).set_costs(1.0, 0.0)
        listens = True
        answer = traffic(engine)
        listens = False
        assert engine.last_choices()[0].shape[1] == 2
        stats = engine.stats().placement
        assert stats is not None and stats.swaps > 0
    assert (answer.tokens, answer.reused_tokens) == (expected.tokens, expected.reused_tokens)
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, **TOLERANCE)
    assert compiled == []


def test_costs_are_measured_and_decide() -> None:
    """An expert costs time and so does its copy; where copies are dear nothing moves."""
    with on_mesh("deepseek_v3", devices=DEVICES, placement="lina", slots_per_device=3) as engine:
        costs = runner_of(engine).placer.costs
        assert 0 < costs.row_s < float("inf") and 0 < costs.copy_s < float("inf")
        runner_of(engine).set_costs(1.0, 1e9)
        engine.generate([[5, 6, 7]], max_new_tokens=3, ignore_eos=True)
        stats = engine.stats().placement
        assert stats is not None and stats.swaps == 0 and stats.estimates > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mesh": EngineMesh(devices=9), "max_batch": 9}, "mesh.devices = 9: this process has 8"),
        ({"mesh": EngineMesh(devices=2, slots_per_device=1)}, "mesh.slots_per_device = 1: must be at least 2 for 4"),
        ({"mesh": EngineMesh(devices=2, slots_per_device=5)}, "mesh.slots_per_device = 5: must be at most 4"),
        ({"mesh": EngineMesh(devices=2), "estimator": "paths"}, "no such file; make one with"),
    ],
)
def test_bad_settings_are_refused_before_weights_are_read(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jmoe.models.lazy_checkpoint.LazyCheckpoint.load_rest", lambda _: pytest.fail("were read"))
    monkeypatch.setattr("jmoe.models.lazy_checkpoint.LazyCheckpoint.fill_expert", lambda *_: pytest.fail("were read"))
    with pytest.raises(ValueError, match=match):
        tiny_engine("mixtral", **options)
