"""Padded or ragged rows: where they compete, what is timed, what is chosen and kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jmoe.config import CommConfig, TiersConfig, TrainConfig
from jmoe.training import exchange_choice
from jmoe.training.exchange_choice import (
    ExchangeTimes,
    may_choose_ragged,
    time_exchange_s,
    with_faster_exchange,
)
from jmoe.training.trainer import make_trainer
from tests.model_configs import MODEL, mesh_of, spread_over

CONFIG = TrainConfig(model=MODEL, batch_size=16, sequence_length=8, num_steps=3)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake devices pass for devices with a ragged all-to-all."""
    monkeypatch.setattr(exchange_choice, "supports_ragged_exchange", lambda device: True)


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((8, 1, 1), {}),
        ((1, 1, 8), {"comm": CommConfig(exchange="flat")}),
        ((1, 1, 8), {"comm": CommConfig(schedule="pipelined")}),
        ((1, 1, 8), {"model": dataclasses.replace(MODEL, capacity_factor=1.0)}),
        ((1, 1, 8), {"model": dataclasses.replace(MODEL, num_experts=0)}),
        ((1, 1, 8), {"tiers": TiersConfig(experts="host", optimizer="host")}),
    ],
)
def test_runs_in_which_only_padded_exchanges_compete(
    shape: tuple[int, int, int], changes: dict[str, Any]
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    assert not may_choose_ragged(config, mesh_of(*shape))
    assert with_faster_exchange(config, mesh_of(*shape)) == (config, [])


@pytest.mark.usefixtures("on_gpus")
def test_ragged_competes_between_few_devices_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((1, 1, 8), (2, 2, 2), (4, 1, 2)):
        assert may_choose_ragged(CONFIG, mesh_of(*shape))
    monkeypatch.setattr(exchange_choice, "MOST_PEERS", 4)
    assert may_choose_ragged(CONFIG, mesh_of(2, 2, 2))
    assert not may_choose_ragged(CONFIG, mesh_of(1, 1, 8))


def test_a_cpu_pads() -> None:
    assert not may_choose_ragged(CONFIG, mesh_of(1, 1, 8))


def test_ragged_must_save_a_tenth() -> None:
    assert ExchangeTimes(1e-3, 0.9e-3).chosen_exchange == "ragged"
    assert ExchangeTimes(1e-3, 0.91e-3).chosen_exchange == "flat"
    words = (
        "comm.exchange = auto: ragged; a layer's rows there and back take 2 ms padded and 1 ms r"
    )
    assert str(ExchangeTimes(2e-3, 1e-3)).startswith(words)


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize(("ragged_s", "chosen"), [(1e-3, "ragged"), (2e-3, "flat")])
def test_a_run_takes_the_faster_one_and_keeps_to_it(
    ragged_s: float, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def pretend(config: TrainConfig, mesh: Mesh, kind: str) -> float:
        timed.append(kind)
        return ragged_s if kind == "ragged" else 2e-3

    monkeypatch.setattr(exchange_choice, "time_exchange_s", pretend)
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path))
    for _ in range(2):
        trainer = make_trainer(spread_over(config, 1, 1, 8), mesh_of(1, 1, 8))
        assert trainer.notes[0].startswith(f"comm.exchange = auto: {chosen}; ")
        assert trainer.notes[1].startswith(f"{chosen} exchange: ")
    assert timed == ["flat", "ragged"]  # the second start reads them
    (tmp_path / "exchange-1x1x8.json").write_text("{}")
    with_faster_exchange(config, mesh_of(1, 1, 8))
    assert timed == ["flat", "ragged"] * 2


def test_both_forms_are_timed() -> None:
    for kind in ("flat", "ragged"):
        assert time_exchange_s(CONFIG, mesh_of(2, 2, 2), kind) > 0
    assert jax.device_count() == 8
