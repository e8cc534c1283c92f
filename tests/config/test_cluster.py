"""The file of a cluster on paper: what is wrong in it is named."""

from pathlib import Path

import pytest

from jmoe.config.cluster import ClusterConfig, read_cluster

SAMPLE = Path(__file__).resolve().parents[2] / "launch" / "clusters" / "h100.toml"
LEAST = """
nodes = [1, 2]
devices_per_node = 4
machine = {accelerator = "h100", host_bytes = 2e12, nvme_bytes = 1}
network = {inside_bytes_per_s = 1e9, between_bytes_per_s = 100}
storage = {write_bytes_per_s = 5e9}
"""


def read(folder: Path, text: str) -> ClusterConfig:
    (folder / "cluster.toml").write_text(text)
    return read_cluster(folder / "cluster.toml")


def test_the_sample_and_the_least(tmp_path: Path) -> None:
    sample = read_cluster(SAMPLE)
    assert (
        sample.nodes == (8, 16, 32, 64, 128, 256, 512, 1024)
        and sample.machine.host_bytes == 2_000_000_000_000
    )
    least = read(tmp_path, LEAST)
    assert (least.batch, least.grows, least.network.between_bytes_per_s) == ("fixed", "data", 100.0)
    assert isinstance(least.machine.host_bytes, int) and isinstance(
        least.network.between_bytes_per_s, float
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "nodes = [1, 2]",
            "nodes = [2, 1]",
            r"nodes = \(2, 1\): must be numbers of nodes, from the fewest on",
        ),
        ("nodes = [1, 2]", "nodes = []", r"nodes = \(\): must be numbers of nodes"),
        ("nodes = [1, 2]", "nodes = [1.5]", r"nodes = \[1.5\]: must be a list of whole numbers"),
        ("nodes = [1, 2]", "", "nodes: is missing"),
        (
            "devices_per_node = 4",
            "devices_per_node = 0",
            "devices_per_node = 0: must be greater than 0",
        ),
        (
            "devices_per_node = 4",
            "devices_per_node = true",
            "devices_per_node = True: must be a whole number",
        ),
        (
            "devices_per_node = 4",
            'devices_per_node = "4"',
            "devices_per_node = '4': must be a whole number",
        ),
        (
            "devices_per_node",
            "gpus = 1\ndevices_per_node",
            "gpus = 1: is none of nodes, devices_per_node, ",
        ),
        ("nodes =", 'batch = "all"\nnodes =', "batch = 'all': must be one of fixed, per_node"),
        ("nodes =", "grows = 3\nnodes =", "grows = 3: must be a text"),
        (
            "inside_bytes_per_s = 1e9",
            "inside_bytes_per_s = 0",
            "network.inside_bytes_per_s = 0.0: must be greater",
        ),
        ("inside_bytes_per_s = 1e9, ", "", "network.inside_bytes_per_s: is missing"),
        (
            "write_bytes_per_s",
            "written",
            "storage.written = 5000000000.0: is none of write_bytes_per_s",
        ),
        ('"h100"', '"h900"', "machine.accelerator = 'h900': must be one of "),
        (
            'accelerator = "h100", ',
            "",
            "machine.accelerator = '': must be given, or else device_bytes, flops",
        ),
        ("host_bytes = 2e12, ", "", "machine.host_bytes = 0: must be greater than 0"),
        (
            "storage = {write_bytes_per_s = 5e9}",
            "storage = 3",
            r"storage = 3: must be a table, \[storage\]",
        ),
        ("nodes =", "nodes", "must be TOML: "),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LEAST
    with pytest.raises(ValueError, match=rf"cluster = '{tmp_path}/cluster.toml': {message}"):
        read(tmp_path, LEAST.replace(old, new, 1))


def test_a_file_of_an_editor_that_marks_its_bytes(tmp_path: Path) -> None:
    """As Windows' editors write it: a mark of the byte order first, and other ends of lines."""
    marked = tmp_path / "marked.toml"
    marked.write_bytes(b"\xef\xbb\xbf" + LEAST.replace("\n", "\r\n").encode())
    assert read_cluster(marked) == read(tmp_path, LEAST)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"cluster = '{tmp_path}/absent.toml': No such file or directory"
    ):
        read_cluster(tmp_path / "absent.toml")
