"""Prefill through a ring of half the layers against all layers resident; the last line is one JSON object.

    python benchmarks/ring_prefill.py --model DIR --batch 8 --prompt 512

The link to the device is limited so that copying a layer takes as long as computing it, the worst case for a ring:
with perfect overlap it costs nothing, without overlap (one slot) it doubles the time. The three engines run in turn.
"""

if __name__ == "__main__":
    import script

    script.reexec_with_env()

import statistics
from typing import Any

import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import about, add_engine_options, engine_of, prefill_s
from jmoe.inference.engine import Engine


def main() -> None:
    parser = report.parser(__doc__)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()

    def start(limits: dict[str, float] | None = None, **options: Any) -> Engine:
        sizes = {"max_batch": a.batch, "max_seq_len": a.prompt + 1, "prefill_chunk_tokens": a.prompt}
        return engine_of(a, limits, **sizes, **options)

    def run(resident: Engine, rounds: int, limits: dict[str, float] | None) -> tuple[dict[str, list[float]], Any]:
        """Seconds of each engine in every round but the first, and what the ring moved in the last."""
        ring: dict[str, Any] = {"policy": "ring", "expert_tier": "host", "limits": limits}
        with start(ring_slots=layers // 2, **ring) as half, start(ring_slots=1, **ring) as one:
            seconds: dict[str, list[float]] = {"resident": [], "ring": [], "without_overlap": []}
            for n in range(rounds + 1):
                tokens = np.random.default_rng(n).integers(3, resident.config.vocab_size, (a.batch, a.prompt)).tolist()
                for rounds_s, engine in zip(seconds.values(), (resident, half, one), strict=True):
                    engine.reset_stats()
                    rounds_s.append(prefill_s(engine, tokens))
            return {name: rounds_s[1:] for name, rounds_s in seconds.items()}, half.stats()

    with start(policy="resident") as resident:
        layers, expert_bytes = resident.config.num_moe_layers, resident.stats().device_expert_bytes
        resident_s = statistics.median(run(resident, 4, None)[0]["resident"])
        bandwidth_bytes_per_s = expert_bytes / resident_s
        seconds, moved = run(resident, a.rounds, {"host": bandwidth_bytes_per_s})
    tokens = a.batch * a.prompt
    result = {
        "tokens_per_s": {name: round(tokens / statistics.median(s), 1) for name, s in seconds.items()},
        "speed_of_resident": {name: report.ratio(seconds["resident"], s) for name, s in seconds.items()},
        "bandwidth_limit_bytes_per_s": round(bandwidth_bytes_per_s),
        "streamed_bytes": moved.streamed_bytes,
        "roofline_fraction": round(moved.roofline_fraction, 3),
        "device_expert_bytes": {"resident": expert_bytes, "ring": moved.device_expert_bytes},
        "seconds": {name: [round(s, 4) for s in rounds_s] for name, rounds_s in seconds.items()},
    }
    report.finish(result | about(a))


if __name__ == "__main__":
    main()
