"""GPUs that are not here, to compile for: needs the CUDA libraries, no GPU and no driver.

What imports this sets `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` before JAX is imported.
"""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

from benchmarks.lib import report
from kernels_pallas import implementations

TARGETS = Path(__file__).resolve().parent.parent / "targets"
MISSING = "JAX's CUDA libraries are not installed (make setup EXTRA=cuda13); no GPU is needed"


def has_cuda() -> bool:
    """Return whether JAX's CUDA libraries are installed."""
    return any(find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))


def skipped() -> bool:
    """Return whether JAX's CUDA libraries are missing; if so, print that as a benchmark's whole result."""
    if has_cuda():
        return False
    print(f"skipped: {MISSING}")
    report.finish({"skipped": True})
    return True


def devices(target: str, num_hosts: int = 1, devices_a_host: int = 1) -> list[Any]:
    """Return the devices of a machine of GPUs of a kind ("h200", "a100")."""
    options = {
        "target_config": (TARGETS / f"{target}.txtpb").read_text(),
        "topology": f"1x{num_hosts}x{devices_a_host}",
    }
    return list(topologies.get_topology_desc(platform="cuda", topology_name=target, **options).devices)


class Programs:
    """Compiles programs for a GPU that is not here, each given what those before it return, by shape alone.

    rows: what compiling each of them told.
    """

    def __init__(self, device: Any) -> None:
        self.rows: list[dict[str, Any]] = []
        self._place = jax.sharding.SingleDeviceSharding(device)

    def abstract(self, tree: Any) -> Any:
        """Return the arrays' shapes and dtypes, on the device."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._place), tree)

    def compile(self, name: str, function: Any, *operands: Any, **options: Any) -> Any:
        """Compile a jitted function of abstract operands; return its results' shapes."""
        begun = time.perf_counter()
        # the kernels of the device that is compiled for, not of this one
        with mock.patch.object(implementations, "default_names", return_value=("mosaic_gpu", "xla")):
            traced = function.trace(*operands, **options)
            lowered = traced.lower(lowering_platforms=("cuda",))
        memory = lowered.compile().memory_analysis()
        row = {
            "program": name,
            "hopper_kernel_mentions": lowered.as_text().count("mosaic_gpu"),
            "argument_bytes": memory.argument_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "compile_s": round(time.perf_counter() - begun, 1),
        }
        self.rows.append(report.progress(row))
        return self.abstract(traced.out_info)
