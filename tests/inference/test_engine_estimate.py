"""What an engine would take on a GPU that is not here; compiled for this CPU instead, which
everyone has.
"""

from dataclasses import replace
from typing import Any

import jax
import pytest

from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.inference import engine_estimate
from jmoe.inference.engine_estimate import EngineEstimate, estimate_engine
from jmoe.inference.loading import open_checkpoint
from jmoe.planning.roofline import distinct_experts
from jmoe.run import ahead_of_time
from tests.model_configs import CHECKPOINTS

OPTIONS = EngineConfig(max_batch=2, max_seq_len=40, prefill_chunk_tokens=8)


def lower_here(_: Any, function: Any, *operands: Any, **options: Any) -> Any:
    traced = function.trace(*operands, **options)
    return traced.out_info, traced.lower()


@pytest.fixture
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "check_cuda_installed", lambda *_: None)
    monkeypatch.setattr(ahead_of_time, "abstract_gpu_devices", lambda _: jax.devices()[:1])
    monkeypatch.setattr(ahead_of_time, "lower_for_device", lower_here)


def estimated(**options: Any) -> EngineEstimate:
    engine = replace(OPTIONS, **options)
    with open_checkpoint(CHECKPOINTS / "mixtral", engine) as checkpoint:
        return estimate_engine(checkpoint, engine, "rtx-4090")


@pytest.mark.usefixtures("on_this_cpu")
def test_steps_of_one_of_all_and_of_a_prompt() -> None:
    found = estimated()
    assert [(step.num_rows, step.width) for step in found.steps] == [(1, 1), (2, 1), (1, 8)]
    assert found.memory.policy == "resident" and all(step.link_s == 0 for step in found.steps)
    assert all(step.seconds == step.gpu.seconds > 0 for step in found.steps)
    one, *_ = found.steps
    layers = found.memory.model.weights.num_layers
    launches = {kernel.name: kernel.launches for kernel in one.gpu.kernels}
    assert {name.partition(":")[0] for name in launches} >= {
        "embedding",
        "layer",
        "head",
    }
    assert all(n % layers == 0 for name, n in launches.items() if name.startswith("layer"))
    text = str(found)
    assert text.startswith(
        "estimated from programs compiled for 1 x rtx-4090, not measured; the host's own time is"
        " left out:"
    )
    assert "single tokens have 20 before them" in text
    assert f"of {0.9 * ACCELERATORS['rtx-4090'].device_bytes / 1e9:.1f} GB that JAX takes" in text
    assert text.count(" ms ") >= len(found.steps) + engine_estimate.MOST_COSTLY


@pytest.mark.usefixtures("on_this_cpu")
def test_copies_of_experts_that_the_device_lacks() -> None:
    """Of a ring every layer's come in each step; of slots for half of them, half of those that
    tokens choose.
    """
    ring, slots = estimated(policy="ring", ring_slots=1), estimated(policy="experts")
    weights, link = ring.memory.model.weights, ACCELERATORS["rtx-4090"].link_bytes_per_s
    assert ring.steps[0].link_s == pytest.approx(weights.total_bytes / link)
    chosen = distinct_experts(weights.num_experts, weights.num_experts_per_tok, 2)
    half = slots.memory.expert_slots / slots.memory.model.num_experts
    assert slots.steps[1].link_s == pytest.approx(
        weights.num_layers * chosen * (1 - half) * weights.expert_bytes / link
    )


def test_nothing_is_compiled_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "has_cuda_plugin", lambda: False)
    with pytest.raises(
        ValueError, match=r"estimate = 'rtx-4090': needs .* pip install 'jmoe\[cuda13\]'"
    ):
        estimated()
