"""Encoding of samples: their text, by the model's chat template, their tokens, and the tokens to
learn.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from jmoe.config import DataConfig
from jmoe.config.train import TrainOn
from jmoe.data.samples import Conversation, PreferencePair, Sample
from jmoe.data.tokenizer import CorpusTokenizer
from jmoe.models.chat_template import DEFAULT, ChatTemplate, RenderedAnswers, read_templates
from jmoe.models.tokenizer_file import (
    ADDED_TOKEN,
    SETTINGS,
    open_tokenizer,
    read_json_if_present,
    special_token_texts,
)
from jmoe.types import Json, JsonObject


class EncodedSample(NamedTuple):
    """The tokens of a sample. trained: the tokens to learn, as targets; the first token is none.
    text_bytes: size of their text in UTF-8.
    """

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]
    text_bytes: int

    @property
    def num_trained(self) -> int:
        """The number of tokens that the loss counts."""
        return int(self.trained[1:].sum())

    @property
    def sequences(self) -> tuple[EncodedSample, ...]:
        """The sample itself, as the one sequence of tokens to store."""
        return (self,)


class EncodedPair(NamedTuple):
    """The tokens of a preference: of the prompt with its chosen and with its rejected answer."""

    chosen: EncodedSample
    rejected: EncodedSample

    @property
    def sequences(self) -> tuple[EncodedSample, ...]:
        """Both sequences of tokens, in the order in which they are stored."""
        return tuple(self)


Encoded = EncodedSample | EncodedPair


class _RenderedSample(NamedTuple):
    """The text of a sample. spans: the text to learn, as (start, end) in characters. is_plain:
    whether it is text without a chat template: the tokenizer's first tokens precede it, and the
    end-of-text token follows, to learn too. prompt_ends: {number of an answer's message: end of the
    prompt that the server renders before it}.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    is_plain: bool
    prompt_ends: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class SampleEncoder:
    """Encodes samples with a tokenizer whose control tokens are read from text.

    template: None if the model has none; conversations are then refused. first_tokens: ids with
    which the tokenizer begins every text (BOS), as the server does outside of chats.
    max_prompt_tokens: limit of the tokens before the first one to learn; 0 for none.
    """

    tokenizer: CorpusTokenizer
    template: ChatTemplate | None
    train_on: TrainOn
    first_tokens: tuple[int, ...]
    max_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        # a byte-level post-processor may trim white space from the offsets of tokens
        self.tokenizer.tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)

    @functools.cached_property
    def _tokens_that_strip_space(self) -> dict[int, str]:
        """The added tokens, by id, that also cover white space beside their own text."""
        added = self.tokenizer.tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.lstrip or token.rstrip}

    def _convert_content_for_template(
        self, messages: Sequence[JsonObject]
    ) -> tuple[JsonObject, ...]:
        """Return the messages with their content in the form that the template takes, as the server
        gives it.
        """
        assert self.template is not None
        if self.template.content_form != "parts":
            return tuple(messages)
        return tuple(m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages)

    def encode(self, samples: Sequence[Sample | PreferencePair]) -> list[Encoded | ValueError]:
        """Return each sample's tokens, or the ValueError that says why it cannot be trained on."""
        flat = [
            sequence
            for own in samples
            for sequence in (
                (own.chosen, own.rejected) if isinstance(own, PreferencePair) else (own,)
            )
        ]
        encoded = iter(self._encode_sequences(flat))
        return [
            _join_pair(next(encoded), next(encoded))
            if isinstance(own, PreferencePair)
            else next(encoded)
            for own in samples
        ]

    def _encode_sequences(self, samples: Sequence[Sample]) -> list[EncodedSample | ValueError]:
        rendered = [self._rendered_or_error(sample) for sample in samples]
        good = [one for one in rendered if isinstance(one, _RenderedSample)]
        texts = [one.text for one in good]
        self.tokenizer.check_characters_known(texts)
        encodings = iter(self.tokenizer.encode_with_offsets(texts))
        return [
            self._mark_trained_tokens(one, *next(encodings))
            if isinstance(one, _RenderedSample)
            else one
            for one in rendered
        ]

    def _rendered_or_error(self, sample: Sample) -> _RenderedSample | ValueError:
        try:
            return self._render(sample)
        except ValueError as error:
            return error

    def _mark_trained_tokens(
        self, rendered: _RenderedSample, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> EncodedSample | ValueError:
        """Return the sample with the tokens to learn: those that hold a character of a span."""
        offsets = self._offsets_without_stripped_space(rendered.text, ids, offsets)
        for i, end in rendered.prompt_ends.items():
            if not self._keeps_served_tokens(rendered.text, ids, offsets, end):
                return _other_tokens_error(i, rendered.text[:end])
        begins, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, begins + 1)
        trained = np.zeros(len(ids), np.bool_)
        for start, end in rendered.spans:
            trained |= (ends > start) & (begins < end)
        if rendered.is_plain:
            first = self.first_tokens
            ids = [*first, *ids, self.tokenizer.eot]
            trained = np.concatenate([np.zeros(len(first), np.bool_), trained, [True]])
        text_bytes = len(rendered.text.encode())
        sample = EncodedSample(np.asarray(ids, np.uint32), trained, text_bytes)
        if not sample.num_trained:
            return ValueError("has no token to learn")
        prompt_tokens, limit = int(np.argmax(sample.trained[1:])) + 1, self.max_prompt_tokens
        if limit and prompt_tokens > limit:
            return ValueError(
                f"the prompt has {prompt_tokens} tokens, more than data.max_prompt_tokens = {limit}"
            )
        return sample

    def _keeps_served_tokens(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], end: int
    ) -> bool:
        """Return whether the tokens of the whole text begin with those of the prompt `text[:end]`.

        Text after an added token is tokenized independently of what precedes it, so the comparison
        begins at the prompt's last added token.
        """
        stop = bisect.bisect_left(offsets, end, key=lambda span: span[0])
        added = self._added_tokens
        start = next((i for i in reversed(range(stop)) if ids[i] in added), 0)
        begin = offsets[start][0] if start else 0
        return self._token_ids(text[begin:end]) == tuple(ids[start:stop])

    @functools.cached_property
    def _added_tokens(self) -> frozenset[int]:
        """The ids of the tokens that the tokenizer finds before it splits the rest of a text."""
        return frozenset(self.tokenizer.tokenizer.get_added_tokens_decoder())

    @functools.cached_property
    def _token_ids(self) -> Callable[[str], tuple[int, ...]]:
        """A function that returns a text's tokens; it remembers the ends of recent prompts, which
        most answers share.
        """
        return functools.lru_cache(256)(lambda text: tuple(self.tokenizer.encode([text])[0]))

    def _offsets_without_stripped_space(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Return the tokens' offsets (ranges of characters in `text`), changed for added tokens
        that also cover the white space beside their text: these get the range of their text alone.

        Such white space may belong to an answer while the token marks the next role.
        """
        stripping = self._tokens_that_strip_space
        if not stripping:
            return offsets
        own = list(offsets)
        for i, token in enumerate(ids):
            content = stripping.get(token)
            if content is not None and (at := text.find(content, *own[i])) >= 0:
                own[i] = (at, at + len(content))
        return own

    def _render(self, sample: Sample) -> _RenderedSample:
        if not isinstance(sample, Conversation):
            text = sample.prompt + sample.completion
            start = 0 if self.train_on == "all" else len(sample.prompt)
            return _RenderedSample(text, [(start, len(text))], is_plain=True, prompt_ends={})
        if self.template is None:
            raise ValueError(
                "messages: the tokenizer's folder has no chat template; give data.chat_template, or"
                " write prompt and completion as text"
            )
        sample = replace(sample, messages=self._convert_content_for_template(sample.messages))
        if self.train_on == "all":
            text = self.template.render(
                sample.messages, add_generation_prompt=False, **sample.variables
            )
            return _RenderedSample(text, [(0, len(text))], is_plain=False, prompt_ends={})
        answers = [i for i, learned in enumerate(sample.is_answer) if learned]
        if not answers:
            raise ValueError("messages: has no answer to learn (a message with role assistant)")
        if self.train_on == "last_answer":
            answers = answers[-1:]
            last = answers[0] + 1
            sample = replace(
                sample, messages=sample.messages[:last], is_answer=sample.is_answer[:last]
            )
        if self.template.marks_answers:
            text, spans = self._render_marked_answers(self.template, sample, answers)
            ends = self._prompt_ends(self.template, sample, answers, text)
        else:
            text, spans = self._render_and_find_answers(self.template, sample, answers)
            ends = {i: start for i, (start, _) in zip(answers, spans, strict=True)}
        return _RenderedSample(text, spans, is_plain=False, prompt_ends=ends)

    def _prompt_ends(
        self, template: ChatTemplate, sample: Conversation, answers: Sequence[int], text: str
    ) -> dict[int, int]:
        """Return the end of the served prompt before each answer, without answers whose prompt is
        no prefix of `text`.
        """
        prompts = {
            i: template.render(sample.messages[:i], add_generation_prompt=True, **sample.variables)
            for i in answers
            if i > 0
        }
        return {i: len(prompt) for i, prompt in prompts.items() if text.startswith(prompt)}

    def _render_marked_answers(
        self, template: ChatTemplate, sample: Conversation, answers: Sequence[int]
    ) -> RenderedAnswers:
        """Return the conversation's text, and of the spans that the template marks with `{%
        generation %}` those of the messages with the numbers `answers`.

        Raises ValueError if the template does not mark every assistant message and only some are
        wanted.
        """
        text, spans = template.render_with_answers(sample.messages, **sample.variables)
        written = [i for i, m in enumerate(sample.messages) if m["role"] == "assistant"]
        if answers == written:
            return RenderedAnswers(text, spans)
        if len(spans) != len(written):
            raise ValueError(
                f"messages: the chat template marks {len(spans)} answers of {len(written)}, so that"
                " some of them alone cannot be learned; data.train_on = 'answers' without weight 0"
                " learns all"
            )
        return RenderedAnswers(text, [spans[written.index(i)] for i in answers])

    def _render_and_find_answers(
        self, template: ChatTemplate, sample: Conversation, answers: Sequence[int]
    ) -> RenderedAnswers:
        """Return the conversation's text and the span of each answer: from the end of the prompt
        before the answer, as the server renders it, to the end of the conversation up to the
        answer.

        Raises ValueError if such a prompt or conversation is no prefix of the whole text.
        """
        messages, variables = sample.messages, sample.variables
        text = template.render(messages, add_generation_prompt=False, **variables)
        spans = []
        for i in answers:
            if i == 0:
                raise ValueError(
                    "messages[0]: an answer before any question cannot be learned; give it weight 0"
                )
            prompt = template.render(messages[:i], add_generation_prompt=True, **variables)
            answered = (
                template.render(messages[: i + 1], add_generation_prompt=False, **variables)
                if i + 1 < len(messages)
                else text
            )
            if not (text.startswith(prompt) and text.startswith(answered)):
                raise _no_prefix_error(i, is_last=i + 1 == len(messages))
            spans.append((len(prompt), self._end_of_answer(text, len(prompt), len(answered))))
        return RenderedAnswers(text, spans)

    def _end_of_answer(self, text: str, start: int, end: int) -> int:
        """Return the end of an answer's last control token, if only white space follows it: the
        server stops there. `end` if there is none.
        """
        answer = text[start:end].rstrip()
        return start + len(answer) if answer.endswith(self.tokenizer.control_tokens) else end


def _join_pair(
    chosen: EncodedSample | ValueError, rejected: EncodedSample | ValueError
) -> EncodedPair | ValueError:
    """Return the pair, or the ValueError of its first answer that cannot be trained on."""
    for name, own in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(own, ValueError):
            return ValueError(f"{name}: {own}")
    assert isinstance(chosen, EncodedSample) and isinstance(rejected, EncodedSample)
    if np.array_equal(chosen.ids, rejected.ids):
        return ValueError("chosen, rejected: have the same tokens, so there is nothing to prefer")
    return EncodedPair(chosen, rejected)


def _no_prefix_error(i: int, *, is_last: bool) -> ValueError:
    """Return the ValueError for message `i`, an answer whose span in the text cannot be found from
    prefixes. is_last: it is the last message, so its own prompt is no prefix of the text.
    """
    why = (
        "the chat template begins this answer otherwise than its prompt ends, so that the trained"
        " format would not be the served one; --data.train-on all learns every token"
        if is_last
        else "the chat template renders this answer, or what is before it, otherwise once later"
        " messages follow (many leave out old reasoning); --data.train-on last_answer learns the"
        " last answer of each conversation"
    )
    return ValueError(f"messages[{i}]: {why}")


def _other_tokens_error(i: int, prompt: str) -> ValueError:
    """Return the ValueError for message `i`, an answer whose first characters are joined to one
    token with the end of its prompt.
    """
    return ValueError(
        f"messages[{i}]: the prompt that the chat template makes for this answer ends with"
        f" {prompt[-8:]!r}, whose tokens change once the answer follows, so that the trained tokens"
        " would not be the served ones; remove white space from the answer's beginning, or give"
        " data.chat_template one whose prompt ends with a control token"
    )


def sample_encoding_fingerprint(config: DataConfig, tokenizer_path: Path) -> Json:
    """Return what decides how samples become tokens, besides the content of the tokenizer's file:
    the chat template, and what the files beside the tokenizer add to it. No path is part of it.
    """
    settings = read_template_settings(config, tokenizer_path.parent)
    if settings is not None:
        settings = {name: value for name, value in settings.items() if name != "source"}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    tokenizer = open_tokenizer(tokenizer_path)
    added = [
        [i, token.content, *(getattr(token, option) for option in ADDED_TOKEN)]
        for i, token in sorted(tokenizer.get_added_tokens_decoder().items())
    ]
    # only if set: prepared folders of earlier versions keep their hash
    only_if_set = ("preferences", "max_prompt_tokens")
    return {
        **{name: getattr(config, name) for name in only_if_set if getattr(config, name)},
        "template": digest,
        "train_on": config.train_on,
        "added_tokens": hashlib.sha256(json.dumps(added).encode()).hexdigest(),
        "first_tokens": _leading_token_ids(tokenizer),
    }


def _leading_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids with which the tokenizer begins every text; () for most tokenizers."""
    encoding = tokenizer.encode("a")
    is_own = [sequence is not None for sequence in encoding.sequence_ids]
    return tuple(encoding.ids[: is_own.index(True)]) if any(is_own) else ()


def read_template_settings(config: DataConfig, folder: Path) -> Json:
    """Return the arguments of `ChatTemplate`: the file `data.chat_template`, or else the templates
    of the tokenizer's folder; None if there are none.

    Raises ValueError for a missing or damaged file.
    """
    if config.chat_template is None:
        return read_templates(folder)
    path = Path(config.chat_template).expanduser()
    if not path.is_file():
        raise ValueError(f"data.chat_template = {config.chat_template!r}: no such file")
    special = special_token_texts(read_json_if_present(folder / SETTINGS), folder)
    return {
        "templates": {DEFAULT: path.read_text(encoding="utf-8")},
        "special_tokens": special,
        "source": str(path),
    }


def make_sample_encoder(
    config: DataConfig, tokenizer: CorpusTokenizer, begun: datetime | None = None
) -> SampleEncoder:
    """Return the encoder of a run's samples. Raises ValueError for a damaged chat template.

    Templates that write the date write `begun`, by default the time of this call, into all samples.
    """
    begun = begun or datetime.now()
    setup = read_template_settings(config, tokenizer.path.parent)
    template = None if setup is None else ChatTemplate(**setup, now=lambda: begun)
    first = _leading_token_ids(tokenizer.tokenizer)
    return SampleEncoder(tokenizer, template, config.train_on, first, config.max_prompt_tokens)


def encode_in_batches(
    encoder: SampleEncoder, samples: Iterable[tuple[int, Sample | PreferencePair]], size: int = 256
) -> Iterable[tuple[int, Encoded | ValueError]]:
    """Yield (number, encoded sample or its error) for each (number, sample), in order."""
    left = iter(samples)
    while batch := list(itertools.islice(left, size)):
        encoded = encoder.encode([sample for _, sample in batch])
        yield from zip((number for number, _ in batch), encoded, strict=True)
