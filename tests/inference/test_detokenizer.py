"""Streams of text against the text decoded at once, with tokenizers trained and built here."""

import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from jmoe.data.tokenizer import END_OF_TEXT, train_bpe
from jmoe.inference.detokenizer import MAX_PENDING_TOKENS, TextStream

TEXT = "The quick brown fox. Grüße aus München! 日本語のテキスト, 한국어. 👩‍👩‍👧 🎉🎉 naïve café — “done”.\n"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE of few merges: most characters beyond ASCII are several tokens."""
    return train_bpe([TEXT, "the stop STOP and the end of it"] * 3, 300)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As Llama and Mixtral: words begin with U+2581, the text's first space goes, other
    characters are byte tokens.
    """
    words = ["\u2581", "a", "b", "c", "\u2581a", "\u2581b", "\u2581ab", "ab"]
    vocabulary = {
        word: i
        for i, word in enumerate(["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    }
    merges = [("\u2581", "a"), ("\u2581", "b"), ("\u2581a", "b"), ("a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(Regex(" "), "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token of the byte-level tokenizer for each byte."""
    # Bytes that Latin-1 can print stand for themselves, the others for the characters from U+0100
    # on.
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(0x100) if b not in plain]
    return [tokenizer.token_to_id(chr(b if b in plain else 0x100 + others.index(b))) for b in data]


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push([token]) for token in ids]


def test_byte_level_text_in_whole_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(TEXT).ids
    stream = TextStream(byte_level)
    texts = pieces(stream, ids)
    assert all("\ufffd" not in text for text in texts)
    assert sum(not text for text in texts) > 20, (
        "characters that are several tokens came in one piece"
    )
    assert "".join(texts) == TEXT
    assert stream.flush() == ""


def test_every_character_of_one_to_four_bytes(byte_level: Tokenizer) -> None:
    text = "a\u00df\u20ac\U0001f389" * 3
    ids = byte_ids(byte_level, text.encode())
    assert len(ids) == len(text.encode())
    stream = TextStream(byte_level)
    texts = pieces(stream, ids)
    assert [t for t in texts if t] == list(text)
    # as soon as its last byte is there
    assert texts[:10] == ["a", "", "\u00df", "", "", "\u20ac", "", "", "", "\U0001f389"]


def test_cut_does_not_matter(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(TEXT * 3).ids
    rng = random.Random(0)
    for stop in ((), ("fox",), ("日本語のテ", "本語"), ("🎉 naïve",), ("not there",)):
        texts = set()
        for _ in range(10):
            stream, text, at = TextStream(byte_level, stop=stop), "", 0
            while at < len(ids):
                count = rng.randrange(1, 12)
                text += stream.push(ids[at : at + count])
                at += count
            texts.add(text + stream.flush())
        (text,) = texts
        ends = [TEXT.find(s) + len(s) for s in stop if s in TEXT]
        if ends:
            first = min((TEXT.find(s) + len(s), TEXT.find(s)) for s in stop if s in TEXT)
            assert text == TEXT[: first[1]]
        else:
            assert text == TEXT * 3


def test_incomplete_character_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, b"ab\xf0\x9f\x8e")
    stream = TextStream(byte_level)
    assert pieces(stream, ids) == ["a", "b", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_invalid_bytes_between(byte_level: Tokenizer) -> None:
    data = b"a\xffb\xe2\x82c\xc3"
    stream = TextStream(byte_level)
    text = "".join(pieces(stream, byte_ids(byte_level, data)))
    assert text == "a\ufffdb\ufffdc"
    assert text + stream.flush() == data.decode(errors="replace")


def test_bytes_that_never_become_text(byte_level: Tokenizer) -> None:
    """They come out all the same after a while, and a character behind them stays whole."""
    for count in range(40):
        data = b"a" + b"\xff" * count + "\U0001f389b".encode()
        ids = byte_ids(byte_level, data)
        stream = TextStream(byte_level)
        texts = pieces(stream, ids)
        assert "".join(texts) == data.decode(errors="replace"), count
        waited = max(len(run) for run in "".join("x" if t else "-" for t in texts).split("x"))
        assert waited < MAX_PENDING_TOKENS


def test_special_tokens_give_no_text(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id(END_OF_TEXT)
    ids = [
        end,
        *byte_level.encode("the end").ids,
        end,
        end,
        *byte_level.encode(" of it").ids,
        *[end] * 50,
    ]
    stream = TextStream(byte_level)
    assert "".join(pieces(stream, ids)) + stream.flush() == "the end of it"


@pytest.mark.parametrize(
    ("stop", "min_new_tokens", "data", "kept", "matched"),
    [
        *(
            ((stop,), 0, f"brown {stop} fox".encode(), "brown ", stop)
            for stop in ("STOP", "日本語", "🎉🎉", "\n", "x y")
        ),
        # several: the one that is complete first, then the longest
        (("abcd", "bc"), 0, b"xabcd", "xa", "bc"),
        (("bc", "abc"), 0, b"xabcd", "x", "abc"),
        (("zz", "d"), 0, b"xabcd", "xabc", "d"),
        # of a replacement character at the end
        (("b\ufffd",), 0, b"ab\xf0", "a", "b\ufffd"),
        # not in the first tokens
        (("bc",), 3, b"abcabc", "abca", "bc"),
        (("c",), 3, b"abcabc", "abcab", "c"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_stop_strings(
    byte_level: Tokenizer,
    whole: bool,
    stop: tuple[str, ...],
    min_new_tokens: int,
    data: bytes,
    kept: str,
    matched: str,
) -> None:
    """The text ends before them, whether it comes at once or token by token, and what follows is
    ignored.
    """
    ids = byte_ids(byte_level, data)
    stream = TextStream(byte_level, stop=stop, min_new_tokens=min_new_tokens)
    text = stream.push(ids) if whole else "".join(pieces(stream, ids))
    assert text + stream.flush() == kept
    assert stream.matched_stop == matched
    assert stream.push(ids) == stream.flush() == ""


def test_stop_string_over_several_tokens(byte_level: Tokenizer) -> None:
    """As the tokenizer encodes them, some of their ends in one token with what follows."""
    ids = byte_level.encode("quick brown the end fox").ids
    assert "".join(pieces(TextStream(byte_level, stop=("the end",)), ids)) == "quick brown "


def test_what_could_begin_a_stop_string_is_held_back(byte_level: Tokenizer) -> None:
    ids = byte_ids(byte_level, b"aababac")
    stream = TextStream(byte_level, stop=("abac!",))
    assert pieces(stream, ids) == ["", "a", "", "", "ab", "", ""]
    assert stream.flush() == "abac"
    assert stream.matched_stop is None


def test_spaces_after_a_prompt(byte_fallback: Tokenizer) -> None:
    """A decoder that strips the first space must not strip the one between prompt and output."""
    prompt, ids = byte_fallback.encode("ab c").ids, [byte_fallback.token_to_id("\u2581ab")] * 3
    assert "".join(pieces(TextStream(byte_fallback, prompt), ids)) == " ab ab ab"
    assert "".join(pieces(TextStream(byte_fallback), ids)) == "ab ab ab"


def test_byte_fallback(byte_fallback: Tokenizer) -> None:
    text = "a\u20ac\U0001f389\u00df b \U0001f389"
    ids = byte_fallback.encode(text).ids
    assert byte_fallback.decode(ids) == text
    texts = pieces(TextStream(byte_fallback), ids)
    assert "".join(texts) == text
    assert all("\ufffd" not in t for t in texts)
    # A run of bytes of which the first were a character, and all together are none.
    broken = [
        *byte_fallback.encode("a\u20ac").ids,
        byte_fallback.token_to_id("<0xF0>"),
        byte_fallback.token_to_id("b"),
    ]
    stream = TextStream(byte_fallback)
    assert "".join(pieces(stream, broken)) + stream.flush() == "a\u20ac\ufffdb"


def test_random_tokens(byte_level: Tokenizer) -> None:
    """Whatever an untrained model says: the pieces are the text."""
    rng = random.Random(1)
    for _ in range(20):
        ids = [rng.randrange(byte_level.get_vocab_size()) for _ in range(200)]
        stream = TextStream(byte_level)
        assert "".join(pieces(stream, ids)) + stream.flush() == byte_level.decode(ids)
