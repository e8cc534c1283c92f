"""Status lines."""

import time

from jmoe.status import status


def test_time_passes() -> None:
    """The text at once, then again with the seconds, until the end and no longer."""
    lines: list[str] = []
    with status("loading", lines.append, every_s=0.01):
        assert lines[0] == "loading ..."
        deadline = time.monotonic() + 60
        while len(lines) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    said = len(lines)
    assert said >= 4 and lines[1] == "loading ... 0 s"
    time.sleep(0.05)
    assert len(lines) == said
