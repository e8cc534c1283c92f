"""Compare the host cache's policies: MoESys' Algorithm 2 as printed, ours, and neither.

    python benchmarks/paper/moesys_cache.py
    python benchmarks/paper/moesys_cache.py --quick

Rows `traces`: hit rates on routing traces whose popularity changes (`benchmarks/offload/
cache_policies.py`), without each record's first use; nothing is timed. Rows `training`: the same
steps of one model on text, experts on NVMe, by `tiers.cache_policy`; `off` is a cache of two
records of each kind, the least that a run takes. Losses must be the same to the bit.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload import cache_policies
from benchmarks.offload.cache_policies import NUM_RECORDS, Ours, Policy
from benchmarks.offload.session import TextSession, add_model_options, config_of, expert_bytes
from jmoe.config import RouterConfig
from jmoe.config.tiers import TiersConfig
from jmoe.memory.moesys_counts import MoESysCounts
from jmoe.memory.slot_table import HitCounts

THRESHOLDS = (0.0, 1.0)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    add_model_options(parser, layers=2)
    parser.set_defaults(hidden_size=128, intermediate_size=64, experts=64, top_k=1)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--cache", type=float, default=0.35, help="share of the records")
    parser.add_argument("--steps", type=int, default=40, help="of training; a quarter warms up")
    parser.add_argument("--trace-steps", type=int, default=400)
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    if a.quick:
        a.steps, a.trace_steps, a.experts, a.hidden_size = 4, 8, 8, 64
    return a


def contestants(num_slots: int) -> dict[str, Policy]:
    """Return ours, and the paper's policy with several thresholds."""
    found: dict[str, Policy] = {"lfu": Ours(num_slots, HitCounts(NUM_RECORDS))}
    for threshold in THRESHOLDS:
        counts = MoESysCounts(NUM_RECORDS, threshold=threshold)
        found[f"moesys, threshold {threshold:g}"] = Ours(num_slots, counts)
    return found


def measure_traces(num_steps: int) -> list[JsonObject]:
    """Return the hit rates of all policies, a row a trace and size of the cache."""
    traces = {
        "zipf, 16 tokens": list(cache_policies.zipf(num_steps, 1, 16, 17)),
        "zipf, 128 tokens": list(cache_policies.zipf(num_steps, 1, 128, 129)),
        "four tasks": list(cache_policies.multi_task(num_steps, 1, 8)),
        "balanced": list(cache_policies.balanced(min(num_steps, 100), 1)),
    }
    rows = []
    for name, steps in traces.items():
        for share in (0.25, 0.5):
            rates = {
                policy: round(cache_policies.hit_rate(it, steps), 4)
                for policy, it in contestants(int(NUM_RECORDS * share)).items()
            }
            rows.append(report.progress({"trace": name, "cache_share": share} | rates))
    return rows


def measure_training(a: argparse.Namespace, folder: Path) -> list[JsonObject]:
    """Return the hit rate and the bytes a step of the same training under each policy."""
    runs: dict[str, dict[str, Any]] = {
        "off": {"host_cache_bytes": 2 * expert_bytes(a) + 6 * 8192},
        "lfu": {},
        **{
            f"moesys, threshold {threshold:g}": {
                "cache_policy": "moesys",
                "cache_threshold": threshold,
            }
            for threshold in THRESHOLDS
        },
    }
    rows, losses = [], list[list[float]]()
    for number, (name, tiers) in enumerate(runs.items()):
        config = config_of(a, folder / str(number), experts="nvme", optimizer="nvme", **tiers)
        session = TextSession(replace(config, model=replace(config.model, router=RouterConfig())))
        steps = [session.step(step) for step in range(a.steps)]
        caches = [store.cache for store in session.program.expert_stats().store_stats]
        session.program.close()
        losses.append([step.loss for step in steps])
        assert losses[-1] == losses[0], f"{name} changes losses"
        hits, misses = sum(c.hits for c in caches), sum(c.misses for c in caches)
        counted = steps[a.steps // 4 :]
        row = {
            "policy": name,
            "hit_rate": round(hits / (hits + misses), 4),
            "read_bytes_a_step": sum(s.read_bytes for s in counted) // len(counted),
            "written_bytes_a_step": sum(s.written_bytes for s in counted) // len(counted),
        }
        rows.append(report.progress(row))
    return rows


def main() -> None:
    a = parse()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "settings": {
                "model": f"{a.layers} layers of {a.experts} experts, top-{a.top_k}",
                "tokens": a.batch_size * a.sequence_length,
                "cache_share": a.cache,
                "steps": a.steps,
                "beta": TiersConfig().cache_beta,
                "interval": TiersConfig().cache_interval,
            },
            "training": measure_training(a, Path(folder)),
            "traces": measure_traces(a.trace_steps),
        }
    report.finish({"benchmark": "cache policies"} | result | {"versions": report.versions("jax")})


if __name__ == "__main__":
    main()
