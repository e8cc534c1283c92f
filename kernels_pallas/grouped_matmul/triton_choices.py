"""A grouped matmul of few tokens in Triton, whose kernel reads the tokens' choices of experts.

Rows are not sorted, nothing is dispatched, and no table of tiles is computed before: a tile has the
rows of one expert among all tokens. Its other rows are multiplied too, which costs nothing while
the weights come from memory.

Legend: T tokens, K choices per token, N = T K assignments, D inner, F outer dimension, E experts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.grouped_matmul.operands import PLAIN, Epilogue, WeightSlots
from kernels_pallas.grouped_matmul.triton import (
    MIN_ROWS,
    TileRows,
    check_operands,
    make_product,
)
from kernels_pallas.triton import Ref, choose_blocks, index_range, launch, load, tile_in_bands

MAX_TOKENS = 64  # of a tile


def matmul_of_choices(
    x: jax.Array,
    w: jax.Array,
    idx_TK: jax.Array,
    slots: WeightSlots,
    *,
    epilogue: Epilogue = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """Return [N, F] in x's dtype: row t K + k is the product of token t with the matrix of its
    expert idx_TK[t, k], in slot `slots.slot_E` of that expert.

    x: [T, D], or [N, D] with a row of its own for each assignment. idx_TK: int32, of which a token
    has none twice; E for no expert, whose row is arbitrary. Raises NotImplementedError for more
    than `MAX_TOKENS` tokens and for operands that `grouped_matmul` does not take.
    """
    check_operands(x, w, None, slots, False)
    (num_tokens, k), num_experts = idx_TK.shape, slots.slot_E.shape[0]
    if num_tokens > MAX_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens: more than {MAX_TOKENS}")
    num_m, width = min(num_tokens * k, num_experts), pl.next_power_of_2(k)
    rows = max(MIN_ROWS, pl.next_power_of_2(num_tokens))
    blocks = replace(choose_blocks(x.dtype), rows=rows, num_warps=4)
    product = make_product(x, w, slots, epilogue, blocks, num_m)
    has_own_rows, by_expert = x.shape[0] != num_tokens, num_m == num_experts

    def grouped_matmul_kernel(idx: Ref, *refs: Ref) -> None:
        *arrays, slot_E, out = refs
        m, n = tile_in_bands(pl.program_id(0), num_m, product.num_n)
        token, choice = index_range(0, rows), index_range(0, width)
        exists = (token < num_tokens)[:, None] & (choice < k)[None]
        chosen = load(idx.at[token[:, None], choice[None]], exists)
        assignment = token[:, None] * k + choice[None]
        # a tile for each expert, or for each assignment that is the first of its expert
        expert = m if by_expert else idx[m // k, m % k]
        is_mine = exists & (chosen == expert)
        earlier = is_mine & (assignment < (0 if by_expert else m))
        count, count_before = (mask.astype(jnp.int32).sum() for mask in (is_mine, earlier))

        @pl.when((count > 0) & (count_before == 0) & (expert < num_experts))
        def compute_tile() -> None:
            row = jnp.where(is_mine, assignment, 0).sum(axis=1)
            is_row = is_mine.astype(jnp.int32).sum(axis=1) > 0
            # Pallas' interpreter writes a masked row's old content, so it needs a row of its own
            row = jnp.where(is_row, row, num_tokens * k + token)
            read = row if has_own_rows else token
            slot = slot_E[expert]
            product.compute_tile(arrays, out, slot, n, TileRows(read, row, is_row))

    out = jax.ShapeDtypeStruct((num_tokens * k, product.num_columns), x.dtype)
    operands = (idx_TK, *product.arrays, slots.slot_E.astype(jnp.int32))
    grid, settings = (num_m * product.num_n,), product.blocks
    return launch(grouped_matmul_kernel, out, grid, operands, blocks=settings, interpret=interpret)
