"""Plain values and bytes between the processes of a run, over the network that the step's
collectives use.

Every process makes the same calls in the same order, in the thread that starts the steps.
Legend: P processes, C bytes of a chunk.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jmoe.config import check
from jmoe.mesh import BY_PROCESS, PROCESS, process_mesh

CHUNK_BYTES = 1 << 23  # of device memory, twice; on CPU larger ones are slower
TEXT_BYTES = 1 << 12  # texts are padded to multiples, so that few programs are compiled

Pairs = tuple[tuple[int, int], ...]  # (from, to) of processes


def gather_json(value: Any) -> list[Any]:
    """Return every process's value, by process; values are what JSON has."""
    text = json.dumps(value).encode()
    if jax.process_count() == 1:
        return [json.loads(text)]
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(-(-int(sizes.max()) // TEXT_BYTES) * TEXT_BYTES, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes, strict=True)]


def check_alike(name: str, identify: Callable[[], str]) -> None:
    """Raise `ValueError` on every process if one reads something else than process 0.

    identify: tells apart what they read. On hosts with disks of their own a copy may be old, or
    another one.
    """
    if jax.process_count() == 1:
        return
    views = gather_json(identify())
    others = [rank for rank, own in enumerate(views) if own != views[0]]
    constraint = (
        f"must be the same on every process, is another on {others}: copy it to their hosts anew"
    )
    check(not others, name, views[0][:16], constraint)


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[Pairs]:
    """Return the pairs in rounds, in each of which nobody sends or receives twice."""
    rounds: list[list[tuple[int, int]]] = []
    for source, target in pairs:
        free = (one for one in rounds if all(source != s and target != t for s, t in one))
        one = next(free, None)
        if one is None:
            rounds.append([(source, target)])
        else:
            one.append((source, target))
    return [tuple(one) for one in rounds]


def exchange_bytes(
    outgoing: NDArray[np.uint8], incoming: NDArray[np.uint8], pairs: Pairs, most_bytes: int
) -> None:
    """Send `outgoing` to the process that `pairs` names, and fill `incoming` with what comes to
    this one.

    Nobody sends or receives twice. A process that sends or receives nothing gives an empty array.
    most_bytes: the greatest size of all that is sent.
    """
    chunk_bytes = min(CHUNK_BYTES, max(1, most_bytes))
    for begin in range(0, most_bytes, chunk_bytes):
        piece, room = outgoing[begin : begin + chunk_bytes], incoming[begin : begin + chunk_bytes]
        chunk_1C = np.zeros((1, chunk_bytes), np.uint8)
        chunk_1C[0, : piece.size] = piece
        room[:] = _sent(chunk_1C, pairs)[0, : room.size]


def _sent(chunk_1C: NDArray[np.uint8], pairs: Pairs) -> NDArray[np.uint8]:
    sharding, send = _sender(pairs)
    own = next(d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index())
    shape = (jax.process_count(), chunk_1C.shape[1])
    chunk_PC = jax.make_array_from_single_device_arrays(
        shape, sharding, [jax.device_put(chunk_1C, own)]
    )
    return np.asarray(send(chunk_PC).addressable_shards[0].data)


@functools.cache
def _sender(pairs: Pairs) -> tuple[NamedSharding, Any]:
    mesh = process_mesh()
    send = jax.shard_map(
        lambda chunk_PC: jax.lax.ppermute(chunk_PC, PROCESS, pairs),
        mesh=mesh,
        in_specs=BY_PROCESS,
        out_specs=BY_PROCESS,
    )
    return NamedSharding(mesh, BY_PROCESS), jax.jit(send)
