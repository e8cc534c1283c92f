"""Backward passes as values: the residuals of a forward pass, without the arguments that the caller
has anyway.

Parameters are residuals too: whoever has them at hand on the way back need not keep them twice. So
`vjp_with_residuals` leaves out all arguments of the function, and `apply_vjp` is given them again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Known:
    """Stands for a residual that is not kept: one of those known."""

    index: int


def without(residuals: Any, known: Sequence[Any]) -> Any:
    """`residuals` with a placeholder for each array that is one of `known`."""

    def strip(leaf: Any) -> Any:
        return next((_Known(i) for i, k in enumerate(known) if k is leaf), leaf)

    return jax.tree.map(strip, residuals)


def with_known(residuals: Any, known: Sequence[Any]) -> Any:
    """The inverse of `without`."""
    is_known = lambda leaf: isinstance(leaf, _Known)  # noqa: E731
    return jax.tree.map(
        lambda leaf: known[leaf.index] if is_known(leaf) else leaf, residuals, is_leaf=is_known
    )


def _floating(tree: Any) -> list[jax.Array]:
    """The leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def vjp_with_residuals(
    function: Callable[..., Any], args: Sequence[Any], wanted: Sequence[int], names: Sequence[str]
) -> tuple[Any, Any]:
    """(function(*args), what `apply_vjp` needs for the gradients by the arguments that are
    `wanted`).

    Of what is inside, the values of these names are kept; the rest is computed again. All that is
    kept has a leading dimension of 1, that of devices.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def apply(*values: Any) -> tuple[list[jax.Array], Any]:
        whole = list(args)
        for place, arg in zip(wanted, values, strict=True):
            whole[place] = arg
        result = jax.checkpoint(function, policy=policy, prevent_cse=False)(*whole)
        return _floating(result), result

    _, pull, result = jax.vjp(apply, *(args[i] for i in wanted), has_aux=True)
    return result, jax.tree.map(lambda leaf: leaf[None], without(pull, jax.tree.leaves(args)))


def apply_vjp(kept: Any, args: Sequence[Any], cotangents: Any) -> Any:
    """The gradients by the `wanted` arguments; args: as `vjp_with_residuals` had them,
    cotangents: like its result.
    """
    pull = with_known(jax.tree.map(lambda leaf: leaf[0], kept), jax.tree.leaves(args))
    return pull(_floating(cotangents))
