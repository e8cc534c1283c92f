"""The loss of a chunk's tokens and the gradient of its logits: both forms against `jax.grad`.

Legend: C tokens of a chunk, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.token_loss import LossGradients, loss_gradients, triton
from tests.arrays import assert_close

C = 5


def operands(num_logits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits, labels, weights); one weight is 0, and one token's logits are far from 0."""
    rng = np.random.default_rng(num_logits)
    logits_CV = 3 * rng.normal(size=(C, num_logits))
    logits_CV[1] -= 1e4
    labels_C = rng.integers(0, num_logits, C).astype(np.int32)
    weights_C = rng.uniform(size=C)
    weights_C[3] = 0
    arrays = jnp.asarray(logits_CV, jnp.float32), jnp.asarray(weights_C, jnp.float32)
    return arrays[0], jnp.asarray(labels_C), arrays[1]


def in_triton(*arguments: Any) -> LossGradients:
    return triton.loss_gradients(*arguments, interpret=True)


@pytest.mark.parametrize("form", [loss_gradients, in_triton])
@pytest.mark.parametrize(
    "num_logits", [96, 4096, 9001]
)  # a part of a block, one, and parts of three
def test_loss_and_gradient(form: Any, num_logits: int) -> None:
    logits_CV, labels_C, weights_C = operands(num_logits)

    def loss(logits_CV: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_p_CV = jax.nn.log_softmax(logits_CV, axis=-1)
        nll_C = -log_p_CV[jnp.arange(C), labels_C]
        return (nll_C * weights_C).sum(), nll_C

    gradient_CV, nll_C = jax.grad(loss, has_aux=True)(logits_CV)
    exact = form(logits_CV, labels_C, weights_C, jnp.float32)
    np.testing.assert_allclose(exact.nll_C, nll_C, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(exact.nll_C[0], nll_C[0], rtol=1e-6)
    assert_close(exact.dlogits_CV, gradient_CV, 1e-5)
    rounded = form(logits_CV, labels_C, weights_C, jnp.bfloat16).dlogits_CV
    assert rounded.dtype == jnp.bfloat16
    assert_close(rounded, gradient_CV, 1e-2)
    assert not np.any(np.asarray(rounded[3], np.float32))


@pytest.mark.parametrize("label", [-1, 96])
def test_a_label_outside_of_the_vocabulary_has_logit_0(label: int) -> None:
    logits_CV, labels_C, weights_C = operands(96)
    labels_C = labels_C.at[2].set(label)
    ours, expected = (
        form(logits_CV, labels_C, weights_C, jnp.float32) for form in (in_triton, loss_gradients)
    )
    for a, b in zip(ours, expected, strict=True):
        assert_close(a, b, 1e-5)
    np.testing.assert_allclose(ours.nll_C[2], jax.nn.logsumexp(logits_CV[2]), rtol=1e-5)


def test_a_logit_that_is_not_finite_makes_the_loss_so() -> None:
    """The step is skipped then."""
    logits_CV, labels_C, weights_C = operands(96)
    for bad in (jnp.nan, jnp.inf):
        ours = in_triton(logits_CV.at[0, 7].set(bad), labels_C, weights_C, jnp.float32)
        assert np.isfinite(np.asarray(ours.nll_C)).tolist() == [False, True, True, True, True]


def test_logits_of_another_dtype_are_refused() -> None:
    logits_CV, labels_C, weights_C = operands(96)
    with pytest.raises(NotImplementedError, match="logits bfloat16: not float32"):
        in_triton(logits_CV.astype(jnp.bfloat16), labels_C, weights_C, jnp.float32)
