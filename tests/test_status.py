"""Status lines."""

import re
import time

from jmoe.status import first_line, status


def test_time_passes() -> None:
    """The text at once, then again with the seconds, until the end and no longer."""
    lines: list[str] = []
    with status("loading", lines.append, every_s=0.01):
        assert lines[0] == "loading ..."
        deadline = time.monotonic() + 240
        while len(lines) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    said = len(lines)
    assert said >= 4 and re.fullmatch(r"loading \.\.\. \d+ s", lines[1])
    time.sleep(0.05)
    assert len(lines) == said


def test_the_cause_at_the_end_of_a_long_error_is_shown() -> None:
    """Both ends of a long line are kept: Orbax puts the cause behind several paths."""
    assert first_line(OSError("short\nsecond")) == "short"
    assert first_line(KeyError()) == "KeyError"
    line = first_line(OSError("writing " + "/folder" * 200 + ": No space left on device\nmore"))
    assert line.startswith("writing /folder") and line.endswith(": No space left on device") and len(line) == 405
