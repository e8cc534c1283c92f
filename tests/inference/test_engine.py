"""The engine against transformers' greedy tokens, and every way of keeping experts against every
other, bit for bit.
"""

import logging
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, SIZES, needs_compiler, tiny_engine

import jmoe
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference import runner as runner_module
from jmoe.inference.engine import Engine, ReloadError
from jmoe.inference.loading import load_native_if_used, plan_engine_memory
from jmoe.inference.runner import ModelRunner
from jmoe.inference.sampling_params import SamplingParams, Unconstrained
from jmoe.inference.sequence import Completion, Output
from jmoe.memory import record_store
from jmoe.memory.moesys_counts import MoESysCounts
from jmoe.memory.pinned import PinnedSlots
from jmoe.memory.slot_table import HitCounts
from jmoe.models.decoder import Decoder
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.pretrained import LanguageModel
from jmoe.models.safetensors_io import DTYPES, read_headers
from jmoe.offload.layer_ring import LayerRing
from jmoe.offload.slots import DeviceSlots
from kernels_pallas import native
from tests.compiled import compilations
from tests.damage import flip_everywhere, poison
from tests.processes import ROOT, without_home

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3_yarn", "gpt_oss", "glm4_moe"]
FAMILIES += ["qwen3_next", "qwen3_5_moe_text"]
SLOW = ["dots1", "minimax_m2", "deepseek_v2", "deepseek_v2_lite", "ernie4_5_moe", "granitemoe"]
SLOW += ["hunyuan_v1_moe", "qwen3_moe_longrope", "phimoe"]
SLOW += ["bailing_moe", "bailing_moe_v1", "llama4_text"]
NEAR_TIE = 5e-4
POLICIES: dict[str, dict[str, Any]] = {
    "ring": {"policy": "ring", "ring_slots": 1},
    "experts": {"policy": "experts", "device_bytes": 20_000, "estimator": "router"},
    "experts, found by programs": {
        "policy": "experts",
        "device_bytes": 20_000,
        "prefill_chunk_tokens": 16,
    },
}


def reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(CHECKPOINTS / name / "reference.npz"))


def same(a: list[Completion], b: list[Completion]) -> bool:
    """The same tokens and, bit for bit, the same log-probabilities."""
    return [(c.token_ids, c.logprobs) for c in a] == [(c.token_ids, c.logprobs) for c in b]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n,
            marks=pytest.mark.slow
            if n in ("qwen2_moe", "olmoe", "qwen3_5_moe_text", *SLOW)
            else (),
        )
        for n in FAMILIES + SLOW
    ],
)
def test_greedy_tokens_and_streaming(name: str, tmp_path: Path) -> None:
    """transformers' greedy tokens up to a near-tie; streamed from host memory or disk, bit for
    bit the same.
    """
    expected = reference(name)
    prompts = expected["input_ids"].tolist()
    count = expected["greedy"].shape[1] - len(prompts[0])
    options = {"max_new_tokens": count, "ignore_eos": True, "logprobs": 2}
    with tiny_engine(name, policy="resident") as resident:
        layers, experts = resident.config.num_moe_layers, resident.config.num_experts
        all_bytes = resident.stats().device_expert_bytes
        found = resident.generate(prompts, **options)
        assert resident.stats().streamed_bytes == 0
    for row, completion in enumerate(found):
        near = np.flatnonzero(expected["greedy_margin"][row] < NEAR_TIE)
        end = int(near[0]) if near.size else count
        assert (
            completion.token_ids[:end] == expected["greedy"][row, len(prompts[0]) :][:end].tolist()
        )
        assert len(completion.token_ids) == count and completion.finish_reason == "length"

    with tiny_engine(name, policy="ring", ring_slots=1) as ring:
        before = ring.stats()
        assert same(ring.generate(prompts, **options), found)
        stats = ring.stats()
        assert stats.device_expert_bytes * layers == all_bytes
        # one slot: every layer of every step came from below, but for the one that was there
        if layers > 1:
            assert (
                stats.streamed_bytes - before.streamed_bytes
                >= (stats.steps * layers - 1) * all_bytes // layers
            )
    chosen = {"policy": "experts", "device_bytes": all_bytes // layers, "expert_tier": "nvme"}
    cache = {"host_cache_bytes": 1 << 20, "cache_dir": tmp_path}
    with tiny_engine(name, **chosen, **cache) as streamed:
        assert streamed.stats().device_expert_bytes == all_bytes // layers
        assert same(streamed.generate(prompts, **options), found)
        stats = streamed.stats()
        record_bytes = streamed._store.layout.record_bytes if streamed._store is not None else 0
        assert 0 < stats.streamed_bytes < stats.steps * layers * experts * record_bytes
        assert layers == 1 or streamed.residency.stats().misses > 0
    assert (tmp_path / "manifest.json").is_file()


@pytest.mark.parametrize("native", ["on", "off"])
def test_latents_in_bfloat16(native: str) -> None:
    """Greedy tokens over a cache of rounded latents are those that the whole sequence, run at once
    in float32, prefers, or near it.
    """
    if native == "on":
        needs_compiler()
    prompts = reference("deepseek_v3")["input_ids"].tolist()
    with tiny_engine("deepseek_v3", dtype="bfloat16", policy="resident", native=native) as served:
        found = served.generate(prompts, max_new_tokens=8, ignore_eos=True)
    model = jmoe.load_pretrained(CHECKPOINTS / "deepseek_v3")
    for prompt, completion in zip(prompts, found, strict=True):
        logits_SV = np.asarray(model(np.array([prompt + completion.token_ids], np.int32))[0])
        before = logits_SV[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(before, np.array(completion.token_ids)[:, None], 1)[:, 0]
        assert (before.max(axis=1) - chosen).max() < 0.02 * np.ptp(before)


# biases, latents, sinks and windows
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3_yarn", "gpt_oss"])
def test_native_operations(name: str) -> None:
    """The same tokens as XLA's alone give, and the same log-probabilities but for the order of
    sums.
    """
    needs_compiler()
    prompts = reference(name)["input_ids"].tolist()
    found, uses, chosen = [], [], []
    for setting in ("on", "off"):
        with tiny_engine(name, policy="resident", native=setting) as served:
            found.append(served.generate(prompts, max_new_tokens=8, ignore_eos=True, logprobs=1))
            runner = served._runner
            assert isinstance(runner, ModelRunner) and runner.native == (setting == "on")
            uses.append(served.tokens_per_expert())
            chosen.append(served.last_expert_choices())
    assert uses[0].any() and np.array_equal(*uses)
    assert len(chosen[0]) and all(map(np.array_equal, *chosen))
    for a, b in zip(*found, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(*([lp.logprob for lp in c.logprobs] for c in (a, b)), atol=2e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3_yarn", "gpt_oss"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_programs_find_their_experts(name: str, tier: str, tmp_path: Path) -> None:
    """Nothing is read back; bit for bit what resident computes; what has no slot is copied, and
    nothing else.
    """
    needs_compiler()
    prompts = reference(name)["input_ids"].tolist()
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 2}
    with tiny_engine(name, policy="resident", native="on") as resident:
        expected = resident.generate(prompts, **options)
        all_bytes, layers = resident.stats().device_expert_bytes, resident.config.num_moe_layers
        experts = resident.config.num_experts
    places: dict[str, Any] = {
        "device_bytes": all_bytes * 3 // (2 * layers),
        "expert_tier": tier,
        "cache_dir": tmp_path,
    }
    places |= {"host_cache_bytes": 1 << 15} if tier == "nvme" else {}
    with tiny_engine(name, policy="experts", native="on", **places) as streamed:
        runner = streamed._runner
        assert isinstance(runner, ModelRunner) and runner.needs_no_choice_readback
        sequences = [streamed.add_request(prompt, SamplingParams(**options)) for prompt in prompts]
        outputs, asked_for = [], 0
        while streamed.has_unfinished:
            before, decoded = streamed.residency.stats(), streamed.stats().decode.steps
            outputs += streamed.step()
            now, chosen = streamed.residency.stats(), streamed.last_expert_choices()
            # one batch: each layer's experts are asked for once
            if streamed.stats().decode.steps > decoded:
                asked_for = sum(np.unique(layer[layer < experts]).size for layer in chosen)
                assert now.hits + now.misses - before.hits - before.misses == asked_for
                assert now.layers - before.layers == layers
        assert asked_for > 0
        found = [
            Completion.from_outputs(s, [output for output in outputs if output.sequence is s])
            for s in sequences
        ]
        assert same(found, expected)
        stats, missed = streamed.stats(), streamed.residency.stats().misses
        assert stats.readback_s == 0 and 0 < stats.hit_rate < 1
        assert streamed._store is not None
        assert stats.streamed_bytes == missed * streamed._store.layout.record_bytes
        assert stats.waited_s > 0 and (stats.nvme_bytes > 0) == (tier == "nvme")


def test_layers_of_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer each, and of all together, bit for bit the same."""
    needs_compiler()
    prompts = reference("deepseek_v3")["input_ids"].tolist()
    found = []
    for size in (1, 2, 8):
        monkeypatch.setattr("jmoe.inference.runner.LAYERS_A_PROGRAM", size)
        with tiny_engine("deepseek_v3", policy="resident", native="on") as served:
            found.append(served.generate(prompts, max_new_tokens=6, ignore_eos=True, logprobs=1))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_where_native_operations_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise native.NotBuiltError("there is no compiler")

    monkeypatch.setattr(native, "load", fail)
    # whether or not this machine has a compiler
    monkeypatch.setattr(native, "is_built", lambda: True)
    with pytest.raises(ValueError, match="native = 'on': cannot be had here: there is no compiler"):
        tiny_engine("olmoe", native="on")
    with caplog.at_level("INFO"), tiny_engine("olmoe", policy="resident", native="auto") as served:
        assert not served._runner.native  # type: ignore[attr-defined]
        assert (
            len(served.generate([[1, 2, 3]], max_new_tokens=2, ignore_eos=True)[0].token_ids) == 2
        )
    assert any(
        "steps of few tokens are slower: there is no compiler" in record.message
        for record in caplog.records
    )


def test_native_operations_that_are_not_built_yet_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are built beside the first start, which says so and answers; who asks for them waits,
    and is told why.
    """
    asked: list[str] = []
    monkeypatch.setattr(native, "is_built", lambda: False)
    monkeypatch.setattr(native, "build_in_background", lambda: asked.append("background"))
    monkeypatch.setattr(native, "load", lambda: asked.append("load"))
    said: list[str] = []
    assert not load_native_if_used(EngineConfig(), said.append)
    assert asked == ["background"] and said == []
    assert "are being built in the background" in caplog.text
    for options, waits in ((EngineConfig(native="on"), False), (EngineConfig(), True)):
        said.clear()
        assert load_native_if_used(options, said.append, waits=waits) and asked[-1] == "load"
        assert (
            said[0] == "building the native operations, once on this machine ..." and len(said) == 2
        )
    with tiny_engine("olmoe", policy="resident", native="auto") as served:
        assert not served._runner.native  # type: ignore[attr-defined]
        assert served.generate([[1, 2, 3]], max_new_tokens=2, ignore_eos=True)[0].token_ids


def test_without_a_home_folder_nothing_is_kept() -> None:
    """As in a container whose user the machine does not know: programs are compiled at each
    start.
    """
    code = f"""if True:
        import jax
        from jmoe.config.engine import EngineConfig
        from jmoe.inference.engine import Engine, ReloadError
        with Engine({str(CHECKPOINTS / "olmoe")!r}, EngineConfig(**{SIZES!r}, policy="resident")) as engine:
            print(len(engine.generate([[1, 2, 3]], max_new_tokens=2, ignore_eos=True)[0].token_ids))
        print(jax.config.values["jax_compilation_cache_dir"])
    """
    done = without_home(["-c", code], {"CXX": "no-compiler", "PYTHONPATH": str(ROOT)})
    assert done.stdout == "2\nNone\n", done.stderr


def test_the_plan_is_what_an_engine_takes(tmp_path: Path) -> None:
    """From a checkpoint's headers, before its weights are read."""
    options = {"policy": "experts", "expert_tier": "nvme", "host_cache_bytes": 20_000}
    with LazyCheckpoint(CHECKPOINTS / "olmoe", "float32") as checkpoint:
        plan = plan_engine_memory(checkpoint, EngineConfig(**SIZES, **options))
    with tiny_engine("olmoe", cache_dir=tmp_path, **options) as served:
        assert served.plan.memory == plan
        assert served.stats().device_expert_bytes == plan.device_expert_bytes
        (records,) = tmp_path.glob("records-*.bin")
        assert records.stat().st_size >= plan.nvme_bytes
        weights = sum(
            x.nbytes for layer in served._runner._layers for x in jax.tree.leaves(layer[1])
        )
        weights += sum(x.nbytes for x in jax.tree.leaves(served._runner.embed_and_head[1]))
        assert weights == plan.model.dense_bytes
        assert (
            sum(x.nbytes for x in jax.tree.leaves(served._runner.caches)) == plan.model.cache_bytes
        )


def test_logprobs_are_the_models() -> None:
    """Log-probabilities of prompt and output are those of the whole sequence run at once."""
    prompts = reference("mixtral")["input_ids"].tolist()
    model = jmoe.load_pretrained(CHECKPOINTS / "mixtral", dtype="float32")
    with tiny_engine("mixtral", policy="resident") as served:
        found = served.generate(
            prompts, max_new_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1
        )
    for prompt, completion in zip(prompts, found, strict=True):
        tokens = np.array([prompt + completion.token_ids], np.int32)
        expected = np.asarray(jax.nn.log_softmax(model(tokens)[0]))
        said = [*completion.prompt_logprobs, *completion.logprobs]
        assert [lp.token_id for lp in said] == tokens[0, 1:].tolist()
        chosen = expected[np.arange(len(said)), tokens[0, 1:]]
        np.testing.assert_allclose([lp.logprob for lp in said], chosen, atol=2e-5)
        top = np.sort(expected[len(prompt) - 1 : -1], axis=1)[:, ::-1][:, :3]
        np.testing.assert_allclose(
            [[v for _, v in lp.top] for lp in completion.logprobs], top, atol=1e-4
        )


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    prompts = reference("olmoe")["input_ids"].tolist()
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, top_p=0.9, seed=7)
    with tiny_engine("olmoe", policy="resident") as served:
        alone = served.generate(prompts[:1], sampling)[0].token_ids
        other = served.add_request(prompts[1], SamplingParams(max_new_tokens=12))
        mixed = served.generate(prompts[:1], sampling)[0].token_ids
        assert mixed == alone
        served.abort(other)
        run_to_end(served)


def test_prompts_with_one_seed_get_streams_of_their_own() -> None:
    """Two prompts of one length with the same seed are two samples; the same prompt again gives
    the same text.
    """
    prompts = reference("olmoe")["input_ids"].tolist()[:2]
    assert len(prompts[0]) == len(prompts[1]) and prompts[0] != prompts[1]
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=4.0, seed=1)
    with tiny_engine("olmoe", policy="resident", max_seq_len=64) as served:
        first, second = (completion.token_ids for completion in served.generate(prompts, sampling))
        equal = sum(a == b for a, b in zip(first, second, strict=True))
        assert equal < 8, f"{equal} of 24 tokens are the same"
        assert [c.token_ids for c in served.generate(prompts[::-1], sampling)] == [second, first]


def test_a_request_like_the_one_before() -> None:
    """The next request in a row is drawn by its own parameters, not by those of the one before."""
    prompt = reference("mixtral")["input_ids"].tolist()[0]
    with tiny_engine("mixtral", policy="resident") as served:
        for token in (5, 6, 7):
            sampling = SamplingParams(max_new_tokens=2, ignore_eos=True, logit_bias={token: 100.0})
            request = served.add_request(prompt, sampling)
            run_to_end(served)
            assert request.output_token_ids == [token] * 2


def eight_requests() -> list[tuple[list[int], SamplingParams]]:
    """Of many lengths; greedy, sampled, with penalties, with log-probabilities of the prompt."""
    rng = np.random.default_rng(1)
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    ]
    fields += [{"prompt_logprobs": 1}, {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}]
    prompts = [rng.integers(3, 60, n).tolist() for n in (16, 3, 16, 33, 1, 12, 20, 2)]
    return [
        (
            prompt,
            SamplingParams(
                max_new_tokens=6, ignore_eos=True, logprobs=2, **fields[i % len(fields)]
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def run_to_end(served: Engine) -> list[Output]:
    outputs = []
    while served.has_unfinished:
        outputs += served.step()
    return outputs


def serve_together(
    served: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> list[Completion]:
    """All at once, each with its own sampling."""
    sequences = [served.add_request(*request) for request in requests]
    outputs = run_to_end(served)
    return [
        Completion.from_outputs(s, [output for output in outputs if output.sequence is s])
        for s in sequences
    ]


def loaded_bytes(served: Engine) -> int:
    """What its ring has loaded up to now, when the load that is under way has ended."""
    assert isinstance(served.residency, LayerRing)
    while not all(served.residency.ring._loaded):
        time.sleep(0.001)
    return served.residency.ring.stats().loads.num_bytes


def test_prompts_prefilled_together(tmp_path: Path) -> None:
    """Eight prompts go through the layers together, read from below once, and each gives what it
    gives alone.
    """
    requests = eight_requests()
    sizes = {"max_batch": 8, "max_seq_len": 64, "prefill_chunk_tokens": 16}
    with tiny_engine("qwen3_moe", policy="resident", **sizes) as resident:
        all_bytes = resident.stats().device_expert_bytes
        layers = resident.config.num_moe_layers
        together = serve_together(resident, requests)
    with tiny_engine("qwen3_moe", policy="resident", **sizes) as resident:
        alone = [resident.generate([prompt], sampling)[0] for prompt, sampling in requests]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            a, b = ([lp.logprob for lp in getattr(c, name)] for c in (one, other))
            np.testing.assert_allclose(a, b, atol=1e-5)
    with tiny_engine("qwen3_moe", policy="ring", ring_slots=1, **sizes) as ring:
        before = loaded_bytes(ring)
        ids = [ring.add_request(prompt[:16]) for prompt, _ in requests]
        assert {output.sequence for output in ring.step()} == set(ids)
        assert loaded_bytes(ring) - before == all_bytes, "one round of the layers"
        assert ring.stats().streamed_bytes >= all_bytes
    with tiny_engine("qwen3_moe", policy="ring", ring_slots=1, **sizes) as ring:
        assert same(serve_together(ring, requests), together)
    options = {
        "device_bytes": all_bytes // layers,
        "expert_tier": "nvme",
        "host_cache_bytes": 1 << 20,
    }
    with tiny_engine(
        "qwen3_moe", policy="experts", cache_dir=tmp_path, **options, **sizes
    ) as streamed:
        assert same(serve_together(streamed, requests), together)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "ring", "ring_slots": 9}, "ring_slots = 9: must be between 1 and 2"),
        ({"policy": "experts", "device_bytes": 5000}, "device_bytes = 5000: must hold the"),
        ({"dtype": "float16"}, "dtype = 'float16': must be float32 or bfloat16"),
        ({"pin_host_memory": "yes"}, "pin_host_memory = 'yes': must be one of auto, on, off"),
        (
            {"pin_host_memory": "on", "policy": "hybrid"},
            "pin_host_memory = 'on': must be auto or off with policy",
        ),
        ({"native": "yes"}, "native = 'yes': must be one of auto, on, off"),
        ({"max_seq_len": 1}, "max_seq_len = 1: must be at least 2"),
        ({"max_seq_len": 65}, "max_seq_len = 65: must not exceed the model's 64 positions"),
        (
            {"max_prefill_tokens": 3},
            "max_prefill_tokens = 3: must be at least 4, a chunk of one prompt",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        tiny_engine("mixtral", **options)


def test_streamed_experts_alone_pin_memory_of_several_devices() -> None:
    for policy in ("auto", "resident"):
        with pytest.raises(ValueError, match="pin_host_memory = 'on': must be "):
            EngineConfig(pin_host_memory="on", policy=policy, mesh=EngineMesh(devices=2))
    with pytest.raises(ValueError, match="pin_host_memory = 'on': must be auto or off with pol"):
        EngineConfig(pin_host_memory="on", policy="hybrid", mesh=EngineMesh(devices=2))
    options: dict[str, Any] = {"pin_host_memory": "on", "policy": "ring"}
    options["mesh"] = EngineMesh(devices=2)
    with pytest.raises(ValueError, match="or holds each record in host memory for one device"):
        tiny_engine("mixtral", max_batch=2, expert_tier="nvme", **options)


def test_native_operations_are_of_one_device() -> None:
    with pytest.raises(
        ValueError, match=r"native = 'on': must be auto or off with mesh\.devices = 2"
    ):
        EngineConfig(native="on", mesh=EngineMesh(devices=2))


@pytest.mark.parametrize("policy", ["ring", "experts"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_experts_from_pinned_memory(
    policy: str,
    tier: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Slots of an accelerator are filled from memory that it copies from directly."""
    options = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 0}
    accelerator = lambda num_slots, fields, **_: DeviceSlots(num_slots, fields, jax.devices()[0])  # noqa: E731
    monkeypatch.setattr("jmoe.offload.residency.HostSlots", accelerator)
    ring = {"ring_slots": 1} if policy == "ring" else {"device_bytes": 20_000}
    cache = {"host_cache_bytes": 25_000, "cache_dir": tmp_path} if tier == "nvme" else {}
    found = []
    for pin in ("on", "off"):
        with (
            caplog.at_level(logging.INFO, "jmoe"),
            tiny_engine(
                "mixtral", policy=policy, expert_tier=tier, pin_host_memory=pin, **ring, **cache
            ) as served,
        ):
            found.append(served.generate([[5, 6, 7]], **options))
            assert served._store is not None
            assert isinstance(served._store._slots_MR, PinnedSlots) == (pin == "on")
            note = (
                "records in pinned host memory"
                if pin == "on"
                else "records in ordinary host memory"
            )
            assert f"experts off the device: {note}" in caplog.text
    assert same(*found)


def test_programs_are_compiled_when_they_are_needed() -> None:
    with tiny_engine("mixtral", policy="resident", max_batch=8) as served:
        with compilations() as first:
            served.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)
        with compilations() as second:
            served.generate([[8, 9]], max_new_tokens=6, ignore_eos=True)
        with compilations() as others:
            served.compile_all_programs()
    assert 0 < len(first) < len(others) and second == []


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_programs_of_an_accelerator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens take all layers in one program where experts stay, and give what other
    programs give.
    """
    prompts = reference(name)["input_ids"].tolist()
    options = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 0}
    with tiny_engine(name, policy="resident", native="off") as served:
        expected = served.generate(prompts, **options)
    accelerator = lambda num_slots, fields, **_: DeviceSlots(num_slots, fields, jax.devices()[0])  # noqa: E731
    monkeypatch.setattr("jmoe.offload.residency.HostSlots", accelerator)
    monkeypatch.setattr(runner_module, "runs_on_cpu", lambda: False)
    programs: list[int] = []
    apply_layers = runner_module.apply_layers

    def counted(static: Any, *operands: Any) -> Any:
        programs.append(len(static.structures))
        assert static.context == 128  # of the positions that there are
        return apply_layers(static, *operands)

    monkeypatch.setattr(runner_module, "apply_layers", counted)
    for policy in ("resident", "ring"):
        with tiny_engine(name, policy=policy, native="off") as served:
            before = len(programs)
            found = served.generate(prompts, **options)
            assert (len(programs) > before) == (policy == "resident")
        for a, b in zip(found, expected, strict=True):
            assert a.token_ids == b.token_ids
            np.testing.assert_allclose(
                *([lp.logprob for lp in c.logprobs] for c in (a, b)), atol=2e-5
            )
    assert set(programs) == {served.config.num_hidden_layers}


@pytest.mark.parametrize("policy", ["ring", "experts"])
def test_a_pack_in_memory_is_not_copied_to_host_memory(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = {"expert_tier": "nvme", "host_cache_bytes": 25_000, "cache_dir": folder}
        ring = {"ring_slots": 1} if policy == "ring" else {"device_bytes": 20_000}
        found = []
        for mapped in (True, False):
            monkeypatch.setattr(record_store, "is_byte_addressable", lambda _: mapped)  # noqa: B023
            with tiny_engine("mixtral", policy=policy, **ring, **tier) as served:
                found.append(
                    served.generate([[5, 6, 7]], max_new_tokens=8, ignore_eos=True, logprobs=0)
                )
                assert served._store is not None
                stats, host_bytes = served._store.stats(), served._store.host_bytes
                assert stats.host.num_bytes > 0
                assert (stats.nvme.num_bytes == 0) == (host_bytes == 0) == mapped
        assert same(*found)


def fine_tuned(name: str, folder: Path) -> Path:
    """Return a copy of a tiny checkpoint in which one expert's matrix is another, of the same
    sizes and times.
    """
    shutil.copytree(CHECKPOINTS / name, folder)
    tensor = next(t for n, t in read_headers(folder).items() if "experts.3." in n)
    size_bytes, times = math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize, tensor.file.stat()
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(size_bytes))
    os.utime(tensor.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return folder


def test_models_of_equal_sizes_and_times_do_not_share_a_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As images and `rsync` make them; the second is served with experts of its own, and so is
    one changed in place.
    """
    tier = {
        "policy": "experts",
        "expert_tier": "nvme",
        "host_cache_bytes": 25_000,
        "device_bytes": 20_000,
    }
    first = shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "first")
    second = fine_tuned("mixtral", tmp_path / "second")
    # as for a large file: marks of tensors are enough
    monkeypatch.setattr("jmoe.memory.identity.WHOLE_BYTES", 0)
    monkeypatch.setattr("jmoe.memory.identity.STRIDE_BYTES", 1 << 40)
    found = []
    for model, cache in ((first, "shared"), (second, "shared"), (second, "own")):
        with tiny_engine(model, cache_dir=tmp_path / cache, **tier) as served:
            found.append(
                served.generate([list(range(5, 25))], max_new_tokens=4, ignore_eos=True, logprobs=0)
            )
    assert same(found[1], found[2]) and not same(found[0], found[1])
    with LazyCheckpoint(first) as one, LazyCheckpoint(CHECKPOINTS / "mixtral") as copied:
        assert one.content_hash == copied.content_hash


@pytest.mark.parametrize("policy", ["ring", "experts", "experts, found by programs"])
def test_a_pack_that_is_cut_while_it_serves(policy: str, tmp_path: Path) -> None:
    """An expert that cannot be read is an error that names the file, and stays one: no wrong
    token comes out.
    """
    tier = {"expert_tier": "nvme", "host_cache_bytes": 25_000, "cache_dir": tmp_path}
    ring = POLICIES[policy]
    with tiny_engine("mixtral", **ring, **tier) as served:
        assert served.generate([[5, 6, 7]], max_new_tokens=2)[0].token_ids
        (records,) = tmp_path.glob("records-*.bin")
        os.truncate(records, 4096)
        for _ in range(2):
            with pytest.raises(OSError, match=r"records-.*\.bin"):
                served.generate([list(range(3, 30))], max_new_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("policy", ["ring", "experts", "experts, found by programs"])
def test_damaged_experts_come_from_the_checkpoint_again(policy: str, tmp_path: Path) -> None:
    """While it serves, and at a start after that; without the checkpoint it is an error that
    names the file.
    """
    folder = shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "model")
    tier = {"expert_tier": "nvme", "host_cache_bytes": 25_000, "cache_dir": tmp_path / "pack"}
    ring = POLICIES[policy]
    options = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 0}
    prompt = [list(range(3, 20))]
    with tiny_engine(folder, **ring, **tier) as served:
        found = served.generate(prompt, **options)
        (records,) = (tmp_path / "pack").glob("records-*.bin")
        whole = records.read_bytes()
        flip_everywhere(records)
        assert same(served.generate(prompt, **options), found)
    flip_everywhere(records)
    with tiny_engine(folder, **ring, **tier) as served:
        assert same(served.generate(prompt, **options), found)
        while records.read_bytes() != whole:
            served.generate(prompt, **options)
        flip_everywhere(records)
        (folder / "model.safetensors").unlink()
        with pytest.raises(
            OSError, match=r"record \d+: damaged, .* source cannot be read: .*records-.*\.bin"
        ):
            served.generate([list(range(3, 30))], max_new_tokens=30, ignore_eos=True)


@pytest.mark.parametrize(
    "field", [{}, {"temperature": 1.0, "seed": 1}, {"logprobs": 1}, {"prompt_logprobs": 0}], ids=str
)
def test_logits_that_are_no_numbers(field: dict[str, Any], tmp_path: Path) -> None:
    """The request ends, at its first token or later; those beside it and after it in its row do
    not notice.
    """
    prompts = [[5, 6, 7], list(range(8, 30))]
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True, **field)
    folder = shutil.copytree(CHECKPOINTS / "qwen3_moe", tmp_path / "poisoned")
    poison(folder, 60)  # what has seen this token gives no numbers
    with tiny_engine(folder, policy="resident") as served:
        expected = [c.token_ids for c in served.generate(prompts, sampling)]
        for bad in ([60, 5], list(range(40, 61)), [60] * 21):
            with pytest.raises(
                FloatingPointError, match="prompt 1: the model's logits are not finite"
            ):
                served.generate([prompts[0], bad], sampling)
            assert not served.has_unfinished
            # in either row, perhaps no further than a chunk
            other = served.add_request(bad, sampling)
            good = served.add_request(prompts[1], sampling)
            served.step()
            run_to_end(served)
            assert good.output_token_ids == expected[1] and other.finish_reason == "error"
            assert [c.token_ids for c in served.generate(prompts, sampling)] == expected
        later = SamplingParams(max_new_tokens=6, logit_bias={60: 100.0}, **field)
        request = served.add_request([5], later)
        outputs = run_to_end(served)
        assert request.output_token_ids == [60] and request.finish_reason == "error"
        assert [(o.token_ids, o.finish_reason) for o in outputs] == [([60], None), ([], "error")]


def test_bad_requests() -> None:
    with tiny_engine("mixtral", policy="resident") as served:
        with pytest.raises(
            ValueError, match=r"prompt: is text, but the checkpoint has no tokenizer\.json"
        ):
            served.generate(["text"])
        with pytest.raises(
            ValueError, match="a token of prompt = 99: must be at least 0 and below 64"
        ):
            served.generate([[1, 99]])
        with pytest.raises(
            ValueError, match=r"len\(prompt_token_ids\) = 40: must be below max_seq_len = 40"
        ):
            served.generate([[1] * 40])
        with pytest.raises(ValueError, match=r"prompt = \(\): must hold at least one token"):
            served.generate([()])
        with pytest.raises(ValueError, match="temperature = -1: must be 0 or greater"):
            served.generate([[1]], temperature=-1)
        every = SamplingParams(stop_token_ids=tuple(range(64)), min_new_tokens=3)
        with pytest.raises(
            ValueError, match=r"min_new_tokens = 3: must be 0, because every token of the vocab"
        ):
            served.generate([[1]], every)
        with pytest.raises(ValueError, match=r"min_new_tokens = 1: must be 0 with a constraint"):
            served.add_request([1], SamplingParams(min_new_tokens=1), Unconstrained())
        assert not served.has_unfinished


class LateConstraint(Unconstrained):
    """Ready for one step in three."""

    def __init__(self) -> None:
        self.asked = self.waits = 0

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked % 3 == 0

    def wait(self, limit_s: float) -> None:
        self.waits += 1


class BrokenConstraint(Unconstrained):
    """Raises in one method, after its first call."""

    def __init__(self, method: str, error: BaseException) -> None:
        self.broken, self.error, self.calls = method, error, 0

    def _call(self, method: str) -> None:
        if method == self.broken:
            self.calls += 1
            if self.calls > 1:
                raise self.error

    def is_ready(self) -> bool:
        self._call("is_ready")
        return self.broken != "wait"

    def wait(self, limit_s: float) -> None:
        self._call("wait")

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = 0
        self._call("fill")
        words_W[:] = -1

    def accept(self, token_id: int) -> None:
        self._call("accept")


@pytest.mark.parametrize("method", ["is_ready", "wait", "fill", "accept"])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), BaseException("a panic")])
def test_a_constraint_that_raises_ends_its_own_sequence(method: str, error: BaseException) -> None:
    """It ends with "error"; the sequence beside it gets the tokens it would draw alone."""
    options = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
    with tiny_engine("mixtral", policy="resident", max_batch=4) as engine:
        (expected,) = engine.generate([[4, 5]], options)
        broken = engine.add_request([1, 2, 3], options, BrokenConstraint(method, error))
        other = engine.add_request([4, 5], options)
        while engine.has_unfinished:
            engine.step()
        assert broken.finish_reason == "error" and len(broken.output_token_ids) < 12
        assert other.finish_reason == "length" and other.output_token_ids == expected.token_ids
        (again,) = engine.generate([[4, 5]], options)
        assert again.token_ids == expected.token_ids


def test_generate_names_the_prompt_whose_text_cannot_be_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not taken for a model whose logits are not finite, and leaves nothing running."""

    class Broken:
        def decode(self, token_ids: list[int]) -> str:
            if 7 in token_ids:
                raise BaseException("a panic")
            return " ".join(map(str, token_ids))

    with tiny_engine("mixtral", policy="resident", max_batch=4) as engine:
        monkeypatch.setattr(engine, "tokenizer", Broken())
        with pytest.raises(RuntimeError, match=r"^prompt 1: its decoding failed$"):
            engine.generate([[4, 5], [6, 7]], max_new_tokens=3)
        assert not engine.has_unfinished


def test_a_sequence_whose_constraint_is_not_ready_rests() -> None:
    """The others go on at their own speed, and its tokens are those that it would draw alone."""
    options = SamplingParams(
        max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3, logprobs=0
    )
    with tiny_engine("mixtral", policy="resident", max_batch=4) as engine:
        (expected,) = engine.generate([[1, 2, 3]], options)
        constraint = LateConstraint()
        late = engine.add_request([1, 2, 3], options, constraint)
        other = engine.add_request([4, 5], options)
        lengths, outputs = [], []
        while other.finish_reason is None:
            outputs += [output for output in engine.step() if output.sequence is late]
            lengths.append((len(late.output_token_ids), len(other.output_token_ids)))
        assert lengths[0] == (1, 1) and lengths[-1] == (4, 12) and not constraint.waits
        while late.finish_reason is None:
            outputs += engine.step()
        assert late.output_token_ids == expected.token_ids and constraint.waits > 0
        # another number of rows may be another order of sums, where products are XLA's
        found = [lp.logprob for output in outputs for lp in output.logprobs]
        np.testing.assert_allclose(found, [lp.logprob for lp in expected.logprobs], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nvme", "resident", "ring"])
def test_other_weights(policy: str, tmp_path: Path) -> None:
    """A reloaded engine answers as one that begins with these weights, bit for bit, also after it
    was asked to load a damaged file.
    """
    shape = jmoe.ModelConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    for seed in range(2):
        model = LanguageModel(Decoder(shape, rngs=nnx.Rngs(seed)))
        jmoe.save_pretrained(model, tmp_path / str(seed), eos_token_id=0)
    shutil.copytree(tmp_path / "1", tmp_path / "damaged")
    (weights,) = (tmp_path / "damaged").glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    kept: dict[str, Any] = {"policy": policy}
    if policy == "nvme":
        kept = {"policy": "experts", "device_bytes": 60_000, "expert_tier": "nvme"}
        kept |= {"host_cache_bytes": 1 << 20, "cache_dir": str(tmp_path / "cache")}
    options = EngineConfig(max_batch=2, max_seq_len=128, prefill_chunk_tokens=16, **kept)
    asked = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 1}
    prompts = [[5] * 20, [7] * 33]
    with Engine(tmp_path / "1", options) as fresh:
        expected = fresh.generate(prompts, **asked)
    with Engine(tmp_path / "0", options) as engine:
        assert not same(engine.generate(prompts, **asked), expected)
        engine.reload(tmp_path / "1")
        assert same(engine.generate(prompts, **asked), expected)
        with pytest.raises(ReloadError):
            engine.reload(tmp_path / "damaged")
        assert same(engine.generate(prompts, **asked), expected)
        shutil.rmtree(tmp_path / "1")
        with pytest.raises(ValueError, match=r"config.json: is missing"):
            engine.reload(tmp_path / "damaged")  # and the old ones are gone: the engine has ended


def test_the_cache_policy_changes_no_token(tmp_path: Path) -> None:
    """MoESys' policy answers like ours, from the cache that its counts rule."""
    options = {"policy": "experts", "expert_tier": "nvme", "host_cache_bytes": 25_000}
    answers = []
    for policy, ranks in (("lfu", HitCounts), ("moesys", MoESysCounts)):
        chosen = options | {"cache_policy": policy, "cache_dir": tmp_path / policy}
        with tiny_engine("olmoe", **chosen) as served:
            answers.append(served.generate([[1, 2, 3], [7, 5]], max_new_tokens=8, ignore_eos=True))
            assert served._store is not None and served._store._cache is not None
            assert type(served._store._cache.counts) is ranks
            assert served._store.stats().nvme.num_bytes > 0
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
