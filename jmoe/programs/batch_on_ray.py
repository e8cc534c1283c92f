"""A batch answered by engines on the nodes of a Ray cluster.

The program itself reads requests and writes answers; an engine is an actor, which only answers. A
request goes to the engine with most capacity. If an engine is lost, its requests go to the others,
and another engine takes its place as soon as the cluster has one for it. Only this process writes
answers, and only the first that it gets for a request, so each request has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmoe.memory.identity import sampled_content_hash
from jmoe.ray_cluster import (
    ActorLostError,
    actor_result,
    check_same_everywhere,
    connect,
    count_places,
    has_gpus,
    jmoe_version,
    start_actor,
    wait_for_one,
)
from jmoe.runtime import gpu_memory_environment
from jmoe.types import JsonObject

if TYPE_CHECKING:
    from jmoe.config.serving import ServeConfig
    from jmoe.serving.batch_files import AnswersFile, BatchRequest

# engines lost one after the other without an answer between, as a multiple of their number
MAX_LOSSES = 3


class EngineActor:
    """An engine in a process of its own: `open` loads it, `answer` may be called many times at
    once.
    """

    def __init__(self, config: ServeConfig) -> None:
        os.environ |= gpu_memory_environment(os.environ)  # before JAX is imported
        self._config, self._stack = config, contextlib.AsyncExitStack()
        self._answerer: Any = None

    async def open(self) -> int:
        """Load the model; return how many requests keep the engine busy."""
        from jmoe.programs.service import opened_service
        from jmoe.serving.batch import BatchAnswerer

        service = self._stack.enter_context(opened_service(self._config, lambda line: None))
        self._answerer = BatchAnswerer(service)
        await self._stack.enter_async_context(self._answerer.running_engine())
        capacity: int = self._answerer.num_concurrent_requests
        return capacity

    async def answer(self, request: BatchRequest) -> JsonObject:
        """Return a request's line of the answers file. Raises EngineFailedError."""
        line: JsonObject = await self._answerer.answer_request(request)
        return line


def describe_node(model: str, adapters: Sequence[str] = ()) -> dict[str, str]:
    """Return {name: value} of what must be the same on every node that has an engine.

    adapters: folders of LoRA adapters.
    """
    folders = {f"model {model}": model} | {path: path for path in adapters}
    return {"jmoe": jmoe_version(), "jax": version("jax")} | {
        f"{name} (hash of names, sizes and sampled content)": _content_digest(path)
        for name, path in folders.items()
    }


def _content_digest(path: str) -> str:
    """Return a digest of a folder's files, or of one file: see `sampled_content_hash`."""
    root = Path(path)
    files = [file for file in (root.iterdir() if root.is_dir() else [root]) if file.is_file()]
    return sampled_content_hash({file.name: file for file in files})[:12] if files else "nothing"


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Return `config` for processes of another working directory."""
    absolute = lambda path: str(Path(path).expanduser().resolve())  # noqa: E731
    folders = config.engine.adapter_folders.items()
    lora = tuple(f"{name}={absolute(folder)}" for name, folder in folders)
    engine = dataclasses.replace(config.engine, lora=lora)
    return dataclasses.replace(config, model=absolute(config.model), engine=engine)


@dataclasses.dataclass(eq=False)
class _Engine:
    """An engine of the cluster. capacity: 0 until it is open."""

    actor: Any
    capacity: int = 0
    under_way: int = 0

    @property
    def free_capacity(self) -> int:
        """How many more requests keep the engine busy."""
        return self.capacity - self.under_way


class ClusterBatch:
    """The engines of one batch, and the requests that they have."""

    def __init__(self, config: ServeConfig, address: str, num_engines: int | None) -> None:
        """Connect to the cluster at `address`. Raises ValueError that names what is wrong."""
        self._config = config = with_absolute_paths(config)
        self._ray = connect(address)
        adapters = list(map(str, config.engine.adapter_folders.values()))
        check_same_everywhere(self._ray, address, describe_node, config.model, adapters)
        self._gpus = config.engine.mesh.devices if has_gpus(self._ray) else 0
        self._num_engines = num_engines or count_places(self._ray, self._gpus)
        if not self._num_engines:
            raise ValueError(
                f"--ray = {address!r}: the cluster has too few GPUs for one engine of"
                f" mesh.devices = {self._gpus}"
            )
        self._engines: list[_Engine] = []
        # what each call is for: a request, or None for the opening of the engine
        self._calls: dict[Any, tuple[_Engine, BatchRequest | None]] = {}
        self._returned: deque[BatchRequest] = deque()  # of lost engines
        self._losses = 0  # since the last answer

    def run(
        self,
        requests: Iterable[BatchRequest],
        total: int,
        answers: AnswersFile,
        say: Callable[[str], None],
    ) -> None:
        """Append the answers to all `requests`, of which there are `total`.

        say: prints a line of progress. Raises EngineFailedError if engines are lost again and again
        without an answer, and the error of an engine that cannot be opened.
        """
        from jmoe.serving.batch import PROGRESS_S, BatchCounts

        say(f"{total:,} requests, {self._num_engines} engines")
        counts, said_s = BatchCounts(total), time.monotonic()
        for _ in range(self._num_engines):
            self._start_engine()
        waiting = iter(requests)
        while counts.answered < total:
            self._distribute_requests(waiting)
            answer = self._wait_for_answer(PROGRESS_S, say)
            if answer is not None:
                answers.append(answer)
                counts.count_response(answer["response"])
            if time.monotonic() - said_s >= PROGRESS_S:
                said_s = time.monotonic()
                is_open = sum(engine.capacity > 0 for engine in self._engines)
                say(f"{counts.summary()}; {is_open} engines")
        say(counts.summary())
        for engine in self._engines:
            self._ray.kill(engine.actor)

    def _next_request(self, requests: Iterator[BatchRequest]) -> BatchRequest | None:
        """Return a request that no engine has, of lost engines first; None if there is none."""
        return self._returned.popleft() if self._returned else next(requests, None)

    def _start_engine(self) -> None:
        """Start an engine in a process of the cluster, and begin to open it."""
        engine = _Engine(start_actor(self._ray, EngineActor, self._config, gpus=self._gpus))
        self._engines.append(engine)
        self._calls[engine.actor.open.remote()] = engine, None

    def _distribute_requests(self, waiting: Iterator[BatchRequest]) -> None:
        """Give requests to the engine with the most free capacity, until none has any."""
        while True:
            engine = max(self._engines, key=lambda engine: engine.free_capacity)
            request = self._next_request(waiting) if engine.free_capacity > 0 else None
            if request is None:
                return
            engine.under_way += 1
            self._calls[engine.actor.answer.remote(request)] = engine, request

    def _wait_for_answer(self, timeout_s: float, say: Callable[[str], None]) -> JsonObject | None:
        """Return the next answer; None if an engine was opened or lost first, or at the timeout."""
        from jmoe.serving.batch import EngineFailedError

        call = wait_for_one(self._ray, self._calls, timeout_s)
        if call is None:
            return None
        engine, request = self._calls.pop(call)
        try:
            result = actor_result(self._ray, call)
        except (ActorLostError, EngineFailedError) as error:
            if request is not None:
                self._returned.append(request)
            self._replace_lost_engine(engine, str(error), say)
            return None
        if request is None:
            engine.capacity = result
            return None
        engine.under_way -= 1
        self._losses = 0
        answer: JsonObject = result
        return answer

    def _replace_lost_engine(
        self, engine: _Engine, reason: str, say: Callable[[str], None]
    ) -> None:
        """Take a lost engine's requests back, and start another engine in its place."""
        from jmoe.serving.batch import EngineFailedError

        self._engines.remove(engine)
        self._ray.kill(engine.actor)
        own = [(call, request) for call, (of, request) in self._calls.items() if of is engine]
        for call, request in own:
            del self._calls[call]
            if request is not None:
                self._returned.append(request)
        self._losses += 1
        say(f"an engine was lost: {reason}; another takes its place")
        if self._losses > MAX_LOSSES * self._num_engines:
            raise EngineFailedError(f"{self._losses} engines were lost without an answer: {reason}")
        self._start_engine()
