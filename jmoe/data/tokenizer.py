"""Byte-level BPE: training, loading and encoding of documents."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jmoe.memory.direct_io import name_file_in_errors
from jmoe.models.tokenizer_file import open_tokenizer, parse_tokenizer

END_OF_TEXT = "<|endoftext|>"
# Names of the token that ends a document in various model families.
END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|im_end|>",
    "[EOS]",
    "[SEP]",
)
MIN_VOCAB_SIZE = 257  # 256 bytes and the end-of-text token
# the trainer allocates for all tokens at once, and aborts the process if memory is short
MAX_VOCAB_SIZE = 1 << 22
# Text per call of the tokenizer: of several threads, one piece for each, so that progress is
# reported about every second; of one thread, little, as encodings take about 40 bytes a character.
THREAD_CHARACTERS = 1 << 20
MAX_THREADS = 16
SINGLE_THREAD_CHARACTERS = 1 << 18
PARALLELISM = "TOKENIZERS_PARALLELISM"  # the tokenizers library reads it at each call
NO_PARALLELISM = ("", "off", "false", "f", "no", "n", "0")


@dataclass(frozen=True, eq=False)
class CorpusTokenizer:
    """A tokenizer with the facts that data preparation needs.

    eot: id of the token that ends a document. vocab_size: exclusive upper bound of the ids.
    fingerprint: SHA-256 of tokenizer.json, by which a shard names its tokenizer. control_tokens:
    texts of the special tokens. encodes_control_tokens: whether such text in a document is encoded
    as the special token instead of as plain text.
    """

    tokenizer: Tokenizer
    path: Path
    eot: int
    vocab_size: int
    fingerprint: str
    control_tokens: tuple[str, ...]
    encodes_control_tokens: bool
    known: set[str] = field(default_factory=set)  # characters known to have a token

    @functools.cached_property
    def _drops_unknown_characters(self) -> bool:
        """Whether encoding silently drops characters that have no token."""
        model, before = self.tokenizer.model, str(self.tokenizer.pre_tokenizer)
        if not isinstance(model, models.BPE) or model.unk_token is not None or model.byte_fallback:
            return False
        every_byte = set(pre_tokenizers.ByteLevel.alphabet())
        return "ByteLevel" not in before or not every_byte <= self.tokenizer.get_vocab().keys()

    def check_characters_known(self, texts: Iterable[str]) -> None:
        """Raise ValueError that names a character which encoding would silently drop.

        Only a BPE without unknown token, byte fallback or byte-level alphabet drops characters.
        """
        if not self._drops_unknown_characters:
            return
        for character in sorted(set().union(*texts) - self.known):
            if (
                not character.isspace()
                and not self.tokenizer.encode(character, add_special_tokens=False).ids
            ):
                raise ValueError(
                    f"data.tokenizer = {str(self.path)!r}: has no token for {character!r}, which"
                    " would be left out of the text; give it an unk_token or byte_fallback, or"
                    " make it byte-level"
                )
            self.known.add(character)

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return each text's (ids, the range of characters of each id). Raises ValueError if the
        tokenizer has no token for a character.
        """
        try:
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain Exception
            raise self._encoding_error(error) from error
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids. Raises ValueError as `encode_with_offsets`."""
        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain Exception
            raise self._encoding_error(error) from error
        return [encoding.ids for encoding in encodings]

    def _encoding_error(self, error: Exception) -> ValueError:
        return ValueError(
            f"data.tokenizer = {str(self.path)!r}: {error}; give it one for unknown text"
        )


def check_vocab_size(vocab_size: int) -> None:
    """Raise ValueError if a byte-level BPE of `vocab_size` tokens is too small for all bytes, or
    too large.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: must be at least {MIN_VOCAB_SIZE} for a byte-level"
            " BPE to be trained"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: must be at most {MAX_VOCAB_SIZE:,} for a byte-level"
            " BPE to be trained; give data.tokenizer for more"
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of at most `vocab_size` tokens.

    It encodes any text losslessly; `<|endoftext|>` has id 0.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_break_long_words(texts), trainer)
    return tokenizer


def _break_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, cut into short pieces if a run of 2,048 characters contains no white space,
    or only white space.

    BPE training is quadratic in the length of a word: a 1 MB line of base64 would take hours.
    """
    block = 1024  # a run of 2 * block characters covers a whole block
    for text in texts:
        blocks = [text[i : i + block] for i in range(0, len(text), block)]
        if any(not b.split(None, 1) or b.split(None, 1) == [b] for b in blocks[:-1]):
            yield from blocks
        else:
            yield text


def load_tokenizer(
    path: Path, max_vocab_size: int, *, encode_control: bool = False
) -> CorpusTokenizer:
    """Return the tokenizer of a `tokenizer.json`.

    encode_control: encode text that spells a special token as that token, as a server does in a
    rendered chat. By default "<|endoftext|>" in a document is plain text. Raises ValueError if the
    file is missing, broken, has more than `max_vocab_size` ids, or has no end-of-text token.
    """
    if not path.is_file():
        raise ValueError(f"data.tokenizer = {str(path)!r}: no such file")
    with name_file_in_errors(path):
        content = path.read_bytes()
    try:
        # a server also reads the tokens that only tokenizer_config.json lists
        tokenizer = open_tokenizer(path) if encode_control else parse_tokenizer(content)
    except ValueError as error:
        raise ValueError(f"data.tokenizer = {str(path)!r}: {error}") from error
    tokenizer.encode_special_tokens = not encode_control
    ids = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values(), default=-1) + 1
    if vocab_size > max_vocab_size:
        raise ValueError(
            f"data.tokenizer = {str(path)!r}: its vocabulary of {vocab_size} tokens exceeds "
            f"model.vocab_size = {max_vocab_size}"
        )
    eot = next((ids[name] for name in END_OF_TEXT_NAMES if name in ids), None)
    if eot is None:
        raise ValueError(
            f"data.tokenizer = {str(path)!r}: has no end-of-text token; looked for"
            f" {', '.join(END_OF_TEXT_NAMES)}"
        )
    control = tuple(
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    )
    fingerprint = hashlib.sha256(content).hexdigest()
    return CorpusTokenizer(tokenizer, path, eot, vocab_size, fingerprint, control, encode_control)


def encode_pieces(
    loaded: CorpusTokenizer, texts: Iterable[tuple[str, bool]]
) -> Iterator[tuple[list[int], int]]:
    """Yield (ids, size of the text in bytes) for each (text, whether it ends its document).

    The ids of a document's last piece end with the end-of-text id.
    """
    batch: list[tuple[str, bool]] = []
    characters, batch_characters = 0, _batch_characters()
    for piece in (
        _join_cut_tokens(texts, loaded.control_tokens) if loaded.encodes_control_tokens else texts
    ):
        batch.append(piece)
        characters += len(piece[0])
        if characters >= batch_characters or len(batch) >= 4096:
            yield from _encode_batch(loaded, batch)
            batch, characters = [], 0
    yield from _encode_batch(loaded, batch)


def _batch_characters() -> int:
    """Return how much text a call of the tokenizer gets, by the number of its threads."""
    if os.environ.get(PARALLELISM, "true").lower() in NO_PARALLELISM:
        return SINGLE_THREAD_CHARACTERS
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    return THREAD_CHARACTERS * threads if threads > 1 else SINGLE_THREAD_CHARACTERS


def _join_cut_tokens(
    texts: Iterable[tuple[str, bool]], tokens: Sequence[str]
) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of documents, re-cut so that no piece boundary splits one of `tokens`."""
    begun = ""
    for text, ends_document in texts:
        whole = begun + text
        longest = 0 if ends_document else min(len(whole), max(map(len, tokens), default=1) - 1)
        cut = (
            n
            for n in range(longest, 0, -1)
            if any(t.startswith(whole[-n:]) and len(t) > n for t in tokens)
        )
        at = len(whole) - next(cut, 0)
        begun = whole[at:]
        yield whole[:at], ends_document


class ControlTextCounter:
    """Counts the documents that contain one of `tokens` as plain text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
        self.documents = 0

    def yield_and_count(self, texts: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
        """Yield the pieces unchanged while counting."""
        spelled = False
        for text, ends_document in texts:
            spelled = spelled or (
                self._pattern is not None and self._pattern.search(text) is not None
            )
            self.documents += spelled and ends_document
            spelled = spelled and not ends_document
            yield text, ends_document


def _encode_batch(
    loaded: CorpusTokenizer, batch: list[tuple[str, bool]]
) -> Iterator[tuple[list[int], int]]:
    texts = [text for text, _ in batch]
    loaded.check_characters_known(texts)
    for ids, (text, ends_document) in zip(loaded.encode(texts), batch, strict=True):
        if ends_document:
            ids.append(loaded.eot)
        yield ids, len(text.encode())
