"""Training runs with experts on tiers, step by step: options, configuration, state and costs."""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from benchmarks.lib.report import median
from jmoe.config import (
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TiersConfig,
    TrainConfig,
)
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.version_store import VersionStore
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
from jmoe.training.state import TrainState
from jmoe.training.streamed.step import StreamedTrainer

LIBRARY = Path(argparse.__file__).parent
MODULES = (
    "argparse",
    "ast",
    "difflib",
    "pickle",
    "random",
    "subprocess",
    "textwrap",
    "threading",
)  # text to train on


def add_model_options(parser: argparse.ArgumentParser, layers: int) -> None:
    """Add the options of `model_of`."""
    sizes = {
        "hidden-size": 512,
        "intermediate-size": 512,
        "layers": layers,
        "experts": 16,
        "top-k": 2,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)


def model_of(a: argparse.Namespace) -> ModelConfig:
    """Return a model of the chosen size whose routing can be steered by the routers' bias."""
    return ModelConfig(
        vocab_size=1024,
        hidden_size=a.hidden_size,
        num_hidden_layers=a.layers,
        num_attention_heads=a.hidden_size // 64,
        num_key_value_heads=a.hidden_size // 64,
        moe_intermediate_size=a.intermediate_size,
        num_experts=a.experts,
        num_experts_per_tok=a.top_k,
        capacity_factor=1.25,
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0, bias_update_speed=0.0),
    )


def expert_bytes(a: argparse.Namespace) -> int:
    """Return the bytes of one expert's weights, gradient and moments."""
    return int(16 * 3 * a.hidden_size * a.intermediate_size)


def config_of(
    a: argparse.Namespace, folder: Path, mesh: MeshConfig | None = None, **tiers: Any
) -> TrainConfig:
    """Return the configuration of a run of `model_of` with its records in `folder`."""
    mesh = mesh or MeshConfig()
    cache_bytes = int(
        a.cache * (a.layers * a.experts * expert_bytes(a) // mesh.expert_inter)
    )  # of a process
    options = {"host_cache_bytes": cache_bytes, "gradients": "nvme"} | tiers
    places = options.pop("experts", "device"), options.pop("optimizer", "device")
    return TrainConfig(
        model=model_of(a),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0),
        mesh=mesh,
        batch_size=a.batch_size,
        sequence_length=a.sequence_length,
        tiers=TiersConfig("auto", "auto", path=str(folder), **options).with_tiers(*places),
    )


class StepCost(NamedTuple):
    """Seconds, loss and NVMe bytes of a step; processor_s: of all threads of the process."""

    seconds: float
    read_bytes: int
    written_bytes: int
    loss: float = math.nan
    processor_s: float = math.nan


class Session:
    """A training program and its state. make: builds the program from configuration and mesh."""

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh | None = None,
        make: Callable[..., Any] = StreamedTrainer,
    ) -> None:
        self.config, self.mesh = config, mesh or make_mesh((1, 1, 1), jax.devices()[:1])
        self._make, self.program = make, make(config, self.mesh)
        self.state: TrainState = self.program.init()

    def step(self, number: int) -> StepCost:
        """Take a step on the tokens that this number seeds."""
        config, parts = self.config, self.config.gradient_accumulation_steps
        shape = (parts, config.batch_size // parts, config.sequence_length + 1)
        drawn = self.draw(np.random.default_rng(number), shape)
        place = NamedSharding(self.mesh, ACCUMULATED_BATCH)
        tokens = jax.make_array_from_callback(shape, place, lambda index: drawn[index])
        before, processor_s, begun = self.moved_bytes(), time.process_time(), time.perf_counter()
        self.state, metrics = self.program.step(self.state, tokens)
        jax.block_until_ready((self.state, metrics))
        seconds, processor_s = time.perf_counter() - begun, time.process_time() - processor_s
        read, written = (after - b for after, b in zip(self.moved_bytes(), before, strict=True))
        return StepCost(seconds, read, written, float(metrics["loss"]), processor_s)

    def replace_config(self, config: TrainConfig) -> None:
        """Take further steps with a configuration of other batches; state and experts stay."""
        before, self.config = self.program, config
        self.program = self._make(config, self.mesh)
        if isinstance(before, StreamedTrainer):
            self.program._take_over_experts(before)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Return random tokens."""
        return rng.integers(0, self.config.model.vocab_size, shape).astype(np.int32)

    def moved_bytes(self) -> tuple[int, int]:
        """Return the bytes (read from NVMe, written to it) so far; zeros without tiers."""
        stats = self.program.expert_stats()
        stores = (
            [store for store in (stats.weights, stats.moments, stats.gradients) if store]
            if stats
            else []
        )
        return sum(s.nvme.num_bytes for s in stores), sum(s.nvme_writes.num_bytes for s in stores)

    def use_only(self, experts: int) -> None:
        """Let the routers choose only the first experts of each layer."""

        def bias(old: jax.Array) -> jax.Array:
            allowed = jnp.arange(old.shape[-1]) < experts
            return jnp.where(allowed, 0.0, -10.0) + jnp.zeros_like(old)

        biases = jax.tree.map(bias, self.state.router_bias)
        self.state = dataclasses.replace(self.state, router_bias=biases)


class TextSession(Session):
    """A run on text, whose choice of experts is uneven."""

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """Return windows of Python's own source."""
        text = np.frombuffer(
            b"".join(Path(LIBRARY, f"{name}.py").read_bytes() for name in MODULES), np.uint8
        )
        begins = rng.integers(0, text.size - shape[-1], shape[:-1])
        return text[begins[..., None] + np.arange(shape[-1])].astype(np.int32)


def disk_rates(layout: RecordLayout, folder: Path, rounds: int) -> tuple[float, float]:
    """Return the median bytes/s of (reads, writes) of records, alone and one after the other."""
    count = max(4, (1 << 28) // layout.record_bytes)
    reads, writes = [], []
    with VersionStore.open(folder, layout, count, fingerprint="rates") as store:
        record_R = store.layout.zeros()
        for _ in range(rounds):
            for rates, call in ((writes, store.write), (reads, store.read_into)):
                begun = time.perf_counter()
                for index in range(count):
                    call(index, record_R)
                rates.append(count * record_R.nbytes / (time.perf_counter() - begun))
    return median(reads), median(writes)
