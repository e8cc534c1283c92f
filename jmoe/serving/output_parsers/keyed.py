"""Formats that write each argument between tags: GLM-4.5 and Qwen3-Coder. A string stands there
without quotes; the tool's JSON schema says which arguments are strings.

Sources: chat templates of https://huggingface.co/zai-org/GLM-4.5 and Qwen/Qwen3-Coder-480B-A35B
"""

from __future__ import annotations

import json

from jmoe.serving.output_parsers.parser import OutputParser
from jmoe.serving.output_parsers.scanner import SPACE, Steps, parse_json
from jmoe.types import Json, JsonObject

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# a model may forget `</parameter>`; the tag that follows then begins a line
PARAMETER_ENDS = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)


_JSON_TYPES: dict[type, set[str]] = {
    dict: {"object"},
    list: {"array"},
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
}


def allows_only_strings(schema: Json) -> bool:
    """Return whether a JSON schema allows strings alone."""
    if not isinstance(schema, dict):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


class KeyedParser(OutputParser):
    """Collects arguments one at a time into a JSON object."""

    _num_arguments = 0
    _schema: JsonObject

    def begin_keyed_call(self, name: str) -> None:
        """Begin a call; arguments follow by `parse_keyed_argument`."""
        parameters = (self.settings.parameters or {}).get(name, {})
        properties = parameters.get("properties")
        self._schema = properties if isinstance(properties, dict) else {}
        self._num_arguments = 0
        self.begin_call(name)

    def parse_keyed_argument(self, key: str, ends: tuple[str, ...]) -> Steps[str]:
        """Emit the argument `key`, whose value is the text up to one of `ends`; return that end.

        A string is emitted as it comes; other values once they are complete, because a text that is
        no JSON counts as a string.
        """
        schema = self._schema.get(key)
        begin = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self.emit_arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
        if allows_only_strings(schema):
            self.emit_arguments('"')
            end = yield from self.emit_until(
                ends, lambda text: self.emit_arguments(_escape_for_json_string(text))
            )
            self.emit_arguments('"')
            return end
        text, end = yield from self.read_until(*ends)
        self.emit_arguments(_argument_as_json(text.strip(), schema))
        return end

    def end_keyed_call(self) -> None:
        """Close the object of arguments, and the call."""
        if self._num_arguments:
            self.emit_arguments("}")
        self.end_call()


def _escape_for_json_string(text: str) -> str:
    """Return text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _argument_as_json(text: str, schema: Json) -> str:
    """Return the text of an argument as JSON: itself, or a string if it is none."""
    if isinstance(schema, dict) and schema.get("type") == "boolean":
        text = text.lower()  # models write Python's True
    value, types = parse_json(text), _type_names(schema)
    is_json = text == "null" or value is not None
    if "string" in types and not types & _JSON_TYPES[type(value)]:
        is_json = False  # `12` where the schema allows a string or null
    return text if is_json else json.dumps(text, ensure_ascii=False)


def _type_names(schema: Json) -> set[str]:
    """Return the types that a schema names, by itself or in its alternatives."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    names = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for one in alternatives if isinstance(alternatives, list) else ():
            names |= _type_names(one)
    return names


class GlmParser(KeyedParser):
    """GLM-4.5: `<tool_call>NAME`, keys and values in turn, `</tool_call>`."""

    opens = (BEGIN,)
    markers = (END, KEY, KEY_END, VALUE, VALUE_END)

    def parse_calls(self, marker: str) -> Steps[bool]:
        name, marker = yield from self.read_until(KEY, END)
        if not marker or not self.is_function_name(name.strip()):
            return False
        self.begin_keyed_call(name.strip())
        while marker == KEY:
            key, marker = yield from self.read_until(KEY_END, END)
            yield from self.skip_characters()
            if marker == KEY_END and (yield from self.consume_if_next(VALUE)):
                marker = yield from self.parse_keyed_argument(key.strip(), (VALUE_END,))
                yield from self.skip_characters()
                marker = KEY if (yield from self.consume_if_next(KEY)) else ""
        yield from self.consume_if_next(END)
        self.end_keyed_call()
        return True


class QwenCoderParser(KeyedParser):
    """Qwen3-Coder: `<function=NAME>` with a `<parameter=KEY>` for each argument, in
    `<tool_call>`, which the model sometimes leaves out.
    """

    opens = (BEGIN, FUNCTION)
    markers = (END,)

    def parse_calls(self, marker: str) -> Steps[bool]:
        yield from self.skip_characters()
        if marker == BEGIN and not (yield from self.consume_if_next(FUNCTION)):
            return False
        name, end = yield from self.read_until(">", "\n")
        name = name.strip()
        is_call = self.is_function_name(name) if marker == BEGIN else self.is_requested_tool(name)
        if end != ">" or not is_call:
            return False
        self.begin_keyed_call(name)
        end = ""
        while end != FUNCTION_END:
            yield from self.skip_characters(SPACE)
            if end != PARAMETER and not (yield from self.consume_if_next(PARAMETER)):
                break
            key, _ = yield from self.read_until(">")
            yield from self.consume_if_next("\n")
            end = (yield from self.parse_keyed_argument(key.strip(), PARAMETER_ENDS)).strip()
        if end != FUNCTION_END:
            yield from self.consume_if_next(FUNCTION_END)
        yield from self.skip_characters(SPACE)
        yield from self.consume_if_next(END)
        self.end_keyed_call()
        return True
