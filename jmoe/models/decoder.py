"""One decoder for every language-model family: norm, attention, norm, MLP or experts, in stacked, scanned layers.

Legend: B batch, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, N MoE layers.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax import lax

from jmoe.config import ModelConfig
from jmoe.layers.attention import Attention
from jmoe.layers.experts import MLP, normal
from jmoe.layers.moe import MoELayer, MoEStats
from jmoe.layers.norm import Norm
from kernels_pallas.saved import saved

Gather = Callable[[Any], Any]

# Kept for the backward pass: what matrix products and routing made. The rest (norms, rotations, casts, permutations,
# and a layer's whole weights, which are gathered again) is computed again: cheaper than to write and read it.
SAVED = ("qkv", "attention", "after_attention", "routing", "expert_rows", "expert_up", "expert_out", "mlp_up")


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the feed-forward is a `MoELayer` or an `MLP`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        moe: bool,
        mesh: jax.sharding.Mesh | None,
        expert_axes: tuple[str, ...],
        exchange: str,
        rngs: nnx.Rngs,
    ) -> None:
        out_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        self.attention_norm = Norm(config.hidden_size, config.norm, config.norm_eps)
        self.attention = Attention(config, out_std, rngs=rngs)
        self.feed_forward_norm = Norm(config.hidden_size, config.norm, config.norm_eps)
        mlp: dict[str, Any] = {
            "activation": config.hidden_act,
            "bias": config.mlp_bias,
            "init_std": config.initializer_range,
            "init_out_std": out_std,
            "rngs": rngs,
        }
        d, shared = config.hidden_size, config.shared_expert_intermediate_size
        self.mlp = None if moe else MLP(d, config.intermediate_size, **mlp)
        self.shared_expert = MLP(d, shared, **mlp) if moe and shared else None
        self.moe = (
            MoELayer(
                d,
                config.num_experts,
                config.num_experts_per_tok,
                config.moe_intermediate_size,
                router=config.router,
                capacity_factor=config.capacity_factor,
                mesh=mesh,
                expert_axes=expert_axes,
                exchange=exchange,
                **mlp,
            )
            if moe
            else None
        )

    def __call__(
        self, x_BSD: jax.Array, *, dtype: Any, key: jax.Array | None, train: bool, worst_case: bool
    ) -> tuple[jax.Array, MoEStats | None]:
        with jax.named_scope("attention"):
            h_BSD = self.attention(self.attention_norm(x_BSD, dtype))
            x_BSD = saved(x_BSD + h_BSD.astype(x_BSD.dtype), "after_attention")
        if self.moe is None:
            assert self.mlp is not None
            with jax.named_scope("mlp"):
                y_BSD = self.mlp(self.feed_forward_norm(x_BSD, dtype))
            return x_BSD + y_BSD.astype(x_BSD.dtype), None
        with jax.named_scope("moe"):
            h_BSD = self.feed_forward_norm(x_BSD, dtype)
            h_TD = h_BSD.reshape(-1, h_BSD.shape[-1])
            y_TD, stats = self.moe.local(h_TD, key=key, train=train, worst_case=worst_case)
            if self.shared_expert is not None:
                y_TD = y_TD + self.shared_expert(h_TD)
        return x_BSD + y_TD.reshape(x_BSD.shape).astype(x_BSD.dtype), stats


def _stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """`count` copies of a module as one, every parameter with a leading layer dimension; drawn one layer at a time."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    draw = lambda key: nnx.state(make(nnx.Rngs(params=key)))  # noqa: E731
    return nnx.merge(graph, lax.map(draw, jax.random.split(rngs.params(), count)))


class Decoder(nnx.Module):
    """Tokens [B, S] -> float32 hidden states [B, S, D]; `lm_head()` turns them into logits.

    Layers come in `num_moe_layers` blocks of `decoder_sparse_step` layers, of which the last has experts, after
    `first_k_dense_replace` dense ones. Each kind is one stack of parameters, run by one scan.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        mesh: jax.sharding.Mesh | None = None,
        expert_axes: tuple[str, ...] = (),
        exchange: str = "two_level",
    ) -> None:
        self.config = config

        def layer(moe: bool) -> Callable[[nnx.Rngs], nnx.Module]:
            return lambda rngs: DecoderLayer(
                config, moe=moe, mesh=mesh, expert_axes=expert_axes, exchange=exchange, rngs=rngs
            )

        std = config.initializer_range
        dense = config.num_hidden_layers - config.num_moe_layers
        self.embedding = normal(rngs, (config.vocab_size, config.hidden_size), std)
        learned = config.position == "learned"
        self.positions = normal(rngs, (config.max_position_embeddings, config.hidden_size), std) if learned else None
        self.dense_layers = _stack(layer(moe=False), dense, rngs) if dense else None
        self.moe_layers = _stack(layer(moe=True), config.num_moe_layers, rngs) if config.num_moe_layers else None
        self.norm = Norm(config.hidden_size, config.norm, config.norm_eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else normal(rngs, (config.hidden_size, config.vocab_size), std)

    def lm_head(self) -> jax.Array:
        """[D, V]: logits = hidden @ lm_head."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def __call__(
        self,
        tokens_BS: jax.Array,
        *,
        dtype: Any = jnp.float32,
        key: jax.Array | None = None,
        train: bool = False,
        worst_case: bool = False,
        remat: bool = False,
        gather: Gather = lambda tree: tree,
    ) -> tuple[jax.Array, MoEStats | None]:
        """(hidden [B, S, D] in `dtype`, `MoEStats` with a leading [N], or None), inside `shard_map` or on one device.

        gather: turns one layer's parameters as they lie on this device into the whole ones. key: for router jitter.
        """
        with jax.named_scope("embedding"):
            x_BSD = self.embedding[...][tokens_BS].astype(dtype)
            if self.positions is not None:
                x_BSD = x_BSD + self.positions[...][: tokens_BS.shape[1]].astype(dtype)

        def run(stack: Any, layer_key: jax.Array | None, x_BSD: jax.Array) -> tuple[jax.Array, MoEStats | None]:
            graph, state = stack

            def apply(state: Any, layer_key: jax.Array | None, x_BSD: jax.Array) -> Any:
                layer = nnx.merge(graph, gather(state))
                return layer(x_BSD, dtype=dtype, key=layer_key, train=train, worst_case=worst_case)

            policy = None if remat else jax.checkpoint_policies.save_only_these_names(*SAVED)
            return jax.checkpoint(apply, policy=policy, prevent_cse=False)(state, layer_key, x_BSD)

        x_BSD, stats = self._scan(run, x_BSD, key)
        return self.norm(x_BSD, dtype), stats

    def _scan(self, run: Callable[..., Any], x_BSD: jax.Array, key: jax.Array | None) -> Any:
        """Dense first layers, then blocks of dense layers closed by a MoE layer."""
        config = self.config
        first, between = config.first_k_dense_replace, config.decoder_sparse_step - 1
        dense_graph, dense = nnx.split(self.dense_layers) if self.dense_layers is not None else (None, None)

        def dense_step(x_BSD: jax.Array, state: Any) -> tuple[jax.Array, None]:
            return run((dense_graph, state), None, x_BSD)[0], None

        if self.moe_layers is None:
            return lax.scan(dense_step, x_BSD, dense)[0], None
        if first:
            x_BSD, _ = lax.scan(dense_step, x_BSD, jax.tree.map(lambda w: w[:first], dense))
        blocks = config.num_moe_layers
        inner = jax.tree.map(lambda w: w[first:].reshape(blocks, between, *w.shape[1:]), dense) if between else None
        moe_graph, moe = nnx.split(self.moe_layers)
        keys = None if key is None else jax.random.split(key, blocks)

        def block(x_BSD: jax.Array, xs: Any) -> tuple[jax.Array, MoEStats]:
            inner_state, moe_state, layer_key = xs
            if between:
                x_BSD, _ = lax.scan(dense_step, x_BSD, inner_state)
            return run((moe_graph, moe_state), layer_key, x_BSD)

        return lax.scan(block, x_BSD, (inner, moe, keys))
