"""Products with adapters, against weights to which the adapters were added."""

from __future__ import annotations

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers.experts import affine
from jmoe.layers.low_rank import BASE, AdaptedParam, ExpertAdapters, LayerAdapters, LowRank
from jmoe.layers.slot_experts import (
    ExpertInputs,
    ExpertProducts,
    add_expert_outputs_by_slot_table,
    add_expert_outputs_in_bundles,
)

OWNERS = np.asarray([1, 1, 2], np.int32)  # an adapter of rank 2, and one of rank 1


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def low_rank_of(seed: int, *shape: int) -> LowRank:
    *leading, inputs, outputs = shape
    a, b = normal(seed, *leading, inputs, 3), normal(seed + 1, *leading, 3, outputs)
    return LowRank(a, b, jnp.asarray(OWNERS))


def merged(w: jax.Array, low_rank: LowRank, adapter: int) -> jax.Array:
    own = adapter == OWNERS
    return w + low_rank.a[..., own] @ low_rank.b[..., own, :]


def test_each_row_has_the_product_of_its_own_weight() -> None:
    x_PCI, w, low_rank = normal(0, 3, 2, 8), normal(1, 8, 5), low_rank_of(2, 8, 5)
    adapter_T = jnp.asarray([2, 2, BASE, BASE, 1, 1])
    y = affine(x_PCI, AdaptedParam(w, low_rank=low_rank, adapter_T=adapter_T))
    for row, adapter in enumerate((2, BASE, 1)):
        expected = x_PCI[row] @ merged(w, low_rank, adapter)
        np.testing.assert_allclose(y[row], expected, atol=1e-4)
    np.testing.assert_array_equal(y[1], affine(x_PCI, nnx.Param(w))[1])  # to the bit


def test_a_layer_replaces_the_weights_that_have_adapters() -> None:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.attention = nnx.Module()
            self.attention.w_out = nnx.Param(normal(0, 4, 4))
            self.attention.w_qkv = nnx.Param(normal(1, 4, 4))

    low_rank = {
        "attention/w_out": low_rank_of(2, 4, 4),
        "moe/experts/w_up": low_rank_of(3, 2, 4, 6),
    }
    adapters, layer = LayerAdapters(low_rank, jnp.asarray([1, BASE])), Layer()
    adapters.install(layer, num_tokens=4)
    assert isinstance(layer.attention.w_out, AdaptedParam)
    assert not isinstance(layer.attention.w_qkv, AdaptedParam)
    changes = adapters.expert_adapters(4)
    assert changes is not None and list(changes.low_rank) == ["w_up"]
    np.testing.assert_array_equal(changes.adapter_T, [1, 1, BASE, BASE])
    assert LayerAdapters({}, jnp.asarray([1])).expert_adapters(1) is None


@pytest.mark.parametrize("num_tokens", [5, 70])  # all tokens through each expert; sorted tiles
@pytest.mark.parametrize("adapted", [("w_up", "w_down"), ("w_down",)])
def test_experts(num_tokens: int, adapted: tuple[str, ...]) -> None:
    """Through bundles of arrays and through a table, beside each adapter's merged experts."""
    e, d, f, t = 3, 8, 6, num_tokens
    shapes = {"w_up": (e, d, 2 * f), "w_down": (e, f, d)}
    arrays = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    low_rank = {name: low_rank_of(10 + i, *shapes[name]) for i, name in enumerate(adapted)}
    random = np.random.default_rng(5)
    idx_TK = np.stack([random.permutation(e + 1)[:2] for _ in range(t)]).astype(np.int32)
    adapter_T = random.integers(0, 3, t).astype(np.int32)
    plain = ExpertInputs(
        normal(6, t, d),
        jnp.asarray(idx_TK),
        jnp.asarray(random.random((t, 2)), jnp.float32),
        normal(7, t, d),
    )
    options: dict[str, Any] = {"activation": "swiglu", "tile_rows": 4, "implementation": "xla"}
    table_E = jnp.arange(e, dtype=jnp.int32)
    expected = np.zeros((t, d), np.float32)
    for adapter in range(3):
        own = {
            n: merged(w, low_rank[n], adapter) if n in low_rank else w for n, w in arrays.items()
        }
        rows = adapter_T == adapter
        expected[rows] = np.asarray(
            add_expert_outputs_by_slot_table(plain, own, table_E, **options)
        )[rows]
    routed = plain._replace(adapters=ExpertAdapters(low_rank, jnp.asarray(adapter_T)))
    experts = [{name: w[i] for name, w in arrays.items()} for i in range(e)]
    by_table = add_expert_outputs_by_slot_table(routed, arrays, table_E, **options)
    np.testing.assert_allclose(by_table, expected, atol=2e-3, rtol=1e-4)
    by_bundles = add_expert_outputs_in_bundles(routed, experts, ExpertProducts("swiglu"))
    np.testing.assert_allclose(by_bundles, expected, atol=2e-3, rtol=1e-4)


def test_groups_of_rows() -> None:
    """The form beside grouped products: rows sorted by expert, of any adapter each."""
    low_rank, sizes = low_rank_of(0, 3, 8, 5), np.asarray([4, 0, 3], np.int32)
    x_NI, adapter_N = normal(3, 8, 8), jnp.asarray([1, 2, BASE, 1, 2, 1, BASE, 2])
    y = low_rank.grouped_product_change(x_NI, adapter_N, jnp.asarray(sizes))
    expert_N = np.repeat(np.arange(3), sizes)
    for n, expert in enumerate(expert_N.tolist()):
        expected = low_rank.for_expert(jnp.int32(expert)).product_change(
            x_NI[n : n + 1], adapter_N[n : n + 1]
        )
        np.testing.assert_allclose(y[n : n + 1], expected, atol=1e-4)
