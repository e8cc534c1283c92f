"""The parameters that a run trains: all of them, or those that `train` and `freeze` choose.

Frozen parameters have no moments, and their gradients are in no norm. A tree of moments therefore
lacks their entries; `subtree_like` and `replace_subtree` go from one tree to the other.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import jax

from jmoe.config import TrainConfig, check
from jmoe.mesh import path_names
from jmoe.types import PyTree


def pattern_matches(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a pattern names a parameter, or a part that the parameter is in.

    names: the parameter's path, such as ("moe_layers", "moe", "experts", "w_up"), which `experts`,
    `experts.w_*` and `moe_layers` match.
    """
    return fnmatchcase(f".{'.'.join(names)}.", f"*.{pattern}.*")


def is_trained(config: TrainConfig, names: Sequence[str]) -> bool:
    """Return whether the run trains the parameter at this path."""
    chosen = not config.train or any(pattern_matches(pattern, names) for pattern in config.train)
    return chosen and not any(pattern_matches(pattern, names) for pattern in config.freeze)


def trained_subtree(config: TrainConfig, tree: PyTree, path: tuple[str, ...] = ()) -> PyTree:
    """Return nested dictionaries without the frozen parameters of a tree of all parameters."""
    if not (config.train or config.freeze):
        return tree
    kept: dict[str, PyTree] = {}
    for name, value in tree.items():
        names = (*path, name)
        if isinstance(value, dict):
            if part := trained_subtree(config, value, names):
                kept[name] = part
        elif is_trained(config, names):
            kept[name] = value
    return kept


def check_train_and_freeze_patterns(config: TrainConfig, shapes: PyTree) -> None:
    """Raise ValueError naming a pattern that fits no parameter, or if no parameter is trained."""
    paths = [path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for field, patterns in (("train", config.train), ("freeze", config.freeze)):
        for pattern in patterns:
            fits = any(pattern_matches(pattern, names) for names in paths)
            known = f"must fit a parameter: {', '.join('.'.join(names) for names in paths)}"
            check(fits, field, pattern, known)
    left = any(is_trained(config, names) for names in paths)
    check(left, "freeze", config.freeze, "must leave a parameter to train")


def describe_trained_and_frozen(config: TrainConfig, shapes: PyTree) -> list[str]:
    """Return a line with the numbers of trained and frozen parameters; none if all are trained."""
    if not (config.train or config.freeze):
        return []
    trained, total = (
        sum(x.size for x in jax.tree.leaves(tree))
        for tree in (trained_subtree(config, shapes), shapes)
    )
    return [f"{trained:,} parameters are trained, {total - trained:,} frozen"]


def subtree_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return the entries of nested dictionaries that `like` has too."""
    if not isinstance(like, dict):
        return tree
    return {name: subtree_like(tree[name], part) for name, part in like.items()}


def replace_subtree(tree: PyTree, replacement: PyTree) -> PyTree:
    """Return nested dictionaries with the entries of `replacement` in place of their own."""
    if not isinstance(replacement, dict):
        return replacement
    return tree | {name: replace_subtree(tree[name], value) for name, value in replacement.items()}
