"""Batches and evaluation on real text: order, sharding by process, resume, bits per byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_corpus import config, finish, start, write_shard

from jmoe.config import DataConfig
from jmoe.data import loader
from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.loader import (
    held_out_windows,
    train_batches,
    unigram_bits_per_byte,
    xz_bits_per_byte,
)


def take(batches: loader.TrainBatches, count: int) -> np.ndarray:
    result = np.stack([next(batches) for _ in range(count)])
    batches.close()
    return result


# Batches


SHAPE = {"batch_size": 8, "sequence_length": 16, "seed": 3}


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("weights", [(), (1.0, 2.5)])
def test_global_batch_does_not_depend_on_processes(
    tmp_path: Path, texts: Path, processes: int, weights: tuple[float, ...]
) -> None:
    two = prepare_corpus(config(texts / "part0", texts / "part1", weights=weights), 300, tmp_path)
    whole = take(train_batches(two, **SHAPE, num_threads=2), 12)
    parts = [
        take(train_batches(two, **SHAPE, process_index=i, process_count=processes), 12)
        for i in range(processes)
    ]
    assert whole.dtype == np.int32
    assert whole.shape == (12, 8, 17)
    assert np.array_equal(np.concatenate(parts, axis=1), whole)


def all_windows(corpus: Corpus, length: int) -> Counter[bytes]:
    shards = [ids for source in corpus.sources for ids in source.shards]
    starts = [(ids, i) for ids in shards for i in range(0, len(ids) - length, length)]
    return Counter(ids[i : i + length + 1].astype(np.int32).tobytes() for ids, i in starts)


def test_an_epoch_is_every_window_once_in_new_order(tmp_path: Path, texts: Path) -> None:
    two = prepare_corpus(config(texts / "part0", texts / "part1"), 300, tmp_path)
    windows = all_windows(two, 16)
    count = windows.total()
    rows = take(train_batches(two, **{**SHAPE, "batch_size": 1}), 2 * count)[:, 0]
    epochs = [[row.tobytes() for row in part] for part in (rows[:count], rows[count:])]
    assert Counter(epochs[0]) == Counter(epochs[1]) == windows
    assert epochs[0] != epochs[1]
    other_seed = take(train_batches(two, **{**SHAPE, "seed": 4}), 1)
    assert not np.array_equal(other_seed, take(train_batches(two, **SHAPE), 1))


def test_mixture_follows_weights(tmp_path: Path) -> None:
    for name, size in (("a", 3000), ("b", 300)):
        write_shard(tmp_path / f"{name}.bin", [ord(name)] * size, text_bytes=size)
    mixed = prepare_corpus(
        config(tmp_path / "a.bin", tmp_path / "b.bin", weights=(0.25, 0.75)), 300, tmp_path
    )
    rows = take(train_batches(mixed, **SHAPE), 50)[..., -1].ravel()
    assert abs(np.mean(rows == ord("b")) - 0.75) < 0.01
    assert sorted(rows[:4].tolist()) == [ord("a"), *[ord("b")] * 3]


RESUME = """
import hashlib, json, sys
from pathlib import Path
from typing import Any
from jmoe.config import DataConfig
from jmoe.data.corpus import prepare_corpus
from jmoe.data.loader import train_batches
path, cache, state, index = sys.argv[1:]
corpus = prepare_corpus(DataConfig(path=(path,)), 400, Path(cache))
batches = train_batches(corpus, batch_size=8, sequence_length=16, seed=3, process_index=int(index), process_count=2)
batches.set_state(json.loads(state))
for _ in range(10):
    print(hashlib.sha256(next(batches).tobytes()).hexdigest())
"""


def test_resume_in_mid_epoch_in_new_processes(tmp_path: Path, texts: Path, corpus: Corpus) -> None:
    batches = train_batches(corpus, **SHAPE, num_threads=2, config=DataConfig(prefetch_batches=4))
    skipped = 110
    epoch = all_windows(corpus, 16).total()
    # the resumed part goes on into the next epoch
    assert 8 * skipped < epoch < 8 * (skipped + 10), epoch
    for _ in range(skipped):
        next(batches)
    state = json.dumps(batches.get_state())
    rest = take(batches, 10)
    cache = tmp_path / "cache"
    for index in range(2):
        printed = finish(start(RESUME, texts, cache, state, index)).split()
        rows = rest[:, 4 * index : 4 * index + 4]
        assert printed == [hashlib.sha256(batch.tobytes()).hexdigest() for batch in rows]


def test_state_can_be_set_on_a_running_iterator(corpus: Corpus) -> None:
    batches = train_batches(corpus, **SHAPE)
    first = [next(batches) for _ in range(5)]
    state = batches.get_state()
    then = [next(batches) for _ in range(5)]
    batches.set_state(state)
    assert np.array_equal(then, take(batches, 5))
    batches.set_state({**state, "next_step": 0})
    assert np.array_equal(first, take(batches, 5))


@pytest.mark.parametrize("name", ["batch_size", "sequence_length", "seed"])
def test_state_of_another_run_is_refused(corpus: Corpus, name: str) -> None:
    state = train_batches(corpus, **{**SHAPE, name: SHAPE[name] * 2}).get_state()
    with pytest.raises(
        ValueError, match=f"the saved position in the data has {name} = {SHAPE[name] * 2}"
    ):
        train_batches(corpus, **SHAPE).set_state(state)
    with pytest.raises(ValueError, match="is in another corpus"):
        train_batches(corpus, **SHAPE).set_state({**state, name: SHAPE[name], "corpus": "other"})


def test_a_process_reads_its_own_rows_only(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = loader._TokenWindows.__getitem__

    def counted(self: loader._TokenWindows, index: int) -> np.ndarray:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(loader._TokenWindows, "__getitem__", counted)
    per_process = []
    for index in range(2):
        read.clear()
        take(train_batches(corpus, **SHAPE, process_index=index, process_count=2, num_threads=0), 3)
        per_process.append(set(read))
        assert len(read) <= 4 * (3 + 2)
    assert not per_process[0] & per_process[1]


def test_too_little_data_for_a_batch(tmp_path: Path, corpus: Corpus) -> None:
    windows = all_windows(corpus, 16).total()
    with pytest.raises(
        ValueError, match=rf"batch_size = {windows + 1}: the data has only {windows} windows"
    ):
        train_batches(corpus, batch_size=windows + 1, sequence_length=16, seed=0)
    with pytest.raises(ValueError, match="has only 0 windows"):
        train_batches(corpus, batch_size=1, sequence_length=10**6, seed=0)
    with pytest.raises(ValueError, match="must be a multiple of the 3 processes"):
        train_batches(corpus, **SHAPE, process_count=3)
    for name, size in (("a", 3000), ("b", 12)):
        write_shard(tmp_path / f"{name}.bin", [5] * size, text_bytes=size)
    uneven = prepare_corpus(
        config(tmp_path / "a.bin", tmp_path / "b.bin", weights=(1.0, 1.0), held_out_fraction=0.3),
        300,
        tmp_path,
    )
    with pytest.raises(ValueError, match=r"b.bin': \d+ tokens are fewer than one window"):
        train_batches(uneven, **SHAPE)


def test_ids_that_the_vocabulary_lacks_are_named_when_they_are_read(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.bin", [60000] * 400, text_bytes=400)
    batches = train_batches(
        prepare_corpus(config(path), 300, tmp_path), batch_size=2, sequence_length=8, seed=0
    )
    with pytest.raises(ValueError, match=r"token of 60000 .* not below vocab_size = 300"):
        next(batches)
    batches.close()


def test_rows_of_documents_are_the_windows(corpus: Corpus) -> None:
    """The same tokens in the same order; each end of text begins a document."""
    options: dict[str, Any] = {"batch_size": 4, "sequence_length": 64, "seed": 3}
    masked = DataConfig(mask_documents=True)
    with (
        contextlib.closing(train_batches(corpus, **options)) as plain,
        contextlib.closing(train_batches(corpus, **options, config=masked)) as rows,
    ):
        numbers = []
        for _ in range(8):
            row: Any = next(rows)
            np.testing.assert_array_equal(row.tokens, next(plain))
            assert (row.weights == 1).all() and row.weights.shape == (4, 64)
            np.testing.assert_array_equal(
                np.diff(row.documents, axis=1), row.tokens[:, 1:-1] == corpus.eot
            )
            np.testing.assert_array_equal(row.documents[:, 0], 1 + (row.tokens[:, 0] == corpus.eot))
            numbers.append(row.documents.max())
        assert max(numbers) > 1


# Elastic layouts


ELASTIC = DataConfig(path=("a", "b"), layout="elastic")  # the corpora are opened already


def three_sources(folder: Path, weights: tuple[float, ...] = (0.5, 0.375, 0.125)) -> Corpus:
    """Sources a, b, c whose tokens say where they are from, the position included."""
    paths = []
    for number in range(3):
        ids = 1 + number + 3 * np.arange(3000 - 900 * number)
        path = folder / f"{'abc'[number]}.bin"
        paths.append(write_shard(path, ids.tolist(), vocab_size=10_000, text_bytes=len(ids)))
    return prepare_corpus(config(*paths, weights=weights), 10_000, folder)


def source_of(rows: np.ndarray) -> np.ndarray:
    return (rows[..., 1] - 1) % 3


@pytest.mark.parametrize("weights", [(), (0.5, 0.375, 0.125)])
@pytest.mark.parametrize(("processes", "groups", "steps"), [(1, 1, 1), (4, 1, 2), (2, 2, 2)])
def test_an_elastic_batch_is_the_mixed_one_with_few_sources_on_a_device(
    tmp_path: Path, weights: tuple[float, ...], processes: int, groups: int, steps: int
) -> None:
    """Each device has neighbouring rows of the batch sorted by source, whatever the processes."""
    corpus, batch = three_sources(tmp_path, weights), 16
    options: dict[str, Any] = {"batch_size": batch, "sequence_length": 16, "seed": 3}
    mixed = take(train_batches(corpus, **options), 6)
    parts = loader.BatchParts(groups, steps)
    devices = []
    for index in range(processes):
        share: dict[str, Any] = {"process_index": index, "process_count": processes}
        own = take(train_batches(corpus, **options, **share, config=ELASTIC, parts=parts), 6)
        # as `place_batch`: micro-batches, devices, rows
        by_step = own.reshape(6, steps, groups, -1, 17)
        devices += list(np.moveaxis(by_step, 2, 0))
    rows_DSATK = np.stack(devices)
    assert rows_DSATK.shape[0] == processes * groups
    for step in range(6):
        of_step = rows_DSATK[:, step]
        assert sorted(map(bytes, of_step.reshape(batch, -1))) == sorted(map(bytes, mixed[step]))
        planned = np.sort(source_of(mixed[step])).reshape(processes * groups, -1)
        for device, expected in zip(of_step, planned, strict=True):
            np.testing.assert_array_equal(np.sort(source_of(device).ravel()), expected)
            # every micro-batch has its share of each source
            count = np.stack([np.bincount(row, minlength=3) for row in source_of(device)])
            assert np.ptp(count, axis=0).max() <= 1


def test_a_process_of_an_elastic_layout_reads_its_own_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = three_sources(tmp_path)
    read: set[str] = set()
    original = loader._TokenWindows.__getitem__

    def noted(self: loader._TokenWindows, index: int) -> np.ndarray:
        read.add(Path(self._source.name).stem)
        return original(self, index)

    monkeypatch.setattr(loader._TokenWindows, "__getitem__", noted)
    seen = {}
    for layout in ("mixed", "elastic"):
        for index in range(4):
            read.clear()
            data = DataConfig(path=("a", "b"), layout=layout)  # type: ignore[arg-type]
            share: dict[str, Any] = {"process_index": index, "process_count": 4}
            take(train_batches(corpus, **SHAPE, **share, config=data, num_threads=0), 4)
            seen[layout, index] = "".join(sorted(read))
    assert [seen["elastic", i] for i in range(4)] == ["a", "a", "b", "bc"]
    assert all(len(seen["mixed", i]) > 1 for i in range(4))


def test_an_elastic_run_goes_on_with_other_devices(tmp_path: Path) -> None:
    """The position says nothing of processes and devices, and counts for either layout."""
    corpus = three_sources(tmp_path)
    batches = train_batches(corpus, **SHAPE, config=ELASTIC)
    assert "elastic: of 1 devices or groups of them, " in batches.description
    assert [float(words.split()[-1]) for words in batches.description.split(", ")[1:]] == [
        0.50,
        0.38,
        0.12,
    ]
    for _ in range(5):
        next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(3)]
    batches.close()
    halves = []
    for index in range(2):
        share: dict[str, Any] = {"process_index": index, "process_count": 2}
        half = train_batches(corpus, **SHAPE, **share, config=ELASTIC)
        half.set_state(state)
        halves.append(take(half, 3))
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), expected)
    mixed = train_batches(corpus, **SHAPE)
    mixed.set_state(state)
    for rows, other in zip(take(mixed, 3), expected, strict=True):
        assert sorted(map(bytes, rows)) == sorted(map(bytes, other))


def test_an_elastic_batch_must_divide_over_devices_and_micro_batches(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="batch_size = 8: must be a multiple of the 2 processes x 2 groups of devices x 3",
    ):
        train_batches(
            three_sources(tmp_path),
            **SHAPE,
            process_count=2,
            config=ELASTIC,
            parts=loader.BatchParts(2, 3),
        )
    with pytest.raises(ValueError, match=r"data\.layout = 'elastic': must be mixed with fewer"):
        DataConfig(path=("a",), layout="elastic")


# Evaluation


@pytest.mark.parametrize(("length", "batch"), [(16, 4), (7, 3), (100_000, 2), (1, 1)])
def test_held_out_windows_cover_every_target_once(corpus: Corpus, length: int, batch: int) -> None:
    ids = corpus.held_out_tokens
    inputs, targets = [], []
    for tokens, weights in held_out_windows(corpus, length, batch):
        assert [tokens.dtype, weights.dtype] == [np.dtype(np.int32), np.dtype(np.float32)]
        assert (tokens.shape, weights.shape) == ((batch, length + 1), (batch, length))
        inputs.append(tokens[:, :-1][weights == 1])
        targets.append(tokens[:, 1:][weights == 1])
        assert set(np.unique(weights)) <= {0.0, 1.0}
    assert np.array_equal(np.concatenate(inputs), ids[:-1])
    assert np.array_equal(np.concatenate(targets), ids[1:])


def test_unigram_bits_per_byte(
    tmp_path: Path, texts: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bits(corpus: Corpus, shares: list[float]) -> float:
        counted = [Counter(np.concatenate(s.shards).tolist()) for s in corpus.sources]
        total = sum(c.total() for c in counted)
        counts = {
            t: sum(
                c[t] / c.total() * total * share for c, share in zip(counted, shares, strict=True)
            )
            for t in range(corpus.vocab_size)
        }
        held = corpus.held_out_tokens.tolist()[1:]
        loss = -sum(np.log2((counts[t] + 1) / (total + corpus.vocab_size)) for t in held)
        return loss / len(corpus.held_out_bytes)

    assert unigram_bits_per_byte(corpus) == pytest.approx(bits(corpus, [1.0]), rel=1e-12)
    mixed = prepare_corpus(
        config(texts / "part0", texts / "part1", weights=(3.0, 1.0)), 300, tmp_path
    )
    assert unigram_bits_per_byte(mixed) == pytest.approx(bits(mixed, [0.75, 0.25]), rel=1e-12)
    monkeypatch.setattr(loader, "UNIGRAM_TOKENS", 1000)
    assert unigram_bits_per_byte(corpus) == pytest.approx(bits(corpus, [1.0]), rel=0.1)


def test_bits_per_byte_of_a_loss(corpus: Corpus) -> None:
    expected = (len(corpus.held_out_tokens) - 1) / len(corpus.held_out_bytes)
    assert corpus.bits_per_byte(float(np.log(2.0))) == pytest.approx(expected)


@pytest.mark.skipif(shutil.which("xz") is None, reason="needs the xz program")
def test_xz_bits_per_byte_is_that_of_the_program(corpus: Corpus) -> None:
    compressed = subprocess.run(
        ["xz", "-9", "-c"], input=corpus.held_out_bytes, capture_output=True, check=True
    ).stdout
    assert xz_bits_per_byte(corpus) == 8 * len(compressed) / len(corpus.held_out_bytes)
