"""Gated delta networks (Qwen3-Next): a layer in place of attention with a state of fixed size.

A short causal convolution over each channel of queries, keys and values, the gated delta rule, and
a norm of each head's output times a gate. Training and prefill use the rule's chunked form, the
decoding of one token its step. `DeltaState` is all that a sequence keeps of its earlier tokens.

Legend: B rows, S tokens, D hidden, G key heads, H value heads, d size of a key, e size of a value,
J = 2 G d + H e channels of the convolution, K taps of the convolution, M rows of the states.
"""

from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import ModelConfig
from jmoe.layers.documents import Documents
from jmoe.layers.experts import affine, normal_parameter
from jmoe.layers.gated_delta_rule import (
    DeltaTokens,
    chunked_delta_rule,
    delta_rule_states,
    delta_rule_step,
)
from jmoe.layers.norm import Norm
from kernels_pallas.saved import mark_saved

LENGTH_EPS = 1e-6  # of the norms of queries and keys, in transformers and flash-linear-attention


class DeltaState(NamedTuple):
    """The memory of rows of tokens in one layer.

    conv: the inputs of the convolution at the last K - 1 tokens, [B, K - 1, J]. memory: float32
    [B, H, d, e].
    """

    conv: jax.Array
    memory: jax.Array


def causal_convolution(
    x_BSJ: jax.Array,
    taps_KJ: jax.Array,
    before_BKJ: jax.Array | None = None,
    documents_BS: jax.Array | None = None,
) -> jax.Array:
    """Return float32 [B, S, J]: each channel's weighted sum of its last K inputs.

    before_BKJ: the K - 1 inputs before the first token, None for zeros. documents_BS: a token sees
    the inputs of its own document; None for all.
    """
    width, s = taps_KJ.shape[0], x_BSJ.shape[1]
    taps = taps_KJ.astype(jnp.float32)
    ahead = ((0, 0), (width - 1, 0))
    joined = (
        jnp.pad(x_BSJ, (*ahead, (0, 0)))
        if before_BKJ is None
        else jnp.concatenate([before_BKJ.astype(x_BSJ.dtype), x_BSJ], axis=1)
    )
    numbers = None if documents_BS is None else jnp.pad(documents_BS, ahead, constant_values=-1)
    out = jnp.zeros(x_BSJ.shape, jnp.float32)
    for tap in range(width):
        term = joined[:, tap : tap + s].astype(jnp.float32) * taps[tap]
        if numbers is not None and documents_BS is not None:
            term = jnp.where((numbers[:, tap : tap + s] == documents_BS)[..., None], term, 0.0)
        out = out + term
    return out


def _unit_length(x: jax.Array) -> jax.Array:
    """Return float32 x / |x| over the last dimension."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + LENGTH_EPS)


class _Projected(NamedTuple):
    """The projections of each token: the convolution's input, and the gates' inputs."""

    mixed_BSJ: jax.Array
    z_BSHe: jax.Array
    b_BSH: jax.Array
    a_BSH: jax.Array


class GatedDeltaNet(nnx.Module):
    """A gated delta network [B, S, D] -> float32 [B, S, D].

    The columns of `w_in` are queries, keys, values and z, then b and a; if
    `config.linear_projections_by_head`, each of the two groups lies side by side for each key head
    (Qwen3-Next), otherwise for all heads (Qwen3.5).

    out_std: standard deviation of the initial output projection.
    """

    def __init__(self, config: ModelConfig, out_std: float, *, rngs: nnx.Rngs) -> None:
        self.config = config
        keys, values = config.linear_key_dim, config.linear_value_dim
        heads, std = config.linear_num_value_heads, config.initializer_range
        width = 2 * keys + 2 * values + 2 * heads
        self.w_in = normal_parameter(rngs, (config.hidden_size, width), std)
        taps = (config.linear_conv_kernel_dim, 2 * keys + values)
        self.w_conv = normal_parameter(rngs, taps, std)
        rates = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 0.01, 16.0)
        self.log_rate = nnx.Param(jnp.log(rates))
        self.b_rate = nnx.Param(jnp.ones(heads, jnp.float32))
        self.b_out, self.sinks = None, None  # as attention has them
        self.out_norm = Norm(config.linear_value_head_dim, "rmsnorm", config.norm_eps)
        self.w_delta_out = normal_parameter(rngs, (values, config.hidden_size), out_std)

    def _project(self, x_BSD: jax.Array) -> _Projected:
        config = self.config
        g, h = config.linear_num_key_heads, config.linear_num_value_heads
        d, e = config.linear_key_head_dim, config.linear_value_head_dim
        y = mark_saved(affine(x_BSD, self.w_in).astype(x_BSD.dtype), "qkv")
        lead, r = y.shape[:-1], h // g
        groups = g if config.linear_projections_by_head else 1
        qkvz, ba = jnp.split(y, [2 * g * d + 2 * h * e], axis=-1)
        sizes = [g // groups * d, g // groups * d, g // groups * r * e]
        at = [sizes[0], 2 * sizes[0], 2 * sizes[0] + sizes[2]]
        *mixed, z = jnp.split(qkvz.reshape(*lead, groups, -1), at, axis=-1)
        b, a = jnp.split(ba.reshape(*lead, groups, -1), 2, axis=-1)
        joined = jnp.concatenate([part.reshape(*lead, -1) for part in mixed], axis=-1)
        return _Projected(joined, z.reshape(*lead, h, e), b.reshape(*lead, h), a.reshape(*lead, h))

    def _tokens(
        self, projected: _Projected, conv_BSJ: jax.Array, real_BS: jax.Array | None
    ) -> DeltaTokens:
        """Return the rule's inputs; tokens outside `real_BS` change no state."""
        config, dtype = self.config, projected.mixed_BSJ.dtype
        g, h, keys = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_dim,
        )
        mixed = jax.nn.silu(conv_BSJ).astype(dtype)
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        q, k = (_unit_length(x.reshape(*x.shape[:-1], g, -1)) for x in (q, k))
        beta = jax.nn.sigmoid(projected.b_BSH.astype(jnp.float32))
        rate = jnp.exp(self.log_rate[...].astype(jnp.float32))
        step = projected.a_BSH.astype(jnp.float32) + self.b_rate[...].astype(jnp.float32)
        decay = -rate * jax.nn.softplus(step)
        if real_BS is not None:
            beta, decay = (jnp.where(real_BS[..., None], x, 0.0) for x in (beta, decay))
        q = q * config.linear_key_head_dim**-0.5
        return DeltaTokens(q, k, v.reshape(*v.shape[:-1], h, -1), decay, beta)

    def _output(self, out_BSHe: jax.Array, projected: _Projected, dtype: jnp.dtype) -> jax.Array:
        normed = self.out_norm(out_BSHe.astype(dtype), dtype).astype(jnp.float32)
        gated = (normed * jax.nn.silu(projected.z_BSHe.astype(jnp.float32))).astype(dtype)
        return affine(gated.reshape(*gated.shape[:-2], -1), self.w_delta_out)

    def __call__(
        self, x_BSD: jax.Array, window: int | None = None, documents: Documents | None = None
    ) -> jax.Array:
        """Return float32 [B, S, D] of whole sequences.

        window: must be None, a state has no window. documents: see `Documents`; None if each
        sequence is one document.
        """
        assert window is None, "config/linear_attention.py refuses windows beside linear_attention"
        projected = self._project(x_BSD)
        numbers_BS = None if documents is None else documents.number_BS
        conv_BSJ = causal_convolution(
            projected.mixed_BSJ, self.w_conv[...], documents_BS=numbers_BS
        )
        tokens = self._tokens(projected, conv_BSJ, None)
        memory = jnp.zeros(self.memory_shape(x_BSD.shape[0]), jnp.float32)
        out_BSHe, _ = chunked_delta_rule(tokens, memory, numbers_BS)
        out_BSHe = mark_saved(out_BSHe.astype(x_BSD.dtype), "attention")
        return self._output(out_BSHe, projected, x_BSD.dtype)

    def memory_shape(self, rows: int) -> tuple[int, int, int, int]:
        """Return (rows, H, d, e)."""
        config = self.config
        sizes = config.linear_key_head_dim, config.linear_value_head_dim
        return (rows, config.linear_num_value_heads, *sizes)

    def continue_from(
        self, x_BSD: jax.Array, state: DeltaState, real_BS: jax.Array
    ) -> tuple[jax.Array, DeltaState]:
        """Return (float32 [B, S, D], the state after the tokens) of tokens after `state`.

        real_BS: bool, False for padding, which lies after the other tokens of its row.
        """
        projected, tokens, joined_BSJ = self._tokens_after(x_BSD, state, real_BS)
        rule = delta_rule_step if x_BSD.shape[1] == 1 else chunked_delta_rule
        out_BSHe, memory = rule(tokens, state.memory)
        count_B = real_BS.sum(axis=1, dtype=jnp.int32)
        last = count_B[:, None] + jnp.arange(state.conv.shape[1])
        conv = jnp.take_along_axis(joined_BSJ, last[..., None], axis=1)
        y_BSD = self._output(out_BSHe, projected, x_BSD.dtype)
        return y_BSD, DeltaState(conv.astype(state.conv.dtype), memory)

    def continue_by_token(
        self, x_BSD: jax.Array, state: DeltaState, real_BS: jax.Array
    ) -> tuple[jax.Array, DeltaState]:
        """Return (float32 [B, S, D], the states after each token) of tokens after `state`, computed
        one after the other as if each ran alone. The states have an axis S behind B.

        real_BS: as for `continue_from`.
        """
        projected, tokens, joined_BSJ = self._tokens_after(x_BSD, state, real_BS)
        out_BSHe, memory = delta_rule_states(tokens, state.memory)
        after = jnp.arange(x_BSD.shape[1])[:, None] + 1
        conv = joined_BSJ[:, after + jnp.arange(state.conv.shape[1])]
        y_BSD = self._output(out_BSHe, projected, x_BSD.dtype)
        return y_BSD, DeltaState(conv.astype(state.conv.dtype), memory)

    def _tokens_after(
        self, x_BSD: jax.Array, state: DeltaState, real_BS: jax.Array
    ) -> tuple[_Projected, DeltaTokens, jax.Array]:
        """Return (the projections of tokens after `state`, the rule's inputs, the convolution's
        inputs with those of the state in front).
        """
        projected = self._project(x_BSD)
        before = state.conv.astype(x_BSD.dtype)
        conv_BSJ = causal_convolution(projected.mixed_BSJ, self.w_conv[...], before)
        tokens = self._tokens(projected, conv_BSJ, real_BS)
        return projected, tokens, jnp.concatenate([before, projected.mixed_BSJ], axis=1)
