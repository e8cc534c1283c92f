"""Finding and splitting (train and held-out) of text files.

A document is a text file, a line of a JSONL file, or a record of a JSON array or of a Parquet file.
The order of files and the split depend on file names relative to the given path, so they are the
same on every machine.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jmoe.data.input_file import (
    JSON_SUFFIX,
    PIECE_BYTES,
    SHARD_SUFFIXES,
    InputFile,
    Report,
    make_input_file,
)
from jmoe.data.samples import holds_sample
from jmoe.data.stored_files import STORED_SUFFIXES

# Suffixes of text in a folder. A file that is given by name or glob may have any suffix.
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".jsonl", ".ndjson")
    + (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".sh")
)
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
        if "://" in pattern:
            what = "only python -m jmoe.data.prepare reads URLs; copy the folder to every node"
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
