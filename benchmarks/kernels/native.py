"""Compare the bandwidth of the native CPU operations with a plain read of memory.

    python benchmarks/kernels/native.py

Products of T rows, and the experts of T tokens out of slots, read weights that no cache holds, but
for the smallest experts: each call takes others of `--bytes`. A call of the experts runs LAYERS
layers, as decoding does: in one program here, one layer after the other in XLA's form. Calls of a
row follow one another for 10 ms at least, as steps do in decoding. A round has every row, beside a
plain read by as many threads as there are cores and the same product by XLA; medians of the rounds,
and of a round's ratios to its plain read. The experts' bytes are those of the experts that the
tokens chose, as they are stored.

What keeps a row from the speed of memory: cached_gb_per_s is the same operation's where it reads
the same expert or matrix again and again, out of caches that hold it (float32's matrix fills 32
MiB). us and cached_us are the times of a layer or product; cached_us of the smallest experts with 1
and 2 tokens is about what a layer's call itself takes.

instruction_set: that of the native operations, $JMOE_NATIVE_ISA or everything the processor has.
XLA takes what $XLA_FLAGS=--xla_cpu_max_isa says.

of_floor: an estimate of the least time that a round's product can take, over its time: that of the
plain read, or that of its multiplications where they take longer, at the speed of one large product
of the tokens' dtype by XLA in the same round.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.offload.slots import HostSlots, NativeSlots
from kernels_pallas import native
from kernels_pallas.compressed import stored_fields
from kernels_pallas.formats import FORMATS
from kernels_pallas.matmul import dot
from kernels_pallas.native import ExpertByteOffsets, slot_mlp

ROWS = (1, 2, 8, 32)
LAYERS, TABLES = 16, 32
INNER, COLUMNS, LARGE = 2048, 4096, 2048
LEAST_S = 0.01  # of a measurement
MAX_SLOTS = 8192  # else the smallest experts fill hundreds of thousands
EXPERTS = {
    "8 experts of 32 x 32, 8 a token": (32, 32, 8, 8),
    "64 experts of 512 x 128, 8 a token": (512, 128, 64, 8),
    "8 experts of 512 x 768, 2 a token": (512, 768, 8, 2),
    "32 experts of 2048 x 768, 8 a token": (
        2048,
        768,
        32,
        8,
    ),  # their sizes are those of Qwen3-30B-A3B
}
Call = Callable[[], object]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of products; tokens")
    parser.add_argument(
        "--bytes", type=int, default=768 << 20, help="of weights that calls take in turn"
    )
    return parser.parse_args()


def plain_read(num_bytes: int) -> tuple[Call, int]:
    """Return a call that reads so many bytes with every core, and their number."""
    parts = np.split(np.ones(num_bytes // 8 // 64 * 64, np.int64), 64)
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    return lambda: list(threads.map(np.bitwise_or.reduce, parts)), sum(
        part.nbytes for part in parts
    )


def large_product(dtype: DTypeLike) -> Call:
    """Return a call of 2 LARGE^3 operations."""
    square = jax.jit(lambda x: dot(x, x))
    x = jnp.ones((LARGE, LARGE), dtype)
    return lambda: square(x)


class Calls(NamedTuple):
    """The same product native, by XLA, and native out of caches, with its bytes and operations."""

    native: Call
    xla: Call
    cached: Call
    num_bytes: int  # of weights
    flops: float
    layers: int = 1


def products(rows: int, dtype: DTypeLike, total: int) -> Calls:
    """Return calls that multiply by the next of many matrices each time."""
    make = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), (INNER, COLUMNS), dtype),
        static_argnums=(),
    )
    num_bytes = INNER * COLUMNS * jnp.dtype(dtype).itemsize
    matrices = itertools.cycle([make(i) for i in range(max(2, total // num_bytes // 4))])
    x = jax.random.normal(jax.random.key(0), (rows, INNER), dtype)
    ours, theirs = jax.jit(native.matmul), jax.jit(dot)
    flops = 2.0 * rows * INNER * COLUMNS
    again = next(matrices)
    calls = (
        lambda: ours(x, next(matrices)),
        lambda: theirs(x, next(matrices)),
        lambda: ours(x, again),
    )
    return Calls(*calls, num_bytes, flops)


def experts(name: str, tokens: int, kind: str, total: int) -> Calls:
    """Return calls of a layer's experts, which lie anywhere among many slots.

    kind: a dtype, of weights and tokens, or a compressed format of weights, with bfloat16 tokens.
    """
    hidden, inner, num_experts, k = EXPERTS[name]
    shapes = {"w_up": (hidden, 2 * inner), "w_down": (inner, hidden)}
    if kind in FORMATS:
        dtype: DTypeLike = jnp.bfloat16
        fields = {
            n: field
            for name, shape in shapes.items()
            for n, field in stored_fields(FORMATS[kind], name, shape).items()
        }
    else:
        dtype = jnp.dtype(kind)
        stored = np.dtype(np.uint16 if dtype == jnp.bfloat16 else np.float32)
        fields = {name: (shape, stored) for name, shape in shapes.items()}
    expert_bytes = sum(math.prod(shape) * stored.itemsize for shape, stored in fields.values())
    num_slots = min(total // expert_bytes // 2, MAX_SLOTS)
    rng = np.random.default_rng(0)
    both = [HostSlots(num_slots, fields, native=is_native) for is_native in (True, False)]
    record = {field: np.zeros(shape, stored) for field, (shape, stored) in fields.items()}
    for slots, slot in itertools.product(both, range(num_slots)):
        slots.write(slot, record)
    idx_TK = np.stack([rng.permutation(num_experts)[:k] for _ in range(tokens)]).astype(np.int32)
    routed = ExpertInputs(
        jnp.ones((tokens, hidden), dtype), jnp.asarray(idx_TK), jnp.ones((tokens, k)), None
    )
    zeros = jax.jit(lambda: jnp.zeros((tokens, hidden)))

    @partial(jax.jit, static_argnums=0)
    def layers(layout: ExpertByteOffsets, slots_MR: jax.Array, tables_LE: jax.Array) -> jax.Array:
        y_TD = jnp.zeros((tokens, hidden))
        for table_E in tables_LE:
            y_TD = slot_mlp((*routed[:3], y_TD), slots_MR, table_E, layout, "swiglu")
        return y_TD

    order = itertools.chain.from_iterable(rng.permutation(num_slots) for _ in itertools.count())
    made = [np.fromiter(order, np.int32, LAYERS * num_experts) for _ in range(TABLES)]
    tables_LE = itertools.cycle([each.reshape(LAYERS, num_experts) for each in made])

    again_LE = np.zeros((LAYERS, num_experts), np.int32)

    def in_one_program(slots: NativeSlots, again: bool = False) -> jax.Array:
        return layers(slots.layout, slots.slots_MR, again_LE if again else next(tables_LE))

    def in_turn(slots: HostSlots) -> jax.Array:
        y_TD = zeros()
        for table_E in next(tables_LE):
            y_TD = slots.add_expert_outputs(routed._replace(y_TD=y_TD), table_E, "swiglu")
        return y_TD

    num_bytes = LAYERS * len(np.unique(idx_TK)) * expert_bytes
    assert both[0].native is not None
    flops = LAYERS * tokens * k * 6.0 * hidden * inner
    mine = partial(in_one_program, both[0].native)
    return Calls(
        mine, partial(in_turn, both[1]), partial(mine, again=True), num_bytes, flops, LAYERS
    )


def seconds(call: Call) -> float:
    """Return the mean seconds of a call, over as many calls as take `LEAST_S`."""
    begun, calls, taken = time.perf_counter(), 0, 0.0
    while taken < LEAST_S:
        jax.block_until_ready(call())
        calls += 1
        taken = time.perf_counter() - begun
    return taken / calls


class Measured(NamedTuple):
    """Seconds of each round: of the native calls, XLA's, the cached ones, a plain read of
    `read_bytes` and a large product.
    """

    made: Calls
    read_bytes: int
    mine_s: Sequence[float]
    xla_s: Sequence[float]
    cached_s: Sequence[float]
    read_s: Sequence[float]
    large_s: Sequence[float]

    @property
    def large_flops_per_s(self) -> list[float]:
        """The rate of the large product in each round."""
        return [2 * LARGE**3 / s for s in self.large_s]

    def row(self) -> JsonObject:
        """Return the medians, and ratios to the plain read, the floor and XLA."""
        made = self.made
        mine, xla, cached = (
            [made.num_bytes / s / 1e9 for s in times]
            for times in (self.mine_s, self.xla_s, self.cached_s)
        )
        plain = [self.read_bytes / s / 1e9 for s in self.read_s]
        floor = [
            min(n, made.num_bytes * peak / made.flops / 1e9)
            for n, peak in zip(plain, self.large_flops_per_s, strict=True)
        ]
        return {
            "gb_per_s": report.median(mine, 1),
            "xla_gb_per_s": report.median(xla, 1),
            "cached_gb_per_s": report.median(cached, 1),
            **{
                name: report.median([s / made.layers * 1e6 for s in times], 1)
                for name, times in (("us", self.mine_s), ("cached_us", self.cached_s))
            },
            "read_gb_per_s": report.median(plain, 1),
            "of_read": report.ratio(mine, plain),
            "of_floor": report.ratio(mine, floor),
            "of_xla": report.ratio(mine, xla),
        }


def measure(made: Calls, read: Call, read_bytes: int, large: Call, rounds: int) -> Measured:
    """Time the calls in turn, beside a plain read and a large product."""
    calls = (made.native, made.xla, made.cached, read, large)
    for call in calls:
        seconds(call)
    taken = []
    for _ in range(rounds):
        before = [seconds(call) for call in calls[:2]]
        jax.block_until_ready(made.cached())  # into the caches
        taken.append(before + [seconds(call) for call in calls[2:]])
    return Measured(made, read_bytes, *zip(*taken, strict=True))


def main() -> None:
    a = parse()
    native.load()
    read, read_bytes = plain_read(a.bytes // 4)
    large = {name: large_product(name) for name in ("bfloat16", "float32")}
    peaks: dict[str, list[float]] = {name: [] for name in large}
    rows = []
    for kind, count in itertools.product(("bfloat16", "float32", *FORMATS), a.rows):
        names = (*EXPERTS,) if kind in FORMATS else (f"{INNER} x {COLUMNS}", *EXPERTS)
        for name in names:
            made = (
                experts(name, count, kind, a.bytes)
                if name in EXPERTS
                else products(count, jnp.dtype(kind), a.bytes)
            )
            wide = "float32" if kind == "float32" else "bfloat16"
            measured = measure(made, read, read_bytes, large[wide], a.rounds)
            peaks[wide] += measured.large_flops_per_s
            what = {"what": name, "weights": kind, "rows": count}
            rows.append(report.progress(what | measured.row()))
    gflops = {name: round(np.median(all_of) / 1e9) for name, all_of in peaks.items()}
    report.finish(
        {
            "versions": report.versions("jax"),
            "options": report.options(a),
            "instruction_set": native.instruction_set(),
            "processor_has": list(native.usable_instruction_sets()),
            "large_product_gflop_per_s": gflops,
        }
        | {"rows": rows}
    )


if __name__ == "__main__":
    main()
