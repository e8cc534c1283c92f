"""Operations for CPUs in C++: on few rows, whose weights XLA:CPU reads at a fraction of the memory's speed; and whole
parts of a training step, which XLA:CPU takes apart into products and passes over memory.
"""

from kernels_pallas.native.api import (
    SLOT_ARRAYS,
    MLPArrays,
    SlotLayout,
    cached_attention,
    causal_attention,
    causal_attention_gradient,
    few_row_matmul,
    find_slots,
    grouped_mlp,
    grouped_mlp_gradient,
    multiplications,
    rms_norm,
    slot_mlp,
    top_k,
)
from kernels_pallas.native.finder import SlotFinder
from kernels_pallas.native.library import NotBuiltError, load, multiplies_many_rows, sources_digest, take_built
from kernels_pallas.native.scope import (
    MAX_ROWS,
    SIZE_MULTIPLE,
    native_operations,
    native_training,
    takes_native,
    takes_native_attention,
    trains_native,
)

__all__ = [
    "MAX_ROWS",
    "SIZE_MULTIPLE",
    "SLOT_ARRAYS",
    "MLPArrays",
    "NotBuiltError",
    "SlotFinder",
    "SlotLayout",
    "cached_attention",
    "causal_attention",
    "causal_attention_gradient",
    "few_row_matmul",
    "find_slots",
    "grouped_mlp",
    "grouped_mlp_gradient",
    "load",
    "multiplications",
    "multiplies_many_rows",
    "native_operations",
    "native_training",
    "rms_norm",
    "slot_mlp",
    "sources_digest",
    "take_built",
    "takes_native",
    "takes_native_attention",
    "top_k",
    "trains_native",
]
