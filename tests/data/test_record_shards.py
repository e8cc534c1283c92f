"""Shards that are damaged, cut, of another tokenizer, or not finished."""

from __future__ import annotations

from pathlib import Path

import pytest
from prepared_shards import UNIT_MB, run
from text_corpus import config

from jmoe.data.corpus import prepare_corpus
from tests.chat_models import VOCAB_SIZE, write_chat_tokenizer


def test_a_run_refuses_damaged_and_unfinished_shards(
    mixed_texts: Path, byte_tokenizer: Path, tmp_path: Path
) -> None:
    out, cache = tmp_path / "shards", tmp_path / "cache"
    assert (
        run(mixed_texts, "--tokenizer", byte_tokenizer, "--out", out, "--workers", 1, *UNIT_MB) == 0
    )
    other = write_chat_tokenizer(tmp_path / "other") / "tokenizer.json"
    other.write_text(other.read_text().replace("}", "} ", 1))
    with pytest.raises(ValueError, match="were made with another tokenizer"):
        prepare_corpus(config(out, tokenizer=str(other)), VOCAB_SIZE, cache)
    shard = out / "train-00001.array_record"
    content = shard.read_bytes()
    ids_end = content.index(b'{"dtype"') - 100
    flipped = content[:ids_end] + bytes([content[ids_end] ^ 1]) + content[ids_end + 1 :]
    for damaged in (content[:-7], b"", flipped):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"train-00001\.array_record: this token shard is dam"):
            prepare_corpus(config(out), VOCAB_SIZE, cache)
    shard.write_bytes(content)
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="its preparation was interrupted"):
        prepare_corpus(config(out), VOCAB_SIZE, cache)
