"""Prefill and decode speed of a checkpoint in every way of keeping its experts; the last line is one JSON object.

    python benchmarks/decoding.py --model DIR --batch 1 8 32 --prompt 64 --new-tokens 64 --policy ring --ring-slots 4

Prompts are random tokens, or `--text FILE` through the checkpoint's tokenizer. Every batch runs once unmeasured, then
`--rounds` times with new prompts; a decode step gives every sequence a token. Medians over the rounds, and of a
round's decode over its steps. `--long-prompt N` also times the prefill of one prompt of N tokens.
"""

if __name__ == "__main__":
    import script

    script.reexec_with_env()

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--long-prompt", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--policy", choices=("auto", "resident", "ring", "experts"), default="auto")
    parser.add_argument("--ring-slots", type=int)
    parser.add_argument("--device-bytes", type=int)
    parser.add_argument("--expert-tier", choices=("auto", "host", "nvme"), default="auto")
    parser.add_argument("--host-cache-bytes", type=int)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--estimator", choices=("router", "counts", "none"), default="router")
    parser.add_argument("--prefill-chunk-tokens", type=int, default=512)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument("--host-bytes-per-s", type=float, help="limit of copies from host memory to the device")
    return parser.parse_args()


def prompts(a: argparse.Namespace, engine: Any, batch: int, number: int) -> list[list[int]]:
    """`batch` prompts of `--prompt` tokens for round `number`; no two share a prefix."""
    import numpy as np

    if a.text is not None:
        ids = np.array(engine.tokenizer.encode(a.text.read_text()).ids)
        starts = (number * batch + np.arange(batch)) * a.prompt % (ids.size - a.prompt)
        return [ids[start : start + a.prompt].tolist() for start in starts]
    tokens = np.random.default_rng((batch, number)).integers(3, engine.config.vocab_size, (batch, a.prompt))
    return [row.tolist() for row in tokens]


def prefill_seconds(engine: Any, requests: list[list[int]], max_new_tokens: int) -> float:
    """Until each of the prompts has its first token."""
    from jmoe.inference.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    begun = time.perf_counter()
    waiting = {engine.add_request(prompt, sampling) for prompt in requests}
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    return time.perf_counter() - begun


def long_prefill(a: argparse.Namespace, engine: Any) -> float:
    """Tokens per second of the prefill of one long prompt."""
    import numpy as np

    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(3, engine.config.vocab_size, a.long_prompt).tolist()  # noqa: E731
    return a.long_prompt / statistics.median([prefill_seconds(engine, [draw()], 1) for _ in range(a.rounds + 1)][1:])


def measure(a: argparse.Namespace, engine: Any, batch: int, number: int) -> dict[str, float]:
    """Prefill of a batch, then decode steps alone."""
    requests = prompts(a, engine, batch, number)
    engine.reset_stats()
    prefill_s = prefill_seconds(engine, requests, a.new_tokens + 1)
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
        "prefill_tokens_per_s": batch * a.prompt / prefill_s,
        "decode_tokens_per_s": batch / statistics.median(seconds),
        "bytes_per_token": decode.bytes_per_token,
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


def medians(a: argparse.Namespace, engine: Any, batch: int) -> dict[str, float]:
    rounds = [measure(a, engine, batch, number) for number in range(a.rounds + 1)][1:]
    known = [key for key, value in rounds[0].items() if value is not None]
    return {key: round(statistics.median(r[key] for r in rounds), 4) for key in known}


def main() -> None:
    a = arguments()
    import jax

    from jmoe.config.engine import EngineConfig
    from jmoe.inference.engine import Engine

    begun = time.perf_counter()
    limits = {"host": a.host_bytes_per_s} if a.host_bytes_per_s else None
    config = EngineConfig(
        max_batch=max(a.batch),
        max_seq_len=max(a.prompt + a.new_tokens + 1, (a.long_prompt or 0) + 1),
        policy=a.policy,
        ring_slots=a.ring_slots,
        device_bytes=a.device_bytes,
        expert_tier=a.expert_tier,
        host_cache_bytes=a.host_cache_bytes,
        cache_dir=None if a.cache_dir is None else str(a.cache_dir),
        estimator=None if a.estimator == "none" else a.estimator,
        dtype=a.dtype,
        prefill_chunk_tokens=a.prefill_chunk_tokens,
        max_prefill_tokens=a.max_prefill_tokens,
    )
    with Engine(a.model, config, bandwidth_limit_bytes_per_s=limits) as engine:
        start_s = time.perf_counter() - begun
        rows = {str(batch): medians(a, engine, batch) for batch in a.batch}
        stats = engine.stats()
        long_tokens_per_s = None if a.long_prompt is None else round(long_prefill(a, engine), 2)
    by_batch = {key: {batch: row[key] for batch, row in rows.items()} for key in next(iter(rows.values()))}
    result = by_batch | {
        "system": "jmoe",
        "long_prefill_tokens_per_s": long_tokens_per_s,
        "policy": stats.policy,
        "start_s": round(start_s, 2),
        "device_expert_bytes": stats.device_expert_bytes,
        "host_expert_bytes": stats.host_expert_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "args": {key: str(v) if isinstance(v, Path) else v for key, v in vars(a).items()},
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
