"""Muon for matrices (Jordan 2024; arXiv 2502.16982): the step goes along the momentum, with all of
its singular values brought near 1 by Newton-Schulz iterations.

Legend: B matrices, I rows, O columns.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import DTypeLike

from jmoe.config import OptimizerConfig
from jmoe.optim.adamw import OptimizerStepScalars

# With steps of this root mean square, Muon takes AdamW's learning rates (arXiv 2502.16982).
UPDATE_RMS = 0.2
NEWTON_SCHULZ_STEPS = 5
_STACKED = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)


def muon_update(
    w: jax.Array,
    m: jax.Array,
    g: jax.Array,
    *,
    config: OptimizerConfig,
    step_scalars: OptimizerStepScalars,
    split: tuple[int, Sequence[str]] | None,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Return (w, m) of float32 matrices [..., I, O] after one step of Muon with Nesterov momentum.

    With gradient g scaled by `step_scalars.clip`, b = `config.momentum`, t = `step_scalars.step` +
    1, and s = `UPDATE_RMS` sqrt(max(I, O)):

        m' = b m + (1 - b) g
        n = b m' / (1 - b^(t + 1)) + (1 - b) g / (1 - b^t)
        w' = w - lr (s orthogonalized(n) + weight_decay w)

    split: (dimension of I or O, mesh axes that it is split over); None if each device has whole
    matrices. dtype: of the matrix products.
    """
    b, t = config.momentum, (step_scalars.step + 1).astype(jnp.float32)
    g = g.astype(jnp.float32) * step_scalars.clip
    m_new = b * m + (1 - b) * g
    nesterov = b * m_new / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
    o, (rows, columns) = orthogonalize_local(nesterov.astype(dtype), split)
    update = UPDATE_RMS * math.sqrt(max(rows, columns)) * o.astype(jnp.float32)
    update = update + config.weight_decay * w
    ok = step_scalars.ok
    return jnp.where(ok, w - step_scalars.lr * update, w), jnp.where(ok, m_new, m)


def orthogonalize_local(
    x: jax.Array, split: tuple[int, Sequence[str]] | None
) -> tuple[jax.Array, tuple[int, int]]:
    """Return (matrices with the singular vectors of `x` and singular values near 1, their whole
    size (I, O)).

    x: [..., I, O], this device's shards if `split` is set. An all-to-all then gives each device
    some whole matrices, and another one the shards of all results.
    """
    flat = x.reshape(-1, *x.shape[-2:])
    if split is None:
        experts = x.shape[1] if x.ndim > 3 else 1  # of one layer
        return _orthogonalize(flat, experts).reshape(x.shape), (x.shape[-2], x.shape[-1])
    dim, axes = split[0] - x.ndim + flat.ndim, tuple(split[1])
    count, devices = flat.shape[0], lax.axis_size(axes)
    padded = jnp.pad(flat, ((0, -count % devices), (0, 0), (0, 0)))
    whole = lax.all_to_all(padded, axes, 0, dim, tiled=True)
    o = lax.all_to_all(_orthogonalize(whole, 1), axes, dim, 0, tiled=True)
    return o[:count].reshape(x.shape), (whole.shape[-2], whole.shape[-1])


def _orthogonalize(x_BIO: jax.Array, at_once: int) -> jax.Array:
    """Return the orthogonalized matrices, `at_once` of them in a batch, so that the iterations'
    products take memory for these alone.
    """
    # without momentum of its own, the transformation is the orthogonalization
    transform = optax.contrib.scale_by_muon(
        beta=0.0,
        nesterov=False,
        ns_steps=NEWTON_SCHULZ_STEPS,
        weight_dimension_numbers=_STACKED,
    )

    def of_batch(x: jax.Array) -> jax.Array:
        # optax itself mixes dtypes; float32 products are not to run in TF32
        with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
            o: jax.Array = transform.update(x, transform.init(x))[0]
        return o

    grouped = x_BIO.reshape(-1, at_once, *x_BIO.shape[1:])
    return lax.map(of_batch, grouped).reshape(x_BIO.shape)
