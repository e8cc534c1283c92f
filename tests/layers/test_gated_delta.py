"""Gated delta networks: the recurrence, its chunked form and its step, alone and as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config import ModelConfig
from jmoe.layers import gated_delta
from jmoe.layers.documents import Documents
from jmoe.layers.gated_delta import DeltaState, GatedDeltaNet, causal_convolution
from jmoe.layers.gated_delta_rule import recurrent_delta_rule

CONFIG = ModelConfig(
    hidden_size=24,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
)


@pytest.fixture(scope="module")
def layer() -> GatedDeltaNet:
    """A layer whose states are far from zero and forget at various rates."""
    made = GatedDeltaNet(CONFIG, 0.5, rngs=nnx.Rngs(0))
    made.w_in[...] = made.w_in[...] * 20
    made.w_conv[...] = made.w_conv[...] * 30
    made.log_rate[...] = jnp.linspace(-5.0, 1.0, 4)
    return made


@pytest.fixture(scope="module")
def apply(layer: GatedDeltaNet) -> Callable[..., jax.Array]:
    """The layer, compiled: (x, documents) -> output."""
    return jax.jit(lambda x, documents=None: layer(x, None, documents))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def empty_state(layer: GatedDeltaNet, rows: int) -> DeltaState:
    return DeltaState(jnp.zeros((rows, 3, 2 * 16 + 24)), jnp.zeros(layer.memory_shape(rows)))


def by_numpy(layer: GatedDeltaNet, x_SD: np.ndarray) -> np.ndarray:
    """The layer of one sequence in float64, token by token, from its definition."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    w = {name: np.asarray(getattr(layer, name)[...], np.float64) for name in WEIGHTS}
    y = x_SD @ w["w_in"]
    mixed, z, b, a = np.split(y, [56, 80, 84], axis=-1)
    padded = np.pad(mixed, ((3, 0), (0, 0)))
    conv = sum(padded[i : i + len(x_SD)] * w["w_conv"][i] for i in range(4))
    conv = conv * sigmoid(conv)
    state, outputs = np.zeros((4, 8, 6)), []
    for t in range(len(x_SD)):
        q, k, v = (part.reshape(h, -1) for part, h in zip(np.split(conv[t], [16, 32]), (2, 2, 4)))
        q, k = (np.repeat(u / np.sqrt((u**2).sum(-1, keepdims=True) + 1e-6), 2, 0) for u in (q, k))
        rate = np.exp(w["log_rate"]) * np.log1p(np.exp(a[t] + w["b_rate"]))
        state = state * np.exp(-rate)[:, None, None]
        change = sigmoid(b[t])[:, None] * (v - np.einsum("hde,hd->he", state, k))
        state = state + k[:, :, None] * change[:, None]
        out = np.einsum("hde,hd->he", state, q) * 8**-0.5
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
        gate = z[t].reshape(4, 6)
        outputs.append((out * gate * sigmoid(gate)).reshape(-1) @ w["w_delta_out"])
    return np.stack(outputs)


WEIGHTS = ("w_in", "w_conv", "log_rate", "b_rate", "w_delta_out")


@pytest.mark.parametrize("length", [1, 5, 150])
def test_layer_is_its_definition(
    layer: GatedDeltaNet, apply: Callable[..., jax.Array], length: int
) -> None:
    x = normal(1, 1, length, 24)
    expected = by_numpy(layer, np.asarray(x[0], np.float64))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(apply(x)[0], expected, atol=2e-4)


def test_states_continue_a_sequence(layer: GatedDeltaNet, apply: Callable[..., jax.Array]) -> None:
    """Chunks of any length, padded or not, then single tokens, equal the whole sequence."""
    x = normal(2, 2, 80, 24)
    whole, state, outputs = apply(x), empty_state(layer, 2), []
    continue_from = jax.jit(lambda x, state, real: layer.continue_from(x, state, real))
    for start, end, width in ((0, 1, 16), (1, 3, 16), (3, 70, 80), (70, 78, 16)):
        part = jnp.pad(x[:, start:end], ((0, 0), (0, width - (end - start)), (0, 0)))
        real = jnp.broadcast_to(jnp.arange(width) < end - start, (2, width))
        out, state = continue_from(part, state, real)
        outputs.append(out[:, : end - start])
    for t in (78, 79):
        out, state = continue_from(x[:, t : t + 1], state, jnp.ones((2, 1), bool))
        outputs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=2e-4)
    unchanged = continue_from(x[:, :1], state, jnp.zeros((2, 1), bool))[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, state, unchanged))


def test_documents_of_a_row_do_not_see_each_other(apply: Callable[..., jax.Array]) -> None:
    lengths = (3, 70, 3, 52, 70)  # boundaries inside and at the ends of chunks
    x, ends = normal(3, 1, sum(lengths), 24), np.cumsum(lengths)
    number = jnp.asarray(np.repeat(np.arange(1, 6), lengths))[None]
    real = jnp.ones(number.shape, bool)
    packed = apply(x, Documents(real, real, number))
    for start, end in zip([0, *ends], ends, strict=False):
        np.testing.assert_allclose(packed[:, start:end], apply(x[:, start:end]), atol=2e-4)


def test_gradients_equal_those_of_the_recurrence(
    layer: GatedDeltaNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, params = nnx.split(layer)
    x, weights = normal(4, 1, 90, 24), normal(5, 1, 90, 24)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graph, params)(x) * weights).sum()

    ours = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    monkeypatch.setattr(
        gated_delta, "chunked_delta_rule", lambda t, s, documents: recurrent_delta_rule(t, s)
    )
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


def test_convolution_continues() -> None:
    x, taps = normal(7, 2, 9, 5), normal(8, 4, 5)
    whole = causal_convolution(x, taps)
    np.testing.assert_allclose(
        causal_convolution(x[:, 4:], taps, x[:, 1:4]), whole[:, 4:], rtol=1e-6
    )
