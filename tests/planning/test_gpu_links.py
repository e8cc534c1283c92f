"""Collectives: whom they join, what they send, and over which links."""

import pytest

from jmoe.config.cluster import NetworkConfig
from jmoe.planning.gpu_links import Collective, collective_of, replica_groups
from jmoe.planning.hlo import parse_hlo

LINKS = NetworkConfig(400e9, 50e9, inside_latency_s=0.0, between_latency_s=0.0)
NODE = tuple(range(8))
TWO_NODES = tuple(range(16))


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, use_global_device_ids=true", ((0, 1), (2, 3))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("replica_groups=mesh['data'=2,'intra'=2] {'intra'}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['data'=2,'intra'=2] {'data'}", ((0, 2), (1, 3))),
        (
            "replica_groups=mesh['data'=2,'inter'=1,'intra'=2] {'data','inter','intra'}",
            ((0, 1, 2, 3),),
        ),
        ("replica_groups=mesh['data'=4] {'data':(1)2}", ()),
        ("channel_id=1", ()),
    ],
)
def test_groups(attributes: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert replica_groups(attributes) == groups


def test_what_is_sent() -> None:
    sent = {
        kind: Collective(kind, (NODE,), 8e6).sent_bytes
        for kind in ("all-gather", "all-reduce", "all-to-all")
    }
    assert sent == {"all-gather": 7 * 8e6, "all-reduce": 2 * 7e6, "all-to-all": 7e6}
    assert Collective("reduce-scatter", (NODE,), 8e6).sent_bytes == 7e6


def test_inside_a_node_and_between() -> None:
    """An all-to-all leaves the node once for each peer there; a ring once for all devices of the
    node.
    """
    assert Collective("all-to-all", (NODE,), 8e6).duration_s(LINKS, 8) == pytest.approx(7e6 / 400e9)
    assert Collective("all-to-all", (TWO_NODES,), 16e6).duration_s(LINKS, 8) == pytest.approx(
        8e6 / 50e9
    )
    ring = Collective("all-reduce", (TWO_NODES,), 16e6)
    # in the ring a node sends once for its eight devices, each of which passes 30 MB on
    assert ring.away_bytes(8) == pytest.approx(30e6 * 8 / 15 / 8) and ring.away_bytes(16) == 0
    assert Collective("all-to-all", (TWO_NODES,), 16e6).away_bytes(8) == pytest.approx(8e6)
    away = ring.sent_bytes * 8 / 15 / 8
    assert ring.duration_s(LINKS, 8) == pytest.approx(
        max(away / 50e9, (ring.sent_bytes - away) / 400e9)
    )
    assert Collective("all-reduce", ((0,), (1,)), 16e6).duration_s(LINKS, 8) == 0


def test_of_a_computation_that_runs_beside_others() -> None:
    module = parse_hlo(
        """%async (a: f32[64]) -> f32[8] {
  %a = f32[64]{0} parameter(0)
  ROOT %scattered = f32[8]{0} reduce-scatter(%a), replica_groups=[1,8]<=[8], to_apply=%plus
}
ENTRY %main (x: f32[64]) -> f32[8] {
  %x = f32[64]{0} parameter(0)
  %started = ((f32[64]{0}), f32[8]{0}) async-start(%x), calls=%async
  ROOT %done = f32[8]{0} async-done(%started)
}"""
    )
    started = collective_of(module, module.entry, module.entry["started"])
    assert started == Collective("reduce-scatter", (NODE,), 256)
    assert collective_of(module, module.entry, module.entry["done"]) is None


def test_a_ragged_all_to_all_sends_its_rows_and_no_spare_ones() -> None:
    """There the buffer that it writes has spare rows, on the way back the one that it reads."""
    text = """HloModule m
ENTRY %main (p0: bf16[64,16], p1: bf16[96,16], p2: s32[8]) -> bf16[96,16] {
  %p0 = bf16[64,16] parameter(0)
  %p1 = bf16[96,16] parameter(1)
  %p2 = s32[8] parameter(2)
  ROOT %there = bf16[96,16] ragged-all-to-all(%p0, %p1, %p2, %p2, %p2, %p2), replica_groups={{0,1}}
  %back = bf16[64,16] ragged-all-to-all(%p1, %p0, %p2, %p2, %p2, %p2), replica_groups={{0,1}}
}
"""
    module = parse_hlo(text)
    for name in ("there", "back"):
        found = collective_of(module, module.entry, module.entry[name])
        assert found is not None and found.sent_bytes == 64 * 16 * 2 / 2
