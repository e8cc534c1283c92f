"""`response_format`: a random model, which would never write JSON by itself, writes what the
schema says.
"""

import contextlib
import json
from typing import Any

import httpx
import openai
import psutil
import pytest

from jmoe.data.tokenizer import train_bpe
from jmoe.serving.grammar_worker import HEAD, make_mask_answerer
from tests.http_servers import HttpProcess

WORD = "日本語 🎉 👩‍👩‍👧"
MANY = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}
SCHEMA = {
    "type": "object",
    "properties": {"word": {"const": WORD}, "n": {"enum": [1, 22]}, "many": MANY},
    "required": ["word", "n"],
    "additionalProperties": False,
}


def response_format(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"temperature": 1, "top_k": 3}]
)
def test_answers_follow_the_schema(client: openai.OpenAI, options: dict[str, Any]) -> None:
    """Each of several choices by itself, while others beside them are free."""
    free = client.completions.create(model="tiny-moe", prompt="x", max_tokens=200, stream=True)
    answer = client.chat.completions.create(
        model="tiny-moe",
        messages=[{"role": "user", "content": "x"}],
        response_format=response_format(SCHEMA),  # type: ignore[arg-type]
        n=3,
        logprobs=True,
        extra_body=options,
    )
    for choice in answer.choices:
        found = json.loads(choice.message.content or "")
        assert found["word"] == WORD and found["n"] in (1, 22) and len(found.get("many", [])) <= 2
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        # of the model's own distribution, which did not expect this
        assert min(token.logprob for token in choice.logprobs.content) < -2
    free.close()


def test_characters_of_many_tokens_come_whole(server: HttpProcess) -> None:
    """Each chunk is valid text, though a character is several tokens."""
    schema = response_format({"const": WORD})
    with server.stream(max_tokens=200, ignore_eos=False, response_format=schema) as pieces:
        *chunks, done = pieces
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert done == "[DONE]" and json.loads("".join(texts)) == WORD
    assert not any("\ufffd" in text for text in texts) and "" in texts and "🎉" in "".join(texts)


def test_a_grammar_that_is_killed(server: HttpProcess) -> None:
    """As the system does when memory is short: its request fails with 500, for it was not wrong,
    and others go on.
    """
    schema = response_format({"type": "string", "minLength": 150})

    def last_of_a_stream() -> Any:
        """The last piece of a stream whose processes were killed after the first one."""
        with server.stream(max_tokens=250, ignore_eos=False, response_format=schema) as pieces:
            next(pieces)
            for child in psutil.Process(server.process.pid).children():
                for fork in child.children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        fork.kill()
            return list(pieces)[-1]

    # on a busy machine a whole answer may come before the kill
    while (last := last_of_a_stream()) == "[DONE]":
        pass
    error = last["error"]
    assert (error["code"], error["type"]) == ("constraint_failed", "server_error")
    assert "SIGKILL from outside the server" in server.log.read_text()
    test_json_object(server)


def test_json_object(server: HttpProcess) -> None:
    answer = server.post(
        "/v1/completions",
        prompt="x",
        max_tokens=2,
        temperature=0,
        response_format={"type": "json_object"},
    ).json()["choices"][0]
    assert answer["text"].startswith("{") and answer["finish_reason"] == "length"
    text = server.post(
        "/v1/completions", prompt="x", max_tokens=2, response_format={"type": "text"}
    )
    assert text.status_code == 200


@pytest.mark.parametrize(("vocab_size", "words"), [(415, 13), (416, 13), (417, 14)])
def test_masks_have_a_bit_for_each_token_and_no_word_more(vocab_size: int, words: int) -> None:
    """A model's vocabulary may be larger than its tokenizer's; 32 divides the size of most."""
    answer = make_mask_answerer(train_bpe(["x"], 300).to_str(), vocab_size, [0])
    first = answer(json.dumps({"form": "schema", "text": "{}", "count": 1}).encode())
    assert len(first) - HEAD.size == 4 * words


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"response_format": response_format({"type": "nonsense"})}, "Invalid type: nonsense"),
        (
            {"response_format": response_format({"$ref": "http://nowhere/x"})},
            "does not fetch resources",
        ),
        (
            {"response_format": response_format({"const": "\ud800"})},
            "response_format.json_schema: ",
        ),
        ({"response_format": response_format({"$ref": "#"})}, "response_format.json_schema: "),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be given"),
        ({"response_format": {"type": "grammar"}}, "Input should be"),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "do not go with response_format",
        ),
    ],
)
def test_what_is_refused(server: HttpProcess, given: dict[str, Any], words: str) -> None:
    # with escapes for what UTF-8 cannot carry
    content = json.dumps({"prompt": "x", **given}).encode()
    response = httpx.post(
        f"{server.url}/v1/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    said = response.json()["error"]["message"]
    assert response.status_code == 400 and words in said
    assert "needs more than" not in said and "<state>" not in said
