"""An engine on several fake devices gives what it gives on one, wherever its experts are and
while they move.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, tiny_engine

from jmoe.config.engine import EngineMesh, Policy
from jmoe.inference.engine import Engine
from jmoe.inference.mesh.runner import MeshRunner
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.offload.placed_experts import PlacedExperts
from jmoe.offload.segments import placements_to_segments
from tests.compiled import compilations
from tests.damage import flip
from tests.inference.mesh.mesh_ranks import COMPRESSED, ON_HOST
from tests.inference.mesh.mesh_traffic import (
    MAX_BATCH,
    Traffic,
    assert_logprobs,
    estimate_wrongly,
    move,
    move_at_every_step,
    traffic,
)
from tests.processes import one_device as one_device_each
from tests.tiny_engines import needs_compiler
from tests.train_runs import Start, free_port

DEVICES = 8
PROCESSES = 4
LONG_S = 600.0


def on_mesh(name: str, policy: Policy = "resident", **options: Any) -> Engine:
    ring = {"ring_slots": 1} if policy == "ring" else {}
    return tiny_engine(name, max_batch=MAX_BATCH, policy=policy, mesh=EngineMesh(**options), **ring)


def runner_of(engine: Engine) -> MeshRunner:
    assert isinstance(engine._runner, MeshRunner)
    return engine._runner


def placed(runner: MeshRunner) -> PlacedExperts:
    assert isinstance(runner.residency, PlacedExperts)
    return runner.residency


@pytest.fixture(
    scope="module",
    params=[
        "deepseek_v3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "qwen2_moe", "gpt_oss")),
    ],
)
def one_device(request: pytest.FixtureRequest) -> Iterator[tuple[str, Traffic, np.ndarray]]:
    """Yield a model and its answers; the first has latent attention, a dense layer and shared
    experts.
    """
    with tiny_engine(request.param, max_batch=MAX_BATCH, policy="resident") as engine:
        yield request.param, traffic(engine), engine.tokens_per_expert()


def test_every_placement_gives_the_tokens_of_one_device(
    one_device: tuple[str, Traffic, np.ndarray],
) -> None:
    """Even, random, Lina's and EPLB's, with chunks, prefixes from other devices and seeds; bit for
    bit each other.

    Random placements are made once, or anew before every step. Of the even one, layers also pass
    through a ring.
    """
    name, expected, use = one_device
    with on_mesh(name, "ring", devices=DEVICES) as engine:
        assert engine.plan.memory.policy == "ring" and engine.plan.memory.ring_slots == 1
        engine.reset_stats()
        answers = [traffic(engine)]
        stats = engine.stats()
        assert engine.tokens_per_expert().tolist() == use.tolist()
        assert engine._store is not None
        layer_bytes = use.shape[1] * engine._store.layout.record_bytes
        # one layer stays where it is
        streamed = stats.steps * len(use) * layer_bytes if len(use) > 1 else 0
        assert abs(stats.streamed_bytes - streamed) <= layer_bytes  # one is on its way
        assert stats.host_expert_bytes == engine.plan.memory.host_bytes > 0
    lina = {"placement": "lina", "slots_per_device": 3}
    eplb = {"placement": "eplb", "slots_per_device": 3, "rebalance_every": 2, "rebalance_window": 3}
    for options, mover in (
        ({}, None),
        (lina, move),
        (lina, move_at_every_step),
        (lina, None),
        (eplb, None),
    ):
        with on_mesh(name, devices=DEVICES, **options) as engine:
            runner = runner_of(engine)
            if mover is not None:
                move(runner, 1)
                assert any(len(np.unique(experts)) > 1 for experts in placed(runner)._held[0].T)
            copied = runner.residency.copied_experts
            if mover is move_at_every_step:
                mover(runner)
            engine.reset_stats()
            # what was moved stays; else every gain is worth a swap
            runner.enable_swaps(0.0 if mover else 1.0, 0.0)
            answers.append(traffic(engine))
            assert engine.tokens_per_expert().tolist() == use.tolist()
            stats = engine.stats().placement
            assert stats is not None
            assert (stats.swaps > 0) == (bool(options) and mover is None)
            assert (stats.swapped_bytes > 0) == (runner.residency.copied_experts > copied)
            assert (stats.swapped_bytes > 0) == (stats.swaps > 0 or mover is move_at_every_step)
            assert all(0 < balance <= 1 for balance in stats.balancedness)
    for answer in answers:
        assert (
            answer.tokens == expected.tokens and answer.reused_tokens == expected.reused_tokens > 0
        )
        assert_logprobs(answer.logprobs, expected.logprobs)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 4])
def test_layers_on_other_devices_give_the_tokens_of_one(
    one_device: tuple[str, Traffic, np.ndarray], group_size: int, tmp_path: Path
) -> None:
    """Each layer on one device, or its experts over half of them: in memory are as many experts
    as the fullest has.
    """
    name, expected, use = one_device
    layers, experts = use.shape
    groups = np.arange(DEVICES).reshape(-1, group_size).tolist()
    segments: list[list[list[int]]] = [[[] for _ in range(layers)] for _ in range(DEVICES)]
    for layer, expert in np.ndindex(layers, experts):
        devices = groups[layer % len(groups)]
        segments[devices[expert % group_size]][layer].append(expert)
    (tmp_path / "segments.json").write_text(json.dumps({"segments": segments}))
    with on_mesh(name, devices=DEVICES, segments=str(tmp_path / "segments.json")) as engine:
        held = placed(runner_of(engine))
        rows = -(-layers // len(groups))  # of which each device has one for each layer of its own
        assert placements_to_segments(held.placements) == segments and held.num_slots == rows * -(
            -experts // group_size
        )
        answer = traffic(engine)
        assert engine.tokens_per_expert().tolist() == use.tolist()
        stats = engine.stats().placement
        assert stats is not None
        busy = [any(layers_n) for layers_n in segments]
        assert [load > 0 for load in stats.loads] == busy
    assert answer.tokens == expected.tokens and answer.reused_tokens == expected.reused_tokens
    assert_logprobs(answer.logprobs, expected.logprobs)


@pytest.mark.slow
def test_every_placement_over_processes(start_python: Start, tmp_path: Path) -> None:
    """Of a device each, led as by serve.py; experts move between them by estimates, at random,
    and by EPLB.
    """
    with tiny_engine("deepseek_v3", max_batch=MAX_BATCH, policy="resident") as engine:
        expected, use = traffic(engine), engine.tokens_per_expert()
    port, environment = free_port(), one_device_each(tmp_path / "compiled")
    command = ["-m", "tests.inference.mesh.mesh_ranks", "deepseek_v3"]
    ranks = [
        start_python(
            [*command, *map(str, (rank, PROCESSES, port, tmp_path / "packed"))],
            tmp_path / f"rank-{rank}",
            environment,
        )
        for rank in range(PROCESSES)
    ]
    screens = [rank.end(LONG_S).splitlines() for rank in ranks]
    found = json.loads(screens[0][-2])
    for name, answer in found.items():
        assert answer["tokens"] == expected.tokens
        assert_logprobs(answer["logprobs"], expected.logprobs)
        assert (
            name in ("tensor", "dedup") or answer["logprobs"] == found["even"]["logprobs"]
        )  # bit for bit
        # only under "tensor" is the cache one pool, as on one device: a pool of two blocks gives
        # another prefix up than one of eight
        cached = answer["reused_tokens"], answer["tokens_per_expert"]
        if name == "tensor":
            assert cached == (expected.reused_tokens, use.tolist())
        else:
            assert cached == (found["even"]["reused_tokens"], found["even"]["tokens_per_expert"])
            assert 0 < cached[0] < expected.reused_tokens
    assert found["wrong"]["estimates"] >= found["wrong"]["replans"] > 0
    # phase one makes room for the wrong ones
    assert found["wrong"]["swaps"] > found["wrong"]["replans"]
    right = found["right"]
    # of the first layer, which goes by recent choices
    assert 0 < right["replans"] <= right["estimates"] / len(use)
    pairs = zip(right["balancedness"][1:], found["even"]["balancedness"][1:], strict=True)
    assert all(mine > even for mine, even in pairs)  # phase one placed the others
    assert found["eplb"]["estimates"] == found["eplb"]["replans"] == 0 < found["eplb"]["swaps"]
    for screen in screens:
        copied = json.loads(screen[-1])
        assert not any(copied[still] for still in ("even", "tensor", "ring", "nvme"))
        assert min(copied[moving] for moving in ("wrong", "right", "random", "eplb")) > 0, copied


@pytest.mark.slow
def test_compressed_experts_over_processes(start_python: Start, tmp_path: Path) -> None:
    """Two processes of a device each give the tokens of one, with resident experts, and with whole
    layers or chosen experts from pinned memory.
    """
    with tiny_engine(
        "deepseek_v3", max_batch=MAX_BATCH, policy="resident", native="off", expert_dtype="fp8"
    ) as engine:
        expected = traffic(engine)
    port, environment = free_port(), one_device_each(tmp_path / "compiled")
    command = ["-m", "tests.inference.mesh.mesh_ranks", "deepseek_v3"]
    ranks = [
        start_python(
            [*command, *map(str, (rank, 2, port, tmp_path / "packed")), *COMPRESSED],
            tmp_path / f"rank-{rank}",
            environment,
        )
        for rank in range(2)
    ]
    screens = [rank.end(LONG_S).splitlines() for rank in ranks]
    found = json.loads(screens[0][-2])
    assert list(found) == list(COMPRESSED)
    for answer in found.values():
        assert answer["tokens"] == expected.tokens
        assert_logprobs(answer["logprobs"], expected.logprobs)
        assert answer["logprobs"] == found["fp8"]["logprobs"]  # bit for bit


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"policy": "experts"}, DEVICES),
        pytest.param({"policy": "experts", "dense": "tensor"}, 2, marks=pytest.mark.slow),
        pytest.param({"policy": "auto"}, 2, marks=pytest.mark.slow),
    ],
)
def test_chosen_experts_give_the_tokens_of_one_device(
    options: dict[str, Any], devices: int, one_device: tuple[str, Traffic, np.ndarray]
) -> None:
    """Each device has fewer slots than it owns experts, and fetches those that tokens choose."""
    name, expected, use = one_device
    layers, share = len(use), -(-use.shape[1] // devices)
    mesh = EngineMesh(devices=devices, dense=options.get("dense", "replicated"))
    device_bytes = None
    if options["policy"] == "auto":  # a slot less than experts
        if layers == 1:
            pytest.skip("slots for a layer are slots for all experts")
        with LazyCheckpoint(CHECKPOINTS / name, "float32") as checkpoint:
            device_bytes = (layers * share - 1) * checkpoint.expert_bytes
    policy = {"policy": options["policy"], "device_bytes": device_bytes}
    with tiny_engine(name, max_batch=MAX_BATCH, mesh=mesh, **policy) as engine:
        memory = engine.plan.memory
        slots = (layers * share - 1) if device_bytes else max(1, layers // 2) * share
        assert (memory.policy, memory.expert_slots) == (options["policy"], slots)
        engine.reset_stats()
        answer = traffic(engine)
        assert engine.tokens_per_expert().tolist() == use.tolist()
        stats = engine.stats()
        assert stats.streamed_bytes > 0 and 0 < stats.hit_rate < 1
        assert engine._store is not None
        assert memory.host_bytes == use.size * engine._store.layout.record_bytes
    assert (answer.tokens, answer.reused_tokens) == (expected.tokens, expected.reused_tokens)
    assert_logprobs(answer.logprobs, expected.logprobs)


@pytest.mark.parametrize(
    ("options", "compiles"),
    [
        ({}, False),
        pytest.param({"dense": "tensor", "devices": 2}, True, marks=pytest.mark.slow),
        pytest.param({"nodes": 2, "exchange": "dedup"}, True, marks=pytest.mark.slow),
        pytest.param({"devices": 2, "ragged": True}, False, marks=pytest.mark.slow),
    ],
)
def test_experts_on_the_host_give_the_tokens_of_one_device(
    options: dict[str, Any],
    compiles: bool,
    one_device: tuple[str, Traffic, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the chosen experts that a device lacks its link copies some, and the host computes the
    others; steps of many tokens take whole layers. Buffers have several sizes, however small.

    compiles: none of these programs is compiled once all are.
    """
    needs_compiler()
    # of either way, whatever is measured
    monkeypatch.setattr("jmoe.offload.host_experts.LEAST_SHARE", 0.4)
    monkeypatch.setattr("jmoe.inference.mesh.exchange_rows.FEW_ROWS", 0)
    name, expected, use = one_device
    mesh = {"devices": DEVICES} | {n: v for n, v in options.items() if n != "ragged"}
    with on_mesh(name, "hybrid", **mesh) as engine:
        assert engine.plan.memory.policy == "hybrid"
        assert engine.plan.memory.host_bytes == engine.stats().host_expert_bytes > 0
        runner_of(engine).ragged |= options.get("ragged", False)
        if compiles:
            engine.compile_all_programs()
        engine.reset_stats()
        with compilations() as compiled:
            answer = traffic(engine)
        assert engine.tokens_per_expert().tolist() == use.tolist()
        stats, residency = engine.stats(), engine.residency.stats()
    assert residency.policy == "hybrid"
    assert 0 < residency.on_host == stats.on_host < residency.misses
    assert stats.streamed_bytes > 0 and 0 < stats.hit_rate < 1
    assert (answer.tokens, answer.reused_tokens) == (expected.tokens, expected.reused_tokens)
    assert_logprobs(answer.logprobs, expected.logprobs)
    programs = "experts_on_mesh", "rows_on_mesh", "attend_and_route", "weighted_expert_sum"
    assert not compiles or not [one for one in compiled if any(name in one for name in programs)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("gpt_oss_mxfp4", {}), ("mixtral", {"expert_dtype": "fp8"})]
)
def test_compressed_experts_on_the_host_of_several_devices(
    name: str, options: dict[str, Any]
) -> None:
    """Experts with biases in mxfp4, and experts in fp8, of two devices."""
    needs_compiler()
    with tiny_engine(name, max_batch=MAX_BATCH, policy="resident", **options) as engine:
        expected = traffic(engine)
    mesh = {"mesh": EngineMesh(devices=2), "policy": "hybrid", **options}
    with tiny_engine(name, max_batch=MAX_BATCH, **mesh) as engine:
        answer = traffic(engine)
        assert engine.stats().on_host > 0
    assert answer.tokens == expected.tokens
    assert_logprobs(answer.logprobs, expected.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("local", [1, 2])
def test_experts_on_the_hosts_of_two_processes(
    local: int, start_python: Start, tmp_path: Path
) -> None:
    """Each process computes experts of its own devices, `local` of them, from its own memory."""
    needs_compiler()
    expected = {}
    for name, options in ON_HOST.items():
        formats = {n: v for n, v in options.items() if n == "expert_dtype"}
        with tiny_engine(
            "deepseek_v3", max_batch=MAX_BATCH, policy="resident", **formats
        ) as engine:
            expected[name] = traffic(engine)
    environment = one_device_each(tmp_path / "compiled") | {"JAX_NUM_CPU_DEVICES": str(local)}
    port = free_port()
    command = ["-m", "tests.inference.mesh.mesh_ranks", "deepseek_v3"]
    ranks = [
        start_python(
            [*command, *map(str, (rank, 2, port, tmp_path / "packed")), *ON_HOST],
            tmp_path / f"rank-{rank}",
            environment,
        )
        for rank in range(2)
    ]
    screens = [rank.end(LONG_S).splitlines() for rank in ranks]
    found = json.loads(screens[0][-2])
    for name, answer in found.items():
        assert answer["tokens"] == expected[name].tokens
        assert_logprobs(answer["logprobs"], expected[name].logprobs)
    for screen in screens:
        computed = json.loads(screen[-1])
        assert list(computed) == list(ON_HOST) and min(computed.values()) > 0, computed


def test_wrong_estimates_change_nothing_but_time() -> None:
    """Every estimate is wrong, so that each layer is placed a second time, after its gate."""
    with on_mesh("deepseek_v3", devices=DEVICES) as engine:
        expected = traffic(engine)
    with on_mesh("deepseek_v3", devices=DEVICES, placement="lina", slots_per_device=3) as engine:
        runner = runner_of(engine)
        runner.enable_swaps(1.0, 0.0)
        estimate_wrongly(runner)
        assert traffic(engine) == expected
        stats = engine.stats().placement
        assert stats is not None
        assert stats.estimates >= stats.replans > 0
        assert 0 < engine.stats().estimate_s <= stats.planning_s
        assert stats.swaps > stats.replans  # phase one made room for the wrong ones
        assert stats.waited_s > 0 and stats.planning_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["even", "lina"])
def test_a_ragged_exchange_gives_the_same_tokens(
    placement: Any,
) -> None:
    """What a GPU does, with the collective made of those that a CPU has."""
    slots = {"slots_per_device": 3} if placement == "lina" else {}
    with tiny_engine("mixtral", policy="resident") as engine:
        expected = traffic(engine)
    with on_mesh("mixtral", devices=2, placement=placement, **slots) as engine:
        runner_of(engine).ragged = True
        answer = traffic(engine)
    assert answer.tokens == expected.tokens
    assert_logprobs(answer.logprobs, expected.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "options"),
    [
        (2, {}),
        (8, {}),
        (2, {"placement": "lina", "slots_per_device": 3}),
        (4, {"dense": "tensor", "devices": 4}),
    ],
)
def test_tokens_that_cross_once_to_a_node_give_the_tokens_of_one_device(
    one_device: tuple[str, Traffic, np.ndarray],
    nodes: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where dedup saves no rows, so that `auto` would not take it; nothing is compiled after
    the programs of all sizes.
    """
    monkeypatch.setattr("jmoe.inference.mesh.exchange_rows.FEW_ROWS", 0)
    name, expected, use = one_device
    shape = {"devices": DEVICES, "nodes": nodes, "exchange": "dedup"}
    with on_mesh(name, **shape | options) as engine:
        assert runner_of(engine).dedup
        engine.compile_all_programs()
        with compilations() as compiled:
            answer = traffic(engine)
        assert engine.tokens_per_expert().tolist() == use.tolist()
    assert answer.tokens == expected.tokens and answer.reused_tokens == expected.reused_tokens
    assert_logprobs(answer.logprobs, expected.logprobs)
    assert compiled == []


@pytest.mark.slow
def test_rows_of_several_sequences_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows on each of two devices, prefixes that cross from one to the other; nothing is
    compiled meanwhile.

    Buffers have several sizes, however small they are.
    """
    monkeypatch.setattr("jmoe.inference.mesh.exchange_rows.FEW_ROWS", 0)
    with tiny_engine("mixtral", max_batch=8, policy="resident") as engine:
        expected = traffic(engine)
    options = {"placement": "eplb", "slots_per_device": 3, "rebalance_every": 2}
    with on_mesh("mixtral", devices=2, **options) as engine:
        engine.compile_all_programs()
        runner_of(engine).enable_swaps(1.0, 0.0)
        with compilations() as compiled:
            answer = traffic(engine)
        assert engine.last_expert_choices()[0].shape[1] == 2
        stats = engine.stats().placement
        assert stats is not None and stats.swaps > 0
    assert (answer.tokens, answer.reused_tokens) == (expected.tokens, expected.reused_tokens)
    assert_logprobs(answer.logprobs, expected.logprobs)
    assert compiled == []


def test_costs_are_measured_and_decide() -> None:
    """An expert costs time and so does its copy; where copies are dear nothing moves."""
    with on_mesh("deepseek_v3", devices=DEVICES, placement="lina", slots_per_device=3) as engine:
        costs = runner_of(engine).placer.costs
        assert 0 < costs.row_s < float("inf") and 0 < costs.copy_s < float("inf")
        runner_of(engine).enable_swaps(1.0, 1e9)
        engine.generate([[5, 6, 7]], max_new_tokens=3, ignore_eos=True)
        stats = engine.stats().placement
        assert stats is not None and stats.swaps == 0 and stats.estimates > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"mesh": EngineMesh(devices=9), "max_batch": 9},
            "mesh.devices = 9: must be at most the 8 of this process; JAX_NUM_CPU_DEVICES=9 makes",
        ),
        (
            {"mesh": EngineMesh(devices=2, slots_per_device=1)},
            "mesh.slots_per_device = 1: must be at least 2 for 4",
        ),
        (
            {"mesh": EngineMesh(devices=2, slots_per_device=5)},
            "mesh.slots_per_device = 5: must be at most 4",
        ),
        ({"mesh": EngineMesh(devices=2), "estimator": "paths"}, "no such file; make one with"),
        (
            {"mesh": EngineMesh(devices=2), "policy": "hybrid", "expert_tier": "nvme"},
            "expert_tier = 'nvme': must be auto or host with policy = 'hybrid'",
        ),
        (
            {"mesh": EngineMesh(devices=2, exchange="dedup")},
            "mesh.exchange = 'dedup': needs several hosts, or mesh.nodes",
        ),
        (
            {"mesh": EngineMesh(devices=8, dense="tensor"), "max_batch": 8},
            (
                "num_attention_heads = 4: must be a multiple of mesh.devices = 8 with mesh.dense ="
                " 'tensor'"
            ),
        ),
    ],
)
def test_bad_settings_are_refused_before_weights_are_read(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jmoe.models.lazy_checkpoint.LazyCheckpoint.load_dense_modules",
        lambda _: pytest.fail("were read"),
    )
    monkeypatch.setattr(
        "jmoe.models.lazy_checkpoint.LazyCheckpoint.load_dense_shard",
        lambda *_: pytest.fail("were read"),
    )
    monkeypatch.setattr(
        "jmoe.models.lazy_checkpoint.LazyCheckpoint.fill_expert",
        lambda *_: pytest.fail("were read"),
    )
    with pytest.raises(ValueError, match=match):
        tiny_engine("mixtral", **options)


UNLIKE = """
import sys
from jmoe.config import DistributedConfig
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.loading import LoadedModel
from jmoe.cluster.distributed import join_processes

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
join_processes(DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=rank))
try:
    LoadedModel(folder, EngineConfig(max_batch=2, max_seq_len=16, mesh=EngineMesh(devices=2)))
except ValueError as error:
    print(error, flush=True)
"""


def test_processes_with_different_weights_are_named(start_python: Start, tmp_path: Path) -> None:
    """Of equal names and sizes, on disks of their own: one answer would be computed from both."""
    copies = [
        shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / f"host-{rank}" / "model")
        for rank in range(2)
    ]
    flip(copies[1] / "model.safetensors", (copies[1] / "model.safetensors").stat().st_size - 9)
    port = free_port()
    ranks = [
        start_python(
            ["-c", UNLIKE, str(rank), str(port), copy],
            tmp_path / f"log-{rank}",
            one_device_each(tmp_path),
        )
        for rank, copy in enumerate(copies)
    ]
    for copy, rank in zip(copies, ranks, strict=True):
        words = (
            rf"content of {copy} = '\w{{16}}': must be the same on every process, is another on"
            r" \[1\]: copy it"
        )
        assert re.search(words, rank.end(LONG_S))
