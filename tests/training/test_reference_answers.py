"""Reference log-probabilities: with their samples, once, and again after a file is damaged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jmoe.config import DpoConfig, TrainConfig
from jmoe.data.corpus import prepare_corpus
from jmoe.data.sample_rows import PreferenceRows, SourceRows, held_out_rows
from jmoe.training.reference_answers import ReferenceAnswers
from tests.chat_models import VOCAB_SIZE, write_chat_tokenizer, write_jsonl
from tests.model_configs import CHECKPOINTS, mesh_of

PAIRS = [
    {"prompt": f"question {i}", "chosen": "y" * (1 + i % 23), "rejected": "n" * (1 + i * 5 % 29)}
    for i in range(80)
]


class CountingTrainer:
    """Stands for the model: the log-probability of an answer is minus its learned tokens."""

    calls = 0

    def answer_log_probs(self, state: Any, rows: PreferenceRows) -> np.ndarray:
        self.calls += 1
        documents, weights = np.asarray(rows.documents), np.asarray(rows.weights)
        return np.stack([-((documents == n) * weights).sum(1) for n in range(1, 41)], axis=1)


def check_rows(rows: list[Any]) -> None:
    for row in rows:
        for n in range(1, row.documents.max() + 1):
            own = row.documents == n
            assert row.reference[own].sum() == -row.weights[own].sum() < 0


def test_computed_once_and_kept_with_the_samples(tmp_path: Path) -> None:
    model = write_chat_tokenizer(tmp_path / "model")
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    config = TrainConfig(init_from=str(CHECKPOINTS / "mixtral"), sequence_length=99, batch_size=4)
    data = dataclasses.replace(
        config.data, path=(str(path),), tokenizer=str(model / "tokenizer.json")
    )
    config = dataclasses.replace(config, data=data, dpo=DpoConfig(beta=0.1)).with_preferences()

    def start(**options: Any) -> tuple[Any, ReferenceAnswers]:
        own = dataclasses.replace(config, **options)
        corpus = prepare_corpus(own.data, VOCAB_SIZE, tmp_path / "cache")
        return corpus, ReferenceAnswers(corpus, own, tmp_path / "out" / "data")

    corpus, answers = start()
    assert not answers.read()
    assert np.isnan(corpus.sources[0].reference_log_probs[0]).all()
    trainer, done = CountingTrainer(), list[tuple[int, int]]()
    answers.compute(trainer, None, mesh_of(1, 1, 1), lambda *rows: done.append(rows))  # type: ignore[arg-type]
    assert done[-1][0] == done[-1][1] > 8 and trainer.calls == len(done)
    corpus, answers = start()
    assert answers.read()
    rows = SourceRows(corpus.sources[0], 99, corpus, config.data)
    check_rows([rows[i] for i in range(len(rows))])
    batches = held_out_rows(corpus, 99, 4, config.data)
    check_rows([PreferenceRows(*row) for own in batches for row in zip(*own, strict=True)])
    assert not start(compute_dtype="float32")[1].read()
    content = bytearray(answers.path.read_bytes())
    content[-3] ^= 1
    answers.path.write_bytes(content)
    assert not answers.read()
    with pytest.raises(ValueError, match=r"data.path = \(\): must name files of preferences"):
        TrainConfig(init_from="model", dpo=DpoConfig(beta=0.1)).with_preferences()
