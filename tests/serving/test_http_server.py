"""How a server ends: by a signal while it streams, and by an engine that fails."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from jmoe.memory.record_store import folder_lock
from tests.http_servers import ENDLESS, LIMIT_S, LONG, HttpProcess
from tests.processes import one_device


def is_not_ready(server: HttpProcess) -> None:
    """As long as it streams it answers probes, and says that it takes nothing in."""
    refused = server.until("/ready", lambda response: response.status_code == 503).json()["error"]
    assert (
        refused["code"] == "shutting_down" and refused["message"] == "the server is shutting down"
    )
    assert server.post("/v1/completions", prompt="x").status_code == 503
    assert server.get("/health").status_code == 200


def test_sigterm_lets_a_stream_end(serve: Callable[..., HttpProcess]) -> None:
    """Another one, which goes on and on, keeps the server from its end as long as the test looks
    at it.
    """
    server = serve(*LONG, "--max-batch", 2, "--drain-timeout-s", 600)
    with server.stream(max_tokens=800) as chunks, server.stream(**ENDLESS) as others:
        assert next(chunks)["choices"] and next(others)["choices"]
        server.process.terminate()
        is_not_ready(server)
        *_, last, done = chunks
    assert last["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.process.wait(LIMIT_S) == 0
    assert server.log.read_text().splitlines()[-1] == "stopped"


def test_sigterm_does_not_wait_for_ever(serve: Callable[..., HttpProcess]) -> None:
    server = serve(*LONG, "--drain-timeout-s", 0.3)
    with server.stream(**ENDLESS) as chunks:
        assert next(chunks)["choices"]
        server.process.terminate()
        *_, last = chunks
    assert "shutting down; the request did not end in 0.3 s" in last["error"]["message"]
    assert server.process.wait(LIMIT_S) == 0


def test_sigterm_does_not_wait_for_a_body(serve: Callable[..., HttpProcess]) -> None:
    """Of which nothing more comes: its client is told, once nothing runs."""
    server = serve(*LONG, "--drain-timeout-s", 300)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), LIMIT_S) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
        server.until("/live", lambda response: response.status_code == 200)
        begun_s = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - begun_s < 30  # of the 60 that a body may take
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is shutting down" in answer
    assert "Traceback" not in server.log.read_text()


def test_open_files(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The limit is raised for the connections that are allowed, or they are refused, not turned
    away one by one.
    """
    program = (
        "import resource as r; from jmoe.serving.http_server import OTHER_FILES, allow_open_files\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 1000)); allow_open_files(600)\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (600 + OTHER_FILES, 1000)\n"
        "allow_open_files(5); assert r.getrlimit(r.RLIMIT_NOFILE)[0] == 600 + OTHER_FILES\n"
        "allow_open_files(1000)"
    )
    done = run_python(["-c", program])
    assert done.returncode == 1
    assert done.stderr.strip().endswith("need ulimit -n 1256, which is 1000")


def test_a_second_ctrl_c_ends_it_at_once(serve: Callable[..., HttpProcess]) -> None:
    server = serve(*LONG, "--drain-timeout-s", 600)
    with server.stream(**ENDLESS) as chunks:
        assert next(chunks)["choices"]
        server.process.send_signal(signal.SIGINT)
        server.until_said("ending: what runs has 600 s")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(LIMIT_S) == 128 + signal.SIGINT
    assert "Traceback" not in server.log.read_text()


def test_ctrl_c_while_it_loads(
    model_folder: Path, tmp_path: Path, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """It waits for the lock of a folder of records, which this process holds: it cannot have
    come further.
    """
    log, cache = tmp_path / "log", tmp_path / "cache"
    cache.mkdir()
    tier = ("--policy", "ring", "--ring-slots", 1, "--expert-tier", "nvme", "--cache-dir", cache)
    with folder_lock(cache, 0):
        process = start_python(
            ["serve.py", model_folder, "--port", "0", *tier], log, one_device(tmp_path / "compiled")
        )
        HttpProcess(process, "", log).until_said("loading ")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == -signal.SIGINT
    assert "Traceback" not in log.read_text()


def test_an_engine_that_fails(serve: Callable[..., HttpProcess], tmp_path: Path) -> None:
    """Its records on NVMe are cut while it streams: what runs and waits gets its error, nothing
    hangs, one log.
    """
    tier = ("--expert-tier", "nvme", "--host-cache-bytes", 40_000, "--cache-dir", tmp_path)
    server = serve("--policy", "ring", "--ring-slots", 1, *tier, *LONG)
    half = ENDLESS | {"n": 30}  # there is room for both
    with server.stream(**half) as chunks, server.stream(**half) as waiting:
        assert next(chunks)["choices"]
        (records,) = tmp_path.glob("records-*.bin")
        os.truncate(records, 4096)
        *_, last = chunks
        assert last["error"]["code"] == "engine_failed"
        assert last["error"]["message"] == "the engine has failed; the server's log says why", (
            "and no path"
        )
        *_, last = waiting
        assert last["error"]["code"] == "engine_failed"
    for path in ("/ready", "/health"):
        assert server.get(path).status_code == 503
    refused = server.post("/v1/completions", prompt="x")
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_failed"
    assert server.get("/metrics").status_code == server.get("/live").status_code == 200
    log = server.log.read_text()
    assert "records-" in log
    assert (
        log.count("the engine has failed; no request is served any more")
        == log.count("Traceback")
        == 1
    )
    assert server.terminate() == 0
