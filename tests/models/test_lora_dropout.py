"""LoRA's weights in training: an adapter of dropped inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.layers.experts import affine
from jmoe.models.lora import DropoutAdaptedParam, weight_change

SPANS = ((0, 3), (3, 5))


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_dropped_products_have_the_mean_of_the_sum() -> None:
    """Over many masks, each of which drops the tensors' inputs apart."""
    x, w, adapter = (
        normal(0, 2, 6),
        normal(1, 6, 5),
        {"a": normal(2, 2, 6, 4), "b": normal(3, 4, 5)},
    )

    def product(key: jax.Array, dropout: float) -> jax.Array:
        options = {"adapter": adapter, "spans": SPANS, "scale": 0.5, "dropout": dropout}
        return affine(x, DropoutAdaptedParam(w, **options, key=key))

    keys = jax.random.split(jax.random.key(0), 20_000)
    expected = x @ (w + weight_change(adapter, SPANS, 0.5))
    np.testing.assert_allclose(product(keys[0], 0.0), expected, atol=1e-4)
    dropped = jax.vmap(lambda key: product(key, 0.25))(keys)
    error = dropped.std(axis=0) / np.sqrt(len(keys))
    assert (jnp.abs(dropped.mean(axis=0) - expected) < 5 * error).all()
    assert (dropped.std(axis=0) > 0.05).all()
    apart = np.corrcoef(np.asarray(dropped[:, 0, :]).T)
    assert abs(apart[0, 3]) < 0.05  # masks of two tensors
