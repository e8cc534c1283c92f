"""A uvicorn server that drains on SIGTERM: running requests finish or time out, and the exit
status is 0.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from jmoe.config import check
from jmoe.config.serving import ServeConfig
from jmoe.serving.connection import Connections
from jmoe.serving.engine_loop import EngineLoop

BACKLOG = 1024
OTHER_FILES = 256  # open files besides connections: experts, forks, libraries
GRACE_S = 5.0  # time to send the last errors
IDLE_CHECK_S = 0.05


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT; a second SIGINT exits immediately.

    While running requests drain, the server keeps listening and answers new requests and probes
    with 503.
    """

    def __init__(
        self,
        app: FastAPI,
        loop: EngineLoop,
        config: ServeConfig,
        announce: Callable[[], None],
        on_hangup: Callable[[], None],
    ) -> None:
        """announce: called once the server listens. on_hangup: called in the event loop at SIGHUP,
        unless a terminal may send it.
        """
        AppStatus.disable_automatic_graceful_drain()  # else SIGTERM would cut every stream
        super().__init__(
            uvicorn.Config(
                app,
                http=Connections(config).make_connection,  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=int(config.drain_timeout_s + GRACE_S),
                backlog=BACKLOG,
            )
        )
        self._engine_loop = loop
        self._drain_timeout_s = config.drain_timeout_s
        self._announce, self._on_hangup = announce, on_hangup
        self._draining: asyncio.Task[None] | None = None
        self._interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            gc.collect()
            # keeps later collections, which large bodies trigger, from scanning loaded modules
            gc.freeze()
            if (leader := self._engine_loop.engine.leader) is not None:
                leader.on_stop = partial(
                    asyncio.get_running_loop().call_soon_threadsafe, self._drain_for_follower
                )
                self._watching = asyncio.create_task(self._exit_when_process_lost())
            self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the handlers that drain at SIGTERM and SIGINT, and that of SIGHUP.

        uvicorn's own version re-raises the signal at the end, which would make the exit status
        nonzero.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._start_draining, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGINT, self._handle_interrupt)
        if not os.isatty(0):  # a terminal that is closed ends the server
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        yield

    def _handle_interrupt(self) -> None:
        """Start to drain at the first Ctrl-C; exit the process at the second."""
        if self._interrupted:
            print("a second Ctrl-C: ended at once", flush=True)
            os._exit(128 + signal.SIGINT)
        self._interrupted = True
        print(
            f"ending: what runs has {self._drain_timeout_s:g} s; Ctrl-C once more ends it at once",
            flush=True,
        )
        self._start_draining(signal.SIGINT)

    def _start_draining(self, signal_number: int) -> None:
        """Start to drain, and exit when idle; if a drain is under way, exit without waiting."""
        if self._draining is None:
            self._engine_loop.start_draining(self._drain_timeout_s)
            self._draining = asyncio.create_task(self._exit_when_idle(signal_number))
        else:
            self.should_exit = True
            self.handle_exit(signal_number, None)

    def _drain_for_follower(self) -> None:
        """Start to drain because another process of the engine got a signal to end."""
        if self._draining is None:
            print("another process of the engine got a signal to end", flush=True)
            self._start_draining(signal.SIGTERM)

    async def _exit_when_process_lost(self) -> None:
        """Exit some time after another process of the engine was lost, so that a supervisor
        restarts all of them.

        Until then, for `drain_timeout_s` seconds, requests get the reason in a 503 response.
        """
        await self._engine_loop.lost_process.wait()
        await asyncio.sleep(self._drain_timeout_s)
        self.should_exit = True

    async def _exit_when_idle(self, signal_number: int) -> None:
        """End the server once no sequence is unfinished."""
        while self._engine_loop.is_busy and not self.should_exit:
            await asyncio.sleep(IDLE_CHECK_S)
        if not self.should_exit:
            self.handle_exit(signal_number, None)


def allow_open_files(max_connections: int) -> None:
    """Raise the soft limit of open files to `max_connections` plus `OTHER_FILES`.

    Without that, accepting a connection at the file limit would fail before another connection can
    be evicted. Raises ValueError if the hard limit is lower.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        fits = most == resource.RLIM_INFINITY or needed <= most
        least = f"so many and {OTHER_FILES} other files need ulimit -n {needed}, which is {most}"
        check(fits, "max_connections", max_connections, f"must be smaller: {least}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; called before the model is loaded, so that a used port
    fails early.

    Raises OSError that names the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(f"host = {host!r}, port = {port}: {error.strerror or error}") from error
    return listening
