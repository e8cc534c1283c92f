"""Layers and experts over unlike devices: the shortest step, by trying all; links, by counting;
what does not fit.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jmoe.config.cluster import DevicesConfig, MachinesConfig, NetworkConfig
from jmoe.config.engine import EngineMesh
from jmoe.offload.segments import placements_to_segments, read_segments
from jmoe.planning.memory_plan import ModelBytes
from jmoe.planning.placement import slot_rows_and_sizes
from jmoe.planning.roofline import ExpertWeightSizes
from jmoe.planning.segmentation import SegmentBy, SegmentPlan, StepTokens, plan_segments

MUCH = 10**12
FEW = StepTokens(8, 10)


def model(num_experts: int, rest_bytes: int = 0, layers: int = 2, k: int = 1) -> ModelBytes:
    return ModelBytes(ExpertWeightSizes(layers, num_experts, k, 100), 4096, rest_bytes, 0)


def plan(
    of: ModelBytes, machines: list[DevicesConfig], by: SegmentBy | None = "experts", **more: Any
) -> SegmentPlan:
    return plan_segments(
        of, MachinesConfig(tuple(machines), more.get("network")), more.get("tokens", FEW), by
    )


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (3.0, 1.0), (5.0, 2.0, 2.0), (1.0, 10.0, 4.0)])
@pytest.mark.parametrize("num_experts", [1, 7, 8])
def test_no_other_counts_are_faster(speeds: tuple[float, ...], num_experts: int) -> None:
    (place,) = plan(model(num_experts), [DevicesConfig(1, MUCH, speed) for speed in speeds]).places
    others = itertools.product(range(num_experts + 1), repeat=len(speeds))
    fastest = min(
        max(n * 100 / speed for n, speed in zip(counts, speeds))
        for counts in others
        if sum(counts) == num_experts
    )
    assert place.read_s == pytest.approx(fastest) and place.layers == 2
    assert sum(place.experts_N) == num_experts


def test_segments_are_neighbours() -> None:
    by_experts = plan(model(5), [DevicesConfig(1, MUCH, 3.0), DevicesConfig(2, MUCH, 1.0)])
    assert by_experts.segments() == [[[0, 1, 2], [0, 1, 2]], [[3], [3]], [[4], [4]]]
    assert (by_experts.read_s, by_experts.link_s, by_experts.device_bytes) == (200.0, 0.0, 600)


def test_layers_and_both() -> None:
    """Equal devices have equally many layers; of unlike ones the fastest have what there is room
    for.
    """
    alike = [DevicesConfig(2, MUCH, 1.0), DevicesConfig(2, MUCH, 1.0)]
    by_layers = plan(model(3, layers=5), alike, "layers")
    assert by_layers.segments() == [
        [[0, 1, 2], [], [], [], []],
        [[], [0, 1, 2], [], [], []],
        [[], [], [0, 1, 2], [], []],
        [[], [], [], [0, 1, 2], [0, 1, 2]],
    ]
    assert (by_layers.read_s, by_layers.device_bytes) == (5 * 300.0, 600)
    both = plan(model(4, layers=2), alike, "both")
    assert both.segments() == [[[0, 1], []], [[2, 3], []], [[], [0, 1]], [[], [2, 3]]]
    assert (both.read_s, both.device_bytes) == (2 * 200.0, 200)
    # 900 bytes of each: three layers of three
    unlike = [DevicesConfig(1, 1000, 1.0), DevicesConfig(1, 1000, 4.0)]
    layers = plan(model(3, layers=4), unlike, "layers")
    assert [(place.layers, place.experts_N) for place in layers.places] == [
        (1, (3, 0)),
        (3, (0, 3)),
    ]


def test_layers_of_devices_are_a_file_with_shared_rows(tmp_path: Path) -> None:
    """What is planned has as many slots as the plan says, also where groups have unequally many
    layers.
    """
    machines = [DevicesConfig(2, 1400, 3.0), DevicesConfig(2, MUCH, 1.0)]
    for by in ("experts", "layers", "both"):
        planned = plan(model(5, 100, layers=3), machines, by)  # type: ignore[arg-type]
        (tmp_path / "segments.json").write_text(json.dumps({"segments": planned.segments()}))
        mesh = EngineMesh(devices=4, segments=str(tmp_path / "segments.json"))
        placements = read_segments(mesh, 3, 5)
        assert placements_to_segments(placements) == planned.segments()
        assert 100 * sum(slot_rows_and_sizes(placements)[1]) + 100 == planned.device_bytes


def test_link_time_is_that_of_tokens_counted_one_by_one() -> None:
    """Two machines of two devices, two choices of four experts: all pairs of experts, of a token
    of every device.
    """
    network = NetworkConfig(10.0, 2.0, 0.5, 3.0)
    machines = [DevicesConfig(2, MUCH, 1.0), DevicesConfig(2, MUCH, 1.0)]
    for by, homes in (("experts", [{0}, {1}, {2}, {3}]), ("both", [{0, 1}, {2, 3}, set(), set()])):
        found = plan(
            model(4, layers=1, k=2), machines, by, network=network, tokens=StepTokens(4, 6)
        )  # type: ignore[arg-type]
        pairs = list(itertools.combinations(range(4), 2))
        traffic = np.zeros((4, 4))
        for source, pair in itertools.product(range(4), pairs):
            for device, experts in enumerate(homes):
                traffic[source, device] += 6 / len(pairs) if experts & set(pair) else 0
        np.fill_diagonal(traffic, 0)
        inside = max(
            block.sum(axis=a).max() for block in (traffic[:2, :2], traffic[2:, 2:]) for a in (0, 1)
        )
        between = max(traffic[:2, 2:].sum(), traffic[2:, :2].sum())
        assert found.link_s == pytest.approx(2 * (3.0 + max(inside / 10, between / 2))), by


def test_the_shortest_step_is_chosen() -> None:
    """A slow link is worth reading a layer on one device alone, to which each token is sent
    once.
    """
    machines = [DevicesConfig(2, MUCH, 1e3), DevicesConfig(2, MUCH, 1e3)]
    of = model(8, layers=2, k=4)
    assert plan(of, machines, None).by == "experts"
    for bytes_per_s, by in ((1e6, "experts"), (50.0, "layers")):
        network = NetworkConfig(1e6, bytes_per_s, 0.0, 0.0)
        chosen = plan(of, machines, None, network=network)
        steps = {
            kind: plan(of, machines, kind, network=network).step_s
            for kind in ("experts", "layers", "both")
        }
        assert chosen.by == by == min(steps, key=steps.__getitem__), steps


def test_what_fits_is_chosen() -> None:
    """One expert of a layer on each of two of four devices: the others have room for another
    layer's.
    """
    # 108 bytes of each: one expert
    machines = [DevicesConfig(2, 120, 1.0), DevicesConfig(2, 120, 1.0)]
    assert plan(model(2), machines, None).by == "both"
    with pytest.raises(ValueError, match="do not hold 2 layers of 2 experts by experts"):
        plan(model(2), machines)


def test_the_least_memory_bounds_all() -> None:
    """Every device has room for as many experts as the fullest one."""
    fast, small = DevicesConfig(1, MUCH, 100.0), DevicesConfig(2, 1000, 1.0)
    (place,) = plan(model(10, 100), [fast, small]).places  # 900 bytes - 100, two layers of 100
    assert place.experts_N == (4, 3, 3)
    message = (
        r"machines\[1\].device_bytes = 1000: has room for 8 experts beside 100 bytes on each device"
    )
    with pytest.raises(
        ValueError, match=f"{message}; 3 devices with as much do not hold 2 layers of 13 experts"
    ):
        plan(model(13, 100), [fast, small])
    with pytest.raises(ValueError, match="has room for 0 experts"):
        plan(model(1, 2000), [fast, small], None)
