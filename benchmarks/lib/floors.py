"""What a device can do at most, measured: copies in its memory, copies to and from the host, a
dense product.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

FULL = (2**30, 8192)  # numbers in bfloat16 that are copied, and the sides of a product
TOY = (2**20, 256)


def measure_call_s(f: Callable[..., object], *operands: object, repeat: int = 10) -> float:
    """Return the seconds of one call in an unbroken series of calls: the best of three series."""
    jax.block_until_ready(f(*operands))
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        outputs = [f(*operands) for _ in range(repeat)][-1]
        jax.block_until_ready(outputs)
        best = min(best, (time.perf_counter() - started) / repeat)
    return best


def measure_floors(toy: bool = False) -> dict[str, float]:
    """Return bytes/s of a device copy (read and write), FLOP/s of a bfloat16 product,
    `measure_host_link`.
    """
    numbers, side = TOY if toy else FULL
    x = jnp.zeros((numbers,), jnp.bfloat16)
    copied = 2 * x.nbytes / measure_call_s(jax.jit(lambda x: x + jnp.bfloat16(1)), x)
    draw = jax.jit(lambda key: jax.random.normal(key, (side, side), jnp.bfloat16))
    a, b = draw(jax.random.key(0)), draw(jax.random.key(1))
    return {
        "bytes_per_s": copied,
        "flops_per_s": 2 * side**3 / measure_call_s(jax.jit(jnp.matmul), a, b),
    } | measure_host_link(x)


def measure_host_link(x: jax.Array) -> dict[str, float]:
    """Return bytes/s of copies between pinned host memory and the device, each way by itself."""
    (device,) = x.devices()
    here = SingleDeviceSharding(device, memory_kind="pinned_host")
    there = SingleDeviceSharding(device)
    at_host = jax.device_put(x, here)
    return {
        "host_to_device_bytes_per_s": x.nbytes
        / measure_call_s(jax.device_put, at_host, there, repeat=2),
        "device_to_host_bytes_per_s": x.nbytes / measure_call_s(jax.device_put, x, here, repeat=2),
    }
