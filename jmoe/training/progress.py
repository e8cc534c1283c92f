"""Lines that say how far the preparing of data is."""

import time
from collections.abc import Callable

from jmoe.training.metrics import duration
from jmoe.training.text_files import Report


def progress_lines(say: Callable[[str], None], *, every_s: float = 10.0) -> Report:
    """Return a `Report` that says a line every `every_s` seconds, and nothing of what takes less."""
    begun = shown = time.monotonic()

    def report(what: str, done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < every_s:
            return
        shown = now
        amount = f", {100 * done // total} % of {total / 1e6:,.1f} MB" if total else f", {done:,}" if done else ""
        say(f"preparing data: {what}{amount}, {duration(now - begun)}")

    return report
