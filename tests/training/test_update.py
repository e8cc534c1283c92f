"""Passes without gradients take the buffers of training, and those with room for every token only
where tokens need it.

Legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.collectives import exchange
from jmoe.config import ModelConfig, TiersConfig, TrainConfig
from jmoe.mesh import BATCH, path_names
from jmoe.training.trainer import make_trainer
from jmoe.training.update import has_overflowed
from tests.model_configs import MODEL, mesh_of, spread_over
from tests.training.tasks.test_streamed_vision import DEVICE, HOST, opened
from tests.training.tasks.test_streamed_vision import MANY as BY_BOTH

B, S = 8, 32
# Experts whose absence shows in the loss, and routers that still deal out evenly.
DECODER = dataclasses.replace(
    MODEL, num_hidden_layers=2, num_experts_per_tok=2, initializer_range=0.1
)
CONFIG = TrainConfig(model=DECODER, batch_size=B, sequence_length=S, compute_dtype="float32")
ONE_CHOICE = dataclasses.replace(
    BY_BOTH, model=dataclasses.replace(BY_BOTH.model, num_experts_per_tok=1)
)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`full_capacity` of every buffer that is laid out while a program is traced."""
    asked, buffer_rows_per_destination = list[bool](), exchange.buffer_rows_per_destination

    def spy(*args: Any) -> int:
        asked.append(bool(args[3]))
        return buffer_rows_per_destination(*args)

    monkeypatch.setattr(exchange, "buffer_rows_per_destination", spy)
    return asked


def undecided(state: Any) -> Any:
    """The state with routers that give all experts one score, so that every token takes the
    first ones.
    """

    def changed(path: Any, x: jax.Array) -> jax.Array:
        of_router = "router" in path_names(path) and path_names(path)[-1] == "kernel"
        return jnp.zeros_like(x) if of_router else x

    return dataclasses.replace(
        state, params=jax.tree_util.tree_map_with_path(changed, state.params)
    )


def values(
    shape: tuple[int, int, int], tiers: TiersConfig, rooms: list[bool]
) -> list[tuple[Any, Any, set[bool]]]:
    """(Summed loss, next token's logits, the buffers that were laid out), of a fresh state and
    of an undecided one.
    """
    config: Any = spread_over(dataclasses.replace(CONFIG, tiers=tiers), *shape)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (B, S + 1)).astype(np.int32)
    with contextlib.closing(make_trainer(config, mesh := mesh_of(*shape))) as trainer:
        rows, of_states = NamedSharding(mesh, BATCH), []
        tokens_BS = jax.device_put(tokens, rows)
        weights_BS = jax.device_put(np.ones((B, S), np.float32), rows)
        fresh = trainer.init()
        for state in (fresh, undecided(fresh)):
            rooms.clear()
            (loss,) = trainer.evaluate_batches(state, [(tokens_BS, weights_BS)])
            logits_V = trainer.next_logits(state, tokens_BS[:, :-1], jnp.int32(S - 1))
            of_states.append((np.asarray(loss), np.asarray(logits_V), set(rooms)))
    return of_states


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["device", "host"])
def test_an_evaluation_takes_trainings_buffers_and_runs_again_where_they_are_too_small(
    rooms: list[bool], tiers: str
) -> None:
    of_tier = TiersConfig() if tiers == "device" else TiersConfig(experts="host", optimizer="host")
    (loss, logits_V, small), (full_loss, full_logits_V, again) = values((1, 2, 4), of_tier, rooms)
    assert small == {False}
    assert again == {True}  # the program with training's buffers is there already
    (expected, expected_V, _), (full_expected, full_expected_V, _) = values(
        (1, 1, 1), TiersConfig(), rooms
    )
    for ours, theirs in ((loss, expected), (full_loss, full_expected)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    for ours, theirs in ((logits_V, expected_V), (full_logits_V, full_expected_V)):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [DEVICE, HOST], ids=["device", "host"])
def test_images_are_evaluated_as_text_is(
    rooms: list[bool], tmp_path: Path, tiers: TiersConfig
) -> None:
    seen = []
    for shape in ((1, 1, 4), (1, 1, 1)):
        with opened(ONE_CHOICE, tiers, tmp_path, *shape) as run:
            run.state = undecided(run.trainer.init())
            seen.append(run.evaluate())

    assert False in rooms  # layers routed by task always have room for every image
    np.testing.assert_allclose(*seen, atol=1e-4)


def test_only_a_dropless_step_overflows() -> None:
    dropped_N = np.array([0, 3], np.int32)
    dropless, capped = ModelConfig(), ModelConfig(capacity_factor=1.0)
    assert has_overflowed(dropless, dropped_N) and has_overflowed(dropless, jnp.asarray(dropped_N))
    assert not has_overflowed(dropless, 0 * dropped_N)
    assert not has_overflowed(capped, dropped_N)
    assert not has_overflowed(dropless, None)  # no layer has experts
