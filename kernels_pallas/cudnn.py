"""cuDNN's flash attention, forward and backward, as XLA's custom calls.

`jax.nn.dot_product_attention` reaches the same kernels, but neither returns the softmax's log-sums
in float32 nor takes values of another size than keys, and it asks the process's own GPU what it
supports, which a program compiled ahead of time need not have.

Legend: B batch, S sequence, H query heads, G key/value heads, d size of a query or key head, e size
of a value head.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.implementations import nvidia_compute_capability

LARGEST_HEAD, LARGEST_ON_HOPPER = 128, 256  # of the backward pass
LATENT_HEADS = (192, 128)  # the sizes (d, e) of DeepSeek's heads, the only unequal ones
# Dimensions of (left, right) that each product contracts; batch and heads are the batch dimensions.
# Queries, keys, values are [B, S, H, d]; scores [B, H, S, S].
_ROWS, _SCORES = ("0", "2"), ("0", "1")
_FORWARD = {"bmm1": ("3", _ROWS, "3", _ROWS), "bmm2": ("3", _SCORES, "1", _ROWS)}
_BACKWARD = {
    "bmm1_grad_gemm1": ("2", _SCORES, "1", _ROWS),
    "bmm1_grad_gemm2": ("3", _SCORES, "1", _ROWS),
    "bmm2_grad_gemm1": ("2", _SCORES, "1", _ROWS),
    "bmm2_grad_gemm2": ("3", _ROWS, "3", _ROWS),
}
_DTYPES = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}
_BY_ROWS = (0, 2, 1, 3)  # the order in memory of [B, H, S, d] that is [B, S, H, d]


def check_attention_supported(q_BSHd: jax.Array, k_BSGd: jax.Array, v_BSGe: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, if cuDNN has no kernel with gradients for these
    operands on the target GPU.
    """
    dtypes = {x.dtype for x in (q_BSHd, k_BSGd, v_BSGe)}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(f"{names}: not one of bfloat16, float16")
    d, e = q_BSHd.shape[3], v_BSGe.shape[3]
    version = nvidia_compute_capability()
    if version is None:
        raise NotImplementedError("not an NVIDIA GPU")
    major, capability = version[0], "{}.{}".format(*version)
    if major < 8:
        raise NotImplementedError(f"compute capability {capability}: below 8.0")
    if (d, e) == LATENT_HEADS and major in (9, 10):
        return
    largest = LARGEST_ON_HOPPER if major == 9 else LARGEST_HEAD
    if d != e:
        raise NotImplementedError(f"heads of {d} and {e} on compute capability {capability}")
    if d > largest or d % 8:
        raise NotImplementedError(
            f"heads of {d}: not a multiple of 8 up to {largest} on compute capability {capability}"
        )


def attention(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    v_BSGe: jax.Array,
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Return (softmax(scale q k^T) v under a causal mask, [B, S, H, e] in q's dtype; float32 [B, H,
    S], the logarithm of each query's sum of exp(scores)).

    window: the number of keys that a query sees, itself included; None for all earlier ones.
    causal: False without a mask; there may then be another number of keys than of queries.
    `check_attention_supported` tells what operands it takes.
    """
    b, s, h, _ = q_BSHd.shape
    results = (
        jax.ShapeDtypeStruct((b, h, s, v_BSGe.shape[3]), q_BSHd.dtype),
        jax.ShapeDtypeStruct((b, h, s), jnp.float32),
        _WORKSPACE,
    )
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmax",
        results,
        output_layouts=(_BY_ROWS, None, None),
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(q_BSHd, k_BSGd, _FORWARD, scale, window, causal),
    )
    o_BHSe, lse_BHS, _ = call(q_BSHd, k_BSGd, v_BSGe)
    return o_BHSe.transpose(_BY_ROWS), lse_BHS


def attention_gradient(
    operands: tuple[jax.Array, jax.Array, jax.Array],
    results: tuple[jax.Array, jax.Array],
    do_BSHe: jax.Array,
    *,
    scale: float,
    window: int | None,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of the operands (q, k, v) of `attention` from its results and the
    gradient of its output.
    """
    q_BSHd, k_BSGd, _ = operands
    o_BSHe, lse_BHS = results
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmaxBackward",
        (*map(_heads_before_sequence, operands), _WORKSPACE),
        output_layouts=(_BY_ROWS, _BY_ROWS, _BY_ROWS, None),
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(q_BSHd, k_BSGd, _BACKWARD, scale, window, causal),
    )
    dq, dk, dv, _ = call(*operands, lse_BHS, do_BSHe, o_BSHe)
    return dq.transpose(_BY_ROWS), dk.transpose(_BY_ROWS), dv.transpose(_BY_ROWS)


def _heads_before_sequence(x_BSHd: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of x with its two middle dimensions swapped, [B, H, S, d]: cuDNN
    names dimensions in this order. No data moves.
    """
    b, s, h, d = x_BSHd.shape
    return jax.ShapeDtypeStruct((b, h, s, d), x_BSHd.dtype)


_WORKSPACE = jax.ShapeDtypeStruct((0,), np.dtype(np.uint8))  # XLA sets its size


def _backend_config(
    q_BSHd: jax.Array,
    k_BSGd: jax.Array,
    products: dict[str, tuple[str, tuple[str, str], str, tuple[str, str]]],
    scale: float,
    window: int | None,
    causal: bool,
) -> str:
    """Return the description of the operation for XLA: its `GpuBackendConfig` as JSON."""
    b, s, h, _ = q_BSHd.shape
    numbers = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [left],
            "rhs_contracting_dimensions": [right],
            "lhs_batch_dimensions": list(left_batch),
            "rhs_batch_dimensions": list(right_batch),
        }
        for name, (left, left_batch, right, right_batch) in products.items()
    }
    scores: dict[str, Any] = {
        "element_type": _DTYPES[q_BSHd.dtype],
        "dimensions": [str(n) for n in (b, h, s, k_BSGd.shape[1])],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {"math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True}
    operation = {
        "algorithm": algorithm | {"tuning_knobs": {"17": "1", "24": "0"}, "workspace_size": "0"},
        "fmha_scale": scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "sliding_window_length": window or 0,
        "max_seg_per_batch": 1,
        **numbers,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": operation})
