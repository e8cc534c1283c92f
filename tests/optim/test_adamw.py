"""AdamW and its schedule: optax's, to rounding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jmoe.config import OptimizerConfig
from jmoe.mesh import path_names
from jmoe.models.decoder import Decoder
from jmoe.optim.adamw import OptimizerStepScalars, adamw_update, has_weight_decay
from jmoe.optim.learning_rate import learning_rate_schedule
from tests.model_configs import MODEL


@pytest.mark.parametrize(
    ("shape", "path"), [((3, 4), ("moe_layers", "w")), ((4,), ("norm", "scale"))]
)
def test_advance_is_optax_adamw(shape: tuple[int, ...], path: tuple[str, ...]) -> None:
    config = OptimizerConfig(warmup_steps=0, schedule="constant", learning_rate=0.01)
    rng = np.random.default_rng(0)
    keys = tuple(jax.tree_util.DictKey(name) for name in path)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    m, v = jnp.zeros(shape), jnp.zeros(shape)
    decay = has_weight_decay(keys, jnp.zeros((2, *shape)) if path[0] == "moe_layers" else w)
    assert decay == (len(shape) == 2)
    theirs = optax.adamw(
        0.01, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay * decay
    )
    w2, s2 = w, theirs.init(w)
    update = jax.jit(
        lambda w, m, v, g, step, ok: adamw_update(
            w,
            m,
            v,
            g,
            config=config,
            decay=decay,
            step_scalars=OptimizerStepScalars(jnp.float32(0.01), step, jnp.float32(0.5), ok),
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
    for config, names in (
        (MODEL, {"scale"}),
        (biased, {"scale", "bias", "b_qkv", "b_out", "b_up", "b_down"}),
    ):
        model = nnx.eval_shape(lambda config=config: Decoder(config, rngs=nnx.Rngs(0)))
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        assert {
            path_names(path)[-1] for path, w in leaves if not has_weight_decay(path, w)
        } == names


def test_learning_rate() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_learning_rate_fraction=0.1)
    rates = [float(learning_rate_schedule(config, 24)(float(i))) for i in range(30)]
    # the first step already learns
    np.testing.assert_allclose(rates[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    assert rates[4] == pytest.approx(1.0) and rates[14] == pytest.approx(0.55)
    np.testing.assert_allclose(rates[24:], 0.1, rtol=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    constant = learning_rate_schedule(
        dataclasses.replace(config, schedule="constant", warmup_steps=0), 24
    )
    assert [float(constant(i)) for i in (0.0, 10.0, 40.0)] == [1.0, 1.0, 1.0]
    assert (
        float(learning_rate_schedule(dataclasses.replace(config, warmup_steps=1), 24)(0.0)) == 1.0
    )


def test_warm_up_stable_decay() -> None:
    """Beside the formula of MiniCPM (arXiv 2404.06395) with a linear decay."""
    config = OptimizerConfig(
        learning_rate=2.0, schedule="wsd", warmup_steps=4, final_learning_rate_fraction=0.25
    )
    for own, decay in ((0, 4), (6, 6)):
        at = learning_rate_schedule(dataclasses.replace(config, decay_steps=own), 40)
        low = np.arange(40 - decay, 45)
        falling = 2.0 - 1.5 * np.minimum((low - (40 - decay)) / decay, 1.0)
        expected = [0.5, 1.0, 1.5, *[2.0] * (37 - decay), *falling]
        np.testing.assert_allclose([float(at(float(i))) for i in range(45)], expected, rtol=1e-6)


def test_a_gpu_goes_over_a_parameter_once() -> None:
    """The barrier that a CPU has between moments and weight splits a GPU's fusion in two."""
    arrays = [jnp.ones((4, 4))] * 4
    now = OptimizerStepScalars(jnp.float32(0.01), jnp.int32(0), jnp.float32(1.0), jnp.bool_(True))
    step = jax.jit(
        lambda *a: adamw_update(*a, config=OptimizerConfig(), decay=True, step_scalars=now)
    ).trace(*arrays)
    barriers = [
        step.lower(lowering_platforms=(p,)).as_text().count("optimization_barrier")
        for p in ("cpu", "cuda")
    ]
    assert barriers == [1, 0]
