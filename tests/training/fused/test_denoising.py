"""An encoder and a decoder, trained by span corruption: the loss beside a plain model of the text,
on one device and on several, and what each side sees.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jmoe.config import (
    CommConfig,
    DenoisingConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    RouterConfig,
    TrainConfig,
)
from jmoe.configs import PRESETS
from jmoe.layers.span_corruption import corrupt_spans
from jmoe.mesh import ACCUMULATED_BATCH, BATCH
from jmoe.models.decoder import Decoder, DecoderExecution
from jmoe.training.fused.denoising import DenoisingTrainer
from jmoe.training.state import TrainState
from jmoe.training.trainer import make_trainer
from jmoe.types import PyTree
from tests.arrays import assert_close
from tests.config.test_honoured import changed
from tests.model_configs import OPTIMIZER, mesh_of

SEQUENCE, BATCH_SIZE = 16, 16
# two layers of the encoder and three of the decoder, of which every second has experts
MODEL = ModelConfig(
    vocab_size=128,
    hidden_size=16,
    num_encoder_layers=2,
    num_hidden_layers=3,
    decoder_sparse_step=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    moe_intermediate_size=12,
    num_experts=8,
    num_experts_per_tok=2,
    hidden_act="gelu",
    initializer_range=0.3,
    router=RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01),
)
EVERY_LAYER = dataclasses.replace(MODEL, decoder_sparse_step=1)
TWO_LAYERS = dataclasses.replace(EVERY_LAYER, num_hidden_layers=2)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    denoising=DenoisingConfig(share=0.3, span_length=2.0),
    evaluation=EvaluationConfig(sample_tokens=0),
    batch_size=BATCH_SIZE,
    sequence_length=SEQUENCE,
    gradient_accumulation_steps=2,
    compute_dtype="float32",
)
AT_ONCE = dataclasses.replace(
    CONFIG, model=TWO_LAYERS, batch_size=BATCH_SIZE // 2, gradient_accumulation_steps=1
)
PARTS = CONFIG.text_parts
TOKENS = np.random.default_rng(0).integers(
    0, CONFIG.text_vocab_size, (2, BATCH_SIZE // 2, SEQUENCE + 1), np.int32
)


@functools.cache
def trainer_on(
    config: TrainConfig, shape: tuple[int, int, int], replicate: int = 1, **comm: Any
) -> DenoisingTrainer:
    mesh = MeshConfig(*shape, replicate=replicate)
    config = dataclasses.replace(config, mesh=mesh, comm=CommConfig(**comm))
    trainer = make_trainer(config, mesh_of(*shape, replicas=replicate))
    assert isinstance(trainer, DenoisingTrainer)
    return trainer


@functools.cache
def run_on(
    config: TrainConfig, shape: tuple[int, int, int], **options: Any
) -> tuple[list[dict[str, Any]], float]:
    """The metrics of three steps, and the held-out loss after them."""
    trainer, steps = trainer_on(config, shape, **options), []
    mesh, state = trainer.model.mesh, trainer.init()
    tokens = TOKENS[: config.gradient_accumulation_steps]
    batch = jax.device_put(tokens, NamedSharding(mesh, ACCUMULATED_BATCH))
    for _ in range(3):
        state, metrics = trainer.step(state, batch, full_capacity=True)
        steps.append(jax.device_get(metrics))
    ones = np.ones((BATCH_SIZE // 2, SEQUENCE), np.float32)
    held_out = jax.device_put((TOKENS[0], ones), NamedSharding(mesh, BATCH))
    first, again = (float(trainer.evaluate_batches(state, [held_out])[0]) for _ in range(2))
    assert first == again
    return steps, first


# A plain model of the text, in float64 and without anything of `jmoe.models` and `jmoe.layers`

Arrays = NDArray[np.float64]


class PlainModel:
    """An encoder and a decoder as their equations say, one sequence and one head at a time.

    routed: the logits of the router of each layer with experts.
    """

    def __init__(self, params: PyTree) -> None:
        self.params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
        self.routed: dict[tuple[str, int], list[Arrays]] = {}

    def layer(self, stack: str, number: int) -> PyTree:
        return jax.tree.map(lambda w: w[number], self.params[stack])

    @staticmethod
    def norm(x: Arrays, scale: Arrays) -> Arrays:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale

    @staticmethod
    def rotate(x: Arrays) -> Arrays:
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] * 10_000.0 ** -(np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    @staticmethod
    def attend(q: Arrays, k: Arrays, v: Arrays, *, causal: bool) -> Arrays:
        scores = q @ k.T / math.sqrt(q.shape[-1])
        if causal:
            scores = np.where(np.tri(*scores.shape, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return p / p.sum(axis=-1, keepdims=True) @ v

    def self_attention(self, x: Arrays, own: PyTree, *, causal: bool) -> Arrays:
        q1, q2, k, v = np.split(x @ own["w_qkv"], 4, axis=-1)  # two heads share keys and values
        k = self.rotate(k)
        heads = [self.attend(self.rotate(q), k, v, causal=causal) for q in (q1, q2)]
        return np.concatenate(heads, axis=-1) @ own["w_out"]

    def cross_attention(self, x: Arrays, encoded: Arrays, own: PyTree) -> Arrays:
        k, v = np.split(encoded @ own["w_kv"], 2, axis=-1)
        heads = [self.attend(q, k, v, causal=False) for q in np.split(x @ own["w_q"], 2, axis=-1)]
        return np.concatenate(heads, axis=-1) @ own["w_out"]

    @staticmethod
    def mlp(x: Arrays, up: Arrays, down: Arrays) -> Arrays:
        h = x @ up
        return h * (1 + np.vectorize(math.erf)(h / math.sqrt(2))) / 2 @ down

    def feed_forward(self, x: Arrays, own: PyTree, name: tuple[str, int]) -> Arrays:
        if "mlp" in own:
            return self.mlp(x, own["mlp"]["w_up"], own["mlp"]["w_down"])
        experts = own["moe"]["experts"]
        logits = x @ own["moe"]["router"]["kernel"]
        self.routed.setdefault(name, []).append(logits)
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        y = np.zeros_like(x)
        for token, row in enumerate(p):
            best = np.argsort(-row)[:2]
            for e in best:
                out = self.mlp(x[token : token + 1], experts["w_up"][e], experts["w_down"][e])
                y[token] += row[e] / row[best].sum() * out[0]
        return y

    def block(self, x: Arrays, name: tuple[str, int], encoded: Arrays | None) -> Arrays:
        own, causal = self.layer(*name), encoded is not None
        h = self.norm(x, own["attention_norm"]["scale"])
        x = x + self.self_attention(h, own["attention"], causal=causal)
        if encoded is not None:
            h = self.norm(x, own["cross_attention_norm"]["scale"])
            seen = self.norm(encoded, own["encoder_norm"]["scale"])
            x = x + self.cross_attention(h, seen, own["cross_attention"])
        return x + self.feed_forward(self.norm(x, own["feed_forward_norm"]["scale"]), own, name)

    def logits(self, encoder_inputs: Any, decoder_inputs: Any, layers: list[Any]) -> Arrays:
        x, y = (self.params["embedding"][inputs] for inputs in (encoder_inputs, decoder_inputs))
        for stack, number in layers:
            if stack.startswith("cross"):
                y = self.block(y, (stack, number), x)
            else:
                x = self.block(x, (stack, number), None)
        logits: Arrays = self.norm(y, self.params["norm"]["scale"]) @ self.params["head"]
        return logits

    def router_losses(self) -> tuple[float, float]:
        """The (balance, z) loss, means over the layers with experts, with their coefficients."""
        balance, z = [], []
        for parts in self.routed.values():
            logits = np.concatenate(parts)
            p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
            chosen = np.argsort(-logits, axis=-1)[:, :2]
            share = np.bincount(chosen.reshape(-1), minlength=8) / chosen.size
            balance.append(8 * (share * p.mean(axis=0)).sum())
            z.append((np.log(np.exp(logits).sum(axis=-1)) ** 2).mean())
        return 0.1 * float(np.mean(balance)), 0.01 * float(np.mean(z))


def plain_losses(config: TrainConfig, step: int) -> tuple[float, float, float]:
    """(loss, balance loss, z loss) of the first step's parameters with the spans of `step`."""
    params = nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(config.seed))))
    layers = [(layer.stack_name, layer.number) for layer in config.model.layers]
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    nll: list[float] = []
    router_losses = []
    for tokens_BS in TOKENS[..., 1:]:
        model = PlainModel(params)
        rows = corrupt_spans(jnp.asarray(tokens_BS), key, config.denoising, config.model.vocab_size)
        for encoder, decoder, targets in zip(*map(np.asarray, rows), strict=True):
            logits = model.logits(encoder, decoder, layers)
            logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            nll += [-logs[at, token] for at, token in enumerate(targets)]
        router_losses.append(model.router_losses())
    assert len(nll) == BATCH_SIZE * PARTS.decoder
    balance, z = np.mean(router_losses, axis=0)
    return float(np.mean(nll)), float(balance), float(z)


@pytest.mark.parametrize(
    "model",
    [pytest.param(MODEL, marks=pytest.mark.slow), EVERY_LAYER],
    ids=["some layers", "all layers"],
)
def test_losses_are_those_of_a_plain_model(model: ModelConfig) -> None:
    config = dataclasses.replace(CONFIG, model=model)
    steps, _ = run_on(config, (1, 1, 1))
    loss, balance, z = plain_losses(config, 0)
    assert float(steps[0]["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(steps[0]["balance_loss"]) == pytest.approx(balance, rel=1e-5)
    assert float(steps[0]["z_loss"]) == pytest.approx(z, rel=1e-5)
    assert float(steps[0]["loss"]) != pytest.approx(plain_losses(config, 1)[0], rel=1e-5)


def test_gradients_are_those_of_the_plain_loss() -> None:
    """Along the step's own gradient the plain loss falls as the gradient's norm says."""
    model = dataclasses.replace(MODEL, router=RouterConfig(aux_loss_coef=0.0))
    config = dataclasses.replace(CONFIG, model=model, gradient_accumulation_steps=1)
    trainer = trainer_on(config, (1, 1, 1))
    state = trainer.init()
    batch = jax.device_put(TOKENS.reshape(1, BATCH_SIZE, -1), jax.devices()[0])

    @jax.jit
    def gradients(state: TrainState) -> PyTree:
        return trainer.shard_over_mesh(
            functools.partial(trainer.gradients_local, full_capacity=True),
            in_specs=(trainer.state_specs, ACCUMULATED_BATCH),
            out_specs=jax.sharding.PartitionSpec(),
        )(state, batch)[0]

    grads = jax.device_get(gradients(state))
    length = math.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    rows = corrupt_spans(
        jnp.asarray(TOKENS[..., 1:].reshape(BATCH_SIZE, -1)), key, config.denoising, 128
    )
    layers = [(layer.stack_name, layer.number) for layer in model.layers]

    def plain_loss(distance: float) -> float:
        moved = jax.tree.map(
            lambda w, g: np.asarray(w, np.float64) + distance / length * g, state.params, grads
        )
        nll = []
        for encoder, decoder, targets in zip(*map(np.asarray, rows), strict=True):
            logits = PlainModel(moved).logits(encoder, decoder, layers)
            nll.append(
                np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(targets)), targets]
            )
        return float(np.mean(nll))

    slope = (plain_loss(1e-5) - plain_loss(-1e-5)) / 2e-5
    assert slope == pytest.approx(length, rel=1e-4)


MESHES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "data and experts": ((2, 1, 2), {}),
    "eight devices of two nodes": ((2, 2, 2), {}),
    "in two chunks": ((1, 2, 2), {"schedule": "pipelined"}),
    "copies of the state": ((4, 1, 2), {"replicate": 2}),
}
MORE: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "parameters one by one": ((2, 1, 2), {"fuse_dense": False, "schedule": "none"}),
    "experts split over data": ((2, 1, 2), {"shard_experts": "weights"}),
    "split embedding": ((2, 1, 2), {"embedding": "rows"}),
    "gradients as they come": ((2, 1, 2), {"schedule": "ready", "bucket_bytes": 4000}),
}
QUICK = "data and experts"  # of MESHES; the others are slow
ACCUMULATED: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "data": ((4, 1, 1), {}),
    "experts alone, all-to-alls first": ((1, 1, 4), {"schedule": "priority"}),
}


def assert_devices_lose_alike(
    config: TrainConfig, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    steps, held_out = run_on(config, (1, 1, 1))
    several, held_out_there = run_on(config, shape, **options)
    for one, other in zip(steps, several, strict=True):
        for name in ("loss", "grad_norm", "balance_loss", "z_loss", "entropy"):
            np.testing.assert_allclose(other[name], one[name], rtol=2e-5, err_msg=name)
        np.testing.assert_array_equal(other["counts"], one["counts"])
    assert held_out_there == pytest.approx(held_out, rel=2e-5)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(*MESHES[name], marks=() if name == QUICK else pytest.mark.slow)
        for name in MESHES
    ],
    ids=MESHES,
)
def test_devices_lose_alike(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    assert_devices_lose_alike(AT_ONCE, shape, options)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), MORE.values(), ids=MORE)
def test_no_order_of_collectives_changes_losses(
    shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    assert_devices_lose_alike(AT_ONCE, shape, options)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), ACCUMULATED.values(), ids=ACCUMULATED)
def test_devices_accumulate_alike(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    """With layers of four kinds, and gradients of two accumulation steps."""
    assert_devices_lose_alike(CONFIG, shape, options)


def test_the_held_out_loss_is_that_of_the_targets() -> None:
    """Of whole sequences each token counts once; a sequence of padding counts nothing."""
    trainer = trainer_on(CONFIG, (1, 1, 1))
    state = trainer.init()
    weights = np.ones((BATCH_SIZE // 2, SEQUENCE), np.float32)
    weights[-1] = 0
    both = jax.device_put((TOKENS[0], weights), jax.devices()[0])
    (without_last,) = trainer.evaluate_batches(state, [both])
    rows = corrupt_spans(
        jnp.asarray(TOKENS[0, :-1, 1:]), jax.random.key(CONFIG.seed), CONFIG.denoising, 128
    )
    model = PlainModel(state.params)
    layers = [(layer.stack_name, layer.number) for layer in MODEL.layers]
    means = []
    for encoder, decoder, targets in zip(*map(np.asarray, rows), strict=True):
        logits = model.logits(encoder, decoder, layers)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        means.append(-logs[np.arange(len(targets)), targets].mean())
    assert float(without_last) == pytest.approx(SEQUENCE * sum(means), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "remat"),
    [("bfloat16", "none"), ("float32", "layer")],
)
def test_what_is_computed_again_changes_nothing(dtype: Any, remat: Any) -> None:
    config = dataclasses.replace(AT_ONCE, compute_dtype=dtype, remat=remat, native="off")
    with jax.numpy_dtype_promotion("standard"):  # JAX's attention needs it in bfloat16
        steps, held_out = run_on(config, (1, 1, 1))
    expected, held_out_before = run_on(AT_ONCE, (1, 1, 1))
    allowed = 2e-2 if dtype == "bfloat16" else 2e-6
    for one, other in zip(expected, steps, strict=True):
        assert float(other["loss"]) == pytest.approx(float(one["loss"]), rel=allowed)
    assert held_out == pytest.approx(held_out_before, rel=allowed)


def hidden_of(decoder: Decoder, encoder: NDArray[np.int32], own: NDArray[np.int32]) -> jax.Array:
    tokens = jnp.asarray(np.concatenate([encoder, own])[None])
    execution = DecoderExecution(encoder_length=len(encoder))
    hidden, _ = decoder(tokens, full_capacity=True, execution=execution)
    return hidden[0]


@pytest.mark.slow
def test_each_side_sees_what_it_may() -> None:
    """The decoder's tokens see all of the encoder's text and their own past, and the encoder sees
    nothing of the decoder.
    """
    decoder = Decoder(MODEL, rngs=nnx.Rngs(0))
    encoder, own = TOKENS[0, 0, 1:10], TOKENS[0, 1, 1:7]
    whole = np.asarray(hidden_of(decoder, encoder, own))
    assert whole.shape == (6, MODEL.hidden_size)
    for place in range(len(encoder)):
        other = encoder.copy()
        other[place] += 1
        differs = np.abs(np.asarray(hidden_of(decoder, other, own)) - whole).max(axis=1)
        assert (differs > 1e-4).all(), place
    for place in range(len(own)):
        later = own.copy()
        later[place] += 1
        differs = np.abs(np.asarray(hidden_of(decoder, encoder, later)) - whole).max(axis=1)
        assert (differs[:place] == 0).all() and (differs[place:] > 1e-4).all(), place
    assert_close(hidden_of(decoder, encoder, own[:3]), whole[:3], 1e-5)


@pytest.mark.slow
def test_the_last_layer_of_the_encoder_is_read() -> None:
    """Both sides have layers of their own: a change of either reaches the hidden states."""
    decoder = Decoder(MODEL, rngs=nnx.Rngs(0))
    encoder, own = TOKENS[0, 0, 1:10], TOKENS[0, 1, 1:7]
    whole = np.asarray(hidden_of(decoder, encoder, own))
    stacks = ("dense_layers", "moe_layers", "cross_dense_layers", "cross_moe_layers")
    for stack in stacks:
        other = Decoder(MODEL, rngs=nnx.Rngs(0))
        norm = getattr(other, stack).feed_forward_norm
        norm.scale[...] = norm.scale[...].at[-1].multiply(1.5)
        assert not np.allclose(hidden_of(other, encoder, own), whole, atol=1e-4), stack


def test_sizes_are_counted() -> None:
    for model in (MODEL, EVERY_LAYER, dataclasses.replace(MODEL, attention_bias=True)):
        decoder = nnx.eval_shape(lambda model=model: Decoder(model, rngs=nnx.Rngs(0)))
        params = nnx.to_pure_dict(nnx.state(decoder, nnx.Param))
        sizes = [w.size for w in jax.tree.leaves(params)]
        assert model.total_and_active_parameters()[0] == sum(sizes)


def test_flops_are_those_of_both_sides() -> None:
    """6 for each parameter that a token passes, and 12 for each pair of a query and a key."""
    d, f, e, k, v = 16, 12, 8, 2, 128
    attention, experts, norm = d * 32 + 16 * d, 2 * k * d * f + d * e, 2 * d
    encoder = 2 * (attention + experts + norm)
    decoder = 3 * (attention + experts + norm + 2 * d * d)
    m, t = PARTS
    pairs = 2 * m * m + 3 * t * t / 2 + 3 * t * m
    flops = 6 * (m * (encoder + 3 * d * 16 + d) + t * (decoder + v * d + d)) + 12 * d * pairs
    config = dataclasses.replace(CONFIG, model=EVERY_LAYER)
    assert config.flops_per_token * SEQUENCE == pytest.approx(flops, rel=1e-12)


def test_the_preset_has_the_sizes_that_it_says() -> None:
    description, config = PRESETS["t5-moe"]
    assert config.text_parts == (512, 113)
    assert config.text_vocab_size == 32128 - 29
    assert len(config.model.expert_layers) == 24
    assert "T5-Base with 16 experts" in description
    dense = dataclasses.replace(config.model, num_experts=0).total_and_active_parameters()[0]
    assert dense / 1e6 == pytest.approx(220, rel=0.02)  # as the paper says of T5-Base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.bidirectional": True}, "bidirectional = True: must be False with num_encoder"),
        ({"model.position": "learned"}, "position = 'learned': must be 'rope' with num_encoder"),
        ({"model.sliding_window": 4}, "sliding_window = 4: must be None with num_encoder_layers"),
        ({"model.attention_sinks": True}, "attention_sinks = True: must be False with"),
        ({"model.qk_norm": "head"}, "qk_norm = 'head': must be 'none' with num_encoder_layers"),
        ({"model.first_k_dense_replace": 1}, "first_k_dense_replace = 1: must be 0 with num_enc"),
        ({"model.decoder_sparse_step": 3}, "decoder_sparse_step = 3: must not exceed num_encoder"),
        ({"model.num_encoder_layers": -1}, "num_encoder_layers = -1: must not be negative"),
        (
            {"model.num_encoder_layers": 20_000},
            "num_encoder_layers = 20000: must be at most 10,000",
        ),
        ({"model.vocab_size": 3}, "model.vocab_size = 3: must exceed the 3 ids that stand for"),
        ({"tiers.experts": "host", "tiers.optimizer": "host"}, "tiers.experts = 'host': is not"),
        ({"comm.packing": 2}, "comm.packing = 2: is not supported with model.num_encoder_layers"),
        ({"evaluation.sample_tokens": 4}, "evaluation.sample_tokens = 4: is not supported with"),
        ({"data.mask_documents": True}, "data.mask_documents = True: is not supported with"),
        ({"init_from": "model"}, "init_from = 'model': is not supported with model.num_encoder"),
        ({"plan": True}, "plan = True: is not supported with model.num_encoder_layers"),
        ({"mesh.context": 2}, "mesh.context = 2: must be 0 or 1 with attention in both directions"),
        ({"sequence_length": 1}, "sequence_length = 1: must be at least 2 with model.num_encoder"),
        ({"denoising.share": 1.0}, "denoising.share = 1.0: must be between 0 and 1"),
        ({"denoising.span_length": 0.5}, "denoising.span_length = 0.5: must be at least 1"),
        (
            {"model.num_encoder_layers": 0},
            "denoising.share = 0.3: must be 0.15 without model.num_encoder_layers",
        ),
        ({"masking.share": 0.3}, "masking.share = 0.3: must be 0.15 without model.bidirectional"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(CONFIG, changes)
