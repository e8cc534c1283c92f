"""/v1/completions over HTTP against the engine in this process; OpenAI's own client reads the
answers.
"""

import asyncio
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from jmoe.inference.engine import Engine
from jmoe.serving.errors import ApiError
from jmoe.serving.service import Service
from jmoe.serving.vocabulary import TokenVocabulary
from tests.http_servers import LIMIT_S, HttpProcess, is_idle
from tests.serving.conftest import VOCAB_SIZE

PROMPTS = ["The quick brown fox", "def f(x):\n    return", "日本語 🎉"]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 7}


def streamed(server: HttpProcess, **body: Any) -> list[Any]:
    """The events of a stream."""
    with server.stream(**{"ignore_eos": False} | body) as chunks:
        return list(chunks)


@pytest.mark.parametrize("policy", ["resident", "ring"])
def test_streamed_text_is_the_engines(
    server: HttpProcess, serve: Callable[..., HttpProcess], engine: Engine, policy: str
) -> None:
    """The same seeds give the same text and tokens, streamed, whole and from `generate`,
    whatever else runs.
    """
    server = server if policy == "resident" else serve("--policy", "ring", "--ring-slots", 1)
    for prompt in PROMPTS:
        (expected,) = engine.generate([prompt], max_new_tokens=40, logprobs=0, **SAMPLED)
        body = {"prompt": prompt, "max_tokens": 40, **SAMPLED}
        *chunks, last, done = streamed(
            server, **body, logprobs=0, stream_options={"include_usage": True}
        )
        assert done == "[DONE]" and last["choices"] == []
        counts = {
            "prompt_tokens": len(expected.prompt_token_ids),
            "completion_tokens": len(expected.token_ids),
        }
        cached = last["usage"].pop("prompt_tokens_details")["cached_tokens"]
        assert last["usage"].pop("completion_tokens_details") == {"reasoning_tokens": 0}
        assert 0 <= cached < counts["prompt_tokens"]
        assert last["usage"] == counts | {"total_tokens": sum(counts.values())}
        assert all(chunk["usage"] is None for chunk in chunks)
        pieces = [chunk["choices"][0] for chunk in chunks]
        assert "".join(piece["text"] for piece in pieces) == expected.text
        assert [p["finish_reason"] for p in pieces] == [None] * (len(pieces) - 1) + [
            expected.finish_reason
        ]
        logprobs = [value for piece in pieces for value in piece["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx([lp.logprob for lp in expected.logprobs], abs=1e-5)
        whole = server.post("/v1/completions", **body).json()
        assert whole["choices"][0]["text"] == expected.text
        assert whole["choices"][0]["finish_reason"] == expected.finish_reason
        # the same prompt came before
        cached = whole["usage"].pop("prompt_tokens_details")["cached_tokens"]
        assert whole["usage"].pop("completion_tokens_details") == {"reasoning_tokens": 0}
        assert cached == counts["prompt_tokens"] - 1
        assert whole["usage"] == last["usage"]
    assert (server.get("/live").json()["streamed_bytes_total"] > 0) == (policy == "ring")


def test_several_prompts_and_choices(client: openai.OpenAI, engine: Engine) -> None:
    """Choice i of a prompt is what the seed + i gives; usage counts each prompt once and all
    choices.
    """
    answer = client.completions.create(
        model="tiny-moe", prompt=PROMPTS[:2], n=2, max_tokens=12, temperature=1, seed=5
    )
    found = {choice.index: choice for choice in answer.choices}
    assert sorted(found) == [0, 1, 2, 3]
    drawn = 0
    for i, prompt in enumerate(PROMPTS[:2]):
        for j in range(2):
            (expected,) = engine.generate([prompt], max_new_tokens=12, temperature=1.0, seed=5 + j)
            assert found[2 * i + j].text == expected.text
            assert found[2 * i + j].finish_reason == expected.finish_reason
            drawn += len(expected.token_ids)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == drawn
    assert answer.usage.prompt_tokens == sum(
        len(engine.tokenizer.encode(p).ids) for p in PROMPTS[:2]
    )


def test_an_event_is_one_line_whatever_the_text(server: HttpProcess) -> None:
    """Clients that split lines as Python does, httpx for one, find each event whole."""
    prompt = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj"
    *chunks, done = streamed(server, prompt=prompt, echo=True, max_tokens=1)
    assert done == "[DONE]" and chunks[0]["choices"][0]["text"].startswith(prompt)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs(client: openai.OpenAI, engine: Engine, max_tokens: int) -> None:
    """As lm_eval asks for log-likelihoods: those of the prompt, null for its first token, then
    what was drawn.
    """
    prompt = engine.tokenizer.encode(PROMPTS[2]).ids
    (expected,) = engine.generate([prompt], max_new_tokens=1, logprobs=1, prompt_logprobs=1)
    answer = client.completions.create(
        model="tiny-moe", prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == PROMPTS[2] + (expected.text if max_tokens else "")
    assert choice.finish_reason == "length" and choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.top_logprobs is not None
    wanted = expected.prompt_logprobs + expected.logprobs * max_tokens
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [lp.logprob for lp in wanted], abs=1e-5
    )
    for top, lp in zip(choice.logprobs.top_logprobs[1:], wanted, strict=True):
        assert max(top.values()) == pytest.approx(lp.top[0][1], abs=1e-5)
        assert len(top) == (1 if lp.top[0][0] == lp.token_id else 2)
    assert choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
    # parts of characters
    assert any(token.startswith("bytes:") for token in choice.logprobs.tokens)
    assert choice.logprobs.text_offset[0] == 0
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens


def assert_offsets(text: str, logprobs: Any) -> None:
    """Every token that is text stands where it is said to, up to bytes that are no text."""
    end = text.find("\ufffd") if "\ufffd" in text else len(text)
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets) and len(offsets) == len(logprobs["tokens"])
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if not token.startswith("bytes:") and offset + len(token) <= end:
            assert text[offset : offset + len(token)] == token


def test_text_offsets(server: HttpProcess) -> None:
    """In characters, also behind those that are several tokens, and whatever is held back for a
    stop string.
    """
    for prompt in ("日本語 🎉 and more 日本語", "<|endoftext|> x", " é"):
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = server.post("/v1/completions", **body).json()["choices"][0]
        assert choice["text"] == prompt
        assert_offsets(prompt, choice["logprobs"])
        assert choice["logprobs"]["text_offset"][-1] >= len(prompt) - 5
    body = {"prompt": "def f(", "max_tokens": 30, "logprobs": 0, "ignore_eos": True, "seed": 1}
    body["logit_bias"] = {str(token): 8 for token in (*range(66, 92), 163, 103, 262)}
    free = server.post("/v1/completions", **body).json()["choices"][0]
    stop = [letter + "never" for letter in set(free["text"])]
    for options in ({}, {"stop": stop[:4]}, {"echo": True}):
        choice = server.post("/v1/completions", **body | options).json()["choices"][0]
        assert_offsets(choice["text"], choice["logprobs"])
        assert len(choice["logprobs"]["tokens"]) >= 30
        *pieces, done = (event for event in streamed(server, **body | options))
        assert done == "[DONE]"
        offsets = [at for piece in pieces for at in piece["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


def test_a_stop_string_never_leaks(server: HttpProcess, engine: Engine) -> None:
    (free,) = engine.generate([PROMPTS[0]], max_new_tokens=60, ignore_eos=True, **SAMPLED)
    body = {"prompt": PROMPTS[0], "max_tokens": 60, "ignore_eos": True, **SAMPLED}
    for begin in (5, 20):
        stop = free.text[begin : begin + 4]
        expected = free.text[: free.text.index(stop)]
        *chunks, done = streamed(server, **body, stop=["never", stop])
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        whole = server.post("/v1/completions", **body, stop=stop).json()
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (
            expected,
            "stop",
        )


def test_parameters_reach_the_sampler(server: HttpProcess, engine: Engine) -> None:
    options = {
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    }
    common = options | SAMPLED | {"ignore_eos": True}
    (expected,) = engine.generate(
        [PROMPTS[1]],
        max_new_tokens=20,
        min_new_tokens=3,
        logit_bias={40: 3.0},
        stop_token_ids=(7,),
        **common,
    )
    limits = {"max_tokens": 20, "min_tokens": 3, "logit_bias": {"40": 3}, "stop_token_ids": [7]}
    answer = server.post("/v1/completions", prompt=PROMPTS[1], **limits, **common).json()
    assert answer["choices"][0]["text"] == expected.text


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"temperature": -1}, 400, "greater than or equal to 0", "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens = 0 needs echo = true", None),
        ({"logit_bias": {"399999": 1}}, 400, f"must be below vocab_size = {VOCAB_SIZE}", None),
        ({"logit_bias": {"007": 1, "7": 2}}, 400, "String should match pattern", None),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE))},
            400,
            "min_tokens = 1: must be 0, because every token of the vocabulary ends the text",
            "min_tokens",
        ),
        ({"min_tokens": 30, "max_tokens": 20}, 400, "at most max_tokens = 20", "min_tokens"),
        ({"prompt": []}, 400, "must hold at least one token", None),
        (
            {"prompt": [1, 999]},
            400,
            f"a token of prompt = 999: must be at least 0 and below {VOCAB_SIZE}",
            None,
        ),
        (
            {"prompt": [1] * 300},
            400,
            "300 tokens; together with one of output at most 256 fit",
            None,
        ),
        ({"model": "other"}, 404, "the model 'other' is not served here", "model"),
        ({"n": 128}, 400, "128 sequences in one request: at most 68", None),
    ],
)
def test_what_is_refused(
    server: HttpProcess, body: dict[str, Any], status: int, words: str, param: str | None
) -> None:
    response = server.post("/v1/completions", **({"prompt": "x"} | body))
    error = response.json()["error"]
    assert response.status_code == status, error
    assert words in error["message"] and set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param


def test_null_is_not_given(server: HttpProcess) -> None:
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0}
    plain = server.post("/v1/completions", **body).json()["choices"]
    assert (
        server.post("/v1/completions", **body, suffix=None, stop=None, tools=None).json()["choices"]
        == plain
    )


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"{", "application/json", "the body is not JSON"),
        (b"[]", "application/json", "the body must be a JSON object"),
        (b'{"prompt": "x"}', "text/plain", "sent as Content-Type: application/json"),
        (b'{"prompt": "\\ud800"}', "application/json", "the prompt holds half of a surrogate pair"),
        (
            b'{"prompt": "x", "\\ud800": 1}',
            "application/json",
            "?: is not a parameter that this server supports",
        ),
        (
            b'{"prompt": "x", "temperature": NaN}',
            "application/json",
            "the body is not JSON, which has no NaN",
        ),
        (b'{"prompt": "x", "n": 1, "n": 2}', "application/json", "n: is given twice in one object"),
        (
            b'{"prompt": "x", "n": 1, "user": "' + b"y" * 100_000 + b'", "n": 2}',
            "application/json",
            "n: is given twice",
        ),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "application/json", "too many digits"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_proper_json(
    server: HttpProcess, content: bytes, kind: str, words: str
) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions", content=content, headers={"content-type": kind}
    )
    assert response.status_code == 400 and words in response.json()["error"]["message"], (
        response.text
    )


def test_a_text_that_the_tokenizer_gives_up(model_folder: Path) -> None:
    """Its regular expression needs more than its limit: a panic of Rust, which is no
    `Exception`.
    """
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    service: Any = SimpleNamespace(
        tokenizer=tokenizer, vocabulary=TokenVocabulary(tokenizer), max_seq_len=256
    )
    assert Service.encode_prompts(service, ["abc"])
    with pytest.raises(
        ApiError, match=r"^the model's tokenizer cannot encode the text: .*retry-limit"
    ):
        Service.encode_prompts(service, ["a" * 40 + "b"])


def test_a_compressed_body(server: HttpProcess) -> None:
    """It is not taken for a damaged one, nor one that is not compressed for what its header
    says.
    """
    for body in (gzip.compress(b'{"prompt": "x"}'), b'{"prompt": "x"}'):
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["message"].startswith(
            "Content-Encoding = 'gzip': must be identity"
        )


def test_usage_with_every_chunk(server: HttpProcess) -> None:
    """As guidellm asks for it; without include_usage it is refused."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = streamed(
        server, prompt=PROMPTS[:2], max_tokens=6, ignore_eos=True, stream_options=options
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert done == "[DONE]" and counts == sorted(counts) == list(range(1, 13))
    assert last["usage"] == chunks[-1]["usage"] and last["choices"] == []
    refused = server.post(
        "/v1/completions", prompt="x", stream=True, stream_options={"continuous_usage_stats": True}
    )
    assert refused.status_code == 400
    assert "continuous_usage_stats needs include_usage = true" in refused.json()["error"]["message"]


def test_a_large_request_lets_short_ones_pass(server: HttpProcess) -> None:
    """60 choices take turns with what comes after them; nothing of them is lost."""
    for _ in range(10):  # all 60 may be drawn while this process stands still: then once more
        ended = 0
        with server.stream(n=60, max_tokens=120, temperature=1) as chunks:
            next(chunks)
            short = server.post("/v1/completions", prompt="y", max_tokens=1)
            assert short.status_code == 200
            waiting = server.get("/live").json()["requests_waiting"]
            for chunk in chunks:
                ended += chunk != "[DONE]" and chunk["choices"][0]["finish_reason"] == "length"
        assert ended == 60
        if waiting:
            break
    assert waiting > 0, "it did not wait for the last of the 60"


def test_the_page_and_its_headers(server: HttpProcess) -> None:
    """Nobody may show it in a frame; HEAD is answered like GET."""
    page = server.get("/")
    (meta,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.text)
    assert page.headers["content-security-policy"] == f"{meta}; frame-ancestors 'none'"
    found = [page, server.get("/v1/models"), server.get("/nothing")]
    for response in found:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    for path in ("/", "/health", "/ready", "/v1/models", "/metrics"):
        head = httpx.head(server.url + path)
        assert (head.status_code, head.content) == (200, b""), path
        assert int(head.headers["content-length"]) > 0
    assert httpx.head(server.url + "/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.0.0.1", 200),
        ("rebound.example", 403),
        ("rebound.example:8000", 403),
        ("localhost.rebound.example", 403),
        ("[rebound.example]", 403),
        ("", 403),
    ],
)
def test_a_page_of_another_site_cannot_reach_the_server(
    server: HttpProcess, host: str, status: int
) -> None:
    """Its name may lead to 127.0.0.1, where the server without keys listens; the browser sends
    that name.
    """
    for path in ("/", "/v1/models", "/live"):
        response = httpx.get(server.url + path, headers={"host": host})
        assert response.status_code == status
        if status == 403:
            assert "--allowed-hosts" in response.json()["error"]["message"]


def test_an_abandoned_stream_frees_its_slot(server: HttpProcess) -> None:
    """Concurrent clients that leave, in mid-stream or while they wait, leave nothing behind."""

    async def leave(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.completions.create(
            model="tiny-moe",
            prompt=f"{number}",
            max_tokens=240,
            n=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        if number % 3:
            async for _ in stream:
                break
        await stream.close()

    async def all_leave() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S
        ) as client:
            await asyncio.gather(*(leave(client, i) for i in range(12)))
            whole = asyncio.create_task(
                client.completions.create(
                    model="tiny-moe", prompt="x", max_tokens=250, extra_body={"ignore_eos": True}
                )
            )
            await asyncio.sleep(0.05)
            whole.cancel()

    def aborted() -> float:
        name = r'vllm:request_success_total\{finished_reason="abort",model_name="tiny-moe"\} (\S+)'
        return sum(map(float, re.findall(name, server.get("/metrics").text)))

    before = aborted()
    for _ in range(10):  # all may be drawn while this process stands still: then once more
        asyncio.run(all_leave())
        live = server.until("/live", is_idle).json()
        assert live["kv_tokens_used"] == 0
        assert 'vllm:num_requests_running{model_name="tiny-moe"} 0.0' in server.get("/metrics").text
        if aborted() > before:
            break
    assert aborted() > before


def test_async_streams_beside_each_other(server: HttpProcess, engine: Engine) -> None:
    """More clients than places: all are served, each with its own text."""
    expected = {
        i: engine.generate([f"{i}"], max_new_tokens=10, **SAMPLED)[0].text for i in range(10)
    }

    async def read(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="tiny-moe", prompt=f"{number}", max_tokens=10, stream=True, **SAMPLED
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S
        ) as client:
            return await asyncio.gather(*(read(client, i) for i in expected))

    assert dict(enumerate(asyncio.run(read_all()))) == expected


def test_the_client_of_the_examples(server: HttpProcess, run_python: Callable[..., Any]) -> None:
    done = run_python(["examples/chat_client.py", server.url, "def f("])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
