"""Kimi-K2: calls between special tokens, each with an id that has the function's name and the
call's number: `functions.NAME:0`.

Source: https://huggingface.co/moonshotai/Kimi-K2-Instruct (docs/tool_call_guidance.md)
"""

from __future__ import annotations

from jmoe.serving.output_parsers.parser import OutputParser
from jmoe.serving.output_parsers.scanner import SPACE, Steps, Trimmer

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


class KimiParser(OutputParser):
    """Calls of a section of the output."""

    opens = (BEGIN,)
    closes_reasoning = True
    markers = (END, CALL_BEGIN, CALL_END, ARGUMENTS)

    def make_call_id(self, index: int, name: str) -> str:
        """Return an id as the model writes them: it reads them in later turns."""
        return f"functions.{name}:{self.settings.num_earlier_calls + index}"

    def parse_calls(self, marker: str) -> Steps[bool]:
        while True:
            yield from self.skip_characters()
            if not (yield from self.consume_if_next(CALL_BEGIN)):
                return (yield from self.consume_if_next(END))
            written, marker = yield from self.read_until(ARGUMENTS, CALL_END, END)
            call_id = written.strip()
            name = (call_id.rpartition(":")[0] or call_id).removeprefix("functions.")
            if marker != ARGUMENTS or not self.is_function_name(name):
                return False
            self.begin_call(name, call_id if ":" in call_id else None)
            arguments = Trimmer(self.emit_arguments, lead=SPACE, trail=SPACE)
            marker = yield from self.emit_until((CALL_END, END), arguments.push)
            self.end_call()
            if marker != CALL_END:
                return True
