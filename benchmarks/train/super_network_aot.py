"""Compile a training step of ufo-17b without a GPU, and compare its bytes with the plan's.

    python benchmarks/train/super_network_aot.py                  32 H200, four nodes of eight
    python benchmarks/train/super_network_aot.py --devices 40     a device for each task

Needs no GPU and no driver. With the CUDA libraries (`make setup EXTRA=cuda13`) the step is compiled
for H200; without them it is lowered for CUDA, and compiled for as many CPU devices, whose bytes of
parameters and optimizer state are the same. Nothing of the 17 billion parameters is there. planned:
parameters, optimizer state, gradients and copies in the dtype of use, by `--plan`, as the busiest
device has them. state: parameters and optimizer state, with the heads, as the compiled program
takes them; planned_state: that part of the plan. temporary: gradients, gathered parameters and
activations of a micro-batch, as the compiler lays them out. The last line is a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import dataclasses
import math
import os
import sys
import time
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.lib import ahead_of_time, report
from jmoe.config import VisionTrainConfig
from jmoe.configs.ufo import ufo_17b
from jmoe.data.image_batches import ImageBatch
from jmoe.mesh import BATCH, make_mesh
from jmoe.planning.elastic import TaskLayout
from jmoe.training.tasks.layouts import STATE_BYTES, allocated_bytes_per_device, plan_task_layout
from jmoe.training.tasks.step import VisionTrainer

NUM_CLASSES = 1000  # of each task; not published


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--devices", type=int, default=32, help="a multiple of eight")
    a = parser.parse_args()
    if a.devices < 8 or a.devices % 8:
        parser.error(f"--devices = {a.devices}: must be a multiple of 8")
    return a


def mesh_of(num_devices: int) -> Mesh:
    """Return a mesh of H200 for compiling alone, or of CPU devices."""
    if not ahead_of_time.has_cuda_plugin():
        jax.config.update("jax_num_cpu_devices", num_devices)
        return make_mesh((num_devices, 1, 1))
    return make_mesh(
        (num_devices, 1, 1), ahead_of_time.abstract_gpu_devices("h200", num_devices // 8, 8)
    )


def batch_of(config: VisionTrainConfig, trainer: VisionTrainer) -> ImageBatch:
    """Return the shapes of the images of a step."""
    layout, size = trainer.layout, trainer.micro_batch
    leading = len(layout.shares), max(layout.images_per_device) // size, size
    sharding = NamedSharding(trainer.model.mesh, BATCH)

    def of(dtype: Any, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct((*leading, *sizes), dtype, sharding=sharding)

    side = config.model.image_size
    pixels = of(jnp.uint8, side, side, config.model.channels)
    return ImageBatch(pixels, of(jnp.int32), of(jnp.int32), of(jnp.float32))


def planned_state_bytes(config: VisionTrainConfig, layout: TaskLayout, slots_a_layer: int) -> int:
    """Return the plan's bytes of parameters and optimizer state, with heads, which it omits."""
    model, devices = config.model, len(layout.shares)
    layers, expert = len(model.task_layers), model.parameters_per_expert
    dense = model.total_and_active_parameters()[0] - model.num_experts * layers * expert
    dense += len(config.tasks) * NUM_CLASSES * model.hidden_size
    return STATE_BYTES * (slots_a_layer * layers * expert + dense // devices)


def main() -> None:
    a = parse()
    config = dataclasses.replace(ufo_17b, layout="elastic")
    mesh, layout = mesh_of(a.devices), plan_task_layout(config, a.devices)
    trainer = VisionTrainer(config, dict.fromkeys(config.tasks, NUM_CLASSES), mesh, layout)
    for line in trainer.notes[-3:]:
        print(line, file=sys.stderr)
    begun = time.perf_counter()
    batch = batch_of(config, trainer)
    traced = trainer.step.trace(trainer.state_shape, batch, full_capacity=True)
    lowered = traced.lower(lowering_platforms=("cuda",))
    lowered_s = time.perf_counter() - begun
    begun = time.perf_counter()
    compiled = (lowered if ahead_of_time.has_cuda_plugin() else traced.lower()).compile()
    memory = compiled.memory_analysis()
    batch_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in batch) // a.devices
    slots = config.model.num_experts if trainer.slots is None else trainer.slots.num_slots
    row = {
        "devices": a.devices,
        "compiled_for": "H200" if ahead_of_time.has_cuda_plugin() else "CPU",
        "experts_a_layer_and_device": slots,
        "planned_bytes": allocated_bytes_per_device(config, layout),
        "planned_state_bytes": planned_state_bytes(config, layout, slots),
        "state_bytes": memory.argument_size_in_bytes - batch_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "lowered_s": round(lowered_s, 1),
        "compiled_s": round(time.perf_counter() - begun, 1),
    }
    result = {
        "benchmark": "a training step of ufo-17b, compiled ahead of time",
        "rows": [report.progress(row)],
    }
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
