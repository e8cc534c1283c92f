"""Engines of models with gated delta networks: states of every row, whatever steps run."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, needs_compiler, run_as_on_accelerator, tiny_engine

import jmoe
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.delta_states import DeltaCache
from jmoe.inference.engine import Engine
from jmoe.inference.loading import FEW_PREFIXES, model_bytes, open_checkpoint
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Scheduler
from jmoe.inference.sequence import Sequence

NAME = "qwen3_next"
SIZES: dict[str, Any] = {"max_batch": 4, "max_seq_len": 320, "prefill_chunk_tokens": 32}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with positions for several blocks of the cache."""
    folder = shutil.copytree(CHECKPOINTS / NAME, tmp_path_factory.mktemp("long") / NAME)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 512}))
    return folder


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with one prefix, of 1 to 124 tokens, greedy and sampled, ended at various times."""
    rng = random.Random(3)
    prefix = [rng.randrange(3, 64) for _ in range(135)]
    asked = []
    for i in range(count):
        prompt = prefix[: rng.choice([1, 20, 120, 120, 120])] + [
            rng.randrange(3, 64)
        ] * rng.randrange(5)
        kind: dict[str, Any] = [{}, {"temperature": 0.7, "seed": i}, {"stop_token_ids": (9, 30)}][
            i % 3
        ]
        most = rng.randrange(5, 50)
        asked.append((prompt, SamplingParams(max_new_tokens=most, ignore_eos=True, **kind)))
    return asked


def run_together(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Sequence]:
    sequences = [engine.add_request(*request) for request in asked[: len(asked) // 2]]
    for request in asked[len(sequences) :]:
        for _ in range(4):
            engine.step()
        sequences.append(engine.add_request(*request))
    while engine.has_unfinished:
        engine.step()
    return sequences


@pytest.mark.parametrize(
    "native",
    ["on", *(pytest.param(n, marks=pytest.mark.slow) for n in ("accelerator", "off", "drafts"))],
)
def test_no_step_changes_another_sequence(
    native: str, long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in common, chunks of prompts, preemption, steps that ran ahead in vain and drafts give
    each request the tokens that it gets alone, in a row that others have used.
    """
    drafting: dict[str, Any] = {"speculation": "lookup"} if native == "drafts" else {}
    if native in ("on", "drafts"):
        native = "on"
        needs_compiler()
    elif native == "accelerator":
        native = "off"
        run_as_on_accelerator(monkeypatch)
    monkeypatch.setattr(Scheduler, "_num_sequences_that_may_grow", lambda *_: 0)
    asked, options = requests(12), {"policy": "resident", "native": native}
    with tiny_engine(long_model, **SIZES, cache_tokens=5 * 128, **options, **drafting) as engine:
        together = run_together(engine, asked)
        stats = engine.scheduler_stats()
        assert stats.preemptions > 0
        assert not drafting or 0 < engine.stats().accepted < engine.stats().drafted
    with tiny_engine(long_model, **SIZES, **options) as engine:
        for sequence, (prompt, sampling) in zip(together, asked, strict=True):
            (alone,) = engine.generate([prompt], sampling)
            assert sequence.output_token_ids == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_a_conversation_continues_in_the_row_of_its_last_turn(
    speculation: str, long_model: Path
) -> None:
    """Only its new tokens run, with the log-probabilities of the whole text; another text that
    begins alike shares nothing, and a row that another sequence has taken is computed again.
    """
    rng = random.Random(7)
    first, further = ([rng.randrange(3, 64) for _ in range(n)] for n in (140, 9))
    asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 1}
    options = {"policy": "resident", "native": "off", "speculation": speculation}
    with tiny_engine(long_model, **SIZES, **options) as engine:
        (turn,) = engine.generate([first], **asked)
        second = first + turn.token_ids + further
        assert engine.scheduler_stats().reused_tokens == 0
        (other,) = engine.generate([first + further], **asked)
        assert engine.scheduler_stats().reused_tokens == 0
        (found,) = engine.generate([second], **asked)
        # the last token of an answer is never computed
        assert engine.scheduler_stats().reused_tokens == len(first) + 11
        third = second + found.token_ids + further
        engine.generate([[5] * 20] * SIZES["max_batch"], **asked)
        before = engine.scheduler_stats().reused_tokens
        (again,) = engine.generate([third], **asked)
        assert engine.scheduler_stats().reused_tokens == before
    model = jmoe.load_pretrained(long_model, dtype="float32")
    for prompt, completion in ((first + further, other), (second, found), (third, again)):
        tokens = np.array([prompt + completion.token_ids], np.int32)
        logits_SV = np.asarray(model(tokens)[0], np.float64)[len(prompt) - 1 : -1]
        sums = np.log(np.exp(logits_SV).sum(axis=1))
        chosen = np.take_along_axis(logits_SV, np.array(completion.token_ids)[:, None], 1)[:, 0]
        assert completion.logprobs is not None
        served = [each.logprob for each in completion.logprobs]
        np.testing.assert_allclose(served, chosen - sums, rtol=0, atol=5e-4)


def test_states_are_planned_and_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="jmoe"), tiny_engine(NAME) as engine:
        states = [c for c in engine._runner.caches if isinstance(c, DeltaCache)]
        assert len(states) == 2 and len(engine._runner.caches) == 3
        planned = engine.plan.memory.model.state_bytes
        assert planned == sum(x.nbytes for x in jax.tree.leaves(states)) > 0
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(states))
    assert sum(FEW_PREFIXES in record.message for record in caplog.records) == 1
    with open_checkpoint(CHECKPOINTS / NAME, EngineConfig(dtype="float32")) as checkpoint:
        short, long = (
            model_bytes(checkpoint, EngineConfig(max_batch=2, max_seq_len=n, dtype="float32"))
            for n in (8, 64)
        )
        drafting = EngineConfig(max_batch=2, max_seq_len=8, dtype="float32", speculation="lookup")
        drafts = model_bytes(checkpoint, drafting)
    assert short.state_bytes == long.state_bytes == planned
    # after each of the six tokens of a step with drafts, and before them
    assert 2 * drafts.state_bytes == 7 * planned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": ("a=b",)}, "lora = .*: must be empty for a model with linear"),
        ({"mesh": EngineMesh(devices=2)}, "mesh.devices = 2: must be 1"),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_engine(NAME, **options)


def test_hybrid_and_auto_give_the_resident_tokens() -> None:
    """Experts computed by the host where the device lacks them."""
    needs_compiler()
    prompts = np.load(CHECKPOINTS / NAME / "reference.npz")["input_ids"].tolist()
    outputs = []
    for options in ({"policy": "resident"}, {"policy": "hybrid", "device_bytes": 20_000}):
        with tiny_engine(NAME, **options) as engine:
            completions = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
            outputs.append([completion.token_ids for completion in completions])
    assert outputs[0] == outputs[1]


def test_states_in_bfloat16() -> None:
    """Greedy tokens over float32 states are those that the whole sequence, run at once, prefers."""
    prompts = np.load(CHECKPOINTS / NAME / "reference.npz")["input_ids"].tolist()
    with tiny_engine(NAME, dtype="bfloat16", policy="resident") as engine:
        completions = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
    model = jmoe.load_pretrained(CHECKPOINTS / NAME)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.array([prompt + completion.token_ids], np.int32)
        before_SV = np.asarray(model(tokens)[0]).astype(np.float32)[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(before_SV, np.array(completion.token_ids)[:, None], 1)[:, 0]
        assert (before_SV.max(axis=1) - chosen).max() < 0.02 * np.ptp(before_SV)


def run_alone(scheduler: Scheduler, sequence: Sequence) -> int:
    """Run a sequence to its end; return the position of the first token that ran."""
    scheduler.add(sequence)
    first = -1
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        first = plan.chunks[0].start if first < 0 else first
        scheduler.update(plan, [7] * len(plan.sampled_sequences))
    return first


def test_which_rows_keep_a_state() -> None:
    """A row that ended well keeps it, until a sequence that goes on from elsewhere takes the row
    that has been free for longest; not one that failed, or ended in the middle of its prompt.
    """
    options = EngineConfig(max_batch=2, max_seq_len=64, prefill_chunk_tokens=4)
    scheduler = Scheduler(options, has_states=True, block_tokens=4)
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    assert run_alone(scheduler, Sequence([1] * 6, sampling)) == 0
    # the answer's last token was never computed
    assert run_alone(scheduler, Sequence([1] * 6 + [7] * 3 + [2], sampling)) == 8
    assert run_alone(scheduler, Sequence([1] * 6 + [7] * 3 + [2], sampling)) == 0
    for length, reason, steps in ((6, "error", 3), (9, "abort", 1)):
        scheduler.forget_cached_prefixes()
        broken = Sequence([3] * length, sampling)
        scheduler.add(broken)
        for _ in range(steps):
            plan = scheduler.schedule()
            scheduler.update(plan, [7] * len(plan.sampled_sequences))
        scheduler.finish(broken, reason)  # type: ignore[arg-type]
        assert run_alone(scheduler, Sequence([3] * length + [7] * 3, sampling)) == 0
    scheduler.forget_cached_prefixes()
    turns = [Sequence([n] * 6, sampling) for n in (1, 2, 3)]
    assert [run_alone(scheduler, turn) for turn in turns] == [0, 0, 0]
    # the third took the row of the first
    follow = [Sequence([n] * 6 + [7] * 3 + [n], sampling) for n in (2, 1)]
    assert [run_alone(scheduler, turn) for turn in follow] == [8, 0]
