"""Lines that say what a program is doing while nothing else does, with the time that has passed.
Standard library.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


def duration(seconds: float) -> str:
    """Return `4:05`, or `1:04:05` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@contextlib.contextmanager
def repeating(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `action` every `every_s` seconds, on a thread of its own, until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            action()

    thread = threading.Thread(target=repeat, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def status(
    text: str,
    say: Callable[[str], None],
    *,
    every_s: float = 10.0,
    timed: bool = False,
    amount: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Say `text ...` at once, and again with the seconds that have passed every `every_s` seconds
    until the end.

    timed: say also how long all of it took, where it ends well. amount: returns how much is done,
    to say it too.
    """
    begun = time.monotonic()
    say(f"{text} ...")

    def say_again() -> None:
        done = "" if amount is None else f"{amount()}, "
        say(f"{text} ... {done}{time.monotonic() - begun:.0f} s")

    with repeating(say_again, every_s):
        yield
    if timed:
        say(f"{text}: {time.monotonic() - begun:.1f} s")


def first_line(error: BaseException, most: int = 400) -> str:
    """Return the first line of an error's text: of a long one both ends, as libraries name the
    cause last.
    """
    line = str(error).partition("\n")[0] or type(error).__name__
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-(most // 2) :]}"
