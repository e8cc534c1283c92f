"""Which implementation of an operation runs: the first that supports the case.

Operations have one folder each: `reference.py` says what they compute, other modules do it fast for
some platform and raise `NotImplementedError` for what they do not support. `api.py` names the
candidates.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal, TypeVar

import jax

Name = Literal["mosaic_gpu", "xla"]
T = TypeVar("T")
logger = logging.getLogger("kernels_pallas")


_TARGET: ContextVar[Any] = ContextVar("the device that programs are traced for", default=None)


@contextlib.contextmanager
def tracing_for(device: Any) -> Iterator[None]:
    """Trace programs for a device that this process may not have: its kernels are taken."""
    token = _TARGET.set(device)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_device() -> Any:
    """Return the device that programs are traced for: of `tracing_for`, or else the process's
    first.
    """
    return jax.devices()[0] if (device := _TARGET.get()) is None else device


def default_names() -> tuple[Name, ...]:
    """The candidates for the target device, best first. The Mosaic GPU kernels are written for
    Hopper alone.
    """
    device = target_device()
    hopper = device.platform == "gpu" and device.compute_capability == "9.0"
    return ("mosaic_gpu", "xla") if hopper else ("xla",)


@cache
def _log_once(message: str) -> None:
    logger.warning(message)


def first_supported(operation: str, candidates: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """The result of the first candidate that does not raise `NotImplementedError`; the last one's
    error is raised.

    Each (operation, candidate, reason) that is passed over is logged once.
    """
    for (name, call), (following, _) in pairwise(candidates):
        try:
            return call()
        except NotImplementedError as why:
            _log_once(
                f"{operation}: {name} does not support this case ({why}); {following} is used"
            )
    return candidates[-1][1]()


def run(
    modules: Mapping[Name, str], implementation: Any, function: str, *args: Any, **options: Any
) -> Any:
    """function(*args, **options) of one of `modules`.

    implementation: None for the first that supports the case; a name; or an object with the
    function itself.
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
