"""Every family beside transformers 5, where that is installed: logits, the gradient of each weight
entry by entry, and the folder that jmoe writes after a step.

transformers has no class for Ling: its tensors are renamed to those of the class whose formulas
they have (`fixtures/make.py`). float32 is compared with a tolerance of 1e-4, or of a few times what
moving transformers' weights by their last bit moves: most in a gated delta network, which carries a
state through its text. So the formulas are compared in float64 too, without such a tolerance.

Runs as `test_transformers_oracle.py` does.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config.engine import CACHE_BLOCK
from jmoe.layers.router import RouterBias
from jmoe.models.pretrained import read_config
from tests.checkpoint_variants import Tensors, read_tensors, write_variant
from tests.float64 import jax_in_float64, torch_in_float64
from tests.model_configs import CHECKPOINTS
from tests.models.test_parity import NAMES, loss_and_gradients
from tests.tiny_engines import tiny_engine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", "5", reason="needs transformers 5")
    torch = pytest.importorskip("torch")
    from tests.fixtures import make
    from tests.roundings import TOLERANCE, nudged, tolerance_of

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = 1e-9  # of a logit in float64, and of a gradient as a share of its tensor's largest
STEP = 0.05  # of gradient descent before a model is written
PLAIN = tuple(name for name in NAMES if name != "gpt_oss_mxfp4")
Record = Callable[[str, Any], None]


# ---- the models


def load_theirs(folder: Path, name: str) -> Any:
    """Return transformers' model of a folder, in float32; every tensor must have its place.

    name: the fixture whose family the folder has.
    """
    if name.startswith("bailing"):
        return load_ling(read_tensors(folder), name)
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model.eval()


def load_ling(tensors: Tensors, name: str) -> Any:
    """Return a model of the class with Ling's formulas, with Ling's tensors."""
    kind, fields, _ = make.FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **deepcopy(fields))
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    state = model.state_dict()
    left = dict(tensors)
    model.load_state_dict(
        {key: torch.from_numpy(ling_tensor(key, state, left)) for key in state}, strict=True
    )
    used = {n for n in tensors if not any(part in n for part in (".experts.", "query_key_value"))}
    assert not used & left.keys(), left.keys()
    return model.eval()


def ling_tensor(key: str, state: dict[str, Any], left: Tensors) -> np.ndarray:
    """Return the tensor that the class calls `key`; what is used once is taken out of `left`."""
    head, matched, part = key.partition(".self_attn.")
    if matched and part in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        parts = [state[f"{head}.self_attn.{one}_proj.weight"].shape[0] for one in "qkv"]
        whole = left[f"{head}.attention.query_key_value.weight"]
        split = np.split(whole, np.cumsum(parts)[:-1])
        made = split["qkv".index(part[0])]
    elif key.endswith("shared_mlp.input_linear.weight"):
        prefix = key.replace("shared_mlp.input_linear.weight", "mlp.shared_experts.")
        made = np.concatenate([left.pop(f"{prefix}{one}_proj.weight") for one in ("gate", "up")])
    elif ".experts." in key:
        prefix, _, kind = key.replace("block_sparse_moe", "mlp").partition(".experts.")
        names = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        made = np.stack(
            [
                np.concatenate([left[f"{prefix}.experts.{n}.{one}_proj.weight"] for one in names])
                for n in range(state[key].shape[0])
            ]
        )
    else:
        for old, new in make.LING_NAMES.items():
            key = key.replace(old, new)
        made = left.pop(key)
    return np.ascontiguousarray(made, np.float32)


def widen_frequencies(model: Any) -> None:
    """Compute the frequencies of rotary positions again, which loading has rounded."""
    rotary = {name: m for name, m in model.named_modules() if hasattr(m, "inv_freq")}
    assert rotary
    for module in rotary.values():
        again = type(module)(model.config)
        module.inv_freq, module.attention_scaling = again.inv_freq, again.attention_scaling
        module.original_inv_freq = again.inv_freq.clone()
        assert module.inv_freq.dtype == torch.float64


@cache
def tokens() -> np.ndarray:
    """Texts of several chunks of Llama 4 and beyond all windows of the fixtures."""
    return np.random.default_rng(0).integers(3, 64, (2, 40)).astype(np.int32)


def their_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(
            torch.from_numpy(tokens()).long(), use_cache=False
        ).logits.numpy()
    return logits


def their_gradients(model: Any) -> dict[str, np.ndarray]:
    """Return the gradient of the loss by parameter, of the routing without drawn experts."""
    model.train(model.config.model_type != "phimoe")
    balanced = getattr(model.config, "router_aux_loss_coef", 0.0) > 0
    options = {"output_router_logits": True} if balanced else {}
    ids = torch.from_numpy(tokens()).long()
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    model.eval()
    return {
        name: parameter.grad.numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@cache
def ours(name: str) -> jmoe.LanguageModel:
    return jmoe.load_pretrained(CHECKPOINTS / name, dtype="float32")


def our_gradients(model: jmoe.LanguageModel) -> Any:
    """Return the gradient of the loss as a state of parameters, computed in the model's dtype."""
    config = model.config
    split: Any = nnx.split(model.decoder, nnx.Param, RouterBias)
    coefficient = jnp.float32(config.router.aux_loss_coef / config.num_experts_per_tok)
    return loss_and_gradients(*split, jnp.asarray(tokens()), coefficient, model.dtype)[1]


def with_parameters(model: jmoe.LanguageModel, params: Any) -> jmoe.LanguageModel:
    """Return the model with other parameters; a router's bias stays."""
    graph, _, bias = nnx.split(model.decoder, nnx.Param, RouterBias)
    merged: Any = nnx.merge(graph, params, bias)
    return jmoe.LanguageModel(merged, model.config_json, dtype=model.dtype)


def in_their_layout(model: jmoe.LanguageModel, grads: Any, folder: Path) -> dict[str, np.ndarray]:
    """Return gradients by transformers' names, in its layout: as weights of a folder they are read
    by its class.
    """
    jmoe.save_pretrained(with_parameters(model, grads), folder)
    theirs = load_theirs(folder, folder.name)
    return {name: parameter.detach().numpy() for name, parameter in theirs.named_parameters()}


def largest_share(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference of an entry, as a share of its tensor's largest entry."""
    shares = {}
    for name, theirs in expected.items():
        largest = float(np.abs(theirs).max())
        difference = float(np.abs(found[name] - theirs).max())
        if largest == 0.0:
            assert difference == 0.0, name
            continue
        shares[name] = difference / largest
    return max(shares.values())


# ---- what one rounding moves


def logit_tolerance(model: Any, logits: np.ndarray) -> float:
    """Return how far logits may be apart: `TOLERANCE`, or more if roundings of the weights move
    transformers' own further.
    """
    with nudged(model):
        return tolerance_of(float(np.abs(their_logits(model) - logits).max()))


def gradient_tolerance(model: Any, gradients: dict[str, np.ndarray]) -> float:
    with nudged(model):
        return tolerance_of(largest_share(their_gradients(model), gradients))


# ---- tests


@pytest.mark.parametrize("name", PLAIN)
def test_logits_and_gradients(name: str, tmp_path: Path, record_property: Record) -> None:
    """Of the whole model, by entry."""
    theirs = load_theirs(CHECKPOINTS / name, name)
    expected, found = their_logits(theirs), np.asarray(ours(name)(tokens()))
    difference = float(np.abs(found - expected).max())
    tolerance = logit_tolerance(theirs, expected)
    record_property("largest difference of a logit", difference)
    record_property("tolerance of a logit", tolerance)
    assert difference < tolerance
    gradients = their_gradients(theirs)
    mine = in_their_layout(ours(name), our_gradients(ours(name)), tmp_path / name)
    assert mine.keys() >= gradients.keys()
    share = largest_share(mine, gradients)
    tolerance = gradient_tolerance(theirs, gradients)
    record_property("largest difference of a gradient", share)
    record_property("tolerance of a gradient", tolerance)
    assert share < tolerance


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_model_is_read_back(name: str, tmp_path: Path, record_property: Record) -> None:
    """After a step of gradient descent transformers reads the folder, without a tensor too many or
    too few, and computes jmoe's logits; the fields of config.json are as they were.
    """
    model = ours(name)
    params = nnx.split(model.decoder, nnx.Param, RouterBias)[1]
    trained = with_parameters(
        model, jax.tree.map(lambda p, g: p - STEP * g, params, our_gradients(model))
    )
    folder = tmp_path / name
    jmoe.save_pretrained(trained, folder)
    found = np.asarray(trained(tokens()))
    assert np.abs(found - np.asarray(model(tokens()))).max() > 1e-3
    theirs = load_theirs(folder, name)
    expected = their_logits(theirs)
    difference = float(np.abs(found - expected).max())
    record_property("largest difference of a logit", difference)
    assert difference < logit_tolerance(theirs, expected)
    before, after = read_config(CHECKPOINTS / name), read_config(folder)
    changed = {"dtype", "torch_dtype", "quantization_config", "num_nextn_predict_layers"}
    assert {k: v for k, v in before.items() if k not in changed and after.get(k) != v} == {}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("name", PLAIN)
def test_formulas_in_float64(name: str, tmp_path: Path, record_property: Record) -> None:
    """Nearly without rounding: logits, and gradients by entry."""
    theirs = load_theirs(CHECKPOINTS / name, name).double()
    with torch_in_float64(torch):
        widen_frequencies(theirs)
        expected, gradients = their_logits(theirs), their_gradients(theirs)
    assert expected.dtype == np.float64
    model = ours(name)
    graph, state = nnx.split(model.decoder)
    with jax_in_float64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), state)
        merged: Any = nnx.merge(graph, wide)
        exact = jmoe.LanguageModel(merged, model.config_json, dtype="float64")
        found = np.asarray(exact(tokens()))
        grads = jax.tree.map(np.asarray, our_gradients(exact))
    assert found.dtype == np.float64
    difference = float(np.abs(found - expected).max())
    record_property("largest difference of a logit", difference)
    assert difference < EXACT
    # as two folders of float32, whose sum is float64
    high = jax.tree.map(lambda g: g.astype(np.float32), grads)
    low = jax.tree.map(lambda g, h: (g - h).astype(np.float32), grads, high)
    parts = [
        in_their_layout(model, jax.tree.map(jnp.asarray, part), tmp_path / kind / name)
        for kind, part in (("high", high), ("low", low))
    ]
    share = largest_share(
        {key: parts[0][key] + np.float64(parts[1][key]) for key in parts[0]}, gradients
    )
    record_property("largest difference of a gradient", share)
    assert share < EXACT


def test_an_engine_beyond_the_first_chunk_of_llama_4(
    tmp_path: Path, record_property: Record
) -> None:
    """The log-probabilities of a prompt of three chunks and of the tokens after it; the prompt runs
    in steps that end with a chunk or inside one.
    """
    folder = write_variant(
        CHECKPOINTS / "llama4_text",
        tmp_path / "llama4_text",
        attention_chunk_size=CACHE_BLOCK,
        max_position_embeddings=512,
    )
    prompt = np.random.default_rng(2).integers(3, 64, 2 * CACHE_BLOCK + 50).tolist()
    sizes = {"max_seq_len": 512, "prefill_chunk_tokens": 48, "policy": "resident"}
    with tiny_engine(folder, **sizes, native="off") as engine:
        options = {"max_new_tokens": 90, "logprobs": 1, "prompt_logprobs": 1}
        (served,) = engine.generate([prompt], ignore_eos=True, **options)
    whole = torch.tensor([prompt + served.token_ids])
    with torch.no_grad():
        logits = load_theirs(folder, "llama4_text")(whole, use_cache=False).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, whole[0, 1:, None])[:, 0].numpy()
    assert served.logprobs is not None and served.prompt_logprobs is not None
    found = [each.logprob for each in (*served.prompt_logprobs, *served.logprobs)]
    difference = float(np.abs(np.array(found) - expected).max())
    record_property("largest difference of a log-probability", difference)
    assert difference < TOLERANCE
