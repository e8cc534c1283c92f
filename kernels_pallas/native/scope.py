"""Context managers that allow native operations in a trace: inference operations for few rows, and
training operations, which have gradients.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.native.library import has_wide_vectors, multiplies_many_rows

SIZE_MULTIPLE = 16  # sizes of matrices and values in native products of many rows are multiples
MAX_ROWS = 32  # with more rows arithmetic takes longer than reading weights

_TOKENS = ContextVar("tokens of native operations", default=0)
_TRAINING = ContextVar("native operations of a training step", default=False)
_BACKGROUND = ContextVar(
    "native operations of a training step run in the background", default=False
)


@contextlib.contextmanager
def allow_native_inference(num_tokens: int) -> Iterator[None]:
    """Allow native products, norms, top-k and attention over a KV cache while a function of
    `num_tokens` tokens is traced.

    With more than `MAX_ROWS` tokens only attention is native on a processor with AVX512-BF16
    (`uses_native_attention`), and only dense bfloat16 products on one with AVX2 alone
    (`uses_native_products_of_many_rows`). With 0 tokens nothing is native. A function that is
    compiled both with and without this context needs a static argument that tells the two apart.
    The library must be loaded (`load`) and the program run on a CPU. These operations have no
    gradients.
    """
    token = _TOKENS.set(num_tokens)
    try:
        yield
    finally:
        _TOKENS.reset(token)


def uses_native_inference() -> bool:
    """Return whether the current trace uses native operations for few tokens: it is inside
    `allow_native_inference` with 1 to `MAX_ROWS` tokens.
    """
    return 0 < _TOKENS.get() <= MAX_ROWS


def uses_native_products_of_many_rows() -> bool:
    """Return whether the current trace uses native products of many bfloat16 rows, which widen
    weights to float32: it is inside `allow_native_inference` with more than `MAX_ROWS` tokens, and
    the processor has AVX2 but not AVX512-BF16, with which XLA's products are as fast.
    """
    return _TOKENS.get() > MAX_ROWS and has_wide_vectors() and not multiplies_many_rows()


def uses_native_attention(dtype: DTypeLike, key_dim: int, value_dim: int) -> bool:
    """Return whether the current trace, inside `allow_native_inference`, uses native attention over
    a KV cache of this dtype and these head sizes.

    With at most `MAX_ROWS` tokens always; with more if dtype and sizes fit and the processor
    multiplies many bfloat16 rows.
    """
    fits = dtype == jnp.bfloat16 and key_dim % 2 == 0 and value_dim % SIZE_MULTIPLE == 0
    return uses_native_inference() or (_TOKENS.get() > MAX_ROWS and fits and multiplies_many_rows())


@contextlib.contextmanager
def allow_native_training(wanted: bool, *, background: bool = False) -> Iterator[None]:
    """Allow native causal attention and experts, both with gradients, while a training step is
    traced.

    wanted: True requires `multiplies_many_rows`; False leaves an enclosing context's setting
    unchanged. background: operations run on another thread of XLA's pool, and the program continues
    with whatever does not depend on them, so that collectives overlap with them.
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


def runs_in_background() -> bool:
    """Return whether the current trace runs native training operations in the background."""
    return _BACKGROUND.get()


def uses_native_training(*dtypes: DTypeLike, multiples: tuple[int, ...]) -> bool:
    """Return whether the current trace is inside `allow_native_training`, all `dtypes` are bfloat16
    and all sizes in `multiples` are multiples of `SIZE_MULTIPLE`.
    """
    fits = all(dtype == jnp.bfloat16 for dtype in dtypes) and all(
        size % SIZE_MULTIPLE == 0 for size in multiples
    )
    return _TRAINING.get() and fits
