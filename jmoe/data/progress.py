"""How far the preparing of data is, for the screen and for limits on time without progress."""

import time
from collections.abc import Callable

from jmoe.status import duration


class PreparingData:
    """Takes the reports of `prepare`; says a line every `every_s` seconds, and nothing of what
    takes less.
    """

    def __init__(self, say: Callable[[str], None], *, every_s: float = 10.0) -> None:
        self._say, self._every_s = say, every_s
        self._begun = self._shown = time.monotonic()
        self._latest = ("", 0, 0)

    def report(self, what: str, done: int, total: int) -> None:
        """Take note of what is being done, and of how much of how much is done."""
        now = time.monotonic()
        # What tells no amount goes on while it reports: seconds are its progress.
        self._latest = (what, done, total) if done else (what, round(now), 0)
        if now - self._shown >= self._every_s:
            self._shown = now
            amount = (
                f", {100 * done // total} % of {total / 1e6:,.1f} MB"
                if total
                else f", {done:,}"
                if done
                else ""
            )
            self._say(f"preparing data: {what}{amount}, {duration(now - self._begun)}")

    def progress(self) -> str:
        """Return text that changes with every report of progress; empty before the first."""
        what, done, total = self._latest
        return (
            f"{what} ({done:,} of {total:,} bytes)"
            if total
            else f"{what} ({done:,})"
            if what
            else ""
        )
