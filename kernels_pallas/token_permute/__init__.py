"""Dispatch (tokens -> rows by expert) and combine (rows -> weighted sums by token)."""

from kernels_pallas.token_permute.reference import combine as combine
from kernels_pallas.token_permute.reference import dispatch as dispatch
from kernels_pallas.token_permute.reference import sum_rows as sum_rows
from kernels_pallas.token_permute.reference import take_rows as take_rows
