"""RMSNorm and LayerNorm over the last dimension, computed in float32."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas.native import rms_norm, uses_native_inference


class Norm(nnx.Module):
    """Normalize the last dimension in float32. `rmsnorm`: x / sqrt(mean(x^2) + eps) * scale;
    `layernorm`: (x - mean) / sqrt(var + eps) * scale + bias.

    axes: set inside `shard_map` if the last dimension is split equally over the devices of these
    mesh axes; means are then over all of them.
    """

    def __init__(self, size: int, kind: str, eps: float) -> None:
        self.kind, self.eps = kind, eps
        self.axes: tuple[str, ...] = ()
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32)) if kind == "layernorm" else None

    def __call__(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return x [..., size] normalized, in `dtype`."""
        if uses_native_inference() and self.bias is None and not self.axes:
            return rms_norm(x, self.scale[...], self.eps, dtype)
        x = x.astype(jnp.float32)
        if self.bias is not None:
            x = x - self._mean_over_last_dim(x)
        x = (
            x
            * lax.rsqrt(self._mean_over_last_dim(x * x) + self.eps)
            * self.scale[...].astype(jnp.float32)
        )
        return (x if self.bias is None else x + self.bias[...].astype(jnp.float32)).astype(dtype)

    def _mean_over_last_dim(self, x: jax.Array) -> jax.Array:
        mean = x.mean(axis=-1, keepdims=True)
        return lax.pmean(mean, self.axes) if self.axes else mean
