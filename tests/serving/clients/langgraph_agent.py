"""LangChain's agent on LangGraph: two tools, called until the answer, whole and streamed.

`python langgraph_agent.py URL MODEL` prints what it did as one JSON object.
"""

import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
called: list[list[Any]] = []


@tool
def weather(city: str) -> str:
    """Temperature in a city, in degrees Celsius."""
    called.append(["weather", city])
    return {"Zürich": "21", "Oslo": "12"}[city]


@tool
def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    called.append(["add", a, b])
    return a + b


chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
agent = create_agent(chat, [weather, add])
asked = {"messages": [{"role": "user", "content": "Add the temperatures of Zürich and Oslo."}]}
whole = agent.invoke(asked)["messages"][-1].content
seen = [list(one) for one in called]
called.clear()
pieces = [
    chunk.content
    for chunk, _ in agent.stream(asked, stream_mode="messages")
    if type(chunk).__name__ == "AIMessageChunk" and not chunk.tool_call_chunks
]
print(json.dumps({"answer": whole, "called": seen, "streamed": "".join(pieces), "again": called}))
