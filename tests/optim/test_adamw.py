"""AdamW is optax's; missed steps replayed later give the bits of taking every step.

Legend: T steps of the schedule, W of a call.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jmoe.config import OptimizerConfig
from jmoe.mesh import path_names
from jmoe.models.decoder import Decoder
from jmoe.optim.adamw import MissedSteps, StepValues, advance, catch_up, decays, learning_rate
from tests.model_configs import MODEL

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


@pytest.mark.parametrize(("shape", "path"), [((3, 4), ("moe_layers", "w")), ((4,), ("norm", "scale"))])
def test_advance_is_optax_adamw(shape: tuple[int, ...], path: tuple[str, ...]) -> None:
    config = OptimizerConfig(warmup_steps=0, schedule="constant", learning_rate=0.01)
    rng = np.random.default_rng(0)
    keys = tuple(jax.tree_util.DictKey(name) for name in path)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    m, v = jnp.zeros(shape), jnp.zeros(shape)
    decay = decays(keys, jnp.zeros((2, *shape)) if path[0] == "moe_layers" else w)
    assert decay == (len(shape) == 2)
    theirs = optax.adamw(0.01, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay * decay)
    w2, s2 = w, theirs.init(w)
    update = jax.jit(
        lambda w, m, v, g, step, ok: advance(
            w, m, v, g, config=config, decay=decay, now=StepValues(jnp.float32(0.01), step, jnp.float32(0.5), ok)
        )
    )
    for i in range(5):
        g = jnp.asarray(rng.normal(size=shape), jnp.float32)
        kept = update(w, m, v, g, jnp.int32(i), jnp.bool_(False))
        for a, b in zip(kept, (w, m, v), strict=True):
            np.testing.assert_array_equal(a, b)
        w, m, v = update(w, m, v, g, jnp.int32(i), jnp.bool_(True))
        with jax.numpy_dtype_promotion("standard"):  # optax itself mixes dtypes
            u, s2 = theirs.update(0.5 * g, s2, w2)
        w2 = optax.apply_updates(w2, u)
        np.testing.assert_allclose(w, w2, rtol=1e-5, atol=1e-7)


def test_what_decays() -> None:
    biased = dataclasses.replace(MODEL, attention_bias=True, mlp_bias=True, norm="layernorm")
    for config, names in ((MODEL, {"scale"}), (biased, {"scale", "bias", "b_qkv", "b_out", "b_up", "b_down"})):
        model = nnx.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0)))
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        assert {path_names(path)[-1] for path, w in leaves if not decays(path, w)} == names


def test_learning_rate() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_learning_rate_fraction=0.1)
    rates = [float(learning_rate(config, 24)(float(i))) for i in range(30)]
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)  # the first step already learns
    assert rates[4] == pytest.approx(1.0) and rates[14] == pytest.approx(0.55)
    np.testing.assert_allclose(rates[24:], 0.1, rtol=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    constant = learning_rate(dataclasses.replace(config, schedule="constant", warmup_steps=0), 24)
    assert [float(constant(i)) for i in (0.0, 10.0, 40.0)] == [1.0, 1.0, 1.0]
    assert float(learning_rate(dataclasses.replace(config, warmup_steps=1), 24)(0.0)) == 1.0
