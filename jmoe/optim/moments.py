"""The moments that an optimizer keeps of each parameter: two in float32 by AdamW; one of a matrix
by Muon; two in 8 bits with `optimizer.moments` = "8bit".

Matrices are those of layers: attention, MLPs and experts, each expert's matrix by itself.
Embeddings, the output head, routers, norms and biases keep AdamW's float32 moments.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import KeyPath

from jmoe.config import STACKS, OptimizerConfig, check
from jmoe.mesh import is_expert, num_stack_dims, path_names
from jmoe.optim.block_codes import BLOCK
from jmoe.optim.muon import NEWTON_SCHULZ_STEPS
from jmoe.types import PyTree

Form = Literal["adamw", "muon", "8bit"]
LEAST_BLOCK = 32  # with smaller blocks the scales would outweigh the codes' savings
NOT_MULTIPLIED = ("router", "w_conv")  # routers stay in float32; taps of a convolution


class Moments(NamedTuple):
    """Trees of the trained parameters' moments, or of their specs.

    m, v: first and second moments. v lacks the parameters that Muon updates. scales: {"m": tree,
    "v": tree} of the blocks' scales of parameters whose moments are codes; None without codes.
    """

    m: PyTree
    v: PyTree
    scales: PyTree


def is_layer_matrix(path: KeyPath, shape: tuple[int, ...]) -> bool:
    """Return whether the parameter at `path` is a matrix of a layer, or a stack of matrices of
    experts.
    """
    names = path_names(path)
    in_layer = names[0] in STACKS.values() and not set(names) & set(NOT_MULTIPLIED)
    dims = len(shape) - num_stack_dims(path) - is_expert(path)
    return in_layer and dims == 2 and shape[-1] > 1


def code_block_size(num_columns: int) -> int:
    """Return the number of neighbouring elements of a row that share a scale; it divides the row's
    length.
    """
    return math.gcd(BLOCK, num_columns)


def moment_form(config: OptimizerConfig, path: KeyPath, shape: tuple[int, ...]) -> Form:
    """Return how the moments of the parameter at `path` are kept."""
    if not is_layer_matrix(path, shape):
        return "adamw"
    if config.kind == "muon":
        return "muon"
    coded = config.moments == "8bit" and code_block_size(shape[-1]) >= LEAST_BLOCK
    return "8bit" if coded else "adamw"


def initial_moments(config: OptimizerConfig, params: PyTree) -> Moments:
    """Return zero moments of trained parameters, as nested dictionaries of arrays."""
    forms = _forms(config, params)

    def zeros(form: Form, w: jax.Array) -> jax.Array:
        return jnp.zeros(w.shape, jnp.uint8 if form == "8bit" else jnp.float32)

    def zero_scales(form: Form, w: jax.Array) -> jax.Array:
        blocks = w.shape[-1] // code_block_size(w.shape[-1])
        return jnp.zeros((*w.shape[:-1], blocks), jnp.float32)

    return _moments(forms, params, zeros, zero_scales)


def moment_specs(config: OptimizerConfig, shapes: PyTree, specs: PyTree, mesh: Mesh) -> Moments:
    """Return the partition specs of the moments of trained parameters: those of the parameters.

    Raises ValueError if the mesh cuts a block of codes, which has one scale.
    """
    forms = _forms(config, shapes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if moment_form(config, path, leaf.shape) == "8bit":
            _check_blocks_whole(path, leaf, _at(specs, path), mesh)
    return _moments(forms, specs, lambda _, spec: spec, lambda _, spec: spec)


def moment_bytes(config: OptimizerConfig, shapes: PyTree) -> tuple[int, int]:
    """Return the bytes of the moments of (parameters outside of experts, experts)."""
    sizes = {False: 0, True: 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        form = moment_form(config, path, leaf.shape)
        num_blocks = leaf.size // code_block_size(leaf.shape[-1]) if form == "8bit" else 0
        each = {"adamw": 8, "muon": 4, "8bit": 2}[form]
        sizes[is_expert(path)] += each * leaf.size + 8 * num_blocks
    return sizes[False], sizes[True]


def muon_flops(config: OptimizerConfig, shapes: PyTree) -> float:
    """Return the FLOPs of the products by which one step orthogonalizes all of Muon's matrices."""
    flops = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if moment_form(config, path, leaf.shape) == "muon":
            short, long = sorted(leaf.shape[-2:])
            matrices = leaf.size / short / long
            # X X^T and B X, and A A, of X [short, long]
            products = 2 * 2 * short**2 * long + 2 * short**3
            flops += matrices * NEWTON_SCHULZ_STEPS * products
    return flops


def describe_moments(config: OptimizerConfig, shapes: PyTree) -> list[str]:
    """Return a line with the numbers of parameters by the form of their moments; none if all are
    AdamW's in float32.
    """
    numbers: dict[Form, int] = {"adamw": 0, "muon": 0, "8bit": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        numbers[moment_form(config, path, leaf.shape)] += leaf.size
    rest = f"{numbers['adamw']:,} by AdamW with float32 moments"
    if config.kind == "muon":
        return [f"Muon updates {numbers['muon']:,} parameters in matrices of layers, {rest}"]
    if config.moments == "8bit":
        return [f"AdamW updates {numbers['8bit']:,} parameters with moments in 8 bits, {rest}"]
    return []


def _forms(config: OptimizerConfig, shapes: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: moment_form(config, path, leaf.shape), shapes
    )


def _moments(
    forms: PyTree,
    leaves: PyTree,
    moment: Callable[[Form, PyTree], PyTree],
    scales: Callable[[Form, PyTree], PyTree],
) -> Moments:
    """Return the trees of moments that `moment` makes of a form and a leaf, and of `scales`."""
    m = jax.tree.map(moment, forms, leaves)
    v = _without_missing(
        jax.tree.map(
            lambda form, leaf: None if form == "muon" else moment(form, leaf), forms, leaves
        )
    )
    coded = _without_missing(
        jax.tree.map(
            lambda form, leaf: scales(form, leaf) if form == "8bit" else None, forms, leaves
        )
    )
    both = {"m": coded, "v": jax.tree.map(lambda leaf: leaf, coded)} if coded else None
    return Moments(m, v, both)


def _without_missing(tree: PyTree) -> PyTree:
    """Return nested dictionaries without the entries that are None or hold nothing else."""
    if not isinstance(tree, dict):
        return tree
    kept = {name: _without_missing(value) for name, value in tree.items()}
    empty = lambda value: value is None or (isinstance(value, dict) and not value)  # noqa: E731
    return {name: value for name, value in kept.items() if not empty(value)}


def _at(tree: PyTree, path: KeyPath) -> PyTree:
    for name in path_names(path):
        tree = tree[name]
    return tree


def _check_blocks_whole(
    path: KeyPath, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh
) -> None:
    axes = spec[leaf.ndim - 1] if len(spec) == leaf.ndim else None
    if axes is None:
        return
    names = (axes,) if isinstance(axes, str) else axes
    shards = math.prod(mesh.shape[name] for name in names)
    columns, block = leaf.shape[-1], code_block_size(leaf.shape[-1])
    check(
        columns // shards % block == 0,
        "optimizer.moments",
        "8bit",
        f"must be float32 on this mesh: {shards} devices split the {columns} columns of"
        f" {'.'.join(path_names(path))}, of which each {block} share a scale",
    )
