"""The states of gated delta networks during inference, beside the KV cache of the other layers.

A layer keeps N states for each of the engine's rows, the state after t tokens at t modulo N: two,
and with speculation one more than a step with drafts has tokens a row. A step reads the state of
the tokens before it. A step of fewer than N tokens a row writes the states after each of its
tokens, so that the next step finds that of the last token that was accepted; a longer one writes
the state after all. No step writes the state that it reads: a step of single tokens that ran ahead
in vain is computed again from an unchanged state. A sequence's first token starts from zeros,
whatever its row held before.

Legend: N states of a row, M rows of the engine, P rows of a step, C tokens a row, D hidden, H value
heads, d size of a key, e size of a value, J channels of the convolution, K its taps.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layers.gated_delta import DeltaState, GatedDeltaNet


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaCache:
    """One layer's states, float32; the first axis is the number of tokens modulo N."""

    conv_NMKJ: jax.Array
    memory_NMHde: jax.Array


def empty_delta_cache(config: ModelConfig, num_rows: int, draft_width: int = 1) -> DeltaCache:
    """Return zeroed states of a layer for `num_rows` rows.

    draft_width: tokens a row of a step with drafts, 1 without speculation.
    """
    states = 1 + draft_width
    channels = 2 * config.linear_key_dim + config.linear_value_dim
    heads = config.linear_num_value_heads
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    return DeltaCache(
        jnp.zeros((states, num_rows, config.linear_conv_kernel_dim - 1, channels), jnp.float32),
        jnp.zeros((states, num_rows, heads, *sizes), jnp.float32),
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
    num_states, num_rows = cache.conv_NMKJ.shape[:2]
    start_P, count_P = positions_PC[:, 0], real_PC.sum(axis=1, dtype=jnp.int32)

    def read(states: jax.Array) -> jax.Array:
        before = states.at[start_P % num_states, rows_P].get(mode="fill", fill_value=0.0)
        first = (start_P == 0).reshape(-1, *[1] * (before.ndim - 1))
        return jnp.where(first, 0.0, before)

    before = DeltaState(read(cache.conv_NMKJ), read(cache.memory_NMHde))
    if positions_PC.shape[1] < num_states:
        y_PCD, after = network.continue_by_token(x_PCD, before, real_PC)
        at_PC = (positions_PC + 1) % num_states, jnp.where(real_PC, rows_P[:, None], num_rows)
        return y_PCD, DeltaCache(
            cache.conv_NMKJ.at[at_PC].set(after.conv, mode="drop"),
            cache.memory_NMHde.at[at_PC].set(after.memory, mode="drop"),
        )
    y_PCD, after = network.continue_from(x_PCD, before, real_PC)
    at_P = (start_P + count_P) % num_states, jnp.where(count_P > 0, rows_P, num_rows)
    return y_PCD, DeltaCache(
        cache.conv_NMKJ.at[at_P].set(after.conv, mode="drop"),
        cache.memory_NMHde.at[at_P].set(after.memory, mode="drop"),
    )
