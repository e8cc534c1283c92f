"""One decoder for every language-model family: blocks in stacked, scanned layers between embedding
and head.

Legend: B batch, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, N MoE layers.
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

from jmoe.config import LayerKind, ModelConfig, Remat
from jmoe.layers.embedding import Lookup, lookup
from jmoe.layers.experts import normal
from jmoe.layers.moe import ExpertParallel, MoEStats
from jmoe.layers.norm import Norm
from jmoe.models.block import ApplyBlock, Block

LayerPlan = list[tuple[tuple[LayerKind, ...], int]]  # see `layer_plan`

# where their parameters are
STACKS: dict[LayerKind, str] = {"dense": "dense_layers", "moe": "moe_layers"}


class StackedLayers(NamedTuple):
    """All layers of one kind: parameters, keys of router jitter, and attention windows with a
    leading dimension.
    """

    params: Any
    keys: jax.Array | None
    windows: jax.Array | None


LayerInputs = dict[LayerKind, StackedLayers]
# (makes one layer, how many layers, what they draw from) -> those layers as one module
StackLayers = Callable[[Callable[[nnx.Rngs], nnx.Module], int, nnx.Rngs], Any]
LayerScan = Callable[
    [LayerPlan, ApplyBlock, LayerInputs, jax.Array], tuple[jax.Array, MoEStats | None]
]


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """Make `count` copies of a module as one: every parameter has a leading layer dimension,
    drawn layer by layer.
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
) -> Any:
    """Return layer number `layer` of what `stack_layers` would make, alone, from the same draws."""
    return make(nnx.Rngs(params=jax.random.split(rngs.params(), count)[layer]))


def layer_plan(kinds: Sequence[LayerKind]) -> LayerPlan:
    """[(pattern, repeats), ...]: the layers' kinds as few repeated patterns, so that regular ones
    compile once.

    Greedy: at each layer the pattern that covers most layers by repeating, the shortest of those.
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
    """Neighbouring layers of one kind in a pattern, and where their parameters lie in that
    kind's stack.
    """

    kind: LayerKind
    count: int
    offset: int  # in the layers of its kind in one repeat
    per_repeat: int  # layers of its kind in one repeat
    start: int  # of the first repeat, in the stack
    alone: bool  # one layer, run without a scan of its own

    def select(self, w: jax.Array, *, repeats: int) -> jax.Array:
        """[repeats, count, ...] of a stack, or [repeats, ...] if alone."""
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
    """[repeats, ...] of each run of one layer, or [repeats, count, ...], as [layers, ...]."""
    if alone == [True]:
        return ys[0]
    y = jnp.concatenate(
        [y[:, None] if one else y for y, one in zip(ys, alone, strict=True)], axis=1
    )
    return y.reshape(-1, *y.shape[2:])


def _step(apply_block: ApplyBlock, kind: LayerKind, x_BSD: jax.Array, layer: StackedLayers) -> Any:
    return apply_block(kind, layer.params, layer.keys, layer.windows, x_BSD)


def scan_layers(
    plan: LayerPlan, apply_block: ApplyBlock, inputs: LayerInputs, x_BSD: jax.Array
) -> tuple[jax.Array, MoEStats | None]:
    """Run all layers in order, with one scan for every repeated pattern of the two kinds."""
    used, stats = dict.fromkeys(STACKS, 0), []
    for pattern, repeats in plan:
        runs = _runs(pattern, used)

        def block(
            x_BSD: jax.Array, xs: Any, runs: list[_Run] = runs
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
    """How a decoder runs where its parameters are spread over devices, or memory is short.

    layer_runner: runs the blocks. lookup: reads the tokens' rows of the embedding table as it lies
    on this device.
    gather, remat: see `ApplyBlock`.
    """

    layer_runner: LayerScan = scan_layers
    lookup: Lookup = lookup
    gather: Callable[[Any], Any] = lambda params: params
    remat: Remat = "none"


class Decoder(nnx.Module):
    """Tokens [B, S] -> float32 hidden states [B, S, D]; `lm_head()` turns them into logits.

    Layers without experts are one stack of parameters, those with experts another, each in the
    order of the layers.
    stack: makes these.
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
        """Return the experts of one layer, counted among those with experts, of `Decoder(config,
        rngs=rngs)`.

        Inside `jit` nothing else is drawn.
        """
        drawn: Any = Decoder(config, stack=partial(one_layer, layer), rngs=rngs).moe_layers
        experts: nnx.Module = drawn.moe.experts
        return experts

    def embed(self, tokens_BS: jax.Array, dtype: Any, lookup: Lookup = lookup) -> jax.Array:
        """[B, S, D] in `dtype`: the first layer's input."""
        with jax.named_scope("embedding"):
            x_BSD = lookup(self.embedding[...], tokens_BS, dtype)
            if self.positions is not None:
                x_BSD = x_BSD + self.positions[...][: tokens_BS.shape[1]].astype(dtype)
            return x_BSD

    def lm_head(self) -> jax.Array:
        """[D, V]: logits = hidden @ lm_head."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def __call__(
        self,
        tokens_BS: jax.Array,
        *,
        dtype: Any = jnp.float32,
        key: jax.Array | None = None,
        train: bool = False,
        full_capacity: bool = False,
        keep_routing: bool = False,
        execution: Execution = Execution(),
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (hidden [B, S, D] in `dtype`, `MoEStats` with a leading [N], or None).

        Runs inside `shard_map` or on one device. key: for what routers draw. keep_routing: the
        statistics hold every token's routing.
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
        """Return (the graph of each kind's layers, what they run on)."""
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
