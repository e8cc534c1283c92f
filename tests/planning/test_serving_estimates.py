"""Expected steps of serving against the same sums by hand."""

import dataclasses

import pytest

from jmoe.config import MachineConfig
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.planning.memory_plan import (
    FreeMemory,
    MemoryPlan,
    ModelBytes,
    plan_memory,
    plan_mesh_memory,
)
from jmoe.planning.roofline import ExpertWeightSizes, busiest_device_experts
from jmoe.planning.serving import DecodeStep, ServingEstimator, ServingRates, serving_rates

MB = 10**6
# 10 layers of 64 experts of 10 MB, 4 of them a token
SIZES = ExpertWeightSizes(10, 64, 4, 10 * MB)
MODEL = ModelBytes(SIZES, record_bytes=10 * MB, dense_bytes=1000 * MB, cache_bytes=0)
RATES = ServingRates(
    memory_bytes_per_s=1e12,
    flops=1e14,
    link_bytes_per_s=5e10,
    host_memory_bytes_per_s=2e11,
    nvme_bytes_per_s=5e9,
    exchange_bytes_per_s=1e11,
    exchange_latency_s=1e-6,
    launches_s=1e-4,
    sync_s=2e-5,
)
STEP = DecodeStep(1, 1000, dense_bytes=1e9, cache_bytes=1e7, flops=1e9)


def planned(**options: object) -> MemoryPlan:
    free = FreeMemory(100_000 * MB, 100_000 * MB, shared=False)
    return plan_memory(MODEL, free, EngineConfig(**options))  # type: ignore[arg-type]


def seconds_of(plan: MemoryPlan, rates: ServingRates = RATES, step: DecodeStep = STEP) -> float:
    return ServingEstimator(plan, rates, 12).estimate(step).seconds


def test_resident_experts_take_the_memory_and_the_launches() -> None:
    """1 GB of weights, 40 experts and 10 MB of the cache at 1 TB/s, then 12 layers' launches."""
    estimate = ServingEstimator(planned(policy="resident"), RATES, 12).estimate(STEP)
    assert estimate.policy == "resident"
    assert estimate.seconds == pytest.approx((1e9 + 40 * 1e7 + 1e7) / 1e12 + 12e-4)
    assert estimate.longest_term.name == "device memory is read"
    many = dataclasses.replace(STEP, flops=1e12)
    assert seconds_of(planned(policy="resident"), step=many) == pytest.approx(1e-2 + 12e-4)


def test_experts_cross_the_link_after_the_layer_computes() -> None:
    """Half of the slots: an expert that a layer's token chooses is absent half of the time."""
    plan = planned(policy="experts")
    assert plan.expert_slots == 320
    estimate = ServingEstimator(plan, RATES, 12).estimate(STEP)
    device_s = (1e9 + 40 * 1e7 + 1e7) / 1e12 + 12e-4
    absent = 40 * (1 - (320 - 4) / 640)
    assert estimate.seconds == pytest.approx(device_s + 10 * 2e-5 + absent * 1e7 / 5e10)
    assert estimate.longest_term.name == "experts cross the link"
    assert "GB/s" in str(estimate) and "longest: experts cross the link" in str(estimate)


def test_hybrid_reads_host_memory_by_link_and_by_cores() -> None:
    """Both read the absent experts at what the host's memory gives."""
    device_s = (1e9 + 40 * 1e7 + 1e7) / 1e12 + 12e-4
    absent_s = 40 * (1 - (320 - 4) / 640) * 1e7 / 2e11
    expected = 10 * 2e-5 + max(device_s, absent_s)
    assert seconds_of(planned(policy="hybrid")) == pytest.approx(expected)
    narrow = dataclasses.replace(RATES, host_memory_bytes_per_s=5e10)  # the link takes all of it
    assert seconds_of(planned(policy="hybrid"), narrow) == pytest.approx(
        10 * 2e-5 + 40 * (1 - (320 - 4) / 640) * 1e7 / 5e10, rel=1e-3
    )


def test_records_on_nvme_wait_for_the_disk() -> None:
    """A quarter of the records is cached in host memory."""
    plan = planned(policy="experts", expert_tier="nvme")
    absent = 40 * (1 - (320 - 4) / 640)
    disk_s = absent * 1e7 * 0.75 / 5e9
    estimate = ServingEstimator(plan, RATES, 12).estimate(STEP)
    assert estimate.longest_term.name == "experts are read from NVMe"
    assert estimate.longest_term.seconds == pytest.approx(disk_s)
    assert estimate.seconds > disk_s


def test_several_devices_share_experts_and_host_memory() -> None:
    """The busiest device decides; every layer's rows cross twice and its choices reach the host."""
    options = EngineConfig(policy="ring", ring_slots=2, mesh=EngineMesh(8))
    plan = plan_mesh_memory(MODEL, FreeMemory(100_000 * MB, 100_000 * MB, False), options, 8)
    rates = dataclasses.replace(RATES, host_memory_bytes_per_s=2.5e10)  # an eighth of the host's
    step = dataclasses.replace(STEP, sent_bytes=1e5)
    estimate = ServingEstimator(plan, rates, 12).estimate(step)
    busiest = busiest_device_experts(64, 4, 1, 8)
    assert 1 < busiest < 2
    assert estimate.terms[0].seconds == pytest.approx((1.01e9 + 10 * busiest * 1e7) / 1e12)
    # 8 experts of a layer and device, all ten layers but none, at what host memory gives
    assert estimate.seconds == pytest.approx(10 * 8 * 1e7 / 2.5e10)
    names = [term.name for term in estimate.terms]
    assert "rows cross between devices" in names and "choices reach the host" in names


def test_hosts_compute_experts_of_several_devices() -> None:
    """The missing experts of the busiest device are read by its link and, beside it, by its share
    of the cores; `auto` leaves none to them.
    """
    rates = dataclasses.replace(RATES, host_memory_bytes_per_s=8e10)
    step = dataclasses.replace(STEP, sent_bytes=1e5)
    seconds = {}
    for policy in ("hybrid", "experts", "auto"):
        options = EngineConfig(policy=policy, device_bytes=400 * MB, mesh=EngineMesh(8))  # type: ignore[arg-type]
        plan = plan_mesh_memory(MODEL, FreeMemory(100_000 * MB, 100_000 * MB, False), options, 8)
        estimate = ServingEstimator(plan, rates, 12).estimate(step)
        seconds[policy] = estimate.seconds
        if policy == "hybrid":
            assert estimate.policy == "hybrid"
            assert "experts that the CPU computes" in str(estimate)
    busiest = busiest_device_experts(64, 4, 1, 8)
    missing = 1 - (40 - busiest) / 80  # 40 slots for eight experts of ten layers
    device_s = (1.01e9 + 10 * busiest * 1e7) / 1e12 + 12e-4
    device_s += 10 * (2 * (1e5 / 1e11 + 1e-6) + 2e-5)  # rows there and back, choices
    read_s = 10 * busiest * missing * 1e7
    assert seconds["hybrid"] == pytest.approx(max(device_s, read_s / 8e10))
    assert seconds["experts"] == pytest.approx(device_s + read_s / 5e10)
    assert seconds["auto"] == pytest.approx(seconds["experts"])


def test_busiest_device() -> None:
    assert busiest_device_experts(64, 4, 1, 1) == 4
    assert busiest_device_experts(8, 8, 1, 8) == 1
    assert busiest_device_experts(64, 64, 3, 8) == 8
    assert busiest_device_experts(256, 8, 64, 8) > busiest_device_experts(256, 8, 8, 8)


def test_rates_of_data_sheets_and_of_measurements() -> None:
    """A data sheet's share; a figure that is given counts as reached."""
    h100 = serving_rates(MachineConfig("h100"), 1)
    assert h100.memory_bytes_per_s == pytest.approx(0.8 * 0.866 * 3.35e12)
    assert h100.link_bytes_per_s == pytest.approx(54e9, rel=0.01)
    assert h100.host_memory_bytes_per_s == 1e11 and h100.exchange_bytes_per_s == 450e9
    eight = serving_rates(MachineConfig("h100", host_memory_bytes_per_s=4e11), 8)
    assert eight.host_memory_bytes_per_s == 5e10 and eight.nvme_bytes_per_s == 2e9 / 8
    assert eight.copy_bytes_per_s == 5e10 and eight.host_compute_bytes_per_s == 1.0
    card = serving_rates(MachineConfig("rtx-5090", memory_bytes_per_s=1e12), 2)
    assert card.memory_bytes_per_s == 1e12
    assert card.exchange_bytes_per_s == card.link_bytes_per_s  # no NVLink
    on_cpu = serving_rates(MachineConfig(), 1)
    assert on_cpu.launches_s == 0
