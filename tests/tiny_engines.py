"""Engines for the tiny checkpoints of `fixtures/checkpoints`."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from jmoe.config.engine import EngineConfig
from jmoe.inference import runner
from jmoe.inference.engine import Engine
from jmoe.offload.slots import DeviceSlots
from kernels_pallas import native
from tests.model_configs import CHECKPOINTS

SIZES = {"max_batch": 2, "max_seq_len": 40, "prefill_chunk_tokens": 4, "dtype": "float32"}


def tiny_engine(name: str | Path, limits: dict[str, float] | None = None, **options: Any) -> Engine:
    """Return an engine of two rows in float32. limits: bytes per second of tiers. options: of
    `EngineConfig`.
    """
    config = EngineConfig(**{**SIZES, **options})
    return Engine(CHECKPOINTS / name, config, bandwidth_limit_bytes_per_s=limits)


def run_as_on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines without native operations run the programs that they run on an accelerator, with
    experts in arrays of the device.
    """
    on_device = partial(DeviceSlots, device=jax.devices()[0])
    monkeypatch.setattr(
        "jmoe.offload.residency.HostSlots",
        lambda slots, fields, *, fp8_inputs, **_: on_device(slots, fields, fp8_inputs=fp8_inputs),
    )
    monkeypatch.setattr(runner, "runs_on_cpu", lambda: False)


def needs_compiler() -> None:
    """Skip the test where native operations cannot be built."""
    try:
        native.load()
    except native.NotBuiltError as error:
        pytest.skip(f"no native operations here: {error}")
