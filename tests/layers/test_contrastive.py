"""The supervised contrastive loss is what a loop over all pairs of images computes.

Legend: G images of all tasks, C features of an embedding, K classes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.layers.contrastive import contrastive_losses, cosine_class_logits, l2_normalized
from tests.arrays import on_host

G, C = 12, 4
TASK = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 2], np.int32)
# 2, 2 and 0 are alone in their class
LABEL = np.array([0, 1, 0, 2, 1, 0, 0, 1, 1, 0, 2, 0], np.int32)
WEIGHT = np.array([1] * 9 + [0] + [1] * 2, np.float32)
TEMPERATURE = np.array([0.5, 0.2, 0.1], np.float32)[TASK]


def z_of(seed: int = 0) -> jax.Array:
    return l2_normalized(
        jnp.asarray(np.random.default_rng(seed).standard_normal((G, C)).astype(np.float32))
    )


def by_hand(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    losses, right = np.zeros(G), np.zeros(G)
    for i in range(G):
        others = [j for j in range(G) if j != i and TASK[j] == TASK[i] and WEIGHT[j] and WEIGHT[i]]
        same = [j for j in others if LABEL[j] == LABEL[i]]
        if same:
            logits = {j: float(z[i] @ z[j]) / TEMPERATURE[i] for j in others}
            total = np.log(sum(np.exp(list(logits.values()))))
            losses[i] = np.mean([total - logits[j] for j in same])
            right[i] = max(others, key=lambda j: logits[j]) in same
    return losses, right


def test_losses_are_those_of_a_loop_over_pairs() -> None:
    z = z_of()
    losses, right = on_host(contrastive_losses(z, TASK, LABEL, WEIGHT, TEMPERATURE))
    expected = by_hand(np.asarray(z, np.float64))
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(right, expected[1])
    assert (losses > 0).sum() == 8 and 0 < right.sum() < 8


def test_the_order_of_rows_changes_no_loss() -> None:
    z, order = z_of(), np.random.default_rng(1).permutation(G)
    losses, right = on_host(contrastive_losses(z, TASK, LABEL, WEIGHT, TEMPERATURE))
    rows = (np.asarray(a)[order] for a in (z, TASK, LABEL, WEIGHT, TEMPERATURE))
    others = on_host(contrastive_losses(*map(jnp.asarray, rows)))
    np.testing.assert_allclose(others[0], losses[order], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(others[1], right[order])


def test_gradients_are_finite_and_touch_only_what_is_compared() -> None:
    grads = jax.grad(
        lambda z: contrastive_losses(l2_normalized(z), TASK, LABEL, WEIGHT, TEMPERATURE)[0].sum()
    )(z_of())
    assert np.isfinite(grads).all()
    touched = np.any(np.asarray(grads) != 0, axis=1)
    np.testing.assert_array_equal(touched, (WEIGHT > 0) & (TASK < 2))
    assert not np.any(jax.grad(lambda z: l2_normalized(z).sum())(jnp.zeros((1, C))) > 1e7)


def test_classes_are_ranked_by_the_direction_of_their_means() -> None:
    means = np.array([[2.0, 0, 0, 0], [0, 0.1, 0, 0]], np.float32)
    z = l2_normalized(jnp.array([[1.0, 0.2, 0, 0], [0.2, 1.0, 0, 0]]))
    scores = on_host(cosine_class_logits(z, jnp.asarray(means), jnp.full(2, 0.5)))
    np.testing.assert_allclose(scores, np.asarray(z)[:, :2] / 0.5, rtol=1e-5)
