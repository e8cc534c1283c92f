"""Which implementation runs: the first that supports the case, said once; a named one or none."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import implementations
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.implementations import (
    default_implementations,
    first_supported,
    target_device,
    trace_for_device,
)
from kernels_pallas.token_permute import dispatch

SIZES = jnp.array([3, 5], jnp.int32)


def test_on_this_cpu() -> None:
    assert default_implementations() == ("xla",)


@pytest.mark.parametrize(
    ("platform", "capability", "names"),
    [
        ("gpu", "9.0", ("mosaic_gpu", "triton", "xla")),
        ("gpu", "8.0", ("triton", "xla")),
        ("gpu", "10.0", ("triton", "xla")),
        ("gpu", "12.0", ("triton", "xla")),
        ("gpu", "7.5", ("xla",)),
        ("gpu", "gfx942", ("xla",)),
        ("tpu", "", ("xla",)),
    ],
)
def test_by_device(
    monkeypatch: pytest.MonkeyPatch, platform: str, capability: str, names: Any
) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert default_implementations() == names


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_a_gpu_without_kernels_is_named_once(
    capability: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its experts run in XLA's form, slower, and nothing said so."""
    implementations.log_once.cache_clear()
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    with trace_for_device(device), caplog.at_level(logging.WARNING):
        for _ in range(2):
            multiply = lambda x, w: grouped_matmul(x, w, SIZES)  # noqa: E731  # not traced before
            jax.eval_shape(multiply, jnp.ones((8, 64)), jnp.ones((2, 64, 128)))
    (record,) = caplog.records
    assert record.message == (
        "experts, permutations and attention over a cache: no kernel for a GPU of kind"
        f" {capability} (NVIDIA from Ampere on has one); xla is used"
    )


def test_of_a_device_that_is_only_described() -> None:
    described: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")
    with trace_for_device(described):
        assert default_implementations()[0] == "mosaic_gpu" and target_device() is described
    assert default_implementations() == ("xla",) and target_device() is jax.devices()[0]


def test_ragged_dot_is_only_a_reference() -> None:
    """On older GPUs XLA computes it as a product of every row with every group."""
    root = Path(__file__).parents[2]
    callers = {
        path.relative_to(root).as_posix()
        for folder in ("jmoe", "kernels_pallas")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("ragged_dot")
    }
    assert callers == {
        f"kernels_pallas/{name}/reference.py" for name in ("grouped_matmul", "grouped_mlp")
    }
    y = jax.jit(grouped_matmul).lower(jnp.ones((8, 16)), jnp.ones((2, 16, 8)), SIZES).as_text()
    assert "ragged_dot" not in y


def unsupported() -> str:
    raise NotImplementedError("seven columns")


def test_the_next_one_is_taken_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    candidates = (("fast", unsupported), ("plain", lambda: "done"))
    with caplog.at_level(logging.WARNING):
        assert [first_supported("multiply", candidates) for _ in range(3)] == ["done"] * 3
    assert [r.message for r in caplog.records] == [
        "multiply: fast does not support this case (seven columns); plain is used"
    ]


def test_the_last_error_is_raised() -> None:
    with pytest.raises(NotImplementedError, match="seven columns"):
        first_supported("multiply", (("fast", unsupported),))


def test_other_errors_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        first_supported("multiply", (("fast", lambda: 1 // 0), ("plain", lambda: 1)))


def test_an_unsupported_case_falls_through(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a Hopper GPU, for float32, which its tensor cores do not have."""
    monkeypatch.setattr(implementations, "default_implementations", lambda: ("mosaic_gpu", "xla"))
    with caplog.at_level(logging.WARNING):
        y = grouped_matmul(jnp.ones((8, 64)), jnp.ones((2, 64, 128)), SIZES)
    assert (y == 64).all()
    assert len(caplog.records) == 1
    assert (
        "grouped_matmul: mosaic_gpu does not support this case (dtypes" in caplog.records[0].message
    )


@pytest.mark.parametrize(
    ("x", "w", "why"),
    [
        (jnp.ones((8, 64)), jnp.ones((2, 64, 128)), "dtypes"),
        (
            jnp.ones((8, 48), jnp.bfloat16),
            jnp.ones((2, 48, 128), jnp.bfloat16),
            "inner dimension 48",
        ),
        (jnp.ones((8, 64), jnp.bfloat16), jnp.ones((2, 64, 96), jnp.bfloat16), "96 columns"),
    ],
)
def test_a_named_one_fails_loudly(x: jax.Array, w: jax.Array, why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        grouped_matmul(x, w, SIZES, implementation="mosaic_gpu")


def test_a_named_permutation_fails_loudly() -> None:
    index = jnp.arange(4, dtype=jnp.int32)
    with pytest.raises(NotImplementedError, match="hidden size 96"):
        dispatch(jnp.ones((4, 96)), index, index[:, None], implementation="mosaic_gpu")


def test_an_unknown_name() -> None:
    unknown: Any = "cuda"
    with pytest.raises(ValueError, match="'cuda': must be one of mosaic_gpu, triton, xla"):
        grouped_matmul(jnp.ones((8, 64)), jnp.ones((2, 64, 128)), SIZES, implementation=unknown)
