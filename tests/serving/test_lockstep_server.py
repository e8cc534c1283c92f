"""serve.py on several processes: one process's answers, and no request left without one when a
process is lost.
"""

import contextlib
import random
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jmoe.cluster.watchdog import EXIT_CODE
from tests.http_servers import LONG, HttpProcess, start_server
from tests.processes import Child, kill_group, start_logged
from tests.serving.conftest import SIZES
from tests.train_runs import free_port

LIMIT_S = 240.0
LONG_2 = (*LONG, "--max-batch", 2)
GROWTH_BYTES = 64 << 20
Start = Callable[..., "Servers"]


class Servers:
    """serve.py on rank 0, and the processes that follow it."""

    def __init__(self, server: HttpProcess, followers: list[Child]) -> None:
        self.server, self.followers = server, followers

    def kill(self) -> None:
        for process in (self.server.process, *self.followers):
            kill_group(process)


@pytest.fixture(scope="module")
def start_ranks(
    model_folder: Path, server_env: dict[str, str | None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """`start_ranks(*options)` starts serve.py on two processes and returns when they serve."""
    started: list[Servers] = []
    env = server_env | {"PYTHONUNBUFFERED": "1"}

    def start(*options: object, count: int = 2) -> Servers:
        logs, port = tmp_path_factory.mktemp("log"), free_port()

        def arguments(rank: int) -> list[str]:
            join = (
                "--distributed.coordinator-address",
                f"127.0.0.1:{port}",
                "--distributed.num-processes",
                count,
            )
            heartbeat = ("--distributed.heartbeat-timeout-s", 120)
            all_ = (
                model_folder,
                *SIZES,
                "--devices",
                count,
                *join,
                "--distributed.process-id",
                rank,
                *heartbeat,
                *options,
            )
            return list(map(str, all_))

        followers = [
            start_logged(["serve.py", *arguments(rank)], logs / f"rank-{rank}.log", env)
            for rank in range(1, count)
        ]
        try:
            server = start_server(logs / "server.log", env, *arguments(0))
        except BaseException:
            for follower in followers:
                print(follower.screen)
                kill_group(follower)
            raise
        started.append(Servers(server, followers))
        return started[-1]

    yield start
    for servers in started:
        servers.kill()


@pytest.fixture(scope="module")
def servers(start_ranks: Start) -> Servers:
    """Two processes, of which the last test that is not slow kills one."""
    return start_ranks("--max-seq-len", 8192, "--drain-timeout-s", 600)


def test_answers_are_those_of_one_process(servers: Servers, shared_server: HttpProcess) -> None:
    """Chats and completions, alone and together, whole and streamed, with log-probabilities of
    prompts too.
    """
    chat = {
        "messages": [{"role": "user", "content": "The quick brown"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    completion = {
        "max_tokens": 16,
        "temperature": 0.7,
        "seed": 3,
        "logprobs": 2,
        "ignore_eos": True,
    }

    def answers(server: HttpProcess) -> tuple[list[str], list[float]]:
        def complete(n: int) -> Any:
            body = {**completion, "prompt": "def f(x)" * n, "echo": n > 4}
            return server.post("/v1/completions", **body).json()["choices"][0]

        with ThreadPoolExecutor(6) as threads:
            together = list(threads.map(complete, range(1, 7)))
        texts = [choice["text"] for choice in together]
        chatted = server.post("/v1/chat/completions", **chat).json()["choices"][0]
        with server.stream(prompt="def f(x)", max_tokens=8, temperature=0) as events:
            texts += [
                chatted["message"]["content"],
                *(e["choices"][0]["text"] for e in events if e != "[DONE]"),
            ]
        return texts, [
            x or 0.0 for choice in together for x in choice["logprobs"]["token_logprobs"]
        ]

    texts, logprobs = answers(servers.server)
    expected_texts, expected_logprobs = answers(shared_server)
    assert texts == expected_texts and len(texts) > 8
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    samples = {
        (sample.name, *sorted(set(sample.labels.values()) - {"tiny-moe"})): sample.value
        for family in text_string_to_metric_families(servers.server.get("/metrics").text)
        for sample in family.samples
    }
    assert all(samples["jmoe:device_load_total", device] > 0 for device in "01"), samples
    assert all(0.5 <= samples["jmoe:device_balancedness", layer] <= 1 for layer in "012"), samples
    assert all(samples["jmoe:device_copies_total", device] == 0 for device in "01"), samples
    devices = servers.server.get("/live").json()["devices"]
    assert len(devices["loads"]) == 2 and min(devices["loads"]) > 0
    assert (devices["copies"], devices["swaps"], len(devices["balancedness"])) == ([0, 0], 0, 3)
    assert shared_server.get("/live").json()["devices"] is None


def test_processes_with_other_options_are_refused(
    model_folder: Path, server_env: dict[str, str | None], tmp_path: Path
) -> None:
    """Both say so before they read weights; their steps would have other shapes. The length that
    both leave open is no difference.
    """
    join = ("--distributed.coordinator-address", f"127.0.0.1:{free_port()}")
    join += ("--distributed.num-processes", "2", "--devices", "2")
    ranks = [
        start_logged(
            ["serve.py", str(model_folder), *join]
            + ["--distributed.process-id", str(rank), "--max-batch", str(2 + 2 * rank)],
            tmp_path / f"{rank}.log",
            server_env | {"PYTHONUNBUFFERED": "1"},
        )
        for rank in range(2)
    ]
    said = r"started with the same options.*max_batch: 2 -> 4"
    for rank in ranks:
        rank.wait(LIMIT_S)
        assert rank.returncode != 0 and re.search(said, rank.screen), rank.screen
        assert "max_seq_len" not in rank.screen


def test_a_killed_process_ends_every_request(servers: Servers) -> None:
    """Streams, and requests that wait: with 500 and the rank. Then nothing is taken in, and the
    server ends.
    """
    server, (follower,) = servers.server, servers.followers

    def wait() -> httpx.Response:
        return server.post("/v1/completions", prompt="y", max_tokens=8000, ignore_eos=True)

    with ThreadPoolExecutor(12) as threads, server.stream(max_tokens=8000) as events:
        next(events)
        waiting = [threads.submit(wait) for _ in range(12)]
        server.until("/live", lambda live: live.json()["requests_waiting"] == 9)
        follower.kill_now()
        *_, last = events
        answers = [request.result() for request in waiting]
    for status, error in (
        (500, last["error"]),
        *((a.status_code, a.json()["error"]) for a in answers),
    ):
        assert (status, error["type"], error["code"]) == (500, "server_error", "engine_failed")
        assert error["message"] == "the engine has failed: rank 1 was lost: its process has ended"
    for path in ("/ready", "/health"):
        answer = server.get(path)
        assert answer.status_code == 503 and "rank 1 was lost" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="y").status_code == 503
    assert 'finished_reason="error",model_name' in server.get("/metrics").text
    assert server.terminate() == EXIT_CODE
    log = server.log.read_text()
    assert (
        "rank 1 was lost: its process has ended; no request is served any more" in log
        and "Traceback" not in log
    )


@pytest.mark.slow
def test_a_stopped_process_ends_every_request(start_ranks: Start) -> None:
    """No connection breaks; the server ends by itself, for a supervisor to start all processes
    again.
    """
    limits = ("--distributed.heartbeat-timeout-s", 20, "--drain-timeout-s", 5)
    servers = start_ranks(*LONG_2, *limits)
    with servers.server.stream(max_tokens=8000) as events:
        next(events)
        servers.followers[0].send_signal(signal.SIGSTOP)
        *_, last = events
    reason = "rank 1 was lost: no sign of life, it is stopped or out of reach"
    assert last["error"]["message"] == f"the engine has failed: {reason}"
    assert servers.server.process.wait(LIMIT_S) == EXIT_CODE


@pytest.mark.slow
def test_a_killed_server_ends_the_others(start_ranks: Start) -> None:
    servers = start_ranks(*LONG_2, "--max-batch", 3, count=3)
    with contextlib.suppress(httpx.HTTPError), servers.server.stream(max_tokens=8000) as events:
        next(events)
        servers.server.kill()
    for follower in servers.followers:
        assert follower.wait(LIMIT_S) in (EXIT_CODE, -signal.SIGABRT), follower.screen


@pytest.mark.slow
def test_a_thousand_requests_with_disconnects(start_ranks: Start) -> None:
    """Every client that stays is answered, none hangs, neither process keeps memory, and both
    end in order.
    """
    servers = start_ranks("--max-waiting", 1000)
    server, rng = servers.server, random.Random(0)
    processes = [psutil.Process(p.pid) for p in (server.process, *servers.followers)]

    def request(number: int) -> int:
        length, leave = 1 + number % 40, number % 3 == 0
        body = {"prompt": "def f(x):" * (1 + number % 7), "max_tokens": length, "ignore_eos": True}
        if not leave:
            answer = server.post("/v1/completions", **body, stream=False)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["completion_tokens"]) - length
        with server.stream(**body) as events:
            for _ in range(rng.randrange(1 + length // 2)):
                next(events)
        return 0

    def memory() -> list[int]:
        return [process.memory_info().rss for process in processes]

    with ThreadPoolExecutor(24) as threads:
        assert not any(threads.map(request, range(200)))  # until every buffer has been made
        before = memory()
        assert not any(threads.map(request, range(1000)))
    grown = [after - begun for after, begun in zip(memory(), before, strict=True)]
    print(f"grown by {[n >> 20 for n in grown]} MiB")
    assert max(grown) < GROWTH_BYTES
    server.until(
        "/live",
        lambda live: live.json()["requests_running"] == live.json()["requests_waiting"] == 0,
    )
    servers.followers[0].send_signal(signal.SIGTERM)  # to any process: all end in order
    assert server.process.wait(LIMIT_S) == 0, server.log.read_text()
    assert server.log.read_text().splitlines()[-1] == "stopped"
    assert servers.followers[0].end(LIMIT_S).splitlines()[-1] == "stopped"
