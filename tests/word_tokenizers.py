"""Tokenizers of a few whole words, with the settings that a release may leave in their files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WORDS = {"<unk>": 0, "hello": 1, "world": 2, "this": 3, "is": 4, "text": 5}
BOS = 6
LONG = "hello world this is text " * 20


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer of `WORDS` and `<s>`, which has the id `BOS`."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>")])
    return tokenizer


def write_word_tokenizer(folder: Path, **settings: Any) -> Path:
    """Write one that cuts texts at 8 tokens and pads batches. settings: tokenizer_config.json."""
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(pad_id=0, pad_token="<unk>")
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"
