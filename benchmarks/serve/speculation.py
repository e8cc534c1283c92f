"""Measure prompt lookup beside decoding without drafts, for each policy.

    python benchmarks/serve/speculation.py --model DIR --gb-per-s 0.5

Prompts repeat a text, as the prompt of an edit or an extract does, and the requests' `logit_bias`
allows `--words` tokens, so that greedy outputs repeat themselves even with random weights; `free`
is the same without bias. The device of the streaming policies has room for `--share` of the
experts, and the link from host memory is limited to `--gb-per-s`. Engines with and without drafts
run in turn, and must return the same tokens.
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
from typing import Any

import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import add_engine_options, make_engine, run_description
from jmoe.inference.engine import Engine
from jmoe.inference.sampling_params import SamplingParams

POLICIES = ("resident", "ring", "experts")
KINDS = ("off", "lookup")


def decode(
    engine: Engine, prompts: list[list[int]], sampling: SamplingParams
) -> tuple[list[list[int]], float]:
    """Return (the outputs, tokens decoded a second after the first token of every request)."""
    sequences = [engine.add_request(prompt, sampling) for prompt in prompts]
    while any(not sequence.output_token_ids for sequence in sequences):
        engine.step()
    before = sum(len(sequence.output_token_ids) for sequence in sequences)
    begun = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - begun
    outputs = [sequence.output_token_ids for sequence in sequences]
    return outputs, (sum(map(len, outputs)) - before) / seconds


def measure(
    engines: dict[str, Engine], prompts: list[list[int]], sampling: SamplingParams, rounds: int
) -> report.JsonObject:
    """Return the rates of both engines in turn, and what became of the drafts."""
    rates: dict[str, list[float]] = {kind: [] for kind in engines}
    outputs: dict[str, list[list[int]]] = {}
    for n in range(rounds + 1):  # the first compiles
        for kind, engine in engines.items():
            if n == 1:
                engine.reset_stats()
            outputs[kind], rate = decode(engine, prompts, sampling)
            rates[kind] += [rate] * (n > 0)
    stats = {kind: engine.stats() for kind, engine in engines.items()}
    with_drafts = stats["lookup"]
    return {
        "tokens_per_s": {kind: round(statistics.median(r), 1) for kind, r in rates.items()},
        "lookup_against_off": report.ratio(rates["lookup"], rates["off"]),
        "same_tokens": outputs["off"] == outputs["lookup"],
        "accepted_share": round(with_drafts.accepted_share, 2),
        "drafted": with_drafts.drafted,
        "steps": {kind: s.steps for kind, s in stats.items()},
        "ms_a_decode_step": {kind: round(1e3 * s.decode.step_s, 2) for kind, s in stats.items()},
    }


def main() -> None:
    parser = report.parser(__doc__)
    add_engine_options(parser, expert_tier="host")
    parser.add_argument("--share", type=float, default=0.5, help="of all experts, on the device")
    parser.add_argument("--gb-per-s", type=float, default=0.5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=3, help="tokens that an output consists of")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    sizes = {"max_batch": max(a.batch), "max_seq_len": a.prompt + a.new_tokens}
    rng = np.random.default_rng(0)
    with make_engine(a, policy="resident", expert_tier="auto", **sizes) as resident:
        expert_bytes, vocab_size = resident.stats().device_expert_bytes, resident.config.vocab_size
    rows: list[report.JsonObject] = []
    for policy in POLICIES:
        of_policy: dict[str, Any] = {"policy": policy, **sizes}
        if policy == "resident":
            of_policy["expert_tier"] = "auto"
        else:
            of_policy["device_bytes"] = int(a.share * expert_bytes)
        limits = None if policy == "resident" else {"host": a.gb_per_s * 1e9}
        with contextlib.ExitStack() as stack:
            engines = {
                kind: stack.enter_context(make_engine(a, limits, **of_policy, speculation=kind))
                for kind in KINDS
            }
            for batch in a.batch:
                for text in ("repetitive", "free"):
                    words = rng.integers(3, vocab_size, (batch, 16)).tolist()
                    prompts = [(own * -(-a.prompt // 16))[: a.prompt] for own in words]
                    bias = {int(word): 100.0 for word in words[0][: a.words]}
                    sampling = SamplingParams(
                        max_new_tokens=a.new_tokens,
                        ignore_eos=True,
                        logit_bias=bias if text == "repetitive" else {},
                    )
                    row = measure(engines, prompts, sampling, a.rounds)
                    case = {"policy": policy, "batch": batch, "text": text}
                    rows.append(report.progress(case | row))
    report.finish({"rows": rows} | run_description(a))


if __name__ == "__main__":
    main()
