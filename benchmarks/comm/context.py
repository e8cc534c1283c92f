"""Training steps of `comm/slow_link context`, whose sequences lie on one node or on both.

The same tokens in steps of two nodes: `alone`, a sequence on each, or `shared`, every sequence on
both (`mesh.context`). Everything else is sent by both, so that `extra_bytes`, the difference of the
bytes that a node sends, is keys, values and their gradients. formula_bytes:
`jmoe.run.planner.training_sizes`.
"""

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib.ranks import Clock, run_in_turn
from benchmarks.lib.report import JsonObject

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jmoe.config import TrainConfig

COMMANDS = {"context": "training steps with sequences on one node or on both"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-lengths", type=int, nargs="+", default=[2048])


def train_config(a: argparse.Namespace, length: int, context: int, ranks: int) -> "TrainConfig":
    from jmoe.config import MeshConfig, ModelConfig, TrainConfig

    model = ModelConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=a.layers,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    mesh = MeshConfig(1, a.nodes, ranks // a.nodes, context)
    return TrainConfig(
        model=model,
        mesh=mesh,
        batch_size=ranks,
        sequence_length=length,
        compute_dtype="float32",
    )


class Step:
    """A step on the same tokens in every call."""

    def __init__(self, config: "TrainConfig", mesh: "Mesh") -> None:
        import jax

        from jmoe.data.context_rows import loaded_share
        from jmoe.training.session import place_batch
        from jmoe.training.trainer import make_trainer

        self.config, trainer = config, make_trainer(config, mesh)
        size = (config.batch_size, config.sequence_length + 1)
        tokens = np.random.default_rng(0).integers(0, 256, size).astype(np.int32)
        processes = jax.process_index(), jax.process_count()
        index, count = loaded_share(config.mesh.context, jax.local_device_count(), *processes)
        self.batch = place_batch(config, mesh, np.split(tokens, count)[index])
        program: Any = trainer.step
        self.step = program.lower(trainer.state_shape, self.batch, full_capacity=True).compile()  # type: ignore[attr-defined]
        self.state, self.losses = trainer.init(), list[float]()

    def __call__(self) -> object:
        self.state, metrics = self.step(self.state, self.batch)
        self.losses.append(float(metrics["loss"]))
        return self.state


def measure(a: argparse.Namespace, mesh: "Mesh", clock: Clock) -> list[JsonObject]:
    """Return one row for every length and number of nodes to a sequence."""
    return [row for length in a.sequence_lengths for row in measure_length(a, length, mesh, clock)]


def measure_length(
    a: argparse.Namespace, length: int, mesh: "Mesh", clock: Clock
) -> list[JsonObject]:
    """Return the rows of `alone` and `shared` sequences."""
    from jmoe.run.planner import training_sizes

    sizes = {"alone": 1, "shared": mesh.size}
    runs = {
        name: Step(train_config(a, length, context, mesh.size), mesh)
        for name, context in sizes.items()
    }
    taken = run_in_turn(runs, clock, a.rounds, report=a.rank == 0)
    rows = []
    for name, run in runs.items():
        row = taken[name].result_row("alone", taken["alone"])
        sent = row["sent_bytes"]
        rows.append(
            {
                "mbit_per_s": a.rates[0],
                "sequence_length": length,
                "sequences": name,
                **row,
                "extra_bytes": sent - rows[0]["sent_bytes"] if rows else 0,
                "formula_bytes": training_sizes(run.config).context_bytes * mesh.size // a.nodes,
                "losses": [round(loss, 5) for loss in run.losses],
            }
        )
    return rows
