"""Compare optimizer state in host memory with optimizer state on the device, by tokens a step.

    python benchmarks/offload/accumulation.py --tokens 1024 2048 4096 8192 16384 \
        --plot docs/accumulation.png

A step accumulates the gradients of as many micro-batches of --micro-tokens as it takes. Both kinds
take turns; the ratio is the median over rounds of the device's seconds to the host's. Predicted:
the planner's figures (`--plan`) with this machine's rate of products and of memory, measured here.
The last line of output is one JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import Session, add_model_options, model_of
from jmoe.config import MachineConfig, OptimizerConfig, TiersConfig, TrainConfig
from jmoe.run.planner import training_plan
from jmoe.training.trainer import make_trainer

SEQUENCE_LENGTH = 256
TIERS = {
    "device": TiersConfig(),
    "host": TiersConfig(experts="host", optimizer="host", device_layers=2),
}


def config_of(
    a: argparse.Namespace, tokens: int, tiers: TiersConfig, machine: MachineConfig
) -> TrainConfig:
    return TrainConfig(
        model=model_of(a),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0, learning_rate=1e-4),
        batch_size=tokens // SEQUENCE_LENGTH,
        sequence_length=SEQUENCE_LENGTH,
        gradient_accumulation_steps=max(1, tokens // a.micro_tokens),
        tiers=tiers,
        machine=machine,
    )


def rates() -> MachineConfig:
    """Return FLOP/s of bfloat16 products with float32 sums, and bytes/s of memory, measured now."""
    x, w = (jnp.ones((2048, 2048), jnp.bfloat16) for _ in range(2))
    multiply = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
    big = jnp.zeros(1 << 26)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def seconds(call: Callable[[], object]) -> float:
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


def measure(a: argparse.Namespace, tokens: int, machine: MachineConfig) -> JsonObject:
    """Return a row: tokens/s of both and their ratio, measured and predicted."""
    configs = {name: config_of(a, tokens, tiers, machine) for name, tiers in TIERS.items()}
    sessions = {name: Session(config, make=make_trainer) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(a.rounds + 2):
        for name, session in sessions.items():
            seconds[name].append(session.step(number).seconds)
    for session in sessions.values():
        session.program.close()
    kept = {name: all_seconds[2:] for name, all_seconds in seconds.items()}
    plan = training_plan(configs["host"])
    on_device = training_plan(configs["device"])
    return {
        "tokens": tokens,
        "tokens_per_s": {
            name: round(tokens / median(seconds), 1) for name, seconds in kept.items()
        },
        "ratio": report.ratio(kept["device"], kept["host"]),
        "predicted": round(on_device.step_s() / plan.step_s(), 3),
        "predicted_if_nothing_overlaps": round(
            on_device.step_s() / plan.step_s(overlapped=False), 3
        ),
    }


def plot(rows: list[JsonObject], path: str) -> None:
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


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--micro-tokens", type=int, default=2048)
    add_model_options(parser, layers=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot")
    a = parser.parse_args()
    machine = rates()
    rows = [report.progress(measure(a, tokens, machine)) for tokens in a.tokens]
    if a.plot:
        plot(rows, a.plot)
    rates_seen = {"flops": machine.flops, "memory_bytes_per_s": machine.memory_bytes_per_s}
    result = {
        "benchmark": "accumulation",
        "options": report.options(a, "plot"),
        "rates": rates_seen,
        "rows": rows,
    }
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
