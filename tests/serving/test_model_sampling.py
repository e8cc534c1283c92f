"""A model's own words on its chats: how they are drawn, where they end, their channels, their
template's form.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from jmoe.serving.model_sampling import ModelSamplingDefaults
from tests.http_servers import LIMIT_S, HttpProcess
from tests.scripted_model import describe, harmony_tokenizer, save_scripted_model

# By parts, as templates of models that also see images are.
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor"
    " %}<|start|>assistant"
)
USER = {"role": "user", "content": "2+2"}
SAID = (
    "<|channel|>analysis<|message|>Hm:"
    " 2+2.<|end|><|start|>assistant<|channel|>final<|message|>four 🎉"
)
AFTER = "<|return|>user"  # what comes where nothing ends the turn
SIZES = (
    "--max-batch",
    1,
    "--max-seq-len",
    100,
    "--prefill-chunk-tokens",
    16,
    "--policy",
    "resident",
)
PLAIN: dict[str, Any] = {"messages": [USER], "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks and answers in channels; its end of a turn stands in
    tokenizer_config.json alone.
    """
    folder = tmp_path_factory.mktemp("models") / "scripted"
    tokenizer = harmony_tokenizer()
    prompt = tokenizer.encode(USER["content"] + "<|start|>assistant").ids
    save_scripted_model(folder, tokenizer, len(prompt), tokenizer.encode(SAID + AFTER).ids)
    described = {"eos_token": "<|return|>", "chat_template": TEMPLATE, "added_tokens_decoder": {}}
    describe(
        folder,
        described,
        {"eos_token_id": 0, "top_k": 1, "temperature": 0.6, "no_repeat_ngram_size": 3},
    )
    return folder


@pytest.fixture(scope="module")
def server(serve: Callable[..., HttpProcess], folder: Path) -> HttpProcess:
    return serve(*SIZES, folder=folder)


def test_channels_and_the_end_of_a_turn(server: HttpProcess) -> None:
    """The answer is the channel `final`, the reasoning stands beside it, streamed or not;
    nothing follows the turn.
    """
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as client:
        body: dict[str, Any] = {"model": "scripted", "messages": [USER], "seed": 1}
        (whole,) = client.chat.completions.create(**body).choices
        assert (whole.message.content, whole.finish_reason) == ("four 🎉", "stop")
        assert (
            whole.message.model_extra is not None
            and whole.message.model_extra["reasoning_content"] == "Hm: 2+2."
        )
        deltas = [
            chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)
        ]
        assert "".join(delta.content or "" for delta in deltas) == "four 🎉"
        reasoning = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
        assert "".join(reasoning) == "Hm: 2+2." and sum(map(bool, reasoning)) > 3
        stopped = client.chat.completions.create(**body, stop="ou").choices[0]
        assert (stopped.message.content, stopped.finish_reason) == ("f", "stop")


def test_a_schema_binds_the_answer_and_not_the_reasoning(server: HttpProcess) -> None:
    """The model reasons first as it would without; then the answer is what the schema allows,
    and ends.
    """
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"const": {"a": 4}}},
    }
    for temperature in (0, 0.6):
        answer = server.post(
            "/v1/chat/completions", **PLAIN, response_format=schema, temperature=temperature
        )
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert (
            json.loads(choice["message"]["content"]) == {"a": 4}
            and choice["finish_reason"] == "stop"
        )
        assert choice["message"]["reasoning_content"] == "Hm: 2+2."


def test_a_turn_goes_on_where_it_is_asked_to(server: HttpProcess) -> None:
    """ignore_eos is honoured; a raw text ends where transformers would end it, by
    generation_config.json alone.
    """
    on = server.post("/v1/chat/completions", **PLAIN, ignore_eos=True, max_tokens=60).json()
    assert on["choices"][0]["finish_reason"] == "length" and on["usage"]["completion_tokens"] == 60
    raw = server.post(
        "/v1/completions", prompt="2+2<|start|>assistant", max_tokens=60, seed=1
    ).json()
    assert raw["choices"][0]["finish_reason"] == "length" and "userrr" in raw["choices"][0]["text"]


def test_requests_that_say_nothing_are_drawn_as_the_authors_say(server: HttpProcess) -> None:
    """top_k = 1 is the model's default: a draw among all tokens departs from what is likeliest."""
    (card,) = server.get("/v1/models").json()["data"]
    assert card["sampling_defaults"] == {"temperature": 0.6, "top_k": 1}
    line = "sampling defaults: temperature 0.6, top_k 1, from generation_config.json"
    assert line in server.log.read_text()
    assert "not used of generation_config.json: no_repeat_ngram_size = 3" in server.log.read_text()
    said = {"prompt": "2+2<|start|>assistant", "max_tokens": 20, "seed": 1}
    likeliest = server.post("/v1/completions", **said).json()["choices"]
    assert server.post("/v1/completions", **said, temperature=0).json()["choices"] == likeliest
    assert (
        server.post("/v1/completions", **said, top_k=0, temperature=1).json()["choices"]
        != likeliest
    )


def test_templates_of_parts_get_parts(server: HttpProcess) -> None:
    """A string, parts and nothing, all as the template reads them."""
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    for content in ("2+2", parts):
        tokens = server.post("/tokenize", messages=[{"role": "user", "content": content}]).json()[
            "tokens"
        ]
        assert server.post("/detokenize", tokens=tokens).json()["prompt"] == "2+2<|start|>assistant"


def test_openais_defaults_by_an_option(folder: Path, tmp_path: Path) -> None:
    """The start says which; numbers that nothing can be drawn by are named with their file."""
    said = (
        "sampling defaults: OpenAI's, temperature 1; --sampling-defaults model: temperature 0.6,"
        " top_k 1"
    )
    assert ModelSamplingDefaults.read(folder, "openai").defaults == {} and said in str(
        ModelSamplingDefaults.read(folder, "openai")
    )
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(
        ValueError,
        match=r"generation_config.json: top_p = 1.5: must be in \(0, 1\]; correct it, or",
    ):
        ModelSamplingDefaults.read(tmp_path, "model")
    assert ModelSamplingDefaults.read(tmp_path, "openai").defaults == {}
