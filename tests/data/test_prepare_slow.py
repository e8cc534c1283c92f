"""Preparation over a Ray cluster whose workers, nodes and head are killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prepared_shards import files_of, run
from text_corpus import REPOSITORY

from jmoe.data.work_units import UNITS
from tests.chat_models import write_chat_tokenizer, write_jsonl
from tests.ray_clusters import SETTINGS, kill_worker, ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
SEED = int(os.environ.get("PREPARE_SEED", "1"))
ROUNDS = int(os.environ.get("PREPARE_ROUNDS", "2"))  # of kills, each of all three kinds
NUM_UNITS = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path | str], Path]:
    """Return (arguments that prepare a corpus, its folder prepared by one process)."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = write_chat_tokenizer(folder / "model") / "tokenizer.json"
    records = [{"text": f"[{i:05d}] " + "word déjà " * (i % 37 + 1)} for i in range(20_000)]
    path = write_jsonl(folder / "a.jsonl", records)
    unit_mb = path.stat().st_size / 1e6 / NUM_UNITS
    arguments = [path, "--tokenizer", tokenizer, "--unit-mb", str(unit_mb)]
    assert run(*arguments, "--out", folder / "expected", "--workers", 1) == 0
    return arguments, folder / "expected"


def start(arguments: list[Path | str], out: Path, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jmoe.data.prepare", *arguments, "--out", out]
    return subprocess.Popen(
        [*map(str, command), "--ray", address],
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(REPOSITORY)},
    )


def units_done(out: Path) -> int:
    return len(list((out / UNITS).glob("*.json")))


def test_workers_nodes_and_heads_are_lost(
    corpus: tuple[list[Path | str], Path], tmp_path: Path
) -> None:
    """Every kill comes at a random time after some units were done; the command is given again
    after the head is lost.
    """
    arguments, expected = corpus
    chance = random.Random(SEED)
    kills = {"worker": 0, "node": 0, "head": 0}
    for number in range(ROUNDS):
        out = tmp_path / f"shards{number}"
        with ray_cluster(3, {"PYTHONPATH": str(REPOSITORY)}) as cluster:
            program = start(arguments, out, cluster.address)
            while program.poll() is None and units_done(out) < chance.randint(1, 4):
                time.sleep(0.02)
            kills["worker"] += kill_worker(cluster, "write_unit", chance.randint(0, 2))
            before = units_done(out)
            while program.poll() is None and units_done(out) < before + 2:
                time.sleep(0.02)
            if program.poll() is None:
                cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
                kills["node"] += 1
            before = units_done(out)
            while program.poll() is None and units_done(out) < before + 2:
                time.sleep(0.02)
            if program.poll() is None:
                cluster.remove_node(cluster.head_node, allow_graceful=False)
                kills["head"] += 1
            assert (program.wait(180) == 0) == (units_done(out) == NUM_UNITS)
        with ray_cluster(1, {"PYTHONPATH": str(REPOSITORY)}) as cluster:
            assert start(arguments, out, cluster.address).wait(300) == 0
        assert files_of(out) == files_of(expected)
    print(kills)
    assert all(kills.values()), kills
