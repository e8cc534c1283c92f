"""Dispatch (tokens -> rows by expert) and combine (rows -> weighted sums by token)."""

from kernels_pallas.token_permute.api import Implementation as Implementation
from kernels_pallas.token_permute.api import RowMap as RowMap
from kernels_pallas.token_permute.api import combine as combine
from kernels_pallas.token_permute.api import dispatch as dispatch
from kernels_pallas.token_permute.api import row_weights as row_weights
from kernels_pallas.token_permute.api import sum_rows as sum_rows
from kernels_pallas.token_permute.reference import take_rows as take_rows
from kernels_pallas.token_permute.sort import sort_by_expert as sort_by_expert
