"""Status lines."""

import re
import time

import pytest

from jmoe.status import first_error_line, status


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


def test_how_much_is_done() -> None:
    lines: list[str] = []
    with status("loading", lines.append, every_s=0.01, amount=lambda: f"{len(lines)} of 9"):
        deadline = time.monotonic() + 240
        while len(lines) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert lines[0] == "loading ..." and re.fullmatch(r"loading \.\.\. 1 of 9, \d+ s", lines[1])


def test_how_long_it_took() -> None:
    """Where it ends well; an error says enough."""
    lines: list[str] = []
    with status("loading", lines.append, timed=True):
        pass
    assert len(lines) == 2 and re.fullmatch(r"loading: \d+\.\d s", lines[1])
    with pytest.raises(ValueError, match="broken"), status("loading", lines.append, timed=True):
        raise ValueError("broken")
    assert lines[2:] == ["loading ..."]


def test_the_cause_at_the_end_of_a_long_error_is_shown() -> None:
    """Both ends of a long line are kept: Orbax puts the cause behind several paths."""
    assert first_error_line(OSError("short\nsecond")) == "short"
    assert first_error_line(KeyError()) == "KeyError"
    line = first_error_line(
        OSError("writing " + "/folder" * 200 + ": No space left on device\nmore")
    )
    assert (
        line.startswith("writing /folder")
        and line.endswith(": No space left on device")
        and len(line) == 405
    )
