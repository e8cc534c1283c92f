"""The explicit scan over layers: how many collectives, in which order, how much memory.

That it changes no number is in test_step.py.

Legend: N layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jmoe.config import MeshConfig, ModelConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH
from jmoe.training.trainer import make_trainer
from tests.compiled import Op, operations
from tests.model_configs import mesh_of, spread_over

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=5,
    first_k_dense_replace=1,
    num_attention_heads=4,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_experts=8,
    shared_expert_intermediate_size=16,
    capacity_factor=1.0,
)


@functools.cache
def compiled(*shape: int, model: ModelConfig = MODEL, tokens: int = 16, **comm: Any) -> Any:
    config = TrainConfig(model=model, batch_size=8, sequence_length=tokens, compute_dtype="float32")
    config = spread_over(config, *shape, embedding="replicated", **comm)
    devices = mesh_of(*shape)
    program = make_trainer(config, devices)
    sharding = NamedSharding(devices, ACCUMULATED_BATCH)
    batch = jax.ShapeDtypeStruct((1, 8, tokens + 1), jnp.int32, sharding=sharding)
    return program.step.lower(program.state_shape, batch).compile()  # type: ignore[attr-defined]


def collectives(*shape: int, **comm: Any) -> list[Op]:
    return operations(compiled(*shape, **comm).as_text())


def layer_elements(model: ModelConfig) -> list[int]:
    """Dense parameters of every layer that are split over devices: all but the experts."""
    d, attention = model.hidden_size, 4 * model.hidden_size**2 + 2 * model.hidden_size
    mlp = 3 * d * model.intermediate_size
    sparse = d * model.num_experts + 3 * d * model.shared_expert_intermediate_size
    return [attention + (sparse if kind == "moe" else mlp) for kind in model.layer_kinds]


@pytest.mark.parametrize(
    ("shape", "chunk_bytes"),
    [pytest.param((1, 1, 8), 0, marks=pytest.mark.slow), ((2, 2, 2), 9000)],
    ids=["whole", "chunks"],
)
def test_number_of_collectives(shape: tuple[int, int, int], chunk_bytes: int) -> None:
    """Every layer is gathered twice, but the last one once, and reduced once; the rest of the
    parameters once. Nothing can run beside the very first gather, which is not cut.
    """
    ops = Counter(op.kind for op in collectives(*shape, chunk_bytes=chunk_bytes))
    elements, levels = layer_elements(MODEL), 2 if shape[1] > 1 else 1
    chunks = [-(-4 * n // chunk_bytes) if chunk_bytes else 1 for n in elements]
    gathers = 1 + sum(chunks[1:]) + sum(chunks[:-1])
    assert ops["all-gather"] == levels * (gathers + 1)
    assert ops["reduce-scatter"] == levels * (sum(chunks) + 1)


@pytest.mark.slow
def test_number_of_collectives_of_larger_buckets() -> None:
    """Two layers of a kind at once: 1 + 2 reductions where there were 1 + 4."""
    ops = Counter(op.kind for op in collectives(1, 1, 8, bucket_bytes=100_000))
    assert ops["reduce-scatter"] == 1 + 2 + 1


def test_parameters_that_no_number_of_devices_divides() -> None:
    """Nothing travels in the buffer; the state keeps its shapes."""
    config = TrainConfig(model=MODEL, mesh=MeshConfig(7), batch_size=7, sequence_length=8)
    program = make_trainer(config, mesh_of(7, 1, 1))
    state, metrics = jax.eval_shape(
        program.step, program.state_shape, jax.ShapeDtypeStruct((1, 7, 9), jnp.int32)
    )
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, program.state_shape)
    assert metrics["counts"].shape == (4, 8)


@pytest.mark.slow
def test_one_by_one_takes_more() -> None:
    fused, single = (
        Counter(op.kind for op in collectives(1, 1, 8, schedule="none", fuse_dense=fuse))
        for fuse in (True, False)
    )
    assert single["all-gather"] > 4 * fused["all-gather"]
    assert single["reduce-scatter"] > 4 * fused["reduce-scatter"]


def test_no_more_than_two_layers_are_unsharded() -> None:
    """Each further layer takes less memory than half of its parameters, of which every device
    keeps an eighth.
    """
    model = dataclasses.replace(
        MODEL, hidden_size=256, intermediate_size=512, num_experts=0, first_k_dense_replace=0
    )
    layer_bytes = 4 * layer_elements(model)[0]
    peaks = []
    for layers in (4, 8):
        deep = dataclasses.replace(model, num_hidden_layers=layers)
        analysis = compiled(1, 1, 8, model=deep, tokens=4).memory_analysis()
        peaks.append(analysis.temp_size_in_bytes)
    assert peaks[1] - peaks[0] < 4 * layer_bytes / 2
    # two layers, what they are unpacked into, gradients and their bucket
    assert peaks[0] < 8 * layer_bytes


# ---- the order inside a layer


def backward_orders(ops: list[Op]) -> list[list[str]]:
    """What runs in each layer's backward pass with experts, from combine's all-to-all to the
    next layer's.
    """
    orders: list[list[str]] = []
    for op in ops:
        if "transpose" not in op.scopes:
            continue
        if op.kind == "all-to-all":
            back = "all_to_all_back" in op.scopes or "all_to_all_across_back" in op.scopes
            if back and (not orders or "there" in orders[-1]):
                orders.append([])
            orders[-1].append("back" if back else "there")
        elif orders and (op.kind != "all-reduce" or "all_reduce" in op.scopes):
            orders[-1].append(op.kind)
    return orders


@pytest.mark.parametrize(
    ("schedule", "num_chunks"),
    [("chunks", 1), pytest.param("pipelined", 2, marks=pytest.mark.slow)],
)
def test_nothing_runs_in_front_of_an_all_to_all_that_could_start(
    schedule: Any, num_chunks: int
) -> None:
    """combine's all-to-alls, chunks during the experts, dispatch's all-to-alls, chunks during
    attention.
    """
    orders = backward_orders(collectives(1, 2, 2, schedule=schedule, chunk_bytes=9000))
    assert len(orders) == 4
    for order in orders:
        first, last = order.index("there"), len(order) - 1 - order[::-1].index("there")
        hops = 2 * num_chunks
        assert order[:hops] == ["back"] * hops  # both levels, nothing between them
        experts, between, attention = order[hops:first], order[first : last + 1], order[last + 1 :]
        assert set(experts) | set(attention) <= {"all-gather", "reduce-scatter"}
        # rows inside the node and across, and the weights once
        assert between == ["there"] * (2 * num_chunks + 1)
    for order in orders[1:-1]:
        experts = order[hops : order.index("there")]
        attention = order[order[::-1].index("there") * -1 :]
        assert experts and "reduce-scatter" in attention


REPLICATED: dict[str, Any] = {"shard_dense": False, "hierarchical": False, "exchange": "flat"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "comm", "kinds"),
    [
        ((1, 2, 2), REPLICATED, {"all-reduce"}),
        ((2, 1, 2), {}, {"all-reduce", "all-gather", "reduce-scatter"}),
    ],
    ids=["replicated dense parameters", "experts' gradients over data"],
)
def test_all_reduces_give_way_to_all_to_alls(
    shape: tuple[int, int, int], comm: dict[str, Any], kinds: set[str]
) -> None:
    """A layer's gradients are all-reduced in chunks beside the products of the layer before it."""
    chunk_bytes = 9000
    orders = backward_orders(collectives(*shape, chunk_bytes=chunk_bytes, **comm))
    assert len(orders) == 4
    for order in orders:
        first, last = order.index("there"), len(order) - 1 - order[::-1].index("there")
        assert order[0] == "back" and order[first : last + 1] == ["there"]
        assert set(order) - {"there", "back"} <= kinds
    between = orders[1:-1]
    assert all({*order[: order.index("there")]} & kinds for order in between)  # during the experts
    # during attention
    assert all("all-reduce" in order[order.index("there") :] for order in between)
    dense = 4 * layer_elements(MODEL)[-1] if comm else 0
    experts = (
        4 * 8 * 3 * MODEL.hidden_size * MODEL.moe_intermediate_size // 2 if shape[0] > 1 else 0
    )
    chunks = -(-dense // (chunk_bytes // 2)) + -(-experts // (chunk_bytes // 2))
    assert [order.count("all-reduce") for order in between] == [chunks] * 2
    orders = backward_orders(collectives(*shape, chunk_bytes=chunk_bytes, schedule="fixed", **comm))
    for order in orders[1:-1]:
        assert order.count("all-reduce") == 1 and order[-1] == "all-reduce"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "during_experts"), [("ready", 0), ("fixed", 0), ("priority", 2)]
)
def test_the_baselines_reduce_elsewhere(schedule: Any, during_experts: int) -> None:
    """ready: in front of the next layer's; fixed: behind the pair; priority: all that is
    pending, as experts begin.
    """
    for order in backward_orders(collectives(1, 2, 2, schedule=schedule))[1:-1]:
        assert order.count("reduce-scatter") == 2
        assert order[2 : order.index("there")].count("reduce-scatter") == during_experts
