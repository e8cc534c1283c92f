"""The programs that are compiled for GPUs that are not here: each is traced with what those
before it return.
"""

from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.lib.ahead_of_time import Programs
from benchmarks.lib.published import tiny_config
from benchmarks.offload import retention_aot
from benchmarks.offload.session import config_of
from benchmarks.serve import engine_aot
from jmoe.models.huggingface import model_config


class Traced(Programs):
    """Traces the programs and compiles none: for that the CUDA libraries are needed."""

    def compile(self, name: str, function: Any, *operands: Any, **options: Any) -> Any:
        self.rows.append({"program": name})
        return self.abstract_tree(function.trace(*operands, **options).out_info)


@pytest.fixture
def programs() -> Traced:
    return Traced(jax.devices()[0])


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
    a.batch_size = 2
    device = jax.devices()[0]
    for where, run in (("device", retention_aot.on_device), ("host", retention_aot.in_host_memory)):
        run(
            programs,
            config_of(a, Path("records"), experts=where, optimizer=where, gradients="host"),
            device,
        )
    names = [row["program"] for row in programs.rows]
    assert names[0] == "step" and names[-1] == "expert brought up to date"
    assert {"route", "add_experts", "moe_gradients", "finish"} < set(names)
