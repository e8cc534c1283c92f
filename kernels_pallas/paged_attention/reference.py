"""Attention over a KV cache in blocks, as plain softmax attention in float32 over gathered rows.

Legend: as `api.py`; S positions of a table, W L.
"""

import jax
import jax.numpy as jnp
from jax import lax


def paged_attention(  # noqa: PLR0913  as `api.py`
    q_PCHd: jax.Array,
    k_NGLd: jax.Array,
    v_NGLe: jax.Array | None,
    blocks_PW: jax.Array,
    positions_PC: jax.Array,
    *,
    scale: float,
    value_dim: int,
    window: jax.Array | int | None = None,
    sinks_H: jax.Array | None = None,
    context: int | None = None,
) -> jax.Array:
    """Return [P, C, H, e] in q's dtype; see `api.py`. Rows of padding are 0."""
    del context
    p, c, h, _ = q_PCHd.shape
    heads_of_group = h // k_NGLd.shape[1]

    def read_rows(x_NGLd: jax.Array) -> jax.Array:
        """Return float32 [P, S, H, d], each group's keys or values once for every query head."""
        x = x_NGLd[blocks_PW].swapaxes(2, 3)  # [P, W, L, G, d]
        x_PSGd = x.reshape(p, -1, *x.shape[3:])
        stored = {jnp.uint16: jnp.bfloat16, jnp.uint8: jnp.float8_e4m3fn}
        for bits, dtype in stored.items():
            if x_PSGd.dtype == bits:
                x_PSGd = lax.bitcast_convert_type(x_PSGd, dtype)
        return jnp.repeat(x_PSGd.astype(jnp.float32), heads_of_group, axis=2)

    k_PSHd = read_rows(k_NGLd)
    v_PSHe = (k_PSHd if v_NGLe is None else read_rows(v_NGLe))[..., :value_dim]
    length = k_PSHd.shape[1]
    at_S, at_PC1 = jnp.arange(length), positions_PC[..., None]
    seen_PCS = (at_S <= at_PC1) & (at_PC1 < length)
    if window is not None:
        seen_PCS &= at_S > at_PC1 - window
    in_use_PS = seen_PCS.any(axis=1)[..., None, None]  # other positions may hold NaN
    k_PSHd, v_PSHe = jnp.where(in_use_PS, k_PSHd, 0), jnp.where(in_use_PS, v_PSHe, 0)
    q = q_PCHd.astype(jnp.float32)
    s_PCHS = jnp.einsum("pchd,pshd->pchs", q, k_PSHd, precision="highest") * scale
    s_PCHS = jnp.where(seen_PCS[:, :, None], s_PCHS, -jnp.inf)
    sinks_H1 = jnp.full((h, 1), -jnp.inf)
    if sinks_H is not None:
        sinks_H1 = sinks_H.astype(jnp.float32)[:, None]
    logits = jnp.concatenate([s_PCHS, jnp.broadcast_to(sinks_H1, (p, c, h, 1))], axis=-1)
    weights_PCHS = jnp.nan_to_num(jax.nn.softmax(logits, axis=-1))[..., :-1]
    out_PCHe = jnp.einsum("pchs,pshe->pche", weights_PCHS, v_PSHe, precision="highest")
    return out_PCHe.astype(q_PCHd.dtype)
