"""The segments of a model over unlike machines as a file that an engine takes, and mistakes in
what describes them.
"""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.deploy.segment import segment
from jmoe.inference.loading import LoadedModel
from jmoe.offload.placed_experts import PlacedExperts
from jmoe.offload.segments import placements_to_segments
from jmoe.planning.segmentation import SegmentBy
from tests.model_configs import CHECKPOINTS
from tests.train_runs import Run

FOLDER = CHECKPOINTS / "mixtral"
MACHINES = """
[[machines]]
devices = 1
device_bytes = 1e9
bytes_per_s = 3e12
[[machines]]
devices = 1
device_bytes = 1e9
bytes_per_s = 1e12
"""


def described(tmp_path: Path, text: str = MACHINES) -> Path:
    (tmp_path / "machines.toml").write_text(text)
    return tmp_path / "machines.toml"


def test_an_engine_takes_them(tmp_path: Path, run_python: Run) -> None:
    out = tmp_path / "segments.json"
    command = ["-m", "jmoe.deploy.segment", FOLDER, "--machines", described(tmp_path), "--out", out]
    done = run_python([*command, "--max-seq-len", "40", "--dtype", "float32"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"2 layers with 3, 1 experts on the devices\n{out}: by experts, ")
    segments = json.loads(out.read_text())["segments"]
    assert segments == [[[0, 1, 2]] * 2, [[3]] * 2]
    options: dict[str, Any] = {"max_batch": 2, "max_seq_len": 40, "dtype": "float32"}
    with LoadedModel(
        FOLDER, EngineConfig(**options, mesh=EngineMesh(devices=2, segments=str(out)))
    ) as model:
        experts = model.runner.residency
        assert (
            isinstance(experts, PlacedExperts)
            and placements_to_segments(experts.placements) == segments
        )
    again = run_python(command)
    assert again.returncode == 1
    assert (
        again.stderr == f"segment: out = '{out}': must not be there yet: nothing is written over\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "must be TOML"),
        ("", "machines = None: must be tables, [[machines]]"),
        ("machines = 3", "machines = 3: must be tables, [[machines]]"),
        ("[cluster]", "cluster = {}: is neither machines nor network"),
        (MACHINES.replace("3e12", "0"), "machines[0].bytes_per_s = 0.0: must be greater than 0"),
        (MACHINES.replace("devices = 1\n", "", 1), "machines[0].devices: is missing"),
        (
            MACHINES + "speed = 1",
            "machines[1].speed = 1: is none of devices, device_bytes, bytes_per_s",
        ),
        (MACHINES + "[network]", "network.inside_bytes_per_s: is missing"),
        ("network = 3\n" + MACHINES, "network = 3: must be a table, [network]"),
        (MACHINES[: len(MACHINES) // 2], "has one device: must have several"),
        (
            MACHINES.replace("1e9", "50_000", 1),
            "machines[0].device_bytes = 50000: has room for 0 experts",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        segment(FOLDER, described(tmp_path, text), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_as_asked_for(tmp_path: Path) -> None:
    """The engine's file has each layer on one device; by itself the command takes what has the
    shortest step.
    """
    network = (
        "[network]\ninside_bytes_per_s = 1e12\nbetween_bytes_per_s = 1e13\nbetween_latency_s = 0\n"
    )
    machines = described(tmp_path, MACHINES + network)
    options = {"max_seq_len": 40, "dtype": "float32"}
    asked = {
        by: segment(FOLDER, machines, tmp_path / by, by, **options) for by in get_args(SegmentBy)
    }
    # the faster one
    assert json.loads((tmp_path / "layers").read_text())["segments"] == [
        [[0, 1, 2, 3]] * 2,
        [[]] * 2,
    ]
    assert asked["layers"].read_s > asked["experts"].read_s and asked["layers"].link_s > 0
    assert asked["layers"].device_bytes > asked["experts"].device_bytes
    chosen = segment(FOLDER, machines, tmp_path / "chosen", **options)
    assert chosen.step_s == min(plan.step_s for plan in asked.values()) and chosen.by == "experts"


def test_options_are_the_engine_s(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_batch = 3: must be a multiple of mesh.devices = 2"):
        segment(FOLDER, described(tmp_path), tmp_path / "out", max_batch=3)
    with pytest.raises(
        ValueError, match=r"out = '.*none/out': must be in a folder, which .*none is not"
    ):
        segment(FOLDER, described(tmp_path), tmp_path / "none" / "out")
    with pytest.raises(ValueError, match=r"machines = '.*nothing': No such file"):
        segment(FOLDER, tmp_path / "nothing", tmp_path / "out")
