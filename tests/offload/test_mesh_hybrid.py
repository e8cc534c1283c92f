"""Of the experts that a mesh's devices lack, the host computes a part, in the places of their rows."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from jax.sharding import Mesh

from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.mesh import BATCH, expert_mesh, put_sharded
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.host_experts import HostExperts
from jmoe.offload.mesh_hybrid import ArrivedBatch, ColdRows, MeshHybridExperts
from jmoe.offload.placed_experts import even_placement, expert_numbers_by_local_device
from jmoe.offload.slot_arrays import Fields
from tests.tiny_engines import needs_compiler

DEVICES, HIDDEN, INNER, ROWS = 4, 16, 32, 40
INDEX = ExpertIndex(num_layers=2, num_experts=10)
FIELDS: Fields = {
    "w_up": ((HIDDEN, 2 * INNER), np.dtype(np.float32)),
    "w_down": ((INNER, HIDDEN), np.dtype(np.float32)),
}


def expert(number: int) -> dict[str, np.ndarray]:
    """Return the weights of a record."""
    rng = np.random.default_rng(number)
    return {
        name: rng.normal(size=shape, scale=0.1).astype(dtype)
        for name, (shape, dtype) in FIELDS.items()
    }


def fill(number: int, views: dict[str, np.ndarray]) -> None:
    for name, values in expert(number).items():
        views[name][...] = values


def outputs(number: int, rows_TD: np.ndarray) -> np.ndarray:
    """Return rows through an expert, in float64."""
    weights = {name: values.astype(np.float64) for name, values in expert(number).items()}
    gate_TF, up_TF = np.split(rows_TD.astype(np.float64) @ weights["w_up"], 2, axis=1)
    return (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ weights["w_down"]


@pytest.fixture
def mesh() -> Mesh:
    return expert_mesh(DEVICES)


@pytest.fixture
def hybrid(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeshHybridExperts]:
    """Ten experts of two layers on four devices, three of each layer on all but the last; three
    slots a device.
    """
    needs_compiler()
    monkeypatch.setattr("jmoe.offload.host_experts.LEAST_SHARE", 0.4)
    by_device = expert_numbers_by_local_device(even_placement(INDEX.num_experts, DEVICES), mesh)
    owned = chain.from_iterable(
        INDEX.record_numbers(layer, experts).tolist()
        for experts in by_device.values()
        for layer in range(INDEX.num_layers)
    )
    layout = RecordLayout.from_arrays(FIELDS)
    records = HostRecords.allocate_and_fill(layout, INDEX.num_records, fill, owned)
    host = HostExperts(records, FIELDS, np.float32)
    assert host.is_known
    with TieredStore(records) as store:
        made = MeshHybridExperts(mesh, INDEX, FIELDS, 3, store, host)
        with contextlib.closing(made):
            yield made


def sorted_rows(
    hybrid: MeshHybridExperts, layer: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (rows [N M, D], the expert of each, -1 behind those of a device, rows of each expert
    [N S]), as an exchange leaves them.
    """
    placement = hybrid.placements[layer]
    rows_MD = rng.normal(size=(DEVICES * ROWS, HIDDEN)).astype(np.float32)
    sizes_NS = rng.integers(0, 5, placement.physical_to_logical.shape).astype(np.int32)
    sizes_NS[placement.physical_to_logical < 0] = 0
    expert_M = np.full((DEVICES, ROWS), -1)
    for n, sizes_S in enumerate(sizes_NS):
        of_device = np.repeat(placement.physical_to_logical[n], sizes_S)
        expert_M[n, : of_device.size] = of_device
    return rows_MD, expert_M.reshape(-1), sizes_NS.reshape(-1)


def start(
    hybrid: MeshHybridExperts, layer: int, mesh: Mesh, rng: np.random.Generator
) -> tuple[ColdRows, list[ArrivedBatch], list[np.ndarray]]:
    """Acquire a layer for two batches and begin the host's part; return (it, the batches, the
    expert of each row).
    """
    batches, experts = [], []
    for _ in range(2):
        rows_MD, expert_M, sizes_NS = sorted_rows(hybrid, layer, rng)
        batches.append(ArrivedBatch(*(put_sharded(x, mesh, BATCH) for x in (rows_MD, sizes_NS))))
        experts.append(expert_M)
    chosen = np.concatenate(experts)
    hybrid.acquire(layer, chosen[chosen >= 0])
    return hybrid.start_cold_rows(layer, batches, "swiglu"), batches, experts


def test_rows_of_experts_without_a_slot_are_the_hosts(
    hybrid: MeshHybridExperts, mesh: Mesh
) -> None:
    """The others have slots by the time that a device computes, with the weights of the table."""
    rng, on_host, copied = np.random.default_rng(0), 0, 0
    for _ in range(4):
        hybrid.begin_step(whole_layers=False, on_host=True)
        for layer in range(INDEX.num_layers):
            copied_before = hybrid._store.stats().host.transfers
            cold, batches, experts = start(hybrid, layer, mesh, rng)
            with hybrid.locked_operands(layer) as (weights, table_NS):
                table, held = np.asarray(table_NS), np.asarray(weights["w_up"])
            outs = hybrid.wait_for_cold_rows(cold, batches)
            is_cold_NS, where = np.asarray(cold.is_cold_NS), hybrid.placements[layer]
            chosen = set(np.concatenate(experts).tolist()) - {-1}
            computed = chosen & set(where.physical_to_logical.ravel()[is_cold_NS].tolist())
            for out_MD, batch, expert_M in zip(outs, batches, experts, strict=True):
                expected = np.zeros(out_MD.shape)
                for number in computed:
                    record, mine = INDEX.record_numbers(layer, number).item(), expert_M == number
                    expected[mine] = outputs(record, np.asarray(batch.rows_MD)[mine])
                np.testing.assert_allclose(np.asarray(out_MD), expected, rtol=0, atol=1e-5)
            for number in chosen - computed:
                n, s = np.argwhere(where.physical_to_logical == number)[0]
                slot = n * hybrid.num_slots + table[n * where.slots_per_device + s]
                record = INDEX.record_numbers(layer, number).item()
                np.testing.assert_array_equal(held[slot], expert(record)["w_up"])
            assert cold.num_experts == len(computed)
            on_host += len(computed)
            copied += hybrid._store.stats().host.transfers - copied_before
            hybrid.release()
    stats = hybrid.stats()
    assert stats.policy == "hybrid" and 0 < stats.on_host == on_host
    assert stats.misses == on_host + copied and copied > 0
    assert hybrid._shares.host_bytes_per_s > 0


def test_whole_layers_leave_nothing_to_the_host(hybrid: MeshHybridExperts, mesh: Mesh) -> None:
    rng = np.random.default_rng(1)
    for options in ({"whole_layers": True, "on_host": True}, {"whole_layers": False}):
        hybrid.begin_step(**options)
        for layer in range(INDEX.num_layers):
            cold, batches, _ = start(hybrid, layer, mesh, rng)
            assert cold.num_experts == 0 and cold.part is None
            outs = hybrid.wait_for_cold_rows(cold, batches)
            assert len(outs) == 2 and not any(np.asarray(out_MD).any() for out_MD in outs)
            hybrid.release()
    assert hybrid.stats().on_host == 0


def test_an_error_on_the_host_ends_every_later_step(
    hybrid: MeshHybridExperts, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("a memory error")

    monkeypatch.setattr(hybrid._host, "_compute_weighted_sums", fail)
    hybrid.begin_step(whole_layers=False, on_host=True)
    cold, batches, _ = start(hybrid, 0, mesh, np.random.default_rng(2))
    with pytest.raises(OSError, match="a memory error"):
        hybrid.wait_for_cold_rows(cold, batches)
    with pytest.raises(OSError, match="a memory error"):
        hybrid.acquire(1, np.arange(INDEX.num_experts))
