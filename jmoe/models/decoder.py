"""The decoder of every language-model family: embedding, stacked and scanned layers, norm and head;
with an encoder's layers before the decoder's, if the model has one.

Legend:
B batch
S sequence
T tokens, B * S
D hidden
V vocabulary
E experts of a layer
N layers with experts
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmoe.config import STACKS, TOKEN_ROUTED, LayerKind, ModelConfig, Remat
from jmoe.layers.context import SplitSequences
from jmoe.layers.documents import Documents
from jmoe.layers.embedding import Lookup, lookup, scale_embeddings
from jmoe.layers.experts import normal_parameter
from jmoe.layers.moe import ExpertParallel, MoEStats
from jmoe.layers.norm import Norm
from jmoe.models.block import ApplyBlock, Block
from jmoe.models.layer_patterns import LayerPattern, LayerRun, find_patterns
from jmoe.models.unstacking import layers_of_stack
from jmoe.types import PyTree
from kernels_pallas.implementations import target_device
from kernels_pallas.matmul import dot

MOST_LAYERS_WITHOUT_LOOP = 8  # of a program for a GPU


class StackedLayers(NamedTuple):
    """The scanned inputs of all layers of one kind, each with a leading layer dimension.

    params: the layers' parameters.
    keys: PRNG keys for router noise, or None.
    """

    params: PyTree
    keys: jax.Array | None


LayerInputs = dict[LayerKind, StackedLayers]
# (function that makes one layer, number of layers, their rngs) -> the layers as one module
StackLayers = Callable[[Callable[[nnx.Rngs], nnx.Module], int, nnx.Rngs], PyTree]
LayerScan = Callable[
    [Sequence[LayerPattern], ApplyBlock, LayerInputs, jax.Array], tuple[jax.Array, MoEStats | None]
]


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> PyTree:
    """Return `count` modules as one, whose parameters have a leading layer dimension.

    Each layer draws its initial values from its own key, so that `init_one_layer` can draw one
    alone.
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


def init_one_layer(
    layer: jax.Array | int, make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs
) -> PyTree:
    """Return layer number `layer` of `stack_layers(make, count, rngs)`, with the same initial
    values.
    """
    return make(nnx.Rngs(params=jax.random.split(rngs.params(), count)[layer]))


def _concat_in_layer_order(ys: tuple[jax.Array, ...], single: list[bool]) -> jax.Array:
    """Return [layers, ...] in layer order from the per-run outputs of the scan over repeats.

    ys: [repeats, ...] for runs of a single layer, else [repeats, count, ...].
    """
    if single == [True]:
        return ys[0]
    y = jnp.concatenate(
        [y[:, None] if one else y for y, one in zip(ys, single, strict=True)], axis=1
    )
    return y.reshape(-1, *y.shape[2:])


def _apply_layer(
    apply_block: ApplyBlock, run: LayerRun, x_BSD: jax.Array, layer: StackedLayers
) -> tuple[jax.Array, MoEStats | None]:
    return apply_block(run.kind, layer.params, layer.keys, run.window, x_BSD)


def runs_without_loops(patterns: Sequence[LayerPattern]) -> bool:
    """Return whether `scan_layers` runs these layers without loops: few layers on a GPU.

    A loop writes every residual to a stack that it has filled with zeros, and reads it from there;
    without it, no residual is copied. The time to compile grows with the number of layers.
    """
    num_layers = sum(len(pattern.layers) for pattern in patterns)
    return num_layers <= MOST_LAYERS_WITHOUT_LOOP and target_device().platform == "gpu"


def _apply_layers_in_order(
    patterns: Sequence[LayerPattern],
    apply_block: ApplyBlock,
    inputs: LayerInputs,
    x_BSD: jax.Array,
) -> tuple[jax.Array, MoEStats | None]:
    """Return the result of `scan_layers`, by a program that has the operations of every layer."""
    params = {kind: layers_of_stack(stack.params) for kind, stack in inputs.items()}
    stats: list[PyTree] = []
    for layer in (layer for pattern in patterns for layer in pattern.layers):
        keys = inputs[layer.kind].keys
        key = None if keys is None else keys[layer.number]
        own = params[layer.kind][layer.number]
        x_BSD, ys = apply_block(layer.kind, own, key, layer.window, x_BSD)
        stats += [ys] if layer.kind in TOKEN_ROUTED else []
    return x_BSD, jax.tree.map(lambda *ys: jnp.stack(ys), *stats) if stats else None


def scan_layers(
    patterns: Sequence[LayerPattern],
    apply_block: ApplyBlock,
    inputs: LayerInputs,
    x_BSD: jax.Array,
) -> tuple[jax.Array, MoEStats | None]:
    """Return (x after all layers [B, S, D], routing statistics with a leading [N], or None).

    Uses one scan for each pattern, and an inner scan for runs of several layers; no scan if
    `runs_without_loops`.
    """
    if runs_without_loops(patterns):
        return _apply_layers_in_order(patterns, replace(apply_block, in_loop=False), inputs, x_BSD)
    stats: list[MoEStats] = []
    for pattern in patterns:
        runs = pattern.runs()

        def apply_repeat(
            x_BSD: jax.Array, xs: list[StackedLayers], runs: list[LayerRun] = runs
        ) -> tuple[jax.Array, list[MoEStats]]:
            stats_of_pattern: list[PyTree] = []
            for run, run_xs in zip(runs, xs, strict=True):
                step = partial(_apply_layer, apply_block, run)
                x_BSD, ys = step(x_BSD, run_xs) if run.is_single else lax.scan(step, x_BSD, run_xs)
                stats_of_pattern += [ys] if run.kind in TOKEN_ROUTED else []
            return x_BSD, stats_of_pattern

        xs = [jax.tree.map(run.select, inputs[run.kind]) for run in runs]
        x_BSD, stats_of_pattern = lax.scan(apply_repeat, x_BSD, xs)
        if stats_of_pattern:
            single = [run.is_single for run in runs if run.kind in TOKEN_ROUTED]
            stats.append(
                jax.tree.map(
                    lambda *ys, single=single: _concat_in_layer_order(ys, single), *stats_of_pattern
                )
            )
    return x_BSD, jax.tree.map(
        lambda *ys: jnp.concatenate(ys) if len(ys) > 1 else ys[0], *stats
    ) if stats else None


@dataclass(frozen=True)
class DecoderExecution:
    """How a decoder runs its layers; the defaults suit one device with enough memory.

    layer_runner: a function that applies all blocks in order, called like `scan_layers`.
    lookup: a function of this device's shard of the embedding table, token ids and a dtype; returns
        the tokens' rows in that dtype.
    gather, remat: see `ApplyBlock`. split: see `Block.__call__`.
    encoder_length: how many of the first tokens of each row are the encoder's; 0 without one.
    """

    layer_runner: LayerScan = scan_layers
    lookup: Lookup = lookup
    gather: Callable[[PyTree], PyTree] = lambda params: params
    remat: Remat = "none"
    split: SplitSequences | None = None
    encoder_length: int = 0


class WithHead(Protocol):
    """A module with an output head, which is its embedding if `head` is None."""

    embedding: nnx.Param[jax.Array]
    head: nnx.Param[jax.Array] | None
    head_bias: nnx.Param[jax.Array] | None


def output_logits(module: WithHead, h_BSD: jax.Array) -> jax.Array:
    """Return float32 logits [..., V] of the last norm's output, by products in its dtype."""
    if module.head is None:
        logits = dot(h_BSD, module.embedding[...].astype(h_BSD.dtype), b_transposed=True)
    else:
        logits = dot(h_BSD, module.head[...].astype(h_BSD.dtype))
    if module.head_bias is None:
        return logits
    return logits + module.head_bias[...].astype(jnp.float32)


class Decoder(nnx.Module):
    """Maps tokens [B, S] to hidden states [B, S, D]; `lm_head` returns the matrix that makes
    logits, to which `head_bias` is added.

    The layers of each kind share one stack of parameters, in layer order. An encoder's layers run
    before the decoder's, over the same array: its first positions are the encoder's, the others the
    decoder's.
    stack: a function that makes such a stack, called like `stack_layers`.
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

        def block_maker(kind: LayerKind) -> Callable[[nnx.Rngs], nnx.Module]:
            return lambda rngs: Block(config, kind, parallel, rngs=rngs)

        std = config.initializer_range
        self.embedding = normal_parameter(rngs, (config.vocab_size, config.hidden_size), std)
        learned = config.position == "learned"
        self.positions = (
            normal_parameter(rngs, (config.max_position_embeddings, config.hidden_size), std)
            if learned
            else None
        )

        def stack_kind(kind: LayerKind) -> PyTree:
            count = config.layer_kinds.count(kind)
            return stack(block_maker(kind), count, rngs) if count else None

        self.dense_layers = stack_kind("dense")
        self.moe_layers = stack_kind("moe")
        self.linear_moe_layers = stack_kind("linear_moe")
        self.cross_dense_layers = stack_kind("cross_dense")
        self.cross_moe_layers = stack_kind("cross_moe")
        self.norm = Norm(
            config.hidden_size, config.norm, config.stream_norm_eps, 1.0 / config.logits_scaling
        )
        tied = config.tie_word_embeddings
        self.head = (
            None if tied else normal_parameter(rngs, (config.hidden_size, config.vocab_size), std)
        )
        self.head_bias = nnx.Param(jnp.zeros(config.vocab_size)) if config.head_bias else None

    @staticmethod
    def init_layer_experts(
        config: ModelConfig, layer: jax.Array | int, rngs: nnx.Rngs
    ) -> nnx.Module:
        """Return the experts of one layer as `Decoder(config, rngs=rngs)` initializes them.

        layer: index among the layers with experts.

        Inside `jit`, XLA drops the initialization of all other parameters.
        """
        drawn: PyTree = Decoder(config, stack=partial(init_one_layer, layer), rngs=rngs).moe_layers
        experts: nnx.Module = drawn.moe.experts
        return experts

    def embed(
        self,
        tokens_BS: jax.Array,
        dtype: DTypeLike,
        lookup: Lookup = lookup,
        documents: Documents | None = None,
        split: SplitSequences | None = None,
    ) -> jax.Array:
        """Return the first layer's input, [B, S, D] in `dtype`: token embedding plus learned
        positions.
        """
        with jax.named_scope("embedding"):
            x_BSD = lookup(self.embedding[...], tokens_BS, dtype)
            x_BSD = scale_embeddings(x_BSD, self.config.stream_scale)
            if self.positions is None:
                return x_BSD
            if split is not None:
                return x_BSD + self.positions[...][split.position].astype(dtype)
            if documents is None:
                return x_BSD + self.positions[...][: tokens_BS.shape[1]].astype(dtype)
            return x_BSD + self.positions[...][documents.positions()].astype(dtype)

    def lm_head(self) -> jax.Array:
        """Return the output matrix [D, V]: logits = hidden @ lm_head (+ head_bias)."""
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
        documents: Documents | None = None,
        execution: DecoderExecution = DecoderExecution(),
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (hidden states [B, S, D] in `dtype`, `MoEStats` with a leading [N], or None
        without experts). With an encoder, the hidden states are those of the decoder's tokens.

        Runs inside `shard_map` or on one device.
        key: PRNG key for router noise.
        full_capacity, keep_routing, documents: see `Block.__call__`.
        """
        x_BSD = self.embed(tokens_BS, dtype, execution.lookup, documents, execution.split)
        graphs, inputs = self.graphs_and_scan_inputs(key)
        options = {
            "dtype": dtype,
            "train": train,
            "full_capacity": full_capacity,
            "keep_routing": keep_routing,
            "documents": documents,
            "split": execution.split,
        }
        encoder_length = execution.encoder_length
        of_run = execution.gather, execution.remat, options
        apply_block = ApplyBlock(graphs, *of_run, encoder_length=encoder_length)
        layers, first = self.config.layers, self.config.first_k_dense_replace
        patterns = find_patterns(layers[:first]) + find_patterns(layers[first:])
        x_BSD, stats = execution.layer_runner(patterns, apply_block, inputs, x_BSD)
        return self.norm(x_BSD[:, encoder_length:], dtype), stats

    def graphs_and_scan_inputs(
        self, key: jax.Array | None
    ) -> tuple[dict[LayerKind, nnx.GraphDef[Block]], LayerInputs]:
        """Return (the graph of a block, its scanned inputs), each by kind of layer."""
        graphs: dict[LayerKind, nnx.GraphDef[Block]] = {}
        inputs: LayerInputs = {}
        for kind, name in STACKS.items():
            if (stack := getattr(self, name, None)) is not None:
                graphs[kind], state = nnx.split(stack)
                keys = None
                if key is not None and kind in TOKEN_ROUTED:
                    records = [layer.record for layer in self.config.layers if layer.kind == kind]
                    keys = jax.random.split(key, self.config.num_moe_layers)[np.asarray(records)]
                inputs[kind] = StackedLayers(state, keys)
        return graphs, inputs
