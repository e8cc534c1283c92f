"""Estimate training steps on GPUs without one, and compare planned bytes with compiled ones.

    make gpu-estimate    all shapes on an H100, one on the others; half an hour
    python benchmarks/train/estimates.py --shapes olmoe mixtral
        some of them; prints and writes nothing
    python benchmarks/train/estimates.py --targets rtx-4090 a100 --shapes olmoe

The published shapes with as many layers as fit, bfloat16 with float32 masters. Needs JAX's CUDA
libraries (`make setup EXTRA=cuda13`), no GPU and no driver. step_ms: estimated, see
`jmoe/planning/gpu_estimate.py`. planned, compiled: GB of a device by `--plan`, and as XLA lays the
compiled step out. Last line: a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, get_args, get_type_hints

from benchmarks import RESULTS
from benchmarks.lib.report import JsonObject
from jmoe.runtime import hide_devices

if __name__ == "__main__":
    hide_devices()

from benchmarks.lib import ahead_of_time, report
from benchmarks.lib.published import published
from jmoe.config import MachineConfig, MeshConfig, TrainConfig
from jmoe.models.huggingface import model_config
from jmoe.planning.gpu_estimate import GpuKernel
from jmoe.run.planner import training_plan
from jmoe.training.fused.step_estimate import StepEstimate, estimate_step

RESULT = RESULTS / "estimates.json"
TARGETS = get_args(get_type_hints(TrainConfig)["estimate"])[1:]


@dataclass(frozen=True)
class Shape:
    """A published model cut to some layers, and a step of some sequences on one host's devices."""

    model: str
    layers: int
    batch: int
    seq: int = 2048
    devices: int = 1
    remat: str = "none"

    def config(self, target: Any) -> TrainConfig:
        """Return a run of this shape to estimate for a GPU."""
        return TrainConfig(
            model=model_config(published(self.model, self.layers)),
            mesh=MeshConfig(expert_intra=self.devices),
            machine=MachineConfig(accelerator=target, host_bytes=10**12),
            batch_size=self.batch,
            sequence_length=self.seq,
            remat=self.remat,  # type: ignore[arg-type]
            estimate=target,
        )


SHAPES = {
    "olmoe": Shape("olmoe", 6, 4),
    "olmoe, 32,768 tokens": Shape("olmoe", 6, 16),
    "mixtral": Shape("mixtral", 2, 4),
    "qwen3": Shape("qwen3", 4, 4),
    "gpt-oss": Shape("gpt-oss", 6, 4),
    "deepseek-lite": Shape("deepseek-lite", 4, 4),
    "olmoe, 8 devices": Shape("olmoe", 16, 32, 4096, 8, "layer"),
    "mixtral, 8 devices": Shape("mixtral", 8, 32, 4096, 8, "layer"),
    "qwen3, 8 devices": Shape("qwen3", 12, 32, 4096, 8, "layer"),
}

OTHERS_RUN = "olmoe"  # what GPUs other than an H100 are estimated for


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["h100"])
    parser.add_argument(
        "--write", action="store_true", help="into benchmarks/results/estimates.json"
    )
    a = parser.parse_args()
    a.steps = [(target, name) for target in a.targets for name in a.shapes]
    if a.write:
        a.steps += [(target, OTHERS_RUN) for target in TARGETS if target != "h100"]
    return a


def planned_bytes(config: TrainConfig) -> int:
    """Return the planned bytes of a device."""
    return training_plan(replace(config, estimate="", plan=True)).bytes_on("device")


def kernel_text(kernel: GpuKernel) -> str:
    """Return a kernel's milliseconds, launches, name and place in one line."""
    return f"{1e3 * kernel.seconds:.1f} ms in {kernel.launches:,}: {kernel.name} ({kernel.scope})"


def row_of(name: str, shape: Shape, step: StepEstimate) -> JsonObject:
    """Return a step's estimate, and its bytes beside the planner's."""
    planned, gpu = planned_bytes(step.config), step.gpu
    return {
        "shape": name,
        "gpu": step.config.estimate,
        "layers": shape.layers,
        "devices": shape.devices,
        "tokens": shape.batch * shape.seq,
        "step_ms": round(1e3 * gpu.seconds, 1),
        "tokens_per_s": round(step.tokens_per_s),
        "mfu": round(step.mfu, 4),
        "launches": gpu.launches,
        "moved_gb": round(gpu.num_bytes / 1e9, 1),
        "computed_tflop": round(gpu.flops / 1e12, 1),
        "communication_ms": round(1e3 * gpu.exposed_s, 1),
        "planned_gb": round(planned / 1e9, 2),
        "compiled_gb": round(step.memory.num_bytes / 1e9, 2),
        "planned_of_compiled": round(planned / step.memory.num_bytes, 3),
        "slowest": [kernel_text(kernel) for kernel in gpu.kernels[:5]],
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skipped():
        return
    rows = []
    for target, name in a.steps:
        begun = time.perf_counter()
        row = row_of(name, SHAPES[name], estimate_step(SHAPES[name].config(target)))
        rows.append(report.progress(row | {"compile_s": round(time.perf_counter() - begun)}))
    result = {
        "benchmark": "training steps on GPUs that are not here: estimated, and planned beside "
        "compiled bytes",
        "command": "make gpu-estimate",
        "date": f"{date.today()}",
        "machine": "CPU cores alone: compiled with the CUDA 13 libraries, run nowhere",
        "notes": [
            "an H100 took 194 ms for an earlier step of olmoe, for which this said 199 "
            "(gpu_profile_olmoe)",
            "8 devices: the experts over all of them, remat = layer, routing as even as it can be",
        ],
        "rows": rows,
        "versions": report.versions("jax", "jaxlib"),
    }
    if a.write:
        report.write(result, RESULT)
    report.finish(result)


if __name__ == "__main__":
    main()
