"""Groups of devices that share sequences: what each has, and where the rest is."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jmoe.layers.context import ContextGroup, split_sequences
from jmoe.mesh import ALL
from tests.model_configs import mesh_of

GROUP, LENGTH = ContextGroup(4, 8), 16


def test_positions_gathered_and_ends() -> None:
    """On two groups of four: positions, whole sequences, the ends of earlier chunks, the device
    and index of a position, and positions in documents.
    """
    numbers = np.tile(np.repeat([1, 2, 3], [3, 9, 4]).astype(np.int32), (8, 1))

    def local(numbers_BK: jax.Array) -> tuple[jax.Array, ...]:
        own = GROUP.positions(LENGTH // 4)[None]
        split = split_sequences(GROUP, LENGTH // 4, numbers_BK)
        ends = GROUP.ends_before(own.reshape(1, 2, 2)[:, :, 1:])
        device, index = GROUP.device_and_index(jnp.arange(LENGTH), LENGTH // 4)
        there = jnp.where(device == GROUP.rank(), own[0, index], -1)[None]
        return own, GROUP.gather(own), ends.reshape(1, 2), there, split.position

    over_all = PartitionSpec(ALL)
    run = jax.shard_map(
        local, mesh=mesh_of(2, 2, 2), in_specs=over_all, out_specs=over_all, check_vma=False
    )
    own, whole, ends, there, in_document = map(np.asarray, jax.jit(run)(numbers))
    expected = [[2 * i, 2 * i + 1, 14 - 2 * i, 15 - 2 * i] for i in range(4)]
    np.testing.assert_array_equal(own, expected * 2)
    np.testing.assert_array_equal(whole, np.tile(np.arange(LENGTH), (8, 1)))
    before = own.reshape(8, 2, 2)[:, :, 0] - 1
    np.testing.assert_array_equal(ends, np.maximum(before, 0))
    np.testing.assert_array_equal(there[:4].max(axis=0), np.arange(LENGTH))
    positions = np.concatenate([np.arange(n) for n in (3, 9, 4)])
    np.testing.assert_array_equal(in_document, positions[own])


def test_gradients_of_what_is_gathered_are_rounded_once() -> None:
    """256 + 1 + 1 + 1 is 260 in bfloat16; added one by one in bfloat16 it stays 256."""
    over_all = PartitionSpec(ALL)

    def local(x_BS: jax.Array) -> jax.Array:
        def weighted(x_BS: jax.Array) -> jax.Array:
            weight = jnp.where(GROUP.rank() == 0, 256.0, 1.0).astype(jnp.bfloat16)
            return (GROUP.gather(x_BS) * weight).astype(jnp.float32).sum()

        return jax.grad(weighted)(x_BS)

    run = jax.shard_map(
        local, mesh=mesh_of(2, 2, 2), in_specs=over_all, out_specs=over_all, check_vma=False
    )
    gradient = jax.jit(run)(jnp.ones((8, LENGTH // 4), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), 260.0)
