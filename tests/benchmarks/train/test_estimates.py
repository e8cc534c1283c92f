"""Training steps on GPUs that are not here: planned bytes beside those of the compiled steps;
none gets slower.
"""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.train.estimates import RESULT, SHAPES, estimated_for, planned_bytes
from jmoe.run.ahead_of_time import has_cuda_plugin

ROWS = json.loads(RESULT.read_text())["rows"]
PLANNED = [name for name, run in SHAPES.items() if run.model.num_moe_layers]
COMMITTED: dict[str, dict[str, Any]] = {row["shape"]: row for row in ROWS if row["gpu"] == "h100"}
HELD = ("olmoe", "mixtral", "qwen3")


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_has_the_bytes_of_the_compiled_step(name: str) -> None:
    planned_gb = planned_bytes(estimated_for(SHAPES[name], "h100")) / 1e9
    assert 0.9 <= planned_gb / COMMITTED[name]["compiled_gb"] <= 1.12


def test_every_shape_is_committed() -> None:
    assert list(COMMITTED) == list(SHAPES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_cuda_plugin(), reason="JAX's CUDA libraries are not installed")
def test_no_step_is_slower_than_committed(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(["benchmarks/train/estimates.py", "--shapes", *HELD], timeout=1800)
    assert done.returncode == 0, done.stderr
    rows = {row["shape"]: row for row in json.loads(done.stdout.strip().splitlines()[-1])["rows"]}
    for name, row in rows.items():
        assert row["step_ms"] <= 1.03 * COMMITTED[name]["step_ms"], name
        assert row["launches"] <= 1.05 * COMMITTED[name]["launches"], name
        assert row["planned_of_compiled"] == pytest.approx(1, abs=0.1), name
