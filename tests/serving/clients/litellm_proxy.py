"""LiteLLM's proxy between OpenAI's SDK and the server: a loop of tools to the answer through chats
and through responses, whole and streamed.

`python litellm_proxy.py URL MODEL` prints what it did as one JSON object. The proxy is the program
`litellm` beside the Python that runs this.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

url, model = sys.argv[1:]
KEY = "sk-" + secrets.token_hex(16)
ASKED = "Add the temperatures of Zürich and Oslo."
PARAMETERS = {
    "weather": {"city": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
FUNCTIONS = {
    "weather": lambda city: {"Zürich": 21, "Oslo": 12}[city],
    "add": lambda a, b: a + b,
}


def functions() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        }
        for name, properties in PARAMETERS.items()
    ]


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    """The address of a proxy whose model `relayed` is the server's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"model": f"hosted_vllm/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")  # JSON is YAML
        models = [{"model_name": "relayed", "litellm_params": settings}]
        config.write_text(json.dumps({"model_list": models}))
        program = Path(sys.executable).with_name("litellm")
        options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        process = subprocess.Popen(
            [program, *options], env=os.environ | env, stdout=sys.stderr, cwd=folder
        )
        try:
            wait_until_alive(process, port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def wait_until_alive(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the proxy ended"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health/liveliness").is_success:
                return
        time.sleep(0.1)
    raise TimeoutError("the proxy does not answer")


def chat(client: openai.OpenAI, streamed: bool) -> dict[str, Any]:
    """The calls and the answer of chats."""
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    tools: list[Any] = [{"type": "function", "function": one} for one in functions()]
    called, reasoning, tokens = [], "", 0
    for _ in range(4):
        options: Any = {"model": "relayed", "messages": messages, "tools": tools}
        if streamed:
            with client.chat.completions.stream(
                **options, stream_options={"include_usage": True}
            ) as stream:
                answer: Any = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
        tokens += answer.usage.completion_tokens
        message = answer.choices[0].message
        reasoning += getattr(message, "reasoning_content", None) or ""
        messages.append(message.model_dump(exclude_none=True))
        if answer.choices[0].finish_reason != "tool_calls":
            break
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            called.append([call.function.name, *arguments.values()])
            result = str(FUNCTIONS[call.function.name](**arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {
        "answer": message.content,
        "called": called,
        "reasoning": reasoning,
        "counted": tokens > 0,
    }


def respond(client: openai.OpenAI, streamed: bool) -> dict[str, Any]:
    """The calls and the answer of responses."""
    items: list[Any] = [{"role": "user", "content": ASKED}]
    tools: list[Any] = [{"type": "function", "strict": False, **one} for one in functions()]
    called, reasoning, tokens = [], "", 0
    for _ in range(4):
        options: Any = {"model": "relayed", "input": items, "tools": tools}
        if streamed:
            events = list(client.responses.create(**options, stream=True))
            answer: Any = events[-1].response
        else:
            answer = client.responses.create(**options)
        tokens += answer.usage.output_tokens
        items += [one.model_dump(exclude_none=True) for one in answer.output]
        reasoning += "".join(
            part.text
            for one in answer.output
            if one.type == "reasoning"
            for part in one.content or one.summary
        )
        calls = [one for one in answer.output if one.type == "function_call"]
        if not calls:
            break
        for call in calls:
            arguments = json.loads(call.arguments)
            called.append([call.name, *arguments.values()])
            result = str(FUNCTIONS[call.name](**arguments))
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
    return {
        "answer": answer.output_text,
        "called": called,
        "reasoning": reasoning,
        "counted": tokens > 0,
    }


with proxy() as address:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=240)
    made = {
        f"{run.__name__} {'streamed' if streamed else 'whole'}": run(client, streamed)
        for run in (chat, respond)
        for streamed in (False, True)
    }
print(json.dumps(made))
