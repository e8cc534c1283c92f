"""The choice of an operation's implementation: the first that supports the operands.

Each operation has a folder: `reference.py` defines the result, other modules compute it fast on
some platform and raise NotImplementedError for operands that they do not support, and `api.py`
lists the implementations.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Literal, TypeVar, cast

import jax

Name = Literal["mosaic_gpu", "triton", "xla"]
T = TypeVar("T")
logger = logging.getLogger("kernels_pallas")


_TARGET: ContextVar[jax.Device | None] = ContextVar(
    "the device that programs are traced for", default=None
)


@contextlib.contextmanager
def trace_for_device(device: jax.Device) -> Iterator[None]:
    """Context manager in which programs are traced for `device`, with the kernels that it has; this
    process need not have the device.
    """
    token = _TARGET.set(device)
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_device() -> jax.Device:
    """Return the device that programs are traced for: `trace_for_device`'s, or this process's first
    device.
    """
    return jax.devices()[0] if (device := _TARGET.get()) is None else device


def nvidia_compute_capability() -> tuple[int, int] | None:
    """Return the target device's compute capability, (9, 0) for Hopper; None if the device is not
    an NVIDIA GPU.
    """
    device = target_device()
    if device.platform != "gpu":
        return None
    major, _, minor = device.compute_capability.partition(".")
    # an AMD GPU has gfx942
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def default_implementations() -> tuple[Name, ...]:
    """Return the implementations for the target device, best first. The Mosaic GPU kernels need
    Hopper, those in Triton an NVIDIA GPU from Ampere on; a GPU without either is named in the log.
    """
    capability = nvidia_compute_capability()
    if capability is not None and capability >= (8, 0):
        return ("mosaic_gpu", "triton", "xla") if capability == (9, 0) else ("triton", "xla")
    if (device := target_device()).platform == "gpu":
        log_once(
            "experts, permutations and attention over a cache: no kernel for a GPU of kind"
            f" {device.compute_capability} (NVIDIA from Ampere on has one); xla is used"
        )
    return ("xla",)


def implementations_among(modules: Mapping[Name, str]) -> tuple[Name, ...]:
    """Return those of `default_implementations` that an operation has."""
    return tuple(name for name in default_implementations() if name in modules)


@cache
def log_once(message: str) -> None:
    """Log a warning, unless the process has logged it before."""
    logger.warning(message)


def first_supported(operation: str, candidates: Sequence[tuple[str, Callable[[], T]]]) -> T:
    """Return the result of the first candidate that does not raise NotImplementedError; the last
    candidate's error is raised.

    Each skipped candidate is logged once, with the reason.
    """
    for (name, call_implementation), (following, _) in pairwise(candidates):
        try:
            return call_implementation()
        except NotImplementedError as why:
            log_once(f"{operation}: {name} does not support this case ({why}); {following} is used")
    return candidates[-1][1]()


def call_first_supported(
    modules: Mapping[Name, str],
    implementation: object,
    function: str,
    *args: object,
    **options: object,
) -> jax.Array:
    """Return the result of function(*args, **options), where `function` is looked up in one of
    `modules`.

    implementation: None for the first that supports the operands; a name; or an object that has the
    function. Raises ValueError for an unknown name.
    """
    if implementation is not None and not isinstance(implementation, str):
        return getattr(implementation, function)(*args, **options)
    if implementation is None:
        names = implementations_among(modules)
    else:
        names = (cast(Name, implementation),)
    if unknown := set(names) - set(modules):
        raise ValueError(f"implementation = {unknown.pop()!r}: must be one of {', '.join(modules)}")

    def call_implementation(name: Name) -> jax.Array:
        # imported on first use: the import of Mosaic GPU takes a second
        result: jax.Array = getattr(import_module(modules[name]), function)(*args, **options)
        return result

    return first_supported(function, [(name, partial(call_implementation, name)) for name in names])
