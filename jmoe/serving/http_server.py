"""uvicorn, with an orderly end: what runs is finished, or its time runs out, and the exit status is 0."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from jmoe.serving.engine_loop import EngineLoop

BACKLOG = 1024
GRACE_S = 5.0  # for the last errors to go out


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT; a second SIGINT does not wait for what runs."""

    def __init__(self, app: FastAPI, loop: EngineLoop, drain_timeout_s: float, announce: Callable[[], None]) -> None:
        AppStatus.disable_automatic_graceful_drain()  # it would cut every stream at SIGTERM
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=int(drain_timeout_s + GRACE_S),
                backlog=BACKLOG,
            )
        )
        self._engine_loop, self._drain_timeout_s, self._announce = loop, drain_timeout_s, announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's would raise the signal again when all is done, and end the process with its status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain, number)
        yield

    def _drain(self, number: int) -> None:
        if not self.should_exit:
            self._engine_loop.drain(self._drain_timeout_s)
        self.handle_exit(number, None)


def bind(host: str, port: int) -> socket.socket:
    """A socket to listen on, taken before the model is loaded; `OSError` naming the address if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(f"host = {host!r}, port = {port}: {error.strerror or error}") from error
    return found
