"""The load generator, benchmarks/serve/load.py, against a small server that answers as jmoe's
does.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import load as serving
from tests.fakes import wait_for
from tests.serving import openai_server
from tests.serving.openai_server import OpenAIServer


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        server.text = ["a"] * 5
        yield server


@pytest.fixture
def load(capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """`load(*arguments)`: the JSON object in the last line."""

    def run(*arguments: str) -> dict[str, Any]:
        serving.main(arguments)
        result: dict[str, Any] = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
        return result

    return run


@pytest.mark.parametrize("chat", [True, False])
def test_closed_loop(load: Callable[..., dict[str, Any]], server: OpenAIServer, chat: bool) -> None:
    server.token_s = 0.01
    options = [
        "--url",
        server.url,
        "--requests",
        "12",
        "--concurrency",
        "4",
        "--max-tokens",
        "5",
        "--api-key",
        "sk-1",
    ]
    result = load(*options, *(["--chat"] if chat else []))
    assert (result["completed"], result["failed"], result["rejected"], result["disconnected"]) == (
        12,
        0,
        0,
        0,
    )
    assert (result["completion_tokens"], result["prompt_tokens"], result["warm_up_failed"]) == (
        60,
        84,
        0,
    )
    assert result["tokens_per_s"] == pytest.approx(60 / result["duration_s"], rel=0.01)
    assert result["requests_per_s"] == pytest.approx(12 / result["duration_s"], rel=0.01)
    assert result["time_to_first_token_s"]["median"] >= 0.01
    # the first may be noticed late, and the last at once
    assert result["time_per_output_token_s"]["median"] > 0.001
    assert result["left_behind"] == {
        "requests_running": 0,
        "requests_waiting": 0,
        "kv_tokens_used": 0,
    }
    assert "sk-1" not in json.dumps(result)
    assert len(server.requests) == 13  # one to warm up
    paths = {path for path, _, _ in server.requests}
    assert paths == {"/v1/chat/completions" if chat else "/v1/completions"}
    _, body, headers = server.requests[-1]
    assert headers["Authorization"] == "Bearer sk-1"
    prompt = body["messages"][0]["content"] if chat else body["prompt"]
    assert prompt in Path(serving.__file__).read_text()
    assert (len(prompt), body["model"], body["max_tokens"], body["stream"]) == (
        256,
        "fake-moe",
        5,
        True,
    )


def test_open_loop_sends_without_waiting(
    load: Callable[..., dict[str, Any]], server: OpenAIServer
) -> None:
    server.gate = threading.Barrier(20)
    result = load("--url", server.url, "--requests", "20", "--rate", "100", "--warm-up", "0")
    assert result["completed"] == 20


def test_refusals_and_failures_are_counted(
    load: Callable[..., dict[str, Any]], server: OpenAIServer
) -> None:
    server.refuse = [(429, {"Retry-After": "1"}, "full"), (429, {}, "full"), (500, {}, "broken")]
    result = load("--url", server.url, "--requests", "5", "--concurrency", "1", "--warm-up", "0")
    assert (result["completed"], result["rejected"], result["rejected_with_retry_after"]) == (
        2,
        2,
        1,
    )
    assert result["failed"] == 1
    (reason,) = result["reasons"]
    assert reason.startswith("500: ")
    assert "broken" in reason


def test_error_within_the_stream_is_a_failure(
    load: Callable[..., dict[str, Any]], server: OpenAIServer
) -> None:
    server.error_after = 2
    result = load("--url", server.url, "--requests", "3")
    assert (result["completed"], result["failed"]) == (0, 3)
    assert result["reasons"] == {"ValueError: the engine failed": 3}
    assert result["time_to_first_token_s"] is None


def test_disconnects(load: Callable[..., dict[str, Any]], server: OpenAIServer) -> None:
    server.text, server.token_s = ["a"] * 200, 0.005
    options = [
        "--url",
        server.url,
        "--warm-up",
        "0",
        "--max-tokens",
        "200",
        "--requests",
        "20",
        "--concurrency",
        "20",
    ]
    result = load(*options, "--disconnect-fraction", "0.5", "--seed", "1")
    assert result["failed"] == 0
    assert result["completed"] + result["disconnected"] == 20
    assert 4 < result["disconnected"] < 16
    wait_for(lambda: server.disconnects > 0)
    assert server.disconnects <= result["disconnected"]


def test_starts_and_stops_the_server(
    load: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SERVE", Path(openai_server.__file__))
    result = load("--requests", "4", "--start", "some-model", "--policy", "ring")
    assert result["completed"] == 4
    assert min(result["server_rss_bytes"].values()) > 1 << 20
    assert result["processor_us"]["clients"] > 1
    assert result["args"]["start"] == ["some-model", "--policy", "ring"]


def test_engine_alone(load: Callable[..., dict[str, Any]], model_folder: Path) -> None:
    """The same prompts, without HTTP."""
    options = [
        "--max-batch",
        "1",
        "--max-seq-len",
        "64",
        "--prefill-chunk-tokens",
        "8",
        "--policy",
        "resident",
    ]
    requests = ["--requests", "3", "--max-tokens", "4", "--ignore-eos", "--prompt-chars", "40"]
    result = load(*requests, "--engine", str(model_folder), *options)
    assert (result["completed"], result["completion_tokens"]) == (3, 12)
    assert result["tokens_per_s"] == pytest.approx(12 / result["duration_s"], rel=0.05)
    us = sum(result["processor_us"].values())
    # counted in hundredths of a second
    assert 0 <= us * 12e-6 < result["duration_s"] * os.cpu_count() + 0.1


def test_server_that_does_not_start(
    load: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "serve.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(serving, "SERVE", tmp_path / "serve.py")
    with pytest.raises(RuntimeError, match="ended with status 3 before it was ready"):
        load("--start", "some-model")


def test_cores_are_split(
    load: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1} if process == 0 else before)
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound.append(sorted(cores)))
    (tmp_path / "serve.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(serving, "SERVE", tmp_path / "serve.py")
    with pytest.raises(RuntimeError, match="ended with status 3"):
        load("--cores", "1", "--start", "some-model")
    assert bound == [[0], [0, 1]]  # while the server is started, and after
    bound.clear()
    with serving.on_cores(1, None):
        assert bound == [[1]]
    assert bound == [[1], [0, 1]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--requests", "0"], "--requests must be greater than 0"),
        (["--rate", "-1"], "--rate must be greater than 0"),
        (["--disconnect-fraction", "2"], "--disconnect-fraction must be between 0 and 1"),
        (["--cores", "1"], "--cores needs --start or --engine"),
        (["--cores", "0", "--start", "DIR"], "--cores must leave a core to the clients"),
        (["--start"], "--start needs a model folder"),
        (["--engine"], "--engine needs a model folder"),
        (["--chat", "--engine", "DIR"], "--engine takes whole prompts at once"),
        (["--rate", "1", "--concurrency", "2"], "not allowed with argument"),
    ],
)
def test_mistakes_are_told(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        serving.main(arguments)
    assert complaint in capsys.readouterr().err
