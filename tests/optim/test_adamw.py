"""Missed AdamW steps replayed later: the bits of taking every step, and optax's numbers.

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
from jmoe.optim.adamw import MissedSteps, catch_up, learning_rate

T, W = 40, 64
SHAPES = [{"w_up": (7, 13), "w_down": (5, 3), "b_up": (11,)}, {"w_up": (16, 64), "w_down": (32, 16)}]
CONFIG = OptimizerConfig(learning_rate=0.03, warmup_steps=5, weight_decay=0.2, clip_norm=0.5)


def state(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(
    lr_T: np.ndarray,
    shapes: dict[str, tuple[int, ...]],
    gradients: dict[int, Any],
    clips: np.ndarray,
    *,
    lazy: bool,
) -> Any:
    """(w, m, v) after T steps with these gradients at some of them; lazy: nothing is done between two of them."""
    decay = {name: len(shape) >= 2 for name, shape in shapes.items()}
    update = jax.jit(partial(catch_up, config=CONFIG, decay=decay))
    none = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    w, m, v = state(shapes, 0), dict(none), dict(none)
    step = 0
    while step < T:
        later = [t for t in gradients if t > step] if lazy else [step + 1]
        until = min(later, default=T)
        lr_W = np.zeros(W, np.float32)
        lr_W[: until - step] = lr_T[step:until]
        missed = MissedSteps(
            clip=clips[step],
            gradient_at=np.int32(0 if step in gradients else -1),
            lr_W=lr_W,
            num_steps=np.int32(until - step),
            step=np.int32(step),
        )
        w, m, v = update(w, m, v, gradients.get(step, none), missed)
        step = until
    return jax.device_get((w, m, v))


def schedule() -> np.ndarray:
    at = learning_rate(CONFIG, T)
    return np.array([at(jnp.float32(t)) for t in range(T)], np.float32)


def equal(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return all(x.tobytes() == y.tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_lazy_is_dense_bit_for_bit(shapes: dict[str, tuple[int, ...]], scale: float) -> None:
    lr_T = schedule() * np.float32(scale)
    gradients = {t: state(shapes, 1 + t) for t in (0, 1, 7, 8, 30)}
    clips = np.random.default_rng(9).uniform(0.1, 1.0, T).astype(np.float32)
    dense, lazy = (run(lr_T, shapes, gradients, clips, lazy=lazy) for lazy in (False, True))
    assert equal(dense, lazy)
    moved = not equal(dense[0], state(shapes, 0))
    assert moved == bool(scale)


def test_an_expert_without_a_gradient_still_moves() -> None:
    shapes = SHAPES[0]
    one, none = (
        run(schedule(), shapes, {0: state(shapes, 1)} if with_one else {}, np.ones(T, np.float32), lazy=True)
        for with_one in (True, False)
    )
    assert not equal(one[0], none[0])
    assert not np.array_equal(none[0]["w_up"], state(shapes, 0)["w_up"])  # weight decay
    assert np.array_equal(none[0]["b_up"], state(shapes, 0)["b_up"])  # a bias does not decay


def test_it_is_optax_adamw() -> None:
    shapes = SHAPES[1]
    gradients = {t: state(shapes, 1 + t) for t in (0, 1, 7, 8, 30)}
    clips = np.random.default_rng(9).uniform(0.1, 1.0, T).astype(np.float32)
    w, _, _ = run(schedule(), shapes, gradients, clips, lazy=True)
    adamw = optax.adamw(
        learning_rate(CONFIG, T),
        b1=CONFIG.beta1,
        b2=CONFIG.beta2,
        eps=CONFIG.eps,
        weight_decay=CONFIG.weight_decay,
        mask={name: len(shape) >= 2 for name, shape in shapes.items()},
    )
    params = jax.tree.map(jnp.asarray, state(shapes, 0))
    memory = adamw.init(params)
    with jax.numpy_dtype_promotion("standard"):  # what optax needs
        for t in range(T):
            g = gradients.get(t, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
            updates, memory = adamw.update({name: jnp.asarray(a * clips[t]) for name, a in g.items()}, memory, params)
            params = optax.apply_updates(params, updates)
    for name, expected in jax.device_get(params).items():
        np.testing.assert_allclose(w[name], expected, rtol=1e-5, atol=1e-6)
