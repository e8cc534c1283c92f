"""The engine thread, and the event loop's interface to it.

The thread named "engine" alone calls the engine. HTTP handlers, on the event loop, submit sequences
and iterate over the engine's outputs. The event loop sends commands to the thread through a queue;
the thread executes them between two steps. The engine receives at most `max_batch` sequences, while
its cache has room for them; the others wait in a `FairQueue`, which picks the next one. Attributes
of `EngineLoop` belong to the event loop unless a comment assigns them to the thread.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from jmoe.config.serving import ServeConfig
from jmoe.inference.engine import NO_NUMBERS, Engine, ReloadError
from jmoe.inference.harmony import AnswerConstraint
from jmoe.inference.mesh.lockstep import LockstepError
from jmoe.inference.reasoning_constraint import ReasoningConstraint
from jmoe.inference.sequence import Output, Sequence
from jmoe.serving.admission import FairQueue, QueueLimit
from jmoe.serving.errors import ApiError
from jmoe.serving.grammar import JsonConstraint
from jmoe.serving.metrics import EngineSnapshot, ExpertView, Metrics
from jmoe.serving.shares import Shares

log = logging.getLogger(__name__)

OWN_CODE_FAILED = "the {} of this request failed; the server's log says why"
ENGINE_FAILED = "the engine has failed; the server's log says why"
RATE_WINDOW_S = 5.0
VIEW_S = 1.0
RECENT = 0.05  # weight of the newest sample in the moving average of inter-token time
# Limits on unsent output: of all requests, and of one non-streamed response, whose serialization
# blocks the event loop.
MAX_UNSENT_BYTES, MAX_WHOLE_BYTES = 1 << 30, 256 << 20
OUTPUT_BYTES = 1000  # estimated memory per drawn token
TOO_LARGE = (
    f"the answer with its log-probabilities has more than {MAX_WHOLE_BYTES >> 20} MiB: ask for a"
    " stream, or for fewer tokens, choices or log-probabilities"
)
NOT_READ = (
    "what has been drawn and not been read takes too much memory: read faster, or ask for less"
)
PAUSE_S = 0.25  # without requests, before work for later ones begins: most clients ask again sooner
JOIN_LIMIT_S = 90.0  # longer than the time limit of a step that waits for an expert


class Generation:
    """The sequences of one HTTP request, as an async iterator over their `Output`s.

    The iterator ends when all sequences have ended. Use it as a context manager: leaving the block
    aborts unfinished sequences, at the latest after the current engine step.

    Iterating raises ApiError: 500 if the engine or the request's own code failed, 504 after
    `timeout_s`, 503 if the reader is too slow or the server shuts down, 429 if the request is
    evicted from the queue, and 400 for an invalid JSON schema or too large an answer.
    """

    def __init__(self, owner: "EngineLoop", sequences: list[Sequence], timeout_s: float) -> None:
        self._owner, self.sequences = owner, sequences
        self.client = ""
        self._unfinished = len(sequences)
        self.on_end: Callable[[], object] = lambda: None  # called when the block is left
        self.is_kept = False  # outputs stay in memory until the response is complete
        self.logprob_bytes = 0  # memory per reported log-probability
        self._outputs: asyncio.Queue[Output | ApiError] = asyncio.Queue()
        # tokens that the reader has received, and those of the reasoning among them
        self.num_read_tokens = self.num_read_reasoning_tokens = 0
        self._timer = asyncio.get_running_loop().call_later(
            timeout_s, self._abort_after_timeout, timeout_s
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens delivered so far, over all sequences of the request."""
        return sum(sequence.num_delivered_tokens for sequence in self.sequences)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started to run."""
        return sum(
            sequence.status == "waiting" and not sequence.num_preemptions
            for sequence in self.sequences
        )

    def put_output(self, output: Output | ApiError) -> None:
        """Queue an output for the reader, or an error that the reader's next read raises."""
        self._outputs.put_nowait(output)

    def unsent_bytes(self, output: Output) -> int:
        """Return the approximate memory of an unsent output in bytes."""
        named = sum(1 + len(logprob.top) for logprob in (*output.logprobs, *output.prompt_logprobs))
        return OUTPUT_BYTES + self.logprob_bytes * named

    def abort_with_error(self, error: ApiError) -> None:
        """Abort the sequences, discard unread outputs, and raise `error` at the reader's next
        read.
        """
        self._owner._abort_sequences(self.sequences)
        self._owner._unsent.remove(self)
        while not self._outputs.empty():
            self._outputs.get_nowait()
        self.put_output(error)

    def _abort_after_timeout(self, timeout_s: float) -> None:
        """Abort the sequences; the reader's next read raises a 504."""
        self._owner._abort_sequences(self.sequences)
        self.put_output(
            ApiError(504, f"the request took longer than {timeout_s:g} s", code="timeout")
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if not self._unfinished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, ApiError):
            raise output
        if not self.is_kept:
            self._owner._subtract_unsent(self, output)
        self.num_read_tokens += len(output.token_ids)
        self.num_read_reasoning_tokens += output.num_reasoning_tokens
        if output.finish_reason == "error":
            if (what := output.sequence.failed) is not None:
                raise ApiError(500, OWN_CODE_FAILED.format(what), code=f"{what}_failed")
            raise ApiError(500, NO_NUMBERS, code="not_finite")
        if output.finish_reason is not None:
            self._unfinished -= 1
            constraint = output.sequence.constraint
            if isinstance(constraint, AnswerConstraint | ReasoningConstraint):
                constraint = constraint.answer
            if isinstance(constraint, JsonConstraint) and constraint.error:
                raise ApiError(400, constraint.error.splitlines()[0], param=constraint.param)
        return output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._owner._abort_sequences(self.sequences)
        self._owner._unsent.remove(self)
        if any(sequence.constraint is not None for sequence in self.sequences):
            self._owner._commands.put(partial(_drop_constraints, self.sequences))
        self.on_end()


class EngineLoop:
    """Runs an engine in its own thread, from `start` to `stop`.

    lost_process: set when another process of a multi-process engine is gone. The engine cannot
        recover; the server must be restarted.
    failure: why the engine has failed; None while it works.
    """

    def __init__(self, engine: Engine, metrics: Metrics, config: ServeConfig) -> None:
        # handlers call only the engine's thread-safe methods
        self.engine, self._metrics = engine, metrics
        self.kv_tokens_total = engine.cache_tokens  # capacity of the cache
        self._limit = QueueLimit(engine.max_batch, config.max_waiting, metrics)
        self._places: Shares[Generation] = Shares(self._limit.capacity)
        self._unsent: Shares[Generation] = Shares(MAX_UNSENT_BYTES)
        self._request_timeout_s = config.request_timeout_s  # from submission to the last token
        self._open: dict[Sequence, Generation] = {}  # sequences that have not ended
        self._numbers = itertools.count()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        self._steps: deque[tuple[float, int]] = deque()  # (when, tokens) of the last RATE_WINDOW_S
        self._token_s = 0.0  # moving average of inter-token time
        self._queue = FairQueue()  # owned by the engine thread
        # weights to be loaded, and what is told when they are; owned by the engine thread
        self._newer: tuple[Path, asyncio.Future[None]] | None = None
        self.draining = False
        self.failure: str | None = None  # reason why requests are no longer served
        # Set when another process of the engine is gone; only a restart helps.
        self.lost_process = asyncio.Event()
        self.snapshot = self._take_snapshot()
        self.last_view, self._viewed_s = self._compute_expert_view(), time.monotonic()

    def start(self) -> None:
        """Start the engine thread. Must be called in the running event loop."""
        self._loop = asyncio.get_running_loop()
        if self.engine.leader is not None:
            self.engine.leader.on_lost = self._fail_after_lost_process
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread after the current step, and wait up to `JOIN_LIMIT_S` for its end.

        If a process of the engine was lost, do not wait: the step may never return. If the thread
        has not ended by then, the engine stays open.
        """
        self._commands.put(None)
        if not self.lost_process.is_set():
            await asyncio.to_thread(self._thread.join, JOIN_LIMIT_S)
            if self._thread.is_alive():
                self.engine.is_in_use = True
                log.warning("the engine's thread has not ended in %g s: not closed", JOIN_LIMIT_S)

    # Called on the event loop

    @property
    def tokens_per_s(self) -> float:
        """Tokens drawn per second, averaged over the last `RATE_WINDOW_S` seconds."""
        since_s = time.monotonic() - RATE_WINDOW_S
        return sum(count for at_s, count in self._steps if at_s >= since_s) / RATE_WINDOW_S

    async def expert_view(self) -> ExpertView:
        """Return the expert residency and load, at most `VIEW_S` seconds old.

        An older view is returned if a step takes longer than that or the engine has failed.
        """
        if self.failure is None and time.monotonic() - self._viewed_s > VIEW_S:
            self._viewed_s = time.monotonic()
            done = asyncio.Event()

            def refresh_view() -> None:  # on the engine thread
                self.last_view = self._compute_expert_view()
                self._loop.call_soon_threadsafe(done.set)

            self._commands.put(refresh_view)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), VIEW_S)
        return self.last_view

    def check_ready(self) -> None:
        """Raise `ApiError` 503 if the engine has failed or the server is shutting down."""
        if self.failure is not None:
            raise ApiError(503, self.failure, code="engine_failed")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    def requests_to_evict(self, count: int, client: str) -> list[Generation]:
        """Return the requests to evict so that `client` can queue `count` more sequences.

        Only requests of other clients that hold more queue places are evicted, and only requests
        with waiting sequences: first those of which no sequence has started, newest first.

        Raises ApiError: 503 if the server accepts no requests, 400 if `count` exceeds the queue's
        total capacity, 429 if the queue is full and no request may be evicted.
        """
        self.check_ready()
        self._limit.check_sequence_count(count)
        requests = list(
            dict.fromkeys(
                generation for generation in self._open.values() if generation.client != client
            )
        )
        waiting = [request for request in reversed(requests) if request.num_waiting]
        waiting.sort(key=lambda request: request.num_waiting < len(request.sequences))
        ending = self._places.items_to_evict(client, count, waiting)
        if ending is None:
            raise self._limit.queue_full_error(self._open, count, self._token_s)
        return ending

    def submit(self, sequences: list[Sequence], client: str) -> Generation:
        """Queue all sequences of a request and return their `Generation`; on an error, queue none.

        Aborts requests of larger clients if `requests_to_evict` names them. Raises `ApiError` as
        `requests_to_evict` does.
        """
        for ending in self.requests_to_evict(len(sequences), client):
            error = self._limit.queue_full_error(self._open, len(ending.sequences), self._token_s)
            self._abort_sequences(ending.sequences)
            ending.put_output(error)
        generation = Generation(self, sequences, self._request_timeout_s)
        request = next(self._numbers)
        generation.client = client
        self._places.add(generation, client, len(sequences))
        for index, sequence in enumerate(sequences):
            sequence.client, sequence.request, sequence.index = client, request, index
            sequence.arrived_s = time.monotonic()
            self._open[sequence] = generation
            self._commands.put(partial(self._queue.push, sequence))
        return generation

    async def reload(self, folder: Path) -> None:
        """Replace the engine's weights once the running sequences have ended; return when the
        waiting ones go on with the new weights.

        Raises ReloadError as `Engine.reload` does, `ApiError` if the engine has failed.
        """
        self.check_ready()
        loaded = self._loop.create_future()
        self._commands.put(partial(setattr, self, "_newer", (folder, loaded)))
        await loaded

    @property
    def is_busy(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._open)

    def start_draining(self, timeout_s: float) -> None:
        """Reject new requests from now on; after `timeout_s` seconds, fail the unfinished ones."""
        self.draining = True
        error = ApiError(
            503, f"the server is shutting down; the request did not end in {timeout_s:g} s"
        )
        self._loop.call_later(timeout_s, self._fail_all_requests, error)

    def _abort_sequences(self, sequences: list[Sequence]) -> None:
        """Free the places of unfinished sequences, and abort them on the engine thread."""
        for sequence in sequences:
            if self._release_queue_place(sequence) is not None:
                self._metrics.finished("abort").inc()
                self._commands.put(partial(self._abort_on_engine, sequence))

    def _release_queue_place(self, sequence: Sequence) -> Generation | None:
        """Free the queue place of a sequence; return its request, or None if the sequence was
        closed before.
        """
        generation = self._open.pop(sequence, None)
        if generation is not None:
            self._places.add(generation, generation.client, -1)
        return generation

    def _deliver_outputs(self, outputs: list[Output]) -> None:
        """Pass a step's outputs to their requests; free the places of sequences that ended."""
        now_s = time.monotonic()
        self._steps.append((now_s, len(outputs)))
        while self._steps[0][0] < now_s - RATE_WINDOW_S:
            self._steps.popleft()
        for output in outputs:
            sequence = output.sequence
            if (generation := self._open.get(sequence)) is None:
                continue
            if sequence.num_delivered_tokens:
                self._token_s += RECENT * (now_s - sequence.last_token_s - self._token_s)
            self._metrics.observe_output(output, now_s)
            if output.finish_reason is not None:
                self._release_queue_place(sequence)
            generation.put_output(output)
            self._count_unsent_and_enforce_limits(generation, output)

    def _count_unsent_and_enforce_limits(self, generation: Generation, output: Output) -> None:
        """Add an output to the memory accounting of unsent outputs, and drop requests over the
        limits.

        A non-streamed response over `MAX_WHOLE_BYTES` is dropped. If all unsent outputs exceed
        `MAX_UNSENT_BYTES`, requests of the client that holds the most are dropped.
        """
        self._unsent.add(generation, generation.client, generation.unsent_bytes(output))
        if generation.is_kept and self._unsent.amount_of_item(generation) > MAX_WHOLE_BYTES:
            generation.abort_with_error(ApiError(400, TOO_LARGE, code="answer_too_large"))
        elif self._unsent.total > self._unsent.limit:
            most = sorted(
                dict.fromkeys(self._open.values()), key=self._unsent.amount_of_item, reverse=True
            )
            for request in self._unsent.items_to_evict(
                generation.client, 0, filter(self._unsent.amount_of_item, most)
            ) or [generation]:
                request.abort_with_error(ApiError(503, NOT_READ, code="not_read"))

    def _subtract_unsent(self, generation: Generation, output: Output) -> None:
        """Take an output that the reader has received out of the count of unsent memory."""
        if self._unsent.amount_of_item(generation):
            self._unsent.add(generation, generation.client, -generation.unsent_bytes(output))

    def _fail_sequence(self, sequence: Sequence, error: ApiError) -> None:
        """Free the place of a sequence; its reader's next read raises the error."""
        if (generation := self._release_queue_place(sequence)) is not None:
            generation.put_output(error)

    def _fail_all_requests(self, error: ApiError) -> None:
        """Let the next read of every open request raise the error."""
        for generation in dict.fromkeys(self._open.values()):
            generation.put_output(error)

    def _fail_engine(self, failure: str) -> None:
        """Fail all requests with a 500, and refuse new ones with `failure` as the reason."""
        self.failure = failure
        self._metrics.finished("error").inc(len(self._open))
        self._fail_all_requests(ApiError(500, failure, code="engine_failed"))
        for sequence in list(self._open):
            self._release_queue_place(sequence)

    def _fail_after_lost_process(self, reason: str) -> None:
        """Fail all requests after another process of the engine was lost.

        Called on the thread that noticed the loss: the engine thread may block on the lost process
        forever.
        """
        log.error("%s; no request is served any more", reason)

        def fail_requests() -> None:
            self._fail_engine(f"the engine has failed: {reason}")
            self.lost_process.set()

        self._loop.call_soon_threadsafe(fail_requests)

    # Called on the engine thread

    def _run_thread(self) -> None:
        """Run engine steps and commands until `stop`, or until the engine fails."""
        try:
            while self._run_commands():
                if self._newer is not None:
                    self._reload_once_idle(*self._newer)
                if self._newer is None:
                    self._admit_waiting()
                outputs = self.engine.step()
                for output in outputs:
                    if output.finish_reason is not None:
                        self._queue.remove_and_tell_if_running(output.sequence)
                self.snapshot = self._take_snapshot()
                self._loop.call_soon_threadsafe(self._deliver_outputs, outputs)
        except LockstepError:
            pass  # `_fail_after_lost_process` logs the reason
        except BaseException:  # a Rust panic of tokenizers is not an Exception
            log.exception("the engine has failed; no request is served any more")
            self._loop.call_soon_threadsafe(self._fail_engine, ENGINE_FAILED)

    def _run_commands(self) -> bool:
        """Execute all queued commands; without unfinished sequences, block for the next command,
        and prepare the engine for later requests until it comes.

        Returns False when the loop must stop.
        """
        pause_s: float | None = PAUSE_S
        while True:
            has_work = self.engine.has_unfinished or len(self._queue)
            is_idle = not has_work and self._newer is None
            try:
                command = self._commands.get(block=is_idle, timeout=pause_s)
            except queue.Empty:
                if not is_idle:
                    return True
                pause_s = 0.0 if self.engine.run_next_preparation_task() else None
                continue
            pause_s = PAUSE_S
            if command is None:
                return False
            command()
            if self._commands.empty():
                self.snapshot = self._take_snapshot()

    def _reload_once_idle(self, folder: Path, loaded: asyncio.Future[None]) -> None:
        """Load the weights of a folder if no sequence runs; none if the server is shutting down,
        where waiting sequences still have time to run. Raises an error if the engine has no weights
        afterwards.
        """
        if self.engine.has_unfinished and not self.draining:
            return
        self._newer = None
        if self.draining:
            error = ReloadError("the server is shutting down")
            self._loop.call_soon_threadsafe(_resolve_reload, loaded, error)
            return
        try:
            self.engine.reload(folder)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_resolve_reload, loaded, ReloadError(str(error)))
            if not isinstance(error, ReloadError):
                raise
        else:
            self._loop.call_soon_threadsafe(_resolve_reload, loaded)
        gc.freeze()  # as `HttpServer` does once the first ones are loaded

    def _admit_waiting(self) -> None:
        """Move waiting sequences to the engine until `max_batch` run, or the next ones would wait
        for blocks of the cache: the engine serves those of one priority in the order in which it
        gets them. A sequence that gave its blocks back keeps out none that ranks before it.
        """
        while len(self._queue) and self.engine.has_capacity_for(
            self._queue.lowest_waiting_priority
        ):
            sequence = self._queue.start_next()
            sequence.started_s = time.monotonic()
            try:
                self.engine.add_sequence(sequence)
            except ValueError as error:
                self._queue.remove_and_tell_if_running(sequence)
                self._loop.call_soon_threadsafe(
                    self._fail_sequence, sequence, ApiError.from_value_error(error)
                )

    def _abort_on_engine(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue, and abort it if it runs."""
        if self._queue.remove_and_tell_if_running(sequence):
            self.engine.abort(sequence)

    def _compute_expert_view(self) -> ExpertView:
        """Return which experts are in the slots now, and each expert's recent tokens."""
        streams = self.engine.residency.streams
        return ExpertView(
            self.engine.residency.occupancy() if streams else [],
            self.engine.tokens_per_expert().tolist(),
        )

    def _take_snapshot(self) -> EngineSnapshot:
        """Return the engine's counters now; its waiting sequences include those of the queue."""
        stats = self.engine.scheduler_stats()
        return EngineSnapshot(
            self.engine.stats(), replace(stats, waiting=stats.waiting + len(self._queue))
        )


def _drop_constraints(sequences: list[Sequence]) -> None:
    """Drop the JSON constraints of ended sequences, which ends their forks.

    Runs on the engine thread, which alone uses the constraints.
    """
    for sequence in sequences:
        sequence.constraint = None


def _resolve_reload(loaded: asyncio.Future[None], error: ReloadError | None = None) -> None:
    """Let `EngineLoop.reload` return or raise `error`, unless its caller has been cancelled."""
    if loaded.done():
        return
    if error is None:
        loaded.set_result(None)
    else:
        loaded.set_exception(error)
