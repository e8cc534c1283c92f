"""Character offsets of a completion's tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jmoe.serving.vocabulary import TextOffsets, TokenVocabulary


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte, one added token that is part of the text, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(["<think>"])
    made.add_special_tokens(["<end>"])
    return made


@pytest.mark.parametrize(
    ("text", "decoded", "offsets"),
    [
        ("a<think>b", "a<think>b", [0, 1, 8]),
        ("<think>é<think>", "<think>é<think>", [0, 7, 7, 8]),
        ("a<end>b", "ab", [0, 1, 1]),
    ],
)
def test_an_added_token_has_text_unless_it_is_special(
    tokenizer: Tokenizer, text: str, decoded: str, offsets: list[int]
) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == decoded
    assert TextOffsets(TokenVocabulary(tokenizer), decoded).advance(ids) == offsets


def test_a_special_token_of_an_echoed_prompt_has_text(tokenizer: Tokenizer) -> None:
    text = "a<end>b"
    ids = tokenizer.encode(text).ids
    assert TextOffsets(TokenVocabulary(tokenizer), text).advance(ids, text) == [0, 1, 6]
