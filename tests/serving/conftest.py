"""A model of milliseconds a token with a real byte-level tokenizer and a chat template, and servers of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import flax.nnx as nnx
import pytest
from http_servers import HttpProcess, start_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jmoe
from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import Engine
from jmoe.models.decoder import Decoder
from jmoe.models.pretrained import LanguageModel

END = "<|endoftext|>"
VOCAB_SIZE = 400
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if fail %}{{ 'x' + fail }}{% endif %}"
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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 20,  # the model has more rows than the tokenizer tokens, as many do
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, Path(__file__).read_text()] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:
    """The engine that `serve.py` would have, without a server."""
    with Engine(model_folder, EngineConfig(max_batch=4, max_seq_len=256, prefill_chunk_tokens=32)) as engine:
        yield engine


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all servers of a session."""
    return tmp_path_factory.mktemp("compile_cache")


@pytest.fixture(scope="module")
def serve(
    model_folder: Path, compile_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., HttpProcess]]:
    """`serve(*options)` starts serve.py on a free port and returns when it answers; it is killed with the module."""
    started: list[HttpProcess] = []

    def start(*options: object, folder: Path = model_folder) -> HttpProcess:
        log = tmp_path_factory.mktemp("log") / "server.log"
        server = start_server(folder, log, compile_cache, *options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()
