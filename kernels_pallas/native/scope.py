"""Where a trace may use the native operations: those for few rows, and those for many, which
have gradients.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from kernels_pallas.native.library import multiplies_many_rows

SIZE_MULTIPLE = 16  # of the sizes of matrices and values that native products of many rows take
MAX_ROWS = 32  # more compute longer than their weights take to read: XLA's products are as fast

_TOKENS = ContextVar("tokens of native operations", default=0)
_TRAINING = ContextVar("native operations of a training step", default=False)
_BACKGROUND = ContextVar(
    "native operations of a training step run in the background", default=False
)


@contextlib.contextmanager
def native_operations(num_tokens: int) -> Iterator[None]:
    """Let products, norms, top-k and attention over a KV cache be native while a function of few
    tokens is traced.

    Of more than `MAX_ROWS` tokens attention alone, where the processor multiplies many rows of
    bfloat16; for none nothing changes. Whoever compiles a function once with and once without this
    must tell the two apart, as by a static argument. The library must be loaded (`load`), and the
    program run on a CPU. These operations have no gradients.
    """
    token = _TOKENS.set(num_tokens)
    try:
        yield
    finally:
        _TOKENS.reset(token)


def takes_native() -> bool:
    """Return whether the function being traced is to use native operations for few tokens."""
    return 0 < _TOKENS.get() <= MAX_ROWS


def takes_native_attention(dtype: Any, key_dim: int, value_dim: int) -> bool:
    """Return whether it is to use native attention, with heads of these sizes."""
    fits = dtype == jnp.bfloat16 and key_dim % 2 == 0 and value_dim % SIZE_MULTIPLE == 0
    return takes_native() or (_TOKENS.get() > MAX_ROWS and fits and multiplies_many_rows())


@contextlib.contextmanager
def native_training(wanted: bool, *, background: bool = False) -> Iterator[None]:
    """Let attention of whole sequences and experts, both with gradients, be native while a training
    step is traced.

    wanted: only where `multiplies_many_rows` says that they can be; False leaves that as it is.
    background: a program goes on to what does not wait for these operations, as it does behind
    XLA's products: collectives travel meanwhile.
    """
    tokens = (
        _TRAINING.set(wanted or _TRAINING.get()),
        _BACKGROUND.set(background or _BACKGROUND.get()),
    )
    try:
        yield
    finally:
        _TRAINING.reset(tokens[0])
        _BACKGROUND.reset(tokens[1])


def in_background() -> bool:
    """Return whether the operations of a training step are to run in the background of the
    program.
    """
    return _BACKGROUND.get()


def trains_native(*dtypes: Any, multiples: tuple[int, ...]) -> bool:
    """Return whether the function being traced is to use those of a training step, on arrays of
    these dtypes.

    multiples: sizes that have to be multiples of `SIZE_MULTIPLE` for it.
    """
    fits = all(dtype == jnp.bfloat16 for dtype in dtypes) and all(
        size % SIZE_MULTIPLE == 0 for size in multiples
    )
    return _TRAINING.get() and fits
