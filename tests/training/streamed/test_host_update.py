"""AdamW on the host against AdamW on the device over many steps, compiled as users compile."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from test_streamed_step import CONFIG, UPDATED_ON_HOST, batch

from jmoe.config import TiersConfig, TrainConfig
from jmoe.offload.expert_updates import load_native_adamw
from jmoe.training.streamed.step import StreamedTrainer
from tests.arrays import differing, full_state
from tests.model_configs import MODEL, mesh_of, stored_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("full_compilation")]

STEPS = 200
NVME = TiersConfig("nvme", "nvme", "nvme", host_cache_bytes=300_000)


def losses_and_state(config: TrainConfig, tiers: TiersConfig, folder: Path) -> tuple[Any, Any]:
    config = dataclasses.replace(config, tiers=stored_in(tiers, folder), num_steps=STEPS)
    with contextlib.closing(StreamedTrainer(config, mesh_of(1, 1, 1))) as program:
        state, losses = program.init(), []
        for step in range(STEPS):
            state, metrics = program.step(state, batch(config, step % 8))
            assert metrics["ok"]
            losses.append(float(metrics["loss"]))
        return losses, full_state(program, state)


@pytest.mark.parametrize("tiers", [UPDATED_ON_HOST, dataclasses.replace(NVME, update="host")])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_losses_of_200_steps(
    compute_dtype: Literal["float32", "bfloat16"], tiers: TiersConfig, tmp_path: Path
) -> None:
    """To the bit: the native operation rounds where XLA's program does."""
    assert load_native_adamw("auto")
    model = dataclasses.replace(MODEL, hidden_size=32, moe_intermediate_size=16, mlp_bias=False)
    config = dataclasses.replace(CONFIG, model=model, compute_dtype=compute_dtype, batch_size=4)
    here = losses_and_state(config, tiers, tmp_path / "here")
    there = losses_and_state(
        config, dataclasses.replace(tiers, update="device"), tmp_path / "there"
    )
    np.testing.assert_allclose(here[0], there[0], rtol=0, atol=1e-6)
    assert here[0][-1] < 0.8 * here[0][0]
    assert here[0] == there[0]
    assert differing(here[1], there[1]) == []
