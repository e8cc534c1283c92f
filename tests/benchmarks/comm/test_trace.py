"""The bound on what a queue at run time could save of a traced step, on steps made by hand."""

import pytest

from benchmarks.comm.trace import Op, Span, queue_gain

OPS = {
    "first": Op("dot", "dot_general", [], 4, "main", 0),
    "second": Op("dot", "dot_general", ["first"], 4, "main", 0),
    "reduce": Op("all-reduce", "", ["first"], 4, "main", 0),
    "rows": Op("fusion", "", ["second"], 4, "main", 0),
    "exchange": Op("all-to-all", "transpose(moe)/all_to_all", ["rows"], 4, "main", 0),
}


def step(**spans: tuple[float, float]) -> list[Span]:
    """A step with these operations, in seconds."""
    return sorted(Span(1e9 * begin, 1e9 * end, name) for name, (begin, end) in spans.items())


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        # the reduction begins with its input and is done when the all-to-all's is
        ({"reduce": (1, 2), "exchange": (2, 3)}, (0, 0)),
        # the all-to-all waits for a reduction that began before its input was there
        ({"reduce": (1, 5), "exchange": (5, 6)}, (0, 0)),
        # the link rests for 0.5 s though the reduction could begin
        ({"reduce": (1.5, 2.5), "exchange": (2.5, 3)}, (0.5, 0)),
        # the reduction goes first though the all-to-all waits already; the link rests before it
        ({"reduce": (3, 5), "exchange": (5, 6)}, (2, 2)),
        # the all-to-all goes first, the reduction waits until after it
        ({"exchange": (2, 3), "reduce": (3, 4)}, (1, 0)),
    ],
)
def test_gain_of_a_queue(
    spans: dict[str, tuple[float, float]], expected: tuple[float, float]
) -> None:
    found = step(first=(0, 1), second=(1, 2), **spans)
    assert tuple(queue_gain(found, OPS)) == pytest.approx(expected)
