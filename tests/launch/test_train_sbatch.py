"""train.sbatch under programs that stand in for SLURM's: what it says where the cluster refuses."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT


@pytest.mark.parametrize("code", [75, 70])
def test_a_job_that_cannot_be_requeued_says_how_to_go_on(tmp_path: Path, code: int) -> None:
    """As where jobs must not be requeued, or no `munged` answers."""
    for name, body in (
        ("srun", f"exit {code}"),
        ("scontrol", "echo 'slurm_requeue error: not allowed' >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "jmoe", "SLURM_JOB_NODELIST": "n[0-1]"}
    job |= {"JMOE_RUN": str(tmp_path / "run"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", ROOT / "launch" / "slurm" / "train.sbatch", "tiny"],
        env=os.environ | job,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert "slurm_requeue error: not allowed" in done.stderr
    assert (
        f"cannot be requeued (see above): go on with JMOE_RUN={tmp_path}/run sbatch ..."
        in done.stdout
    )


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ("tiny", False),
        ("tiny --tiers.experts nvme", True),
        ("tiny --tiers.experts=auto", True),
        ("tiny-nvme", False),
    ],
)
def test_a_folder_for_nvme_is_passed_on_where_experts_may_lie_there(
    tmp_path: Path, options: str, passed: bool
) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $*"\n')
    (tmp_path / "srun").chmod(0o755)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "jmoe",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "JMOE_LOCAL": "/local",
    }
    job |= {"JMOE_RUN": str(tmp_path / "run"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", ROOT / "launch" / "slurm" / "train.sbatch", *options.split()]
    done = subprocess.run(
        script, env=os.environ | job, capture_output=True, text=True, timeout=60, check=True
    )
    assert ("--tiers.path /local/jmoe-7" in done.stdout) == passed
    assert f"jmoe-train {options}" in done.stdout
