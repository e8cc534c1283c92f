"""Rows of samples for training and evaluation: several samples one after the other, or one, and
padding.

Legend: S sequence length. A row has S + 1 tokens: inputs `[:-1]` and targets `[1:]`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jmoe.config import DataConfig
from jmoe.data.corpus import Corpus, TextSource
from jmoe.data.shards import TRAINED


class SampleRows(NamedTuple):
    """One row of samples, or a batch of rows with leading dimensions; NumPy arrays, or JAX's on the
    devices.

    tokens: int32 [..., S + 1]. weights: float32 [..., S], 1 for a target to learn, else 0.
    documents: int32 [..., S], for each input the number of its sample in the row, from 1; 0 for an
    input without a target in its sample: padding, and the last token of each sample. Of text with
    `data.mask_documents` the number of its document.
    """

    tokens: Any
    weights: Any
    documents: Any


@dataclass(frozen=True)
class RowCounts:
    """How many samples of a corpus are in rows, cut or left out.

    long: samples of more than S + 1 tokens, which were cut or dropped. unlearned: samples cut
    before the first token to learn, and therefore dropped. tokens: in the rows.
    """

    samples: int = 0
    rows: int = 0
    tokens: int = 0
    long: int = 0
    unlearned: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.samples + other.samples,
            self.rows + other.rows,
            self.tokens + other.tokens,
            self.long + other.long,
            self.unlearned + other.unlearned,
        )

    def describe(self, sequence_length: int, long_samples: str) -> str:
        """Return a sentence for the log: the numbers of samples and rows, the filled fraction of
        the rows, and the samples that were cut or dropped. long_samples: `cut` or `drop`, as
        configured.
        """
        filled = self.tokens / max(1, self.rows * (sequence_length + 1))
        words = (
            f"{self.samples:,} samples in {self.rows:,} rows of sequence_length + 1 ="
            f" {sequence_length + 1} tokens, {filled:.0%} filled"
        )
        if self.long:
            done = "dropped" if long_samples == "drop" else "cut"
            words += f"; {self.long:,} were longer and are {done}"
        if self.unlearned:
            words += f", {self.unlearned:,} of them dropped, as no token to learn is left"
        return words


class _ShardRows:
    """Random access to the rows of one shard of samples."""

    def __init__(
        self, source: TextSource, shard: int, sequence_length: int, config: DataConfig
    ) -> None:
        assert source.lengths is not None
        self._ids, self._blocks = source.shards[shard], source.blocks[shard]
        lengths, self._row_tokens = source.lengths[shard].astype(np.int64), sequence_length + 1
        starts = np.cumsum(lengths) - lengths
        is_long = lengths > self._row_tokens
        kept = np.ones(len(lengths), np.bool_)
        if config.long_samples == "drop":
            kept[is_long] = False
        else:
            for i in np.flatnonzero(is_long):
                kept[i] = self._row_has_trained_token(int(starts[i]))
        self._starts = starts[kept]
        self._lengths = np.minimum(lengths[kept], self._row_tokens)
        self._first = _first_samples_of_rows(
            self._lengths, self._row_tokens if config.pack_samples else 0
        )
        cut_away = int((is_long & ~kept).sum()) if config.long_samples == "cut" else 0
        self.counts = RowCounts(
            len(self._lengths), len(self), int(self._lengths.sum()), int(is_long.sum()), cut_away
        )

    def _row_has_trained_token(self, start: int) -> bool:
        self._blocks.check_ids(start, start + self._row_tokens)
        return bool((self._ids[start + 1 : start + self._row_tokens] & TRAINED).any())

    def __len__(self) -> int:
        return len(self._first) - 1

    def row(self, index: int, eot: int) -> SampleRows:
        """Return a row, padded with `eot`."""
        size = self._row_tokens
        row = empty_rows((), size - 1, eot)
        begin = 0
        for number, i in enumerate(range(self._first[index], self._first[index + 1]), 1):
            start, length = int(self._starts[i]), int(self._lengths[i])
            self._blocks.check_ids(start, start + length)
            stored = self._ids[start : start + length]
            end = begin + length
            row.tokens[begin:end] = stored & (TRAINED - 1)
            row.weights[begin : end - 1] = stored[1:] >= TRAINED
            row.documents[begin : end - 1] = number
            begin = end
        return row


def rows_of_windows(
    tokens: NDArray[np.int32], weights: NDArray[np.float32], eot: int
) -> SampleRows:
    """Return windows of text [..., S + 1] as rows of documents.

    A document begins with the end-of-text token before it, which the first of its tokens follows
    in generated text too; so every token of the window is a target in its document. The first
    document of a window may lack its beginning.
    """
    begins = tokens[..., :-1] == eot
    return SampleRows(tokens, weights, 1 + np.cumsum(begins, axis=-1, dtype=np.int32))


def empty_rows(shape: tuple[int, ...], sequence_length: int, eot: int) -> SampleRows:
    """Return rows of padding alone. shape: the leading dimensions."""
    return SampleRows(
        np.full((*shape, sequence_length + 1), eot, np.int32),
        np.zeros((*shape, sequence_length), np.float32),
        np.zeros((*shape, sequence_length), np.int32),
    )


def _first_samples_of_rows(lengths: NDArray[np.int64], row_tokens: int) -> list[int]:
    """Return the number of the first sample of each row, and at the end the number of samples.

    Each row takes the next samples that fit into `row_tokens`, in order; 0 for one sample a row.
    """
    if not row_tokens:
        return list(range(len(lengths) + 1))
    ends, first = np.cumsum(lengths), [0]
    while first[-1] < len(lengths):
        before = int(ends[first[-1] - 1]) if first[-1] else 0
        first.append(int(np.searchsorted(ends, before + row_tokens, side="right")))
    return first


class SourceRows:
    """Random access to the rows of one source of samples. Rows do not cross shards."""

    def __init__(
        self, source: TextSource, sequence_length: int, corpus: Corpus, config: DataConfig
    ) -> None:
        self._name, self._corpus = source.name, corpus
        self._shards = [
            _ShardRows(source, shard, sequence_length, config)
            for shard in range(len(source.shards))
        ]
        self._ends = list(itertools.accumulate(map(len, self._shards)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> SampleRows:
        shard = bisect.bisect_right(self._ends, index)
        row = self._shards[shard].row(
            index - (self._ends[shard - 1] if shard else 0), self._corpus.eot
        )
        largest = int(row.tokens.max())
        if largest >= self._corpus.vocab_size:
            raise ValueError(
                f"data.path = {self._name!r}: a token of {largest} in row {index} is not below"
                f" vocab_size = {self._corpus.vocab_size}: the token shard is damaged"
            )
        return row

    @property
    def counts(self) -> RowCounts:
        """The numbers of samples, over all shards."""
        return sum((shard.counts for shard in self._shards), RowCounts())


def held_out_rows(
    corpus: Corpus, sequence_length: int, batch_size: int, config: DataConfig
) -> Iterator[SampleRows]:
    """Return an iterator of batches of rows [batch_size, ...] over the held-out samples, each
    sample once; rows of padding complete the last batch.

    Raises ValueError if no held-out sample has a token to learn.
    """
    assert corpus.held_out_samples is not None
    rows = SourceRows(corpus.held_out_samples, sequence_length, corpus, config)
    if not len(rows):
        raise ValueError(
            f"sequence_length = {sequence_length}: no held-out sample has a token to learn within"
            " so many; give a larger sequence_length or data.held_out_bytes"
        )
    padding = empty_rows((), sequence_length, corpus.eot)
    for first in range(0, len(rows), batch_size):
        batch = [rows[i] for i in range(first, min(first + batch_size, len(rows)))]
        yield stack_rows(batch + [padding] * (batch_size - len(batch)))


def stack_rows(rows: Sequence[SampleRows]) -> SampleRows:
    """Return rows as one batch."""
    return SampleRows(*map(np.stack, zip(*rows, strict=True)))
