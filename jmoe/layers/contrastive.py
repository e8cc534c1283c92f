"""Supervised contrastive learning (arXiv:2004.11362): images of a class come together, those of
others go apart.

Legend: G images of all tasks, C features of an embedding, K classes of all tasks.
"""

import jax
import jax.numpy as jnp
from jax import lax

_TINY = 1e-12  # keeps the length of an embedding of zeros from being divided by


def unit(x_GC: jax.Array) -> jax.Array:
    """Return float32 embeddings of length 1; zeros stay zeros."""
    x_GC = x_GC.astype(jnp.float32)
    return x_GC * lax.rsqrt(jnp.square(x_GC).sum(axis=-1, keepdims=True) + _TINY)


def contrastive_losses(
    z_GC: jax.Array,
    task_G: jax.Array,
    label_G: jax.Array,
    weight_G: jax.Array,
    temperature_G: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (the loss of each image in nats [G], 1.0 where the nearest other image is of its class
    [G]).

    Every other image of an image's task is compared with it: the loss is the mean, over those of
    its class, of the negative logarithm of softmax(cosine / temperature). Without another of its
    class it is 0. z: of length 1. weight: 0 for rows that only fill up. The order of the rows
    changes nothing but the order in which floats are added.
    """
    counts_G = weight_G > 0
    others_GG = (
        (task_G[:, None] == task_G)
        & counts_G[:, None]
        & counts_G
        & ~jnp.eye(len(task_G), dtype=bool)
    )
    same_GG = others_GG & (label_G[:, None] == label_G)
    cosine_GG = jnp.dot(z_GC, z_GC.T, precision=lax.Precision.HIGHEST) / temperature_G[:, None]
    compared_GG = jnp.where(others_GG, cosine_GG, -jnp.inf)
    # Rows without anything to compare with would make nan, also in gradients.
    some_G = same_GG.any(axis=1)
    log_sum_G = jax.nn.logsumexp(jnp.where(some_G[:, None], compared_GG, 0.0), axis=1)
    log_p_GG = jnp.where(same_GG, cosine_GG - log_sum_G[:, None], 0.0)
    loss_G = -log_p_GG.sum(axis=1) / jnp.maximum(same_GG.sum(axis=1, dtype=jnp.int32), 1).astype(
        jnp.float32
    )
    nearest_G = jnp.argmax(compared_GG, axis=1)
    is_right_G = jnp.take_along_axis(same_GG, nearest_G[:, None], axis=1)[:, 0]
    return loss_G, is_right_G.astype(jnp.float32)


def similarities(z_GC: jax.Array, means_KC: jax.Array, temperature_G: jax.Array) -> jax.Array:
    """Return [G, K], the cosine of each embedding and each class's mean, over the temperature:
    logits of classes.
    """
    return jnp.dot(z_GC, unit(means_KC).T, precision=lax.Precision.HIGHEST) / temperature_G[:, None]
