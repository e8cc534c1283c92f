"""A training step of ufo-17b is compiled for 32 devices that are not here, in the bytes that the
plan says.
"""

import json
import subprocess
from collections.abc import Callable

import pytest

from jmoe.configs.ufo import ufo_17b

pytestmark = pytest.mark.slow
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_step_of_ufo_17b_has_the_planned_bytes(run_python: Run) -> None:
    done = run_python(["benchmarks/train/super_network_aot.py"], timeout=900)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["devices"] == 32 and row["experts_a_layer_and_device"] == 2  # forty tasks
    assert row["state_bytes"] == pytest.approx(row["planned_state_bytes"], rel=0.005)
    whole = 12 * ufo_17b.model.total_and_active_parameters()[0]
    assert row["state_bytes"] < whole / 16
    assert row["planned_state_bytes"] < row["planned_bytes"] < 2 * row["planned_state_bytes"]
    assert f"{row['planned_bytes'] / 1e9:,.2f} GB in all" in done.stderr
    assert row["state_bytes"] + row["temporary_bytes"] < 80e9


def test_a_number_of_devices_that_no_nodes_have_is_refused(run_python: Run) -> None:
    done = run_python(["benchmarks/train/super_network_aot.py", "--devices", "12"])
    assert done.returncode == 2 and "--devices = 12: must be a multiple of 8" in done.stderr
