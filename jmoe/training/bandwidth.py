"""What the network between the devices of a mesh carries."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jmoe.mesh import ALL, BATCH, REPLICATED

PAYLOAD_BYTES = 1 << 20
ROUNDS = 3


def gathered_bytes_per_s(mesh: Mesh) -> float:
    """Bytes that an all-gather over all devices makes whole in a second: of the slowest process, the same on each."""
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
