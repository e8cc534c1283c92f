"""What a profile of a step counts, and where."""

from typing import Any

import pytest

from benchmarks.comm.trace import Op, Span, exchanges, operations, with_background
from benchmarks.train.profile_step import accounted, longest

MS = 1e6  # nanoseconds


def op(kind: str, scopes: str) -> Op:
    return Op(kind, scopes, [], 8, "main", 0)


OPS = {
    "dot.1": op("dot", "jit(step)/jvp()/while/body/attention/dot_general"),
    "fusion.2": op("fusion", "jit(step)/jvp(loss)/while/body/dot_general"),
    "fusion.3": op("fusion", "jit(step)/optimizer/mul"),
    "copy.4": op("copy", ""),
    "custom-call.6": op(
        "custom-call", "jit(step)/transpose(jvp())/while/body/attention/jmoe_causal_attention"
    ),
    "while.5": op("while", "jit(step)/jvp()/while"),
}


def spans(*some: tuple[float, float, str]) -> list[Any]:
    return sorted(Span(begin * MS, end * MS, name) for begin, end, name in some)


def test_every_millisecond_counts_once() -> None:
    """An operation that begins under another counts from where that one ends; loops hold what is
    counted already.
    """
    operations = (
        (1, 3, "dot.1"),
        (2, 5, "fusion.2"),
        (5, 6, "copy.4"),
        (7, 8, "fusion.3"),
        (8, 9, "custom-call.6"),
    )
    found = spans((0, 9, "while.5"), *operations)
    rows = accounted(found, OPS, 1, 0.0, 10 * MS)
    assert rows == {
        "idle": {"idle": 3.0},
        "attention": {"products": 2.0, "native": 1.0},
        "loss": {"products": 2.0},
        "other": {"copies": 1.0},
        "optimizer": {"elementwise": 1.0},
    }
    assert sum(ms for row in rows.values() for ms in row.values()) == 10


def test_collectives_count_where_nothing_else_runs() -> None:
    ops = OPS | {"all-reduce.7": op("all-reduce", "jit(step)/reduce/psum")}
    found = spans((1, 6, "all-reduce.7"), (2, 4, "dot.1"), (7, 8, "fusion.3"))
    rows = accounted(found, ops, 1, 0.0, 8 * MS)
    assert rows == {
        "collectives": {"collectives": 3.0},
        "attention": {"products": 2.0},
        "idle": {"idle": 2.0},
        "optimizer": {"elementwise": 1.0},
    }


def test_times_are_of_one_step() -> None:
    found = spans((0, 2, "dot.1"), (4, 8, "dot.1"), (2, 3, "fusion.3"))
    assert accounted(found, OPS, 2, 0.0, 8 * MS)["attention"] == {"products": 3.0}
    first, second = longest(found, OPS, 2, 2)
    assert (first["op"], first["ms"], second["op"], second["ms"]) == ("dot.1", 3.0, "fusion.3", 0.5)


def test_operations_in_the_background_last_as_long_as_they_ran() -> None:
    """From when they got a thread; others as the trace has it."""
    text = """ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %call.1 = f32[8]{0} custom-call(%x), custom_call_target="jmoe_grouped_mlp", backend_config={background = true}
  %call.2 = f32[8]{0} custom-call(%x), custom_call_target="jmoe_grouped_mlp", backend_config={background = false}
  ROOT %add.3 = f32[8]{0} add(%call.1, %call.2)
}"""
    ops = operations(text)
    found = spans((0, 1, "call.1"), (1, 3, "call.2"), (4, 5, "add.3"), (6, 7, "call.1"))
    longer = with_background(found, ops, [(5e-4, 2e-3), (0, 3e-3)])
    assert [(s.begin_ns / MS, s.end_ns / MS) for s in longer] == [
        (0.5, 2.5),
        (1, 3),
        (4, 5),
        (6, 9),
    ]
    with pytest.raises(ValueError, match="shorter"):
        with_background(found, ops, [(0, 2e-3)])


def test_an_exchange_is_ready_when_the_native_operation_is_done_that_its_rows_come_from() -> None:
    """Whatever that waited for itself, and not when other operations are done whose memory is
    held meanwhile.
    """
    text = """ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %order.1 = bf16[8,8]{1,0} negate(%x), metadata={op_name="transpose/order/xor"}
  %call.2 = bf16[8,8]{1,0} custom-call(%order.1), custom_call_target="jmoe_grouped_mlp_gradient"
  %call.3 = bf16[8,8]{1,0} custom-call(%x), custom_call_target="jmoe_causal_attention_gradient"
  %hold.4 = s32[] custom-call(%x, %call.2, %call.3), custom_call_target="jmoe_hold"
  %rows.5 = bf16[8,8]{1,0} add(%call.2, %hold.4), metadata={op_name="transpose/moe/all_to_all_back/xor"}
  ROOT %send.6 = bf16[8,8]{1,0} all-to-all(%rows.5), metadata={op_name="transpose/moe/all_to_all_back/all_to_all"}
}"""
    found = spans(
        (0, 1, "order.1"), (1, 3, "call.2"), (1, 5, "call.3"), (5, 6, "hold.4"), (7, 9, "send.6")
    )
    (exchange,) = exchanges(found, operations(text))
    assert (exchange.ready_ns / MS, exchange.done_ns / MS) == (3, 9)
