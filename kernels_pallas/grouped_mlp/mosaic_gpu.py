"""The grouped MLP on Hopper: two grouped matmuls, and XLA's fused elementwise work between them.

Legend: N rows sorted by group, L groups (local experts), D hidden, F expert hidden, U = 2F (SwiGLU) or F (GELU).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.grouped_matmul import Implementation, grouped_matmul
from kernels_pallas.grouped_mlp.reference import activate
from kernels_pallas.implementations import Name
from kernels_pallas.saved import saved


@jax.custom_vjp
def _add_bias(h_NU: jax.Array, b_LU: jax.Array, group_N: jax.Array) -> jax.Array:
    """h + b[group] in float32; its gradient is a product with the groups' indicator, not a scatter of floats."""
    return h_NU.astype(jnp.float32) + jnp.take(b_LU, group_N, axis=0, mode="clip").astype(jnp.float32)


def _add_bias_fwd(h_NU: jax.Array, b_LU: jax.Array, group_N: jax.Array) -> Any:
    return _add_bias(h_NU, b_LU, group_N), (group_N, jnp.zeros(0, h_NU.dtype), b_LU)


def _add_bias_bwd(residuals: Any, dy_NU: jax.Array) -> Any:
    group_N, of_dtype, b_LU = residuals
    dh_NU = dy_NU.astype(of_dtype.dtype)
    num_groups = b_LU.shape[0]
    member_NL = (group_N[:, None] == jnp.arange(num_groups, dtype=group_N.dtype)).astype(dh_NU.dtype)
    inside_NU = jnp.where((group_N < num_groups)[:, None], dh_NU, 0)  # rows beyond the groups may hold NaN
    db_LU = lax.dot_general(member_NL, inside_NU, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dh_NU, db_LU.astype(b_LU.dtype), None


_add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


def grouped_mlp(
    x_ND: jax.Array,
    group_sizes_L: jax.Array,
    w_up_LDU: jax.Array,
    w_down_LFD: jax.Array,
    b_up_LU: jax.Array | None,
    b_down_LD: jax.Array | None,
    *,
    activation: str,
    slots: int = 0,
    matmul: Name | Implementation = "mosaic_gpu",
) -> jax.Array:
    """See `grouped_mlp.api`. slots: for other implementations."""
    del slots
    ends_L = jnp.cumsum(group_sizes_L)
    group_N = (jnp.arange(x_ND.shape[0], dtype=jnp.int32)[:, None] >= ends_L).sum(axis=-1, dtype=jnp.int32)
    h = grouped_matmul(x_ND, w_up_LDU, group_sizes_L, implementation=matmul)
    if b_up_LU is not None:
        h = _add_bias(h, b_up_LU, group_N).astype(x_ND.dtype)
    h = saved(h, "expert_up")
    a_NF = activate(h.astype(jnp.float32), activation).astype(x_ND.dtype)
    y = grouped_matmul(a_NF, w_down_LFD, group_sizes_L, implementation=matmul)
    return y if b_down_LD is None else _add_bias(y, b_down_LD, group_N).astype(x_ND.dtype)
