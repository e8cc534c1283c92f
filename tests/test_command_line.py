"""Command lines as configurations."""

import pytest

from jmoe.command_line import parse_train
from jmoe.config import CommConfig
from jmoe.configs import PRESETS


@pytest.mark.parametrize("tier", ["auto", "device", "host", "nvme"])
def test_moments_go_where_the_weights_are(tier: str) -> None:
    """Unless they have a tier of their own; with weights on NVMe there is no other one."""
    for options in (["--tiers.experts", tier], [f"--tiers.experts={tier}"]):
        config = parse_train(["tiny", *options], PRESETS)
        assert (config.tiers.experts, config.tiers.optimizer, config.plan) == (tier, tier, False)
    config = parse_train(["tiny", "--tiers.optimizer", "nvme", "--plan", *options], PRESETS)
    assert (config.tiers.experts, config.tiers.optimizer, config.plan) == (tier, "nvme", True)
    assert config.output_dir == "runs/tiny"


def test_ablations_are_presets_and_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_train(["tiny-unfused", "--comm.exchange", "flat"], PRESETS)
    assert config.comm == CommConfig(exchange="flat", fuse_dense=False)
    with pytest.raises(SystemExit):
        parse_train(["tiny", "--comm.fuse-dense", "False"], PRESETS)
    assert "Unrecognized options: --comm.fuse-dense" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_train(["tiny", "--help"], PRESETS)
    assert "fuse" not in capsys.readouterr().out


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_no_options(name: str) -> None:
    assert parse_train([name], PRESETS).output_dir == f"runs/{name}"
