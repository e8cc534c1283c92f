"""Anthropic's SDK: a loop of tools to the answer, whole and streamed, and the count of tokens.

`python anthropic_tools.py URL MODEL` prints what it did as one JSON object.
"""

import json
import sys
from typing import Any

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=240)
TOOLS: list[Any] = [
    {
        "name": name,
        "input_schema": {"type": "object", "properties": properties, "required": list(properties)},
    }
    for name, properties in {
        "weather": {"city": {"type": "string"}},
        "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    }.items()
]
FUNCTIONS = {
    "weather": lambda city: {"Zürich": 21, "Oslo": 12}[city],
    "add": lambda a, b: a + b,
}


def run(streamed: bool) -> dict[str, Any]:
    """The calls and the answer."""
    messages: list[Any] = [{"role": "user", "content": "Add the temperatures."}]
    called = []
    for _ in range(4):
        options: Any = {"model": model, "max_tokens": 400, "tools": TOOLS, "messages": messages}
        if streamed:
            with client.messages.stream(**options) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**options)
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if answer.stop_reason != "tool_use":
            break
        results = []
        for use in uses:
            called.append([use.name, *use.input.values()])
            result = str(FUNCTIONS[use.name](**use.input))
            results.append({"type": "tool_result", "tool_use_id": use.id, "content": result})
        messages.append({"role": "user", "content": results})
    texts = [block.text for block in answer.content if block.type == "text"]
    thoughts = [
        block.thinking
        for message in messages[1::2]
        for block in message["content"]
        if block.type == "thinking"
    ]
    return {"answer": "".join(texts), "called": called, "reasoning": "".join(thoughts)}


counted = client.messages.count_tokens(
    model=model, tools=TOOLS, messages=[{"role": "user", "content": "Add the temperatures."}]
)
made = {"whole": run(False), "streamed": run(True), "tokens": counted.input_tokens}
print(json.dumps(made))
