"""Training steps of `comm/slow_link embedding`, whose embedding table and head are sharded.

A step of a model whose one layer is little beside its vocabulary, on 2 nodes x 2 ranks, the
partitions in turn: replicated (the whole table on every rank, its gradient all-reduced), zero3
(split at rest, gathered for every step), columns and rows of `jmoe.layers.embedding`. Ids are drawn
by Zipf's law, so that they repeat as those of text do. Formula:
`jmoe.planning.embedding.embedding_traffic`. `table_bytes` are those of table, head and their AdamW
moments on one rank, `temp_bytes` what a step takes beside the state.
"""

import argparse
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.lib.ranks import Clock, run_in_turn
from benchmarks.lib.report import JsonObject

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jmoe.config import TrainConfig

COMMANDS = {"embedding": "training steps with the embedding table in parts"}
KINDS = ("replicated", "zero3", "columns", "rows")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=256, help="of a rank in one step")
    parser.add_argument("--untied", action="store_true", help="a head of its own")


def train_config(
    a: argparse.Namespace, kind: str, hidden_size: int, shape: tuple[int, ...]
) -> "TrainConfig":
    from jmoe.config import CommConfig, MeshConfig, ModelConfig, TrainConfig

    model = ModelConfig(
        vocab_size=a.vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_experts=0,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=64,
        tie_word_embeddings=not a.untied,
    )
    embedding = "replicated" if kind == "zero3" else kind
    mesh, comm = MeshConfig(*shape), CommConfig(shard_dense=kind == "zero3", embedding=embedding)  # type: ignore
    return TrainConfig(
        model=model, mesh=mesh, comm=comm, batch_size=int(np.prod(shape)), sequence_length=a.tokens
    )


class TrainedVariant:
    """One variant of the step; every call trains on the same tokens."""

    def __init__(self, config: "TrainConfig", mesh: "Mesh") -> None:
        import jax
        from jax.sharding import NamedSharding

        from jmoe.mesh import ACCUMULATED_BATCH
        from jmoe.training.trainer import make_trainer

        self.config, program = config, make_trainer(config, mesh)
        p = 1 / (np.arange(config.model.vocab_size) + 2.7)
        rng = np.random.default_rng(jax.process_index())
        ids = rng.choice(p.size, (1, 1, config.sequence_length + 1), p=p / p.sum()).astype(np.int32)
        sharding = NamedSharding(mesh, ACCUMULATED_BATCH)
        self.tokens = jax.make_array_from_process_local_data(sharding, ids)
        self.step = program.step.lower(program.state_shape, self.tokens).compile()  # type: ignore[attr-defined]
        self.state = program.init()
        self.losses: list[float] = []

    def __call__(self) -> object:
        self.state, metrics = self.step(self.state, self.tokens)
        self.losses.append(float(metrics["loss"]))
        return self.state

    @property
    def table_bytes(self) -> int:
        trees = (self.state.params, self.state.m, self.state.v)
        leaves = [tree[name] for tree in trees for name in ("embedding", "head") if name in tree]
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    @property
    def formula_bytes(self) -> int:
        """Return the bytes that one node's ranks send to the other for the lookup and the head."""
        from jmoe.planning.embedding import EmbeddingSizes, embedding_traffic, plan_embedding

        config, model = self.config, self.config.model
        sizes = (
            model.vocab_size,
            model.hidden_size,
            model.tie_word_embeddings,
            config.sequence_length,
        )
        vocabulary = EmbeddingSizes(*sizes, activation_bytes=2, sharded=config.comm.shard_dense)
        nodes = config.mesh.data * config.mesh.expert_inter
        inside = config.mesh.expert_intra
        plan = plan_embedding(
            config.comm.embedding, vocabulary, num_nodes=nodes, devices_per_node=inside
        )
        return inside * embedding_traffic(plan, vocabulary).across_bytes


def measure(a: argparse.Namespace, mesh: "Mesh", clock: Clock) -> list[JsonObject]:
    """Return one row for every hidden size and partition."""
    return [
        row for hidden_size in a.hidden_sizes for row in measure_size(a, hidden_size, mesh, clock)
    ]


def measure_size(
    a: argparse.Namespace, hidden_size: int, mesh: "Mesh", clock: Clock
) -> list[JsonObject]:
    """Return one row for every partition."""
    from jmoe.mesh import mesh_shape

    shape = mesh_shape(mesh)
    runs = {
        kind: TrainedVariant(train_config(a, kind, hidden_size, shape), mesh) for kind in a.kinds
    }
    taken = run_in_turn(runs, clock, a.rounds, report=a.rank == 0)
    reference = a.kinds[0]
    return [
        {
            "mbit_per_s": a.rates[0],
            "hidden_size": hidden_size,
            "embedding": kind,
            **taken[kind].result_row(reference, taken[reference]),
            "formula_bytes": run.formula_bytes,
            "table_bytes": run.table_bytes,
            f"table_part_of_{reference}": run.table_bytes / runs[reference].table_bytes,
            "temp_bytes": run.step.memory_analysis().temp_size_in_bytes,
            "losses": [round(loss, 4) for loss in run.losses],
        }
        for kind, run in runs.items()
    ]
