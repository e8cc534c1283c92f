"""Steps of single tokens as accelerators run them: all layers, head and sampling in one program."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_engines import run_as_on_accelerator, tiny_engine

from jmoe.inference import layer_programs, runner
from jmoe.inference.engine import Engine
from jmoe.inference.sampler import Sampler
from jmoe.inference.sampling_params import SamplingParams, Unconstrained
from jmoe.inference.sequence import Sequence

STEPS = 5
RESIDENT: dict[str, Any] = {"policy": "resident", "native": "off"}
PROMPTS = [[1, 5, 9, 2], [3, 8, 4]]
DRAWN = {"temperature": 1.0, "seed": 3}


@pytest.fixture
def as_on_accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which engines run the programs of an accelerator."""
    return lambda: run_as_on_accelerator(monkeypatch)


def profiled_steps(served: Engine, folder: Path) -> Counter[str]:
    """Return how often `STEPS` steps dispatched each program, and what they read on the host."""
    with jax.profiler.trace(folder):
        for _ in range(STEPS):
            served.step()
    (path,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    names = [event.name for plane in planes for line in plane.lines for event in line.events]
    programs = sum(name.endswith("::ExecuteHelperOnSingleDevice") for name in names)
    return Counter(programs=programs, reads=names.count("$numpy asarray"))


@pytest.mark.parametrize(
    ("batch", "sampling", "programs", "reads"),
    [
        (1, {}, 1, 1),
        (2, {}, 1, 1),
        (1, DRAWN, 1, 1),
        (2, DRAWN | {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, 1, 1),
        # a search of the vocabulary, and penalties, have a program of their own; with one row of
        # two, logits are padded and tokens cut
        (2, DRAWN | {"top_p": 0.9}, 2, 1),
        (1, DRAWN | {"presence_penalty": 1.0}, 4, 1),
        (2, {"logprobs": 2}, 2, 4),
    ],
)
def test_programs_and_reads_of_a_step(
    batch: int,
    sampling: dict[str, Any],
    programs: int,
    reads: int,
    as_on_accelerator: Callable[[], None],
    tmp_path: Path,
) -> None:
    """A step reads the tokens alone, which are those of an engine that runs layer by layer."""
    fields: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    with tiny_engine("mixtral", **RESIDENT) as served:
        expected = [answer.token_ids for answer in served.generate(PROMPTS[:batch], **fields)]
    as_on_accelerator()
    with tiny_engine("mixtral", **RESIDENT) as served:
        served.generate(PROMPTS[:batch], **fields)  # compiles
        requests = [served.add_request(p, SamplingParams(**fields)) for p in PROMPTS[:batch]]
        while any(len(request.output_token_ids) < 4 for request in requests):
            served.step()
        counts = profiled_steps(served, tmp_path)
        while served.has_unfinished:
            served.step()
    assert [request.output_token_ids for request in requests] == expected
    assert counts["programs"] == programs * STEPS
    # NumPy's own conversions, of parameters that go to the device, count too
    assert counts["reads"] <= (reads + (programs > 1)) * STEPS


class EvenTokens(Unconstrained):
    """Allows every second token: a grammar, whose masks the host makes."""

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = 0x55555555


def serve_all_kinds(served: Engine) -> list[Any]:
    """Serve requests of every kind that begin and end at different steps; return their tokens,
    ends and numbers of log-probabilities.
    """
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 20},
        {"max_new_tokens": 9, **DRAWN, "top_k": 12, "top_p": 0.8},
        {"max_new_tokens": 16, **DRAWN, "seed": 5, "min_p": 0.05},
        {"max_new_tokens": 6, "constrained": True},
        {"max_new_tokens": 8, **DRAWN, "presence_penalty": 1.5, "logprobs": 3},
        {"max_new_tokens": 7, **DRAWN, "seed": 8, "top_p": 0.7},
        {"max_new_tokens": 12, "temperature": 0.4, "seed": 1, "top_k": 3},
    ]
    requests = []
    for first, kind in enumerate(kinds):
        constraint = EvenTokens() if kind.pop("constrained", False) else None
        sampling = SamplingParams(ignore_eos=True, **kind)
        requests.append(served.add_request([first + 3, 9, 2, 7], sampling, constraint))
        for _ in range(3):
            served.step()
    while served.has_unfinished:
        served.step()
    assert all(token % 2 == 0 for token in requests[3].output_token_ids)
    return [(r.output_token_ids, r.finish_reason) for r in requests]


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [
        pytest.param("mixtral", {}, 32, marks=pytest.mark.slow),
        pytest.param("mixtral", {"expert_dtype": "fp8"}, 32, marks=pytest.mark.slow),
        ("gpt_oss", {}, 32),  # windows and sinks
        ("deepseek_v3_yarn", {}, 1),  # latents, and a program for each layer
    ],
)
def test_tokens_are_those_of_layer_by_layer(
    name: str,
    options: dict[str, Any],
    most: int,
    as_on_accelerator: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**RESIDENT, "max_batch": 4, **options}
    with tiny_engine(name, **options) as served:
        expected = serve_all_kinds(served)
    as_on_accelerator()
    monkeypatch.setattr(runner, "LAYERS_ON_ACCELERATOR", most)
    with tiny_engine(name, **options) as served:
        assert serve_all_kinds(served) == expected


@pytest.mark.parametrize("most", [32, 1])
def test_host_arrays_and_programs_follow_the_cap(
    most: int,
    as_on_accelerator: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs of at most as many layers as the constant says; only tables of blocks and positions
    come from the host, and only the last program samples.
    """
    as_on_accelerator()
    monkeypatch.setattr(runner, "LAYERS_ON_ACCELERATOR", most)
    apply, sampled, from_host = layer_programs.apply_layers, [], []

    def note(static: Any, *operands: Any) -> Any:
        sampled.append(operands[4].sampling is not None)
        leaves = jax.tree.leaves(operands)
        from_host.append([x.shape for x in leaves if not isinstance(x, jax.Array)])
        return apply(static, *operands)

    with tiny_engine("gpt_oss", **RESIDENT) as served:
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, **DRAWN)
        request = served.add_request(PROMPTS[0], sampling)
        while len(request.output_token_ids) < 3:
            served.step()
        monkeypatch.setattr(runner, "apply_layers", note)
        served.step()
        programs = -(-served.config.num_hidden_layers // most)
        width = served._model.on_one.table_width  # type: ignore[union-attr]
    assert sampled == [*[False] * (programs - 1), True]
    assert from_host == [[(1, width), (1, 1)]] * programs


def test_preparation_compiles_what_steps_run(
    as_on_accelerator: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy and of sampled requests: a step after it compiles nothing."""
    as_on_accelerator()
    with tiny_engine("mixtral", **RESIDENT) as served:
        served.compile_all_programs()
        before = layer_programs.apply_layers._cache_size()  # type: ignore[attr-defined]
        for fields in ({}, DRAWN, DRAWN | {"top_k": 5}):
            served.generate(PROMPTS, max_new_tokens=4, ignore_eos=True, **fields)
            served.generate(PROMPTS[:1], max_new_tokens=4, ignore_eos=True, **fields)
        assert layer_programs.apply_layers._cache_size() == before  # type: ignore[attr-defined]


def test_a_drawn_step_ahead_of_a_changed_batch(as_on_accelerator: Callable[[], None]) -> None:
    """A request with penalties ends while a step runs ahead that took the most likely tokens: the
    other's next token follows its own parameters.
    """
    plain = SamplingParams(max_new_tokens=20, ignore_eos=True, **DRAWN)
    fields = {"max_new_tokens": 20, "ignore_eos": True, **DRAWN, "presence_penalty": 1.0}

    def serve(served: Engine, stop: int | None) -> list[list[int]]:
        stops = () if stop is None else (stop,)
        ends = served.add_request(PROMPTS[0], SamplingParams(**fields, stop_token_ids=stops))
        stays = served.add_request(PROMPTS[1], plain)
        while served.has_unfinished:
            served.step()
        return [ends.output_token_ids, stays.output_token_ids]

    with tiny_engine("mixtral", **RESIDENT) as served:
        whole = serve(served, None)
        expected = serve(served, whole[0][7])
    as_on_accelerator()
    with tiny_engine("mixtral", **RESIDENT) as served:
        assert serve(served, None) == whole
        assert serve(served, whole[0][7]) == expected
    assert len(expected[0]) <= 8


def test_what_a_step_can_sample() -> None:
    """Filters that the likeliest tokens settle, with nothing that the host keeps count of."""
    sampler = Sampler(2, 1000, ())

    def can(**fields: Any) -> bool:
        return sampler.params_in_step([Sequence([1], SamplingParams(**fields))]) is not None

    assert can(temperature=1.0) and can(temperature=0.5, top_k=256, top_p=0.1, min_p=0.5)
    assert not can(temperature=0.0)  # the most likely tokens need no parameters
    for fields in ({"top_p": 0.9}, {"top_k": 257}, {"logprobs": 0}, {"logit_bias": {3: 1.0}}):
        assert not can(temperature=1.0, **fields)
