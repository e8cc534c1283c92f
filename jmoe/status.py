"""Progress messages with elapsed time for long phases such as compilation. Standard library
only.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


def duration_text(seconds: float) -> str:
    """Return seconds as text: `4:05`, or `1:04:05` from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@contextlib.contextmanager
def call_repeatedly(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Context manager that calls `action` every `every_s` seconds, in its own thread, until the
    block ends.
    """
    ended = threading.Event()

    def repeat_action() -> None:
        while not ended.wait(every_s):
            action()

    thread = threading.Thread(target=repeat_action, name="status", daemon=True)
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
    """Context manager that says `text ...` at once, and again with the elapsed seconds every
    `every_s` seconds.

    say: a function that prints a line. timed: also say the total time if the block ends without an
    error. amount: a function that returns how much is done, as text to be shown with the elapsed
    time.
    """
    begun = time.monotonic()
    say(f"{text} ...")

    def say_again() -> None:
        done = "" if amount is None else f"{amount()}, "
        say(f"{text} ... {done}{time.monotonic() - begun:.0f} s")

    with call_repeatedly(say_again, every_s):
        yield
    if timed:
        say(f"{text}: {time.monotonic() - begun:.1f} s")


def first_error_line(error: BaseException, max_characters: int = 400) -> str:
    """Return the first line of an error's text, or its type's name if the text is empty.

    Of a line longer than `max_characters`, return both ends, as libraries often name the cause
    last.
    """
    line = str(error).partition("\n")[0] or type(error).__name__
    return (
        line
        if len(line) <= max_characters
        else f"{line[: max_characters // 2]} ... {line[-(max_characters // 2) :]}"
    )
