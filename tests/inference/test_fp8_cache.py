"""Engines whose cache holds keys and values, or latents, in FP8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, run_as_on_accelerator, tiny_engine

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference import kv_cache
from jmoe.inference.kv_cache import KVCache
from jmoe.inference.loading import plan_engine_memory
from jmoe.inference.runner import ModelRunner
from jmoe.inference.sequence import Completion
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from kernels_pallas.paged_attention import reference

PROMPTS = [[1, 5, 9, 2, 7, 33, 12, 4, 8], [3, 8, 4], [1, 5, 9, 2, 7, 33, 12, 40]]
RESIDENT: dict[str, Any] = {"policy": "resident", "native": "off"}


def answers(name: str, **options: Any) -> list[Completion]:
    jax.clear_caches()  # programs of equal shapes, traced with other functions
    with tiny_engine(name, **options) as served:
        return served.generate(PROMPTS, max_new_tokens=8, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module")
def plain_answers() -> list[Completion]:
    """Return the answers of steps that run layer by layer on one device."""
    return answers("qwen3_moe", kv_cache_dtype="fp8", **RESIDENT)


def top_logprobs(completions: list[Completion]) -> list[list[dict[int, float]]]:
    return [[dict(token.top) for token in each.logprobs] for each in completions]


def use_plain_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a float32 cache hold numbers that XLA's conversion rounds to E4M3, and plain softmax
    attention read it.
    """

    def rounded(x: jax.Array) -> jax.Array:
        return jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype)

    def encode(cache: KVCache, k_PCGd: jax.Array, v_PCGe: jax.Array) -> KVCache:
        return KVCache(rounded(k_PCGd), None if cache.v_NGLe is None else rounded(v_PCGe))

    def attend(*operands: jax.Array, implementation: object = None, **options: Any) -> jax.Array:
        return reference.paged_attention(*operands, **options)

    monkeypatch.setattr(kv_cache, "_encode_for_cache", encode)
    monkeypatch.setattr(kv_cache, "paged_attention", attend)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        "gpt_oss",
        pytest.param("deepseek_v3_yarn", marks=pytest.mark.slow),
    ],
)
def test_a_plain_reference_that_rounds_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts and single tokens; windows and sinks; latents."""
    ours = answers(name, kv_cache_dtype="fp8", **RESIDENT)
    with monkeypatch.context() as patch:
        use_plain_reference(patch)
        expected = answers(name, **RESIDENT)
    jax.clear_caches()
    assert [each.token_ids for each in ours] == [each.token_ids for each in expected]
    for one, other in zip(*map(top_logprobs, (ours, expected)), strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.keys() == b.keys()
            np.testing.assert_allclose([a[t] for t in a], [b[t] for t in a], atol=3e-5)


def first_logits(name: str, **options: Any) -> np.ndarray:
    """Return the logits after a prompt, less their mean."""
    seen: list[np.ndarray] = []
    make = ModelRunner.logits

    def note(*operands: Any) -> jax.Array:
        logits_PV = make(*operands)
        seen.append(np.asarray(logits_PV, np.float32))
        return logits_PV

    with pytest.MonkeyPatch.context() as patch, tiny_engine(name, **options, **RESIDENT) as served:
        patch.setattr(ModelRunner, "logits", note)
        served.generate(PROMPTS[:1], max_new_tokens=1, ignore_eos=True)
    logits_V: np.ndarray = seen[-1][0] - seen[-1][0].mean()
    return logits_V


def test_how_far_rounding_moves_logits() -> None:
    """By 0.13 of their norm in a model of drawn weights with heads of 12 dimensions."""
    exact, narrow = (first_logits("qwen3_moe", kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    change = np.linalg.norm(narrow - exact) / np.linalg.norm(exact)
    assert 0.01 < change < 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "resident", "native": "auto"},
        {"policy": "resident", "mesh": EngineMesh(2)},  # blocks go from one device to another
        pytest.param(
            {"policy": "experts", "device_bytes": 30_000, "native": "off"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"policy": "resident", "mesh": EngineMesh(2, dense="tensor")}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"policy": "resident", "native": "off", "speculation": "lookup"}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_way_to_run_steps(options: dict[str, Any], plain_answers: list[Completion]) -> None:
    """Native products beside XLA's attention, streamed experts, several devices, and drafts."""
    found = answers("qwen3_moe", kv_cache_dtype="fp8", **options)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain_answers]


def test_one_program_a_step(
    plain_answers: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_on_accelerator(monkeypatch)
    found = answers("qwen3_moe", kv_cache_dtype="fp8", **RESIDENT)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain_answers]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_bytes_of_the_cache(name: str) -> None:
    """Half of bfloat16's, in the plan and on the device."""
    planned = {}
    with LazyCheckpoint(CHECKPOINTS / name, "bfloat16") as checkpoint:
        for kind in ("auto", "fp8"):
            options = EngineConfig(4, 40, dtype="bfloat16", kv_cache_dtype=kind)
            planned[kind] = plan_engine_memory(checkpoint, options).model.cache_bytes
    assert planned["auto"] == 2 * planned["fp8"] > 0
    options = {"max_batch": 4, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    with tiny_engine(name, **options, **RESIDENT) as served:
        held = sum(x.nbytes for x in jax.tree.leaves(served._runner.caches))
    assert held == planned["fp8"]


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype = 'int8': must be"):
        EngineConfig(kv_cache_dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_cache_dtype = None: must be"):
        EngineConfig(kv_cache_dtype=None)  # type: ignore[arg-type]


def test_a_prefix_is_reused() -> None:
    """A prompt that goes on from cached blocks gets the tokens that it gets alone."""
    with tiny_engine("qwen3_moe", kv_cache_dtype="fp8", **RESIDENT) as served:
        (first,) = served.generate([PROMPTS[0]], max_new_tokens=6, ignore_eos=True)
        longer = [*PROMPTS[0], *first.token_ids, 7]
        (again,) = served.generate([longer], max_new_tokens=6, ignore_eos=True)
        assert served.scheduler_stats().reused_tokens > 0
    with tiny_engine("qwen3_moe", kv_cache_dtype="fp8", **RESIDENT) as served:
        (alone,) = served.generate([longer], max_new_tokens=6, ignore_eos=True)
    assert again.token_ids == alone.token_ids
