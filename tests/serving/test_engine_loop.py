"""What the engine promises, seen by a client of a real server."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from jmoe.config.engine import EngineConfig
from jmoe.config.serving import ServeConfig
from jmoe.inference.engine import Engine, ReloadError
from jmoe.inference.sampling_params import SamplingParams, Unconstrained
from jmoe.inference.sequence import Output, Sequence
from jmoe.serving import engine_loop
from jmoe.serving.engine_loop import EngineLoop, Generation
from jmoe.serving.errors import ApiError
from jmoe.serving.metrics import Metrics
from tests.damage import flip_everywhere, poison
from tests.http_servers import ENDLESS, LONG, HttpProcess

COMPILED = "the programs of all requests are compiled: "
BIASED = {"logit_bias": {str(token): 1.0 for token in range(17)}}
STOPPED = {"stop_token_ids": list(range(17)), "min_tokens": 2}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
AS_JSON = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"temperature": 0},
        BIASED,
        STOPPED,
        AS_JSON,
        BIASED | AS_JSON,
        {"n": 4, "temperature": 1, "repetition_penalty": 1.5, "top_p": 0.5},
        {"prompt": [[5] * 70, [6] * 33, [7]]},
        {"echo": True, "logprobs": 3, "prompt": [5] * 70},
    ],
    ids=lambda body: " ".join(body) or "plain",
)
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}], ids=["tokens", "logprobs"])
def test_nothing_is_compiled_after_serving(
    server: HttpProcess, body: dict[str, Any], more: dict[str, Any]
) -> None:
    """Once the server says that all is compiled: a request with what nobody asked for before does
    not hold up the others; nor did any of another test.
    """
    server.until_said(COMPILED)
    response = server.post(
        "/v1/completions", **{"prompt": "def f(x):", "max_tokens": 3} | more | body
    )
    assert response.status_code == 200, response.text
    start, _, service = server.log.read_text().partition(COMPILED)
    assert "Compiling" in start, "this would be seen"
    assert "Compiling" not in service


def test_an_answer_before_all_is_compiled(start: Callable[..., HttpProcess]) -> None:
    """A request that comes at once waits for its own programs, not for all; so does the end."""
    server = start("--policy", "resident")
    try:
        assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        assert server.terminate() == 0
        assert COMPILED not in server.log.read_text()
    finally:
        server.kill()


class Panic(BaseException):
    """Like those of tokenizers, which is written in Rust: no `Exception`."""


def test_a_panic_in_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request hears of it at once, and the server says that it is no more healthy."""

    def step() -> list[Output]:
        raise Panic("a decoder's regular expression")

    monkeypatch.setattr(engine, "step", step)

    sequence = Sequence([1], SamplingParams())

    async def check() -> None:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        loop.start()
        with loop.submit([sequence], "a") as request, pytest.raises(ApiError, match="has failed"):
            async with asyncio.timeout(60):
                await anext(request)
        assert loop.failure is not None
        await loop.stop()

    asyncio.run(check())
    engine.abort(sequence)


def test_a_server_that_shuts_down_loads_no_other_weights(engine: Engine) -> None:
    """What runs and what waits has its time; the reload, which may take minutes, has none."""
    long, short = (SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (50, 2))

    async def check() -> None:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        loop.start()
        with loop.submit([Sequence([1], long)], "a") as running:
            await anext(running)
            reload = asyncio.create_task(loop.reload(Path("nowhere")))
            await asyncio.sleep(0)
            with loop.submit([Sequence([2], short)], "b") as waiting:
                loop.start_draining(60.0)
                async with asyncio.timeout(60):
                    while (await anext(waiting)).finish_reason is None:
                        pass
                    with pytest.raises(ReloadError, match="the server is shutting down"):
                        await reload
        await loop.stop()

    asyncio.run(check())


def test_priorities(serve: Callable[..., HttpProcess]) -> None:
    """With one place, the request with the lowest priority is the next to run, whenever it came."""
    server = serve(*LONG, "--scheduling-policy", "priority", "--policy", "resident")
    ended: list[int] = []

    def ask(priority: int) -> None:
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "priority": priority}
        assert server.post("/v1/completions", **body).status_code == 200
        ended.append(priority)

    with ThreadPoolExecutor(3) as threads, server.stream(**ENDLESS) as events:
        next(events)
        for count, priority in enumerate((7, 3, -2), ENDLESS["n"]):
            threads.submit(ask, priority)
            server.until("/live", lambda r, count=count: r.json()["requests_waiting"] >= count)  # type: ignore[misc]
    assert ended == [-2, 3, 7]


def test_a_preempted_sequence_does_not_wait_for_its_start(engine: Engine) -> None:
    """It has begun: a request of which it is the rest is not ended for another client's."""

    async def count_waiting() -> list[int]:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        sequences = [Sequence([5]), Sequence([6])]
        generation = Generation(loop, sequences, timeout_s=60.0)
        generation._timer.cancel()
        counts = [generation.num_waiting]
        sequences[0].num_preemptions = 1
        return [*counts, generation.num_waiting]

    assert asyncio.run(count_waiting()) == [2, 1]


def test_a_client_does_not_wait_for_all_of_another_s_blocks(model_folder: Path) -> None:
    """The engine gets no more sequences than its cache has room for, and one."""
    options = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with Engine(
        model_folder,
        EngineConfig(max_batch=8, max_seq_len=128, cache_tokens=256, dtype="float32"),
    ) as engine:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        ended: list[str] = []

        def run_step() -> None:
            loop._admit_waiting()
            for output in engine.step():
                if output.finish_reason is not None:
                    loop._queue.remove_and_tell_if_running(output.sequence)
                    ended.append(output.sequence.client)

        for client in "aaaaaaaab":
            if client == "b":
                run_step()
            sequence = Sequence([5 + len(ended)], options)
            sequence.client = client
            loop._queue.push(sequence)
        while engine.has_unfinished or len(loop._queue):
            run_step()
    assert ended.index("b") <= 3 and len(ended) == 9


def test_an_engine_whose_thread_goes_on_stays_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is not closed while a long preparation reads it."""
    begun, may_end = threading.Event(), threading.Event()

    def run_next_preparation_task() -> bool:
        begun.set()
        return not may_end.wait(60)

    monkeypatch.setattr(engine, "run_next_preparation_task", run_next_preparation_task)
    monkeypatch.setattr(engine_loop, "JOIN_LIMIT_S", 0.05)
    monkeypatch.setattr(engine, "is_in_use", False)
    monkeypatch.setattr(engine._model, "close", lambda: pytest.fail("the thread uses it"))

    async def check() -> None:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        loop.start()
        try:
            await asyncio.to_thread(begun.wait, 60)
            await loop.stop()
            engine.close()
        finally:
            may_end.set()
            await asyncio.to_thread(loop._thread.join, 60)

    asyncio.run(check())


class PanickingConstraint(Unconstrained):
    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        raise Panic("a grammar")


def test_a_panic_of_a_constraint(engine: Engine) -> None:
    """Only its own request hears of it: 500; the engine goes on with the others."""
    options = SamplingParams(max_new_tokens=5, ignore_eos=True)
    broken, good = Sequence([1], options, PanickingConstraint()), Sequence([1], options)

    async def check() -> None:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        loop.start()
        with loop.submit([broken], "a") as request, loop.submit([good], "b") as other:
            async with asyncio.timeout(60):
                with pytest.raises(ApiError, match="constraint of this request failed") as error:
                    await anext(request)
                assert error.value.status == 500
                assert [output.finish_reason async for output in other] == [None] * 4 + ["length"]
        assert loop.failure is None
        await loop.stop()

    asyncio.run(check())


PANICKING_TOKEN = 5


def panicking_tokenizer() -> Tokenizer:
    """Its decoder's regular expression gives up on one token: a panic of Rust."""
    names = {f"t{token}": token for token in range(PANICKING_TOKEN)} | {"a" * 49: PANICKING_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(names, "t0"))
    pattern = Regex(r"^(?:(a+)+)+\1c")
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(pattern, "")])
    return tokenizer


@pytest.mark.parametrize("where", ["prompt", "output"])
def test_a_panic_of_the_tokenizer_in_one_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Only its own request hears of it: 500; the engine goes on with the others."""
    monkeypatch.setattr(engine, "tokenizer", panicking_tokenizer())
    options = SamplingParams(max_new_tokens=5, ignore_eos=True, logit_bias={1: 100.0})
    drawn = {PANICKING_TOKEN: 100.0} if where == "output" else {1: 100.0}
    prompt = [PANICKING_TOKEN if where == "prompt" else 1]
    broken = Sequence(prompt, replace(options, logit_bias=drawn))
    good = Sequence([2], options)

    async def check() -> None:
        loop = EngineLoop(engine, Metrics("x"), ServeConfig("x"))
        loop.start()
        with loop.submit([broken], "a") as request, loop.submit([good], "b") as other:
            async with asyncio.timeout(60):
                with pytest.raises(ApiError, match="decoding of this request failed") as error:
                    await anext(request)
                assert (error.value.status, error.value.body.error.code) == (500, "decoding_failed")
                assert "".join([output.text async for output in other]) == "t1" * 5
        assert loop.failure is None and not loop.is_busy
        await loop.stop()

    asyncio.run(check())
    assert not engine.has_unfinished


BAD_TOKEN = 300  # what has seen it has no numbers any more


@pytest.mark.slow
def test_damaged_experts_over_http(
    model_folder: Path, serve: Callable[..., HttpProcess], tmp_path: Path
) -> None:
    """Flipped bits in the experts on disk change no answer, while it serves and after a start;
    they are mended.
    """
    folder = shutil.copytree(model_folder, tmp_path / "poisoned")
    poison(folder, BAD_TOKEN)
    tier = (
        "--policy",
        "ring",
        "--ring-slots",
        1,
        "--expert-tier",
        "nvme",
        "--host-cache-bytes",
        50_000,
    )
    tier = (*tier, "--cache-dir", tmp_path / "pack")
    body = {"prompt": [5], "max_tokens": 20, "seed": 1, "ignore_eos": True}
    texts = []
    for start in range(2):
        server = serve(*tier, folder=folder)
        (records,) = (tmp_path / "pack").glob("records-*.bin")
        for damaged in (False, True):
            if damaged:
                flip_everywhere(records)
            response = server.post("/v1/completions", **body)
            assert response.status_code == 200, response.text
            texts.append(response.json()["choices"][0]["text"])
        assert server.get("/health").status_code == 200
        assert "mended from its source" in server.log.read_text()
        if not start:
            not_finite_logits_fail_one_request(server)
        assert server.terminate() == 0
        flip_everywhere(records)
    assert len(texts) == 4 and len(set(texts)) == 1


def not_finite_logits_fail_one_request(server: HttpProcess) -> None:
    """500 for it, whole or streamed, at once or in the middle; 200 and the same text as alone
    for all others.
    """

    def ask(**body: Any) -> Any:
        return server.post(
            "/v1/completions", **{"max_tokens": 20, "seed": 1, "ignore_eos": True} | body
        )

    good = [{"prompt": [5 + i] * (1 + 9 * i)} for i in range(8)]
    bad: list[dict[str, Any]] = [
        {"prompt": [BAD_TOKEN]},
        {"prompt": [5] * 70 + [BAD_TOKEN] + [5] * 70, "temperature": 0},
        {"prompt": [7] * 20, "logit_bias": {str(BAD_TOKEN): 100}},
        {"prompt": [7, BAD_TOKEN, 7], "echo": True, "logprobs": 1},
        {"prompt": [[5, 6], [BAD_TOKEN]], "n": 2},
    ]
    expected = [ask(**body).json()["choices"][0]["text"] for body in good]
    with ThreadPoolExecutor(16) as threads:
        asked = [
            threads.submit(ask, **body)
            for pair in zip(good, bad * 2, strict=False)
            for body in pair
        ]
        answers = [future.result() for future in asked]
    assert [answer.json()["choices"][0]["text"] for answer in answers[::2]] == expected
    for answer in answers[1::2]:
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (
            error["code"] == "not_finite"
            and "the model's logits are not finite" in error["message"]
        )
    with server.stream(max_tokens=20, **bad[2]) as chunks:
        *pieces, last = chunks
    assert len(pieces) == 1 and last["error"]["code"] == "not_finite", (
        "one token came before it was noticed"
    )
    assert 'finished_reason="error"' in server.get("/metrics").text
    assert server.get("/ready").status_code == 200
