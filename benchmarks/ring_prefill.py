"""Prefill through a ring of half the layers against all layers resident; the last line is one JSON object.

    python benchmarks/ring_prefill.py --model DIR --batch 8 --prompt 512

The link to the device is limited so that copying a layer takes as long as computing it, the worst case for a ring:
with perfect overlap it costs nothing, without overlap (one slot) it doubles the time. The three engines run in turn.
"""

if __name__ == "__main__":
    import script

    script.reexec_with_env()

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def prefill_s(engine: Any, batch: int, prompt: int, seed: int) -> float:
    """Seconds from `batch` new prompts to the first token of each."""
    import numpy as np

    from jmoe.inference.sampling_params import SamplingParams

    tokens = np.random.default_rng(seed).integers(3, engine.config.vocab_size, (batch, prompt))
    begun = time.perf_counter()
    waiting = {engine.add_request(row.tolist(), SamplingParams(max_new_tokens=1)) for row in tokens}
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    a = parser.parse_args()
    import jax

    from jmoe.config.engine import EngineConfig
    from jmoe.inference.engine import Engine

    def start(limits: dict[str, float] | None = None, **options: Any) -> Engine:
        sizes: dict[str, Any] = {"max_batch": a.batch, "max_seq_len": a.prompt + 1, "prefill_chunk_tokens": a.prompt}
        config = EngineConfig(dtype=a.dtype, **sizes, **options)
        return Engine(a.model, config, bandwidth_limit_bytes_per_s=limits)

    def run(resident: Engine, rounds: int, limits: dict[str, float] | None) -> tuple[dict[str, list[float]], Any]:
        """Seconds of each engine in every round but the first, and what the ring moved in the last."""
        ring: dict[str, Any] = {"policy": "ring", "expert_tier": "host", "limits": limits}
        with start(ring_slots=layers // 2, **ring) as half, start(ring_slots=1, **ring) as one:
            seconds: dict[str, list[float]] = {"resident": [], "ring": [], "without_overlap": []}
            for n in range(rounds + 1):
                for found, engine in zip(seconds.values(), (resident, half, one), strict=True):
                    engine.reset_stats()
                    found.append(prefill_s(engine, a.batch, a.prompt, n))
            return {name: found[1:] for name, found in seconds.items()}, half.stats()

    with start(policy="resident") as resident:
        layers, expert_bytes = resident.config.num_moe_layers, resident.stats().device_expert_bytes
        resident_s = statistics.median(run(resident, 4, None)[0]["resident"])
        bandwidth_bytes_per_s = expert_bytes / resident_s
        seconds, moved = run(resident, a.rounds, {"host": bandwidth_bytes_per_s})
    of_resident = {
        name: statistics.median(r / s for r, s in zip(seconds["resident"], found, strict=True))
        for name, found in seconds.items()
    }
    tokens = a.batch * a.prompt
    result = {
        "tokens_per_s": {name: round(tokens / statistics.median(s), 1) for name, s in seconds.items()},
        "speed_of_resident": {name: round(ratio, 3) for name, ratio in of_resident.items()},
        "bandwidth_limit_bytes_per_s": round(bandwidth_bytes_per_s),
        "streamed_bytes": moved.streamed_bytes,
        "roofline_fraction": round(moved.roofline_fraction, 3),
        "device_expert_bytes": {"resident": expert_bytes, "ring": moved.device_expert_bytes},
        "seconds": {name: [round(s, 4) for s in found] for name, found in seconds.items()},
        "args": {key: str(v) if isinstance(v, Path) else v for key, v in vars(a).items()},
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
