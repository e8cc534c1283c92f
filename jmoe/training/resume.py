"""Restore a checkpoint's step into a trainer, whichever tiers held its experts then and hold them
now.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import jax

from jmoe.config import EXPERT_STACKS, ModelConfig
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.saved_experts import SavedExperts, expert_array_names
from jmoe.optim.loss_scale import initial_loss_scale
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.state import TrainState, experts_of, without_experts
from jmoe.training.streamed.experts import StreamedExperts
from jmoe.training.trainer import Trainer
from jmoe.types import PyTree

# the kinds of records that a run needs to take over a checkpoint's experts unread
LINKED = {"weights", "moments"}


def open_saved_experts(
    model: ModelConfig, full_shape: TrainState, folder: Path
) -> SavedExperts | None:
    """Return the experts stored in the checkpoint folder of one step; None for a model without
    experts.

    full_shape: the shapes of a training state that includes all experts.
    """
    shapes = [
        experts for stack in EXPERT_STACKS if (experts := experts_of(full_shape.params, stack))
    ]
    if not shapes:
        return None
    of_expert = {name: tuple(w.shape[2:]) for name, w in shapes[0].items()}
    return SavedExperts(folder, of_expert, ExpertIndex.from_model(model), model.expert_layers)


def restore_checkpoint(
    trainer: Trainer, checkpoints: Checkpoints, step: int
) -> tuple[TrainState, PyTree]:
    """Return (training state, data iterator state) of checkpoint `step`.

    If the run keeps its experts as records that are compatible with the checkpoint's, the
    checkpoint's record versions become the current ones and no expert is read.
    """
    shape = trainer.saved_shape
    saved = open_saved_experts(
        trainer.config.model, trainer.full_shape, checkpoints.step_folder(step)
    )
    if saved is None:
        saved_state, data = _restore_state_and_data(trainer, checkpoints, step, shape)
        return trainer.restore_state(saved_state), data
    # the run streams its experts, which are not part of the state
    if not any(experts_of(shape.params, stack) for stack in EXPERT_STACKS):
        linked = saved.kinds == LINKED and _can_reuse_records(trainer, saved)
        experts = expert_array_names(checkpoints.array_names(step))
        if isinstance(trainer, StreamedExperts):
            trainer.stop_expert_threads()
        rest, data = _restore_state_and_data(
            trainer, checkpoints, step, shape, skipped_arrays=experts, records=linked
        )
        return trainer.restore_state(
            rest, *((None, None) if linked else (saved.read_weights, saved.read_moments))
        ), data
    weights, moments = "weights" in saved.kinds, "moments" in saved.kinds
    wanted = replace(
        shape,
        params=without_experts(shape.params) if weights else shape.params,
        m=without_experts(shape.m) if moments else shape.m,
        v=without_experts(shape.v) if moments else shape.v,
    )
    rest, data = _restore_state_and_data(trainer, checkpoints, step, wanted)
    return trainer.restore_state(
        rest, saved.read_weights if weights else None, saved.read_moments if moments else None
    ), data


def _restore_state_and_data(
    trainer: Trainer,
    checkpoints: Checkpoints,
    step: int,
    shape: TrainState,
    skipped_arrays: Collection[str] = (),
    **options: PyTree,
) -> tuple[TrainState, PyTree]:
    """Return (saved state, data iterator state).

    The loss scale is ignored if the run no longer computes in float16, and starts anew if the
    checkpoint has none.
    """
    scaling = [name for name in checkpoints.array_names(step) if name.startswith("loss_scale.")]
    if scaling and shape.loss_scale is None:
        skipped_arrays = [*skipped_arrays, *scaling]
    wanted = shape if scaling else replace(shape, loss_scale=None)
    state, data, _ = checkpoints.restore(step, wanted, skipped_arrays=skipped_arrays, **options)
    if shape.loss_scale is not None and not scaling:
        first = initial_loss_scale(trainer.config)
        first = jax.tree.map(
            lambda x, place: jax.device_put(x, place.sharding), first, shape.loss_scale
        )
        state = replace(state, loss_scale=first)
    return state, data


def _can_reuse_records(trainer: Trainer, saved: SavedExperts) -> bool:
    """Return whether the run can take over the checkpoint's records unread, with the gradients and
    optimizer steps that its experts still lack: it keeps weights and moments as records on NVMe,
    with the same AdamW constants and gradient dtype.
    """
    records = trainer.records
    if records is None or not records.stores.keys() >= LINKED:
        return False
    return (
        saved.replay_state is None
        or saved.replay_state.settings.items() <= records.settings.items()
    )
