"""Time prefill through a ring of slots against resident experts (MoESys, Figure 12).

    python benchmarks/paper/fig12.py --model DIR --batch 8 --prompt 512

The link to the device is limited so that copying a layer takes as long as computing it, the worst
case for a ring: with perfect overlap it costs nothing, without overlap (one slot) it doubles the
time. The second row has compressed experts (`--compressed`) behind the same link. The engines of a
row run in turn. The paper's ring keeps nearly the speed of resident weights with about 30 % less
GPU memory (58.2 billion parameters, 16 A100).
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import statistics
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import (
    add_engine_options,
    make_engine,
    measure_prefill_s,
    run_description,
)
from benchmarks.lib.report import JsonObject
from jmoe.inference.engine import Engine

Limits = dict[str, float] | None


def start(a: argparse.Namespace, limits: Limits = None, **options: Any) -> Engine:
    sizes = {"max_batch": a.batch, "max_seq_len": a.prompt + 1, "prefill_chunk_tokens": a.prompt}
    return make_engine(a, limits, **sizes, **options)


def in_turn(a: argparse.Namespace, engines: dict[str, Engine]) -> dict[str, list[float]]:
    """Return the seconds of each engine in every round but the first."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for n in range(a.rounds + 1):
        vocab_size = next(iter(engines.values())).config.vocab_size
        tokens = np.random.default_rng(n).integers(3, vocab_size, (a.batch, a.prompt)).tolist()
        for name, engine in engines.items():
            engine.reset_stats()
            seconds[name].append(measure_prefill_s(engine, tokens))
    return {name: rounds_s[1:] for name, rounds_s in seconds.items()}


def row(a: argparse.Namespace, expert_dtype: str, limits: Limits, wide_bytes: int) -> JsonObject:
    """Return the rates of resident experts and of rings of half the layers and of one."""
    with ExitStack() as stack:
        resident = stack.enter_context(start(a, policy="resident", expert_dtype=expert_dtype))
        slots = {"ring": resident.config.num_moe_layers // 2, "without_overlap": 1}
        ring: JsonObject = {
            "policy": "ring",
            "expert_tier": "host",
            "expert_dtype": expert_dtype,
            "limits": limits,
        }
        engines = {
            name: stack.enter_context(start(a, ring_slots=count, **ring))
            for name, count in slots.items()
        }
        seconds = in_turn(a, {"resident": resident, **engines})
        stats = {name: engine.stats() for name, engine in engines.items()} | {
            "resident": resident.stats()
        }
    return {
        "experts": expert_dtype,
        "tokens_per_s": {
            name: round(a.batch * a.prompt / statistics.median(s), 1) for name, s in seconds.items()
        },
        "speed_of_resident": {
            name: report.ratio(seconds["resident"], s) for name, s in seconds.items()
        },
        "expert_bytes_of_all_wide": {
            n: round(s.device_expert_bytes / wide_bytes, 3) for n, s in stats.items()
        },
        "streamed_bytes": stats["ring"].streamed_bytes,
        "link_busy": round(stats["ring"].roofline_fraction, 3),
        "seconds": {name: [round(s, 4) for s in rounds_s] for name, rounds_s in seconds.items()},
    }


def main() -> None:
    parser = report.parser(__doc__)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--compressed", default="int4", help="the experts' format in the second row"
    )
    a = parser.parse_args()
    with start(a, policy="resident", expert_dtype="wide") as resident:
        wide_bytes = resident.stats().device_expert_bytes
        bandwidth = wide_bytes / statistics.median(in_turn(a, {"resident": resident})["resident"])
    rows = [
        report.progress(row(a, kind, {"host": bandwidth}, wide_bytes))
        for kind in ("wide", a.compressed)
    ]
    report.finish({"link_bytes_per_s": round(bandwidth), "rows": rows} | run_description(a))


if __name__ == "__main__":
    main()
