"""The training step: the same on every mesh, the same as a plain loss with optax, and safe when
something is wrong.

Legend: A accumulation steps, B batch, S sequence, V vocabulary, E experts, N MoE layers.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jmoe.config import CommConfig, RouterConfig, TrainConfig
from jmoe.layers.router import RouterBias
from jmoe.mesh import ACCUMULATED_BATCH, ALL, BATCH, is_expert, path_names, split_over
from jmoe.models.decoder import Decoder
from jmoe.optim.adamw import has_weight_decay
from jmoe.optim.learning_rate import learning_rate_schedule
from jmoe.training.sharded_decoder import ShardedDecoder
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer, make_trainer
from tests import model_configs
from tests.arrays import assert_trees_close, on_host
from tests.model_configs import OPTIMIZER, mesh_of, spread_over

ONE = (1, 1, 1)
B, S, E, N = 16, 32, 8, 2
MODEL = dataclasses.replace(
    model_configs.MODEL,
    vocab_size=256,
    num_hidden_layers=N + 1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=OPTIMIZER,
    batch_size=B,
    sequence_length=S,
    num_steps=10,
    compute_dtype="float32",
)
NO_BALANCE = dataclasses.replace(MODEL, router=dataclasses.replace(MODEL.router, aux_loss_coef=0.0))


def config_of(shape: tuple[int, int, int], **changes: Any) -> TrainConfig:
    """`CONFIG` on a mesh of `shape`, with changes to its fields or to those of its `CommConfig`."""
    fields = {field.name for field in dataclasses.fields(CommConfig)}
    comm = {name: changes.pop(name) for name in fields & changes.keys()}
    return spread_over(dataclasses.replace(CONFIG, **changes), *shape, **comm)


@functools.cache
def program(shape: tuple[int, int, int], **changes: Any) -> tuple[Trainer, Mesh, TrainConfig]:
    mesh = mesh_of(*shape)
    config = config_of(shape, **changes)
    return make_trainer(config, mesh), mesh, config


def place(state: Any, to: Trainer) -> TrainState:
    """A state on the host as `to`'s devices hold it. A copy: a donated buffer may lie on the
    array it came from.
    """
    shape = dataclasses.replace(to.state_shape, cast=())
    placed: TrainState = jax.tree.map(
        lambda x, s: jax.device_put(np.array(x), s.sharding), state, shape
    )
    if to.state_shape.cast:
        placed = to.refresh_cast_copies(placed)  # type: ignore[attr-defined]
    return jax.block_until_ready(placed)


@functools.cache
def initial() -> Any:
    """The state all runs start from, drawn on one device; its norms, routers and router biases
    are made to matter.
    """
    state = on_host(program(ONE)[0].init())
    rng = np.random.default_rng(0)
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.router_bias)):
        std = {"scale": 0.1, "kernel": 0.5, "e_score_correction_bias": 0.01}.get(
            path_names(path)[-1], 0.0
        )
        leaf += std * rng.normal(size=leaf.shape).astype(np.float32)
    return state


def batch(mesh: Mesh, step: int, accumulation: int = 1) -> jax.Array:
    tokens = (
        np.random.default_rng(100 + step).integers(0, MODEL.vocab_size, (B, S + 1)).astype(np.int32)
    )
    return jax.device_put(
        tokens.reshape(accumulation, -1, S + 1), NamedSharding(mesh, ACCUMULATED_BATCH)
    )


@dataclass(frozen=True)
class Run:
    metrics: list[dict[str, Any]]
    state: Any


@functools.cache
def run(shape: tuple[int, int, int], steps: int = 3, **changes: Any) -> Run:
    """`steps` steps from `initial()`, each awaited; one that overflows runs again with room for
    all.
    """
    ours, mesh, config = program(shape, **changes)
    state, metrics = place(initial(), ours), []
    for i in range(steps):
        tokens = batch(mesh, i, config.gradient_accumulation_steps)
        state, values = jax.block_until_ready(ours.step(state, tokens))
        if values["overflow"]:
            state, values = jax.block_until_ready(ours.step(state, tokens, full_capacity=True))
        metrics.append(jax.device_get(values))
    return Run(metrics, on_host(state))


def assert_same_run(ours: Run, expected: Run, tolerance: float = 1e-5) -> None:
    for a, b in zip(ours.metrics, expected.metrics, strict=True):
        assert a["ok"] and not a["overflow"]
        assert_trees_close(a, b, tolerance)
    assert int(ours.state.step) == len(ours.metrics)
    assert_trees_close(ours.state.params, expected.state.params, tolerance)
    np.testing.assert_array_equal(ours.state.step, expected.state.step)
    assert_trees_close(ours.state.router_bias, expected.state.router_bias, tolerance)
    assert_trees_close(ours.state.m, expected.state.m, 3 * tolerance)  # three gradients' errors
    assert_trees_close(ours.state.v, expected.state.v, 3 * tolerance)


# ---- one device against a plain loss and optax


def plain_decoder() -> tuple[Any, Any, Any]:
    """(graph, parameters, router biases) of the decoder that all runs start from."""
    parts: Any = nnx.split(
        nnx.eval_shape(lambda: Decoder(MODEL, rngs=nnx.Rngs(0))), nnx.Param, RouterBias
    )
    graph, params, bias = parts
    nnx.replace_by_pure_dict(params, jax.tree.map(jnp.asarray, initial().params))
    nnx.replace_by_pure_dict(bias, jax.tree.map(jnp.asarray, initial().router_bias))
    return graph, params, bias


def plain_training(steps: int) -> Run:
    """The same steps with the loss by its definition, from all logits, and `optax.adamw`."""
    _, mesh, config = program(ONE)
    router, (graph, params, bias) = MODEL.router, plain_decoder()
    decay = jax.tree_util.tree_map_with_path(lambda path, w: has_weight_decay(path, w), params)
    o = OPTIMIZER
    adamw = optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(
            learning_rate_schedule(o, config.num_steps),
            o.beta1,
            o.beta2,
            o.eps,
            weight_decay=o.weight_decay,
            mask=decay,
        ),
    )

    def loss_fn(params: Any, bias: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(graph, params, bias)
        hidden, stats = model(tokens[:, :-1])
        nll = optax.softmax_cross_entropy_with_integer_labels(
            hidden @ model.lm_head(), tokens[:, 1:]
        ).mean()
        share_NE = stats.counts_E.astype(jnp.float32) / (B * S * 2)
        balance = (
            router.aux_loss_coef * E * (share_NE * stats.probs_sum_E / (B * S)).sum(axis=1).mean()
        )
        z = router.z_loss_coef * (stats.z_sum / (B * S)).mean()
        return nll + balance + z, (nll, balance, z, stats.counts_E)

    @jax.jit
    def step(params: Any, bias: Any, optimizer: Any, tokens: jax.Array) -> Any:
        (_, (nll, balance, z, counts_NE)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, bias, tokens
        )
        updates, optimizer = adamw.update(grads, optimizer, params)
        fair = counts_NE.astype(jnp.float32).mean(axis=1, keepdims=True)
        move = router.bias_update_speed * jnp.sign(fair - counts_NE.astype(jnp.float32))
        bias = jax.tree.map(lambda b: b + move, bias)
        values = {"loss": nll, "balance_loss": balance, "z_loss": z, "counts": counts_NE}
        values["grad_norm"] = optax.tree.norm(grads)
        return optax.apply_updates(params, updates), bias, optimizer, values

    optimizer, metrics = adamw.init(params), []
    for i in range(steps):
        with jax.numpy_dtype_promotion("standard"):  # optax itself mixes dtypes
            params, bias, optimizer, values = step(params, bias, optimizer, batch(mesh, i)[0])
        metrics.append(jax.device_get(values))
    return Run(metrics, on_host((nnx.to_pure_dict(params), nnx.to_pure_dict(bias))))


def test_one_device_is_a_plain_loss_with_optax() -> None:
    ours, expected = run(ONE), plain_training(3)
    for a, b in zip(ours.metrics, expected.metrics, strict=True):
        assert_trees_close({name: a[name] for name in b}, b)
        assert a["dropped"].tolist() == [0] * N
        total = np.sqrt(sum(np.square(g).sum() for g in a["grad_norms"].values()))
        assert total == pytest.approx(float(a["grad_norm"]), rel=1e-5)
        assert float(a["grad_norm"]) > OPTIMIZER.clip_norm  # the clip was at work
    assert_trees_close((ours.state.params, ours.state.router_bias), expected.state)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ours.state.params, initial().params)
    assert min(jax.tree.leaves(moved)) > 1e-4
    assert ours.metrics[0]["grad_norms"]["moe_layers"].shape == (N,)
    schedule = learning_rate_schedule(OPTIMIZER, CONFIG.num_steps)
    np.testing.assert_allclose(
        [m["learning_rate"] for m in ours.metrics],
        [schedule(float(i)) for i in range(3)],
        rtol=1e-6,
    )


# ---- every mesh gives the same


def test_a_program_says_which_exchange_it_has_and_why() -> None:
    exchanges = [
        [note for note in program(shape)[0].notes if "exchange" in note]
        for shape in (ONE, (1, 1, 8), (2, 2, 2))
    ]
    assert exchanges == [
        [],
        ["flat exchange: all experts are on one node"],
        ["dedup exchange: 0.79 rows a token cross between 2 nodes with dedup, 1.00 without"],
    ]


@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 2),
        *(
            pytest.param(shape, marks=pytest.mark.slow)
            for shape in [(1, 1, 8), (8, 1, 1), (1, 2, 4), (4, 1, 2)]
        ),
    ],
    ids=str,
)
def test_mesh(shape: tuple[int, int, int]) -> None:
    assert_same_run(run(shape), run(ONE))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"shard_dense": False}, marks=pytest.mark.slow),
        pytest.param({"fuse_dense": False, "schedule": "none"}, marks=pytest.mark.slow),
        pytest.param(
            {"exchange": "flat", "remat": "layer", "schedule": "ready"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"exchange": "hierarchical", "hierarchical": False, "schedule": "none"},
            marks=pytest.mark.slow,
        ),
        {"exchange": "ragged"},
        pytest.param(
            {"exchange": "ragged", "remat": "layer", "schedule": "fixed"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"exchange": "ragged", "schedule": "none", "shard_dense": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "schedule": "pipelined",
                "exchange_chunks": 3,
                "chunk_bytes": 2000,
                "shard_dense": False,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"schedule": "pipelined", "chunk_bytes": 2000}, marks=pytest.mark.slow),
        pytest.param({"schedule": "fixed", "bucket_bytes": 2000}, marks=pytest.mark.slow),
        pytest.param({"schedule": "priority", "bucket_bytes": 20000}, marks=pytest.mark.slow),
    ],
    ids=[
        "dense parameters whole",
        "dense parameters one by one",
        "flat exchange, remat, work as soon as it is known",
        "two-level exchange, all else flat, in any order",
        "ragged exchange",
        "ragged exchange, remat, work after the all-to-alls",
        "ragged exchange, dense parameters whole, in any order",
        "dense parameters whole, chunks, exchange in three pieces",
        "chunks, exchange in two pieces",
        "buckets of a part of a layer",
        "buckets of two layers",
    ],
)
def test_choices_that_change_no_number(changes: dict[str, Any]) -> None:
    assert_same_run(run((2, 2, 2), **changes), run(ONE))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ragged", "flat"])
def test_fifty_steps_have_the_losses_of_one_device(exchange: str) -> None:
    ours, expected = (
        [float(metrics["loss"]) for metrics in run(*args, steps=50, **changes).metrics]
        for args, changes in ((((2, 2, 2),), {"exchange": exchange}), ((ONE,), {}))
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 2, 2)], ids=str)
def test_chunks_of_the_exchange_change_no_number_under_capacity(
    shape: tuple[int, int, int],
) -> None:
    full = dataclasses.replace(MODEL, capacity_factor=0.75)
    whole, chunks = (
        run(shape, model=full, schedule=schedule) for schedule in ("chunks", "pipelined")
    )
    assert whole.metrics[0]["dropped"].sum() > 0
    for a, b in zip(chunks.metrics, whole.metrics, strict=True):
        np.testing.assert_array_equal(a["dropped"], b["dropped"])
    assert_same_run(chunks, whole)


@pytest.mark.parametrize(
    ("shape", "there", "back"), [((1, 1, 8), 3, 2), ((1, 2, 4), 7, 5)], ids=["flat", "dedup"]
)
def test_no_exchange_runs_twice(shape: tuple[int, int, int], there: int, back: int) -> None:
    """All-to-alls of a layer: rows there and back at each level and what describes them;
    backwards rows and weights.
    """
    ours, mesh, _ = program(shape, embedding="replicated")
    text = ours.step.lower(ours.state_shape, batch(mesh, 0)).as_text()  # type: ignore[attr-defined]
    assert text.count('all_to_all"(') == N * (there + back)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((1, 1, 2), {}),
        ((2, 1, 1), {"gradient_accumulation_steps": 4}),
        ((2, 1, 2), {"shard_dense": False, "chunk_bytes": 2000}),
        ((2, 1, 2), {"exchange": "ragged"}),
    ],
    ids=[
        "dense parameters sharded",
        "experts' gradients over data",
        "dense parameters whole",
        "ragged exchange",
    ],
)
def test_gradient_accumulation(shape: tuple[int, int, int], changes: dict[str, Any]) -> None:
    """Without the balance loss, which is a product of two means over the tokens that share a
    forward pass.
    """
    one = run(ONE, model=NO_BALANCE)
    assert_same_run(
        run(shape, model=NO_BALANCE, **{"gradient_accumulation_steps": 2} | changes), one
    )


@pytest.mark.slow
def test_bfloat16_stays_near_float32() -> None:
    low, full = run((2, 2, 2), compute_dtype="bfloat16"), run(ONE)
    for a, b in zip(low.metrics, full.metrics, strict=True):
        assert a["ok"]
        assert a["loss"] == pytest.approx(float(b["loss"]), rel=1e-2)
        assert a["grad_norm"] == pytest.approx(float(b["grad_norm"]), rel=5e-2)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(low.state.params))


def test_initial_state_is_the_same_on_every_mesh() -> None:
    one, eight = program(ONE)[0].init(), program((2, 2, 2))[0].init()
    assert_trees_close(on_host(eight), on_host(one), 1e-6)
    assert not any(
        leaf.any() for leaf in jax.tree.leaves((one.m, one.v, one.router_bias, one.step))
    )
    shapes = program((2, 2, 2))[0].state_shape
    where = jax.tree.map(
        lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), eight, shapes
    )
    assert all(jax.tree.leaves(where))


@pytest.mark.parametrize(
    ("changes", "matrix", "vector"),
    [({}, 8, 8), ({"fuse_dense": False, "schedule": "none"}, 8, 1), ({"shard_dense": False}, 1, 1)],
    ids=["one buffer", "one by one", "whole"],
)
def test_what_is_split(changes: dict[str, Any], matrix: int, vector: int) -> None:
    """Over how many devices: experts over theirs, the rest over all; norms and biases only if
    they cost no gather.
    """
    shape = program((2, 2, 2), **changes)[0].state_shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(shape.params):
        parts = leaf.size // int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        if path_names(path) == ("embedding",):  # in columns, whatever the rest
            assert leaf.sharding.spec == split_over(ALL, 1) and parts == 8
            continue
        small = path_names(path)[-1] == "scale"
        assert parts == (4 if is_expert(path) else vector if small else matrix), path


def test_evaluation_and_logits() -> None:
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, MODEL.vocab_size, (8, S + 1)).astype(np.int32)
    weights = rng.integers(0, 2, (8, S)).astype(np.float32)
    graph, params, bias = plain_decoder()

    @jax.jit
    def logits_of(params: Any, bias: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params, bias)
        return model(tokens)[0] @ model.lm_head()

    logits = logits_of(params, bias, jnp.asarray(tokens[:, :-1]))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(tokens[:, 1:]))
    ours, mesh, _ = program((1, 2, 4))
    placed, rows = place(initial(), ours), NamedSharding(mesh, BATCH)
    (value,) = ours.evaluate_batches(
        placed, [(jax.device_put(tokens, rows), jax.device_put(weights, rows))]
    )
    np.testing.assert_allclose(
        jax.block_until_ready(value), (nll * jnp.asarray(weights)).sum(), rtol=1e-5
    )
    same = jax.device_put(np.tile(tokens[:1, :-1], (8, 1)), rows)
    for position in (0, 17):
        next_V = jax.block_until_ready(ours.next_logits(placed, same, jnp.int32(position)))
        assert_trees_close(next_V, logits[0, position])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(placed))


# ---- when something is wrong


def assert_unchanged(after: TrainState, before: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, on_host(after), before)


def poisoned(name: str) -> Any:
    state = on_host(initial())
    if name == "not a number":
        state.params["moe_layers"]["attention"]["w_out"][1, 0, 0] = np.nan
    # the loss stays finite, but the gradient of the second layer's w_down squares beyond float32
    else:
        experts = state.params["moe_layers"]["moe"]["experts"]
        experts["w_up"][1] *= 1e12
        experts["w_down"][1] = 0
    return state


@pytest.mark.parametrize("shape", [ONE, (2, 2, 2)], ids=str)
def test_a_step_that_is_not_finite_changes_nothing(shape: tuple[int, int, int]) -> None:
    ours, mesh, _ = program(shape)
    bad = poisoned("not a number")
    after, metrics = jax.block_until_ready(ours.step(place(bad, ours), batch(mesh, 0)))
    assert not metrics["ok"] and not np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norms"]["moe_layers"][1])
    assert_unchanged(after, bad)

    bad = poisoned("large")
    after, metrics = jax.block_until_ready(ours.step(place(bad, ours), batch(mesh, 0)))
    assert np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])
    assert not metrics["ok"] and not metrics["overflow"]
    norms = jax.device_get(metrics["grad_norms"])
    assert not np.isfinite(norms["moe_layers"][1])  # only the offending layer
    assert np.isfinite(norms.pop("moe_layers")[0]) and all(
        np.isfinite(norm).all() for norm in norms.values()
    )
    assert_unchanged(after, bad)


def test_the_state_is_donated() -> None:
    ours, mesh, _ = program(ONE)
    state = place(initial(), ours)
    after, _ = jax.block_until_ready(ours.step(state, batch(mesh, 0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize(
    "shape", [(1, 1, 8), pytest.param((1, 2, 4), marks=pytest.mark.slow)], ids=["flat", "dedup"]
)
def test_an_overflowing_dropless_step_runs_again_with_room_for_all(
    shape: tuple[int, int, int],
) -> None:
    """All tokens to experts 0 and 1: four times the fair share of their two devices, where buffers
    hold twice it.

    With dedup the first node has room for every token, and its devices for twice their share of
    what they deal out.
    """
    skewed = on_host(initial())
    skewed.router_bias["moe_layers"]["moe"]["router"]["e_score_correction_bias"][:, :2] += 10.0
    ours, mesh, _ = program(shape)
    after, metrics = jax.block_until_ready(ours.step(place(skewed, ours), batch(mesh, 0)))
    assert metrics["overflow"] and not metrics["ok"] and np.isfinite(metrics["loss"])
    assert metrics["dropped"].tolist() == [B * S] * N  # half of all assignments
    # of a copy: jax 0.11 does not donate arrays that NumPy looks at
    assert_unchanged(jax.tree.map(jnp.copy, after), skewed)

    again, metrics = jax.block_until_ready(ours.step(after, batch(mesh, 0), full_capacity=True))
    assert metrics["ok"] and not metrics["overflow"] and metrics["dropped"].tolist() == [0] * N
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    one, mesh, _ = program(ONE)
    expected, expected_metrics = jax.block_until_ready(one.step(place(skewed, one), batch(mesh, 0)))
    assert not expected_metrics["overflow"]
    assert_trees_close(jax.device_get(metrics), jax.device_get(expected_metrics))
    assert_trees_close(on_host(again), on_host(expected), 3e-5)


@pytest.mark.parametrize(
    "shape", [(1, 1, 8), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_a_ragged_step_takes_any_load(shape: tuple[int, int, int]) -> None:
    """All tokens to experts 0 and 1: no step overflows; the experts run in rounds."""
    skewed = on_host(initial())
    skewed.router_bias["moe_layers"]["moe"]["router"]["e_score_correction_bias"][:, :2] += 10.0
    results = []
    for ours, mesh, _ in (program(shape, exchange="ragged"), program(ONE)):
        after, metrics = jax.block_until_ready(ours.step(place(skewed, ours), batch(mesh, 0)))
        assert metrics["ok"] and not metrics["overflow"]
        assert metrics["dropped"].tolist() == [0] * N
        results.append((jax.device_get(metrics), on_host(after)))
    (metrics, state), (expected_metrics, expected) = results
    assert_trees_close(metrics, expected_metrics)
    assert_trees_close(state, expected, 3e-5)


def test_capacity_drops_without_stopping() -> None:
    ours, mesh, _ = program((1, 1, 8), model=dataclasses.replace(MODEL, capacity_factor=0.5))
    after, metrics = jax.block_until_ready(ours.step(place(initial(), ours), batch(mesh, 0)))
    assert metrics["ok"] and not metrics["overflow"] and int(after.step) == 1
    assert (metrics["dropped"] >= B * S).all()  # buffers hold half of all assignments
    assert metrics["counts"].sum(axis=1).tolist() == [2 * B * S] * N


JITTER = 1, RouterConfig(kind="switch", jitter_noise=0.1)
SECOND_EXPERT = 2, RouterConfig(kind="gshard", second_expert_policy="random")


@pytest.mark.parametrize(
    ("k", "router", "accumulation"),
    [
        (*JITTER, 1),
        pytest.param(*JITTER, 2, marks=pytest.mark.slow),
        pytest.param(*SECOND_EXPERT, 1, marks=pytest.mark.slow),
        (*SECOND_EXPERT, 2),
    ],
    ids=["jitter-1", "jitter-2", "second expert-1", "second expert-2"],
)
def test_what_routers_draw_is_traced_on_every_mesh(
    k: int, router: RouterConfig, accumulation: int
) -> None:
    model = dataclasses.replace(MODEL, router=router, num_experts_per_tok=k)
    for shape in (ONE, (2, 2, 2)):
        ours, mesh, _ = program(shape, model=model, gradient_accumulation_steps=accumulation)
        state, metrics = jax.eval_shape(ours.step, ours.state_shape, batch(mesh, 0, accumulation))
        structure: Any = jax.tree.structure(state)
        assert structure == jax.tree.structure(ours.state_shape)
        assert metrics["counts"].shape == (N, E)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [ONE, (1, 2, 2)], ids=str)
def test_weights_that_are_cast_once_change_no_number(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's step does, on a CPU: its products see the same weights, and round their
    gradients as before.
    """
    narrow = {"compute_dtype": "bfloat16", "native": "off"}
    each = run(shape, 2, **narrow)
    monkeypatch.setattr(ShardedDecoder, "casts_once_per_step", property(lambda _: True))
    once = run(shape, 2, **narrow, output_dir="once")  # a program of its own
    assert_same_run(once, each, 1e-5)
    if shape != ONE:
        return
    ours = program(shape, **narrow, output_dir="once")[0]
    state, copies = place(dataclasses.replace(once.state, cast=()), ours), once.state.cast
    assert {w.dtype for w in copies} == {jnp.dtype(jnp.bfloat16)} and len(copies) > 4
    for a, b in zip(copies, state.cast, strict=True):  # AdamW wrote them as it updated the weights
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    saved = ours.prepare_state_for_save(state)
    # no part of a checkpoint
    assert jax.tree.structure(saved) == jax.tree.structure(ours.saved_shape)
    assert jax.tree.structure(ours.restore_state(saved)) == jax.tree.structure(ours.state_shape)
