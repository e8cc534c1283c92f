"""The benchmark of the path to a deployed model: losses by programs and over HTTP are those of
the model itself.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.deployed import ROOT, lowered_model_loss, running_server, served_loss
from benchmarks.paper import deploy_path
from benchmarks.paper.deploy_path import (
    ALONE,
    DISTILLED,
    HALF,
    LONGER,
    LONGER_HALF,
    WHOLE,
    draw,
    ratios,
)
from jmoe.config.engine import EngineConfig
from jmoe.deploy.layerwise import mean_loss
from jmoe.deploy.lower import lower
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from tests.deploy.gpt_moe_models import write_model
from tests.deploy.test_prune import write_tokenizer
from tests.train_runs import Run

WINDOWS = np.random.default_rng(0).integers(1, 28, (3, 13)).astype(np.int32)


@pytest.mark.slow
def test_losses_of_what_is_deployed(tmp_path: Path) -> None:
    """Of a model lowered with room for two of three windows, and served on two devices."""
    write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    with LazyCheckpoint(tmp_path / "model", "float32", "wide") as checkpoint:
        expected = mean_loss(checkpoint, WINDOWS)
    options = EngineConfig(max_batch=2, max_seq_len=24, prefill_chunk_tokens=8, native="off")
    lower(tmp_path / "model", tmp_path / "lowered", options, lambda _: None)
    assert lowered_model_loss(tmp_path / "lowered", WINDOWS) == pytest.approx(expected, abs=1e-4)
    serve = (sys.executable, ROOT / "serve.py", tmp_path / "model", "--devices", 2)
    sizes = ("--max-batch", 2, "--max-seq-len", 24, "--dtype", "float32")
    with running_server((*serve, *sizes), tmp_path, 1, tmp_path / "log") as url:
        assert served_loss(url, WINDOWS) == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_path_of_a_model_with_few_positions(run_python: Run, tmp_path: Path) -> None:
    """Preset tiny has room for 256 tokens, the default of a sequence; a server wants one of them
    for output.
    """
    steps = ("--steps", "2", "--student-steps", "1", "--batch-size", "2")
    tokens = ("--unseen-tokens", "1100", "--calibration-tokens", "2048")
    command = (
        "benchmarks/paper/deploy_path.py",
        "--folder",
        tmp_path,
        "--path-only",
        *steps,
        *tokens,
    )
    done = run_python(command, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["unseen_tokens"] == 4 * 254
    stages_agree(result["stages"])


def test_no_file_is_learned_from_and_measured_on(tmp_path: Path) -> None:
    """A sixteenth or so of the standard library is left out, the same files each time."""
    learned, unseen = deploy_path.split_text(tmp_path)
    files = [{path.name for path in folder.iterdir()} for folder in (learned, unseen)]
    assert not files[0] & files[1]
    assert 0.02 < len(files[1]) / len(files[0]) < 0.12


def test_ratios() -> None:
    """The student against pruning: of the model it learned from, and of one that learned for as
    many steps more.
    """
    bits = {WHOLE: 2.0, DISTILLED: 1.9, HALF: 2.4, LONGER: 1.8, LONGER_HALF: 2.3, ALONE: 1.925}
    assert ratios([{"stage": stage, "bits_per_byte": value} for stage, value in bits.items()]) == {
        "distilled_over_pruned": -0.25,
        "distilled_over_pruned_after_as_many_steps": 0.2,
        "teacher_gains_bits": 0.025,
    }


def test_the_committed_figures() -> None:
    """The ratios are those of the rows; a stage after the compression loses nothing."""
    result = json.loads(
        (ROOT / "benchmarks" / "results" / "deploy_path_served_small_cpu.json").read_text()
    )
    rows = result["stages"]
    found = ratios(rows)
    assert found == {name: result[name] for name in found}
    stages_agree(rows)


def stages_agree(rows: list[dict[str, Any]]) -> None:
    """What comes after the compression has the same loss."""
    path = [row for row in rows if row["path"]]
    assert [row["stage"].partition(",")[0] for row in path][3:] == [
        "compressed to mxfp4",
        "lowered",
        "segmented",
        "bundled",
        "served by 2 processes",
    ]
    assert max(abs(row["bits_per_byte"] - path[3]["bits_per_byte"]) for row in path[3:]) < 0.002


def test_the_picture(tmp_path: Path) -> None:
    rows = [
        {"stage": stage, "experts": 8, "path": stage == WHOLE, "mb": mb, "bits_per_byte": 2.0}
        for stage, mb in ((WHOLE, 100.0), (LONGER, 1.5))
    ]
    draw(rows, tmp_path / "path.png")
    assert (tmp_path / "path.png").read_bytes().startswith(b"\x89PNG")
