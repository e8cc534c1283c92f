"""Time decoding of one sequence from a model that does not fit in memory.

    python benchmarks/serve/oversized.py --model DIR --text FILE --device-bytes 350e6 \
        --host-cache-bytes 80e6

Run it under a memory limit that counts the page cache. The tokens are those of a text and not the
model's own, so that a random model cannot repeat itself and keep to a few experts: every step is a
request for the text so far, whose prefix is in the cache but for the last token. `--prepare` packs
the experts and ends.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import resource
import statistics
import time
from pathlib import Path

from benchmarks.lib import report
from benchmarks.lib.engines import add_engine_options, make_engine, run_description
from benchmarks.lib.page_cache import disk_read_bytes, evict_from_page_cache


def main() -> None:
    parser = report.parser(__doc__)
    add_engine_options(parser, policy="experts", expert_tier="nvme")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prepare", action="store_true")
    a = parser.parse_args()
    if a.host_cache_bytes is None:
        parser.error("--host-cache-bytes is required: the memory that the model does not fit")
    evict_from_page_cache(a.model)
    sizes = {
        "max_batch": 1,
        "max_seq_len": a.prompt + a.new_tokens + 1,
        "prefill_chunk_tokens": a.prompt,
    }
    with make_engine(a, **sizes) as engine:
        if a.prepare:
            report.finish({"packed": str(a.model)})
            return
        text = engine.tokenizer.encode(a.text.read_text()[:100_000]).ids
        engine.generate([text[: a.prompt]], max_new_tokens=1)
        engine.reset_stats()
        read_bytes, seconds = disk_read_bytes(), []
        for n in range(a.prompt + 1, a.prompt + a.new_tokens + 1):
            begun = time.perf_counter()
            engine.generate([text[:n]], max_new_tokens=1)
            seconds.append(time.perf_counter() - begun)
        stats = engine.stats()
        read_bytes = disk_read_bytes() - read_bytes
    assert stats.tokens == a.new_tokens, "a step must run one token"
    result = {
        "decode_tokens_per_s": round(a.new_tokens / sum(seconds), 3),
        "median_tokens_per_s": round(1 / statistics.median(seconds), 3),
        "disk_read_bytes_per_token": round(read_bytes / a.new_tokens),
        "streamed_bytes_per_token": round(stats.bytes_per_token),
        "nvme_bytes_per_s": round(stats.nvme_bytes / stats.nvme_s) if stats.nvme_s else 0,
        "hit_rate": round(stats.hit_rate, 4),
        "waited_fraction": round(stats.waited_s / stats.step_s, 4),
        "guessed": stats.guessed,
        "guessed_right": stats.guessed_right,
        "device_expert_bytes": stats.device_expert_bytes,
        "host_expert_bytes": stats.host_expert_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": [round(s, 4) for s in seconds],
    }
    report.finish(result | run_description(a))


if __name__ == "__main__":
    main()
