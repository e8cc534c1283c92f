"""Models of the gpt-moe-* presets as folders: parity, round trips, experts kept in every way; a
run from end to end.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import (
    LinearRopeConfig,
    Llama3RopeConfig,
    ModelConfig,
    RopeScaling,
    RouterConfig,
    YarnConfig,
)
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.configs import PRESETS
from jmoe.deploy.merge import main, saved_model_config
from jmoe.inference.engine import Engine
from jmoe.inference.sequence import Completion
from jmoe.models.huggingface import hf_config, model_config
from jmoe.models.safetensors_io import read_headers
from kernels_pallas.compressed import compress
from kernels_pallas.formats import FORMATS
from tests.deploy.gpt_moe_models import gpt_moe_config, in_numpy, stored_arrays, write_model
from tests.http_servers import start_server
from tests.kernels.test_compressed import read
from tests.train_runs import SHORT, Run, TrainRuns, evaluations

TOKENS = np.random.default_rng(3).integers(0, 64, 24)
PROMPTS = [TOKENS[:9].tolist(), TOKENS[9:14].tolist()]
ASKED: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 2}
ENGINE: dict[str, Any] = {
    "max_batch": 2,
    "max_seq_len": 40,
    "prefill_chunk_tokens": 4,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in float32."""
    path = tmp_path_factory.mktemp("gpt_moe") / "model"
    write_model(path)
    return path


def said(folder: Path, **options: Any) -> tuple[list[Completion], Any]:
    """What an engine makes of the prompts, and its statistics."""
    with Engine(folder, EngineConfig(**(ENGINE | options))) as engine:
        return engine.generate(PROMPTS, **ASKED), engine.stats()


def numbers(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.logprobs) for c in completions]


def logprobs(completions: list[Completion]) -> list[float]:
    return [lp.logprob for c in completions for lp in c.logprobs]


def test_presets_have_a_family() -> None:
    """What is written says all that the decoder computes; what concerns training alone is the
    run's.
    """
    for name in ("gpt-moe-8e", "gpt-moe-128e"):
        model = PRESETS[name][1].model
        fields = hf_config(model)
        assert fields["model_type"] == "gpt_moe" and fields["architectures"] == [
            "GptMoeForCausalLM"
        ]
        router = RouterConfig(
            kind="softmax", norm_topk_prob=False, aux_loss_coef=model.router.aux_loss_coef
        )
        expected = dataclasses.replace(model, head_dim=64, capacity_factor=None, router=router)
        assert model_config(json.loads(json.dumps(fields))) == expected
    mixed = gpt_moe_config(
        mlp_only_layers=(1,), attention_bias=False, mlp_bias=False, tie_word_embeddings=False
    )
    assert model_config(hf_config(mixed)).layer_kinds == ("moe", "dense", "moe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new': is not supported, only 'gelu'"),
        ({"num_experts": None}, "num_experts = None: must be an integer"),
        ({"moe_intermediate_size": "64"}, "moe_intermediate_size = '64': must be an integer"),
        (
            {"norm_topk_prob": True},
            "num_experts_per_tok = 1: is not supported where weights are divided by their sum",
        ),
        (
            {"num_experts_per_tok": 5},
            "num_experts_per_tok = 5: must be between 1 and num_experts = 4",
        ),
        ({"mlp_only_layers": [0, 1, 2]}, "must leave a layer with experts"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        model_config(hf_config(gpt_moe_config()) | changes)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, mlp_bias=False)
    described = json.loads((tmp_path / "config.json").read_text()) | {"mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        ValueError, match=r"model.layers.0.mlp.experts.0.down_proj.bias' is missing"
    ):
        jmoe.load_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": (1,), "num_experts_per_tok": 2}])
def test_logits_and_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    """A plain numpy decoder over the stored tensors; saved again, bit for bit the same."""
    router = RouterConfig(kind="gshard") if changes else RouterConfig(kind="switch")
    config = gpt_moe_config(router=router, **changes)
    model = write_model(tmp_path / "first", router=router, **changes)
    loaded = jmoe.load_pretrained(tmp_path / "first")
    expected, routed = in_numpy(config, stored_arrays(tmp_path / "first"), TOKENS)
    assert len(np.unique(routed[0][0].argmax(axis=1))) > 1  # experts differ
    logits = np.asarray(loaded(TOKENS[None].astype(np.int32)))[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_array_equal(logits, np.asarray(model(TOKENS[None].astype(np.int32)))[0])
    jmoe.save_pretrained(loaded, tmp_path / "second", max_shard_bytes=20_000)
    first, second = stored_arrays(tmp_path / "first"), stored_arrays(tmp_path / "second")
    assert list(first) == list(read_headers(tmp_path / "first")) and first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_every_way_to_keep_experts(folder: Path, tmp_path: Path) -> None:
    """The whole model's greedy tokens; native operations or not, streamed or not."""
    model = jmoe.load_pretrained(folder)
    found, stats = said(folder, policy="resident")
    for prompt, completion in zip(PROMPTS, found, strict=True):
        text = np.array([[*prompt, *completion.token_ids]], np.int32)
        logits = np.asarray(model(text))[0, len(prompt) - 1 : -1]
        assert completion.token_ids == logits.argmax(axis=-1).tolist()
    plain, _ = said(folder, policy="resident", native="off")
    np.testing.assert_allclose(logprobs(plain), logprobs(found), atol=1e-5)
    layer_bytes = stats.device_expert_bytes // 3
    disk = {"expert_tier": "nvme", "host_cache_bytes": 1 << 20, "cache_dir": tmp_path}
    for options in (
        {"policy": "ring", "ring_slots": 1, "expert_tier": "host"},
        {"policy": "experts", "device_bytes": layer_bytes, **disk},
    ):
        again, of = said(folder, **options)
        assert numbers(again) == numbers(found), options
        assert of.streamed_bytes > 0 and of.device_expert_bytes < stats.device_expert_bytes


def test_streamed_is_resident_in_bfloat16(folder: Path) -> None:
    """Bit for bit, whether the embedding's sum is in the program of the layers or in one of its
    own.
    """
    resident, _ = said(folder, policy="resident", dtype="bfloat16")
    ring, _ = said(folder, policy="ring", ring_slots=1, expert_tier="host", dtype="bfloat16")
    assert numbers(ring) == numbers(resident)


@pytest.mark.parametrize("dense", [pytest.param("replicated", marks=pytest.mark.slow), "tensor"])
def test_several_devices(folder: Path, dense: str) -> None:
    found, _ = said(folder, policy="resident", native="off")
    mesh = EngineMesh(devices=2, dense=dense)  # type: ignore[arg-type]
    several, _ = said(folder, policy="resident", mesh=mesh)
    assert [c.token_ids for c in several] == [c.token_ids for c in found]
    np.testing.assert_allclose(logprobs(several), logprobs(found), atol=1e-4)


@pytest.mark.parametrize(("kind", "native"), [("mxfp4", "off"), ("int8", "auto")])
def test_compressed_experts(kind: str, native: str, folder: Path, tmp_path: Path) -> None:
    """What the model says whose experts were widened by the format's definition."""
    model = jmoe.load_pretrained(folder)
    experts = model.decoder.moe_layers.moe.experts
    for parameter in (experts.w_up, experts.w_down):
        stacked = np.array(parameter[...])
        for at in np.ndindex(stacked.shape[:2]):
            stacked[at] = read(*compress(stacked[at], FORMATS[kind]), FORMATS[kind])
        parameter[...] = jnp.asarray(stacked)
    jmoe.save_pretrained(model, tmp_path)
    expected, _ = said(tmp_path, policy="resident", native="off")
    found, _ = said(folder, policy="ring", ring_slots=1, expert_dtype=kind, native=native)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=1e-4)


def test_inputs_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, moe_intermediate_size=40)
    with pytest.raises(
        ValueError, match=r"expert_dtype = 'int8': needs inputs of w_down to be a multiple of 32"
    ):
        said(tmp_path, expert_dtype="int8")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(
        ValueError, match=r"OUT_DIR = .*: must be an empty folder or none: nothing is written over"
    ):
        main([str(tmp_path / "run"), str(tmp_path)])
    with pytest.raises(ValueError, match=r"RUN_DIR = .*: has no checkpoint"):
        main([str(tmp_path / "run"), str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


SMALL = ("--model.vocab-size", "512", "--model.hidden-size", "32", "--model.num-hidden-layers", "2")
SMALL += (
    "--model.num-attention-heads",
    "2",
    "--model.num-key-value-heads",
    "2",
    "--model.intermediate-size",
    "64",
)
SMALL += (
    "--model.moe-intermediate-size",
    "64",
    "--mesh.expert-inter",
    "1",
    "--mesh.expert-intra",
    "1",
)
LEARNING = ("--optimizer.learning-rate", "0.01", "--evaluation.every-steps", "1000")


@pytest.mark.slow
def test_gpt_moe_trained_merged_served_and_fine_tuned(
    runs: TrainRuns, run_python: Run, tmp_path: Path
) -> None:
    """gpt-moe-8e at a small size, as a user does it."""

    def run(*arguments: Any) -> str:
        done = run_python(arguments, env=runs.environment())
        assert done.returncode == 0, done.stderr[-3000:]
        return str(done.stdout)

    first, second, folder = tmp_path / "first", tmp_path / "second", tmp_path / "merged"
    data = ("--data.path", runs.text)
    run(
        "train.py",
        "gpt-moe-8e",
        *SMALL,
        *SHORT,
        *LEARNING,
        "--num-steps",
        12,
        *data,
        "--output-dir",
        first,
    )
    learned = evaluations(first)
    assert learned[-1] < learned[0]
    assert f"step 12 of {first} is in {folder}" in run("-m", "jmoe.deploy.merge", first, folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt_moe"

    say = ["-m", "jmoe.programs.generate", folder, "def read(self):", "--max-new-tokens", "12"]
    resident = run(*say, "--policy", "resident")
    ring = run(*say, "--policy", "ring", "--ring-slots", "1")
    assert resident == ring and resident.startswith("def read(self):")
    ringed = ("--policy", "ring", "--ring-slots", 1, "--max-seq-len", 64, "--max-batch", 2)
    server = start_server(tmp_path / "log", runs.environment(), folder, *ringed)
    try:
        asked = {"prompt": "def read(self):", "max_tokens": 12, "temperature": 0}
        answer = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
    finally:
        server.kill()
    assert resident.startswith("def read(self):" + answer)

    start = ("--init-from", folder, "--num-steps", 12, *data, "--output-dir", second)
    mesh = ("--mesh.expert-inter", "1", "--mesh.expert-intra", "1")
    assert f"starting from {folder}" in run(
        "train.py", "gpt-moe-8e", *mesh, *SHORT, *LEARNING, *start
    )
    tuned = evaluations(second)
    assert tuned[0] == pytest.approx(learned[-1], abs=1e-4) and tuned[-1] < tuned[0]
    run("-m", "jmoe.deploy.merge", second, tmp_path / "tuned")
    assert jmoe.load_pretrained(tmp_path / "tuned").config == jmoe.load_pretrained(folder).config


@pytest.mark.parametrize(
    "scaling",
    [LinearRopeConfig(2.0), Llama3RopeConfig(8.0, 16, 1.0, 4.0), YarnConfig(2.0, 16)],
)
def test_saved_positions(scaling: RopeScaling) -> None:
    """A run's JSON gives back its form of positions; older versions wrote YaRN without a name."""
    config = ModelConfig(rope_scaling=scaling)
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    assert saved_model_config(fields) == config
    if isinstance(scaling, YarnConfig):
        del fields["rope_scaling"]["rope_type"]
        assert saved_model_config(fields) == config
