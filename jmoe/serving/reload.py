"""Replaces the weights of a server that goes on answering, on SIGHUP."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jmoe.config import ModelConfig
from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import ReloadError
from jmoe.inference.loading import open_checkpoint
from jmoe.models.tokenizer_file import TOKENIZER, companion_file_names
from jmoe.serving.engine_loop import EngineLoop
from jmoe.serving.errors import ApiError

log = logging.getLogger(__name__)

EXPECTED = ValueError, OSError, ReloadError, ApiError  # their messages need no traceback
OpenFolder = Callable[[], contextlib.AbstractContextManager[Path]]


@dataclass(frozen=True)
class ModelIdentity:
    """Configuration and files that a model with newer weights must share with the served one.

    files: SHA-256 of the tokenizer and of the files beside it, of which the server has made its
        template and defaults.
    """

    config: ModelConfig
    files: dict[str, str]

    @classmethod
    def read(cls, folder: Path, options: EngineConfig) -> Self:
        """Return the identity of a Hugging Face folder. Raises ValueError for a damaged one."""
        with open_checkpoint(folder, options) as checkpoint:  # the headers alone
            config = checkpoint.config
        names = [TOKENIZER, *companion_file_names(folder)]
        digests = {name: _file_digest(folder / name) for name in names if (folder / name).is_file()}
        return cls(config, digests)

    def check_replaceable_by(self, newer: Self, folder: Path) -> None:
        """Raise ValueError unless the served model can be replaced by the one in `folder`.

        newer: the identity of that folder.
        """
        words = "must be as of the served model; start the server again for another one"
        if newer.config != self.config:
            raise ValueError(f"config.json of {folder}: {words}")
        for name in sorted({*self.files, *newer.files}):
            if newer.files.get(name) != self.files.get(name):
                raise ValueError(f"{name} of {folder}: {words}")


def _file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Reloader:
    """Loads the newest weights of the served model when it is asked to; running requests end on
    the old ones, waiting and new ones run on the new.
    """

    def __init__(
        self,
        loop: EngineLoop,
        folder: Path,
        options: EngineConfig,
        open_folder: OpenFolder,
        say: Callable[[str], None],
    ) -> None:
        """folder: the served Hugging Face folder. open_folder: returns the context in which the
        newest one can be read; raises ValueError if the weights cannot be replaced.
        """
        self._loop, self._options = loop, options
        self._open_folder, self._say = open_folder, say
        self._identity = ModelIdentity.read(folder, options)
        self._in_use = contextlib.ExitStack()  # holds the folder of the last reload
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def request_reload(self) -> None:
        """Begin a reload, after the one under way if there is one. Do nothing if a reload already
        waits: it will load the same weights.
        """
        if len(self._tasks) > 1:
            return
        task = asyncio.create_task(self.reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def reload(self) -> None:
        """Load the newest weights. If that fails, report the error and keep the old weights."""
        async with self._lock:
            opened, begun_s = contextlib.ExitStack(), time.monotonic()
            try:
                folder = await asyncio.to_thread(self._open_newest_folder, opened)
                await self._loop.reload(folder)
            except Exception as error:
                opened.close()
                if not isinstance(error, EXPECTED):
                    log.exception("the reload has failed")
                self._say(f"the weights stay as they were: {error}")
                return
            self._in_use.close()
            self._in_use = opened
            self._say(f"reloaded from {folder} in {time.monotonic() - begun_s:.1f} s")

    def _open_newest_folder(self, opened: contextlib.ExitStack) -> Path:
        """Open and return the newest folder, which stays open until `opened` is closed.

        The path has no links: they may lead elsewhere when the engine reads an expert. Raises
        ValueError if the folder's model is another one.
        """
        folder = opened.enter_context(self._open_folder()).resolve()
        self._identity.check_replaceable_by(ModelIdentity.read(folder, self._options), folder)
        return folder
