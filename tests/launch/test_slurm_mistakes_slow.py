"""What a real SLURM of two nodes says of jobs that cannot begin: too many nodes, no munge, clocks
that differ.

No job of these starts.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.slurm_cluster import DIE_WITH_PARENT, SlurmCluster, why_not

SCRIPT = str(ROOT / "launch" / "slurm" / "train.sbatch")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(params=["stopped", "killed"])
def without_munge(cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """The cluster while its `munged` is not there; stopped: its socket is gone too."""
    cluster.kill("munged")
    if request.param == "stopped":
        (cluster.folder / "munge.socket").unlink()
    yield cluster
    cluster.start_munge()


def test_more_nodes_than_there_are(cluster: SlurmCluster, tmp_path: Path) -> None:
    """SLURM takes the job, as nodes may be added, and says in `squeue` what it waits for."""
    tried = cluster.run("sbatch", "--test-only", "--nodes=3", SCRIPT, "tiny")
    assert tried.returncode == 1 and "Requested node configuration is not available" in tried.stderr
    number = cluster.submit(tmp_path / "log", "--nodes=3", SCRIPT, "tiny", changes={})
    cluster.wait_until(lambda: cluster.job(number)["Reason"] == "PartitionNodeLimit")
    assert cluster.job(number)["JobState"] == "PENDING"
    assert "(PartitionNodeLimit)" in cluster.call("squeue", f"--job={number}")
    cluster.call("scancel", str(number))
    with (cluster.folder / "slurm.conf").open("a") as config:
        config.write("EnforcePartLimits=ALL\n")
    cluster.call("scontrol", "reconfigure")
    cluster.wait_until(
        lambda: "EnforcePartLimits       = ALL" in cluster.call("scontrol", "show", "config")
    )
    refused = cluster.run("sbatch", "--nodes=3", SCRIPT, "tiny")
    assert refused.returncode == 1 and "Node count specification invalid" in refused.stderr


def test_more_devices_than_a_node_has(cluster: SlurmCluster) -> None:
    refused = cluster.run("sbatch", "--gpus-per-node=8", SCRIPT, "tiny")
    assert (
        refused.returncode == 1
        and "Invalid generic resource (gres) specification" in refused.stderr
    )


def test_no_munge(without_munge: SlurmCluster) -> None:
    refused = without_munge.run("sbatch", SCRIPT, "tiny")
    assert refused.returncode == 1
    assert "If munged is up, restart with" in refused.stderr
    assert f"{without_munge.folder}/munge.socket" in refused.stderr


@pytest.mark.skipif(
    shutil.which("faketime") is None, reason="faketime: not installed (apt-get install faketime)"
)
@pytest.mark.parametrize(("clock", "word"), [("+1h", "Rewound"), ("-1h", "Expired")])
def test_clocks_that_differ(cluster: SlurmCluster, clock: str, word: str) -> None:
    """A host whose clock is an hour ahead, or behind, submits a job."""
    name = f"munge{clock}"
    # which waits for a child of its own
    cluster.start_munge(name, "faketime", "-f", clock, *DIE_WITH_PARENT)
    config = cluster.folder / f"{name}.conf"
    config.write_text(
        (cluster.folder / "slurm.conf").read_text().replace("munge.socket", f"{name}.socket")
    )
    refused = cluster.run("sbatch", SCRIPT, "tiny", changes={"SLURM_CONF": str(config)})
    assert refused.returncode == 1 and "Batch job submission failed" in refused.stderr
    log = (cluster.folder / "slurmctld.log").read_text()
    assert (
        f"Munge decode failed: {word} credential" in log and "Check for out of sync clocks" in log
    )
