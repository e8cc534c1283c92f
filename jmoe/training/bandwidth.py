"""Measure the bandwidth and latency of the links between a mesh's devices.

`make_trainer` calls this module before it compiles anything: the bandwidth sizes chunked
collectives, the links choose the expert exchange.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jmoe.collectives.schedule import SCHEDULES, chunk_bytes_at
from jmoe.config import CommConfig, TrainConfig
from jmoe.config.cluster import LinkConfig, LinksConfig, links_to_toml, read_links
from jmoe.data.shards import replace_content_durably
from jmoe.mesh import ALL, BATCH, EXPERT, REPLICATED, mesh_shape

PAYLOAD_BYTES = 1 << 20
LATENCY_BYTES = 256
MOST_BYTES = 1 << 24
LONG_S = 20e-3  # shorter transfers measure switch buffers and process scheduling, not bandwidth
ROUNDS = 5
REPEATS = 4
NUMBERS = 7  # (bytes/s, latency) of three links, and the seconds per message


def measure_all_gather_bytes_per_s(mesh: Mesh) -> float:
    """Return the bytes per second that each device receives in an all-gather over the whole mesh,
    on the slowest process.

    Every process must call this: it runs collectives.
    """
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
    return 4 * size / time_on_slowest_process_s(gather, x)


def measure_chunk_bytes(config: CommConfig, mesh: Mesh) -> int | None:
    """Return the bytes of one chunk of a chunked collective on this network, measured with an
    all-gather.

    None if no measurement is needed: `comm.chunk_bytes` is set, the schedule is not chunked, or
    there is one process or one device.
    """
    chunked = SCHEDULES[config.schedule].chunked and mesh.size > 1
    if not chunked or config.chunk_bytes or jax.process_count() == 1:
        return None
    return chunk_bytes_at(measure_all_gather_bytes_per_s(mesh))


def read_or_measure_links(config: TrainConfig, mesh: Mesh) -> LinksConfig | None:
    """Return the bandwidth and latency of the mesh's links, for choosing the expert exchange.

    Reads the file `comm.links` if that is set; otherwise measures once and stores the result in
    `links-SHAPE.toml` of the output folder, so that a resumed run chooses the same exchange. None
    if the exchange does not depend on the links: it is set explicitly, one expert axis has size 1,
    the model has no MoE layers, or there is one process. Every process must call this.
    """
    if config.comm.links:
        return read_links(Path(config.comm.links))
    chooses = config.comm.exchange == "auto" and min(mesh.shape[axis] for axis in EXPERT) > 1
    if not chooses or not config.model.num_moe_layers or jax.process_count() == 1:
        return None
    path = Path(config.output_dir) / f"links-{'x'.join(map(str, mesh_shape(mesh)))}.toml"
    stored = _read_stored_links(path) if jax.process_index() == 0 else np.zeros(NUMBERS, np.float32)
    numbers = multihost_utils.broadcast_one_to_all(stored)
    if numbers[0] > 0:
        return _links_from_numbers(numbers)
    links = measure_links(mesh)
    if jax.process_index() == 0 and path.parent.is_dir():
        replace_content_durably(path, links_to_toml(links).encode())
    return links


def _read_stored_links(path: Path) -> NDArray[np.float32]:
    """Return the link numbers [NUMBERS] stored in `path` by an earlier start; zeros if the file is
    missing or invalid.
    """
    try:
        stored = read_links(path)
    except ValueError:
        return np.zeros(NUMBERS, np.float32)
    near = stored.inside, stored.rail, stored.leaf
    return np.array(
        [*(n for link in near for n in (link.bytes_per_s, link.latency_s)), stored.message_s],
        np.float32,
    )


def _links_from_numbers(numbers: NDArray[np.float32]) -> LinksConfig:
    """Return a `LinksConfig` from (bytes/s, latency) of inside, rail and leaf, and the seconds per
    message.

    The spine link is set equal to the leaf link: a measurement cannot tell the two apart.
    """
    *pairs, message_s = (float(n) for n in numbers)
    inside, rail, leaf = (LinkConfig(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True))
    return LinksConfig(inside, rail, leaf, leaf, message_s)


def measure_links(mesh: Mesh) -> LinksConfig:
    """Return the measured links between the devices that share the experts, by the slowest
    process's times.

    Three point-to-point patterns are timed: each device sends to its neighbour in the node
    (inside), to the device of the same index in the next node (rail), and to that device's
    neighbour (leaf). An all-to-all of small messages gives the seconds per message. Every process
    must call this.
    """
    num_nodes, per_node = (mesh.shape[axis] for axis in EXPERT)
    small = LATENCY_BYTES // 4

    def measure_link(node_offset: int, place_offset: int) -> tuple[float, float]:
        to = [
            (
                node * per_node + place,
                (node + node_offset) % num_nodes * per_node + (place + place_offset) % per_node,
            )
            for node in range(num_nodes)
            for place in range(per_node)
        ]
        send = partial(lax.ppermute, axis_name=EXPERT, perm=to)
        latency_s, size = _time_collective_s(mesh, send, small), small
        seconds = latency_s
        while seconds < max(LONG_S, 2 * latency_s) and 4 * size < MOST_BYTES:
            seconds = _time_collective_s(mesh, send, size := 8 * size)
        return 4 * size / max(seconds - latency_s, 0.1 * seconds), latency_s

    inside, rail, leaf = measure_link(0, 1), measure_link(1, 0), measure_link(1, 1)
    peers = num_nodes * per_node - 1

    def run_all_to_all(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x.reshape(peers + 1, -1), EXPERT, 0, 0, tiled=True).reshape(-1)

    together_s = _time_collective_s(mesh, run_all_to_all, small * (peers + 1))
    message_s = max(0.0, together_s - max(rail[1], leaf[1])) / peers
    return _links_from_numbers(np.array([*inside, *rail, *leaf, message_s], np.float32))


def _time_collective_s(
    mesh: Mesh, collective: Callable[[jax.Array], jax.Array], num_floats: int
) -> float:
    """Return the seconds of one call of `collective` on `num_floats` float32 values per device,
    averaged over `REPEATS` dependent calls in one program.
    """

    def body(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, REPEATS, lambda _, x: collective(x), x)

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=False)
    )
    zeros = jax.jit(
        lambda: jnp.zeros(mesh.size * num_floats, jnp.float32),
        out_shardings=NamedSharding(mesh, BATCH),
    )()
    return time_on_slowest_process_s(program, zeros) / REPEATS


def time_on_slowest_process_s(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the seconds of `program`: the minimum over `ROUNDS` calls on each process, then the
    maximum over processes.
    """
    seconds = []
    for _ in range(1 + ROUNDS):  # the first one compiles
        begun = time.perf_counter()
        jax.block_until_ready(program(x))
        seconds.append(time.perf_counter() - begun)
    return float(np.max(multihost_utils.process_allgather(np.float32(min(seconds[1:])))))
