"""Llama 3 and 4: an output that is nothing but a JSON object with a name and parameters, or several
with `;` between them, after `<|python_tag|>` or not.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
"""

from __future__ import annotations

from jmoe.serving.output_parsers.parser import OutputParser
from jmoe.serving.output_parsers.scanner import SPACE, Steps
from jmoe.types import Json

TAG = "<|python_tag|>"


class LlamaParser(OutputParser):
    """Calls at the beginning of the answer alone; an answer that begins otherwise is content, as is
    a JSON object that names no tool of the request.
    """

    opens = (TAG,)  # seen in the text; `parse_after_reasoning` looks for it at the beginning alone

    def is_function_name(self, text: Json) -> bool:
        return self.is_requested_tool(text)

    def parse_after_reasoning(self) -> Steps[None]:
        if self._opens:
            yield from self._parse_marked_calls("")

    def parse_calls(self, marker: str) -> Steps[bool]:
        yield from self.skip_characters()
        yield from self.consume_if_next(TAG)
        while (yield from self.skip_characters(SPACE + ";")) == "{":
            if not (yield from self.parse_json_call()):
                return self._call is not None
            self.end_call()
        return self._num_calls > 0
