"""GPUs that are not here, to compile for: needs the CUDA libraries, no GPU and no driver.

What imports this sets `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` before JAX is imported.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax.experimental import topologies

TARGETS = Path(__file__).resolve().parent.parent / "targets"
MISSING = "JAX's CUDA libraries are not installed (make setup EXTRA=cuda13); no GPU is needed"


def has_cuda() -> bool:
    """Return whether JAX's CUDA libraries are installed."""
    return any(find_spec(f"jax_cuda{v}_plugin") for v in (12, 13))


def devices(target: str, num_hosts: int = 1, devices_a_host: int = 1) -> list[Any]:
    """Return the devices of a machine of GPUs of a kind ("h200", "a100")."""
    options = {
        "target_config": (TARGETS / f"{target}.txtpb").read_text(),
        "topology": f"1x{num_hosts}x{devices_a_host}",
    }
    return list(topologies.get_topology_desc(platform="cuda", topology_name=target, **options).devices)
