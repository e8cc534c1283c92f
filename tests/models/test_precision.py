"""How far bfloat16 moves the gradients of preset `tiny` from float32 where every token keeps its
experts.

Legend: B batch, S sequence, T = B S tokens, N layers, K choices a token.
"""

from __future__ import annotations

import copy
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.configs import PRESETS
from jmoe.layers.loss import HeadWeight, cross_entropy
from jmoe.layers.router import Router, Routing, balance_loss_local
from jmoe.mesh import path_names
from jmoe.models.decoder import Decoder

CONFIG = PRESETS["tiny"][1]
MODEL = CONFIG.model
B, S = 2, 256
# of the gradient's norm; what experts make is small at the start
LIMITS = {"router": 0.06, "w_up": 0.05}
LIMIT = 0.01  # all others


class Choices(nnx.Variable[jax.Array]):
    """The experts of every token, stacked over layers like a parameter."""


class KeptRouter(nnx.Module):
    """A router that keeps to choices made before."""

    def __init__(self, router: Router, topk_idx_NTK: jax.Array) -> None:
        self.router, self.topk_idx = router, Choices(topk_idx_NTK)

    def __call__(
        self, x_TD: jax.Array, *, key: jax.Array | None = None, train: bool = False
    ) -> Routing:
        return self.router(x_TD, key=key, train=train, topk_idx_TK=self.topk_idx[...])


def gradients(decoder: Decoder, tokens_BS: jax.Array, dtype: Any) -> tuple[Any, Any]:
    """(gradients of the training loss, each layer's routing)."""
    parts: Any = nnx.split(decoder, nnx.Param, ...)
    graph, params, rest = parts
    labels_T = tokens_BS[:, 1:].reshape(-1)
    tokens = labels_T.size

    def loss(params: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, params, rest)
        hidden, stats = model(tokens_BS[:, :-1], dtype=dtype, train=True, keep_routing=True)
        weights_T = jnp.full(tokens, 1.0 / tokens, jnp.float32)
        head = HeadWeight(model.lm_head().astype(dtype))
        nll = cross_entropy(hidden.reshape(tokens, -1), head, labels_T, weights_T)
        sizes = (MODEL.num_experts, MODEL.num_experts_per_tok)
        balance = balance_loss_local(stats.probs_sum_E, stats.counts_E, tokens, *sizes)
        return nll + MODEL.router.aux_loss_coef * balance.mean(), stats.routing

    grads, routing = jax.jit(jax.grad(loss, has_aux=True))(params)
    return jax.block_until_ready((grads, routing))


@pytest.mark.slow
def test_each_gradient_in_bfloat16() -> None:
    rng = np.random.default_rng(0)
    zipf_V = 1 / np.arange(1, MODEL.vocab_size + 1)
    tokens_BS = jnp.asarray(
        rng.choice(MODEL.vocab_size, (B, S + 1), p=zipf_V / zipf_V.sum()), jnp.int32
    )
    decoder = Decoder(MODEL, rngs=nnx.Rngs(0))
    full, routing = gradients(decoder, tokens_BS, jnp.float32)
    kept = copy.deepcopy(decoder)
    kept.moe_layers.moe.router = KeptRouter(kept.moe_layers.moe.router, routing.topk_idx_TK)
    low, again = gradients(kept, tokens_BS, jnp.bfloat16)
    np.testing.assert_array_equal(again.topk_idx_TK, routing.topk_idx_TK)
    low["moe_layers"]["moe"]["router"] = low["moe_layers"]["moe"]["router"]["router"]
    expected = dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(full)))
    found = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(low))
    assert {path for path, _ in found} == set(expected)
    for path, g in found:
        a, b = np.asarray(g, np.float64), np.asarray(expected[path], np.float64)
        limit = next((LIMITS[name] for name in path_names(path) if name in LIMITS), LIMIT)
        assert np.linalg.norm(a - b) < limit * np.linalg.norm(b), jax.tree_util.keystr(path)
        assert np.linalg.norm(a - b) > 1e-4 * np.linalg.norm(b), "computed in float32"
