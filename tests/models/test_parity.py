"""The decoder against transformers: tiny checkpoints of every family with stored references (see
fixtures/make.py).

Legend: B batch, S sequence, V vocabulary, N layers with experts, T = B S tokens, E experts.
"""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmoe
from jmoe.config import OptimizerConfig
from jmoe.layers.router import RouterBias
from jmoe.mesh import path_names
from jmoe.models.decoder import output_logits
from jmoe.models.pretrained import abstract_decoder, read_config
from jmoe.models.weights import list_parameters
from jmoe.optim.adamw import OptimizerStepScalars, adamw_update
from tests.model_configs import CHECKPOINTS

NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
# every kind of attention is among these; the others are slow
PADDED = ("deepseek_v3", "gpt_oss", "granitemoe", "llama4_text_chunks", "mixtral", "qwen3_next")
TOLERANCE = 1e-4  # of a logit
LOSS_TOLERANCE = 1e-4
# {ending of a stored name: of the name in memory}
OTHER_NAMES = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}


@cache
def loaded(name: str) -> jmoe.LanguageModel:
    return jmoe.load_pretrained(CHECKPOINTS / name, dtype="float32")


@cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(CHECKPOINTS / name / "reference.npz") as arrays:
        return {
            key: arrays[key].astype(np.int32) if arrays[key].dtype == np.int16 else arrays[key]
            for key in arrays
        }


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(name: str) -> None:
    """Logits of the text, and each new token from the reference's own past, in a row up to its
    first near-tie.
    """
    ref = reference(name)
    length, new = ref["input_ids"].shape[1], ref["greedy_margin"].shape[1]
    logits = np.asarray(loaded(name)(ref["greedy"][:, :-1]))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(ref["greedy"][:, :length], ref["input_ids"])
    np.testing.assert_allclose(logits[:, :length], ref["logits"], rtol=0, atol=TOLERANCE)
    clear = np.cumprod(ref["greedy_margin"] > 2 * TOLERANCE, axis=1).astype(bool)
    assert clear.sum() > clear.size // 2
    np.testing.assert_array_equal(
        logits.argmax(axis=-1)[:, -new:][clear], ref["greedy"][:, -new:][clear]
    )


@pytest.mark.parametrize("name", NAMES)
def test_routing(name: str) -> None:
    ref = reference(name)
    routing = loaded(name).routing(ref["input_ids"])
    assert routing.logits_TE is not None
    np.testing.assert_allclose(routing.logits_TE, ref["router_logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(np.sort(routing.topk_idx_TK), np.sort(ref["router_idx"]))


@pytest.mark.parametrize(
    "name", [n if n in PADDED else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_padded_batch(name: str) -> None:
    ref = reference(name)
    mask_BS = ref["padded_mask"].astype(bool)
    # one row is padded on the left, one on the right
    assert not mask_BS[0, 0] and not mask_BS[1, -1]
    logits = np.asarray(loaded(name)(ref["padded_ids"], mask_BS))
    np.testing.assert_allclose(
        logits[mask_BS], ref["padded_logits"][mask_BS], rtol=0, atol=TOLERANCE
    )


def transformers_balance_loss(stats: Any, num_tokens: int) -> jax.Array:
    """E * sum_e (assignments to e / rows) (mean probability of e), over the rows of all layers
    together.
    """
    layers, experts = stats.counts_E.shape
    rows = layers * num_tokens
    share_E = stats.counts_E.astype(jnp.float32).sum(axis=0) / rows
    return experts * (share_E * stats.probs_sum_E.sum(axis=0) / rows).sum()


@partial(jax.jit, static_argnums=(0, 5))
def loss_and_gradients(
    graph: Any,
    params: Any,
    rest: Any,
    tokens_BS: jax.Array,
    balance_coef: jax.Array,
    dtype: str = "float32",
) -> Any:
    def loss(params: Any) -> jax.Array:
        decoder = nnx.merge(graph, params, rest)
        hidden, stats = decoder(tokens_BS, dtype=dtype, train=True)
        logits = output_logits(decoder, hidden)
        nll = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens_BS[:, 1:]
        ).mean()
        return nll + balance_coef * transformers_balance_loss(stats, tokens_BS.size)

    return jax.value_and_grad(loss)(params)


@jax.jit
def adamw(state: tuple[Any, Any, Any], grads: Any, step: jax.Array) -> tuple[Any, Any, Any]:
    """The optimizer of the training step, with decay on every parameter."""
    config = OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    now = OptimizerStepScalars(jnp.float32(1e-3), step, jnp.float32(1.0), jnp.bool_(True))
    new = jax.tree.map(
        lambda w, m, v, g: adamw_update(w, m, v, g, config=config, decay=True, step_scalars=now),
        *state,
        grads,
    )
    return jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), new)


def in_memory_name(name: str, family: str) -> str:
    """transformers holds all experts of a layer in one tensor, whatever their names on disk."""
    if family == "phimoe":
        name = name.replace(".gate.weight", ".router.weight")
    for ending, other in OTHER_NAMES.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + other
    name = name.replace("block_sparse_moe", "mlp")
    head, experts, tail = name.partition(".mlp.experts.")
    kinds = {
        "w1": "gate_up_proj",
        "w3": "gate_up_proj",
        "w2": "down_proj",
        "gate_proj": "gate_up_proj",
    }
    kinds |= {"up_proj": "gate_up_proj", "down_proj": "down_proj"}
    parts = tail.split(".")
    return f"{head}{experts}{kinds[parts[1]]}" if experts and len(parts) == 3 else name


# Packed experts are dequantised when they are loaded: from there on it is the training of gpt_oss.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in ("deepseek_v3", "gpt_oss", "mixtral_sharded") else pytest.mark.slow,
        )
        for name in NAMES
        if name != "gpt_oss_mxfp4"
    ],
)
def test_training(name: str) -> None:
    """The loss with the balance loss, the gradient of every tensor, and five steps of AdamW."""
    ref, model = reference(name), loaded(name)
    config, tokens_BS = model.config, jnp.asarray(ref["input_ids"])
    split: Any = nnx.split(model.decoder, nnx.Param, RouterBias)
    graph, params, rest = split
    coef = jnp.float32(config.router.aux_loss_coef / config.num_experts_per_tok)
    loss, grads = loss_and_gradients(graph, params, rest, tokens_BS, coef)
    assert float(loss) == pytest.approx(float(ref["train_loss"]), abs=LOSS_TOLERANCE)

    squares: dict[str, float] = {}
    family = read_config(CHECKPOINTS / name)["model_type"]
    by_path = {
        path_names(path): g
        for path, g in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads))
    }
    for parameter in list_parameters(abstract_decoder(config)[2], config, family):
        if parameter.path not in by_path:
            continue  # the correction bias has no gradient
        for piece in parameter.pieces():
            part = np.asarray(by_path[parameter.path][piece.at])[..., slice(*piece.columns)]
            key = in_memory_name(piece.name, family)
            squares[key] = squares.get(key, 0.0) + float(np.square(part.astype(np.float64)).sum())
    assert squares.keys() == set(ref["grad_names"].tolist())
    for key, norm in zip(ref["grad_names"].tolist(), ref["grad_norms"], strict=True):
        assert np.sqrt(squares[key]) == pytest.approx(float(norm), rel=1e-4, abs=1e-6), key

    zeros = jax.tree.map(jnp.zeros_like, params)
    state, losses = (params, zeros, zeros), []
    for step in range(5):
        loss, grads = loss_and_gradients(graph, state[0], rest, tokens_BS, jnp.float32(0.0))
        state = adamw(state, grads, jnp.int32(step))
        losses.append(float(loss))
    np.testing.assert_allclose(losses, ref["adamw_losses"], rtol=0, atol=LOSS_TOLERANCE)


def stored_weights(name: str) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint of bfloat16, in float64."""
    data = (CHECKPOINTS / name / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    weights = {}
    for key, entry in json.loads(data[8:start]).items():
        if key != "__metadata__":
            assert entry["dtype"] == "BF16"
            first, last = entry["data_offsets"]
            bits = (
                np.frombuffer(data[start + first : start + last], np.uint16).astype(np.uint32) << 16
            )
            weights[key] = bits.view(np.float32).reshape(entry["shape"]).astype(np.float64)
    return weights


def olmoe_in_numpy(
    fields: dict[str, Any], w: dict[str, np.ndarray], tokens_BS: np.ndarray
) -> np.ndarray:
    """Logits after `modeling_olmoe.py` of transformers: q and k are normalised, then all three
    clipped, rotated.
    """
    heads = fields["num_attention_heads"]
    groups = fields["num_key_value_heads"]
    eps = fields["rms_norm_eps"]
    dim, length, clip = fields["hidden_size"] // heads, tokens_BS.shape[1], fields["clip_qkv"]
    angle = np.arange(length)[:, None] * fields["rope_parameters"]["rope_theta"] ** (
        -np.arange(0, dim, 2) / dim
    )
    cos, sin = (np.concatenate([f(angle)] * 2, axis=1) for f in (np.cos, np.sin))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], -1, dim).swapaxes(1, 2)

    def rotated(x: np.ndarray) -> np.ndarray:
        return x * cos + np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], axis=-1) * sin

    x = w["model.embed_tokens.weight"][tokens_BS]
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k = (
            norm(linear(h, f"{at}.self_attn.{n}_proj"), f"{at}.self_attn.{n}_norm") for n in "qk"
        )
        v = linear(h, f"{at}.self_attn.v_proj")
        if clip is not None:
            q, k, v = (np.clip(y, -clip, clip) for y in (q, k, v))
        q, k, v = (
            rotated(split(q)),
            *(np.repeat(y, heads // groups, axis=1) for y in (rotated(split(k)), split(v))),
        )
        scores = q @ k.swapaxes(2, 3) / np.sqrt(dim) + np.triu(
            np.full((length, length), -np.inf), 1
        )
        x = x + linear(
            (softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape), f"{at}.self_attn.o_proj"
        )
        h = norm(x, f"{at}.post_attention_layernorm")
        probs = softmax(linear(h, f"{at}.mlp.gate"))
        kth = np.sort(probs, axis=-1)[..., -fields["num_experts_per_tok"], None]
        for e in range(fields["num_experts"]):
            gate, up = (linear(h, f"{at}.mlp.experts.{e}.{n}_proj") for n in ("gate", "up"))
            out = linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.experts.{e}.down_proj")
            x = x + np.where(probs >= kth, probs, 0)[..., e, None] * out
    return linear(norm(x, "model.norm"), "lm_head")


def test_clipped_queries_keys_and_values(tmp_path: Path) -> None:
    """`clip_qkv` of OLMoE against a reference in NumPy, which without it gives the stored logits
    of transformers.
    """
    ref = reference("olmoe")
    weights = stored_weights("olmoe")
    fields = read_config(CHECKPOINTS / "olmoe")
    plain = olmoe_in_numpy(fields, weights, ref["input_ids"])
    np.testing.assert_allclose(plain, ref["logits"], rtol=0, atol=TOLERANCE)
    clipped = olmoe_in_numpy(fields | {"clip_qkv": 0.5}, weights, ref["input_ids"])
    assert np.abs(clipped - plain).max() > 100 * TOLERANCE
    shutil.copy(CHECKPOINTS / "olmoe" / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"clip_qkv": 0.5}))
    model = jmoe.load_pretrained(tmp_path, dtype="float32")
    np.testing.assert_allclose(model(ref["input_ids"]), clipped, rtol=0, atol=TOLERANCE)
