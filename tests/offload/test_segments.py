"""Plans that say where experts are: read as placements and written again; every mistake named
with its place.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.loading import LoadedModel, open_checkpoint
from jmoe.offload.placed_experts import PlacedExperts, even_placement
from jmoe.offload.segments import placements_to_segments, read_segments
from tests.model_configs import CHECKPOINTS

# Of 2 devices, 2 layers and 3 experts; one of them has two places in a layer.
SEGMENTS = [[[0, 1], [2]], [[2], [1, 0, 2]]]


def mesh(tmp_path: Path, segments: Any, **changes: Any) -> EngineMesh:
    file = tmp_path / "segments.json"
    file.write_text(segments if isinstance(segments, str) else json.dumps({"segments": segments}))
    return EngineMesh(**{"devices": 2, "segments": str(file)} | changes)


def test_placements_and_back(tmp_path: Path) -> None:
    first, second = read_segments(mesh(tmp_path, SEGMENTS), 2, 3)
    assert first.physical_to_logical.tolist() == [[0, 1], [2, -1]]
    assert second.physical_to_logical.tolist() == [[2, -1, -1], [1, 0, 2]]
    physical = second.replica_of_tokens(np.arange(256), np.full(256, 2))
    assert set(physical.tolist()) == {0, 5}  # both take tokens of expert 2
    assert placements_to_segments([first, second]) == SEGMENTS
    roomy = read_segments(mesh(tmp_path, SEGMENTS, slots_per_device=4), 2, 3)
    assert [placement.slots_per_device for placement in roomy] == [4, 4] and placements_to_segments(
        roomy
    ) == SEGMENTS
    layers = read_segments(mesh(tmp_path, [[[0, 1, 2], []], [[], [1, 0, 2]]]), 2, 3)
    assert [one.physical_to_logical.tolist() for one in layers] == [
        [[0, 1, 2], [-1] * 3],
        [[-1] * 3, [1, 0, 2]],
    ]
    assert placements_to_segments([even_placement(3, 2)]) == [[[0, 1]], [[2]]]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ("[", "must be a JSON object with segments"),
        ("[]", "must be a JSON object with segments"),
        ('{"other": 1}', "must be a JSON object with segments"),
        ({}, "segments must be a list, one entry a device"),
        ([[]], "has 1 devices: must have mesh.devices = 2"),
        ([SEGMENTS[0], [[1]]], "device 1: must be a list of 2 lists, one a layer with experts"),
        ([SEGMENTS[0], [[1], 2]], "device 1, layer 1: must be a list of experts"),
        ([SEGMENTS[0], [[3], [1]]], "device 1, layer 0: expert 3 must be an integer from 0 to 2"),
        (
            [SEGMENTS[0], [[True], [1]]],
            "device 1, layer 0: expert True must be an integer from 0 to 2",
        ),
        ([SEGMENTS[0], [[2], [1, 1]]], "device 1, layer 1: expert 1 must be there once"),
        ([SEGMENTS[0], [[2], [1]]], "layer 1: expert 0 must be on a device"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, segments: Any, message: str) -> None:
    asked = mesh(tmp_path, segments)
    with pytest.raises(
        ValueError, match=re.escape(f"mesh.segments = {asked.segments!r}: {message}")
    ):
        read_segments(asked, 2, 3)


def test_what_segments_exclude(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"mesh.segments = 'nowhere': cannot be read: No such file"
    ):
        read_segments(EngineMesh(devices=2, segments="nowhere"), 2, 3)
    with pytest.raises(ValueError, match=r"segments = 'file': needs mesh.devices above 1"):
        EngineMesh(segments="file")
    with pytest.raises(ValueError, match="segments = 'file': must be None with placement = 'lina'"):
        EngineMesh(devices=2, placement="lina", segments="file")
    with pytest.raises(
        ValueError, match=r"mesh.segments = 'file': must be None with policy = 'ring'"
    ):
        EngineConfig(policy="ring", mesh=EngineMesh(devices=2, segments="file"))
    with pytest.raises(
        ValueError, match=r"expert_tier = 'nvme': experts stay on their devices .*segments = 'file'"
    ):
        EngineConfig(expert_tier="nvme", mesh=EngineMesh(devices=2, segments="file"))
    assert not EngineConfig(mesh=EngineMesh(devices=2, segments="file")).mesh_allows_streaming


# Of 2 devices, 2 layers and 4 experts: experts of each layer on both, and each layer on one of
# them.
BY_EXPERTS = [[[0, 1, 2], [2]], [[3], [1, 0, 3, 2]]]
BY_LAYERS = [[[], [3, 0, 1, 2]], [[0, 1, 2, 3], []]]


@pytest.mark.parametrize(("segments", "slots"), [(BY_EXPERTS, 3 + 4), (BY_LAYERS, 4)])
def test_a_model_is_loaded_so(segments: Any, slots: int, tmp_path: Path) -> None:
    """Every expert's weights are where the file says, and layers on different devices share
    room.
    """
    folder = CHECKPOINTS / "mixtral"
    options = EngineConfig(
        max_batch=2, max_seq_len=40, dtype="float32", mesh=mesh(tmp_path, segments)
    )
    with LoadedModel(folder, options) as model, open_checkpoint(folder, options) as checkpoint:
        experts = model.runner.residency
        assert isinstance(experts, PlacedExperts)
        assert placements_to_segments(experts.placements) == segments
        assert model.memory.expert_slots == experts.num_slots == slots
        held = [
            (layer, e)
            for layers in segments
            for layer, experts_n in enumerate(layers)
            for e in experts_n
        ]
        assert sorted(place for place in experts.occupancy() if place is not None) == sorted(held)
        for layer, placement in enumerate(experts.placements):
            w_up = np.asarray(experts.layer_weights(layer)["w_up"])
            for slot, expert in enumerate(placement.physical_to_logical.ravel().tolist()):
                if expert >= 0:
                    np.testing.assert_array_equal(
                        w_up[slot], checkpoint.read_expert_array("w_up", layer, expert)
                    )
