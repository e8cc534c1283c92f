"""A checkpoint's scales of keys and values in FP8, as factors in its attention's weights.

A scale s says that FP8 holds k / s. FP8 numbers have an exponent, so a scale moves their range and
hardly their precision: s is rounded up to a power of two, by which weights are multiplied without
rounding. Keys (or latents) and values then leave their projections divided, queries and the output
projection are multiplied, and the cache, its kernels and the attention need no scales.

Legend:
D hidden
U columns of queries, keys and values
"""

import math
import re
from collections.abc import Mapping

import flax.nnx as nnx
import numpy as np

from jmoe.layers.attention import Attention
from jmoe.layers.latent_attention import LatentAttention
from jmoe.models.block import Block
from jmoe.models.safetensors_io import DTYPES, StoredTensor, TensorReader

# of ModelOpt and compressed-tensors; older ones have one scale for both
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|attn\.)?([kv]|kv)_scale$")
Exponents = tuple[int, int]  # of the powers of two of keys and values


def read_cache_exponents(stored: Mapping[str, StoredTensor]) -> dict[int, Exponents]:
    """Return {layer: exponents of the scales of its keys and values} of a checkpoint's tensors.

    Raises ValueError naming the tensor that is no positive number.
    """
    exponents_of: dict[int, Exponents] = {}
    with TensorReader() as reader:
        for name, tensor in stored.items():
            if (match := _NAME.match(name)) is None:
                continue
            layer, kind = int(match[1]), match[2]
            exponent = _exponent(tensor, reader)
            k, v = exponents_of.get(layer, (0, 0))
            exponents_of[layer] = (exponent if "k" in kind else k, exponent if "v" in kind else v)
    return {layer: exponents for layer, exponents in exponents_of.items() if any(exponents)}


def _exponent(tensor: StoredTensor, reader: TensorReader) -> int:
    """Return the exponent of the smallest power of two that is at least a stored scale."""
    if math.prod(tensor.shape) != 1 or tensor.dtype not in DTYPES:
        words = f"is {tensor.dtype}{list(tensor.shape)}: with kv_cache_dtype = 'fp8' must be one"
        raise tensor.error(f"{words} floating-point number")
    ((_, _, values),) = reader.read_chunks(tensor, 0, 1)
    scale = float(np.asarray(values, np.float32).reshape(()))
    if not (math.isfinite(scale) and scale > 0):
        raise tensor.error(f"is {scale}: with kv_cache_dtype = 'fp8' must be greater than 0")
    fraction, exponent = math.frexp(scale)
    return exponent - 1 if fraction == 0.5 else exponent


def fold_cache_scales(block: Block, exponents: Exponents) -> None:
    """Multiply a block's attention by the powers of two of its keys and values.

    Raises ValueError if its keys have no weights that take a factor exactly.
    """
    attention, (k, v) = block.attention, (2.0**exponent for exponent in exponents)
    if isinstance(attention, LatentAttention):
        _fold_into_latents(attention, k)
    elif isinstance(attention, Attention):
        _fold_into_heads(attention, k, v)


def _scaled(weight: nnx.Param, factors: float | np.ndarray) -> nnx.Param:
    """Return a parameter times powers of two, in its dtype."""
    values = np.asarray(weight[...])
    return nnx.Param(values * np.asarray(factors, np.float32).astype(values.dtype))


def _fold_into_heads(attention: Attention, k: float, v: float) -> None:
    """Divide keys by `k` and values by `v`; multiply queries and outputs."""
    config = attention.config
    q_norm, k_norm = attention.q_norm, attention.k_norm
    takes = k_norm is None or k_norm.kind == "rmsnorm"
    if not takes or (config.clip_qkv is not None and (v != 1 or k_norm is None)):
        raise ValueError(
            "kv_cache_dtype = 'fp8': must be auto for this model, whose checkpoint has k_scale or"
            " v_scale and whose keys are clipped or have norms around 1"
        )
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    sizes = [n * config.dim_per_head for n in (heads, groups, groups)]
    of_q, of_k = (k, 1 / k) if k_norm is None else (1.0, 1.0)
    factors_U = np.repeat(np.asarray([of_q, of_k, 1 / v]), sizes)
    attention.w_qkv = _scaled(attention.w_qkv, factors_U)
    if attention.b_qkv is not None:
        attention.b_qkv = _scaled(attention.b_qkv, factors_U)
    if q_norm is not None and k_norm is not None:
        q_norm.scale, k_norm.scale = _scaled(q_norm.scale, k), _scaled(k_norm.scale, 1 / k)
    attention.w_out = _scaled(attention.w_out, v)


def _fold_into_latents(attention: LatentAttention, k: float) -> None:
    """Divide latents and shared keys by `k`; multiply what reads them: the rotated parts of
    queries, and the projections of latents.
    """
    config = attention.config
    rank, rope, nope = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    assert rank is not None and rope is not None and nope is not None
    shared_l = np.repeat(np.asarray([1.0, 1 / k]), [rank, rope])  # a norm comes before latents
    attention.w_kv_a = _scaled(attention.w_kv_a, shared_l)
    if attention.b_kv_a is not None:
        attention.b_kv_a = _scaled(attention.b_kv_a, shared_l)
    attention.kv_a_norm.scale = _scaled(attention.kv_a_norm.scale, 1 / k)
    name = "w_q" if attention.w_q is not None else "w_q_b"
    weight = getattr(attention, name)
    a_head = np.repeat(np.asarray([1.0, k]), [nope, rope])
    setattr(attention, name, _scaled(weight, np.tile(a_head, weight.shape[-1] // (nope + rope))))
    attention.w_uk, attention.w_uv = _scaled(attention.w_uk, k), _scaled(attention.w_uv, k)
