r"""Load a server of the OpenAI API and measure throughput, waiting times and refusals.

    python benchmarks/serve/load.py --url http://127.0.0.1:8000 --concurrency 32 --requests 256
    python benchmarks/serve/load.py --rate 4 --requests 500
    python benchmarks/serve/load.py --requests 10000 --disconnect-fraction 0.5 --start DIR \
        --policy ring

--concurrency keeps so many requests open (a closed loop); --rate sends them at random, so many a
second. Any such server will do (vLLM, llama.cpp). `--start MODEL_DIR [options of serve.py]`, last,
starts `serve.py` on a free port, waits until it is ready, stops it at the end, and adds its
resident memory. Prompts are pieces of `--text FILE`, or of this file. Tokens are counted by the
server's `usage`, or else as pieces of the stream.

`--engine MODEL_DIR [options of serve.py]`, last, gives the same prompts to the engine at once,
without HTTP. A server's throughput beside its engine's, in turn:

    load='python benchmarks/serve/load.py --concurrency 32 --max-tokens 32 --ignore-eos'
    python benchmarks/lib/alternate.py "$load --engine DIR --max-batch 32" \
        "$load --start DIR --max-batch 32 --max-waiting 200"

Clients take time from an engine on the same cores. `--cores 1` gives the first core to the engine,
or to the server with its engine, and the others to the clients. With `--start` and `--engine`,
`processor_us` is what a token of an answer takes of the processor, spinning included, by thread:
`main` (the server's event loop; the engine where it is alone), `clients` (this process), all others
by their names: `tf_XLAEigen` is XLA's, `python` the server's engine and the helpers of native
operations (from Python 3.14 on, a thread of Python has its own name).
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    # jmoe need not be installed to load another server
    script.start(reexec="--engine" in sys.argv)

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import ROOT
from benchmarks.lib.report import JsonObject

SERVE = ROOT / "serve.py"
ANSWER_FIELDS = ("content", "reasoning", "tool_calls")  # of a delta of a chat
COMPLETED, DISCONNECTED, REJECTED, FAILED = "completed", "disconnected", "rejected", "failed"
STOP_S = 60  # a server gets so long to stop


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--chat", action="store_true", help="/v1/chat/completions in place of /v1/completions"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=1, help="requests before the clock starts")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=int, default=8, help="clients that each wait for their answer"
    )
    load.add_argument(
        "--rate", type=float, help="arrivals per second, whether or not earlier ones are answered"
    )
    parser.add_argument(
        "--disconnect-fraction",
        type=float,
        default=0.0,
        help="clients that leave within their answer",
    )
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--prompt-chars", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="always --max-tokens, for servers that know the field",
    )
    parser.add_argument("--request-timeout-s", type=float, default=600)
    parser.add_argument("--start-timeout-s", type=float, default=600)
    parser.add_argument("--cores", type=int, help="of the server or engine; clients get the others")
    parser.add_argument("--seed", type=int, default=0)
    served = parser.add_mutually_exclusive_group()
    served.add_argument("--start", nargs=argparse.REMAINDER, metavar="MODEL_DIR")
    served.add_argument("--engine", nargs=argparse.REMAINDER, metavar="MODEL_DIR")
    a = parser.parse_args(argv)
    check_arguments(parser, a)
    return a


def check_arguments(parser: argparse.ArgumentParser, a: argparse.Namespace) -> None:
    """End the program with a message if an option is out of range or does not fit another."""
    for name, ok, rule in (
        ("requests", a.requests > 0, "must be greater than 0"),
        ("concurrency", a.concurrency > 0, "must be greater than 0"),
        ("rate", a.rate is None or a.rate > 0, "must be greater than 0"),
        ("disconnect-fraction", 0 <= a.disconnect_fraction <= 1, "must be between 0 and 1"),
        (
            "cores",
            a.cores is None or 0 < a.cores < len(os.sched_getaffinity(0)),
            "must leave a core to the clients",
        ),
        ("cores", a.cores is None or a.start or a.engine, "needs --start or --engine"),
        ("start", a.start != [], "needs a model folder"),
        ("engine", a.engine != [], "needs a model folder"),
        (
            "engine",
            a.engine is None or not (a.chat or a.rate or a.disconnect_fraction),
            "takes whole prompts at once",
        ),
    ):
        if not ok:
            parser.error(f"--{name} {rule}")


@dataclass(frozen=True)
class Plan:
    """A request's body, and after how many pieces of the answer the client leaves (or None)."""

    body: JsonObject
    leaves_after: int | None


@dataclass
class Outcome:
    """The outcome of a request. Times in seconds since it was sent; None if never reached."""

    kind: str = FAILED
    reason: str = ""
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def plans(a: argparse.Namespace, model: str) -> list[Plan]:
    """Return the requests; equal seeds give equal requests."""
    rng = random.Random(a.seed)
    text = a.text.read_text(encoding="utf-8", errors="replace")
    common = {
        "model": model,
        "max_tokens": a.max_tokens,
        "temperature": a.temperature,
        "stream": True,
    }
    common |= {"stream_options": {"include_usage": True}} | (
        {"ignore_eos": True} if a.ignore_eos else {}
    )
    made = []
    for _ in range(a.requests):
        start = rng.randrange(max(1, len(text) - a.prompt_chars))
        prompt = text[start : start + a.prompt_chars]
        said = {"messages": [{"role": "user", "content": prompt}]} if a.chat else {"prompt": prompt}
        leaves = rng.randrange(a.max_tokens) if rng.random() < a.disconnect_fraction else None
        made.append(Plan(common | said, leaves))
    return made


class Client:
    """Sends requests to one server."""

    def __init__(self, session: httpx.AsyncClient, url: str, chat: bool, timeout_s: float) -> None:
        self.session, self.url, self.timeout_s = session, url.rstrip("/"), timeout_s
        self.path = "/v1/chat/completions" if chat else "/v1/completions"

    async def get(self, path: str) -> Any:
        """A JSON answer, None where there is no such path."""
        response = await self.session.get(self.url + path)
        if response.status_code == 404:
            return None
        return response.raise_for_status().json()

    async def ask(self, plan: Plan) -> Outcome:
        """Send one request and read its answer, or leave."""
        outcome = Outcome()
        begun = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.session.stream("POST", self.url + self.path, json=plan.body) as response,
            ):
                if response.status_code == 429:
                    outcome.kind = REJECTED
                    outcome.reason = (
                        "Retry-After" if "Retry-After" in response.headers else "no Retry-After"
                    )
                elif not response.is_success:
                    await response.aread()
                    outcome.reason = f"{response.status_code}: {response.text[:200]}"
                else:
                    await self._read(response, plan, outcome, begun)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            outcome.kind, outcome.reason = FAILED, f"{type(error).__name__}: {error}"
        return outcome

    async def _read(
        self, response: httpx.Response, plan: Plan, outcome: Outcome, begun: float
    ) -> None:
        pieces = 0
        async for event in events(response):
            if "error" in event:
                raise ValueError(event["error"]["message"])
            if usage := event.get("usage"):
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.completion_tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                delta = choice.get("delta", {})
                if choice.get("text") or any(map(delta.get, ANSWER_FIELDS)):
                    pieces += 1
                    outcome.last_s = time.perf_counter() - begun
                    outcome.first_s = outcome.first_s or outcome.last_s
            if plan.leaves_after is not None and pieces > plan.leaves_after:
                outcome.kind, outcome.completion_tokens = DISCONNECTED, pieces
                await response.aclose()
                return
        outcome.kind = COMPLETED
        outcome.completion_tokens = outcome.completion_tokens or pieces


async def events(response: httpx.Response) -> AsyncIterator[JsonObject]:
    """The data of server-sent events; `[DONE]` must come."""
    rest, ended = b"", False
    async for read in response.aiter_bytes():
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                ended = True  # but read on, so that the connection serves the next request
            elif data:
                yield json.loads(data)
    if not ended:
        raise ValueError("the stream ended without [DONE]")


async def closed_loop(client: Client, requests: Sequence[Plan], concurrency: int) -> list[Outcome]:
    """Each of the clients sends the next request when its last one is done."""
    left, outcomes = iter(requests), []

    async def one_client() -> None:
        for plan in left:
            outcomes.append(await client.ask(plan))

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return outcomes


async def open_loop(
    client: Client, requests: Sequence[Plan], rate: float, seed: int
) -> list[Outcome]:
    """Poisson arrivals."""
    rng, due, sent = random.Random(seed), time.perf_counter(), []
    for plan in requests:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent.append(asyncio.create_task(client.ask(plan)))
    return await asyncio.gather(*sent)


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median, 95th and 99th percentile."""
    if not values:
        return None
    cuts = (
        statistics.quantiles(values, n=100, method="inclusive")
        if len(values) > 1
        else list(values) * 99
    )
    return {"median": round(cuts[49], 4), "p95": round(cuts[94], 4), "p99": round(cuts[98], 4)}


def report(outcomes: Sequence[Outcome], duration_s: float) -> JsonObject:
    """Return the figures of a run. Waiting times are those of completed requests."""
    kinds = Counter(outcome.kind for outcome in outcomes)
    done = [
        o
        for o in outcomes
        if o.kind == COMPLETED and o.first_s is not None and o.last_s is not None
    ]
    tokens = sum(outcome.completion_tokens for outcome in outcomes)
    per_token = [
        (o.last_s - o.first_s) / (o.completion_tokens - 1) for o in done if o.completion_tokens > 1
    ]
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.kind == FAILED)
    return {
        "duration_s": round(duration_s, 6),
        "tokens_per_s": round(tokens / duration_s, 2),
        "requests_per_s": round(kinds[COMPLETED] / duration_s, 3),
        "time_to_first_token_s": quantiles([o.first_s for o in done]),
        "time_per_output_token_s": quantiles(per_token),
        **{kind: kinds[kind] for kind in (COMPLETED, DISCONNECTED, REJECTED, FAILED)},
        "rejected_with_retry_after": sum(
            o.reason == "Retry-After" for o in outcomes if o.kind == REJECTED
        ),
        "reasons": dict(reasons.most_common(5)),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in outcomes),
        "completion_tokens": tokens,
    }


async def held_when_idle(client: Client) -> dict[str, int] | None:
    """Return what jmoe's server holds once it is idle, within 10 s; None for other servers."""
    names = ("requests_running", "requests_waiting", "kv_tokens_used")
    for _ in range(50):
        live = await client.get("/live")
        if live is None:
            return None
        if not live["requests_running"] + live["requests_waiting"]:
            break
        await asyncio.sleep(0.2)
    return {name: live[name] for name in names}


async def measure(
    a: argparse.Namespace, url: str, server: subprocess.Popen[bytes] | None
) -> JsonObject:
    """Warm up, put on the load, report."""
    headers = {"Authorization": f"Bearer {a.api_key}"} if a.api_key else {}
    client_options = {
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        "timeout": None,
        "trust_env": False,
    }
    async with httpx.AsyncClient(headers=headers, **client_options) as session:
        client = Client(session, url, a.chat, a.request_timeout_s)
        requests = plans(a, a.model or (await client.get("/v1/models"))["data"][0]["id"])
        warm_up = [await client.ask(plan) for plan in requests[: a.warm_up]]
        async with memory_of(server) as memory, processor_times(server) as processor_s:
            begun = time.perf_counter()
            if a.rate is None:
                outcomes = await closed_loop(client, requests, a.concurrency)
            else:
                outcomes = await open_loop(client, requests, a.rate, a.seed)
            result = report(outcomes, time.perf_counter() - begun)
        result["warm_up_failed"] = sum(outcome.kind == FAILED for outcome in warm_up)
        result["left_behind"] = await held_when_idle(client)
    if server:
        result["processor_us"] = microseconds_per_token(processor_s, result["completion_tokens"])
    if memory:  # what grows at first and then no more is no leak
        result["server_rss_bytes"] = {
            "start": memory[0],
            "middle": memory[len(memory) // 2],
            "end": memory[-1],
        }
    return result


@contextlib.asynccontextmanager
async def memory_of(server: subprocess.Popen[bytes] | None) -> AsyncIterator[list[int]]:
    """Resident bytes of a server and its children: at once, every second, and at the end. Empty
    without a server.
    """
    seen: list[int] = []

    def look() -> None:
        if server:
            process = psutil.Process(server.pid)
            seen.append(
                sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
            )

    async def keep_looking() -> None:
        while True:
            look()
            await asyncio.sleep(1)

    task = asyncio.create_task(keep_looking())
    try:
        yield seen
    finally:
        task.cancel()
    look()


def thread_times(pid: int) -> dict[str, float]:
    """Return a process's processor seconds by thread: `main`, others by name without number."""
    seconds: dict[str, float] = defaultdict(float)
    for thread in psutil.Process(pid).threads():
        try:
            name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip().split("/")[0]
        except FileNotFoundError:  # it has ended
            continue
        seconds["main" if thread.id == pid else name] += thread.user_time + thread.system_time
    return seconds


@contextlib.asynccontextmanager
async def processor_times(
    server: subprocess.Popen[bytes] | None,
) -> AsyncIterator[dict[str, float]]:
    """Processor seconds, until the end, of a server's threads and of the `clients`; filled at the
    end.
    """
    taken: dict[str, float] = {}
    before, own_s = thread_times(server.pid) if server else {}, time.process_time()
    yield taken
    taken["clients"] = time.process_time() - own_s
    if server:
        taken |= difference(before, thread_times(server.pid))


def difference(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Return processor seconds by thread between two readings; ended threads are left out."""
    return {name: s - before.get(name, 0.0) for name, s in now.items()}


def microseconds_per_token(seconds: dict[str, float], tokens: int) -> dict[str, float]:
    """Return microseconds a token by thread, the longest first, without those below one."""
    us = {name: round(s * 1e6 / max(1, tokens), 1) for name, s in seconds.items()}
    return {
        name: us[name] for name in sorted(us, key=us.__getitem__, reverse=True) if us[name] >= 1
    }


@contextlib.contextmanager
def started(
    arguments: Sequence[str], timeout_s: float, cores: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `serve.py` on a free port and the first cores; SIGTERM at the end must give status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What the server prints goes to stderr: the last line of stdout is the result.
    with on_cores(0, cores):
        server = subprocess.Popen(
            [sys.executable, SERVE, *arguments, "--port", str(port)], stdout=sys.stderr
        )
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(ready(url, server, timeout_s))
        yield url, server
        server.send_signal(signal.SIGTERM)
        if server.wait(STOP_S):
            raise RuntimeError(f"serve.py ended with status {server.returncode}")
    finally:
        server.kill()
        server.wait()


async def ready(url: str, server: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for /ready to answer 200."""
    until = time.perf_counter() + timeout_s
    async with httpx.AsyncClient(timeout=5, trust_env=False) as session:
        while time.perf_counter() < until:
            if server.poll() is not None:
                raise RuntimeError(
                    f"serve.py ended with status {server.returncode} before it was ready"
                )
            with contextlib.suppress(httpx.HTTPError):  # it does not listen yet
                if (await session.get(f"{url}/ready")).is_success:
                    return
            await asyncio.sleep(0.2)
    raise TimeoutError(f"serve.py was not ready within {timeout_s} s")


def engine_alone(a: argparse.Namespace) -> JsonObject:
    """Run all requests at once in the engine that `serve.py` would make."""
    from jmoe.command_line import parse_serve
    from jmoe.deploy.model_folder import hugging_face_folder
    from jmoe.inference.engine import Engine

    config = parse_serve(a.engine)
    prompts = [plan.body["prompt"] for plan in plans(a, config.model)]
    sampling = {
        "max_new_tokens": a.max_tokens,
        "temperature": a.temperature,
        "ignore_eos": a.ignore_eos,
    }
    with (
        hugging_face_folder(config.model, print) as folder,
        Engine(folder, config.engine) as engine,
    ):
        engine.generate(prompts[: a.warm_up], **sampling)
        before, begun = thread_times(os.getpid()), time.perf_counter()
        completions = engine.generate(prompts, **sampling)
        duration_s = time.perf_counter() - begun
        processor_s = difference(before, thread_times(os.getpid()))
    tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "duration_s": round(duration_s, 6),
        "tokens_per_s": round(tokens / duration_s, 2),
        COMPLETED: len(completions),
        "prompt_tokens": sum(len(completion.prompt_token_ids) for completion in completions),
        "completion_tokens": tokens,
        "processor_us": microseconds_per_token(processor_s, tokens),
    }


@contextlib.contextmanager
def on_cores(first: int, end: int | None) -> Iterator[None]:
    """Run this thread, and all that it starts in the block, on these of its cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[first:end])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main(argv: Sequence[str] | None = None) -> None:
    a = arguments(argv)
    if a.engine:
        with on_cores(0, a.cores):
            result = engine_alone(a)
    elif a.start:
        with (
            started(a.start, a.start_timeout_s, a.cores) as (url, server),
            on_cores(a.cores or 0, None),
        ):
            result = asyncio.run(measure(a, url, server))
    else:
        result = asyncio.run(measure(a, a.url, None))
    kept = {
        key: str(v) if isinstance(v, Path) else v for key, v in vars(a).items() if key != "api_key"
    }
    print(json.dumps(result | {"args": kept}))


if __name__ == "__main__":
    main()
