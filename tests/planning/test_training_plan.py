"""What a model in training needs on which tier, and how long a step takes."""

import math
from dataclasses import replace

import pytest

from jmoe.config.tiers import TIERS, Tier, Update
from jmoe.planning.first_fitting import first_fitting_plan
from jmoe.planning.setting_changes import possible_changes
from jmoe.planning.training import TrainingPlan, plan_training
from jmoe.planning.training_sizes import (
    Machine,
    StatePlacement,
    TrainingSizes,
    candidate_tier_pairs,
)

GB = 10**9
# 1 billion parameters in 16 x 64 experts
MODEL = TrainingSizes(
    num_layers=16,
    num_experts=64,
    num_experts_per_tok=2,
    parameters_per_expert=10**6,
    dense_parameters=10**7,
    step_tokens=4096,
    dense_flops=1e11,
    input_bytes=6 * 10**7,
    working_bytes=4 * 10**7,
    compute_dtype_bytes=2,
    gradient_bytes_per_parameter=4,
)
MACHINE = Machine(8 * GB, 16 * GB, 100 * GB, False, 1e12, 1e10, 2e9, 1e9, 1e11)
NVME = StatePlacement("nvme", "nvme", "nvme", 2, 0, 1)


def test_bytes_by_tier() -> None:
    plan = plan_training(MODEL, NVME, MACHINE)
    rows = {(tier, kind): size for tier, kind, size in plan.rows}
    experts = 16 * 64 * 10**6
    assert rows["nvme", "experts: weights"] == 4 * experts
    assert rows["nvme", "experts: moments"] == 8 * experts
    assert rows["nvme", "experts: gradients"] == 4 * experts
    # one checkpoint besides, with gradients that wait
    assert plan.bytes_on_tier("nvme") == (16 + 16) * experts
    assert rows["device", "dense weights, moments, gradients"] == 16 * 10**7
    # MoESys: 4 S / L for each layer there
    assert rows["device", "experts: weights"] == 4 * 2 * 64 * 10**6
    assert plan.lacking_bytes == {} and plan.advice() == []
    assert "it fits" in str(plan)


def test_room_for_a_share_of_a_layers_experts() -> None:
    """MoESys: 4 a S / L on the device; a step of few tokens chooses few experts, and the advice
    says how few.
    """

    def slots(model: TrainingSizes, share: float) -> int:
        rows = plan_training(model, replace(NVME, device_experts=share), MACHINE).rows
        return sum(
            size for tier, kind, size in rows if (tier, kind) == ("device", "experts: weights")
        )

    few = replace(MODEL, step_tokens=16)
    assert 16 < few.active_experts < 32  # of 64
    assert slots(few, 1.0) == 4 * 2 * 64 * 10**6
    assert slots(few, 0.5) == 4 * 2 * 32 * 10**6
    chosen = math.ceil(few.active_experts)
    assert slots(few, 0.1) == 4 * 2 * chosen * 10**6  # slots grow to what the tokens choose
    assert slots(MODEL, 0.5) == slots(MODEL, 1.0)
    in_use = {
        kind: size
        for _, kind, size in plan_training(few, replace(NVME, device_experts=0.5), MACHINE).rows
    }
    assert in_use["experts: in use"] == (2 * 4 + 2 * 2) * 32 * 10**6
    on_device = replace(NVME, experts="device", device_experts=0.5)  # all of them are there
    assert plan_training(few, on_device, MACHINE).experts_per_slot == 64

    tight = replace(MACHINE, device_bytes=1300 * 10**6)
    (advice,) = plan_training(few, NVME, tight).advice()
    assert "tiers.device_experts = 0.5" in advice
    (advice,) = plan_training(MODEL, NVME, tight).advice()  # a step of so many tokens chooses all
    assert "tiers.device_experts" not in advice


def test_a_measured_share_of_chosen_experts() -> None:
    """Routing is less even than estimated: traffic and seconds are those of so many experts,
    slots hold the most.
    """

    def moved(plan: TrainingPlan) -> float:
        experts = plan.model.num_layers * plan.model.active_experts
        return experts * sum(sum(traffic) for traffic in plan.expert_traffic_by_pass())

    assert MODEL.active_experts == pytest.approx(64)
    estimated = plan_training(MODEL, replace(NVME, device_experts=0.25), MACHINE)
    half, quarter = (estimated.with_chosen_share(share) for share in (0.5, 0.25))
    assert (half.model.active_experts, quarter.model.active_experts) == (32, 16)
    assert (estimated.experts_per_slot, half.experts_per_slot, quarter.experts_per_slot) == (
        64,
        64,
        64,
    )
    few = plan_training(
        replace(MODEL, step_tokens=1, chosen_share=0.5), replace(NVME, device_experts=0.25), MACHINE
    )
    assert few.experts_per_slot == 32  # more than even routing chooses
    assert {row[:2]: row[2] for row in few.rows}["device", "experts: weights"] == 4 * 2 * 32 * 10**6
    assert moved(estimated) == pytest.approx(2 * moved(half)) and moved(half) == pytest.approx(
        2 * moved(quarter)
    )
    assert half.step_s() == pytest.approx(estimated.step_s() / 2)  # all of it transfers
    assert half.step_s(overlapped=False) == pytest.approx(
        sum(half.compute_s_by_pass) + sum(half.transfers_s_by_pass)
    )
    # updates of those chosen
    assert estimated.compute_s_by_pass[0] > half.compute_s_by_pass[0] > quarter.compute_s_by_pass[0]
    assert quarter.model.tokens_per_expert == 4096 * 2 / 16
    assert half.with_chosen_share(0) == estimated

    spread = replace(half.model, num_devices=8)  # the share is of each device's experts
    assert spread.active_experts == 4


def test_an_update_on_the_host() -> None:
    """Weights go in 2 bytes and gradients come; the host's memory is then in the way as well."""
    there, here = (
        plan_training(MODEL, replace(NVME, update=u), MACHINE) for u in ("device", "host")
    )
    traffic = [plan.expert_traffic_by_pass() for plan in (there, here)]
    link = [sum(each.link_bytes for each in both) / 10**6 for both in traffic]
    again = 1 - 2 / 16  # of layers: the last two are still on the device
    assert link == pytest.approx([32 + 4 * again, 6 + 2 * again])
    assert [each[2:] for each in traffic[0]] == [each[2:] for each in traffic[1]]  # of the disk
    # in the backward pass weights go while gradients return; on the device one expert after another
    in_series = [plan.link_bytes_in_series_by_pass for plan in (there, here)]
    assert in_series[0] == pytest.approx((28e6, (4 + 4 * again) * 10**6))
    assert in_series[1] == (2e6, 4e6)

    sizes = [{row[:2]: row[2] for row in plan.rows} for plan in (there, here)]
    for kind, of_device, of_host in (
        ("experts: weights", 4 * 2, 2 * 2),
        ("experts: in use", 2 * 4 + 2 * 2, 2 * 4 + 2),
    ):
        assert [size["device", kind] for size in sizes] == [
            n * 64 * 10**6 for n in (of_device, of_host)
        ]
    assert here.needed_bytes("host") == there.needed_bytes("host")

    in_host_memory = replace(
        NVME, experts="host", optimizer="host", gradients="host", update="host"
    )
    assert here.host_bytes_by_pass == pytest.approx((24 + 4 + 4, 3 * 4 + 8 * again))
    slow = replace(MACHINE, host_memory_bytes_per_s=32e6)  # a second for an update
    plan = plan_training(replace(MODEL, devices_per_host=4), in_host_memory, slow)
    backward_s = 4 * (12 + 8 * again) / 32
    assert plan.expert_transfer_s_by_pass == pytest.approx((4, backward_s))
    assert there.compute_s_by_pass[0] > here.compute_s_by_pass[0]
    assert there.compute_s_by_pass[1] == here.compute_s_by_pass[1]
    shared = plan_training(MODEL, in_host_memory, replace(slow, shared=True))
    assert not any(shared.expert_transfer_s_by_pass)  # the cores that compute update as well
    assert there.compute_s_by_pass[0] > shared.compute_s_by_pass[0] > here.compute_s_by_pass[0]


def test_records_are_copied_where_they_are_streamed() -> None:
    """AdamW moves 28 bytes per parameter; the record of weights 8 more, that of moments 16, and
    neither does if it stays on the device. Parameters outside the experts have no records.
    """
    dense, of_experts = MODEL.dense_parameters, 16 * 64 * 10**6

    def moved_bytes(experts: Tier, optimizer: Tier, update: Update = "device") -> float:
        place = replace(NVME, experts=experts, optimizer=optimizer, update=update)
        slow, fast = (
            plan_training(MODEL, place, replace(MACHINE, memory_bytes_per_s=rate))
            for rate in (1.0, 1e30)
        )
        return slow.compute_s_by_pass[0] - fast.compute_s_by_pass[0]

    assert moved_bytes("device", "device") == pytest.approx(28 * (dense + of_experts))
    assert moved_bytes("device", "host") == pytest.approx(28 * dense + (28 + 16) * of_experts)
    for optimizer in ("host", "nvme"):
        streamed = moved_bytes("host", optimizer)
        assert streamed == pytest.approx(28 * dense + (28 + 24) * of_experts)
    assert moved_bytes("host", "host", update="host") == pytest.approx(28 * dense)


def test_a_smaller_batch_is_expected_to_choose_a_smaller_share() -> None:
    few = replace(MODEL, chosen_share=0.3, step_tokens=32, max_micro_batches=4)
    shares = [
        change.model.chosen_share
        for change in possible_changes(few, NVME)
        if change.setting == "batch_size"
    ]
    assert len(shares) == 2 and 0.3 > shares[0] > shares[1] > 2 / 64
    assert shares[0] / 0.3 == pytest.approx(
        replace(few, chosen_share=0.0, step_tokens=16).active_experts
        / replace(few, chosen_share=0.0).active_experts
    )


def test_what_a_save_takes() -> None:
    """A copy of what is on the device; experts elsewhere are saved as records, a few at a time."""

    def copies(place: StatePlacement) -> int:
        return sum(
            n
            for _, kind, n in plan_training(MODEL, place, MACHINE).rows
            if kind == "copies for a save"
        )

    host = replace(NVME, experts="host", optimizer="host", gradients="host")
    assert copies(host) == 12 * (10**7 + 8 * 10**6)
    assert copies(replace(NVME, experts="device", optimizer="device")) == 12 * (
        10**7 + 16 * 64 * 10**6
    )


def test_what_is_kept_for_the_backward_pass() -> None:
    """A streamed step runs a layer for all micro-batches at once, and so keeps what all of them
    need.
    """

    def kept(place: StatePlacement) -> int:
        return sum(
            n
            for _, kind, n in plan_training(spread, place, MACHINE).rows
            if kind.startswith("kept for")
        )

    spread = replace(MODEL, num_devices=2, residual_bytes=2 * GB, micro_batches=4)
    assert kept(NVME) == 4 * GB
    assert kept(replace(NVME, experts="device", optimizer="device")) == 1 * GB


def test_all_on_the_device_is_sixteen_bytes_a_parameter() -> None:
    plan = plan_training(MODEL, replace(NVME, experts="device", optimizer="device"), MACHINE)
    parameters = MODEL.num_all_expert_parameters + MODEL.dense_parameters
    assert plan.bytes_on_tier("device") >= 16 * parameters
    assert plan.bytes_on_tier("nvme") == 0
    assert set(plan.lacking_bytes) == {"device"}
    assert "the most is experts: moments, 8.19 GB. Take " in plan.advice()[0]
    assert "tiers.experts = host and tiers.optimizer = host" in plan.advice()[0]
    # nothing moves, whatever tiers.gradients says
    assert not any(map(any, plan.expert_traffic_by_pass()))


def test_a_shared_memory_is_counted_once() -> None:
    host = replace(NVME, experts="host", optimizer="host", gradients="host")
    apart = plan_training(MODEL, host, replace(MACHINE, host_bytes=20 * GB))
    assert apart.lacking_bytes == {}
    shared = plan_training(MODEL, host, replace(MACHINE, host_bytes=18 * GB, shared=True))
    assert set(shared.lacking_bytes) == {"host"}
    assert "tiers.optimizer = nvme" in shared.advice()[0]


def test_a_full_disk() -> None:
    plan = plan_training(MODEL, NVME, replace(MACHINE, nvme_bytes=20 * GB))
    assert set(plan.lacking_bytes) == {"nvme"}
    assert "Take tiers.experts = device and tiers.optimizer = host (enough)" in plan.advice()[0]
    small = replace(MACHINE, device_bytes=2 * GB, host_bytes=GB, nvme_bytes=20 * GB)
    alone = plan_training(MODEL, NVME, small)
    assert alone.advice()[0].endswith("bfloat16 (4.10 GB less), or a larger disk (tiers.path)")


def test_advice_is_on_the_largest_row_and_never_what_is_already_set() -> None:
    """Every value that is advised is another one than the plan's, and shrinks the row that takes
    the most.
    """
    tiny = replace(MACHINE, device_bytes=GB // 2)
    plan = plan_training(
        replace(MODEL, input_bytes=GB, working_bytes=4 * GB, max_micro_batches=8), NVME, tiny
    )
    (advice,) = plan.advice()
    assert (
        "the most is activations: in use, 4.00 GB. Take gradient_accumulation_steps = 8 (3.50 GB"
        " less)" in advice
    )
    assert "tiers.device_layers" not in advice and "remat" not in advice
    (advice,) = plan_training(replace(plan.model, residual_bytes=9 * GB), NVME, tiny).advice()
    assert (
        "the most is kept for the backward pass, 9.00 GB. Take remat = layer (9.00 GB less)"
        in advice
    )
    whole = replace(MODEL, micro_batches=8, max_micro_batches=8, working_bytes=4 * GB)
    (advice,) = plan_training(whole, replace(NVME, device_layers=1), tiny).advice()
    assert "gradient_accumulation_steps" not in advice and "device_layers" not in advice

    small = replace(MACHINE, device_bytes=2 * GB, host_bytes=GB, nvme_bytes=20 * GB)
    full = plan_training(replace(MODEL, gradient_bytes_per_parameter=2), NVME, small)
    (advice,) = full.advice()
    assert "tiers.gradient_dtype" not in advice and "checkpoint.keep" not in advice
    (advice,) = plan_training(full.model, replace(NVME, checkpoints=2), full.machine).advice()
    assert "checkpoint.keep" not in advice, "a run with records refuses to keep one"
    (advice,) = plan_training(full.model, replace(NVME, checkpoints=3), full.machine).advice()
    assert (
        "older versions in checkpoints, 36.86 GB. Take checkpoint.keep = 2 (14.34 GB less), or a"
        " larger d" in advice
    )


def test_what_is_advised_as_enough_is_enough() -> None:
    resident = replace(NVME, experts="device", optimizer="device", gradients="host")
    roomy = replace(MACHINE, host_bytes=20 * GB)
    (advice,) = plan_training(MODEL, resident, roomy).advice()
    assert (
        "Take tiers.optimizer = host (enough), or tiers.experts = host and tiers.optimizer = host"
        " (enough)" in advice
    )
    assert plan_training(MODEL, replace(resident, optimizer="host"), roomy).lacking_bytes == {}
    spread = replace(MODEL, max_micro_batches=4)
    device, host = plan_training(
        spread, resident, replace(MACHINE, host_bytes=2 * GB, nvme_bytes=GB)
    ).advice()
    assert "Take mesh.expert_inter = 4, on 4 devices (enough)" in device
    assert "the most is copies for a save, 12.41 GB" in host


def test_data_parallel_replicas_share_the_dense_state() -> None:
    twice = replace(MODEL, num_devices=2, replicas=3)
    rows = {kind: size for _, kind, size in plan_training(twice, NVME, MACHINE).rows}
    assert rows["dense weights, moments, gradients"] == 16 * 10**7 // 6
    assert str(plan_training(twice, NVME, MACHINE)).startswith(
        "per device, 6 devices; host and nvme per host, 6 hosts"
    )
    whole = plan_training(replace(twice, shard_dense=False), NVME, MACHINE)
    assert {kind: size for _, kind, size in whole.rows}[
        "dense weights, moments, gradients"
    ] == 16 * 10**7


def test_replicas_repeat_the_experts_and_share_the_saving() -> None:
    """Two, on two hosts: each has all records; an expert moves if a token of either chose it."""
    few = replace(MODEL, step_tokens=20)
    plans = [plan_training(replace(few, replicas=replicas), NVME, MACHINE) for replicas in (1, 2)]
    alone, two = ({kind: size for _, kind, size in plan.rows} for plan in plans)
    for kind in ("experts: weights", "experts: moments", "experts: gradients"):
        assert two[kind] == alone[kind] > 0
    for kind in ("older versions in checkpoints", "gradients in checkpoints"):
        assert 2 * two[kind] == alone[kind] > 0
    layer_bytes = 4 * MODEL.num_experts * MODEL.parameters_per_expert
    # gradients that are being summed
    assert two["experts: in use"] == alone["experts: in use"] + layer_bytes
    assert plans[0].model.active_experts < plans[1].model.active_experts <= MODEL.num_experts


def test_only_a_streamed_step_keeps_the_inputs_of_all_its_micro_batches() -> None:
    model = replace(MODEL, micro_batches=4)
    rows = {
        place: plan_training(model, replace(NVME, experts=place, optimizer=place), MACHINE)
        for place in TIERS
    }
    inputs = {
        place: sum(n for _, kind, n in plan.rows if "inputs" in kind)
        for place, plan in rows.items()
    }
    assert inputs == {"device": 6 * 10**7, "host": 24 * 10**7, "nvme": 24 * 10**7}


def test_traffic_of_an_expert() -> None:
    forward, back = plan_training(MODEL, NVME, MACHINE).expert_traffic_by_pass()
    again = 1 - 2 / 16  # two layers are still there on the way back
    # everything comes, weights and moments go
    assert forward == pytest.approx((16e6, 12e6, 16e6, 12e6)) and forward.link_bytes == 28e6
    # weights come, gradients go
    assert back == pytest.approx((4e6 * again, 4e6, 4e6 * again, 4e6))
    whole = replace(NVME, host_cache_bytes=16 * MODEL.num_all_expert_parameters)
    assert all(
        traffic[2:] == (0, 0)
        for traffic in plan_training(MODEL, whole, MACHINE).expert_traffic_by_pass()
    )


def test_a_step_takes_the_longer_of_computing_and_moving() -> None:
    plan = plan_training(MODEL, NVME, MACHINE)
    experts = 16 * MODEL.active_experts
    assert plan.step_s() == pytest.approx(experts * sum(plan.expert_transfer_s_by_pass))
    assert plan.step_s(overlapped=False) > plan.step_s()
    fast = replace(
        MACHINE, nvme_read_bytes_per_s=1e15, nvme_write_bytes_per_s=1e15, link_bytes_per_s=1e15
    )
    computing = plan_training(MODEL, NVME, fast)
    assert computing.step_s() == pytest.approx(plan.step_s(overlapped=False) - plan.step_s())


def test_a_layer_that_keeps_nothing_is_computed_twice_forward() -> None:
    fast = replace(MACHINE, memory_bytes_per_s=1e18, link_bytes_per_s=1e18)
    resident = replace(NVME, experts="device", optimizer="device", gradients="device")
    host = replace(NVME, experts="host", optimizer="host", gradients="host")
    ordinary, streamed, remat, remat_streamed = (
        plan_training(replace(MODEL, residual_bytes=residual_bytes), place, fast).step_s()
        for residual_bytes in (1, 0)
        for place in (resident, host)
    )
    assert streamed == pytest.approx(ordinary)
    assert remat == pytest.approx(4 / 3 * ordinary) == pytest.approx(remat_streamed)


def test_experts_products_computed_again() -> None:
    """Advised before whole layers are, with the bytes that it saves; only experts' products are
    made once more.
    """
    fast = replace(MACHINE, memory_bytes_per_s=1e18, link_bytes_per_s=1e18)
    resident = replace(NVME, experts="device", optimizer="device", gradients="device")
    kept = replace(MODEL, residual_bytes=9 * GB, experts_residual_bytes=6 * GB)
    again = replace(kept, residual_bytes=3 * GB, experts_residual_bytes=0, experts_again=True)
    once, twice = (plan_training(model, resident, fast) for model in (kept, again))
    choices = MODEL.num_layers * MODEL.step_tokens * MODEL.num_experts_per_tok
    product_s = 2 * MODEL.parameters_per_expert * choices / MODEL.num_devices / fast.flops
    assert twice.step_s() - once.step_s() == pytest.approx(product_s)
    assert (
        once.bytes_on_tier("device") - twice.bytes_on_tier("device") == 6 * GB // MODEL.num_devices
    )
    tight = replace(fast, device_bytes=once.bytes_on_tier("device") - GB)
    (advice,) = plan_training(kept, resident, tight).advice()
    assert "remat = experts (enough)" in advice


def test_each_way_takes_the_longer_of_computing_and_moving() -> None:
    """Twice as much is computed on the way back, but most is moved on the way forward, where
    experts are updated.
    """
    plan = plan_training(
        replace(MODEL, residual_bytes=1), NVME, replace(MACHINE, memory_bytes_per_s=1e18)
    )
    experts, computing_s = 16 * MODEL.active_experts, plan.step_s(overlapped=False)
    forward_s, back_s = (experts * seconds for seconds in plan.expert_transfer_s_by_pass)
    computing_s -= forward_s + back_s
    # computing then takes 1 and 2 times what moving takes back
    flops = MACHINE.flops * computing_s / (3 * back_s)
    between = plan_training(plan.model, NVME, replace(plan.machine, flops=flops))
    assert forward_s > back_s
    assert between.step_s() == pytest.approx(forward_s + 2 * back_s)
    assert between.step_s(overlapped=False) == pytest.approx(forward_s + 4 * back_s)


def test_break_even() -> None:
    plan = plan_training(MODEL, NVME, MACHINE)
    tokens = plan.break_even_tokens_per_expert * MODEL.num_experts / MODEL.num_experts_per_tok
    there = plan_training(replace(MODEL, step_tokens=int(tokens)), NVME, MACHINE)
    assert there.model.tokens_per_expert == pytest.approx(
        plan.break_even_tokens_per_expert, rel=1e-3
    )
    assert (
        there.step_s(overlapped=False) - there.step_s()
        >= 0.99 * sum(there.expert_transfer_s_by_pass) * 16 * 64
    )


def test_auto_takes_the_fastest_that_fits() -> None:
    assert candidate_tier_pairs("auto", "auto")[0] == ("device", "device")
    assert candidate_tier_pairs("auto", "auto")[-1] == ("nvme", "nvme")
    assert candidate_tier_pairs("host", "auto") == [("host", "host"), ("host", "nvme")]
    places = [
        replace(NVME, experts=a, optimizer=b) for a, b in candidate_tier_pairs("auto", "auto")
    ]
    assert (
        first_fitting_plan(MODEL, replace(MACHINE, device_bytes=30 * GB), places).placement.experts
        == "device"
    )
    chosen = first_fitting_plan(MODEL, MACHINE, places).placement
    assert (chosen.experts, chosen.optimizer) == ("device", "host")
    small = replace(MACHINE, device_bytes=2 * GB, host_bytes=2 * GB)
    chosen = first_fitting_plan(MODEL, small, places).placement
    assert (chosen.experts, chosen.optimizer) == ("nvme", "nvme")
    with pytest.raises(ValueError, match=r"no choice of tiers fits. .*nvme: "):
        first_fitting_plan(MODEL, replace(small, nvme_bytes=GB), places)


def test_devices_share_everything_out() -> None:
    """Eight devices in two hosts: an eighth of the bytes on each, a half of those below in each
    host.
    """
    spread = replace(MODEL, num_devices=8, devices_per_host=4)
    (alone, one), (plan, rows) = (
        (p, {(tier, kind): size for tier, kind, size in p.rows})
        for p in (plan_training(model, NVME, MACHINE) for model in (MODEL, spread))
    )
    for kind in (
        "experts: weights",
        "experts: in use",
        "dense weights, moments, gradients",
        "activations: in use",
    ):
        assert 8 * rows["device", kind] == one["device", kind]
    assert 2 * rows["nvme", "experts: moments"] == one["nvme", "experts: moments"]
    assert spread.active_experts * 8 == pytest.approx(MODEL.active_experts)
    assert spread.tokens_per_expert == pytest.approx(MODEL.tokens_per_expert)
    # the disk of a host has an eighth of the experts for each of four devices
    assert plan.step_s() == pytest.approx(alone.step_s() / 2)
