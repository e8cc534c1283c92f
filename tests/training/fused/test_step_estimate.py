"""The step that is estimated: on how many GPUs, of which model, and what the text says of it."""

import dataclasses
from typing import Any

import pytest

from jmoe.config import MeshConfig, TiersConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.planning.gpu_estimate import Communication, GpuEstimate, GpuKernel
from jmoe.run.ahead_of_time import has_cuda_plugin
from jmoe.training.fused.step_estimate import (
    StepEstimate,
    StepMemory,
    estimate_step,
    hosts_and_devices_per_host,
)

TINY = PRESETS["tiny"][1]


@pytest.mark.parametrize(
    ("mesh", "shape"),
    [
        ((0, 1, 1), (1, 1)),
        ((1, 1, 8), (1, 8)),
        ((3, 1, 4), (3, 4)),
        ((16, 1, 1), (2, 8)),
        ((1, 4, 8), (4, 8)),
        ((2, 2, 2), (4, 2)),
        ((1, 1, 72), (1, 72)),
    ],
)
def test_hosts_of_a_mesh(mesh: tuple[int, int, int], shape: tuple[int, int]) -> None:
    assert hosts_and_devices_per_host(dataclasses.replace(TINY, mesh=MeshConfig(*mesh))) == shape


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": True}, "estimate = 'h100': must not be given together with plan"),
        (
            {"tiers": TiersConfig(experts="host", optimizer="host")},
            "such a step is many programs; take --plan",
        ),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, estimate="h100", **changes)


def test_images_are_refused() -> None:
    with pytest.raises(ValueError, match="estimate = 'a100': must not be given for images"):
        dataclasses.replace(PRESETS["ufo-tiny"][1], estimate="a100")


def estimated(**changes: Any) -> StepEstimate:
    config: TrainConfig = dataclasses.replace(
        TINY, estimate="h100", batch_size=8, sequence_length=256
    )
    kernels = tuple(
        GpuKernel(f"kernel{n}", "loss", n, 1e9, 2e9, 0.01 * (9 - n)) for n in range(1, 8)
    )
    behind = {"product": 0.008, "pass": 0.002}
    sums = (Communication("all-reduce of 8", 3, 4e9, 0.03, asynchronous=2, hidden_behind=behind),)
    return StepEstimate(
        config, 8, GpuEstimate(kernels, sums, ("a guess",)), StepMemory(50 * 10**9, 11 * 10**9)
    )


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    step = estimated()
    text = str(step)
    assert step.gpu.seconds == pytest.approx(0.35 + 0.02)
    flops = TINY.model.flops_per_token(256) * 8 * 256
    assert step.mfu == pytest.approx(flops / 8 / step.gpu.seconds / 989e12)
    assert f"0.37 s a step, {8 * 256 / step.gpu.seconds:,.0f} tokens/s, " in text
    assert (
        "memory of a device: 61.0 GB, 50.0 of state and 11.0 besides, of 72.0 GB that JAX takes"
        in text
    )
    assert "(90 % of 80 GB): it fits" in text
    assert text.count("kernel") == 5
    hidden = "10.00 ms hidden behind 8.00 product, 2.00 pass"
    assert f"all-reduce of 8, 2 of them asynchronous, {hidden}" in text
    assert text.splitlines()[-1] == "note: a guess"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    assert "of 60.0 GB that JAX takes (75 % of 80 GB): it does not fit" in str(step)


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_plugin(), reason="JAX's CUDA libraries are not installed")
def test_a_step_compiled_for_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    step = estimate_step(dataclasses.replace(TINY, estimate="h100"))
    assert {"grouped_matmul", "weight_gradient", "__cudnn$fmhaSoftmax"} <= {
        kernel.name for kernel in step.gpu.kernels
    }
    assert 5e-4 < step.gpu.seconds < 5e-3
