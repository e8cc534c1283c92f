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
from jmoe.data.shards import TRAINED, Ids


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


class PreferenceRows(NamedTuple):
    """`SampleRows` of preferences: samples 2i - 1 and 2i of a row are the chosen and the rejected
    answer of its i-th pair.

    reference: float32 [..., S], the reference model's log-probability of an answer at its first
    target to learn, else 0.
    """

    tokens: Any
    weights: Any
    documents: Any
    reference: Any


AnyRows = SampleRows | PreferenceRows


@dataclass(frozen=True)
class RowCounts:
    """How many samples of a corpus are in rows, cut or left out.

    long: samples of more than S + 1 tokens, which were cut or dropped. unlearned: samples cut
    before the first token to learn, and therefore dropped; of preferences also those whose answers
    are equal once cut. tokens: in the rows.
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

    def describe(self, sequence_length: int, config: DataConfig) -> str:
        """Return a sentence for the log: the numbers of samples and rows, the filled fraction of
        the rows, and the samples that were cut or dropped.
        """
        noun = "answers of preferences" if config.preferences else "samples"
        filled = self.tokens / max(1, self.rows * (sequence_length + 1))
        words = (
            f"{self.samples:,} {noun} in {self.rows:,} rows of sequence_length + 1 ="
            f" {sequence_length + 1} tokens, {filled:.0%} filled"
        )
        if self.long:
            done = "dropped" if config.long_samples == "drop" else "cut"
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
        # samples that share a row: one, or the two of a preference
        group = 2 if source.has_preferences else 1
        group_lengths = lengths.reshape(-1, group).sum(axis=1)
        is_long = np.repeat(group_lengths > self._row_tokens, group)
        cut_lengths = np.where(is_long, np.minimum(lengths, self._row_tokens // group), lengths)
        kept = np.ones(len(lengths), np.bool_)
        if config.long_samples == "drop":
            kept[is_long] = False
        else:
            for first in np.flatnonzero(is_long[::group]):
                i = int(first) * group
                cut = [self._stored_ids(starts[j], cut_lengths[j]) for j in range(i, i + group)]
                learned = all((own[1:] & TRAINED).any() for own in cut)
                same = group == 2 and np.array_equal(cut[0], cut[-1])
                kept[i : i + group] = learned and not same
        self._starts, self._lengths = starts[kept], cut_lengths[kept]
        self._first = group * _first_groups_of_rows(
            self._lengths.reshape(-1, group).sum(axis=1),
            self._row_tokens if config.pack_samples else 0,
        )
        self._reference: NDArray[np.float32] | None = None
        if source.has_preferences:
            self._reference = source.reference_log_probs[shard]
        self.kept_samples = np.flatnonzero(kept)
        cut_away = int((is_long & ~kept).sum()) if config.long_samples == "cut" else 0
        self.counts = RowCounts(
            len(self._lengths), len(self), int(self._lengths.sum()), int(is_long.sum()), cut_away
        )

    def _stored_ids(self, start: int, length: int) -> Ids:
        """Return the ids of a sample as they are stored, checked."""
        self._blocks.check_ids(start, start + length)
        return self._ids[start : start + length]

    def __len__(self) -> int:
        return len(self._first) - 1

    def samples_of_row(self, index: int) -> NDArray[np.int64]:
        """Return the numbers of a row's samples in the shard, in order."""
        return self.kept_samples[self._first[index] : self._first[index + 1]]

    def row(self, index: int, eot: int) -> AnyRows:
        """Return a row, padded with `eot`."""
        reference, row = self._reference, empty_rows((), self._row_tokens - 1, eot)
        reference_S = np.zeros(self._row_tokens - 1, np.float32)
        begin = 0
        for number, i in enumerate(range(self._first[index], self._first[index + 1]), 1):
            stored = self._stored_ids(int(self._starts[i]), int(self._lengths[i]))
            end = begin + len(stored)
            row.tokens[begin:end] = stored & (TRAINED - 1)
            row.weights[begin : end - 1] = stored[1:] >= TRAINED
            row.documents[begin : end - 1] = number
            if reference is not None:
                first = begin + int(np.argmax(stored[1:] >= TRAINED))
                reference_S[first] = reference[self.kept_samples[i]]
            begin = end
        return row if reference is None else PreferenceRows(*row, reference_S)


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


def _first_groups_of_rows(lengths: NDArray[np.int64], row_tokens: int) -> NDArray[np.int64]:
    """Return the number of the first group of samples of each row, and at the end the number of
    groups.

    Each row takes the next groups that fit into `row_tokens`, in order; 0 for one group a row.
    """
    if not row_tokens:
        return np.arange(len(lengths) + 1)
    ends, first = np.cumsum(lengths), [0]
    while first[-1] < len(lengths):
        before = int(ends[first[-1] - 1]) if first[-1] else 0
        first.append(int(np.searchsorted(ends, before + row_tokens, side="right")))
    return np.asarray(first, np.int64)


class SourceRows:
    """Random access to the rows of one source of samples. Rows do not cross shards."""

    def __init__(
        self, source: TextSource, sequence_length: int, corpus: Corpus, config: DataConfig
    ) -> None:
        self.source, self._name, self._corpus = source, source.name, corpus
        self._length = sequence_length
        self._shards = [
            _ShardRows(source, shard, sequence_length, config)
            for shard in range(len(source.shards))
        ]
        self._ends = list(itertools.accumulate(map(len, self._shards)))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def padding(self) -> AnyRows:
        """A row of padding."""
        row = empty_rows((), self._length, self._corpus.eot)
        has_reference = self.source.has_preferences
        return PreferenceRows(*row, np.zeros_like(row.weights)) if has_reference else row

    def __getitem__(self, index: int) -> AnyRows:
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

    def samples_of_row(self, index: int) -> tuple[int, NDArray[np.int64]]:
        """Return (the shard of a row, the numbers of the row's samples in this shard)."""
        shard = bisect.bisect_right(self._ends, index)
        first = self._ends[shard - 1] if shard else 0
        return shard, self._shards[shard].samples_of_row(index - first)

    @property
    def counts(self) -> RowCounts:
        """The numbers of samples, over all shards."""
        return sum((shard.counts for shard in self._shards), RowCounts())


def held_out_rows(
    corpus: Corpus, sequence_length: int, batch_size: int, config: DataConfig
) -> Iterator[AnyRows]:
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
    yield from batches_in_order(rows, batch_size)


def batches_in_order(rows: SourceRows, batch_size: int) -> Iterator[AnyRows]:
    """Yield the rows of a source as batches [batch_size, ...]; rows of padding complete the last
    one.
    """
    for first in range(0, len(rows), batch_size):
        batch = [rows[i] for i in range(first, min(first + batch_size, len(rows)))]
        yield stack_rows(batch + [rows.padding] * (batch_size - len(batch)))


def num_loss_terms(batch: AnyRows | tuple[Any, Any]) -> float:
    """Return the number by which the summed loss of a batch is divided: the sum of its targets'
    weights, or of preferences the number of pairs. batch: rows, or (tokens, weights).
    """
    if isinstance(batch, PreferenceRows):
        return float((batch.documents.max(axis=-1) // 2).sum())
    return float(batch[1].sum(dtype=np.float64))


def stack_rows(rows: Sequence[AnyRows]) -> AnyRows:
    """Return rows as one batch."""
    return type(rows[0])(*map(np.stack, zip(*rows, strict=True)))
