"""Token shards: files of uint16 or uint32 token ids with a JSON header, memory-mapped for reading.

Layout, little-endian: 8 bytes magic `JMOETOK1`, uint32 length of the header, the header as UTF-8
JSON, zeros up to the next multiple of 4096 bytes, `count` ids, then the CRC-32 (uint32) of every
`BLOCK_BYTES` of ids. The ids are documents between end-of-text ids: `eot document eot document ...
eot`.

A shard of samples for fine-tuning holds the tokens of one sample after the other, each as its id
plus `TRAINED` if the loss counts it. A second file of this layout beside it, NAME.lengths, holds
the number of tokens of each sample. Two samples one after the other are a preference if its layout
is `preferences`: a prompt with its chosen and with its rejected answer.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import json
import mmap
import os
import secrets
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jmoe.memory.direct_io import name_file_in_errors
from jmoe.types import Json, JsonObject

MAGIC = b"JMOETOK1"
ALIGNMENT_BYTES = 4096
# bytes of ids per CRC-32; about the kernel's read-ahead for one window
BLOCK_BYTES = 1 << 16
READ_BYTES = 1 << 24
POPULATE_READ = 22  # MADV_POPULATE_READ of <linux/mman.h>, which Python does not name
TEMPORARY = ".jmoe-tmp"
TRAINED = 1 << 31  # added to the id of a sample's token that is to be learned
LENGTHS_SUFFIX = ".lengths"
Ids = NDArray[np.unsignedinteger[Any]]
Layout = Literal["text", "samples", "preferences", "lengths"]
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class ShardHeader:
    """The header stored at the start of a token shard.

    dtype: `uint16` or `uint32`. count: number of ids. vocab_size: exclusive upper bound of the ids.
    eot: the end-of-text id. tokenizer: fingerprint of the tokenizer.json that produced the ids.
    split: `train` or `held_out`. text_bytes: size in UTF-8 of the text behind the ids. sha256: hash
    of the stored ids. block_sums: SHA-256 of the CRC-32s after the ids, empty without CRC-32s.
    control: `tokens` if text that spells a special token was encoded as that token, `text` if it
    was encoded as plain text. control_texts: number of documents in which such text was encoded as
    plain text. layout: `text`, `samples`, `preferences`, or `lengths` of samples. trained: number
    of samples' tokens to learn.

    Shards of older versions lack the last five fields; they have no CRC-32s, did not count such
    documents, and hold text.
    """

    dtype: str
    count: int
    vocab_size: int
    eot: int
    tokenizer: str
    split: str
    text_bytes: int
    sha256: str
    block_sums: str = ""
    control: str = "text"
    control_texts: int = 0
    layout: str = "text"
    trained: int = 0

    @property
    def has_samples(self) -> bool:
        """Whether the ids are samples for fine-tuning, preferences included."""
        return self.layout in ("samples", "preferences")


class IdSequence(Protocol):
    """Random access to the ids of a shard."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Ids: ...


class IdChecks(Protocol):
    """Integrity checks of the ids of the shard `path`: `num_bytes` bytes. has_sums: whether a part
    can be checked without the rest.
    """

    path: Path
    num_bytes: int
    has_sums: bool

    def check_ids(self, first: int, end: int) -> None:
        """Raise ValueError or OSError naming the file if ids `first` up to but excluding `end` are
        damaged or cannot be read.
        """

    def check_all(self, header: ShardHeader) -> None:
        """Raise ValueError or OSError as `check_ids`, for all ids."""


class BlockChecks:
    """Lazy integrity checks of a shard's ids: each block is read from the disk, and compared with
    its stored CRC-32 on first use.

    mapped: the file, whose ids begin at byte `offset`.
    """

    def __init__(
        self, path: Path, mapped: mmap.mmap, offset: int, ids: Ids, sums: NDArray[np.uint32] | None
    ) -> None:
        self.path, self.num_bytes, self.has_sums = path, ids.nbytes, sums is not None
        self._mapped, self._offset = mapped, offset
        self._data, self._item_bytes = ids.view(np.uint8).data, ids.itemsize
        self._sums = np.zeros(0, np.uint32) if sums is None else sums
        self._checked = np.zeros(len(self._sums), np.bool_)

    def check_ids(self, first: int, end: int) -> None:
        """Read ids `first` up to but excluding `end` into memory, and check their blocks if the
        shard has CRC-32s.

        Raises ValueError naming the file if a block is damaged, and OSError if it cannot be read.
        """
        self._read_into_memory(first * self._item_bytes, end * self._item_bytes)
        if not self.has_sums:
            return
        for block in range(
            first * self._item_bytes // BLOCK_BYTES, -(-end * self._item_bytes // BLOCK_BYTES)
        ):
            if not self._checked[block]:
                data = self._data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                if zlib.crc32(data) != self._sums[block]:
                    raise self._damaged_error(
                        f"in bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES} of its ids"
                    )
                self._checked[block] = True

    def check_all(self, header: ShardHeader) -> None:
        """Read all ids. Raises ValueError naming the file if the SHA-256 is wrong, and OSError if
        the file cannot be read.
        """
        digest = hashlib.sha256()
        for start in range(0, len(self._data), READ_BYTES):
            self._read_into_memory(start, min(start + READ_BYTES, self.num_bytes))
            digest.update(self._data[start : start + READ_BYTES])
        if digest.hexdigest() != header.sha256:
            raise self._damaged_error("")
        self._checked[:] = True

    def _read_into_memory(self, first_byte: int, end_byte: int) -> None:
        """Read these bytes of the ids into memory.

        Raises OSError naming the file if the disk fails or the file was cut. An access to such
        bytes ends the process with SIGBUS, as it still does before Linux 5.14.
        """
        first = (self._offset + first_byte) // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._mapped.madvise(POPULATE_READ, first, self._offset + end_byte - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                where = f"bytes {first_byte} to {end_byte} of its ids cannot be read"
                why = f"{where}: the disk or its server fails, or the file was cut"
                raise OSError(errno.EIO, why, str(self.path)) from error

    def _damaged_error(self, where: str) -> ValueError:
        return ValueError(
            f"{self.path}: this token shard is damaged{' ' * bool(where)}{where}: its content is"
            f" not what was written; prepare it again (delete {self.path.parent / 'manifest.json'}"
            " if it was made by a run)"
        )


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that is flushed to disk and replaces `path` atomically when the block
    ends; after an error `path` is unchanged.
    """
    # not tempfile's, which no other user of a cluster could read; the umask says who may
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_content_durably(path: Path, content: bytes) -> None:
    """Replace a file's content atomically and flush it to disk; an error leaves the old content."""
    with replacing_file(path) as file:
        file.write(content)


def remove_stale_temporaries(directory: Path) -> None:
    """Delete temporary files of killed writers: those not modified for an hour by the file
    system's clock.
    """
    with tempfile.TemporaryFile(dir=directory) as probe:
        now = os.fstat(probe.fileno()).st_mtime
    for path in directory.glob(f".*{TEMPORARY}"):
        with contextlib.suppress(FileNotFoundError):  # deleted by another process
            if now - path.stat().st_mtime > 3600:
                path.unlink()


class ShardWriter:
    """Writes one shard; created by `writing_shard`.

    header: the header written, None before `finish`.
    """

    def __init__(self, file: BinaryIO, *, vocab_size: int, eot: int, **fields: str) -> None:
        self._file, self._fields = file, {"vocab_size": vocab_size, "eot": eot, **fields}
        is_text = fields.get("layout", "text") == "text"
        self._dtype = "uint16" if vocab_size <= 2**16 and is_text else "uint32"
        self._digest = hashlib.sha256()
        self._block, self._sums = bytearray(), array.array("I")
        self.count = self.text_bytes = 0
        self.control_texts = self.trained = 0
        self.header: ShardHeader | None = None
        file.write(bytes(ALIGNMENT_BYTES))
        if is_text:
            self.append([eot], text_bytes=0)

    def append(self, ids: ArrayLike, *, text_bytes: int) -> None:
        """Append ids that encode `text_bytes` bytes of text; end-of-text ids count 0 bytes."""
        if isinstance(ids, list):  # ten times as fast as NumPy's own conversion of a list
            ids = np.frombuffer(array.array("I", ids), np.uint32)
            if ids.size and ids.max() > np.iinfo(DTYPES[self._dtype]).max:
                raise OverflowError(f"id {ids.max()} exceeds {self._dtype}")
        array_of_ids = np.asarray(ids, dtype=DTYPES[self._dtype])
        data = array_of_ids.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._block += data
        complete = len(self._block) // BLOCK_BYTES * BLOCK_BYTES
        for start in range(0, complete, BLOCK_BYTES):
            self._sums.append(zlib.crc32(self._block[start : start + BLOCK_BYTES]))
        del self._block[:complete]
        self.count += array_of_ids.size
        self.text_bytes += text_bytes

    def write_checksums_and_header(self) -> None:
        """Write the CRC-32s after the ids, and the header before them."""
        if self._block:
            self._sums.append(zlib.crc32(self._block))
        sums = np.asarray(self._sums, "<u4").tobytes()
        self._file.write(sums)
        digests = {
            "sha256": self._digest.hexdigest(),
            "block_sums": hashlib.sha256(sums).hexdigest(),
        }
        counts = {
            "count": self.count,
            "text_bytes": self.text_bytes,
            "control_texts": self.control_texts,
            "trained": self.trained,
        }
        fields: JsonObject = {"dtype": self._dtype, **self._fields, **counts, **digests}
        self.header = ShardHeader(**fields)
        text = json.dumps(asdict(self.header)).encode()
        prefix = MAGIC + struct.pack("<I", len(text)) + text
        assert len(prefix) <= ALIGNMENT_BYTES, len(prefix)
        self._file.seek(0)
        self._file.write(prefix)


@contextlib.contextmanager
def writing_shard(
    path: Path,
    *,
    vocab_size: int,
    eot: int,
    tokenizer: str,
    split: str,
    control: str = "text",
    layout: Layout = "text",
) -> Iterator[ShardWriter]:
    """Yield a writer of one shard, which appears as `path` only if the block ends without an
    error.
    """
    with replacing_file(path) as file:
        fields = {"tokenizer": tokenizer, "split": split, "control": control, "layout": layout}
        writer = ShardWriter(file, vocab_size=vocab_size, eot=eot, **fields)
        yield writer
        writer.write_checksums_and_header()


class SampleShardWriter:
    """Writes a shard of samples and the file of their lengths; see `writing_sample_shard`."""

    def __init__(self, ids: ShardWriter, lengths: ShardWriter) -> None:
        self.ids, self.lengths = ids, lengths

    def append(
        self, ids: NDArray[np.uint32], trained: NDArray[np.bool_], *, text_bytes: int
    ) -> None:
        """Append one sample. trained: its tokens to learn; the first is never one."""
        learned = trained & (np.arange(len(ids)) > 0)
        self.ids.append(ids + np.where(learned, np.uint32(TRAINED), 0), text_bytes=text_bytes)
        self.ids.trained += int(learned.sum())
        self.lengths.append([len(ids)], text_bytes=0)


def sample_lengths_path(path: Path) -> Path:
    """Return the file of lengths beside a shard of samples."""
    return path.with_suffix(LENGTHS_SUFFIX)


@contextlib.contextmanager
def writing_sample_shard(
    path: Path, *, vocab_size: int, eot: int, tokenizer: str, split: str, preferences: bool
) -> Iterator[SampleShardWriter]:
    """Yield a writer of a shard of samples, as `writing_shard` of a shard of text. preferences:
    two samples are a preference.
    """
    layout: Layout = "preferences" if preferences else "samples"
    fields: JsonObject = {"vocab_size": vocab_size, "eot": eot, "tokenizer": tokenizer}
    fields |= {"split": split, "control": "tokens"}
    with (
        writing_shard(sample_lengths_path(path), **fields, layout="lengths") as lengths,
        writing_shard(path, **fields, layout=layout) as ids,
    ):
        yield SampleShardWriter(ids, lengths)


def open_sample_lengths(path: Path, header: ShardHeader) -> Shard:
    """Return the lengths of the samples in the shard `path`, all read and checked. header: of that
    shard.

    Raises ValueError if the file beside it is missing, damaged, or of another shard.
    """
    if not sample_lengths_path(path).is_file():
        raise ValueError(
            f"{path}: lacks {sample_lengths_path(path).name} beside it; copy both files"
        )
    lengths = open_shard(sample_lengths_path(path))
    lengths.blocks.check_all(lengths.header)
    if int(lengths.ids[:].sum(dtype=np.int64)) != header.count:
        raise ValueError(
            f"{sample_lengths_path(path)}: belongs to another shard; copy both files again"
        )
    return lengths


def parse_header(path: Path, text: bytes) -> ShardHeader:
    """Return the header in the JSON `text` of the shard `path`. Raises ValueError naming the file
    if it is not valid.
    """
    try:
        values: Json = json.loads(text.decode())
    except ValueError as error:
        raise ValueError(f"{path}: the header of this token shard is no JSON: {error}") from error
    later = {f.name: f.default for f in fields(ShardHeader) if f.default is not MISSING}
    written: JsonObject = later | values if isinstance(values, dict) else {}
    missing = [
        f.name
        for f in fields(ShardHeader)
        if type(written.get(f.name)) is not (int if f.type == "int" else str)
    ]
    if missing:
        raise ValueError(f"{path}: the header of this token shard lacks {', '.join(missing)}")
    header = ShardHeader(**{f.name: written[f.name] for f in fields(ShardHeader)})
    if header.layout not in get_args(Layout):
        raise ValueError(
            f"{path}: layout = {header.layout!r}: must be one of {', '.join(get_args(Layout))}; it"
            " was written by a later version"
        )
    if header.dtype not in DTYPES:
        raise ValueError(f"{path}: dtype = {header.dtype!r}: must be one of {', '.join(DTYPES)}")
    if header.count < 1 or not 0 <= header.eot < header.vocab_size:
        raise ValueError(
            f"{path}: count = {header.count}, eot = {header.eot}, vocab_size = {header.vocab_size}:"
            " count must be positive and eot below vocab_size"
        )
    return header


@dataclass(frozen=True, eq=False)
class Shard:
    """The ids of a token shard, read on use: memory-mapped, or records (`record_shards.py`).

    ids: all ids, or a prefix if the rest is held out. header: of the whole file. blocks: checks the
    ids.
    """

    header: ShardHeader
    ids: IdSequence
    blocks: IdChecks


def open_shard(path: Path) -> Shard:
    """Return the memory-mapped shard.

    Checks only the header, the file size and the CRC-32s' own hash, so that opening terabytes is
    cheap. Raises ValueError if the file is not a shard, is truncated or is damaged.
    """
    with name_file_in_errors(path), open(path, "rb") as file:
        start = file.read(len(MAGIC) + 4)
        if len(start) < len(MAGIC) + 4 or start[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path}: not a token shard: it does not begin with {MAGIC.decode()}")
        (length,) = struct.unpack("<I", start[len(MAGIC) :])
        text = file.read(length)
        size_bytes = os.fstat(file.fileno()).st_size
    if len(text) < length:
        raise ValueError(
            f"{path}: this token shard is truncated inside its header ({size_bytes} bytes)"
        )
    header = parse_header(path, text)
    offset = -(-(len(start) + length) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    ids_bytes = header.count * DTYPES[header.dtype].itemsize
    num_sums = -(-ids_bytes // BLOCK_BYTES) if header.block_sums else 0
    expected_bytes = offset + ids_bytes + 4 * num_sums
    if size_bytes != expected_bytes:
        what = "is truncated" if size_bytes < expected_bytes else "has foreign data at its end"
        raise ValueError(
            f"{path}: this token shard {what}: {size_bytes} bytes, but its header says"
            f" {header.count} tokens, i.e. {expected_bytes} bytes"
        )
    with open(path, "rb") as file:
        # A private mapping: FUSE rejects shared mappings of files opened with direct I/O.
        mapped = mmap.mmap(file.fileno(), size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
    ids = cast("Ids", np.frombuffer(mapped, DTYPES[header.dtype], header.count, offset))
    if not num_sums:
        return Shard(header, ids, BlockChecks(path, mapped, offset, ids, None))
    with name_file_in_errors(path):
        sums = np.fromfile(path, np.dtype("<u4"), num_sums, offset=offset + ids_bytes)
    if hashlib.sha256(sums.tobytes()).hexdigest() != header.block_sums:
        raise ValueError(
            f"{path}: this token shard is damaged: the sums at its end are not what was written"
        )
    return Shard(header, ids, BlockChecks(path, mapped, offset, ids, sums))
