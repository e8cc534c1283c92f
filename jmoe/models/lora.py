"""LoRA adapters of a decoder: which weights have one, its arrays, and the weight that it makes.

An adapter of a weight [in, out] is a pair of arrays. The weight's columns may come from several
Hugging Face tensors (query, key and value); each has its own A, and its columns of B.

Legend:
N layers of a kind
E experts (only for the experts' weights)
P tensors that fill the weight's columns
I inputs
O outputs
r rank
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import ModelConfig, check
from jmoe.layers.low_rank import AdaptedParam, LowRank
from jmoe.mesh import EXPERTS_PATH, path_names
from jmoe.models.pretrained import abstract_decoder
from jmoe.models.tensor_names import parameter_source
from jmoe.models.weights import Names, Parameter, flatten_by_path
from jmoe.types import PyTree
from kernels_pallas.matmul import dot

DROPOUT_KEY = 0x6C6F7261  # makes the keys of dropout others than those of the routers
Adapter = dict[str, jax.Array]  # {"a": [N, E?, P, I, r], "b": [N, E?, r, O]}, or of one layer


def lora_target_of(path: Names) -> str | None:
    """Return the name in `LORA_TARGETS` of the part that a parameter belongs to; None if adapters
    do not apply to it.
    """
    inside = path[1:]
    if inside == ("moe", "router", "kernel"):
        return "router"
    if not inside or not inside[-1].startswith("w_"):
        return None
    return EXPERTS_PATH if inside[:2] == ("moe", EXPERTS_PATH) else inside[0]


def adapted_parameters(config: ModelConfig, family: str, targets: Sequence[str]) -> list[Parameter]:
    """Return the parameters that have an adapter, with the tensors of transformers 5 for them.

    Raises ValueError if the model has none of the targets.
    """
    adapted = list[Parameter]()
    for path, leaf in flatten_by_path(abstract_decoder(config)[2]).items():
        if lora_target_of(path) in targets:
            source = parameter_source(path, config, family, fused=True)
            layers = tuple(i for i, x in enumerate(config.layers) if x.stack_name == path[0])
            experts = config.num_experts if EXPERTS_PATH in path else 0
            adapted.append(Parameter(path, tuple(leaf.shape), source, layers, experts))
    check(bool(adapted), "lora.targets", tuple(targets), "must name a part that the model has")
    return adapted


def adapter_shapes(parameter: Parameter, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's `Adapter`."""
    inputs, outputs = parameter.matrix_shape
    leading = parameter.shape[:-2]
    tensors = len(parameter.source.names)
    return {"a": (*leading, tensors, inputs, rank), "b": (*leading, rank, outputs)}


def initial_adapters(key: jax.Array, parameters: Sequence[Parameter], rank: int) -> PyTree:
    """Return float32 adapters as nested dictionaries: A uniform in +-1 / sqrt(I), as in PEFT, and B
    zero.
    """
    tree: dict[str, PyTree] = {}
    for number, parameter in enumerate(parameters):
        shapes, bound = adapter_shapes(parameter, rank), parameter.matrix_shape[0] ** -0.5
        own = jax.random.fold_in(key, number)
        a = jax.random.uniform(own, shapes["a"], jnp.float32, -bound, bound)
        set_at_path(tree, parameter.path, {"a": a, "b": jnp.zeros(shapes["b"], jnp.float32)})
    return tree


def set_at_path(tree: dict[str, PyTree], path: Names, value: PyTree) -> None:
    """Put `value` at `path` of nested dictionaries."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def get_at_path(tree: PyTree, path: Names) -> PyTree:
    """Return the value at `path` of nested dictionaries."""
    for name in path:
        tree = tree[name]
    return tree


def num_adapter_elements(parameters: Sequence[Parameter], rank: int) -> int:
    """Return the number of elements of all adapters."""
    return sum(math.prod(s) for p in parameters for s in adapter_shapes(p, rank).values())


@dataclass(frozen=True)
class AdapterApplier:
    """Adds adapters to the weights of one layer.

    spans: the columns of the tensors that fill a weight, by the weight's path in a layer, which is
    the same in every stack.
    """

    spans: Mapping[Names, Sequence[tuple[int, int]]]
    scale: float

    @classmethod
    def make(cls, parameters: Sequence[Parameter], scale: float) -> Self:
        """Return the applier for adapters of these parameters. scale: factor of A B."""
        return cls({p.path[1:]: p.source.column_spans(p.shape[-1]) for p in parameters}, scale)

    def add_to_layer(self, layer: PyTree, adapters: PyTree) -> PyTree:
        """Return one layer's parameters with W + scale x A B in place of each weight W that has an
        adapter.

        The sum is rounded to W's dtype, the run's compute dtype. If the base is stored in that
        dtype, a merge writes the same weights; otherwise it rounds to the stored dtype. The
        gradient of A and B is that of the unrounded sum. adapters: nested dictionaries of the
        layer's `Adapter`s.
        """

        def add(path: jax.tree_util.KeyPath, w: jax.Array) -> jax.Array:
            names = tuple(name for name in path_names(path) if name != "value")
            if names not in self.spans:
                return w
            change = weight_change(get_at_path(adapters, names), self.spans[names], self.scale)
            return (w.astype(jnp.float32) + change).astype(w.dtype)

        with jax.named_scope("adapters"):
            return jax.tree_util.tree_map_with_path(add, layer)


def expert_low_rank(adapters: Mapping[str, Adapter], scale: float) -> dict[str, LowRank]:
    """Return the adapters of one layer's experts, by name of their weight, for products beside
    those of the weights.
    """
    return {name: LowRank(own["a"][:, 0], scale * own["b"]) for name, own in adapters.items()}


class DropoutAdaptedParam(AdaptedParam):
    """A weight to whose products an adapter adds its own, of an input with dropped elements.

    Its metadata: `adapter`, an `Adapter` of one layer; `spans`, `scale` and `dropout`; `key`, the
    PRNG key of the weight's masks.
    """

    def product_change(self, x: jax.Array) -> jax.Array:
        """Return float32 scale x dropout(x) A B. Each tensor of the weight's columns has a mask of
        its own; kept elements are divided by 1 - dropout.
        """
        adapter, kept = self.get_metadata("adapter"), 1.0 - self.get_metadata("dropout")
        parts = []
        for p, (low, high) in enumerate(self.get_metadata("spans")):
            mask = jax.random.bernoulli(
                jax.random.fold_in(self.get_metadata("key"), p), kept, x.shape
            )
            x_dropped = jnp.where(mask, x.astype(jnp.float32) / kept, 0.0)
            parts.append(dot(dot(x_dropped, adapter["a"][p]), adapter["b"][:, low:high]))
        change: jax.Array = self.get_metadata("scale") * jnp.concatenate(parts, axis=-1)
        return change


def install_dropout_adapters(
    block: nnx.Module, adapters: PyTree, applied: AdapterApplier, dropout: float, key: jax.Array
) -> None:
    """Replace each weight of a block that has an adapter by a `DropoutAdaptedParam`."""
    for number, (path, spans) in enumerate(applied.spans.items()):
        module: Any = block
        for name in path[:-1]:
            module = getattr(module, name)
        if module is None:
            continue  # a weight of another kind of layer
        own = DropoutAdaptedParam(
            getattr(module, path[-1])[...],
            adapter=get_at_path(adapters, path),
            spans=tuple(spans),
            scale=applied.scale,
            dropout=dropout,
            key=jax.random.fold_in(key, number),
        )
        setattr(module, path[-1], own)


def weight_change(adapter: Adapter, spans: Sequence[tuple[int, int]], scale: float) -> jax.Array:
    """Return scale x A B, float32 [..., I, O]."""
    a, b = adapter["a"], adapter["b"]
    parts = [
        jnp.matmul(a[..., p, :, :], b[..., low:high], precision=jax.lax.Precision.HIGHEST)
        for p, (low, high) in enumerate(spans)
    ]
    return scale * (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1))


def merged_weight(
    w: np.ndarray, adapter: Mapping[str, np.ndarray], spans: Sequence[tuple[int, int]], scale: float
) -> np.ndarray:
    """Return W + scale x A B in W's dtype, on the host: `AdapterApplier.add_to_layer` for one
    weight.
    """
    a, b = adapter["a"], adapter["b"]
    merged = w.astype(np.float32)
    for p, (low, high) in enumerate(spans):
        merged[..., low:high] += scale * (a[..., p, :, :] @ b[..., low:high])
    return merged.astype(w.dtype)
