"""The decoder against a plain one without stacks, scans, blocks or permutations, for every option
of `ModelConfig`.

Legend: B batch, S sequence, D hidden, F feed-forward hidden, V vocabulary, E experts, H heads, G
key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.config import ModelConfig, Remat, RouterConfig, YarnConfig
from jmoe.layers.rotary import rotary_frequencies
from jmoe.layers.router import route
from jmoe.mesh import is_expert
from jmoe.models import decoder
from jmoe.models.decoder import Decoder, DecoderExecution
from jmoe.models.layer_patterns import find_patterns
from jmoe.types import PyTree

B, S = 2, 20
TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
LATENT = {
    "kv_lora_rank": 10,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt": {
        "norm": "layernorm",
        "position": "learned",
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "one key/value head": {
        "num_key_value_heads": 1,
        "qk_norm": "full",
        "tie_word_embeddings": True,
    },
    "every second layer": {
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "num_experts_per_tok": 1,
    },
    "no experts": {"num_experts": 0},
    "dense in between": {"num_hidden_layers": 7, "mlp_only_layers": (1, 4), "qkv_bias": True},
    "gated shared expert": {"shared_expert_intermediate_size": 20, "shared_expert_gate": True},
    "window": {"sliding_window": 6},
    "gpt-oss": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "attention_sinks": True,
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "full_attention") * 2,
        "hidden_act": "clamped_swiglu",
        "attention_bias": True,
        "mlp_bias": True,
        "router": RouterConfig(bias=True),
        "rope_scaling": YarnConfig(factor=4.0, original_max_position_embeddings=8, truncate=False),
    },
    "latent": {**LATENT, "attention_bias": True, "rope_interleave": True},
    "latent, no query latent": {
        **LATENT,
        "q_lora_rank": None,
        "rope_scaling": YarnConfig(
            factor=4.0, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.0
        ),
    },
    "everything": {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 20,
        "norm": "layernorm",
        "attention_bias": True,
        "mlp_bias": True,
        "qk_norm": "head",
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": True,
        "router": RouterConfig(
            kind="group_limited", n_group=2, topk_group=1, routed_scaling_factor=2.5
        ),
    },
}


def config_of(**options: Any) -> ModelConfig:
    return ModelConfig(**(TINY | options))


def build(config: ModelConfig) -> tuple[Any, nnx.State]:
    """(graph, state): norms and biases random too, so that each of them shows in values and
    gradients.
    """
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        mean = 1.0 if "scale" in name else 0.0
        std = 0.1 if "scale" in name or "b" in name else 0.2
        return jnp.asarray(mean + std * rng.normal(size=leaf.shape), leaf.dtype)

    return graph, jax.tree_util.tree_map_with_path(draw, shapes)


def tokens_of(config: ModelConfig) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (B, S)), jnp.int32)


@partial(jax.jit, static_argnums=0)
def logits_of(graph: Any, state: nnx.State, tokens_BS: jax.Array) -> jax.Array:
    model = nnx.merge(graph, state)
    return model(tokens_BS)[0] @ model.lm_head()


# ---- the plain decoder


def norm(config: ModelConfig, p: Any, x: jax.Array, kind: str | None = None) -> jax.Array:
    if (kind or config.norm) == "layernorm":
        return (
            p["scale"] * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
            + p["bias"]
        )
    return p["scale"] * x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def turn(config: ModelConfig, x_BSHd: jax.Array) -> jax.Array:
    half, scaling = x_BSHd.shape[-1] // 2, config.rope_scaling
    speed, size = config.rope_theta ** (-np.arange(half) / half), 1.0
    if scaling is not None:
        speed = rotary_frequencies(2 * half, config.rope_theta, scaling)
        size = scaling.rotary_scale
    rotation = jnp.asarray(
        size * np.exp(1j * np.arange(S)[:, None] * speed)[:, None], jnp.complex64
    )
    a, b = x_BSHd[..., :half], x_BSHd[..., half:]
    if config.rope_interleave:
        a, b = x_BSHd[..., 0::2], x_BSHd[..., 1::2]
    z = jax.lax.complex(a, b) * rotation
    return jnp.concatenate([z.real, z.imag], axis=-1)


def weighted_values(
    config: ModelConfig, p: Any, q: jax.Array, k: jax.Array, v: jax.Array, scale: float, layer: int
) -> jax.Array:
    repeats = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * np.float32(scale)
    seen = np.tri(S, dtype=bool)
    if config.sliding_window and (
        not config.layer_types or config.layer_types[layer] == "sliding_attention"
    ):
        seen = seen & ~np.tri(S, k=-config.sliding_window, dtype=bool)
    s = jnp.where(seen, s, -jnp.inf)
    if "sinks" in p:
        s = jnp.concatenate(
            [s, jnp.broadcast_to(p["sinks"][:, None, None], (*s.shape[:-1], 1))], axis=-1
        )
    a = jax.nn.softmax(s)[..., :S]
    return jnp.einsum("bhqk,bkhd->bqhd", a, v).reshape(B, S, -1) @ p["w_out"] + p.get("b_out", 0.0)


def latent_attention(config: ModelConfig, p: Any, x: jax.Array, layer: int) -> jax.Array:
    h, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    if "w_q" in p:
        q = x @ p["w_q"]
    else:
        q = norm(config, p["q_a_norm"], x @ p["w_q_a"] + p.get("b_q_a", 0.0)) @ p["w_q_b"]
    q = q.reshape(B, S, h, -1)
    latent = x @ p["w_kv_a"] + p.get("b_kv_a", 0.0)
    kv = (norm(config, p["kv_a_norm"], latent[..., :-rope]) @ p["w_kv_b"]).reshape(B, S, h, -1)
    k_rope = jnp.repeat(turn(config, latent[:, :, None, -rope:]), h, axis=2)
    q = jnp.concatenate([q[..., :nope], turn(config, q[..., nope:])], axis=-1)
    k = jnp.concatenate([kv[..., :nope], k_rope], axis=-1)
    yarn = config.rope_scaling
    sharper = (
        (0.1 * yarn.mscale_all_dim * np.log(yarn.factor) + 1) ** 2
        if isinstance(yarn, YarnConfig)
        else 1.0
    )
    return weighted_values(config, p, q, k, kv[..., nope:], sharper / np.sqrt(nope + rope), layer)


def attention(config: ModelConfig, p: Any, x: jax.Array, layer: int) -> jax.Array:
    if config.kv_lora_rank is not None:
        return latent_attention(config, p, x, layer)
    h, g, dh = config.num_attention_heads, config.num_key_value_heads, config.dim_per_head
    qkv = x @ p["w_qkv"] + p.get("b_qkv", 0.0)
    q, k, v = qkv[..., : h * dh], qkv[..., h * dh : (h + g) * dh], qkv[..., (h + g) * dh :]
    if config.qk_norm == "full":
        q, k = norm(config, p["q_norm"], q, "rmsnorm"), norm(config, p["k_norm"], k, "rmsnorm")
    q, k, v = q.reshape(B, S, h, dh), k.reshape(B, S, g, dh), v.reshape(B, S, g, dh)
    if config.qk_norm == "head":
        q, k = norm(config, p["q_norm"], q, "rmsnorm"), norm(config, p["k_norm"], k, "rmsnorm")
    if config.position == "rope":
        q, k = turn(config, q), turn(config, k)
    return weighted_values(config, p, q, k, v, dh**-0.5, layer)


def feed_forward(config: ModelConfig, p: Any, x: jax.Array) -> jax.Array:
    h = x @ p["w_up"] + p.get("b_up", 0.0)
    f = p["w_down"].shape[0]
    if config.hidden_act == "gelu":
        a = jax.nn.gelu(h, approximate=False)
    elif config.hidden_act == "swiglu":
        a = jax.nn.silu(h[..., :f]) * h[..., f:]
    else:
        gate, up = jnp.minimum(h[..., :f], 7.0), jnp.clip(h[..., f:], -7.0, 7.0)
        a = gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return a @ p["w_down"] + p.get("b_down", 0.0)


def mixture(config: ModelConfig, p: Any, x: jax.Array, seen: list[jax.Array]) -> jax.Array:
    """Every expert computes every token. Selection and weights are the router's own, tested beside
    it.

    seen: gets the router's logits.
    """
    logits = (x @ p["router"]["kernel"] + p["router"].get("bias", 0.0)).reshape(B * S, -1)
    seen.append(logits)
    bias = p["router"].get("e_score_correction_bias")
    routing = route(logits, config.num_experts_per_tok, config.router, bias)
    onehot = jax.nn.one_hot(routing.topk_idx_TK, config.num_experts)
    weights = jnp.einsum("tk,tke->te", routing.topk_weights_TK, onehot).reshape(B, S, -1)
    y_EBSD = jax.vmap(lambda p: feed_forward(config, p, x))(p["experts"])
    return jnp.einsum("bse,ebsd->bsd", weights, y_EBSD)


def plain_logits(
    config: ModelConfig, params: Any, tokens_BS: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """(logits, those of the router in each layer with experts)."""
    seen: list[jax.Array] = []
    x = params["embedding"][tokens_BS]
    if config.position == "learned":
        x = x + params["positions"][:S]
    used = {"dense_layers": 0, "moe_layers": 0}
    for i in range(config.num_hidden_layers):
        # Hugging Face: (layer + 1) % decoder_sparse_step == 0 has experts
        after = i - config.first_k_dense_replace
        sparse = (
            bool(config.num_experts)
            and after >= 0
            and (after + 1) % config.decoder_sparse_step == 0
        )
        sparse = sparse and i not in config.mlp_only_layers
        stack = "moe_layers" if sparse else "dense_layers"
        p = jax.tree.map(lambda w, n=used[stack]: w[n], params[stack])
        used[stack] += 1
        x = x + attention(config, p["attention"], norm(config, p["attention_norm"], x), i)
        h = norm(config, p["feed_forward_norm"], x)
        x = x + (
            mixture(config, p["moe"], h, seen) if sparse else feed_forward(config, p["mlp"], h)
        )
        if "shared_expert" in p:
            gate = jax.nn.sigmoid(h @ p["shared_expert_gate"]) if "shared_expert_gate" in p else 1.0
            x = x + gate * feed_forward(config, p["shared_expert"], h)
    head = params["embedding"].T if config.tie_word_embeddings else params["head"]
    return norm(config, params["norm"], x) @ head, seen


# ---- tests


# Slow: options of Hugging Face's families, which test_parity.py tries. The first two are in other
# quick tests too.
SLOW_OPTIONS = (
    *("one key/value head", "every second layer", "dense in between"),
    *("gated shared expert", "gpt-oss", "latent"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW_OPTIONS else ()) for n in OPTIONS]
)
def test_every_option_agrees_with_a_plain_decoder(name: str) -> None:
    config = config_of(**OPTIONS[name])
    graph, state = build(config)
    tokens_BS = tokens_of(config)
    g = jnp.asarray(np.random.default_rng(1).normal(size=(B, S, config.vocab_size)), jnp.float32)

    def ours(state: nnx.State) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(graph, state, tokens_BS)
        return (logits * g).sum(), logits

    def plain(params: Any) -> tuple[jax.Array, jax.Array]:
        logits, _ = plain_logits(config, params, tokens_BS)
        return (logits * g).sum(), logits

    (_, logits), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(state)
    (_, expected), egrads = jax.jit(jax.value_and_grad(plain, has_aux=True))(
        nnx.to_pure_dict(state)
    )
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))
    grads = nnx.to_pure_dict(grads)
    structure: Any = jax.tree.structure(grads)
    assert structure == jax.tree.structure(egrads)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(egrads), strict=True
    ):
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * float(jnp.abs(b).max()), err_msg=where)
        if "e_score_correction_bias" not in where:  # it steers the choice and has no gradient
            assert jnp.abs(b).max() > 1e-3, where


@pytest.mark.parametrize("name", OPTIONS)
def test_number_of_parameters(name: str) -> None:
    config = config_of(**OPTIONS[name])
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert total == config.total_and_active_parameters()[0]
    experts = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))
        if is_expert(path)
    ]
    idle = 1 - config.num_experts_per_tok / max(1, config.num_experts)
    assert total - idle * sum(experts) == config.total_and_active_parameters()[1]


@pytest.mark.parametrize("name", ["default", "everything"])
def test_a_later_token_changes_nothing_earlier(name: str) -> None:
    config = config_of(**OPTIONS[name])
    graph, state = build(config)
    tokens_BS = tokens_of(config)
    changed = tokens_BS.at[:, 11].set((tokens_BS[:, 11] + 1) % config.vocab_size)
    before, after = logits_of(graph, state, tokens_BS), logits_of(graph, state, changed)
    # other tokens of an expert may sit in other rows of a product: equal up to rounding
    np.testing.assert_allclose(
        before[:, :11], after[:, :11], rtol=0, atol=1e-5 * float(jnp.abs(before).max())
    )
    assert (jnp.abs(before - after)[:, 11:].max(axis=-1) > 1e-3).all()


def test_remat_changes_nothing() -> None:
    config = config_of(**OPTIONS["every second layer"])
    graph, state = build(config)
    tokens_BS = tokens_of(config)

    def loss(state: nnx.State, remat: Remat) -> jax.Array:
        return jnp.square(
            nnx.merge(graph, state)(tokens_BS, execution=DecoderExecution(remat=remat))[0]
        ).sum()

    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    kept, *again = (step(state, remat) for remat in get_args(Remat))
    assert len(again) == 2
    for remat in again:
        for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(remat), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(jnp.abs(b).max()))
    products = [
        str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(state, r)).count("dot_general")
        for r in get_args(Remat)
    ]
    assert products[0] < products[1] < products[2]  # more and more are computed again


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "none"])
def test_layers_without_loops_equal_those_of_the_scan(
    monkeypatch: pytest.MonkeyPatch, remat: Remat
) -> None:
    config = config_of(**OPTIONS["everything"])
    graph, state = build(config)
    tokens_BS = tokens_of(config)

    def loss(state: nnx.State, remat: Remat, unrolled: bool) -> tuple[jax.Array, PyTree]:
        monkeypatch.setattr(decoder, "runs_without_loops", lambda patterns: unrolled)
        hidden, stats = nnx.merge(graph, state)(tokens_BS, execution=DecoderExecution(remat=remat))
        return jnp.square(hidden).sum(), stats

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 2))
    scanned, unrolled = (step(state, remat, way) for way in (False, True))
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(unrolled), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(jnp.abs(b).max()))
    loops, fewer = (step.trace(state, remat, way).jaxpr for way in (False, True))
    assert str(loops).count("scan[") > str(fewer).count("scan[")


@pytest.mark.parametrize(("layers", "unrolled"), [(8, True), (9, False)])
def test_few_layers_run_without_loops_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, layers: int, unrolled: bool
) -> None:
    patterns = find_patterns(config_of(num_hidden_layers=layers).layers)
    assert not decoder.runs_without_loops(patterns)
    monkeypatch.setattr(decoder, "target_device", lambda: SimpleNamespace(platform="gpu"))
    assert decoder.runs_without_loops(patterns) == unrolled


def test_statistics_have_a_layer_dimension() -> None:
    config = config_of(num_hidden_layers=5, first_k_dense_replace=1, decoder_sparse_step=2)
    graph, state = build(config)
    _, stats = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(
        state, tokens_of(config)
    )
    assert stats is not None
    assert stats.counts_E.shape == (2, 4) and stats.counts_E.sum(axis=1).tolist() == [B * S * 2] * 2
    assert stats.entropy_sum.shape == stats.z_sum.shape == stats.dropped.shape == (2,)
    assert stats.dropped.tolist() == [0, 0]
    _, none = nnx.merge(*build(config_of(num_experts=0)))(tokens_of(config))
    assert none is None


def test_bfloat16_stays_near_float32() -> None:
    # without experts: no token changes its expert by rounding
    graph, state = build(config_of(num_experts=0))
    tokens_BS = tokens_of(config_of())
    full, low = (
        jax.jit(lambda state, dtype=dtype: nnx.merge(graph, state)(tokens_BS, dtype=dtype)[0])(
            state
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert low.dtype == jnp.bfloat16 and full.dtype == jnp.float32
    assert np.linalg.norm(np.asarray(low, np.float32) - full) < 0.03 * np.linalg.norm(full)


REGULAR: list[Callable[[int], dict[str, Any]]] = [
    lambda n: {},
    lambda n: {"decoder_sparse_step": 2},
    lambda n: {"num_experts": 0},
    lambda n: {"mlp_only_layers": tuple(range(1, n, 4))},
    lambda n: {
        "sliding_window": 4,
        "layer_types": ("sliding_attention", "full_attention") * (n // 2),
    },
    lambda n: {**LATENT, "first_k_dense_replace": 1},
]


@pytest.mark.parametrize(
    "options",
    [
        option if n in (4, 5) else pytest.param(option, marks=pytest.mark.slow)
        for n, option in enumerate(REGULAR)
    ],
    ids=lambda options: str(options(4)),
)
def test_the_program_does_not_grow_with_depth(options: Callable[[int], dict[str, Any]]) -> None:
    def program_size(num_layers: int) -> int:
        config = config_of(num_hidden_layers=num_layers, **options(num_layers))
        model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(model)
        tokens_BS = jax.ShapeDtypeStruct((B, S), jnp.int32)

        def loss(state: nnx.State, tokens_BS: jax.Array) -> jax.Array:
            return nnx.merge(graph, state)(tokens_BS)[0].sum()

        return len(jax.jit(jax.grad(loss)).lower(state, tokens_BS).as_text())

    # no number of layers that is a size of something else too
    shallow, deep = program_size(12), program_size(24)
    assert abs(deep - shallow) < 0.02 * shallow


def test_statistics_of_irregular_layers_are_in_order() -> None:
    """Dense layers between those with experts change how layers are grouped, not the order of
    what they report.
    """
    config = config_of(num_hidden_layers=8, mlp_only_layers=(1, 5))
    graph, state = build(config)
    _, stats = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens, keep_routing=True))(
        state, tokens_of(config)
    )
    assert stats is not None and stats.routing is not None
    assert stats.counts_E.shape == (6, 4) and stats.routing.logits_TE.shape == (6, B * S, 4)
    _, seen = plain_logits(config, nnx.to_pure_dict(state), tokens_of(config))
    np.testing.assert_allclose(stats.routing.logits_TE, jnp.stack(seen), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["everything", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-oss", "latent"))],
)
def test_parameters_in_bfloat16(name: str) -> None:
    """Every parameter may be stored in bfloat16; mathematics in float32 stays there (dtype
    promotion is strict).
    """
    config = config_of(**OPTIONS[name])
    graph, state = build(config)
    tokens_BS = tokens_of(config)
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
    rounded = jax.tree.map(lambda w: w.astype(jnp.float32), low)
    run = jax.jit(lambda state: nnx.merge(graph, state)(tokens_BS)[0])
    np.testing.assert_allclose(run(low), run(rounded), rtol=0, atol=1e-4)


def test_initialisation() -> None:
    config = config_of(hidden_size=64, num_hidden_layers=8, initializer_range=0.02)
    params = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    layer = params["moe_layers"]
    # what adds to the residual stream is scaled by depth, as in GPT-2
    out_std = 0.02 / np.sqrt(2 * 8)
    for weights, std in (
        (params["embedding"], 0.02),
        (layer["attention"]["w_qkv"], 0.02),
        (layer["attention"]["w_out"], out_std),
        (layer["moe"]["experts"]["w_up"], 0.02),
        (layer["moe"]["experts"]["w_down"], out_std),
    ):
        assert float(weights.std()) == pytest.approx(std, rel=0.05)
    stacked = layer["moe"]["experts"]["w_up"].reshape(8 * 4, -1)
    # every layer and expert drawn on its own
    assert np.abs(np.corrcoef(stacked) - np.eye(32)).max() < 0.2
