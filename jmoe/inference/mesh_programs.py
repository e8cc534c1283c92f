"""Programs of a model on several devices: each is one `shard_map` over all of them.

Legend: N devices, P rows of a step on a device, M = N P, Q chunks of a group, C tokens a row, T = P C tokens of a
device, D hidden, E experts of a layer, K choices a token, `planning/placement.py`'s cycle beside E.
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
from jmoe.inference.kv_cache import KVCache
from jmoe.inference.runner import Arrays, Hidden, attend_local, embed_local
from jmoe.layers.experts import SLOT_MULTIPLE, slots_per_expert
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.mesh import BATCH, EXPERT_INTRA, REPLICATED
from jmoe.models.block import add_residual
from jmoe.models.functional import Structure
from kernels_pallas.grouped_mlp import MLPWeights, grouped_mlp
from kernels_pallas.saved import bits

FEW_FACTOR = 4  # times the mean number of tokens, which an expert seldom gets
FEW_MULTIPLE = 8


class Gate(NamedTuple):
    """The output of attention and router in a layer with experts. all_idx_TK: of the tokens of all devices, on each."""

    routed: ExpertInputs
    all_idx_TK: jax.Array


class ExchangeShape(NamedTuple):
    """A step's exchange: rows per (source, destination), and what the experts' program is compiled for."""

    rows: int
    slots_per_device: int
    activation: str


def _sharded(mesh: Mesh, body: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@partial(jax.jit, static_argnums=(0, 1, 5))
def embed_on_mesh(
    mesh: Mesh, structure: Structure, arrays: Arrays, tokens_MC: jax.Array, positions_MC: jax.Array, dtype: Any
) -> Hidden:
    """Return the first layer's input, each device's rows on it."""
    body = lambda arrays, tokens, positions: embed_local(structure, arrays, tokens, positions, dtype)  # noqa: E731
    hidden: Hidden = _sharded(mesh, body, (REPLICATED, BATCH, BATCH), BATCH)(arrays, tokens_MC, positions_MC)
    return hidden


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def attend_on_mesh(
    mesh: Mesh,
    structure: Structure,
    arrays: Arrays,
    cache: KVCache,
    hidden: Hidden,
    rows_M: jax.Array,
    positions_MC: jax.Array,
    window: jax.Array | None,
) -> tuple[jax.Array, KVCache, jax.Array | Gate]:
    """Run a block but for its experts, each device with its own part of the cache, as `attend_local` says."""
    routed = structure.merge(arrays).kind == "moe"

    def local(arrays: Arrays, window: jax.Array | None, cache: KVCache, hidden: Hidden, rows_P: Any, at_PC: Any) -> Any:
        x_PCD, cache, y = attend_local(structure, arrays, cache, hidden, rows_P, at_PC, window)
        if not isinstance(y, ExpertInputs):
            return x_PCD, cache, y
        return x_PCD, cache, Gate(y, lax.all_gather(y.idx_TK, EXPERT_INTRA, tiled=True))

    gate_spec: Any = Gate(BATCH, REPLICATED)  # type: ignore[arg-type]
    out_specs = BATCH, BATCH, gate_spec if routed else BATCH
    sharded = _sharded(mesh, local, (REPLICATED, REPLICATED, BATCH, BATCH, BATCH, BATCH), out_specs)
    attended: tuple[jax.Array, KVCache, jax.Array | Gate] = sharded(arrays, window, cache, hidden, rows_M, positions_MC)
    return attended


@partial(jax.jit, static_argnums=(0, 1))
def experts_on_mesh(
    mesh: Mesh, exchange: ExchangeShape, routed: ExpertInputs, turns_EC: jax.Array, weights: MLPWeights
) -> jax.Array:
    """Return float32: y + the weighted sum of each token's experts, wherever they are; nothing is dropped.

    A token's number in the step and its expert say which replica takes it, so that none is used twice.
    """

    def local(routed: ExpertInputs, turns_EC: jax.Array, weights: MLPWeights) -> jax.Array:
        (num_tokens, k), num_devices = routed.idx_TK.shape, mesh.size
        num_physical, num_experts = num_devices * exchange.slots_per_device, turns_EC.shape[0]
        token_T = lax.axis_index(EXPERT_INTRA) * num_tokens + jnp.arange(num_tokens, dtype=jnp.int32)
        real_TK = routed.idx_TK < num_experts
        turn_TK = turns_EC.at[routed.idx_TK, token_T[:, None] % turns_EC.shape[1]].get(mode="clip")
        physical_TK = jnp.where(real_TK, turn_TK, num_physical)
        numbers = jnp.arange(num_physical, dtype=jnp.int32)
        counts = (physical_TK[:, :, None] == numbers).sum(axis=(0, 1), dtype=jnp.int32)
        weights_TK = jnp.where(real_TK, routed.weights_TK, 0.0)
        per_device = PerDevice(make_all_to_all((EXPERT_INTRA,)), num_devices, None)
        chosen = Choices(physical_TK, weights_TK, counts)
        there = per_device.dispatch_rows(routed.h_TD, chosen, exchange.rows, num_tokens * k)
        slots = slots_per_expert(num_tokens * k, exchange.slots_per_device)
        if mesh.devices.flat[0].platform == "cpu":
            slots = _few_slots(num_devices * num_tokens, k, num_experts)
        options: dict[str, Any] = {"activation": exchange.activation, "slots": slots}
        out_MD = grouped_mlp(there.rows_MD, there.group_sizes_L, weights, **options)
        return routed.y_TD + per_device.combine(out_MD, there.handle)

    y_TD: jax.Array = _sharded(mesh, local, (BATCH, REPLICATED, BATCH), BATCH)(routed, turns_EC, weights)
    return y_TD


def _few_slots(num_tokens: int, k: int, num_experts: int) -> int:
    """Return the rows of each expert that one product computes, whether or not so many of the tokens chose it.

    A CPU takes further rows about as fast, in tiles, and a device with little to do is done earlier. No expert gets a
    token twice. It is the same for every placement, as a sum's last bits can depend on the shape of its product.
    """
    often = FEW_FACTOR * num_tokens * k / num_experts
    return min(num_tokens, SLOT_MULTIPLE, FEW_MULTIPLE * math.ceil(often / FEW_MULTIPLE))


@partial(jax.jit, static_argnums=(0, 3))
def finish_on_mesh(mesh: Mesh, hidden: Hidden, positions_MC: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return the last layer's output, and of each row that of the last token alone, on every device."""

    def local(hidden: Hidden, positions_PC: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_PCD = add_residual(*hidden)
        last_P = jnp.maximum((positions_PC < length).sum(axis=1, dtype=jnp.int32) - 1, 0)
        last_PD = x_PCD[jnp.arange(x_PCD.shape[0]), last_P]
        return x_PCD, _all_gather(last_PD)

    after: tuple[jax.Array, jax.Array] = _sharded(mesh, local, (BATCH, BATCH), (BATCH, REPLICATED))(
        hidden, positions_MC
    )
    return after


@partial(jax.jit, static_argnums=0)
def gather_row_on_mesh(mesh: Mesh, x_MCD: jax.Array, place: jax.Array) -> jax.Array:
    """Return [C, D] on every device: the row at `place` of the M."""

    def local(x_PCD: jax.Array, place: jax.Array) -> jax.Array:
        rows = x_PCD.shape[0]
        all_NCD = _all_gather(lax.dynamic_index_in_dim(x_PCD, place % rows, 0))
        return lax.dynamic_index_in_dim(all_NCD, place // rows, 0, keepdims=False)

    x_CD: jax.Array = _sharded(mesh, local, (BATCH, REPLICATED), REPLICATED)(x_MCD, place)
    return x_CD


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def copy_row_on_mesh(mesh: Mesh, crosses: bool, cache: KVCache, at: jax.Array) -> KVCache:
    """Return the cache with a row copied; at: the device and row of the source, and of the target."""

    def local(cache: KVCache, at: jax.Array) -> KVCache:
        n = lax.axis_index(EXPERT_INTRA)

        def copied(x: jax.Array) -> jax.Array:
            row = lax.dynamic_index_in_dim(x, at[1], 0)
            if crosses:
                row = _sent_by(row, at[0])
            old = lax.dynamic_index_in_dim(x, at[3], 0)
            return lax.dynamic_update_index_in_dim(x, jnp.where(n == at[2], row, old), at[3], 0)

        return jax.tree.map(copied, cache)

    copied: KVCache = _sharded(mesh, local, (BATCH, REPLICATED), BATCH)(cache, at)
    return copied


def _sent_by(x: jax.Array, device: jax.Array) -> jax.Array:
    """Return the x of one device on all, bit for bit, as a sum of integers to which the others add 0."""
    whole = lax.bitcast_convert_type(x, jnp.uint32) if x.dtype == jnp.float32 else x.astype(jnp.uint32)
    mine = lax.axis_index(EXPERT_INTRA) == device
    sent = lax.psum(jnp.where(mine, whole, jnp.zeros_like(whole)), EXPERT_INTRA)
    return lax.bitcast_convert_type(sent, x.dtype) if x.dtype == jnp.float32 else sent.astype(x.dtype)


def _all_gather(x: jax.Array) -> jax.Array:
    """Return [N P, ...] of [P, ...], as bits: XLA:CPU would send bfloat16 as float32."""
    return lax.bitcast_convert_type(lax.all_gather(bits(x), EXPERT_INTRA, tiled=True), x.dtype)


@jax.jit
def pick(last_MD: jax.Array, place_Q: jax.Array) -> jax.Array:
    """Return [Q, 1, D], the rows of a group's chunks."""
    return last_MD[place_Q][:, None]


@partial(jax.jit, static_argnums=0)
def timed_experts(activation: str, x_ND: jax.Array, weights: MLPWeights) -> jax.Array:
    """Return what rows, dealt out evenly to the experts of one device, become: to be timed."""
    num_experts = weights.w_up.shape[0]
    sizes_L = jnp.full(num_experts, x_ND.shape[0] // num_experts, jnp.int32)
    return grouped_mlp(x_ND, sizes_L, weights, activation=activation, slots=x_ND.shape[0] // num_experts)
