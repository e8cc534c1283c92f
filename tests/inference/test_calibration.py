"""Policy auto: what it chooses, that it computes what resident computes, and what it says about
bytes.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, tiny_engine

from jmoe.inference.engine import Engine
from jmoe.inference.sequence import Completion
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.planning.streaming import StreamingPlan
from tests.compiled import compilations

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 3], [20, 21, 22, 23, 24]]


def run(engine: Engine) -> list[Completion]:
    return engine.generate(PROMPTS, max_new_tokens=10, ignore_eos=True, logprobs=2)


def layer_bytes(name: str) -> int:
    with LazyCheckpoint(CHECKPOINTS / name, "float32") as checkpoint:
        return checkpoint.expert_bytes * checkpoint.config.num_experts


@pytest.mark.parametrize(
    "name",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gpt_oss"))],
)
@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.slow), "nvme"])
def test_auto_computes_what_resident_computes(
    name: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(name) as resident:
        assert resident.plan.memory.policy == "resident"  # tiny, it fits
        expected, use = run(resident), resident.tokens_per_expert()
        # there is one way: nothing is measured
        assert resident.stats().prefill.predicted_step_s is None
    options = {
        "device_bytes": layer_bytes(name) * 7 // 4,
        "expert_tier": tier,
        "cache_dir": tmp_path,
    }
    options |= {"host_cache_bytes": 1 << 15} if tier == "nvme" else {}
    # whole layers as auto says, for steps with a chunk of a prompt, for all, for none
    ways = (
        ("router", None),
        ("router", 3),
        ("counts", 3),
        ("counts", 1),
        ("router", 100),
        (None, 3),
        (None, 100),
    )
    for estimator, whole in ways:
        with (
            tiny_engine(name, estimator=estimator, **options) as streamed,
            monkeypatch.context() as patch,
        ):
            if whole is not None:
                patch.setattr(
                    StreamingPlan,
                    "choose_policy",
                    lambda _, n, whole=whole: "ring" if n >= whole else "experts",
                )
            known = streamed.residency.stats().layers
            found = run(streamed)
            same = [(c.token_ids, c.logprobs) for c in found] == [
                (c.token_ids, c.logprobs) for c in expected
            ]
            assert same, (estimator, whole)
            np.testing.assert_array_equal(streamed.tokens_per_expert(), use)
            stats = streamed.stats()
            assert stats.policy == "auto"
            assert (
                stats.device_expert_bytes
                == streamed.plan.memory.device_expert_bytes
                <= options["device_bytes"]
            )
            assert stats.streamed_bytes > 0
            assert (stats.nvme_bytes > 0) == (tier == "nvme")
            known = streamed.residency.stats().layers - known
            layers = streamed.config.num_moe_layers
            if whole == 1:  # no choice was read back, and every layer was there whole
                assert (known, stats.readback_s) == (0, 0)
                assert stats.streamed_bytes >= stats.steps * layers * layer_bytes(name) // 4
            elif whole == 100 and estimator is not None:
                assert known == stats.steps * layers
            # programs find their slots: of a chunk of a prompt and of what decodes beside it, each
            elif whole == 100:
                assert stats.steps * layers <= known <= 2 * stats.steps * layers


def measured_engine(name: str, **options: Any) -> Engine:
    """Return a tiny engine of policy auto that has answered a request and measured the machine."""
    engine = tiny_engine(name, **options)
    engine.generate([[5]], max_new_tokens=1, ignore_eos=True)
    engine._measure_machine()
    engine.reset_stats()
    return engine


def test_nothing_is_compiled_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for what programs of several layers make, logits too, nor for steps of whole
    layers beside them.
    """
    with tiny_engine(
        "mixtral", max_batch=4, device_bytes=layer_bytes("mixtral") * 7 // 4
    ) as served:
        monkeypatch.setattr(
            StreamingPlan, "choose_policy", lambda _, n: "ring" if n >= 4 else "experts"
        )
        served.compile_all_programs()
        # two sequences decode beside the chunks of a third one's prompt, then all three
        with compilations() as compiled:
            served.generate([[5], [11, 3], list(range(5, 20))], max_new_tokens=10, ignore_eos=True)
    assert compiled == []


def test_auto_chooses_by_the_bandwidth(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """2.5 of 3 layers fit. A link that costs nothing: whole layers, no read-back. A slow one:
    what tokens chose.
    """
    device_bytes = layer_bytes("qwen3_moe") * 5 // 2
    caplog.set_level(logging.INFO, logger="jmoe")
    read_back = {"estimator": "router"}  # else nothing is, and whole layers have no advantage
    with measured_engine("qwen3_moe", device_bytes=device_bytes, **read_back) as fast:
        assert fast.plan.choose_policy(1) == fast.plan.choose_policy(4) == "ring"
        run(fast)
        stats = fast.stats()
        assert (stats.prefill.policy, stats.decode.policy, stats.readback_s) == ("ring", "ring", 0)
    limit = 2e5  # 15 ms an expert
    for tier in ("host", "nvme"):
        cache = {"host_cache_bytes": 1 << 14, "cache_dir": tmp_path} if tier == "nvme" else {}
        options = {"device_bytes": device_bytes, "expert_tier": tier} | cache | read_back
        with measured_engine("qwen3_moe", **options, limits={tier: limit}) as slow:
            plan, measured = slow.plan, slow.plan.calibration
            assert measured is not None
            measured = (
                measured.bandwidth_bytes_per_s if tier == "host" else measured.nvme_bytes_per_s
            )
            # a limited link makes up for SLACK_S of lost time at a loaded machine
            assert measured <= 1.25 * limit
            assert plan.choose_policy(1) == "experts"
            for num_tokens in range(1, 7):
                fitting = [p for p in plan.predictions(num_tokens) if p.fits]
                assert plan.choose_policy(num_tokens) == min(fitting, key=lambda p: p.step_s).policy
            slow.generate([[5]], max_new_tokens=36, ignore_eos=True)
            # 35 decode steps of 1 token: 2 of 4 experts, some on the device
            assert slow.plan.routing is not None
            assert slow.plan.routing.active_experts == 2 and 0 < slow.plan.routing.hit_rate <= 1
            stats = slow.stats()
            assert stats.decode.policy == "experts" and stats.readback_s > 0
            assert stats.decode.predicted_step_s is not None and stats.decode.step_s > 0
            assert stats.streamed_bytes < stats.steps * 3 * layer_bytes("qwen3_moe")
    assert "policy auto, experts from nvme: 10 slots for 3 x 4 experts of 3072 bytes" in caplog.text
    assert "1 token a step: experts, predicted: resident" in caplog.text
    assert "decode: " in caplog.text and "ms a step, predicted" in caplog.text


@pytest.mark.parametrize("policy", ["resident", "ring", "experts"])
def test_a_given_policy_is_not_measured(policy: str) -> None:
    with tiny_engine("mixtral", policy=policy) as served:
        assert served.plan.memory.policy == policy and served.plan.calibration is None
        served.generate([[5]], max_new_tokens=2, ignore_eos=True)
        assert served.stats().decode.predicted_step_s is None
