"""The numbering of experts' records: old checkpoints and packs lean on it."""

import numpy as np

from jmoe.offload.expert_index import ExpertIndex, LocalExperts
from tests.model_configs import mesh_of


def test_records_are_numbered_layer_by_layer() -> None:
    index = ExpertIndex(3, 8)
    assert index.num_records == 24
    assert index.records(2).tolist() == list(range(16, 24))
    assert index.records(1, [5, 0]).tolist() == [13, 8]
    assert [index.locate(record) for record in (0, 7, 13)] == [(0, 0), (0, 7), (1, 5)]
    assert index.local_records == list(range(24))


def test_a_process_has_records_of_its_own() -> None:
    local = LocalExperts(np.array([2, 3]), ())
    assert ExpertIndex(3, 4, local).local_records == [2, 3, 6, 7, 10, 11]
    everyone = LocalExperts.of(mesh_of(1, 2, 2), 8)
    assert (everyone.experts.tolist(), everyone.per_device) == (list(range(8)), 2)
    parts = everyone.split({"w": np.arange(8)})
    assert [part["w"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
