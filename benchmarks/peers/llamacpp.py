"""Compare decoding and prefill with llama.cpp on the same weights, in alternation.

    python benchmarks/peers/llamacpp.py --node FOLDER \
        --pairs MODEL:wide:MODEL-bf16.gguf MODEL:int4:MODEL-q4_0.gguf

--node: the folder in which `llamacpp.mjs` was set up. A pair: a Hugging Face folder, the format of
its experts here (wide: bfloat16) and the same weights for llama.cpp, which runs once with each
number of `--threads`: the faster one counts, figure by figure. A round runs both sides of every
pair, in processes of their own; medians, and of a round's ratios. bits: a weight's on either side,
by the bytes of all weights. --context N: one sequence after a prompt of N tokens, and that prompt's
prefill, in place of short prompts. --expert-activations int8: ours multiplies inputs in 8 bits too,
as llama.cpp does.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import sys
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.lib import report
from benchmarks.lib.peers import (
    compare_rounds,
    decoding_speeds,
    fastest_figures,
    run_for_last_object,
)
from benchmarks.lib.report import JsonObject
from jmoe.models.lazy_checkpoint import LazyCheckpoint

HERE = Path(__file__).resolve().parent
OURS = BENCHMARKS / "serve" / "decoding.py"
COMMON = "--policy resident --dtype bfloat16 --new-tokens 33"
SHORT = f"{COMMON} --batch 1 8 --long-prompt 512 --rounds 2"
Speeds = dict[str, float]


def bits(model: str, kind: str, gguf: str) -> dict[str, float]:
    """Return the bits a weight on either side, averaged over all weights."""
    with (
        LazyCheckpoint(model, "bfloat16", "wide") as wide,
        LazyCheckpoint(model, "bfloat16", kind) as kept,
    ):
        experts = wide.config.num_moe_layers * wide.config.num_experts
        weights = (experts * wide.expert_bytes + wide.dense_bytes_per_device()) / 2
        here = 8 * (experts * kept.expert_bytes + kept.dense_bytes_per_device()) / weights
    return {"here": round(here, 2), "there": round(8 * Path(gguf).stat().st_size / weights, 2)}


def speeds_here(model: str, experts: str, activations: str, context: int | None) -> Speeds:
    """Return jmoe's tokens a second, from a process of its own."""
    sizes = SHORT if context is None else f"{COMMON} --batch 1 --prompt {context} --rounds 1"
    options = f"--expert-dtype {experts} --expert-activations {activations}"
    command = f"{OURS} --model {model} {options} {sizes}"
    side = run_for_last_object([sys.executable, *command.split()])
    if context is None:
        return decoding_speeds(side)
    return {"one": side["decode_tokens_per_s"]["1"], "prefill": side["prefill_tokens_per_s"]["1"]}


def speeds_there(node: Path, gguf: str, threads: int, context: int | None) -> Speeds:
    """Return llama.cpp's tokens a second with this number of threads."""
    sizes = ["2"] if context is None else ["1", str(context)]
    script = str(HERE / "llamacpp.mjs")
    side = run_for_last_object(
        ["node", script, str(Path(gguf).resolve()), str(threads), *sizes], node
    )
    if context is None:
        return decoding_speeds(side)
    return {"one": side["decode_tokens_per_s"], "prefill": side["prefill_tokens_per_s"]}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--node", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, help="tokens of the prompt")
    parser.add_argument("--expert-activations", choices=("exact", "int8"), default="exact")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of llama.cpp")
    a = parser.parse_args()
    rows = [
        dict(zip(("model", "experts", "gguf"), pair.split(":"), strict=True)) for pair in a.pairs
    ]
    rounds: list[list[tuple[Speeds, Speeds]]] = [[] for _ in rows]
    for _ in range(a.rounds):
        for row, both in zip(rows, rounds, strict=True):
            here = speeds_here(row["model"], row["experts"], a.expert_activations, a.context)
            there = [speeds_there(a.node, row["gguf"], t, a.context) for t in a.threads]
            both.append((here, fastest_figures(there)))
            report.progress(
                {"gguf": row["gguf"], "here": here}
                | dict(zip(map(str, a.threads), there, strict=True))
            )
    results = []
    for row, both in zip(rows, rounds, strict=True):
        result: JsonObject = {"model": Path(row["model"]).name, "experts": row["experts"]}
        result["llama_cpp"] = Path(row["gguf"]).stem.rpartition("-")[2]
        result["bits"] = bits(row["model"], row["experts"], row["gguf"])
        results.append(result | compare_rounds(both, "llama.cpp"))
    report.finish({"versions": report.versions("jax"), "rows": results})


if __name__ == "__main__":
    main()
