"""Samples for fine-tuning, from the records of JSON files: conversations, completions of a prompt,
and texts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jmoe.types import Json, JsonObject

# fields under which records hold a conversation
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")
# names of ShareGPT and of chat data that follows it -> roles of a chat template
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
ANSWER_FIELDS = ("chosen", "rejected")
FORMS = (
    "messages, conversations, prompt and completion, instruction and output, or the field that"
    " data.field names"
)


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them.

    is_answer: for each message, whether it is an answer to learn. variables: further variables of
    the template, such as `tools`.
    """

    messages: tuple[JsonObject, ...]
    is_answer: tuple[bool, ...]
    variables: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class PlainText:
    """A text to learn after a prompt, without a chat template. prompt: "" for a text alone."""

    prompt: str
    completion: str


Sample = Conversation | PlainText


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, of which `chosen` is preferred to `rejected`."""

    chosen: Sample
    rejected: Sample


def holds_sample(record: Json, text_field: str) -> bool:
    """Return whether a record is a sample for fine-tuning, rather than a text in `text_field`."""
    if not isinstance(record, dict) or isinstance(record.get(text_field), str):
        return False
    return record.keys() >= set(ANSWER_FIELDS) or _reader_of(record, text_field) is not None


def parse_sample(record: Json, text_field: str) -> Sample:
    """Return the sample in a record.

    A record has one of these forms: `messages` with role and content (OpenAI; `tools` beside them,
    `reasoning_content` and `tool_calls` in them, `weight` 0 for an answer not to learn);
    `conversations` with from and value (ShareGPT); `prompt` and `completion`, both as text or both
    as messages; `instruction`, `input` and `output` (alpaca); or a text in `text_field`. If
    `text_field` holds a list, that is the conversation.

    Raises ValueError that says what is wrong with the record.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    if isinstance(record.get(text_field), str):
        return PlainText("", _check_not_empty(_required_text(record, text_field), text_field))
    reader = _reader_of(record, text_field)
    if reader is None:
        if record.keys() >= set(ANSWER_FIELDS):
            raise ValueError(
                "chosen, rejected: is a preference, which data.preferences reads and dpo.beta"
                " trains on"
            )
        raise ValueError(f"has {', '.join(record) or 'nothing'}; must have {FORMS}")
    return reader(record)


def parse_preference(record: Json) -> PreferencePair:
    """Return the pair of answers in a record with `chosen` and `rejected`.

    The prompt is `prompt`, text or messages; or `messages` (`conversations`) before an answer that
    is one message or text; or the messages with which `chosen` and `rejected` both begin. Answers
    of the prompt are not learned.

    Raises ValueError that says what is wrong with the record.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, not an object")
    for name in ANSWER_FIELDS:
        if record.get(name) is None:
            fields = ", ".join(record) or "nothing"
            raise ValueError(f"{name}: is missing from a preference; the record has {fields}")
    if isinstance(record["chosen"], str) != isinstance(record["rejected"], str):
        raise ValueError("chosen, rejected: must both be text or both be messages")
    if isinstance(record["chosen"], str) and isinstance(record.get("prompt"), str):
        pair = PreferencePair(*(_plain_answer(record, name) for name in ANSWER_FIELDS))
    else:
        pair = _conversation_pair(record)
    if pair.chosen == pair.rejected:
        raise ValueError("chosen, rejected: are equal, so there is nothing to prefer")
    return pair


def _plain_answer(record: JsonObject, name: str) -> PlainText:
    return PlainText(
        _required_text(record, "prompt"), _check_not_empty(_required_text(record, name), name)
    )


def _conversation_pair(record: JsonObject) -> PreferencePair:
    """Return the pair of conversations in a preference. Raises ValueError for an empty answer, and
    for answers without a prompt.
    """
    chosen, rejected = (_answer_messages(record, name) for name in ANSWER_FIELDS)
    prompt = _preference_prompt(record)
    if not prompt:
        pairs = zip(chosen.messages, rejected.messages, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        prompt = tuple(message for message, _ in same)
    if not prompt:
        raise ValueError(
            "prompt: is missing; chosen and rejected do not begin with the same messages"
        )
    if all(own.messages[: len(prompt)] == prompt for own in (chosen, rejected)):
        chosen, rejected = (_without_first(own, len(prompt)) for own in (chosen, rejected))
    for name, answer in zip(ANSWER_FIELDS, (chosen, rejected), strict=True):
        if not any(answer.is_answer):
            raise ValueError(f"{name}: holds no answer (a message with role assistant)")
    system = record.get("system")
    if isinstance(system, str) and system and prompt[0]["role"] != "system":
        prompt = (_make_message("system", system), *prompt)
    return PreferencePair(*(_with_prompt(prompt, answer) for answer in (chosen, rejected)))


def _preference_prompt(record: JsonObject) -> tuple[JsonObject, ...]:
    """Return the messages of a preference's prompt; () if only its answers have them. A text is a
    question, which answers that begin with their prompt repeat.
    """
    prompt, chosen = record.get("prompt"), record["chosen"]
    if isinstance(prompt, str):
        text = _check_not_empty(_required_text(record, "prompt"), "prompt")
        question = _make_message("user", text)
        if not isinstance(chosen, list) or _read_messages(chosen, "chosen")[1][0]:
            return (question,)
        if question not in _read_messages(chosen, "chosen")[0]:
            raise ValueError("prompt: is none of the messages with which chosen begins")
        return ()
    if prompt is not None:
        return tuple(_read_messages(prompt, "prompt")[0])
    if isinstance(chosen, list):
        return ()
    for name in CONVERSATION_FIELDS:
        if isinstance(record.get(name), list):
            return tuple(_read_messages(record[name], name)[0])
    return ()


def _answer_messages(record: JsonObject, name: str) -> Conversation:
    """Return an answer of a preference as messages: it is text, one message, or several."""
    answer = record[name]
    if isinstance(answer, str):
        answer = [_make_message("assistant", _check_not_empty(_required_text(record, name), name))]
    elif isinstance(answer, dict):
        answer = [answer]
    elif not isinstance(answer, list):
        raise ValueError(f"{name}: is a {type(answer).__name__}, not text or messages")
    messages, is_answer = _read_messages(answer, name)
    return Conversation(tuple(messages), tuple(is_answer), _template_variables(record))


def _without_first(conversation: Conversation, number: int) -> Conversation:
    return replace(
        conversation,
        messages=conversation.messages[number:],
        is_answer=conversation.is_answer[number:],
    )


def _with_prompt(prompt: tuple[JsonObject, ...], answer: Conversation) -> Conversation:
    """Return a conversation whose prompt is not learned."""
    return replace(
        answer,
        messages=(*prompt, *answer.messages),
        is_answer=(*[False] * len(prompt), *answer.is_answer),
    )


def _reader_of(record: JsonObject, text_field: str) -> Callable[[JsonObject], Sample] | None:
    """Return the function that reads a record of this form; None for an unknown form."""
    for name in (text_field, *CONVERSATION_FIELDS):
        if isinstance(record.get(name), list):
            return lambda record: _read_conversation(record, name)
    if "prompt" in record and "completion" in record:
        return _read_completion
    if "instruction" in record and "output" in record:
        return _read_alpaca
    return None


def _read_conversation(record: JsonObject, name: str) -> Conversation:
    messages, is_answer = _read_messages(record[name], name)
    system = record.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages, is_answer = [_make_message("system", system), *messages], [False, *is_answer]
    return Conversation(tuple(messages), tuple(is_answer), _template_variables(record))


def _read_completion(record: JsonObject) -> Sample:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, _ = _read_messages(prompt, "prompt")
        after, is_answer = _read_messages(completion, "completion")
        known = (*[False] * len(before), *is_answer)
        return Conversation((*before, *after), known, _template_variables(record))
    return PlainText(
        _required_text(record, "prompt"),
        _check_not_empty(_required_text(record, "completion"), "completion"),
    )


def _read_alpaca(record: JsonObject) -> Conversation:
    asked = _required_text(record, "instruction")
    if record.get("input"):
        asked += "\n\n" + _required_text(record, "input")
    messages = [_make_message("user", asked)]
    if record.get("system"):
        messages.insert(0, _make_message("system", _required_text(record, "system")))
    answer = _make_message(
        "assistant", _check_not_empty(_required_text(record, "output"), "output")
    )
    return Conversation((*messages, answer), (*[False] * len(messages), True))


def _make_message(role: str, content: str) -> JsonObject:
    return {"role": role, "content": content}


def _required_text(record: JsonObject, name: str) -> str:
    text = record[name]
    if not isinstance(text, str):
        raise ValueError(f"{name}: is a {type(text).__name__}, not text")
    check_encodable(text, name)
    return text


def check_encodable(text: str, name: str) -> None:
    """Raise ValueError that names the field if the text has half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: half a surrogate pair at character {error.start}") from error


def _check_not_empty(text: str, name: str) -> str:
    """Return the text. Raises ValueError naming the field if it is blank."""
    if not text.strip():
        raise ValueError(f"{name}: is empty, so there is nothing to learn")
    return text


def _template_variables(record: JsonObject) -> JsonObject:
    """Return the variables of the chat template that a record gives beside its messages. Raises
    ValueError naming a field of the wrong type.
    """
    extra = record.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise ValueError(f"chat_template_kwargs: is a {type(extra).__name__}, not an object")
    variables = dict(extra)
    for name in ("tools", "documents"):
        value = _parse_if_json_text(record.get(name))
        if value:
            if not isinstance(value, list):
                raise ValueError(f"{name}: must be a list, or the JSON text of one")
            variables[name] = value
    return variables


def _parse_if_json_text(value: Json) -> Json:
    """Return the JSON value in a text, as some data sets write nested fields; `value` itself if it
    is none.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read_messages(entries: Json, name: str) -> tuple[list[JsonObject], list[bool]]:
    """Return (messages for a chat template, for each whether it is an answer to learn). Raises
    ValueError naming the message at fault.
    """
    if not entries:
        raise ValueError(f"{name}: is empty")
    messages, is_answer = list[JsonObject](), list[bool]()
    for i, entry in enumerate(entries):
        where = f"{name}[{i}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: is a {type(entry).__name__}, not an object")
        message = _normalize_message(entry, where)
        learned = message["role"] == "assistant" and _pop_weight(message, where) > 0
        if learned and not _has_content(message):
            raise ValueError(
                f"{where}: the answer is empty; leave the record out, or give it weight 0"
            )
        messages.append(message)
        is_answer.append(learned)
    return messages, is_answer


def _normalize_message(entry: JsonObject, where: str) -> JsonObject:
    """Return a message with role and content in OpenAI's form, without fields that are None. Raises
    ValueError for an unknown role or a content that is no text.
    """
    message = {name: value for name, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        message |= {"role": message.pop("from"), "content": message.pop("value", None)}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(dict.fromkeys(ROLES))
        raise ValueError(f"{where}: role = {role!r}: must be one of {known}")
    message["role"] = ROLES[role]
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        message["content"] = ""
    else:
        message["content"] = _content_text(content, where)
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return message


def _content_text(content: Json, where: str) -> str:
    """Return a message's content as one text; parts are joined by newlines, as by the server.
    Raises ValueError if the content is no text.
    """
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: content has a part that is no text; only text is trained")
        content = "\n".join(map(str, texts))
    if not isinstance(content, str):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{where}: content is {kind}, not text")
    check_encodable(content, f"{where}: content")
    return content


def _tool_calls(calls: Json, where: str) -> Sequence[Json]:
    """Return tool calls with their arguments as objects, which chat templates expect. Raises
    ValueError if they are not a list of objects.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: tool_calls must be a list of objects")
    parsed: list[Json] = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and "arguments" in function:
            own = function | {"arguments": _parse_if_json_text(function["arguments"])}
            call = call | {"function": own}
        parsed.append(call)
    return parsed


def _pop_weight(message: JsonObject, where: str) -> int:
    """Return the message's `weight`, which it loses: 1 to learn an answer, 0 not to. Raises
    ValueError for any other value.
    """
    weight = message.pop("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ValueError(f"{where}: weight = {weight!r}: must be 0 or 1")
    return int(weight)


def _has_content(message: JsonObject) -> bool:
    reasoning = [message.get(name) for name in REASONING_FIELDS]
    return bool(message["content"].strip() or message.get("tool_calls") or any(reasoning))
