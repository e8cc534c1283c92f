"""Programs of jmoe and of transformers in float64, to tell rounding from another formula."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest


@contextmanager
def jax_in_float64() -> Iterator[None]:
    """Let what is traced here compute in float64 where jmoe names float32: norms, routers, sums.

    Parameters and compute dtype are the caller's; programs that were traced before are not run.
    """
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "float32", jnp.float64)
        yield


@contextmanager
def torch_in_float64(torch: Any) -> Iterator[None]:
    """Let transformers compute in float64 where its classes name float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
