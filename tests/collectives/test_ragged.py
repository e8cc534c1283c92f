"""The exchange in unequal parts against every expert on every token, and as a GPU's program."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from jmoe.collectives.exchange import TokenChoices
from jmoe.collectives.ragged import RaggedExchange, block_offsets, ragged_all_to_all
from jmoe.mesh import split_over
from tests.collectives.test_exchange import DEVICES, D, E, T, draw, experts


@functools.cache
def program(move: Any, rows: int) -> Any:
    """Return the jitted (x [8 T, D], idx, weights [8 T, K], w [E, D]) -> (y, group sizes)."""
    mesh = jax.make_mesh((DEVICES,), ("gpu",), axis_types=(AxisType.Auto,))

    def body(x: jax.Array, idx: jax.Array, weights: jax.Array, w: jax.Array) -> Any:
        counts_E = (idx.reshape(-1, 1) == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)
        exchange = RaggedExchange("gpu", DEVICES, move)
        there = exchange.dispatch_rows(x, TokenChoices(idx, weights, counts_E), rows, idx.size)
        (arrived,) = there.chunks
        out_MD = experts(arrived.rows_MD, arrived.group_sizes_L, w)
        return exchange.combine([out_MD], there.handle), arrived.group_sizes_L

    spec = split_over(("gpu",))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@pytest.mark.parametrize("routing", ["uniform", "skewed", "same", "padding"])
@pytest.mark.parametrize("k", [1, 3])
def test_it_is_every_expert_on_every_token(k: int, routing: str) -> None:
    """With a buffer of just the rows that the busiest device gets; tokens of padding have no
    expert and get zeros.
    """
    x, idx, weights, w, _ = draw("uniform" if routing == "padding" else routing, k)
    if routing == "padding":
        idx = idx.at[::3].set(E)
        weights = weights.at[::3].set(0)
    sent = np.bincount(np.asarray(idx).reshape(-1), minlength=E)[:E]
    rows = int(sent.reshape(DEVICES, -1).sum(axis=1).max())
    y, sizes = program(ragged_all_to_all, rows)(x, idx, weights, w)
    out_TKD = jnp.tanh(x[:, None] * w.at[idx].get(mode="fill", fill_value=0))
    np.testing.assert_allclose(y, (out_TKD * weights[:, :, None]).sum(axis=1), atol=1e-6)
    np.testing.assert_array_equal(sizes, sent)


def test_parts_fill_each_device_without_gaps() -> None:
    counts_RE = np.random.default_rng(0).integers(0, 5, (4, 8)).astype(np.int32)
    filled: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for source in range(4):
        parts = block_offsets(jnp.asarray(counts_RE), jnp.int32(source))
        at = np.cumsum(counts_RE[source]) - counts_RE[source]
        np.testing.assert_array_equal(parts.sent_at_E, at)
        for expert in range(8):
            start = int(parts.lands_at_E[expert])
            filled[expert // 2].append((start, start + int(counts_RE[source, expert])))
        np.testing.assert_array_equal(parts.taken_RL, counts_RE[:, 2 * source : 2 * source + 2])
    for device, spans in enumerate(filled):
        ends = [end for start, end in sorted(spans) if end > start]
        starts = [start for start, end in sorted(spans) if end > start]
        assert (
            starts == [0, *ends[:-1]]
            and ends[-1] == counts_RE[:, 2 * device : 2 * device + 2].sum()
        )


@pytest.mark.parametrize("rows", [7, 100])
def test_windows_of_rows_make_up_all_rows(rows: int) -> None:
    """Each round sends the next `rows` rows of a device, in order, from where they lie."""
    counts_RE = np.random.default_rng(0).integers(0, 9, (4, 8)).astype(np.int32)
    for device in range(4):
        whole = block_offsets(jnp.asarray(counts_RE), jnp.int32(device))
        sent: list[tuple[int, int, int]] = []  # expert, row of this device, place there
        for first in range(0, int(counts_RE.sum()), rows):
            part = block_offsets(jnp.asarray(counts_RE), jnp.int32(device), first, rows)
            assert int(part.taken_RL.sum()) <= rows
            for expert in range(8):
                start, place = int(part.sent_at_E[expert]), int(part.lands_at_E[expert])
                size = int(part.sent_E[expert])
                assert place >= 0 and place + size <= rows
                assert start + size <= counts_RE[device].sum()
                sent += [(expert, start + i, first + place + i) for i in range(size)]
        expected = [
            (expert, int(whole.sent_at_E[expert]) + i, int(whole.lands_at_E[expert]) + i)
            for expert in range(8)
            for i in range(counts_RE[device, expert])
        ]
        assert sorted(sent) == expected


def moved_dtypes(text: str) -> list[str]:
    """Return the dtypes of a lowered program's all-to-alls of equal parts."""
    return re.findall(r"stablehlo.all_to_all.*: \(tensor<[0-9x]+x(\w+)>\)", text)


def test_a_gpus_program_sends_both_ways_in_unequal_parts() -> None:
    x, idx, weights, w, _ = draw("uniform", 2)
    traced = program(lax.ragged_all_to_all, T * 2).trace(x, idx, weights, w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @ragged_all_to_all") == 2
    assert moved_dtypes(text) == ["i32"]  # the counts
    assert x.shape[1] == D
