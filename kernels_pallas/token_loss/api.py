"""The gradient of a chunk's logits under cross-entropy, by the best implementation for the
platform.

Legend: C tokens of a chunk, V vocabulary.
"""

from typing import Any

import jax
from jax.typing import DTypeLike

from kernels_pallas.implementations import Name, call_first_supported
from kernels_pallas.token_loss.reference import LossGradients

MODULES: dict[Name, str] = {
    "triton": "kernels_pallas.token_loss.triton",
    "xla": "kernels_pallas.token_loss.reference",
}


def loss_gradients(
    logits_CV: jax.Array,
    labels_C: jax.Array,
    weights_C: jax.Array,
    dtype: DTypeLike,
    *,
    implementation: object = None,
) -> LossGradients:
    """Return the gradient of sum_c weights[c] * nll[c] with respect to the logits, in `dtype`, and
    the negative log-likelihood nll of each label.

    logits_CV: float32. A label outside the vocabulary counts as a logit of 0 that is not among the
    V. implementation: None for the best that supports the operands; a name; or an object that has
    this function.
    """
    operands = logits_CV, labels_C, weights_C, dtype
    gradients: Any = call_first_supported(MODULES, implementation, "loss_gradients", *operands)
    return LossGradients(*gradients)
