"""The all-to-all in two hops against the flat one, and the flat one against plain indexing; bit for
bit.

Legend: R devices of one all-to-all = P x Q, C rows per destination, D hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from jmoe.collectives.all_to_all import make_all_to_all
from jmoe.mesh import split_over

# (across nodes, inside a node); the rest is data
SPLITS = [(1, 8), (2, 4), (4, 2), (8, 1), (2, 2), (1, 2)]
C, D = 3, 5


def mesh_of(across: int, inside: int) -> jax.sharding.Mesh:
    shape = (8 // (across * inside), across, inside)
    return jax.make_mesh(shape, ("rows", "node", "gpu"), axis_types=(AxisType.Auto,) * 3)


def run(
    hierarchical: bool, across: int, inside: int, x: np.ndarray, g: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(rows, int32 labels, gradient of the rows) after the all-to-all; x [8, R, C, D], one block
    per device.
    """
    mesh = mesh_of(across, inside)
    all_to_all, axes = make_all_to_all(("node", "gpu"), hierarchical), ("rows", "node", "gpu")

    def body(x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, g = x[0], g[0]
        labels = 100 * lax.axis_index(axes) + jnp.arange(x.shape[0], dtype=jnp.int32)
        out, vjp = jax.vjp(lambda x: all_to_all((x, labels))[0], x)
        return out[None], all_to_all((x, labels))[1][None], vjp(g)[0][None]

    spec = split_over(axes)
    step = jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec, spec), check_vma=False
    )
    result: tuple[jax.Array, jax.Array, jax.Array] = jax.block_until_ready(jax.jit(step)(x, g))
    return result


@pytest.mark.parametrize(("across", "inside"), SPLITS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_hierarchical_is_flat_is_a_transpose(across: int, inside: int, dtype: Any) -> None:
    devices = across * inside
    rng = np.random.default_rng(0)
    x, g = (np.asarray(jnp.asarray(rng.normal(size=(8, devices, C, D)), dtype)) for _ in range(2))
    flat = run(False, across, inside, x, g)
    hierarchical = run(True, across, inside, x, g)
    labels = (100 * np.arange(8)[:, None] + np.arange(devices)).astype(np.int32)
    swapped = [
        a.reshape(8 // devices, devices, devices, *a.shape[2:]).swapaxes(1, 2)
        for a in (x, labels, g)
    ]
    for ours, other, expected in zip(flat, hierarchical, swapped, strict=True):
        np.testing.assert_array_equal(ours, other)
        np.testing.assert_array_equal(np.asarray(ours).reshape(expected.shape), expected)
        assert ours.dtype == other.dtype == expected.dtype


def test_it_is_its_own_inverse() -> None:
    mesh, axes = mesh_of(2, 4), ("node", "gpu")
    x = np.random.default_rng(1).normal(size=(64, C)).astype(np.float32)
    move, spec = make_all_to_all(axes, hierarchical=True), split_over(axes)
    twice = jax.shard_map(
        lambda x: move(move(x)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    np.testing.assert_array_equal(jax.block_until_ready(jax.jit(twice)(x)), x)
