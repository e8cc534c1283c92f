"""Guesses about the next layer: what they are, and that no guess changes a token."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, tiny_engine

from jmoe.inference.path_table import PATHS_FILE
from jmoe.inference.popularity import CountEstimator, RouterEstimator
from jmoe.inference.runner import ModelRunner
from jmoe.inference.sequence import Completion
from jmoe.layers.router import Router
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.programs.profile import count_paths

PROMPTS = [[5, 6, 7, 8, 9], [11, 3], [20, 21, 22]]
QUICK = {("gpt_oss", "host"), ("deepseek_v3_yarn", "nvme")}


def test_counts_of_recent_steps() -> None:
    estimator = CountEstimator(num_layers=2, num_experts=6)
    none = np.array([[6, 6]], np.int32)  # padding
    assert estimator.estimate_next_experts([none]).size == 0  # nothing is known of layer 1
    for _ in range(3):
        first, second = np.array([[0, 1], [1, 2]], np.int32), np.array([[3, 5], [3, 6]], np.int32)
        estimator.estimate_next_experts([first])
        # the last layer's next is the first layer of the next step
        after = estimator.estimate_next_experts([first, second])
        assert sorted(after.tolist()) == [0, 1, 2]
    assert sorted(estimator.estimate_next_experts([first]).tolist()) == [3, 5]
    for _ in range(30):  # the choice changes: layer 1 now needs one expert, another one
        estimator.estimate_next_experts([first])
        estimator.estimate_next_experts([first, np.array([[4, 4], [4, 4]], np.int32)])
    assert estimator.estimate_next_experts([first]).tolist() == [4]


def test_next_router_on_this_input() -> None:
    d, e, k = 8, 6, 2
    routers = [Router(d, e, k, rngs=nnx.Rngs(seed)) for seed in range(3)]
    estimator = RouterEstimator(routers, e)
    hidden = [
        jax.random.normal(jax.random.key(i), (t, d), jnp.float32) for i, t in enumerate((4, 3))
    ]
    path = [np.zeros((7, k), np.int32)]
    path[0][5] = e  # a token that pads its group
    for layer in range(2):
        estimator.start_next_estimate(layer, hidden)
        expected = np.concatenate([np.asarray(routers[layer + 1](h).topk_idx_TK) for h in hidden])
        np.testing.assert_array_equal(
            estimator.estimate_next_experts(path), np.delete(expected, 5, axis=0)
        )
    estimator.start_next_estimate(2, hidden)
    assert estimator.estimate_next_experts(path).size == 0  # no router comes after the last


def run(name: str, **options: Any) -> tuple[list[Completion], Any]:
    with tiny_engine(name, **options) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=12, ignore_eos=True, logprobs=2)
        assert isinstance(engine._runner, ModelRunner)
        if engine._runner.needs_no_choice_readback:
            assert engine.stats().readback_s == 0
        elif engine.residency.takes_guesses:
            assert 0 < engine.stats().readback_s < engine.stats().step_s
        return found, engine.stats()


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        pytest.param(name, tier, marks=() if (name, tier) in QUICK else pytest.mark.slow)
        for name, tier in itertools.product(
            ("mixtral", "deepseek_v3_yarn", "gpt_oss"), ("host", "nvme")
        )
    ],
)
def test_a_guess_changes_no_token(name: str, tier: str, tmp_path: Path) -> None:
    resident, stats = run(name, policy="resident")
    layers = 3 if name == "gpt_oss" else 2
    options: dict[str, Any] = {"policy": "experts", "expert_tier": tier, "cache_dir": tmp_path}
    # one and a half layers
    options |= {"device_bytes": stats.device_expert_bytes * 3 // (2 * layers)}
    options |= {"host_cache_bytes": 1 << 15} if tier == "nvme" else {}
    guessed = {}
    for estimator in ("router", "counts", None):
        streamed, stats = run(name, estimator=estimator, **options)
        same = [(c.token_ids, c.logprobs) for c in streamed] == [
            (c.token_ids, c.logprobs) for c in resident
        ]
        assert same, estimator
        assert stats.prefill.steps + stats.decode.steps == stats.steps
        assert stats.prefill.streamed_bytes + stats.decode.streamed_bytes <= stats.streamed_bytes
        guessed[estimator] = stats.guessed, stats.guessed_right
    assert guessed[None] == (0, 0)
    for estimator in ("router", "counts"):
        guesses, right = guessed[estimator]
        assert 0 <= right <= guesses
        assert guesses > 0 or name == "mixtral", (
            "whose slots have no room beside what a batch chose"
        )


def test_paths_of_a_profile_change_no_token(tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINTS / "gpt_oss", tmp_path / "gpt_oss")

    def answers(**options: Any) -> tuple[list[Any], Any]:
        with tiny_engine(folder, **options) as engine:
            found = engine.generate(PROMPTS, max_new_tokens=12, ignore_eos=True, logprobs=2)
            return [(c.token_ids, c.logprobs) for c in found], engine.stats()

    with pytest.raises(
        ValueError,
        match=f"{PATHS_FILE}: no such file; make one with `python -m jmoe.programs.profi",
    ):
        tiny_engine(folder, estimator="paths")
    expected, stats = answers(policy="resident")
    options: dict[str, Any] = {"policy": "experts", "device_bytes": stats.device_expert_bytes // 2}
    # a profile of these very sequences, so that every path was seen
    with tiny_engine(folder, policy="resident") as engine, LazyCheckpoint(folder) as checkpoint:
        sequences = [
            [*prompt, *token_ids[:-1]]
            for prompt, (token_ids, _) in zip(PROMPTS, expected, strict=True)
        ]
        config, fingerprint = engine.config, checkpoint.routing_fingerprint
        table = count_paths(engine, sequences, path_length=2).make_table(
            fingerprint, config.num_experts
        )
        assert table.header.tokens == sum(map(len, sequences))
        chosen = engine.last_expert_choices()[0]
        popularity_E, without_share = table.estimate_popularity([chosen])
        real = np.count_nonzero(chosen < config.num_experts)
        assert (popularity_E.sum(), without_share) == (pytest.approx(real), 0)
        table.save(folder)
    streamed, stats = answers(estimator="paths", **options)
    assert streamed == expected
    assert 0 < stats.guessed_right <= stats.guessed
    with LazyCheckpoint(folder, "bfloat16") as checkpoint:
        assert checkpoint.routing_fingerprint == fingerprint, (
            "whatever the dtype that was asked for"
        )
    shutil.copy(folder / PATHS_FILE, shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "mixtral"))
    with pytest.raises(ValueError, match="was made for another model"):
        tiny_engine(tmp_path / "mixtral", estimator="paths")


def test_unknown_estimator() -> None:
    with pytest.raises(
        ValueError, match="estimator = 'oracle': must be auto, router, counts, paths or None"
    ):
        run("mixtral", estimator="oracle")
