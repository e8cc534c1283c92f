"""Byte content of single tokens, which may be partial UTF-8 characters, and log-probabilities in
OpenAI's response formats.
"""

import codecs
import json
import re

from tokenizers import Tokenizer

from jmoe.inference.sequence import TokenLogprob
from jmoe.models.tokenizer_file import byte_level_characters
from jmoe.serving.schemas import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenVocabulary:
    """Byte content and text of each token of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = set(added)
        self._special = {token_id for token_id, token in added.items() if token.special}
        byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])
        characters = {c: byte for byte, c in enumerate(byte_level_characters())}
        self._alphabet = characters if byte_level else None
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # Without byte fallback, one unknown token may stand for any number of characters.
        whole = byte_level or "<0x00>" in vocabulary
        self._longest = (
            max((len(self.token_bytes(token)) for token in vocabulary.values()), default=0)
            if whole
            else None
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token contributes to decoded text.

        Returns b"" for an id that the tokenizer lacks: a model's embedding may have more rows than
        the tokenizer has tokens.
        """
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._alphabet is not None:
            return bytes(self._alphabet[char] for char in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        r"""Return the token's text; for bytes that are not valid UTF-8, OpenAI's notation, e.g.
        `bytes:\xf0\x9f`.
        """
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def max_text_length(self, num_tokens: int) -> int | None:
        """Return the maximum number of characters that `num_tokens` tokens can encode.

        Returns None if there is no maximum: without byte fallback, an unknown token may stand for
        any number of characters.
        """
        return None if self._longest is None else num_tokens * self._longest

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a special token, which decoding omits from the output
        text.
        """
        return token_id in self._special

    def completion_logprobs(
        self, prompt_token_ids: list[int], logprobs: list[TokenLogprob], text_offset: list[int]
    ) -> CompletionLogprobs:
        """Return log-probabilities in the format of /v1/completions.

        prompt_token_ids: tokens to list first, with null in place of a log-probability: the first
            prompt token if the prompt is echoed, else none.
        logprobs: the following tokens.
        text_offset: for each token of both lists, the character at which it begins.
        """
        first = [self.token_text(token) for token in prompt_token_ids]
        return CompletionLogprobs(
            tokens=first + [self.token_text(lp.token_id) for lp in logprobs],
            token_logprobs=[*[None for _ in first], *(lp.logprob for lp in logprobs)],
            top_logprobs=[*[None for _ in first], *(self._top_logprobs(lp) for lp in logprobs)],
            text_offset=text_offset,
        )

    def chat_logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs:
        """Return log-probabilities in the format of /v1/chat/completions."""
        content = []
        for lp in logprobs:
            drawn, *top = (
                self._make_top_logprob(*pair) for pair in ((lp.token_id, lp.logprob), *lp.top)
            )
            content.append(ChatLogprob(**dict(drawn), top_logprobs=top))
        return ChatLogprobs(content=content)

    def _top_logprobs(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return {text: log-probability} of the most likely tokens and of the drawn token.

        Of several tokens with the same text, the most likely one counts.
        """
        top: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self.token_text(token), value)
        return top

    def _make_top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        """Return a token's text, log-probability and bytes in the format of a chat."""
        data = self.token_bytes(token_id)
        return TopLogprob(token=data.decode(errors="replace"), logprob=logprob, bytes=list(data))


class TextOffsets:
    """Computes the character offset in a text at which each of its tokens begins.

    A token that continues a multi-byte character has the offset of that character's start. Text
    that the stream still holds back counts as well, so the offsets do not depend on how the text is
    split into chunks.
    """

    def __init__(self, vocabulary: TokenVocabulary, text: str) -> None:
        """Start at offset 0.

        text: the beginning of the text. If it does not begin with a space, the decoder has removed
            the first token's leading space, which is then not counted.
        """
        self._vocabulary, self._strips_space = vocabulary, not text.startswith(" ")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def advance(self, token_ids: list[int], text: str = "") -> list[int]:
        """Return the offset of each of the next tokens, in characters.

        text: the whole text so far if it can contain special tokens (an echoed prompt). A special
            token counts only if `text` has it at its offset.
        """
        offsets = []
        for token in token_ids:
            offsets.append(self._num_characters)
            data = self._vocabulary.token_bytes(token)
            if self._vocabulary.is_special(token) and not text.startswith(
                data.decode(), self._num_characters
            ):
                continue
            if self._strips_space:
                data = data.removeprefix(b" ")
                self._strips_space = False
            self._num_characters += len(self._decoder.decode(data))
        return offsets
