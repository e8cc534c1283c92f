"""The expert MLP over ragged groups of rows."""

from kernels_pallas.grouped_mlp.reference import activate as activate
from kernels_pallas.grouped_mlp.xla import grouped_mlp as grouped_mlp
