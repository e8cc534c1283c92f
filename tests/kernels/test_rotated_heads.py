"""The kernels that norm and rotate queries and keys in training, in Pallas' interpreter, against
`Attention`'s own form and its gradients.
"""

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config.positions import YarnConfig
from jmoe.layers.attention import Attention
from jmoe.layers.rotated_heads import norm_and_rotate
from kernels_pallas.rotated_heads import Angles, HeadLayout, Scales, rotated_heads
from tests.arrays import assert_close
from tests.kernels.test_rotary_write import attention_of

B, S = 2, 13  # 26 tokens: a whole program of the backward pass and a part of one
CASES: list[tuple[dict[str, Any], Any, bool]] = [
    ({}, jnp.bfloat16, False),
    ({"qk_norm": "full"}, jnp.float32, True),
    ({"qk_norm": "full", "num_key_value_heads": 6}, jnp.bfloat16, False),
    ({"qk_norm": "head"}, jnp.float32, False),
    ({"qk_norm": "head", "rope_scaling": YarnConfig(32.0, 64)}, jnp.bfloat16, True),
    ({"qk_norm": "head", "norm": "zero_centered_rmsnorm"}, jnp.float32, False),
]


def by_kernel(attention: Attention, qkv: jax.Array, positions: jax.Array) -> Any:
    norms = attention.q_norm, attention.k_norm
    scaling = attention.rope_scaling_at(S)
    return norm_and_rotate(attention.config, norms, scaling, qkv, positions, interpret=True)


def projection(attention: Attention, dtype: Any) -> jax.Array:
    columns = attention.w_qkv[...].shape[1]
    return jnp.asarray(np.random.default_rng(2).normal(size=(B, S, columns)), dtype)


@pytest.mark.parametrize(("changes", "dtype", "per_row"), CASES)
def test_heads_and_gradients(changes: dict[str, Any], dtype: Any, per_row: bool) -> None:
    """per_row: whether each sequence has positions of its own."""
    attention = attention_of(**changes)
    qkv, rng = projection(attention, dtype), np.random.default_rng(3)
    positions = jnp.asarray(rng.integers(0, 500, (B, S)) if per_row else np.arange(S))
    graph, state = nnx.split(attention)

    def by_xla(attention: Attention, qkv: jax.Array, positions: jax.Array) -> Any:
        return attention._normed_and_rotated(qkv, positions, S)

    results = []
    for form in (by_kernel, by_xla):

        def run(state: nnx.State, qkv: jax.Array, form: Any = form) -> Any:
            return form(nnx.merge(graph, state), qkv, positions)

        heads, pull = jax.vjp(run, state, qkv)
        draws = np.random.default_rng(4)
        cotangents = [jnp.asarray(draws.normal(size=x.shape), x.dtype) for x in heads]
        results.append((heads, pull(tuple(cotangents))))
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    ours, expected = map(jax.tree.leaves, results)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert_close(a, b, tolerance)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_qkv": 1.0}, "clipped"),
        ({"qk_norm": "rotated_head"}, "after their rotation"),
        ({"position": "learned"}, "no rotary positions"),
        ({"partial_rotary_factor": 0.5}, "a part of a head"),
    ],
)
def test_unsupported(changes: dict[str, Any], words: str) -> None:
    attention = attention_of(**changes)
    with pytest.raises(NotImplementedError, match=words):
        by_kernel(attention, projection(attention, jnp.float32), jnp.arange(S))


def test_heads_of_no_power_of_two_are_refused() -> None:
    angles = Angles(jnp.ones((2, 12)), jnp.zeros((2, 12)))
    with pytest.raises(NotImplementedError, match="heads of 24 dimensions: no power of two"):
        rotated_heads(jnp.zeros((2, 72)), Scales(None, None), angles, HeadLayout(1, 1, 0.0))


def test_a_gpu_without_triton_is_refused() -> None:
    attention = attention_of()
    operands = projection(attention, jnp.float32), jnp.arange(S)
    with pytest.raises(NotImplementedError, match="no Triton"):  # the device here is a CPU
        norm_and_rotate(attention.config, (None, None), None, *operands)
