"""Where bytes go, on numbers worked out by hand."""

import dataclasses
from typing import Any

import pytest

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.planning.memory_plan import (
    FreeMemory,
    ModelBytes,
    default_sequence_length,
    plan_memory,
    plan_mesh_memory,
)
from jmoe.planning.roofline import ExpertWeightSizes

MB = 10**6
# 4 layers of 8 experts of 1 MB, records of 1.1 MB, 2 MB of other weights and 1 MB of keys and
# values
MODEL = ModelBytes(
    ExpertWeightSizes(4, 8, 2, MB), record_bytes=1_100_000, dense_bytes=2 * MB, cache_bytes=MB
)
GPU = FreeMemory(device_bytes=40 * MB, host_bytes=100 * MB, shared=False)
SMALL_GPU = dataclasses.replace(GPU, device_bytes=20 * MB)
CPU = FreeMemory(device_bytes=100 * MB, host_bytes=100 * MB, shared=True)
SMALL_CPU = FreeMemory(device_bytes=30 * MB, host_bytes=30 * MB, shared=True)


@pytest.mark.parametrize(
    ("free", "options", "policy", "tier", "slots", "host_bytes"),
    [
        (GPU, {}, "resident", None, 32, 0),  # 40 - 10 % - 3 = 33 MB of room
        (dataclasses.replace(GPU, device_bytes=38 * MB), {}, "auto", "host", 31, 35_200_000),
        (SMALL_GPU, {}, "auto", "host", 15, 35_200_000),
        (SMALL_GPU, {"device_bytes": 9 * MB}, "auto", "host", 9, 35_200_000),
        (SMALL_GPU, {"device_bytes": 32 * MB}, "resident", None, 32, 0),  # the user knows better
        (SMALL_GPU, {"host_cache_bytes": 5 * MB}, "auto", "nvme", 15, 5 * MB),
        (dataclasses.replace(SMALL_GPU, host_bytes=30 * MB), {}, "auto", "nvme", 15, 8_800_000),
        (dataclasses.replace(SMALL_GPU, host_bytes=MB), {}, "auto", "nvme", 15, 2_200_000),
        (CPU, {}, "resident", None, 32, 0),
        # 24 MB of room, a quarter of it for the cache of records
        (SMALL_CPU, {}, "auto", "nvme", 18, 6 * MB),
        (SMALL_CPU, {"host_cache_bytes": 4 * MB}, "auto", "nvme", 20, 4 * MB),
        (CPU, {"device_bytes": 16 * MB}, "auto", "host", 16, 35_200_000),
        (GPU, {"policy": "resident"}, "resident", None, 32, 0),
        (GPU, {"policy": "ring"}, "ring", "host", 16, 35_200_000),
        (GPU, {"policy": "ring", "ring_slots": 3}, "ring", "host", 24, 35_200_000),
        (GPU, {"ring_slots": 1}, "ring", "host", 8, 35_200_000),
        (GPU, {"policy": "ring", "device_bytes": 25 * MB}, "ring", "host", 24, 35_200_000),
        (GPU, {"policy": "experts"}, "experts", "host", 16, 35_200_000),
        (GPU, {"policy": "experts", "device_bytes": 99 * MB}, "experts", "host", 32, 35_200_000),
        (GPU, {"policy": "experts", "expert_tier": "nvme"}, "experts", "nvme", 16, 35_200_000 // 4),
    ],
)
def test_plan(
    free: FreeMemory,
    options: dict[str, Any],
    policy: str,
    tier: str | None,
    slots: int,
    host_bytes: int,
) -> None:
    plan = plan_memory(MODEL, free, EngineConfig(**options))
    assert (plan.policy, plan.expert_tier, plan.expert_slots, plan.host_bytes) == (
        policy,
        tier,
        slots,
        host_bytes,
    )
    assert plan.nvme_bytes == (35_200_000 if tier == "nvme" else 0)
    assert plan.device_bytes == slots * MB + 3 * MB
    assert plan.ring_slots == (slots // 8 if policy == "ring" else 0)
    # what nobody asked for must fit
    if not {"device_bytes", "policy", "ring_slots"} & options.keys():
        assert plan.device_bytes <= free.device_bytes
        assert plan.device_bytes * free.shared + plan.host_bytes <= max(free.host_bytes, 2_200_000)
    assert f"policy {policy}" in str(plan) and f"{plan.device_bytes / MB:.1f} MB" in str(plan)


@pytest.mark.parametrize(
    ("free", "options", "words"),
    [
        (
            GPU,
            {"policy": "rings"},
            "policy = 'rings': must be one of auto, resident, ring, experts, hybrid",
        ),
        (GPU, {"ring_slots": 5}, "ring_slots = 5: must be between 1 and 4"),
        (GPU, {"policy": "experts", "ring_slots": 2}, "ring_slots = 2: needs policy = 'ring'"),
        (
            GPU,
            {"ring_slots": 3, "device_bytes": 23 * MB},
            "ring_slots = 3: 24 experts do not fit device_bytes",
        ),
        (GPU, {"expert_tier": "tape"}, "expert_tier = 'tape': must be one of auto, host, nvme"),
        (
            GPU,
            {"expert_tier": "host", "host_cache_bytes": 1},
            "host_cache_bytes = 1: needs expert_tier = 'nvme'",
        ),
        (
            GPU,
            {"policy": "resident", "device_bytes": 31 * MB},
            "device_bytes = 31000000: must hold all 32 experts",
        ),
        (
            GPU,
            {"device_bytes": 7 * MB},
            "device_bytes = 7000000: must hold the 8 experts of a layer",
        ),
        (
            dataclasses.replace(GPU, device_bytes=10 * MB),
            {},
            "device_bytes = 6000000: must hold the 8 experts",
        ),
        (
            SMALL_CPU,
            {"expert_tier": "host"},
            "expert_tier = 'host': needs 35200000 bytes of host memory",
        ),
        (
            SMALL_CPU,
            {"policy": "ring", "expert_tier": "host"},
            "expert_tier = 'host': needs .* and 8000000 are free",
        ),
    ],
)
def test_no_plan(free: FreeMemory, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_memory(MODEL, free, EngineConfig(**options))


@pytest.mark.parametrize(
    ("free", "mesh", "tier", "slots", "host_bytes"),
    [
        (GPU, EngineMesh(4), None, 8, 0),
        (GPU, EngineMesh(4, "lina", 3), "host", 12, 35_200_000),
        (CPU, EngineMesh(2, "eplb"), "host", 16, 35_200_000),
    ],
)
def test_plan_of_each_of_several_devices(
    free: FreeMemory, mesh: EngineMesh, tier: str | None, slots: int, host_bytes: int
) -> None:
    plan = plan_mesh_memory(MODEL, free, EngineConfig(mesh=mesh), local_devices=2)
    assert (plan.policy, plan.expert_tier, plan.expert_slots, plan.host_bytes) == (
        "resident",
        tier,
        slots,
        host_bytes,
    )
    assert plan.device_bytes == slots * MB + 2 * MB + MB


@pytest.mark.parametrize(
    ("free", "mesh", "match"),
    [
        (
            dataclasses.replace(GPU, device_bytes=10 * MB),
            EngineMesh(4),
            "mesh.devices = 4: each of them needs 11000000",
        ),
        (
            SMALL_CPU,
            EngineMesh(4),
            "mesh.devices = 4: the 4 devices of a process need 44000000 bytes and 27000000",
        ),
        (
            dataclasses.replace(GPU, host_bytes=MB),
            EngineMesh(4, "eplb"),
            "mesh.placement = 'eplb': keeps a copy of all",
        ),
    ],
)
def test_several_devices_without_room(free: FreeMemory, mesh: EngineMesh, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        plan_mesh_memory(MODEL, free, EngineConfig(mesh=mesh, policy="resident"), local_devices=4)


@pytest.mark.parametrize(
    ("free", "options", "tier", "ring_slots", "host_bytes"),
    [
        (GPU, {"policy": "ring"}, "host", 2, 17_600_000),
        (GPU, {"ring_slots": 3, "expert_tier": "nvme"}, "nvme", 3, 4_400_000),
        (GPU, {"device_bytes": 7 * MB, "policy": "ring"}, "host", 3, 17_600_000),
        (dataclasses.replace(GPU, device_bytes=10 * MB), {"ring_slots": 3}, "host", 3, 17_600_000),
        (
            SMALL_CPU,
            {"policy": "ring", "ring_slots": 1, "host_cache_bytes": 5 * MB},
            "nvme",
            1,
            5 * MB,
        ),
    ],
)
def test_plan_of_a_ring_through_several_devices(
    free: FreeMemory, options: dict[str, Any], tier: str, ring_slots: int, host_bytes: int
) -> None:
    """Of four devices, two a process, each has two of a layer's eight experts at a time."""
    plan = plan_mesh_memory(
        MODEL, free, EngineConfig(mesh=EngineMesh(4), **options), local_devices=2
    )
    assert (plan.policy, plan.expert_tier, plan.ring_slots, plan.host_bytes) == (
        "ring",
        tier,
        ring_slots,
        host_bytes,
    )
    assert plan.expert_slots == 2 * ring_slots and plan.device_bytes == (2 * ring_slots + 3) * MB
    assert plan.nvme_bytes == (35_200_000 if tier == "nvme" else 0)


@pytest.mark.parametrize(
    ("free", "options", "policy", "slots"),
    [
        (GPU, {"policy": "experts"}, "experts", 4),
        (GPU, {"policy": "experts", "device_bytes": 5 * MB}, "experts", 5),
        (GPU, {"policy": "experts", "device_bytes": 99 * MB}, "experts", 8),
        (GPU, {"policy": "hybrid"}, "hybrid", 4),
        (GPU, {"policy": "hybrid", "device_bytes": 5 * MB}, "hybrid", 5),
        (GPU, {"device_bytes": 7 * MB}, "auto", 7),
        (dataclasses.replace(GPU, device_bytes=10 * MB), {}, "auto", 6),
    ],
)
def test_plan_of_chosen_experts_on_several_devices(
    free: FreeMemory, options: dict[str, Any], policy: str, slots: int
) -> None:
    """Of four devices, each has slots for its quarter of eight experts of four layers."""
    plan = plan_mesh_memory(
        MODEL, free, EngineConfig(mesh=EngineMesh(4), **options), local_devices=2
    )
    assert (plan.policy, plan.expert_tier, plan.expert_slots) == (policy, "host", slots)
    assert (plan.ring_slots, plan.num_devices, plan.host_bytes) == (0, 4, 17_600_000)


@pytest.mark.parametrize(
    ("free", "options", "match"),
    [
        (
            GPU,
            {"policy": "experts", "device_bytes": MB},
            "device_bytes = 1000000: must hold 1 layers' experts, of 2000000",
        ),
        (
            dataclasses.replace(GPU, device_bytes=5 * MB),
            {"policy": "experts"},
            "mesh.devices = 4: each of them needs 40",
        ),
        (
            GPU,
            {"policy": "hybrid", "expert_tier": "nvme"},
            "expert_tier = 'nvme': must be auto or host with policy = 'hybrid'",
        ),
        (GPU, {"ring_slots": 5}, "ring_slots = 5: must be between 1 and 4"),
        (
            GPU,
            {"policy": "ring", "device_bytes": MB},
            "device_bytes = 1000000: must hold 1 layers' experts, of 2000000",
        ),
        (
            dataclasses.replace(GPU, device_bytes=5 * MB),
            {"policy": "ring"},
            "mesh.devices = 4: each of them needs 40",
        ),
        (
            dataclasses.replace(GPU, host_bytes=MB),
            {"policy": "ring", "expert_tier": "host"},
            "expert_tier = 'host': ",
        ),
        (
            GPU,
            {"expert_tier": "host", "host_cache_bytes": 9, "ring_slots": 1},
            "host_cache_bytes = 9: needs expert_ti",
        ),
    ],
)
def test_a_ring_through_several_devices_without_room(
    free: FreeMemory, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        plan_mesh_memory(MODEL, free, EngineConfig(mesh=EngineMesh(4), **options), local_devices=2)


# Keys and values of 1,000 bytes a token: 2,048 tokens in 2 MB.
SHORT = dataclasses.replace(MODEL, cache_bytes=2048 * 1000)


@pytest.mark.parametrize(
    ("free", "options", "longest", "tokens"),
    [
        (
            dataclasses.replace(GPU, device_bytes=41 * MB),
            {},
            131072,
            2048,
        ),  # experts leave 2.9 MB: no 1,024 tokens more
        # even the shortest leave no room for all experts, which are streamed
        (GPU, {}, 131072, 4096),
        # of the 54 - 34 MB that experts leave; the same with a little more or less memory
        (dataclasses.replace(GPU, device_bytes=60 * MB), {}, 131072, 16384),
        (dataclasses.replace(GPU, device_bytes=57 * MB), {}, 131072, 16384),
        (dataclasses.replace(GPU, device_bytes=61 * MB), {}, 131072, 20480),
        # all the positions that the model has
        (dataclasses.replace(GPU, device_bytes=60 * MB), {}, 12000, 12000),
        (SMALL_GPU, {}, 131072, 2048),  # experts are streamed: an eighth of 20 MB
        (dataclasses.replace(SMALL_GPU, device_bytes=30 * MB), {}, 131072, 3072),  # of 30
        (
            dataclasses.replace(CPU, device_bytes=200 * MB, host_bytes=200 * MB),
            {},
            131072,
            24576,
        ),  # 25 MB, of one memory
        (CPU, {"policy": "ring"}, 131072, 12288),
        # room for much more: an eighth of 40 MB
        (GPU, {"policy": "ring", "ring_slots": 1}, 131072, 4096),
        (GPU, {}, 1024, 1024),  # fewer positions than the shortest default has
    ],
)
def test_how_long_sequences_may_be_by_default(
    free: FreeMemory, options: dict[str, Any], longest: int, tokens: int
) -> None:
    """As long as the model and memory allow, where longer ones would not move experts."""
    config, shortest = EngineConfig(**options), min(2048, longest)
    model = dataclasses.replace(SHORT, cache_bytes=1000 * shortest)
    made = default_sequence_length(
        model, shortest, longest, free, lambda model: plan_memory(model, free, config)
    )
    assert made == tokens
    plans = [
        plan_memory(dataclasses.replace(model, cache_bytes=1000 * n), free, config)
        for n in (shortest, made)
    ]
    assert plans[0].policy == plans[1].policy and plans[0].expert_tier == plans[1].expert_tier


def test_logits_of_drafts_take_memory_from_slots() -> None:
    drafting = dataclasses.replace(MODEL, draft_bytes=3 * MB)
    without, plan = (plan_memory(m, SMALL_GPU, EngineConfig()) for m in (MODEL, drafting))
    assert plan.expert_slots == without.expert_slots - 3
    assert plan.device_bytes == without.device_bytes and "logits of drafts" not in str(without)
    assert "  logits of drafts           3.0 MB" in str(plan)
    few = dataclasses.replace(SMALL_GPU, device_bytes=15 * MB)
    with pytest.raises(ValueError, match="logits of drafts 3000000, of 15000000 free"):
        plan_memory(drafting, few, EngineConfig())
