"""Missed AdamW steps replayed later give the bits of taking every step.

Legend: T steps of the schedule, W of a call.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jmoe.config import OptimizerConfig
from jmoe.offload.lazy_adamw import StepHistory, catch_up
from jmoe.optim.learning_rate import learning_rate_schedule
from tests.arrays import differing

T = 80  # more than one call takes
SHAPES = [
    {"w_up": (7, 13), "w_down": (5, 3), "b_up": (11,)},
    {"w_up": (16, 64), "w_down": (32, 16)},
]
CONFIG = OptimizerConfig(learning_rate=0.03, warmup_steps=5, weight_decay=0.2, clip_norm=0.5)
UPDATE = jax.jit(partial(catch_up, config=CONFIG))
Arrays = dict[str, np.ndarray]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def schedule() -> np.ndarray:
    at = learning_rate_schedule(CONFIG, T)
    return np.array([at(jnp.float32(t)) for t in range(T)], np.float32)


def run(
    lr_T: np.ndarray,
    shapes: dict[str, tuple[int, ...]],
    gradients: dict[int, Arrays],
    *,
    lazy: bool,
) -> Any:
    """(w, m, v) after T steps with these gradients at some of them; lazy: nothing is done
    between two of them.
    """
    none = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    w, m, v = drawn(shapes, 0), dict(none), dict(none)
    history = StepHistory(0, lr_T, clips())
    starts = sorted({0, *gradients}) if lazy else range(T)
    for start, until in zip(starts, [*starts[1:], T], strict=True):
        for window in history.missed_windows(range(start, until), pending=start in gradients):
            w, m, v = UPDATE(w, m, v, gradients.get(start, none), window)
    return jax.device_get((w, m, v))


def clips() -> np.ndarray:
    return np.random.default_rng(9).uniform(0.1, 1.0, T).astype(np.float32)


def some_gradients(shapes: dict[str, tuple[int, ...]]) -> dict[int, Arrays]:
    return {t: drawn(shapes, 1 + t) for t in (0, 1, 7, 8, 78)}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_lazy_is_dense_bit_for_bit(shapes: dict[str, tuple[int, ...]], scale: float) -> None:
    lr_T = schedule() * np.float32(scale)
    dense, lazy = (run(lr_T, shapes, some_gradients(shapes), lazy=lazy) for lazy in (False, True))
    assert differing(dense, lazy) == []
    assert bool(differing(dense[0], drawn(shapes, 0))) == bool(scale)


def test_an_expert_without_a_gradient_still_moves() -> None:
    shapes = SHAPES[0]
    one, none = (run(schedule(), shapes, found, lazy=True) for found in ({0: drawn(shapes, 1)}, {}))
    assert differing(one[0], none[0])
    moved = differing(none[0], drawn(shapes, 0))
    assert moved == ["['w_down']", "['w_up']"]  # by weight decay, which a bias has none of


def test_it_is_optax_adamw() -> None:
    shapes = SHAPES[1]
    gradients = some_gradients(shapes)
    w, _, _ = run(schedule(), shapes, gradients, lazy=True)
    adamw = optax.adamw(
        learning_rate_schedule(CONFIG, T),
        CONFIG.beta1,
        CONFIG.beta2,
        CONFIG.eps,
        weight_decay=CONFIG.weight_decay,
    )
    params: Any = drawn(shapes, 0)
    memory = adamw.init(params)

    @jax.jit
    def step(params: Any, memory: Any, g: Any) -> tuple[Any, Any]:
        updates, memory = adamw.update(g, memory, params)
        return optax.apply_updates(params, updates), memory

    with jax.numpy_dtype_promotion("standard"):  # what optax needs
        for t in range(T):
            g = gradients.get(
                t, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
            )
            params, memory = step(params, memory, {name: a * clips()[t] for name, a in g.items()})
    for name, expected in jax.device_get(params).items():
        np.testing.assert_allclose(w[name], expected, rtol=1e-5, atol=1e-6)
