"""Attention to ranges of keys, as plain softmax attention in float32.

Legend: as `api.py`.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.range_attention.ranges import KeyRanges


def range_attention(
    q_BSHd: jax.Array, k_BCGd: jax.Array, v_BCGe: jax.Array, ranges: KeyRanges, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return (o [B, S, H, e] in q's dtype, lse float32 [B, H, S]); see `api.py`."""
    heads_of_group = q_BSHd.shape[2] // k_BCGd.shape[2]
    k_BCHd, v_BCHe = (
        jnp.repeat(x.astype(jnp.float32), heads_of_group, axis=2) for x in (k_BCGd, v_BCGe)
    )
    scores = jnp.einsum("bshd,bchd->bhsc", q_BSHd.astype(jnp.float32), k_BCHd, precision="highest")
    seen_B1SC = ranges.seen(k_BCGd.shape[1])[:, None]
    scores = jnp.where(seen_B1SC, scores * scale, -1e30)
    lse_BHS = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen_B1SC, jnp.exp(scores - lse_BHS[..., None]), 0.0)
    o_BSHe = jnp.einsum("bhsc,bche->bshe", weights, v_BCHe, precision="highest")
    return o_BSHe.astype(q_BSHd.dtype), lse_BHS
