"""A checkpoint's step as the state of a run, whatever tiers its experts were saved from and go to."""

from dataclasses import replace
from typing import Any

from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.saved_experts import SavedExperts, names_of_experts
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.state import TrainState, experts_of, without_experts
from jmoe.training.trainer import Trainer

LINKED = {"weights", "moments"}  # kinds of records that a run can take over as they are, with gradients that wait


def restored(trainer: Trainer, checkpoints: Checkpoints, step: int) -> tuple[TrainState, Any]:
    """Return (the state, the data's state) of `step`; records that stay on the tier nvme become current."""
    shape, full = trainer.saved_shape, experts_of(trainer.full_shape.params)
    if not full:
        saved_state, data, _ = checkpoints.restore(step, shape)
        return trainer.load_state(saved_state), data
    index = ExpertIndex(*next(iter(full.values())).shape[:2])
    saved = SavedExperts(checkpoints.folder_of(step), {name: tuple(w.shape[2:]) for name, w in full.items()}, index)
    if not experts_of(shape.params):  # experts are no part of the state
        linked = saved.kinds == LINKED and _keeps_records(trainer, saved)
        rest, data, _ = checkpoints.restore(step, shape, but=names_of_experts(checkpoints.arrays(step)), records=linked)
        return trainer.load_state(rest, *((None, None) if linked else (saved.weights, saved.moments))), data
    weights, moments = "weights" in saved.kinds, "moments" in saved.kinds
    wanted = replace(
        shape,
        params=without_experts(shape.params) if weights else shape.params,
        m=without_experts(shape.m) if moments else shape.m,
        v=without_experts(shape.v) if moments else shape.v,
    )
    rest, data, _ = checkpoints.restore(step, wanted)
    return trainer.load_state(rest, saved.weights if weights else None, saved.moments if moments else None), data


def _keeps_records(trainer: Trainer, saved: SavedExperts) -> bool:
    """Return whether the run keeps its experts as they were saved, so that they are as far behind as before."""
    records = trainer.records
    if records is None or not records.stores.keys() >= LINKED:
        return False
    return saved.laziness is None or saved.laziness.settings.items() <= records.settings.items()
