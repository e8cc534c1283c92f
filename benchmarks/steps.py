"""Training steps of `benchmarks.communication` whose collectives differ: fused or not, one level or two, in what order.

Every comparison runs one model with several `MeshConfig`s in turn, from the same state on the same tokens; `ratio` is
the median, round by round, of the first one's seconds to this one's: how many times as fast it is. Over several steps
the losses have to stay the same.

order: an all-to-all of the backward pass is complete `all_to_all_s` after its input is known, waiting included, in the
median; times come from callbacks on rank 0, of which a step has as many more as it has all-to-alls. `ratio_all_to_all`
compares the sums over a step. `busy_share` is the part of the time of its all-to-alls in which rank 0 computed, from a
trace of one step.
"""

import argparse
import glob
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from jmoe.config import MeshConfig, ModelConfig, OptimizerConfig, RouterConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH

COMMANDS = {
    "fusion": "24 small layers, their dense parameters as one buffer and one by one",
    "levels": "flat against two levels and dedup, top-2 and top-8",
    "order": "the orders of Lina's figure: none, fixed, priority, chunks, pipelined",
}
ONE_LEVEL = {"exchange": "flat", "two_level": False}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "fusion": {"one_by_one": {"fuse_dense": False}, "fused": {}, "fused_flat": {"two_level": False}},
    "levels": {"flat": ONE_LEVEL, "two_level": {"exchange": "dedup"}},
    "order": {name: {"schedule": name} for name in ("none", "fixed", "priority", "chunks", "pipelined")},
}
# (hidden size, layers, experts, top-k, tokens of a rank, intermediate size)
SHAPES = {
    "fusion": [(64, 24, 0, 1, 64, 128)],
    "levels": [(256, 2, 8, 2, 512, 256), (256, 2, 64, 8, 256, 256)],
    "order": [(512, 4, 8, 2, 256, 512)],
}
SEQUENCE_LENGTH = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", help="of the comparison; the first is what others are compared to")
    parser.add_argument("--shapes", type=int, nargs="+", help="which of the comparison's shapes, by number")
    parser.add_argument("--chunk-bytes", type=int, help="default: what the link carries in 20 ms")
    parser.add_argument("--bucket-bytes", type=int, default=0)


def config_of(a: argparse.Namespace, shape: tuple[int, ...], num_ranks: int, mesh: dict[str, Any]) -> TrainConfig:
    hidden, layers, experts, top_k, num_tokens, intermediate = shape
    rate = a.rates[0] or 1000
    return TrainConfig(
        model=ModelConfig(
            vocab_size=256,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
            intermediate_size=intermediate,
            moe_intermediate_size=intermediate,
            num_experts=experts,
            num_experts_per_tok=top_k,
            capacity_factor=1.25,
            router=RouterConfig(aux_loss_coef=0.01),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=0, schedule="constant"),
        mesh=MeshConfig(
            1,
            num_ranks // 2,
            2,
            chunk_bytes=a.chunk_bytes or round(rate / 8 * 1e6 * 0.02),
            bucket_bytes=a.bucket_bytes,
            embedding="replicated",
            **mesh,
        ),
        batch_size=num_ranks * num_tokens // SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        compute_dtype="bfloat16",
    )


class Waits:
    """When each all-to-all of the backward pass had its input, and when it was done."""

    def __init__(self) -> None:
        self.sites = itertools.count()
        self.times: dict[tuple[int, str], list[float]] = {}

    def stamp(self, x: Any, site: int, name: str) -> None:
        import jax

        def record(_: Any) -> None:
            self.times.setdefault((site, name), []).append(time.perf_counter())

        jax.debug.callback(record, x[(slice(0, 1),) * x.ndim])

    @contextmanager
    def traced(self) -> Iterator[None]:
        """All-to-alls that are traced within are timed."""
        from jmoe.collectives import all_to_all

        def backward(move: Any, _: None, g: Any) -> tuple[Any]:
            site = next(self.sites)
            self.stamp(g, site, "ready")
            y = all_to_all._moved(g, move)
            self.stamp(y, site, "done")
            return (y,)

        moved = all_to_all._moved
        moved.defvjp(all_to_all._moved_fwd, backward)
        try:
            yield
        finally:
            moved.defvjp(all_to_all._moved_fwd, all_to_all._moved_bwd)

    def take(self) -> list[float]:
        """Seconds of every all-to-all since the last call."""
        import jax

        jax.effects_barrier()
        seconds: list[float] = []
        for (site, name), ready in self.times.items():
            if name == "ready":
                done = sorted(self.times[site, "done"])
                seconds += [end - begin for begin, end in zip(sorted(ready), done, strict=True)]
        self.times.clear()
        return seconds


def union_s(spans: list[tuple[float, float]], within: list[tuple[float, float]]) -> float:
    """Seconds of `within`, spans that do not overlap, in which one of `spans` runs."""
    total, spans = 0.0, sorted(spans)
    for begin, end in within:
        at = begin
        for a, b in spans:
            if b > at and a < end:
                total += max(0.0, min(b, end) - max(a, at))
                at = max(at, min(b, end))
    return total * 1e-9


def busy_share(folder: str) -> float:
    """Of the time in which all-to-alls ran, the part in which something else but collectives ran too."""
    import jax

    collectives = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
    whole = ("while", "conditional", "call")  # hold what is counted already
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    exchanges, compute = [], []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                if not any(name == "hlo_op" for name, _ in event.stats):
                    continue
                span = (event.start_ns, event.start_ns + event.duration_ns)
                if event.name.startswith("all-to-all"):
                    exchanges.append(span)
                elif not event.name.startswith(collectives + whole):
                    compute.append(span)
    exchanges.sort()
    total = sum(end - begin for begin, end in exchanges) * 1e-9
    return union_s(compute, exchanges) / total if total else 0.0


def measure(a: argparse.Namespace, mesh: Any, clock: Any) -> list[dict[str, Any]]:
    """One row for every shape and variant."""
    rows = []
    for number, shape in enumerate(SHAPES[a.command]):
        if a.shapes is None or number in a.shapes:
            rows += measure_shape(a, mesh, clock, shape)
    return rows


class Run:
    """One variant: its program, state and figures."""

    def __init__(self, a: argparse.Namespace, mesh: Any, shape: tuple[int, ...], variant: str) -> None:
        import jax

        from jmoe.training.step import make_program

        config = config_of(a, shape, mesh.size, VARIANTS[a.command][variant])
        self.timed, self.waits = a.command == "order", Waits()
        program = make_program(config, mesh)
        sharding = jax.sharding.NamedSharding(mesh, ACCUMULATED_BATCH)
        rng = np.random.default_rng(a.rank)
        local = rng.integers(0, 256, (1, config.batch_size // jax.process_count(), SEQUENCE_LENGTH + 1)).astype(
            np.int32
        )
        self.tokens = jax.make_array_from_process_local_data(sharding, local)
        with self.waits.traced() if self.timed else tempfile.TemporaryDirectory():
            lowered = program.step.lower(program.state_shape, self.tokens)  # type: ignore[attr-defined]
        self.step = lowered.compile()
        self.state = program.init()
        self.config = asdict(config.mesh)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self.exchange_s: list[list[float]] = []
        self.busy: float | None = None

    def __call__(self) -> Any:
        self.state, self.metrics = self.step(self.state, self.tokens)
        return self.metrics

    def round(self, clock: Any) -> None:
        self.waits.times.clear()
        seconds, sent = clock(self, ())
        self.seconds.append(seconds)
        self.sent.append(sent)
        self.losses.append(float(self.metrics["loss"]))
        assert self.metrics["ok"]
        if self.timed:
            self.exchange_s.append(self.waits.take())

    def trace(self, clock: Any) -> None:
        import jax

        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                clock(self, ())
            self.busy = busy_share(folder)


def measure_shape(a: argparse.Namespace, mesh: Any, clock: Any, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    runs = {variant: Run(a, mesh, shape, variant) for variant in a.variants or VARIANTS[a.command]}
    for run in runs.values():
        clock(run, ())
    for _ in range(a.rounds):
        for run in runs.values():
            run.round(clock)
    if a.command == "order":
        for run in runs.values():
            run.trace(clock)
    reference, rows = next(iter(runs)), []
    names = ("hidden_size", "layers", "experts", "top_k", "tokens_per_rank", "intermediate_size")
    for variant, run in runs.items():
        first = runs[reference]
        row = {"mbit_per_s": a.rates[0], **dict(zip(names, shape, strict=True)), "variant": variant}
        row |= {
            "seconds": round(statistics.median(run.seconds), 4),
            f"ratio_to_{reference}": ratio(first.seconds, run.seconds),
            "sent_bytes": round(statistics.median(run.sent)),
            "chunk_bytes": run.config["chunk_bytes"],
            "loss": [round(run.losses[0], 4), round(run.losses[-1], 4)],
            "all_seconds": [round(s, 4) for s in run.seconds],
        }
        if a.command == "order":
            sums = [[sum(seconds) for seconds in r.exchange_s] for r in (first, run)]
            row |= {
                "all_to_all_s": round(statistics.median(itertools.chain(*run.exchange_s)), 4),
                "all_to_alls_s": round(statistics.median(sums[1]), 4),
                f"ratio_all_to_all_to_{reference}": ratio(*sums),
                "busy_share": None if run.busy is None else round(run.busy, 3),
            }
        rows.append(row)
    return rows


def ratio(first: list[float], other: list[float]) -> float:
    """How many times as fast as the first, in the median of the rounds."""
    return round(statistics.median(f / o for f, o in zip(first, other, strict=True)), 3)
