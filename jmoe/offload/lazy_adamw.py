"""Exact lazy AdamW: replays the optimizer steps that an offloaded expert has skipped.

A record stays at the step of its last update. Its pending gradient, and the later steps without
one, are applied when the record is next used. A checkpoint saves records without updating them, and
beside them a `ReplayState`. `expert_state.py` uses this in training, `saved_experts.py` when it
reads a checkpoint.

Legend:
  W  steps of one call of the compiled program
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmoe.config import OptimizerConfig
from jmoe.optim.adamw import OptimizerStepScalars, adamw_update
from jmoe.types import Json, JsonObject

WINDOW_STEPS = 64  # steps of one call of the compiled program
NO_GRADIENT = -1
CONSTANTS = ("beta1", "beta2", "eps", "weight_decay")

Params = Mapping[str, np.ndarray]  # an expert's parameters, moments or gradients, by parameter
States = tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]  # w, m, v


class MissedSteps(NamedTuple):
    """Consecutive optimizer steps of one expert: `num_steps` steps from step `step` on.

    clip: factor of the gradient. gradient_at: offset of the step that has a gradient, 0 to
    num_steps - 1, or -1 if none has. lr_W: float32 learning rates of the steps, W >= num_steps.
    """

    clip: ArrayLike
    gradient_at: ArrayLike
    lr_W: jax.Array | np.ndarray
    num_steps: ArrayLike
    step: ArrayLike


def catch_up(
    w: Mapping[str, jax.Array],
    m: Mapping[str, jax.Array],
    v: Mapping[str, jax.Array],
    g: Mapping[str, jax.Array],
    missed: MissedSteps,
    *,
    config: OptimizerConfig,
) -> States:
    """Return an expert's (w, m, v), each by parameter name, after the missed AdamW steps.

    g: the gradient of step `missed.step + missed.gradient_at`. The gradient is zero in all other
    steps, because no token reached the expert; dense AdamW still decays the moments and moves the
    weights in those steps. Weight decay applies to matrices.

    One loop body serves any number of steps, so that replayed steps give the same bits as steps
    taken one by one. Two compiled programs of the same formula may differ by rounding, because the
    compiler chooses what to contract to fused multiply-adds.
    """

    def take_step(i: jax.Array, state: States) -> States:
        w, m, v = state
        lr = lax.dynamic_index_in_dim(missed.lr_W, i, 0, keepdims=False)
        now = OptimizerStepScalars(
            lr, jnp.asarray(missed.step) + i, jnp.asarray(missed.clip), jnp.bool_(True)
        )
        grads = {
            name: jnp.where(i == missed.gradient_at, g[name].astype(jnp.float32), 0) for name in w
        }
        new = {
            n: adamw_update(
                w[n], m[n], v[n], grads[n], config=config, decay=w[n].ndim >= 2, step_scalars=now
            )
            for n in w
        }
        w, m, v = ({name: moved[k] for name, moved in new.items()} for k in range(3))
        return w, m, v

    return lax.fori_loop(0, missed.num_steps, take_step, (dict(w), dict(m), dict(v)))


_catch_up_alone = jax.jit(catch_up, static_argnames="config")


def catch_up_arrays(
    w: Params,
    m: Params,
    v: Params,
    g: Params | None,
    windows: Iterable[MissedSteps],
    *,
    config: OptimizerConfig,
) -> tuple[Params, Params, Params]:
    """Return an expert's (w, m, v) on the host after the missed AdamW steps, computed by JAX's
    default device. g: the gradient of the first step; None if it has none.
    """
    if g is None:
        g = {name: np.zeros(a.shape, a.dtype) for name, a in w.items()}
    for window in windows:
        w, m, v = _catch_up_alone(w, m, v, g, window, config=config)
    return jax.device_get((w, m, v))


class StepHistory:
    """Learning rates and clip factors of consecutive steps from `first` on, float32 values."""

    def __init__(self, first: int, lr: Iterable[float] = (), clip: Iterable[float] = ()) -> None:
        self.first, self.lr, self.clip = first, list(lr), list(clip)

    @property
    def end_step(self) -> int:
        """Return the step after the last one in the history."""
        return self.first + len(self.lr)

    def add_step(self, lr: float, clip: float) -> None:
        """Append the learning rate and clip factor of step `end_step`."""
        self.lr.append(lr)
        self.clip.append(clip)

    def copy(self) -> "StepHistory":
        return StepHistory(self.first, self.lr, self.clip)

    def forget_before(self, step: int) -> None:
        """Drop the steps before `step`, which must lie in the history or at its end."""
        assert self.first <= step <= self.end_step, (self.first, step, self.end_step)
        del self.lr[: step - self.first]
        del self.clip[: step - self.first]
        self.first = step

    def missed_windows(self, steps: range, *, pending: bool) -> Iterator[MissedSteps]:
        """Yield the steps in windows of at most `WINDOW_STEPS`, as `catch_up` takes them.

        steps: must lie within the history. pending: whether the first step has a gradient.
        """
        assert self.first <= steps.start and steps.stop <= self.end_step, (
            self.first,
            steps,
            self.end_step,
        )
        for first in range(steps.start, steps.stop, WINDOW_STEPS):
            count = min(WINDOW_STEPS, steps.stop - first)
            lr_W = np.zeros(WINDOW_STEPS, np.float32)
            lr_W[:count] = self.lr[first - self.first : first - self.first + count]
            yield MissedSteps(
                clip=np.float32(self.clip[first - self.first]),
                gradient_at=np.int32(0 if pending and first == steps.start else NO_GRADIENT),
                lr_W=lr_W,
                num_steps=np.int32(count),
                step=np.int32(first),
            )


def adamw_constants(config: OptimizerConfig) -> OptimizerConfig:
    """Return a config that holds only AdamW's constants (`CONSTANTS`); other fields have their
    defaults.
    """
    return OptimizerConfig(**{name: getattr(config, name) for name in CONSTANTS})


@dataclass(frozen=True)
class ReplayState:
    """Says how many optimizer steps the records of a checkpoint at step `step` have skipped.

    history: learning rates and clip factors since the oldest skipped step. applied: the number of
    steps applied to a record, for records with fewer than `step`. pending: records with a gradient
    that is not applied yet; it belongs to step `applied[record]`. optimizer: AdamW's constants of
    the skipped steps. gradient_dtype: dtype of the pending gradients.
    """

    step: int
    history: StepHistory
    applied: Mapping[int, int]
    pending: frozenset[int]
    optimizer: OptimizerConfig
    gradient_dtype: str

    @classmethod
    def up_to_date(cls, step: int, optimizer: OptimizerConfig, gradient_dtype: str) -> Self:
        """Return the replay state of records that have skipped no step."""
        return cls(
            step, StepHistory(step), {}, frozenset(), adamw_constants(optimizer), gradient_dtype
        )

    @property
    def settings(self) -> JsonObject:
        """Return the settings that a resumed run must not change: AdamW's constants and the
        gradient dtype.
        """
        values = {name: getattr(self.optimizer, name) for name in CONSTANTS}
        return {"optimizer": values, "gradient_dtype": self.gradient_dtype}

    def to_json(self) -> JsonObject:
        """Return the JSON object saved beside a process's list of records.

        `pending` is left out: the list itself names the gradient records.
        """
        return {
            "step": self.step,
            "first": self.history.first,
            "lr": self.history.lr,
            "clip": self.history.clip,
            "applied": {str(index): step for index, step in self.applied.items()},
            **self.settings,
        }

    @classmethod
    def from_record_lists(cls, lists: Iterable[Mapping[str, Json]]) -> Self | None:
        """Return the replay state of all processes' lists of a checkpoint; None if every record is
        up to date.
        """
        besides, pending = [], set[int]()
        for listed in lists:
            if listed.get("beside"):
                besides.append(listed["beside"])
                pending.update(
                    int(name.partition(".")[0]) for name in listed["versions"].get("gradients", [])
                )
        if not besides:
            return None
        longest = min(besides, key=lambda beside: beside["first"])
        return cls(
            step=longest["step"],
            history=StepHistory(longest["first"], longest["lr"], longest["clip"]),
            applied={
                int(index): step for beside in besides for index, step in beside["applied"].items()
            },
            pending=frozenset(pending),
            optimizer=OptimizerConfig(**longest["optimizer"]),
            gradient_dtype=longest["gradient_dtype"],
        )

    def select_records(self, indices: Iterable[int]) -> "ReplayState":
        """Return the replay state of these records only."""
        mine = frozenset(indices)
        applied = {index: step for index, step in self.applied.items() if index in mine}
        return replace(
            self, history=self.history.copy(), applied=applied, pending=self.pending & mine
        )

    def catch_up(
        self, index: int, w: Params, m: Params, v: Params, g: Params | None
    ) -> tuple[Params, Params, Params]:
        """Return (weights, first moments, second moments) of a record at step `step`.

        w, m, v: the record's arrays in the checkpoint. g: the record's pending gradient, None if it
        has none. The result has the same bits as the training run would have.
        """
        assert (g is not None) == (index in self.pending), index
        steps = range(self.applied.get(index, self.step), self.step)
        windows = self.history.missed_windows(steps, pending=index in self.pending)
        return catch_up_arrays(w, m, v, g, windows, config=self.optimizer)
