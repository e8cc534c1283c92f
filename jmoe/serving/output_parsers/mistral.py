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
        first = yield from self.skip()
        if first == "[":
            yield from self.accept("[")
            return (yield from self._parse_objects()) and (yield from self.accept("]"))
        if first == "{":
            return (yield from self._parse_objects())
        return (yield from self._parse_named())

    def _parse_objects(self) -> Steps[bool]:
        while (yield from self.skip(SPACE + ",")) == "{":
            if not (yield from self.json_call()):
                return self._call is not None
            self.end_call()
        return True

    def _parse_named(self) -> Steps[bool]:
        name, marker = yield from self.read_until(ARGUMENTS, CALL_ID, BEGIN, "{")
        call_id = None
        if marker == CALL_ID:
            call_id, marker = yield from self.read_until(ARGUMENTS, BEGIN)
        if marker not in (ARGUMENTS, "{") or not self.is_name(name.strip()):
            return False
        self.begin_call(name.strip(), call_id and call_id.strip())
        if marker == "{":
            self._text = "{" + self._text
        yield from self.skip()
        yield from self.json_value(self.arguments)
        return True
