"""Exchange of JSON values and bytes between all processes of a run, by JAX collectives.

Every process must make the same calls in the same order, in the thread that dispatches training
steps. Axis legend:

P  processes
C  bytes of a chunk
"""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jmoe.config import check, describe_differences
from jmoe.mesh import BY_PROCESS, PROCESS, process_mesh
from jmoe.types import Json, JsonObject

CHUNK_BYTES = 1 << 23  # a transfer holds two chunks in device memory; larger are slower on CPU
TEXT_BYTES = 1 << 12  # texts are padded to multiples, so that few programs are compiled

Pairs = tuple[tuple[int, int], ...]  # (from, to) process indices


def gather_json(value: Json) -> list[Json]:
    """Return the list of all processes' values, indexed by process. Values must be serializable as
    JSON.
    """
    text = json.dumps(value).encode()
    if jax.process_count() == 1:
        return [json.loads(text)]
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.zeros(-(-int(sizes.max()) // TEXT_BYTES) * TEXT_BYTES, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(texts, sizes, strict=True)]


def check_same_identity(name: str, identify: Callable[[], str]) -> None:
    """Raise `ValueError` on every process if any process's identity differs from process 0's.

    name: setting to blame in the message. identify: a function that returns a text, such as a hash,
    of the file this process reads; hosts with their own disks may hold an old or different copy.
    """
    if jax.process_count() == 1:
        return
    views = gather_json(identify())
    others = [rank for rank, own in enumerate(views) if own != views[0]]
    constraint = (
        f"must be the same on every process, is another on {others}: copy it to their hosts anew"
    )
    check(not others, name, views[0][:16], constraint)


def check_same_options(options: JsonObject, prefixes_that_may_differ: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` on every process if one of them has other options, code or JAX than
    process 0. Every process must call this.

    prefixes_that_may_differ: of the options that may differ between hosts, such as folders.
    """
    if jax.process_count() == 1:
        return
    code = {"jax": version("jax"), "jaxlib": version("jaxlib"), "jmoe": _hash_of_code()}
    first, *others = gather_json({"code": code, **options})
    for rank, other in enumerate(others, 1):
        lines = [
            line
            for line in describe_differences(first, other)
            if not line.startswith(prefixes_that_may_differ)
        ]
        if lines:
            raise ValueError(
                f"every process must be started with the same options and code (process 0 ->"
                f" {rank}): {'; '.join(lines)}"
            )


def _hash_of_code() -> str:
    """Return 16 hex digits that change with any of the program's Python files."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for folder in ("jmoe", "kernels_pallas"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def split_into_rounds(pairs: Sequence[tuple[int, int]]) -> list[Pairs]:
    """Return the (from, to) pairs split into rounds, such that no process sends or receives twice
    in a round.
    """
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
    outgoing: NDArray[np.uint8], incoming: NDArray[np.uint8], pairs: Pairs, max_sent_bytes: int
) -> None:
    """Send `outgoing` to the process that `pairs` gives for this one, and fill `incoming` with the
    bytes received.

    No process may send or receive twice. A process that sends (or receives) nothing passes an empty
    array. max_sent_bytes: size of the largest array sent by any process; it must be the same on
    all.
    """
    chunk_bytes = min(CHUNK_BYTES, max(1, max_sent_bytes))
    for begin in range(0, max_sent_bytes, chunk_bytes):
        piece, room = outgoing[begin : begin + chunk_bytes], incoming[begin : begin + chunk_bytes]
        chunk_1C = np.zeros((1, chunk_bytes), np.uint8)
        chunk_1C[0, : piece.size] = piece
        room[:] = _permute_chunk(chunk_1C, pairs)[0, : room.size]


def _permute_chunk(chunk_1C: NDArray[np.uint8], pairs: Pairs) -> NDArray[np.uint8]:
    """Send this process's chunk along `pairs`; return [1, C], the chunk received, or zeros."""
    sharding, send = _sharding_and_permute(pairs)
    own = next(d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index())
    shape = (jax.process_count(), chunk_1C.shape[1])
    chunk_PC = jax.make_array_from_single_device_arrays(
        shape, sharding, [jax.device_put(chunk_1C, own)]
    )
    return np.asarray(send(chunk_PC).addressable_shards[0].data)


@functools.cache
def _sharding_and_permute(pairs: Pairs) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    mesh = process_mesh()
    send = jax.shard_map(
        lambda chunk_PC: jax.lax.ppermute(chunk_PC, PROCESS, pairs),
        mesh=mesh,
        in_specs=BY_PROCESS,
        out_specs=BY_PROCESS,
    )
    return NamedSharding(mesh, BY_PROCESS), jax.jit(send)
