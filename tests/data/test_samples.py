"""Records of samples for fine-tuning: what each form means, and what is wrong with a bad one."""

import json
from typing import Any

import pytest

from jmoe.data.samples import (
    Conversation,
    PlainText,
    PreferencePair,
    holds_sample,
    parse_preference,
    parse_sample,
)

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
PARSED_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("record", "messages", "is_answer", "variables"),
    [
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT], [False, True], {}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER, ASSISTANT],
            [False, True],
            {},
        ),
        (
            {"system": "s", "conversation": [USER, ASSISTANT]},
            [SYSTEM, USER, ASSISTANT],
            [False, False, True],
            {},
        ),
        (
            {"instruction": "q", "input": "", "output": "a"},
            [USER, ASSISTANT],
            [False, True],
            {},
        ),
        (
            {"instruction": "q", "input": "it", "output": "a", "system": "s"},
            [SYSTEM, {"role": "user", "content": "q\n\nit"}, ASSISTANT],
            [False, False, True],
            {},
        ),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
            [USER, ASSISTANT, USER, ASSISTANT],
            [False, False, False, True],
            {},
        ),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}]},
            [USER, ASSISTANT, USER, ASSISTANT],
            [False, False, False, True],
            {},
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}], "name": None},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "1"},
                    ASSISTANT | {"reasoning_content": "so"},
                ],
                "tools": json.dumps(TOOLS),
                "chat_template_kwargs": {"enable_thinking": True},
            },
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [PARSED_CALL]},
                {"role": "tool", "content": "1"},
                ASSISTANT | {"reasoning_content": "so"},
            ],
            [False, True, False, True],
            {"tools": TOOLS, "enable_thinking": True},
        ),
    ],
)
def test_conversations(
    record: Any, messages: list[Any], is_answer: list[bool], variables: dict[str, Any]
) -> None:
    before = json.dumps(record)
    assert holds_sample(record, "text")
    assert parse_sample(record, "text") == Conversation(
        tuple(messages), tuple(is_answer), variables
    )
    assert json.dumps(record) == before


def test_texts() -> None:
    assert parse_sample({"prompt": "q", "completion": " a"}, "text") == PlainText("q", " a")
    assert parse_sample({"text": "all"}, "text") == PlainText("", "all")
    assert parse_sample({"body": [USER, ASSISTANT]}, "body") == parse_sample(
        {"messages": [USER, ASSISTANT]}, "text"
    )
    # a text in data.field wins over a conversation beside it
    both = {"text": "all", "messages": [USER, ASSISTANT]}
    assert not holds_sample(both, "text") and parse_sample(both, "text") == PlainText("", "all")
    assert holds_sample({"text": "all", "body": [USER, ASSISTANT]}, "body")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([1], "a list, not an object"),
        ({}, "has nothing; must have messages, conversations, prompt and completion"),
        ({"id": 1, "question": "q"}, "has id, question; must have messages"),
        (
            {"chosen": "a", "rejected": "b"},
            "chosen, rejected: is a preference, which data.preferences",
        ),
        ({"messages": []}, "messages: is empty"),
        ({"messages": ["q"]}, r"messages\[0\]: is a str, not an object"),
        ({"messages": [{"content": "q"}]}, r"messages\[0\]: role = None: must be one of system"),
        ({"messages": [{"role": "bot", "content": "q"}]}, r"role = 'bot': must be one of system"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: content is nothing, not text"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int, not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "content has a part that is no text",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "content: half a surrogate pair at character 0",
        ),
        ({"messages": [USER, ASSISTANT | {"content": " "}]}, r"messages\[1\]: the answer is empty"),
        ({"messages": [USER, ASSISTANT | {"weight": 2}]}, "weight = 2: must be 0 or 1"),
        ({"messages": [USER, ASSISTANT | {"weight": True}]}, "weight = True: must be 0 or 1"),
        ({"messages": [USER, ASSISTANT | {"tool_calls": "f"}]}, "tool_calls must be a list of obj"),
        ({"messages": [USER, ASSISTANT], "tools": "f"}, "tools: must be a list, or the JSON text"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": 1}, "chat_template_kwargs: is a "),
        ({"prompt": "q", "completion": ""}, "completion: is empty, so there is nothing to learn"),
        ({"prompt": 1, "completion": "a"}, "prompt: is a int, not text"),
        ({"instruction": "q", "output": "\n"}, "output: is empty, so there is nothing to learn"),
        ({"text": " "}, "text: is empty, so there is nothing to learn"),
    ],
)
def test_bad_records(record: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_sample(record, "text")


BETTER, WORSE = ({"role": "assistant", "content": text} for text in ("good", "bad"))


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]}, [USER]),
        ({"chosen": [USER, BETTER], "rejected": [USER, WORSE]}, [USER]),
        ({"prompt": "q", "chosen": [USER, BETTER], "rejected": [USER, WORSE]}, [USER]),
        ({"prompt": "q", "chosen": [BETTER], "rejected": [WORSE], "system": "s"}, [SYSTEM, USER]),
        (
            {"messages": [USER, ASSISTANT, USER], "chosen": BETTER, "rejected": WORSE},
            [USER, ASSISTANT, USER],
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            [USER],
        ),
        # answers of the prompt are not learned
        (
            {"chosen": [USER, ASSISTANT, USER, BETTER], "rejected": [USER, ASSISTANT, USER, WORSE]},
            [USER, ASSISTANT, USER],
        ),
        ({"messages": [USER], "chosen": "good", "rejected": "bad"}, [USER]),
    ],
)
def test_preferences(record: dict[str, Any], prompt: list[Any]) -> None:
    pair, known = parse_preference(record), (*[False] * len(prompt), True)
    assert pair.chosen == Conversation((*prompt, BETTER), known)
    assert pair.rejected == Conversation((*prompt, WORSE), known)


def test_preferences_as_text() -> None:
    record = {"prompt": "q: ", "chosen": "good", "rejected": "bad"}
    pair = PreferencePair(PlainText("q: ", "good"), PlainText("q: ", "bad"))
    assert parse_preference(record) == pair and holds_sample(record, "text")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([1], "a list, not an object"),
        ({"prompt": "q", "chosen": "a"}, "rejected: is missing from a preference; the record has"),
        ({"chosen": "q a", "rejected": "q b"}, "prompt: is missing"),
        ({"chosen": [BETTER], "rejected": [WORSE]}, "prompt: is missing; chosen and rejected do"),
        ({"prompt": "q", "chosen": "a", "rejected": [WORSE]}, "must both be text or both be"),
        ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected: is empty"),
        (
            {"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE | {"content": ""}]},
            r"rejected\[0\]: the answer is empty",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen, rejected: are equal"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [WORSE]}, "chosen: holds no answer"),
        (
            {"prompt": "other", "chosen": [USER, BETTER], "rejected": [USER, WORSE]},
            "prompt: is none of the messages with which chosen begins",
        ),
    ],
)
def test_bad_preferences(record: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_preference(record)
