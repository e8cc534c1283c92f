"""Finding text, checking it, splitting it into train and held-out, and reading it piece by piece.

A document is a text file, one line of a JSONL file or one record of a JSON array. Nothing here
depends on where on a machine the files lie: order and split follow from names relative to the path
that was given. A file in another encoding than UTF-8 is read into memory whole and then is its
UTF-8 bytes, a JSON array is JSONL then, so that every position in a file is one in UTF-8.
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

from jmoe.data.file_formats import binary_format

# What a folder is searched for; a file that is named, or matched by a glob, is read whatever its
# suffix.
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".jsonl", ".ndjson")
    + (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".sh")
)
SHARD_SUFFIX = ".bin"
JSON_SUFFIX = ".json"  # of an array of records, or of lines as in JSONL
RECORD_SUFFIXES = (".jsonl", ".ndjson", JSON_SUFFIX)
PIECE_BYTES = 1 << 20  # longer documents are read and encoded in pieces of about this size
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
MAX_SHOWN = 20  # files or lines named in one error ...
MAX_PROBLEMS = 1000  # ... of at most so many looked for

# Called with what is being done, and how much of how much is done: bytes, or files where the second
# is 0.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class InputFile:
    """One input; `name` is its path relative to the folder or glob that was given, `size_bytes`
    that of its UTF-8.
    """

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int
    field: str | None = None  # of records: the one with the text
    encoding: str = "utf-8"
    is_array: bool = False  # its records are elements of one JSON array, not lines
    # so many of its first bytes are trained on, the others held out; see `split_off`
    train_bytes: int = 0

    def open(self) -> BinaryIO:
        """Open the file's text as UTF-8, records one a line."""
        if self.is_array:
            return io.BytesIO(_as_lines(self.path.read_bytes().decode(self.encoding)))
        if self.encoding == "utf-8":
            return open(self.path, "rb")
        return io.BytesIO(self.path.read_bytes().decode(self.encoding).encode())

    def place(self, number: int) -> str:
        """Return the file and the number of a record in it, counted from 1, in words."""
        return f"{self.path}: record {number}" if self.is_array else f"{self.path}:{number}"

    @property
    def order(self) -> str:
        """Return a pseudo-random rank that is the same on every machine."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def _input_file(path: Path, root: Path, field: str) -> InputFile:
    name, wrong = path.relative_to(root).as_posix(), f"data.path = {str(path)!r}: "
    try:
        name.encode()
        status = path.stat()
    except UnicodeError as error:
        raise ValueError(f"{wrong}must have a name in UTF-8; rename it") from error
    except OSError as error:
        raise ValueError(f"{wrong}{error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):  # nothing may ever come out of it, or no end
        raise ValueError(
            f"{wrong}must be a file, and is a pipe, a socket or a device; leave it out"
        )
    has_records = path.suffix in RECORD_SUFFIXES
    return InputFile(path, name, status.st_size, status.st_mtime_ns, field if has_records else None)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


@dataclass(frozen=True)
class TextInput:
    """One `data.path` and the files behind it, sorted by name, never empty: all text, or all token
    shards.

    weight: its share in the mixture; None: by size. skipped: a folder's other files, counted by
    suffix.
    """

    pattern: str
    files: tuple[InputFile, ...]
    weight: float | None = None
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def is_shards(self) -> bool:
        return self.files[0].path.suffix == SHARD_SUFFIX


def find_files(pattern: str, weight: float | None, field: str, report: Report) -> TextInput:
    """Find what one `data.path` names: a file, a folder (recursive) or a glob.

    Where there are token shards, they are what is meant: a folder of shards also holds their
    tokenizer and manifest.
    """
    path = Path(pattern).expanduser()
    if path.exists() and not path.is_dir():
        return TextInput(pattern, (_input_file(path, path.parent, field),), weight)
    skipped: Counter[str] = Counter()
    if path.is_dir():
        root = path
        paths = []
        for p in _walk(path):
            if p.suffix in TEXT_SUFFIXES or p.suffix == SHARD_SUFFIX:
                paths.append(p)
            else:
                skipped[f"*{p.suffix}" if p.suffix else p.name] += 1
            report("finding files", len(paths), 0)
        what = (
            f"this folder holds no text ({' '.join(sorted(TEXT_SUFFIXES))}) and no token shards"
            f" ({SHARD_SUFFIX})"
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
    shards = [p for p in paths if p.suffix == SHARD_SUFFIX]
    files = []
    for p in shards or paths:
        files.append(_input_file(p, root, field))
        report("finding files", len(files), 0)
    return TextInput(
        pattern,
        tuple(sorted(files, key=lambda f: f.name)),
        weight,
        Counter() if shards else skipped,
    )


def check_texts(
    files: Sequence[InputFile], encodings: Sequence[str], report: Report
) -> list[InputFile]:
    """Read every file once, each in the first of the encodings that fits it.

    Returns the files with their encodings and sizes in UTF-8. `ValueError` names all files, and the
    bytes or lines of them, that cannot be read, and files that are no text, whatever the encodings.
    """
    checked: list[InputFile] = []
    bad: list[str] = []
    undecoded = False
    done_bytes, all_bytes = 0, sum(file.size_bytes for file in files)
    for file in files:

        def more(position: int, before: int = done_bytes) -> None:
            report("checking the text", before + position, all_bytes)

        fitting, problems = _check(file, encodings, more)
        undecoded |= fitting is None
        checked += [fitting] if fitting is not None else []
        bad += problems
        if len(bad) >= MAX_PROBLEMS:
            break
        done_bytes += file.size_bytes
    if not bad:
        return checked
    count = f"{MAX_PROBLEMS} or more" if len(bad) >= MAX_PROBLEMS else str(len(bad))
    shown = [
        *bad[:MAX_SHOWN],
        *([f"... and {len(bad) - MAX_SHOWN} more"] if len(bad) > MAX_SHOWN else []),
    ]
    message = (
        f"data.path: {count} problem(s) in {len(files)} file(s) of text; nothing was written:\n"
        + "\n".join(shown)
    )
    if undecoded:
        several = " ".join(dict.fromkeys((*encodings, "latin-1")))
        message += (
            f"\n--data.encoding {several} reads each file in the first of these encodings that"
            " fits it"
        )
    raise ValueError(message)


def _check(
    file: InputFile, encodings: Sequence[str], report: Callable[[int], None]
) -> tuple[InputFile | None, list[str]]:
    """Return (the file as it is read, or None if no encoding fits it; what is wrong with it)."""
    binary = binary_format(file.path)
    if binary is not None:
        return file, [f"{file.path}: is {binary}"]
    fitting, problem = _fitting(file, encodings, report)
    if file.path.suffix == JSON_SUFFIX and fitting is not None:
        fitting, problem = _with_layout(fitting)
    if file.field is None or (file.path.suffix == JSON_SUFFIX and problem):
        return fitting, [problem] if problem else []
    problems = list(itertools.islice(_record_problems(fitting or file, report), MAX_PROBLEMS))
    return fitting, problems or ([problem] if problem else [])


def _with_layout(file: InputFile) -> tuple[InputFile, str]:
    """Return (a `.json` file that says whether it is an array or lines, what is wrong with it)."""
    with file.open() as f:
        first = next((line for line in f if line.strip()), b"")
    if not first.lstrip().startswith(b"["):
        try:
            _loads(first or b"{}")
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


def _as_lines(array: str) -> bytes:
    """Return the elements of a JSON array as JSONL."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in _loads(array))


def _loads(text: str | bytes) -> Any:
    """Return what JSON says; `ValueError` for any text that is none."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply to be read") from error


def _fitting(
    file: InputFile, encodings: Sequence[str], report: Callable[[int], None]
) -> tuple[InputFile | None, str]:
    """Return (the file in the first encoding that fits it, ""), or (None, what is wrong with it
    in the first).
    """
    problem = ""
    for encoding in encodings:
        name = codecs.lookup(encoding).name
        decoder = codecs.getincrementaldecoder(encoding)()
        position = utf8_bytes = pending = 0
        try:
            with open(file.path, "rb") as f:
                while data := f.read(PIECE_BYTES):
                    pending = len(decoder.getstate()[0])
                    text = decoder.decode(data)
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
            return dataclasses.replace(file, encoding=name, size_bytes=utf8_bytes), ""
    return None, problem


def _record_problems(file: InputFile, report: Callable[[int], None]) -> Iterator[str]:
    with file.open() as f:
        position = 0
        for number, line in enumerate(f, 1):
            position += len(line)
            report(min(position, file.size_bytes))
            try:
                if line.strip():
                    _json_text(line, file)
            except ValueError as error:
                yield f"{file.place(number)}: {error}"


def standard_library() -> list[InputFile]:
    """Return the `.py` sources of the running interpreter's standard library, without its tests;
    sorted by name.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in _walk(root, STDLIB_EXCLUDED):
        # _sysconfigdata* holds this build's compiler flags and paths, not source code.
        if path.suffix != ".py" or path.name.startswith("_sysconfigdata"):
            continue
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        files.append(_input_file(path, root, ""))
    if sum(file.size_bytes for file in files) < STDLIB_MIN_BYTES:
        raise ValueError(
            f"data.path = (): the Python standard library in {root} comes without (enough of) its"
            " source; give a file, folder or glob of text"
        )
    return sorted(files, key=lambda f: f.name)


def split_off(files: Sequence[InputFile], target_bytes: int) -> list[InputFile]:
    """Return the files with their `train_bytes`, so that about `target_bytes` of all are held out.

    Whole files join in a pseudo-random order of their names while they fit into `target_bytes`.
    Where that gives less than half of it (one file, a few large ones), the last part of the next
    file in that order joins as well.
    """
    offsets = {file.name: file.size_bytes for file in files}
    left_bytes = target_bytes
    in_order = sorted((f for f in files if f.size_bytes), key=lambda f: f.order)
    for file in in_order:
        if file.size_bytes <= left_bytes:
            offsets[file.name] = 0
            left_bytes -= file.size_bytes
    if left_bytes > target_bytes / 2:
        split = next((f for f in in_order if offsets[f.name]), None)
        if split is not None:
            offsets[split.name] = _last_part(split, max(1, left_bytes))
    return [dataclasses.replace(file, train_bytes=offsets[file.name]) for file in files]


def _last_part(file: InputFile, last_bytes: int) -> int:
    """Return where the last `last_bytes` of a file begin, moved to the next line.

    If no line begins there: in JSONL the last line, in text the next character.
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
    """Return (text, ends its document) of the bytes [start, stop) of a file; documents without text
    are left out.

    `ValueError` names the file and the byte, or the file and the line, of what cannot be read.
    """
    if file.field is None:
        return _text_pieces(file, start, stop)
    return _record_pieces(file, start, stop)


def _text_pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[str, bool]]:
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


def _record_pieces(file: InputFile, start: int, stop: int) -> Iterator[tuple[str, bool]]:
    with file.open() as f:
        f.seek(start)
        position = start
        while position < stop and (line := f.readline()):
            if line.strip():
                try:
                    text = _json_text(line, file)
                except ValueError as error:
                    raise ValueError(
                        f"{file.place(_line_number(file, position))}: {error}"
                    ) from error
                for first in range(0, len(text), PIECE_BYTES):
                    yield text[first : first + PIECE_BYTES], first + PIECE_BYTES >= len(text)
            position += len(line)


def _json_text(line: bytes, file: InputFile) -> str:
    field, record_is = file.field, "record" if file.is_array else "line"
    try:
        record = _loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict) or field not in record:
        fields = (
            ", ".join(record)
            if isinstance(record, dict)
            else f"a {type(record).__name__}, not an object"
        )
        raise ValueError(
            f"data.field = {field!r}: not in this {record_is}, which has: {fields or 'nothing'}"
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


def sample_texts(files: Sequence[InputFile], limit_bytes: int) -> Iterator[str]:
    """Yield about `limit_bytes` of what is trained on, spread over the files by their size."""
    share = min(1.0, limit_bytes / max(1, sum(file.train_bytes for file in files)))
    left = limit_bytes
    for file in sorted(files, key=lambda file: file.order):
        wanted = min(left, max(1, int(file.train_bytes * share)))
        for text, _ in read_pieces(file, 0, file.train_bytes):
            yield text
            wanted -= len(text)
            left -= len(text)
            if wanted <= 0:
                break
        if left <= 0:
            return
