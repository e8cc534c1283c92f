"""Batches of tokens for training and evaluation.

Legend: B sequences in a global batch, b sequences of this process, S sequence length. A window is S
+ 1 consecutive tokens: inputs `[:, :-1]` and targets `[:, 1:]`. Windows start every S tokens, so
that every token is a target once an epoch. Samples for fine-tuning come in rows instead
(`sample_rows.py`).
"""

from __future__ import annotations

import bisect
import itertools
import lzma
from collections.abc import Iterator, Sequence
from typing import Any, Self

import grain
import numpy as np
from numpy.typing import NDArray

from jmoe.config import DataConfig
from jmoe.data.corpus import Corpus, TextSource
from jmoe.data.sample_rows import AnyRows, RowCounts, SampleRows, SourceRows, rows_of_windows
from jmoe.types import JsonObject

# Minimum size of held-out text for comparable baselines. `xz -9` has no prior
# knowledge: on 20 kB of source code it needs a sixth more bits per byte than on 500 kB (by chance
# up to a third less), on 100 kB a tenth more.
COMPARABLE_BYTES = 100_000
# limit of training tokens counted for the unigram model, spread over each source
UNIGRAM_TOKENS = 1 << 28


TokenRows = NDArray[np.int32] | AnyRows  # windows of text, or rows of samples


class _TokenWindows:
    """Random access to the windows of one source: int32 [S + 1]. Windows do not cross shards."""

    def __init__(self, source: TextSource, sequence_length: int, vocab_size: int) -> None:
        self._source, self._length, self._vocab_size = source, sequence_length, vocab_size
        self._ends = list(
            itertools.accumulate((len(ids) - 1) // sequence_length for ids in source.shards)
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        shard = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[shard - 1] if shard else 0)) * self._length
        self._source.blocks[shard].check_ids(start, start + self._length + 1)
        window = self._source.shards[shard][start : start + self._length + 1].astype(np.int32)
        largest = int(np.max(window))
        if largest >= self._vocab_size:
            raise ValueError(
                f"data.path = {self._source.name!r}: a token of {largest} near position {start} of"
                f" shard {shard} is not below vocab_size = {self._vocab_size}: the token shard is"
                " damaged"
            )
        return window


class _DocumentWindows:
    """Random access to the windows of one source as rows of documents (`rows_of_windows`)."""

    def __init__(self, windows: _TokenWindows, eot: int) -> None:
        self._windows, self._eot = windows, eot

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> SampleRows:
        tokens = self._windows[index]
        return rows_of_windows(tokens, np.ones(tokens.size - 1, np.float32), self._eot)


class _LocalRows:
    """This process's b consecutive rows of every global batch of B rows."""

    def __init__(self, rows: grain.MapDataset, batch_size: int, first: int, local: int) -> None:
        self._rows, self._batch_size, self._first, self._local = rows, batch_size, first, local

    def __len__(self) -> int:
        return len(self._rows) // self._batch_size * self._local

    def __getitem__(self, index: int) -> TokenRows:
        step, row = divmod(index, self._local)
        window: TokenRows = self._rows[step * self._batch_size + self._first + row]
        return window


class TrainBatches:
    """Endless iterator of this process's training batches, int32 [b, S + 1] or `SampleRows`; see
    `train_batches`.
    """

    def __init__(
        self,
        batches: grain.MapDataset,
        options: grain.ReadOptions,
        identity: JsonObject,
        description: str = "",
    ) -> None:
        self._batches, self._options, self._identity = batches, options, identity
        self.description = description  # what became of samples; "" for text
        self._step = 0
        self._iterator: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenRows:
        if self._iterator is None:
            self._iterator = iter(self._batches[self._step :].to_iter_dataset(self._options))
        batch: TokenRows = next(self._iterator)
        self._step += 1
        return batch

    def get_state(self) -> JsonObject:
        """Return the JSON-serialisable position in the data, which is the same on every process
        and for every process count.
        """
        return {"next_step": self._step, **self._identity}

    def set_state(self, state: JsonObject) -> None:
        """Continue at a position from `get_state`.

        Raises ValueError if the position belongs to another corpus or another batch order.
        """
        if state.get("corpus") != self._identity["corpus"]:
            raise ValueError(
                "data: the saved position is in another corpus, not in this run's: the data has"
                " changed"
            )
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ValueError(
                    f"data: the saved position in the data has {name} = {state.get(name)!r}, this"
                    f" run {value!r}: they must agree for training to go on with the same batches"
                )
        self.close()
        self._step = int(state["next_step"])

    def close(self) -> None:
        """Stop prefetching."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def rows_of_sources(
    corpus: Corpus, sequence_length: int, config: DataConfig
) -> list[_TokenWindows | _DocumentWindows | SourceRows]:
    """Return random access to each source's windows of text, or rows of samples."""
    if corpus.held_out_samples is None:
        windows = [
            _TokenWindows(source, sequence_length, corpus.vocab_size) for source in corpus.sources
        ]
        if config.mask_documents:
            return [_DocumentWindows(own, corpus.eot) for own in windows]
        return [*windows]
    return [SourceRows(source, sequence_length, corpus, config) for source in corpus.sources]


def _check_enough_windows(
    corpus: Corpus,
    windows: Sequence[_TokenWindows | _DocumentWindows | SourceRows],
    sequence_length: int,
    batch_size: int,
    config: DataConfig,
) -> None:
    """Raise ValueError if there are fewer windows than a batch has rows, or a weighted source has
    none.
    """
    weighted = any(source.weight is not None for source in corpus.sources)
    for source, own in zip(corpus.sources, windows, strict=True):
        name = f"data.path = {source.name!r}"
        if weighted and not len(own):
            few = (
                f"no sample has a token to learn within sequence_length = {sequence_length}; give a"
                " larger sequence_length"
                if isinstance(own, SourceRows)
                else f"{source.num_tokens} tokens are fewer than one window of sequence_length + 1"
                f" = {sequence_length + 1}"
            )
            raise ValueError(f"{name}: {few}")
        if len(own) >= 2**32:
            raise ValueError(
                f"{name}: {len(own)} windows of sequence_length = {sequence_length}: must be fewer"
                " than 2**32; give it as several paths with data.weights"
            )
    total = sum(map(len, windows))
    if total >= batch_size:
        return
    if counts := [own.counts for own in windows if isinstance(own, SourceRows)]:
        raise ValueError(
            f"batch_size = {batch_size}: the data has only"
            f" {sum(counts, RowCounts()).describe(sequence_length, config)}; give more samples, a"
            " smaller batch_size, or a larger sequence_length where samples are dropped"
        )
    raise ValueError(
        f"batch_size = {batch_size}: the data has only {total} windows of sequence_length + 1 ="
        f" {sequence_length + 1} tokens to train on; give more text, or a smaller batch_size or"
        " sequence_length"
    )


def _shuffled_windows(
    corpus: Corpus, windows: Sequence[_TokenWindows | _DocumentWindows | SourceRows], seed: int
) -> grain.MapDataset:
    """Return an endless grain dataset of windows, reshuffled each epoch.

    windows: of each source. Sources are mixed by their weights, or by size if none has a weight.
    """
    weighted = [source.weight for source in corpus.sources if source.weight is not None]
    # One seed per source: with equal seeds, sources of equal size would have the same order.
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(len(windows))]
    if not weighted:
        sources = [grain.MapDataset.source(own) for own in windows if len(own)]
        return grain.MapDataset.concatenate(sources).shuffle(seed=seeds[0]).repeat()
    mixed = [
        grain.MapDataset.source(own).shuffle(seed=s).repeat()
        for own, s in zip(windows, seeds, strict=True)
    ]
    return grain.MapDataset.mix(mixed, weights=weighted)


def train_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    config: DataConfig = DataConfig(),  # noqa: B008 (frozen)
    num_threads: int = 1,
) -> TrainBatches:
    """Return this process's endless training batches: int32 [b, S + 1] with b = batch_size /
    process_count, or `SampleRows` of samples.

    Row r of global batch s is window s * batch_size + r of an endless shuffled sequence, which
    depends on the corpus, the sequence length and the seed alone. Process i reads only rows i * b
    up to (i + 1) * b. Without weights, each epoch visits every window once, in a new order. With
    weights, each source repeats at its own pace, and its share stays within 1 % of its weight at
    all times. `num_threads` threads prefetch `config.prefetch_batches` batches; `config` also says
    how samples become rows.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index = {process_index}: must be between 0 and process_count - 1 ="
            f" {process_count - 1}"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size = {batch_size}: must be a multiple of the {process_count} processes"
        )
    local = batch_size // process_count
    windows = rows_of_sources(corpus, sequence_length, config)
    _check_enough_windows(corpus, windows, sequence_length, batch_size, config)
    rows = _shuffled_windows(corpus, windows, seed)
    own = grain.MapDataset.source(_LocalRows(rows, batch_size, process_index * local, local))
    # grain warns if the buffer is smaller than the number of threads.
    options = grain.ReadOptions(
        num_threads=num_threads, prefetch_buffer_size=max(config.prefetch_batches, num_threads)
    )
    identity = {
        "corpus": corpus.fingerprint,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "seed": seed,
    }
    counts = [own_rows.counts for own_rows in windows if isinstance(own_rows, SourceRows)]
    description = sum(counts, RowCounts()).describe(sequence_length, config) if counts else ""
    return TrainBatches(own.batch(local, drop_remainder=True), options, identity, description)


def held_out_windows(
    corpus: Corpus, sequence_length: int, batch_size: int
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Return an iterator of (tokens int32 [B, S + 1], weights float32 [B, S]) over the held-out
    text.

    Every held-out token but the first is a target exactly once, with weight 1. Targets that pad the
    last window and the last batch have weight 0.
    """
    ids = corpus.held_out_tokens
    targets = len(ids) - 1
    batch_targets = batch_size * sequence_length
    num_batches = -(-targets // batch_targets)
    padded = np.full(num_batches * batch_targets + 1, corpus.eot, np.int32)
    padded[: len(ids)] = ids
    shape = (num_batches, batch_size, sequence_length)
    inputs = padded[:-1].reshape(shape)
    last = padded[1:].reshape(shape)[..., -1:]
    tokens = np.concatenate([inputs, last], axis=-1)
    weights = (np.arange(num_batches * batch_targets) < targets).astype(np.float32).reshape(shape)
    return zip(tokens, weights, strict=True)


def _count_tokens(source: TextSource, vocab_size: int, max_tokens: int) -> NDArray[np.float64]:
    counts = np.zeros(vocab_size, np.int64)
    chunk = 1 << 22
    stride = max(1, -(-source.num_tokens // max_tokens)) * chunk
    for ids, blocks in zip(source.shards, source.blocks, strict=True):
        for start in range(0, len(ids), stride):
            blocks.check_ids(start, min(start + chunk, len(ids)))
            counts += np.bincount(ids[start : start + chunk], minlength=vocab_size)
    return counts.astype(np.float64)


def unigram_and_xz_bits_per_byte(corpus: Corpus) -> tuple[float, float]:
    """Return held-out bits per byte of a unigram model and of `xz -9`.

    Both are nan if the held-out text is unknown or shorter than `COMPARABLE_BYTES`.
    """
    if len(corpus.held_out_bytes) < COMPARABLE_BYTES:
        return float("nan"), float("nan")
    return unigram_bits_per_byte(corpus), xz_bits_per_byte(corpus)


def unigram_bits_per_byte(corpus: Corpus) -> float:
    """Return held-out bits per byte of a unigram model over the same tokens.

    p(t) = (n_t + 1) / (n + V), where n_t counts t in the training tokens, rescaled by the sources'
    weights if they have any.
    """
    counts = [_count_tokens(source, corpus.vocab_size, UNIGRAM_TOKENS) for source in corpus.sources]
    total = sum(float(c.sum()) for c in counts)
    weights = [source.weight for source in corpus.sources if source.weight is not None]
    if weights:
        shares = [w / sum(weights) for w in weights]
        counts = [c * (total * share / c.sum()) for c, share in zip(counts, shares, strict=True)]
    log_p = np.log((np.sum(counts, axis=0) + 1.0) / (total + corpus.vocab_size))
    return corpus.bits_per_byte(-float(log_p[corpus.held_out_tokens[1:]].mean()))


def xz_bits_per_byte(corpus: Corpus) -> float:
    """Return bits per byte of `xz -9` on the held-out text."""
    corpus.check_held_out_text_known()
    return 8 * len(lzma.compress(corpus.held_out_bytes, preset=9)) / len(corpus.held_out_bytes)
