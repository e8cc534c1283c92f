"""Replicas behind Ray Serve: chats with one prefix meet one replica, a node's replicas share one
packed copy of the experts, one is killed under load, and their number follows the load.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ray_clusters import SETTINGS, kill_worker, ray_cluster
from tests.train_runs import free_port

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S, LIMIT_S = 600.0, 120.0
SIZES = ("--max-batch", 4, "--max-seq-len", 2048, "--prefill-chunk-tokens", 32)
HEADER = "x-jmoe-replica"
# Ray Serve kills a proxy that is not ready after 10 s, and passes over a replica that does not say
# within 0.1 s how long its queue is: a busy machine needs longer
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "200",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
}


@contextlib.contextmanager
def serving(model_folder: Path, *options: object) -> Iterator[str]:
    """Yield the URL of an application on a cluster of one node with two cores."""
    port = free_port()
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **PATIENCE}
    with ray_cluster(1, settings, cores=2) as cluster:
        command = [sys.executable, ROOT / "launch/ray/serve.py", model_folder, "--ray"]
        command += [cluster.address, "--port", port, *SIZES, *options]
        environment = {**os.environ, **SETTINGS, **settings}
        with subprocess.Popen(list(map(str, command)), env=environment) as server:
            address = f"http://127.0.0.1:{port}"
            try:
                wait_until(lambda: bool(replicas_of(address)), START_LIMIT_S, server)
                yield address
            finally:
                server.kill()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the replicas of `url` pack their experts."""
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def url(model_folder: Path, experts: Path) -> Iterator[str]:
    replicas = ("--min-replicas", 2, "--max-replicas", 2)
    on_nvme = ("--policy", "experts", "--expert-tier", "nvme", "--cache-dir", experts)
    with serving(model_folder, *replicas, *on_nvme) as address:
        wait_until(lambda: len(replicas_of(address)) == 2, START_LIMIT_S)
        yield address


def wait_until(
    done: Callable[[], bool], limit_s: float, program: subprocess.Popen[bytes] | None = None
) -> None:
    """Return once `done()`; the program must run until then."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert program is None or program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(1)


def replicas_of(url: str) -> set[str]:
    """The replicas that answer twelve requests for the model's name."""
    seen = set()
    for _ in range(12):
        try:
            answer = httpx.get(f"{url}/v1/models", timeout=10)
        except httpx.TransportError:
            return set()
        if answer.status_code == 200:
            seen.add(answer.headers[HEADER])
    return seen


def prompt_tokens(url: str) -> dict[str, float]:
    """Return {replica: tokens of its prompts} of all running replicas."""
    answer = httpx.get(f"{url}/metrics", timeout=LIMIT_S)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return prompt_tokens_in(answer.text)


def prompt_tokens_in(metrics: str) -> dict[str, float]:
    return {
        sample.labels["replica"]: sample.value
        for family in text_string_to_metric_families(metrics)
        if family.name == "vllm:prompt_tokens"
        for sample in family.samples
        if sample.name == "vllm:prompt_tokens_total"
    }


def num_replicas(url: str) -> int:
    """Return the number of running replicas; 0 if one does not say its metrics in time."""
    answer = httpx.get(f"{url}/metrics", timeout=LIMIT_S)
    assert answer.status_code in (200, 503), answer.text
    return len(prompt_tokens_in(answer.text)) if answer.status_code == 200 else 0


def readers_of(folder: Path) -> dict[str, set[int]]:
    """Return {file of records, also a deleted one: processes of replicas that have it open}."""
    readers: dict[str, set[int]] = {}
    for process in psutil.process_iter(["cmdline"]):
        if "ServeReplica:jmoe:Replica" not in " ".join(process.info["cmdline"] or []):
            continue
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(link)
                if target.startswith(f"{folder}/") and "/records-" in target:
                    readers.setdefault(target, set()).add(process.pid)
    return readers


def ask(url: str, text: str, user: str = "hello") -> httpx.Response:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": user}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LIMIT_S)


def test_ten_chats_with_one_prefix_meet_one_replica(url: str) -> None:
    by_prefix = {}
    for prefix in range(6):
        text = f"{prefix} " + "a common instruction of some length. " * 20
        answers = [ask(url, text, f"question {i}") for i in range(10)]
        assert {answer.status_code for answer in answers} == {200}
        (by_prefix[prefix],) = {answer.headers[HEADER] for answer in answers}
        cached = [
            answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers
        ]
        assert min(cached[1:]) >= 128, cached
    assert len(set(by_prefix.values())) == 2


def test_replicas_of_a_node_share_a_packed_copy(url: str, experts: Path) -> None:
    """One replica writes the experts, and both read that file: none was packed anew and deleted."""
    ((path, processes),) = readers_of(experts).items()
    assert len(processes) == 2
    assert list(experts.rglob("records-*.bin")) == [Path(path)]
    assert Path(path).stat().st_size >= 3 * 4 * 3 * 32 * 32 * 4  # of 3 layers of 4 experts


def test_a_refusal_is_the_servers_own(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "depth": 3}, timeout=LIMIT_S)
    assert answer.status_code == 400
    assert "depth" in answer.json()["error"]["message"]
    assert httpx.get(f"{url}/nothing", timeout=LIMIT_S).status_code == 404


def test_metrics_are_of_each_replica(url: str) -> None:
    """Each replica's tokens are counted under its own name, and add up to those of the answers."""
    before, asked = prompt_tokens(url), dict.fromkeys(replicas_of(url), 0)
    assert set(before) == set(asked) and len(asked) == 2
    for prefix in range(8):
        answer = ask(url, f"{prefix} is another instruction. " * 20)
        asked[answer.headers[HEADER]] += answer.json()["usage"]["prompt_tokens"]
    after = prompt_tokens(url)
    assert {name: after[name] - before[name] for name in asked} == asked


def test_a_replica_is_killed_under_load(url: str) -> None:
    """No request hangs: each is answered, by the other replica if need be, or ends with an error.
    Streams that had begun end with an error event.
    """

    def outcome(number: int) -> str:
        body = {"prompt": f"fox {number} " * 5, "max_tokens": 60, "ignore_eos": True}
        if number % 2:
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
            return str(answer.status_code)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=LIMIT_S
        ) as answer:
            text = answer.read().decode()
        if answer.status_code != 200:
            return str(answer.status_code)
        if text.rstrip().endswith("data: [DONE]"):
            return "whole stream"
        assert "the replica was lost" in text[-300:]
        return "cut stream"

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        outcomes = [pool.submit(outcome, number) for number in range(80)]
        while sum(one.done() for one in outcomes) < 20:
            time.sleep(0.02)
        assert kill_worker(None, "ServeReplica:jmoe:Replica")
        ended = Counter(one.result(timeout=LIMIT_S) for one in outcomes)
    print(ended)
    assert ended["200"] + ended["whole stream"] >= 60
    assert set(ended) <= {"200", "503", "whole stream", "cut stream"}
    wait_until(lambda: len(replicas_of(url)) == 2, LIMIT_S)  # another takes its place


def test_replicas_follow_the_load(model_folder: Path) -> None:
    """A second replica starts under load, and stops after it; every request is answered."""
    replicas = ("--min-replicas", 1, "--max-replicas", 2, "--downscale-delay-s", 5)
    with serving(model_folder, *replicas) as url:
        ended = threading.Event()

        def ask_until_ended(number: int) -> set[int]:
            seen = set()
            while not ended.is_set():
                body = {"prompt": f"fox {number}", "max_tokens": 100, "ignore_eos": True}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
                seen.add(answer.status_code)
            return seen

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            clients = [pool.submit(ask_until_ended, number) for number in range(16)]
            try:
                wait_until(lambda: num_replicas(url) == 2, START_LIMIT_S)
            finally:
                ended.set()
            assert set().union(*(client.result() for client in clients)) == {200}
        begun = time.monotonic()
        wait_until(lambda: num_replicas(url) == 1, START_LIMIT_S)
        print(f"one replica again {time.monotonic() - begun:.0f} s after the load")
        assert ask(url, "an instruction").status_code == 200


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--min-replicas", "3", "--max-replicas", "2"), "--min-replicas = 3: must be at least 1"),
        (("--downscale-delay-s", "-1"), "--downscale-delay-s = -1.0: must be 0 or more"),
        (("--downscale-delay-s", "nan"), "--downscale-delay-s = nan: must be 0 or more"),
        (
            ("--downscale-delay-s", "inf"),
            "--downscale-delay-s = inf: must be 0 or more, and finite",
        ),
    ],
)
def test_wrong_options_are_named(
    model_folder: Path, options: tuple[str, ...], problem: str
) -> None:
    command = [sys.executable, ROOT / "launch/ray/serve.py", model_folder, *options]
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert problem in done.stderr
