"""Time a training step of any model shape on this machine.

    python benchmarks/train/step.py    4 layers, hidden 256, 8 experts, top-1
    python benchmarks/train/step.py --processes 2 --ep 2
        two processes that share one set of experts
    python benchmarks/train/step.py --hf-config config.json --batch 4
        the shape of a Mixtral or Qwen3-MoE model

--batch is per process. tokens_per_s is the median over the steps after the warm-up, counting all
processes' tokens. Each process is pinned to its share of the cores. The same batch is trained on at
every step.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lib import report
from benchmarks.lib.gpu_trace import kernel_times
from benchmarks.lib.ranks import add_rank_options, free_port, rank_command, wait_for_all
from benchmarks.lib.report import JsonObject
from jmoe.config import (
    CommConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TrainConfig,
)
from jmoe.models.huggingface import model_config

if TYPE_CHECKING:
    import jax
    from jax.tree_util import KeyPath

TRACED_STEPS = 3


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences a process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="processes that share one set of experts")
    parser.add_argument("--capacity-factor", type=float, default=None, help="default: dropless")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--native", choices=("auto", "on", "off"), default="auto", help="see `TrainConfig.native`"
    )
    parser.add_argument("--hf-config", type=Path, help="config.json; replaces the shape options")
    parser.add_argument(
        "--replicate-dense",
        action="store_true",
        help="no ZeRO-3: every process holds all dense parameters",
    )
    parser.add_argument("--bucket-bytes", type=int, default=0, help="see `CommConfig.bucket_bytes`")
    parser.add_argument("--data", choices=("random", "text"), default="random")
    parser.add_argument(
        "--init",
        choices=("jmoe", "torch", "hf"),
        default="jmoe",
        help="torch: its layers' defaults; hf: normal(0.02), as transformers does",
    )
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--profile", help="write a trace of three more steps, and list a GPU's kernels"
    )
    add_rank_options(parser)
    return parser.parse_args()


def train_config(a: argparse.Namespace) -> TrainConfig:
    """Return the run that the options describe: AdamW as in the peers' scripts, a constant rate."""
    if a.hf_config:
        hf = json.loads(a.hf_config.read_text())
        hf = hf.get("config", {}) | {"model_type": hf["model_type"]} if "config" in hf else hf
        model = replace(model_config(hf), capacity_factor=a.capacity_factor)
    else:
        model = ModelConfig(
            vocab_size=a.vocab_size,
            hidden_size=a.hidden_size,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            num_key_value_heads=a.heads,
            max_position_embeddings=a.seq,
            intermediate_size=4 * a.hidden_size,
            moe_intermediate_size=4 * a.hidden_size,
            num_experts=a.experts,
            num_experts_per_tok=a.top_k,
            hidden_act="gelu",
            norm="layernorm",
            norm_eps=1e-5,
            position="learned",
            attention_bias=True,
            mlp_bias=True,
            capacity_factor=a.capacity_factor,
            # 0.01 for each layer
            router=RouterConfig(
                kind={1: "switch", 2: "gshard"}.get(a.top_k, "softmax"),
                aux_loss_coef=0.01 * a.layers,
            ),
        )
    return TrainConfig(
        model=model,
        optimizer=OptimizerConfig(
            learning_rate=a.lr,
            schedule="constant",
            warmup_steps=0,
            beta2=0.999,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        mesh=MeshConfig(expert_intra=a.ep),
        comm=CommConfig(shard_dense=not a.replicate_dense, bucket_bytes=a.bucket_bytes),
        num_steps=a.warmup + a.steps,
        batch_size=a.batch * a.processes,
        sequence_length=a.seq,
        compute_dtype=a.dtype,
        native=a.native,
    )


def tokens(a: argparse.Namespace, config: TrainConfig, rank: int) -> np.ndarray:
    """Return int32 [1, batch, seq + 1]: random ids seeded by the rank, or Python source."""
    count, vocab = a.batch * (a.seq + 1), config.model.vocab_size
    if a.data == "text":
        text = b"".join(
            p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py"))[: 40 * (rank + 1)]
        )
        start = rank * count
        return (
            np.frombuffer(text, np.uint8)[start : start + count]
            .astype(np.int32)
            .reshape(1, a.batch, -1)
        )
    twister = np.random.RandomState(rank)  # the plain 32-bit stream, as torch.randint draws it
    ids = twister.randint(0, 2**32, a.batch * a.seq, np.uint32) % vocab
    last = np.random.default_rng(rank).integers(0, vocab, (a.batch, 1))
    return np.concatenate([ids.reshape(a.batch, a.seq), last], axis=1).astype(np.int32)[None]


def peer_like(program: Any, state: Any, init: str, std: float, seed: int = 0) -> Any:
    """Return the state with weights drawn as torch's Linear and Embedding, or transformers, do."""
    import jax
    import jax.numpy as jnp

    def draw(path: "KeyPath", w: jax.Array) -> jax.Array:
        names = [str(getattr(k, "key", k)) for k in path]
        rng = np.random.default_rng([seed, *"/".join(names).encode()])
        if init == "hf" and w.ndim > 1 and names[-1] not in ("scale", "bias"):
            value = np.float32(std) * rng.standard_normal(w.shape, np.float32)
        elif names[-1] in ("embedding", "positions"):
            value = rng.standard_normal(w.shape, np.float32)
        elif names[-1] in ("scale", "bias"):
            return w
        else:
            fan_in = {"b_up": "w_up", "b_down": "w_down", "b_qkv": "w_qkv", "b_out": "w_out"}.get(
                names[-1]
            )
            rows = w.shape[-2] if fan_in is None else fans["/".join([*names[:-1], fan_in])]
            value = (rng.random(w.shape, np.float32) * 2 - 1) / np.float32(np.sqrt(rows))
        return jax.make_array_from_callback(w.shape, w.sharding, lambda index: value[index])

    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    fans = {
        "/".join(str(getattr(k, "key", k)) for k in p): w.shape[-2] for p, w in leaves if w.ndim > 1
    }
    params = jax.tree_util.tree_map_with_path(draw, state.params)
    return program.restore_state(
        replace(program.prepare_state_for_save(state), params=jax.tree.map(jnp.asarray, params))
    )


def join(a: argparse.Namespace, rank: int) -> None:
    """Join the other processes, if there are any."""
    if a.processes > 1:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{a.port}", a.processes, rank)


class Job:
    """The training step of one rank, compiled, with its state and batch."""

    def __init__(self, a: argparse.Namespace, rank: int) -> None:
        import jax

        from jmoe.mesh import ACCUMULATED_BATCH, make_mesh
        from jmoe.training.trainer import make_trainer

        join(a, rank)
        self.config = train_config(a)
        mesh = make_mesh(self.config.checked_mesh_shape(jax.device_count()))
        program = make_trainer(self.config, mesh)
        sharding = jax.sharding.NamedSharding(mesh, ACCUMULATED_BATCH)
        local = tokens(a, self.config, rank)
        self.batch = jax.make_array_from_process_local_data(sharding, local)
        begun = time.perf_counter()
        lowered = program.step.lower(program.state_shape, self.batch)  # type: ignore[attr-defined]
        self.compiled = lowered.compile()
        self.compile_s = time.perf_counter() - begun
        self.state = program.init()  # after compiling, whose memory it takes over
        if a.init != "jmoe":
            deviation = self.config.model.initializer_range
            self.state = peer_like(program, self.state, a.init, deviation)

    def step(self) -> dict[str, "jax.Array"]:
        """Take a step; return its metrics, which may still be computed."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return metrics


def worker(a: argparse.Namespace, rank: int) -> JsonObject:
    """Train on this rank; every rank returns the job's figures. peak_rss_bytes: of each rank."""
    import jax
    from jax.experimental import multihost_utils

    job = Job(a, rank)
    seconds, losses, dropped = [], [], 0
    for i in range(a.warmup + a.steps):
        begun = time.perf_counter()
        metrics = jax.device_get(job.step())
        if i >= a.warmup:
            seconds.append(time.perf_counter() - begun)
            dropped += int(metrics["dropped"].sum()) if "dropped" in metrics else 0
        losses.append(float(metrics["loss"]))
        assert metrics["ok"], f"step {i} did not run: {metrics}"
    if a.profile:
        with jax.profiler.trace(a.profile):
            for _ in range(TRACED_STEPS):
                jax.block_until_ready(job.step())
    peak = np.int64(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    peaks = np.atleast_1d(multihost_utils.process_allgather(peak)).tolist()
    return {
        "system": "jmoe",
        "args": report.options(a, "rank", "port"),
        **speed(job.config, seconds),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "losses": [round(loss, 5) for loss in losses],
        "dropped_fraction": dropped / (assignments(job.config) * a.steps),
        **sizes(job.config, seconds),
        "peak_rss_bytes": peaks,
        "compile_s": round(job.compile_s, 2),
        "versions": report.versions("jax", "jaxlib", "flax"),
        "device": jax.devices()[0].device_kind,
    } | ({"profile": kernel_times(Path(a.profile), TRACED_STEPS)} if a.profile else {})


def speed(config: TrainConfig, seconds: list[float]) -> JsonObject:
    """Return the rates of these steps."""
    per_step = config.batch_size * config.sequence_length
    return {
        "tokens_per_s": round(per_step / statistics.median(seconds), 2),
        "tokens_per_s_best": round(per_step / min(seconds), 2),
        "seconds": [round(s, 5) for s in seconds],
    }


def sizes(config: TrainConfig, seconds: list[float]) -> JsonObject:
    """Return the numbers of parameters, and the rate at which the model's FLOPs are computed."""
    per_step, median = config.batch_size * config.sequence_length, statistics.median(seconds)
    total, active = config.model.total_and_active_parameters()
    flops = config.flops_per_token
    return {
        "params_total": total,
        "params_active": active,
        "model_flops_per_s": round(flops * per_step / median),
    }


def assignments(config: TrainConfig) -> int:
    """Return the (token, expert) pairs of all layers in a step."""
    model, per_step = config.model, config.batch_size * config.sequence_length
    return per_step * model.num_experts_per_tok * max(1, model.num_moe_layers)


def launch(a: argparse.Namespace) -> int:
    """Start one process a rank, each on its share of the cores, and pass on rank 0's output."""
    port, cores = free_port(), sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // a.processes)
    ranks = []
    for rank in range(a.processes):
        mine = {cores[(rank * share + i) % len(cores)] for i in range(share)}
        out = None if rank == 0 else subprocess.DEVNULL
        pin = lambda mine=mine: os.sched_setaffinity(0, mine)  # noqa: E731
        ranks.append(subprocess.Popen(rank_command(rank, port), stdout=out, preexec_fn=pin))
    return max(code or 0 for code in wait_for_all(ranks))


def main() -> int:
    a = parse()
    if a.processes > 1 and a.rank is None:
        return launch(a)
    report.finish(worker(a, a.rank or 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
