"""Read `tiktoken.model`, the only tokenizer that Kimi-K2 and Moonlight ship: tokens with the ranks
by which they are merged.

Each line has a token in base64 and its rank. How text is cut before merges and how special tokens
are numbered is in code beside the weights (`TikTokenTokenizer`), so other classes are refused.
"""

import base64
import binascii
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jmoe.config import check
from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.tokenizer_file import (
    SETTINGS,
    byte_level_characters,
    read_json_if_present,
)

FILE = "tiktoken.model"
TOKENIZER_CLASS = "TikTokenTokenizer"
_CHARACTERS = byte_level_characters()
NUM_SPECIAL = 256 + 2  # numbered behind the merged tokens, whether they have a name or not
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# tokenization_kimi.py: Chinese characters by themselves, then as OpenAI's o200k_base
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_tiktoken(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder's `tiktoken.model` and `tokenizer_config.json`.

    Raises ValueError naming the file that is damaged or of another tokenizer class.
    """
    settings = read_json_if_present(folder / SETTINGS)
    name = settings.get("tokenizer_class")
    words = f"must be {TOKENIZER_CLASS} for a {FILE}"
    check(name == TOKENIZER_CLASS, f"{folder / SETTINGS}: tokenizer_class", name, words)
    ranks = _read_ranks(folder / FILE)
    texts = {token: _byte_level_text(token) for token in ranks}
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    pairs = (_last_merge(token, ranks) for token in ranks if len(token) > 1)
    merges = [(texts[pair[0]], texts[pair[1]]) for pair in pairs if pair is not None]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = settings.get("added_tokens_decoder") or {}
    numbers = range(len(ranks), len(ranks) + NUM_SPECIAL)
    field = f"{folder / SETTINGS}: added_tokens_decoder"
    for number in named:
        words = f"must be in {numbers}, behind the {len(ranks)} tokens of {FILE}: is it cut off?"
        check(number in map(str, numbers), field, number, words)
    for number in numbers:
        content = (named.get(str(number)) or {}).get("content", f"<|reserved_token_{number}|>")
        tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])
        own = tokenizer.token_to_id(content)
        words = f"must name a token of its own, and {content!r} is {own}"
        check(own == number, field, number, words)
    return tokenizer


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Return {token: rank} in the order of ranks, which must be 0, 1, 2 and so on."""
    try:
        with name_file_in_errors(file):
            lines = file.read_text(encoding="ascii").splitlines()
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"{file}: must have a token in base64 and its rank a line") from error
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    whole = list(ranks.values()) == list(range(len(ranks))) and len(ranks) == len(pairs)
    if not whole or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{file}: must number its tokens from 0, every byte among them")
    return ranks


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two tokens that merge into `token` last, when pairs are merged by rank.

    None if merges of lower ranks do not lead to it: it is then found as a whole word alone.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        best = pairs.index(min(pairs))
        if pairs[best] >= ranks[token]:
            return None
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _byte_level_text(token: bytes) -> str:
    """Return a token as byte-level BPE writes it: a printable character for each byte."""
    return "".join(_CHARACTERS[byte] for byte in token)
