"""What is measured between devices, and where it is not."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from jmoe.config import CommConfig, TrainConfig
from jmoe.config.cluster import read_links
from jmoe.training import bandwidth
from jmoe.training.bandwidth import links_of, measured_chunk_bytes, measured_links
from jmoe.training.trainer import make_trainer
from tests.model_configs import MODEL, mesh_of, spread_over

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
    model=dataclasses.replace(MODEL, num_experts_per_tok=1), batch_size=8, sequence_length=16, output_dir="nowhere"
)


@pytest.fixture
def links(tmp_path: Path) -> str:
    (tmp_path / "links.toml").write_text(LINKS)
    return str(tmp_path / "links.toml")


def test_measured_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 1 << 18)
    found = measured_links(mesh_of(2, 2, 2))
    for link in (found.inside, found.rail, found.leaf, found.spine):
        assert 0 < link.bytes_per_s < math.inf and link.latency_s > 0
    assert found.message_s >= 0 and found.nodes_per_leaf == 0


@pytest.mark.parametrize("rate", [3e6, 1e9])
def test_neither_buffers_nor_busy_cores_decide_a_rate(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch takes the first 8 KiB at once, and now and then a process waits 4 ms for its turn."""
    turns = itertools.cycle([0.0, 4e-3, 1e-3])

    def seconds(mesh: Any, move: Any, size: int) -> float:
        return 1e-4 + next(turns) + max(0, 4 * size - 8192) / rate

    monkeypatch.setattr(bandwidth, "_seconds", seconds)
    found = bandwidth.measured_links(mesh_of(1, 2, 2))
    for link in (found.inside, found.rail, found.leaf):
        assert rate / 1.5 < link.bytes_per_s < rate * 1.5


def test_a_run_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of several processes: the first start writes a file, the next one reads it; a damaged one is replaced."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(bandwidth, "multihost_utils", Alone)
    monkeypatch.setattr(bandwidth, "MOST_BYTES", 1 << 12)
    config, mesh = dataclasses.replace(CONFIG, output_dir=str(tmp_path)), mesh_of(1, 2, 2)
    first = links_of(config, mesh)
    (kept,) = tmp_path.iterdir()
    assert kept.name == "links-1x2x2.toml" and read_links(kept) == first
    assert first is not None
    faster = dataclasses.replace(first, message_s=1.0)
    monkeypatch.setattr("jmoe.training.bandwidth.measured_links", lambda mesh: faster)
    assert links_of(config, mesh) == first
    kept.write_text("inside = 3")
    assert links_of(config, mesh) == faster == read_links(kept)


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
    assert links_of(CONFIG, mesh) is None
    assert measured_chunk_bytes(CommConfig(), mesh) is None


def test_links_that_are_given_decide_the_exchange(links: str) -> None:
    """Top-1, of which dedup saves nothing: in two hops everything stays on its rail."""
    given = dataclasses.replace(CONFIG, comm=CommConfig(links=links))
    assert links_of(given, mesh_of(1, 2, 2)) == read_links(Path(links))
    notes = {}
    for path in ("", links):
        trainer = make_trainer(spread_over(CONFIG, 1, 4, 2, links=path), mesh_of(1, 4, 2))
        notes[path] = trainer.notes[0]
    assert notes[""].startswith("flat exchange: ")
    assert notes[links].startswith("hierarchical exchange: on these links a layer's all-to-alls take ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINKS.replace("450e9", "0"), "inside.bytes_per_s = 0.0: must be greater than 0"),
        (LINKS.replace("spine", "sky"), "sky = .*: is none of inside, rail, leaf, spine, message_s, nodes_per_leaf"),
        (LINKS.replace("rail", "# rail"), "rail: is missing"),
        (LINKS.replace("nodes_per_leaf = 4", "nodes_per_leaf = -1"), "nodes_per_leaf = -1: must not be negative"),
    ],
)
def test_links_that_are_refused(links: str, text: str, words: str) -> None:
    Path(links).write_text(text)
    with pytest.raises(ValueError, match=rf"comm.links = .*links.toml': {words}"):
        links_of(dataclasses.replace(CONFIG, comm=CommConfig(links=links)), mesh_of(1, 2, 2))


@pytest.mark.parametrize(
    ("comm", "words"),
    [
        ({"exchange": "flat", "links": "a.toml"}, "links = 'a.toml': must be empty with exchange = 'flat'"),
        ({"links": "nowhere.toml"}, "comm.links = 'nowhere.toml': No such file"),
    ],
)
def test_links_without_use(comm: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        links_of(dataclasses.replace(CONFIG, comm=CommConfig(**comm)), mesh_of(1, 2, 2))
