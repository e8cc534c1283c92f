"""GPUs that are not here, to compile for: JAX's CUDA libraries are needed, no GPU and no driver.

`jmoe.runtime.without_devices` comes before the first import of JAX.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jmoe.config.checks import check
from kernels_pallas.implementations import tracing_for

TARGETS = Path(__file__).with_name("targets")
INSTALL = "pip install 'jmoe[cuda13]'"


def has_cuda() -> bool:
    """Return whether JAX's CUDA libraries are installed."""
    return any(find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))


def check_cuda(option: str, value: str) -> None:
    """Raise `ValueError` naming the option and what to install if there is nothing to compile
    with.
    """
    check(has_cuda(), option, value, f"needs JAX's CUDA libraries, though no GPU: {INSTALL}")


def devices(target: str, num_hosts: int = 1, devices_a_host: int = 1) -> list[Any]:
    """Return the devices of a machine of GPUs, each as a file of `targets` describes it."""
    options = {
        "target_config": (TARGETS / f"{target}.txtpb").read_text(),
        "topology": f"1x{num_hosts}x{devices_a_host}",
    }
    return list(
        topologies.get_topology_desc(platform="cuda", topology_name=target, **options).devices
    )


def lower_for(
    device: Any, function: Any, *operands: Any, **options: Any
) -> tuple[Any, jax.stages.Lowered]:
    """Return (shapes of the results, the program of a jitted function for a device, not compiled
    yet).
    """
    with tracing_for(device):
        traced = function.trace(*operands, **options)
        return traced.out_info, traced.lower(lowering_platforms=("cuda",))
