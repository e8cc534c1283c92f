"""Training with the embedding in parts: the same steps, evaluation and checkpoints as with a whole
one.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import CheckpointConfig, CommConfig, MeshConfig, ModelConfig, TrainConfig
from jmoe.deploy.merge import merge_run_to_hugging_face
from jmoe.mesh import ACCUMULATED_BATCH, BATCH
from jmoe.models.pretrained import load_pretrained
from jmoe.run.checkpoint import Checkpoints
from jmoe.training.finetune import load_pretrained_state
from jmoe.training.state import TrainState
from jmoe.training.trainer import Trainer, make_trainer
from tests.arrays import assert_trees_close
from tests.model_configs import OPTIMIZER, mesh_of

ONE, EIGHT = (1, 1, 1), (2, 2, 2)
B, S, V = 16, 8, 1024
MODEL = ModelConfig(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.2,
)
CASES = list(itertools.product(("columns", "rows"), (True, False)))  # partition, tied
FIRST = [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
# Programs with each partition and each head once; the layer's own tests compare all gradients.
QUICK = [
    (
        case
        if case in (("columns", True), ("rows", False))
        else pytest.param(*case, marks=pytest.mark.slow)
    )
    for case in CASES
]


@functools.cache
def program(
    shape: tuple[int, int, int],
    embedding: str = "replicated",
    tied: bool = True,
    shard_dense: bool = True,
    **more: Any,
) -> Trainer:
    config = TrainConfig(
        model=dataclasses.replace(MODEL, tie_word_embeddings=tied),
        optimizer=OPTIMIZER,
        mesh=MeshConfig(*shape),
        comm=CommConfig(embedding=embedding, shard_dense=shard_dense),  # type: ignore[arg-type]
        **(
            {"batch_size": B, "sequence_length": S, "num_steps": 10, "compute_dtype": "float32"}
            | more
        ),
    )
    return make_trainer(config, mesh_of(*shape))


def tokens_of(ours: Trainer, seed: int) -> jax.Array:
    mesh = ours.state_shape.step.sharding.mesh  # type: ignore[union-attr]
    tokens = np.random.default_rng(seed).integers(0, V, (1, B, S + 1)).astype(np.int32)
    tokens[:, :3] = 7  # a frequent one
    return jax.device_put(tokens, NamedSharding(mesh, ACCUMULATED_BATCH))


def from_host(saved: Any, ours: Trainer) -> TrainState:
    """A saved state on the host as `ours` keeps it."""
    placed = jax.tree.map(
        lambda x, s: jax.device_put(np.array(x), s.sharding), saved, ours.saved_shape
    )
    return jax.block_until_ready(ours.restore_state(placed))


@functools.cache
def steps(
    shape: tuple[int, int, int], embedding: str, tied: bool, shard_dense: bool = True
) -> tuple[Any, Any]:
    """(metrics of each step, saved state) of two steps from the one that a single device begins
    with.
    """
    ours = program(shape, embedding, tied, shard_dense)
    state, metrics = from_host(jax.device_get(program(ONE, tied=tied).init()), ours), []
    for i in range(2):
        state, values = jax.block_until_ready(ours.step(state, tokens_of(ours, i)))
        metrics.append(jax.device_get(values))
    return metrics, jax.device_get(ours.prepare_state_for_save(state))


@pytest.mark.parametrize(("embedding", "tied"), FIRST)
def test_the_same_steps(embedding: str, tied: bool) -> None:
    metrics, state = steps(EIGHT, embedding, tied, shard_dense=tied)
    assert all(values["ok"] for values in metrics)
    expected_metrics, expected = steps(ONE, "replicated", tied)
    assert_trees_close(metrics, expected_metrics)
    assert_trees_close(state, expected, 3e-5)


def reduced_tables(ours: Trainer) -> list[str]:
    """Instructions of the step that add up or gather, over devices, as many values as the table
    or the head has.
    """
    text = ours.step.lower(ours.state_shape, tokens_of(ours, 0)).compile().as_text()  # type: ignore[attr-defined]
    found = re.findall(
        r"= \(?f32\[([\d,]+)\].* (?:all-reduce|all-gather|reduce-scatter)(?:-start)?\(", text
    )
    return [
        shape
        for shape in found
        if np.prod([int(n) for n in shape.split(",")]) >= V * MODEL.hidden_size
    ]


@pytest.mark.parametrize(("embedding", "tied"), QUICK)
def test_a_device_keeps_and_reads_its_part(embedding: str, tied: bool) -> None:
    """Table, head and moments are an eighth each; nothing of the table's size is gathered or
    added up in the step.
    """
    ours = program(EIGHT, embedding, tied, shard_dense=False)
    names = ["embedding"] if tied else ["embedding", "head"]
    for tree, name in itertools.product(
        (ours.state_shape.params, ours.state_shape.m, ours.state_shape.v), names
    ):
        leaf = tree[name]
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) == V * MODEL.hidden_size // 8
    assert reduced_tables(ours) == []


def test_a_whole_table_is_reduced() -> None:
    assert len(reduced_tables(program(EIGHT, shard_dense=False))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("embedding", "tied"), FIRST)
def test_evaluation_and_logits(embedding: str, tied: bool) -> None:
    state = steps(ONE, "replicated", tied)[1]
    one = program(ONE, tied=tied)
    ours = program(EIGHT, embedding, tied)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, V, (B, S + 1)).astype(np.int32)
    weights = rng.integers(0, 2, (B, S)).astype(np.float32)
    found = []
    for each in (one, ours):
        rows = NamedSharding(each.state_shape.step.sharding.mesh, BATCH)  # type: ignore[union-attr]
        placed = from_host(state, each)
        (loss,) = each.evaluate_batches(
            placed, [(jax.device_put(tokens, rows), jax.device_put(weights, rows))]
        )
        same = jax.device_put(np.tile(tokens[:1, :-1], (rows.mesh.size, 1)), rows)
        found.append(jax.device_get((loss, each.next_logits(placed, same, jnp.int32(3)))))
    assert_trees_close(found[1], found[0])


def test_initial_state_and_saved_form() -> None:
    """Whatever the mesh, a run begins with the same table, and saves it in the order of the
    vocabulary.
    """
    one = jax.device_get(program(ONE).init())
    for embedding in ("replicated", "columns", "rows"):
        ours = program(EIGHT, embedding)
        state = ours.init()
        saved = ours.prepare_state_for_save(state)
        assert_trees_close(jax.device_get(saved), one, 1e-6)
        back = ours.restore_state(saved)
        for a, b, c in zip(
            jax.tree.leaves(back), jax.tree.leaves(state), jax.tree.leaves(ours.state_shape)
        ):
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(c.sharding, a.ndim)
        where = jax.tree.map(
            lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim), saved, ours.saved_shape
        )
        assert all(jax.tree.leaves(where))


def test_stripes_are_saved_without_a_whole_table_anywhere() -> None:
    ours = program(EIGHT, "rows")
    text = (
        jax.jit(lambda s: ours.prepare_state_for_save(s).params["embedding"])
        .lower(ours.state_shape)
        .compile()
        .as_text()
    )
    assert "all-to-all" in text and "all-gather" not in text


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
def test_checkpoints_restore_onto_other_partitions_and_meshes(tmp_path: Path, tied: bool) -> None:
    """A run goes on from another's checkpoint as it would have gone on itself."""
    places = [
        (EIGHT, "rows"),
        ((4, 1, 1), "columns"),
        ((1, 2, 2), "rows"),
        (EIGHT, "replicated"),
        (ONE, "replicated"),
    ]
    saved = steps(ONE, "replicated", tied)[1]
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep=10)) as checkpoints:
        for i, (shape, embedding) in enumerate(places):
            ours = program(shape, embedding, tied)
            if i == 0:
                state = from_host(saved, ours)
            else:
                stored, _, _ = checkpoints.restore(i - 1, ours.saved_shape)
                state = ours.restore_state(stored)
            checkpoints.save(i, ours.prepare_state_for_save(state), {}, "{}")
            checkpoints.wait_for_save()
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), saved)


@pytest.mark.parametrize("embedding", [pytest.param("columns", marks=pytest.mark.slow), "rows"])
def test_merge_and_a_start_from_it(tmp_path: Path, embedding: str) -> None:
    """A run's checkpoint as a Hugging Face folder holds the table in order; another run starts
    from it in parts.
    """
    ours, run_dir, folder = program(EIGHT, embedding), tmp_path / "run", tmp_path / "merged"
    config = TrainConfig(
        model=dataclasses.replace(MODEL, tie_word_embeddings=True), init_from=str(folder)
    )
    saved = steps(ONE, "replicated", True)[1]
    with Checkpoints(run_dir / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(
            2, ours.prepare_state_for_save(from_host(saved, ours)), {}, config.to_json()
        )
    merge_run_to_hugging_face(run_dir, folder)
    decoder = load_pretrained(folder).decoder
    np.testing.assert_array_equal(decoder.embedding[...], saved.params["embedding"])

    begun = ours.prepare_state_for_save(load_pretrained_state(ours, config))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(begun.params), saved.params)
    assert not any(leaf.any() for leaf in jax.tree.leaves((begun.m, begun.v, begun.step)))


@pytest.mark.slow
def test_gradient_accumulation_and_bfloat16() -> None:
    for embedding in ("columns", "rows"):
        ours = program(EIGHT, embedding, gradient_accumulation_steps=2, compute_dtype="bfloat16")
        tokens = tokens_of(ours, 0)
        state = from_host(jax.device_get(program(ONE).init()), ours)
        halves = jax.device_put(np.asarray(tokens).reshape(2, B // 2, S + 1), tokens.sharding)
        _, metrics = jax.block_until_ready(ours.step(state, halves))
        expected = steps(ONE, "replicated", True)[0][0]
        assert metrics["ok"]
        assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-2)
        assert float(metrics["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=5e-2)


def test_a_program_says_how_its_table_is_split() -> None:
    assert program(ONE, "auto").notes == []
    assert program(EIGHT, "rows").notes[-1] == "rows embedding: as configured"
    assert (
        program(EIGHT, "auto")
        .notes[-1]
        .startswith("columns embedding: a device sends 0.0 MB to other nodes")
    )
