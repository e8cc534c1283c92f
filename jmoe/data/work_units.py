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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jmoe.config import DataConfig
from jmoe.config.checks import check
from jmoe.data.input_file import InputFile, Report, make_input_file
from jmoe.data.output_folder import OutputFolder, open_file_system
from jmoe.data.record_shards import PLAN
from jmoe.data.sample_encoder import sample_encoding_fingerprint
from jmoe.data.temporary_folder import temporary_folder
from jmoe.data.text_files import TextInput, begins_with_sample, find_text_input
from jmoe.data.tokenizer import CorpusTokenizer
from jmoe.types import JsonObject

FORMAT = 1  # of the folder; a folder of another version is refused
UNITS = "units"  # the folder of the units' results
SPLIT_SUFFIXES = (".jsonl", ".ndjson")
# of what fsspec says of an object: S3; Google; Azure; servers, local files, memory
VERSION_FIELDS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created")
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

    tokenizer_files: names in `out` of the tokenizer and the chat files. key: hash of inputs and
    settings. held_out_share: probability of a document to be held out. begun: the time that chat
    templates may write.
    """

    out: OutputFolder
    tokenizer_files: tuple[str, ...]
    config: DataConfig
    has_samples: bool
    held_out_share: float
    key: str
    begun: str

    def result_name(self, unit: Unit) -> str:
        return f"{UNITS}/{unit.number:05d}.json"

    def shard_name(self, unit: Unit, suffix: str) -> str:
        return f"train-{unit.number:05d}{suffix}"

    def read_results(self, units: Sequence[Unit]) -> dict[Unit, JsonObject]:
        """Return {unit: result} of the units that are done: not of those whose shard is missing or
        has another size.
        """
        contents = self.out.read_all([self.result_name(unit) for unit in units])
        results = {}
        for unit in units:
            with contextlib.suppress(KeyError, ValueError, TypeError):
                result: JsonObject = json.loads(contents[self.result_name(unit)])
                if result["key"] == self.key:
                    results[unit] = result
        sizes = self.out.sizes([name for result in results.values() for name in _files_of(result)])
        return {
            unit: result
            for unit, result in results.items()
            if all(name in sizes for name in _files_of(result))
            and _has_size(result["shard"], sizes)
        }


def _files_of(result: JsonObject) -> list[str]:
    """Return the names of the files that a unit's result describes."""
    shard = result["shard"] or {}
    return [shard[kind] for kind in ("file", "lengths") if kind in shard]


def _has_size(shard: JsonObject | None, sizes: Mapping[str, int]) -> bool:
    return shard is None or sizes[shard["file"]] == shard["file_bytes"]


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
    fs, root = open_file_system(pattern, "data.path")
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
            _object_version(info),
        )
        for info in infos
    ]


def _object_version(info: JsonObject) -> str:
    """Return what changes with an object's content: of the fields that a store has, the first that
    listing and looking up give alike.
    """
    return next((str(info[name]).strip('"') for name in VERSION_FIELDS if info.get(name)), "")


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
    fs, remote = open_file_system(piece.location, "data.path")
    with temporary_folder() as folder:
        path = folder / Path(remote).name
        try:
            fs.invalidate_cache()  # of listings, which have the version of an earlier time
            version = _object_version(fs.info(remote))
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


def claim_folder(out: OutputFolder, key: str, begun: str) -> str:
    """Make `out` the folder of the job `key`; return when the job began first.

    Raises ValueError if it holds anything but an earlier start of the same job.
    """
    if PLAN not in (entries := out.entries()):
        # another process may have written the plan and more meanwhile
        if not all(map(_is_claim_file, entries)) and PLAN not in out.entries():
            raise ValueError(
                f"--out = {str(out)!r}: must be a new or empty folder, or one that an earlier start"
                " of the same preparation left"
            )
        out.write_new(PLAN, json.dumps({"key": key, "begun": begun}).encode())
    try:
        plan = json.loads(out.read(PLAN))
        claimed_key, begun = str(plan["key"]), str(plan["begun"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out}/{PLAN}: is damaged: {error!r}; prepare anew") from error
    if claimed_key != key:
        raise ValueError(f"--out = {str(out)!r}: holds shards made from other inputs or settings")
    return begun


def _is_claim_file(name: str) -> bool:
    """Return whether `claim_folder` of this or another process makes a file of this name."""
    return name.lstrip(".").startswith(PLAN)
