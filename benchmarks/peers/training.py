"""Compare training steps with DeepSpeed-MoE's and transformers', in alternation.

    python benchmarks/peers/training.py --deepspeed E1/bin/python --transformers E2/bin/python

--deepspeed, --transformers: the Python of a peer's environment, as `setup.py` of this folder makes
it; either may be left out. A round runs every contestant once, in processes of its own; the ratio
is the median of the rounds' ratios to the peer's faster row. GPT-MoE is a model of 4 layers, hidden
256, --experts experts, top-1, with the same 2,048 tokens a step and weights drawn alike; in one
process all cores compute, in two each has its own. 0 experts: a dense model. The others are the
configurations of this folder, 1,024 tokens a step; transformers' bfloat16 has no float32 masters.
peak_rss_mib: of each process.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.lib import report
from benchmarks.lib.peers import run_for_last_object
from benchmarks.lib.report import JsonObject

HERE = Path(__file__).resolve().parent
OURS = BENCHMARKS / "train" / "step.py"
MODELS = ("mixtral_8e", "qwen3moe_64e")


@dataclass
class Contestant:
    """One side of a comparison, with the last object of each of its runs."""

    system: str
    processes: int
    dtype: str
    command: list[str]
    runs: list[JsonObject] = field(default_factory=list)

    def row(self, first: "Contestant") -> JsonObject:
        """Return the contestant's figures; first: the contestant that ratios refer to."""
        own, others = ([run["tokens_per_s"] for run in side.runs] for side in (self, first))
        last = self.runs[-1]
        return {
            "system": self.system,
            "processes": self.processes,
            "dtype": self.dtype,
            "tokens_per_s": report.median(own, 1),
            "ratio": report.ratio(own, others),
            "rounds": own,
            "last_loss": last["last_loss"],
            "peak_rss_mib": [round(peak / 2**20) for peak in last["peak_rss_bytes"]],
            "versions": last["versions"],
        }


def gpt_moe(python: str, experts: int, bucket_bytes: int) -> list[Contestant]:
    """Return DeepSpeed's arrangements of a model and ours."""
    theirs = [python, str(HERE / "deepspeed_training.py"), "--experts", str(experts)]
    ours = [
        sys.executable,
        str(OURS),
        "--init",
        "torch",
        "--capacity-factor",
        "1.25",
        "--experts",
        str(experts),
    ]
    split = ["--processes", "2", "--replicate-dense", "--bucket-bytes", str(bucket_bytes)]
    if not experts:
        theirs, ours = [*theirs, "--ep", "1"], [*ours[:4], "--experts", "0"]
    return [
        Contestant("DeepSpeed-MoE", 2, "bfloat16", [*theirs, "--zero", "1"]),
        Contestant("DeepSpeed-MoE", 2, "float32", [*theirs, "--dtype", "float32"]),
        Contestant("jmoe", 1, "bfloat16", [*ours, "--batch", "8"]),
        Contestant("jmoe", 1, "float32", [*ours, "--batch", "8", "--dtype", "float32"]),
        Contestant("jmoe", 2, "bfloat16", [*ours, *split, *(["--ep", "2"] if experts else [])]),
    ]


def causal_lm(python: str, model: str) -> list[Contestant]:
    """Return transformers' training of a model and ours."""
    config = str(HERE / f"{model}.json")
    theirs = [python, str(HERE / "transformers_training.py"), "--config", config]
    ours = [
        sys.executable,
        str(OURS),
        "--hf-config",
        config,
        "--batch",
        "4",
        "--lr",
        "1e-4",
        "--warmup",
        "1",
    ]
    return [
        Contestant(system, 1, dtype, [*command, "--dtype", dtype])
        for system, command in (("transformers", theirs), ("jmoe", [*ours, "--init", "torch"]))
        for dtype in ("bfloat16", "float32")
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--deepspeed", help="Python of its environment")
    parser.add_argument("--transformers", help="Python of its environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"]
    )
    parser.add_argument(
        "--experts", type=int, nargs="+", default=[8], help="of GPT-MoE; 0: dense layers"
    )
    parser.add_argument(
        "--bucket-bytes", type=int, default=0, help="of GPT-MoE in two processes, see `CommConfig`"
    )
    a = parser.parse_args()
    if min(a.experts) < 0:
        parser.error(f"--experts {min(a.experts)}: must be at least 0")
    if a.rounds < 1 or not (a.deepspeed or a.transformers):
        parser.error("--deepspeed or --transformers: must be given, and --rounds at least 1")
    sides: dict[str, list[Contestant]] = {}
    if a.deepspeed:
        sides |= {
            f"{number} experts" if number else "dense": gpt_moe(a.deepspeed, number, a.bucket_bytes)
            for number in a.experts
        }
    if a.transformers:
        sides |= {model: causal_lm(a.transformers, model) for model in MODELS}
    sides = {
        model: [side for side in both if side.dtype in a.dtypes] for model, both in sides.items()
    }
    for number in range(a.rounds):
        for model, contestants in sides.items():
            for contestant in contestants:
                contestant.runs.append(run_for_last_object(contestant.command))
                speed = contestant.runs[-1]["tokens_per_s"]
                shown = {
                    "system": contestant.system,
                    "processes": contestant.processes,
                    "dtype": contestant.dtype,
                }
                report.progress({"round": number, "model": model} | shown | {"tokens_per_s": speed})
    result = {}
    for model, contestants in sides.items():
        peers = [side for side in contestants if side.system != "jmoe"]
        best = max(
            peers, key=lambda side: statistics.median(run["tokens_per_s"] for run in side.runs)
        )
        result[model] = [side.row(best) for side in contestants]
    report.finish({"versions": report.versions("jax", "jaxlib"), **result})


if __name__ == "__main__":
    main()
