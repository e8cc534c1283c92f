"""The grouped MLP by `lax.ragged_dot`: the reference for tests.

XLA masks rows of other groups, which is L times the work, so no program uses this `grouped_mlp`.
`MLPWeights` and `activate` are used by all implementations.

Legend: N rows sorted by group, D hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU), L groups
(local experts).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.matmul import float32_precision
from kernels_pallas.token_permute.api import RowMap
from kernels_pallas.token_permute.reference import take_rows_or_last

# (a weight's name, the rows that it multiplies) -> what is added to the product; None for nothing
ProductChange = Callable[[str, jax.Array], jax.Array | None]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # constants of gpt-oss


class MLPWeights(NamedTuple):
    """The weights of one expert, [D, U], [F, D], [U], [D], or of all local experts, [L, D, U], ...
    Biases may be None.
    """

    w_up: jax.Array
    w_down: jax.Array
    b_up: jax.Array | None = None
    b_down: jax.Array | None = None


def activate(h: jax.Array, activation: str) -> jax.Array:
    """Return [..., F] from pre-activations h [..., U].

    `swiglu`: silu(gate) * up for h = [gate, up]. `gelu`: the exact (erf) GELU. `clamped_swiglu`
    (gpt-oss): gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up between -7 and 7.
    """
    if activation == "gelu":
        # `jax.nn.gelu` uses erfc, which takes twice as long as erf and is more precise only for
        # values below 1e-6 in the tail
        return 0.5 * h * (1.0 + lax.erf(h * math.sqrt(0.5)))
    return activate_gated(*jnp.split(h, 2, axis=-1), activation=activation)


def activate_gated(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """Return `activate` of h = [gate, up] for the gated activations."""
    if activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)
    return jax.nn.silu(gate) * up


def gelu_without_erf(x: jax.Array) -> jax.Array:
    """Return the exact GELU, x Phi(x), from operations that Mosaic GPU can lower (erf is not among
    them).

    max(x, 0) - |x| / 2 erfc(|x| / sqrt(2)), with erfc by a polynomial of error at most 1.5e-7
    (Abramowitz and Stegun, 7.1.26).
    """
    size = jnp.maximum(x, -x)
    z = size * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * z)
    poly = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return jnp.maximum(x, 0.0) - 0.5 * size * poly * jnp.exp(-z * z)


def scaled_activation(h_NU: jax.Array, scale_N: jax.Array | None, activation: str) -> jax.Array:
    """Return [N, F] in h's dtype: the activations, times the factor of each row if there are
    factors.
    """
    a_NF = activate(h_NU.astype(jnp.float32), activation)
    return (a_NF if scale_N is None else a_NF * scale_N[:, None]).astype(h_NU.dtype)


class ActivationGradients(NamedTuple):
    """The backward pass of `scaled_activation`: the gradient of the pre-activations, the scaled
    activations again, and float32 gradients of the factors; None without factors.
    """

    dh_NU: jax.Array
    scaled_NF: jax.Array
    dscale_N: jax.Array | None


def activation_gradients(
    h_NU: jax.Array, dscaled_NF: jax.Array, scale_N: jax.Array | None, *, activation: str
) -> ActivationGradients:
    """Return the backward pass of `scaled_activation` from the gradient of its result."""
    scaled_NF, pull = jax.vjp(
        lambda h_NU, scale_N: scaled_activation(h_NU, scale_N, activation), h_NU, scale_N
    )
    dh_NU, dscale_N = pull(dscaled_NF)
    return ActivationGradients(dh_NU, scaled_NF, dscale_N)


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    rows: RowMap | None = None,
    scale_N: jax.Array | None = None,
) -> jax.Array:
    """Return [N, D] in x's dtype: group l's MLP, activate(x w_up[l] + b_up[l]) w_down[l] +
    b_down[l], applied to its rows, times `scale_N`. Rows beyond the groups are 0.
    """
    x_ND = x_ND if rows is None else take_rows_or_last(x_ND, rows.src_M)
    num_groups = group_sizes_L.shape[0]
    ends_L = jnp.cumsum(group_sizes_L)
    group_N = (jnp.arange(x_ND.shape[0])[:, None] >= ends_L).sum(axis=-1)
    inside_N1 = (group_N < num_groups)[:, None]
    group_N = jnp.minimum(group_N, num_groups - 1)
    exact = float32_precision(x_ND)
    h_NU = lax.ragged_dot(
        x_ND, weights.w_up, group_sizes_L, exact, preferred_element_type=jnp.float32
    )
    if weights.b_up is not None:
        h_NU = h_NU + weights.b_up[group_N].astype(jnp.float32)
    a_NF = activate(h_NU, activation).astype(x_ND.dtype)
    y_ND = lax.ragged_dot(
        a_NF, weights.w_down, group_sizes_L, exact, preferred_element_type=jnp.float32
    )
    if weights.b_down is not None:
        y_ND = y_ND + weights.b_down[group_N].astype(jnp.float32)
    if scale_N is not None:
        y_ND = y_ND * scale_N[:, None]
    return jnp.where(inside_N1, y_ND, 0).astype(x_ND.dtype)
