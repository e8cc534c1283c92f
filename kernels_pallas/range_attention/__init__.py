"""Attention in which each query sees one range of keys: packed documents, windows, causal masks."""

from kernels_pallas.range_attention.api import check_supported as check_supported
from kernels_pallas.range_attention.api import range_attention as range_attention
from kernels_pallas.range_attention.api import range_attention_gradient as range_attention_gradient
from kernels_pallas.range_attention.ranges import KeyRanges as KeyRanges
