"""Account for every millisecond of a training step on a CPU.

    python benchmarks/train/profile_step.py --batch 8 --init torch --capacity-factor 1.25
        (options: train/step)
    python benchmarks/train/profile_step.py --hf-config benchmarks/peers/qwen3moe_64e.json --batch 4
    python benchmarks/train/profile_step.py --init torch --capacity-factor 1.25 --processes 2 \
        --replicate-dense --ep 2

milliseconds: of a step, by what the operations belong to (scope) and by what they do: matrix
products, native operations (products and the elementwise work between them), copies (transposes,
gathers of rows, concatenations), everything else (elementwise work and sums), collectives where
nothing else runs, and idle, when nothing runs. Where operations overlap, the time is of the one
that began first. Of several processes: rank 0's. large_product: what one product of 4,096 x 1,024 x
4,096 reaches in the same process, in between; floor_ms: the process's products at that rate.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import re
import resource
import statistics
import sys
import time
from collections import Counter

from benchmarks.comm.trace import COLLECTIVES, WHOLE, Op, Span, operations, recording, union_s
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.train import step as bench

SCOPES = (
    "optimizer",
    "loss",
    "attention",
    "moe",
    "mlp",
    "gather",
    "reduce",
    "embed",
    "auxiliary_losses",
)
COPIES = (
    "copy",
    "transpose",
    "concatenate",
    "gather",
    "scatter",
    "slice",
    "dynamic-slice",
    "dynamic-update-slice",
)
ROWS, INNER, COLUMNS = 4096, 1024, 4096
STEPS = 5


def scope(op: Op) -> str:
    """Return the part of the step that an operation belongs to."""
    words = set(re.findall(r"[a-z_]+", op.scopes))
    return next((name for name in SCOPES if any(word.startswith(name) for word in words)), "other")


def work(op: Op) -> str:
    """Return the kind of work that an operation does."""
    if op.kind == "dot" or (op.kind == "fusion" and "dot_general" in op.scopes):
        return "products"
    if op.kind == "custom-call":
        return "native"
    return "copies" if op.kind in COPIES else "elementwise"


def accounted(
    found: list[Span], ops: dict[str, Op], steps: int, begin_ns: float, end_ns: float
) -> JsonObject:
    """Return milliseconds of a step by scope and work; what no operation covers is idle."""
    total: Counter[tuple[str, str]] = Counter()
    at, gaps = begin_ns, []
    for begin, end, name in found:
        op = ops.get(name)
        if op is None or op.kind in WHOLE + COLLECTIVES:
            continue
        if begin > at:
            gaps.append(Span(at, begin, ""))
        total[scope(op), work(op)] += max(0.0, end - max(begin, at))
        at = max(at, end)
    gaps.append(Span(at, max(at, end_ns), ""))
    exchanges = [span for span in found if span.name in ops and ops[span.name].kind in COLLECTIVES]
    alone_ns = 1e9 * union_s(exchanges, gaps)
    total["idle", "idle"] = sum(end - begin for begin, end, _ in gaps) - alone_ns
    if exchanges:
        total["collectives", "collectives"] = alone_ns
    rows: dict[str, dict[str, float]] = {}
    for (part, kind), ns in sorted(total.items(), key=lambda item: -item[1]):
        rows.setdefault(part, {})[kind] = round(ns * 1e-6 / steps, 2)
    return rows


def longest(found: list[Span], ops: dict[str, Op], steps: int, number: int) -> list[JsonObject]:
    """Return the operations that take longest, as the program names them."""
    total: Counter[str] = Counter()
    for begin, end, name in found:
        if name in ops and ops[name].kind not in WHOLE:
            total[name] += end - begin
    described = [(name, ns, ops[name]) for name, ns in total.most_common(number)]
    return [
        {
            "op": name,
            "ms": round(ns * 1e-6 / steps, 2),
            "kind": op.kind,
            "scope": op.scopes[-110:],
            "bytes": op.num_bytes,
        }
        for name, ns, op in described
    ]


class LargeProduct:
    """A large product of the step's dtype, timed beside the steps: what the processor can do."""

    def __init__(self, dtype: str) -> None:
        import jax
        import jax.numpy as jnp

        ones = jnp.ones((ROWS, INNER), dtype), jnp.ones((INNER, COLUMNS), dtype)
        product = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
        self._run = lambda: jax.block_until_ready(product(*ones))
        self._run()

    def seconds(self) -> float:
        """Return the seconds of one product."""
        begun = time.perf_counter()
        self._run()
        return time.perf_counter() - begun


def step_seconds(job: bench.Job) -> float:
    """Return the seconds of one step."""
    import jax

    begun = time.perf_counter()
    jax.block_until_ready(job.step())
    return time.perf_counter() - begun


def main() -> int:
    a = bench.parse()
    if a.processes > 1 and a.rank is None:
        return bench.launch(a)
    job = bench.Job(a, a.rank or 0)
    product = LargeProduct(a.dtype)
    seconds, products, faults = [], [], []
    for i in range(a.warmup + a.steps):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        taken, alone = step_seconds(job), product.seconds()
        if i >= a.warmup:
            seconds.append(taken)
            products.append(alone)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    ops = operations(job.compiled.as_text())
    with recording(ops) as found:
        for _ in range(STEPS):
            step_seconds(job)
    config = job.config
    tokens = config.batch_size * config.sequence_length // a.processes
    rate = 2 * ROWS * INNER * COLUMNS / statistics.median(products)
    flops = config.flops_per_token * tokens
    rows = accounted(found, ops, STEPS, found[0].begin_ns, max(span.end_ns for span in found))
    result = {
        "args": report.options(a, "rank", "port"),
        "step_ms": report.median([1e3 * s for s in seconds], 2),
        "all_step_ms": [round(1e3 * s, 2) for s in seconds],
        "large_product_flops_per_s": round(rate),
        "process_flops": round(flops),
        "floor_ms": round(1e3 * flops / rate, 2),
        "page_faults": round(statistics.median(faults)),
        "milliseconds": rows,
        "sums": {
            kind: round(sum(row.get(kind, 0.0) for row in rows.values()), 2)
            for kind in ("products", "native", "elementwise", "copies", "collectives", "idle")
        },
        "longest": longest(found, ops, STEPS, 25),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": report.versions("jax", "jaxlib"),
    }
    report.finish(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
