"""Engines whose cache is too small for what runs: sequences share blocks, wait for them and are
preempted, and every request gets the tokens that it gets alone.
"""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, needs_compiler, run_as_on_accelerator, tiny_engine

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.block_pool import NOTHING_CACHED, BlockPool
from jmoe.inference.engine import Engine
from jmoe.inference.loading import plan_engine_memory, resolve_sequence_length
from jmoe.inference.sampling_params import SamplingParams, Unconstrained
from jmoe.inference.scheduler import Scheduler
from jmoe.inference.sequence import Sequence
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from kernels_pallas.paged_attention import triton, xla

POSITIONS = 1024
ROOMY: dict[str, Any] = {"max_batch": 4, "max_seq_len": 384, "prefill_chunk_tokens": 32}
TIGHT = ROOMY | {"cache_tokens": 600}  # five blocks, of which a sequence may need three
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}


@pytest.fixture(scope="module")
def long_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tiny checkpoints that have more positions than a block."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3_moe", "gpt_oss"):
        shutil.copytree(CHECKPOINTS / name, folder / name)
        file = folder / name / "config.json"
        config = json.loads(file.read_text()) | {"max_position_embeddings": POSITIONS}
        file.write_text(json.dumps(config))
    return folder


def requests(count: int, seed: int = 1) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts that fill most of a block or two, of which many share a prefix, and parameters
    of every kind.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(3, 60) for _ in range(200)]
    made = []
    for i in range(count):
        prefix = shared[: rng.choice([0, 50, 100, 128, 150])]
        length = rng.choice([120, 125, 126, 250]) - rng.randrange(10)
        own = [rng.randrange(3, 60) for _ in range(max(1, length - len(prefix)))]
        kind: dict[str, Any] = [
            {"temperature": 0.9, "seed": i},
            {},
            {"temperature": 0.7, "seed": i, **PENALTIES},
            {"logprobs": 2, "prompt_logprobs": 1},
        ][i % 4]
        most = rng.randrange(10, 50)
        sampling = SamplingParams(max_new_tokens=most, ignore_eos=True, **kind)
        made.append((prefix + own, sampling))
    return made


@pytest.fixture
def no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sequences enter whatever those that run will need: most are preempted then."""
    monkeypatch.setattr(Scheduler, "_num_sequences_that_may_grow", lambda *_: 0)


def run_together(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Sequence]:
    """Run all requests and return their sequences; some come while others run."""
    sequences = [engine.add_request(*request) for request in asked[: len(asked) // 2]]
    for request in asked[len(sequences) :]:
        for _ in range(5):
            engine.step()
        sequences.append(engine.add_request(*request))
    while engine.has_unfinished:
        engine.step()
    return sequences


def run_alone(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Sequence]:
    """Run the requests one after the other, and reuse nothing."""
    sequences = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockPool, "find_cached_prefix", lambda *_: NOTHING_CACHED)
        for request in asked:
            sequences.append(engine.add_request(*request))
            while engine.has_unfinished:
                engine.step()
    assert engine.scheduler_stats().reused_tokens == 0
    return sequences


def assert_same(some: list[Sequence], others: list[Sequence]) -> None:
    """Tokens, ends and, up to the order of sums, log-probabilities of prompts."""
    assert [s.output_token_ids for s in some] == [s.output_token_ids for s in others]
    assert [s.finish_reason for s in some] == [s.finish_reason for s in others]
    for one, other in zip(some, others, strict=True):
        values = [[lp.logprob for lp in s.prompt_logprobs] for s in (one, other)]
        np.testing.assert_allclose(*values, atol=2e-5)


@pytest.mark.usefixtures("no_reserve")
@pytest.mark.parametrize(
    ("name", "native"),
    [
        pytest.param("qwen3_moe", "off", marks=pytest.mark.slow),
        ("gpt_oss", "on"),
        pytest.param("qwen3_moe", "accelerator", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "on", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "off", marks=pytest.mark.slow),
    ],
)
def test_pressure_changes_no_token(
    name: str, native: str, long_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled, with penalties and with log-probabilities; gpt-oss has windows and sinks."""
    if native == "on":
        needs_compiler()
    elif native == "accelerator":
        native = "off"
        run_as_on_accelerator(monkeypatch)
    asked = requests(12)
    options: dict[str, Any] = {"policy": "resident", "native": native}
    with tiny_engine(long_models / name, **TIGHT, **options) as engine:
        together = run_together(engine, asked)
        stats = engine.scheduler_stats()
        assert stats.preemptions > 4 and stats.reused_tokens > 300
        # greedy, with penalties, and with log-probabilities of the prompt
        assert {i % 4 for i, s in enumerate(together) if s.num_preemptions} >= {1, 2, 3}
        assert stats.blocks == 5 and stats.blocks_used == 0
    with tiny_engine(long_models / name, **ROOMY, **options) as engine:
        assert_same(together, run_alone(engine, asked))
        assert engine.scheduler_stats().preemptions == 0


@pytest.mark.usefixtures("no_reserve")
@pytest.mark.parametrize(
    ("mesh", "cache_tokens", "preempts"),
    [
        (EngineMesh(2), 768, True),
        pytest.param(EngineMesh(2, dense="tensor"), 600, True, marks=pytest.mark.slow),
        pytest.param(EngineMesh(4), None, False, marks=pytest.mark.slow),
    ],
)
def test_devices_under_pressure_give_the_tokens_of_one(
    mesh: EngineMesh, cache_tokens: int | None, preempts: bool, long_models: Path
) -> None:
    """Prefixes of other devices are copied, block by block."""
    asked = [request for request in requests(12) if request[1].prompt_logprobs is None]
    model, options = long_models / "qwen3_moe", {"policy": "resident", "native": "off"}
    with tiny_engine(model, **ROOMY, **options) as engine:
        expected = run_together(engine, asked)
    tight = ROOMY | {"cache_tokens": cache_tokens, "mesh": mesh}
    with tiny_engine(model, **tight, policy="resident") as engine:
        found = run_together(engine, asked)
        stats = engine.scheduler_stats()
        assert (stats.preemptions > 0) == preempts and stats.reused_tokens > 100
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("no_reserve")
def test_pressure_on_a_cache_in_fp8(long_models: Path) -> None:
    """Preempted requests compute their keys and values again and round them alike."""
    asked = requests(8)
    options: dict[str, Any] = {"policy": "resident", "native": "off", "kv_cache_dtype": "fp8"}
    with tiny_engine(long_models / "qwen3_moe", **TIGHT, **options) as engine:
        together = run_together(engine, asked)
        stats = engine.scheduler_stats()
        assert stats.preemptions > 2 and stats.reused_tokens > 200
    with tiny_engine(long_models / "qwen3_moe", **ROOMY, **options) as engine:
        alone = run_alone(engine, asked)
    assert [s.output_token_ids for s in together] == [s.output_token_ids for s in alone]


@pytest.mark.slow
@pytest.mark.usefixtures("no_reserve")
@pytest.mark.parametrize(
    "policy", [{"policy": "ring", "ring_slots": 1}, {"policy": "experts", "device_bytes": 20_000}]
)
def test_streamed_experts_under_pressure(policy: dict[str, Any], long_models: Path) -> None:
    asked, model = requests(6), long_models / "qwen3_moe"
    with tiny_engine(model, **TIGHT, policy="resident", native="off") as engine:
        expected = run_together(engine, asked)
        preemptions = engine.scheduler_stats().preemptions
    with tiny_engine(model, **TIGHT, **policy, native="off") as engine:
        assert_same(run_together(engine, asked), expected)
        assert engine.scheduler_stats().preemptions == preemptions > 0


def test_who_leaves_gives_blocks_back(long_models: Path) -> None:
    """Aborted while it waits, computes its prompt, decodes, and after it was preempted."""
    options = {"max_new_tokens": 100, "ignore_eos": True}
    with tiny_engine(long_models / "qwen3_moe", **TIGHT, policy="resident") as engine:
        first, *rest = [
            engine.add_request([i + 3] * 200, SamplingParams(**options)) for i in range(4)
        ]
        engine.step()
        engine.abort(rest[2])
        for _ in range(60):
            engine.step()
        assert engine.scheduler_stats().blocks_used > 0
        for sequence in (rest[0], first, rest[1]):
            engine.abort(sequence)
        stats = engine.scheduler_stats()
        assert (stats.blocks_used, stats.waiting, stats.running) == (0, 0, 0)
        (whole,) = engine.generate([[7] * 283], **options)  # needs what they had
        assert len(whole.token_ids) == 100


def test_chats_share_the_system_prompt(long_models: Path) -> None:
    """Chats that come one after the other compute it once, and use its memory once."""
    system = np.random.default_rng(0).integers(3, 60, 300).tolist()
    with tiny_engine(long_models / "qwen3_moe", **ROOMY, policy="resident") as engine:
        for i in range(10):
            engine.generate([[*system, i + 3, i + 4]], max_new_tokens=4, ignore_eos=True)
        stats = engine.scheduler_stats()
        assert (stats.reused_tokens, stats.prompt_tokens) == (9 * 300, 10 * 302)
        # two full blocks, and a third for each chat as far as there is memory
        assert stats.blocks_cached == 12 == stats.blocks


def test_the_size_of_the_cache(long_models: Path) -> None:
    """Bytes follow the option, and so does the longest sequence that is left open."""
    model = long_models / "qwen3_moe"
    with LazyCheckpoint(model) as checkpoint:
        sizes = {}
        for tokens in (256, 512, None):
            options = EngineConfig(4, 256, cache_tokens=tokens)
            sizes[tokens] = plan_engine_memory(checkpoint, options).model.cache_bytes
        assert sizes[512] == 2 * sizes[256] and sizes[None] == 4 * sizes[256]
        for tokens, length in ((300, 300), (5000, POSITIONS)):
            options = resolve_sequence_length(checkpoint, EngineConfig(4, cache_tokens=tokens))
            assert options.max_seq_len == length
        options = EngineConfig(4, cache_tokens=600, mesh=EngineMesh(2))
        assert resolve_sequence_length(checkpoint, options).max_seq_len == 300
    with tiny_engine(model, max_seq_len=300, cache_tokens=300) as engine:
        assert (engine.max_seq_len, engine.cache_tokens) == (300, 384)
        with pytest.raises(ValueError, match="300: must be below max_seq_len = 300"):
            engine.add_request([5] * 300)


class SlowConstraint(Unconstrained):
    """Ready when asked for the fifth time after a token."""

    asked = 5

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked >= 5

    def wait(self, limit_s: float) -> None:
        return

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        assert self.asked >= 5, "asked for before it was ready"
        super().fill_next_token_bitmask(words_W)

    def accept(self, token_id: int) -> None:
        self.asked = 0


def test_a_paused_sequence_is_preempted(long_models: Path) -> None:
    """It computes its tokens again, and draws the next one once its constraint is ready."""
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    options = ROOMY | {"cache_tokens": 384}  # three blocks
    with tiny_engine(long_models / "qwen3_moe", policy="resident", **options) as engine:
        first = engine.add_request([5, 6] * 50, sampling)
        late = engine.add_request([7, 8] * 63, sampling, SlowConstraint())
        while engine.has_unfinished:
            engine.step()
        assert late.num_preemptions > 0
        assert (first.finish_reason, late.finish_reason) == ("length", "length")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_tokens_are_the_same_by_the_kernel_of_gpus(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and sinks; latents. Chunks of prompts and single tokens, in Pallas' interpreter."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [5, 6, 7, 8, 9, 20]]
    options: dict[str, Any] = {"native": "off", "policy": "resident"}

    def answers() -> list[Any]:
        jax.clear_caches()  # programs of equal shapes, traced with the other form
        with tiny_engine(family, **options) as served:
            return served.generate(prompts, max_new_tokens=8, ignore_eos=True, logprobs=1)

    expected = answers()
    kernel = Mock(side_effect=partial(triton.paged_attention, interpret=True))
    monkeypatch.setattr(xla, "paged_attention", kernel)
    try:
        ours = answers()
    finally:
        jax.clear_caches()
    assert kernel.called
    for a, b in zip(ours, expected, strict=True):
        assert a.token_ids == b.token_ids
        both = [[token.logprob for token in each.logprobs] for each in (a, b)]
        # plain softmax attention in float32 differs from XLA's form by up to 1.6e-5 here
        np.testing.assert_allclose(*both, atol=3e-5)
