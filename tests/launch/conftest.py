"""A SLURM cluster that the tests of one module share."""

from collections.abc import Iterator

import pytest

from tests.serving.conftest import model_folder as model_folder
from tests.slurm_cluster import SlurmCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster
