"""Division of a corpus into units of work, each of which becomes one shard whatever process does
it.

The division depends on names and sizes of the files and on the settings alone. A unit's result
appears in one step: the shard by a rename, then `units/NUMBER.json`, which describes it. So a unit
may be done twice, or by two processes at once, and its documents are still in one shard once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jmoe.config import DataConfig
from jmoe.config.checks import check
from jmoe.data.input_file import InputFile, Report, make_input_file
from jmoe.data.record_shards import PLAN
from jmoe.data.sample_encoder import sample_encoding_fingerprint
from jmoe.data.shards import TEMPORARY, replace_content_durably
from jmoe.data.text_files import TextInput, begins_with_sample, find_text_input
from jmoe.data.tokenizer import CorpusTokenizer
from jmoe.types import JsonObject

FORMAT = 1  # of the folder; a folder of another version is refused
UNITS = "units"  # the folder of the units' results
SPLIT_SUFFIXES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class FilePiece:
    """A range of an input file, in bytes of the stored file: the records that begin in it.

    location: a path, or the URL of an object. name: its name inside the input, the same on every
    machine. version: changes with the file's content. stop: None for the whole file.
    """

    location: str
    name: str
    size_bytes: int
    version: str
    start: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.size_bytes if self.stop is None else self.stop - self.start


@dataclass(frozen=True)
class Unit:
    """A unit of work: the ranges of files that one worker writes to shard `number`."""

    number: int
    pieces: tuple[FilePiece, ...]


@dataclass(frozen=True)
class Job:
    """A preparation, as every worker gets it.

    config: its tokenizer is the copy in `out`. key: hash of inputs and settings. held_out_share:
    probability of a document to be held out. begun: the time that chat templates may write.
    """

    out: Path
    config: DataConfig
    has_samples: bool
    held_out_share: float
    key: str
    begun: str

    def result_path(self, unit: Unit) -> Path:
        return self.out / UNITS / f"{unit.number:05d}.json"

    def shard_path(self, unit: Unit, suffix: str) -> Path:
        return self.out / f"train-{unit.number:05d}{suffix}"

    def read_result(self, unit: Unit) -> JsonObject | None:
        """Return the result of a unit that is done; None if it is not, or its shard is missing or
        has another size.
        """
        try:
            result: JsonObject = json.loads(self.result_path(unit).read_text())
            done = result["key"] == self.key
            shard = result["shard"]
            if shard is not None:
                path = self.out / shard["file"]
                done &= path.stat().st_size == shard["file_bytes"]
                done &= "lengths" not in shard or (self.out / shard["lengths"]).is_file()
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return result if done else None


def find_file_pieces(config: DataConfig, report: Report) -> tuple[list[FilePiece], bool]:
    """Return (the files of `config.path`, each as one piece, whether they hold samples for
    fine-tuning).

    Raises ValueError naming a path that holds no text, or a file that is in two.
    """
    pieces: list[FilePiece] = []
    for number, pattern in enumerate(config.path):
        if "://" in pattern:
            pieces += _list_remote_objects(pattern, number)
            continue
        entry = find_text_input(pattern, None, config.field, report)
        _check_is_text(entry)
        pieces += [
            FilePiece(
                str(file.path.resolve()),
                f"{number}/{file.name}",
                file.size_bytes,
                _file_version(file),
            )
            for file in entry.files
        ]
    seen: dict[str, str] = {}
    for piece in pieces:
        other = seen.setdefault(piece.location, piece.name)
        if other != piece.name:
            raise ValueError(
                f"data.path: {piece.location} is in it twice, as {other} and {piece.name}; its"
                " documents would be in the shards twice"
            )
    first = next((piece for piece in pieces if piece.size_bytes), None)
    if first is None:
        raise ValueError(f"data.path = {config.path}: all {len(pieces)} files are empty")
    with open_piece(first, config.field) as file:
        has_samples = begins_with_sample(file)
    check(
        has_samples or not config.preferences,
        "data.preferences",
        config.preferences,
        f"must be False without records that hold chosen and rejected; {first.location} holds text",
    )
    check(
        has_samples or config.chat_template is None,
        "data.chat_template",
        config.chat_template,
        f"must be None without samples, such as chats; {first.location} holds text",
    )
    return pieces, has_samples


def _check_is_text(entry: TextInput) -> None:
    if entry.is_shards:
        raise ValueError(
            f"data.path = {entry.pattern!r}: already token shards; only text can be prepared"
        )


def _file_version(file: InputFile) -> str:
    return str(file.mtime_ns)


def _list_remote_objects(pattern: str, number: int) -> list[FilePiece]:
    """Return the objects of a URL: an object, a folder or a glob."""
    fs, root = _open_file_system(pattern)
    try:
        paths = fs.find(root) if fs.isdir(root) else fs.glob(root)
        infos = [fs.info(path) for path in sorted(paths)]
    except Exception as error:  # each store has errors of its own
        raise ValueError(f"data.path = {pattern!r}: cannot be listed: {error}") from error
    if not infos:
        raise ValueError(f"data.path = {pattern!r}: no such object, and none matches it as a glob")
    base = root if fs.isdir(root) else str(Path(infos[0]["name"]).parent)
    return [
        FilePiece(
            fs.unstrip_protocol(info["name"]),
            f"{number}/{str(info['name']).removeprefix(base).lstrip('/')}",
            int(info["size"]),
            str(fs.ukey(info["name"])),
        )
        for info in infos
    ]


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return (the fsspec file system, the path in it) of a URL."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ValueError(
            f"data.path = {url!r}: needs fsspec: pip install 'jmoe[ray]', or fsspec and the"
            " package of the store, such as s3fs or gcsfs"
        ) from error
    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # a store's package is missing, or no such store
        raise ValueError(f"data.path = {url!r}: {error}") from error
    return fs, path


@contextlib.contextmanager
def open_piece(piece: FilePiece, field: str) -> Iterator[InputFile]:
    """Yield a piece's file on this machine; an object is copied into a temporary folder.

    Raises ValueError if the file has changed since it was listed.
    """
    if "://" not in piece.location:
        path = Path(piece.location)
        file = make_input_file(path, path.parent, field)
        _check_unchanged(piece, file.size_bytes, _file_version(file))
        yield file
        return
    fs, remote = _open_file_system(piece.location)
    with tempfile.TemporaryDirectory(prefix="jmoe-object-") as folder:
        path = Path(folder) / Path(remote).name
        try:
            version = str(fs.ukey(remote))
            fs.get_file(remote, str(path))
        except Exception as error:  # each store has errors of its own
            raise OSError(f"{piece.location}: cannot be read: {error}") from error
        _check_unchanged(piece, path.stat().st_size, version)
        yield make_input_file(path, path.parent, field)


def _check_unchanged(piece: FilePiece, size_bytes: int, version: str) -> None:
    if (size_bytes, version) != (piece.size_bytes, piece.version):
        raise ValueError(
            f"{piece.location}: has changed since the preparation began; prepare its text anew,"
            " into another --out"
        )


def plan_units(pieces: Sequence[FilePiece], unit_bytes: int, config: DataConfig) -> list[Unit]:
    """Return the units of about `unit_bytes` stored bytes.

    Larger files of lines of JSON are divided; other files, compressed ones and objects are whole.
    """
    units: list[Unit] = []
    group: list[FilePiece] = []
    ranges = (part for piece in pieces for part in _split_into_ranges(piece, unit_bytes, config))
    for piece in ranges:
        if group and sum(p.num_bytes for p in group) + piece.num_bytes > unit_bytes:
            units.append(Unit(len(units), tuple(group)))
            group = []
        group.append(piece)
    return [*units, Unit(len(units), tuple(group))] if group else units


def _split_into_ranges(piece: FilePiece, unit_bytes: int, config: DataConfig) -> list[FilePiece]:
    if piece.size_bytes <= unit_bytes or not _is_divisible(piece, config):
        return [piece]
    count = -(-piece.size_bytes // unit_bytes)
    ends = [piece.size_bytes * i // count for i in range(count + 1)]
    fields = asdict(piece)
    return [FilePiece(**(fields | {"start": ends[i], "stop": ends[i + 1]})) for i in range(count)]


def _is_divisible(piece: FilePiece, config: DataConfig) -> bool:
    if "://" in piece.location or config.encoding != ("utf-8",):
        return False
    path = Path(piece.location)
    file = make_input_file(path, path.parent, config.field)
    with path.open("rb") as content:
        marked = content.read(3) == BYTE_ORDER_MARK
    return file.storage == "plain" and path.suffix in SPLIT_SUFFIXES and not marked


def job_key(
    pieces: Sequence[FilePiece], unit_bytes: int, config: DataConfig, tokenizer: CorpusTokenizer
) -> str:
    """Return the hash of everything that decides the shards' bytes."""
    what: JsonObject = {
        "format": FORMAT,
        "pieces": [[p.name, p.size_bytes, p.version] for p in pieces],
        "unit_bytes": unit_bytes,
        "tokenizer": tokenizer.fingerprint,
        "encoding": sample_encoding_fingerprint(config, tokenizer.path),
    }
    names = ("field", "encoding", "control_tokens", "held_out_fraction", "held_out_bytes")
    what |= {name: getattr(config, name) for name in names}
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def claim_folder(out: Path, key: str, begun: str) -> str:
    """Make `out` the folder of the job `key`; return when the job began first.

    Raises ValueError if it holds anything but an earlier start of the same job.
    """
    if not (out / PLAN).is_file():
        is_new = not out.exists() or (out.is_dir() and all(map(_is_claim_file, out.iterdir())))
        if not is_new and not (out / PLAN).is_file():  # another process may have written it
            raise ValueError(
                f"--out = {str(out)!r}: must be a new or empty folder, or one that an earlier start"
                " of the same preparation left"
            )
        (out / UNITS).mkdir(parents=True, exist_ok=True)
        _write_plan(out / PLAN, json.dumps({"key": key, "begun": begun}).encode())
    try:
        plan = json.loads((out / PLAN).read_text())
        claimed_key, begun = str(plan["key"]), str(plan["begun"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out / PLAN}: is damaged: {error!r}; prepare anew") from error
    if claimed_key != key:
        raise ValueError(f"--out = {str(out)!r}: holds shards made from other inputs or settings")
    return begun


def _write_plan(plan: Path, content: bytes) -> None:
    """Write a plan, unless another process that began at the same time has written one."""
    new = plan.with_name(f".{plan.name}.{secrets.token_hex(8)}{TEMPORARY}")
    replace_content_durably(new, content)
    try:
        os.link(new, plan)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        replace_content_durably(plan, content)
    finally:
        new.unlink(missing_ok=True)


def _is_claim_file(path: Path) -> bool:
    """Return whether `claim_folder` of this or another process makes such a file."""
    return path.name == UNITS or path.name.lstrip(".").startswith(PLAN)
