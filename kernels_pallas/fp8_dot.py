"""A product of two blocks in E4M3 inside of a Triton kernel, for the FP8 instructions of tensor
cores.

Hopper's instruction adds its products up with about 14 bits. Triton therefore multiplies E4M3 there
as float16, at half of the rate or less, unless the product allows such sums; Pallas has no option
for it (`max_num_imprecise_acc` of Triton's own `tl.dot`). So this product is a primitive whose
lowering adds the attribute. The caller multiplies few inputs at a time and adds the results in
float32 itself, as DeepSeek-V3 does every 128 inputs. Ada and Blackwell add in float32 anyway.
"""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from kernels_pallas.triton import dot


def _import_lowering() -> Any:
    """Return JAX's module of Triton lowerings, which it does not export; None if a later JAX has
    moved it.
    """
    try:
        lowering: Any = import_module("jax._src.pallas.triton.lowering")
    except ImportError:
        return None
    return lowering if hasattr(lowering, "triton_lowering_rules") else None


_LOWERING = _import_lowering()
# Whether Hopper may add products up with fewer bits; if not, it multiplies E4M3 as float16.
ALLOWS_FEWER_BITS = _LOWERING is not None
_ATTRIBUTE = "maxNumImpreciseAcc"
_fp8_dot = Primitive("fp8_dot")


def fp8_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 product of blocks [M, K] and [N, K] in E4M3, over at most 128 inputs,
    which an instruction may add up with fewer bits.
    """
    if not ALLOWS_FEWER_BITS:
        return dot(a, b, (1, 1))
    product: jax.Array = _fp8_dot.bind(a, b)
    return product


def _evaluate(a: jax.Array, b: jax.Array) -> jax.Array:
    return dot(a, b, (1, 1))


def _lower_in_triton(context: Any, a: Any, b: Any) -> Any:
    """Lower the product as `lax.dot_general`, and allow sums of K inputs of fewer bits."""
    product = _LOWERING.triton_lowering_rules[lax.dot_general_p](
        context,
        a,
        b,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=None,
        preferred_element_type=jnp.float32,
        out_sharding=None,
    )
    num_inputs = context.avals_in[0].shape[1]
    ir: Any = _LOWERING.ir
    integer = ir.IntegerType.get_signless(32)
    product.owner.attributes[_ATTRIBUTE] = ir.IntegerAttr.get(integer, num_inputs)
    return product


_fp8_dot.def_impl(_evaluate)
_fp8_dot.def_abstract_eval(
    lambda a, b: jax.core.ShapedArray((a.shape[0], b.shape[0]), jnp.dtype(jnp.float32))
)
mlir.register_lowering(_fp8_dot, mlir.lower_fun(_evaluate, multiple_results=False))
if _LOWERING is not None:
    _LOWERING.triton_lowering_rules[_fp8_dot] = _lower_in_triton
