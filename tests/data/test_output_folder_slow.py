"""A corpus from an S3 server of this machine to that server, by processes and by nodes, interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prepared_shards import download, files_of, run
from text_corpus import REPOSITORY

from jmoe.data.output_folder import OutputFolder, StoredFolder
from jmoe.data.work_units import claim_folder
from tests.ray_clusters import SETTINGS, ray_cluster
from tests.train_runs import free_port

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def shards_of(files: dict[str, str]) -> dict[str, str]:
    """Return what a run reads: other files name the place of the inputs."""
    return {
        name: digest
        for name, digest in files.items()
        if name.startswith(("train-", "held_out", "manifest", "tokenizer"))
    }


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an S3 server on this machine."""
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    port = free_port()
    settings = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    server = moto.ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(f"corpus-{port}")  # a server has the buckets of earlier ones
        yield f"s3://corpus-{port}"
    finally:
        server.stop()


def upload(folder: Path, url: str) -> Any:
    s3fs = pytest.importorskip("s3fs")
    fs = s3fs.S3FileSystem()
    fs.put(f"{folder}/", url, recursive=True)
    return fs


@pytest.mark.parametrize("cluster_nodes", [0, 2])
def test_a_corpus_from_a_store_to_a_store(
    cluster_nodes: int, mixed_texts: Path, byte_tokenizer: Path, bucket: str, tmp_path: Path
) -> None:
    """By processes or by nodes, the command killed in the middle and given again."""
    fs = upload(mixed_texts, f"{bucket}/in/")
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(REPOSITORY)}
    local = tmp_path / "local"
    largest = max(path.stat().st_size for path in mixed_texts.iterdir())  # objects are not divided
    settings = ["--tokenizer", str(byte_tokenizer), "--unit-mb", str(largest / 1e6)]
    assert run(mixed_texts, *settings, "--out", local, "--workers", 1) == 0

    def prepare(*options: str) -> None:
        command = [sys.executable, "-m", "jmoe.data.prepare", f"{bucket}/in", *settings]
        command += ["--out", f"{bucket}/out", *options]
        with subprocess.Popen(command, env=environment) as program:
            deadline = time.monotonic() + 240
            while not units_of(fs, bucket) and program.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            program.send_signal(signal.SIGKILL)
        assert subprocess.run(command, env=environment, timeout=300, check=True).returncode == 0

    if cluster_nodes:
        keys = {name: environment[name] for name in environment if name.startswith("AWS_")}
        with ray_cluster(cluster_nodes, {**keys, "PYTHONPATH": str(REPOSITORY)}) as cluster:
            prepare("--ray", cluster.address)
    else:
        prepare("--workers", "2")
    assert shards_of(download(f"{bucket}/out", tmp_path / "copy")) == shards_of(files_of(local))


def units_of(fs: Any, bucket: str) -> list[str]:
    fs.invalidate_cache()
    units: list[str] = fs.find(f"{bucket}/out/units")
    return units


def test_what_is_wrong_with_a_store_is_named(
    bucket: str, byte_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Preparations that claim one folder at once take turns; a bucket that is missing is named."""
    folders: list[OutputFolder] = [StoredFolder(f"{bucket}/claimed") for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        begun = set(threads.map(lambda i: claim_folder(folders[i], "key", str(i)), range(8)))
    assert len(begun) == 1
    (tmp_path / "a.jsonl").write_text('{"text": "a text"}\n' * 99)
    arguments = [tmp_path, "--tokenizer", byte_tokenizer, "--workers", 1]
    assert run(*arguments, "--out", "s3://missing/shards") == 2
    assert "error: --out = 's3://missing/shards': " in capsys.readouterr().err
    assert run("s3://missing/in", *arguments[1:], "--out", tmp_path / "out") == 2
    assert "error: data.path = 's3://missing/in': " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
