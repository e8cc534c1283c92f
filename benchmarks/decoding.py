"""Prefill and decode speed of a checkpoint in every way of keeping its experts; the last line is one JSON object.

    python benchmarks/decoding.py --model DIR --batch 1 8 32 --prompt 64 --new-tokens 64 --policy ring --ring-slots 4

Prompts are random tokens, or `--text FILE` through the checkpoint's tokenizer. A decode step gives every sequence of
the batch a token; medians over the steps.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jmoe.runtime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
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
    parser.add_argument("--host-bytes-per-s", type=float, help="limit of copies from host memory to the device")
    return parser.parse_args()


def prompts(a: argparse.Namespace, engine: Any, batch: int) -> list[list[int]]:
    """`batch` prompts of `--prompt` tokens; no two share a prefix."""
    import numpy as np

    if a.text is not None:
        ids = np.array(engine.tokenizer.encode(a.text.read_text()).ids)
        return [ids[i * a.prompt : (i + 1) * a.prompt].tolist() for i in range(batch)]
    tokens = np.random.default_rng(batch).integers(3, engine.config.vocab_size, (batch, a.prompt))
    return [row.tolist() for row in tokens]


def measure(a: argparse.Namespace, engine: Any, batch: int) -> dict[str, Any]:
    """Prefill of a batch, then decode steps alone."""
    from jmoe.inference.sampling import SamplingParams

    sampling = SamplingParams(max_new_tokens=a.new_tokens + 1, ignore_eos=True)
    requests = prompts(a, engine, batch)
    engine.reset_stats()
    begun = time.perf_counter()
    ids = {engine.add_request(prompt, sampling) for prompt in requests}
    first: set[str] = set()
    while len(first) < batch:
        first |= {output.request_id for output in engine.step()}
    prefill_s = time.perf_counter() - begun
    prefill = engine.stats()
    engine.reset_stats()
    seconds = []
    while engine.has_unfinished:
        begun = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == batch:
            seconds.append(time.perf_counter() - begun)
    assert first == ids and seconds, "every request must have decoded in full batches"
    decode = engine.stats()
    return {
        "prefill_tokens_per_s": round(batch * a.prompt / prefill_s, 2),
        "decode_tokens_per_s": round(batch / statistics.median(seconds), 2),
        "bytes_per_token": round(decode.bytes_per_token),
        "nvme_bytes_per_token": round(decode.nvme_bytes / max(1, decode.tokens)),
        "hit_rate": round(decode.hit_rate, 4),
        "waited_fraction": round(decode.waited_s / decode.step_s, 4),
        "readback_fraction": round(decode.readback_s / decode.step_s, 4),
        "estimate_fraction": round(decode.estimate_s / decode.step_s, 4),
        "guessed_right_fraction": round(decode.guessed_right / max(1, decode.guessed), 4),
        "decode_policy": decode.decode.policy,
        "decode_step_s": decode.decode.step_s,
        "predicted_decode_step_s": decode.decode.predicted_step_s,
        "prefill_policy": prefill.prefill.policy,
        "prefill_step_s": prefill.prefill.step_s,
        "predicted_prefill_step_s": prefill.prefill.predicted_step_s,
        "roofline_fraction": round(decode.roofline_fraction, 4),
        "prefill_roofline_fraction": round(prefill.roofline_fraction, 4),
        "prefill_bytes": prefill.streamed_bytes,
    }


def main() -> None:
    a = arguments()
    import jax

    from jmoe.inference.engine import Engine

    begun = time.perf_counter()
    limits = {"host": a.host_bytes_per_s} if a.host_bytes_per_s else None
    with Engine.from_pretrained(
        a.model,
        max_batch=max(a.batch),
        max_seq_len=a.prompt + a.new_tokens + 1,
        policy=a.policy,
        ring_slots=a.ring_slots,
        device_bytes=a.device_bytes,
        expert_tier=a.expert_tier,
        host_cache_bytes=a.host_cache_bytes,
        cache_dir=a.cache_dir,
        estimator=None if a.estimator == "none" else a.estimator,
        dtype=a.dtype,
        prefill_chunk_tokens=a.prefill_chunk_tokens,
        bandwidth_limit_bytes_per_s=limits,
    ) as engine:
        start_s = time.perf_counter() - begun
        rows = {str(batch): measure(a, engine, batch) for batch in a.batch}
        stats = engine.stats()
    by_batch = {key: {batch: row[key] for batch, row in rows.items()} for key in next(iter(rows.values()))}
    result = by_batch | {
        "system": "jmoe",
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
    jmoe.runtime.start_anew()
    main()
