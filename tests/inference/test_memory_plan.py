"""What is said of memory from a checkpoint's headers, and what an engine takes."""

from pathlib import Path

import jax
import pytest
from tiny_engines import SIZES, tiny_engine

from jmoe.config.engine import EngineConfig
from jmoe.inference.memory_plan import memory_plan
from tests.model_configs import CHECKPOINTS

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_plan_without_weights(tmp_path: Path) -> None:
    """What the headers tell is what the engine then takes."""
    options = {"policy": "experts", "expert_tier": "nvme", "host_cache_bytes": 20_000}
    plan = memory_plan(CHECKPOINTS / "olmoe", EngineConfig(**SIZES, **options))
    with tiny_engine("olmoe", cache_dir=tmp_path, **options) as served:
        assert served.plan.memory == plan
        assert served.stats().device_expert_bytes == plan.device_expert_bytes
        (records,) = tmp_path.glob("records-*.bin")
        assert records.stat().st_size >= plan.nvme_bytes
        weights = sum(x.nbytes for layer in served._runner._layers for x in jax.tree.leaves(layer[1]))
        weights += sum(x.nbytes for x in jax.tree.leaves(served._runner._ends[1]))
        assert weights == plan.model.dense_bytes
        assert sum(x.nbytes for x in jax.tree.leaves(served._runner.caches)) == plan.model.cache_bytes
