"""The parts that all Pallas-Triton kernels share: how a kernel is launched, the sizes of its
blocks, and the order in which its tiles run.

Triton compiles for Ampere, Ada, Hopper and Blackwell. JAX 0.11 calls Pallas' Triton backend
deprecated; a JAX without it runs the next implementation.

Legend: M, N tiles of rows and columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.implementations import target_device
from kernels_pallas.matmul import float32_precision

try:
    from jax.experimental.pallas import triton as pltriton
except ImportError as error:  # a later JAX
    raise NotImplementedError("this JAX has no Pallas-Triton") from error

Ref: TypeAlias = Any  # a reference to memory inside a kernel; JAX names no type for it
BAND = 8  # consecutive row tiles that run before the next column tile of the weights
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
SMALL_MEMORY = ("8.6", "8.9", "12.0", "12.1")  # 99 KiB of shared memory; others have 163 or more


@dataclass(frozen=True)
class BlockSizes:
    """The rows, columns and inner dimension of one tile of a product, and the warps and pipeline
    stages of the program that computes it.
    """

    rows: int = 128
    columns: int = 128
    inner: int = 64
    num_warps: int = 8
    num_stages: int = 3


WIDE, SMALL = BlockSizes(), BlockSizes(inner=32, num_stages=4)
FLOAT32 = BlockSizes(rows=64, columns=64, inner=32, num_warps=4, num_stages=2)  # no tensor cores


def choose_blocks(dtype: jax.typing.DTypeLike) -> BlockSizes:
    """Return the tile sizes and launch settings of a product of this dtype on the target GPU."""
    if dtype == jnp.float32:
        return FLOAT32
    capability = getattr(target_device(), "compute_capability", None)
    return SMALL if capability in SMALL_MEMORY else WIDE


def check_dtypes(*arrays: jax.Array) -> None:
    """Raise NotImplementedError unless all arrays have one dtype, which the kernels support."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) > 1 or not dtypes <= set(map(jnp.dtype, DTYPES)):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(f"dtypes {names}: not one of bfloat16, float16, float32")


def launch(
    body: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    operands: Sequence[jax.Array],
    *,
    blocks: BlockSizes = WIDE,
    interpret: bool = False,
) -> jax.Array:
    """Return the result of a kernel; see `launch_with_results`."""
    results = launch_with_results(body, [out], grid, operands, blocks=blocks, interpret=interpret)
    return results[0]


def launch_with_results(
    body: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    operands: Sequence[jax.Array],
    *,
    blocks: BlockSizes = WIDE,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Return the results of a kernel. body: takes a reference to each operand and to each result.

    aliases: {operand: result} of operands whose memory the result takes, with their content.
    interpret: runs the kernel without a GPU.
    """
    params = pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages)
    kernel = pl.pallas_call(
        body,
        out_shape=list(outs),
        grid=grid,
        compiler_params=params,
        input_output_aliases=dict(aliases or {}),
        interpret=interpret,
        name=body.__name__,
    )
    with jax.named_scope(body.__name__):  # the estimates know the kernel by it
        results: list[jax.Array] = kernel(*operands)
    return results


def load(ref: Ref, mask: jax.Array) -> jax.Array:
    """Return the values at the indices of a reference, 0 where the mask is False."""
    return pltriton.load(ref, mask=mask, other=0)


def store(ref: Ref, value: jax.Array, mask: jax.Array) -> None:
    """Write `value`, cast to the reference's dtype, to its indices where the mask is True."""
    pltriton.store(ref, value.astype(ref.dtype), mask=mask)


def split_optional(
    refs: Sequence[Ref], are_there: Sequence[bool]
) -> tuple[list[Ref | None], list[Ref]]:
    """Return (references to optional operands, None for those that are not there; the references
    after them).
    """
    following = list(refs)
    return [following.pop(0) if is_there else None for is_there in are_there], following


def index_range(start: jax.Array | int, count: int) -> jax.Array:
    """Return int32 [count]: start, start + 1, and so on."""
    return start + jnp.arange(count, dtype=jnp.int32)


def dot(a: jax.Array, b: jax.Array, contracted_dims: tuple[int, int]) -> jax.Array:
    """Return the float32 product of two blocks, summed over dimension `contracted_dims[0]` of a and
    `contracted_dims[1]` of b; exact for float32.
    """
    left, right = contracted_dims
    return lax.dot_general(
        a,
        b,
        (((left,), (right,)), ((), ())),
        precision=float32_precision(a, b),
        preferred_element_type=jnp.float32,
    )


def tile_in_bands(index: jax.Array, num_m: int, num_n: int) -> tuple[jax.Array, jax.Array]:
    """Return tile (m, n) of an index that runs down BAND rows of tiles, then to the next column, so
    that what neighbours read is still in the cache.
    """
    band = index // (BAND * num_n)
    height = jnp.minimum(BAND, num_m - band * BAND)
    within = index - band * (BAND * num_n)
    n = within // height
    return band * BAND + within - n * height, n
