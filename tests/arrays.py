"""Comparisons of pytrees of arrays."""

from typing import Any

import jax
import numpy as np


def assert_trees_close(ours: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Check that every leaf has the other's shape and is within `tolerance` of its largest value."""
    structure: Any = jax.tree.structure(ours)
    assert structure == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True):
        where, a64, b64 = jax.tree_util.keystr(path), np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a64.shape == b64.shape, where
        np.testing.assert_allclose(a64, b64, rtol=0, atol=tolerance * np.abs(b64).max(), err_msg=where)


def differing(a: Any, b: Any) -> list[str]:
    """Return the paths of the arrays that are not equal bit for bit."""
    pairs = zip(jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), (_, y) in pairs if x.tobytes() != y.tobytes()]
