"""Exact lazy AdamW: how far experts on lower tiers are behind, and `catch_up`, which replays the
steps they missed.

Legend: W steps of one call of the program.

A record stands at the step it was last updated; its gradient, and the steps that came after without
one, are applied when it is wanted. A checkpoint saves records as they stand, with `ReplayState`
beside them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from jmoe.config import OptimizerConfig
from jmoe.optim.adamw import StepValues, advance

WINDOW_STEPS = 64  # steps taken by one call of the program
NO_GRADIENT = -1
CONSTANTS = ("beta1", "beta2", "eps", "weight_decay")

Params = Mapping[str, NDArray[Any]]  # an expert's parameters by name, or one kind of their state


class MissedSteps(NamedTuple):
    """Steps of one expert that are taken together: `num_steps` from `step` on.

    clip: the factor of the gradient. gradient_at: which of them has one, 0 ... num_steps - 1, or -1
    for none. lr_W: learning rates of the steps from `step` on, float32 [W >= num_steps].
    """

    clip: Any
    gradient_at: Any
    lr_W: Any
    num_steps: Any
    step: Any


def catch_up(
    w: Mapping[str, jax.Array],
    m: Mapping[str, jax.Array],
    v: Mapping[str, jax.Array],
    g: Mapping[str, jax.Array],
    missed: MissedSteps,
    *,
    config: OptimizerConfig,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]:
    """Take the missed AdamW steps of an expert's parameters by name; g: the gradient of step
    `missed.gradient_at`.

    The other gradients are 0, since no token came to the expert: dense AdamW decays its moments and
    moves its weights all the same. Weight decay applies to matrices. One loop body serves every
    number of steps, so that missed steps replayed later give the bits that taking them one by one
    gives (two programs of the same formula differ by
    rounding: what is contracted to fused multiply-adds is the compiler's choice).
    """

    def one(i: jax.Array, state: Any) -> Any:
        w, m, v = state
        lr = lax.dynamic_index_in_dim(missed.lr_W, i, 0, keepdims=False)
        now = StepValues(lr, missed.step + i, missed.clip, jnp.bool_(True))
        grads = {
            name: jnp.where(i == missed.gradient_at, g[name].astype(jnp.float32), 0) for name in w
        }
        new = {
            n: advance(w[n], m[n], v[n], grads[n], config=config, decay=w[n].ndim >= 2, now=now)
            for n in w
        }
        return tuple({name: moved[part] for name, moved in new.items()} for part in range(3))

    result: tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array]]
    result = lax.fori_loop(0, missed.num_steps, one, (dict(w), dict(m), dict(v)))
    return result


_catch_up_alone = jax.jit(catch_up, static_argnames="config")


class History:
    """Learning rates and clip factors of the steps from `first` on, as float32 has them."""

    def __init__(self, first: int, lr: Iterable[float] = (), clip: Iterable[float] = ()) -> None:
        self.first, self.lr, self.clip = first, list(lr), list(clip)

    @property
    def end(self) -> int:
        return self.first + len(self.lr)

    def add(self, lr: float, clip: float) -> None:
        self.lr.append(lr)
        self.clip.append(clip)

    def copy(self) -> "History":
        return History(self.first, self.lr, self.clip)

    def forget_before(self, step: int) -> None:
        assert self.first <= step <= self.end, (self.first, step, self.end)
        del self.lr[: step - self.first]
        del self.clip[: step - self.first]
        self.first = step

    def windows(self, steps: range, *, pending: bool) -> Iterator[MissedSteps]:
        """Give what `catch_up` takes besides arrays, call by call; pending: the first step has a
        gradient.
        """
        assert self.first <= steps.start and steps.stop <= self.end, (self.first, steps, self.end)
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


def constants(config: OptimizerConfig) -> OptimizerConfig:
    """Return AdamW's constants alone."""
    return OptimizerConfig(**{name: getattr(config, name) for name in CONSTANTS})


@dataclass(frozen=True)
class ReplayState:
    """Says how far the records of a checkpoint of `step` are behind.

    history: of the steps from that of the oldest record on. applied: steps that a record has behind
    it, where those are fewer than `step`. pending: records whose gradient waits; it is that of step
    `applied[record]`. optimizer: AdamW's constants in those steps, nothing else. gradient_dtype: of
    the gradients that wait.
    """

    step: int
    history: History
    applied: Mapping[int, int]
    pending: frozenset[int]
    optimizer: OptimizerConfig
    gradient_dtype: str

    @classmethod
    def up_to_date(cls, step: int, optimizer: OptimizerConfig, gradient_dtype: str) -> Self:
        """Return the replay state of records that are not behind."""
        return cls(step, History(step), {}, frozenset(), constants(optimizer), gradient_dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """Return what has to be as it was for the steps that are missed and the gradients that
        wait.
        """
        values = {name: getattr(self.optimizer, name) for name in CONSTANTS}
        return {"optimizer": values, "gradient_dtype": self.gradient_dtype}

    def to_json(self) -> dict[str, Any]:
        """Return what is saved beside the list of a process's records, which names those whose
        gradient waits.
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
    def from_lists(cls, lists: Iterable[Mapping[str, Any]]) -> Self | None:
        """Read what all processes have listed of a checkpoint's records; None where all of them
        are up to date.
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
            history=History(longest["first"], longest["lr"], longest["clip"]),
            applied={
                int(index): step for beside in besides for index, step in beside["applied"].items()
            },
            pending=frozenset(pending),
            optimizer=OptimizerConfig(**longest["optimizer"]),
            gradient_dtype=longest["gradient_dtype"],
        )

    def select(self, indices: Iterable[int]) -> "ReplayState":
        """Return the replay state of these records only."""
        mine = frozenset(indices)
        applied = {index: step for index, step in self.applied.items() if index in mine}
        return replace(
            self, history=self.history.copy(), applied=applied, pending=self.pending & mine
        )

    def catch_up(
        self, index: int, w: Params, m: Params, v: Params, g: Params | None
    ) -> tuple[Params, Params, Params]:
        """Return a record's weights and moments at `step`, from those in the checkpoint: the bits
        that the run has.

        g: its gradient, where it is pending, else None.
        """
        assert (g is not None) == (index in self.pending), index
        steps = range(self.applied.get(index, self.step), self.step)
        if g is None:
            g = {name: np.zeros(a.shape, a.dtype) for name, a in w.items()}
        for window in self.history.windows(steps, pending=index in self.pending):
            w, m, v = _catch_up_alone(w, m, v, g, window, config=self.optimizer)
        return jax.device_get((w, m, v))
