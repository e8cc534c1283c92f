"""Attention within documents: several in a row are as each alone, at its positions."""

import itertools
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.layers import attention
from jmoe.layers.attention import causal_attention
from jmoe.layers.documents import Documents
from kernels_pallas import implementations
from kernels_pallas.implementations import trace_for_device

# three documents and padding; the second and the third cross a block of 128 queries
LENGTHS = (70, 90, 130)
NUMBERS_S = np.repeat([1, 2, 3, 0], [*LENGTHS, 10]).astype(np.int32)
S, H, G, D = len(NUMBERS_S), 4, 2, 8


def test_positions() -> None:
    numbers_BS = jnp.asarray([[1, 1, 1, 0, 2, 2, 0, 3], [7, 0, 0, 0, 1, 1, 2, 2]])
    documents = Documents(numbers_BS > 0, numbers_BS > 1, numbers_BS)
    expected = [[0, 1, 2, 0, 0, 1, 0, 0], [0, 0, 1, 2, 0, 1, 0, 1]]
    assert documents.positions().tolist() == expected
    assert documents._replace(number_BS=None).positions().tolist() == list(range(8))
    assert {name: int(n) for name, n in documents.token_counts().items()} == {
        "tokens": 11,
        "trained_tokens": 6,
    }


@pytest.mark.parametrize(
    ("with_sinks", "window"),
    [
        (True, None),
        (False, 50),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, 50, marks=pytest.mark.slow),
    ],
)
def test_documents_do_not_see_each_other(window: int | None, with_sinks: bool) -> None:
    """Values and gradients."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, k, v = draw(2, S, H, D), draw(2, S, G, D), draw(2, S, G, D)
    sinks = draw(H) if with_sinks else None
    wanted = draw(2, S, H, D)
    numbers = jnp.asarray(np.stack([NUMBERS_S, NUMBERS_S[::-1]]))

    def packed(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        return causal_attention(q, k, v, sinks_H=sinks, window=window, documents_BS=numbers)

    def alone(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        rows = []
        for row, row_numbers in enumerate((NUMBERS_S, NUMBERS_S[::-1])):
            cuts = [0, *(np.flatnonzero(np.diff(row_numbers)) + 1), S]
            parts = []
            for start, end in itertools.pairwise(cuts):
                own = (x[row : row + 1, start:end] for x in (q, k, v))
                parts.append(causal_attention(*own, sinks_H=sinks, window=window))
            rows.append(jnp.concatenate(parts, axis=1))
        return jnp.concatenate(rows)

    args = (q, k, v, sinks) if with_sinks else (q, k, v, None)
    each = []
    for function in (packed, alone):
        of_wanted = lambda *xs, function=function: (function(*xs) * wanted).sum()  # noqa: E731
        places = (0, 1, 2, 3) if with_sinks else (0, 1, 2)
        each.append((function(*args), *jax.grad(of_wanted, places)(*args)))
    for ours, expected in zip(*each, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_a_gpus_kernel_computes_the_same(window: int | None) -> None:
    """In Pallas' interpreter: values and gradients, of the sinks too."""
    rng = np.random.default_rng(1)
    shapes = (2, S, H, D), (2, S, G, D), (2, S, G, D), (H,), (2, S, H, D)
    *args, wanted = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    numbers = jnp.asarray(np.stack([NUMBERS_S, NUMBERS_S[::-1]]))
    kernel = attention.ranges_kernel(D**-0.5, interpret=True)

    def ours(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        keys = k, attention.ranges_of_documents(numbers, window)
        return attention.flash_attention(q, keys, v, sinks, kernel)

    def expected(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return causal_attention(q, k, v, sinks_H=sinks, window=window, documents_BS=numbers)

    results = []
    for function in (ours, expected):
        o, vjp = jax.vjp(jax.jit(function), *args)
        results.append((o, *vjp(wanted)))
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "12.0"])
def test_a_gpu_runs_rows_of_several_documents_in_a_kernel(capability: str) -> None:
    """Forward and backward, and what it does not support in XLA."""
    numbers = jnp.asarray(NUMBERS_S)[None]
    q, k = (jax.ShapeDtypeStruct((1, S, n, 64), jnp.bfloat16) for n in (H, G))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        attend = partial(causal_attention, documents_BS=numbers)
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    with trace_for_device(device):
        text = str(jax.make_jaxpr(gradients)(q, k, k))
        wide = jax.ShapeDtypeStruct((1, S, G, 512), jnp.bfloat16)
        in_xla = str(jax.make_jaxpr(gradients)(wide, wide, wide))
    for name in ("", "_query_gradient", "_key_gradient"):
        assert f"range_attention{name}_kernel" in text
    assert "range_attention" not in in_xla


def test_kernels_without_documents_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The native operation is left out, and the log says so once."""
    x, numbers = jnp.ones((1, S, 2, D)), jnp.asarray(NUMBERS_S)[None]
    implementations.log_once.cache_clear()
    monkeypatch.setattr(attention.native, "uses_native_training", lambda *_, **__: True)
    with caplog.at_level(logging.WARNING, "kernels_pallas"):
        for _ in range(2):
            ours = causal_attention(x, x, x, documents_BS=numbers)
    assert [record.message for record in caplog.records] == [attention.PACKED_IN_XLA]
    np.testing.assert_allclose(ours, x, rtol=1e-6)
