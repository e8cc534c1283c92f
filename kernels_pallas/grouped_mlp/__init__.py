"""The expert MLP over ragged groups of rows."""

from kernels_pallas.grouped_mlp.api import grouped_mlp as grouped_mlp
from kernels_pallas.grouped_mlp.by_matmul import changed_grouped_mlp as changed_grouped_mlp
from kernels_pallas.grouped_mlp.reference import MLPWeights as MLPWeights
from kernels_pallas.grouped_mlp.reference import activate as activate
