"""Shards that are damaged, cut, of another tokenizer, or not finished."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from prepared_shards import UNIT_MB, run
from text_corpus import config

from jmoe.data.corpus import prepare_corpus
from jmoe.data.record_shards import RECORD_BYTES, open_token_shard
from jmoe.data.shards import open_shard, writing_shard
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
    # of another preparation, whole in itself
    shard.write_bytes((out / "train-00002.array_record").read_bytes())
    with pytest.raises(ValueError, match=r"train-00001\.array_record: is of another preparation"):
        prepare_corpus(config(out), VOCAB_SIZE, cache)
    shard.write_bytes(content)
    manifest = (out / "manifest.json").read_text()
    (out / "manifest.json").write_text(manifest[:100])
    with pytest.raises(ValueError, match=r"manifest\.json: is damaged"):
        prepare_corpus(config(out), VOCAB_SIZE, cache)
    (out / "manifest.json").unlink()
    with pytest.raises(ValueError, match="its preparation was interrupted"):
        prepare_corpus(config(out), VOCAB_SIZE, cache)


def test_records_of_other_sizes_are_refused(tmp_path: Path) -> None:
    """As many as the header's count needs, which would shift every token after the first record."""
    with writing_shard(
        tmp_path / "a.bin", vocab_size=256, eot=0, tokenizer="t", split="train"
    ) as writer:
        writer.append(np.arange(RECORD_BYTES) % 256, text_bytes=1)
    shard = open_shard(tmp_path / "a.bin")
    path = tmp_path / "a.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    ids = shard.ids[:].tobytes()
    for start, end in ((0, 100), (100, 2 * 10**4), (2 * 10**4, len(ids))):
        writer.write(ids[start:end])
    writer.write(json.dumps(asdict(shard.header)).encode())
    writer.close()
    with pytest.raises(
        ValueError, match=r"a\.array_record: .* its record 0 has 100 bytes, not 65536"
    ):
        open_token_shard(path).ids[:10]
