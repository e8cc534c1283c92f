"""The parts of the memory that adapters over experts on NVMe need, of a model of known sizes."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from benchmarks.offload.frozen_experts import (
    BATCH,
    LENGTH,
    Run,
    difference,
    memory_of,
    predicted_bytes,
)
from tests.training.test_frozen_experts import SMALL, small_base


@pytest.mark.parametrize(("kind", "bits"), [("bfloat16", 16), ("mxfp4", 4.25)])
def test_parts(kind: str, bits: float, tmp_path: Path) -> None:
    base = small_base(tmp_path / "base")
    parts = predicted_bytes(base, kind, argparse.Namespace(rank=2))
    layers, experts, hidden = SMALL.num_hidden_layers, SMALL.num_experts, SMALL.hidden_size
    elements = 3 * hidden * SMALL.moe_intermediate_size
    assert parts["ring"] == 2 * experts * elements * bits / 8  # two layers
    assert parts["decoded"] == (0 if kind == "bfloat16" else experts * elements * 2)
    assert parts["host_cache"] == 16 * elements * bits / 8  # as many experts
    assert parts["layer_inputs"] == layers * BATCH * LENGTH * hidden * 2
    heads = SMALL.num_attention_heads + 2 * SMALL.num_key_value_heads
    dim = hidden // SMALL.num_attention_heads
    of_attention = 3 * hidden * 2 + 2 * heads * dim  # queries, keys and values
    of_attention += SMALL.num_attention_heads * dim * 2 + 2 * hidden
    of_expert = 2 * (hidden + 2 * SMALL.moe_intermediate_size)  # gate and up as one
    of_expert += 2 * (SMALL.moe_intermediate_size + hidden)
    assert parts["adapters"] == 16 * layers * (of_attention + experts * of_expert)
    attention = hidden * heads * dim + SMALL.num_attention_heads * dim * hidden
    frozen = 2 * (2 * SMALL.vocab_size * hidden + layers * attention)
    assert frozen < parts["other_parameters"] < 1.2 * frozen  # and norms and routers in float32


def test_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    """A step that was taken twice counts by its later loss."""
    runs = []
    for name, lines in (
        ("whole", [(0, 3.0), (1, 2.0), (2, 1.0)]),
        ("killed", [(0, 3.0), (1, 9.0), (1, 2.5), (2, 1.0)]),
    ):
        out = tmp_path / name
        out.mkdir()
        events = [{"event": "resume", "step": 1}]
        records = [{"step": step, "loss": loss} for step, loss in lines] + events
        (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        runs.append(Run(argparse.Namespace(), tmp_path, tmp_path, out, "bfloat16", True))
    assert difference(*runs) == 0.5 and runs[1].resumed_at() == [1]


def test_memory_of_a_process() -> None:

    own = memory_of(os.getpid())
    assert own["VmHWM"] >= own["RssAnon"] > 0
