"""Streams of events: special tokens that a parser sees, stop strings, and the end after calls."""

import pytest
from tokenizers import AddedToken

from jmoe.data.tokenizer import train_bpe
from jmoe.inference.output_events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallEnd,
    join_content,
)
from jmoe.inference.parsed_stream import EventFilter, ParsedStream, special_token_texts_by_id

TOKENIZER = train_bpe(["some words of text"], 300)
TOKENIZER.add_special_tokens([AddedToken("<call>"), AddedToken("<other>")])
VISIBLE = special_token_texts_by_id(TOKENIZER, {"<call>", "text"})


class Echo:
    """Returns text up to `;` as reasoning, and the rest as content."""

    in_reasoning = True

    def feed(self, text: str) -> list[OutputEvent]:
        if self.in_reasoning:
            reasoning, end, text = text.partition(";")
            self.in_reasoning = not end
            return [ReasoningDelta(reasoning), ContentDelta(text)]
        return [ContentDelta(text)]

    def finish(self) -> list[OutputEvent]:
        return [ContentDelta("!")]


def content(text: str, size: int, **options: object) -> tuple[str, ParsedStream]:
    stream = ParsedStream(TOKENIZER, Echo(), VISIBLE, [], **options)  # type: ignore[arg-type]
    tokens, events = TOKENIZER.encode(text).ids, list[OutputEvent]()
    for start in range(0, len(tokens), size):
        events += stream.push(tokens[start : start + size])
    return join_content(events + stream.flush()), stream


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_special_tokens_are_text_where_the_parser_sees_them(size: int) -> None:
    """In their place, between characters of several bytes; others have no text."""
    assert content("hm; 日<call>本<other> x", size)[0] == " 日<call>本 x!"


def test_an_incomplete_character_before_a_special_token() -> None:
    tokens = [*TOKENIZER.encode(";日").ids[:-1], TOKENIZER.token_to_id("<call>")]
    stream = ParsedStream(TOKENIZER, Echo(), VISIBLE)
    assert join_content(stream.push(tokens)) == "\ufffd<call>"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_end_the_content_alone(size: int) -> None:
    found, stream = content("so stop;a stop b", size, stop=("stop",))
    assert found == "a " and stream.has_ended
    found, stream = content("so stop;a sto", size, stop=("stop",))
    assert found == "a sto!" and not stream.has_ended
    assert content(";stop ab", size, stop=("stop",), min_new_tokens=1000)[0] == "stop ab!"


def test_tokens_of_the_reasoning_are_counted() -> None:
    """With the token that ends it."""
    for size in (1, 1000):
        assert content("xyz;abc", size)[1].num_reasoning_tokens == 4


def test_no_stop_string_spans_a_call() -> None:
    """Content after a call is not cut by the state that content before it left."""
    calls = [ToolCallBegin(0, "a", "f"), ToolCallEnd(0)]
    cut = EventFilter(("xxxx",), None)
    passed = cut.filter_events([ContentDelta("axxx"), *calls, ContentDelta("x and more")])
    assert join_content(passed) == "axxxx and more" and not cut.has_ended


def test_events_end_after_the_last_call() -> None:
    calls = [ToolCallBegin(0, "a", "f"), ToolCallEnd(0), ToolCallBegin(1, "b", "f"), ToolCallEnd(1)]
    limited = EventFilter((), 1)
    assert limited.filter_events(calls) == calls[:2] and limited.has_ended
    assert limited.filter_events([ContentDelta("x")]) == []
    free = EventFilter(("xy",), None)
    assert free.filter_events([ContentDelta("ax"), *calls]) == [
        ContentDelta("a"),
        ContentDelta("x"),
        *calls,
    ]
    assert not free.has_ended
