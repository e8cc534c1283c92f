"""Where a trace may use the native operations."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

MAX_ROWS = 32  # more compute longer than their weights take to read: XLA's products are as fast

_ACTIVE = ContextVar("native operations", default=False)


@contextlib.contextmanager
def native_operations(num_tokens: int) -> Iterator[None]:
    """Let products, norms, top-k and attention over a KV cache be native while a function of few tokens is traced.

    Nothing changes for more than `MAX_ROWS` tokens, or none. Whoever compiles a function once with and once without
    this must tell the two apart, as by a static argument. The library must be loaded (`load`), and the program run on a
    CPU. Native operations have no gradients.
    """
    token = _ACTIVE.set(0 < num_tokens <= MAX_ROWS)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def takes_native() -> bool:
    """Return whether the function being traced is to use native operations."""
    return _ACTIVE.get()
