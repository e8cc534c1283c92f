"""What is wrong with a Ray cluster is named before any work begins."""

from __future__ import annotations

import operator
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jmoe.data.prepare import main
from jmoe.ray_cluster import connect, run_tasks
from tests.chat_models import write_chat_tokenizer
from tests.ray_clusters import ray_cluster

ROOT = Path(__file__).resolve().parent.parent


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = [tmp_path, "--tokenizer", tmp_path / "t.json", "--out", tmp_path / "out"]
    assert main([*map(str, arguments), "--ray", "auto"]) == 2
    assert "--ray = 'auto': needs Ray: pip install 'jmoe[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["head", "ray://head:1", "head:", ":6379", "head:x"])
def test_an_address_has_a_host_and_a_port(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(ValueError, match=r"--ray = .*must be auto, or HOST:PORT"):
        connect(address)


def test_an_address_where_nothing_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"--ray = .*no Ray head answers there"):
            connect(address)


class FakeRay:
    """A cluster whose tasks end a hundred at a time, the last ones first."""

    exceptions = SimpleNamespace(RayTaskError=RuntimeError)

    def __init__(self, cores: int) -> None:
        self.cores, self.under_way, self.most = cores, 0, 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cores}

    def remote(self, **_: object) -> Callable[[Callable[..., int]], SimpleNamespace]:
        def submit(function: Callable[..., int], common: int, argument: int) -> int:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            return function(common, argument)

        return lambda function: SimpleNamespace(remote=partial(submit, function))

    def wait(
        self, references: list[int], *, num_returns: int, timeout: float | None = None
    ) -> tuple[list[int], list[int]]:
        assert timeout is None or num_returns == len(references)
        ended = min(num_returns, 100)
        return references[-ended:], references[:-ended]

    def get(self, reference: int) -> int:
        self.under_way -= 1
        return reference


@pytest.mark.parametrize(("cores", "most"), [(8, 1000), (4096, 8192)])
def test_all_cores_of_a_large_cluster_have_a_task(cores: int, most: int) -> None:
    ray = FakeRay(cores)
    assert sorted(run_tasks(ray, operator.mul, 2, range(10_000))) == list(range(0, 20_000, 2))
    assert ray.most == most and ray.under_way == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_other_versions_are_named(tmp_path: Path) -> None:
    """Of Ray, by the connection; of jmoe, by a task on every node."""
    tokenizer = write_chat_tokenizer(tmp_path / "model") / "tokenizer.json"
    (tmp_path / "a.txt").write_text("text")
    program = (
        "import sys, ray, jmoe\n{change}\nfrom jmoe.data.prepare import main\nsys.exit(main())"
    )
    with ray_cluster(1, {"PYTHONPATH": str(ROOT)}) as cluster:
        arguments = [tmp_path / "a.txt", "--tokenizer", tokenizer, "--ray", cluster.address]
        for change, words in [
            ("ray.__version__ = '1.0'", "Version mismatch"),
            ("jmoe.__version__ = '9.9'", "has jmoe = 0.1.0, this machine 9.9"),
        ]:
            code = program.format(change=change)
            command = [sys.executable, "-c", code, *map(str, arguments), "--out", tmp_path / "out"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            assert done.returncode == 2, done.stderr
            assert words in done.stderr
    assert not list((tmp_path / "out").glob("train-*"))
