"""Channels of gpt-oss's answers, token by token."""

from collections.abc import Iterable

import numpy as np
import pytest
from tokenizers import Tokenizer

from jmoe.data.tokenizer import train_bpe
from jmoe.inference.harmony import AnswerConstraint, ChannelStream, HarmonyTokens
from jmoe.inference.output_events import (
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    join_content,
)
from jmoe.inference.sampling_params import Unconstrained
from tests.scripted_model import harmony_tokenizer

PROMPT = (
    "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>2+2<|end|><|start|>assistant"
)
TOKENIZER = harmony_tokenizer()


def stream(
    prompt: str = PROMPT, tokenizer: Tokenizer = TOKENIZER, **options: object
) -> ChannelStream:
    harmony = HarmonyTokens.detect(tokenizer)
    assert harmony is not None
    return ChannelStream(tokenizer, harmony, tokenizer.encode(prompt).ids, **options)  # type: ignore[arg-type]


def texts(events: Iterable[OutputEvent]) -> tuple[str, str]:
    """(content, reasoning)"""
    events = list(events)
    reasoning = (event.text for event in events if isinstance(event, ReasoningDelta))
    return join_content(events), "".join(reasoning)


@pytest.mark.parametrize(
    ("said", "answer", "reasoning"),
    [
        (
            (
                "<|channel|>analysis<|message|>User:"
                " 日本<|end|><|start|>assistant<|channel|>final<|message|>🎉 4"
            ),
            "🎉 4",
            "User: 日本",
        ),
        ("<|channel|>final<|message|>4<|return|>", "4", ""),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "", "{}"),
        (
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
                "<|start|>assistant<|channel|>final<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d"
            ),
            "c\nd",
            "a\nb",
        ),
        ("<|message|>no channel", "no channel", ""),
        ("no format at all", "no format at all", ""),
        (
            "no format, and longer than a header can be. " * 3,
            "no format, and longer than a header can be. " * 3,
            "",
        ),
        ("<|channel|>analysis<|message|>cut he", "", "cut he"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant", "", "a"),
        ("<|channel|>ana", "", ""),
        ("", "", ""),
    ],
)
def test_channels(said: str, answer: str, reasoning: str) -> None:
    """However the tokens come, nothing of a header is text, and nothing of a message is lost."""
    tokens, channels = TOKENIZER.encode(said).ids, stream()
    events = [event for token in tokens for event in channels.push([token])] + channels.flush()
    assert texts(events) == (answer, reasoning)
    channels = stream()
    assert texts(channels.push(tokens) + channels.flush()) == (answer, reasoning)


CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
OTHER_ORDER = " to=functions.g<|channel|>commentary json<|message|>"


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        (CALL + '{"a": "日"}<|call|>', [("f", '{"a": "日"}')]),
        (CALL + '{"a": 1', [("f", '{"a": 1')]),
        (
            CALL + '{"a": "日 }{ 🎉", "b": {"at": [1, {"c": null}]}}<|call|>',
            [("f", '{"a": "日 }{ 🎉", "b": {"at": [1, {"c": null}]}}')],
        ),
        ("<|channel|>commentary to=functions. json<|message|>{}<|call|>", []),
        ("<|channel|>commentary to=functions.f", []),
        (CALL + "<|call|>", [("f", "{}")]),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assistant" + CALL + "{}", [("f", "{}")]),
        (CALL + "1<|end|><|start|>assistant" + OTHER_ORDER + "2<|call|>", [("f", "1"), ("g", "2")]),
        ("<|channel|>analysis to=browser.search<|message|>{}<|call|>", []),
    ],
)
def test_messages_to_functions_are_calls(said: str, calls: list[tuple[str, str]]) -> None:
    """Where the request has tools; a call of a tool that only the model has is reasoning, and so is
    one without a name. The same token by token and cut in two at every token.
    """
    tokens = TOKENIZER.encode(said).ids
    cuts = [[tokens[:at], tokens[at:]] for at in range(len(tokens))]
    for split in [[[token] for token in tokens], *cuts]:
        channels, events = stream(has_tools=True), list[OutputEvent]()
        for piece in split:
            events += channels.push(piece)
        events += channels.flush()
        assert texts(events)[0] == ""
        begun = [event for event in events if isinstance(event, ToolCallBegin)]
        pieces = [event for event in events if isinstance(event, ToolCallArguments)]
        written = [
            (call.name, "".join(piece.text for piece in pieces if piece.index == call.index))
            for call in begun
        ]
        ended = [event.index for event in events if isinstance(event, ToolCallEnd)]
        assert written == calls and ended == [call.index for call in begun]
        assert len({call.id for call in begun}) == len(begun)


def test_the_last_allowed_call_ends_the_output() -> None:
    channels = stream(has_tools=True, max_calls=1)
    channels.push(TOKENIZER.encode(CALL + "{}").ids)
    assert not channels.has_ended
    channels.push(TOKENIZER.encode("<|end|><|start|>assistant" + CALL + "{}").ids)
    assert channels.has_ended and channels.flush() == []


def test_tokens_of_the_reasoning_are_counted() -> None:
    """Its text and the token that ends it, not headers."""
    channels = stream()
    channels.push(TOKENIZER.encode("<|channel|>analysis<|message|>xyz<|end|><|start|>assist").ids)
    assert channels.num_reasoning_tokens == 4


def test_text_goes_out_as_it_comes() -> None:
    """A letter a token, once the header is over."""
    channels, pieces = stream(), []
    for token in TOKENIZER.encode("<|channel|>analysis<|message|>xyz<|end|>").ids:
        content, reasoning = texts(channels.push([token]))
        assert content == ""
        pieces.append(reasoning)
    assert [piece for piece in pieces if piece] == ["x", "y", "z"]


def test_a_stop_string_ends_the_answer_and_not_the_reasoning() -> None:
    channels = stream(stop=["4."])
    said = "<|channel|>analysis<|message|>So 4.<|end|>"
    assert texts(channels.push(TOKENIZER.encode(said).ids)) == ("", "So 4.")
    assert not channels.has_ended
    said = "<|start|>assistant<|channel|>final<|message|>It is 4"
    assert texts(channels.push(TOKENIZER.encode(said).ids)) == ("It is ", "")
    assert not channels.has_ended, "held back: it may be a stop string's beginning"
    assert channels.push(TOKENIZER.encode(". Never").ids) == [] and channels.has_ended
    assert channels.flush() == []


def test_the_prompt_may_begin_the_message() -> None:
    """As templates that leave the reasoning out do; a prompt of another format is answered in
    it.
    """
    begun = stream(PROMPT + "<|channel|>final<|message|>")
    four = TOKENIZER.encode("four").ids
    assert texts(begun.push(four) + begun.flush()) == ("four", "")
    begun = stream(PROMPT + "<|channel|>analysis<|message|>I think")
    assert texts(begun.push(four)) == ("", "four")
    plain = stream("2+2=")
    assert texts(plain.push(four) + plain.flush()) == ("four", "")


def test_other_tokenizers_have_no_channels() -> None:
    assert HarmonyTokens.detect(train_bpe(["text"], 300)) is None


class Recorded(Unconstrained):
    """Allows token 5 alone, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = 0
        words_W[0] = 1 << 5

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)


def allowed(constraint: AnswerConstraint) -> set[int]:
    words = np.zeros(-(-TOKENIZER.get_vocab_size() // 32), np.int32)
    constraint.fill_next_token_bitmask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_a_constraint_of_the_answer_begins_with_it() -> None:
    """Before it a channel must be named, and the turn cannot end; its text alone reaches the
    grammar.
    """
    harmony, inner = HarmonyTokens.detect(TOKENIZER), Recorded()
    assert harmony is not None
    ends = [0, TOKENIZER.token_to_id("<|return|>")]
    constraint = AnswerConstraint(inner, TOKENIZER, harmony, TOKENIZER.encode(PROMPT).ids, ends)
    assert allowed(constraint) == {harmony.channel}
    free = set(range(-(-TOKENIZER.get_vocab_size() // 32) * 32)) - set(ends)
    before = "<|channel|>analysis<|message|>a 5<|end|><|start|>assistant<|channel|>final<|message|>"
    for token in TOKENIZER.encode(before).ids:
        constraint.accept(token)
        assert allowed(constraint) in (free, {5})
    assert allowed(constraint) == {5} and inner.told == []
    constraint.accept(5)
    assert inner.told == [5]


@pytest.mark.parametrize("prompt", [PROMPT + "<|channel|>final<|message|>", "2+2="])
def test_a_constraint_of_an_answer_that_has_begun(prompt: str) -> None:
    harmony = HarmonyTokens.detect(TOKENIZER)
    assert harmony is not None
    constraint = AnswerConstraint(Recorded(), TOKENIZER, harmony, TOKENIZER.encode(prompt).ids, [0])
    assert allowed(constraint) == {5}
