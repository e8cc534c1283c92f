"""Programs of a model on several devices: each is one `shard_map` over all of them.

Legend: N devices, M rows of a step, Q chunks of a group, C tokens a row, T tokens of a device, D
hidden, V vocabulary, E experts of a layer, K choices a token, `planning/placement.py`'s cycle
beside E. Hidden states are split over the devices as `dense_layout.py` says.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jmoe.collectives.all_to_all import make_all_to_all
from jmoe.collectives.exchange import Choices, PerDevice
from jmoe.collectives.ragged import Ragged
from jmoe.inference.kv_cache import KVCache
from jmoe.inference.mesh.dense_layout import RowLayout, sent_by_local
from jmoe.inference.runner import Arrays, Hidden, InCache, attend_local, embed_local
from jmoe.layers.experts import SLOT_MULTIPLE, slots_per_expert
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.mesh import BATCH, EXPERT_INTRA, REPLICATED
from jmoe.models.block import add_residual
from jmoe.models.functional import Structure
from kernels_pallas.grouped_mlp import MLPWeights, grouped_mlp

FEW_FACTOR = 4  # times the mean number of tokens, which an expert seldom gets
FEW_MULTIPLE = 8


class Gate(NamedTuple):
    """The output of attention and router in a layer with experts. all_idx_TK: of the tokens of
    all devices, on each.
    """

    routed: ExpertInputs
    all_idx_TK: jax.Array


class ExchangeShape(NamedTuple):
    """A step's exchange, and what the experts' program is compiled for.

    rows: of the buffers, for what a device gets in all if the exchange is ragged, else for a source
    and a destination.
    """

    rows: int
    slots_per_device: int
    activation: str
    ragged: bool = False


def _sharded(mesh: Mesh, body: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@partial(jax.jit, static_argnums=(0, 1, 5))
def embed_on_mesh(
    layout: RowLayout,
    structure: Structure,
    arrays: Arrays,
    tokens_MC: jax.Array,
    positions_MC: jax.Array,
    dtype: Any,
) -> Hidden:
    """Return the first layer's input, each device's tokens on it."""

    def local(arrays: Arrays, tokens: jax.Array, positions: jax.Array) -> Hidden:
        return embed_local(
            structure, layout.own(arrays), tokens, positions, dtype, layout.layers(tokens.size)
        )

    sharded = _sharded(layout.mesh, local, (layout.weights, layout.tokens, layout.tokens), BATCH)
    hidden: Hidden = sharded(arrays, tokens_MC, positions_MC)
    return hidden


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def attend_on_mesh(
    layout: RowLayout,
    structure: Structure,
    arrays: Arrays,
    cache: KVCache,
    hidden: Hidden,
    rows_M: jax.Array,
    positions_MC: jax.Array,
    window: jax.Array | None,
) -> tuple[jax.Array, KVCache, jax.Array | Gate]:
    """Run a block but for its experts, each device with its own part of the cache, as
    `attend_local` says.
    """
    routed = structure.merge(arrays).kind == "moe"

    def local(
        arrays: Arrays, window: jax.Array | None, cache: KVCache, hidden: Hidden, rows: Any, at: Any
    ) -> Any:
        layers = layout.layers(at.size)
        x_PCD, cache, y = attend_local(
            structure, layout.own(arrays), cache, hidden, InCache(rows, at, window), layers
        )
        if not isinstance(y, ExpertInputs):
            return x_PCD, cache, y
        return x_PCD, cache, Gate(y, lax.all_gather(y.idx_TK, EXPERT_INTRA, tiled=True))

    gate_spec: Any = Gate(BATCH, REPLICATED)  # type: ignore[arg-type]
    out_specs = BATCH, layout.cache, gate_spec if routed else BATCH
    in_specs = layout.weights, REPLICATED, layout.cache, BATCH, layout.tokens, layout.tokens
    sharded = _sharded(layout.mesh, local, in_specs, out_specs)
    attended: tuple[jax.Array, KVCache, jax.Array | Gate] = sharded(
        arrays, window, cache, hidden, rows_M, positions_MC
    )
    return attended


@partial(jax.jit, static_argnums=(0, 1))
def experts_on_mesh(
    mesh: Mesh,
    exchange: ExchangeShape,
    routed: ExpertInputs,
    turns_EC: jax.Array,
    weights: MLPWeights,
) -> jax.Array:
    """Return float32: y + the weighted sum of each token's experts, wherever they are; nothing is
    dropped.

    A token's number in the step and its expert say which replica takes it, so that none is used
    twice.
    """

    def local(routed: ExpertInputs, turns_EC: jax.Array, weights: MLPWeights) -> jax.Array:
        (num_tokens, k), num_devices = routed.idx_TK.shape, mesh.size
        num_physical, num_experts = num_devices * exchange.slots_per_device, turns_EC.shape[0]
        token_T = lax.axis_index(EXPERT_INTRA) * num_tokens + jnp.arange(
            num_tokens, dtype=jnp.int32
        )
        real_TK = routed.idx_TK < num_experts
        turn_TK = turns_EC.at[routed.idx_TK, token_T[:, None] % turns_EC.shape[1]].get(mode="clip")
        physical_TK = jnp.where(real_TK, turn_TK, num_physical)
        numbers = jnp.arange(num_physical, dtype=jnp.int32)
        counts = (physical_TK[:, :, None] == numbers).sum(axis=(0, 1), dtype=jnp.int32)
        weights_TK = jnp.where(real_TK, routed.weights_TK, 0.0)
        sent: Ragged | PerDevice = Ragged(EXPERT_INTRA, num_devices)
        if not exchange.ragged:
            sent = PerDevice(make_all_to_all((EXPERT_INTRA,)), num_devices, None)
        chosen = Choices(physical_TK, weights_TK, counts)
        there = sent.dispatch_rows(routed.h_TD, chosen, exchange.rows, num_tokens * k)
        slots = slots_per_expert(num_tokens * k, exchange.slots_per_device)
        if mesh.devices.flat[0].platform == "cpu":
            slots = _few_slots(num_devices * num_tokens, k, num_experts)
        options: dict[str, Any] = {"activation": exchange.activation, "slots": slots}
        (arrived,) = there.chunks
        out_MD = grouped_mlp(arrived.rows_MD, arrived.group_sizes_L, weights, **options)
        return routed.y_TD + sent.combine([out_MD], there.handle)

    y_TD: jax.Array = _sharded(mesh, local, (BATCH, REPLICATED, BATCH), BATCH)(
        routed, turns_EC, weights
    )
    return y_TD


def _few_slots(num_tokens: int, k: int, num_experts: int) -> int:
    """Return the rows of each expert that one product computes, whether or not so many of the
    tokens chose it.

    A CPU takes further rows about as fast, in tiles, and a device with little to do is done
    earlier. No expert gets a token twice. It is the same for every placement, as a sum's last bits
    can depend on the shape of its product.
    """
    often = FEW_FACTOR * num_tokens * k / num_experts
    return min(num_tokens, SLOT_MULTIPLE, FEW_MULTIPLE * math.ceil(often / FEW_MULTIPLE))


@partial(jax.jit, static_argnums=0)
def finish_on_mesh(
    layout: RowLayout, hidden: Hidden, positions_MC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the last layer's output, and of each row that of the last token alone, on every
    device.
    """

    def local(hidden: Hidden, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = add_residual(*hidden)
        return x, layout.last_local(x, positions)

    sharded = _sharded(layout.mesh, local, (BATCH, layout.tokens), (BATCH, REPLICATED))
    after: tuple[jax.Array, jax.Array] = sharded(hidden, positions_MC)
    return after


@partial(jax.jit, static_argnums=(0, 1))
def gather_row_on_mesh(layout: RowLayout, width: int, x: jax.Array, place: jax.Array) -> jax.Array:
    """Return [C, D] on every device: the row at `place` of the M, of C = `width` tokens."""
    local = lambda x, place: layout.row_local(x, place, width)  # noqa: E731
    x_CD: jax.Array = _sharded(layout.mesh, local, (BATCH, REPLICATED), REPLICATED)(x, place)
    return x_CD


@partial(jax.jit, static_argnums=(0, 1, 4))
def logits_on_mesh(
    layout: RowLayout,
    structure: Structure,
    arrays: Arrays,
    x_MD: jax.Array,
    vocab_size: int,
    place_Q: jax.Array,
) -> jax.Array:
    """Return float32 [Q, V] on every device, of some of the rows that are on all: each computes
    its part of V.
    """

    def local(arrays: Arrays, x_MD: jax.Array, place_Q: jax.Array) -> jax.Array:
        logits_Qv = structure.merge(layout.own(arrays)).logits(x_MD[place_Q])
        return lax.all_gather(logits_Qv, EXPERT_INTRA, axis=1, tiled=True)[:, :vocab_size]

    sharded = _sharded(layout.mesh, local, (layout.weights, REPLICATED, REPLICATED), REPLICATED)
    logits_QV: jax.Array = sharded(arrays, x_MD, place_Q)
    return logits_QV


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copy_row_on_mesh(layout: RowLayout, crosses: bool, cache: KVCache, at: jax.Array) -> KVCache:
    """Return the cache with a row copied, of all heads; at: the device and row of the source, and
    of the target.

    Without a device of its own (-1) a row is on all.
    """

    def local(cache: KVCache, at: jax.Array) -> KVCache:
        n = lax.axis_index(EXPERT_INTRA)

        def copied(x: jax.Array) -> jax.Array:
            row = lax.dynamic_index_in_dim(x, at[1], 0)
            if crosses:
                row = sent_by_local(row, n == at[0])
            old = lax.dynamic_index_in_dim(x, at[3], 0)
            here = (at[2] < 0) | (n == at[2])
            return lax.dynamic_update_index_in_dim(x, jnp.where(here, row, old), at[3], 0)

        return jax.tree.map(copied, cache)

    copied: KVCache = _sharded(layout.mesh, local, (layout.cache, REPLICATED), layout.cache)(
        cache, at
    )
    return copied


@jax.jit
def pick(last_MD: jax.Array, place_Q: jax.Array) -> jax.Array:
    """Return [Q, 1, D], the rows of a group's chunks."""
    return last_MD[place_Q][:, None]


@partial(jax.jit, static_argnums=0)
def timed_experts(activation: str, x_ND: jax.Array, weights: MLPWeights) -> jax.Array:
    """Return what rows, dealt out evenly to the experts of one device, become: to be timed."""
    num_experts = weights.w_up.shape[0]
    sizes_L = jnp.full(num_experts, x_ND.shape[0] // num_experts, jnp.int32)
    return grouped_mlp(
        x_ND, sizes_L, weights, activation=activation, slots=x_ND.shape[0] // num_experts
    )
