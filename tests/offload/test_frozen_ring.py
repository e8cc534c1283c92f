"""Layers that a training step only reads pass through a ring in the order of each pass."""

import jax
import numpy as np
import pytest

from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.record_store import HostRecords
from jmoe.memory.tiered_store import TieredStore
from jmoe.offload.expert_index import ExpertIndex
from jmoe.offload.frozen_ring import FrozenExpertRing
from tests.model_configs import MODEL

FIELDS = {"w_up": ((4, 6), np.dtype(np.float32)), "b_up": ((6,), np.dtype(np.float32))}


def test_each_pass_reads_its_layers_in_its_order() -> None:
    """Arrays that a layer does not need stay in the records."""
    index = ExpertIndex.from_model(MODEL)

    def fill(number: int, views: dict[str, np.ndarray]) -> None:
        for view in views.values():
            view[...] = number

    layout = RecordLayout.from_arrays(FIELDS)
    store = TieredStore(HostRecords.allocate_and_fill(layout, index.num_records, fill))
    needed, down = {"w_up": FIELDS["w_up"]}, list(range(index.num_layers))
    with FrozenExpertRing(store, index, needed, jax.devices()[0], 2) as ring:
        assert ring.num_bytes == 2 * index.num_experts * 4 * 6 * 4
        for order in (down + down[::-1], down, down + down[::-1]):
            ring.begin_pass(order)
            for layer in order:
                with ring.next_layer(layer) as arrays:
                    assert list(arrays) == ["w_up"]
                    values = np.asarray(arrays["w_up"])[:, 0, 0]
                    np.testing.assert_array_equal(values, index.record_numbers(layer))
        ring.begin_pass(down)
        with pytest.raises(AssertionError), ring.next_layer(down[-1] + 1):
            pass
