"""Progress of data preparation, for the screen and for timeouts that watch for progress."""

import time
from collections.abc import Callable

from jmoe.status import duration_text


class PreparationProgress:
    """Prints the progress of `corpus.prepare_corpus`, at most one line every `every_s` seconds.

    Work that takes less than `every_s` prints nothing.
    """

    def __init__(self, say: Callable[[str], None], *, every_s: float = 10.0) -> None:
        self._say, self._every_s = say, every_s
        self._begun = self._shown = time.monotonic()
        self._latest = ("", 0, 0)

    def report(self, activity: str, done: int, total: int) -> None:
        """Record progress, and print a line if the last one is `every_s` seconds old.

        activity: what is under way. done, total: bytes; if `total` is 0, `done` counts items; if
        both are 0, the amount is unknown.
        """
        now = time.monotonic()
        # For work of unknown amount, the time of the report counts as progress.
        self._latest = (activity, done, total) if done else (activity, round(now), 0)
        if now - self._shown >= self._every_s:
            self._shown = now
            amount = (
                f", {100 * done // total} % of {total / 1e6:,.1f} MB"
                if total
                else f", {done:,}"
                if done
                else ""
            )
            self._say(f"preparing data: {activity}{amount}, {duration_text(now - self._begun)}")

    def progress_text(self) -> str:
        """Return a text that changes whenever progress is reported; empty before the first report.

        For work of unknown amount, the text changes at most every second.
        """
        what, done, total = self._latest
        return (
            f"{what} ({done:,} of {total:,} bytes)"
            if total
            else f"{what} ({done:,})"
            if what
            else ""
        )
