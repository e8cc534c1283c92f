"""Next-token cross-entropy that never holds the logits of more than one chunk of tokens.

Legend: T local tokens, C tokens of a chunk, D hidden, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.matmul import dot, transposed

CHUNK_LOGITS = 2**22  # logits of a chunk: 16 MiB in float32


def _chunk(num_tokens: int, vocab_size: int) -> int:
    """Tokens of a chunk: the largest divisor of num_tokens whose logits stay within CHUNK_LOGITS."""
    limit = max(1, CHUNK_LOGITS // vocab_size)
    return next(c for c in range(min(limit, num_tokens), 0, -1) if num_tokens % c == 0)


def _chunks(x_TD: jax.Array, labels_T: jax.Array, weights_T: jax.Array, vocab_size: int) -> tuple[jax.Array, ...]:
    size = _chunk(labels_T.size, vocab_size)
    return tuple(a.reshape(-1, size, *a.shape[1:]) for a in (x_TD, labels_T, weights_T))


def _logits(x_CD: jax.Array, w_DV: jax.Array, labels_C: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(exp(logits - lse), lse, is_label) of a chunk."""
    logits_CV = dot(x_CD, w_DV)
    top_C1 = lax.stop_gradient(logits_CV.max(axis=-1, keepdims=True))
    exp_CV = jnp.exp(logits_CV - top_C1)
    total_C1 = exp_CV.sum(axis=-1, keepdims=True)
    label_CV = labels_C[:, None] == jnp.arange(w_DV.shape[1], dtype=labels_C.dtype)
    label_logit_C = jnp.where(label_CV, logits_CV, 0).sum(axis=-1)
    nll_C = (top_C1 + jnp.log(total_C1))[:, 0] - label_logit_C
    return exp_CV / total_C1, nll_C, label_CV


@jax.custom_vjp
def cross_entropy(x_TD: jax.Array, w_DV: jax.Array, labels_T: jax.Array, weights_T: jax.Array) -> jax.Array:
    """sum_t weights[t] * -log softmax(x[t] w)[labels[t]], float32. x and w in one dtype; not differentiable in weights.

    The gradients of x and w are computed together with the loss, chunk by chunk, so that each chunk's logits are
    computed once.
    """

    def step(total: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_CD, labels_C, weights_C = chunk
        _, nll_C, _ = _logits(x_CD, w_DV, labels_C)
        return total + (nll_C * weights_C).sum(), None

    return lax.scan(step, jnp.zeros((), jnp.float32), _chunks(x_TD, labels_T, weights_T, w_DV.shape[1]))[0]


def _fwd(x_TD: jax.Array, w_DV: jax.Array, labels_T: jax.Array, weights_T: jax.Array) -> Any:
    def step(carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]) -> Any:
        total, dw_DV = carry
        x_CD, labels_C, weights_C = chunk
        p_CV, nll_C, label_CV = _logits(x_CD, w_DV, labels_C)
        dlogits_CV = ((p_CV - label_CV.astype(jnp.float32)) * weights_C[:, None]).astype(x_CD.dtype)
        dx_CD = dot(dlogits_CV, w_DV, b_transposed=True).astype(x_CD.dtype)
        dw_DV = dw_DV + dot(transposed(x_CD), dlogits_CV)
        return (total + (nll_C * weights_C).sum(), dw_DV), dx_CD

    init = (jnp.zeros((), jnp.float32), jnp.zeros(w_DV.shape, jnp.float32))
    (total, dw_DV), dx = lax.scan(step, init, _chunks(x_TD, labels_T, weights_T, w_DV.shape[1]))
    return total, (dx.reshape(x_TD.shape), dw_DV.astype(w_DV.dtype))


def _bwd(residuals: Any, g: jax.Array) -> Any:
    dx_TD, dw_DV = residuals
    return (dx_TD * g.astype(dx_TD.dtype)), (dw_DV * g.astype(dw_DV.dtype)), None, None


cross_entropy.defvjp(_fwd, _bwd)
