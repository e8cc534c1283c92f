"""Inputs of products with `fp8` weights, rounded to E4M3 in groups of 128 with one float32 scale
each (DeepSeek-V3, arXiv 2412.19437, section 3.3).

Both factors of a product are then 8-bit floats, which the tensor cores of Ada, Hopper and Blackwell
multiply at twice the rate of bfloat16. The sums over a group of inputs are float32; they are
multiplied by the scales of the inputs and of the weights, and added up.

Legend: N rows, D inputs, F outputs, B groups of inputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.formats import FP8
from kernels_pallas.implementations import nvidia_compute_capability

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = float(jnp.finfo(E4M3).max)
FIRST_CAPABILITY = (8, 9)  # Ada: the first tensor cores that multiply E4M3


def has_fp8_products() -> bool:
    """Return whether the target device is an NVIDIA GPU whose tensor cores multiply E4M3."""
    capability = nvidia_compute_capability()
    return capability is not None and capability >= FIRST_CAPABILITY


class RoundedInputs(NamedTuple):
    """Rows [N, D] as E4M3 values times scales of groups of 128 inputs, float32 [N, B]; the last
    group may be shorter.
    """

    values_ND: jax.Array
    scales_NB: jax.Array

    def wide(self) -> jax.Array:
        """Return the rows in float32."""
        spread_ND = jnp.repeat(self.scales_NB, FP8.block, axis=1)[:, : self.values_ND.shape[1]]
        return self.values_ND.astype(jnp.float32) * spread_ND


def round_inputs(x_ND: jax.Array) -> RoundedInputs:
    """Return the rows rounded to the nearest E4M3 values. The scale of a group maps its largest
    magnitude to 448; a group with a value that is not finite becomes NaN.
    """
    num_rows, d = x_ND.shape
    num_groups = -(-d // FP8.block)
    padded = jnp.pad(x_ND.astype(jnp.float32), ((0, 0), (0, num_groups * FP8.block - d)))
    groups = padded.reshape(num_rows, num_groups, FP8.block)
    values, scales = round_group(groups)
    return RoundedInputs(values.reshape(num_rows, -1)[:, :d], scales)


def round_group(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (E4M3 values, float32 scales) of groups of inputs along the last axis."""
    wide = x.astype(jnp.float32)
    peak = jnp.abs(wide).max(axis=-1)
    peak = jnp.where(jnp.abs(peak) < jnp.inf, peak, jnp.nan)
    scale = jnp.where(peak == 0, 1.0, peak) * (1 / LARGEST)
    return (wide / jnp.expand_dims(scale, -1)).astype(E4M3), scale


def rounded(x: jax.Array) -> jax.Array:
    """Return rows [..., D] in float32, rounded as `round_inputs` does: for products on devices that
    do not multiply E4M3.
    """
    return round_inputs(x.reshape(-1, x.shape[-1])).wide().reshape(x.shape)


def matmul_of_rounded(x_ND: jax.Array, w_DF: jax.Array, scales_BF: jax.Array) -> jax.Array:
    """Return float32 [N, F]: the product of rounded rows with one matrix in the format `fp8`, group
    after group. It defines the result of the other forms; tests alone run it.
    """
    inputs = round_inputs(x_ND)
    pad = ((0, 0), (0, scales_BF.shape[0] * FP8.block - x_ND.shape[1]))
    x_NBd = jnp.pad(inputs.values_ND.astype(jnp.float32), pad).reshape(
        -1, len(scales_BF), FP8.block
    )
    w32_DF = lax.bitcast_convert_type(w_DF, E4M3).astype(jnp.float32)
    w_BdF = jnp.pad(w32_DF, pad[::-1]).reshape(len(scales_BF), FP8.block, -1)
    sums_NBF = jnp.einsum("nbd,bdf->nbf", x_NBd, w_BdF, precision=lax.Precision.HIGHEST)
    return (sums_NBF * inputs.scales_NB[:, :, None] * scales_BF[None]).sum(axis=1)
