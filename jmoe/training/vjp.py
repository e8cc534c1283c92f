"""Backward passes as values: `jax.vjp` residuals that leave out the arrays the caller has anyway.

Parameters are residuals too, and the caller still holds them in the backward pass.
`vjp_with_residuals` therefore leaves out the function's arguments, and `apply_vjp` takes them
again. The streamed step passes these residuals between compiled programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmoe.types import PyTree


@jax.tree_util.register_static
@dataclass(frozen=True)
class _KnownPlaceholder:
    """Placeholder for a residual that the caller holds already: entry `index` of `known`."""

    index: int


def replace_known_residuals(residuals: PyTree, known: Sequence[PyTree]) -> PyTree:
    """Return `residuals` with a placeholder for each array that is an element of `known` (compared
    by identity).
    """

    def replace_leaf(leaf: PyTree) -> PyTree:
        return next((_KnownPlaceholder(i) for i, k in enumerate(known) if k is leaf), leaf)

    return jax.tree.map(replace_leaf, residuals)


def restore_known_residuals(residuals: PyTree, known: Sequence[PyTree]) -> PyTree:
    """Return `residuals` with each placeholder replaced by its element of `known`; the inverse of
    `replace_known_residuals`.
    """
    is_known = lambda leaf: isinstance(leaf, _KnownPlaceholder)  # noqa: E731
    return jax.tree.map(
        lambda leaf: known[leaf.index] if is_known(leaf) else leaf, residuals, is_leaf=is_known
    )


def _float_leaves(tree: PyTree) -> list[jax.Array]:
    """Return the floating-point leaves, the only ones with cotangents."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def vjp_with_residuals(
    function: Callable[..., PyTree],
    args: Sequence[PyTree],
    wanted: Sequence[int],
    names: Sequence[str],
) -> tuple[PyTree, PyTree]:
    """Return (function(*args), residuals for `apply_vjp`).

    wanted: positions of the arguments to differentiate by. names: the `checkpoint_name`s of
    intermediate values to save; the backward pass recomputes the others. Each saved array gets a
    leading dimension of 1, so that `shard_map` can concatenate them over devices.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def apply_to_wanted(*values: PyTree) -> tuple[list[jax.Array], PyTree]:
        whole = list(args)
        for place, arg in zip(wanted, values, strict=True):
            whole[place] = arg
        result = jax.checkpoint(function, policy=policy, prevent_cse=False)(*whole)
        return _float_leaves(result), result

    _, pull, result = jax.vjp(apply_to_wanted, *(args[i] for i in wanted), has_aux=True)
    return result, jax.tree.map(
        lambda leaf: leaf[None], replace_known_residuals(pull, jax.tree.leaves(args))
    )


def apply_vjp(residuals: PyTree, args: Sequence[PyTree], cotangents: PyTree) -> PyTree:
    """Return the gradients of the `wanted` arguments of `vjp_with_residuals`.

    args: the same arguments as there. cotangents: a tree like the function's result; leaves that
    are not floating-point are ignored.
    """
    pull = restore_known_residuals(
        jax.tree.map(lambda leaf: leaf[0], residuals), jax.tree.leaves(args)
    )
    return pull(_float_leaves(cotangents))
