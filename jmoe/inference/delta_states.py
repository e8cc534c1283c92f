"""The states of gated delta networks during inference, beside the KV cache of the other layers.

A layer keeps two states for each of the engine's rows: after an even and after an odd number of
tokens. A step reads the one of the tokens before it and writes the one of the tokens after it. A
step of single tokens that ran ahead in vain is thus computed again from an unchanged state. A
sequence's first token starts from zeros, whatever its row held before.

Legend: M rows of the engine, P rows of a step, C tokens a row, D hidden, H value heads, d size of a
key, e size of a value, J channels of the convolution, K its taps.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layers.gated_delta import DeltaState, GatedDeltaNet


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaCache:
    """One layer's states, float32; the first axis tells even from odd numbers of tokens."""

    conv_2MKJ: jax.Array
    memory_2MHde: jax.Array


def empty_delta_cache(config: ModelConfig, num_rows: int) -> DeltaCache:
    """Return zeroed states of a layer for `num_rows` rows."""
    channels = 2 * config.linear_key_dim + config.linear_value_dim
    heads = config.linear_num_value_heads
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    return DeltaCache(
        jnp.zeros((2, num_rows, config.linear_conv_kernel_dim - 1, channels), jnp.float32),
        jnp.zeros((2, num_rows, heads, *sizes), jnp.float32),
    )


def advance_states(
    network: GatedDeltaNet,
    x_PCD: jax.Array,
    cache: DeltaCache,
    rows_P: jax.Array,
    positions_PC: jax.Array,
    real_PC: jax.Array,
) -> tuple[jax.Array, DeltaCache]:
    """Return (the network's output float32 [P, C, D], the cache with the states after the step).

    rows_P: int32, the engine's row of each row of the step; a row beyond M is padding.
    real_PC: bool, False for padding, which lies after the other tokens of its row.
    """
    start_P, count_P = positions_PC[:, 0], real_PC.sum(axis=1, dtype=jnp.int32)
    end_P = start_P + count_P

    def read(states: jax.Array) -> jax.Array:
        before = states.at[start_P % 2, rows_P].get(mode="fill", fill_value=0.0)
        first = (start_P == 0).reshape(-1, *[1] * (before.ndim - 1))
        return jnp.where(first, 0.0, before)

    before = DeltaState(read(cache.conv_2MKJ), read(cache.memory_2MHde))
    y_PCD, after = network.continue_from(x_PCD, before, real_PC)
    at = end_P % 2, jnp.where(count_P > 0, rows_P, cache.conv_2MKJ.shape[1])
    return y_PCD, DeltaCache(
        cache.conv_2MKJ.at[at].set(after.conv, mode="drop"),
        cache.memory_2MHde.at[at].set(after.memory, mode="drop"),
    )
