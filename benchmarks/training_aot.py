"""Compile the training steps that `benchmarks/gpu.py` times for an H200 that is not here; last line: a JSON object.

    python benchmarks/training_aot.py --models olmoe

Published shapes with as many layers as fit 80 GB, bfloat16 with float32 masters, the Hopper kernels. state: parameters
and optimizer state; temporary: gradients, activations and copies in bfloat16, as the compiler lays them out.
"""

if __name__ == "__main__":
    import script  # noqa: F401  makes benchmarks and jmoe importable

import argparse
import os
import time
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from benchmarks.lib import ahead_of_time, report
from benchmarks.lib.published import LAYERS, published
from jmoe.config import MeshConfig, OptimizerConfig, TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH, make_mesh, shardings
from jmoe.models.huggingface import model_config
from jmoe.training.step import FusedTrainer
from kernels_pallas import implementations


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--seq", type=int, default=2048)
    return parser.parse_args()


def compiled(name: str, device: Any, batch: int, seq: int) -> dict[str, Any]:
    """Compile a step of a published shape."""
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_steps=0)
    sizes = {"batch_size": batch, "sequence_length": seq, "num_steps": 10, "compute_dtype": "bfloat16"}
    model = model_config(published(name, LAYERS[name]))
    mesh = make_mesh((1, 1, 1), [device])
    trainer = FusedTrainer(TrainConfig(model=model, optimizer=optimizer, mesh=MeshConfig(), **sizes), mesh)
    places = shardings(trainer.model.state_specs, mesh)
    of = lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)  # noqa: E731
    state = jax.tree.map(of, trainer.state_shape, places)
    tokens = of(jax.ShapeDtypeStruct((1, batch, seq + 1), jnp.int32), NamedSharding(mesh, ACCUMULATED_BATCH))
    begun = time.perf_counter()
    # the kernels of the device that is compiled for, not of this one
    with mock.patch.object(implementations, "default_names", return_value=("mosaic_gpu", "xla")):
        lowered = trainer.step.trace(state, tokens).lower(lowering_platforms=("cuda",))
    lowered_s = time.perf_counter() - begun
    memory = lowered.compile().memory_analysis()
    return {
        "model": name,
        "layers": LAYERS[name],
        "tokens": batch * seq,
        "hopper_kernel_mentions": lowered.as_text().count("mosaic_gpu"),
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "lowered_s": round(lowered_s, 1),
        "compiled_s": round(time.perf_counter() - begun - lowered_s, 1),
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skipped():
        return
    (device,) = ahead_of_time.devices("h200")
    rows = [report.progress(compiled(name, device, a.batch, a.seq)) for name in a.models]
    result = {"benchmark": "training steps of published shapes, compiled ahead of time for an H200", "rows": rows}
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
