"""Preparation of training data: from `DataConfig` to memory-mapped tokens.

Process 0 tokenises the text once into a folder; every process then maps that folder. The folder
holds `tokenizer.json`, `train-00000.bin`, ... (one per text input), `held_out.bin`, `held_out.txt`
and, written last, `manifest.json`, which identifies the inputs and settings. `python -m jmoe.data`
writes the same folder, and `data.path` accepts it. Samples for fine-tuning become shards of samples
(`shards.py`), each with a file of lengths.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jmoe.config import DataConfig
from jmoe.data.chat_files import write_chat_files
from jmoe.data.corpus_inputs import (
    existing_tokenizer,
    find_inputs,
    has_shards,
    hash_of_texts,
    held_out_target_bytes,
    open_shards,
)
from jmoe.data.held_out import HeldOutTokens, read_held_out, take_held_out_of_shards
from jmoe.data.input_file import Report
from jmoe.data.record_shards import MANIFEST, open_token_shard
from jmoe.data.shards import (
    IdChecks,
    IdSequence,
    Shard,
    open_sample_lengths,
)
from jmoe.data.text_files import TextInput
from jmoe.data.tokenizer import (
    CorpusTokenizer,
    load_tokenizer,
)
from jmoe.data.tokenizing_job import HASHED_BYTES, TokenizingJob
from jmoe.memory.direct_io import fsync
from jmoe.models.tokenizer_file import TOKENIZER
from jmoe.types import JsonObject


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
    inputs = find_inputs(config, role.report)
    shards = {
        i: open_shards(entry, vocab_size, config)
        for i, entry in enumerate(inputs)
        if entry.is_shards
    }
    tokenizer = existing_tokenizer(config, inputs, shards, vocab_size)
    targets = held_out_target_bytes(config, inputs, shards)
    texts = [i for i in range(len(inputs)) if i not in shards]
    held_out: list[HeldOutTokens] = []
    if texts:
        job = TokenizingJob(
            inputs=tuple(inputs[i] for i in texts),
            target_bytes=tuple(targets[i] for i in texts),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            directory=cache_dir,
            config=config,
            content=hash_of_texts([inputs[i] for i in texts], role.report),
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
        held_out.append(read_held_out(cache_dir, tokenizer))
    shard_inputs = [i for i, entry in enumerate(inputs) if entry.is_shards]
    _check_shard_hashes([shard for i in shard_inputs for shard in shards[i]], role.report)
    held_out += take_held_out_of_shards(inputs, shards, shard_inputs, targets, tokenizer)
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
    inputs = find_inputs(config, report)
    for entry in inputs:
        if entry.is_shards:
            raise ValueError(
                f"data.path = {entry.pattern!r}: already token shards; only text can be written as"
                " shards"
            )
    tokenizer = existing_tokenizer(config, inputs, {}, vocab_size)
    targets = tuple(held_out_target_bytes(config, inputs, {}))
    job = TokenizingJob(
        tuple(inputs), targets, tokenizer, vocab_size, out, config, hash_of_texts(inputs, report)
    )
    if has_shards(out) and job.verified_manifest() is None:
        raise ValueError(
            f"--out = {str(out)!r}: already holds token shards made from other inputs or settings"
        )
    corpus = prepare_corpus(config, vocab_size, out, PreparationRole(report=report))
    if job.has_samples:
        write_chat_files(config, out)
    return corpus


def _wait_for_manifest(job: TokenizingJob, role: PreparationRole) -> JsonObject:
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


def _assemble_corpus(
    inputs: Sequence[TextInput],
    shards: Sequence[Sequence[Shard]],
    held_out: Sequence[HeldOutTokens],
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
