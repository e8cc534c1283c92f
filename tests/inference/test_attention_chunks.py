"""Engines of models that attend within chunks (Llama 4), on sequences of several chunks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, needs_compiler, run_as_on_accelerator, tiny_engine

import jmoe
from jmoe.config.engine import CACHE_BLOCK, EngineConfig, EngineMesh
from jmoe.deploy.lower import lower
from jmoe.inference.engine import Engine
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Scheduler
from jmoe.inference.sequence import Completion, Sequence
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from tests.checkpoint_variants import write_variant

CHUNK = CACHE_BLOCK
NEAR_TIE = 5e-4  # of a log-probability
SIZES: dict[str, Any] = {
    "max_batch": 4,
    "max_seq_len": 3 * CHUNK,
    "prefill_chunk_tokens": 48,
    "policy": "resident",
}
# before, across and far beyond the ends of chunks, in the prompt and in what follows it
LENGTHS = (20, CHUNK - 6, CHUNK, CHUNK + 1, 2 * CHUNK - 3, 2 * CHUNK + 40)
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixture with chunks as short as a block of the cache."""
    return write_variant(
        CHECKPOINTS / "llama4_text",
        tmp_path_factory.mktemp("chunks") / "model",
        attention_chunk_size=CHUNK,
        max_position_embeddings=512,
    )


def prompts() -> list[list[int]]:
    """Prompts of all lengths; some begin alike."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 64) for _ in range(2 * CHUNK + 100)]
    return [
        shared[:length] if i % 2 else [rng.randrange(3, 64) for _ in range(length)]
        for i, length in enumerate(LENGTHS)
    ]


def generate(engine: Engine, **options: Any) -> list[Completion]:
    asked = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 2} | options
    return engine.generate(prompts(), **asked)


def check_against_whole_sequences(folder: Path, found: list[Completion]) -> None:
    """Log-probabilities of a text run at once, whose layers have chunks of their own code."""
    model = jmoe.load_pretrained(folder, dtype="float32")
    for prompt, completion in zip(prompts(), found, strict=True):
        tokens = np.array([prompt + completion.token_ids], np.int32)
        logits_SV = np.asarray(model(tokens)[0], np.float64)[len(prompt) - 1 : -1]
        largest = logits_SV.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits_SV - largest).sum(axis=1, keepdims=True))
        logprobs_SV = logits_SV - largest - sums
        chosen = np.take_along_axis(logprobs_SV, np.array(completion.token_ids)[:, None], 1)[:, 0]
        assert completion.logprobs is not None
        served = [each.logprob for each in completion.logprobs]
        np.testing.assert_allclose(served, chosen, rtol=0, atol=1e-4)
        assert (logprobs_SV.max(axis=1) - chosen).max() < NEAR_TIE


@pytest.mark.parametrize(
    "native", ["on", *(pytest.param(n, marks=pytest.mark.slow) for n in ("accelerator", "off"))]
)
def test_tokens_are_those_of_the_whole_sequence(
    native: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native == "on":
        needs_compiler()
    elif native == "accelerator":
        native = "off"
        run_as_on_accelerator(monkeypatch)
    with tiny_engine(folder, **SIZES, native=native) as engine:
        found = generate(engine)
        assert engine.scheduler_stats().reused_tokens > 0
    check_against_whole_sequences(folder, found)


def test_chunks_count(folder: Path) -> None:
    """Full attention in all rotated layers gives other log-probabilities beyond the first chunk."""
    model = jmoe.load_pretrained(folder, dtype="float32")
    tokens = np.array(prompts()[-1:], np.int32)
    whole = write_variant(
        CHECKPOINTS / "llama4_text",
        folder.parent / "whole",
        max_position_embeddings=512,
        attention_chunk_size=512,
    )
    other_model = jmoe.load_pretrained(whole, dtype="float32")
    one, other = (np.asarray(m(tokens)) for m in (model, other_model))
    np.testing.assert_allclose(one[:, :CHUNK], other[:, :CHUNK], rtol=0, atol=1e-5)
    assert np.abs(one[:, CHUNK:] - other[:, CHUNK:]).max() > 0.1


@pytest.mark.slow
def test_policies_and_drafts_give_the_resident_tokens(folder: Path) -> None:
    """Streamed experts bit for bit; drafts end with their chunk."""
    with tiny_engine(folder, **SIZES, native="off") as engine:
        expected = generate(engine)
    with tiny_engine(folder, **SIZES | {"policy": "ring", "ring_slots": 1}, native="off") as engine:
        streamed = generate(engine)
    assert [(c.token_ids, c.logprobs) for c in streamed] == [
        (c.token_ids, c.logprobs) for c in expected
    ]
    drafting = SIZES | {"speculation": "lookup", "prompt_lookup_min": 1}
    with tiny_engine(folder, **drafting, native="off") as engine:
        drafted = generate(engine)
        assert engine.stats().drafted > 0
    assert [c.token_ids for c in drafted] == [c.token_ids for c in expected]


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["tensor", "replicated"])
def test_several_devices(dense: Any, folder: Path) -> None:
    mesh = EngineMesh(devices=2, dense=dense)
    with tiny_engine(folder, **SIZES, mesh=mesh) as engine:
        found = generate(engine)
    check_against_whole_sequences(folder, found)


def test_steps_end_with_their_chunk() -> None:
    """No chunk of a prompt and no draft has tokens of two attention chunks, and steps of many
    prompts stay within `max_prefill_tokens`.
    """
    options = EngineConfig(
        max_batch=4,
        max_seq_len=64,
        prefill_chunk_tokens=16,
        max_prefill_tokens=32,
        speculation="lookup",
        prompt_lookup_min=1,
    )
    scheduler = Scheduler(options, attention_chunk=20)
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for length in (7, 18, 21, 33, 39, 41):
        scheduler.add(Sequence([5] * length, sampling))
    widths, drafted = set(), 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            assert chunk.start // 20 == (chunk.end - 1) // 20
            widths.add(len(chunk.tokens))
            drafted += chunk.num_drafted
        assert sum(scheduler.padded_width(chunk) for chunk in plan.prefill) <= 32
        plan = plan.without_drafts()
        scheduler.update(plan, [5] * len(plan.sampled_sequences))
    assert 16 in widths and drafted > 0


def test_one_chunk_where_it_ends_inside_a_block() -> None:
    words = r"max_seq_len = 49: must not exceed the 48 positions of a chunk: .* multiple of 128"
    with pytest.raises(ValueError, match=words):
        tiny_engine("llama4_text", max_seq_len=49)
    prompts = np.load(CHECKPOINTS / "llama4_text" / "reference.npz")["input_ids"].tolist()
    with tiny_engine("llama4_text", max_seq_len=48, policy="resident", native="off") as engine:
        (found,) = engine.generate(prompts[:1], max_new_tokens=4, ignore_eos=True)
    assert len(found.token_ids) == 4


def test_what_runs_whole_rows_takes_one_chunk(folder: Path, tmp_path: Path) -> None:
    options = EngineConfig(max_batch=1, max_seq_len=CHUNK + 1)
    words = f"max_seq_len = {CHUNK + 1}: must not exceed attention_chunk_size = {CHUNK} for low"
    with pytest.raises(ValueError, match=words):
        lower(folder, tmp_path / "lowered", options, print)
    with LazyCheckpoint(folder) as checkpoint:
        config = checkpoint.config
    config.check_one_attention_chunk("sequence_length", CHUNK, "a teacher")
    with pytest.raises(ValueError, match=r"sequence_length = 129: must .* for a teacher"):
        config.check_one_attention_chunk("sequence_length", CHUNK + 1, "a teacher")
