"""What is measured between devices, and where it is not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jmoe.config import CommConfig, TrainConfig
from jmoe.config.cluster import LinksConfig, read_links
from jmoe.training import bandwidth
from jmoe.training.bandwidth import measure_chunk_bytes, measure_links, read_or_measure_links
from jmoe.training.trainer import make_trainer
from tests.model_configs import MODEL, mesh_of, spread_over
from tests.train_runs import Run, free_port

# What stays on its rail is soon there.
LINKS = """
message_s = 5e-7
nodes_per_leaf = 4
inside = {bytes_per_s = 450e9, latency_s = 1e-6}
rail = {bytes_per_s = 50e9, latency_s = 2e-5}
leaf = {bytes_per_s = 25e9, latency_s = 2e-4}
spine = {bytes_per_s = 25e9, latency_s = 3e-4}
"""
CONFIG = TrainConfig(
    model=dataclasses.replace(MODEL, num_experts_per_tok=1),
    batch_size=8,
    sequence_length=16,
    output_dir="nowhere",
)

# FOLDER ADDRESS RANK: one of two nodes with two devices each, with an output folder of its own. It
# writes what it measured, and what a second start finds, which must not measure.
WORKER = """
import dataclasses, json, sys
from pathlib import Path
from jmoe.config import DistributedConfig
from jmoe.cluster.distributed import join_processes
from jmoe.training import bandwidth

folder, address, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
join_processes(DistributedConfig(coordinator_address=address, num_processes=2, process_id=rank))
from tests.model_configs import mesh_of
from tests.training.test_bandwidth import CONFIG

bandwidth.MOST_BYTES = 1 << 20
config, mesh = dataclasses.replace(CONFIG, output_dir=f"{folder}/{rank}"), mesh_of(1, 2, 2)
first = bandwidth.read_or_measure_links(config, mesh)
bandwidth.measure_links = None
found = [dataclasses.asdict(links) for links in (first, bandwidth.read_or_measure_links(config, mesh))]
Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
"""
# Starts a command with a rank behind it twice: here, and on two nodes with a slow link between
# them, in namespaces that need no root where a user may have some.
HERE = """
"$@" 0 & "$@" 1 && wait $!
"""
SLOW = "root tbf rate 100mbit burst 128kb limit 64mb"
ON_NODES = f"""
node='
  until ip addr add 10.0.0.1$0/24 dev node$0; do sleep 0.02; done 2>/dev/null
  ip link set lo up && ip link set node$0 up && echo "10.0.0.1$0 $(hostname)" >$1/hosts-$0 &&
  mount --bind $1/hosts-$0 /etc/hosts && tc qdisc add dev node$0 {SLOW} && shift && exec "$@" $0
'
ip link add node0 type veth peer name node1 || exit 1
for rank in 0 1; do
  unshare -nm sh -c "$node" $rank FOLDER "$@" &
  pids="$pids $!"
  while ip link show node$rank; do ip link set node$rank netns $!; sleep 0.02; done >/dev/null 2>&1
done
for pid in $pids; do wait $pid || exit 1; done
"""
TRIED = (
    f"ip link add node0 type veth peer name node1 && tc qdisc add dev node0 {SLOW} && mount --bind"
    " /etc /etc"
)
LIMIT = 12.5e6  # bytes a second that go each way from node to node
EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def links(tmp_path: Path) -> str:
    (tmp_path / "links.toml").write_text(LINKS)
    return str(tmp_path / "links.toml")


def test_measure_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 1 << 18)
    found = measure_links(mesh_of(2, 2, 2))
    for link in (found.inside, found.rail, found.leaf, found.spine):
        assert 0 < link.bytes_per_s < math.inf and link.latency_s > 0
    assert found.message_s >= 0 and found.nodes_per_leaf == 0


@pytest.mark.parametrize("rate", [3e6, 1e9])
def test_neither_buffers_nor_busy_cores_decide_a_rate(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch takes the first 8 KiB at once, and now and then a process waits 4 ms for its
    turn.
    """
    turns = itertools.cycle([0.0, 4e-3, 1e-3])

    def seconds(mesh: Any, move: Any, size: int) -> float:
        return 1e-4 + next(turns) + max(0, 4 * size - 8192) / rate

    monkeypatch.setattr(bandwidth, "_time_collective_s", seconds)
    found = bandwidth.measure_links(mesh_of(1, 2, 2))
    for link in (found.inside, found.rail, found.leaf):
        assert rate / 1.5 < link.bytes_per_s < rate * 1.5


def test_a_run_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of several processes: the first start writes a file, the next one reads it; a
    damaged one is replaced.
    """
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(bandwidth, "multihost_utils", Alone)
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 1 << 12)
    config, mesh = dataclasses.replace(CONFIG, output_dir=str(tmp_path)), mesh_of(1, 2, 2)
    first = read_or_measure_links(config, mesh)
    (kept,) = tmp_path.iterdir()
    assert kept.name == "links-1x2x2.toml" and read_links(kept) == first
    assert first is not None
    faster = dataclasses.replace(first, message_s=1.0)
    monkeypatch.setattr("jmoe.training.bandwidth.measure_links", lambda mesh: faster)
    assert read_or_measure_links(config, mesh) == first
    kept.write_text("inside = 3")
    assert read_or_measure_links(config, mesh) == faster == read_links(kept)


def links_of_two_processes(run_python: Run, folder: Path, address: str, *shell: str) -> LinksConfig:
    """Return the links that both processes find and the first one keeps. shell: a shell and its
    script.
    """
    for rank in range(2):
        (folder / str(rank)).mkdir()
    worker = [sys.executable, "-c", WORKER, folder, f"{address}:{free_port()}"]
    environment = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "PYTHONWARNINGS": "error",
    }
    done = run_python(["-c", EXECUTE, *shell, "sh", *worker], environment)
    assert done.returncode == 0, done.stderr
    (first, second), others = (
        json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)
    )
    assert second == first and others == [first, first]
    (kept,) = folder.glob("*/*")
    assert kept == folder / "0" / "links-1x2x2.toml"
    links = read_links(kept)
    assert dataclasses.asdict(links) == first
    for link in (links.inside, links.rail, links.leaf, links.spine):
        assert 0 < link.bytes_per_s < math.inf and 0 < link.latency_s < math.inf
    assert 0 <= links.message_s < math.inf
    return links


def test_two_processes_find_the_same_links(run_python: Run, tmp_path: Path) -> None:
    links_of_two_processes(run_python, tmp_path, "127.0.0.1", "sh", "-c", HERE)


@pytest.mark.slow
def test_a_slow_link_between_two_nodes_is_seen(run_python: Run, tmp_path: Path) -> None:
    for program in ("unshare", "ip", "tc"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} command")
    apart = ("unshare", "-rnmp", "--kill-child", "sh", "-c")
    tried = run_python(["-c", EXECUTE, *apart, TRIED])
    if tried.returncode:
        pytest.skip(f"no networks for this user: {tried.stderr.strip()}")
    links = links_of_two_processes(
        run_python, tmp_path, "10.0.0.10", *apart, ON_NODES.replace("FOLDER", str(tmp_path))
    )
    for link in (links.rail, links.leaf):  # two devices share it
        assert (
            LIMIT / 8 < link.bytes_per_s < LIMIT and links.inside.bytes_per_s > 2 * link.bytes_per_s
        ), links


class Alone:
    """Stands for what processes tell each other, where there is one."""

    @staticmethod
    def process_allgather(value: Any) -> Any:
        return value

    @staticmethod
    def broadcast_one_to_all(value: Any) -> Any:
        return value


def test_one_process_has_no_links_to_measure() -> None:
    mesh = mesh_of(1, 2, 2)
    assert read_or_measure_links(CONFIG, mesh) is None
    assert measure_chunk_bytes(CommConfig(), mesh) is None


def test_links_that_are_given_decide_the_exchange(links: str) -> None:
    """Top-1, of which dedup saves nothing: in two hops everything stays on its rail."""
    given = dataclasses.replace(CONFIG, comm=CommConfig(links=links))
    assert read_or_measure_links(given, mesh_of(1, 2, 2)) == read_links(Path(links))
    notes = {}
    for path in ("", links):
        trainer = make_trainer(spread_over(CONFIG, 1, 4, 2, links=path), mesh_of(1, 4, 2))
        notes[path] = trainer.notes[0]
    assert notes[""].startswith("flat exchange: ")
    assert notes[links].startswith(
        "hierarchical exchange: on these links a layer's all-to-alls take "
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINKS.replace("450e9", "0"), "inside.bytes_per_s = 0.0: must be greater than 0"),
        (
            LINKS.replace("spine", "sky"),
            "sky = .*: is none of inside, rail, leaf, spine, message_s, nodes_per_leaf",
        ),
        (LINKS.replace("rail", "# rail"), "rail: is missing"),
        (
            LINKS.replace("nodes_per_leaf = 4", "nodes_per_leaf = -1"),
            "nodes_per_leaf = -1: must not be negative",
        ),
    ],
)
def test_links_that_are_refused(links: str, text: str, words: str) -> None:
    Path(links).write_text(text)
    with pytest.raises(ValueError, match=rf"comm.links = .*links.toml': {words}"):
        read_or_measure_links(
            dataclasses.replace(CONFIG, comm=CommConfig(links=links)), mesh_of(1, 2, 2)
        )


@pytest.mark.parametrize(
    ("comm", "words"),
    [
        (
            {"exchange": "flat", "links": "a.toml"},
            "links = 'a.toml': must be empty with exchange = 'flat'",
        ),
        ({"links": "nowhere.toml"}, "comm.links = 'nowhere.toml': No such file"),
    ],
)
def test_links_without_use(comm: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_or_measure_links(
            dataclasses.replace(CONFIG, comm=CommConfig(**comm)), mesh_of(1, 2, 2)
        )
