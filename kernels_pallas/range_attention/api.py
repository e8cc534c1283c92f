"""Attention in which each query sees one range of keys, by a flash kernel.

XLA's form of the same is `jmoe/layers/attention.py`'s, which callers take where no kernel supports
the operands.

Legend: B batch, S queries, C keys, H query heads, G key/value heads, d size of a query or key head,
e size of a value head.
"""

from importlib import import_module
from typing import Any

import jax

from kernels_pallas.implementations import nvidia_compute_capability
from kernels_pallas.range_attention.ranges import KeyRanges

KERNEL = "kernels_pallas.range_attention.triton"
LARGEST_HEAD = 256


def check_supported(q_BSHd: jax.Array, k_BCGd: jax.Array, v_BCGe: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, if the target device has no kernel for these
    operands.
    """
    version = nvidia_compute_capability()
    if version is None or version < (8, 0):
        raise NotImplementedError("not an NVIDIA GPU of compute capability 8.0 or above")
    largest = max(q_BSHd.shape[-1], v_BCGe.shape[-1])
    if largest > LARGEST_HEAD:
        raise NotImplementedError(f"heads of {largest}: more than {LARGEST_HEAD}")
    _kernel().check_dtypes(q_BSHd, k_BCGd, v_BCGe)


def range_attention(
    q_BSHd: jax.Array,
    k_BCGd: jax.Array,
    v_BCGe: jax.Array,
    ranges: KeyRanges,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return (o [B, S, H, e] in q's dtype, lse float32 [B, H, S]): softmax(scale q k^T) v over the
    keys that each query sees, and the logarithm of its sum of exp(scores).

    A query that sees no key has an output of 0 and an lse of -1e30 or less. interpret: runs the
    kernel without a GPU.
    """
    operands = q_BSHd, k_BCGd, v_BCGe
    results: tuple[jax.Array, jax.Array] = _kernel().range_attention(
        *operands, ranges, scale=scale, interpret=interpret
    )
    return results


def range_attention_gradient(
    operands: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    do_BSHe: jax.Array,
    ranges: KeyRanges,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients (dq, dk, dv) of `range_attention`, in the operands' dtypes.

    results: o and lse. An lse of more terms, with o scaled to match, gives the gradients of an
    attention with these terms (see `jmoe.layers.attention.flash_attention`).
    """
    gradients: tuple[jax.Array, jax.Array, jax.Array] = _kernel().range_attention_gradient(
        operands, results, do_BSHe, ranges, scale=scale, interpret=interpret
    )
    return gradients


def _kernel() -> Any:
    """Return the kernel's module. Raises NotImplementedError on a JAX without Pallas-Triton."""
    return import_module(KERNEL)
