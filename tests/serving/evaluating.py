"""What the forks of `test_forks.py` do. It imports little, as what a fork server begins with
does.
"""

import os
from collections.abc import Callable
from typing import Any


def begin_evaluating(refusal: str | None = None) -> Callable[[bytes], bytes]:
    """A fork evaluates what it is asked, as Python."""
    if refusal is not None:
        raise ValueError(refusal)
    names: dict[str, Any] = {"os": os, "kept": []}
    return lambda question: repr(eval(question, names)).encode()
