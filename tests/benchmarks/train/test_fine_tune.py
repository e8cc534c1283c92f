"""`make fine-tune`: its chats, and the whole program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.train.fine_tune import LEAST_SHARE, NUM_CHATS, chats

ROOT = Path(__file__).resolve().parents[3]


def test_every_question_has_one_answer() -> None:
    pairs = chats()
    assert len(pairs) == len(dict(pairs)) == NUM_CHATS
    assert all(question.endswith(" do?") and answer.endswith(".") for question, answer in pairs)


@pytest.mark.slow
def test_tuned_models_answer(run_python: Callable[..., Any], tmp_path: Path) -> None:
    done = run_python(
        [ROOT / "benchmarks" / "train" / "fine_tune.py", "--out", tmp_path / "out"], timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["right"]["before"] == 0
    for name in ("fine-tune", "fine-tune-lora"):
        assert result["right"][name] >= LEAST_SHARE * result["questions"], result
