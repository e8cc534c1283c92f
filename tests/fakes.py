"""Stand-ins that tests share, and waiting for a condition."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


def wait_for(
    condition: Callable[[], bool], what: str = "the condition does not hold", limit_s: float = 240.0
) -> None:
    """Return when the condition holds; fail with `what` after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def wait_for_text(log: Path, text: str, limit_s: float = 240) -> None:
    """Return when the log has the text; fail with the log after `limit_s` seconds."""
    deadline_s = time.monotonic() + limit_s
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline_s, (
            f"{text!r} did not appear in {log}:\n{log.read_text()}"
        )
        time.sleep(0.05)


class Gate:
    """Stands before a store's `read_into` or `write`: calls are noted, may be held up, and may
    fail once.
    """

    def __init__(self, store: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.real: Callable[[int, NDArray[np.uint8]], None] = getattr(store, method)
        self.begun: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.fail: dict[int, Exception] = {}
        monkeypatch.setattr(store, method, self)

    def __call__(self, index: int, record_R: NDArray[np.uint8]) -> None:
        self.begun.append(index)
        assert self.open.wait(240)
        if index in self.fail:
            raise self.fail.pop(index)
        self.real(index, record_R)


def run_in_threads(work: Callable[[int], None], count: int, limit_s: float = 120.0) -> None:
    """Run `work(0)`, `work(1)`, ... in threads of their own; raise the first error."""
    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(work, number) for number in range(count)]:
            done.result(limit_s)
