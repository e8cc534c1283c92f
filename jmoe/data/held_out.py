"""Held-out tokens: read from a prepared folder, or split off token shards."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jmoe.data.record_shards import open_token_shard
from jmoe.data.shards import (
    Ids,
    Shard,
)
from jmoe.data.text_files import TextInput
from jmoe.data.tokenizer import (
    CorpusTokenizer,
)
from jmoe.data.tokenizing_job import HELD_OUT, HELD_OUT_TEXT
from jmoe.memory.direct_io import name_file_in_errors


@dataclass(frozen=True, eq=False)
class HeldOutTokens:
    """Held-out tokens. `text` is None if unknown; `sha256` identifies the ids. samples: the shard
    of held-out samples, which has neither `ids` nor `text`.
    """

    ids: NDArray[np.int32]
    text: bytes | None
    sha256: str
    samples: Shard | None = None


def read_held_out(directory: Path, tokenizer: CorpusTokenizer | None) -> HeldOutTokens:
    shard = open_token_shard(directory / HELD_OUT)
    shard.blocks.check_all(shard.header)
    if shard.header.has_samples:
        return HeldOutTokens(np.zeros(0, np.int32), None, shard.header.sha256, shard)
    text_path = directory / HELD_OUT_TEXT
    text = None
    if text_path.is_file() and text_path.stat().st_size == shard.header.text_bytes:
        with name_file_in_errors(text_path):
            text = text_path.read_bytes()
    elif tokenizer is not None:
        text = _decode_to_utf8(tokenizer, shard.ids[:])
    return HeldOutTokens(shard.ids[:].astype(np.int32), text, shard.header.sha256)


def _decode_to_utf8(tokenizer: CorpusTokenizer, ids: Ids) -> bytes:
    ends = np.flatnonzero(ids == tokenizer.eot)
    documents = np.split(ids, ends)
    texts = ([int(i) for i in document if i != tokenizer.eot] for document in documents)
    return "".join(
        tokenizer.tokenizer.decode(text, skip_special_tokens=False) for text in texts
    ).encode()


def take_held_out_of_shards(
    inputs: Sequence[TextInput],
    shards: dict[int, list[Shard]],
    shard_inputs: Sequence[int],
    targets: Sequence[int],
    tokenizer: CorpusTokenizer | None,
) -> list[HeldOutTokens]:
    """Return the held-out tokens of the inputs numbered in `shard_inputs`.

    Uses `held_out.bin` beside the shards; without one, splits the end off the largest shard and
    updates `shards`. Raises ValueError if a `held_out.bin` was made with another tokenizer.
    """
    held_out: list[HeldOutTokens] = []
    seen: set[Path] = set()
    for i in shard_inputs:
        folders = sorted({file.path.parent.resolve() for file in inputs[i].files})
        beside = [folder for folder in folders if (folder / HELD_OUT).is_file()]
        for folder in beside:
            if (
                open_token_shard(folder / HELD_OUT).header.tokenizer
                != shards[i][0].header.tokenizer
            ):
                raise ValueError(
                    f"{folder / HELD_OUT}: made with another tokenizer than the token shards"
                    " beside it"
                )
            if folder not in seen:
                held_out.append(read_held_out(folder, tokenizer))
                seen.add(folder)
        if not beside and shards[i][0].header.has_samples:
            raise ValueError(
                f"data.path = {inputs[i].pattern!r}: lacks {HELD_OUT} beside its shards of samples;"
                " copy the whole folder that python -m jmoe.data made"
            )
        if not beside:
            largest = max(range(len(shards[i])), key=lambda j: len(shards[i][j].ids))
            shard = shards[i][largest]
            shards[i][largest], carved = _split_off_held_out(
                shard, targets[i], tokenizer, inputs[i].pattern
            )
            held_out.append(carved)
    return held_out


def _split_off_held_out(
    shard: Shard, target_bytes: int, tokenizer: CorpusTokenizer | None, pattern: str
) -> tuple[Shard, HeldOutTokens]:
    """Return the shard without its last `target_bytes` of text, and these as held-out tokens.

    Cuts at the first end of a document within these bytes if there is one. Raises ValueError if the
    shard has too few tokens.
    """
    count, header = len(shard.ids), shard.header
    wanted = int(target_bytes * count / max(1, header.text_bytes))
    cut = count - min(wanted, count // 2)
    shard.blocks.check_ids(cut, count)
    ends = np.flatnonzero(shard.ids[cut:-1] == header.eot)
    cut += int(ends[0]) if len(ends) else 0
    tail = shard.ids[cut:].astype(np.int32)
    if not len(ends):
        tail = np.concatenate([np.asarray([header.eot], np.int32), tail])
    if len(tail) < 2 or cut < 2:
        raise ValueError(
            f"data.path = {pattern!r}: {count} tokens are too few to hold any of them out"
        )
    text = _decode_to_utf8(tokenizer, tail.astype(np.uint32)) if tokenizer else None
    digest = hashlib.sha256(tail.tobytes()).hexdigest()
    return dataclasses.replace(shard, ids=shard.ids[:cut]), HeldOutTokens(tail, text, digest)
