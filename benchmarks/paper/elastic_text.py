"""Time elastic training of several corpora with experts split over devices (SE-MoE, 4.1).

    python benchmarks/paper/elastic_text.py
    python benchmarks/paper/elastic_text.py --quick        a smoke test

Two processes, each a device with one core of this machine, train a small model on four corpora with
shares of 8, 4, 2 and 2 rows of a batch, the shares of MoESys' Table 3. Each device has half of the
experts, so both take part in every all-to-all. imbalanced: corpora are dealt out whole in their
order, which leaves 10 rows on one device and 6 on the other; the second device fills its buffers
with 4 rows that do not count. mixed: `--data.layout mixed`, rows of any corpus on any device.
elastic: `--data.layout elastic`. Steps are timed in turn, from a barrier to a barrier; tokens/s
count the 16 rows of the corpora.

skewed: the mixed layout without a balance loss; balanced: the same, with experts that change their
devices by load every 3 steps (`--comm.balance-every-steps 3`; the moves are not timed).
busiest_device: the tokens of the device whose experts get the most, over the mean device's, in the
mean over layers and the steps from the third on.

corpora_by_device: those whose tokens a process has read. overflowed: of the steps, those with more
rows for one expert's device than training's buffers hold, which run again with larger ones.
loss_error: the largest relative difference of a step's loss from that of the mixed layout.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from benchmarks.lib import report
from benchmarks.lib.engine_ranks import pin_to_one_core
from benchmarks.lib.ranks import Clock, add_rank_options, run_ranks
from benchmarks.lib.report import JsonObject
from jmoe.config import DataConfig, MeshConfig, TrainConfig
from jmoe.configs import PRESETS
from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.loader import TrainBatches, train_batches
from jmoe.data.shards import writing_shard

NUM_DEVICES = 2
LAYOUTS = ("imbalanced", "mixed", "elastic", "skewed", "balanced")
BALANCE_EVERY_STEPS = 3
SHARES = {"first": 8, "second": 4, "third": 2, "fourth": 2}  # rows of a batch, by corpus
VOCAB_SIZE = 4096
Trainers = dict[TrainConfig, Any]
SIZES = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 2}
QUICK = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="a small model and four rounds")
    add_rank_options(parser)
    a = parser.parse_args()
    if a.quick:
        a.rounds, a.sequence_length = 4, 32
    return a


def config_of(a: argparse.Namespace, rows: int, layout: str) -> TrainConfig:
    """Return preset tiny with other sizes, its experts split over both devices."""
    tiny = PRESETS["tiny"][1]
    assert isinstance(tiny, TrainConfig)
    model = dataclasses.replace(tiny.model, vocab_size=VOCAB_SIZE, **(QUICK if a.quick else SIZES))
    # a smoke test compiles one program for all layouts with as many rows
    if a.quick or layout in ("skewed", "balanced"):
        router = dataclasses.replace(model.router, aux_loss_coef=0.0)
        model = dataclasses.replace(model, router=router)
    every = BALANCE_EVERY_STEPS if layout == "balanced" else 0
    return dataclasses.replace(
        tiny,
        model=model,
        comm=dataclasses.replace(tiny.comm, balance_every_steps=every),
        mesh=MeshConfig(expert_intra=NUM_DEVICES),
        batch_size=rows,
        sequence_length=a.sequence_length,
        compute_dtype="float32",
        native="off",
    )


def make_corpus(folder: Path) -> Corpus:
    """Return the four corpora, each of words of its own: a quarter of the vocabulary."""
    paths = []
    for number, name in enumerate(SHARES):
        rng = np.random.default_rng(number)
        words = VOCAB_SIZE // len(SHARES)
        ids = 1 + number * (words - 1) + rng.zipf(1.3, 200_000) % (words - 1)
        path = folder / f"{name}.bin"
        with writing_shard(
            path, vocab_size=VOCAB_SIZE, eot=0, tokenizer="words", split="train"
        ) as writer:
            writer.append(ids.tolist(), text_bytes=4 * ids.size)
        paths.append(str(path))
    weights = tuple(map(float, SHARES.values()))
    data = DataConfig(path=tuple(paths), weights=weights, held_out_bytes=10_000)
    return prepare_corpus(data, VOCAB_SIZE, folder / "cache")


class Training:
    """The program of one layout, its batches, its state and the seconds of its steps."""

    def __init__(
        self, a: argparse.Namespace, mesh: Mesh, corpus: Corpus, layout: str, trainers: Trainers
    ) -> None:
        from jmoe.training.expert_order import LoadBalancer
        from jmoe.training.fused.step import FusedTrainer

        self.corpus = corpus
        rows = sum(SHARES.values())
        own = list(SHARES.values())
        self.rows_by_device = [rows // NUM_DEVICES] * NUM_DEVICES
        if layout == "imbalanced":
            self.rows_by_device = [sum(own[device::NUM_DEVICES]) for device in range(NUM_DEVICES)]
        self.config = config_of(a, max(self.rows_by_device) * NUM_DEVICES, layout)
        # layouts with the same program share it: moves of experts are no part of it
        comm = dataclasses.replace(self.config.comm, balance_every_steps=0)
        program = dataclasses.replace(self.config, comm=comm)
        if program not in trainers:
            trainers[program] = FusedTrainer(program, mesh)
        self.mesh, self.trainer = mesh, trainers[program]
        self.state = self.trainer.init()
        self.batches = self._batches(a, "elastic" if layout == "elastic" else "mixed")
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.overflowed = 0
        self.balancer = LoadBalancer(self.config)
        self.busiest: list[float] = []

    def _batches(self, a: argparse.Namespace, layout: Any) -> TrainBatches:
        return train_batches(
            self.corpus,
            batch_size=sum(SHARES.values()),
            sequence_length=a.sequence_length,
            seed=0,
            process_index=a.rank,
            process_count=NUM_DEVICES,
            config=DataConfig(path=("first", "second"), layout=layout),
            num_threads=0,
        )

    def next_batch(self) -> Any:
        """Return a placed batch; of too few rows, the first ones twice."""
        from jmoe.training.session import place_batch

        rows: Any = next(self.batches)
        padded = np.resize(rows, (max(self.rows_by_device), rows.shape[1]))
        return place_batch(self.config, self.mesh, padded)

    def time(self, clock: Clock) -> None:
        """Take a step as `train.py` does, and again with larger buffers if they overflow."""
        import jax

        from jmoe.planning.expert_order import busiest_share
        from jmoe.training.expert_order import reorder_experts

        orders = self.balancer.choose_orders(len(self.seconds), NUM_DEVICES)
        if orders is not None and orders.num_moved:
            self.state = reorder_experts(self.state, orders.orders_LE, self.trainer)
        batch, metrics = self.next_batch(), dict[str, Any]()

        def step() -> None:
            full_capacity = False
            while not metrics or metrics["overflow"]:
                self.state, values = self.trainer.step(
                    self.state, batch, full_capacity=full_capacity
                )
                metrics.update(jax.device_get(values))
                full_capacity = True
                self.overflowed += bool(metrics["overflow"])

        self.seconds.append(clock(step)[0])
        self.losses.append(float(metrics["loss"]))
        self.balancer.note_counts(metrics["counts"])
        shares = [busiest_share(np.asarray(load, float), NUM_DEVICES) for load in metrics["counts"]]
        self.busiest.append(float(np.mean(shares)))

    def take_first_step(self, clock: Clock) -> None:
        """Compile the step, before any is timed."""
        import jax

        self.state, _ = self.trainer.step(self.state, self.next_batch(), full_capacity=False)
        jax.block_until_ready(self.state)
        clock.barrier()


def note_what_is_read(seen: set[str]) -> None:
    """Add to `seen` the names of the corpora of which this process reads a window."""
    from jmoe.data import loader

    original = loader._TokenWindows.__getitem__

    def noted(self: Any, index: int) -> Any:
        seen.add(Path(self._source.name).stem)
        return original(self, index)

    loader._TokenWindows.__getitem__ = noted  # type: ignore[method-assign]


def measure(a: argparse.Namespace) -> list[JsonObject]:
    """Return a row for each layout; called by every rank."""
    import jax
    from jax.experimental import multihost_utils

    from jmoe.mesh import make_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{a.port}", NUM_DEVICES, a.rank)
    mesh = make_mesh((1, 1, NUM_DEVICES))
    clock = Clock(mesh, has_link=False)
    clock.barrier()
    seen: set[str] = set()
    note_what_is_read(seen)
    names = list(SHARES)
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder))
        trainers: Trainers = {}
        runs = {name: Training(a, mesh, corpus, name, trainers) for name in LAYOUTS}
        read: dict[str, set[str]] = {name: set() for name in runs}
        for run in runs.values():
            run.take_first_step(clock)
        for _ in range(a.rounds):
            for name, run in runs.items():
                seen.clear()
                run.time(clock)
                read[name] |= seen
    rows = []
    for name, run in runs.items():
        flags = np.array([name_ in read[name] for name_ in names], np.int32)
        by_device = np.asarray(multihost_utils.process_allgather(flags)).reshape(NUM_DEVICES, -1)
        errors = [
            abs(one / other - 1)
            for one, other in zip(run.losses, runs["mixed"].losses, strict=True)
        ]
        seconds = report.median(run.seconds)
        rows.append(
            {
                "layout": name,
                "rows_by_device": run.rows_by_device,
                "step_s": seconds,
                "tokens_per_s": round(sum(SHARES.values()) * a.sequence_length / seconds, 1),
                "speed_up": report.ratio(runs["imbalanced"].seconds, run.seconds),
                "corpora_by_device": [
                    [corpus_name for corpus_name, flag in zip(names, device, strict=True) if flag]
                    for device in by_device
                ]
                if name != "imbalanced"
                else [names[device::NUM_DEVICES] for device in range(NUM_DEVICES)],
                "overflowed": run.overflowed,
                "busiest_device": round(float(np.mean(run.busiest[BALANCE_EVERY_STEPS:])), 3),
                "loss_error": float(f"{max(errors):.2g}") if name == "elastic" else None,
                "all_step_s": [round(s, 4) for s in run.seconds],
            }
        )
    return rows


def main() -> None:
    a = parse()
    if a.rank is not None:
        pin_to_one_core(a.rank)
        report.finish(measure(a))
        return
    rows = [report.progress(row) for row in run_ranks(NUM_DEVICES, 0)]
    result = {
        "benchmark": "elastic training of several corpora (SE-MoE, section 4.1)",
        "options": report.options(a, "rank", "port") | (QUICK if a.quick else SIZES),
        "rows": rows,
    }
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
