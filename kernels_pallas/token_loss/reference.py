"""Cross-entropy and the gradient of its logits in plain XLA, in several passes over the logits.

Legend: C tokens of a chunk, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


class LossGradients(NamedTuple):
    """dlogits_CV: the gradient of the logits of the weighted loss. nll_C: float32, the negative
    log-likelihood of each label.
    """

    dlogits_CV: jax.Array
    nll_C: jax.Array


class SoftmaxTerms(NamedTuple):
    """A chunk's softmax before division: exp(logits - top), the largest logit, the sum of exp, and
    the logit of the label, 0 for a label outside the vocabulary.
    """

    exp_CV: jax.Array
    top_C1: jax.Array
    total_C1: jax.Array
    label_logit_C: jax.Array


def softmax_terms(logits_CV: jax.Array, labels_C: jax.Array) -> SoftmaxTerms:
    """Return the terms of the softmax and of the labels' log-likelihood."""
    num_logits = logits_CV.shape[1]
    top_C1 = lax.stop_gradient(logits_CV.max(axis=-1, keepdims=True))
    exp_CV = jnp.exp(logits_CV - top_C1)
    total_C1 = exp_CV.sum(axis=-1, keepdims=True)
    # a negative index would count from the end
    own_C = jnp.where(labels_C < 0, num_logits, labels_C)
    label_logit_C = jnp.take_along_axis(
        logits_CV, own_C[:, None], axis=-1, mode="fill", fill_value=0
    )[:, 0]
    return SoftmaxTerms(exp_CV, top_C1, total_C1, label_logit_C)


def softmax_and_nll(logits_CV: jax.Array, labels_C: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (softmax [C, V], negative log-likelihood [C])."""
    exp_CV, top_C1, total_C1, label_logit_C = softmax_terms(logits_CV, labels_C)
    return exp_CV / total_C1, (top_C1 + jnp.log(total_C1))[:, 0] - label_logit_C


def gradient_of_softmax(
    p_CV: jax.Array, labels_C: jax.Array, weights_C: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the gradient of the logits, in `dtype`, from their softmax."""
    label_CV = labels_C[:, None] == jnp.arange(p_CV.shape[1], dtype=labels_C.dtype)
    return ((p_CV - label_CV.astype(jnp.float32)) * weights_C[:, None]).astype(dtype)


def loss_gradients(
    logits_CV: jax.Array, labels_C: jax.Array, weights_C: jax.Array, dtype: DTypeLike
) -> LossGradients:
    """Return `token_loss.api`'s result."""
    p_CV, nll_C = softmax_and_nll(logits_CV, labels_C)
    return LossGradients(gradient_of_softmax(p_CV, labels_C, weights_C, dtype), nll_C)
