"""A grouped matmul of few tokens in Triton, whose kernel reads the tokens' choices of experts, or
chooses them from the router's logits.

Rows are not sorted, nothing is dispatched, and no table of tiles is computed before: a tile has the
rows of one expert among all tokens. Its other rows are multiplied too, which costs nothing while
the weights come from memory.

Legend: T tokens, K choices per token, N = T K assignments, D inner, F outer dimension, E experts, R
rows of a tile.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.choose_experts import ChoiceRefs, TokenChoice
from kernels_pallas.expert_choices import RouterLogits
from kernels_pallas.grouped_matmul.operands import PLAIN, Epilogue, WeightSlots
from kernels_pallas.grouped_matmul.triton import (
    MIN_ROWS,
    Product,
    TileRows,
    check_operands,
    make_product,
)
from kernels_pallas.triton import (
    Ref,
    choose_blocks,
    index_range,
    launch_with_results,
    load,
    tile_in_bands,
)

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
    tiles = _tiles_of_choices(idx_TK.shape, slots)
    product = _make_product(x, w, tiles, slots, epilogue)
    has_own_rows, choices = x.shape[0] != tiles.num_tokens, _GivenChoices(tiles)

    def grouped_matmul_kernel(idx: Ref, *refs: Ref) -> None:
        *arrays, slot_E, out = refs
        _compute_tile(tiles, choices, idx, product, arrays, slot_E, out, has_own_rows)

    operands = (idx_TK, *product.arrays, slots.slot_E.astype(jnp.int32))
    (y_ND,) = _launch(grouped_matmul_kernel, tiles, product, [], operands, interpret)
    return y_ND


def choose_and_multiply(
    x_TD: jax.Array,
    w: jax.Array,
    logits: RouterLogits,
    slots: WeightSlots,
    *,
    epilogue: Epilogue = PLAIN,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (`matmul_of_choices` of the experts that the logits choose; the results of
    `choose_experts`, which some of the programs write).

    Each program finds its tile's expert, and the tokens that chose it, by comparing logits. Raises
    NotImplementedError as `matmul_of_choices`, and for choices by more than such comparisons.
    """
    choice, choice_operands = TokenChoice.from_logits(logits)
    choice.check_ranks()
    num_tokens, k = x_TD.shape[0], logits.rules.num_choices
    tiles = _tiles_of_choices((num_tokens, k), slots)
    product = _make_product(x_TD, w, tiles, slots, epilogue)
    choices, num_programs = _RankedChoices(tiles, choice), tiles.num_m * product.num_n
    arrays_of_product = product.arrays
    num_arrays = len(arrays_of_product)

    def grouped_matmul_kernel(first: Ref, *refs: Ref) -> None:
        arrays, others = refs[:num_arrays], refs[num_arrays:]
        choice_refs, (slot_E, out, idx_out, weights_out) = choice.split((first, *others))

        program = pl.program_id(0)

        def write_choice(i: jax.Array, _: None) -> None:
            token = program + i * num_programs

            @pl.when(token < num_tokens)
            def write_token() -> None:
                choice.write(choice_refs, token, idx_out, weights_out)

        lax.fori_loop(0, pl.cdiv(num_tokens, num_programs), write_choice, None)
        _compute_tile(tiles, choices, choice_refs, product, arrays, slot_E, out, False)

    first, *others = choice_operands
    operands = (first, *arrays_of_product, *others, slots.slot_E.astype(jnp.int32))
    y_ND, idx_TK, weights_TK = _launch(
        grouped_matmul_kernel, tiles, product, choice.results(), operands, interpret
    )
    return y_ND, idx_TK, weights_TK


class _Tiles(NamedTuple):
    """T tokens with K choices among E experts, and the tiles of `rows` rows that compute them: one
    for each expert, or for each assignment that is the first of its expert.
    """

    num_tokens: int
    k: int
    num_experts: int
    rows: int

    @property
    def num_m(self) -> int:
        return min(self.num_tokens * self.k, self.num_experts)

    @property
    def by_expert(self) -> bool:
        return self.num_m == self.num_experts


def _tiles_of_choices(shape: tuple[int, ...], slots: WeightSlots) -> _Tiles:
    """Return the tiles of choices [T, K]."""
    num_tokens, k = shape
    if num_tokens > MAX_TOKENS:
        raise NotImplementedError(f"{num_tokens} tokens: more than {MAX_TOKENS}")
    rows = max(MIN_ROWS, pl.next_power_of_2(num_tokens))
    return _Tiles(num_tokens, k, slots.slot_E.shape[0], rows)


def _make_product(
    x: jax.Array, w: jax.Array, tiles: _Tiles, slots: WeightSlots, epilogue: Epilogue
) -> Product:
    check_operands(x, w, None, slots, False)
    blocks = replace(choose_blocks(x.dtype), rows=tiles.rows, num_warps=4)
    return make_product(x, w, slots, epilogue, blocks, tiles.num_m)


class _Choices(Protocol):
    """Finds the expert of a tile, and the assignments to an expert."""

    def expert_of(self, refs: Any, m: jax.Array) -> jax.Array:
        """Return the expert of assignment m."""

    def choice_of_tokens(self, refs: Any, expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return ([R], which of its choices an expert is of each token; whether it is one)."""


@dataclass(frozen=True)
class _GivenChoices:
    """Choices that the kernel reads: refs is a reference to idx_TK."""

    tiles: _Tiles

    def expert_of(self, refs: Ref, m: jax.Array) -> jax.Array:
        expert: jax.Array = refs[m // self.tiles.k, m % self.tiles.k]
        return expert

    def choice_of_tokens(self, refs: Ref, expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_tokens, k, _, rows = self.tiles
        token, choice = index_range(0, rows), index_range(0, pl.next_power_of_2(k))
        exists = (token < num_tokens)[:, None] & (choice < k)[None]
        chosen = load(refs.at[token[:, None], choice[None]], exists)
        is_mine = exists & (chosen == expert)
        at_R = jnp.where(is_mine, choice[None], 0).sum(axis=1)
        return at_R, is_mine.astype(jnp.int32).sum(axis=1) > 0


@dataclass(frozen=True)
class _RankedChoices:
    """Choices that the kernel makes: refs are `TokenChoice`'s."""

    tiles: _Tiles
    choice: TokenChoice

    def expert_of(self, refs: ChoiceRefs, m: jax.Array) -> jax.Array:
        return self.choice.expert_of(refs, m // self.tiles.k, m % self.tiles.k)

    def choice_of_tokens(self, refs: ChoiceRefs, expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        rank_R = self.choice.ranks_of(refs, index_range(0, self.tiles.rows), expert)
        return rank_R, rank_R < self.tiles.k


def _compute_tile(
    tiles: _Tiles,
    choices: _Choices,
    refs: Any,
    product: Product,
    arrays: tuple[Ref, ...] | list[Ref],
    slot_E: Ref,
    out: Ref,
    has_own_rows: bool,
) -> None:
    """Write the rows of the program's tile, if it has some."""
    m, n = tile_in_bands(pl.program_id(0), tiles.num_m, product.num_n)
    token = index_range(0, tiles.rows)
    expert = m if tiles.by_expert else choices.expert_of(refs, m)
    choice_R, is_row = choices.choice_of_tokens(refs, expert)
    row = jnp.where(is_row, token * tiles.k + choice_R, tiles.num_tokens * tiles.k + token)
    is_first = (row.min() == m) | tiles.by_expert

    @pl.when(is_first & (row.min() < tiles.num_tokens * tiles.k) & (expert < tiles.num_experts))
    def compute_tile() -> None:
        # Pallas' interpreter writes a masked row's old content, so it needs a row of its own
        read = row if has_own_rows else token
        product.compute_tile(arrays, out, slot_E[expert], n, TileRows(read, row, is_row))


def _launch(
    kernel: Any,
    tiles: _Tiles,
    product: Product,
    more: list[jax.ShapeDtypeStruct],
    operands: tuple[jax.Array, ...],
    interpret: bool,
) -> list[jax.Array]:
    """Return the products [N, F], and the results `more` after them."""
    dtype = product.reader.x_TD.dtype
    out = jax.ShapeDtypeStruct((tiles.num_tokens * tiles.k, product.num_columns), dtype)
    grid, settings = (tiles.num_m * product.num_n,), product.blocks
    return launch_with_results(
        kernel, [out, *more], grid, operands, blocks=settings, interpret=interpret
    )
