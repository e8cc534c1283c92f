"""How far logits and gradients of a model of transformers move when its weights move by their last
bit: less than that no comparison in float32 can ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
TOLERANCE = 1e-4  # of a logit, and of a gradient as a share of its tensor's largest
# a program of another order of sums differs by a few times what one rounding moves
ROUNDINGS = 4


@contextmanager
def nudged(model: Any) -> Iterator[None]:
    """Move every weight by its last bit, up or down at random."""
    generator = torch.Generator().manual_seed(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = torch.where(up, torch.inf, -torch.inf)
            parameter.copy_(torch.nextafter(parameter, towards))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)


def tolerance_of(moved: float) -> float:
    """Return how far two programs may be apart if one rounding of a model's weights moves its
    results by `moved`; never less than `TOLERANCE`.
    """
    return max(TOLERANCE, ROUNDINGS * moved)
