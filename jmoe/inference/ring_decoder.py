"""The decoder of the engine: layer by layer over a KV cache, with expert weights that come and go in slots.

Legend: P rows of a step, C tokens a row, T = P C, D hidden, V vocabulary, E experts of a layer, K choices a token.

A layer is two programs: `attend` (attention, router, shared expert) and `experts`. They are compiled once a shape and
serve every layer of a kind and every way of keeping the experts (`Residency`), which differ in the table alone: so
what is streamed is, bit for bit, what is computed when everything is resident.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import ModelConfig
from jmoe.inference.estimators import Estimator
from jmoe.inference.expert_slots import slot_mlp
from jmoe.inference.kv_cache import KVCache, attend, copy_row, write
from jmoe.inference.residency import Residency
from jmoe.models.decoder import DecoderLayer
from jmoe.models.split_checkpoint import Ends

PREFILL_TILE_ROWS = 64
RECENT_STEPS = 16


class Tokens(NamedTuple):
    """What one program runs on: `rows` of the cache, each with C tokens; a position of S marks padding."""

    tokens_PC: jax.Array
    rows_P: jax.Array
    positions_PC: jax.Array


class _Routed(NamedTuple):
    h_TD: jax.Array
    idx_TK: jax.Array
    weights_TK: jax.Array


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _attend(
    graph: Any,
    state: Any,
    cache: KVCache,
    x_PCD: jax.Array,
    rows_P: jax.Array,
    positions_PC: jax.Array,
    window: jax.Array | None,
) -> tuple[jax.Array, KVCache, _Routed | None]:
    """Everything of a layer but its experts: (x + attention (+ MLP or shared expert), cache, routing)."""
    layer = nnx.merge(graph, state)
    dtype = x_PCD.dtype
    with jax.named_scope("attention"):
        q, k, v = layer.attention.project(layer.attention_norm(x_PCD, dtype), positions_PC)
        cache = write(cache, rows_P, positions_PC, k, v)
        sinks = layer.attention.sinks
        sinks_H = None if sinks is None else sinks[...]
        o = attend(q, cache, rows_P, positions_PC, scale=layer.attention.scale, window=window, sinks_H=sinks_H)
        x_PCD = x_PCD + layer.attention.output(o).astype(dtype)
    h_PCD = layer.feed_forward_norm(x_PCD, dtype)
    if layer.moe is None:
        return x_PCD + layer.mlp(h_PCD).astype(dtype), cache, None
    with jax.named_scope("router"):
        h_TD = h_PCD.reshape(-1, h_PCD.shape[-1])
        routing = layer.moe.router(h_TD)
        real_T = positions_PC.reshape(-1) < cache.length
        idx_TK = jnp.where(real_T[:, None], routing.topk_idx_TK, layer.moe.num_experts)
    if layer.shared_expert is not None:
        x_PCD = x_PCD + layer.shared(h_PCD).astype(dtype)
    return x_PCD, cache, _Routed(h_TD, idx_TK, routing.topk_weights_TK)


@partial(jax.jit, static_argnums=(0, 1))
def _experts(
    activation: str, tile_rows: int, x_PCD: jax.Array, routed: _Routed, table_E: jax.Array, slots: dict[str, jax.Array]
) -> jax.Array:
    """x + the weighted sum of each token's experts."""
    with jax.named_scope("experts"):
        y_TD = slot_mlp(*routed, slots, table_E, activation=activation, tile_rows=tile_rows)
    return x_PCD + y_TD.reshape(x_PCD.shape).astype(x_PCD.dtype)


@partial(jax.jit, static_argnums=(0, 4))
def _embed(graph: Any, state: Any, tokens_PC: jax.Array, positions_PC: jax.Array, dtype: Any) -> jax.Array:
    return nnx.merge(graph, state).embed(tokens_PC, positions_PC, dtype)


@partial(jax.jit, static_argnums=0)
def _logits(graph: Any, state: Any, x_PCD: jax.Array, at_P: jax.Array) -> jax.Array:
    """float32 [P, V]: the logits after token `at_P` of each row."""
    return nnx.merge(graph, state).logits(x_PCD[jnp.arange(x_PCD.shape[0]), at_P])


@partial(jax.jit, static_argnums=0)
def _all_logits(graph: Any, state: Any, x_PCD: jax.Array, row: jax.Array) -> jax.Array:
    return nnx.merge(graph, state).logits(x_PCD[row])


class RingDecoder:
    """Runs tokens through all layers; holds the caches."""

    def __init__(
        self,
        config: ModelConfig,
        ends: Ends,
        layers: Sequence[DecoderLayer],
        residency: Residency,
        caches: Sequence[KVCache],
        dtype: Any,
        estimator: Estimator | None = None,
    ) -> None:
        """ends, layers: of `without_experts`."""
        self.config, self.residency, self.dtype, self.estimator = config, residency, dtype, estimator
        self.readback_s, self.estimate_s = 0.0, 0.0  # see `EngineStats`
        self.recent_choices: deque[list[list[jax.Array]]] = deque(maxlen=RECENT_STEPS)  # steps, layers, groups
        self.caches = list(caches)
        self._ends = nnx.split(ends)
        self._layers = [nnx.split(layer) for layer in layers]
        self._moe_index = (np.cumsum(config.sparse_layers) - 1).tolist()
        windows = config.windows
        self._windows = [None if windows is None else np.int32(w) for w in windows or [0] * len(layers)]

    def tokens(self, rows: Sequence[tuple[int, int, Sequence[int]]], num_rows: int, width: int) -> Tokens:
        """(row of the cache, first position, tokens) of each row, padded to [num_rows, width]."""
        tokens_PC = np.zeros((num_rows, width), np.int32)
        rows_P = np.zeros(num_rows, np.int32)
        positions_PC = np.full((num_rows, width), self.caches[0].length, np.int32)
        for i, (row, start, tokens) in enumerate(rows):
            rows_P[i] = row
            tokens_PC[i, : len(tokens)] = tokens
            positions_PC[i, : len(tokens)] = np.arange(start, start + len(tokens))
        return Tokens(*jax.device_put((tokens_PC, rows_P, positions_PC), jax.devices()[0]))

    def forward(self, groups: Sequence[Tokens]) -> list[jax.Array]:
        """Hidden states [P, C, D] of every group; a layer is acquired once for all of them."""
        xs = [_embed(*self._ends, g.tokens_PC, g.positions_PC, self.dtype) for g in groups]
        held: tuple[int, list[jax.Array]] | None = None  # the layer whose slots running programs may still read
        path: list[np.ndarray] = []
        choices: list[list[jax.Array]] = []
        for i, (graph, state) in enumerate(self._layers):
            routed: list[_Routed] = []
            for n, g in enumerate(groups):
                xs[n], self.caches[i], choice = _attend(
                    graph, state, self.caches[i], xs[n], g.rows_P, g.positions_PC, self._windows[i]
                )
                if choice is not None:
                    routed.append(choice)
            if routed:
                self._release(held)
                held = (self._moe_index[i], self._run_experts(self._moe_index[i], xs, routed, path))
                xs = held[1][:]
                choices.append([r.idx_TK for r in routed])
        self._release(held)
        self.recent_choices.append(choices)
        return xs

    def _run_experts(
        self, moe_layer: int, xs: list[jax.Array], routed: list[_Routed], path: list[np.ndarray]
    ) -> list[jax.Array]:
        """x + experts of every group, when the layer's experts are in place. path: choices of the layers before."""
        residency, chosen = self.residency, None
        if residency.needs_choices:
            if self.estimator is not None:
                self.estimator.start(moe_layer, [r.h_TD for r in routed])
            indices = [r.idx_TK for r in routed]
            for idx_TK in indices:
                idx_TK.copy_to_host_async()
            jax.block_until_ready(indices)  # computing them is not part of reading them
            begun, waited_s = time.perf_counter(), residency.waited_s
            chosen = np.concatenate([np.asarray(idx_TK) for idx_TK in indices])
            path.append(chosen)
        table_E = residency.acquire(moe_layer, chosen)
        if chosen is not None:
            self.readback_s += time.perf_counter() - begun - (residency.waited_s - waited_s)
        out = []
        for x_PCD, choice in zip(xs, routed, strict=True):
            tile = min(PREFILL_TILE_ROWS, choice.h_TD.shape[0])
            program = partial(_experts, self.config.hidden_act, tile, x_PCD, choice, table_E)
            out.append(residency.slots.run(program))
        following = (moe_layer + 1) % self.config.num_moe_layers
        if chosen is not None and self.estimator is not None and following != moe_layer:
            begun = time.perf_counter()
            residency.expect(following, self.estimator.estimate(path))
            self.estimate_s += time.perf_counter() - begun
        return out

    def expert_use(self) -> np.ndarray:
        """int64 [N, E]: tokens that each expert of each layer got in the last `RECENT_STEPS` steps.

        Read from the device now and not in the steps, which only keep what their routers computed.
        """
        experts = self.config.num_experts
        use_NE = np.zeros((self.config.num_moe_layers, experts + 1), np.int64)  # the last: padding
        for layers in jax.device_get(list(self.recent_choices)):
            for layer, indices in enumerate(layers):
                for idx_TK in indices:
                    use_NE[layer] += np.bincount(idx_TK.reshape(-1), minlength=experts + 1)
        return use_NE[:, :-1]

    def _release(self, held: tuple[int, list[jax.Array]] | None) -> None:
        if held is not None and self.residency.streams:
            jax.block_until_ready(held[1])
            self.residency.release(held[0])

    def copy_row(self, source: int, target: int) -> None:
        """Copy one row of every cache over another."""
        self.caches = [copy_row(cache, np.int32(source), np.int32(target)) for cache in self.caches]

    def all_logits(self, x_PCD: jax.Array, row: int) -> jax.Array:
        """float32 [C, V]: the logits after every token of one row."""
        return _all_logits(*self._ends, x_PCD, np.int32(row))

    def logits(self, x_PCD: jax.Array, at_P: np.ndarray) -> jax.Array:
        """float32 [P, V]: the logits after token `at_P` of each row."""
        return _logits(*self._ends, x_PCD, at_P)
