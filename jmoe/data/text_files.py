"""Finding, checking, splitting (train and held-out) and reading of text files.

A document is a text file, a line of a JSONL file, or a record of a JSON array or of a Parquet file.
The order of files and the split depend on file names relative to the given path, so they are the
same on every machine. Byte positions refer to the UTF-8 form of a file: a compressed file is
unpacked as it is read, a file in another encoding is converted in memory, and records are lines of
JSONL. A byte order mark at the head of a file is no part of its text.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
import hashlib
import io
import itertools
import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jmoe.data.file_formats import binary_format_advice
from jmoe.data.samples import (
    PreferencePair,
    Sample,
    holds_sample,
    parse_preference,
    parse_sample,
)
from jmoe.data.stored_files import (
    STORED_SUFFIXES,
    Storage,
    detect_storage,
    open_text,
    text_suffix,
)
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.types import Json

# Suffixes of text in a folder. A file that is given by name or glob may have any suffix.
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".jsonl", ".ndjson")
    + (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".sh")
)
SHARD_SUFFIX = ".bin"
RECORD_SHARD_SUFFIX = ".array_record"
SHARD_SUFFIXES = (SHARD_SUFFIX, RECORD_SHARD_SUFFIX)
JSON_SUFFIX = ".json"  # an array of records, or JSONL
RECORD_SUFFIXES = (".jsonl", ".ndjson", JSON_SUFFIX)
MARK = "\ufeff"  # a byte order mark as text
TABLE_SUFFIXES = (".csv", ".tsv")
TABLE_WAY = (
    "write its records as JSONL: pandas.read_csv(FILE).to_json(OUT, orient='records', lines=True),"
    " or name it .txt to learn it as text"
)
SAMPLE_WAY = "; it is a sample for fine-tuning, and here every record must be a text"
PIECE_BYTES = 1 << 20  # approximate size of the pieces of longer documents
STDLIB_EXCLUDED = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "encodings",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "lib-dynload",
    )
)
STDLIB_MIN_BYTES = 1_000_000
MAX_SHOWN = 20  # problems listed in an error message
MAX_PROBLEMS = 1000  # the check stops after this many

# Progress callback (activity, done, total): bytes, or a number of files if `total` is 0.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class InputFile:
    """One text file or token shard.

    name: path relative to the folder or glob that was given. size_bytes: size of its UTF-8 form,
    once the file has been checked.
    """

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int
    field: str | None = None  # name of a record's text field; None for plain text
    encoding: str = "utf-8"
    is_array: bool = False  # whether records are elements of a JSON array instead of lines
    storage: Storage = "plain"
    has_samples: bool = False  # whether records are samples for fine-tuning instead of texts
    has_preferences: bool = False  # whether these samples are preferences
    has_mark: bool = False  # whether the file begins with a byte order mark
    # size of the training prefix; the rest is held out, see `split_off_held_out`
    train_bytes: int = 0

    def open(self) -> BinaryIO:
        """Return a binary stream of the text in UTF-8, without a byte order mark; records are one a
        line.

        Errors of reading the stream name the file.
        """
        skipped_bytes = len(codecs.BOM_UTF8) if self.has_mark else 0
        in_place = self.storage == "plain" or not skipped_bytes
        if self.encoding == "utf-8" and not self.is_array and in_place:
            return self.open_uncompressed(skipped_bytes)
        with self.open_uncompressed() as file:
            text = file.read().decode(self.encoding).removeprefix(MARK)
        return io.BytesIO(_json_array_to_jsonl(text) if self.is_array else text.encode())

    def open_uncompressed(self, skipped_bytes: int = 0) -> BinaryIO:
        """Return a binary stream of the file's text in its own encoding, from byte `skipped_bytes`
        on if the file is not compressed.
        """
        if self.storage != "plain":
            return open_text(self.path, self.storage)
        return io.BufferedReader(_FileFromOffset(self.path, skipped_bytes), PIECE_BYTES)

    @property
    def suffix(self) -> str:
        """The suffix that tells the kind of text; see `text_suffix`."""
        return text_suffix(self.path, self.storage)

    def describe_line(self, number: int) -> str:
        """Return "FILE:LINE", or "FILE: record NUMBER" in a JSON array or a Parquet file. number:
        counted from 1.
        """
        by_record = self.is_array or self.storage == "parquet"
        return f"{self.path}: record {number}" if by_record else f"{self.path}:{number}"

    @property
    def random_rank(self) -> str:
        """A hash of the name: the file's pseudo-random rank, the same on every machine."""
        return hashlib.sha256(self.name.encode()).hexdigest()


class _FileFromOffset(io.FileIO):
    """A file from byte `first` on, whose errors name it. Positions count from there."""

    def __init__(self, path: Path, first: int) -> None:
        super().__init__(path)
        self._first = first
        self.seek(0)

    def readinto(self, buffer: Any) -> int | None:
        with name_file_in_errors(str(self.name)):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with name_file_in_errors(str(self.name)):
            return super().readall()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        offset += self._first if whence == os.SEEK_SET else 0
        return super().seek(offset, whence) - self._first

    def tell(self) -> int:
        return super().tell() - self._first


def make_input_file(path: Path, root: Path, field: str) -> InputFile:
    """Return the file `path` under the folder `root`. Raises ValueError naming one that cannot be
    read.
    """
    name, wrong = path.relative_to(root).as_posix(), f"data.path = {str(path)!r}: "
    try:
        name.encode()
        status = path.stat()
    except UnicodeError as error:
        raise ValueError(f"{wrong}must have a name in UTF-8; rename it") from error
    except OSError as error:
        raise ValueError(f"{wrong}{error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):  # reading it might block or never end
        raise ValueError(
            f"{wrong}must be a file, and is a pipe, a socket or a device; leave it out"
        )
    storage = detect_storage(path)
    has_records = text_suffix(path, storage) in RECORD_SUFFIXES
    return InputFile(
        path,
        name,
        status.st_size,
        status.st_mtime_ns,
        field if has_records else None,
        storage=storage,
    )


def _has_text_name(path: Path) -> bool:
    """Return whether a folder's file counts as text by its name, such as a.txt or a.jsonl.gz."""
    suffix = path.suffix
    if suffix in STORED_SUFFIXES:
        return suffix in (".parquet", ".pq") or Path(path.stem).suffix in TEXT_SUFFIXES
    return suffix in TEXT_SUFFIXES


def mark_inputs_with_samples(
    inputs: Sequence[TextInput], *, preferences: bool = False
) -> list[TextInput]:
    """Return the inputs with `has_samples` set on every file if the first record of any file is a
    sample for fine-tuning. preferences: samples are read as preferences.

    Raises ValueError naming a file of plain text beside samples.
    """
    files = [file for entry in inputs for file in entry.files]
    chats = next((file for file in files if begins_with_sample(file)), None)
    if chats is None:
        return list(inputs)
    text = next((file for file in files if file.field is None), None)
    if text is not None:
        raise ValueError(
            f"data.path: {text.path} is text beside the samples of {chats.path}; give samples"
            " alone, or write the text as records in the field that data.field names"
        )
    return [
        dataclasses.replace(
            entry,
            files=tuple(
                dataclasses.replace(file, has_samples=True, has_preferences=preferences)
                for file in entry.files
            ),
        )
        for entry in inputs
    ]


def begins_with_sample(file: InputFile) -> bool:
    """Return whether the first record of a file is a sample for fine-tuning."""
    if file.field is None:
        return False
    with file.open_uncompressed() as f:
        first = next((line for line in f if line.strip()), b"")
        text = first.decode("utf-8-sig", errors="replace").lstrip()
        if text.startswith("[") and file.suffix == JSON_SUFFIX:
            # the first record of an array may take several lines
            rest = f.read(PIECE_BYTES).decode("utf-8", errors="replace")
            text = (text[1:] + rest).lstrip()
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # the check of all records says what is wrong
        return False
    return holds_sample(record, file.field)


def _walk_files(root: Path, skipped_folders: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped_folders and not f.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


@dataclass(frozen=True)
class TextInput:
    """One `data.path` and its files, sorted by name: all text or all token shards, and never
    empty.

    weight: share in the mixture; None means by size. skipped: number of the folder's other files by
    suffix.
    """

    pattern: str
    files: tuple[InputFile, ...]
    weight: float | None = None
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def is_shards(self) -> bool:
        return self.files[0].path.suffix in SHARD_SUFFIXES


def find_text_input(pattern: str, weight: float | None, field: str, report: Report) -> TextInput:
    """Return the files of one `data.path`: a file, a folder (searched recursively) or a glob.

    If token shards are among them, only these are returned: a folder of shards also holds their
    tokenizer and manifest. Raises ValueError if there is no file.
    """
    path = Path(pattern).expanduser()
    if path.exists() and not path.is_dir():
        return TextInput(pattern, (make_input_file(path, path.parent, field),), weight)
    skipped: Counter[str] = Counter()
    if path.is_dir():
        root = path
        paths = []
        for p in _walk_files(path):
            if _has_text_name(p) or p.suffix in SHARD_SUFFIXES:
                paths.append(p)
            else:
                skipped[f"*{p.suffix}" if p.suffix else p.name] += 1
            report("finding files", len(paths), 0)
        what = (
            f"this folder holds no text ({' '.join(sorted(TEXT_SUFFIXES))}, also with .gz or .zst,"
            f" .parquet) and no token shards ({' '.join(SHARD_SUFFIXES)})"
        )
        if skipped:
            what += (
                f"; it has {', '.join(f'{count} {kind}' for kind, count in skipped.most_common(5))}"
            )
    else:
        paths = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
        root = Path(os.path.commonpath([p.parent for p in paths])) if paths else path
        what = "no such file or folder, and no file matches it as a glob"
    if not paths:
        raise ValueError(f"data.path = {pattern!r}: {what}")
    shards = [p for p in paths if p.suffix in SHARD_SUFFIXES]
    files = []
    for p in shards or paths:
        files.append(make_input_file(p, root, field))
        report("finding files", len(files), 0)
    return TextInput(
        pattern,
        tuple(sorted(files, key=lambda f: f.name)),
        weight,
        Counter() if shards else skipped,
    )


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
            _parse_json(first or b"{}")
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


def _json_array_to_jsonl(array: str) -> bytes:
    """Return the elements of a JSON array as JSONL."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in _parse_json(array))


def _parse_json(text: str | bytes) -> Json:
    """Return the parsed JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply to be read") from error


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


def standard_library_files() -> list[InputFile]:
    """Return the `.py` files of the running interpreter's standard library, without tests, sorted
    by name.

    Raises ValueError if the library has no (or too little) source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in _walk_files(root, STDLIB_EXCLUDED):
        # _sysconfigdata* holds this build's compiler flags and paths, not source code.
        if path.suffix != ".py" or path.name.startswith("_sysconfigdata"):
            continue
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        files.append(make_input_file(path, root, ""))
    if sum(file.size_bytes for file in files) < STDLIB_MIN_BYTES:
        raise ValueError(
            f"data.path = (): the Python standard library in {root} comes without (enough of) its"
            " source; give a file, folder or glob of text"
        )
    return sorted(files, key=lambda f: f.name)


def split_off_held_out(files: Sequence[InputFile], target_bytes: int) -> list[InputFile]:
    """Return the files with `train_bytes` set, so that about `target_bytes` in total are held out.

    Files are held out whole in pseudo-random order; a file that does not fit into the rest of
    `target_bytes` is skipped. If they fill less than half of `target_bytes` (e.g. a single large
    file), the end of the first file not held out is held out as well.
    """
    offsets = {file.name: file.size_bytes for file in files}
    left_bytes = target_bytes
    in_order = sorted((f for f in files if f.size_bytes), key=lambda f: f.random_rank)
    for file in in_order:
        if file.size_bytes <= left_bytes:
            offsets[file.name] = 0
            left_bytes -= file.size_bytes
    if left_bytes > target_bytes / 2:
        split = next((f for f in in_order if offsets[f.name]), None)
        if split is not None:
            offsets[split.name] = _find_tail_start(split, max(1, left_bytes))
    return [dataclasses.replace(file, train_bytes=offsets[file.name]) for file in files]


def _find_tail_start(file: InputFile, last_bytes: int) -> int:
    """Return the byte position where the file's last `last_bytes` begin, moved to the next line
    start.

    Without a line start there: the start of the last nonempty line in JSONL, of the next character
    in text.
    """
    with file.open() as f:
        start = max(0, file.size_bytes - last_bytes)
        f.seek(start)
        tail = f.read()
        newline = tail.rstrip(b"\n").find(b"\n")
        if newline >= 0:
            return start + newline + 1
        if file.field is None:
            return start + next((i for i, byte in enumerate(tail) if byte & 0xC0 != 0x80), 0)
        f.seek(0)
        last_line = position = 0
        for line in f:
            last_line = position if line.strip() else last_line
            position += len(line)
        return last_line


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
        return _parse_json(line.decode())
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
