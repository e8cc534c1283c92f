"""Compare the bytes/s of AdamW on the host's cores with what its memory gives plain loops.

    python benchmarks/kernels/host_adamw.py

AdamW reads weight, moments and gradient and writes weight, moments and a bfloat16 copy: 30 bytes a
parameter with a float32 gradient, 28 with a bfloat16 one. Parameters of `--elements` each lie in
`--bytes` of memory, so that no cache holds what a call takes. Plain loops take as many bytes as the
update, read and written ones counted, of other memory each time, with as many threads as there are
cores: `copy` is memcpy, `read` ors integers, `in_place` adds to float32 in blocks that fit the
caches, which loads and stores the same lines as AdamW does. Neither they nor the update count the
lines that a store loads first. Everything takes turns within a round; medians of the rounds, and
medians of a round's ratios. of_fastest: to the plain loop with the largest median.

xla_gb_per_s is the same update without the native operation, on one parameter.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import ctypes
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.config import OptimizerConfig
from jmoe.memory.buffers import PAGE_BYTES, allocate_slots
from jmoe.offload.lazy_adamw import StepHistory, catch_up_arrays
from kernels_pallas import native

CONFIG = OptimizerConfig()
SETTINGS = native.AdamWSettings(CONFIG.beta1, CONFIG.beta2, CONFIG.eps, CONFIG.weight_decay)
STEPS = native.HostAdamWSteps(*(np.full(1, x, np.float32) for x in (1e-4, 2.0, 3.0)), clip=0.5)
BFLOAT16 = np.dtype(jnp.bfloat16)
GRADIENTS = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
BLOCK_BYTES = 1 << 17
LEAST_BYTES = 64 << 20  # moved in one measurement
Call = Callable[[], object]


def filled(size: int, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Return a random array in page-aligned memory, as an expert record is."""
    num_bytes = size * dtype.itemsize
    (memory,) = allocate_slots(1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
    array = memory[:num_bytes].view(dtype)
    array[...] = np.resize(np.abs(rng.normal(size=min(size, 1 << 16))), size)
    return array


def updates(elements: int, num_bytes: int, gradient: np.dtype) -> tuple[Call, int]:
    """Return a call that updates the next of many parameters, and the bytes it moves."""
    moved, rng, wide = (
        (28 if gradient.itemsize == 2 else 30) * elements,
        np.random.default_rng(0),
        np.dtype(np.float32),
    )
    parameters = itertools.cycle(
        [
            native.HostParameter(
                *(filled(elements, dtype, rng) for dtype in (wide, wide, wide, gradient)),
                copy=filled(elements, BFLOAT16, rng),
                decay=True,
            )
            for _ in range(max(2, num_bytes // moved))
        ]
    )
    return lambda: native.adamw_in_place([next(parameters)], STEPS, SETTINGS), moved


def copies(of_call: int, num_bytes: int) -> tuple[Call, int]:
    """Return a call that copies the next part of `num_bytes` with every core, and the bytes it
    reads and writes.
    """
    threads = len(os.sched_getaffinity(0))
    part = -(-of_call // 2 // threads // PAGE_BYTES) * PAGE_BYTES
    calls = max(2, num_bytes // of_call)
    here, there = (allocate_slots(threads * calls, part) for _ in range(2))
    here[...], there[...] = 1, 2
    pool, copy = ThreadPoolExecutor(threads), ctypes.CDLL(None).memcpy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    numbers = itertools.cycle(range(calls))

    def copy_part(i: int) -> None:
        copy(there[i].ctypes.data, here[i].ctypes.data, part)

    def copy_next() -> None:
        first = next(numbers) * threads
        list(pool.map(copy_part, range(first, first + threads)))

    return copy_next, 2 * threads * part


def passes(of_call: int, num_bytes: int, *, writes: bool) -> tuple[Call, int]:
    """Return a call that reads the next part of `num_bytes` with every core, and with `writes`
    changes it in place, and the bytes it reads and writes.
    """
    threads = len(os.sched_getaffinity(0))
    num_blocks = -(-of_call // (2 if writes else 1) // threads // BLOCK_BYTES)
    part = num_blocks * BLOCK_BYTES
    calls = max(2, num_bytes // (threads * part))
    memory = allocate_slots(threads * calls, part)
    memory[...] = 0
    pool, numbers = ThreadPoolExecutor(threads), itertools.cycle(range(calls))

    def take_part(i: int) -> None:
        if not writes:
            np.bitwise_or.reduce(memory[i].view(np.int64))
            return
        for block in memory[i].view(np.float32).reshape(num_blocks, -1):
            np.add(block, np.float32(1), out=block)

    def take_next() -> None:
        first = next(numbers) * threads
        list(pool.map(take_part, range(first, first + threads)))

    return take_next, (2 if writes else 1) * threads * part


def by_xla(elements: int) -> tuple[Call, int]:
    """Return a call of the AdamW update compiled by XLA, and the bytes that it moves."""
    rng = np.random.default_rng(0)
    arrays = [{"w": filled(elements, np.dtype(np.float32), rng).reshape(-1, 1)} for _ in range(4)]
    (window,) = StepHistory(0, [1e-4], [0.5]).missed_windows(range(1), pending=True)
    return lambda: catch_up_arrays(*arrays, [window], config=CONFIG), 28 * elements


def gb_per_s(call: Call, moved: int) -> float:
    """Return the rate of one call, or of as many as move `LEAST_BYTES`."""
    times = max(1, LEAST_BYTES // moved)
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return times * moved / (time.perf_counter() - begun) / 1e9


def measure(elements: int, gradient: str, a: argparse.Namespace) -> JsonObject:
    """Return the rates of an update, of XLA's, and of plain loops over as many bytes."""
    update = updates(elements, a.bytes, GRADIENTS[gradient])
    plain = {
        "copy_": copies(update[1], a.bytes),
        "read_": passes(update[1], a.bytes, writes=False),
        "in_place_": passes(update[1], a.bytes, writes=True),
    }
    calls = {"": update, "xla_": by_xla(elements), **plain}
    for call, _ in calls.values():  # compiles, and touches memory for the first time
        call()
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(a.rounds):
        for name, call in calls.items():
            rates[name].append(gb_per_s(*call))
    fastest = max(plain, key=lambda name: report.median(rates[name]))
    return {
        "elements": elements,
        "gradient": gradient,
        **{f"{name}gb_per_s": report.median(each, 1) for name, each in rates.items()},
        **{f"of_{name}".strip("_"): report.ratio(rates[""], rates[name]) for name in plain},
        "of_fastest": report.ratio(rates[""], rates[fastest]),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument(
        "--elements", type=int, nargs="+", default=[1 << 16, 3 * 768 * 2048, 3 << 23]
    )
    a = parser.parse_args()
    native.load()
    rows = [
        report.progress(measure(elements, gradient, a))
        for elements in a.elements
        for gradient in GRADIENTS
    ]
    about = {"options": report.options(a), "instruction_set": native.instruction_set()}
    report.finish(
        about
        | {"threads": len(os.sched_getaffinity(0)), "rows": rows}
        | report.device_and_versions()
    )


if __name__ == "__main__":
    main()
