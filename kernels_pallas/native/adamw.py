"""AdamW on the host's cores, for parameters in numpy arrays (`adamw.cc`).

`jmoe/offload/expert_updates.py` calls this for experts whose weights and moments are host records.

Legend:
  W  steps of one call
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kernels_pallas.native.library import load

BFLOAT16 = np.dtype(jnp.bfloat16)


class HostParameter(NamedTuple):
    """One parameter with its AdamW state, C-contiguous arrays of one shape.

    w, m, v: float32, updated in place. g: gradient, float32 or bfloat16; None for zeros. copy:
    bfloat16, receives the updated w, rounded to nearest; None for no copy. decay: whether weight
    decay applies.
    """

    w: NDArray[np.float32]
    m: NDArray[np.float32]
    v: NDArray[np.float32]
    g: np.ndarray | None
    copy: np.ndarray | None
    decay: bool


class HostAdamWSteps(NamedTuple):
    """Consecutive AdamW steps, of which only the first has a gradient.

    lr_W: float32 learning rates. m_factor_W, v_factor_W: float32 1 / (1 - beta^t) of both moments.
    clip: factor of the gradient.
    """

    lr_W: NDArray[np.float32]
    m_factor_W: NDArray[np.float32]
    v_factor_W: NDArray[np.float32]
    clip: float


class AdamWSettings(NamedTuple):
    """The constants of AdamW that no step changes."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class _Array(ctypes.Structure):  # `AdamWArray` in adamw.cc
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "m", "v", "g", "copy")),
        ("size", ctypes.c_int64),
        ("wide", ctypes.c_int32),
        ("decay", ctypes.c_int32),
    ]


class _Rounded(ctypes.Structure):  # `RoundedArray` in adamw.cc
    _fields_ = [("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("size", ctypes.c_int64)]


@cache
def _load_library() -> ctypes.CDLL:
    return _open_library(load())


def _open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.jmoe_adamw.argtypes = [pointer, count, pointer, count, pointer]
    library.jmoe_round_to_bfloat16.argtypes = [pointer, count]
    library.jmoe_adamw.restype = library.jmoe_round_to_bfloat16.restype = None
    return library


def adamw_in_place(
    parameters: Sequence[HostParameter], steps: HostAdamWSteps, settings: AdamWSettings
) -> None:
    """Apply AdamW steps to the parameters, on all cores, without the interpreter's lock.

    The result has the bits of `jmoe.optim.adamw.adamw_update` on XLA:CPU, with every instruction
    set. Raises `ValueError` if an array has another dtype, size or layout than `HostParameter`
    says.
    """
    arrays = (_Array * len(parameters))(*map(_adamw_array_struct, parameters))
    steps_W3 = np.stack([steps.lr_W, steps.m_factor_W, steps.v_factor_W], 1).astype(np.float32)
    beta1, beta2, eps, weight_decay = settings
    constants = np.array(
        [beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay, steps.clip], np.float32
    )
    _load_library().jmoe_adamw(
        arrays, len(arrays), steps_W3.ctypes.data, len(steps_W3), constants.ctypes.data
    )


def round_to_bfloat16(pairs: Sequence[tuple[NDArray[np.float32], np.ndarray]]) -> None:
    """Write each float32 array to the bfloat16 array beside it, rounded to nearest, on all cores.

    Raises `ValueError` if an array has another dtype or layout, or the two differ in size.
    """
    arrays = (_Rounded * len(pairs))(
        *(
            _Rounded(
                _checked_address(a, (np.float32,), a.size),
                _checked_address(b, (BFLOAT16,), a.size),
                a.size,
            )
            for a, b in pairs
        )
    )
    _load_library().jmoe_round_to_bfloat16(arrays, len(arrays))


def _adamw_array_struct(p: HostParameter) -> _Array:
    state = (_checked_address(a, (np.float32,), p.w.size) for a in (p.w, p.m, p.v))
    g = None if p.g is None else _checked_address(p.g, (np.float32, BFLOAT16), p.w.size)
    copy = None if p.copy is None else _checked_address(p.copy, (BFLOAT16,), p.w.size)
    is_wide = p.g is None or p.g.dtype == np.float32
    return _Array(*state, g, copy, p.w.size, is_wide, p.decay)


def _checked_address(array: np.ndarray, dtypes: Sequence[type | np.dtype], size: int) -> int:
    if array.dtype not in dtypes or array.size != size or not array.flags.c_contiguous:
        raise ValueError(
            f"array = {array.dtype} {array.shape}: must be C-contiguous, of {size} elements and"
            f" one of {[np.dtype(d).name for d in dtypes]}"
        )
    return array.ctypes.data
