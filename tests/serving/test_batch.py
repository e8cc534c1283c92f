"""The program that answers a batch, as a process that is killed, beside the server."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jmoe.config.engine import EngineConfig
from jmoe.config.serving import ServeConfig
from jmoe.inference.engine import Engine
from jmoe.inference.sequence import Output
from jmoe.serving import batch
from jmoe.serving.batch import BatchAnswerer, BatchRunner, EngineFailedError
from jmoe.serving.batch_files import AnswersFile, read_request_keys, read_requests
from jmoe.serving.errors import ApiError
from jmoe.serving.service import Service
from tests.http_servers import HttpProcess
from tests.processes import Child, kill_group, start_logged
from tests.serving.conftest import SIZES

ENGINE = EngineConfig(max_batch=4, max_seq_len=256, prefill_chunk_tokens=32)  # of `engine`
COUNT, BODY_BYTES = 60, 10_000
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}}
BAD = {
    "unknown": {"prompt": "x", "depth": 3},
    "other model": {"prompt": "x", "model": "gpt-5"},
    "long": {"prompt": "word " * 4000},
}


def requests() -> list[dict[str, Any]]:
    """Greedy completions and chats, some with several choices, tools or a schema; bad ones."""
    lines = []
    for number in range(COUNT):
        url, body = "/v1/completions", {"prompt": f"fox {number}", "n": 1 + number % 2}
        if number % 3 == 0:
            messages = [{"role": "user", "content": f"日本語 {number}"}]
            url, body = "/v1/chat/completions", {"messages": messages}
        if number % 20 == 7:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
        body |= {"max_tokens": 12, "temperature": 0, "logprobs": number % 3 == 0 or 1}
        lines.append({"custom_id": f"r{number}", "url": url, "body": body})
    body = {"input": "日本語", "max_output_tokens": 12, "temperature": 0}
    lines.append({"custom_id": "responses", "url": "/v1/responses", "body": body})
    lines += [{"custom_id": name, "url": "/v1/completions", "body": BAD[name]} for name in BAD]
    return [{"method": "POST", **line} for line in lines]


@pytest.fixture
def start_batch(
    model_folder: Path, server_env: dict[str, str | None], tmp_path: Path
) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def start() -> Child:
        paths = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
        options = ["--model", str(model_folder), "--max-body-bytes", BODY_BYTES, *SIZES]
        command = ["-m", "jmoe.programs.batch", *paths, *map(str, options)]
        started.append(start_logged(command, tmp_path / f"log{len(started)}", server_env))
        return started[-1]

    yield start
    for process in started:
        kill_group(process)


def test_an_engine_that_fails_leaves_no_answer_of_it(
    model_folder: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = tmp_path / "in.jsonl", [f"fox {number}" for number in range(12)]
    bodies = [{"prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in prompts]
    bodies[3]["top_k"] = "many"
    asked = {"method": "POST", "url": "/v1/completions"}
    lines = [
        asked | {"custom_id": body["prompt"], "body": body} for body in [*bodies, {"prompt": ""}]
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    said: list[str] = []

    def answer(engine: Engine) -> list[dict[str, Any]]:
        config = ServeConfig(str(model_folder), engine=ENGINE)
        service = Service(engine, config, model_folder, "tiny", None)
        with AnswersFile(tmp_path / "out.jsonl", path, read_request_keys(path)) as answers:
            waiting = [one for one in read_requests(path) if one.key not in answers.keys]
            runner = BatchRunner(service, answers, len(waiting))
            try:
                asyncio.run(runner.run(waiting, said.append))
            finally:
                written = (tmp_path / "out.jsonl").read_text().splitlines()
        return [json.loads(line) for line in written]

    with Engine(model_folder, ENGINE) as failing:
        steps, step = itertools.count(), failing.step

        def fail_at_last() -> list[Output]:
            if next(steps) == 20:
                raise RuntimeError("out of memory")
            return step()

        monkeypatch.setattr(failing, "step", fail_at_last)
        with pytest.raises(EngineFailedError, match="the engine has failed"):
            answer(failing)
    before = (tmp_path / "out.jsonl").read_text()
    assert 0 < before.count('"status_code": 200') < len(prompts) - 1
    assert '"status_code": 500' not in before
    answers = {each["custom_id"]: each["response"] for each in answer(engine)}
    assert (tmp_path / "out.jsonl").read_text().startswith(before)
    assert set(answers) == {*prompts, ""}
    assert answers[prompts[3]]["status_code"] == 400
    expected = engine.generate(prompts, max_new_tokens=8)
    for prompt, completion in zip(prompts, expected, strict=True):
        if prompt != prompts[3]:
            assert answers[prompt]["body"]["choices"][0]["text"] == completion.text
    assert "requests answered" in said[-1]


@pytest.mark.parametrize(("failures", "status"), [(2, 200), (9, 503)])
def test_a_passing_error_is_no_answer_before_further_tries(
    failures: int,
    status: int,
    model_folder: Path,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread is refused: what the system's limit of processes does."""
    monkeypatch.setattr(batch, "PAUSE_S", 0.01)
    path, left = tmp_path / "in.jsonl", itertools.count(-failures)
    body = {"prompt": "fox", "max_tokens": 2}
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    path.write_text(json.dumps(asked))
    service = Service(
        engine, ServeConfig(str(model_folder), engine=ENGINE), model_folder, "t", None
    )
    run_work = service.run_text_work

    async def run_if_possible(*arguments: Any) -> Any:
        if next(left) < 0:
            raise ApiError(503, "the system starts no thread", code="no_thread")
        return await run_work(*arguments)

    monkeypatch.setattr(service, "run_text_work", run_if_possible)

    async def answer() -> dict[str, Any]:
        answerer = BatchAnswerer(service)
        async with answerer.running_engine():
            (request,) = read_requests(path)
            return await answerer.answer_request(request)

    assert asyncio.run(answer())["response"]["status_code"] == status
    assert next(left) == (1 if status == 200 else 3 - failures)


@pytest.mark.slow
def test_a_batch_killed_twice_answers_each_request_once_and_as_the_server(
    start_batch: Callable[[], Child], server: HttpProcess, tmp_path: Path
) -> None:
    asked, out = requests(), tmp_path / "out.jsonl"
    lines = [json.dumps(line) for line in asked]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:30], "no JSON", "", *lines[30:]]))

    def num_answers() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    for _ in range(2):
        before = num_answers()
        process = start_batch()
        process.wait_until(lambda before=before: num_answers() > before)  # type: ignore[misc]
        kill_group(process)
        assert before < num_answers() < COUNT + len(BAD) + 2
    written = out.read_bytes()
    kept = written[: written.rfind(b"\n") + 1]  # the kill may have come inside a line
    out.write_bytes(kept + b'{"id": "batch_req_')
    process = start_batch()
    screen = process.end(300)
    left = COUNT + len(BAD) + 2 - kept.count(b"\n")
    assert f"{left} of {left} requests answered" in screen
    assert screen.rstrip().endswith(" tokens/s")
    assert out.read_bytes().startswith(kept)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == Counter(
        [None, *(line["custom_id"] for line in asked)]
    )
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert by_id[None]["id"] == "batch_req_31"
    assert by_id[None]["response"]["status_code"] == 400
    for line in asked:
        served = server.post(line["url"], **line["body"])
        response = by_id[line["custom_id"]]["response"]
        if line["custom_id"] == "long":
            assert response["status_code"] == 413
            continue
        assert response["status_code"] == served.status_code
        if served.status_code == 200:
            assert by_id[line["custom_id"]]["error"] is None
            assert_same_answer(response["body"], served.json())
        else:
            assert response["body"] == served.json()
    screen = start_batch().end(300)
    assert "65 of 65 requests have an answer" in screen
    assert "loading" not in screen


def assert_same_answer(ours: dict[str, Any], servers: dict[str, Any]) -> None:
    """But for ids, times and what of a prompt the cache has."""
    if "output" in ours:
        assert ours["usage"]["output_tokens"] == servers["usage"]["output_tokens"] == 12
        said, served = ([item["content"] for item in one["output"]] for one in (ours, servers))
        assert said == served
        return
    for choice, served in zip(ours["choices"], servers["choices"], strict=True):
        for name in ("text", "message", "finish_reason"):
            assert choice.get(name) == served.get(name)
    for name in ("prompt_tokens", "completion_tokens"):
        assert ours["usage"][name] == servers["usage"][name]
