"""The planner's numbers are those of the configuration."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jmoe.config import CommConfig, MachineConfig, MeshConfig, TiersConfig, TrainConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.configs import PRESETS
from jmoe.planning.setting_changes import possible_changes
from jmoe.run.metrics import REQUIRED, MetricsLog, peak_flops_per_s, read_events
from jmoe.run.planner import (
    context_sent_elements,
    described_machine,
    gradient_elements_in_use,
    packing_shortfall,
    packing_summary,
    residual_elements,
    summarize_and_log_tiers,
    training_plan,
    training_sizes,
    with_chosen_expert_sharding,
    with_chosen_tiers,
)
from jmoe.runtime import MEMORY_SHARE

TINY = PRESETS["tiny"][1]


@pytest.mark.parametrize("name", ["tiny", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-moe-8e"])
def test_parameters_add_up(name: str) -> None:
    config = PRESETS[name][1]
    model = training_sizes(config)
    total, active = config.model.total_and_active_parameters()
    assert model.num_all_expert_parameters + model.dense_parameters == total
    inactive = (
        (model.num_experts - model.num_experts_per_tok)
        * model.num_layers
        * model.parameters_per_expert
    )
    assert total - active == inactive


@pytest.mark.parametrize(("option", "low", "high"), [("muon", 4, 8), ("8bit", 2.03, 8)])
def test_moments_of_another_optimizer_are_planned(option: str, low: float, high: float) -> None:
    """Experts by the matrix alone, other parameters between; no advice to move them to a tier."""
    changed = {"kind": "muon"} if option == "muon" else {"moments": "8bit"}
    optimizer = dataclasses.replace(TINY.optimizer, **changed)
    machine = MachineConfig(device_bytes=1_000_000)
    config = dataclasses.replace(TINY, optimizer=optimizer, machine=machine)
    model = training_sizes(config)
    assert model.expert_moment_bytes == pytest.approx(low, rel=0.01)
    assert low < model.dense_moment_bytes < high
    plan = training_plan(config)
    rows = {kind: size for _, kind, size in plan.rows}
    assert rows["experts: moments"] == pytest.approx(
        low * model.num_all_expert_parameters, rel=0.01
    )
    assert (plan.step_s() > training_plan(TINY).step_s()) == (option == "muon")
    assert plan.lacking_bytes and not any("tiers." in line for line in plan.advice())


def test_auto_becomes_a_tier(tmp_path: Path) -> None:
    def run(**machine: int) -> TrainConfig:
        path = str(tmp_path / "not" / "there")
        tiers = TiersConfig(experts="auto", optimizer="auto", path=path, device_experts=0.5)
        return with_chosen_tiers(
            dataclasses.replace(TINY, remat="layer", tiers=tiers, machine=MachineConfig(**machine))
        )

    roomy = run(device_bytes=10**12)
    assert roomy.tiers.all_on_device and roomy.tiers.device_experts == 1
    tight = run(device_bytes=180_000_000, host_bytes=10**12)
    assert (tight.tiers.experts, tight.tiers.optimizer) != ("device", "device")
    assert tight.tiers.device_experts == (1 if tight.tiers.experts == "device" else 0.5)
    assert training_plan(tight).lacking_bytes == {}
    with pytest.raises(ValueError, match="tiers = 'auto'"):
        run(device_bytes=10**6)


def test_auto_updates_where_the_step_is_faster() -> None:
    """On a GPU the link decides, or the host's memory; with experts on the device nothing."""

    def update(tiers: TiersConfig, **machine: float) -> str:
        gpu = MachineConfig(accelerator="h100", host_bytes=10**12, **machine)  # type: ignore[arg-type]
        config = with_chosen_tiers(dataclasses.replace(TINY, tiers=tiers, machine=gpu))
        return config.tiers.update

    host = TiersConfig("host", "host", update="auto")
    assert update(host) == "host"
    assert update(host, host_memory_bytes_per_s=1e8) == "device"
    assert update(dataclasses.replace(host, update="device")) == "device"
    every = TiersConfig("auto", "auto", update="auto")
    assert update(every, device_bytes=10**12) == "device"  # where the experts are, too
    assert update(dataclasses.replace(every, experts="host"), device_bytes=10**12) == "host"


def test_a_measured_share_of_chosen_experts(tmp_path: Path) -> None:
    """It is planned with, and the summary has the prediction with the share of its own run too."""

    def run(share: float) -> TrainConfig:
        tiers = TiersConfig(
            experts="nvme", optimizer="nvme", path=str(tmp_path), chosen_share=share
        )
        return dataclasses.replace(
            TINY, tiers=tiers, machine=MachineConfig(flops=1e18, memory_bytes_per_s=1e18)
        )

    estimated, half, few = (training_plan(run(share)) for share in (0.0, 0.5, 0.3))
    experts = TINY.model.num_experts
    assert [plan.model.active_experts for plan in (half, few)] == pytest.approx(
        [0.5 * experts, 0.3 * experts]
    )
    assert estimated.step_s() > half.step_s() > few.step_s()
    assert few.step_s() == pytest.approx(0.6 * half.step_s())

    def summary(config: TrainConfig, share: float) -> tuple[str, dict[str, Any]]:
        counts = ("waited_s", "nvme_read_bytes", "nvme_written_bytes", "updates", "replayed_steps")
        counts = (*counts, "to_device_bytes", "from_device_bytes")
        totals = dict.fromkeys(counts, 0.0) | {
            "chosen_share": share,
            "most_chosen_share": 0.9,
            "room": 1.0,
        }
        with MetricsLog(tmp_path / f"{config.tiers.chosen_share}-{share}", start_step=0) as log:
            for step, waited_s in enumerate([9.0, 9.5, 0.1, 0.85]):  # resumed at step 2
                record = dict.fromkeys(REQUIRED, 0.0) | {"step_s": 2.5}
                log.write_step(step, record | {"tiers": {"step_waited_s": waited_s}})
            line, waited = summarize_and_log_tiers(config, totals, log).splitlines()[:2]
            (event,) = read_events(log.path)
        assert event["measured_step_s"] == 2.5
        assert event["waited_share"] == pytest.approx((0.5 + 0.75) / (2 * 2.5))
        predicted = 100 * event["predicted_waited_share"]
        assert 0 < predicted < 100
        assert waited == (
            f"devices waited for a tier in 25.0 % of the steps' time, predicted {predicted:.1f} %"
        )
        return line, event

    for given, plan in ((0.0, estimated), (0.5, half)):
        line, event = summary(run(given), 0.3)
        predicted = event["predicted_step_s"], event["predicted_step_s_measured_share"]
        assert predicted == (plan.step_s(), few.step_s())
        both = (
            f"step: predicted {predicted[0]:.3g} s ({predicted[1]:.3g} s with the measured share of"
            " chosen experts)"
        )
        assert line == f"{both}, measured 2.5 s; 0.0 s waited"
    line, event = summary(run(0.0), 0.0)  # resumed at its last step
    assert (
        line == f"step: predicted {event['predicted_step_s']:.3g} s, measured 2.5 s; 0.0 s waited"
    )
    assert "predicted_step_s_measured_share" not in event


def test_a_model_without_experts_has_no_plan() -> None:
    dense = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, num_experts=0))
    with pytest.raises(ValueError, match="the planner is for models with experts"):
        training_plan(dense)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (
            {"batch_size": 7, "mesh": MeshConfig(4, 1, 8, 1)},
            "batch_size = 7: must be a multiple of 32 devices x 1",
        ),
        (
            {"mesh": MeshConfig(1, 1, 3), "batch_size": 9},
            "model.num_experts = 8: must be a multiple of",
        ),
    ],
)
def test_what_the_run_would_refuse_is_not_planned(changes: dict[str, Any], refused: str) -> None:
    """A batch of 256 on 6,400,000 devices had a step of 0.00 s."""
    with pytest.raises(ValueError, match=refused):
        training_plan(dataclasses.replace(TINY, **changes))


def test_a_mesh_shares_the_experts_out() -> None:
    tiers = TiersConfig(experts="nvme", optimizer="nvme")
    alone, spread = (
        training_plan(dataclasses.replace(TINY, tiers=tiers, mesh=MeshConfig(1, inter, 1)))
        for inter in (1, 2)
    )
    assert spread.model.num_devices == 2
    assert 2 * spread.bytes_on_tier("nvme") == alone.bytes_on_tier("nvme")
    assert 2 * spread.host_cache_bytes == alone.host_cache_bytes


def test_chunks_of_dedup_have_whole_buffers_under_capacity() -> None:
    """Elsewhere chunks share them."""

    def residual_bytes(factor: float | None, inter: int = 2, **comm: Any) -> int:
        model = dataclasses.replace(TINY.model, capacity_factor=factor)
        mesh = MeshConfig(1, inter, 2)
        return training_sizes(
            dataclasses.replace(TINY, model=model, mesh=mesh, comm=CommConfig(**comm))
        ).residual_bytes

    three: Any = {"schedule": "pipelined", "exchange_chunks": 3}
    one, two, four = (
        residual_bytes(1.0, **comm)
        for comm in ({}, {"schedule": "pipelined"}, {**three, "exchange_chunks": 4})
    )
    assert 0 < two - one < four - two and four - one == 3 * (two - one)
    assert residual_bytes(None, **three) == residual_bytes(None)
    assert residual_bytes(1.0, inter=1, **three) == residual_bytes(1.0, inter=1)
    assert residual_bytes(1.0, exchange="flat", **three) == one


def packed(packing: Any, device_bytes: int = 10**12) -> TrainConfig:
    return dataclasses.replace(
        TINY,
        mesh=MeshConfig(1, 2, 4),
        comm=CommConfig(packing=packing),
        batch_size=8,
        sequence_length=64,
        remat="layer",
        machine=MachineConfig(device_bytes=device_bytes, host_bytes=10**12),
    )


def test_packing_multiplies_what_a_device_has_of_the_experts() -> None:
    alone, four = training_plan(packed(1)), training_plan(packed(4))
    assert (four.model.num_devices, four.model.replicas, four.model.num_all_devices) == (2, 4, 8)
    rows = [
        {kind: size for tier, kind, size in plan.rows if tier == "device"} for plan in (alone, four)
    ]
    for kind in ("experts: weights", "experts: moments"):
        assert rows[1][kind] == 4 * rows[0][kind], kind
    for kind in (
        "dense weights, moments, gradients",
        "unsharded dense layers",
        "activations: inputs of layers",
    ):
        assert rows[1][kind] == rows[0][kind], kind
    assert training_plan(packed("auto")).rows == alone.rows


def test_packing_that_does_not_fit_is_advised_against() -> None:
    fits = training_plan(packed(2)).bytes_on_tier("device") * 10 // 9 + 100
    assert training_plan(packed(2, fits)).lacking_bytes == {}
    (advice,) = training_plan(packed(4, fits)).advice()
    assert "comm.packing = 2 (enough)" in advice
    shortfall = packing_shortfall(packed(4, fits), described_machine(packed(4, fits)))
    assert shortfall.lacking_bytes > 0 and shortfall.offloaded_lacking_bytes == 0
    assert (
        packing_summary(packed(4))
        == "packing: 4 experts a device, mesh (4, 1, 2) (comm.packing = 4)"
    )
    allowed = (
        "packing: 1 experts a device, mesh (1, 2, 4) at first; memory and mesh allow up to {}"
        " (comm.packing = auto)"
    )
    assert packing_summary(packed("auto", fits)) == allowed.format("4, more than 2 in host memory")
    assert packing_summary(packed("auto")) == allowed.format(8)


def on_64_gpus(device_bytes: int, **comm: Any) -> TrainConfig:
    """Mixtral-8x7B on eight hosts, each with all experts."""
    return dataclasses.replace(
        PRESETS["mixtral-8x7b"][1],
        mesh=MeshConfig(8, 1, 8),
        comm=CommConfig(**comm),
        batch_size=64,
        machine=MachineConfig(device_bytes=device_bytes, host_bytes=10**13),
        plan=True,
    )


STATES = ("dense weights", "experts: weights", "experts: moments", "experts: gradients")


@pytest.mark.parametrize(
    ("sharding", "each", "gb"), [("none", 16, 90.6), ("optimizer", 4, 22.9), ("weights", 2, 11.7)]
)
def test_experts_over_the_data_axis_have_the_bytes_of_the_formula(
    sharding: Any, each: int, gb: float
) -> None:
    """16, 2 + 16 / 8 and 16 / 8 bytes for each of a device's eighth of the experts' parameters, and
    16 / 64 for each dense one.
    """
    config = on_64_gpus(10**12, shard_experts=sharding)
    plan = training_plan(config)
    state = sum(n for tier, kind, n in plan.rows if tier == "device" and kind.startswith(STATES))
    model = plan.model
    experts, dense = model.num_all_expert_parameters, model.dense_parameters
    assert experts == 32 * 8 * 3 * 4096 * 14336
    assert state == pytest.approx(each * experts / 8 + dense / 4, rel=1e-6)
    assert round(state / 1e9, 1) == gb


def test_a_copy_on_each_host_has_the_state_of_eight_devices() -> None:
    """Experts are then whole in each host, and a dense parameter takes 16 bytes of eight devices
    instead of 64; `auto` splits nothing, and one copy is among the changes that save memory.
    """
    config = on_64_gpus(10**12, shard_experts="none")
    copies = dataclasses.replace(config, mesh=MeshConfig(8, 1, 8, replicate=8))
    one, eight = (
        {kind: size for tier, kind, size in training_plan(each).rows if tier == "device"}
        for each in (config, copies)
    )
    dense = "dense weights, moments, gradients"
    assert eight.pop(dense) == pytest.approx(8 * one.pop(dense), rel=1e-6) and eight == one
    auto = dataclasses.replace(copies, comm=CommConfig())
    assert with_chosen_tiers(auto).comm.shard_experts == "none"
    plan = training_plan(copies)
    changes = {change.setting: change for change in possible_changes(plan.model, plan.placement)}
    assert changes["mesh.replicate"].model.copies == 1


def test_auto_splits_experts_if_they_do_not_fit_otherwise() -> None:
    """The first value that fits; with tiers auto, a tier only if no value fits."""
    needed = {
        sharding: training_plan(on_64_gpus(10**12, shard_experts=sharding)).bytes_on_tier("device")
        for sharding in ("none", "optimizer", "weights")
    }
    assert needed["none"] > needed["optimizer"] > needed["weights"]
    for sharding, size in needed.items():
        fits = on_64_gpus(size * 10 // 9 + 100)
        assert with_chosen_tiers(fits).comm.shard_experts == sharding
        auto = dataclasses.replace(fits, tiers=TiersConfig(experts="auto", optimizer="auto"))
        chosen = with_chosen_tiers(auto)
        assert (chosen.comm.shard_experts, chosen.tiers.experts) == (sharding, "device")
    small = on_64_gpus(needed["weights"])
    assert with_chosen_tiers(small).comm.shard_experts == "weights"
    assert training_plan(with_chosen_tiers(small)).lacking_bytes
    auto = dataclasses.replace(small, tiers=TiersConfig(experts="auto", optimizer="auto"))
    chosen = with_chosen_tiers(auto)
    assert chosen.comm.shard_experts == "none" and not chosen.tiers.all_on_device
    # without replicas there is nothing to split; their number may not be known yet
    for mesh, sharding in ((MeshConfig(1, 1, 8), "none"), (MeshConfig(0, 1, 8), "auto")):
        other = dataclasses.replace(on_64_gpus(10**9), mesh=mesh)
        assert with_chosen_tiers(other).comm.shard_experts == sharding
    advice = training_plan(on_64_gpus(needed["optimizer"], shard_experts="none")).advice()[0]
    assert "comm.shard_experts = weights (enough)" in advice


def test_an_accelerator_is_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that were given take precedence; products in float32 go half as fast (TF32)."""
    for name in MEMORY_SHARE:
        monkeypatch.delenv(name, raising=False)
    h100 = dataclasses.replace(
        TINY, machine=MachineConfig(accelerator="h100"), compute_dtype="bfloat16"
    )
    plan = training_plan(h100)
    assert not plan.machine.shared
    assert (plan.machine.device_bytes, plan.machine.flops, plan.machine.link_bytes_per_s) == (
        72 * 10**9,
        989e12,
        64e9,
    )
    assert (
        "989 TFLOP/s, memory 3,350 GB/s, link 64 GB/s (the data sheet of h100; programs reach less"
        in str(plan)
    )
    own = dataclasses.replace(h100, machine=MachineConfig(accelerator="h100", flops=4e14))
    assert (training_plan(own).machine.flops, training_plan(own).machine.memory_bytes_per_s) == (
        4e14,
        3.35e12,
    )
    assert (
        training_plan(dataclasses.replace(h100, compute_dtype="float32")).machine.flops
        == 989e12 / 2
    )
    for name, nominal in ACCELERATORS.items():
        assert nominal.flops == peak_flops_per_s(f"NVIDIA {name.upper()}".replace("RTX-", "RTX "))
    with pytest.raises(
        ValueError, match="accelerator = 'b300': must be one of , a100-40gb, a100, h100, h200"
    ):
        MachineConfig(accelerator="b300")  # type: ignore[arg-type]


def test_jax_takes_a_share_of_a_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths unless it is set; bytes that are given are those that the run may take."""
    h100 = dataclasses.replace(TINY, machine=MachineConfig(accelerator="h100"))
    for name in MEMORY_SHARE:
        for other in MEMORY_SHARE:
            monkeypatch.delenv(other, raising=False)
        assert "of its memory JAX takes 90 %, unless XLA_CLIENT_MEM_FRACTION or" in str(
            training_plan(h100)
        )
        monkeypatch.setenv(name, "0.75")
        assert described_machine(h100).device_bytes == 60 * 10**9
        given = dataclasses.replace(
            h100, machine=MachineConfig(accelerator="h100", device_bytes=79 * 10**9)
        )
        assert described_machine(given).device_bytes == 79 * 10**9 and "JAX takes" not in str(
            training_plan(given)
        )
        monkeypatch.setenv(name, "most")
        with pytest.raises(ValueError, match=f"{name} = 'most': must be a number greater than 0"):
            described_machine(h100)


MIXTRAL = dataclasses.replace(PRESETS["mixtral-8x7b"][1], machine=MachineConfig(accelerator="h100"))


def test_whose_host_memory_is_free_is_said() -> None:
    """A plan for an H100 went by the memory of the laptop that made it, without a word."""
    text = str(training_plan(MIXTRAL))
    ask = "give --machine.host-bytes and --machine.nvme-bytes of the hosts that the run is for"
    assert f"free host bytes and nvme bytes are those of this machine: {ask}" in text
    small = dataclasses.replace(training_plan(MIXTRAL).machine, host_bytes=10**10)
    advice = dataclasses.replace(training_plan(MIXTRAL), machine=small).advice()[-1]
    assert advice.endswith(
        "Take --machine.host-bytes, if a host of the run has more than the 10.00 GB of this machine"
    )
    described = MachineConfig(accelerator="h100", host_bytes=10**10, nvme_bytes=10**13)
    given = training_plan(dataclasses.replace(MIXTRAL, machine=described))
    assert "this machine" not in str(given) and given.advice()[-1].endswith("or more host memory")
    assert "free host bytes and nvme bytes are those of this machine\n" in str(training_plan(TINY))


def test_advice_names_devices_that_help_and_no_others() -> None:
    """Eight experts on eight devices: more devices cannot split them further, but they share the
    tokens.
    """
    plan = training_plan(MIXTRAL)
    device = plan.advice()[0]
    assert "mesh.expert_inter" not in device and "or more of them" not in device
    assert "mesh.data = 16, on 128 devices" in device and device.endswith(
        "or devices with more memory"
    )
    shared = training_plan(dataclasses.replace(MIXTRAL, mesh=MeshConfig(16, 1, 8)))
    assert 16 * shared.model.layer_activation_bytes == plan.model.layer_activation_bytes
    assert shared.model.num_device_expert_parameters == plan.model.num_device_expert_parameters


def test_a_predicted_step_says_that_traffic_is_left_out() -> None:
    both = training_plan(MIXTRAL), training_plan(TINY)
    several, alone = (
        next(line for line in str(plan).splitlines() if "predicted step" in line) for plan in both
    )
    assert several.endswith(
        " s, without the traffic between the 8 devices, which --cluster FILE adds"
    )
    assert alone.endswith(" s")


def test_what_one_gpu_and_several_have_of_the_weights() -> None:
    """One has a copy in the products' dtype, and gradients in it; accumulation steps add a sum of
    them in float32.

    So have several of their experts, where no gradients of others are added to theirs.
    """

    def rows(**changes: Any) -> dict[str, int]:
        base: dict[str, Any] = {"machine": MachineConfig(accelerator="h100"), "batch_size": 16}
        plan = training_plan(dataclasses.replace(TINY, **(base | changes)))
        return {kind: size for tier, kind, size in plan.rows if tier == "device"}

    total, experts = (
        TINY.model.total_and_active_parameters()[0],
        training_sizes(TINY).num_all_expert_parameters,
    )
    one, cpu = rows(), rows(machine=MachineConfig())
    copies, gradients = "weights in the products' dtype", "experts: gradients"
    assert (
        one[copies] == 2 * total and one[gradients] == 2 * experts and "experts: in use" not in one
    )
    eight, replicas = rows(mesh=MeshConfig(1, 1, 8)), rows(mesh=MeshConfig(2, 1, 4))
    assert eight[copies] == eight[gradients] == 2 * experts // 8  # of the experts alone
    assert copies not in replicas and replicas[gradients] == 4 * experts // 4
    assert copies not in cpu and cpu[gradients] == 4 * experts
    assert rows(gradient_accumulation_steps=2)[gradients] == 6 * experts
    assert (
        rows(mesh=MeshConfig(1, 1, 8), gradient_accumulation_steps=2)[gradients] == 8 * experts // 8
    )


def test_the_exchange_has_buffers_and_a_layer_that_is_computed_again_has_more() -> None:
    def in_use(remat: Any = "none", **mesh: int) -> int:
        base: dict[str, Any] = {
            "remat": remat,
            "batch_size": 16,
            "machine": MachineConfig(accelerator="h100"),
        }
        return training_sizes(
            dataclasses.replace(TINY, mesh=MeshConfig(**mesh), **base)
        ).layer_activation_bytes

    # twice the rows that are tokens, and both ends of what is sent
    assert 8 * in_use(expert_intra=8) > 2 * in_use()
    assert in_use("layer") > in_use() and in_use("layer", expert_intra=8) > in_use(expert_intra=8)


def test_a_ragged_exchange_has_smaller_buffers_than_one_that_pads() -> None:
    """Rows received: 1.5 times an even load instead of twice; rows returned: those sent."""
    k, tokens, devices = TINY.model.num_experts_per_tok, 4096, 8
    padded, ragged = (
        residual_elements(TINY.model, tokens, devices, ragged=ragged) for ragged in (False, True)
    )
    layers, hidden = TINY.model.num_moe_layers, TINY.model.hidden_size
    assert padded[0] - ragged[0] == layers * hidden * k * tokens * ((2 + 2) - (1.5 + 1))
    assert ragged[1] == 0.75 * padded[1]
    padded, ragged = (
        gradient_elements_in_use(TINY.model, tokens, devices, ragged=ragged)
        for ragged in (False, True)
    )
    assert ragged[0] < padded[0]

    def layer_bytes(exchange: Any) -> int:
        comm = dataclasses.replace(TINY.comm, exchange=exchange)
        spread = dataclasses.replace(TINY, mesh=MeshConfig(1, 1, 8), batch_size=16, comm=comm)
        return training_sizes(spread).layer_activation_bytes

    assert layer_bytes("ragged") < layer_bytes("flat")


def test_131072_positions_fit_64_gpus_that_share_sequences() -> None:
    """Qwen3-30B-A3B: one sequence a device does not fit, one for each node of eight devices does.
    A device sends seven times its keys and values of 48 layers, three times.
    """
    config = dataclasses.replace(
        PRESETS["qwen3-30b-a3b"][1],
        mesh=MeshConfig(8, 1, 8),
        sequence_length=131_072,
        batch_size=64,
        remat="layer",
        machine=MachineConfig(accelerator="h100", host_bytes=2 * 10**12, nvme_bytes=10**12),
    )
    alone = training_plan(config)
    assert "device" in alone.lacking_bytes and alone.model.context_bytes == 0
    (advice,) = training_plan(with_chosen_expert_sharding(config)).advice()
    assert "Take mesh.context = 2 with gradient_accumulation_steps = 2 (enough)" in advice
    pairs = {"mesh": MeshConfig(8, 1, 8, 2), "gradient_accumulation_steps": 2}
    advised = with_chosen_expert_sharding(dataclasses.replace(config, **pairs))
    assert not training_plan(advised).lacking_bytes
    mesh, eight = MeshConfig(8, 1, 8, 8), {"gradient_accumulation_steps": 8, "plan": True}
    shared = with_chosen_tiers(dataclasses.replace(config, mesh=mesh, **eight))
    plan = training_plan(shared)
    assert not plan.lacking_bytes
    assert plan.bytes_on_tier("device") < 40e9
    tokens = 64 * 131_072 // 64
    assert plan.model.context_bytes == 3 * 7 * tokens * 48 * 2 * 4 * 128 * 2
    # one sequence a step, on as many devices as it takes
    few = dataclasses.replace(config, batch_size=8)
    assert training_sizes(few).context == 8
    assert (plan.model.max_micro_batches, training_sizes(few).max_micro_batches) == (8, 1)


def test_windows_send_the_ends_of_chunks() -> None:
    """Rounded up to 128 positions, to one of two neighbours; a window beyond a chunk sends all."""
    window, full = (
        dataclasses.replace(
            TINY.model,
            sliding_window=100,
            layer_types=("sliding_attention",) * n
            + ("full_attention",) * (TINY.model.num_hidden_layers - n),
        )
        for n in (1, 0)
    )
    one_layer = context_sent_elements(full, 4096, 4) / TINY.model.num_hidden_layers
    saved = context_sent_elements(full, 4096, 4) - context_sent_elements(window, 4096, 4)
    assert saved == pytest.approx(one_layer * (1 - 128 / 512 / 4))
    assert context_sent_elements(window, 512, 4) == context_sent_elements(full, 512, 4)
    assert context_sent_elements(full, 4096, 1) == 0
