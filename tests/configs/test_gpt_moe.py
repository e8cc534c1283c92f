"""Models of MoESys: as many parameters as its tables say."""

import pytest

from jmoe.configs import PRESETS
from jmoe.configs.gpt_moe import gpt_dense


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [((1024, 24, 16), 0.35), ((2048, 24, 16), 1.3), ((4096, 32, 32), 6.7), ((12288, 96, 96), 175)],
)
def test_dense_models_are_those_of_table_1(sizes: tuple[int, int, int], billions: float) -> None:
    total, active = gpt_dense(*sizes).total_and_active_parameters()
    assert total == active and total / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("experts", "billions"), [(8, 13.9), (16, 26.8), (32, 52.6), (64, 104.1), (128, 207.2)]
)
def test_models_with_experts_are_those_of_table_2(experts: int, billions: float) -> None:
    total, _ = PRESETS[f"gpt-moe-{experts}e"][1].model.total_and_active_parameters()
    assert total / 1e9 == pytest.approx(billions, rel=0.001)
