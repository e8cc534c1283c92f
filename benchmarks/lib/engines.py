"""Engines under load: fields of `EngineConfig` as options, and prefill by the clock."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.config.engine import EngineConfig
from jmoe.inference.engine import Engine
from jmoe.inference.loading import load_native_if_used
from jmoe.inference.sampling_params import SamplingParams


def add_engine_options(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Add options for the checkpoint and the fields of `EngineConfig`, but its size and mesh.

    The word "none" means None.
    """
    parser.add_argument("--model", type=Path, required=True)
    for field in fields(EngineConfig):
        if field.name not in ("max_batch", "max_seq_len", "mesh"):
            kind = (lambda text: int(float(text))) if str(field.type).startswith("int") else str
            default = defaults.get(field.name, field.default)
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=default)


def make_engine(
    a: argparse.Namespace, limits: dict[str, float] | None = None, **more: Any
) -> Engine:
    """Return the engine that the options and `more` fields describe; with policy "auto" it has
    measured the machine.

    limits: bytes per second of each tier.
    """
    names = {field.name for field in fields(EngineConfig)}
    chosen = {
        name: None if value == "none" else value for name, value in vars(a).items() if name in names
    }
    config = EngineConfig(**(chosen | more))
    if config.mesh.devices == 1:
        # else a first run would be measured without the native operations
        load_native_if_used(config, waits=True)
    engine = Engine(a.model, config, bandwidth_limit_bytes_per_s=limits)
    if config.policy == "auto":
        engine.generate([[1]], max_new_tokens=1, ignore_eos=True)
        engine.generate([])  # measures before a second call
    return engine


def run_description(a: argparse.Namespace) -> JsonObject:
    """Return what a result says of its run: options, versions and device."""
    return {"args": report.options(a)} | report.device_and_versions()


def measure_prefill_s(
    engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int = 1
) -> float:
    """Return the seconds until each of the prompts has its first token."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    begun = time.perf_counter()
    waiting = {engine.add_request(prompt, sampling) for prompt in prompts}
    while waiting:
        waiting -= {output.sequence for output in engine.step()}
    return time.perf_counter() - begun
