"""Command lines as configurations."""

import pytest

from configs import PRESETS
from jmoe.command_line import parse_train


@pytest.mark.parametrize("tier", ["auto", "device", "host", "nvme"])
def test_moments_go_where_the_weights_are(tier: str) -> None:
    """Unless they have a tier of their own; with weights on NVMe there is no other one."""
    for options in (["--tiers.experts", tier], [f"--tiers.experts={tier}"]):
        config, only_plan = parse_train(["tiny", *options], PRESETS)
        assert (config.tiers.experts, config.tiers.optimizer, only_plan) == (tier, tier, False)
    config, only_plan = parse_train(["tiny", "--tiers.optimizer", "nvme", "--plan", *options], PRESETS)
    assert (config.tiers.experts, config.tiers.optimizer, only_plan) == (tier, "nvme", True)
    assert config.output_dir == "runs/tiny"
