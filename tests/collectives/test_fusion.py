"""One buffer against one collective per parameter, and two levels against one: values and
gradients.

Legend: R devices = P nodes x Q devices a node.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.collectives.fusion import (
    ShardInBuffer,
    all_gather_buffer_local,
    all_reduce_local,
    gather_parameter_local,
    gather_parameters_fused_local,
    reduce_scatter_buffer_local,
)
from jmoe.mesh import ALL, BATCH, REPLICATED, hierarchy, make_mesh, split_over

MESH = make_mesh((1, 2, 4))
SHAPES = {"w_in": ((16, 6), 0), "w_out": ((6, 24), 1), "scale": ((8,), 0), "cube": ((3, 8, 5), 1)}
HIERARCHIES = [hierarchy(MESH, hierarchical) for hierarchical in (False, True)]
ids = ["one level", "two levels"]


def run(function: Any, args: Any, in_specs: Any, out_specs: Any) -> Any:
    sharded = jax.shard_map(
        function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.block_until_ready(jax.jit(sharded)(*args))


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, (shape, _) in SHAPES.items()
    }


@pytest.mark.parametrize("over", HIERARCHIES, ids=ids)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_buffer_is_all_parameters(over: Any, dtype: Any) -> None:
    """Each parameter whole in the dtype of its use, and the gradient of a different loss on
    every device.
    """
    specs = {name: split_over(ALL, dim) for name, (_, dim) in SHAPES.items()}
    dtypes = {name: jnp.float32 if name == "scale" else dtype for name in SHAPES}

    def loss(whole: dict[str, jax.Array]) -> jax.Array:
        rank = lax_index().astype(jnp.float32)
        return sum(
            (jnp.sin(w.astype(jnp.float32) * (1 + rank)).sum() for w in whole.values()),
            jnp.float32(0),
        )

    def fused(shards: dict[str, jax.Array]) -> Any:
        parts = tuple(
            ShardInBuffer(w.shape, SHAPES[name][1], dtypes[name]) for name, w in shards.items()
        )

        def gather(w: Any) -> Any:
            return dict(
                zip(w, gather_parameters_fused_local(list(w.values()), parts, over), strict=True)
            )

        return gather(shards), jax.grad(lambda w: loss(gather(w)))(shards)

    def single(shards: dict[str, jax.Array]) -> Any:
        def gather(w: Any) -> Any:
            return {
                n: gather_parameter_local(x, SHAPES[n][1], dtypes[n], ALL) for n, x in w.items()
            }

        return gather(shards), jax.grad(lambda w: loss(gather(w)))(shards)

    everywhere = dict.fromkeys(SHAPES, REPLICATED)
    ours = run(fused, (parameters(),), (specs,), (everywhere, specs))
    expected = run(single, (parameters(),), (specs,), (everywhere, specs))
    jax.tree.map(np.testing.assert_array_equal, ours[0], expected[0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours[1], expected[1]
    )


def lax_index() -> jax.Array:
    return jax.lax.axis_index(ALL)


@pytest.mark.parametrize("over", HIERARCHIES, ids=ids)
def test_rows_gathered_and_reduced(over: Any) -> None:
    """The reduction is the transpose of the gather: what a device gathers from itself, times 8,
    comes back to it.
    """
    x = jnp.arange(40, dtype=jnp.float32)

    def body(row_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = all_gather_buffer_local(row_C, over)
        return jnp.sort(rows[:, 0]), reduce_scatter_buffer_local(rows, over)

    firsts, back = run(body, (x,), BATCH, (REPLICATED, BATCH))
    np.testing.assert_array_equal(firsts, np.arange(0, 40, 5))
    np.testing.assert_array_equal(back, 8 * x)


@pytest.mark.parametrize("over", HIERARCHIES, ids=ids)
def test_all_reduce_is_psum(over: Any) -> None:
    tree = {"a": jnp.arange(8 * 3, dtype=jnp.float32).reshape(8, 3), "b": [jnp.ones((8, 2, 5))]}
    total = run(lambda tree: all_reduce_local(tree, over), (tree,), BATCH, BATCH)
    expected = jax.tree.map(lambda x: np.broadcast_to(x.sum(axis=0), x.shape), tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), total, expected)
    assert run(
        lambda x: (all_reduce_local([], over), x)[1], (jnp.ones(8),), BATCH, BATCH
    ).shape == (8,)
