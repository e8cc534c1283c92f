"""Operations on few rows for CPUs, in C++: XLA:CPU reads weights for them at a fraction of the memory's speed."""

from kernels_pallas.native.api import (
    SLOT_ARRAYS,
    SlotLayout,
    cached_attention,
    few_row_matmul,
    find_slots,
    rms_norm,
    slot_mlp,
    top_k,
)
from kernels_pallas.native.finder import SlotFinder
from kernels_pallas.native.library import NotBuiltError, load, multiplies_many_rows, sources_digest, take_built
from kernels_pallas.native.scope import MAX_ROWS, native_operations, takes_native, takes_native_attention

__all__ = [
    "MAX_ROWS",
    "SLOT_ARRAYS",
    "NotBuiltError",
    "SlotFinder",
    "SlotLayout",
    "cached_attention",
    "few_row_matmul",
    "find_slots",
    "load",
    "multiplies_many_rows",
    "native_operations",
    "rms_norm",
    "slot_mlp",
    "sources_digest",
    "take_built",
    "takes_native",
    "takes_native_attention",
    "top_k",
]
