"""Attention over a KV cache that consists of blocks."""

from kernels_pallas.paged_attention.api import paged_attention as paged_attention
from kernels_pallas.paged_attention.api import reads_in_place as reads_in_place
