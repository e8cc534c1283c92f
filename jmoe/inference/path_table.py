"""A profile of which experts tokens choose after which paths: Lina's popularity estimate (5.1).

A token's path is the experts that it chose in the layers before. `PathCounter` makes a `PathTable`
from the choices of a profiling run; estimator "paths" and the placement of experts read it.

Legend:
T tokens
K choices a token, by falling score
E experts of a layer
N layers
G digits of a path
R paths
M experts stored for a path
U distinct paths of a step
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jmoe.config import check
from jmoe.data.shards import replace_content_durably

PATHS_FILE = "expert_paths.table"  # beside the checkpoint
VERSION = 1
DIGEST_BYTES = 32
MAX_KEY = 2**63


class PopularityEstimate(NamedTuple):
    """The estimated popularity of a layer's experts.

    popularity_E: float64, the expected number of tokens of each expert; 0 without an estimate.
    without_share: fraction of the tokens whose path has no estimate; popularity_E omits them.
    """

    popularity_E: np.ndarray
    without_share: float


@dataclass(frozen=True)
class TableHeader:
    """The model and the path length for which a table was made.

    kept: M, the experts stored for a path, between K and E.
    fingerprint: `LazyCheckpoint.routing_fingerprint` of the model.
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    path_length: int
    kept: int
    fingerprint: str
    tokens: int  # number of tokens that were counted

    def __post_init__(self) -> None:
        length, experts = self.path_length, self.num_experts
        longest = next(g for g in range(64) if experts ** (g + 3) >= MAX_KEY) if experts > 1 else 64
        check(
            1 <= length <= longest,
            "path_length",
            length,
            f"must be in [1, {longest}] with {experts} experts",
        )
        inside = self.num_experts_per_tok <= self.kept <= experts
        check(inside, "kept", self.kept, f"must be in [{self.num_experts_per_tok}, {experts}]")

    def max_digits(self, layer: int) -> int:
        """Return the number of digits of the longest path that ends at `layer`."""
        return min(self.path_length, layer + 1) + (self.num_experts_per_tok > 1)

    def layers_back_and_rank_of_digit(self, digit: int) -> tuple[int, int]:
        """Return (layers back, rank among the token's choices) of a path's digit, most important
        first.

        Digits 0 and 1 are the first and second choice of the last layer; the others are the first
        choices of the layers before it. With K = 1 every digit is a layer's only choice.
        """
        if self.num_experts_per_tok == 1:
            return digit, 0
        return (0, digit) if digit < 2 else (digit - 1, 0)


@dataclass(frozen=True, eq=False)
class PathTable:
    """For each layer and path, the experts of the next layer that tokens chose most often.

    A path is the top expert of each of the last `path_length` layers, and the second expert of the
    last one (see `TableHeader.layers_back_and_rank_of_digit`); complete sets of K experts would
    hardly ever repeat. A path that is not in the table is shortened by its least important digits;
    a path without an entry even for digit 0 has no estimate.

    starts: int64 [N - 1, G + 1]; rows starts[n, g - 1] to starts[n, g] hold the paths of g digits
        that end at layer n.
    keys: int64 [R], ascending within each such range: the sum of digit d times E^d.
    tokens: int64 [R], the number of tokens with this path.
    experts: int32 [R, M], by falling count.
    counts: int64 [R, M]; 0 marks an unused entry.
    """

    header: TableHeader
    starts: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    experts: np.ndarray
    counts: np.ndarray

    def estimate_popularity(self, path: Sequence[np.ndarray]) -> PopularityEstimate:
        """Return the estimated popularity of the experts of layer len(path).

        path: see `Estimator.estimate_next_experts`.

        Estimates are sums over tokens, so those of several devices add up.
        """
        experts = self.header.num_experts
        rows_U, tokens_U = self._find_path_rows_and_counts(path)
        known = rows_U >= 0
        rows, total = rows_U[known], int(tokens_U.sum())
        weights = self.counts[rows] * (tokens_U[known] / self.tokens[rows])[:, None]
        popularity_E = np.bincount(self.experts[rows].ravel(), weights.ravel(), minlength=experts)
        return PopularityEstimate(
            popularity_E, float(tokens_U[~known].sum()) / total if total else 0.0
        )

    def most_frequent_experts(self, path: Sequence[np.ndarray]) -> np.ndarray:
        """Return the K most frequent experts of each distinct path of a step, concatenated."""
        rows_U, _ = self._find_path_rows_and_counts(path)
        rows, k = rows_U[rows_U >= 0], self.header.num_experts_per_tok
        return self.experts[rows, :k][self.counts[rows, :k] > 0]

    def _find_path_rows_and_counts(
        self, path: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (row of each distinct path of a step or -1, tokens with that path), [U] each."""
        layer, experts = len(path) - 1, self.header.num_experts
        real_T, max_digits = path[-1][:, 0] < experts, self.header.max_digits(layer)
        keys_T = np.zeros(np.count_nonzero(real_T), np.int64)
        for digit in range(max_digits):
            back, place = self.header.layers_back_and_rank_of_digit(digit)
            keys_T += path[layer - back][real_T, place].astype(np.int64) * experts**digit
        keys_U, tokens_U = np.unique(keys_T, return_counts=True)
        rows_U = np.full(len(keys_U), -1)
        if layer < len(self.starts):
            for digit in reversed(range(max_digits)):
                begin, end = self.starts[layer, digit : digit + 2]
                open_U = np.flatnonzero(rows_U < 0)
                if not open_U.size:
                    break
                wanted, known = keys_U[open_U] % experts ** (digit + 1), self.keys[begin:end]
                at = np.searchsorted(known, wanted)
                same = np.flatnonzero(at < len(known))
                same = same[known[at[same]] == wanted[same]]
                rows_U[open_U[same]] = begin + at[same]
        return rows_U, tokens_U

    def save(self, folder: Path) -> Path:
        """Write the table beside a checkpoint atomically, and return the file.

        The file is an npz after its SHA-256.
        """
        content = io.BytesIO()
        header = json.dumps(vars(self.header) | {"version": VERSION})
        arrays = {
            name: getattr(self, name) for name in ("starts", "keys", "tokens", "experts", "counts")
        }
        np.savez_compressed(content, header=np.array(header), **arrays)
        replace_content_durably(
            folder / PATHS_FILE, hashlib.sha256(content.getvalue()).digest() + content.getvalue()
        )
        return folder / PATHS_FILE

    @classmethod
    def load(cls, folder: Path, fingerprint: str) -> "PathTable":
        """Return the table beside a checkpoint.

        Raises ValueError if the file is missing, damaged, of another version or of another model.
        """
        file = folder / PATHS_FILE
        make = f"make one with `python -m jmoe.programs.profile {folder} --text FILE`"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; {make}")
        content = file.read_bytes()
        if hashlib.sha256(content[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
            raise ValueError(f"{file}: is damaged; {make}")
        with np.load(io.BytesIO(content[DIGEST_BYTES:]), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        fields = json.loads(str(arrays.pop("header")))
        version = fields.pop("version")
        if version != VERSION:
            raise ValueError(f"{file}: has version {version}, this is version {VERSION}; {make}")
        table = cls(TableHeader(**fields), **arrays)
        if table.header.fingerprint != fingerprint:
            raise ValueError(f"{file}: was made for another model; {make}")
        return table


class PathCounter:
    """Counts which experts tokens choose after which paths, for each layer."""

    def __init__(
        self, num_layers: int, num_experts: int, num_experts_per_tok: int, path_length: int
    ) -> None:
        sizes = (num_layers, num_experts, num_experts_per_tok, path_length)
        self._header = TableHeader(*sizes, kept=num_experts, fingerprint="", tokens=0)
        self._tokens = 0
        layers = range(num_layers - 1)
        self._parts = [
            [_IntegerCounter() for _ in range(self._header.max_digits(layer))] for layer in layers
        ]

    def count_step(self, choices: Sequence[np.ndarray]) -> None:
        """Count the tokens of a step.

        choices: int32 [T, K] of each layer; E marks padding.
        """
        experts = self._header.num_experts
        real_T = choices[0][:, 0] < experts
        chosen = [idx_TK[real_T].astype(np.int64) for idx_TK in choices]
        self._tokens += len(chosen[0])
        for layer, parts in enumerate(self._parts):
            keys_T = np.zeros(len(chosen[0]), np.int64)
            for digit, part in enumerate(parts):
                back, place = self._header.layers_back_and_rank_of_digit(digit)
                keys_T = keys_T + chosen[layer - back][:, place] * experts**digit
                part.add((keys_T[:, None] * experts + chosen[layer + 1]).ravel())

    def make_table(self, fingerprint: str, experts_per_path: int | None = None) -> PathTable:
        """Return the counts as a table.

        experts_per_path: how many are stored; K by default, E for the whole distribution.
        """
        h = self._header
        kept = h.num_experts_per_tok if experts_per_path is None else experts_per_path
        sizes = (h.num_layers, h.num_experts, h.num_experts_per_tok, h.path_length)
        header = TableHeader(*sizes, kept=kept, fingerprint=fingerprint, tokens=self._tokens)
        starts = np.zeros((h.num_layers - 1, h.max_digits(h.num_layers) + 1), np.int64)
        parts, rows = (
            [_most_frequent_experts_by_path(*_IntegerCounter().codes_and_counts(), header)],
            0,
        )
        for layer, tallies in enumerate(self._parts):
            starts[layer] = rows
            for digit, tally in enumerate(tallies):
                parts.append(_most_frequent_experts_by_path(*tally.codes_and_counts(), header))
                rows += len(parts[-1][0])
                starts[layer, digit + 1 :] = rows
        return PathTable(
            header, starts, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        )


class _IntegerCounter:
    """Counts occurrences of integers; new ones are merged once they outnumber the distinct old
    ones.
    """

    def __init__(self) -> None:
        self._codes, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._waiting_size = 0

    def add(self, codes: np.ndarray) -> None:
        """Count each of the integers once for each time that it occurs."""
        self._waiting.append(np.unique(codes, return_counts=True))
        self._waiting_size += len(self._waiting[-1][0])
        if self._waiting_size > len(self._codes):
            self._merge_new_codes()

    def codes_and_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (distinct integers, ascending; how often each was added)."""
        self._merge_new_codes()
        return self._codes, self._counts

    def _merge_new_codes(self) -> None:
        """Merge the counts of new integers into the sorted ones."""
        codes = np.concatenate([self._codes, *(codes for codes, _ in self._waiting)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._waiting)])
        order = np.argsort(codes, kind="stable")
        codes, counts = codes[order], counts[order]
        first = np.flatnonzero(np.diff(codes, prepend=-1))
        self._codes, self._counts = (
            codes[first],
            np.add.reduceat(counts, first) if len(first) else counts,
        )
        self._waiting, self._waiting_size = [], 0


def _most_frequent_experts_by_path(
    codes: np.ndarray, counts: np.ndarray, header: TableHeader
) -> tuple[np.ndarray, ...]:
    """Return (keys, tokens, experts [R, M], counts [R, M]) for paths of one length and layer.

    codes: key * E + expert, ascending.
    """
    keys, row = np.unique(codes // header.num_experts, return_inverse=True)
    chosen = codes % header.num_experts
    tokens = (
        np.bincount(row, counts, minlength=len(keys)).astype(np.int64) // header.num_experts_per_tok
    )
    order = np.lexsort((chosen, -counts, row))
    row = row[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    most = rank < header.kept
    experts_RM = np.zeros((len(keys), header.kept), np.int32)
    counts_RM = np.zeros((len(keys), header.kept), np.int64)
    experts_RM[row[most], rank[most]] = chosen[order][most]
    counts_RM[row[most], rank[most]] = counts[order][most]
    return keys, tokens, experts_RM, counts_RM
