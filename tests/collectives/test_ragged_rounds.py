"""The ragged exchange of training against every expert on every token: values, gradients, rounds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from jmoe.collectives.exchange import TokenChoices
from jmoe.collectives.ragged import RaggedExchange, ragged_all_to_all
from jmoe.collectives.ragged_rounds import RoundsExchange, _num_rounds
from jmoe.planning.exchange import ragged_buffer_rows
from tests.collectives.test_exchange import (
    AXES,
    DEVICES,
    E,
    T,
    assert_same,
    dense,
    draw,
    experts,
    run,
)
from tests.collectives.test_ragged import moved_dtypes


@functools.cache
def program(k: int, move: Any = ragged_all_to_all) -> Any:
    """(x [8 T, D], idx, weights [8 T, K], w [E, D], g [8 T, D]) -> (y, gradients, group sizes)."""
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    exchange = RoundsExchange(RaggedExchange(AXES, DEVICES, move))

    def body(x: jax.Array, idx: jax.Array, weights: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        counts_E = (idx.reshape(-1, 1) == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)

        def run_experts(params: Any, others: Any, arrived: Any) -> jax.Array:
            return experts(arrived.rows_MD, arrived.group_sizes_L, params + others)

        def layer(x: jax.Array, weights: jax.Array, w: jax.Array) -> jax.Array:
            there = exchange.dispatch(x, TokenChoices(idx, weights, counts_E))
            zeros = lax.stop_gradient(0 * w)
            return exchange.run_experts(there.handle, run_experts, w, zeros)

        y, vjp = jax.vjp(layer, x, weights, w)
        return y, vjp(g)

    spec = jax.sharding.PartitionSpec(AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@pytest.mark.parametrize("routing", ["uniform", "skewed", "same", "twice"])
@pytest.mark.parametrize("k", [1, 3])
def test_it_is_every_expert_on_every_token(k: int, routing: str) -> None:
    args = draw(routing, k)
    assert_same(program(k)(*args), dense(args))


@pytest.mark.parametrize("routing", ["uniform", "same"])
def test_bfloat16_rows_round_as_those_of_the_padded_exchange(routing: str) -> None:
    args = draw(routing, 3, jnp.bfloat16)
    y, grads = program(3)(*args)
    assert grads[0].dtype == jnp.bfloat16
    padded, _, padded_grads = run("flat", (2, 4), args)
    assert_same((y, grads), (padded, padded_grads), 0.01)


def test_a_busy_device_takes_several_rounds() -> None:
    """All tokens to one device: every round of the loop is needed."""
    _, idx, *_ = draw("same", 1)
    assert len(np.unique(np.asarray(idx))) == 1
    counts_RE = jnp.asarray(np.tile(np.eye(E, dtype=np.int32)[int(idx[0, 0])] * T, (DEVICES, 1)))
    rows = ragged_buffer_rows(T, DEVICES)
    assert rows == 32 and int(_num_rounds(counts_RE, rows)) == 5
    even_RE = jnp.full((DEVICES, E), T // E + 1)
    assert int(_num_rounds(even_RE, rows)) == 1


def test_a_gpus_step_sends_rows_by_the_ragged_collective_alone() -> None:
    traced = program(2, lax.ragged_all_to_all).trace(*draw("uniform", 2))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # forwards there and back, backwards there and back, and the same in two loops, of which the
    # second also sends rows forwards again
    assert text.count("stablehlo.custom_call @ragged_all_to_all") in (9, 10)
    assert moved_dtypes(text) == ["i32"]


def test_chunks_are_refused() -> None:
    x, idx, weights, *_ = draw("uniform", 2)
    exchange = RoundsExchange(RaggedExchange(AXES, DEVICES))
    with pytest.raises(ValueError, match=r"num_chunks = 2: must be 1 for a ragged exchange"):
        exchange.dispatch(x, TokenChoices(idx, weights, jnp.zeros(E, jnp.int32)), num_chunks=2)


def test_tokens_without_an_expert_get_zeros_and_no_gradient() -> None:
    x, idx, weights, w, g = draw("skewed", 3)
    idx = idx.at[::3].set(E)
    y, (dx, dweights, _) = program(3)(x, idx, weights, w, g)
    for zero in (y[::3], dx[::3], dweights[::3]):
        np.testing.assert_array_equal(zero, 0)
    assert np.abs(np.asarray(dx[1::3])).min() > 0
