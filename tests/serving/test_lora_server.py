"""`serve.py MODEL --lora NAME=FOLDER ...`: adapters by the request's model."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.config import LoraConfig
from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import Engine
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.lora import adapted_parameters, initial_adapters
from jmoe.models.peft_files import write_adapter_folder
from jmoe.models.pretrained import read_config
from tests.http_servers import HttpProcess


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter with a random B over a model."""
    fields = read_config(model)
    lora = LoraConfig(rank=4, targets=("attention", "experts"))
    config, family = model_config(fields), family_of(fields)
    parameters = adapted_parameters(config, family, lora.targets)
    random = np.random.default_rng(seed)
    adapters = jax.tree.map(
        lambda x: random.standard_normal(x.shape, np.float32) * 0.3,
        initial_adapters(jax.random.key(0), parameters, 4),
    )
    write_adapter_folder(folder, parameters, adapters, lora, str(model))
    return folder


@pytest.mark.slow
def test_each_name_is_a_model(
    serve: Callable[..., HttpProcess], model_folder: Path, tmp_path: Path
) -> None:
    folders = {name: write_adapter(model_folder, tmp_path / name, i) for i, name in enumerate("ab")}
    options = tuple(f"{name}={folder}" for name, folder in folders.items())
    server, base = serve("--lora", *options), model_folder.name
    cards = server.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        (base, None),
        ("a", base),
        ("b", base),
    ]
    assert server.get("/v1/models/b").json()["id"] == "b"
    sizes: dict[str, Any] = {"max_batch": 4, "max_seq_len": 256, "prefill_chunk_tokens": 32}
    texts = {}
    with Engine(model_folder, EngineConfig(**sizes, lora=options)) as engine:
        for name in (base, "a", "b"):
            adapter = "" if name == base else name
            wanted: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "adapter": adapter}
            texts[name] = engine.generate(["def f"], **wanted)[0].text
    assert len({*texts.values()}) == 3
    for name, text in texts.items():
        body = {"prompt": "def f", "max_tokens": 12, "temperature": 0, "model": name}
        answer = server.post("/v1/completions", **body).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
        said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": name}
        assert server.post("/v1/chat/completions", **said).json()["model"] == name
    refused = server.post("/v1/completions", prompt="x", model="c")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    server.process.send_signal(signal.SIGHUP)
    server.until_said("the weights stay as they were: lora = ")
