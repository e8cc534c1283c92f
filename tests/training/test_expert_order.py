"""Experts in another order while a run goes on: the losses as if nothing had happened, and devices
with similar loads.
"""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jmoe.config import (
    CommConfig,
    LoraConfig,
    OptimizerConfig,
    RouterConfig,
    TiersConfig,
    TrainConfig,
)
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.planning.expert_order import busiest_share
from jmoe.training.expert_order import LoadBalancer, reorder_experts
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.state import TrainState
from jmoe.types import JsonObject
from tests import model_configs
from tests.arrays import on_host
from tests.model_configs import OPTIMIZER, spread_over

SHAPE = (1, 2, 2)
SEQUENCE, BATCH = 16, 8
MODEL = dataclasses.replace(
    model_configs.MODEL, num_hidden_layers=3, first_k_dense_replace=1, num_experts_per_tok=2
)
CONFIG = TrainConfig(
    model=MODEL,
    optimizer=dataclasses.replace(OPTIMIZER, learning_rate=0.001),
    batch_size=BATCH,
    sequence_length=SEQUENCE,
    compute_dtype="float32",
)


def trainer_of(config: TrainConfig, shape: tuple[int, int, int] = SHAPE) -> FusedTrainer:
    return FusedTrainer(config, make_mesh(shape, jax.devices()[:4]))


def step(trainer: FusedTrainer, state: TrainState, number: int) -> tuple[TrainState, JsonObject]:
    """Take a step on the tokens of its number, with room for all at once."""
    tokens = (
        np.random.default_rng(number)
        .integers(0, MODEL.vocab_size, (1, BATCH, SEQUENCE + 1))
        .astype(np.int32)
    )
    placed = jax.device_put(tokens, NamedSharding(trainer.model.mesh, ACCUMULATED_BATCH))
    state, values = trainer.step(state, placed, full_capacity=True)
    assert values["ok"]
    return state, jax.device_get(values)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (SHAPE, {}),
        pytest.param((2, 1, 2), {"shard_experts": "weights"}, marks=pytest.mark.slow),
        pytest.param(
            SHAPE,
            {"optimizer": OptimizerConfig(kind="muon", learning_rate=0.001)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adamw", "sharded", "muon"],
)
def test_losses_are_those_of_experts_that_stay(
    shape: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    """Weights, moments, routers and their biases move together: ten steps after the move the losses
    and the loads of experts, found by their old numbers, are those of a run without it.
    """
    optimizer = changes.pop("optimizer", CONFIG.optimizer)
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    trainer = trainer_of(spread_over(config, *shape, **changes), shape)
    alone, moved = trainer.init(), trainer.init()
    for number in range(3):
        alone, expected = step(trainer, alone, number)
        moved, values = step(trainer, moved, number)
    assert np.abs(jax.tree.leaves(on_host(moved.router_bias))[0]).max() > 0
    rng = np.random.default_rng(7)
    orders_LE = np.stack([rng.permutation(8) for _ in range(2)]).astype(np.int32)
    before = on_host(trainer.prepare_state_for_save(moved))
    moved = reorder_experts(moved, orders_LE, trainer)
    after = on_host(trainer.prepare_state_for_save(moved))
    for tree in ("params", "m"):
        name = "w_up"
        one, other = (
            getattr(state, tree)["moe_layers"]["moe"]["experts"][name] for state in (before, after)
        )
        np.testing.assert_array_equal(other[0], one[0][orders_LE[0]])
        assert not np.array_equal(other, one)
    for number in range(3, 13):
        alone, expected = step(trainer, alone, number)
        moved, values = step(trainer, moved, number)
        np.testing.assert_allclose(values["loss"], expected["loss"], rtol=1e-5)
        in_old_order = np.take_along_axis(values["counts"], np.argsort(orders_LE, axis=1), axis=1)
        np.testing.assert_array_equal(in_old_order, expected["counts"])


def test_the_busiest_device_gets_less() -> None:
    """A router that prefers the two experts of the first device: its loads before and after."""
    comm: dict[str, Any] = {"balance_every_steps": 2}
    trainer = trainer_of(spread_over(CONFIG, *SHAPE, **comm))
    state = trainer.init()
    skew = np.array([5, 5, 0, 0, 0, 0, 0, 0], np.float32)
    state = dataclasses.replace(
        state,
        router_bias=jax.tree.map(
            lambda x: jax.device_put(np.asarray(x) + skew, x.sharding), state.router_bias
        ),
    )
    balancer, shares = LoadBalancer(trainer.config), []
    for number in range(4):
        orders = balancer.choose_orders(number, 4)
        assert (orders is not None) == (number == 2)
        if orders is not None:
            assert orders.before == pytest.approx(4.0)
            assert orders.after == pytest.approx(2.0)
            assert orders.num_moved == 4  # two of each layer
            state = reorder_experts(state, orders.orders_LE, trainer)
        state, values = step(trainer, state, number)
        balancer.note_counts(values["counts"])
        shares.append(np.mean([busiest_share(load_E, 4) for load_E in values["counts"]]))
    np.testing.assert_allclose(shares, [4.0, 4.0, 2.0, 2.0])


def test_nothing_is_decided_without_the_option_or_counts() -> None:
    never = LoadBalancer(CONFIG)
    never.note_counts(np.ones((2, 8)))
    assert never.choose_orders(0, 4) is None
    often = LoadBalancer(spread_over(CONFIG, *SHAPE, balance_every_steps=4))
    assert often.choose_orders(4, 4) is None  # a run that has just resumed
    often.note_counts(np.ones((2, 8)))
    assert often.choose_orders(5, 4) is None
    orders = often.choose_orders(8, 4)
    assert orders is not None
    assert orders.num_moved == 0
    assert often.choose_orders(12, 4) is None  # counted anew since


GROUPS = RouterConfig(kind="group_limited", n_group=4, topk_group=2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": dataclasses.replace(MODEL, router=GROUPS)}, "model.router.n_group = 4"),
        ({"comm": CommConfig(balance_every_steps=5, packing="auto")}, "comm.packing = 'auto'"),
        ({"optimizer": OptimizerConfig(moments="8bit")}, "optimizer.moments = '8bit'"),
        ({"lora": LoraConfig(rank=2), "init_from": "run"}, "lora.rank"),
        ({"tiers": TiersConfig(experts="host", optimizer="host")}, "experts on other tiers"),
    ],
)
def test_runs_whose_experts_must_stay_are_refused(changes: dict[str, Any], why: str) -> None:
    balanced = {"comm": CommConfig(balance_every_steps=5)} | changes
    with pytest.raises(
        ValueError, match=f"comm.balance_every_steps = 5: must be 0 with {re.escape(why)}"
    ):
        dataclasses.replace(CONFIG, **balanced)
