"""The decoder of every language-model family: embedding, stacked and scanned layers, norm and head.

Legend:
B batch
S sequence
T tokens, B * S
D hidden
V vocabulary
E experts of a layer
N layers with experts
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmoe.config import LayerKind, ModelConfig, Remat
from jmoe.layers.embedding import Lookup, lookup
from jmoe.layers.experts import normal
from jmoe.layers.moe import ExpertParallel, MoEStats
from jmoe.layers.norm import Norm
from jmoe.models.block import ApplyBlock, Block
from jmoe.types import PyTree

LayerPlan = list[tuple[tuple[LayerKind, ...], int]]  # see `layer_plan`

# the attribute of `Decoder` that holds the stacked parameters of each kind of layer
STACKS: dict[LayerKind, str] = {"dense": "dense_layers", "moe": "moe_layers"}


class StackedLayers(NamedTuple):
    """The scanned inputs of all layers of one kind, each with a leading layer dimension.

    params: the layers' parameters.
    keys: PRNG keys for router noise, or None.
    windows: attention windows in tokens, int32, or None for full attention.
    """

    params: PyTree
    keys: jax.Array | None
    windows: jax.Array | None


LayerInputs = dict[LayerKind, StackedLayers]
# (function that makes one layer, number of layers, their rngs) -> the layers as one module
StackLayers = Callable[[Callable[[nnx.Rngs], nnx.Module], int, nnx.Rngs], Any]
LayerScan = Callable[
    [LayerPlan, ApplyBlock, LayerInputs, jax.Array], tuple[jax.Array, MoEStats | None]
]


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> PyTree:
    """Return `count` modules as one, whose parameters have a leading layer dimension.

    Each layer draws its initial values from its own key, so that `one_layer` can draw one alone.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    draw = lambda key: nnx.state(make(nnx.Rngs(params=key)))  # noqa: E731
    stack = nnx.merge(graph, lax.map(draw, jax.random.split(rngs.params(), count)))
    for _, variable in nnx.iter_graph(stack):
        if isinstance(variable, nnx.Variable) and (
            axes := variable.get_metadata().get("out_sharding")
        ):
            variable.set_metadata(out_sharding=(None, *axes))
    return stack


def one_layer(
    layer: jax.Array | int, make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs
) -> PyTree:
    """Return layer number `layer` of `stack_layers(make, count, rngs)`, with the same initial
    values.
    """
    return make(nnx.Rngs(params=jax.random.split(rngs.params(), count)[layer]))


def layer_plan(kinds: Sequence[LayerKind]) -> LayerPlan:
    """Return [(pattern, repeats), ...]: the layer kinds in order, as few repeated patterns.

    Each repeated pattern compiles once. Greedy: from each layer, takes the pattern whose repeats
    cover the most layers, and the shortest of equal ones.
    """
    plan, at = [], 0
    while at < len(kinds):
        best = (tuple(kinds[at : at + 1]), 1)
        for period in range(1, (len(kinds) - at) // 2 + 1):
            pattern, repeats = tuple(kinds[at : at + period]), 1
            while tuple(kinds[at + repeats * period : at + (repeats + 1) * period]) == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > len(best[0]) * best[1]:
                best = (pattern, repeats)
        plan.append(best)
        at += len(best[0]) * best[1]
    return plan


@dataclass(frozen=True)
class _Run:
    """Consecutive layers of one kind in a pattern, and the location of their parameters in the
    stack.
    """

    kind: LayerKind
    count: int
    offset: int  # index of the first layer among the layers of this kind in one repeat
    per_repeat: int  # layers of this kind in one repeat
    start: int  # index in the stack where the first repeat begins
    alone: bool  # a single layer, which needs no inner scan

    def select(self, w: jax.Array, *, repeats: int) -> jax.Array:
        """Return the run's entries of stacked parameters: [repeats, count, ...], or [repeats, ...]
        if alone.
        """
        end = self.start + repeats * self.per_repeat
        w = w if (self.start, end) == (0, w.shape[0]) else w[self.start : end]
        if self.alone and self.per_repeat == 1:
            return w
        w = w.reshape(repeats, self.per_repeat, *w.shape[1:])
        return w[:, self.offset] if self.alone else w[:, self.offset : self.offset + self.count]


def _runs(pattern: tuple[LayerKind, ...], start: dict[LayerKind, int]) -> list[_Run]:
    runs, taken = [], dict.fromkeys(STACKS, 0)
    for kind, group in itertools.groupby(pattern):
        count = len(list(group))
        alone = count == 1 and (kind == "moe" or len(pattern) == 1)
        runs.append(_Run(kind, count, taken[kind], pattern.count(kind), start[kind], alone))
        taken[kind] += count
    return runs


def _in_order(ys: tuple[jax.Array, ...], alone: list[bool]) -> jax.Array:
    """Return [layers, ...] in layer order from the per-run outputs of the scan over repeats.

    ys: [repeats, ...] for runs of a single layer, else [repeats, count, ...].
    """
    if alone == [True]:
        return ys[0]
    y = jnp.concatenate(
        [y[:, None] if one else y for y, one in zip(ys, alone, strict=True)], axis=1
    )
    return y.reshape(-1, *y.shape[2:])


def _step(
    apply_block: ApplyBlock, kind: LayerKind, x_BSD: jax.Array, layer: StackedLayers
) -> PyTree:
    return apply_block(kind, layer.params, layer.keys, layer.windows, x_BSD)


def scan_layers(
    plan: LayerPlan, apply_block: ApplyBlock, inputs: LayerInputs, x_BSD: jax.Array
) -> tuple[jax.Array, MoEStats | None]:
    """Return (x after all layers [B, S, D], routing statistics with a leading [N], or None).

    Uses one scan for each entry of the layer plan, and an inner scan for runs of several layers.
    """
    used, stats = dict.fromkeys(STACKS, 0), []
    for pattern, repeats in plan:
        runs = _runs(pattern, used)

        def block(
            x_BSD: jax.Array, xs: PyTree, runs: list[_Run] = runs
        ) -> tuple[jax.Array, list[Any]]:
            stats_of_pattern = []
            for layers, layer_xs in zip(runs, xs, strict=True):
                step = partial(_step, apply_block, layers.kind)
                x_BSD, ys = (
                    step(x_BSD, layer_xs) if layers.alone else lax.scan(step, x_BSD, layer_xs)
                )
                stats_of_pattern += [ys] if layers.kind == "moe" else []
            return x_BSD, stats_of_pattern

        xs = [
            jax.tree.map(partial(layers.select, repeats=repeats), inputs[layers.kind])
            for layers in runs
        ]
        x_BSD, stats_of_pattern = lax.scan(block, x_BSD, xs)
        if stats_of_pattern:
            alone = [layers.alone for layers in runs if layers.kind == "moe"]
            stats.append(
                jax.tree.map(lambda *ys, alone=alone: _in_order(ys, alone), *stats_of_pattern)
            )
        used = {kind: used[kind] + repeats * pattern.count(kind) for kind in used}
    return x_BSD, jax.tree.map(
        lambda *ys: jnp.concatenate(ys) if len(ys) > 1 else ys[0], *stats
    ) if stats else None


@dataclass(frozen=True)
class Execution:
    """How a decoder runs its layers; the defaults suit one device with enough memory.

    layer_runner: applies all blocks in order.
    lookup: reads the tokens' rows from this device's shard of the embedding table.
    gather, remat: see `ApplyBlock`.
    """

    layer_runner: LayerScan = scan_layers
    lookup: Lookup = lookup
    gather: Callable[[PyTree], PyTree] = lambda params: params
    remat: Remat = "none"


class Decoder(nnx.Module):
    """Maps tokens [B, S] to hidden states [B, S, D]; `lm_head` returns the matrix that makes
    logits.

    Dense layers share one stack of parameters and layers with experts another, each in layer order.
    stack: makes these stacks.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ExpertParallel | None = None,
        *,
        stack: StackLayers = stack_layers,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config

        def block(kind: LayerKind) -> Callable[[nnx.Rngs], nnx.Module]:
            return lambda rngs: Block(config, kind, parallel, rngs=rngs)

        std = config.initializer_range
        dense = config.num_hidden_layers - config.num_moe_layers
        self.embedding = normal(rngs, (config.vocab_size, config.hidden_size), std)
        learned = config.position == "learned"
        self.positions = (
            normal(rngs, (config.max_position_embeddings, config.hidden_size), std)
            if learned
            else None
        )
        self.dense_layers = stack(block("dense"), dense, rngs) if dense else None
        self.moe_layers = (
            stack(block("moe"), config.num_moe_layers, rngs) if config.num_moe_layers else None
        )
        self.norm = Norm(config.hidden_size, config.norm, config.norm_eps)
        tied = config.tie_word_embeddings
        self.head = None if tied else normal(rngs, (config.hidden_size, config.vocab_size), std)

    @staticmethod
    def experts_of(config: ModelConfig, layer: jax.Array | int, rngs: nnx.Rngs) -> nnx.Module:
        """Return the experts of one layer as `Decoder(config, rngs=rngs)` initializes them.

        layer: index among the layers with experts.

        Inside `jit`, XLA drops the initialization of all other parameters.
        """
        drawn: Any = Decoder(config, stack=partial(one_layer, layer), rngs=rngs).moe_layers
        experts: nnx.Module = drawn.moe.experts
        return experts

    def embed(self, tokens_BS: jax.Array, dtype: DTypeLike, lookup: Lookup = lookup) -> jax.Array:
        """Return the first layer's input, [B, S, D] in `dtype`: token embedding plus learned
        positions.
        """
        with jax.named_scope("embedding"):
            x_BSD = lookup(self.embedding[...], tokens_BS, dtype)
            if self.positions is not None:
                x_BSD = x_BSD + self.positions[...][: tokens_BS.shape[1]].astype(dtype)
            return x_BSD

    def lm_head(self) -> jax.Array:
        """Return the output matrix [D, V]: logits = hidden @ lm_head."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def __call__(
        self,
        tokens_BS: jax.Array,
        *,
        dtype: DTypeLike = jnp.float32,
        key: jax.Array | None = None,
        train: bool = False,
        full_capacity: bool = False,
        keep_routing: bool = False,
        execution: Execution = Execution(),
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (hidden states [B, S, D] in `dtype`, `MoEStats` with a leading [N], or None
        without experts).

        Runs inside `shard_map` or on one device.
        key: PRNG key for router noise.
        full_capacity, keep_routing: see `Block.__call__`.
        """
        x_BSD = self.embed(tokens_BS, dtype, execution.lookup)
        graphs, inputs = self._stacks(key)
        options = {
            "dtype": dtype,
            "train": train,
            "full_capacity": full_capacity,
            "keep_routing": keep_routing,
        }
        apply_block = ApplyBlock(graphs, execution.gather, execution.remat, options)
        kinds, first = self.config.layer_kinds, self.config.first_k_dense_replace
        plan = layer_plan(kinds[:first]) + layer_plan(kinds[first:])
        x_BSD, stats = execution.layer_runner(plan, apply_block, inputs, x_BSD)
        return self.norm(x_BSD, dtype), stats

    def _stacks(self, key: jax.Array | None) -> tuple[dict[LayerKind, Any], LayerInputs]:
        """Return (the graph of a block, its scanned inputs), each by kind of layer."""
        kinds = np.array(self.config.layer_kinds)
        graphs: dict[LayerKind, Any] = {}
        inputs: LayerInputs = {}
        windows = None if self.config.windows is None else np.array(self.config.windows, np.int32)
        for kind, name in STACKS.items():
            if (stack := getattr(self, name)) is not None:
                graphs[kind], state = nnx.split(stack)
                keys = (
                    jax.random.split(key, self.config.num_moe_layers)
                    if key is not None and kind == "moe"
                    else None
                )
                own = None if windows is None else jnp.asarray(windows[kinds == kind])
                inputs[kind] = StackedLayers(state, keys, own)
        return graphs, inputs
