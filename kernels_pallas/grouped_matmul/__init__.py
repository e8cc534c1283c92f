"""Matrix products of ragged groups of rows, each group with its own matrix."""

from kernels_pallas.grouped_matmul.api import Implementation as Implementation
from kernels_pallas.grouped_matmul.api import grouped_matmul as grouped_matmul
from kernels_pallas.grouped_matmul.api import quantized_grouped_matmul as quantized_grouped_matmul
from kernels_pallas.grouped_matmul.quantize import quantize as quantize
