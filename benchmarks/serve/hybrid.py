"""Compare copying experts over a slow link with computing them on the CPU.

    python benchmarks/serve/hybrid.py --model DIR --dtype bfloat16 --share 0.5

The device is this CPU with room for `--share` of the experts, the link from host memory is limited
to `--gb-per-s`. Where the device is a GPU its products are faster and no link has to be limited:
this shows what the policies do about a link, not what a GPU gains. Tokens are drawn at random, so
that routing varies. All engines run in turn.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import contextlib
import statistics
import time

import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import add_engine_options, make_engine, run_description
from jmoe.inference.engine import Engine
from jmoe.inference.sampling_params import SamplingParams

POLICIES = ("experts", "hybrid", "ring")


def step_s(engine: Engine, batch: int, new_tokens: int, seed: int) -> float:
    """Return the median seconds of a decode step."""
    prompts = (
        np.random.default_rng(seed).integers(3, engine.config.vocab_size, (batch, 16)).tolist()
    )
    sampling = SamplingParams(
        max_new_tokens=new_tokens, ignore_eos=True, temperature=1.0, seed=seed
    )
    for prompt in prompts:
        engine.add_request(prompt, sampling)
    seconds: list[float] = []
    while engine.has_unfinished:
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = report.parser(__doc__)
    add_engine_options(parser, expert_tier="host")
    parser.add_argument("--share", type=float, default=0.5, help="of all experts, on the device")
    parser.add_argument("--gb-per-s", type=float, nargs="+", default=[0.25, 0.5, 1, 2])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    sizes = {"max_batch": a.batch, "max_seq_len": a.new_tokens + 32}
    with make_engine(a, policy="resident", **sizes) as resident:
        expert_bytes = resident.stats().device_expert_bytes
        resident_s = statistics.median(
            step_s(resident, a.batch, a.new_tokens, n) for n in range(a.rounds)
        )
    rows = []
    for rate in a.gb_per_s:
        with contextlib.ExitStack() as stack:
            room = {"device_bytes": int(a.share * expert_bytes), **sizes}
            engines = {
                policy: stack.enter_context(
                    make_engine(a, {"host": rate * 1e9}, policy=policy, **room)
                )
                for policy in POLICIES
            }
            seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            for n in range(a.rounds + 1):  # the first finds out who is used
                for policy, engine in engines.items():
                    if n == 1:
                        engine.reset_stats()
                    seconds[policy].append(step_s(engine, a.batch, a.new_tokens, n))
            stats = {policy: engine.stats() for policy, engine in engines.items()}
        medians = {policy: statistics.median(s[1:]) for policy, s in seconds.items()}
        hybrid = stats["hybrid"]
        row = {
            "link_gb_per_s": rate,
            "ms_a_step": {policy: round(1e3 * s, 2) for policy, s in medians.items()},
            "hybrid_against_experts": report.ratio(seconds["experts"][1:], seconds["hybrid"][1:]),
            "hybrid_against_ring": report.ratio(seconds["ring"][1:], seconds["hybrid"][1:]),
            "hit_rate": round(hybrid.hit_rate, 2),
            "experts_on_host": hybrid.on_host,
            "mb_a_token": {
                policy: round(s.bytes_per_token / 1e6, 2) for policy, s in stats.items()
            },
        }
        rows.append(report.progress(row))
    report.finish({"resident_ms": round(1e3 * resident_s, 2), "rows": rows} | run_description(a))


if __name__ == "__main__":
    main()
