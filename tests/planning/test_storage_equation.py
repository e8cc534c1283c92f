"""Equation 1 of MoESys, by hand and beside the planner's bytes."""

from dataclasses import replace

import pytest

from jmoe.config.tiers import Tier
from jmoe.planning.storage_equation import StorageEquation
from jmoe.planning.training import plan_training
from tests.planning.test_training_plan import MACHINE, MODEL, NVME

GB = 10**9


def test_the_papers_terms() -> None:
    """A thousand dense and a million sparse parameters, a quarter of them active, in 10 layers."""
    params, grads, master, momentum, variance = 2, 2, 4, 4, 4
    dense = 1000 * (params + grads + master + momentum + variance)
    active = 10**6 // 4
    assert StorageEquation(1000, 10**6, 10, 0.25).bytes_by_tier == {
        "device": dense + (params + grads) * active / 10,
        "host": (params + grads + master + momentum + variance) * active,
        "nvme": (master + momentum + variance) * 10**6,
    }


@pytest.mark.parametrize(
    ("short", "num_devices", "fits"),
    [(None, 8, True), ("device", 8, False), ("host", 8, False), ("nvme", 8, False)],
)
def test_every_constraint_can_fail(short: Tier | None, num_devices: int, fits: bool) -> None:
    """Each at its bound: one byte a device less does not fit."""
    equation = StorageEquation(8_000, 8_000_000, 4, 0.5)
    memory: dict[Tier, int] = {"device": 516_000, "host": 8_000_000, "nvme": 12_000_000}
    if short is not None:
        memory[short] -= 1
    assert equation.fits(memory, num_devices) is fits


@pytest.mark.parametrize(
    ("name", "value", "constraint"),
    [
        ("dense", -1, "must not be negative"),
        ("sparse", -1, "must not be negative"),
        ("layers", 0, "must be greater than 0"),
        ("alpha", 1.5, "must be between 0 and 1"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, constraint: str) -> None:
    good = StorageEquation(1, 1, 1, 0.5)
    with pytest.raises(ValueError, match=f"{name} = {value}: {constraint}"):
        replace(good, **{name: value})


def test_a_plan_has_the_papers_bytes_beside_its_own() -> None:
    """A line of the plan's table: per device, and per host of all devices' experts."""
    plan = plan_training(replace(MODEL, chosen_share=0.25), NVME, MACHINE)
    experts = 16 * 64 * 10**6
    expected = StorageEquation(10**7, experts, 16, 0.25)
    assert plan.storage_equation == expected
    (line,) = (line for line in str(plan).splitlines() if line.startswith("MoESys"))
    cells = [f"{expected.bytes_by_tier[tier] / GB:.2f} GB" for tier in ("device", "host", "nvme")]
    assert line.split(maxsplit=3)[:3] == ["MoESys,", "equation", "1"]
    assert [" ".join(pair) for pair in zip(*2 * [iter(line.split()[3:])], strict=True)] == cells


def test_a_plan_on_two_hosts_divides_the_papers_bytes() -> None:
    many = replace(MODEL, num_devices=4, devices_per_host=2, chosen_share=0.25)
    plan = plan_training(many, NVME, MACHINE)
    whole = plan.storage_equation.bytes_by_tier
    line = next(line for line in str(plan).splitlines() if line.startswith("MoESys"))
    device, _, host, _, nvme, _ = line.split()[3:]
    assert float(device) == pytest.approx(whole["device"] / 4 / GB, abs=0.006)
    assert float(host) == pytest.approx(whole["host"] / 2 / GB, abs=0.006)
    assert float(nvme) == pytest.approx(whole["nvme"] / 2 / GB, abs=0.006)


def test_a_plan_without_tiers_has_no_such_line() -> None:
    resident = replace(NVME, experts="device", optimizer="device")
    assert "MoESys" not in str(plan_training(MODEL, resident, MACHINE))
