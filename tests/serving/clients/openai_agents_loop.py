"""OpenAI's Agents SDK: two tools, called until the answer, through `/v1/responses` and through
`/v1/chat/completions`, whole and streamed.

`python openai_agents_loop.py URL MODEL` prints what it did as one JSON object.
"""

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    AsyncOpenAI,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

url, model = sys.argv[1:]
set_tracing_disabled(True)
called: list[list[Any]] = []


@function_tool
def weather(city: str) -> int:
    """Temperature in a city, in degrees Celsius."""
    called.append(["weather", city])
    return {"Zürich": 21, "Oslo": 12}[city]


@function_tool
def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    called.append(["add", a, b])
    return a + b


async def run(kind: Any, streamed: bool) -> dict[str, Any]:
    """The calls and the answer."""
    called.clear()
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
    agent = Agent(
        name="Adder",
        instructions="Use the tools.",
        tools=[weather, add],
        model=kind(model=model, openai_client=client),
    )
    asked = "Add the temperatures of Zürich and Oslo."
    if streamed:
        result = Runner.run_streamed(agent, asked)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, asked)
    return {"answer": result.final_output, "called": sorted(called[:2]) + called[2:]}


async def main() -> None:
    made = {
        f"{kind.__name__} {'streamed' if streamed else 'whole'}": await run(kind, streamed)
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)
        for streamed in (False, True)
    }
    print(json.dumps(made))


asyncio.run(main())
