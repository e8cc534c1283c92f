"""Reading of text files between two byte positions: pieces of documents, lines, and the text or
sample of a record.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence

from jmoe.data.input_file import PIECE_BYTES, InputFile, parse_json_text
from jmoe.data.samples import PreferencePair, Sample, holds_sample, parse_preference, parse_sample
from jmoe.types import Json

SAMPLE_WAY = "; it is a sample for fine-tuning, and here every record must be a text"


def read_pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    """Return an iterator of (text, whether the text ends its document) over bytes `start` up to
    `stop` of a file.

    Empty records are skipped. Raises ValueError that names the file and the byte or line of
    unreadable text.
    """
    if file.field is None:
        return _read_text_pieces(file, start, stop)
    return _read_record_pieces(file, start, stop)


def _read_text_pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open() as f:
        f.seek(start)
        position = start
        while position < stop:
            data = f.read(min(PIECE_BYTES, stop - position))
            data += f.readline(min(PIECE_BYTES, stop - position - len(data)))
            if not data:
                raise ValueError(f"{file.path}: became shorter while it was read")
            decoded = position - len(decoder.getstate()[0])
            position += len(data)
            try:
                text = decoder.decode(data, final=position >= stop)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file.path}: not UTF-8 at byte {decoded + error.start}: {error.reason}"
                ) from error
            yield text, position >= stop


def _read_record_pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    for position, line in read_lines(file, start, stop):
        if line.strip():
            try:
                text = text_of_record(line, file)
            except ValueError as error:
                raise ValueError(f"{describe_position(file, position)}: {error}") from error
            for first in range(0, len(text), PIECE_BYTES):
                yield text[first : first + PIECE_BYTES], first + PIECE_BYTES >= len(text)


def check_record(line: bytes, file: InputFile) -> None:
    """Raise ValueError if a line of a text file is not a valid sample or text record; the message
    says why.
    """
    if file.has_samples:
        sample_of_record(line, file)
    else:
        text_of_record(line, file)


def sample_of_record(line: bytes, file: InputFile) -> Sample | PreferencePair:
    """Return the sample for fine-tuning in a record's line. Raises ValueError that says what is
    wrong with it.
    """
    assert file.field is not None, file.path
    record = _parse_record(line)
    return parse_preference(record) if file.has_preferences else parse_sample(record, file.field)


def read_samples(
    file: InputFile, start: int, stop: int
) -> Iterator[tuple[int, Sample | PreferencePair]]:
    """Yield (byte position of the record, sample) over bytes `start` up to `stop` of a file.

    Raises ValueError that names the file and the line of an unreadable record.
    """
    for position, line in read_lines(file, start, stop):
        if line.strip():
            try:
                sample = sample_of_record(line, file)
            except ValueError as error:
                raise ValueError(f"{describe_position(file, position)}: {error}") from error
            yield position, sample


def read_lines(file: InputFile, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield (byte position, line) of the records in bytes `start` up to `stop` of a file."""
    with file.open() as f:
        f.seek(start)
        position = start
        while position < stop and (line := f.readline()):
            yield position, line
            position += len(line)


def describe_position(file: InputFile, position: int) -> str:
    """Return the file's name with the number of the line, or record, at a byte position."""
    return file.describe_line(_line_number(file, position))


def _parse_record(line: bytes) -> Json:
    try:
        return parse_json_text(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error


def text_of_record(line: bytes, file: InputFile) -> str:
    """Return the text in a record's line. Raises ValueError that says what is wrong with it."""
    field, record_is = file.field, "record" if file.is_array else "line"
    record = _parse_record(line)
    if not isinstance(record, dict) or field not in record:
        fields = (
            ", ".join(record)
            if isinstance(record, dict)
            else f"a {type(record).__name__}, not an object"
        )
        is_sample = field is not None and holds_sample(record, field)
        raise ValueError(
            f"data.field = {field!r}: not in this {record_is}, which has: {fields or 'nothing'}"
            f"{SAMPLE_WAY if is_sample else ''}"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"data.field = {field!r}: is a {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"data.field = {field!r}: half a surrogate pair at character {error.start}"
        ) from error
    return text


def _line_number(file: InputFile, position: int) -> int:
    with file.open() as f:
        line, left = 1, position
        while left > 0 and (data := f.read(min(PIECE_BYTES, left))):
            line += data.count(b"\n")
            left -= len(data)
    return line


def pick_training_texts(files: Sequence[InputFile], limit_bytes: int) -> Iterator[str]:
    """Yield about `limit_bytes` of the training text, from all files in proportion to size."""
    share = min(1.0, limit_bytes / max(1, sum(file.train_bytes for file in files)))
    left = limit_bytes
    for file in sorted(files, key=lambda file: file.random_rank):
        wanted = min(left, max(1, int(file.train_bytes * share)))
        for text, _ in read_pieces(file, 0, file.train_bytes):
            yield text
            wanted -= len(text)
            left -= len(text)
            if wanted <= 0:
                break
        if left <= 0:
            return
