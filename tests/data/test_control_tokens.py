"""Text that spells out a tokenizer's control tokens: kept as text, and told, or encoded as a
server encodes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from text_corpus import config

import train
from jmoe.cluster.watchdog import Watchdog
from jmoe.configs import PRESETS
from jmoe.data.__main__ import main
from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.input_file import PIECE_BYTES
from jmoe.data.tokenizer import ControlTextCounter, encode_pieces, load_tokenizer, train_bpe
from jmoe.models.tokenizer_file import open_tokenizer

CHATS = [
    f"<|im_start|>user\nhello {i}<|im_end|>\n<|im_start|>assistant\nworld {i}<|im_end|>\n"
    for i in range(60)
]
PLAIN = [f"hello world, this is document {i}, of no importance\n" for i in range(40)]
START, END = 257, 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model's tokenizer.json."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made = train_bpe([], 257)
    assert made.add_special_tokens(["<|im_start|>", "<|im_end|>"]) == 2
    made.save(str(path))
    return path


def write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(corpus: Corpus) -> list[list[int]]:
    """Tokens of every document, trained on or held out, in order of their text."""
    ids = np.concatenate([corpus.sources[0].shards[0], corpus.held_out_tokens])
    found = [part.tolist() for part in np.split(ids, np.flatnonzero(ids == corpus.eot))]
    return sorted([i for i in part if i != corpus.eot] for part in found if len(part) > 1)


def test_tokens_are_those_that_the_model_is_served_with(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", CHATS)
    corpus = prepare_corpus(
        config(path, tokenizer=str(tokenizer), control_tokens=True), 300, tmp_path / "cache"
    )
    served = open_tokenizer(tokenizer)
    assert documents(corpus) == sorted(served.encode(text).ids for text in CHATS)
    assert documents(corpus)[0].count(START) == documents(corpus)[0].count(END) == 2
    assert corpus.describe_control_token_texts() == ""
    assert corpus.held_out_bytes.decode() == "".join(CHATS)[-len(corpus.held_out_bytes.decode()) :]


def test_by_default_they_are_text_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*CHATS, *PLAIN])
    kept = prepare_corpus(config(path, tokenizer=str(tokenizer)), 300, tmp_path / "cache")
    assert not {START, END} & {i for ids in documents(kept) for i in ids}
    assert kept.describe_control_token_texts().startswith(
        "60 texts hold text of control tokens, kept as text; --data.control-tokens"
    )
    # from the folder of the run
    again = prepare_corpus(config(path, tokenizer=str(tokenizer)), 300, tmp_path / "cache")
    assert again.describe_control_token_texts() == kept.describe_control_token_texts()
    tokens = prepare_corpus(
        config(path, tokenizer=str(tokenizer), control_tokens=True), 300, tmp_path / "cache"
    )
    assert tokens.fingerprint != kept.fingerprint
    assert (
        prepare_corpus(
            config(write(path, PLAIN), tokenizer=str(tokenizer)), 300, tmp_path / "c"
        ).describe_control_token_texts()
        == ""
    )


@pytest.mark.parametrize(("init_from", "said"), [("", False), ("model", True)])
def test_train_says_so_where_a_model_is_tuned(
    init_from: str, said: bool, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tiny = PRESETS["tiny"]
    data = config(write(tmp_path / "a.jsonl", CHATS), tokenizer=str(tokenizer))
    run = dataclasses.replace(
        tiny, init_from=init_from, data=data, output_dir=str(tmp_path / "run"), batch_size=2
    )
    run = dataclasses.replace(run, sequence_length=16)
    Path(run.output_dir).mkdir()
    with contextlib.ExitStack() as stack:
        train.prepare_text_data(
            run, stack.enter_context(Watchdog(60.0)), stack, json.loads(run.to_json())
        )
    line = (
        "texts hold text of control tokens, kept as text; --data.control-tokens encodes it as those"
        " tokens"
    )
    assert (line in capsys.readouterr().out) == said


def test_documents_that_are_read_in_pieces(tokenizer: Path) -> None:
    """Wherever a piece ends, amid a token or behind what only begins like one."""
    loaded = load_tokenizer(tokenizer, 300, encode_control=True)
    text = "a<|im_start|>b<|im_en <|<|im_end|><|im_end|"
    whole = [*loaded.tokenizer.encode(text, add_special_tokens=False).ids, loaded.eot]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [(text[:first], False), (text[first:second], False), (text[second:], True)]
            encoded = list(encode_pieces(loaded, [*pieces, ("x", True)]))
            assert [i for ids, _ in encoded for i in ids][: len(whole)] == whole
            assert sum(size for _, size in encoded) == len(text) + 1
    counted = ControlTextCounter(loaded.control_tokens)
    assert (
        len(
            list(
                counted.yield_and_count([("<|im_end|>", False), ("<|im_end|>", True), ("x", True)])
            )
        )
        == 3
    )
    assert counted.documents == 1


def test_a_long_document_whose_piece_ends_amid_a_token(tokenizer: Path, tmp_path: Path) -> None:
    text = "x" * (PIECE_BYTES - 4) + "<|im_end|>\n"
    path = write(tmp_path / "a.jsonl", [text, "short", "short"])
    corpus = prepare_corpus(
        config(path, tokenizer=str(tokenizer), control_tokens=True), 300, tmp_path / "cache"
    )
    assert max(documents(corpus), key=len)[-2] == END


def test_shards(tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They say how they were made, and are not taken for what they are not."""
    path, kept, made = write(tmp_path / "a.jsonl", CHATS), tmp_path / "kept", tmp_path / "made"
    command = [str(path), "--tokenizer", str(tokenizer), "--out"]
    assert main([*command, str(kept)]) == main([*command, str(made), "--control-tokens"]) == 0
    assert (
        prepare_corpus(config(kept), 300, tmp_path / "cache")
        .describe_control_token_texts()
        .startswith("58 texts hold text of control")
    )
    with pytest.raises(
        ValueError, match=r"data.control_tokens = True: .*kept/.*\.bin was made without; make"
    ):
        prepare_corpus(config(kept, control_tokens=True), 300, tmp_path / "cache")
    tokens = prepare_corpus(config(made, control_tokens=True), 300, tmp_path / "cache")
    assert tokens.describe_control_token_texts() == "" and START in documents(tokens)[0]
    assert main([*command, str(made)]) == 2
    assert (
        "already holds token shards made from other inputs or settings" in capsys.readouterr().err
    )
