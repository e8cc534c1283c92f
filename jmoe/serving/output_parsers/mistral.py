"""Mistral: `[TOOL_CALLS]` with a JSON array of calls, or since its 11th tokenizer
`[TOOL_CALLS]NAME[ARGS]{...}` a call.

Source: https://github.com/mistralai/mistral-common (its instruct tokenizers)
"""

from __future__ import annotations

import secrets
import string

from jmoe.serving.output_parsers.parser import OutputParser
from jmoe.serving.output_parsers.scanner import SPACE, Steps

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ALPHABET, ID_LENGTH = string.ascii_letters + string.digits, 9


class MistralParser(OutputParser):
    """Calls after the marker in either form."""

    opens = (BEGIN,)
    markers = (ARGUMENTS, CALL_ID)

    def make_call_id(self, index: int, name: str) -> str:
        """Return nine letters or digits: the templates refuse other ids."""
        return "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))

    def parse_calls(self, marker: str) -> Steps[bool]:
        first = yield from self.skip_characters()
        if first == "[":
            yield from self.consume_if_next("[")
            return (yield from self._parse_json_calls()) and (yield from self.consume_if_next("]"))
        if first == "{":
            return (yield from self._parse_json_calls())
        return (yield from self._parse_named_call())

    def _parse_json_calls(self) -> Steps[bool]:
        """Parse calls that are JSON objects; return whether all of them are in this form."""
        while (yield from self.skip_characters(SPACE + ",")) == "{":
            if not (yield from self.parse_json_call()):
                return self._call is not None
            self.end_call()
        return True

    def _parse_named_call(self) -> Steps[bool]:
        """Parse a name, an optional id and arguments; return whether they are a call."""
        name, marker = yield from self.read_until(ARGUMENTS, CALL_ID, BEGIN, "{")
        call_id = None
        if marker == CALL_ID:
            call_id, marker = yield from self.read_until(ARGUMENTS, BEGIN)
        if marker not in (ARGUMENTS, "{") or not self.is_function_name(name.strip()):
            return False
        self.begin_call(name.strip(), call_id and call_id.strip())
        if marker == "{":
            self._text = "{" + self._text
        yield from self.skip_characters()
        yield from self.emit_json_value(self.emit_arguments)
        return True
