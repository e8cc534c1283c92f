"""The table and the head in parts against whole ones: values and gradients, on several meshes.

Legend: R devices, T tokens a device, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config.parallel import EmbeddingKind
from jmoe.layers import loss
from jmoe.layers.embedding import Embedding, lookup, lookup_row_block_local
from jmoe.layers.loss import HeadWeight, cross_entropy
from jmoe.mesh import ALL, BATCH, REPLICATED, make_mesh, split_over
from jmoe.planning.embedding import EmbeddingPlan, rows_per_round
from tests.arrays import assert_near

R, T, V, D = 8, 24, 64, 16
MESHES = [(8, 1, 1), (2, 2, 2), (1, 1, 8)]


def sharded(
    shape: tuple[int, int, int], f: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    return jax.jit(
        jax.shard_map(
            f, mesh=make_mesh(shape), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
    )


def make(
    kind: EmbeddingKind, shape: tuple[int, int, int], tied: bool = True, parallel_head: bool = True
) -> Embedding:
    plan = EmbeddingPlan(kind, "", R // shape[2], shape[2], parallel_head)
    return Embedding(plan, ALL, tied)


def table_of(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(V, D)), jnp.float32)


def close(a: Any, b: Any, tolerance: float) -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


TOKENS = {
    "uniform": lambda rng: rng.integers(0, V, R * T),
    "all different": lambda rng: np.concatenate([rng.permutation(V)[:T] for _ in range(R)]),
    "of one device": lambda rng: R * rng.integers(0, V // R, R * T) + 3,
    "one": lambda rng: np.full(R * T, 5),
    "one device asks for much": lambda rng: np.concatenate(
        [np.full((R - 1) * T, 5), rng.permutation(V)[:T]]
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["columns", "rows"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_lookup(shape: tuple[int, int, int], kind: EmbeddingKind, dtype: Any) -> None:
    """The same rows bit by bit; gradients differ by the order of sums, and with bfloat16 rows by
    their rounding.
    """
    embedding = make(kind, shape)
    dim = embedding.split_dims["embedding"]
    table, rng = table_of(), np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(R * 2, T // 2, D)), dtype)

    def found(lookup: Any) -> Callable[..., Any]:
        def f(table: jax.Array, tokens: jax.Array, weights: jax.Array) -> Any:
            x, vjp = jax.vjp(lambda table: lookup(table, tokens, dtype), table)
            return x, vjp(weights)[0]

        return f

    specs = split_over(ALL, dim)
    ours = sharded(shape, found(embedding.lookup), (specs, BATCH, BATCH), (BATCH, specs))
    whole = jax.jit(found(lookup))
    for name, draw in TOKENS.items():
        tokens = jnp.asarray(draw(rng).reshape(R * 2, T // 2), jnp.int32)
        x, dtable = jax.block_until_ready(
            ours(embedding.to_parameter_shape(table), tokens, weights)
        )
        expected, edtable = whole(table, tokens, weights)
        np.testing.assert_array_equal(x, expected, err_msg=name)
        close(dtable.reshape(V, D), edtable, 1e-6 if dtype == jnp.float32 else 1e-2)


def test_rows_of_a_round() -> None:
    assert (
        rows_per_round(T, R) == 8 and rows_per_round(4096, R) == 256 and rows_per_round(3, R) == 3
    )


@pytest.mark.parametrize(("kind", "gathers", "reduces"), [("columns", 1, 0), ("rows", 0, 1)])
def test_a_lookup_has_three_all_to_alls_and_no_reduction(
    kind: EmbeddingKind, gathers: int, reduces: int
) -> None:
    """Ids, rows, gradients; columns gather the ids, and rows reduce one number, that of the
    rounds.
    """
    embedding = make(kind, (2, 2, 2))

    def f(table: jax.Array, tokens: jax.Array, g: jax.Array) -> Any:
        x, vjp = jax.vjp(lambda table: embedding.lookup(table, tokens, jnp.bfloat16), table)
        return x, vjp(g)

    specs = split_over(ALL, 1)
    args = (
        embedding.to_parameter_shape(table_of()),
        jnp.zeros(R * T, jnp.int32),
        jnp.zeros((R * T, D), jnp.bfloat16),
    )
    text = sharded((2, 2, 2), f, (specs, BATCH, BATCH), (BATCH, (specs,))).lower(*args).as_text()
    counts = [
        text.count(f'{name}"(')
        for name in ("all_to_all", "all_gather", "all_reduce", "reduce_scatter")
    ]
    assert counts == [3 - gathers, gathers, reduces, 0]


# partition, tied, parallel head; a whole head of its own is any other parameter
HEADS = [
    (kind, *head)
    for kind in ("columns", "rows")
    for head in ((True, True), (False, True), (True, False))
]


@pytest.mark.parametrize(("kind", "tied", "parallel"), HEADS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_head_and_loss(
    shape: tuple[int, int, int],
    kind: EmbeddingKind,
    tied: bool,
    parallel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and gradients of hidden states and of the table or head; then the logits, in the
    vocabulary's order.
    """
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 16 * V)
    embedding = make(kind, shape, tied, parallel)
    rng = np.random.default_rng(2)
    weight = table_of() if tied else table_of().T
    x = jnp.asarray(rng.normal(size=(R * T, D)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, V, R * T), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=R * T) * (rng.uniform(size=R * T) > 0.2), jnp.float32)

    def head(weight: jax.Array) -> jax.Array:
        return embedding.output_head.weight(weight, None if tied else weight, jnp.float32)

    def ours(weight: jax.Array, x: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
        def f(x: jax.Array, weight: jax.Array) -> jax.Array:
            return 0.5 * embedding.output_head.cross_entropy(x, head(weight), labels, weights)

        value, gradients = jax.value_and_grad(f, (0, 1))(x, weight)
        alone = embedding.output_head.cross_entropy(x, head(weight), labels, weights)
        return (
            jax.lax.psum(jnp.stack([value, 0.5 * alone]), ALL),
            gradients,
            embedding.output_head.logits(x[0] * 0 + 1, head(weight)),
        )

    place = split_over(ALL, 1)
    run = sharded(
        shape, ours, (place, BATCH, BATCH, BATCH), (REPLICATED, (BATCH, place), REPLICATED)
    )
    kept = embedding.to_parameter_shape(weight) if tied else weight
    values, (dx, dweight), logits = jax.block_until_ready(run(kept, x, labels, weights))

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return 0.5 * cross_entropy(x, HeadWeight(weight.T if tied else weight), labels, weights)

    expected, (edx, edweight) = jax.value_and_grad(plain, (0, 1))(x, weight)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    close(dx, edx, 1e-5)
    close(dweight.reshape(weight.shape), edweight, 1e-5)
    close(logits, jnp.ones(D) @ (weight.T if tied else weight), 1e-6)


def test_bfloat16_loss() -> None:
    """The operands are exact, so are the float32 logits; gradients are rounded to bfloat16 once
    more a level.
    """
    rng = np.random.default_rng(3)
    x, w = jnp.asarray(rng.normal(size=(R * T, D)), jnp.bfloat16), table_of().T.astype(jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, V, R * T), jnp.int32)
    weights = jnp.ones(R * T, jnp.float32)
    embedding = make("columns", (2, 2, 2), tied=False)
    run = sharded(
        (2, 2, 2),
        lambda *a: jax.tree.map(
            lambda v: jax.lax.psum(v, ALL) if v.ndim == 0 else v,
            jax.value_and_grad(
                lambda x, w, *rest: embedding.output_head.cross_entropy(x, HeadWeight(w), *rest),
                (0, 1),
            )(*a),
        ),
        (BATCH, split_over(ALL, 1), BATCH, BATCH),
        (REPLICATED, (BATCH, split_over(ALL, 1))),
    )
    value, gradients = jax.block_until_ready(run(x, w, labels, weights))
    plain = lambda x, w: cross_entropy(x, HeadWeight(w), labels, weights)  # noqa: E731
    expected, egradients = jax.value_and_grad(plain, (0, 1))(
        x.astype(jnp.float32), w.astype(jnp.float32)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert {a.dtype for a in gradients} == {jnp.dtype(jnp.bfloat16)}
    assert_near(gradients, egradients, 1e-2)


def test_large_logits_do_not_overflow() -> None:
    rng = np.random.default_rng(4)
    x, w = jnp.asarray(20 * rng.normal(size=(R * T, D)), jnp.float32), 20 * table_of().T
    labels = jnp.asarray(rng.integers(0, V, R * T), jnp.int32)
    weights = jnp.ones(R * T, jnp.float32)
    embedding = make("rows", (1, 1, 8), tied=False)
    run = sharded(
        (1, 1, 8),
        lambda x, w, *rest: jax.lax.psum(
            embedding.output_head.cross_entropy(x, HeadWeight(w), *rest), ALL
        ),
        (BATCH, split_over(ALL, 1), BATCH, BATCH),
        REPLICATED,
    )
    value = jax.block_until_ready(run(x, w, labels, weights))
    np.testing.assert_allclose(value, cross_entropy(x, HeadWeight(w), labels, weights), rtol=1e-5)


def test_blocks_of_a_table_whose_rows_do_not_divide() -> None:
    """Every device gets the rows of its tokens, of a table of 61 rows that ends in zeros."""
    table = table_of()[:61]
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, R * 3), jnp.int32)
    padded = jnp.pad(table, ((0, 3), (0, 0)))
    look_up = partial(lookup_row_block_local, dtype=jnp.float32, axes=(ALL[-1],))
    found_TD = sharded((1, 1, 8), look_up, (BATCH, REPLICATED), BATCH)(padded, tokens)
    np.testing.assert_array_equal(found_TD, table[tokens])
