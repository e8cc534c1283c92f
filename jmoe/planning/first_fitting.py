"""Choice of the first placement, or sharding of experts, with which training fits."""

from dataclasses import replace

from jmoe.config.parallel import ExpertSharding
from jmoe.planning.training import TrainingPlan, plan_training
from jmoe.planning.training_sizes import EXPERT_SHARDINGS, Machine, StatePlacement, TrainingSizes


def first_fitting_plan(
    model: TrainingSizes, machine: Machine, placements: list[StatePlacement]
) -> TrainingPlan:
    """Return the plan of the first placement that fits. Raises `ValueError`, with advice for the
    last placement, if none fits.
    """
    plans = [plan_training(model, placement, machine) for placement in placements]
    fitting = [plan for plan in plans if not plan.lacking_bytes]
    if not fitting:
        raise ValueError(
            "tiers = 'auto': no choice of tiers fits. " + "; ".join(plans[-1].advice())
        )
    return fitting[0]


def first_fitting_expert_sharding(
    model: TrainingSizes, machine: Machine, placement: StatePlacement
) -> ExpertSharding | None:
    """Return the first of `EXPERT_SHARDINGS` with which the experts fit the devices; None if none
    does. placement: with experts and optimizer on the device.
    """
    for sharding in EXPERT_SHARDINGS:
        plan = plan_training(replace(model, expert_sharding=sharding), placement, machine)
        if not {"device", "host" if machine.shared else "device"} & plan.lacking_bytes.keys():
            return sharding
    return None
