"""Values and bytes between processes, here of a single one; test_snapshots.py has three."""

import numpy as np
import pytest

from jmoe.cluster import processes
from jmoe.cluster.processes import exchange_bytes, gather_json, split_into_rounds


def test_values_come_back_as_json_has_them() -> None:
    assert gather_json({"a": (1, None), "b": "text"}) == [{"a": [1, None], "b": "text"}]


def test_nobody_sends_or_receives_twice_in_a_round() -> None:
    assert split_into_rounds([(0, 1), (1, 0), (2, 3)]) == [((0, 1), (1, 0), (2, 3))]
    assert split_into_rounds([(0, 1), (0, 2), (1, 3), (3, 2)]) == [
        ((0, 1), (1, 3), (3, 2)),
        ((0, 2),),
    ]
    assert split_into_rounds([]) == []


@pytest.mark.parametrize("num_bytes", [0, 1, 99, 100, 250])
def test_bytes_go_in_chunks(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHUNK_BYTES", 100)
    outgoing = np.arange(num_bytes).astype(np.uint8)
    incoming = np.full(num_bytes, 255, np.uint8)
    exchange_bytes(outgoing, incoming, ((0, 0),), num_bytes)
    assert np.array_equal(outgoing, incoming)


def test_others_may_send_more_than_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHUNK_BYTES", 100)
    incoming = np.full(30, 255, np.uint8)
    exchange_bytes(np.arange(30, dtype=np.uint8), incoming, ((0, 0),), 230)
    assert np.array_equal(incoming, np.arange(30))
