"""The programs of a decoder over a KV cache: one layer, several layers, logits.

Programs compile once per shape and serve all layers of a kind and all policies (`Residency`), which
differ only in the slots.

Legend:
P rows of a step
C tokens a row
T tokens, P * C
D hidden
V vocabulary
E experts of a layer
K experts that a token chooses
N layers with experts
W blocks of a table
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmoe.inference.cached_layers import (
    Arrays,
    CachePlaces,
    Hidden,
    attend_and_route_local,
    embed_local,
)
from jmoe.inference.kv_cache import LayerCache
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.inference.sampling import greedy, sample_settled
from jmoe.layers.low_rank import LayerAdapters
from jmoe.layers.slot_experts import (
    ExpertInputs,
    ExpertProducts,
    UnchosenInputs,
    choose_and_apply_experts,
)
from jmoe.models.functional import ModuleStructure
from jmoe.offload.slots import expert_outputs_in_tiles
from jmoe.types import PyTree
from kernels_pallas.expert_choices import WeightedOutputs
from kernels_pallas.native import ExpertByteOffsets, allow_native_inference, find_slots, slot_mlp
from kernels_pallas.paged_attention import reads_in_place

# on an accelerator without a kernel that reads blocks in place, programs for single tokens read
# this many positions, a program for each
CONTEXTS = [512 * 4**n for n in range(12)]


def context_bucket(num_positions: int, table_positions: int) -> int | None:
    """Return how many positions of a table the attention of single tokens reads: the smallest of
    `CONTEXTS` that is at least `num_positions`, so that few programs are compiled, and at most
    `table_positions`.

    None if a kernel reads blocks in place, whose one program serves all lengths.
    """
    if reads_in_place():
        return None
    return min(next(n for n in CONTEXTS if n >= num_positions), table_positions)


class LayerProgramOptions(NamedTuple):
    """Static options of a layer's program.

    native: use native (C++) operations.
    context: see `write_and_attend`.
    chooses: False if the experts' kernel may choose the experts.
    """

    native: bool
    context: int | None = None
    chooses: bool = True


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def attend_and_route_program(
    variant: LayerProgramOptions,
    structure: ModuleStructure,
    arrays: Arrays,
    cache: LayerCache,
    hidden: Hidden,
    places: CachePlaces,
    adapters: LayerAdapters | None = None,
) -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs | UnchosenInputs]:
    with allow_native_inference(places.positions_PC.size * variant.native):
        return attend_and_route_local(
            structure,
            arrays,
            cache,
            hidden,
            places._replace(context=variant.context),
            adapters=adapters,
            chooses=variant.chooses,
        )


add_alone = jax.jit(lambda hidden: hidden.sum())
embed = jax.jit(embed_local, static_argnums=(0, 4))


class LayerGroupOptions(NamedTuple):
    """Static arguments of a program that runs several layers.

    layout: the slots' layout for native operations; None if the slots are device arrays by name.
    products: how experts compute.
    embed_and_head: structure of the modules before the first and after the last layer.
    is_first, is_last: whether the group contains the model's first and last layers.
    finds: number of a layer's experts if the program looks up their slots in the host's
        `SlotFinder`; 0 if tables give the slots.
    context: see `write_and_attend`.
    samples: whether the program finds a token for each row: by `sample_settled` if its batch has
        sampling parameters, else the most likely one.
    """

    structures: tuple[ModuleStructure, ...]
    layout: ExpertByteOffsets | None
    products: ExpertProducts
    dtype: DTypeLike
    embed_and_head: ModuleStructure
    is_first: bool
    is_last: bool
    finds: int
    context: int | None = None
    samples: bool = False


class Sampled(NamedTuple):
    """The logits and tokens that a program with the last layer computes of single tokens."""

    logits_PV: jax.Array | None = None
    tokens_P: jax.Array | None = None


class LayerOperands(NamedTuple):
    """One layer of a program that runs several: its arrays, its window and its adapters."""

    arrays: Arrays
    window: jax.Array | np.int32 | None
    adapters: LayerAdapters | None


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def apply_layers(
    static: LayerGroupOptions,
    layers: tuple[LayerOperands, ...],
    caches: tuple[LayerCache, ...],
    embed_and_head: Arrays,
    hidden: Hidden | None,
    batch: TokenBatch,
    experts: tuple[PyTree, PyTree],
) -> tuple[Hidden | jax.Array, Sampled, tuple[LayerCache, ...], jax.Array | None]:
    """Run a group of layers on few tokens; asks the host only for chosen experts that have no slot.

    embed_and_head: arrays of `static.embed_and_head`.
    hidden: output of the previous group; None for the first group.
    experts: (the slots, as `static.layout` says; a table [E] of the experts' slots for each layer
        with experts, or the arguments of `find_slots`).

    Returns (output, sampled, caches, choices). The output is a `Hidden`, or x [P, C, D] after the
    last layer; sampled is set after the last layer of single tokens; choices are [N, T, K], or None
    without experts.
    """
    slots, tables = experts
    written: list[LayerCache] = []
    choices: list[jax.Array] = []
    with allow_native_inference(batch.positions_PC.size * (static.layout is not None)):
        if static.is_first:
            hidden = embed_local(
                static.embed_and_head,
                embed_and_head,
                batch.tokens_T,
                batch.positions_PC,
                static.dtype,
                previous_PCD=batch.previous_PCD,
            )
        assert hidden is not None
        for i, structure in enumerate(static.structures):
            arrays, window, adapters = layers[i]
            # adapters change products; a layout or a finder of slots is a CPU's
            chooses = adapters is not None or static.layout is not None or static.finds > 0
            variant = LayerProgramOptions(static.layout is not None, static.context, chooses)
            places = CachePlaces(batch.blocks_PW, batch.positions_PC, window, rows_P=batch.rows_P)
            # layers of equal structure share one jitted function, traced once
            x_PCD, cache, y = attend_and_route_program(
                variant, structure, arrays, caches[i], hidden, places, adapters
            )
            # stops fusion across layers: results equal those of one program per layer bit for bit
            if static.layout is None:
                x_PCD, y = lax.optimization_barrier((x_PCD, y))
            if isinstance(y, ExpertInputs):
                n = len(choices)
                if static.layout is None and structure.merge(arrays).shared_expert is None:
                    # zeros that fuse with the experts' sum, in place of those before the barrier
                    y = y._replace(y_TD=jnp.zeros_like(y.y_TD))
                table_E = (
                    find_slots(y.idx_TK, tables, n, static.finds) if static.finds else tables[n]
                )
                choices.append(y.idx_TK)
                y = with_adapters(y, adapters)
                y = _add_experts_in_slots(static, y, slots, table_E)
            elif isinstance(y, UnchosenInputs):
                assert isinstance(slots, dict)
                operands, tile_rows = (slots, tables[len(choices)]), y.h_TD.shape[0]
                y, idx_TK = choose_and_apply_experts(
                    y, *operands, products=static.products, tile_rows=tile_rows
                )
                choices.append(idx_TK)
            hidden = Hidden(x_PCD, y)
            if static.layout is None:
                hidden = lax.optimization_barrier(hidden)
            written.append(cache)
        sampled = Sampled()
        output: Hidden | jax.Array = hidden
        if static.is_last:
            output = x_PCD = hidden.sum()
            if batch.positions_PC.shape[1] == 1:
                logits_PV = static.embed_and_head.merge(embed_and_head).logits(x_PCD[:, 0])
                tokens_P = _sample_in_step(logits_PV, batch) if static.samples else None
                sampled = Sampled(logits_PV, tokens_P)
    return output, sampled, tuple(written), jnp.stack(choices) if choices else None


def _sample_in_step(logits_PV: jax.Array, batch: TokenBatch) -> jax.Array:
    """Return the token after each single token of a batch, int32 [P]."""
    if batch.sampling is None:
        return greedy(logits_PV)
    params = jax.tree.map(lambda x_B: x_B[: logits_PV.shape[0]], batch.sampling)
    return sample_settled(logits_PV, params, batch.positions_PC[:, 0] + 1)


def with_adapters(routed: ExpertInputs, adapters: LayerAdapters | None) -> ExpertInputs:
    """Return a layer's routed tokens with the adapters of its experts."""
    if adapters is None:
        return routed
    return routed._replace(adapters=adapters.expert_adapters(routed.h_TD.shape[0]))


def _add_experts_in_slots(
    static: LayerGroupOptions, routed: ExpertInputs, slots: PyTree, table_E: jax.Array
) -> jax.Array | WeightedOutputs:
    """Return float32 [T, D]: `routed.y_TD` + the weighted sum of each token's experts."""
    if static.layout is None:
        return expert_outputs_in_tiles(static.products, routed, slots, table_E)
    tokens = (routed.h_TD, routed.idx_TK, routed.weights_TK, routed.y_TD)
    return slot_mlp(tokens, slots, table_E, static.layout, static.products.activation)


@partial(jax.jit, static_argnums=(0, 4))
def logits_at_tokens(
    structure: ModuleStructure,
    arrays: Arrays,
    x_PCD: jax.Array,
    at_P: jax.Array,
    native: bool = False,
) -> jax.Array:
    """Return the logits after token `at_P` of each row, float32 [P, V].

    native: use native (C++) operations.
    """
    with allow_native_inference(x_PCD.shape[0] * native):
        return structure.merge(arrays).logits(x_PCD[jnp.arange(x_PCD.shape[0]), at_P])


@partial(jax.jit, static_argnums=0)
def logits_of_row(
    structure: ModuleStructure, arrays: Arrays, x_PCD: jax.Array, row: jax.Array
) -> jax.Array:
    """Return the logits after every token of row `row` of x, float32 [C, V]."""
    return structure.merge(arrays).logits(x_PCD[row])


@partial(jax.jit, static_argnums=(0, 3))
def logits_of_all(
    structure: ModuleStructure, arrays: Arrays, x_PCD: jax.Array, native: bool = False
) -> jax.Array:
    """Return the logits after every token, float32 [P, C, V].

    native: use native (C++) operations.
    """
    p, c, d = x_PCD.shape
    with allow_native_inference(p * c * native):
        return structure.merge(arrays).logits(x_PCD.reshape(-1, d)).reshape(p, c, -1)
