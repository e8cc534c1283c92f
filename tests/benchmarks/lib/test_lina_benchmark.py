"""The simulator of Lina's benchmark against an engine whose experts really move."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_engines import tiny_engine

from benchmarks.lib.lina import (
    LENGTHS,
    WeightlessPlacedExperts,
    count_path_tables,
    make_contestant_planner,
    replay_choices,
)
from jmoe.config.engine import EngineMesh
from jmoe.inference.mesh.runner import MeshRunner
from tests.model_configs import CHECKPOINTS

ROWS, TOKENS, SLOTS = 4, 4, 3


@pytest.mark.slow
def test_the_simulator_decides_what_the_engine_decides(tmp_path: Path) -> None:
    """For every contestant; with a forced balance no device has more to do than another."""
    folder = Path(shutil.copytree(CHECKPOINTS / "mixtral", tmp_path / "mixtral"))
    batches = np.random.default_rng(0).integers(3, 60, (6, ROWS, TOKENS)).tolist()
    mesh = EngineMesh(devices=2, placement="lina", slots_per_device=SLOTS)
    with tiny_engine(
        folder, max_batch=ROWS, prefill_chunk_tokens=TOKENS, mesh=mesh, estimator="counts"
    ) as engine:
        for length, table in count_path_tables(engine, folder, batches[0]).items():
            (folder / f"l{length}").mkdir()
            table.save(folder / f"l{length}")
        runner = engine._runner
        assert isinstance(runner, MeshRunner)
        runner.enable_swaps(1.0, 0.5)
        swaps = {}
        lina = [f"lina, l = {length}" for length in LENGTHS]
        for name in ("even", "ideal", *lina, "without_estimate", "without_phase_two"):
            runner.start_contestant(name, str(folder))  # type: ignore[attr-defined]
            engine.reset_stats()
            steps = []
            for prompts in batches[1:]:
                engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
                steps.append(engine.last_expert_choices())
            stats = engine.stats()
            assert stats.placement is not None
            assert stats.steps == len(steps)
            places = WeightlessPlacedExperts(engine.config, 2, SLOTS)
            places.process_of_N = runner.residency.process_of_N  # one for both devices
            planner = make_contestant_planner(
                name, folder, places, runner.placer.costs, engine.config
            )
            replayed, planned, found = (
                replay_choices(planner, steps),
                planner.stats(),
                stats.placement,
            )
            for field in ("loads", "copies", "balancedness", "estimates", "replans", "swaps"):
                assert getattr(planned, field) == getattr(found, field), (name, field)
            assert (replayed.plans == 0).all() == (name in ("even", "ideal", "without_estimate"))
            swaps[name] = found.swaps
            if name == "ideal":
                assert found.balancedness == (1.0,) * engine.config.num_moe_layers
                # top-2 on two devices
                assert (replayed.busiest == ROWS * TOKENS * engine.config.num_moe_layers).all()
    assert (
        swaps["even"] == swaps["ideal"] == 0 < min(swaps["lina, l = 3"], swaps["without_estimate"])
    )
