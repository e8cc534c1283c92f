"""The command that counts paths, as a process."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jmoe.inference.path_table import PATHS_FILE, PathTable
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.programs import profile
from jmoe.programs.profile import split_tokens
from tests.model_configs import CHECKPOINTS
from tests.processes import one_device
from tests.train_runs import Run

WORDS = [f"w{number}" for number in range(64)]  # one a token of the vocabulary


def test_a_profile_is_kept_beside_the_checkpoint(
    tmp_path: Path, run_python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(CHECKPOINTS / "gpt_oss", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(WORDS[3:], 400)))
    command = [str(folder), "--text", str(text), "--max-tokens", "300", "--max-seq-len", "33"]

    def refused(*more: str, match: str) -> None:
        monkeypatch.setattr(sys, "argv", ["profile", *command, *more])
        with pytest.raises(ValueError, match=match):
            profile.main()

    refused(match=r"MODEL = .*: must hold a tokenizer.json")
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    refused("--path-length", "99", match=r"path_length = 99: must be in \[1, 25\] with 5 experts")
    refused("--max-tokens", "0", match="max_tokens = 0: must be greater than 0")

    done = run_python(["-m", "jmoe.programs.profile", *command], one_device(tmp_path / "compiled"))
    assert done.returncode == 0, done.stderr
    assert f"{folder / PATHS_FILE}: " in done.stdout
    assert "from 300 tokens" in done.stdout
    with LazyCheckpoint(folder) as checkpoint:
        table = PathTable.load(folder, checkpoint.routing_fingerprint)
    header = table.header
    assert (header.num_layers, header.num_experts, header.path_length, header.kept) == (3, 5, 3, 2)
    for layer in range(2):
        for digits in range(header.max_digits(layer)):
            rows = slice(*table.starts[layer, digits : digits + 2])
            assert table.tokens[rows].sum() == 300
            assert np.all(table.counts[rows].sum(axis=1) <= 2 * table.tokens[rows])


def test_pieces() -> None:
    assert list(split_tokens(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
