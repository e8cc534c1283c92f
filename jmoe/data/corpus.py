"""Preparation of training data: from `DataConfig` to memory-mapped tokens.

Process 0 tokenises the text once into a folder; every process then maps that folder. The folder
holds `tokenizer.json`, `train-00000.bin`, ... (one per text input), `held_out.bin`, `held_out.txt`
and, written last, `manifest.json`, which identifies the inputs and settings. `python -m jmoe.data`
writes the same folder, and `data.path` accepts it. Samples for fine-tuning become shards of samples
(`shards.py`), each with a file of lengths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jmoe.config import DataConfig
from jmoe.config.checks import check, check_unset
from jmoe.data.chat_files import write_chat_files
from jmoe.data.record_shards import MANIFEST, open_token_shard, read_manifest_hashes
from jmoe.data.sample_encoder import (
    SampleEncoder,
    encode_in_batches,
    make_sample_encoder,
    sample_encoding_fingerprint,
)
from jmoe.data.shards import (
    IdChecks,
    Ids,
    IdSequence,
    SampleShardWriter,
    Shard,
    ShardWriter,
    open_sample_lengths,
    remove_stale_temporaries,
    replace_content_durably,
    writing_sample_shard,
    writing_shard,
)
from jmoe.data.text_files import (
    MAX_PROBLEMS,
    MAX_SHOWN,
    SHARD_SUFFIX,
    SHARD_SUFFIXES,
    InputFile,
    Report,
    TextInput,
    check_and_detect_encodings,
    describe_position,
    describe_problems,
    find_text_input,
    mark_inputs_with_samples,
    pick_training_texts,
    read_lines,
    read_pieces,
    read_samples,
    split_off_held_out,
    standard_library_files,
)
from jmoe.data.tokenizer import (
    ControlTextCounter,
    CorpusTokenizer,
    check_vocab_size,
    encode_pieces,
    load_tokenizer,
    train_bpe,
)
from jmoe.memory.direct_io import fsync, name_file_in_errors
from jmoe.memory.identity import sampled_content_hash
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.status import call_repeatedly
from jmoe.types import Json, JsonObject

FORMAT = 1  # version of the prepared folder; another version is prepared again
HELD_OUT, HELD_OUT_TEXT = "held_out.bin", "held_out.txt"
HASHED_BYTES = 1 << 28  # size up to which shards are hashed at the start
BPE_SAMPLE_BYTES = 20_000_000


@dataclass(frozen=True, eq=False)
class TextSource:
    """The training tokens of one `data.path`: ids that are read on use, one sequence per shard.

    weight: share in the mixture relative to the other sources; None means by size. files: number of
    files read. skipped: number of non-text files in the folder by suffix. control_texts: number of
    documents in which text of control tokens was encoded as plain text. lengths: the tokens of each
    sample, one array per shard; None for text. num_trained: the samples' tokens to learn.
    has_preferences: two samples one after the other are a preference.
    """

    name: str
    shards: tuple[IdSequence, ...]
    blocks: tuple[IdChecks, ...]
    weight: float | None
    text_bytes: int
    files: int
    skipped: Counter[str]
    control_texts: int
    lengths: tuple[NDArray[np.uint32], ...] | None = None
    num_trained: int = 0
    has_preferences: bool = False

    @functools.cached_property
    def reference_log_probs(self) -> tuple[NDArray[np.float32], ...]:
        """The reference model's log-probability of each sample's answer, one array per shard, which
        the caller fills in. NaN until then.
        """
        return tuple(np.full(len(own), np.nan, np.float32) for own in self.lengths or ())

    @property
    def num_tokens(self) -> int:
        return sum(len(shard) for shard in self.shards)

    @property
    def num_samples(self) -> int:
        return sum(len(lengths) for lengths in self.lengths or ())


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and held-out tokens, each a sequence `eot document eot document ... eot`.

    held_out_tokens: int32 [N]; the first is the end-of-text token, the other N - 1 are targets.
    held_out_bytes: their text in UTF-8 (end-of-text tokens count no bytes), empty if the inputs are
    shards without a tokenizer. vocab_size: exclusive upper bound of all ids. fingerprint: hash of
    all tokens, weights and the tokenizer; a run resumes only with the same fingerprint.
    held_out_samples: of a corpus of samples, whose held_out_tokens and held_out_bytes are empty;
    None for text.
    """

    tokenizer: Tokenizer | None
    tokenizer_path: Path | None
    eot: int
    vocab_size: int
    sources: tuple[TextSource, ...]
    held_out_tokens: NDArray[np.int32]
    held_out_bytes: bytes
    fingerprint: str
    held_out_samples: TextSource | None = None

    @property
    def num_held_out_tokens(self) -> int:
        held_out = self.held_out_samples
        return len(self.held_out_tokens) if held_out is None else held_out.num_tokens

    @property
    def num_train_tokens(self) -> int:
        return sum(source.num_tokens for source in self.sources)

    @property
    def shard_folders(self) -> list[Path]:
        """The folders of the training tokens."""
        return sorted({b.path.parent for source in self.sources for b in source.blocks})

    def describe_tokens(self) -> str:
        """Return a phrase with the numbers of tokens; of samples also of those to learn."""
        words = f"{self.num_train_tokens:,} tokens to train on"
        if self.held_out_samples is not None:
            words += f" ({sum(source.num_trained for source in self.sources):,} to learn)"
        return f"{words}, {self.num_held_out_tokens:,} held out"

    def describe_input_files(self) -> str:
        """Return a sentence with the numbers of files read and skipped."""
        skipped = sum((source.skipped for source in self.sources), Counter())
        words = f"{sum(source.files for source in self.sources):,} file(s) read"
        if skipped:
            kinds = [f"{count} {kind}" for kind, count in skipped.most_common(5)]
            more = ", ..." if len(skipped) > 5 else ""
            words += f", {skipped.total():,} skipped that are no text ({', '.join(kinds)}{more})"
        return words

    def describe_control_token_texts(self) -> str:
        """Return a sentence with the number of training documents in which control tokens were
        kept as text; "" if none.
        """
        count = sum(source.control_texts for source in self.sources)
        if not count:
            return ""
        option = "--data.control-tokens encodes it as those tokens, as a server does"
        return f"{count:,} texts hold text of control tokens, kept as text; {option}"

    def check_held_out_text_known(self) -> None:
        """Raise ValueError if the held-out text, and so bits per byte, is unknown."""
        if not self.held_out_bytes:
            raise ValueError(
                "data.path: the held-out text is unknown, as the token shards come without a"
                " tokenizer"
            )

    def bits_per_byte(self, mean_loss: float) -> float:
        """Return bits per byte of held-out text.

        mean_loss: mean over the N - 1 held-out targets, in nats. Raises ValueError if the held-out
        text is unknown.
        """
        self.check_held_out_text_known()
        return mean_loss / math.log(2) * (len(self.held_out_tokens) - 1) / len(self.held_out_bytes)


@dataclass(frozen=True, eq=False)
class _HeldOutTokens:
    """Held-out tokens. `text` is None if unknown; `sha256` identifies the ids. samples: the shard
    of held-out samples, which has neither `ids` nor `text`.
    """

    ids: NDArray[np.int32]
    text: bytes | None
    sha256: str
    samples: Shard | None = None


@dataclass(frozen=True, eq=False)
class PreparationRole:
    """The role of this process in data preparation.

    is_main: this process writes; the others wait. report: a function called with the progress, at
    least every few seconds. progress: a function that returns a value, which changes when the main
    process progresses; other processes wait at most `wait_s` seconds without a change. keep:
    prepare other text beside the cached text without replacing it, until `publish_staged` is
    called.
    """

    is_main: bool = True
    report: Report = lambda what, done, total: None
    wait_s: float = 300
    progress: Callable[[], object] = lambda: None
    keep: bool = False


def prepare_corpus(
    config: DataConfig, vocab_size: int, cache_dir: Path, role: PreparationRole | None = None
) -> Corpus:
    """Return the corpus of a run: find, check, split, tokenise (once, into `cache_dir`) and
    memory-map its data.

    vocab_size: the model's. The main process writes; the others wait for the manifest, or raise
    TimeoutError naming it (see `PreparationRole`). All processes must see the same inputs and the
    same `cache_dir`. Raises ValueError that names the field, the file and, if known, the line or
    byte at fault, before anything is written.
    """
    role = role or PreparationRole()
    inputs = _find_inputs(config, role.report)
    shards = {
        i: _open_shards(entry, vocab_size, config)
        for i, entry in enumerate(inputs)
        if entry.is_shards
    }
    tokenizer = _existing_tokenizer(config, inputs, shards, vocab_size)
    targets = _held_out_target_bytes(config, inputs, shards)
    texts = [i for i in range(len(inputs)) if i not in shards]
    held_out: list[_HeldOutTokens] = []
    if texts:
        job = _TokenizingJob(
            inputs=tuple(inputs[i] for i in texts),
            target_bytes=tuple(targets[i] for i in texts),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            directory=cache_dir,
            config=config,
            content=_text_hash([inputs[i] for i in texts], role.report),
        )
        finished = job.verified_manifest() is not None
        if role.is_main and not finished and job.read_own_manifest() is not None:
            print(f"{cache_dir}: the prepared text is damaged, it is prepared again", flush=True)
        expected_manifest = None
        if role.keep and not finished:
            expected_manifest = _read_manifest(cache_dir)
            cache_dir = staging_folder(cache_dir)
            job = dataclasses.replace(job, directory=cache_dir)
        manifest = (
            job.ensure_tokenised(role.report, expected_manifest)
            if role.is_main
            else _wait_for_manifest(job, role)
        )
        tokenizer = load_tokenizer(
            cache_dir / TOKENIZER, vocab_size, encode_control=job.encodes_control_tokens
        )
        for number, i in enumerate(texts):
            shards[i] = [open_token_shard(cache_dir / manifest["train"][number]["file"])]
        held_out.append(_read_held_out(cache_dir, tokenizer))
    shard_inputs = [i for i, entry in enumerate(inputs) if entry.is_shards]
    _check_shard_hashes([shard for i in shard_inputs for shard in shards[i]], role.report)
    held_out += _take_held_out_of_shards(inputs, shards, shard_inputs, targets, tokenizer)
    return _assemble_corpus(inputs, [shards[i] for i in range(len(inputs))], held_out, tokenizer)


def _check_shard_hashes(shards: Sequence[Shard], report: Report) -> None:
    """Raise ValueError naming a shard whose ids have another SHA-256 than its header says.

    All shards without CRC-32s are read, and others up to `HASHED_BYTES` in total; the rest is
    checked block by block when it is read.
    """
    small_bytes, done_bytes = HASHED_BYTES, 0
    chosen = []
    for shard in shards:
        small_bytes -= shard.blocks.num_bytes
        if small_bytes >= 0 or not shard.blocks.has_sums:
            chosen.append(shard)
    total_bytes = sum(shard.blocks.num_bytes for shard in chosen)
    for shard in chosen:
        shard.blocks.check_all(shard.header)
        done_bytes += shard.blocks.num_bytes
        report("checking token shards", done_bytes, total_bytes)


class TextChangedError(ValueError):
    """The text differs from the cached text that `PreparationRole.keep` protects."""


def _read_manifest(cache_dir: Path) -> JsonObject | None:
    """Return the manifest in `cache_dir`, of whatever inputs; None if it is missing or damaged."""
    try:
        manifest = json.loads((cache_dir / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "held_out_text" in manifest else None


def staging_folder(cache_dir: Path) -> Path:
    """Return the folder in which new text is prepared while `cache_dir` keeps the old text."""
    return cache_dir.with_name(f".{cache_dir.name}.new")


def publish_staged(corpus: Corpus, cache_dir: Path) -> None:
    """Move a corpus prepared in `staging_folder(cache_dir)` to `cache_dir`; ignore any other
    corpus.

    Files that are open stay readable. The old manifest is removed first and the new one moved last,
    so that after an interruption the text is prepared again.
    """
    made = staging_folder(cache_dir)
    if corpus.tokenizer_path is None or corpus.tokenizer_path.parent != made:
        return
    cache_dir.mkdir(exist_ok=True)
    (cache_dir / MANIFEST).unlink(missing_ok=True)
    for path in sorted(made.iterdir(), key=lambda path: path.name == MANIFEST):
        path.replace(cache_dir / path.name)
    fsync(cache_dir)
    made.rmdir()


def discard_staged(cache_dir: Path) -> None:
    """Delete the unpublished text in the folder `staging_folder(cache_dir)`."""
    shutil.rmtree(staging_folder(cache_dir), ignore_errors=True)


def write_shards(config: DataConfig, vocab_size: int, out: Path, report: Report) -> Corpus:
    """Write text as token shards into `out`, for other runs, and return the corpus. Samples bring
    the files along with which their model is to be served (`chat_files.py`).

    Raises ValueError if the inputs are token shards already, or `out` holds shards of other inputs
    or settings.
    """
    inputs = _find_inputs(config, report)
    for entry in inputs:
        if entry.is_shards:
            raise ValueError(
                f"data.path = {entry.pattern!r}: already token shards; only text can be written as"
                " shards"
            )
    tokenizer = _existing_tokenizer(config, inputs, {}, vocab_size)
    targets = tuple(_held_out_target_bytes(config, inputs, {}))
    job = _TokenizingJob(
        tuple(inputs), targets, tokenizer, vocab_size, out, config, _text_hash(inputs, report)
    )
    if _has_shards(out) and job.verified_manifest() is None:
        raise ValueError(
            f"--out = {str(out)!r}: already holds token shards made from other inputs or settings"
        )
    corpus = prepare_corpus(config, vocab_size, out, PreparationRole(report=report))
    if job.has_samples:
        write_chat_files(config, out)
    return corpus


def _find_inputs(config: DataConfig, report: Report) -> list[TextInput]:
    if not config.path:
        return [TextInput("", tuple(standard_library_files()))]
    weights = config.weights or (None,) * len(config.path)
    inputs = [
        find_text_input(*pair, config.field, report)
        for pair in zip(config.path, weights, strict=True)
    ]
    written = [entry for entry in inputs if not entry.is_shards]
    texts = iter(mark_inputs_with_samples(written, preferences=config.preferences))
    inputs = [entry if entry.is_shards else next(texts) for entry in inputs]
    owner: dict[Path, tuple[TextInput, Path]] = {}
    for entry in inputs:
        for file in entry.files:
            first, known = owner.setdefault(file.path.resolve(), (entry, file.path))
            if first is not entry or known is not file.path:
                twice = f"is in both {first.pattern!r} and {entry.pattern!r}"
                raise ValueError(
                    f"data.path: {file.path}"
                    f" {f'is {known}, by a link' if first is entry else twice}; its held-out part"
                    " would be trained on"
                )
    if all(entry.is_shards for entry in inputs):
        check_unset(config, "data", ["encoding"], "with token shards alone, which hold no text")
    if not any(file.field for entry in inputs for file in entry.files):
        check_unset(
            config,
            "data",
            ["field"],
            "without JSON or JSONL in data.path, whose records have fields",
        )
    _check_sample_options(config, inputs)
    return inputs


def _has_samples(entry: TextInput) -> bool:
    """Return whether an input holds samples for fine-tuning, as records or as token shards."""
    if entry.is_shards:
        return open_token_shard(entry.files[0].path).header.has_samples
    return entry.files[0].has_samples


def _check_sample_options(config: DataConfig, inputs: Sequence[TextInput]) -> None:
    """Raise ValueError for options of samples without samples, and for text beside samples."""
    samples = [entry for entry in inputs if _has_samples(entry)]
    written = [entry for entry in samples if not entry.is_shards]
    if samples and len(samples) < len(inputs):
        text = next(entry for entry in inputs if entry not in samples)
        raise ValueError(
            f"data.path = {text.pattern!r}: is text beside the samples of {samples[0].pattern!r};"
            " give samples alone"
        )
    if not samples:
        why = "without samples, such as chats, in data.path"
        names = ["preferences", "max_prompt_tokens", "long_samples", "pack_samples"]
        check_unset(config, "data", names, why)
    for entry in samples:
        if entry.is_shards:
            layout = open_token_shard(entry.files[0].path).header.layout
            wanted = "preferences" if config.preferences else "samples"
            check(
                layout == wanted,
                "data.preferences",
                config.preferences,
                f"must be {not config.preferences} with shards of {layout} in {entry.pattern!r}",
            )
    if not written:
        why = "without samples, such as chats, in data.path that are not tokens yet"
        check_unset(config, "data", ["chat_template", "train_on"], why)
    elif config.tokenizer is None:
        check(
            any(entry.is_shards for entry in inputs),
            "data.tokenizer",
            None,
            "must be the tokenizer.json of the model whose chat format the samples take;"
            " --init-from MODEL takes the model's own",
        )


def _has_shards(folder: Path) -> bool:
    return any(any(folder.glob(f"*{suffix}")) for suffix in SHARD_SUFFIXES)


def _open_shards(entry: TextInput, vocab_size: int, config: DataConfig) -> list[Shard]:
    folders = sorted({file.path.parent for file in entry.files})
    listed = {folder: read_manifest_hashes(folder) for folder in folders}
    train = []
    for file in entry.files:
        shard = open_token_shard(file.path)
        expected = listed[file.path.parent].get(file.path.name, shard.header.sha256)
        if shard.header.sha256 != expected:
            raise ValueError(
                f"{file.path}: is of another preparation than the {MANIFEST} beside it; copy the"
                " whole folder"
            )
        made_for = shard.header.vocab_size
        if made_for > vocab_size:
            raise ValueError(
                f"{file.path}: its vocab_size = {made_for} exceeds model.vocab_size = {vocab_size}"
            )
        if config.control_tokens and shard.header.control != "tokens":
            raise ValueError(
                f"data.control_tokens = True: {file.path} was made without; make its shards again"
                " with python -m jmoe.data --control-tokens"
            )
        if shard.header.split != "held_out":
            train.append(shard)
    if not train:
        raise ValueError(
            f"data.path = {entry.pattern!r}: holds held-out token shards only, nothing to train on"
        )
    return train


def _existing_tokenizer(
    config: DataConfig, inputs: Sequence[TextInput], shards: dict[int, list[Shard]], vocab_size: int
) -> CorpusTokenizer | None:
    """Return the tokenizer of `data.tokenizer`, or else of the shards' folder.

    Returns None if there is neither: shards without a tokenizer, or text whose tokenizer is yet to
    be trained. Raises ValueError if shards come from different tokenizers.
    """
    path = Path(config.tokenizer).expanduser() if config.tokenizer else None
    if path is None:
        beside = [inputs[i].files[0].path.parent / TOKENIZER for i in shards]
        path = next((p for p in beside if p.is_file()), None)
    tokenizer = (
        load_tokenizer(path, vocab_size, encode_control=config.control_tokens) if path else None
    )
    makers = {
        shard.header.tokenizer: inputs[i].pattern for i, group in shards.items() for shard in group
    }
    if len(makers) > 1:
        raise ValueError(
            f"data.path: the token shards in {', '.join(makers.values())} come from different"
            " tokenizers"
        )
    for maker, pattern in makers.items():
        if tokenizer is None and len(shards) < len(inputs):
            raise ValueError(
                f"data.tokenizer = None: the token shards in {pattern!r} come without a"
                f" {TOKENIZER}, so the text beside them cannot be tokenised alike"
            )
        if tokenizer is not None and tokenizer.fingerprint != maker:
            raise ValueError(
                f"data.tokenizer = {str(tokenizer.path)!r}: the token shards in {pattern!r} were"
                f" made with another tokenizer ({maker[:12]}, not {tokenizer.fingerprint[:12]})"
            )
    return tokenizer


def _held_out_target_bytes(
    config: DataConfig, inputs: Sequence[TextInput], shards: dict[int, list[Shard]]
) -> list[int]:
    """Return the number of bytes of text to hold out of each input, in proportion to the inputs'
    shares of training data.
    """
    sizes = [
        (
            sum(s.header.text_bytes for s in shards[i])
            if i in shards
            else sum(f.size_bytes for f in entry.files)
        )
        for i, entry in enumerate(inputs)
    ]
    weights = [
        float(size) if entry.weight is None else entry.weight
        for size, entry in zip(sizes, inputs, strict=True)
    ]
    total = sum(weights) or 1.0
    return [
        int(min(config.held_out_bytes * weight / total, config.held_out_fraction * size))
        for size, weight in zip(sizes, weights, strict=True)
    ]


def _text_hash(inputs: Sequence[TextInput], report: Report) -> str:
    """Return an identity (hash) of the content of all text files."""
    files = {
        f"{i}/{file.name}": file.path for i, entry in enumerate(inputs) for file in entry.files
    }
    return sampled_content_hash(files, report=partial(report, "comparing the text"))


@dataclass(frozen=True, eq=False)
class _TokenizingJob:
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
        return _has_samples(self.inputs[0])

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


def _wait_for_manifest(job: _TokenizingJob, role: PreparationRole) -> JsonObject:
    path = job.directory / MANIFEST
    since, seen = time.monotonic(), role.progress()
    pause_s = 0.05
    while (manifest := job.verified_manifest()) is None:
        if (now := role.progress()) != seen:
            since, seen = time.monotonic(), now
        if time.monotonic() >= since + role.wait_s:
            state = (
                "it is there, but was made from other inputs or settings than this process sees"
                " (names, sizes, text)"
                if path.exists()
                else (
                    "it is not there; is the folder shared by all processes, and did process 0"
                    " fail? Large text is better tokenised once with python -m jmoe.data"
                )
            )
            raise TimeoutError(
                f"{path}: waited {role.wait_s:g} s (distributed.start_timeout_s) without progress"
                f" of process 0, which prepares the data: {state}"
            )
        time.sleep(min(pause_s, max(0.0, since + role.wait_s - time.monotonic())))
        pause_s = min(1.0, pause_s * 1.5)
    return manifest


def _read_held_out(directory: Path, tokenizer: CorpusTokenizer | None) -> _HeldOutTokens:
    shard = open_token_shard(directory / HELD_OUT)
    shard.blocks.check_all(shard.header)
    if shard.header.has_samples:
        return _HeldOutTokens(np.zeros(0, np.int32), None, shard.header.sha256, shard)
    text_path = directory / HELD_OUT_TEXT
    text = None
    if text_path.is_file() and text_path.stat().st_size == shard.header.text_bytes:
        with name_file_in_errors(text_path):
            text = text_path.read_bytes()
    elif tokenizer is not None:
        text = _decode_to_utf8(tokenizer, shard.ids[:])
    return _HeldOutTokens(shard.ids[:].astype(np.int32), text, shard.header.sha256)


def _decode_to_utf8(tokenizer: CorpusTokenizer, ids: Ids) -> bytes:
    ends = np.flatnonzero(ids == tokenizer.eot)
    documents = np.split(ids, ends)
    texts = ([int(i) for i in document if i != tokenizer.eot] for document in documents)
    return "".join(
        tokenizer.tokenizer.decode(text, skip_special_tokens=False) for text in texts
    ).encode()


def _take_held_out_of_shards(
    inputs: Sequence[TextInput],
    shards: dict[int, list[Shard]],
    shard_inputs: Sequence[int],
    targets: Sequence[int],
    tokenizer: CorpusTokenizer | None,
) -> list[_HeldOutTokens]:
    """Return the held-out tokens of the inputs numbered in `shard_inputs`.

    Uses `held_out.bin` beside the shards; without one, splits the end off the largest shard and
    updates `shards`. Raises ValueError if a `held_out.bin` was made with another tokenizer.
    """
    held_out: list[_HeldOutTokens] = []
    seen: set[Path] = set()
    for i in shard_inputs:
        folders = sorted({file.path.parent.resolve() for file in inputs[i].files})
        beside = [folder for folder in folders if (folder / HELD_OUT).is_file()]
        for folder in beside:
            if (
                open_token_shard(folder / HELD_OUT).header.tokenizer
                != shards[i][0].header.tokenizer
            ):
                raise ValueError(
                    f"{folder / HELD_OUT}: made with another tokenizer than the token shards"
                    " beside it"
                )
            if folder not in seen:
                held_out.append(_read_held_out(folder, tokenizer))
                seen.add(folder)
        if not beside and shards[i][0].header.has_samples:
            raise ValueError(
                f"data.path = {inputs[i].pattern!r}: lacks {HELD_OUT} beside its shards of samples;"
                " copy the whole folder that python -m jmoe.data made"
            )
        if not beside:
            largest = max(range(len(shards[i])), key=lambda j: len(shards[i][j].ids))
            shard = shards[i][largest]
            shards[i][largest], carved = _split_off_held_out(
                shard, targets[i], tokenizer, inputs[i].pattern
            )
            held_out.append(carved)
    return held_out


def _split_off_held_out(
    shard: Shard, target_bytes: int, tokenizer: CorpusTokenizer | None, pattern: str
) -> tuple[Shard, _HeldOutTokens]:
    """Return the shard without its last `target_bytes` of text, and these as held-out tokens.

    Cuts at the first end of a document within these bytes if there is one. Raises ValueError if the
    shard has too few tokens.
    """
    count, header = len(shard.ids), shard.header
    wanted = int(target_bytes * count / max(1, header.text_bytes))
    cut = count - min(wanted, count // 2)
    shard.blocks.check_ids(cut, count)
    ends = np.flatnonzero(shard.ids[cut:-1] == header.eot)
    cut += int(ends[0]) if len(ends) else 0
    tail = shard.ids[cut:].astype(np.int32)
    if not len(ends):
        tail = np.concatenate([np.asarray([header.eot], np.int32), tail])
    if len(tail) < 2 or cut < 2:
        raise ValueError(
            f"data.path = {pattern!r}: {count} tokens are too few to hold any of them out"
        )
    text = _decode_to_utf8(tokenizer, tail.astype(np.uint32)) if tokenizer else None
    digest = hashlib.sha256(tail.tobytes()).hexdigest()
    return dataclasses.replace(shard, ids=shard.ids[:cut]), _HeldOutTokens(tail, text, digest)


def _assemble_corpus(
    inputs: Sequence[TextInput],
    shards: Sequence[Sequence[Shard]],
    held_out: Sequence[_HeldOutTokens],
    tokenizer: CorpusTokenizer | None,
) -> Corpus:
    what = {
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "train": [
            [entry.weight, [[s.header.sha256, len(s.ids)] for s in group]]
            for entry, group in zip(inputs, shards, strict=True)
        ],
        "held_out": [part.sha256 for part in held_out],
    }
    sources = tuple(starmap(_make_source, zip(inputs, shards, strict=True)))
    if any(source.lengths is not None for source in sources):
        lengths = [
            open_sample_lengths(s.blocks.path, s.header).header.sha256
            for group in shards
            for s in group
        ]
        what["lengths"] = lengths
        held_out_shards = [part.samples for part in held_out if part.samples is not None]
        held_out_source = _make_source(TextInput("held-out samples", ()), held_out_shards)
    else:
        held_out_source = None
    # Each part ends with the end-of-text token and the next begins with it: keep one of the two.
    ids = [
        held_out[0].ids,
        *(part.ids[int(part.ids[0] == held_out[0].ids[0]) :] for part in held_out[1:]),
    ]
    texts = [part.text for part in held_out if part.text is not None]
    header = shards[0][0].header
    return Corpus(
        tokenizer=tokenizer.tokenizer if tokenizer else None,
        tokenizer_path=tokenizer.path if tokenizer else None,
        eot=header.eot,
        # samples may have tokens that only tokenizer_config.json lists
        vocab_size=max(
            *(s.header.vocab_size for group in shards for s in group),
            tokenizer.vocab_size if tokenizer else 0,
        ),
        sources=sources,
        held_out_tokens=np.concatenate(ids),
        held_out_bytes=b"".join(texts) if len(texts) == len(held_out) else b"",
        fingerprint=hashlib.sha256(json.dumps(what).encode()).hexdigest(),
        held_out_samples=held_out_source,
    )


def _make_source(entry: TextInput, shards: Sequence[Shard]) -> TextSource:
    """Return the tokens of one input from its shards."""
    header = shards[0].header
    return TextSource(
        name=entry.pattern or "Python standard library",
        shards=tuple(s.ids for s in shards),
        blocks=tuple(s.blocks for s in shards),
        weight=entry.weight,
        text_bytes=sum(int(s.header.text_bytes * len(s.ids) / s.header.count) for s in shards),
        files=len(entry.files),
        skipped=entry.skipped,
        control_texts=sum(s.header.control_texts for s in shards),
        lengths=(
            tuple(
                np.asarray(open_sample_lengths(s.blocks.path, s.header).ids[:], np.uint32)
                for s in shards
            )
            if header.has_samples
            else None
        ),
        num_trained=sum(s.header.trained for s in shards),
        has_preferences=header.layout == "preferences",
    )
