"""Check of text files before anything is written: encoding, layout, and every record."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence

from jmoe.data.file_formats import binary_format_advice
from jmoe.data.input_file import JSON_SUFFIX, MARK, PIECE_BYTES, InputFile, Report, parse_json_text
from jmoe.data.text_pieces import check_record

TABLE_SUFFIXES = (".csv", ".tsv")
TABLE_WAY = (
    "write its records as JSONL: pandas.read_csv(FILE).to_json(OUT, orient='records', lines=True),"
    " or name it .txt to learn it as text"
)
MAX_SHOWN = 20  # problems listed in an error message
MAX_PROBLEMS = 1000  # the check stops after this many


def check_and_detect_encodings(
    files: Sequence[InputFile], encodings: Sequence[str], report: Report
) -> list[InputFile]:
    """Read every file once; return the files with encoding and UTF-8 size filled in.

    Each file gets the first of `encodings` that decodes it. Raises ValueError that lists every file
    that is binary or cannot be decoded, and every bad record with its line.
    """
    checked: list[InputFile] = []
    bad: list[str] = []
    undecoded = False
    done_bytes, all_bytes = 0, sum(file.size_bytes for file in files)
    for file in files:

        def report_position(position: int, before: int = done_bytes) -> None:
            report("checking the text", before + position, all_bytes)

        fitting, problems = _check_and_detect_encoding(file, encodings, report_position)
        undecoded |= fitting is None
        checked += [fitting] if fitting is not None else []
        bad += problems
        if len(bad) >= MAX_PROBLEMS:
            break
        done_bytes += file.size_bytes
    if not bad:
        return checked
    message = describe_problems(bad, len(files))
    if undecoded:
        several = " ".join(dict.fromkeys((*encodings, "latin-1")))
        message += (
            f"\n--data.encoding {several} reads each file in the first of these encodings that"
            " fits it"
        )
    raise ValueError(message)


def describe_problems(problems: Sequence[str], num_files: int) -> str:
    """Return an error message that lists the first `MAX_SHOWN` problems of the text."""
    count = f"{MAX_PROBLEMS} or more" if len(problems) >= MAX_PROBLEMS else str(len(problems))
    shown = [
        *problems[:MAX_SHOWN],
        *([f"... and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []),
    ]
    return (
        f"data.path: {count} problem(s) in {num_files} file(s) of text; nothing was written:\n"
        + "\n".join(shown)
    )


def _check_and_detect_encoding(
    file: InputFile, encodings: Sequence[str], report: Callable[[int], None]
) -> tuple[InputFile | None, list[str]]:
    """Return (file with its encoding, problems). The file is None if no encoding fits."""
    fitting, problem = detect_encoding_and_layout(file, encodings, report)
    by_line = not problem or (fitting is None and file.suffix != JSON_SUFFIX)
    if file.field is not None and by_line:
        problems = list(itertools.islice(_find_bad_records(fitting or file, report), MAX_PROBLEMS))
        return fitting, problems or ([problem] if problem else [])
    return fitting, [problem] if problem else []


def detect_encoding_and_layout(
    file: InputFile, encodings: Sequence[str], report: Callable[[int], None]
) -> tuple[InputFile | None, str]:
    """Read a file once; return (the file with encoding, UTF-8 size and layout, its problem or "").

    The problem concerns the whole file: it is binary, damaged, or cannot be decoded. In the last
    case the file is None; records in UTF-8 may then still be read line by line.
    """
    try:
        with file.open_uncompressed() as f:
            binary = binary_format_advice(f)
        if binary is not None:
            return file, f"{file.path}: is {binary}"
        if file.suffix.lower() in TABLE_SUFFIXES:
            return file, f"{file.path}: is a table, not text; {TABLE_WAY}"
        fitting, problem = _with_fitting_encoding(file, encodings, report)
        if file.suffix == JSON_SUFFIX and fitting is not None:
            fitting, problem = _with_json_layout(fitting)
    except ValueError as error:  # of a stored file: damaged, or its library is missing
        return file, str(error)
    return fitting, problem


def _with_json_layout(file: InputFile) -> tuple[InputFile, str]:
    """Return (a `.json` file with `is_array` and size set, its problem or "")."""
    with file.open() as f:
        first = next((line for line in f if line.strip()), b"")
    if not first.lstrip().startswith(b"["):
        try:
            parse_json_text(first or b"{}")
        except ValueError:
            way = "write its records as JSONL, or name it .txt to learn it as text"
            return (
                file,
                f"{file.path}: is JSON, neither an array of records nor one record a line; {way}",
            )
        return file, ""
    file = dataclasses.replace(file, is_array=True)
    try:
        with file.open() as f:
            return dataclasses.replace(file, size_bytes=len(f.read())), ""
    except json.JSONDecodeError as error:
        return (
            file,
            (
                f"{file.path}: not a JSON array: {error.msg} at line {error.lineno}, column"
                f" {error.colno}"
            ),
        )
    except ValueError as error:
        return file, f"{file.path}: not a JSON array: {error}"


def _with_fitting_encoding(
    file: InputFile, encodings: Sequence[str], report: Callable[[int], None]
) -> tuple[InputFile | None, str]:
    """Return (file with its encoding and UTF-8 size, ""), or (None, problem of the first
    encoding).
    """
    problem = ""
    for encoding in encodings:
        name = codecs.lookup(encoding).name
        decoder = codecs.getincrementaldecoder(encoding)()
        position = utf8_bytes = pending = 0
        has_mark: bool | None = None  # not known before the first character
        try:
            with file.open_uncompressed() as f:
                while data := f.read(PIECE_BYTES):
                    pending = len(decoder.getstate()[0])
                    text = decoder.decode(data)
                    has_mark = text.startswith(MARK) if has_mark is None and text else has_mark
                    utf8_bytes += len(data) if name == "utf-8" else len(text.encode())
                    position += len(data)
                    report(position)
                pending = len(decoder.getstate()[0])
                utf8_bytes += len(decoder.decode(b"", final=True).encode())
        except UnicodeError as error:
            at = position - pending + getattr(error, "start", 0)
            reason = getattr(error, "reason", error)
            problem = problem or f"{file.path}: not {encoding.upper()} at byte {at}: {reason}"
        else:
            marked = bool(has_mark)
            utf8_bytes -= len(codecs.BOM_UTF8) * marked
            fitting = dataclasses.replace(file, encoding=name, size_bytes=utf8_bytes)
            return dataclasses.replace(fitting, has_mark=marked), ""
    return None, problem


def _find_bad_records(file: InputFile, report: Callable[[int], None]) -> Iterator[str]:
    with file.open() as f:
        position = 0
        for number, line in enumerate(f, 1):
            position += len(line)
            report(min(position, file.size_bytes))
            try:
                if line.strip():
                    check_record(line, file)
            except ValueError as error:
                yield f"{file.describe_line(number)}: {error}"
