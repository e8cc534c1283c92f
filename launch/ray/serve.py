"""Serve a model by replicas on a Ray cluster (Ray Serve): each replica is jmoe's server on some
node, and requests with one prefix go to one replica, whose cache has it.

python launch/ray/serve.py MODEL --ray HEAD:6379 --min-replicas 2 --max-replicas 8 [options of
serve.py]

Ray Serve starts the replicas, scales their number with the load, replaces those that are lost or
whose engine has failed, and lets a replica that it stops finish what it has begun.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jmoe import __version__
from jmoe.command_line import parse_serve
from jmoe.config.serving import ServeConfig
from jmoe.programs.batch_on_ray import describe_node, with_absolute_paths
from jmoe.ray_cluster import check_same_everywhere, connect, has_gpus
from jmoe.runtime import gpu_memory_environment

APPLICATION = "jmoe"
# Of the text that decides the replica: about a block of the cache, which is what prompts share.
PREFIX_CHARACTERS = 512
# fields of a body in the order in which they become the prompt's text
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
ATTEMPTS = 3  # of a request whose replica was lost before it said anything
# calls under way in a replica for each sequence of its batch; further ones go to the next replica
REPLICA_CALLS = 2
REPLICA_HEADER = b"x-jmoe-replica"
METRICS_TIMEOUT_S = 10.0
LOST = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError)


def prefix_of(body: bytes) -> str:
    """Return what decides a request's replica: the first characters of its prompt's fields; "" for
    a body without any.
    """
    try:
        fields = json.loads(body)
        parts = [fields[name] for name in PROMPT_FIELDS if fields.get(name)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return json.dumps(parts)[:PREFIX_CHARACTERS] if parts else ""


class PrefixRouter(RequestRouter):
    """Sends requests of one prefix to one replica while it has room, then to the next in an order
    that is the prefix's own (rendezvous hashing): lost and new replicas move few prefixes.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, each a rank of its own, the preferred one first."""
        prefix = pending_request.args[0] if pending_request and pending_request.args else ""
        prefix = prefix or str(random.random())

        def rank(replica: RunningReplica) -> bytes:
            name = f"{replica.replica_id.unique_id} {prefix}"
            return hashlib.blake2b(name.encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]


class Replica:
    """One engine behind jmoe's routes, called with the parts of an HTTP request."""

    def __init__(self, config: ServeConfig) -> None:
        os.environ |= gpu_memory_environment(os.environ)  # before JAX is imported
        from jmoe.programs.service import opened_service
        from jmoe.serving.api_keys import ApiKeys
        from jmoe.serving.app import make_app

        self._stack = contextlib.ExitStack()
        self._service = self._stack.enter_context(opened_service(config, print))
        self._app = make_app(self._service, ApiKeys(config.api_key_file), __version__)
        self._running = False

    def _start(self) -> None:
        if not self._running:  # in the event loop of the calls
            self._running = True
            self._service.loop.start()

    async def check_health(self) -> None:
        """Raise an error once the engine has failed, so that Ray Serve replaces the replica."""
        self._start()
        self._service.loop.check_ready()

    async def answer(
        self, prefix: str, scope: dict[str, Any], body: bytes
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the ASGI messages of the response. If the caller goes, the request is aborted.

        prefix: for the router, which sees the first argument.
        """
        self._start()
        name = serve.get_replica_context().replica_id.unique_id
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(64)
        pending, gone = [{"type": "http.request", "body": body}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not pending:
                await gone.wait()
                return {"type": "http.disconnect"}
            return pending.pop()

        async def run() -> None:
            try:
                await self._app(scope | {"state": {}}, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (REPLICA_HEADER, name.encode())]
                yield message
            await task  # its error, if it has one
        finally:
            gone.set()
            while not messages.empty():  # let it end
                messages.get_nowait()

    async def answer_whole(self, scope: dict[str, Any]) -> tuple[str, int, dict[str, str], bytes]:
        """Return (this replica's name, status, headers, body) of the response to a request without
        a body.
        """
        start, *rest = [message async for message in self.answer("", scope, b"")]
        body = b"".join(message.get("body", b"") for message in rest)
        return serve.get_replica_context().replica_id.unique_id, *_status_and_headers(start), body


class Ingress:
    """Takes HTTP requests, and passes each to a replica by its prefix.

    A request whose replica is lost is tried again if nothing of its answer was sent, and else ends
    with an error.
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._answer, self._broadcast = replicas.answer.options(stream=True), replicas.broadcast
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Return the response of a replica."""
        body = bytearray()
        async for data in request.stream():
            body += data
            if len(body) > self._max_body_bytes:
                return _error(413, f"the body has more than {self._max_body_bytes} bytes")
        names = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers")
        scope = {name: request.scope[name] for name in (*names, "scheme", "client", "server")}
        scope |= {"asgi": {"version": "3.0"}, "root_path": ""}
        if request.url.path == "/metrics":
            return await self._metrics(scope)
        for _ in range(ATTEMPTS):
            messages = self._answer.remote(prefix_of(bytes(body)), scope, bytes(body))
            try:
                start, first = await anext(messages), await anext(messages)
            except LOST:
                continue
            return _streamed(messages, start, first)
        return _error(503, f"{ATTEMPTS} replicas were lost while they had this request")

    async def _metrics(self, scope: dict[str, Any]) -> Response:
        """Return the metrics of all replicas, each sample with the label `replica`; the refusal of
        one if it refuses, and 503 if one says nothing in time. Lost replicas are left out.
        """
        from jmoe.serving.app import METRICS_TYPE
        from jmoe.serving.metrics import merge_metrics

        asked = self._broadcast("answer_whole", scope)
        try:
            answers = await asked.results_async(timeout_s=METRICS_TIMEOUT_S, return_exceptions=True)
        except TimeoutError:
            return _error(503, f"a replica did not say its metrics in {METRICS_TIMEOUT_S:.0f} s")
        texts: dict[str, str] = {}
        for answer in answers:
            if isinstance(answer, LOST):
                continue
            if isinstance(answer, BaseException):
                raise answer
            name, status, headers, body = answer
            if status != 200:
                return Response(body, status, headers)
            texts[name] = body.decode()
        return Response(merge_metrics(texts), 200, {"content-type": METRICS_TYPE})


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status)


def _streamed(messages: Any, start: dict[str, Any], first: dict[str, Any]) -> StreamingResponse:
    """Return the response that begins with two ASGI messages and goes on with `messages`."""
    status, headers = _status_and_headers(start)
    is_stream = headers.get("content-type", "").startswith("text/event-stream")

    async def content() -> AsyncIterator[bytes]:
        try:
            yield first.get("body", b"")
            async for message in messages:
                yield message.get("body", b"")
        except LOST as lost:
            if not is_stream:
                raise  # closes the connection before the body's end
            error = {"message": "the replica was lost", "type": "server_error", "code": None}
            yield f"data: {json.dumps({'error': error})}\n\n".encode()
            print(f"a replica was lost in a stream: {lost}", file=sys.stderr)
        finally:
            messages.cancel()

    return StreamingResponse(content(), status, headers)


def _status_and_headers(start: dict[str, Any]) -> tuple[int, dict[str, str]]:
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers


def make_application(
    config: ServeConfig,
    min_replicas: int,
    max_replicas: int,
    *,
    downscale_delay_s: float,
    on_gpus: bool,
) -> serve.Application:
    """Return the application: an ingress on every node with a proxy, and replicas that scale with
    the requests under way.

    downscale_delay_s: how long fewer requests are under way before a replica is stopped.
    """
    max_batch = config.engine.max_batch
    resources = {"num_gpus": config.engine.mesh.devices} if on_gpus else {"num_cpus": 1}
    replica = serve.deployment(Replica).options(
        ray_actor_options=resources,
        max_ongoing_requests=REPLICA_CALLS * max_batch,
        autoscaling_config=AutoscalingConfig(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            initial_replicas=min_replicas,
            target_ongoing_requests=max_batch,
            downscale_delay_s=downscale_delay_s,
        ),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        health_check_period_s=5,
    )
    ingress = serve.deployment(Ingress).options(
        ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000
    )
    return ingress.bind(replica.bind(config), config.max_body_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Deploy the application, and wait until a signal ends it."""
    parser = argparse.ArgumentParser(description="The other options are those of serve.py.")
    parser.add_argument("--ray", default="auto", help="HOST:PORT of the head, or auto")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=1)
    parser.add_argument(
        "--downscale-delay-s",
        type=float,
        default=AutoscalingConfig().downscale_delay_s,
        help="stop a replica after so many seconds of less load (%(default)s)",
    )
    options, others = parser.parse_known_args(arguments)
    config = parse_serve(others)
    if not 1 <= options.min_replicas <= options.max_replicas:
        sys.exit(
            f"--min-replicas = {options.min_replicas}: must be at least 1 and at most"
            f" --max-replicas = {options.max_replicas}"
        )
    if not 0 <= options.downscale_delay_s < float("inf"):
        sys.exit(
            f"--downscale-delay-s = {options.downscale_delay_s}: must be 0 or more, and finite"
        )
    config = with_absolute_paths(config)
    if not Path(config.model).exists():
        sys.exit(f"model = {config.model!r}: must be a folder that every node has at this path")
    try:
        cluster = connect(options.ray)
        adapters = list(config.engine.adapter_folders.values())
        check_same_everywhere(cluster, options.ray, describe_node, config.model, adapters)
        on_gpus = has_gpus(cluster)
    except ValueError as error:
        sys.exit(str(error))
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port))
    except TimeoutError as error:  # after 60 s; a busy node may need longer, and goes on
        print(error, file=sys.stderr)
    application = make_application(
        config,
        options.min_replicas,
        options.max_replicas,
        downscale_delay_s=options.downscale_delay_s,
        on_gpus=on_gpus,
    )
    serve.run(application, name=APPLICATION, blocking=True)


if __name__ == "__main__":
    main()
