"""The experts' MLP over weights that lie in slots, for inference; exact for any routing.

No compiled program depends on which slot holds which expert. `add_expert_outputs_by_slot_table`
reads one array of slots in place through a table from expert to slot, on a GPU in one grouped
matmul per projection. XLA:CPU would copy the slots, so `add_expert_outputs_in_bundles` takes the
arrays of a few experts at a time there.

Legend: T tokens, K choices per token, N = T K assignments, E experts of a layer, M slots, B rows of
a tile, A experts of a bundle, D hidden, F expert hidden, U = 2F (SwiGLU) or F.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmoe.layers.low_rank import ExpertAdapters
from kernels_pallas.compressed import decompressed_or_plain_weight
from kernels_pallas.expert_choices import RouterLogits, WeightedOutputs
from kernels_pallas.grouped_mlp import MLPWeights
from kernels_pallas.grouped_mlp.api import MODULES
from kernels_pallas.grouped_mlp.reference import ProductChange
from kernels_pallas.grouped_mlp.xla import expert_mlp, expert_mlp_of_rounded
from kernels_pallas.implementations import Name, default_implementations, first_supported
from kernels_pallas.token_permute import combine

BUNDLE = 8
MATRICES = ("w_up", "w_down")  # of an expert's arrays
# Up to this many tokens each expert in use runs on all of them: reading its weights takes longer
# than the surplus arithmetic.
FEW_TOKENS = 32
# an expert's arrays by name; bfloat16 may be stored as uint16 bits, matrices may be compressed
StoredExpert = Mapping[str, jax.Array]
# Up to this many tokens a GPU's kernel reads the choices instead of sorted rows.
MAX_TOKENS_BY_CHOICE = 64
TILE_FACTOR = 1.25  # rows of a tile / an expert's even share of the assignments


class ExpertInputs(NamedTuple):
    """A layer's routed tokens.

    h_TD: the experts' input. idx_TK: chosen experts; E for no expert (padding). weights_TK: factors
    of the experts' outputs. y_TD: float32, to which the weighted outputs are added. changes: the
    adapters of the experts; None without.
    """

    h_TD: jax.Array
    idx_TK: jax.Array
    weights_TK: jax.Array
    y_TD: jax.Array
    adapters: ExpertAdapters | None = None


class UnchosenInputs(NamedTuple):
    """A layer's tokens, for which the experts' first kernel chooses experts.

    h_TD: the experts' input. y_TD: float32, to which the weighted outputs are added; None for
    nothing.
    """

    h_TD: jax.Array
    logits: RouterLogits
    y_TD: jax.Array | None


class _TokensOfExperts(NamedTuple):
    """The tokens [T, D] that experts multiply, and the experts' adapters."""

    h_TD: jax.Array
    adapters: ExpertAdapters | None


class ExpertProducts(NamedTuple):
    """How experts compute: their activation, and whether the inputs of both products are rounded to
    E4M3 (`kernels_pallas/grouped_matmul/fp8_inputs.py`). An array of slots then holds matrices
    transposed, as tensor cores read them.
    """

    activation: str
    fp8_inputs: bool = False

    def decode_and_apply(
        self, x_BD: jax.Array, arrays: "StoredExpert", change: ProductChange | None = None
    ) -> jax.Array:
        """Return [B, D] in x's dtype: one expert's MLP, from its stored arrays."""
        if self.fp8_inputs:
            weights = decode_expert(arrays, jnp.float32)
            return expert_mlp_of_rounded(x_BD, weights, self.activation, change)
        return expert_mlp(x_BD, decode_expert(arrays, x_BD.dtype), self.activation, change)


class _SortedAssignments(NamedTuple):
    """Assignments sorted by expert.

    token_N has one more tile of entries, since the last tile may run past the end.
    """

    token_N: jax.Array
    rank_TK: jax.Array
    starts_E: jax.Array
    sizes_E: jax.Array


def _sort_by_expert(idx_TK: jax.Array, num_experts: int, tile_rows: int) -> _SortedAssignments:
    """Return the assignments sorted by expert. tile_rows: entries appended to `token_N`."""
    num_tokens, k = idx_TK.shape
    n, idx_N = num_tokens * k, idx_TK.reshape(-1)
    order_N = jnp.argsort(idx_N, stable=True).astype(jnp.int32)
    rank_N = (
        jnp.zeros(n, jnp.int32).at[order_N].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)
    )
    sizes_E = (idx_N[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
    token_N = jnp.concatenate([order_N // k, jnp.zeros(tile_rows, jnp.int32)])
    return _SortedAssignments(
        token_N, rank_N.reshape(num_tokens, k), jnp.cumsum(sizes_E) - sizes_E, sizes_E
    )


def _add_weighted_rows(
    out: jax.Array,
    routed: ExpertInputs,
    by_expert: _SortedAssignments,
    implementation: Name | None = None,
) -> jax.Array:
    """Return y plus the weighted sum of each token's rows of `out`."""
    num_experts = by_expert.sizes_E.shape[0]
    weights_TK = jnp.where(routed.idx_TK < num_experts, routed.weights_TK, 0.0)
    src_N = by_expert.token_N[: routed.idx_TK.size]
    return routed.y_TD + combine(
        out, weights_TK, src_N, by_expert.rank_TK, True, implementation=implementation
    )


def _write_tile(
    out: jax.Array,
    tokens: _TokensOfExperts,
    by_expert: _SortedAssignments,
    row: jax.Array,
    expert: tuple[jax.Array, StoredExpert],
    products: ExpertProducts,
) -> jax.Array:
    """Return `out` with the output of an expert (number, stored arrays) for a tile of rows that
    starts at `row`.

    Rows past the expert's end hold garbage until the next tile overwrites them.
    """
    tile_rows = by_expert.token_N.size - by_expert.rank_TK.size
    token_B = lax.dynamic_slice_in_dim(by_expert.token_N, row, tile_rows)
    number, arrays = expert
    change = (
        None
        if tokens.adapters is None
        else tokens.adapters.product_change_of_expert(number, token_B)
    )
    y_BD = products.decode_and_apply(tokens.h_TD[token_B], arrays, change)
    return lax.dynamic_update_slice_in_dim(out, y_BD.astype(jnp.float32), row, axis=0)


# From one array of slots, through a table


def add_expert_outputs_by_slot_table(
    routed: ExpertInputs,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    *,
    activation: str,
    tile_rows: int,
    fp8_inputs: bool = False,
    implementation: Name | None = None,
) -> jax.Array:
    """Return float32 [T, D]: `routed.y_TD` plus the weighted sum of each token's experts, whose
    weights are in slot `table_E[expert]`.

    slots: arrays [M, ...] by name; bfloat16 as uint16 bits. An expert without tokens costs nothing,
    and its slot may hold anything. tile_rows: rows of a tile in the implementation `xla`.
    fp8_inputs: see `ExpertProducts`. implementation: None for the best that supports the case.
    """
    outputs = expert_outputs_by_slot_table(
        *(routed, slots, table_E),
        products=ExpertProducts(activation, fp8_inputs),
        tile_rows=tile_rows,
        implementation=implementation,
    )
    return sum_outputs(outputs)


def sum_outputs(outputs: jax.Array | WeightedOutputs) -> jax.Array:
    """Return float32 [T, D] of outputs that are added up, or not yet."""
    return outputs.sum() if isinstance(outputs, WeightedOutputs) else outputs


def expert_outputs_by_slot_table(
    routed: ExpertInputs,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    *,
    products: ExpertProducts,
    tile_rows: int,
    implementation: Name | None = None,
) -> jax.Array | WeightedOutputs:
    """Return the result of `add_expert_outputs_by_slot_table`; of few tokens on a GPU as summands,
    for a kernel that adds them.
    """
    forms: dict[Name, Callable[[], jax.Array | WeightedOutputs]] = {
        **{
            name: partial(_add_outputs_by_grouped_matmul, name, routed, slots, table_E, products)
            for name in ("mosaic_gpu", "triton")
        },
        "xla": partial(
            _add_outputs_by_tiles, routed, slots, table_E, products, tile_rows, implementation
        ),
    }
    names = default_implementations() if implementation is None else (implementation,)
    candidates: list[tuple[str, Callable[[], jax.Array | WeightedOutputs]]]
    candidates = [(name, forms[name]) for name in names]
    is_few = routed.h_TD.shape[0] <= MAX_TOKENS_BY_CHOICE
    if "triton" in names and is_few and routed.adapters is None:
        by_choice = partial(_outputs_by_choice, routed, slots, table_E, products)
        candidates.insert(0, ("triton by choice", by_choice))
    return first_supported("expert_outputs_by_slot_table", candidates)


def _outputs_by_choice(
    routed: ExpertInputs,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    products: ExpertProducts,
) -> WeightedOutputs:
    """Return the result of `expert_outputs_by_slot_table` in two launches, for few tokens: a step
    of decoding would spend more time in the launches of a sort than in its kernels.
    """
    # imported on first use: the import takes a second
    mlp_of_choices = import_module(MODULES["triton"]).mlp_of_choices

    y_TKD = mlp_of_choices(routed.h_TD, routed.idx_TK, slots, table_E, **products._asdict())
    return WeightedOutputs(y_TKD, routed.weights_TK, routed.idx_TK, routed.y_TD, table_E.shape[0])


def choose_and_apply_experts(
    unchosen: UnchosenInputs,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    *,
    products: ExpertProducts,
    tile_rows: int,
    interpret: bool = False,
) -> tuple[jax.Array | WeightedOutputs, jax.Array]:
    """Return (`expert_outputs_by_slot_table` of tokens whose experts are not chosen yet; the chosen
    experts [T, K]), for few tokens on an NVIDIA GPU.

    The first product's kernel chooses, or a kernel of its own where comparing experts with each
    other does not suffice.
    """
    h_TD, logits, y_TD = unchosen
    num_experts = table_E.shape[0]

    def in_product() -> tuple[jax.Array | WeightedOutputs, jax.Array]:
        # imported on first use: the import takes a second
        mlp_of_logits = import_module(MODULES["triton"]).mlp_of_logits
        rows, idx_TK, weights_TK = mlp_of_logits(
            h_TD, logits, slots, table_E, interpret=interpret, **products._asdict()
        )
        return WeightedOutputs(rows, weights_TK, idx_TK, y_TD, num_experts), idx_TK

    def before() -> tuple[jax.Array | WeightedOutputs, jax.Array]:
        choose_experts = import_module("kernels_pallas.choose_experts").choose_experts
        idx_TK, weights_TK = choose_experts(logits, interpret=interpret)
        added_TD = jnp.zeros(h_TD.shape, jnp.float32) if y_TD is None else y_TD
        routed = ExpertInputs(h_TD, idx_TK, weights_TK, added_TD)
        outputs = expert_outputs_by_slot_table(
            routed, slots, table_E, products=products, tile_rows=tile_rows
        )
        if isinstance(outputs, WeightedOutputs):  # which need no zeros
            outputs = replace(outputs, y_TD=y_TD)
        return outputs, idx_TK

    candidates = [("the product's kernel", in_product), ("a kernel of its own", before)]
    return first_supported("choice of experts", candidates)


def _add_outputs_by_grouped_matmul(
    implementation: Name,
    routed: ExpertInputs,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    products: ExpertProducts,
) -> jax.Array:
    """Return the result of `add_expert_outputs_by_slot_table`, by one grouped matmul per projection
    over all experts, which reads the slots as stored.
    """
    # imported on first use: the import takes a second
    grouped_mlp_in_slots = import_module(MODULES[implementation]).grouped_mlp_in_slots

    num_experts, n = table_E.shape[0], routed.idx_TK.size
    by_expert = _sort_by_expert(routed.idx_TK, num_experts, 0)
    rows_ND = routed.h_TD[by_expert.token_N]
    change = None
    if routed.adapters is not None:
        change = routed.adapters.product_change_of_groups(by_expert.token_N, by_expert.sizes_E)
    out = grouped_mlp_in_slots(
        rows_ND, by_expert.sizes_E, slots, table_E, change=change, **products._asdict()
    )
    # rows of choices without an expert are never written: point them past the end
    rank_TK = jnp.where(routed.idx_TK < num_experts, by_expert.rank_TK, n)
    return routed.y_TD + combine(out, routed.weights_TK, by_expert.token_N, rank_TK, False)


def _add_outputs_by_tiles(
    routed: ExpertInputs,
    slots: Mapping[str, jax.Array],
    table_E: jax.Array,
    products: ExpertProducts,
    tile_rows: int,
    implementation: Name | None,
) -> jax.Array:
    """Return the result of `add_expert_outputs_by_slot_table`, by a loop over tiles of assignments
    sorted by expert; a tile belongs to one expert.
    """
    h_TD, num_experts = routed.h_TD, table_E.shape[0]
    tokens = _TokensOfExperts(h_TD, routed.adapters)
    by_expert = _sort_by_expert(routed.idx_TK, num_experts, tile_rows)
    tiles_E = (by_expert.sizes_E + tile_rows - 1) // tile_rows

    def write_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        expert, row = _expert_and_first_row_of_tile(i, by_expert.starts_E, tiles_E, tile_rows)
        mine = expert, _pick_slot(slots, table_E[expert], products)
        return _write_tile(out, tokens, by_expert, row, mine, products)

    out = jnp.zeros((routed.idx_TK.size + tile_rows, h_TD.shape[1]), jnp.float32)
    return _add_weighted_rows(
        lax.fori_loop(0, tiles_E.sum(), write_tile, out), routed, by_expert, implementation
    )


def _expert_and_first_row_of_tile(
    i: jax.Array, starts_E: jax.Array, tiles_E: jax.Array, tile_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Return (expert, first row) of tile i, counted over the tiles of all experts."""
    ends_E = jnp.cumsum(tiles_E)
    expert = (i >= ends_E).sum(dtype=jnp.int32)
    return expert, starts_E[expert] + (i - (ends_E[expert] - tiles_E[expert])) * tile_rows


def grouped_mlp_from_slots(
    x_ND: jax.Array,
    group_sizes_E: jax.Array,
    slots: Mapping[str, jax.Array],
    *,
    activation: str,
    tile_rows: int,
    table_E: jax.Array | None = None,
    implementation: Name | None = None,
) -> jax.Array:
    """Return [N, D] in x's dtype: the expert in slot `table_E[e]`, applied to the rows of group e.

    x_ND: rows sorted by group; rows beyond the groups hold arbitrary values in the result. slots:
    arrays [M, ...] by name, with matrices compressed or not; bfloat16 may be uint16 bits. table_E:
    int32, None if group e is in slot e. tile_rows: rows of a tile in the
    implementation `xla`, whose result for a row depends on no other row. implementation: None for
    the best that supports the case.
    """
    slot_E = jnp.arange(group_sizes_E.shape[0], dtype=jnp.int32) if table_E is None else table_E
    products = ExpertProducts(activation)

    def by_grouped_matmul(name: Name) -> jax.Array:
        # imported on first use: the import takes a second
        grouped_mlp_in_slots = import_module(MODULES[name]).grouped_mlp_in_slots
        y_ND: jax.Array = grouped_mlp_in_slots(
            x_ND, group_sizes_E, slots, slot_E, activation=activation
        )
        return y_ND

    forms: dict[Name, Callable[[], jax.Array]] = {
        "mosaic_gpu": partial(by_grouped_matmul, "mosaic_gpu"),
        "triton": partial(by_grouped_matmul, "triton"),
        "xla": partial(
            _grouped_mlp_from_slots_in_tiles,
            x_ND,
            group_sizes_E,
            slots,
            slot_E,
            products,
            tile_rows,
        ),
    }
    names = default_implementations() if implementation is None else (implementation,)
    return first_supported("grouped_mlp_from_slots", [(name, forms[name]) for name in names])


def _grouped_mlp_from_slots_in_tiles(
    x_ND: jax.Array,
    group_sizes_E: jax.Array,
    slots: Mapping[str, jax.Array],
    slot_E: jax.Array,
    products: ExpertProducts,
    tile_rows: int,
) -> jax.Array:
    """Return the result of `grouped_mlp_from_slots`, by a loop over tiles of rows, each of one
    group.
    """
    tiles_E = (group_sizes_E + tile_rows - 1) // tile_rows
    starts_E = jnp.cumsum(group_sizes_E) - group_sizes_E
    # the last tile may run past the end
    padded_ND = jnp.pad(x_ND, ((0, tile_rows), (0, 0)))

    def write_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        expert, row = _expert_and_first_row_of_tile(i, starts_E, tiles_E, tile_rows)
        x_BD = lax.dynamic_slice_in_dim(padded_ND, row, tile_rows)
        y_BD = products.decode_and_apply(x_BD, _pick_slot(slots, slot_E[expert], products))
        return lax.dynamic_update_slice_in_dim(out, y_BD.astype(jnp.float32), row, axis=0)

    out = lax.fori_loop(0, tiles_E.sum(), write_tile, jnp.zeros(padded_ND.shape, jnp.float32))
    return out[: x_ND.shape[0]].astype(x_ND.dtype)


def _pick_slot(
    slots: Mapping[str, jax.Array], slot: jax.Array, products: ExpertProducts
) -> StoredExpert:
    """Return the arrays of the expert in a slot."""
    pick = lambda values: lax.dynamic_index_in_dim(values, slot, 0, keepdims=False)  # noqa: E731
    flipped = MATRICES if products.fp8_inputs else ()
    return {n: pick(x).T if n in flipped else pick(x) for n, x in slots.items()}


def decode_expert(arrays: StoredExpert, dtype: DTypeLike) -> MLPWeights:
    """Return one expert's weights in `dtype`, decoded from its stored arrays."""
    return MLPWeights(
        **{
            name: decompressed_or_plain_weight(arrays, name, dtype)
            for name in MLPWeights._fields
            if name in arrays
        }
    )


# From the arrays of single experts, a bundle at a time


def add_expert_outputs_in_bundles(
    routed: ExpertInputs, experts: Sequence[StoredExpert], products: ExpertProducts
) -> jax.Array:
    """Return float32 [T, D]: y plus the weighted sum of each token's experts, added by ascending
    expert number.

    experts: the arrays of all E experts; those of an expert that no token chose may hold anything.
    With few tokens the host reads `idx_TK` to skip unchosen experts.
    """
    num_tokens, k = routed.idx_TK.shape
    bundles = _iterate_bundles(routed.idx_TK, experts)
    if num_tokens <= FEW_TOKENS:
        y_TD = routed.y_TD
        for numbers_A, weights in bundles:
            y_TD = _add_bundle_on_all_tokens(
                products, y_TD, *routed[:3], routed.adapters, numbers_A, weights
            )
        return y_TD
    tile_rows = math.ceil(TILE_FACTOR * num_tokens * k / len(experts) / 32) * 32
    by_expert, out = _sort_and_allocate_output(len(experts), tile_rows, routed)
    tokens = _TokensOfExperts(routed.h_TD, routed.adapters)
    for numbers_A, weights in bundles:
        out = _write_bundle_rows(products, tile_rows, out, tokens, by_expert, numbers_A, weights)
    return _add_combined_compiled(out, routed, by_expert)


def _iterate_bundles(
    idx_TK: jax.Array, experts: Sequence[StoredExpert]
) -> Iterator[tuple[np.ndarray, tuple[StoredExpert, ...]]]:
    """Yield (expert numbers, arrays) of 8, 4, 2 or 1 experts at a time, so that a few compiled
    programs serve any number of experts.

    With more than `FEW_TOKENS` tokens yields all experts, since most are chosen; otherwise only the
    chosen ones, for which the host waits for `idx_TK`.
    """
    numbers = np.arange(len(experts), dtype=np.int32)
    if idx_TK.shape[0] <= FEW_TOKENS:
        uses_E = np.bincount(np.asarray(idx_TK).reshape(-1), minlength=len(experts))[: len(experts)]
        numbers = np.flatnonzero(uses_E).astype(np.int32)
    # A batch of padding alone warms up: run every size with numbers that match no token, so that
    # no later call compiles.
    if not numbers.size:
        for size in (8, 4, 2, 1):
            if size <= len(experts):
                yield np.full(size, -1, np.int32), tuple(experts[:size])
    at = 0
    while at < numbers.size:
        size = min(BUNDLE, 2 ** ((numbers.size - at).bit_length() - 1))
        some = numbers[at : at + size]
        yield some, tuple(experts[n] for n in some)
        at += size


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add_bundle_on_all_tokens(
    products: ExpertProducts,
    y_TD: jax.Array,
    h_TD: jax.Array,
    idx_TK: jax.Array,
    weights_TK: jax.Array,
    adapters: ExpertAdapters | None,
    numbers_A: jax.Array,
    experts: Sequence[StoredExpert],
) -> jax.Array:
    """Return y plus the weighted outputs of a bundle's experts. Each of them runs on all tokens."""
    all_T = jnp.arange(h_TD.shape[0])
    for a, expert in enumerate(experts):
        mine_TK = idx_TK == numbers_A[a]
        change = (
            None if adapters is None else adapters.product_change_of_expert(numbers_A[a], all_T)
        )
        gate_T1 = jnp.where(mine_TK, weights_TK, 0.0).sum(axis=1, keepdims=True)
        out_TD = products.decode_and_apply(h_TD, expert, change).astype(jnp.float32)
        y_TD = y_TD + jnp.where(mine_TK.any(axis=1, keepdims=True), gate_T1 * out_TD, 0.0)
    return y_TD


@partial(jax.jit, static_argnums=(0, 1))
def _sort_and_allocate_output(
    num_experts: int, tile_rows: int, routed: ExpertInputs
) -> tuple[_SortedAssignments, jax.Array]:
    """Return (the assignments sorted by expert, zeros for the experts' output rows)."""
    out = jnp.zeros((routed.idx_TK.size + tile_rows, routed.h_TD.shape[1]), jnp.float32)
    return _sort_by_expert(routed.idx_TK, num_experts, tile_rows), out


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _write_bundle_rows(
    products: ExpertProducts,
    tile_rows: int,
    out: jax.Array,
    tokens: _TokensOfExperts,
    by_expert: _SortedAssignments,
    numbers_A: jax.Array,
    experts: Sequence[StoredExpert],
) -> jax.Array:
    """Return `out` with the outputs of a bundle's experts in the rows of their assignments."""
    for a, expert in enumerate(experts):
        start = by_expert.starts_E[numbers_A[a]]
        size = by_expert.sizes_E[numbers_A[a]]

        def write_tile(
            i: jax.Array,
            out: jax.Array,
            expert: StoredExpert = expert,
            start: jax.Array = start,
            number: jax.Array = numbers_A[a],
        ) -> jax.Array:
            return _write_tile(
                out,
                tokens,
                by_expert,
                start + i * tile_rows,
                (number, expert),
                products,
            )

        out = lax.fori_loop(0, (size + tile_rows - 1) // tile_rows, write_tile, out)
    return out


_add_combined_compiled = jax.jit(_add_weighted_rows)
