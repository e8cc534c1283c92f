"""The jitted programs of a model on a mesh, each a `shard_map` over all devices.

`MeshRunner` calls them. Hidden states are split over the devices as `dense_layout.py` says.

Legend:
N devices
M rows of a step
Q chunks of a group
C tokens a row; in `replica_EC`, the cycle of `planning/placement.py`
T tokens of a device
D hidden
V vocabulary
E experts of a layer
K choices a token
W blocks of a table
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jmoe.collectives.all_to_all import make_all_to_all
from jmoe.collectives.exchange import (
    DispatchedTokens,
    Exchange,
    PerDeviceExchange,
    PerNodeExchange,
    TokenChoices,
)
from jmoe.collectives.ragged import RaggedExchange
from jmoe.inference.cached_layers import (
    Arrays,
    CachePlaces,
    Hidden,
    attend_and_route_local,
    embed_local,
)
from jmoe.inference.kv_cache import KVCache, LayerCache
from jmoe.inference.mesh.dense_layout import RowLayout, broadcast_from_local
from jmoe.layers.experts import SLOT_MULTIPLE, batched_rows_per_expert
from jmoe.layers.slot_experts import ExpertInputs, UnchosenInputs, grouped_mlp_from_slots
from jmoe.mesh import BATCH, EXPERT, REPLICATED
from jmoe.models.functional import ModuleStructure
from jmoe.offload.slot_arrays import as_mlp_weights
from jmoe.types import PyTree
from kernels_pallas.compressed import SCALES
from kernels_pallas.grouped_mlp import grouped_mlp

FEW_FACTOR = 4  # an expert rarely gets more than this many times the mean number of tokens
FEW_MULTIPLE = 8  # rows of a matrix product are rounded up to this


class GateOutput(NamedTuple):
    """The output of attention and router in a layer with experts.

    all_idx_TK: the choices of all devices' tokens, on every device.
    """

    routed: ExpertInputs
    all_idx_TK: jax.Array


class ExchangeShape(NamedTuple):
    """Static sizes of a step's exchange of tokens and of the experts' program.

    rows: rows of a device's receive buffer if ragged, else of the buffer for each source and
        destination: a device, or a node if device_rows is set.
    slots_per_device: experts of the layer that a device has slots for.
    ragged: use a ragged all-to-all instead of padded buffers.
    device_rows: send a token once to each node of its experts (dedup), and inside the node by
        buffers of this many rows for each source and destination; 0: send directly.
    """

    rows: int
    slots_per_device: int
    activation: str
    ragged: bool = False
    device_rows: int = 0


def _shard_map(
    mesh: Mesh, body: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
) -> PyTree:
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@partial(jax.jit, static_argnums=(0, 1, 5))
def embed_on_mesh(
    layout: RowLayout,
    structure: ModuleStructure,
    arrays: Arrays,
    tokens_MC: jax.Array,
    positions_MC: jax.Array,
    dtype: DTypeLike,
) -> Hidden:
    """Return the first layer's input, split over the devices."""

    def embed_local_tokens(arrays: Arrays, tokens: jax.Array, positions: jax.Array) -> Hidden:
        return embed_local(
            structure,
            layout.local_weights(arrays),
            tokens,
            positions,
            dtype,
            layout.dense_runner(tokens.size),
        )

    sharded = _shard_map(
        layout.mesh, embed_local_tokens, (layout.weights, layout.tokens, layout.tokens), BATCH
    )
    hidden: Hidden = sharded(arrays, tokens_MC, positions_MC)
    return hidden


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def attend_and_route_on_mesh(
    layout: RowLayout,
    structure: ModuleStructure,
    arrays: Arrays,
    cache: LayerCache,
    hidden: Hidden,
    blocks_MW: jax.Array,
    positions_MC: jax.Array,
    window: jax.Array | None,
) -> tuple[jax.Array, LayerCache, jax.Array | GateOutput]:
    """Run a block without its experts on each device's part of the cache; return (hidden states,
    cache, y), as `attend_and_route_local` does.

    The third result is the dense MLP's output, or a `GateOutput`.
    """
    routed = structure.merge(arrays).kind == "moe"

    def attend_local_heads(
        arrays: Arrays,
        window: jax.Array | None,
        cache: LayerCache,
        hidden: Hidden,
        blocks: jax.Array,
        at: jax.Array,
    ) -> tuple[jax.Array, LayerCache, jax.Array | GateOutput]:
        layers = layout.dense_runner(at.size)
        x_PCD, cache, y = attend_and_route_local(
            structure,
            layout.local_weights(arrays),
            cache,
            hidden,
            CachePlaces(blocks, at, window),
            layers,
        )
        assert not isinstance(y, UnchosenInputs), "experts are chosen, by default"
        if not isinstance(y, ExpertInputs):
            return x_PCD, cache, y
        return x_PCD, cache, GateOutput(y, lax.all_gather(y.idx_TK, EXPERT, tiled=True))

    gate_spec: PyTree = GateOutput(BATCH, REPLICATED)  # type: ignore[arg-type]
    out_specs = BATCH, layout.cache, gate_spec if routed else BATCH
    in_specs = layout.weights, REPLICATED, layout.cache, BATCH, layout.tokens, layout.tokens
    sharded = _shard_map(layout.mesh, attend_local_heads, in_specs, out_specs)
    attended: tuple[jax.Array, LayerCache, jax.Array | GateOutput] = sharded(
        arrays, window, cache, hidden, blocks_MW, positions_MC
    )
    return attended


@partial(jax.jit, static_argnums=(0, 1))
def experts_on_mesh(
    mesh: Mesh,
    exchange: ExchangeShape,
    routed: ExpertInputs,
    replica_EC: jax.Array,
    weights: Mapping[str, jax.Array],
    table_NS: jax.Array | None = None,
) -> jax.Array:
    """Return y + the weighted sum of each token's experts, float32, for tokens split over the
    devices.

    weights: arrays [N S, ...] of the devices' expert slots by name, matrices compressed or not.
    table_NS: int32 [N S], if a device's slots hold experts of several layers: which of its slots
    has each expert of this layer; the arrays are then [N M, ...] with M slots a device.

    No token is dropped. A token's number and its expert select the replica (`replica_EC`), so that
    no token goes to the same slot twice.
    """
    num_tokens, num_experts = routed.h_TD.shape[0], replica_EC.shape[0]
    tile_rows = rows_of_tiles(mesh, exchange, num_tokens, routed.idx_TK.shape[1], num_experts)

    def run_local_experts(
        routed: ExpertInputs,
        replica_EC: jax.Array,
        weights: Mapping[str, jax.Array],
        table_S: jax.Array | None,
    ) -> jax.Array:
        sent, there = _send_local(mesh, exchange, routed, replica_EC)
        (arrived,) = there.chunks
        out_MD = _run_slot_experts_local(
            arrived.rows_MD,
            arrived.group_sizes_L,
            weights,
            exchange.activation,
            tile_rows,
            table_S,
        )
        return routed.y_TD + sent.combine([out_MD], there.handle)

    specs = BATCH, REPLICATED, BATCH, BATCH
    y_TD: jax.Array = _shard_map(mesh, run_local_experts, specs, BATCH)(
        routed, replica_EC, weights, table_NS
    )
    return y_TD


class SentRows(NamedTuple):
    """A layer's tokens on the devices of their experts, before the experts run.

    rows_MD: [N M, D], sorted by expert on each device. sizes_S: int32 [N S], the rows of each of a
    device's experts. handle: the way back, its arrays with an axis of devices in front.
    """

    rows_MD: jax.Array
    sizes_S: jax.Array
    handle: PyTree


@partial(jax.jit, static_argnums=(0, 1))
def send_rows_on_mesh(
    mesh: Mesh, exchange: ExchangeShape, routed: ExpertInputs, replica_EC: jax.Array
) -> SentRows:
    """Send tokens to the devices of their experts, as `experts_on_mesh` does.

    With `run_rows_on_mesh` and `return_rows_on_mesh` this computes what `experts_on_mesh` does, in
    three programs, so that the host can compute some of the rows.
    """

    def send_local(routed: ExpertInputs, replica_EC: jax.Array) -> SentRows:
        _, there = _send_local(mesh, exchange, routed, replica_EC)
        (arrived,) = there.chunks
        handle = jax.tree.map(lambda x: x[None], there.handle)
        return SentRows(arrived.rows_MD, arrived.group_sizes_L, handle)

    sent: SentRows = _shard_map(mesh, send_local, (BATCH, REPLICATED), BATCH)(routed, replica_EC)
    return sent


@partial(jax.jit, static_argnums=(0, 1, 2))
def run_rows_on_mesh(
    mesh: Mesh,
    activation: str,
    tile_rows: int,
    rows_MD: jax.Array,
    sizes_S: jax.Array,
    is_cold_S: jax.Array,
    weights: Mapping[str, jax.Array],
    table_NS: jax.Array | None,
) -> jax.Array:
    """Return the rows of `SentRows` through the experts in their devices' slots, [N M, D]. Rows of
    cold experts, which the host computes, hold arbitrary values.

    tile_rows: see `rows_of_tiles`. is_cold_S: bool [N S]. weights, table_NS: see
    `experts_on_mesh`.
    """

    def run_local(
        rows_MD: jax.Array,
        sizes_S: jax.Array,
        is_cold_S: jax.Array,
        weights: Mapping[str, jax.Array],
        table_S: jax.Array | None,
    ) -> jax.Array:
        is_cold_M = _rows_of_experts_local(is_cold_S, sizes_S, rows_MD.shape[0])
        order_M = jnp.argsort(is_cold_M, stable=True)  # cold rows behind all others
        out_MD = _run_slot_experts_local(
            rows_MD[order_M],
            jnp.where(is_cold_S, 0, sizes_S),
            weights,
            activation,
            tile_rows,
            table_S,
        )
        return out_MD[jnp.argsort(order_M)]

    out_MD: jax.Array = _shard_map(mesh, run_local, (BATCH,) * 5, BATCH)(
        rows_MD, sizes_S, is_cold_S, weights, table_NS
    )
    return out_MD


@partial(jax.jit, static_argnums=(0, 1))
def return_rows_on_mesh(
    mesh: Mesh,
    exchange: ExchangeShape,
    y_TD: jax.Array,
    is_cold_S: jax.Array,
    sent: SentRows,
    out_MD: jax.Array,
    host_MD: jax.Array,
) -> jax.Array:
    """Return y + the weighted sum of each token's rows, float32, for tokens split over the devices.

    out_MD: of the experts in slots. host_MD: the rows of the cold experts, `is_cold_S`.
    """

    def return_local(
        y_TD: jax.Array,
        is_cold_S: jax.Array,
        sent: SentRows,
        out_MD: jax.Array,
        host_MD: jax.Array,
    ) -> jax.Array:
        is_cold_M = _rows_of_experts_local(is_cold_S, sent.sizes_S, out_MD.shape[0])
        rows_MD = jnp.where(is_cold_M[:, None], host_MD, out_MD)
        handle = jax.tree.map(lambda x: x[0], sent.handle)
        return y_TD + _make_exchange(mesh, exchange).combine([rows_MD], handle)

    added_TD: jax.Array = _shard_map(mesh, return_local, (BATCH,) * 5, BATCH)(
        y_TD, is_cold_S, sent, out_MD, host_MD
    )
    return added_TD


def _rows_of_experts_local(is_chosen_S: jax.Array, sizes_S: jax.Array, num_rows: int) -> jax.Array:
    """Return bool [M]: whether each of a device's rows is of one of these experts; arbitrary for
    rows behind those of all experts.
    """
    return jnp.repeat(is_chosen_S, sizes_S, total_repeat_length=num_rows)


def rows_of_tiles(
    mesh: Mesh, exchange: ExchangeShape, num_tokens: int, k: int, num_experts: int
) -> int:
    """Return how many rows of each expert one batched product, or one tile, computes.

    num_tokens: of all devices.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return _batched_rows_per_expert(num_tokens, k, num_experts)
    return batched_rows_per_expert(num_tokens // mesh.size * k, exchange.slots_per_device)


def _send_local(
    mesh: Mesh, exchange: ExchangeShape, routed: ExpertInputs, replica_EC: jax.Array
) -> tuple[Exchange | RaggedExchange, DispatchedTokens]:
    """Return (the exchange, this device's tokens on the devices of their experts)."""
    num_tokens, num_experts = routed.idx_TK.shape[0], replica_EC.shape[0]
    num_physical = mesh.size * exchange.slots_per_device
    token_T = lax.axis_index(EXPERT) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
    real_TK = routed.idx_TK < num_experts
    turn_TK = replica_EC.at[routed.idx_TK, token_T[:, None] % replica_EC.shape[1]].get(mode="clip")
    physical_TK = jnp.where(real_TK, turn_TK, num_physical)
    numbers = jnp.arange(num_physical, dtype=jnp.int32)
    counts = (physical_TK[:, :, None] == numbers).sum(axis=(0, 1), dtype=jnp.int32)
    weights_TK = jnp.where(real_TK, routed.weights_TK, 0.0)
    chosen = TokenChoices(physical_TK, weights_TK, counts)
    made = _make_exchange(mesh, exchange)
    if isinstance(made, PerNodeExchange):
        return made, made.dispatch_rows(routed.h_TD, chosen, exchange.rows, exchange.device_rows)
    return made, made.dispatch_rows(routed.h_TD, chosen, exchange.rows, physical_TK.size)


def _make_exchange(
    mesh: Mesh, exchange: ExchangeShape
) -> PerNodeExchange | PerDeviceExchange | RaggedExchange:
    """Return the exchange of a step's tokens."""
    if exchange.device_rows:
        nodes, per_node = (mesh.shape[axis] for axis in EXPERT)
        inside = PerDeviceExchange(make_all_to_all(EXPERT[1:]), per_node, None)
        # its buffers have the sizes of `exchange`, so that it needs no expected number of nodes
        return PerNodeExchange(make_all_to_all(EXPERT[:1]), inside, nodes, 0.0, None)
    if exchange.ragged:
        return RaggedExchange(EXPERT, mesh.size)
    return PerDeviceExchange(make_all_to_all(EXPERT), mesh.size, None)


def _run_slot_experts_local(
    x_MD: jax.Array,
    group_sizes_L: jax.Array,
    weights: Mapping[str, jax.Array],
    activation: str,
    batched_rows: int,
    table_S: jax.Array | None = None,
) -> jax.Array:
    """Return one device's rows through the experts of its slots, [M, D] in x's dtype.

    table_S: the slot of each group's expert, None for slots in the order of the groups. Wide
    matrices in that order take `grouped_mlp`. Others are multiplied as stored where a kernel reads
    their format, and otherwise decoded for each tile of `batched_rows` rows.
    """
    if table_S is not None or any(name.endswith(SCALES) for name in weights):
        return grouped_mlp_from_slots(
            x_MD,
            group_sizes_L,
            weights,
            activation=activation,
            tile_rows=batched_rows,
            table_E=table_S,
        )
    return grouped_mlp(
        x_MD,
        group_sizes_L,
        as_mlp_weights(weights),
        activation=activation,
        batched_rows_per_group=batched_rows,
    )


def _batched_rows_per_expert(num_tokens: int, k: int, num_experts: int) -> int:
    """Return how many rows of each expert one batched product computes on a CPU; a loop computes
    others.

    An expert gets a token at most once, so num_tokens bounds the result. Few rows suffice: a CPU
    computes others in tiles about as fast, and devices with little work finish earlier. The result
    does not depend on the placement, since a product's shape may change the last bits of its sums.
    """
    often = FEW_FACTOR * num_tokens * k / num_experts
    return min(num_tokens, SLOT_MULTIPLE, FEW_MULTIPLE * math.ceil(often / FEW_MULTIPLE))


@partial(jax.jit, static_argnums=0)
def finish_layers_on_mesh(
    layout: RowLayout, hidden: Hidden, positions_MC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (the last layer's output, the hidden state of each row's last token on every
    device).
    """

    def add_and_gather_last(hidden: Hidden, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = hidden.sum()
        return x, layout.gather_last_hidden_local(x, positions)

    sharded = _shard_map(
        layout.mesh, add_and_gather_last, (BATCH, layout.tokens), (BATCH, REPLICATED)
    )
    finished: tuple[jax.Array, jax.Array] = sharded(hidden, positions_MC)
    return finished


@partial(jax.jit, static_argnums=(0, 1))
def gather_row_on_mesh(layout: RowLayout, width: int, x: jax.Array, place: jax.Array) -> jax.Array:
    """Return the hidden states of one of the M rows, [C, D], on every device.

    width: C. place: the row's index.
    """

    def gather_row_local(x: jax.Array, place: jax.Array) -> jax.Array:
        return layout.gather_row_hidden_local(x, place, width)

    x_CD: jax.Array = _shard_map(layout.mesh, gather_row_local, (BATCH, REPLICATED), REPLICATED)(
        x, place
    )
    return x_CD


@partial(jax.jit, static_argnums=(0, 1, 4))
def logits_on_mesh(
    layout: RowLayout,
    structure: ModuleStructure,
    arrays: Arrays,
    x_MD: jax.Array,
    vocab_size: int,
    place_Q: jax.Array,
) -> jax.Array:
    """Return the logits of rows `place_Q` of `x_MD`, float32 [Q, V], on every device.

    Each device computes its block of the vocabulary. x_MD must be on every device.
    """

    def gather_logits_local(arrays: Arrays, x_MD: jax.Array, place_Q: jax.Array) -> jax.Array:
        logits_Qv = structure.merge(layout.local_weights(arrays)).logits(x_MD[place_Q])
        return lax.all_gather(logits_Qv, EXPERT, axis=1, tiled=True)[:, :vocab_size]

    sharded = _shard_map(
        layout.mesh, gather_logits_local, (layout.weights, REPLICATED, REPLICATED), REPLICATED
    )
    logits_QV: jax.Array = sharded(arrays, x_MD, place_Q)
    return logits_QV


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copy_cache_blocks_on_mesh(
    layout: RowLayout, crosses: bool, cache: KVCache, at_W4: jax.Array, count: jax.Array
) -> KVCache:
    """Return the cache with the first `count` of the blocks in `at_W4` copied, in order.

    at_W4: int32 (source device, source block, target device, target block); device -1 means all
    devices.
    crosses: whether blocks are copied to other devices.
    """

    def copy_cache_blocks_local(cache: KVCache, at_W4: jax.Array, count: jax.Array) -> KVCache:
        n = lax.axis_index(EXPERT)

        def copy_block(i: jax.Array, x: jax.Array) -> jax.Array:
            at = at_W4[i]
            block = lax.dynamic_index_in_dim(x, at[1], 0)
            if crosses:
                block = broadcast_from_local(block, n == at[0])
            old = lax.dynamic_index_in_dim(x, at[3], 0)
            here = (at[2] < 0) | (n == at[2])
            return lax.dynamic_update_index_in_dim(x, jnp.where(here, block, old), at[3], 0)

        return jax.tree.map(lambda x: lax.fori_loop(0, count, copy_block, x), cache)

    copied: KVCache = _shard_map(
        layout.mesh, copy_cache_blocks_local, (layout.cache, REPLICATED, REPLICATED), layout.cache
    )(cache, at_W4, count)
    return copied


@jax.jit
def select_last_hidden_of_chunks(last_MD: jax.Array, place_Q: jax.Array) -> jax.Array:
    """Return the hidden states of a group's chunks, [Q, 1, D]."""
    return last_MD[place_Q][:, None]


@partial(jax.jit, static_argnums=0)
def run_experts_for_timing(
    activation: str, x_ND: jax.Array, weights: Mapping[str, jax.Array]
) -> jax.Array:
    """Return the output of one device's experts for evenly distributed rows; for timing."""
    num_experts = weights["w_up"].shape[0]
    sizes_L = jnp.full(num_experts, x_ND.shape[0] // num_experts, jnp.int32)
    return _run_slot_experts_local(x_ND, sizes_L, weights, activation, x_ND.shape[0] // num_experts)
