"""Experts computed on the host beside those on the device: values, the share of each, errors."""

from typing import Any

import jax
import numpy as np
import pytest
from tiny_engines import tiny_engine

from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import Engine
from jmoe.inference.sequence import Completion
from jmoe.offload.host_experts import LEAST_SHARE, HybridExperts
from jmoe.offload.slots import DeviceSlots, HostSlots
from kernels_pallas import native
from kernels_pallas.native import NotBuiltError
from tests.inference.test_calibration import layer_bytes

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 3], list(range(2, 38))]
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 3,
    "ignore_eos": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
}


@pytest.fixture(autouse=True)
def _built() -> None:
    try:
        native.load()
    except NotBuiltError as error:
        pytest.skip(str(error))


def hybrid_engine(name: str, **options: Any) -> Engine:
    """Return an engine with room for a layer and three quarters on the device."""
    sizes = {"device_bytes": layer_bytes(name) * 7 // 4, "prefill_chunk_tokens": 36}
    return tiny_engine(name, **{"policy": "hybrid", **sizes, **options})


def experts_of(engine: Engine) -> HybridExperts:
    assert isinstance(engine.residency, HybridExperts)
    return engine.residency


def logprobs(completions: list[Completion]) -> list[float]:
    return [lp.logprob for c in completions for lp in (*c.prompt_logprobs, *c.logprobs)]


@pytest.mark.parametrize(
    ("name", "slots"),
    [("mixtral", HostSlots), ("gpt_oss", HostSlots), ("deepseek_v3", HostSlots), ("mixtral", None)],
)
def test_it_computes_what_resident_computes(
    name: str, slots: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts on the device, some on the host, some copied meanwhile; a long chunk takes whole
    layers.

    slots: None: those of an accelerator.
    """
    # of either way, whatever is measured
    monkeypatch.setattr("jmoe.offload.host_experts.LEAST_SHARE", 0.4)
    with tiny_engine(name, policy="resident", prefill_chunk_tokens=36) as resident:
        expected = resident.generate(PROMPTS, **OPTIONS)
    if slots is None:

        def accelerator(num_slots: int, fields: Any, **_: bool) -> DeviceSlots:
            return DeviceSlots(num_slots, fields, jax.devices()[0])

        monkeypatch.setattr("jmoe.offload.residency.HostSlots", accelerator)
    with hybrid_engine(name) as engine:
        found = engine.generate(PROMPTS, **OPTIONS)
        stats, residency = engine.stats(), engine.residency.stats()
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(found), logprobs(expected), rtol=1e-5, atol=1e-5)
    assert 0 < residency.on_host == stats.on_host < residency.misses
    assert stats.streamed_bytes > 0 and 0 < stats.hit_rate < 1


def test_compressed_experts_on_the_host() -> None:
    with tiny_engine("gpt_oss_mxfp4", policy="resident") as resident:
        expected = resident.generate(PROMPTS[:2], **OPTIONS)
    with hybrid_engine("gpt_oss_mxfp4", device_bytes=1 << 15) as engine:
        found = engine.generate(PROMPTS[:2], **OPTIONS)
        assert engine.stats().on_host > 0
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(found), logprobs(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("host", "share"), [(1.0, 0.75), (3.0, 0.5), (27.0, 0.1), (1e9, LEAST_SHARE)]
)
def test_the_share_that_is_brought_is_that_of_the_rates(host: float, share: float) -> None:
    """The most used ones are brought, and what has a slot keeps it."""
    with hybrid_engine("mixtral") as engine:
        experts = experts_of(engine)
        experts.begin_step(whole_layers=False, on_host=True)
        shares = experts.shares
        shares.link_bytes_per_s, shares.host_bytes_per_s, shares._owed = 3.0, host, 0.0
        experts.pool.counts.scores[:] = np.arange(experts.index.num_records)
        there = experts.pool.slot_of[: experts.index.num_experts] >= 0
        missing = np.flatnonzero(~there)
        brought = [
            experts._records_to_copy(list(range(experts.index.num_experts))) for _ in range(400)
        ]
        for records in brought:
            assert set(np.flatnonzero(there)) <= set(records)
            new = sorted(set(records) & set(missing.tolist()))
            assert new == missing[missing.size - len(new) :].tolist()
        counted = sum(len(records) - there.sum() for records in brought)
        assert counted == pytest.approx(400 * missing.size * share, abs=1)


def test_rates_are_measured() -> None:
    """A slow link brings few experts, a fast one more; each way is tried again and again."""
    brought = {}
    for limit in (1e5, 1e9):
        with hybrid_engine("qwen3_moe", limits={"host": limit}) as engine:
            engine.generate(PROMPTS[:2], max_new_tokens=12, ignore_eos=True)
            shares, stats = experts_of(engine).shares, engine.residency.stats()
            assert shares.host_bytes_per_s > 0 and shares.link_bytes_per_s > 0
            brought[limit] = 1 - stats.on_host / stats.misses
    assert brought[1e5] < brought[1e9]


def test_auto_takes_it_where_the_link_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU, whose memory is not the host's."""
    monkeypatch.setattr("jmoe.inference.loading.load_native_for_host_experts", lambda *_: True)
    with tiny_engine("mixtral", policy="resident") as resident:
        expected = resident.generate(PROMPTS[:2], **OPTIONS)
    with hybrid_engine(
        "mixtral", policy="auto", expert_tier="host", limits={"host": 1e5}
    ) as engine:
        engine.generate([[5]], max_new_tokens=1, ignore_eos=True)
        engine._measure_machine()
        engine.reset_stats()
        assert engine.plan.calibration is not None and engine.plan.calibration.host_bytes_per_s > 0
        found = engine.generate(PROMPTS[:2], **OPTIONS)
        stats = engine.stats()
    assert stats.decode.policy == "hybrid" and stats.on_host > 0
    np.testing.assert_allclose(logprobs(found), logprobs(expected), rtol=1e-5, atol=1e-5)


def test_an_error_on_the_host_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with hybrid_engine("mixtral") as engine:

        def fail(*_: Any) -> None:
            raise OSError("a memory error")

        monkeypatch.setattr(experts_of(engine).host, "_compute_weighted_sums", fail)
        for _ in range(2):
            with pytest.raises(OSError, match="a memory error"):
                engine.generate(PROMPTS[:2], max_new_tokens=12, ignore_eos=True)


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="native = 'off': must be auto or on with policy = 'hybrid'"
    ):
        EngineConfig(policy="hybrid", native="off")
    with pytest.raises(
        ValueError, match="expert_tier = 'nvme': must be auto or host with policy = 'hybrid'"
    ):
        hybrid_engine("mixtral", expert_tier="nvme")

    def no_compiler() -> None:
        raise NotBuiltError("there is no compiler")

    monkeypatch.setattr(native, "load", no_compiler)
    with pytest.raises(
        ValueError, match="policy = 'hybrid': needs native operations: there is no compiler"
    ):
        hybrid_engine("mixtral")
