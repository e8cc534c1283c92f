"""Compare expert placements under a skewed load: even, EPLB's, and EPLB's with copies.

    sudo python benchmarks/paper/eplb.py    two processes of this machine, and of two nodes
    python benchmarks/paper/eplb.py --rates 0 --quick    a smoke test: too small for copies to pay

Two processes with a core each. Experts are chosen by Zipf's law with exponent 1.1, which does not
change; which expert has which rank is drawn for each layer. It is the router's bias that brings
this about, so the engine routes, sends and computes as with any model. A step is the prefill of a
whole batch of prompts, one token each comes of it.

even: experts in order, for good. rearranged: EPLB without a spare slot. redundant: with a quarter
more slots. no_skew: even, all experts chosen alike: what no placement can beat. Contestants take
turns; `ratio` is the median, round by round, of tokens a second to those of `even`. Beside it what
ROCm's ATOM reports (8 MI355, DeepSeek-V4-Pro, prefill).

max_over_mean: busiest device, in the mean over layers. expert_share: the part of a step that the
busiest device's experts take, as timed alone. bound: the ratio if from the step of `even` nothing
went but what the busiest device computes more than the mean one. `planned`: max_over_mean that the
planner reaches with the choices of `even` for more devices than there are here.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import math
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engine_ranks import EngineRank, pin_to_one_core, run_rank
from benchmarks.lib.linked_nodes import sent_bytes
from benchmarks.lib.ranks import add_rank_options, run_ranks
from benchmarks.lib.report import JsonObject
from benchmarks.lib.skewed_model import write_skewed_checkpoint, zipf_shares
from jmoe.config.engine import EngineConfig, EngineMesh, PlacementPolicy

if TYPE_CHECKING:
    from jmoe.inference.engine import Engine

NUM_RANKS = 2
EXPONENT = 1.1
ATOM = {"rearranged": 1.17, "redundant": 1.34}
REDUNDANCY = 1.25
EVERY = 6  # steps between two placements, and of the window that they go by
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
SIZES = {"layers": 2, "experts": 16, "prompts": 16, "prompt_tokens": 128, "steps": 2}
QUICK_MODEL = MODEL | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
QUICK_SIZES = {"layers": 2, "experts": 8, "prompts": 4, "prompt_tokens": 32, "steps": 1}
PLANNED_DEVICES = (2, 4, 8)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0, 200, 1000],
        help="Mbit/s, both ways; 0: no link",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the experts' ranks")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, one round, no link: is all there?"
    )
    parser.add_argument("--folder", type=Path, help="keep models and compiled programs here")
    add_rank_options(parser)
    a = parser.parse_args()
    if a.quick:
        a.rounds, a.rates = 1, a.rates[:1]
    return a


def engines(sizes: dict[str, int]) -> dict[str, tuple[str, EngineConfig]]:
    """Return each contestant's model and configuration."""
    prompts, tokens = sizes["prompts"], sizes["prompt_tokens"]
    fair = sizes["experts"] // NUM_RANKS
    even = EngineConfig(
        max_batch=prompts,
        max_seq_len=tokens + 2,
        prefill_chunk_tokens=tokens,
        max_prefill_tokens=prompts * tokens,
        mesh=EngineMesh(devices=NUM_RANKS, slots_per_device=fair),
    )
    eplb = partial(EngineMesh, NUM_RANKS, "eplb", rebalance_every=EVERY, rebalance_window=EVERY)
    return {
        "even": ("skewed", even),
        "rearranged": ("skewed", replace(even, mesh=eplb(slots_per_device=fair))),
        "redundant": (
            "skewed",
            replace(even, mesh=eplb(slots_per_device=math.ceil(REDUNDANCY * fair))),
        ),
        "no_skew": ("alike", even),
    }


class Contestant:
    """An engine and the seconds of its rounds."""

    def __init__(self, engine: "Engine", sizes: dict[str, int]) -> None:
        self.engine, self._sizes = engine, sizes
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def run(self, seed: tuple[int, ...], steps: int) -> float:
        """Return the seconds of these steps, each with new prompts."""
        shape = steps, self._sizes["prompts"], self._sizes["prompt_tokens"]
        tokens = (
            np.random.default_rng(seed).integers(1, self.engine.config.vocab_size, shape).tolist()
        )
        begun = time.perf_counter()
        for prompts in tokens:
            self.engine.generate(prompts, max_new_tokens=1, ignore_eos=True)
        return time.perf_counter() - begun

    def row(self, name: str, even: "Contestant", row_s: float) -> JsonObject:
        """Return the contestant's figures. row_s: seconds of an expert for a token."""
        stats, sizes = self.engine.stats(), self._sizes
        placed, steps = stats.placement, len(self.seconds) * sizes["steps"]
        tokens = sizes["prompts"] * sizes["prompt_tokens"]
        over_mean = 1 / np.asarray(placed.balancedness)
        busiest_rows = tokens * self.engine.config.num_experts_per_tok / NUM_RANKS * over_mean.sum()
        step_s = report.median(self.seconds) / sizes["steps"]
        expert_s = busiest_rows * row_s
        found = float(np.mean(over_mean))
        return {
            "placement": name,
            "tokens_per_s": round(tokens / step_s),
            "ratio": report.ratio(even.seconds, self.seconds),
            "atom_ratio": ATOM.get(name),
            "max_over_mean": round(found, 3),
            "max_over_mean_by_layer": [round(x, 3) for x in over_mean.tolist()],
            "expert_share": round(expert_s / step_s, 3),
            "bound": round(1 / (1 - expert_s / step_s * (1 - 1 / found)), 3),
            "slots_per_device": self.engine.residency.placements[0].slots_per_device,
            "expert_mbytes_per_device": round(self.engine.residency.num_bytes / 1e6, 1),
            "sent_mbytes_per_step": round(report.median(self.sent) / sizes["steps"] / 1e6, 2),
            "swaps": placed.swaps,
            "copied_ms_per_step": round(1e3 * placed.swap_s / steps, 2),
            "planning_ms_per_step": round(1e3 * placed.planning_s / steps, 2),
            "readback_ms_per_step": round(1e3 * stats.readback_s / steps, 2),
            "all_step_s": [round(s / sizes["steps"], 4) for s in self.seconds],
        }


def planned(use_LE: np.ndarray) -> list[JsonObject]:
    """Return max / mean load, averaged over layers, of placements on several numbers of devices."""
    from jmoe.planning.placement import place_experts

    def over_mean(devices: int, redundancy: float, policy: PlacementPolicy) -> float:
        slots = math.ceil(redundancy * use_LE.shape[1] / devices)
        options: dict[str, Any] = {"slots_per_device": slots, "max_packed": slots, "policy": policy}
        return float(
            np.mean([1 / place_experts(use_E, devices, **options).balancedness for use_E in use_LE])
        )

    return [
        {
            "devices": devices,
            "even": round(over_mean(devices, 1.0, "even"), 3),
            "rearranged": round(over_mean(devices, 1.0, "eplb"), 3),
            "redundant": round(over_mean(devices, REDUNDANCY, "eplb"), 3),
        }
        for devices in PLANNED_DEVICES
        if use_LE.shape[1] % devices == 0
    ]


def measure(a: argparse.Namespace, sizes: dict[str, int], found: dict[str, "Engine"]) -> JsonObject:
    """Return a row for each contestant, once all have settled on a placement."""
    contestants = {name: Contestant(engine, sizes) for name, engine in found.items()}
    for contestant in contestants.values():
        contestant.run(
            (1, a.seed), EVERY + sizes["layers"] + 1
        )  # a layer is placed between two steps
    for contestant in contestants.values():
        contestant.engine.reset_stats()
    for number in range(a.rounds):
        for contestant in contestants.values():
            before = sent_bytes() if a.rates[0] else 0
            contestant.seconds.append(contestant.run((2, a.seed, number), sizes["steps"]))
            contestant.sent.append((sent_bytes() if a.rates[0] else 0) - before)
    even = contestants["even"]
    row_s = contestants["rearranged"].engine._runner.measure_swap_costs().row_s
    rows = [
        {"mbit_per_s": a.rates[0], **c.row(name, even, row_s)} for name, c in contestants.items()
    ]
    return {
        "rows": [report.progress(row) for row in rows],
        "planned": planned(even.engine.tokens_per_expert()),
    }


def main() -> None:
    a = parse()
    sizes, model = (QUICK_SIZES, QUICK_MODEL) if a.quick else (SIZES, MODEL)
    if a.rank is not None:
        pin_to_one_core(a.rank)
        load = {name: (a.folder / of, config) for name, (of, config) in engines(sizes).items()}
        run_rank(
            EngineRank(a.rank, NUM_RANKS, a.port, a.rates[0]),
            a.folder,
            load,
            partial(measure, a, sizes),
        )
        return
    with tempfile.TemporaryDirectory(prefix="jmoe-eplb-") as temporary:
        folder = a.folder or Path(temporary)
        for name, exponent in (("skewed", EXPONENT), ("alike", 0.0)):
            if not (folder / name).is_dir():
                shares = zipf_shares(sizes["layers"], sizes["experts"], exponent, a.seed)
                write_skewed_checkpoint(folder / name, shares, a.seed, **model)
        found = [
            run_ranks(NUM_RANKS, rate, "--rates", str(rate), "--folder", str(folder))
            for rate in a.rates
        ]
    options = report.options(a, "rank", "port", "folder")
    result = {
        "benchmark": "EPLB on a skewed load",
        "options": options | {"zipf_shares": EXPONENT} | sizes | model,
    }
    rows = [row for one in found for row in one["rows"]]
    report.finish(
        result
        | {
            "rows": rows,
            "planned": found[0]["planned"],
            "versions": report.versions("jax", "jaxlib"),
        }
    )


if __name__ == "__main__":
    main()
