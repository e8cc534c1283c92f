"""Targets to compile for are those that estimates name, and nothing is compiled without the
libraries.
"""

import re
import typing

import pytest

from jmoe.config import TrainConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.run import ahead_of_time
from jmoe.run.ahead_of_time import TARGETS


def test_a_description_of_every_gpu_that_is_estimated() -> None:
    names = {path.stem for path in TARGETS.glob("*.txtpb")}
    assert names == {*typing.get_args(typing.get_type_hints(TrainConfig)["estimate"])} - {""}
    for name in names:
        text = (TARGETS / f"{name}.txtpb").read_text()
        memory_bytes, bandwidth = (int(re.findall(rf"{key}: (\d+)", text)[0]) for key in SIZES)
        assert memory_bytes == pytest.approx(ACCELERATORS[name].device_bytes, rel=0.08), name
        assert bandwidth == pytest.approx(ACCELERATORS[name].memory_bytes_per_s), name


SIZES = "device_memory_size", "memory_bandwidth"


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "has_cuda_plugin", lambda: False)
    with pytest.raises(
        ValueError, match=r"estimate = 'h100': needs .*: pip install 'jmoe\[cuda13\]'"
    ):
        ahead_of_time.check_cuda_installed("estimate", "h100")
    monkeypatch.setattr(ahead_of_time, "has_cuda_plugin", lambda: True)
    ahead_of_time.check_cuda_installed("estimate", "h100")
