"""The exchange that a plan names, and its all-to-alls alone."""

import jax
import jax.numpy as jnp
import pytest

from jmoe.collectives.exchange import OneDeviceExchange, PerDeviceExchange, TokenChoices
from jmoe.collectives.planned_exchange import make_exchange, trace_dispatch_all_to_alls
from jmoe.collectives.ragged_rounds import RoundsExchange
from tests.collectives.test_exchange import AXES, D, E, T, planned


def test_make_exchange() -> None:
    assert isinstance(make_exchange(planned("dedup", (1, 1), 2), (), None), OneDeviceExchange)
    assert isinstance(make_exchange(planned("ragged", (1, 1), 2), (), None), OneDeviceExchange)
    assert isinstance(make_exchange(planned("flat", (1, 8), 2), ("gpu",), 1.0), PerDeviceExchange)
    for axes, split in ((("gpu",), (1, 8)), (AXES, (2, 4))):
        assert isinstance(make_exchange(planned("ragged", split, 2), axes, None), RoundsExchange)
    for kind in ("hierarchical", "dedup"):
        with pytest.raises(ValueError, match=rf"exchange = '{kind}': needs two expert axes"):
            make_exchange(planned(kind, (1, 8), 2), ("gpu",), None)
    with pytest.raises(ValueError, match=r"capacity_factor = 1.0: must be None with exchange = 'r"):
        make_exchange(planned("ragged", (2, 4), 2), AXES, 1.0)


def all_to_alls_of(kind: str) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the operands of each dispatch all-to-all."""
    k, shape = 2, jax.ShapeDtypeStruct
    chosen = TokenChoices(
        shape((T, k), jnp.int32), shape((T, k), jnp.float32), shape((E,), jnp.int32)
    )
    exchange = make_exchange(planned(kind, (2, 4), k), AXES, None)
    sent = trace_dispatch_all_to_alls(exchange, shape((T, D), jnp.float32), chosen)
    return [[leaf.shape for leaf in jax.tree.leaves(tree)] for _, tree in sent]


def test_a_ragged_exchange_is_measured_without_padding() -> None:
    """Flat pads each device's 5 rows to 16 and sends two counts with them."""
    assert all_to_alls_of("flat") == [[(8, 16, D), (8, 2)]]
    assert all_to_alls_of("ragged") == [[(8, 5, D)]]
    assert len(all_to_alls_of("dedup")) == 3  # weights and experts, rows; rows inside a node
