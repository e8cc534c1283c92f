"""Keys that change while the server runs."""

import logging
from pathlib import Path

import pytest

from jmoe.serving.api_keys import ApiKeys


def test_keys_are_those_that_the_file_has_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a file that is being written nothing counts yet; one without keys, or none, changes
    nothing.
    """
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n")
    keys = ApiKeys(str(file))
    assert keys and keys.match("first") and keys.match("second") and not keys.match("third")
    file.write_text("second\nthi")
    keys.reload()
    assert keys.match("first") and not keys.match("thi")
    file.write_text("second\nthird\n")
    keys.reload()
    assert keys.match("first"), "it may not be whole yet"
    keys.reload()
    assert not keys.match("first") and keys.match("second") and keys.match("third")
    for spoil in (
        lambda: file.write_bytes(b"\n"),
        lambda: file.write_bytes(b"\xff\n"),
        file.unlink,
    ):
        caplog.clear()
        spoil()
        with caplog.at_level(logging.ERROR):
            for _ in range(4):
                keys.reload()
        (record,) = caplog.records
        assert str(file) in record.getMessage() and record.getMessage().endswith(
            "; the keys before stay"
        )
        assert keys.match("third")


def test_a_file_of_an_editor_that_marks_its_bytes(tmp_path: Path) -> None:
    """As Windows' editors write it: a mark of the byte order first, and other ends of lines."""
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")
    keys = ApiKeys(str(file))
    assert keys.match("first") and keys.match("second") and not keys.match("\ufefffirst")


def test_no_file_lets_everyone_in() -> None:
    assert not ApiKeys(None)
