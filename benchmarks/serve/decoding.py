"""Time prefill and decoding of a checkpoint, experts resident or in any lower tier.

    python benchmarks/serve/decoding.py --model DIR --batch 1 8 32 --policy ring --ring-slots 4

Prompts are random tokens, or `--text FILE` through the checkpoint's tokenizer. Every batch runs
once unmeasured, then `--rounds` times with new prompts; a decode step gives every sequence a token.
Medians over the rounds, and of a round's decode over its steps. `--long-prompt N` also times the
prefill of one prompt of N tokens. `--profile FOLDER` lists a GPU's kernels in a decode step of
every batch.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import resource
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import (
    add_engine_options,
    make_engine,
    measure_prefill_s,
    run_description,
)
from benchmarks.lib.gpu_trace import kernel_times
from benchmarks.lib.report import JsonObject
from jmoe.inference.engine import Engine
from jmoe.inference.sampling_params import SamplingParams

TRACED_STEPS = 20


def arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    add_engine_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--long-prompt", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", type=Path)
    parser.add_argument(
        "--profile",
        type=Path,
        help="write a trace of 20 decode steps of every batch to this folder",
    )
    parser.add_argument(
        "--host-bytes-per-s", type=float, help="limit of copies from host memory to the device"
    )
    return parser.parse_args()


def prompts(a: argparse.Namespace, engine: Engine, batch: int, number: int) -> list[list[int]]:
    """Return `batch` prompts of `--prompt` tokens for round `number`; no two share a prefix."""
    if a.text is not None:
        ids = np.array(engine.tokenizer.encode(a.text.read_text()).ids)
        starts = (number * batch + np.arange(batch)) * a.prompt % (ids.size - a.prompt)
        return [ids[start : start + a.prompt].tolist() for start in starts]
    tokens = np.random.default_rng((batch, number)).integers(
        3, engine.config.vocab_size, (batch, a.prompt)
    )
    return [row.tolist() for row in tokens]


def long_prefill(a: argparse.Namespace, engine: Engine) -> float:
    """Return the tokens per second of the prefill of one long prompt."""
    draw = np.random.default_rng(0).integers
    prompts = [
        draw(3, engine.config.vocab_size, a.long_prompt).tolist() for _ in range(a.rounds + 1)
    ]
    return a.long_prompt / statistics.median(
        [measure_prefill_s(engine, [prompt]) for prompt in prompts][1:]
    )


def measure(a: argparse.Namespace, engine: Engine, batch: int, number: int) -> dict[str, float]:
    """Return the figures of a batch: its prefill, then decode steps alone."""
    requests = prompts(a, engine, batch, number)
    engine.reset_stats()
    prefilled_s = measure_prefill_s(engine, requests, a.new_tokens + 1)
    prefill = engine.stats()
    engine.reset_stats()
    seconds = []
    while engine.has_unfinished:
        begun = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            seconds.append(time.perf_counter() - begun)
    assert seconds, "every request must have decoded in full batches"
    decode = engine.stats()
    return {
        "prefill_tokens_per_s": batch * a.prompt / prefilled_s,
        "decode_tokens_per_s": batch / statistics.median(seconds),
        "bytes_per_token": decode.bytes_per_token,
        "copied_bytes_per_s": decode.streamed_bytes / decode.step_s,
        "nvme_bytes_per_token": decode.nvme_bytes / max(1, decode.tokens),
        "hit_rate": decode.hit_rate,
        "waited_fraction": decode.waited_s / decode.step_s,
        "readback_fraction": decode.readback_s / decode.step_s,
        "estimate_fraction": decode.estimate_s / decode.step_s,
        "guessed_right_fraction": decode.guessed_right / max(1, decode.guessed),
        "decode_step_s": decode.decode.step_s,
        "predicted_decode_step_s": decode.decode.predicted_step_s,
        "prefill_step_s": prefill.prefill.step_s,
        "predicted_prefill_step_s": prefill.prefill.predicted_step_s,
        "roofline_fraction": decode.roofline_fraction,
        "prefill_roofline_fraction": prefill.roofline_fraction,
        "prefill_streamed_bytes": prefill.streamed_bytes,
    }


def profiled(a: argparse.Namespace, engine: Engine, batch: int) -> JsonObject | None:
    """Return the GPU kernels of `TRACED_STEPS` decode steps; None on a CPU."""
    sampling = SamplingParams(max_new_tokens=2 * TRACED_STEPS, ignore_eos=True)
    waiting = {
        engine.add_request(prompt, sampling) for prompt in prompts(a, engine, batch, a.rounds + 1)
    }
    while waiting:
        waiting -= {output.sequence for output in engine.step()}
    folder = a.profile / str(batch)
    with jax.profiler.trace(str(folder)):
        for _ in range(TRACED_STEPS):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    return kernel_times(folder, TRACED_STEPS)


def medians(a: argparse.Namespace, engine: Engine, batch: int) -> dict[str, float]:
    rounds = [measure(a, engine, batch, number) for number in range(a.rounds + 1)][1:]
    known = [key for key, value in rounds[0].items() if value is not None]
    return {key: report.median(r[key] for r in rounds) for key in known}


def main() -> None:
    a = arguments()
    begun = time.perf_counter()
    limits = {"host": a.host_bytes_per_s} if a.host_bytes_per_s else None
    longest = max(a.prompt + a.new_tokens, a.long_prompt or 0) + 1
    with make_engine(a, limits, max_batch=max(a.batch), max_seq_len=longest) as engine:
        start_s = time.perf_counter() - begun
        rows = {str(batch): medians(a, engine, batch) for batch in a.batch}
        stats = engine.stats()
        long_tokens_per_s = None if a.long_prompt is None else round(long_prefill(a, engine), 2)
        profile = (
            None
            if a.profile is None
            else {str(batch): profiled(a, engine, batch) for batch in a.batch}
        )
    by_batch = {
        key: {batch: row[key] for batch, row in rows.items()} for key in next(iter(rows.values()))
    }
    result = {
        "system": "jmoe",
        "long_prefill_tokens_per_s": long_tokens_per_s,
        "policy": stats.policy,
        "profile": profile,
        "start_s": round(start_s, 2),
        "device_expert_bytes": stats.device_expert_bytes,
        "host_expert_bytes": stats.host_expert_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    report.finish(by_batch | result | run_description(a))


if __name__ == "__main__":
    main()
