"""Experts' optimizer state in host memory against all of it on the device, over the tokens of a step.

    python benchmarks/accumulation.py --tokens 1024 2048 4096 8192 16384 --plot docs/accumulation.png

A step accumulates the gradients of as many micro-batches of --micro-tokens as it takes. Both kinds take turns; the
ratio is the median over rounds of the device's seconds to the host's. Predicted: the planner's figures (`--plan`) with
this machine's rate of products and of memory, measured here. The last line of output is one JSON object.
"""

if __name__ == "__main__":
    import script

    script.reexec_with_env()

import argparse
import json
import sys
import time
from importlib.metadata import version
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training_tiers import add_model_options, model_of
from jmoe.config import MachineConfig, OptimizerConfig, TiersConfig, TrainConfig
from jmoe.mesh import make_mesh
from jmoe.run.planner import training_plan
from jmoe.training.trainer import make_trainer

SEQUENCE_LENGTH = 256
TIERS = {"device": TiersConfig(), "host": TiersConfig(experts="host", optimizer="host", device_layers=2)}


def config_of(a: argparse.Namespace, tokens: int, tiers: TiersConfig, machine: MachineConfig) -> TrainConfig:
    return TrainConfig(
        model=model_of(a),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0, learning_rate=1e-4),
        batch_size=tokens // SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        gradient_accumulation_steps=max(1, tokens // a.micro_tokens),
        tiers=tiers,
        machine=machine,
    )


class Session:
    """A program, its state, and the seconds of its steps."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.program = make_trainer(config, make_mesh((1, 1, 1), jax.devices()[:1]))
        self.state = self.program.init()
        self.seconds: list[float] = []

    def step(self, number: int) -> None:
        parts = self.config.gradient_accumulation_steps
        shape = (parts, self.config.batch_size // parts, SEQUENCE_LENGTH + 1)
        tokens = jnp.asarray(np.random.default_rng(number).integers(0, 1024, shape).astype(np.int32))
        begun = time.perf_counter()
        self.state, metrics = self.program.step(self.state, tokens)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - begun)


def rates() -> MachineConfig:
    """FLOP/s of bfloat16 products with float32 sums, and bytes/s of reading and writing memory, here and now."""
    x, w = (jnp.ones((2048, 2048), jnp.bfloat16) for _ in range(2))
    multiply = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
    big = jnp.zeros(1 << 26)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def seconds(call: Any) -> float:
        times = []
        for _ in range(7):
            begun = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - begun)
        return median(times[1:])

    def touch() -> jax.Array:
        nonlocal big
        big = add(big)
        return big

    flops = 2 * 2048**3 / seconds(lambda: multiply(x, w))
    return MachineConfig(flops=flops, memory_bytes_per_s=2 * big.nbytes / seconds(touch))


def measure(a: argparse.Namespace, tokens: int, machine: MachineConfig) -> dict[str, Any]:
    """One row: tokens/s of both, and their ratio, measured and predicted."""
    sessions = {name: Session(config_of(a, tokens, tiers, machine)) for name, tiers in TIERS.items()}
    for number in range(a.rounds + 2):
        for session in sessions.values():
            session.step(number)
    for session in sessions.values():
        session.program.close()
    kept = {name: session.seconds[2:] for name, session in sessions.items()}
    plan = training_plan(sessions["host"].config)
    on_device = training_plan(sessions["device"].config)
    return {
        "tokens": tokens,
        "tokens_per_s": {name: round(tokens / median(seconds), 1) for name, seconds in kept.items()},
        "ratio": round(median(d / h for d, h in zip(kept["device"], kept["host"], strict=True)), 3),
        "predicted": round(on_device.step_s() / plan.step_s(), 3),
        "predicted_if_nothing_overlaps": round(on_device.step_s() / plan.step_s(overlapped=False), 3),
    }


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    tokens = [row["tokens"] for row in rows]
    axes.plot(tokens, [row["ratio"] for row in rows], "o-", label="measured")
    axes.plot(tokens, [row["predicted"] for row in rows], "--", label="predicted")
    top = 1.1 * max(1.0, *(row["ratio"] for row in rows))
    axes.set(xscale="log", xlabel="tokens of a step", ylabel="speed, host / device", ylim=(0, top))
    axes.set_xticks(tokens, [f"{n // 1024}K" for n in tokens])
    axes.minorticks_off()
    axes.axhline(0.9, color="grey", linewidth=0.8)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--micro-tokens", type=int, default=2048)
    add_model_options(parser, layers=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot")
    a = parser.parse_args()
    machine, rows = rates(), []
    for tokens in a.tokens:
        rows.append(measure(a, tokens, machine))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if a.plot:
        plot(rows, a.plot)
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    options = {name: value for name, value in vars(a).items() if name != "plot"}
    rates_seen = {"flops": machine.flops, "memory_bytes_per_s": machine.memory_bytes_per_s}
    result = {"benchmark": "accumulation", "options": options, "rates": rates_seen, "rows": rows, "versions": versions}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
