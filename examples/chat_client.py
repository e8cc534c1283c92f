"""Stream a completion from a running server with the openai package.

Usage: python examples/chat_client.py URL 'a question'
"""

import sys

import openai

if len(sys.argv) != 3:
    sys.exit(__doc__)
url, question = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.completions.create(
    model=model, prompt=question, max_tokens=16, temperature=0.7, seed=1, stream=True
)
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)
print()
