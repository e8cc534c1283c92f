"""The exchanges against each other and against every expert on every token: values, gradients, what
is dropped.

Legend: T tokens of a device, D hidden, E experts, L experts of a device, K choices a token, P nodes
of Q devices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jmoe.collectives.exchange import TokenChoices
from jmoe.collectives.planned_exchange import make_exchange
from jmoe.config import RouterConfig
from jmoe.layers.router import route
from jmoe.mesh import split_over
from jmoe.planning.exchange import (
    ExchangePlan,
    buffer_rows_per_destination,
    exchange_traffic,
    nodes_per_token,
    plan_exchange,
)
from tests.compiled import inside_shard_map, origins, runs

SPLITS = [(2, 4), (4, 2)]  # (nodes, devices of a node)
AXES = ("node", "gpu")
T, D, E = 20, 12, 16  # 20: no multiple of the 8 that buffers are rounded to
DEVICES = 8


def planned(kind: Any, split: tuple[int, int], k: int, **groups: int) -> ExchangePlan:
    nodes, inside = split
    sizes = {
        "num_nodes": nodes,
        "devices_per_node": inside,
        "num_experts": E,
        "num_experts_per_tok": k,
    }
    return plan_exchange(kind, **sizes, **groups)


def experts(rows_MD: jax.Array, group_sizes_L: jax.Array, w_LD: jax.Array) -> jax.Array:
    """Expert e makes tanh(w_e x): nothing that a wrong row, expert or order would leave as it
    is.
    """
    expert_M = (jnp.arange(rows_MD.shape[0])[:, None] >= jnp.cumsum(group_sizes_L)).sum(axis=1)
    w_MD = jnp.take(w_LD, expert_M, axis=0, mode="fill", fill_value=0)
    return jnp.tanh(rows_MD.astype(jnp.float32) * w_MD).astype(rows_MD.dtype)


@functools.cache
def program(
    kind: str,
    split: tuple[int, int],
    k: int,
    factor: float | None,
    full_capacity: bool,
    num_chunks: int = 1,
) -> Callable[..., Any]:
    """(x [8 T, D], idx, weights [8 T, K], w [E, D], g [8 T, D]) -> (y, dropped of each device,
    gradients).
    """
    mesh = jax.make_mesh(split, AXES, axis_types=(AxisType.Auto,) * 2)
    exchange = make_exchange(planned(kind, split, k), AXES, factor)

    def body(x: jax.Array, idx: jax.Array, weights: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        counts_E = (idx.reshape(-1, 1) == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)

        def layer(x: jax.Array, weights: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            there = exchange.dispatch(
                x, TokenChoices(idx, weights, counts_E), full_capacity, num_chunks
            )
            assert len(there.chunks) == num_chunks
            assert there.chunks[0].expected_rows == -(-T * k // num_chunks)
            outs = [experts(arrived.rows_MD, arrived.group_sizes_L, w) for arrived in there.chunks]
            return exchange.combine(outs, there.handle), there.dropped

        y, vjp, dropped = jax.vjp(layer, x, weights, w, has_aux=True)
        return y, dropped[None], vjp(g)

    spec = split_over(AXES)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def draw(routing: str, k: int, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """The arguments of `program`."""
    rng = np.random.default_rng(k)
    tokens = T * DEVICES
    score_TE = rng.random((tokens, E))
    if routing == "skewed":  # half of the tokens crowd the first experts
        score_TE[::2] += np.linspace(2, 0, E)
    idx = np.argsort(-score_TE, axis=1)[:, :k].astype(np.int32)
    if routing == "same":  # one expert of every second device, the last one first
        idx[:] = (E - 1 - 4 * np.arange(k)) % E
    if routing == "twice":  # a router may name an expert twice
        idx[:, -1] = idx[:, 0]
    x, g = (jnp.asarray(rng.normal(size=(tokens, D)), dtype) for _ in range(2))
    weights = jnp.asarray(rng.uniform(0.1, 1, size=idx.shape), jnp.float32)
    return (
        x,
        jnp.asarray(idx),
        weights,
        jnp.asarray(rng.normal(size=(E, D)), jnp.float32),
        g.astype(jnp.float32),
    )


def run(
    kind: str,
    split: tuple[int, int],
    args: tuple[Any, ...],
    factor: float | None = None,
    worst: bool = True,
    num_chunks: int = 1,
) -> Any:
    return jax.block_until_ready(
        program(kind, split, args[1].shape[1], factor, worst, num_chunks)(*args)
    )


def dense(args: tuple[Any, ...], kept_TK: np.ndarray | None = None) -> Any:
    """(y, gradients) with every expert on every token."""
    x, idx, weights, w, g = args
    kept_TK = np.ones(idx.shape, bool) if kept_TK is None else kept_TK

    def layer(x: jax.Array, weights: jax.Array, w: jax.Array) -> jax.Array:
        out_TKD = jnp.tanh(x[:, None] * w[idx])
        return (out_TKD * jnp.where(kept_TK, weights, 0)[:, :, None]).sum(axis=1)

    y, vjp = jax.vjp(layer, x, weights, w)
    return y, vjp(g)


def assert_same(ours: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Every leaf of two pytrees within `tolerance` of its largest value."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(b64).max() > 1e-3
        np.testing.assert_allclose(a64, b64, rtol=0, atol=tolerance * np.abs(b64).max())


# ---- with room for everything


@pytest.mark.parametrize("routing", ["uniform", "skewed", "same", "twice"])
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_exchange_is_every_expert_on_every_token(
    split: tuple[int, int], k: int, routing: str
) -> None:
    args = draw(routing, k)
    y, dropped, grads = run("flat", split, args)
    assert not dropped.any()
    assert_same((y, grads), dense(args))
    y_dedup, dropped, grads_dedup = run("dedup", split, args)
    assert not dropped.any()
    assert_same((y_dedup, grads_dedup), (y, grads))


def test_hierarchical_is_flat_bit_for_bit() -> None:
    args = draw("skewed", 2)
    for ours, expected in zip(
        *(jax.tree.leaves(run(kind, (2, 4), args)) for kind in ("hierarchical", "flat"))
    ):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("split", [(1, 8), (8, 1)], ids=str)
def test_dedup_where_one_level_has_one_device(split: tuple[int, int]) -> None:
    args = draw("skewed", 2)
    y, dropped, grads = run("dedup", split, args)
    assert not dropped.any()
    assert_same((y, grads), dense(args))


def test_bfloat16_rows_stay_bfloat16() -> None:
    """The rows cross as 16 bits, each node's sum is rounded once more than flat's rows are."""
    args = draw("uniform", 8, jnp.bfloat16)
    text = program("dedup", (2, 4), 8, None, True).lower(*args).as_text()
    moved = re.findall(r"all_to_all.*: \(tensor<([0-9x]+)x(\w+)>\)", text)
    assert {kind for shape, kind in moved if shape.endswith(f"x{D}")} == {"ui16"}
    # two levels, there and back, twice
    assert len([kind for _, kind in moved if kind == "ui16"]) == 8
    (y, _, grads), (y_flat, _, grads_flat) = run("dedup", (2, 4), args), run("flat", (2, 4), args)
    assert_same((y, grads), (y_flat, grads_flat), 0.02)


# ---- with less


def heaviest(weights: list[float], rows: int) -> set[int]:
    """Which of them get the rows: the largest, of equal ones the first."""
    return set(sorted(range(len(weights)), key=lambda i: -weights[i])[:rows])


def kept_flat(args: tuple[Any, ...], rows: int) -> np.ndarray:
    """Which choices find one of the `rows` that every device has for each, by weight."""
    idx, weights = (np.asarray(a) for a in args[1:3])
    kept = np.zeros(idx.shape, bool)
    for source in range(DEVICES):
        for device in range(DEVICES):
            mine = slice(source * T, (source + 1) * T)
            sent = np.argwhere(idx[mine] // (E // DEVICES) == device) + [source * T, 0]
            for i in heaviest([weights[t, c] for t, c in sent], rows):
                kept[tuple(sent[i])] = True
    return kept


def kept_choices(args: tuple[Any, ...], split: tuple[int, int], factor: float) -> np.ndarray:
    """Which choices find rows at both levels of `dedup`, one by one."""
    idx, weights = (np.asarray(a) for a in args[1:3])
    (nodes, devices), k = split, idx.shape[1]
    rows = buffer_rows_per_destination(T * nodes_per_token(nodes, E, k) / nodes, T, factor)
    device_rows = buffer_rows_per_destination(T * k / devices, nodes * rows * k, factor)
    kept = np.zeros(idx.shape, bool)
    node_of, device_of = idx // (E // nodes), idx // (E // (nodes * devices)) % devices
    for node in range(nodes):
        # the device that deals out what arrives in its place from all nodes
        for place in range(devices):
            carried: list[tuple[int, int]] = []
            for source in range(nodes):
                first = (source * devices + place) * T
                tokens = [t for t in range(first, first + T) if (node_of[t] == node).any()]
                chosen = heaviest([weights[t, node_of[t] == node].sum() for t in tokens], rows)
                crossed = [tokens[i] for i in sorted(chosen)]
                carried += [(t, c) for t in crossed for c in range(k) if node_of[t, c] == node]
            for device in range(devices):
                sent = [(t, c) for t, c in carried if device_of[t, c] == device]
                for i in heaviest([weights[t, c] for t, c in sent], device_rows):
                    kept[sent[i]] = True
    return kept


@pytest.mark.parametrize("kind", ["flat", "hierarchical"])
@pytest.mark.parametrize("routing", ["uniform", "skewed", "same"])
@pytest.mark.parametrize(("k", "factor"), [(1, 1.0), (2, 0.5), (8, 0.6)], ids=str)
def test_a_full_buffer_keeps_the_largest_weights(
    k: int, factor: float, routing: str, kind: str
) -> None:
    args = draw(routing, k)
    kept_TK = kept_flat(args, buffer_rows_per_destination(T * k / DEVICES, T * k, factor))
    assert routing == "uniform" or 0 < kept_TK.mean() < 1
    y, dropped, grads = run(kind, (2, 4), args, factor, worst=False)
    assert int(dropped.sum()) == (~kept_TK).sum()
    assert_same((y, grads), dense(args, kept_TK))


@pytest.mark.parametrize("kind", ["flat", "hierarchical", "dedup"])
def test_experts_of_a_full_device_lose_alike(kind: str) -> None:
    """All tokens to one device, three quarters to its first expert: by number, its second one
    would lose them all.
    """
    x, _, weights, w, g = draw("uniform", 1)
    idx = jnp.where(jnp.arange(T * DEVICES) % 4 == 3, 1, 0).astype(jnp.int32)[:, None]
    weights = jnp.where(idx == 0, weights, weights[::-1])
    args = (x, idx, weights, w, g)
    _, dropped, (_, dweights, _) = run(kind, (2, 4), args, 4.0, worst=False)
    assert int(dropped.sum()) > 0
    kept_T = np.asarray(dweights)[:, 0] != 0  # what is dropped has no gradient
    for expert in (0, 1):
        share = kept_T[np.asarray(idx)[:, 0] == expert].mean()
        assert 0.6 * kept_T.mean() < share < 1.4 * kept_T.mean()


@pytest.mark.parametrize("routing", ["uniform", "skewed", "same"])
@pytest.mark.parametrize(
    ("split", "k", "factor"), [((2, 4), 2, 1.0), ((4, 2), 2, 0.5), ((2, 4), 8, 1.25)], ids=str
)
def test_what_finds_no_row_is_counted_and_adds_nothing(
    split: tuple[int, int], k: int, factor: float, routing: str
) -> None:
    args = draw(routing, k)
    kept_TK = kept_choices(args, split, factor)
    assert routing == "uniform" or 0 < kept_TK.mean() < 1
    y, dropped, grads = run("dedup", split, args, factor, worst=False)
    assert int(dropped.sum()) == (~kept_TK).sum()
    assert_same((y, grads), dense(args, kept_TK))


def test_a_dropless_first_try_holds_twice_the_fair_share_and_counts_the_rest() -> None:
    y, dropped, grads = run("dedup", (2, 4), draw("uniform", 2), None, worst=False)
    assert not dropped.any()
    assert_same((y, grads), dense(draw("uniform", 2)))
    args = draw("same", 2)
    _, dropped, _ = run("dedup", (2, 4), args, None, worst=False)
    assert int(dropped.sum()) == (~kept_choices(args, (2, 4), 2.0)).sum() > 0


# ---- in chunks


@pytest.mark.parametrize(
    ("kind", "k", "factor", "num_chunks"),
    [
        ("flat", 2, 0.5, 2),
        pytest.param("flat", 2, None, 3, marks=pytest.mark.slow),
        ("hierarchical", 1, 1.0, 3),
        pytest.param("dedup", 2, 0.5, 2, marks=pytest.mark.slow),
        ("dedup", 8, 0.6, 3),
        ("dedup", 2, None, 2),
    ],
)
def test_chunks_share_capacity(kind: str, k: int, factor: float | None, num_chunks: int) -> None:
    """Whatever the number of chunks: the same choices dropped, the same values bit for bit, the
    same gradients.
    """
    args = draw("uniform" if factor is None else "skewed", k)
    y, dropped, grads = run(kind, (2, 4), args, factor, worst=False)
    assert factor is None or dropped.any()
    y_chunks, dropped_chunks, grads_chunks = run(
        kind, (2, 4), args, factor, worst=False, num_chunks=num_chunks
    )
    np.testing.assert_array_equal(y_chunks, y)
    assert int(dropped_chunks.sum()) == int(dropped.sum())
    assert_same(grads_chunks, grads)


def test_chunks_cross_one_after_another() -> None:
    """Each chunk is an all-to-all of its own, of its part of the rows; the first's experts do
    not wait for the last.
    """
    args = draw("uniform", 2)
    closed = jax.make_jaxpr(program("flat", (2, 4), 2, 1.0, False, 2))(*args)
    inside = inside_shard_map(closed.jaxpr)
    sent = [
        eqn for eqn in inside.eqns if runs(eqn, "all_to_all") and eqn.invars[0].aval.shape[-1] == D
    ]
    whole = buffer_rows_per_destination(T * 2 / DEVICES, T * 2, 1.0)
    there, back = sent[:2], sent[2:4]
    assert [eqn.invars[0].aval.shape for eqn in there + back] == [(DEVICES, whole // 2, D)] * 4
    assert there[0].outvars[0] in origins(inside, back[0].invars[0])
    assert there[1].outvars[0] not in origins(inside, back[0].invars[0])
    assert there[1].outvars[0] in origins(inside, back[1].invars[0])


# ---- what crosses


BYTES = {"f32": 4, "i32": 4, "ui16": 2, "ui8": 1}


@pytest.mark.parametrize(("k", "factor"), [(2, 1.0), (8, None)])
@pytest.mark.parametrize("kind", ["flat", "hierarchical", "dedup"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_program_sends_what_the_formula_says(
    split: tuple[int, int], kind: str, k: int, factor: float | None
) -> None:
    """Bytes by level, forward and backward, from the shapes of the program's all-to-alls."""
    (nodes, devices), args = split, draw("uniform", k)
    text = program(kind, split, k, factor, False).lower(*args).as_text()
    across = inside = 0.0
    for parts, shape, dtype in re.findall(
        r"all_to_all.*split_count = (\d+).*: \(tensor<([0-9x]+)x(\w+)>\)", text
    ):
        # to each of its devices
        sent = np.prod([int(n) for n in shape.split("x")]) * BYTES[dtype] / int(parts)
        if int(parts) == DEVICES:
            across, inside = across + sent * (nodes - 1) * devices, inside + sent * (devices - 1)
        elif int(parts) == nodes:
            across += sent * (nodes - 1)
        else:
            inside += sent * (devices - 1)
    expected = exchange_traffic(
        planned(kind, split, k),
        num_tokens=T,
        num_experts=E,
        num_experts_per_tok=k,
        row_bytes=4 * D,
        capacity_factor=factor,
        backward=True,
    )
    assert (across, inside) == (expected.across_bytes, expected.inside_bytes)


@pytest.mark.parametrize("kind", ["flat", "dedup"])
def test_chunks_are_gathered_one_by_one(kind: str) -> None:
    """A GPU wrote the rows of all chunks to memory and copied each chunk out of them."""
    args = draw("uniform", 2)
    traced = program(kind, (2, 4), 2, 1.0, True, 2).trace(*args)  # also the backward pass
    shapes = [
        out.aval.shape
        for eqn in inside_shard_map(traced.jaxpr.jaxpr).eqns
        for out in eqn.outvars
        if eqn.primitive.name in ("reshape", "split", "slice", "squeeze")
    ]
    assert shapes and not any(len(shape) == 4 and shape[-1] == D for shape in shapes)


@pytest.mark.parametrize("topk_group", [1, 2])
def test_limited_to_groups_a_token_crosses_to_as_many_nodes(topk_group: int) -> None:
    """Groups lie on nodes. Rows in the buffers = distinct nodes of the routing, never more than
    topk_group a token.
    """
    split, k = (4, 2), 3
    config = RouterConfig(kind="group_limited", n_group=4, topk_group=topk_group)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(T * DEVICES, E)), jnp.float32)
    idx = np.asarray(route(logits, k, config).topk_idx_TK)
    mesh = jax.make_mesh(split, AXES, axis_types=(AxisType.Auto,) * 2)
    plan = planned("auto", split, k, n_group=4, topk_group=topk_group)
    assert plan.kind == "dedup"
    assert plan.nodes_per_token <= topk_group
    exchange = make_exchange(plan, AXES, None)

    def body(idx_TK: jax.Array) -> jax.Array:
        counts_E = (idx_TK.reshape(-1, 1) == jnp.arange(E)).sum(axis=0, dtype=jnp.int32)
        there = exchange.dispatch(
            jnp.ones((T, D)), TokenChoices(idx_TK, jnp.ones(idx_TK.shape), counts_E), True
        )
        _, src_M, _ = there.handle
        # rows that this device sent to each node
        return (src_M.reshape(4, -1) < T).sum(axis=1)[None]

    spec = split_over(AXES)
    sent_RP = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(jnp.asarray(idx))
    reached_RTP = (idx[:, :, None] // (E // 4) == np.arange(4)).any(axis=1).reshape(DEVICES, T, 4)
    np.testing.assert_array_equal(np.asarray(sent_RP).reshape(DEVICES, 4), reached_RTP.sum(axis=1))
    assert reached_RTP.sum(axis=2).max() == topk_group
