"""LiteLLM's SDK: a loop of tools to the answer, whole and streamed, through its openai provider and
its anthropic provider.

`python litellm_tools.py URL MODEL` prints what it did as one JSON object.
"""

import json
import sys
from typing import Any

import litellm

url, model = sys.argv[1:]
litellm.telemetry = False
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
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


def run(stream: bool, **where: Any) -> dict[str, Any]:
    """The calls and the answer."""
    messages: list[Any] = [{"role": "user", "content": "Add the temperatures."}]
    called, reasoning = [], ""
    for _ in range(4):
        answer = litellm.completion(
            messages=messages, tools=TOOLS, stream=stream, max_tokens=400, **where
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        reasoning += getattr(message, "reasoning_content", None) or ""
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            called.append([call.function.name, *arguments.values()])
            result = str(FUNCTIONS[call.function.name](**arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"answer": message.content, "called": called, "reasoning": reasoning}


openai = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
anthropic = {"model": f"anthropic/{model}", "api_base": url, "api_key": "none"}
made = {
    f"{name} {'streamed' if stream else 'whole'}": run(stream, **where)
    for name, where in {"openai": openai, "anthropic": anthropic}.items()
    for stream in (False, True)
}
print(json.dumps(made))
