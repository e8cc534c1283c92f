"""Optional operands of a grouped matmul: slots to read the matrices from, and a bias and an
activation to apply to its sums.

Legend: N rows sorted by group, F outer dimension, E groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class WeightSlots:
    """The location of the matrices: group e uses matrix (and bias) slot_E[e] of w, which may have
    any number of them.

    scales: of matrices compressed as `kernels_pallas.compressed` describes. fp8_inputs: the rows
    are rounded to E4M3 as `fp8_inputs.py` describes; the matrices are in the format `fp8`,
    transposed: [F, D] each, as tensor cores read them.
    """

    slot_E: jax.Array
    scales: jax.Array | None = None
    fp8_inputs: bool = False


@dataclass(frozen=True)
class Epilogue:
    """The operation on the float32 sums before they are stored.

    bias_EF: added to the columns. activate: applied to the sums; with `gated` called as
    activate(gate, up) on the two halves of the columns, which gives [N, F / 2].
    """

    bias_EF: jax.Array | None = None
    activate: Callable[..., jax.Array] | None = None
    gated: bool = False


PLAIN = Epilogue()
