"""/v1/chat/completions, tokens, and what the server says of itself."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from jmoe.config import DataConfig
from jmoe.data.corpus import prepare_corpus
from jmoe.data.tokenizer import END_OF_TEXT
from jmoe.inference.engine import Engine
from tests.http_servers import HttpProcess, is_idle
from tests.serving.conftest import VOCAB_SIZE

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "日本語?"}, {"type": "text", "text": "🎉"}],
    },
]
# By the template of these tests.
RENDERED = "<|system|>Be brief.\n<|user|>日本語?\n🎉\n<|assistant|>"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
# the template of these tests then adds it to text
VARIABLES = {"chat_template_kwargs": {"fail": 1}}


def test_answers_are_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    """The template's text is the prompt; each choice has a seed of its own; the answer may fill
    the context.
    """
    prompt = engine.tokenizer.encode(RENDERED, add_special_tokens=False).ids
    answer = client.chat.completions.create(
        model="tiny-moe", messages=MESSAGES, max_tokens=20, n=2, **SAMPLED
    )
    expected = [
        engine.generate([prompt], max_new_tokens=20, temperature=1.0, seed=11 + i)[0]
        for i in range(2)
    ]
    assert [c.message.content for c in answer.choices] == [e.text for e in expected]
    assert [c.finish_reason for c in answer.choices] == [e.finish_reason for e in expected]
    assert all(c.message.role == "assistant" for c in answer.choices)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(e.token_ids) for e in expected)

    full = client.chat.completions.create(
        model="tiny-moe", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert full.choices[0].finish_reason == "length"
    assert full.usage is not None and full.usage.total_tokens == 256
    # the prompt but for its last token, which is computed for what follows it
    assert full.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1


def test_stream(client: openai.OpenAI) -> None:
    """The stream holds the same as the whole answer, begins with the role and ends with reason
    and usage.
    """
    options: dict[str, Any] = {
        "model": "tiny-moe",
        "messages": MESSAGES,
        "max_completion_tokens": 20,
        **SAMPLED,
    }
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options, **logprobs).choices[0]
    usage_too = {"stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**options, **logprobs, **usage_too, stream=True)
    first = chunks[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.finish_reason
    ]
    assert chunks[-1].choices[0].finish_reason is not None
    tokens = [
        t for c in chunks[1:] if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []
    ]
    assert whole.logprobs is not None and tokens == whole.logprobs.content
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == len(tokens)
    for token in tokens:
        assert len(token.top_logprobs) == 2 and token.logprob <= token.top_logprobs[0].logprob
    said = b"".join(
        bytes(token.bytes or [])
        for token in tokens[: -1 if whole.finish_reason == "stop" else None]
    )
    assert said.decode(errors="replace") == whole.message.content
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"top_logprobs": 3}, "top_logprobs needs logprobs = true"),
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens and max_completion_tokens differ",
        ),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 999}]},
            "together with one of output at most 256 fit",
        ),
        (
            {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"thinks": True}},
            "response_format: the model's chat template begins the answer with <think>",
        ),
        ({"chat_template_kwargs": {"messages": 1}}, "messages cannot be given here"),
    ],
)
def test_what_is_refused(server: HttpProcess, body: dict[str, Any], words: str) -> None:
    response = server.post(
        "/v1/chat/completions", **({"messages": [{"role": "user", "content": "x"}]} | body)
    )
    assert response.status_code == 400 and words in response.json()["error"]["message"]


def test_errors_hold_nothing_of_the_server(server: HttpProcess, model_folder: Path) -> None:
    """What a template cannot do is said without the folder it is from, and without what a
    library says of it.
    """
    refused = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **VARIABLES
    )
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (
        error["message"] == "messages: the model's chat template: cannot render them"
        and error["param"] == "messages"
    )
    assert str(model_folder) in server.log.read_text()


def test_tokens(server: HttpProcess, engine: Engine) -> None:
    found = server.post("/tokenize", prompt="fox 🎉", return_token_strs=True).json()
    assert found["tokens"] == engine.tokenizer.encode("fox 🎉").ids
    assert (
        found["count"] == len(found["tokens"]) == len(found["token_strs"])
        and found["max_model_len"] == 256
    )
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "fox 🎉"}
    chat = server.post("/tokenize", messages=MESSAGES).json()
    assert chat["tokens"] == engine.tokenizer.encode(RENDERED, add_special_tokens=False).ids
    without = server.post("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert without["tokens"] == engine.tokenizer.encode(RENDERED.removesuffix("<|assistant|>")).ids
    control = server.post("/tokenize", messages=[{"role": "user", "content": END_OF_TEXT}]).json()
    assert engine.tokenizer.token_to_id(END_OF_TEXT) in control["tokens"], (
        "as transformers and vLLM encode it"
    )
    assert server.post("/detokenize", tokens=[VOCAB_SIZE]).status_code == 400
    assert server.post("/tokenize", prompt="x", messages=MESSAGES).status_code == 400


def test_tokens_of_fine_tuning_are_those_of_the_server(
    server: HttpProcess, model_folder: Path, tmp_path: Path
) -> None:
    text = f"user: fox 🎉{END_OF_TEXT}\nassistant: dog{END_OF_TEXT}\n"
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": text}) + "\n") * 20)
    data = DataConfig(
        (str(tmp_path / "a.jsonl"),),
        tokenizer=str(model_folder / "tokenizer.json"),
        control_tokens=True,
    )
    trained = prepare_corpus(data, VOCAB_SIZE, tmp_path / "cache").sources[0].shards[0].tolist()
    served = server.post("/tokenize", prompt=text).json()["tokens"]
    assert served.count(0) == 2 and trained[: len(served) + 2] == [0, *served, 0]


def test_models(client: openai.OpenAI, server: HttpProcess) -> None:
    (model,) = client.models.list()
    assert (model.id, model.owned_by) == ("tiny-moe", "jmoe")
    assert client.models.retrieve("tiny-moe") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert server.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/completions").json()["error"]["message"] == "Method Not Allowed"


def test_health_metrics_and_live(server: HttpProcess) -> None:
    assert server.get("/health").json() == server.get("/ready").json() == {"status": "ok"}
    server.until("/live", is_idle)  # what others have left
    for _ in range(2):  # the second finds the first's prompt in the cache
        server.post("/v1/completions", prompt="x of y and z", max_tokens=5, ignore_eos=True)
    live = server.until("/live", lambda live: any(map(sum, live.json()["expert_counts"]))).json()
    families = {
        family.name: family
        for family in text_string_to_metric_families(server.get("/metrics").text)
    }
    samples = {
        s.name: s.value
        for family in families.values()
        for s in family.samples
        if "le" not in s.labels
    }
    assert all(
        s.labels["model_name"] == "tiny-moe" for family in families.values() for s in family.samples
    )
    assert samples["vllm:generation_tokens_total"] >= 5 and samples["vllm:prompt_tokens_total"] >= 1
    assert (
        samples["vllm:time_to_first_token_seconds_count"]
        >= samples["vllm:e2e_request_latency_seconds_count"]
        >= 1
    )
    assert samples["vllm:num_requests_running"] == samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["jmoe:kv_blocks"] == 8 >= samples["jmoe:kv_blocks_cached"] > 0
    assert samples["jmoe:kv_blocks_used"] == samples["vllm:num_preemptions_total"] == 0
    assert samples["vllm:spec_decode_num_drafts_total"] == 0
    found, asked = (samples[f"vllm:prefix_cache_{name}_total"] for name in ("hits", "queries"))
    assert 0 < found < asked
    assert {
        s.labels["layer"] for s in families["jmoe:expert_load_max"].samples if 1 <= s.value <= 4
    } == {"0", "1", "2"}
    page = server.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<title>" in page.text
    assert len(live["expert_counts"]) == 3 and live["slots"] == []
    assert live["model"] == "tiny-moe" and live["policy"] == "resident" and live["chat"]
    assert live["generation_tokens_total"] == samples["vllm:generation_tokens_total"]
    assert live["kv_tokens_total"] == 4 * 256


def test_request_ids(server: HttpProcess) -> None:
    """A client's id is kept if it is harmless; it is in the answer, the header and the log."""
    with server.client() as client:
        body = {"prompt": "a secret", "max_tokens": 1}
        given = client.post("/v1/completions", json=body, headers={"x-request-id": "my-id.1"})
        assert given.headers["x-request-id"] == "my-id.1" and given.json()["id"] == "cmpl-my-id.1"
        odd = client.post("/v1/completions", json=body, headers={"x-request-id": "a\tb"}).headers[
            "x-request-id"
        ]
        assert len(odd) == 32
    server.until_said("my-id.1 POST /v1/completions 200")
    server.until_said(f"{odd} POST /v1/completions 200")
    assert "secret" not in server.log.read_text()
