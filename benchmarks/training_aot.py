"""Compile the training steps that `benchmarks/gpu.py` times for an H200 that is not here; last line: a JSON object.

    python benchmarks/training_aot.py --models olmoe

Published shapes with as many layers as fit 80 GB, bfloat16 with float32 masters, the Hopper kernels. state: parameters
and optimizer state; temporary: gradients, activations and copies in bfloat16, as the compiler lays them out.
"""

if __name__ == "__main__":
    import script  # noqa: F401  makes benchmarks and jmoe importable

import argparse
import time
from typing import Any

from jmoe.runtime import without_devices

if __name__ == "__main__":
    without_devices()

from benchmarks.lib import ahead_of_time, report
from benchmarks.lib.published import LAYERS, published
from jmoe.config import MeshConfig, OptimizerConfig, TrainConfig
from jmoe.models.huggingface import model_config
from jmoe.training.step_estimate import lower_step, step_memory


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--seq", type=int, default=2048)
    return parser.parse_args()


def compiled(name: str, batch: int, seq: int) -> dict[str, Any]:
    """Compile a step of a published shape."""
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_steps=0)
    sizes = {"batch_size": batch, "sequence_length": seq, "num_steps": 10, "compute_dtype": "bfloat16"}
    model = model_config(published(name, LAYERS[name]))
    begun = time.perf_counter()
    lowered = lower_step(TrainConfig(model=model, optimizer=optimizer, mesh=MeshConfig(), **sizes), "h200")
    lowered_s = time.perf_counter() - begun
    memory = step_memory(lowered.compile())
    return {
        "model": name,
        "layers": LAYERS[name],
        "tokens": batch * seq,
        "hopper_kernel_mentions": lowered.as_text().count("mosaic_gpu"),
        "state_bytes": memory.state_bytes,
        "temporary_bytes": memory.temporary_bytes,
        "lowered_s": round(lowered_s, 1),
        "compiled_s": round(time.perf_counter() - begun - lowered_s, 1),
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skipped():
        return
    rows = [report.progress(compiled(name, a.batch, a.seq)) for name in a.models]
    result = {"benchmark": "training steps of published shapes, compiled ahead of time for an H200", "rows": rows}
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
