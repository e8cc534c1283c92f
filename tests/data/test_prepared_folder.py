"""The end of a preparation, which may come more than once."""

from __future__ import annotations

from pathlib import Path

import pytest
from prepared_shards import UNIT_MB, files_of, run
from text_corpus import config

from jmoe.data.corpus import prepare_corpus
from tests.chat_models import VOCAB_SIZE


def test_a_deleted_shard_is_written_again(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    arguments = [mixed_texts, "--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, *UNIT_MB]
    assert run(*arguments) == 0
    expected = files_of(out)
    (out / "train-00003.array_record").unlink()
    with pytest.raises(ValueError, match=r"lacks train-00003\.array_record, which its manifest"):
        prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert run(*arguments) == 0
    assert files_of(out) == expected
    capsys.readouterr()
    assert run(*arguments) == 0
    assert "nothing is left to do" in capsys.readouterr().out
