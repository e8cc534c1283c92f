"""The programs that are compiled for GPUs that are not here: each is traced with what those
before it return.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import ROOT
from benchmarks.lib.ahead_of_time import Programs
from benchmarks.lib.published import tiny_config
from benchmarks.offload import retention, retention_aot
from benchmarks.serve import engine_aot
from jmoe.config import MachineConfig
from jmoe.layers.slot_experts import WeightedOutputs
from jmoe.models.huggingface import model_config
from jmoe.run.planner import training_plan


class Traced(Programs):
    """Traces the programs and compiles none: for that the CUDA libraries are needed."""

    def compile(self, name: str, function: Any, *operands: Any, **options: Any) -> Any:
        self.rows.append({"program": name})
        return self.abstract_tree(function.trace(*operands, **options).out_info)


@pytest.fixture
def programs() -> Traced:
    return Traced(jax.devices()[0])


class TracedForGPU(Traced):
    """Decode steps leave the sum of a token's experts open, as Triton's kernels do."""

    def compile(self, name: str, function: Any, *operands: Any, **options: Any) -> Any:
        results = super().compile(name, function, *operands, **options)
        if not (name.startswith("experts, ") and name.endswith(" x 1 tokens")):
            return results
        routed = operands[1]
        outputs_TKD = self.abstract_array(results.dtype, *routed.idx_TK.shape, results.shape[-1])
        return WeightedOutputs(
            outputs_TKD, routed.weights_TK, routed.idx_TK, routed.y_TD, operands[3].shape[0]
        )


def test_sums_that_decode_steps_leave_open() -> None:
    programs = TracedForGPU(jax.devices()[0])
    engine_aot.engine_programs(programs, model_config(tiny_config("olmoe")), engine_aot.options())


def test_engines(programs: Traced) -> None:
    engine_aot.engine_programs(programs, model_config(tiny_config("olmoe")), engine_aot.options())
    names = [row["program"] for row in programs.rows]
    batches = (1, 8, 64)
    steps = [f"{batch} x {width}" for batch in batches for width in (128, 1)]
    for way in ("resident", "ring", "experts and hybrid"):
        assert all(f"experts, {way}, {step} tokens" in names for step in steps)
        assert f"expert into a slot, {way}" in names
    assert all(f"all layers, resident, {batch} x 1 tokens" in names for batch in batches)
    assert len(names) == len(set(names)) == 10 * len(steps) + len(batches) + 3


def test_retention(programs: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["retention_aot.py"])
    a = retention_aot.parse()
    assert (a.hidden_size, a.experts, a.tokens) == (2048, 64, [8192, 16384, 32768])
    a.hidden_size = 64
    a.intermediate_size = 64
    a.layers = 2
    a.experts = 4
    a.top_k = 2
    device, folder = jax.devices()[0], Path("records")
    for place, run in (("device", retention_aot.on_device), ("host", retention_aot.in_host_memory)):
        run(programs, retention.config_at(a, folder, place, 512), device)
    names = [row["program"] for row in programs.rows]
    assert names[0] == "step" and names[-1] == "finish"
    assert {"route", "experts into a slot", "add_experts", "moe_gradients"} < set(names)

    a.micro_batch_tokens = 512
    config = retention.config_at(a, folder, "host", 1024)
    assert (config.batch_size, config.gradient_accumulation_steps) == (4, 2)
    rows = [{"program": name, "estimated_s": 1.0} for name in names[1:]]
    # of two layers and two micro-batches, with three groups of experts
    forward, backward = retention_aot.computing_s_by_pass(rows, config, 3)
    assert (forward, backward) == (2 * (1 + 2) + 2 * 4 + 3, 3 + 2 * 2 + 4)
    found = retention_aot.retained(2.0, (1.0, 1.0), training_plan(config))
    assert found["retention"] == 1.0 and found["host_step_s"] == 2.0
    slow = replace(config, machine=MachineConfig(accelerator="h100", host_memory_bytes_per_s=1e3))
    found = retention_aot.retained(2.0, (1.0, 1.0), training_plan(slow))
    assert found["host_step_s"] == pytest.approx(sum(found["host_memory_s"]), abs=1e-3)


def test_the_docs_have_the_planned_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["8192", "16384", "32768", "65536", "131072"]
    monkeypatch.setattr("sys.argv", ["retention_aot.py", "--plan", "--tokens", *tokens])
    rows = retention_aot.planned_rows(retention_aot.parse())
    page = (ROOT / "docs" / "offloading.md").read_text()
    for gb_per_s in (200, 400):
        kept = [row["retention"] for row in rows if row["host_memory_gb_per_s"] == gb_per_s]
        cells = " | ".join(f"{100 * share:.0f} %" for share in kept)
        assert f"| {gb_per_s} GB/s | {cells} |" in page
    most = [row["most_retained"] for row in rows if row["host_memory_gb_per_s"] == 200]
    assert all(m >= row["retention"] for m, row in zip(most, rows, strict=False))
    *first, last = (f"{100 * share:.0f}" for share in most)
    assert f"would\nkeep at most {', '.join(first)} and {last} % at 200 GB/s" in page


def test_the_docs_have_the_plan_of_a_published_run() -> None:
    """Slower products hide more of the same update."""
    page = (ROOT / "docs" / "offloading.md").read_text()
    rows = retention_aot.planned_published_rows()
    ours, theirs = rows[::2], rows[1::2]
    assert [row["device_step_s"] for row in theirs] == 2 * [retention_aot.PUBLISHED.step_s]
    kept = [[f"{100 * row['retention']:.0f} %" for row in some] for some in (ours, theirs)]
    for words in (
        f"has {ours[0]['device_step_s']:.2f} s with all state on the devices",
        f"keeps {kept[0][0]} at 400 GB/s of host memory and {kept[0][1]} at 800 GB/s",
        f"our plan keeps {kept[1][0]} and {kept[1][1]}.",
    ):
        assert words in page
