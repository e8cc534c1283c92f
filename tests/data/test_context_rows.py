"""Rows are divided over the devices of a group so that every target is learned once."""

import numpy as np
import pytest

from jmoe.data.context_rows import ContextRows, loaded_share
from jmoe.data.sample_rows import SampleRows


def test_chunks_of_two_groups() -> None:
    """Device i of a group of two gets chunks i and 3 - i of its group's rows, with their targets;
    documents stay whole.
    """
    tokens = np.arange(9) + 10 * np.arange(4)[:, None]
    batch = SampleRows(tokens, 1.0 + tokens[:, :-1], tokens[:, :-1] // 4)
    divided = ContextRows(2, 4).divide(batch)
    first = [
        [0, 1, 2, 6, 7, 8],
        [10, 11, 12, 16, 17, 18],
        [2, 3, 4, 4, 5, 6],
        [12, 13, 14, 14, 15, 16],
    ]
    assert divided.tokens[:4].tolist() == first
    assert (divided.tokens[4:] - 20).tolist() == first
    chunks = divided.tokens.reshape(8, 2, 3)
    np.testing.assert_array_equal(divided.weights, 1.0 + chunks[..., :-1].reshape(8, 4))
    np.testing.assert_array_equal(divided.documents[:2], batch.documents[:2])
    np.testing.assert_array_equal(divided.documents[2:4], batch.documents[:2])
    targets = np.sort(chunks[..., 1:].ravel())
    np.testing.assert_array_equal(targets, np.sort(tokens[:, 1:].ravel()))
    part = ContextRows(2, 4).divide(batch, first=1, count=1)
    np.testing.assert_array_equal(part.tokens[:2], divided.tokens[2:4])
    inputs = ContextRows(2, 4).divide_inputs(tokens[:, :-1])
    np.testing.assert_array_equal(inputs, chunks[..., :-1].reshape(8, 4))


def test_one_device_a_sequence_changes_nothing() -> None:
    tokens = np.zeros((4, 9), np.int32)
    assert ContextRows(1, 4).divide(tokens) is tokens
    assert ContextRows(1, 4).divide_inputs(tokens) is tokens


def test_processes_of_one_group_load_the_same_rows() -> None:
    assert [loaded_share(4, 2, i, 4) for i in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [loaded_share(2, 4, i, 2) for i in range(2)] == [(0, 2), (1, 2)]
    with pytest.raises(ValueError, match=r"mesh\.context = 2: must divide the 3 devices"):
        loaded_share(2, 3, 0, 2)
