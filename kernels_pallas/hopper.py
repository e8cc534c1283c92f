"""The parts that all Mosaic GPU kernels share: how a kernel is launched, and a block's share of its
work.

Each multiprocessor runs one persistent block, which takes every `num_sms`-th piece of the work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132  # of an H100 SXM or an H200
# A reference to memory, a barrier or an accumulator inside a kernel; JAX names no type for it.
Ref: TypeAlias = Any
Scratch: TypeAlias = Any  # what JAX allocates for a kernel: `plgpu.SMEM(...)`, `plgpu.Barrier(...)`
Slice: TypeAlias = slice | pl.Slice  # of a reference, from `pl.ds`


@dataclass(frozen=True)
class Launch:
    """How a kernel runs: the number of multiprocessors and, without a GPU, the interpreter's
    parameters.
    """

    num_sms: int = NUM_SMS
    interpret: Any = None  # `InterpretGPUParams`, which JAX moved between versions

    def make_kernel(
        self,
        body: Callable[..., None],
        out_type: jax.ShapeDtypeStruct,
        scratch: Sequence[Scratch],
        num_warpgroups: int | None = None,
    ) -> Callable[..., jax.Array]:
        """Return the kernel as a function of its input arrays. Several warpgroups run `body` as
        threads of the axis "wg".
        """
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=(self.num_sms,),
            grid_names=("sm",),
            num_threads=num_warpgroups,
            thread_name=None if num_warpgroups is None else "wg",
            compiler_params=plgpu.CompilerParams(),
            **({} if self.interpret is None else {"interpret": self.interpret}),
        )

    def num_pieces(self, total: jax.Array | int) -> jax.Array:
        """Return how many of `total` pieces of work this block does: numbers sm, sm + num_sms, sm +
        2 num_sms, ...
        """
        return (total - lax.axis_index("sm") + (self.num_sms - 1)) // self.num_sms

    def piece_index(self, i: jax.Array) -> jax.Array:
        """Return the number of this block's i-th piece of work."""
        return lax.axis_index("sm") + i * self.num_sms


ALL_SMS = Launch()
