"""Engines for the tiny checkpoints of `fixtures/checkpoints`."""

from pathlib import Path
from typing import Any

import pytest

from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import Engine
from kernels_pallas import native
from tests.model_configs import CHECKPOINTS

SIZES = {"max_batch": 2, "max_seq_len": 40, "prefill_chunk_tokens": 4, "dtype": "float32"}


def tiny_engine(name: str | Path, limits: dict[str, float] | None = None, **options: Any) -> Engine:
    """Return an engine of two rows in float32. limits: bytes per second of tiers. options: of
    `EngineConfig`.
    """
    config = EngineConfig(**{**SIZES, **options})
    return Engine(CHECKPOINTS / name, config, bandwidth_limit_bytes_per_s=limits)


def needs_compiler() -> None:
    """Skip the test where native operations cannot be built."""
    try:
        native.load()
    except native.NotBuiltError as error:
        pytest.skip(f"no native operations here: {error}")
