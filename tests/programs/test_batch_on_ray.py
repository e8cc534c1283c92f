"""How requests are dealt to engines of a cluster, with engines that are lost at random. The
cluster is simulated; `tests/serving/test_batch_on_ray_slow.py` kills real ones.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from jmoe.command_line import BatchOptions
from jmoe.config.engine import EngineConfig
from jmoe.config.serving import ServeConfig
from jmoe.programs import batch_on_ray
from jmoe.programs.batch_on_ray import ClusterBatch, describe_node
from jmoe.ray_cluster import ActorLostError
from jmoe.serving.batch import EngineFailedError
from jmoe.serving.batch_files import AnswersFile, BatchRequest, read_request_keys, read_requests

ROOM, ENGINES = 3, 4


class Actor:
    """An engine of the simulated cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.lost, self.under_way = cluster, False, 0
        self.open, self.answer = self.call_of("open"), self.call_of("answer")

    def call_of(self, name: str) -> Any:
        def remote(*arguments: Any) -> object:
            self.under_way += name == "answer"
            assert self.under_way <= ROOM
            call = object()
            self.cluster.calls[call] = self, *arguments
            return call

        return type(name, (), {"remote": staticmethod(remote)})


class Cluster:
    """A cluster whose engines end calls in random order, and are lost with probability `loss`."""

    def __init__(self, seed: int, loss: float) -> None:
        self.chance, self.loss = random.Random(seed), loss
        self.calls: dict[Any, tuple[Any, ...]] = {}
        self.actors: list[Actor] = []
        self.lost = 0

    def start_actor(self, ray: Any, kind: type, *arguments: Any, gpus: int) -> Actor:
        self.actors.append(Actor(self))
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        actor.lost = True

    def wait_for_one(self, ray: Any, calls: Iterable[Any], timeout_s: float) -> Any:
        waiting = list(calls)
        assert waiting, "nothing is under way, and answers are missing"
        assert all(not self.calls[call][0].lost for call in waiting)
        return self.chance.choice(waiting)

    def actor_result(self, ray: Any, call: Any) -> Any:
        actor, *request = self.calls.pop(call)
        if self.chance.random() < self.loss:
            self.lost += 1
            raise ActorLostError("killed")
        if not request:
            return ROOM
        actor.under_way -= 1
        answer = {"status_code": 200, "body": {"usage": {"completion_tokens": 2}}}
        return {
            "id": f"batch_req_{request[0].line}",
            "custom_id": request[0].custom_id,
            "response": answer,
        }


@pytest.fixture
def answer_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Cluster, list[str], list[str]]]:
    """`answer_all(seed, loss)`: (the cluster, custom ids of the answers, lines of progress)."""

    def run(seed: int, loss: float) -> tuple[Cluster, list[str], list[str]]:
        cluster = Cluster(seed, loss)
        monkeypatch.setattr(batch_on_ray, "connect", lambda address: cluster)
        monkeypatch.setattr(batch_on_ray, "check_same_everywhere", lambda *arguments: None)
        monkeypatch.setattr(batch_on_ray, "has_gpus", lambda ray: False)
        monkeypatch.setattr(batch_on_ray, "count_places", lambda ray, gpus: ENGINES)
        for name in ("start_actor", "wait_for_one", "actor_result"):
            monkeypatch.setattr(batch_on_ray, name, getattr(cluster, name))
        asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        path, out = tmp_path / "in.jsonl", tmp_path / f"out{seed}.jsonl"
        path.write_text("\n".join(json.dumps({**asked, "custom_id": f"r{i}"}) for i in range(100)))
        said: list[str] = []
        with AnswersFile(out, path, read_request_keys(path)) as answers:
            requests: list[BatchRequest] = list(read_requests(path))
            batch = ClusterBatch(ServeConfig(str(tmp_path)), "auto", None)
            batch.run(requests, len(requests), answers, said.append)
        return cluster, [json.loads(s)["custom_id"] for s in out.read_text().splitlines()], said

    return run


@pytest.mark.parametrize("seed", range(5))
def test_each_request_has_one_answer_whatever_is_lost(
    answer_all: Callable[..., tuple[Cluster, list[str], list[str]]], seed: int
) -> None:
    cluster, answered, said = answer_all(seed, 0.1)
    assert Counter(answered) == Counter(f"r{i}" for i in range(100))
    assert cluster.lost > 2
    assert len(cluster.actors) == ENGINES + cluster.lost
    assert all(actor.lost for actor in cluster.actors)  # ended with the batch
    assert "100 of 100 requests answered" in said[-1]
    assert said[-1].endswith(" tokens/s")


def test_engines_that_are_always_lost_end_the_batch(
    answer_all: Callable[..., tuple[Cluster, list[str], list[str]]],
) -> None:
    with pytest.raises(EngineFailedError, match="13 engines were lost without an answer: killed"):
        answer_all(0, 1.0)


def test_the_number_of_engines_needs_a_cluster() -> None:
    with pytest.raises(ValueError, match=r"ray_engines = 2: must be positive, and needs --ray"):
        BatchOptions("in", "out", "model", ray_engines=2)
    assert BatchOptions("in", "out", "model", ray="auto", ray_engines=2).ray_engines == 2


def test_what_must_be_the_same_on_every_node(tmp_path: Path) -> None:
    """A model of one file is compared too, and every adapter's folder, by content."""
    model, adapter = tmp_path / "model.gguf", tmp_path / "adapter"
    missing = describe_node(str(model), [str(adapter)])
    assert "nothing" in missing.values()
    adapter.mkdir()
    for changed in (model, adapter / "adapter_model.safetensors"):
        for content in (b"x", b"y"):
            before = describe_node(str(model), [str(adapter)])
            changed.write_bytes(content)
            assert describe_node(str(model), [str(adapter)]) != before


def test_engines_elsewhere_get_absolute_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch_on_ray, "connect", lambda address: None)
    monkeypatch.setattr(batch_on_ray, "check_same_everywhere", lambda *args: asked.extend(args))
    monkeypatch.setattr(batch_on_ray, "has_gpus", lambda ray: False)
    config = ServeConfig("model", engine=EngineConfig(lora=("a=b/c",)))
    ClusterBatch(config, "auto", 1)
    assert asked[-2:] == [str(tmp_path / "model"), [str(tmp_path / "b/c")]]
