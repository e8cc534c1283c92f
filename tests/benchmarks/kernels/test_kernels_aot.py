"""The ahead-of-time compile check runs, or says why not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from importlib.util import find_spec

import pytest

installed = any(find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))


@pytest.mark.skipif(installed, reason="the CUDA libraries are installed here")
@pytest.mark.parametrize(
    "program",
    [
        "kernels/aot",
        pytest.param("train/estimates", marks=pytest.mark.slow),
        pytest.param("serve/decode_estimates", marks=pytest.mark.slow),
        pytest.param("serve/fp8_estimates", marks=pytest.mark.slow),
    ],
)
def test_without_the_cuda_libraries(
    run_python: Callable[..., subprocess.CompletedProcess[str]], program: str
) -> None:
    done = run_python([f"benchmarks/{program}.py"])
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.strip().splitlines()
    assert first.startswith("skipped: JAX's CUDA libraries are not installed")
    assert json.loads(last) == {"skipped": True}


@pytest.mark.skipif(not installed, reason="JAX's CUDA libraries are not installed")
def test_compiles_for_gpus_that_are_not_here(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    targets = ("h200", "a100", "rtx-5090")
    done = run_python(["benchmarks/kernels/aot.py", "--shapes", "tiny", "--targets", *targets])
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout.strip().splitlines()[-1])["programs"]
    kernels = {k["kernel"] for p in programs if p["target"] == "h200" for k in p["kernels"]}
    assert kernels == {
        "grouped_matmul_kernel",
        "weight_gradient_kernel",
        "gather_rows_kernel",
        "gather_sum_kernel",
    }
    assert {p["target"] for p in programs} >= set(targets)
    others = [p for p in programs if p["target"] != "h200" and p["shape"] == "tiny"]
    assert len(others) == 17 + 19 and all(p["triton_kernels"] for p in others)
    assert {p["target"] for p in others if "inputs in fp8" in p["program"]} == {"rtx-5090"}
    attention = [p["cudnn"] for p in programs if p["shape"] == "attention"]
    assert attention == (4 + 2 * 3) * [["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]]
    within = [p for p in programs if p["shape"] == "attention within documents"]
    assert [p["triton_kernels"] for p in within] == 3 * 4 * [3]  # output, queries, keys and values
    cached = [p for p in programs if p["shape"] == "attention over a cache"]
    assert cached and all(p["triton_kernels"] for p in cached)
