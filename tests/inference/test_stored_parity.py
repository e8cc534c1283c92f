"""Checkpoints with experts stored in 4 or 8 bits, against transformers run on weights that another
reader made wide.

The checkpoints and logits are those of fixtures/make_compressed.py. Legend: B sequences, S tokens,
V vocabulary.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmoe
from jmoe.config import ModelConfig
from jmoe.config.engine import EngineConfig
from jmoe.inference.kv_cache import tables_of_consecutive_blocks
from jmoe.inference.loading import LoadedModel
from jmoe.inference.runner import ModelRunner
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.memory.buffers import PAGE_BYTES
from jmoe.memory.record_layout import FIELD_ALIGNMENT_BYTES
from kernels_pallas.formats import FORMATS

FIXTURES = Path(__file__).parent.parent / "fixtures" / "compressed"
TOLERANCE = 1e-4  # of a logit
KEPT = {"fp4_experts": "mxfp4", "fp8": "fp8", "int4": "int4", "int8": "int8", "mxfp4": "mxfp4"}
# layouts that differ on disk alone: read like those above, so their tiers are not tried again
KEPT_TOO = {"fp8_rows": "fp8", "fp8_tensor": "fp8", "gptq_symmetric": "int4"}
WIDENED = {"gptq": "GPTQ", "awq": "AWQ", "nvfp4": "NVFP4", "nvfp4_packed": "NVFP4"}
# how experts are kept, by format: bits of a weight, inputs under one scale, bytes of a scale
SIZES = {"mxfp4": (4, 32, 1), "int4": (4, 32, 2), "int8": (8, 32, 2), "fp8": (8, 128, 4)}


@cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "reference.npz") as arrays:
        return {
            key: arrays[key].astype(np.int32) if key == "input_ids" else arrays[key]
            for key in arrays
        }


def opened(name: str, **options: Any) -> LoadedModel:
    sizes = {
        "max_batch": 2,
        "max_seq_len": 12,
        "prefill_chunk_tokens": 12,
        "dtype": "float32",
        "estimator": None,
    }
    return LoadedModel(FIXTURES / name, EngineConfig(**{**sizes, **options}))


def logits_of(model: LoadedModel, tokens_BS: np.ndarray) -> np.ndarray:
    """Return float32 [B, S, V], by the programs of an engine."""
    runner = model.runner
    assert isinstance(runner, ModelRunner)
    positions_BS = np.tile(np.arange(tokens_BS.shape[1], dtype=np.int32), (len(tokens_BS), 1))
    runner.residency.begin_step(whole_layers=True)
    blocks_BW = tables_of_consecutive_blocks(len(tokens_BS), runner.num_table_positions)
    (output,) = runner.forward([TokenBatch(tokens_BS.reshape(-1), blocks_BW, positions_BS)])
    return np.stack(
        [np.asarray(runner.logits_of_chunk(output, row)) for row in range(len(tokens_BS))]
    )


def expert_arrays(config: ModelConfig, kind: str) -> list[int]:
    """Return the bytes of an expert's arrays: values and scales of its matrices."""
    bits, block, scale_bytes = SIZES[kind]
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    arrays = []
    for inputs, outputs in ((hidden, 2 * inner), (inner, hidden)):
        arrays += [inputs * outputs * bits // 8, -(-inputs // block) * outputs * scale_bytes]
    return arrays


def record_bytes(arrays: list[int]) -> int:
    """Return the bytes of a record, in whole pages, on NVMe and in host memory."""
    end = 0
    for size in arrays:
        end = -(-end // FIELD_ALIGNMENT_BYTES) * FIELD_ALIGNMENT_BYTES + size
    return -(-end // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.parametrize("name", [*KEPT, *KEPT_TOO, *WIDENED])
def test_logits_of_the_widened_model(name: str) -> None:
    ref = reference(name)
    found = np.asarray(jmoe.load_pretrained(FIXTURES / name, dtype="float32")(ref["input_ids"]))
    np.testing.assert_allclose(found, ref["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*KEPT_TOO, *WIDENED])
def test_logits_of_a_streamed_release(name: str) -> None:
    """Kept compressed where that is exact, widened otherwise, which the log says."""
    ref, said = reference(name), list[str]()
    options = {"max_batch": 2, "max_seq_len": 12, "prefill_chunk_tokens": 12, "dtype": "float32"}
    ring = EngineConfig(**options, estimator=None, policy="ring", ring_slots=1, expert_tier="host")
    with LoadedModel(FIXTURES / name, ring, say=said.append) as model:
        logits = logits_of(model, ref["input_ids"])
        config, slots = model.runner.config, model.runner.residency.num_bytes
    np.testing.assert_allclose(logits, ref["logits"], rtol=0, atol=TOLERANCE)
    assert any("the KV cache is not quantized" in line for line in said) == (name == "nvfp4")
    if name in KEPT_TOO:
        assert slots == config.num_experts * sum(expert_arrays(config, KEPT_TOO[name]))
        assert not any("experts are stored in" in line for line in said)
    else:
        assert any(f"experts are stored in {WIDENED[name]}, which no" in line for line in said)


@pytest.mark.parametrize("native", ["auto", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KEPT)
def test_logits_and_bytes_of_every_tier(name: str, native: str, tmp_path: Path) -> None:
    """Logits as transformers has them; streamed the same to the bit, through a ring or by
    choice, from either tier.
    """
    ref, kind = reference(name), KEPT[name]
    with opened(name, policy="resident", native=native) as model:
        config = model.runner.config
        experts = config.num_moe_layers * config.num_experts
        arrays = expert_arrays(config, kind)
        whole_bytes = record_bytes(arrays)
        resident = logits_of(model, ref["input_ids"])
        assert model.runner.residency.num_bytes == experts * sum(arrays)
    np.testing.assert_allclose(resident, ref["logits"], rtol=0, atol=TOLERANCE)

    nvme = {
        "expert_tier": "nvme",
        "host_cache_bytes": 5 * whole_bytes + 1,
        "cache_dir": str(tmp_path / "records"),
    }
    chosen = {"policy": "experts", "device_bytes": config.num_experts * sum(arrays)}
    for options in ({"policy": "ring", "ring_slots": 1, "expert_tier": "host"}, chosen | nvme):
        with opened(name, native=native, **options) as model:
            assert model.store is not None
            np.testing.assert_array_equal(logits_of(model, ref["input_ids"]), resident)
            moved = model.store.stats()
            assert (
                moved.host.num_bytes >= experts * whole_bytes
                and moved.host.num_bytes % whole_bytes == 0
            )
            assert model.runner.residency.num_bytes == config.num_experts * sum(arrays)
            if options["expert_tier"] == "host":
                assert model.store.host_bytes == experts * whole_bytes
                continue
            assert model.store.host_bytes == 5 * whole_bytes
            assert (
                moved.nvme.num_bytes >= experts * whole_bytes
                and moved.nvme.num_bytes % whole_bytes == 0
            )
    (records,) = (
        file for file in (tmp_path / "records").iterdir() if file.suffix not in (".json", ".lock")
    )
    assert records.stat().st_size == experts * whole_bytes


def test_the_bytes_of_a_weight() -> None:
    """A format's bytes are those of the checkpoint, but for scales that a row or a block shares."""
    for name, kind in KEPT.items():
        bits, block, scale_bytes = SIZES[kind]
        assert FORMATS[kind].block == block
        stored = float(reference(name)["bits"])
        kept = bits + 8 * scale_bytes / block
        assert kept == stored if name in ("fp4_experts", "int4", "mxfp4") else kept > stored
        assert kind != "mxfp4" or stored / 8 == 0.53125
