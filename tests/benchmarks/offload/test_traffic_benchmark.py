"""The benchmark of a step's traffic, where the experts fit the cache and where they do not."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.offload import training as training_tiers


@pytest.mark.parametrize(("bytes_an_expert", "ratio"), [(0, None), (10, 0.5)])
def test_bytes_of_half_the_experts_are_compared_with_those_of_all(
    bytes_an_expert: int, ratio: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Session:
        """A run whose steps move so many bytes."""

        def __init__(self, config: Any) -> None:
            self.program, self.experts = SimpleNamespace(close=lambda: None), 0

        def use_only(self, experts: int) -> None:
            self.experts = experts

        def step(self, number: int) -> Any:
            return SimpleNamespace(read_bytes=self.experts * bytes_an_expert, written_bytes=0)

    monkeypatch.setattr(training_tiers, "Session", Session)
    options = argparse.Namespace(cache=0.5, rounds=1, experts=8, layers=2)
    monkeypatch.setattr(training_tiers, "config_of", lambda *_, **__: None)
    monkeypatch.setattr(training_tiers, "expert_bytes", lambda _: 1000)
    found = training_tiers.measure_traffic(options, tmp_path)
    assert found == {
        "all": 8 * bytes_an_expert,
        "half": 4 * bytes_an_expert,
        "half_against_all": ratio,
    }
