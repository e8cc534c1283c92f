"""One unit of a preparation: its documents, read, tokenised and written as one shard.

Any process of any node may do it; two that do the same unit write the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from jmoe.data.input_file import RECORD_SHARD_SUFFIX, SHARD_SUFFIX, InputFile
from jmoe.data.record_shards import write_as_records
from jmoe.data.sample_encoder import (
    Encoded,
    SampleEncoder,
    encode_in_batches,
    make_sample_encoder,
)
from jmoe.data.samples import PreferencePair, Sample
from jmoe.data.shards import (
    LENGTHS_SUFFIX,
    open_shard,
    replace_content_durably,
    sample_lengths_path,
    writing_sample_shard,
    writing_shard,
)
from jmoe.data.temporary_folder import temporary_folder
from jmoe.data.text_checks import detect_encoding_and_layout
from jmoe.data.text_pieces import read_lines, read_pieces, sample_of_record, text_of_record
from jmoe.data.tokenizer import (
    ControlTextCounter,
    CorpusTokenizer,
    encode_pieces,
    load_tokenizer,
)
from jmoe.data.work_units import FilePiece, Job, Unit, open_piece
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.types import JsonObject

MAX_LISTED = 1000  # bad documents of a unit that are listed; all are counted
MAX_VOCAB_SIZE = 1 << 31
PIECE_CHARACTERS = 1 << 20
NO_END = 1 << 62


def write_unit(job: Job, unit: Unit) -> JsonObject:
    """Write a unit's shard unless that is done; return its result, without texts: counts and the
    number of bytes read.

    Raises ValueError or OSError naming a file that cannot be read or has changed.
    """
    result = job.read_results([unit]).get(unit)
    if result is None:
        reader = UnitReader(job, unit)
        shard = (
            _write_samples(job, unit, reader) if job.has_samples else _write_text(job, unit, reader)
        )
        result = {"key": job.key, "shard": shard, **reader.counts()}
        content = {**result, "bad": reader.bad, "held_out": reader.held_out}
        job.out.write(job.result_name(unit), json.dumps(content).encode())
    return {name: value for name, value in result.items() if name not in ("bad", "held_out")} | {
        "unit_bytes": sum(piece.num_bytes for piece in unit.pieces)
    }


def write_unit_on_one_core(job: Job, unit: Unit) -> JsonObject:
    """Run `write_unit` with a tokenizer of one thread, for as many processes as cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return write_unit(job, unit)


def _write_text(job: Job, unit: Unit, reader: UnitReader) -> JsonObject | None:
    tokenizer = tokenizer_of(job)
    with temporary_folder() as folder:
        path = folder / f"shard{SHARD_SUFFIX}"
        counter = ControlTextCounter(
            () if tokenizer.encodes_control_tokens else tokenizer.control_tokens
        )
        with writing_shard(
            path,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            tokenizer=tokenizer.fingerprint,
            split="train",
            control="tokens" if tokenizer.encodes_control_tokens else "text",
        ) as shard:
            pieces = counter.yield_and_count(reader.text_pieces())
            for ids, size in encode_pieces(tokenizer, pieces):
                shard.append(ids, text_bytes=size)
            shard.control_texts = counter.documents
        return _copy_shard_to_job_folder(job, unit, path) if shard.count > 1 else None


def _write_samples(job: Job, unit: Unit, reader: UnitReader) -> JsonObject | None:
    encoder = sample_encoder_of(job)
    with temporary_folder() as folder:
        path = folder / f"shard{SHARD_SUFFIX}"
        with writing_sample_shard(
            path,
            vocab_size=encoder.tokenizer.vocab_size,
            eot=encoder.tokenizer.eot,
            tokenizer=encoder.tokenizer.fingerprint,
            split="train",
            preferences=job.config.preferences,
        ) as shard:
            for sample in reader.encoded_samples(encoder):
                for own in sample.sequences:
                    shard.append(own.ids, own.trained, text_bytes=own.text_bytes)
        return _copy_shard_to_job_folder(job, unit, path) if shard.ids.count else None


def _copy_shard_to_job_folder(job: Job, unit: Unit, path: Path) -> JsonObject:
    """Copy a finished shard of this machine to the job's folder; return its entry of the
    manifest.
    """
    entry: JsonObject = {"file": job.shard_name(unit, RECORD_SHARD_SUFFIX)}
    if job.has_samples:
        entry["lengths"] = job.shard_name(unit, LENGTHS_SUFFIX)
    shard = open_shard(path)
    with job.out.staging([entry[kind] for kind in ("lengths", "file") if kind in entry]) as folder:
        if job.has_samples:
            lengths = sample_lengths_path(path).read_bytes()
            replace_content_durably(folder / entry["lengths"], lengths)
        target = folder / entry["file"]
        write_as_records(shard, target)
        return {**entry, "file_bytes": target.stat().st_size, **dataclasses.asdict(shard.header)}


@functools.lru_cache(1)
def tokenizer_of(job: Job) -> CorpusTokenizer:
    """Return the job's tokenizer, which a process loads once."""
    control = job.config.control_tokens or job.has_samples
    folder = job.out.local_copy(job.tokenizer_files)
    return load_tokenizer(folder / TOKENIZER, MAX_VOCAB_SIZE, encode_control=control)


@functools.lru_cache(1)
def sample_encoder_of(job: Job) -> SampleEncoder:
    """Return the encoder of the job's samples, by the chat template in the job's folder."""
    return make_sample_encoder(job.config, tokenizer_of(job), datetime.fromisoformat(job.begun))


class UnitReader:
    """Reads a unit's documents in order, sets some apart as held out, and counts.

    held_out: texts, or lines of samples. bad: the first `MAX_LISTED` documents that could not be
    read, with file, byte of the record (None for a whole file) and the problem.
    """

    def __init__(self, job: Job, unit: Unit) -> None:
        self._job, self._unit = job, unit
        self.held_out: list[str] = []
        self.bad: list[JsonObject] = []
        self._held_lines: dict[int, str] = {}  # by position, of samples being encoded
        self._documents = self._empty = self._num_bad = 0

    def counts(self) -> JsonObject:
        """Return the numbers of documents by what became of them."""
        return {
            "documents": self._documents,
            "held_out_documents": len(self.held_out),
            "empty_documents": self._empty,
            "bad_documents": self._num_bad,
        }

    def text_pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, whether it ends its document) of the documents to train on."""
        for piece in self._unit.pieces:
            with open_piece(piece, self._job.config.field) as file:
                readable = self._detect_encoding_or_record_bad(piece, file)
                if readable is None:
                    continue
                if readable.field is None:
                    yield from self._read_whole_file_pieces(piece, readable)
                    continue
                for position, line in _read_records_of_piece(piece, readable):
                    text = self._text_of_record_or_empty(piece, readable, position, line)
                    if not text:
                        continue
                    if self._is_held_out(piece, position, len(line)):
                        self.held_out.append(text)
                    else:
                        self._documents += 1
                        yield from _cut_into_pieces(text)

    def encoded_samples(self, encoder: SampleEncoder) -> Iterator[Encoded]:
        """Yield the samples to train on."""
        for piece in self._unit.pieces:
            with open_piece(piece, self._job.config.field) as file:
                readable = self._detect_encoding_or_record_bad(piece, file)
                if readable is None:
                    continue
                samples = self._read_training_samples(piece, readable)
                for position, sample in encode_in_batches(encoder, samples):
                    held_line = self._held_lines.pop(position, None)
                    if isinstance(sample, ValueError):
                        self._add_bad_document(piece, position, sample)
                    elif held_line is not None:
                        self.held_out.append(held_line)
                    else:
                        self._documents += 1
                        yield sample

    def _detect_encoding_or_record_bad(self, piece: FilePiece, file: InputFile) -> InputFile | None:
        """Return the file with its encoding and layout; None if it is bad as a whole."""
        job = self._job
        preferences = job.has_samples and job.config.preferences
        file = dataclasses.replace(file, has_samples=job.has_samples, has_preferences=preferences)
        if piece.stop is not None:  # plain UTF-8, as `plan_units` has seen
            return file
        fitting, problem = detect_encoding_and_layout(
            file, self._job.config.encoding, lambda position: None
        )
        if fitting is None and file.field is not None:
            return file  # line by line
        if not problem and self._job.has_samples and file.field is None:
            problem = f"{file.path}: is text beside samples"
        if problem:
            self._add_bad_document(piece, None, problem.removeprefix(f"{file.path}: "))
            return None
        return fitting

    def _read_whole_file_pieces(
        self, piece: FilePiece, file: InputFile
    ) -> Iterator[tuple[str, bool]]:
        pieces = read_pieces(file, 0, file.size_bytes)
        if not file.size_bytes:
            self._empty += 1
        elif self._is_held_out(piece, 0, file.size_bytes):
            self.held_out.append("".join(text for text, _ in pieces))
        else:
            self._documents += 1
            yield from pieces

    def _text_of_record_or_empty(
        self, piece: FilePiece, file: InputFile, position: int, line: bytes
    ) -> str:
        """Return the text of a record, "" if it is bad or empty."""
        try:
            text = text_of_record(line, file)
        except ValueError as error:
            self._add_bad_document(piece, position, error)
            return ""
        self._empty += not text
        return text

    def _read_training_samples(
        self, piece: FilePiece, file: InputFile
    ) -> Iterator[tuple[int, Sample | PreferencePair]]:
        for position, line in _read_records_of_piece(piece, file):
            try:
                sample = sample_of_record(line, file)
            except ValueError as error:
                self._add_bad_document(piece, position, error)
                continue
            if self._is_held_out(piece, position, len(line)):
                self._held_lines[position] = line.decode()
            yield position, sample

    def _is_held_out(self, piece: FilePiece, position: int, size_bytes: int) -> bool:
        """Return whether a hash of the document's place chooses it, and it is small enough."""
        digest = hashlib.blake2b(f"{piece.name}:{position}".encode(), digest_size=8).digest()
        chosen = int.from_bytes(digest, "big") < self._job.held_out_share * 2**64
        return chosen and size_bytes <= self._job.config.held_out_bytes

    def _add_bad_document(self, piece: FilePiece, position: int | None, problem: object) -> None:
        self._num_bad += 1
        if len(self.bad) < MAX_LISTED:
            self.bad.append({"file": piece.location, "byte": position, "problem": str(problem)})


def _read_records_of_piece(piece: FilePiece, file: InputFile) -> Iterator[tuple[int, bytes]]:
    """Yield (byte position, line) of the records that begin in a piece, without blank lines."""
    start, stop = piece.start, NO_END if piece.stop is None else piece.stop
    if start:  # the piece before has the record that goes on here
        with file.open() as content:
            content.seek(start - 1)
            start += len(content.readline()) - 1
    for position, line in read_lines(file, start, stop):
        if line.strip():
            yield position, line


def _cut_into_pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a document, with whether they end it."""
    for first in range(0, len(text), PIECE_CHARACTERS):
        end = first + PIECE_CHARACTERS
        yield text[first:end], end >= len(text)
