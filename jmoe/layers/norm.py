"""RMSNorm and LayerNorm over the last dimension, computed in float32."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from kernels_pallas.native import rms_norm, uses_native_inference


class Norm(nnx.Module):
    """Normalize the last dimension in float32. `rmsnorm`: x / sqrt(mean(x^2) + eps) * scale;
    `layernorm`: (x - mean) / sqrt(var + eps) * scale + bias; `zero_centered_rmsnorm`: as rmsnorm,
    times 1 + scale.

    multiplier: a constant factor of the result (Granite divides its logits).
    axes: set inside `shard_map` if the last dimension is split equally over the devices of these
    mesh axes; means are then over all of them.
    """

    def __init__(self, size: int, kind: str, eps: float, multiplier: float = 1.0) -> None:
        self.kind, self.eps, self.multiplier = kind, eps, multiplier
        self.axes: tuple[str, ...] = ()
        self._offset = 1.0 if kind == "zero_centered_rmsnorm" else 0.0
        self.scale = nnx.Param(jnp.full(size, 1.0 - self._offset, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32)) if kind == "layernorm" else None

    @property
    def factors(self) -> jax.Array:
        """The factors of the normalized dimensions: the scale as it is stored, or in float32 if 1
        is added to it or it is multiplied.
        """
        scale: jax.Array = self.scale[...]
        if not self._offset and self.multiplier == 1.0:
            return scale
        return (scale.astype(jnp.float32) + self._offset) * self.multiplier

    def __call__(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return x [..., size] normalized, in `dtype`."""
        if uses_native_inference() and self.bias is None and not self.axes:
            return rms_norm(x, self.factors, self.eps, dtype)
        x = x.astype(jnp.float32)
        if self.bias is not None:
            x = x - self._mean_over_last_dim(x)
        factors = self.factors.astype(jnp.float32)
        x = x * lax.rsqrt(self._mean_over_last_dim(x * x) + self.eps) * factors
        if self.bias is None:
            return x.astype(dtype)
        return (x + self.multiplier * self.bias[...].astype(jnp.float32)).astype(dtype)

    def _mean_over_last_dim(self, x: jax.Array) -> jax.Array:
        mean = x.mean(axis=-1, keepdims=True)
        return lax.pmean(mean, self.axes) if self.axes else mean
