"""Decide whether a run's steps use the native CPU operations (`TrainConfig.native`), and trace
functions with them.
"""

import contextlib
import functools
import logging
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jmoe.config import TrainConfig
from jmoe.config.checks import check
from jmoe.status import status
from jmoe.types import PyTree
from kernels_pallas import native

log = logging.getLogger(__name__)


def steps_are_native(config: TrainConfig, mesh: Mesh) -> bool:
    """Return whether steps on `mesh` use the native operations; builds their library if necessary.

    Raises ValueError if `native` is `on` and the mesh is not of CPUs, the library cannot be built,
    or the processor lacks AVX512-BF16. With `auto` these cases return False.
    """
    platform, wanted = mesh.devices.flat[0].platform, config.native
    if wanted == "on":
        check(
            platform == "cpu",
            "native",
            wanted,
            f"must be auto or off on a {platform}: the operations are a CPU's",
        )
    if wanted == "off" or platform != "cpu" or config.compute_dtype != "bfloat16":
        return False
    try:
        with contextlib.ExitStack() as stack:
            if not native.is_built():
                stack.enter_context(
                    status(
                        "building the native operations, once on this machine", log.info, timed=True
                    )
                )
            why = None if native.multiplies_many_rows() else "the processor has no AVX512-BF16"
    except native.NotBuiltError as error:
        why = str(error)
    check(why is None or wanted != "on", "native", wanted, f"cannot be had here: {why}")
    if why is not None:
        log.info("no native operations, steps are slower: %s", why)
    return why is None


def trace_natively_if(is_native: bool, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return `function`, traced with native operations if `is_native`."""

    @functools.wraps(function)
    def traced_natively(*args: PyTree, **options: PyTree) -> PyTree:
        with native.allow_native_training(
            is_native, background=is_native and jax.process_count() > 1
        ):
            return function(*args, **options)

    return traced_natively
