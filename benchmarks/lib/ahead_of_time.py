"""Benchmarks that compile for GPUs that are not here, and what they do without JAX's CUDA
libraries.

What imports this sets `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` before JAX is imported
(`jmoe.runtime.hide_devices`).
"""

import time
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.planning.gpu_estimate import GpuRates, estimate_module
from jmoe.planning.hlo import parse_hlo
from jmoe.run.ahead_of_time import abstract_gpu_devices, has_cuda_plugin, lower_for_device

__all__ = [
    "Jitted",
    "Programs",
    "abstract_gpu_devices",
    "has_cuda_plugin",
    "lower_for_device",
    "skip_without_cuda_libraries",
]
Jitted = Callable[..., object]  # what `jax.jit` returns
MISSING = "JAX's CUDA libraries are not installed (make setup EXTRA=cuda13); no GPU is needed"


def skip_without_cuda_libraries() -> bool:
    """Return whether JAX's CUDA libraries are missing; if so, print that as the result."""
    if has_cuda_plugin():
        return False
    print(f"skipped: {MISSING}")
    report.finish({"skipped": True})
    return True


class Programs:
    """Compiles programs for a GPU that this machine lacks, each on the shapes of earlier results.

    rows: what compiling each program told. rates: of the GPU, for `estimated_s` of
    each row; None for rows without it.
    """

    def __init__(self, device: jax.Device, rates: GpuRates | None = None) -> None:
        self.rows: list[JsonObject] = []
        self._device, self._rates = device, rates
        self._place = jax.sharding.SingleDeviceSharding(device)

    def abstract_array(self, dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        """Return an array's shape and dtype, on the device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

    def abstract_tree(self, tree: Any) -> Any:
        """Return the arrays' shapes and dtypes, on the device."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._place), tree
        )

    def compile(self, name: str, function: Jitted, *operands: Any, **options: Any) -> Any:
        """Compile a jitted function of abstract operands; return its results' shapes."""
        begun = time.perf_counter()
        results, lowered = lower_for_device(self._device, function, *operands, **options)
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        row = {
            "program": name,
            "hopper_kernel_mentions": lowered.as_text().count("mosaic_gpu"),
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "compile_s": round(time.perf_counter() - begun, 1),
        }
        if self._rates is not None:
            estimate = estimate_module(parse_hlo(compiled.as_text() or ""), self._rates)
            row["estimated_s"] = round(estimate.seconds, 6)
        self.rows.append(report.progress(row))
        return self.abstract_tree(results)
