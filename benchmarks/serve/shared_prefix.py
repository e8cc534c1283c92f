"""Measure chats that begin with the same system prompt, beside chats of which each has its own.

    python benchmarks/serve/shared_prefix.py --model DIR --chats 10 50

All chats of a round arrive at once; those beyond `--rows` wait for their turn. Every round has new
prompts, so that nothing of an earlier round is reused. Both kinds of chats run in turn.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.engines import add_engine_options, make_engine, run_description
from jmoe.inference.engine import Engine
from jmoe.inference.sampling_params import SamplingParams

Draw = Callable[[int], list[int]]
KINDS = ("one prefix", "own prefixes")


class Round(NamedTuple):
    """What a round of chats took.

    first_s: seconds from the arrival to the first token, of each chat. end_s: of all together.
    computed: prompt tokens that ran. blocks: of the cache, the most at any time.
    """

    first_s: list[float]
    end_s: float
    computed: int
    blocks: int


def run_chats(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Round:
    """Run one request for each prompt, all from the start."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    before, blocks = engine.scheduler_stats(), 0
    begun = time.perf_counter()
    first_s: dict[object, float] = {}
    for prompt in prompts:
        engine.add_request(prompt, sampling)
    while engine.has_unfinished:
        outputs = engine.step()
        now_s = time.perf_counter() - begun
        for output in outputs:
            first_s.setdefault(output.sequence, now_s)
        blocks = max(blocks, engine.scheduler_stats().blocks_used)
    end_s, after = time.perf_counter() - begun, engine.scheduler_stats()
    found = after.reused_tokens - before.reused_tokens
    return Round(list(first_s.values()), end_s, sum(map(len, prompts)) - found, blocks)


def make_prompts(draw: Draw, kind: str, count: int, lengths: tuple[int, int]) -> list[list[int]]:
    """Return the prompts of a round.

    draw: returns a number of random tokens. lengths: tokens of a prefix, and of what follows it.
    """
    prefix, rest = lengths
    shared = draw(prefix)
    return [(shared if kind == KINDS[0] else draw(prefix)) + draw(rest) for _ in range(count)]


def summary(rounds: list[Round], block_bytes: int) -> report.JsonObject:
    """Return the medians over rounds."""
    firsts = [statistics.median(one.first_s) for one in rounds]
    return {
        "first_token_s": round(statistics.median(firsts), 3),
        "last_first_token_s": round(statistics.median(max(one.first_s) for one in rounds), 3),
        "end_s": round(statistics.median(one.end_s for one in rounds), 3),
        "prompt_tokens_computed": rounds[0].computed,
        "cache_mb": round(max(one.blocks for one in rounds) * block_bytes / 1e6, 2),
    }


def main() -> None:
    parser = report.parser(__doc__)
    add_engine_options(parser)
    parser.add_argument("--chats", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--rows", type=int, default=16, help="chats that run at once")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--rest", type=int, default=32, help="tokens of each chat's own")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    length, rng = a.prefix + a.rest + a.new_tokens, np.random.default_rng(0)
    rows: list[report.JsonObject] = []
    with make_engine(a, max_batch=a.rows, max_seq_len=length) as engine:
        draw = lambda n: rng.integers(3, engine.config.vocab_size, n).tolist()  # noqa: E731
        caches = jax.tree.leaves(engine._runner.caches)
        block_bytes = sum(x.nbytes for x in caches) // engine.scheduler_stats().blocks
        for count in a.chats:
            measured: dict[str, list[Round]] = {kind: [] for kind in KINDS}
            for n in range(a.rounds + 1):
                for kind, rounds in measured.items():
                    prompts = make_prompts(draw, kind, count, (a.prefix, a.rest))
                    one = run_chats(engine, prompts, a.new_tokens)
                    if n:  # the first compiles
                        rounds.append(one)
            for kind, rounds in measured.items():
                rows.append(
                    report.progress({"chats": count, "kind": kind} | summary(rounds, block_bytes))
                )
    report.finish({"rows": rows} | run_description(a))


if __name__ == "__main__":
    main()
