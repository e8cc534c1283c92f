"""DeepSeek: calls between special tokens. V3 writes `function<sep>NAME` and the arguments in a
Markdown block, V3.1 `NAME<sep>ARGUMENTS`.

Sources: chat templates of https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1
"""

from __future__ import annotations

from jmoe.serving.output_parsers.parser import OutputParser
from jmoe.serving.output_parsers.scanner import SPACE, Steps, Trimmer

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
BLOCK = "```"


class DeepSeekParser(OutputParser):
    """Calls of either version, which the text itself tells apart."""

    opens = (BEGIN,)
    closes_reasoning = True
    markers = (END, CALL_BEGIN, CALL_END, SEPARATOR)

    def parse_calls(self, marker: str) -> Steps[bool]:
        while True:
            yield from self.skip_characters()
            if not (yield from self.consume_if_next(CALL_BEGIN)):
                return (yield from self.consume_if_next(END))
            head, marker = yield from self.read_until(SEPARATOR, CALL_END, END)
            if marker != SEPARATOR:
                return False
            if head.strip() == "function":
                head, marker = yield from self.read_until("\n", CALL_END, END)
            if not self.is_function_name(name := head.strip()):
                return False
            self.begin_call(name)
            if marker not in (CALL_END, END):
                marker = yield from self._parse_arguments()
            self.end_call()
            if marker != CALL_END:
                return True

    def _parse_arguments(self) -> Steps[str]:
        """Emit arguments without the Markdown block around them; return the marker after them."""
        yield from self.skip_characters()
        if (yield from self.consume_if_next(BLOCK)):
            yield from self.consume_if_next("json")
        arguments = Trimmer(self.emit_arguments, lead=SPACE, trail=SPACE + "`")
        return (yield from self.emit_until((CALL_END, END), arguments.push))
