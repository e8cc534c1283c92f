"""A model of milliseconds a token with a real byte-level tokenizer and a chat template, and
servers of it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import openai
import pytest

import jmoe
from jmoe.config.engine import EngineConfig
from jmoe.data.tokenizer import END_OF_TEXT, train_bpe
from jmoe.inference.engine import Engine
from jmoe.models.decoder import Decoder
from jmoe.models.pretrained import LanguageModel
from tests.http_servers import LIMIT_S, HttpProcess, start_server
from tests.processes import one_device

SIZES = ("--max-batch", 4, "--max-seq-len", 256, "--prefill-chunk-tokens", 32)
CONVERSATIONS = Path(__file__).parent.parent / "fixtures" / "chat_templates" / "conversations.json"
VOCAB_SIZE = 416  # 32 divides it, as it does those of published models
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if show_reasoning %}{{ m.reasoning_content }}|{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if thinks %}<think>\n{% endif %}"
    "{% if fail %}{{ 'x' + fail }}{% endif %}"
    # what a model could have in it that is made to stop a server
    "{% if nested %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor"
    " %}{% endif %}"
    "{% if padded %}{{ '%2000000000d' % 1 }}{% endif %}"
    "{% if long %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endif %}"
)
TEXT = "The quick brown fox, 日本語 and 🎉 in one line.\ndef f(x):\n    return x\n"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of 3 layers in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("models") / "tiny-moe"
    config = jmoe.ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=8192,
    )
    jmoe.save_pretrained(LanguageModel(Decoder(config, rngs=nnx.Rngs(0))), folder, eos_token_id=0)
    # the model has more rows than the tokenizer tokens, as many do
    train_bpe([TEXT, CONVERSATIONS.read_text()] * 3, VOCAB_SIZE - 20).save(
        str(folder / "tokenizer.json")
    )
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[Engine]:
    """The engine that `serve.py` would have, without a server."""
    with Engine(
        model_folder, EngineConfig(max_batch=4, max_seq_len=256, prefill_chunk_tokens=32)
    ) as engine:
        yield engine


@pytest.fixture(scope="session")
def server_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Changes to the environment of every server, which share what they compile."""
    return one_device(tmp_path_factory.mktemp("compile_cache"))


@pytest.fixture(scope="session")
def start(
    model_folder: Path, server_env: dict[str, str | None], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., HttpProcess]:
    """`start(*options)` starts serve.py on a free port and returns when it answers. Later
    options take precedence.
    """
    env = server_env

    def start(*options: object, folder: Path = model_folder, **more: str) -> HttpProcess:
        return start_server(
            tmp_path_factory.mktemp("log") / "server.log", env | more, folder, *SIZES, *options
        )

    return start


@pytest.fixture(scope="module")
def serve(start: Callable[..., HttpProcess]) -> Iterator[Callable[..., HttpProcess]]:
    """`serve(*options)` is `start`; what it started is killed with the module."""
    started: list[HttpProcess] = []

    def serve(*options: object, **more: Any) -> HttpProcess:
        started.append(start(*options, **more))
        return started[-1]

    yield serve
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def shared_server(start: Callable[..., HttpProcess]) -> Iterator[HttpProcess]:
    """One for all tests that leave a server as it was; it logs what it compiles."""
    server = start("--policy", "resident", JAX_LOG_COMPILES="1")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def server(shared_server: HttpProcess) -> HttpProcess:
    return shared_server


@pytest.fixture(scope="module")
def client(server: HttpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0
    ) as client:
        yield client
