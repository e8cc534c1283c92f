"""Rotary positions against complex numbers, and the frequencies of each scaling.

`tests/models/test_transformers_oracle.py` compares frequencies and logits with transformers.

Legend: B batch, d head dimension.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import (
    DynamicRopeConfig,
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    NtkAlphaRopeConfig,
    RopeScaling,
    YarnConfig,
)
from jmoe.layers.rotary import apply_rotary, rotary_frequencies

B, d = 2, 16


def test_rotary_is_a_complex_rotation() -> None:
    theta, positions = 10_000.0, np.array([0, 1, 5, 77, 1000])
    x = np.random.default_rng(0).normal(size=(B, positions.size, 3, d))
    turn = np.exp(1j * positions[:, None, None] * theta ** (-2 * np.arange(d // 2) / d))
    rotated = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
    expected = np.concatenate([rotated.real, rotated.imag], axis=-1)
    ours = apply_rotary(jnp.asarray(x, jnp.float32), jnp.asarray(positions), theta)
    # an angle of 1000 has 6e-5 of rounding in float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-4)
    np.testing.assert_allclose(ours[:, :2], expected[:, :2], rtol=1e-5, atol=1e-6)
    assert (
        apply_rotary(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), theta).dtype
        == jnp.bfloat16
    )


def test_rotary_of_neighbouring_pairs() -> None:
    """Interleaved pairs rotate as halves do, and come out as halves."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, 5, 3, d)), jnp.float32)
    halves = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    positions = jnp.arange(5)
    ours = apply_rotary(x, positions, 100.0, interleave=True)
    np.testing.assert_array_equal(ours, apply_rotary(halves, positions, 100.0))
    # positions of each row of the batch
    each = apply_rotary(x, jnp.stack([positions, positions + 3]), 100.0)
    np.testing.assert_array_equal(each[0], apply_rotary(x, positions, 100.0)[0])
    np.testing.assert_array_equal(each[1], apply_rotary(x, positions + 3, 100.0)[1])


def test_yarn_frequencies() -> None:
    """Fast pairs keep their speed, slow ones are slowed by the factor, a ramp lies between
    (arXiv:2309.00071).
    """
    yarn = YarnConfig(
        factor=8.0,
        original_max_position_embeddings=64,
        beta_fast=4.0,
        beta_slow=1.0,
        truncate=False,
    )
    theta, dim = 1000.0, 32
    speed = rotary_frequencies(dim, theta, yarn)
    plain_speed = theta ** (-np.arange(dim // 2) / (dim // 2))
    turns = 64 * plain_speed / (2 * np.pi)  # within the original context
    np.testing.assert_allclose(speed[turns > 4], plain_speed[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(speed[turns < 1], plain_speed[turns < 1] / 8, rtol=1e-6)
    between = speed[(turns < 4) & (turns > 1)] / plain_speed[(turns < 4) & (turns > 1)]
    assert (
        between.size > 2
        and (np.diff(between) < 0).all()
        and (between < 1).all()
        and (between > 1 / 8).all()
    )
    # linear in the pair's index
    np.testing.assert_allclose(np.diff(between), np.diff(between).mean(), rtol=1e-3)
    x = jnp.ones((1, 3, 1, dim))
    ratio = (
        apply_rotary(x, jnp.arange(3), theta, scaling=yarn)[0, 0]
        / apply_rotary(x, jnp.arange(3), theta)[0, 0]
    )
    np.testing.assert_allclose(ratio, 0.1 * np.log(8) + 1, rtol=1e-6)  # position 0 is only scaled


def test_rotary_scores_depend_on_the_distance_only() -> None:
    q, k = (
        jnp.asarray(np.random.default_rng(s).normal(size=(1, 1, 1, d)), jnp.float32) for s in (1, 2)
    )
    at = lambda x, position: apply_rotary(x, jnp.array([position]), 100.0)  # noqa: E731
    near, far = (float((at(q, p + 3) * at(k, p)).sum()) for p in (0, 40))
    assert near == pytest.approx(far, rel=1e-4)
    assert near != pytest.approx(float((at(q, 4) * at(k, 0)).sum()), rel=1e-2)


# ROPE_INIT_FUNCTIONS of transformers 5.24: theta 500000, 32 dimensions
FREQUENCIES: list[tuple[RopeScaling, list[float]]] = [
    (
        LinearRopeConfig(factor=4.0),
        [
            *(0.25, 0.11009166, 0.04848069, 0.021349275, 0.0094015077, 0.0041401102),
            *(0.0018231663, 0.00080286153, 0.00035355336, 0.00015569311, 6.8562047e-05),
            *(3.0192436e-05, 1.3295739e-05, 5.8549995e-06, 2.5783463e-06, 1.1354176e-06),
        ],
    ),
    (
        Llama3RopeConfig(8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        [
            *(1.0, 0.44036663, 0.19392276, 0.085397102, 0.037606031, 0.016560441),
            *(0.0072926651, 0.0032114461, 0.00052484602, 7.7846555e-05, 3.4281024e-05),
            *(1.5096218e-05, 6.6478697e-06, 2.9274997e-06, 1.2891732e-06, 5.6770881e-07),
        ],
    ),
]


@pytest.mark.parametrize(("scaling", "expected"), FREQUENCIES)
def test_frequencies_of_transformers(scaling: RopeScaling, expected: list[float]) -> None:
    found = rotary_frequencies(32, 500_000.0, scaling)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=5e-7)
    x = np.random.default_rng(0).normal(size=(B, 3, 1, 32))
    angle = np.arange(3)[:, None, None] * np.array(expected)
    turned = (x[..., :16] + 1j * x[..., 16:]) * np.exp(1j * angle)
    np.testing.assert_allclose(
        apply_rotary(jnp.asarray(x, jnp.float32), jnp.arange(3), 500_000.0, scaling=scaling),
        np.concatenate([turned.real, turned.imag], axis=-1),
        rtol=0,
        atol=1e-6,
    )


def test_a_form_without_frequencies_is_no_silent_default() -> None:
    with pytest.raises(TypeError, match="RopeScaling has no frequencies"):
        rotary_frequencies(8, 10.0, RopeScaling())


LONGROPE = LongRopeConfig((1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0), 8, factor=2.0)
PLAIN = (1.0, 0.21147424, 0.04472136, 0.00945742)


@pytest.mark.parametrize(
    ("scaling", "length", "expected", "scale"),
    [
        (DynamicRopeConfig(2.0, 16), 16, PLAIN, 1.0),
        (DynamicRopeConfig(2.0, 16), 40, (1.0, 0.13322043, 0.01774768, 0.00236435), 1.0),
        (LONGROPE, 8, (1.0, 0.19224931, 0.0372678, 0.00727494), 1.15470054),
        (LONGROPE, 9, (1.0, 0.10573712, 0.01490712, 0.00236435), 1.15470054),
        (
            NtkAlphaRopeConfig(50.0),
            40,
            (1.0, 5.74029423e-2, 3.29509797e-3, 1.89148312e-4),
            1.0,
        ),
    ],
)
def test_frequencies_that_transformers_computes(
    scaling: RopeScaling, length: int, expected: tuple[float, ...], scale: float
) -> None:
    """For heads of 8 dimensions, theta 500 and sequences of this length."""
    form = scaling.at_length(length)
    np.testing.assert_allclose(rotary_frequencies(8, 500.0, form), expected, rtol=2e-6)
    assert form.rotary_scale == pytest.approx(scale)
    shorter = form.at_length(8)
    assert shorter == scaling
