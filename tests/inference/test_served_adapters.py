"""LoRA adapters by name in one engine, against models that they are merged into."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import jmoe
from jmoe.config.engine import EngineConfig
from jmoe.deploy.adapters import merge_adapter_folder
from jmoe.inference import runner as runner_module
from jmoe.inference.engine import Engine
from jmoe.inference.served_adapters import ServedAdapters, max_adapter_bytes
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.peft_files import CONFIG, WEIGHTS
from jmoe.models.pretrained import read_config
from jmoe.models.safetensors_io import (
    NewTensor,
    TensorReader,
    read_header,
    write_safetensors_file,
)
from jmoe.offload.slots import DeviceSlots
from tests.model_configs import CHECKPOINTS

LORA = CHECKPOINTS.parent / "lora"
NAMES = ("first", "last")
SIZES = {"max_batch": 4, "max_seq_len": 64, "prefill_chunk_tokens": 16}


def write_base(name: str, out: Path) -> Path:
    """Write a fixture in float32: bfloat16 would round the sum of weight and adapter."""
    jmoe.save_pretrained(jmoe.load_pretrained(CHECKPOINTS / name, dtype="float32"), out)
    return out


def options_of(name: str, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    return tuple(f"{n}={LORA / name / n}" for n in names)


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Return prompts of one chunk and of several."""
    random = np.random.default_rng(0)
    return [random.integers(vocab_size, size=n).tolist() for n in (3, 21, 40)]


@pytest.mark.parametrize(
    ("name", "policy", "adapters"),
    [
        ("mixtral", "resident", ("last",)),
        *(
            pytest.param(name, policy, ("", *NAMES), marks=pytest.mark.slow)
            for name, policy in (
                ("mixtral", "experts"),
                ("qwen3_moe", "resident"),
                ("qwen3_moe", "ring"),
                ("gpt_oss", "resident"),
                ("gpt_oss", "experts"),
            )
        ),
    ],
)
def test_one_batch_has_the_tokens_of_each_merged_model(
    name: str, policy: str, adapters: tuple[str, ...], tmp_path: Path
) -> None:
    base = write_base(name, tmp_path / "base")
    expected, prompts = {}, []
    for adapter in adapters:
        folder = base
        if adapter:
            folder = tmp_path / adapter
            merge_adapter_folder(LORA / name / adapter, base, folder)
        with Engine(folder, EngineConfig(**SIZES, native="off")) as engine:
            prompts = prompts_of(engine.config.vocab_size)
            done = engine.generate(prompts, max_new_tokens=8, temperature=0, ignore_eos=True)
        expected[adapter] = [completion.token_ids for completion in done]
    assert len({str(tokens) for tokens in expected.values()}) == len(adapters)
    config = EngineConfig(**SIZES, policy=policy, lora=options_of(name))
    with Engine(base, config) as engine:
        sampling = jmoe.SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        sequences = {
            (adapter, i): engine.add_request(prompt, sampling, adapter=adapter)
            for i, prompt in enumerate(prompts)
            for adapter in expected
        }
        while engine.has_unfinished:
            engine.step()
    for (adapter, i), sequence in sequences.items():
        assert sequence.output_token_ids == expected[adapter][i], (adapter, i)


def test_prefixes_are_shared_within_an_adapter_alone() -> None:
    """The second request of a name finds the blocks of the first; one of another name does not."""
    sizes = {"max_batch": 2, "max_seq_len": 64, "cache_tokens": 512}
    config = EngineConfig(**sizes, policy="resident", lora=options_of("mixtral"))
    prompt = list(range(1, 30))
    with Engine(CHECKPOINTS / "mixtral", config) as engine:
        outputs = [
            engine.generate([prompt], max_new_tokens=4, temperature=0, adapter=name)[0].token_ids
            for name in ("", "first", "first", "last", "")
        ]
        reused = engine.scheduler_stats().reused_tokens
    assert outputs[0] == outputs[4] and outputs[1] == outputs[2]
    assert reused == 2 * (len(prompt) - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("first",), "lora = 'first': must read NAME=FOLDER"),
        (("=x",), "lora = '=x': must read NAME=FOLDER"),
        (("a=x", "a=y"), "lora = 'a=x': must be the only adapter a"),
    ],
)
def test_names(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(lora=options)


@pytest.mark.parametrize(
    ("model", "folder", "message"),
    [
        ("qwen3_moe", LORA / "mixtral" / "first", "another model|is unexpected|fit no part"),
        ("mixtral", LORA / "nowhere", "nowhere"),
        ("deepseek_v3", LORA / "deepseek_v3" / "first", "adapts kv_b_proj, which latent attention"),
    ],
)
def test_what_is_refused_before_weights_are_read(model: str, folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=f"^lora = 'a={folder}': (?s:.*)({message})"):
        Engine(CHECKPOINTS / model, EngineConfig(max_seq_len=32, lora=(f"a={folder}",)))


@pytest.mark.parametrize("left_out", [(), ("k_proj", "v_proj")])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_planned_bytes_are_those_on_the_device(
    name: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    """Fused weights, whose tensors may have an adapter or none, and routers, which stay float32."""
    stored = LORA / name / "first"
    shutil.copy(stored / CONFIG, tmp_path / CONFIG)
    with TensorReader() as reader:
        kept = [
            NewTensor(tensor_name, x.dtype, x.shape, partial(np.asarray, x))
            for tensor_name, tensor in read_header(stored / WEIGHTS).items()
            if not any(part in tensor_name for part in left_out)
            for x in [
                np.concatenate([x for *_, x in reader.read_chunks(tensor, 0, tensor.shape[0])])
            ]
        ]
    write_safetensors_file(tmp_path / WEIGHTS, kept)
    fields = read_config(CHECKPOINTS / name)
    config = model_config(fields)
    operands = {"a": tmp_path, "b": LORA / name / "last"}, config, family_of(fields), "bfloat16"
    adapters = ServedAdapters.load(*operands)
    adapter_P = np.zeros(1, np.int32)
    layers = [adapters.layer_adapters_for_rows(i, adapter_P) for i in range(len(config.layers))]
    arrays = jax.tree.leaves([layer.low_rank for layer in layers if layer is not None])
    assert {str(array.dtype) for array in arrays} == {"bfloat16", "float32", "int32"}
    assert sum(array.nbytes for array in arrays) == max_adapter_bytes(*operands)


def test_a_request_names_an_adapter_of_the_engine() -> None:
    config = EngineConfig(max_batch=1, max_seq_len=32, lora=options_of("mixtral", NAMES[:1]))
    with Engine(CHECKPOINTS / "mixtral", config) as engine:
        with pytest.raises(ValueError, match="adapter = 'other': must be one of first"):
            engine.add_request([1], adapter="other")
        assert not engine.has_unfinished


def test_programs_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers in one program, which a step ahead runs too, give the tokens of single layers."""
    config = EngineConfig(**SIZES, dtype="float32", policy="resident", lora=options_of("mixtral"))
    sampling = jmoe.SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)

    def tokens_of_names() -> list[list[int]]:
        with Engine(CHECKPOINTS / "mixtral", config) as engine:
            prompt = prompts_of(engine.config.vocab_size)[0]
            sequences = [
                engine.add_request(prompt, sampling, adapter=name) for name in ("last", "", "first")
            ]
            while engine.has_unfinished:
                engine.step()
        return [sequence.output_token_ids for sequence in sequences]

    expected = tokens_of_names()
    accelerator = lambda num_slots, fields, **_: DeviceSlots(num_slots, fields, jax.devices()[0])  # noqa: E731
    monkeypatch.setattr("jmoe.offload.residency.HostSlots", accelerator)
    monkeypatch.setattr(runner_module, "runs_on_cpu", lambda: False)
    assert tokens_of_names() == expected
    assert len({str(tokens) for tokens in expected}) == 3
