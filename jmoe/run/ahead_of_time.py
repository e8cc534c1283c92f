"""Compile programs for GPUs that this machine does not have. JAX's CUDA libraries are needed, but
no GPU and no driver.

Call `jmoe.runtime.hide_devices` before the first import of JAX.
"""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jmoe.config.checks import check
from jmoe.types import PyTree
from kernels_pallas.implementations import trace_for_device

TARGETS = Path(__file__).with_name("targets")
INSTALL = "pip install 'jmoe[cuda13]'"


def has_cuda_plugin() -> bool:
    """Return True if JAX's CUDA plugin is installed."""
    return any(find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))


def check_cuda_installed(option: str, value: str) -> None:
    """Raise `ValueError`, naming the option and the package to install, if JAX's CUDA plugin is
    missing.
    """
    check(has_cuda_plugin(), option, value, f"needs JAX's CUDA libraries, though no GPU: {INSTALL}")


def abstract_gpu_devices(
    target: str, num_hosts: int = 1, devices_per_host: int = 1
) -> list[jax.Device]:
    """Return abstract JAX devices of `num_hosts` hosts with `devices_per_host` GPUs each.

    target: name of a file in the folder `targets`, which describes the GPU.
    """
    options = {
        "target_config": (TARGETS / f"{target}.txtpb").read_text(),
        "topology": f"1x{num_hosts}x{devices_per_host}",
    }
    return list(
        topologies.get_topology_desc(platform="cuda", topology_name=target, **options).devices
    )


def lower_for_device(
    device: jax.Device, function: jax.stages.Wrapped, *operands: PyTree, **options: Any
) -> tuple[PyTree, jax.stages.Lowered]:
    """Return (shapes of the results, lowered program) of a jitted function for `device`. The
    program is not compiled yet.
    """
    with trace_for_device(device), _lowering_triton_for(device):
        traced = function.trace(*operands, **options)
        return traced.out_info, traced.lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def _lowering_triton_for(device: jax.Device) -> Iterator[None]:
    """Lower Pallas-Triton kernels for `device`.

    From JAX 0.11 on they are lowered for the process's own GPU, or for a kind of GPU from JAX's
    list, in which consumer GPUs are missing.
    """
    try:
        gpu_info: Any = import_module("jax._src.pallas.triton.gpu_info")
    except ImportError:  # JAX 0.10 lowers for any GPU
        yield
        return
    capability = device.compute_capability
    number = int(capability.replace(".", ""))
    info = gpu_info.GpuInfo(gpu_version=None, arch_name=capability, compute_capability=number)
    of_this_process, gpu_info.get_gpu_info = gpu_info.get_gpu_info, lambda: info
    try:
        yield
    finally:
        gpu_info.get_gpu_info = of_this_process
