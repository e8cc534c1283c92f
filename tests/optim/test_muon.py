"""Muon: optax's, for one matrix and for stacks; singular values near 1 on every mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jmoe.config import OptimizerConfig
from jmoe.mesh import ALL, DATA, EXPERT
from jmoe.optim.adamw import OptimizerStepScalars
from jmoe.optim.muon import UPDATE_RMS, muon_update, orthogonalize_local
from tests.model_configs import mesh_of


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_update_is_that_of_optax(shape: tuple[int, int]) -> None:
    """Each matrix of a stack [layers, experts, I, O] as optax.contrib.muon updates it alone."""
    config = OptimizerConfig(0.01, "constant", warmup_steps=0, kind="muon")
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=(2, 3, *shape)), jnp.float32)
    theirs = optax.contrib.muon(
        0.01, beta=config.momentum, weight_decay=config.weight_decay, consistent_rms=UPDATE_RMS
    )
    update = jax.jit(
        lambda w, m, g, step, ok: muon_update(
            w,
            m,
            g,
            config=config,
            step_scalars=OptimizerStepScalars(jnp.float32(0.01), step, jnp.float32(0.5), ok),
            split=None,
            dtype=jnp.float32,
        )
    )
    w, m = start, jnp.zeros_like(start)
    others = {str(index): start[index] for index in np.ndindex(2, 3)}
    with jax.numpy_dtype_promotion("standard"):  # optax itself mixes dtypes
        state, step_theirs = theirs.init(others), jax.jit(theirs.update)
    for i in range(3):
        g = jnp.asarray(rng.normal(size=start.shape), jnp.float32)
        for kept, old in zip(update(w, m, g, jnp.int32(i), jnp.bool_(False)), (w, m), strict=True):
            np.testing.assert_array_equal(kept, old)
        w, m = update(w, m, g, jnp.int32(i), jnp.bool_(True))
        grads = {str(index): 0.5 * g[index] for index in np.ndindex(2, 3)}
        with jax.numpy_dtype_promotion("standard"):
            steps, state = step_theirs(grads, state, others)
        others = optax.apply_updates(others, steps)
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(w[index], others[str(index)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "spec", "split"),
    [
        ((3, 16, 24), PartitionSpec(None, ALL), (1, ALL)),  # 3 layers over 8 devices
        ((12, 6, 16), PartitionSpec(None, None, ALL), (2, ALL)),
        ((2, 4, 8, 6), PartitionSpec(None, EXPERT, DATA), (2, (DATA,))),
        ((2, 4, 8, 6), PartitionSpec(None, EXPERT), None),
    ],
)
def test_shards_are_orthogonalized_as_whole_matrices(
    shape: tuple[int, ...], spec: PartitionSpec, split: tuple[int, tuple[str, ...]] | None
) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    sizes = []

    def local(x: jax.Array, split: tuple[int, tuple[str, ...]] | None) -> jax.Array:
        o, size = orthogonalize_local(x, split)
        sizes.append(size)
        return o

    shard = partial(jax.shard_map, mesh=mesh_of(2, 1, 4), check_vma=False)
    many = jax.jit(shard(partial(local, split=split), in_specs=spec, out_specs=spec))(x)
    whole = jax.jit(partial(local, split=None))(x)
    assert sizes == [shape[-2:]] * 2
    np.testing.assert_allclose(many, whole, atol=1e-5)
    values = np.linalg.svd(np.asarray(many), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3
