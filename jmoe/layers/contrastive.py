"""Supervised contrastive learning (arXiv:2004.11362): embeddings of one class move together, those
of different classes apart.

`training/tasks/losses.py` computes image tasks' losses with these functions.

Legend: G images of all tasks, C features of an embedding, K classes of all tasks.
"""

import jax
import jax.numpy as jnp
from jax import lax

_TINY = 1e-12  # an embedding of zeros is not divided by its length 0


def l2_normalized(x_GC: jax.Array) -> jax.Array:
    """Return the embeddings scaled to length 1, in float32; embeddings of zeros stay zeros."""
    x_GC = x_GC.astype(jnp.float32)
    return x_GC * lax.rsqrt(jnp.square(x_GC).sum(axis=-1, keepdims=True) + _TINY)


def contrastive_losses(
    z_GC: jax.Array,
    task_G: jax.Array,
    label_G: jax.Array,
    weight_G: jax.Array,
    temperature_G: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (float32 [G] loss of each image in nats, float32 [G] hits).

    An image is compared with every other image of its task. Its loss is the mean, over the other
    images of its class, of -log softmax(cosine / temperature); an image that is the only one of its
    class has loss 0. A hit is 1.0 if the most similar image has the same class, else 0.0.

    z_GC: embeddings of length 1. weight_G: 0 for padding rows, which are compared with nothing. A
    permutation of the rows permutes the results, up to the rounding of float sums.
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
    # A row with nothing to compare with would give NaN, also in the gradients.
    some_G = same_GG.any(axis=1)
    log_sum_G = jax.nn.logsumexp(jnp.where(some_G[:, None], compared_GG, 0.0), axis=1)
    log_p_GG = jnp.where(same_GG, cosine_GG - log_sum_G[:, None], 0.0)
    loss_G = -log_p_GG.sum(axis=1) / jnp.maximum(same_GG.sum(axis=1, dtype=jnp.int32), 1).astype(
        jnp.float32
    )
    nearest_G = jnp.argmax(compared_GG, axis=1)
    is_right_G = jnp.take_along_axis(same_GG, nearest_G[:, None], axis=1)[:, 0]
    return loss_G, is_right_G.astype(jnp.float32)


def cosine_class_logits(
    z_GC: jax.Array, means_KC: jax.Array, temperature_G: jax.Array
) -> jax.Array:
    """Return float32 [G, K]: the cosine of each embedding and each class mean, divided
    by the embedding's temperature.
    """
    cosine_GK = jnp.dot(z_GC, l2_normalized(means_KC).T, precision=lax.Precision.HIGHEST)
    return cosine_GK / temperature_G[:, None]
