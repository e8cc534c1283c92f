"""SIGHUP to a real server: newer weights, and no request is dropped."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jmoe.config.engine import EngineConfig
from jmoe.serving.reload import Reloader
from tests.agent_model import byte_tokenizer
from tests.http_servers import HttpProcess
from tests.scripted_model import describe, save_scripted_model

POSITIONS = 512
PROMPT = "abcd"


def save(folder: Path, said: str, positions: int = POSITIONS) -> None:
    """A model that says one letter without end after `PROMPT`."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    save_scripted_model(folder, tokenizer, len(PROMPT), tokenizer.encode(said).ids, positions)
    describe(folder, {"eos_token": "<|im_end|>"}, {"eos_token_id": 0, "top_k": 1})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of a model; `model` is a link to one of them."""
    folder = tmp_path_factory.mktemp("steps")
    save(folder / "1", "x")
    save(folder / "2", "y")
    save(folder / "other", "z", POSITIONS // 2)
    shutil.copytree(folder / "2", folder / "damaged")
    (weights,) = (folder / "damaged").glob("*.safetensors")
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    shutil.copytree(folder / "2", folder / "templated")
    (folder / "templated" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model").symlink_to("1")
    return folder


def point_to(folders: Path, name: str) -> None:
    """Make `model` a link to another step, at once."""
    (folders / "new").symlink_to(name)
    (folders / "new").rename(folders / "model")


@pytest.fixture(scope="module")
def server(serve: Callable[..., HttpProcess], folders: Path) -> HttpProcess:
    options = ("--max-batch", 1, "--max-seq-len", POSITIONS, "--policy", "resident")
    return serve(*options, folder=folders / "model")


def say(server: HttpProcess, max_tokens: int = 3) -> str:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True}
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_a_newer_step(server: HttpProcess, folders: Path) -> None:
    """What runs ends on the old weights; what waits, with the same prompt, runs on the new."""
    assert say(server) == "xxx"
    point_to(folders, "2")
    with ThreadPoolExecutor(3) as threads, server.stream(prompt=PROMPT, max_tokens=400) as events:
        text = next(events)["choices"][0]["text"]
        server.process.send_signal(signal.SIGHUP)
        waiting = [threads.submit(say, server) for _ in range(3)]
        text += "".join(event["choices"][0]["text"] for event in events if event != "[DONE]")
        # requests that came before the new folder was opened may have run before it was loaded
        answers = {one.result() for one in waiting}
    assert text == "x" * 400 and answers <= {"xxx", "yyy"}
    server.until_said("reloaded from ")
    assert say(server) == "yyy"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other", "config.json of "),
        ("templated", "chat_template.jinja of "),
        ("damaged", ""),
        ("missing", "must be a"),
    ],
)
def test_what_cannot_be_loaded(server: HttpProcess, folders: Path, name: str, words: str) -> None:
    """The reason is said, and the server goes on with the weights that it has."""
    before, said = say(server), "the weights stay as they were: "
    count = server.log.read_text().count(said)
    point_to(folders, name)
    server.process.send_signal(signal.SIGHUP)
    while (log := server.log.read_text()).count(said) == count:
        assert server.get("/health").status_code == 200
    assert words in log.rpartition(said)[2]
    assert say(server) == before


def test_the_end_still_drains(server: HttpProcess) -> None:
    assert server.terminate() == 0


def run_reloader(folder: Path, signals: int, error: Exception | None = None) -> list[str]:
    """Return what `signals` requests at once make a `Reloader` say and do, without an engine."""
    did: list[str] = []

    @contextlib.contextmanager
    def open_folder() -> Iterator[Path]:
        did.append("opened")
        yield folder
        did.append("closed")

    async def load(newest: Path) -> None:
        await asyncio.sleep(0)
        if error is not None:
            raise error

    async def run() -> None:
        loop: Any = SimpleNamespace(reload=load)
        reloader = Reloader(loop, folder, EngineConfig(), open_folder, did.append)
        for _ in range(signals):
            reloader.request_reload()
        await asyncio.gather(*reloader._tasks)

    asyncio.run(run())
    return did


def test_many_signals_are_two_reloads(folders: Path) -> None:
    """The one under way, and one that finds what is new since."""
    did = run_reloader(folders / "1", 9)
    assert [what.split()[0] for what in did] == ["opened", "reloaded"] + [
        "opened",
        "closed",
        "reloaded",
    ]


def test_an_error_of_any_kind_is_said(folders: Path) -> None:
    did = run_reloader(folders / "1", 1, KeyError("x"))
    assert did == ["opened", "closed", "the weights stay as they were: 'x'"]
