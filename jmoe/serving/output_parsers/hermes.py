"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from jmoe.serving.output_parsers.parser import OutputParser
from jmoe.serving.output_parsers.scanner import SPACE, Steps

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(OutputParser):
    """Calls as JSON objects between tags, one or several between two tags."""

    opens = (BEGIN,)
    markers = (END,)

    def parse_calls(self, marker: str) -> Steps[bool]:
        before = self._num_calls
        while (yield from self.skip_characters()) == "{":
            num_calls = self._num_calls
            if not (yield from self.parse_json_call(ends=(END,))):
                if self._num_calls == num_calls:
                    return False
                yield from self.emit_until((END,), self.emit_arguments)
                return True
            self.end_call()
            yield from self.skip_characters(SPACE + "}")  # some models close one brace too many
        return (yield from self.consume_if_next(END)) or self._num_calls > before
