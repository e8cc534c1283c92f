"""Training steps of `comm/slow_link` that differ in their collectives: fusion, levels, order,
strategies.

Every comparison runs one model with several `CommConfig`s in turn, from the same state on the same
tokens; `ratio` is the median, round by round, of the first one's seconds to this one's: how many
times as fast it is. Over several steps the losses have to stay the same.

fusion: crosswise, dense parameters as one buffer or one by one, and one level (`_flat`) or two; the
order is the same, `none`. `fused_chunks` is `fused` in the default order. Two levels are those of
buffers and of the tokens' exchange: matrices one by one cross in one level whatever `hierarchical`
says, so without experts `one_by_one` is left out. In float32, because XLA:CPU gathers bfloat16 as
float32 where no buffer holds it as integers.

strategies: each of MoESys' means alone (Table 5), over collectives that do not know nodes, dense
parameters and the embedding on every rank. device_bytes: arguments and temporary arrays of the
compiled step.

parts_s: of a step, traced on rank 0, by what runs; where several things do, an all-to-all counts
before the optimizer, that before the backward and the forward pass, and these before other
collectives. forward_layer_s, backward_layer_s: of the layers' pass from its first operation to its
last, over the number of layers.

order, ddp: one rank a node. `all_to_all_s`: in the mean, an exchange of the backward pass is
done so long after its input could be known (`comm/trace.py`), waiting included; `all_to_alls_s`:
all of a step, which `ratio_all_to_alls` compares. `busy_share`: the part of the time of all-to-alls
in which rank 0 computed. `queue_resting_s`, `queue_inverted_s`: what a queue that starts
collectives at run time could save at most (`trace.queue_gain`). `slowdown`: quantiles of an
exchange's seconds over the median of the same exchange in the order `fixed`, which has all-reduces
after the last of them. `link_s`: what the link alone takes for the bytes of a step; a row with
--rates 0 and the same --chunk-bytes says what the rest takes.
"""

import argparse
import hashlib
import pickle
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from benchmarks.comm import trace
from benchmarks.lib.ranks import Clock, Rounds
from benchmarks.lib.report import JsonObject, median, ratio
from jmoe.config import (
    CommConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)
from jmoe.mesh import ACCUMULATED_BATCH

COMMANDS = {
    "fusion": "dense parameters as one buffer and one by one, one level and two: 24 small layers, "
    "4 with experts",
    "levels": "flat against two levels and dedup, top-2 and top-8",
    "order": "the orders of Lina's figure: none, ready, fixed, priority, chunks, pipelined",
    "ddp": "the same with dense parameters on every rank, their gradients all-reduced, as in Lina",
    "strategies": "collectives in two levels and the partitioned embedding, each alone (MoESys)",
}
ORDERINGS = ("order", "ddp")  # of one rank a node; their all-to-alls are looked at one by one
ONE_LEVEL = {"exchange": "flat", "hierarchical": False}
TWO_LEVELS = {"exchange": "hierarchical", "hierarchical": True}
ONE_BY_ONE = {"schedule": "none", "fuse_dense": False}
FUSED = {"schedule": "none"}
BASELINE = ONE_LEVEL | {"shard_dense": False}
QUANTILES = (0.1, 0.5, 0.9, 1.0)
ORDERS = ("ready", "none", "fixed", "priority", "chunks", "pipelined")
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "fusion": {
        "one_by_one_flat": ONE_BY_ONE | ONE_LEVEL,
        "one_by_one": ONE_BY_ONE | TWO_LEVELS,
        "fused_flat": FUSED | ONE_LEVEL,
        "fused": FUSED | TWO_LEVELS,
        "fused_chunks": TWO_LEVELS,
    },
    "levels": {"flat": ONE_LEVEL, "hierarchical": {"exchange": "dedup"}},
    "order": {name: {"schedule": name} for name in ORDERS},
    "ddp": {name: {"schedule": name, "shard_dense": False} for name in ORDERS},
    "strategies": {
        "baseline": BASELINE,
        "resource_aware": BASELINE | {"exchange": "dedup", "hierarchical": True},
        "embedding_partition": BASELINE | {"embedding": "columns"},
        "embedding_rows": BASELINE | {"embedding": "rows"},
    },
}
# (hidden size, layers, experts, top-k, tokens of a rank, intermediate size)
ORDERED = (512, 4, 2, 1, 768, 8192)  # computing takes as long as the link at 200 Mbit/s
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "fusion": {"dense": (64, 24, 0, 1, 64, 128), "experts": (128, 4, 8, 1, 256, 256)},
    "levels": {"top-2": (256, 2, 8, 2, 512, 256), "top-8": (256, 2, 64, 8, 256, 256)},
    "order": {"top-1": ORDERED},
    "ddp": {"top-1": ORDERED},
    # the table half as large as the other dense parameters, as in MoESys' Table 5
    "strategies": {"top-2": (256, 4, 8, 2, 512, 1024)},
}
VOCAB_SIZE = 256
VOCAB_SIZES = {"strategies": 2048}
SEQUENCE_LENGTH = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variants", nargs="+", help="of the comparison; the first is what others are compared to"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        help="of the comparison: dense, experts of fusion, top-2, top-8 of levels",
    )
    parser.add_argument("--chunk-bytes", type=int, help="default: what the link carries in 20 ms")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="see `CommConfig.bucket_bytes`")
    parser.add_argument(
        "--native", choices=("auto", "on", "off"), default="auto", help="see `TrainConfig.native`"
    )


def config_of(
    a: argparse.Namespace,
    shape: tuple[int, ...],
    num_ranks: int,
    comm: dict[str, Any],
    dtype: str = "bfloat16",
    vocab_size: int = VOCAB_SIZE,
) -> TrainConfig:
    hidden, layers, experts, top_k, num_tokens, intermediate = shape
    rate = a.rates[0] or 1000
    chunked = comm.get("schedule", CommConfig.schedule) in ("chunks", "pipelined")
    return TrainConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
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
        mesh=MeshConfig(1, a.nodes, a.ranks_per_node),
        comm=CommConfig(
            chunk_bytes=(a.chunk_bytes or round(rate / 8 * 1e6 * 0.02)) if chunked else 0,
            bucket_bytes=a.bucket_bytes,
            **({"embedding": "replicated"} | comm),
        ),
        batch_size=num_ranks * num_tokens // SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        compute_dtype=dtype,
        native=a.native,
    )


def measure(a: argparse.Namespace, mesh: Mesh, clock: Clock) -> list[JsonObject]:
    """Return a row for every shape and variant."""
    rows = []
    for name in a.shapes or SHAPES[a.command]:
        rows += measure_shape(a, mesh, clock, SHAPES[a.command][name])
    return rows


def compiled(lowered: Lowered, folder: Path, rank: int) -> Compiled:
    """Return the step, compiled by rank 0 for all: compilations would slow each other."""
    import jax
    from jax.experimental import serialize_executable

    path = folder / hashlib.sha256((jax.__version__ + lowered.as_text()).encode()).hexdigest()
    if rank == 0 and not path.exists():
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(serialize_executable.serialize(lowered.compile())))
        part.rename(path)
    while not path.exists():
        time.sleep(0.1)
    return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))


class Run:
    """One variant of the step, with its program, state and figures."""

    def __init__(
        self, a: argparse.Namespace, mesh: Mesh, shape: tuple[int, ...], variant: str
    ) -> None:
        import jax

        from jmoe.training.fused.step_estimate import step_memory
        from jmoe.training.trainer import make_trainer

        dtype = "float32" if a.command == "fusion" else "bfloat16"
        comm, vocab_size = VARIANTS[a.command][variant], VOCAB_SIZES.get(a.command, VOCAB_SIZE)
        config = config_of(a, shape, mesh.size, comm, dtype, vocab_size)
        program = make_trainer(config, mesh)
        sharding = jax.sharding.NamedSharding(mesh, ACCUMULATED_BATCH)
        rng = np.random.default_rng(a.rank)
        local = rng.integers(
            0, 256, (1, config.batch_size // jax.process_count(), SEQUENCE_LENGTH + 1)
        ).astype(np.int32)
        self.tokens = jax.make_array_from_process_local_data(sharding, local)
        lowered = program.step.lower(program.state_shape, self.tokens)  # type: ignore[attr-defined]
        self.step = compiled(lowered, Path(a.cache_dir), a.rank)
        self.state = program.init()
        self.chunk_bytes = config.comm.chunk_bytes
        self.device_bytes = step_memory(self.step).num_bytes
        self.losses: list[float] = []
        self.taken = Rounds()
        self.ops = trace.operations(self.step.as_text())
        self.exchanges: list[list[trace.Exchange]] = []
        self.busy: list[float] = []
        self.gains: list[trace.QueueGain] = []
        self.parts: list[dict[str, float]] = []
        self.layers: list[dict[str, float]] = []

    @property
    def waits(self) -> list[float]:
        """Return the seconds that experts waited for all-to-alls in each round's backward pass."""
        return [sum(exchange.seconds for exchange in step) for step in self.exchanges]

    def __call__(self) -> object:
        self.state, self.metrics = self.step(self.state, self.tokens)
        return self.metrics

    def round(self, clock: Clock, ordering: bool) -> None:
        """Take one step, traced on rank 0."""
        import jax

        traced = jax.process_index() == 0
        with trace.recording(self.ops, "jit_step") if traced else nullcontext([]) as found:
            self.taken.add(*clock(self))
        if traced:
            self.parts.append(trace.parts_s(found, self.ops))
            self.layers.append(trace.layers_s(found, self.ops))
            if ordering:
                self.exchanges.append(trace.exchanges(found, self.ops))
                self.busy.append(trace.busy_share(found, self.ops))
                self.gains.append(trace.queue_gain(found, self.ops))
        self.losses.append(float(self.metrics["loss"]))
        assert self.metrics["ok"]


def measure_shape(
    a: argparse.Namespace, mesh: Mesh, clock: Clock, shape: tuple[int, ...]
) -> list[JsonObject]:
    """Return a row for every variant of a shape."""
    variants = a.variants or [
        name for name in VARIANTS[a.command] if shape[2] or name != "one_by_one"
    ]
    runs = {variant: Run(a, mesh, shape, variant) for variant in variants}
    for run in runs.values():
        clock(run)
    for _ in range(a.rounds):
        for run in runs.values():
            run.round(clock, ordering=a.command in ORDERINGS)
    if a.command == "fusion":
        losses = [run.losses for run in runs.values()]
        assert np.allclose(losses, losses[0], rtol=1e-3, atol=0), losses
    return [row_of(a, shape, runs, variant) for variant in runs]


def row_of(
    a: argparse.Namespace, shape: tuple[int, ...], runs: dict[str, Run], variant: str
) -> JsonObject:
    """Return a variant's figures, with ratios to the first variant and to `none`."""
    references = dict.fromkeys((next(iter(runs)), *({"none"} & runs.keys())))
    names = ("hidden_size", "layers", "experts", "top_k", "tokens_per_rank", "intermediate_size")
    run, link_s = runs[variant], 0.0
    taken = run.taken
    if a.rates[0]:
        link_s = round(a.nodes * median(taken.sent_bytes) * 8e-6 / a.rates[0], 4)
    row: JsonObject = {
        "mbit_per_s": a.rates[0],
        **dict(zip(names, shape, strict=True)),
        "variant": variant,
        "seconds": median(taken.seconds),
        **{
            f"ratio_to_{name}": ratio(runs[name].taken.seconds, taken.seconds)
            for name in references
        },
        "sent_bytes": round(median(taken.sent_bytes)),
        "link_s": link_s,
        "chunk_bytes": run.chunk_bytes,
        "device_bytes": run.device_bytes,
        "loss": [round(run.losses[0], 4), round(run.losses[-1], 4)],
        "all_seconds": [round(s, 4) for s in taken.seconds],
    }
    if run.parts:
        row["parts_s"] = {name: median(step[name] for step in run.parts) for name in run.parts[0]}
        for way in run.layers[0]:
            row[f"{way}_layer_s"] = median(step[way] / row["layers"] for step in run.layers)
    if run.exchanges:
        row |= exchange_figures(run, {name: runs[name] for name in references})
        if "fixed" in runs:
            row["slowdown"] = slowdown(run, runs["fixed"])
    return row


def slowdown(run: Run, alone: Run) -> dict[str, float]:
    """Return quantiles of the seconds of each exchange over the median of the same exchange of a
    run whose exchanges share the link with nothing.
    """
    seconds, references = (
        np.array([[exchange.seconds for exchange in step] for step in each.exchanges])
        for each in (run, alone)
    )
    ratios = seconds / np.median(references, axis=0)
    return {f"{share:g}": round(float(np.quantile(ratios, share)), 2) for share in QUANTILES}


def exchange_figures(run: Run, references: dict[str, Run]) -> JsonObject:
    """Return how long experts waited for all-to-alls, beside the references."""
    seconds = [exchange.seconds for step in run.exchanges for exchange in step]
    return {
        "all_to_all_s": round(sum(seconds) / len(seconds), 4),
        "all_to_alls_s": median(run.waits),
        **{
            f"ratio_all_to_alls_to_{name}": ratio(other.waits, run.waits)
            for name, other in references.items()
        },
        "busy_share": median(run.busy, 3),
        "queue_resting_s": median(gain.resting_s for gain in run.gains),
        "queue_inverted_s": median(gain.inverted_s for gain in run.gains),
    }
