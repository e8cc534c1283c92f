"""The grouped MLP by `lax.ragged_dot`: the oracle of the tests. Masked, so E times the work: never
the product's path.

Legend: N rows sorted by group, D hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU), L groups
(local experts).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.matmul import exact_if_float32
from kernels_pallas.token_permute.api import RowMap
from kernels_pallas.token_permute.reference import take_any_rows

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of gpt-oss


class MLPWeights(NamedTuple):
    """The weights of one expert, [D, U], [F, D], [U], [D], or of all, [L, D, U], ...; biases may
    be None.
    """

    w_up: jax.Array
    w_down: jax.Array
    b_up: jax.Array | None = None
    b_down: jax.Array | None = None


def activate(h: jax.Array, activation: str) -> jax.Array:
    """[..., U] -> [..., F]: `swiglu` silu(gate) * up for h = [gate, up]; `gelu` the exact (erf)
    GELU.

    `clamped_swiglu` (gpt-oss): gate * sigmoid(1.702 gate) * (up + 1), gate at most 7, up between -7
    and 7.
    """
    if activation == "gelu":
        # by erf: `jax.nn.gelu` takes erfc, which costs twice the time for digits that only tails
        # below 1e-6 have
        return 0.5 * h * (1.0 + lax.erf(h * math.sqrt(0.5)))
    return activate_gated(*jnp.split(h, 2, axis=-1), activation=activation)


def activate_gated(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """`activate` for the two halves of h."""
    if activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)
    return jax.nn.silu(gate) * up


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    weights: MLPWeights,
    *,
    activation: str,
    rows: RowMap | None = None,
) -> jax.Array:
    """Apply group l's MLP, activate(x w_up[l] + b_up[l]) w_down[l] + b_down[l], to its rows;
    those beyond are zero.
    """
    x_ND = x_ND if rows is None else take_any_rows(x_ND, rows.src_M)
    num_groups = group_sizes_L.shape[0]
    ends_L = jnp.cumsum(group_sizes_L)
    group_N = (jnp.arange(x_ND.shape[0])[:, None] >= ends_L).sum(axis=-1)
    inside_N1 = (group_N < num_groups)[:, None]
    group_N = jnp.minimum(group_N, num_groups - 1)
    exact = exact_if_float32(x_ND)
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
    return jnp.where(inside_N1, y_ND, 0).astype(x_ND.dtype)
