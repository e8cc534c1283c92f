"""Measures the bandwidth between the devices of a mesh."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jmoe.collectives.schedule import SCHEDULES, chunk_bytes
from jmoe.config import CommConfig
from jmoe.mesh import ALL, BATCH, REPLICATED

PAYLOAD_BYTES = 1 << 20
ROUNDS = 3


def gathered_bytes_per_s(mesh: Mesh) -> float:
    """Return how many bytes a second an all-gather over all devices gathers: the slowest process's, on each."""
    gather = jax.jit(
        jax.shard_map(
            lambda x: lax.all_gather(x, ALL, tiled=True),
            mesh=mesh,
            in_specs=BATCH,
            out_specs=REPLICATED,
            check_vma=False,
        )
    )
    size = -(-PAYLOAD_BYTES // 4 // mesh.size) * mesh.size
    x = jax.jit(lambda: jnp.zeros(size, jnp.float32), out_shardings=NamedSharding(mesh, BATCH))()
    seconds = []
    for _ in range(1 + ROUNDS):  # the first one compiles
        begun = time.perf_counter()
        jax.block_until_ready(gather(x))
        seconds.append(time.perf_counter() - begun)
    mine = np.float32(4 * size / min(seconds[1:]))
    return float(np.min(multihost_utils.process_allgather(mine)))


def measured_chunk_bytes(config: CommConfig, mesh: Mesh) -> int | None:
    """Return the bytes that this network takes at once; None where it need not be measured."""
    chunked = SCHEDULES[config.schedule].chunked and mesh.size > 1
    if not chunked or config.chunk_bytes or jax.process_count() == 1:
        return None
    return chunk_bytes(gathered_bytes_per_s(mesh))
