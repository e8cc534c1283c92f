"""One decoder for every language-model family: norm, attention, norm, MLP or experts, in stacked, scanned layers.

Legend: B batch, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, N MoE layers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmoe.config import ModelConfig
from jmoe.layers.attention import Attention
from jmoe.layers.embedding import Lookup, lookup
from jmoe.layers.experts import MLP, normal
from jmoe.layers.latent_attention import LatentAttention
from jmoe.layers.moe import MoELayer, MoEStats
from jmoe.layers.norm import Norm
from jmoe.planning.exchange import ExchangeChoice
from kernels_pallas.matmul import matmul
from kernels_pallas.saved import saved

Gather = Callable[[Any], Any]
Plan = list[tuple[tuple[bool, ...], int]]  # see `layer_plan`
# (has experts, parameters, key, window, x) -> (x, statistics)
Layer = Callable[[bool, Any, jax.Array | None, jax.Array | None, jax.Array], tuple[jax.Array, MoEStats | None]]
Stacks = dict[bool, tuple[Any, Any, Any]]  # has experts -> stacked (parameters, keys, windows)
LayerScan = Callable[[Plan, Layer, Stacks, jax.Array], tuple[jax.Array, MoEStats | None]]

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
        exchange: ExchangeChoice,
        pieces: int = 1,
        rngs: nnx.Rngs,
    ) -> None:
        out_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        self.attention_norm = Norm(config.hidden_size, config.norm, config.norm_eps)
        attention = Attention if config.kv_lora_rank is None else LatentAttention
        self.attention = attention(config, out_std, rngs=rngs)
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
                pieces=pieces,
                **mlp,
            )
            if moe
            else None
        )
        gate = moe and config.shared_expert_gate
        self.shared_expert_gate = normal(rngs, (d, 1), config.initializer_range) if gate else None

    def __call__(
        self,
        x_BSD: jax.Array,
        window: jax.Array | None,
        *,
        dtype: Any,
        key: jax.Array | None,
        train: bool,
        worst_case: bool,
        keep_routing: bool,
    ) -> tuple[jax.Array, MoEStats | None]:
        x_BSD = self.attend(x_BSD, window, dtype)
        if self.moe is None:
            assert self.mlp is not None
            with jax.named_scope("mlp"):
                y_BSD = self.mlp(self.feed_forward_norm(x_BSD, dtype))
            return x_BSD + y_BSD.astype(x_BSD.dtype), None
        with jax.named_scope("moe"):
            h_BSD = self.feed_forward_norm(x_BSD, dtype)
            h_TD = h_BSD.reshape(-1, h_BSD.shape[-1])
            y_TD, stats = self.moe.local(h_TD, key=key, train=train, worst_case=worst_case, keep_routing=keep_routing)
            if self.shared_expert is not None:
                y_TD = y_TD + self.shared(h_TD)
        return x_BSD + y_TD.reshape(x_BSD.shape).astype(x_BSD.dtype), stats

    def attend(self, x_BSD: jax.Array, window: jax.Array | None, dtype: Any) -> jax.Array:
        """x + attention(norm(x)), the first half of the layer."""
        with jax.named_scope("attention"):
            h_BSD = self.attention(self.attention_norm(x_BSD, dtype), window)
            return saved(x_BSD + h_BSD.astype(x_BSD.dtype), "after_attention")

    def shared(self, h: jax.Array) -> jax.Array:
        """float32 output of the shared expert, gated where it has a gate."""
        assert self.shared_expert is not None
        y = self.shared_expert(h)
        if self.shared_expert_gate is None:
            return y
        return y * jax.nn.sigmoid(matmul(h, self.shared_expert_gate[...].astype(h.dtype)))


def _stack(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """`count` copies of a module as one, every parameter with a leading layer dimension; drawn one layer at a time."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    draw = lambda key: nnx.state(make(nnx.Rngs(params=key)))  # noqa: E731
    return nnx.merge(graph, lax.map(draw, jax.random.split(rngs.params(), count)))


def layer_plan(sparse: Sequence[bool]) -> Plan:
    """[(pattern, repeats), ...]: the layers' kinds as few repeated patterns, so that regular ones compile once.

    Greedy: at each layer the pattern that covers most layers by repeating, the shortest of those.
    """
    plan, at = [], 0
    while at < len(sparse):
        best = (tuple(sparse[at : at + 1]), 1)
        for period in range(1, (len(sparse) - at) // 2 + 1):
            pattern, repeats = tuple(sparse[at : at + period]), 1
            while tuple(sparse[at + repeats * period : at + (repeats + 1) * period]) == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > len(best[0]) * best[1]:
                best = (pattern, repeats)
        plan.append(best)
        at += len(best[0]) * best[1]
    return plan


@dataclass(frozen=True)
class _Run:
    """Neighbouring layers of one kind in a pattern, and where their parameters lie in that kind's stack."""

    sparse: bool
    count: int
    offset: int  # in the layers of its kind in one repeat
    per_repeat: int  # layers of its kind in one repeat
    start: int  # of the first repeat, in the stack
    alone: bool  # one layer, run without a scan of its own

    def of(self, w: jax.Array, *, repeats: int) -> jax.Array:
        """[repeats, count, ...] of a stack, or [repeats, ...] if alone."""
        end = self.start + repeats * self.per_repeat
        w = w if (self.start, end) == (0, w.shape[0]) else w[self.start : end]
        if self.alone and self.per_repeat == 1:
            return w
        w = w.reshape(repeats, self.per_repeat, *w.shape[1:])
        return w[:, self.offset] if self.alone else w[:, self.offset : self.offset + self.count]


def _runs(pattern: tuple[bool, ...], start: dict[bool, int]) -> list[_Run]:
    runs, taken = [], {False: 0, True: 0}
    for kind, group in itertools.groupby(pattern):
        count = len(list(group))
        alone = count == 1 and (kind or len(pattern) == 1)
        runs.append(_Run(kind, count, taken[kind], pattern.count(kind), start[kind], alone))
        taken[kind] += count
    return runs


def _in_order(ys: tuple[jax.Array, ...], alone: list[bool]) -> jax.Array:
    """[repeats, ...] of each run of one layer, or [repeats, count, ...], as [layers, ...]."""
    if alone == [True]:
        return ys[0]
    y = jnp.concatenate([y[:, None] if one else y for y, one in zip(ys, alone, strict=True)], axis=1)
    return y.reshape(-1, *y.shape[2:])


def _step(layer: Layer, kind: bool, x_BSD: jax.Array, xs: Any) -> tuple[jax.Array, MoEStats | None]:
    state, key, window = xs
    return layer(kind, state, key, window, x_BSD)


def scan_layers(plan: Plan, layer: Layer, inputs: Stacks, x_BSD: jax.Array) -> tuple[jax.Array, MoEStats | None]:
    """All layers in order, one scan for every repeated pattern of the two kinds."""
    used, stats = {False: 0, True: 0}, []
    for pattern, repeats in plan:
        runs = _runs(pattern, used)

        def block(x_BSD: jax.Array, xs: Any, runs: list[_Run] = runs) -> tuple[jax.Array, list[Any]]:
            found = []
            for layers, layer_xs in zip(runs, xs, strict=True):
                step = partial(_step, layer, layers.sparse)
                x_BSD, ys = step(x_BSD, layer_xs) if layers.alone else lax.scan(step, x_BSD, layer_xs)
                found += [ys] * layers.sparse
            return x_BSD, found

        xs = [jax.tree.map(partial(layers.of, repeats=repeats), inputs[layers.sparse]) for layers in runs]
        x_BSD, found = lax.scan(block, x_BSD, xs)
        if found:
            alone = [layers.alone for layers in runs if layers.sparse]
            stats.append(jax.tree.map(lambda *ys, alone=alone: _in_order(ys, alone), *found))
        used = {kind: used[kind] + repeats * pattern.count(kind) for kind in used}
    return x_BSD, jax.tree.map(lambda *ys: jnp.concatenate(ys) if len(ys) > 1 else ys[0], *stats) if stats else None


class Decoder(nnx.Module):
    """Tokens [B, S] -> float32 hidden states [B, S, D]; `lm_head()` turns them into logits.

    Layers without experts are one stack of parameters, those with experts another, each in the order of the layers.
    They are run by `scan_layers`, or by what `layers` is given.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        mesh: jax.sharding.Mesh | None = None,
        expert_axes: tuple[str, ...] = (),
        exchange: ExchangeChoice = "auto",
        pieces: int = 1,
    ) -> None:
        self.config = config

        def layer(moe: bool) -> Callable[[nnx.Rngs], nnx.Module]:
            return lambda rngs: DecoderLayer(
                config, moe=moe, mesh=mesh, expert_axes=expert_axes, exchange=exchange, pieces=pieces, rngs=rngs
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

    @staticmethod
    def experts_of(config: ModelConfig, layer: jax.Array | int, rngs: nnx.Rngs) -> nnx.Module:
        """The experts of one layer with experts (counted among its kind) of `Decoder(config, rngs=rngs)`, alone."""
        dense = config.num_hidden_layers > config.num_moe_layers
        for _ in range(1 + (config.position == "learned") + dense):  # what the decoder draws before
            rngs.params()
        key = jax.random.split(rngs.params(), config.num_moe_layers)[layer]
        drawn = DecoderLayer(config, moe=True, mesh=None, expert_axes=(), exchange="flat", rngs=nnx.Rngs(params=key))
        assert drawn.moe is not None and isinstance(drawn.moe.experts, nnx.Module)
        return drawn.moe.experts

    def embed(self, tokens_BS: jax.Array, dtype: Any, lookup: Lookup = lookup) -> jax.Array:
        """[B, S, D] in `dtype`: the first layer's input."""
        with jax.named_scope("embedding"):
            x_BSD = lookup(self.embedding[...], tokens_BS, dtype)
            if self.positions is not None:
                x_BSD = x_BSD + self.positions[...][: tokens_BS.shape[1]].astype(dtype)
            return x_BSD

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
        layers: LayerScan = scan_layers,
        lookup: Lookup = lookup,
        keep_routing: bool = False,
    ) -> tuple[jax.Array, MoEStats | None]:
        """(hidden [B, S, D] in `dtype`, `MoEStats` with a leading [N], or None), inside `shard_map` or on one device.

        gather: turns one layer's parameters as they lie on this device into the whole ones. layers: what runs them all.
        lookup: the tokens' rows of the embedding table as it lies here. key: for router jitter. keep_routing: the
        statistics hold every token's routing.
        """
        x_BSD = self.embed(tokens_BS, dtype, lookup)
        options = {"dtype": dtype, "train": train, "worst_case": worst_case, "keep_routing": keep_routing}

        graphs, inputs = self._stacks(key)

        def layer(
            kind: bool, state: Any, layer_key: jax.Array | None, window: jax.Array | None, x_BSD: jax.Array
        ) -> tuple[jax.Array, MoEStats | None]:
            def apply(state: Any, layer_key: jax.Array | None, window: jax.Array | None, x_BSD: jax.Array) -> Any:
                return nnx.merge(graphs[kind], gather(state))(x_BSD, window, key=layer_key, **options)

            policy = None if remat else jax.checkpoint_policies.save_only_these_names(*SAVED)
            return jax.checkpoint(apply, policy=policy, prevent_cse=False)(state, layer_key, window, x_BSD)

        sparse, first = self.config.sparse_layers, self.config.first_k_dense_replace
        x_BSD, stats = layers(layer_plan(sparse[:first]) + layer_plan(sparse[first:]), layer, inputs, x_BSD)
        return self.norm(x_BSD, dtype), stats

    def _stacks(self, key: jax.Array | None) -> tuple[dict[bool, Any], Stacks]:
        """What each kind of layer is, and what its layers run on."""
        sparse = np.array(self.config.sparse_layers)
        graphs, inputs = {}, {}
        windows = None if self.config.windows is None else np.array(self.config.windows, np.int32)
        for kind, stack in ((False, self.dense_layers), (True, self.moe_layers)):
            if stack is not None:
                graphs[kind], state = nnx.split(stack)
                keys = jax.random.split(key, self.config.num_moe_layers) if key is not None and kind else None
                inputs[kind] = (state, keys, None if windows is None else jnp.asarray(windows[sparse == kind]))
        return graphs, inputs
