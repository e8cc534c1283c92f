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

# a round starts two clusters, which takes minutes on a busy machine
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]
SEED = int(os.environ.get("PREPARE_SEED", "1"))
ROUNDS = int(os.environ.get("PREPARE_ROUNDS", "2"))  # of five kills each
WORKERS_KILLED = 3
NUM_UNITS = 24
LIMIT_S = 400.0


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


def start(arguments: list[Path | str], out: Path, *where: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jmoe.data.prepare", *arguments, "--out", out]
    return subprocess.Popen(
        [*map(str, command), *where],
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(REPOSITORY)},
    )


def units_done(out: Path) -> int:
    return len(list((out / UNITS).glob("*.json")))


def wait_for_units(program: subprocess.Popen[bytes], out: Path, count: int) -> None:
    """Return once so many units are done; the program must still be at work then."""
    while units_done(out) < count:
        assert program.poll() is None, f"it ended with {units_done(out)} units done"
        time.sleep(0.02)
    assert program.poll() is None, f"it ended with {units_done(out)} units done"


@pytest.mark.parametrize("number", range(ROUNDS))
def test_workers_a_node_and_the_head_are_lost(
    corpus: tuple[list[Path | str], Path], tmp_path: Path, number: int
) -> None:
    """Each kill comes at a random time, after some units were done. The command is given again after
    the head is lost, on another cluster or on one machine. One process wrote the expected shards.
    """
    arguments, expected = corpus
    chance = random.Random(SEED * 1000 + number)
    out = tmp_path / "shards"
    with ray_cluster(3, {"PYTHONPATH": str(REPOSITORY)}) as cluster:
        program = start(arguments, out, "--ray", cluster.address)
        for _ in range(WORKERS_KILLED):
            wait_for_units(program, out, units_done(out) + chance.randint(0, 2))
            while not kill_worker(cluster, "write_unit", chance.randint(0, 2)):
                assert program.poll() is None, "it ended before a worker was killed"
        wait_for_units(program, out, units_done(out) + chance.randint(1, 3))
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        wait_for_units(program, out, units_done(out) + chance.randint(1, 3))
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        if program.wait(LIMIT_S) == 0:  # it had all units before it knew that the head was lost
            assert units_done(out) == NUM_UNITS
    left = NUM_UNITS - units_done(out)
    print(f"round {number}: {WORKERS_KILLED} workers, a node, the head killed, {left} units left")
    if number % 2:
        assert start(arguments, out, "--workers", "2").wait(LIMIT_S) == 0
    else:
        with ray_cluster(1, {"PYTHONPATH": str(REPOSITORY)}) as cluster:
            assert start(arguments, out, "--ray", cluster.address).wait(LIMIT_S) == 0
    assert files_of(out) == files_of(expected)
