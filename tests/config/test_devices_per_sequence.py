"""The number of devices that share a sequence, and what is refused."""

import dataclasses
import re
from typing import Any

import pytest

from jmoe.config import CommConfig, MeshConfig, TiersConfig, TrainConfig
from jmoe.config.context import devices_per_sequence
from tests.model_configs import MODEL

CONFIG = TrainConfig(model=MODEL, batch_size=4, sequence_length=32, num_steps=1)


def size(num_devices: int, **changes: Any) -> int:
    context = changes.pop("context", 0)
    mesh = MeshConfig(context=context)
    return devices_per_sequence(dataclasses.replace(CONFIG, mesh=mesh, **changes), num_devices)


def test_small_batches_take_the_fewest_devices_a_sequence() -> None:
    """As many as give every device a part of the batch; one where that suffices."""
    assert [size(n) for n in (1, 4, 8, 16, 64)] == [1, 1, 2, 4, 16]
    assert size(8, gradient_accumulation_steps=2) == 4
    assert size(4, context=4) == 4


@pytest.mark.parametrize(
    ("message", "num_devices", "changes"),
    [
        ("mesh.context = 3: must divide the 8 devices", 8, {"context": 3}),
        (
            "sequence_length = 30: must be a multiple of 2 x mesh.context = 8",
            8,
            {"context": 4, "sequence_length": 30},
        ),
        (
            "batch_size = 4: must be a multiple of 64 devices x 1 accumulation steps / mesh.context = 8",
            64,
            {"context": 8},
        ),
        (
            "batch_size = 3: must be a multiple of 8 devices x 1 accumulation steps, or with n devices to a sequence (mesh.context)",
            8,
            {"batch_size": 3, "sequence_length": 36},
        ),
        (
            "batch_size = 4: must be a multiple of 8 devices x 1 accumulation steps; devices cannot share a sequence with experts on other tiers",
            8,
            {"tiers": TiersConfig(experts="host", optimizer="host")},
        ),
        (
            "mesh.context = 2: must be 0 or 1 with experts on other tiers",
            8,
            {
                "context": 2,
                "tiers": TiersConfig(experts="host", optimizer="host"),
                "comm": CommConfig(),
            },
        ),
    ],
)
def test_refusals(message: str, num_devices: int, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        size(num_devices, **changes)
