"""Which implementation of an operation runs: the first that supports the case.

Operations have one folder each: `reference.py` says what they compute, other modules do it fast for some platform and
raise `NotImplementedError` for what they do not support. `api.py` names the candidates.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal, TypeVar

import jax

Name = Literal["mosaic_gpu", "xla"]
T = TypeVar("T")
logger = logging.getLogger("kernels_pallas")


def default_names() -> tuple[Name, ...]:
    """The candidates for the default device, best first. The Mosaic GPU kernels are written for Hopper alone."""
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and device.compute_capability == "9.0"
    return ("mosaic_gpu", "xla") if hopper else ("xla",)


@cache
def _log_once(message: str) -> None:
    logger.warning(message)


def first_supported(operation: str, candidates: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """The result of the first candidate that does not raise `NotImplementedError`; the last one's error is raised.

    Each (operation, candidate, reason) that is passed over is logged once.
    """
    for (name, call), (following, _) in pairwise(candidates):
        try:
            return call()
        except NotImplementedError as why:
            _log_once(f"{operation}: {name} does not support this case ({why}); {following} is used")
    return candidates[-1][1]()


def run(modules: Mapping[Name, str], implementation: Any, function: str, *args: Any, **options: Any) -> Any:
    """function(*args, **options) of one of `modules`.

    implementation: None for the first that supports the case; a name; or an object with the function itself.
    """
    if implementation is not None and not isinstance(implementation, str):
        return getattr(implementation, function)(*args, **options)
    names: tuple[Any, ...] = default_names() if implementation is None else (implementation,)
    if unknown := set(names) - set(modules):
        raise ValueError(f"implementation = {unknown.pop()!r}: must be one of {', '.join(modules)}")

    def call(name: Name) -> Any:
        # imported on first use: Mosaic GPU takes a second
        return getattr(import_module(modules[name]), function)(*args, **options)

    return first_supported(function, [(name, partial(call, name)) for name in names])
