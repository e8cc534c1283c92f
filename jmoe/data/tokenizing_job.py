"""Tokenisation of text and samples into a folder of shards with a manifest, see
`jmoe.data.corpus`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jmoe.config import DataConfig
from jmoe.data.corpus_inputs import has_samples
from jmoe.data.input_file import SHARD_SUFFIX, InputFile, Report
from jmoe.data.record_shards import MANIFEST, open_token_shard
from jmoe.data.sample_encoder import (
    SampleEncoder,
    encode_in_batches,
    make_sample_encoder,
    sample_encoding_fingerprint,
)
from jmoe.data.shards import (
    SampleShardWriter,
    ShardWriter,
    open_sample_lengths,
    remove_stale_temporaries,
    replace_content_durably,
    writing_sample_shard,
    writing_shard,
)
from jmoe.data.text_checks import (
    MAX_PROBLEMS,
    MAX_SHOWN,
    check_and_detect_encodings,
    describe_problems,
)
from jmoe.data.text_files import TextInput, split_off_held_out
from jmoe.data.text_pieces import (
    describe_position,
    pick_training_texts,
    read_lines,
    read_pieces,
    read_samples,
)
from jmoe.data.tokenizer import (
    ControlTextCounter,
    CorpusTokenizer,
    check_vocab_size,
    encode_pieces,
    load_tokenizer,
    train_bpe,
)
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.status import call_repeatedly
from jmoe.types import Json, JsonObject

FORMAT = 1  # version of the prepared folder; another version is prepared again
HELD_OUT, HELD_OUT_TEXT = "held_out.bin", "held_out.txt"
HASHED_BYTES = 1 << 28  # size up to which shards are hashed at the start
BPE_SAMPLE_BYTES = 20_000_000


class TextChangedError(ValueError):
    """The text differs from the cached text that `PreparationRole.keep` protects."""


@dataclass(frozen=True, eq=False)
class TokenizingJob:
    """The job of tokenising text inputs into `directory`."""

    inputs: tuple[TextInput, ...]
    target_bytes: tuple[int, ...]
    tokenizer: CorpusTokenizer | None
    vocab_size: int
    directory: Path
    config: DataConfig
    content: str  # identity of the text

    @property
    def has_samples(self) -> bool:
        """Whether the inputs are samples for fine-tuning."""
        return has_samples(self.inputs[0])

    @property
    def encodes_control_tokens(self) -> bool:
        """Whether text that spells a control token is that token."""
        return self.config.control_tokens or self.has_samples

    @functools.cached_property
    def _sample_encoding_settings(self) -> Json:
        """The settings that determine the tokens of samples, read once."""
        assert self.tokenizer is not None
        return sample_encoding_fingerprint(self.config, self.tokenizer.path)

    def cache_key(self) -> str:
        """Return a hash of everything that the result depends on: settings and each file's name,
        size, time and content.

        The modification time is included because a small change in a large file may not change the
        content identity.
        """
        timestamps = bool(self.config.path)  # install times of the standard library are irrelevant
        what: JsonObject = {
            "format": FORMAT,
            "target_bytes": self.target_bytes,
            "weights": [entry.weight for entry in self.inputs],
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer else self.vocab_size,
            "inputs": [
                [
                    [f.name, f.size_bytes, f.mtime_ns if timestamps else 0, f.field]
                    for f in entry.files
                ]
                for entry in self.inputs
            ],
            "content": self.content,
            "control_tokens": self.config.control_tokens,
        }
        if self.config.encoding != DataConfig().encoding:
            what["encoding"] = self.config.encoding
        if self.has_samples:
            what["samples"] = self._sample_encoding_settings
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def read_own_manifest(self) -> JsonObject | None:
        """Return the manifest of this very job, None if it has not been done. Checks no other
        file.
        """
        try:
            manifest: JsonObject = json.loads((self.directory / MANIFEST).read_text())
            return manifest if manifest["key"] == self.cache_key() else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def verified_manifest(self) -> JsonObject | None:
        """Return the manifest of this very job, None if it is not done or a file is damaged."""
        if (manifest := self.read_own_manifest()) is None:
            return None
        try:
            for part in [*manifest["train"], manifest["held_out"]]:
                shard = open_token_shard(self.directory / part["file"])
                if shard.header.sha256 != part["sha256"]:
                    return None
                if self.has_samples:
                    open_sample_lengths(self.directory / part["file"], shard.header)
                if shard.blocks.num_bytes <= HASHED_BYTES or not shard.blocks.has_sums:
                    shard.blocks.check_all(shard.header)
            with name_file_in_errors(self.directory / HELD_OUT_TEXT):
                text = (self.directory / HELD_OUT_TEXT).read_bytes()
            tokenizer = self._load_tokenizer(self.directory / TOKENIZER)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        same = hashlib.sha256(text).hexdigest() == manifest["held_out_text"]
        return manifest if same and tokenizer.fingerprint == manifest["tokenizer"] else None

    def ensure_tokenised(
        self, report: Report, expected_manifest: JsonObject | None = None
    ) -> JsonObject:
        """Tokenise the text unless that has been done; return the manifest, which is written last.

        expected_manifest: of the text with which the run began. Raises `TextChangedError` if the
        held-out text differs from that manifest's, before the tokenizer is trained and the text
        tokenised.
        """
        manifest = self.verified_manifest()
        if manifest is not None:
            return manifest
        if self.tokenizer is None:
            check_vocab_size(self.vocab_size)
        parts = self._split_held_out(report)
        expected = None if expected_manifest is None else expected_manifest["held_out_text"]
        if expected is not None and self._held_out_sha256(parts) != expected:
            raise TextChangedError("data.path: names other text than the run began with")
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / MANIFEST).unlink(missing_ok=True)
        remove_stale_temporaries(self.directory)
        tokenizer = self._write_tokenizer(parts, report)
        manifest = {
            "key": self.cache_key(),
            "tokenizer": tokenizer.fingerprint,
            **self._write_shards(tokenizer, parts, report),
        }
        replace_content_durably(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())
        return manifest

    def _split_held_out(self, report: Report) -> list[list[InputFile]]:
        """Check all text; return each input's files with the numbers of bytes for training set.

        Raises ValueError if there is no text to train on or to hold out.
        """
        files = iter(
            check_and_detect_encodings(
                [file for entry in self.inputs for file in entry.files],
                self.config.encoding,
                report,
            )
        )
        parts = []
        for entry, target in zip(self.inputs, self.target_bytes, strict=True):
            parts.append(
                split_off_held_out(list(itertools.islice(files, len(entry.files))), target)
            )
            if not any(_has_text_or_samples(file, 0, file.train_bytes) for file in parts[-1]):
                raise ValueError(
                    f"data.path = {entry.pattern!r}: too little text to train on and to hold out"
                )
        files_of_parts = itertools.chain.from_iterable(parts)
        if not any(_has_text_or_samples(f, f.train_bytes, f.size_bytes) for f in files_of_parts):
            raise ValueError(
                f"data.path: the {len(parts)} inputs hold too little text to hold any of it out"
            )
        return parts

    def _held_out_sha256(self, parts: list[list[InputFile]]) -> str:
        """Return the SHA-256 of the held-out text, as the manifest records it."""
        return hashlib.sha256(
            b"".join(_held_out_content(file) for part in parts for file in part)
        ).hexdigest()

    def _write_tokenizer(self, parts: list[list[InputFile]], report: Report) -> CorpusTokenizer:
        path = self.directory / TOKENIZER
        if self.tokenizer is None:
            sizes = [sum(file.train_bytes for file in part) for part in parts]
            pairs = zip(self.inputs, sizes, strict=True)
            weights = [size if entry.weight is None else entry.weight for entry, size in pairs]
            limits = [int(BPE_SAMPLE_BYTES * weight / (sum(weights) or 1)) for weight in weights]
            texts = itertools.chain.from_iterable(map(pick_training_texts, parts, limits))
            # the trainer reports no progress
            with call_repeatedly(lambda: report("training the tokenizer", 0, 0), 1.0):
                trained = train_bpe(texts, self.vocab_size)
            replace_content_durably(path, trained.to_str().encode())
        elif self.tokenizer.path.resolve() != path.resolve():
            # copy byte for byte, as the fingerprint is the file's hash
            replace_content_durably(path, self.tokenizer.path.read_bytes())
        loaded = self._load_tokenizer(path)
        return (
            loaded
            if self.tokenizer is None
            else dataclasses.replace(loaded, path=self.tokenizer.path)
        )

    def _load_tokenizer(self, path: Path) -> CorpusTokenizer:
        return load_tokenizer(path, self.vocab_size, encode_control=self.encodes_control_tokens)

    def _write_shards(
        self, tokenizer: CorpusTokenizer, parts: list[list[InputFile]], report: Report
    ) -> JsonObject:
        if self.has_samples:
            return self._write_sample_shards(parts, report)
        writer = partial(
            writing_shard,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            tokenizer=tokenizer.fingerprint,
            control="tokens" if tokenizer.encodes_control_tokens else "text",
        )
        encoder = _ShardEncoder(
            tokenizer, sum(file.size_bytes for part in parts for file in part), report
        )
        train = []
        held_out_text = bytearray()
        with contextlib.ExitStack() as stack:
            held_out = stack.enter_context(writer(self.directory / HELD_OUT, split="held_out"))
            for number, (entry, part) in enumerate(zip(self.inputs, parts, strict=True)):
                name = f"train-{number:05d}{SHARD_SUFFIX}"
                with writer(self.directory / name, split="train") as shard:
                    for file in part:
                        encoder.encode_into_shard(read_pieces(file, 0, file.train_bytes), shard)
                        held = list(read_pieces(file, file.train_bytes, file.size_bytes))
                        held_out_text += "".join(text for text, _ in held).encode()
                        encoder.encode_into_shard(held, held_out)
                    if shard.count < 2:
                        raise ValueError(
                            f"data.path = {entry.pattern!r}: too little text to train on and to"
                            " hold out"
                        )
                train.append(_manifest_entry(name, shard))
            if held_out.count < 2:
                raise ValueError(
                    f"data.path: the {len(train)} inputs hold too little text to hold any of it out"
                )
            replace_content_durably(self.directory / HELD_OUT_TEXT, bytes(held_out_text))
        return {
            "train": train,
            "held_out": _manifest_entry(HELD_OUT, held_out),
            "held_out_text": hashlib.sha256(held_out_text).hexdigest(),
        }

    def _write_sample_shards(self, parts: list[list[InputFile]], report: Report) -> JsonObject:
        """Write the shards of samples; return their entries of the manifest. Raises ValueError that
        lists the samples that cannot be trained on.
        """
        assert self.tokenizer is not None
        tokenizer = load_tokenizer(self.tokenizer.path, self.vocab_size, encode_control=True)
        writer = partial(
            writing_sample_shard,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            tokenizer=tokenizer.fingerprint,
            preferences=self.config.preferences,
        )
        files = [file for part in parts for file in part]
        encoder = _SampleShardEncoder(
            make_sample_encoder(self.config, tokenizer),
            sum(file.size_bytes for file in files),
            report,
        )
        train = []
        with writer(self.directory / HELD_OUT, split="held_out") as held_out:
            for number, part in enumerate(parts):
                name = f"train-{number:05d}{SHARD_SUFFIX}"
                with writer(self.directory / name, split="train") as shard:
                    for file in part:
                        encoder.encode_into_shard(file, 0, file.train_bytes, shard)
                        encoder.encode_into_shard(file, file.train_bytes, file.size_bytes, held_out)
                    encoder.raise_if_problems(len(files))
                train.append(_manifest_entry(name, shard.ids))
        held_out_content = b"".join(map(_held_out_content, files))
        replace_content_durably(self.directory / HELD_OUT_TEXT, held_out_content)
        return {
            "train": train,
            "held_out": _manifest_entry(HELD_OUT, held_out.ids),
            "held_out_text": hashlib.sha256(held_out_content).hexdigest(),
        }


def _has_text_or_samples(file: InputFile, start: int, stop: int) -> bool:
    """Return whether bytes `start` up to `stop` of a file hold any text, or any sample."""
    if file.has_samples:
        return any(line.strip() for _, line in read_lines(file, start, stop))
    return any(text for text, _ in read_pieces(file, start, stop))


def _held_out_content(file: InputFile) -> bytes:
    """Return the held-out text of a file; of samples, the lines of their records."""
    if file.has_samples:
        return b"".join(line for _, line in read_lines(file, file.train_bytes, file.size_bytes))
    pieces = read_pieces(file, file.train_bytes, file.size_bytes)
    return b"".join(text.encode() for text, _ in pieces)


class _SampleShardEncoder:
    """Encodes samples into shards, and reports progress through `all_bytes` bytes of records."""

    def __init__(self, encoder: SampleEncoder, all_bytes: int, report: Report) -> None:
        self._encoder, self._report = encoder, report
        self._done_bytes, self._all_bytes = 0, all_bytes
        self._problems: list[tuple[InputFile, int, ValueError]] = []

    def encode_into_shard(
        self, file: InputFile, start: int, stop: int, shard: SampleShardWriter
    ) -> None:
        """Append the samples in bytes `start` up to `stop` of a file, and remember those that
        cannot be trained on, for `raise_if_problems`; stop early after `MAX_PROBLEMS` of these.
        """
        before = self._done_bytes - start
        samples = read_samples(file, start, stop)
        for position, sample in encode_in_batches(self._encoder, samples):
            if isinstance(sample, ValueError):
                self._problems.append((file, position, sample))
                if len(self._problems) >= MAX_PROBLEMS:
                    return
            else:
                for own in sample.sequences:
                    shard.append(own.ids, own.trained, text_bytes=own.text_bytes)
            self._report("tokenising", before + position, self._all_bytes)
        self._done_bytes = before + stop

    def raise_if_problems(self, num_files: int) -> None:
        """Raise ValueError that lists the samples that cannot be trained on, if there are any."""
        if not self._problems:
            return
        lines = [
            f"{describe_position(file, position)}: {error}"
            for file, position, error in self._problems[:MAX_SHOWN]
        ]
        lines += [""] * (len(self._problems) - len(lines))  # only counted
        raise ValueError(describe_problems(lines, num_files))


class _ShardEncoder:
    """Encodes text into shards, and reports progress through `all_bytes` bytes of text."""

    def __init__(self, tokenizer: CorpusTokenizer, all_bytes: int, report: Report) -> None:
        self._tokenizer, self._report = tokenizer, report
        self._done_bytes, self._all_bytes = 0, all_bytes

    def encode_into_shard(self, texts: Iterable[tuple[str, bool]], shard: ShardWriter) -> None:
        """Append the tokens of pieces of text to a shard, and count control tokens kept as text."""
        tokenizer = self._tokenizer
        kept_as_text = ControlTextCounter(
            () if tokenizer.encodes_control_tokens else tokenizer.control_tokens
        )
        for ids, size in encode_pieces(tokenizer, kept_as_text.yield_and_count(texts)):
            shard.append(ids, text_bytes=size)
            self._done_bytes += size
            self._report("tokenising", self._done_bytes, self._all_bytes)
        shard.control_texts += kept_as_text.documents


def _manifest_entry(name: str, shard: ShardWriter) -> JsonObject:
    assert shard.header is not None, name
    return {"file": name, **dataclasses.asdict(shard.header)}
