"""Engines that verify drafts: tokens, log-probabilities, texts and ends of requests are those of
engines without drafts.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, needs_compiler, tiny_engine
from tokenizers import Tokenizer, decoders, models

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference import runner as runner_module
from jmoe.inference.engine import Engine
from jmoe.inference.loading import model_bytes
from jmoe.inference.sampling_params import Constraint, SamplingParams
from jmoe.inference.scheduler import Scheduler
from jmoe.inference.sequence import Output, Sequence
from jmoe.inference.speculation import PromptLookup
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.offload.slots import DeviceSlots
from tests.compiled import compilations

LOOKUP: dict[str, Any] = {"speculation": "lookup", "prompt_lookup_min": 1}
SIZES: dict[str, Any] = {"max_batch": 4, "max_seq_len": 64, "prefill_chunk_tokens": 16}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
COOL = {"temperature": 0.2, "seed": 3}


class Cycle(Constraint):
    """Allows one of two tokens, in turns of three; ready at every second question."""

    def __init__(self) -> None:
        self.length = self.asked = 0

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked % 2 == 0

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = 0
        words_W[0] = 0b11 << (3 + 2 * (self.length % 3))

    def accept(self, token_id: int) -> None:
        assert (token_id - 3) // 2 == self.length % 3
        self.length += 1


def traffic(engine: Engine, stop: int | None = None) -> tuple[list[Sequence], list[list[Output]]]:
    """Serve requests of every kind, most of which repeat themselves; return them and their
    outputs.

    stop: a token that ends the fourth request.
    """
    requests: list[tuple[list[int], dict[str, Any]]] = [
        ([5, 9, 2, 7] * 4, {}),
        ([4, 3] * 5, {**COOL, "logprobs": 2}),
        ([6, 7, 8] * 4, {**COOL, **PENALTIES, "prompt_logprobs": 1}),
        ([5, 9, 2, 7] * 4, {} if stop is None else {"stop_token_ids": (stop,)}),
        ([9, 4] * 6, {"constrained": True, "logprobs": 0}),
        ([8, 8, 8], {"min_new_tokens": 9, "stop_token_ids": tuple(range(3, 40))}),
        ([8, 8, 8], {"max_new_tokens": 1}),
        ([11, 12, 13], {"max_new_tokens": 99}),  # to the end of its table
        ([3, 1] * 6, {"temperature": 5.0, "seed": 1}),  # drafts fail
    ]
    sequences, outputs = [], {}
    for prompt, fields in requests:
        constraint = Cycle() if fields.pop("constrained", False) else None
        sampling = SamplingParams(**{"max_new_tokens": 30, "ignore_eos": True} | fields)
        sequences.append(engine.add_request(prompt, sampling, constraint))
        outputs[sequences[-1]] = list[Output]()
        for output in engine.step():
            outputs[output.sequence].append(output)
    while engine.has_unfinished:
        for output in engine.step():
            assert len(output.token_ids) == 1
            outputs[output.sequence].append(output)
    return sequences, list(outputs.values())


def draft_mostly_right(monkeypatch: pytest.MonkeyPatch, expected: list[Sequence]) -> None:
    """Let lookups draft what the requests' outputs will be, with a wrong token in every fifth
    place: models of random weights repeat too little.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for sequence in sorted(expected, key=lambda s: len(s.output_token_ids)):
        by_prompt[tuple(sequence.prompt_token_ids)] = sequence.output_token_ids

    def draft(_: PromptLookup, prompt: list[int], output: list[int], most: int) -> list[int]:
        start = len(output)
        right = by_prompt[tuple(prompt)][start : start + max(0, most)]
        return [
            (token + 1) % 60 if place % 5 == 4 else token
            for place, token in enumerate(right, start)
        ]

    monkeypatch.setattr(PromptLookup, "draft_tokens", draft)


def logprobs_of(outputs: list[list[Output]]) -> list[float]:
    return [
        value
        for of_sequence in outputs
        for output in of_sequence
        for lp in output.logprobs + output.prompt_logprobs
        for value in (lp.logprob, *(logprob for _, logprob in lp.top))
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt_oss", {"policy": "resident", "native": "on"}),
        ("mixtral", {"policy": "experts", "device_bytes": 30_000, "native": "on"}),
        pytest.param(
            "deepseek_v3", {"policy": "resident", "native": "off"}, marks=pytest.mark.slow
        ),
        pytest.param("olmoe", {"policy": "ring", "ring_slots": 1}, marks=pytest.mark.slow),
        pytest.param(
            "mixtral",
            {"policy": "experts", "device_bytes": 30_000, "estimator": "router", "native": "off"},
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3_moe", {"policy": "hybrid", "native": "on"}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"mesh": EngineMesh(2)}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"mesh": EngineMesh(2, dense="tensor")}, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_nothing(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("native") == "on":
        needs_compiler()
    with tiny_engine(name, **SIZES, **options) as engine:
        stop = traffic(engine)[0][3].output_token_ids[11]
        engine.reset_stats()
        expected, before = traffic(engine, stop)
        steps = engine.stats().steps
        assert engine.stats().drafts == 0
    draft_mostly_right(monkeypatch, expected)
    with tiny_engine(name, **SIZES, **options, **LOOKUP) as engine:
        found, after = traffic(engine, stop)
        stats = engine.stats()
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in expected]
    assert [s.finish_reason for s in found] == [s.finish_reason for s in expected]
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=2e-5)
    assert stats.accepted > 80 and 0.4 < stats.accepted_share < 0.9
    assert stats.steps < steps and stats.drafted >= stats.drafts > 10


def test_an_accelerator_runs_drafts_through_several_layers_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where experts stay; the tokens are those of single steps. On the CPU, as an accelerator."""
    accelerator = lambda num_slots, fields, **_: DeviceSlots(num_slots, fields, jax.devices()[0])  # noqa: E731
    monkeypatch.setattr("jmoe.offload.residency.HostSlots", accelerator)
    monkeypatch.setattr(runner_module, "runs_on_cpu", lambda: False)
    options: dict[str, Any] = {"policy": "resident", "native": "off"}
    with tiny_engine("mixtral", **SIZES, **options) as engine:
        expected, before = traffic(engine)
    draft_mostly_right(monkeypatch, expected)
    widths: list[int] = []
    apply_layers = runner_module.apply_layers

    def counted(*operands: Any) -> Any:
        widths.append(operands[5].positions_PC.shape[1])
        return apply_layers(*operands)

    monkeypatch.setattr(runner_module, "apply_layers", counted)
    with tiny_engine("mixtral", **SIZES, **options, **LOOKUP) as engine:
        found, after = traffic(engine)
        assert engine.stats().accepted > 80
    assert set(widths) == {1, 6}
    assert [s.output_token_ids for s in found] == [s.output_token_ids for s in expected]
    np.testing.assert_allclose(logprobs_of(after), logprobs_of(before), atol=2e-5)


def test_memory_plans_have_the_logits_of_drafts() -> None:
    """Of every token of a step in which all sequences draft; the vocabulary has 64 tokens."""
    with LazyCheckpoint(CHECKPOINTS / "mixtral") as checkpoint:
        off, on = (model_bytes(checkpoint, EngineConfig(**SIZES, **o)) for o in ({}, LOOKUP))
        logits = np.zeros((4, 6, checkpoint.config.vocab_size), np.float32)
    assert off.draft_bytes == 0 and on.draft_bytes == logits.nbytes


def test_texts_end_within_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that go on behind a stop string, the end-of-text token and the last token."""
    model = shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "model")
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {f"{chr(97 + i // 10)}{i % 10}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    prompts = [[5, 9, 2, 7] * 4, [4, 3] * 5, [6, 7, 8] * 4]

    def serve(engine: Engine, **fields: Any) -> tuple[list[Sequence], list[list[Output]]]:
        sampling = SamplingParams(max_new_tokens=30, **fields)
        outputs = {engine.add_request(prompt, sampling): list[Output]() for prompt in prompts}
        while engine.has_unfinished:
            for output in engine.step():
                outputs[output.sequence].append(output)
        return list(outputs), list(outputs.values())

    needs_compiler()
    options = {**SIZES, "policy": "resident", "native": "on"}
    with tiny_engine(model, **options) as engine:
        endless, outputs = serve(engine, ignore_eos=True)
        # each begins within a token, and so ends within the next
        stops = tuple("".join(o.text for o in of)[25:27] for of in outputs)
        kinds: list[dict[str, Any]] = [
            {"ignore_eos": True, "stop": stops},
            {"ignore_eos": True, "stop": stops[:1], "min_new_tokens": 15},
            {"stop_token_ids": (endless[1].output_token_ids[13],)},
        ]
        expected = [serve(engine, **kind)[1] for kind in kinds]
    draft_mostly_right(monkeypatch, endless)
    with tiny_engine(model, **options, **LOOKUP) as engine:
        found = [serve(engine, **kind)[1] for kind in kinds]
        assert engine.stats().accepted > 40
    for before, after in zip(expected, found, strict=True):
        said = [
            [[(o.token_ids, o.text, o.finish_reason) for o in of] for of in each]
            for each in (before, after)
        ]
        assert said[0] == said[1]
        assert all(any(o.text for o in of) for of in after)
        assert "stop" in [of[-1].finish_reason for of in after]


def test_drafts_under_pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of several blocks that share prefixes and are preempted: what a refused draft
    wrote is never read.
    """
    shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 512}))
    monkeypatch.setattr(
        Scheduler, "_num_sequences_that_may_grow", lambda *_: 0
    )  # preempts more often
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 60, 150).tolist()
    prompts = [shared[: 90 + 3 * i] + rng.integers(3, 60, 20).tolist() for i in range(6)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.6, **PENALTIES}]

    def outputs(**options: Any) -> list[list[int]]:
        with tiny_engine(
            tmp_path / "model", max_batch=4, max_seq_len=384, prefill_chunk_tokens=32, **options
        ) as engine:
            sequences = [
                engine.add_request(
                    prompt,
                    SamplingParams(max_new_tokens=90, ignore_eos=True, seed=i, **kinds[i % 2]),
                )
                for i, prompt in enumerate(prompts)
            ]
            while engine.has_unfinished:
                engine.step()
            # they go on from where others ended, in blocks that drafts were written to
            again = engine.generate(
                [s.prompt_token_ids + s.output_token_ids[:50] for s in sequences],
                max_new_tokens=20,
                ignore_eos=True,
            )
            stats, of_cache = engine.stats(), engine.scheduler_stats()
        assert of_cache.reused_tokens > 300 and of_cache.blocks_used == 0
        if "speculation" in options:
            assert of_cache.preemptions > 1 and stats.accepted > 20
        return [s.output_token_ids for s in sequences] + [c.token_ids for c in again]

    needs_compiler()
    with_drafts = outputs(cache_tokens=400, policy="resident", native="on", **LOOKUP)
    assert with_drafts == outputs(policy="resident", native="on")


def test_programs_are_compiled_before_requests_come() -> None:
    with tiny_engine("mixtral", **SIZES, policy="resident", native="off", **LOOKUP) as engine:
        engine.compile_all_programs()
        with compilations() as own:
            traffic(engine)
        assert own == [] and engine.stats().drafts > 10


def test_steps_begin_ahead_where_nothing_repeats() -> None:
    """And not where something may."""
    needs_compiler()
    with tiny_engine("mixtral", **SIZES, policy="resident", native="on", **LOOKUP) as engine:
        engine.add_request(
            [3, 4, 5],
            SamplingParams(max_new_tokens=50, ignore_eos=True, temperature=9.0, seed=0),
        )
        ahead = 0
        while engine.has_unfinished:
            engine.step()
            ahead += engine._ahead is not None
        wild = engine.stats()
        assert ahead > 15 and wild.drafted < 25 and wild.accepted_share < 0.5
        engine.reset_stats()
        (tame,) = engine.generate([[5, 9] * 8], max_new_tokens=40, ignore_eos=True)
        assert len(tame.token_ids) == 40 and engine.stats().steps < 25


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"speculation": "ngram"}, "speculation = 'ngram': must be"),
        (
            {"num_speculative_tokens": 3},
            "num_speculative_tokens = 3: must be None with speculation = 'off'",
        ),
        ({"prompt_lookup_min": 1}, "prompt_lookup_min = 1: must be 2 with speculation = 'off'"),
        ({**LOOKUP, "num_speculative_tokens": 0}, "num_speculative_tokens = 0: must be"),
        (
            {**LOOKUP, "num_speculative_tokens": 128},
            "num_speculative_tokens = 128: must be below 128",
        ),
        (
            {**LOOKUP, "prompt_lookup_min": 5},
            "prompt_lookup_min = 5: must be at most prompt_lookup_max = 4",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        EngineConfig(**options)
