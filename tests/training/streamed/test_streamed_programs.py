"""Experts on other tiers, spread over several devices: the ordinary step's training on the same
mesh.

Legend: E experts.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_streamed_step import CONFIG, HOST, E, Trained, batch, same_training, train

from jmoe.config import CommConfig, MeshConfig, RouterConfig, TiersConfig, TrainConfig
from jmoe.run.planner import training_sizes
from jmoe.training.streamed.model import BackwardInputs
from jmoe.training.streamed.step import StreamedTrainer
from jmoe.training.trainer import make_trainer
from tests.arrays import differing
from tests.compiled import operations
from tests.model_configs import MODEL, mesh_of, spread_over, stored_in

SPREAD = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(MODEL, num_experts_per_tok=2, shared_expert_intermediate_size=8),
    mesh=MeshConfig(1, 1, 2),
    comm=CommConfig(chunk_bytes=4000),
    batch_size=4,
)

REPLICAS = dataclasses.replace(SPREAD, mesh=MeshConfig(2, 1, 2))
# of an expert by a token, so that some stay idle and catch up
ONE_CHOICE = dataclasses.replace(CONFIG, batch_size=4)


@pytest.fixture(
    scope="module",
    params=[pytest.param(SPREAD, marks=pytest.mark.slow), REPLICAS],
    ids=["each its own", "replicas"],
)
def config(request: pytest.FixtureRequest) -> Any:
    """Every device has experts of its own, or two have the same."""
    return request.param


@pytest.fixture(scope="module")
def ordinary(config: TrainConfig) -> Trained:
    return train(config, steps=4)


@pytest.fixture(scope="module")
def on_host(config: TrainConfig) -> Trained:
    return train(config, HOST, steps=4)


def test_the_losses_are_those_of_the_ordinary_step(ordinary: Trained, on_host: Trained) -> None:
    same_training(on_host, ordinary)


@pytest.mark.slow
def test_it_starts_from_the_same_parameters() -> None:
    assert differing(train(SPREAD, HOST, steps=0).state, train(SPREAD, steps=0).state) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 1, 4), {"remat": "layer"}),
        ((4, 1, 2), {"comm": CommConfig(schedule="priority", bucket_bytes=3000)}),
        ((8, 1, 1), {"comm": CommConfig(shard_dense=False, schedule="none")}),
        ((2, 2, 2), {"comm": CommConfig(exchange="dedup", schedule="pipelined", chunk_bytes=1000)}),
        ((1, 2, 4), {"comm": CommConfig(packing=2)}),
    ],
    ids=["inputs only", "priority", "whole", "nodes", "packed"],
)
def test_meshes_with_replicas(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    config = dataclasses.replace(SPREAD, batch_size=16, gradient_accumulation_steps=2)
    config = dataclasses.replace(config, mesh=MeshConfig(*shape), **options)
    same_training(train(config, HOST, steps=2), train(config, steps=2))


@pytest.fixture(scope="module")
def one_replica() -> Trained:
    return train(ONE_CHOICE, HOST, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_differ_from_one_by_the_order_of_sums_alone(
    replicas: int, one_replica: Trained
) -> None:
    """Every gradient, which AdamW's first moments hold, is that of one device to a millionth, and
    so are the updates.

    A loss counted once a replica, buffers too small or an expert that catches up twice would show
    at once; rounding shows in the last digits, until it turns a token's choice of experts.
    """
    ours = train(dataclasses.replace(ONE_CHOICE, mesh=MeshConfig(replicas, 1, 1)), HOST, steps=3)
    same_training(ours, one_replica, losses_rtol=1e-6, metrics_rtol=1e-5)
    moments = (jax.tree.leaves_with_path(trained.state.m) for trained in (ours, one_replica))
    for (path, x), (_, y) in zip(*moments, strict=True):
        np.testing.assert_allclose(
            x, y, rtol=0, atol=1e-6 * np.max(np.abs(y)), err_msg=jax.tree_util.keystr(path)
        )
    updates = [
        (trained.stats.updates, trained.stats.replayed_steps) for trained in (ours, one_replica)
    ]
    assert updates[0] == updates[1] and updates[0][1] > 0


def test_replicas_have_their_records_once(config: TrainConfig, on_host: Trained) -> None:
    """Each gradient comes and goes once, of an expert that a token of any of them chose."""
    chosen = sum(int((m["counts"] > 0).sum()) for m in on_host.metrics)
    assert on_host.stats.gradients.host.transfers == 2 * chosen


@pytest.mark.parametrize(
    "tiers",
    [
        pytest.param(TiersConfig(experts="device", optimizer="host"), marks=pytest.mark.slow),
        TiersConfig(
            experts="nvme",
            optimizer="nvme",
            gradients="nvme",
            host_cache_bytes=150_000,
            device_layers=3,
        ),
        pytest.param(
            TiersConfig("nvme", "nvme", update="host", host_cache_bytes=150_000, device_layers=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["device", "nvme", "updated on the host"],
)
def test_where_it_lies_changes_no_bit(
    config: TrainConfig, on_host: Trained, tiers: TiersConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, native="off")  # XLA: the bits of the device's update
    there = train(config, stored_in(tiers, tmp_path), steps=4, reopen_after=2)
    assert there.losses == on_host.losses
    assert there.held_out == on_host.held_out
    assert differing(there.state, on_host.state) == []


@pytest.mark.slow
def test_hierarchy_accumulation_and_all_else_at_once() -> None:
    """2 x 2 devices, a tied table in rows, jitter, pieces."""
    router = RouterConfig(kind="switch", jitter_noise=0.3, aux_loss_coef=0.1, z_loss_coef=0.01)
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(
            MODEL, router=router, tie_word_embeddings=True, first_k_dense_replace=2
        ),
        mesh=MeshConfig(1, 2, 2),
        comm=CommConfig(exchange="dedup", schedule="pipelined", embedding="rows", chunk_bytes=1000),
        batch_size=16,
        gradient_accumulation_steps=2,
    )
    same_training(train(config, HOST, steps=2), train(config, steps=2))


@pytest.mark.slow
def test_a_step_that_overflows_changes_nothing_and_runs_again() -> None:
    def steered(config: TrainConfig) -> tuple[Any, Any, Any]:
        """A program whose state sends all tokens to the first device, and its first step."""
        program = make_trainer(config, mesh_of(1, 1, 4))
        state = program.init()
        push = jax.tree.map(
            lambda b: b + 10.0 * (np.arange(E) < E // 4).astype(np.float32), state.router_bias
        )
        state = dataclasses.replace(state, router_bias=push)
        return program, *program.step(state, batch(config, 0))

    config = spread_over(SPREAD, 1, 1, 4)
    ordinary, theirs, other = steered(config)
    program, state, metrics = steered(dataclasses.replace(config, tiers=HOST))
    try:
        assert other["overflow"] and metrics["overflow"] and not metrics["ok"]
        assert int(state.step) == 0
        for step in range(2):
            state, metrics = program.step(state, batch(config, step), full_capacity=True)
            theirs, other = ordinary.step(theirs, batch(config, step), full_capacity=True)
            assert metrics["ok"] and not metrics["overflow"]
            np.testing.assert_allclose(metrics["loss"], other["loss"], rtol=1e-5)
    finally:
        program.close()


@pytest.mark.parametrize(
    ("shape", "comm", "words"),
    [
        (
            (1, 2, 2),
            {"shard_dense": False},
            (
                "comm.schedule = 'chunks': must be none with experts on other tiers and"
                " comm.shard_dense = False"
            ),
        ),
        (
            (1, 2, 2),
            {"schedule": "none", "fuse_dense": False},
            "comm.fuse_dense = False: must be True with experts on other tiers",
        ),
    ],
)
def test_meshes_that_are_refused(
    shape: tuple[int, int, int], comm: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        spread_over(dataclasses.replace(SPREAD, tiers=HOST), *shape, **comm).checked_mesh_shape(4)


@pytest.mark.slow
def test_dense_parameters_on_every_device() -> None:
    """Nothing to gather; parameters that no number of devices divides are the same case."""
    config = spread_over(SPREAD, 1, 1, 2, shard_dense=False, schedule="none")
    same_training(train(config, HOST, steps=2), train(config, steps=2))


class Spy:
    """Stands for a compiled function: counts its all-to-alls, and the bytes of the residuals it
    is given.
    """

    def __init__(self, function: Any) -> None:
        self.function, self.all_to_alls, self.residual_bytes = function, 0, 0
        # by the text that they were compiled from, and what they take
        self.compiled: dict[Any, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        lowered = self.function.lower(*args, **options)
        key = lowered.as_text(), jax.tree.structure(args)
        if key not in self.compiled:
            self.compiled[key] = lowered.compile()
        self.all_to_alls += all_to_alls(self.compiled[key])
        residuals = args[2].residuals if isinstance(args[2], BackwardInputs) else None
        self.residual_bytes += sum(a.nbytes for a in jax.tree.leaves(residuals))
        return self.compiled[key](*args)


def all_to_alls(compiled: Any) -> int:
    return Counter(op.kind for op in operations(compiled.as_text()))["all-to-all"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "comm", "remat", "forward", "backward"),
    [
        # rows and how many there are; rows back. And reversed
        ((1, 1, 2), {"chunk_bytes": 2000}, "none", 3, 2),
        ((1, 1, 2), {"chunk_bytes": 2000, "schedule": "none"}, "none", 3, 2),
        ((1, 1, 2), {"chunk_bytes": 2000}, "layer", 3, 5),
        ((1, 1, 2), {"chunk_bytes": 2000}, "experts", 3, 2),
        # weights and choices of all rows; of each chunk rows across, rows inside and how many, two
        # levels back
        ((1, 2, 2), {"exchange": "dedup", "schedule": "pipelined"}, "none", 2 + 2 * 5, 1 + 2 * 4),
    ],
    ids=["chunks", "unordered", "again", "experts again", "dedup"],
)
def test_nothing_is_sent_twice(
    shape: Any, comm: dict[str, Any], remat: Any, forward: int, backward: int
) -> None:
    """As many all-to-alls as in the ordinary step, as long as there is memory to keep what is
    needed; it is planned.
    """
    model = dataclasses.replace(SPREAD.model, capacity_factor=2.0)
    config = dataclasses.replace(SPREAD, model=model, remat=remat, batch_size=32, tiers=HOST)
    config = spread_over(config, *shape, embedding="replicated", **comm)
    devices = mesh_of(*shape)
    layers = config.model.num_moe_layers
    program = StreamedTrainer(config, devices)
    spies = {
        name: Spy(getattr(program.programs, name))
        for name in ("route", "apply_experts", "moe_gradients")
    }
    program.programs = dataclasses.replace(program.programs, **spies)
    try:
        _, metrics = program.step(program.init(), batch(config, 0))
    finally:
        program.close()
    assert metrics["ok"]
    assert spies["route"].all_to_alls + spies["apply_experts"].all_to_alls == layers * forward
    assert spies["moe_gradients"].all_to_alls == layers * backward
    planned_bytes = training_sizes(config).residual_bytes
    assert 0.7 * planned_bytes <= spies["moe_gradients"].residual_bytes <= 1.15 * planned_bytes
    ordinary: Any = make_trainer(dataclasses.replace(config, tiers=TiersConfig()), devices)
    whole = ordinary.step.lower(ordinary.state_shape, batch(config, 0)).compile()
    assert all_to_alls(whole) == layers * (forward + backward)
