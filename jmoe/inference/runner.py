"""The engine's decoder on one device: layers over a KV cache, with experts in slots.

`Engine` calls `ModelRunner` once a step; `inference/mesh` reuses the layers inside `shard_map`.

A layer is one program for attention, router and shared expert, and further programs of
`slot_experts` for its experts. Programs compile once per shape and serve all layers of a kind and
all policies (`Residency`), which differ only in the slots. So streamed experts give the same
result, bit for bit, as resident ones.

Legend:
P rows of a step
C tokens a row
T tokens, P * C
D hidden
V vocabulary
E experts of a layer
K experts that a token chooses
N layers with experts
W blocks of a table
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmoe.config import ModelConfig
from jmoe.inference import few_tokens
from jmoe.inference.delta_states import DeltaCache, advance_states
from jmoe.inference.kv_cache import (
    BLOCK,
    KVCache,
    LayerCache,
    copy_cache_blocks,
    is_not_padding,
    write_and_attend,
)
from jmoe.inference.popularity import Estimator
from jmoe.inference.sampler import TokensInStep
from jmoe.inference.sampler_arrays import BatchParams
from jmoe.inference.sampling import greedy, sample_settled
from jmoe.inference.scheduler import ChunkGroup
from jmoe.inference.served_adapters import NO_ADAPTERS
from jmoe.layers.attention import CacheInputs
from jmoe.layers.embedding import lookup
from jmoe.layers.gated_delta import GatedDeltaNet
from jmoe.layers.low_rank import LayerAdapters
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.models.block import AttentionModule, Block, add_residual
from jmoe.models.functional import ModuleStructure, split_arrays
from jmoe.models.lazy_checkpoint import EmbedAndHead
from jmoe.offload.policies import ExpertResidency, Residency
from jmoe.offload.slots import add_expert_outputs_in_tiles
from jmoe.types import PyTree
from kernels_pallas.implementations import Name, default_implementations, first_supported
from kernels_pallas.native import ExpertByteOffsets, allow_native_inference, find_slots, slot_mlp
from kernels_pallas.paged_attention import reads_in_place

RECENT_STEPS = 16
# on an accelerator without a kernel that reads blocks in place, programs for single tokens read
# this many positions, a program for each
CONTEXTS = [512 * 4**n for n in range(12)]
# the most layers in one program, for steps of few tokens that need no choices on the host
LAYERS_A_PROGRAM = 8
# the same on an accelerator, whose programs of more layers take minutes to compile
LAYERS_ON_ACCELERATOR = 32
Arrays = tuple[jax.Array, ...]  # of a module, as `functional.split` returns them


def runs_on_cpu() -> bool:
    """Return whether the default device is a CPU, on which loops over rows and blocks are fast."""
    return jax.devices()[0].platform == "cpu"


def context_bucket(num_positions: int, table_positions: int) -> int | None:
    """Return how many positions of a table the attention of single tokens reads: the smallest of
    `CONTEXTS` that is at least `num_positions`, so that few programs are compiled, and at most
    `table_positions`.

    None if a kernel reads blocks in place, whose one program serves all lengths.
    """
    if reads_in_place():
        return None
    return min(next(n for n in CONTEXTS if n >= num_positions), table_positions)


class TokenBatch(NamedTuple):
    """The tokens of one program, as host arrays; tokens_T may be on the device.

    tokens_T: int32.
    blocks_PW: int32, each row's table of blocks of the cache; the places that no token reaches may
        hold any block.
    positions_PC: int32, positions of each row; S = W * `BLOCK` marks padding.
    adapter_P: int32, the number of each row's LoRA adapter; None if the model has none.
    sampling: the parameters of at least P rows if the program is to sample by `sample_settled`;
        only for single tokens in programs of several layers, see `ModelRunner.samples_in_step`.
    rows_P: int32, the engine's row of each row, which has the states of gated delta networks; None
        if the model has none.
    """

    tokens_T: Any
    blocks_PW: Any
    positions_PC: Any
    adapter_P: Any = None
    sampling: BatchParams | None = None
    rows_P: Any = None


class BatchChoices(NamedTuple):
    """The experts that a batch's tokens chose.

    layers: int32 arrays [N', T, K] that concatenate to [N, T, K]; E marks padding.
    lost: tokens of a step that ran ahead whose sequence had ended, to be counted as padding.
    """

    layers: list[jax.Array]
    lost: tuple[int, ...] = ()


class BatchOutput(NamedTuple):
    """Hidden states after the last layer, [P, C, D], and the experts that the tokens chose.

    logits_PV: float32; only set for single tokens whose last program computed logits.
    step_tokens: the tokens sampled in the program of the logits, if it did.
    """

    x_PCD: jax.Array
    choices: BatchChoices
    logits_PV: jax.Array | None = None
    step_tokens: TokensInStep | None = None


class Hidden(NamedTuple):
    """A layer's input x + y, not added yet.

    y_TD: float32, the output of the previous layer's feed-forward.
    """

    x_PCD: jax.Array
    y_TD: jax.Array


class CachePlaces(NamedTuple):
    """Where a step's tokens are in a layer's cache, and which positions each attends to.

    window: int32, number of positions, the token's own included; None for all.
    context, implementation: see `write_and_attend`.
    rows_P: see `TokenBatch`.
    """

    blocks_PW: jax.Array
    positions_PC: jax.Array
    window: jax.Array | np.int32 | None = None
    context: int | None = None
    implementation: Name | None = None
    rows_P: jax.Array | None = None


class CachedAttention:
    """Attention over a KV cache, to which it first writes the step's keys and values; or a gated
    delta network on the states of its rows.

    cache: the cache, updated by the call.
    """

    def __init__(self, cache: LayerCache, places: CachePlaces) -> None:
        self.cache, self._places = cache, places

    def __call__(
        self, attention: AttentionModule, h_PCD: jax.Array, *, with_output_bias: bool = True
    ) -> jax.Array:
        """Return the attention's output, in the shape of `h_PCD`: [P, C, D] or [T, D].

        with_output_bias: False if the caller adds the bias of the output projection.
        """
        blocks_PW, positions_PC, window, context, implementation, rows_P = self._places
        x_PCD = h_PCD.reshape(*positions_PC.shape, -1)
        if isinstance(attention, GatedDeltaNet):
            assert isinstance(self.cache, DeltaCache) and rows_P is not None
            real_PC = is_not_padding(positions_PC, blocks_PW)
            y_PCD, self.cache = advance_states(
                attention, x_PCD, self.cache, rows_P, positions_PC, real_PC
            )
            return y_PCD.reshape(h_PCD.shape)
        sinks_H = None if attention.sinks is None else attention.sinks[...]

        def write_and_attend_to_layer(new: CacheInputs) -> jax.Array:
            assert isinstance(self.cache, KVCache)
            out_PCHe, self.cache = write_and_attend(
                new,
                self.cache,
                blocks_PW,
                positions_PC,
                scale=attention.scale,
                window=window,
                sinks_H=sinks_H,
                context=context,
                implementation=implementation,
            )
            return out_PCHe

        out_PCD: jax.Array = attention.attend_to_cache(
            x_PCD, positions_PC, write_and_attend_to_layer, with_output_bias=with_output_bias
        )
        return out_PCD.reshape(h_PCD.shape)


class DenseLayerRunner:
    """Runs dense layers with unsharded weights, on this device's tokens alone.

    `ShardedDenseLayerRunner` overrides it for tensor parallelism.
    """

    lookup = staticmethod(lookup)

    def device_positions(self, positions_PC: jax.Array) -> jax.Array:
        """Return the positions of the tokens on which `apply` runs a layer on this device.

        positions_PC: those of all tokens of the step.
        """
        return positions_PC

    def apply(self, layer: Callable[[jax.Array], jax.Array], h: jax.Array) -> jax.Array:
        """Return layer(h) for this device's tokens. `layer` works on each token alone and has no
        routed experts.
        """
        return layer(h)


UNSHARDED = DenseLayerRunner()


def attend_and_route_local(
    structure: ModuleStructure,
    arrays: Arrays,
    cache: LayerCache,
    hidden: Hidden,
    places: CachePlaces,
    layer_runner: DenseLayerRunner = UNSHARDED,
    adapters: LayerAdapters | None = None,
) -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs]:
    """Run a block without its experts; return (x + attention [P, C, D], cache, y).

    y is the dense MLP's output [T, D], or the `ExpertInputs` of a block with experts.

    places: of all tokens on which attention runs; with tensor parallelism, those of all devices.
    adapters: LoRA adapters of the block's weights; those of its experts are not applied here.
    """
    block: Block = structure.merge(arrays)
    if adapters is not None:
        adapters.install(block, places.positions_PC.size)

    def by_xla() -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs]:
        return _attend_and_route_in_xla(block, cache, hidden, places, layer_runner)

    def by_kernels() -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs]:
        if adapters is not None:
            raise NotImplementedError("LoRA adapters")
        cached = CachedAttention(cache, places)
        attend = partial(cached, with_output_bias=False)
        where = places.positions_PC.reshape(-1), places.blocks_PW.shape[1] * BLOCK
        x_PCD, y = few_tokens.attend_and_route(block, hidden, attend, *where)
        return x_PCD, cached.cache, y

    if layer_runner is not UNSHARDED or "triton" not in default_implementations():
        return by_xla()
    if not few_tokens.fit_few_token_kernels(places.positions_PC.size):
        return by_xla()
    return first_supported("layer of few tokens", [("triton", by_kernels), ("xla", by_xla)])


def _attend_and_route_in_xla(
    block: Block,
    cache: LayerCache,
    hidden: Hidden,
    places: CachePlaces,
    layer_runner: DenseLayerRunner,
) -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs]:
    """Return `attend_and_route_local`, with norms, sums and router in XLA."""
    x_PCD = add_residual(*hidden)
    dtype = x_PCD.dtype
    cached = CachedAttention(cache, places)
    x_PCD = block.attend(
        x_PCD, lambda module, h: layer_runner.apply(partial(cached, module), h), dtype
    )
    if block.kind == "dense":
        mlp = lambda x_TD: block.feed_forward(x_TD, dtype)  # noqa: E731
        return x_PCD, cached.cache, layer_runner.apply(mlp, x_PCD.reshape(-1, x_PCD.shape[-1]))
    h_TD, routing = block.route(x_PCD, dtype)
    real_T = is_not_padding(
        layer_runner.device_positions(places.positions_PC), places.blocks_PW
    ).reshape(-1)
    # E, which is no expert, for padding
    idx_TK = jnp.where(real_T[:, None], routing.topk_idx_TK, routing.counts_E.size)
    shared_TD = (
        block.shared_output(h_TD)
        if block.shared_expert is None
        else layer_runner.apply(block.shared_output, h_TD)
    )
    return x_PCD, cached.cache, ExpertInputs(h_TD, idx_TK, routing.topk_weights_TK, shared_TD)


class LayerProgramOptions(NamedTuple):
    """Static options of a layer's program.

    native: use native (C++) operations.
    context: see `write_and_attend`.
    """

    native: bool
    context: int | None = None


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _attend_and_route_program(
    variant: LayerProgramOptions,
    structure: ModuleStructure,
    arrays: Arrays,
    cache: LayerCache,
    hidden: Hidden,
    places: CachePlaces,
    adapters: LayerAdapters | None = None,
) -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs]:
    with allow_native_inference(places.positions_PC.size * variant.native):
        return attend_and_route_local(
            structure,
            arrays,
            cache,
            hidden,
            places._replace(context=variant.context),
            adapters=adapters,
        )


_add_alone = jax.jit(lambda hidden: add_residual(*hidden))


def embed_local(
    structure: ModuleStructure,
    arrays: Arrays,
    tokens: jax.Array,
    positions_PC: jax.Array,
    dtype: DTypeLike,
    layer_runner: DenseLayerRunner = UNSHARDED,
) -> Hidden:
    """Return the first layer's input.

    tokens: int32, any shape of as many elements as positions_PC.
    """
    tokens_PC = tokens.reshape(positions_PC.shape)
    x_PCD = structure.merge(arrays).embed(
        tokens_PC, layer_runner.device_positions(positions_PC), dtype, layer_runner.lookup
    )
    return Hidden(x_PCD, jnp.zeros((x_PCD.size // x_PCD.shape[-1], x_PCD.shape[-1]), jnp.float32))


_embed = jax.jit(embed_local, static_argnums=(0, 4))


class _LayerGroupOptions(NamedTuple):
    """Static arguments of a program that runs several layers.

    layout: the slots' layout for native operations; None if the slots are device arrays by name.
    activation: the experts' activation.
    embed_and_head: structure of the modules before the first and after the last layer.
    is_first, is_last: whether the group contains the model's first and last layers.
    finds: number of a layer's experts if the program looks up their slots in the host's
        `SlotFinder`; 0 if tables give the slots.
    context: see `write_and_attend`.
    samples: whether the program finds a token for each row: by `sample_settled` if its batch has
        sampling parameters, else the most likely one.
    """

    structures: tuple[ModuleStructure, ...]
    layout: ExpertByteOffsets | None
    activation: str
    dtype: DTypeLike
    embed_and_head: ModuleStructure
    is_first: bool
    is_last: bool
    finds: int
    context: int | None = None
    samples: bool = False


class Sampled(NamedTuple):
    """The logits and tokens that a program with the last layer computes of single tokens."""

    logits_PV: jax.Array | None = None
    tokens_P: jax.Array | None = None


class _LayerOperands(NamedTuple):
    """One layer of a program that runs several: its arrays, its window and its adapters."""

    arrays: Arrays
    window: jax.Array | np.int32 | None
    adapters: LayerAdapters | None


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _apply_layers(
    static: _LayerGroupOptions,
    layers: tuple[_LayerOperands, ...],
    caches: tuple[LayerCache, ...],
    embed_and_head: Arrays,
    hidden: Hidden | None,
    batch: TokenBatch,
    experts: tuple[PyTree, jax.Array],
) -> tuple[Hidden | jax.Array, Sampled, tuple[LayerCache, ...], jax.Array | None]:
    """Run a group of layers on few tokens; asks the host only for chosen experts that have no slot.

    embed_and_head: arrays of `static.embed_and_head`.
    hidden: output of the previous group; None for the first group.
    experts: (the slots, as `static.layout` says; tables [N, E] of the experts' slots, or the
        arguments of `find_slots`).

    Returns (output, sampled, caches, choices). The output is a `Hidden`, or x [P, C, D] after the
    last layer; sampled is set after the last layer of single tokens; choices are [N, T, K], or None
    without experts.
    """
    slots, tables = experts
    written: list[LayerCache] = []
    choices: list[jax.Array] = []
    with allow_native_inference(batch.positions_PC.size * (static.layout is not None)):
        if static.is_first:
            hidden = embed_local(
                static.embed_and_head,
                embed_and_head,
                batch.tokens_T,
                batch.positions_PC,
                static.dtype,
            )
        assert hidden is not None
        for i, structure in enumerate(static.structures):
            variant = LayerProgramOptions(static.layout is not None, static.context)
            arrays, window, adapters = layers[i]
            places = CachePlaces(batch.blocks_PW, batch.positions_PC, window, rows_P=batch.rows_P)
            # layers of equal structure share one jitted function, traced once
            x_PCD, cache, y = _attend_and_route_program(
                variant, structure, arrays, caches[i], hidden, places, adapters
            )
            # stops fusion across layers: results equal those of one program per layer bit for bit
            if static.layout is None:
                x_PCD, y = lax.optimization_barrier((x_PCD, y))
            if isinstance(y, ExpertInputs):
                n = len(choices)
                if static.layout is None and structure.merge(arrays).shared_expert is None:
                    # zeros that fuse with the experts' sum, in place of those before the barrier
                    y = y._replace(y_TD=jnp.zeros_like(y.y_TD))
                table_E = (
                    find_slots(y.idx_TK, tables, n, static.finds) if static.finds else tables[n]
                )
                choices.append(y.idx_TK)
                y = with_adapters(y, adapters)
                y = _add_experts_in_slots(static, y, slots, table_E)
            hidden = Hidden(x_PCD, y)
            if static.layout is None:
                hidden = lax.optimization_barrier(hidden)
            written.append(cache)
        sampled = Sampled()
        output: Hidden | jax.Array = hidden
        if static.is_last:
            output = x_PCD = add_residual(*hidden)
            if batch.positions_PC.shape[1] == 1:
                logits_PV = static.embed_and_head.merge(embed_and_head).logits(x_PCD[:, 0])
                tokens_P = _sample_in_step(logits_PV, batch) if static.samples else None
                sampled = Sampled(logits_PV, tokens_P)
    return output, sampled, tuple(written), jnp.stack(choices) if choices else None


def _sample_in_step(logits_PV: jax.Array, batch: TokenBatch) -> jax.Array:
    """Return the token after each single token of a batch, int32 [P]."""
    if batch.sampling is None:
        return greedy(logits_PV)
    params = jax.tree.map(lambda x_B: x_B[: logits_PV.shape[0]], batch.sampling)
    return sample_settled(logits_PV, params, batch.positions_PC[:, 0] + 1)


def with_adapters(routed: ExpertInputs, adapters: LayerAdapters | None) -> ExpertInputs:
    """Return a layer's routed tokens with the adapters of its experts."""
    if adapters is None:
        return routed
    return routed._replace(adapters=adapters.expert_adapters(routed.h_TD.shape[0]))


def _add_experts_in_slots(
    static: _LayerGroupOptions, routed: ExpertInputs, slots: PyTree, table_E: jax.Array
) -> jax.Array:
    """Return float32 [T, D]: `routed.y_TD` + the weighted sum of each token's experts."""
    if static.layout is None:
        return add_expert_outputs_in_tiles(static.activation, routed, slots, table_E)
    tokens = (routed.h_TD, routed.idx_TK, routed.weights_TK, routed.y_TD)
    return slot_mlp(tokens, slots, table_E, static.layout, static.activation)


@partial(jax.jit, static_argnums=(0, 4))
def logits_at_tokens(
    structure: ModuleStructure,
    arrays: Arrays,
    x_PCD: jax.Array,
    at_P: jax.Array,
    native: bool = False,
) -> jax.Array:
    """Return the logits after token `at_P` of each row, float32 [P, V].

    native: use native (C++) operations.
    """
    with allow_native_inference(x_PCD.shape[0] * native):
        return structure.merge(arrays).logits(x_PCD[jnp.arange(x_PCD.shape[0]), at_P])


@partial(jax.jit, static_argnums=0)
def logits_of_row(
    structure: ModuleStructure, arrays: Arrays, x_PCD: jax.Array, row: jax.Array
) -> jax.Array:
    """Return the logits after every token of row `row` of x, float32 [C, V]."""
    return structure.merge(arrays).logits(x_PCD[row])


@partial(jax.jit, static_argnums=(0, 3))
def logits_of_all(
    structure: ModuleStructure, arrays: Arrays, x_PCD: jax.Array, native: bool = False
) -> jax.Array:
    """Return the logits after every token, float32 [P, C, V].

    native: use native (C++) operations.
    """
    p, c, d = x_PCD.shape
    with allow_native_inference(p * c * native):
        return structure.merge(arrays).logits(x_PCD.reshape(-1, d)).reshape(p, c, -1)


class Runner(Protocol):
    """Runs a model for an engine, on one device or on a mesh.

    `make_batch` and `padding_batches` return batches of the runner's own type, which `forward`
    takes; `forward` and `zero_output` return its own type of outputs, which `logits`,
    `logits_of_chunk` and `logits_of_all` take.
    """

    config: ModelConfig
    caches: list[LayerCache]
    readback_s: float
    estimate_s: float

    @property
    def residency(self) -> ExpertResidency: ...
    @property
    def recent_choices(self) -> deque[Any]: ...
    def make_batch(self, group: ChunkGroup) -> Any: ...
    def padding_batches(self, num_rows: int, width: int) -> list[Any]: ...
    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None: ...
    def zero_output(self, num_rows: int, width: int) -> Any: ...
    def forward(self, batches: Sequence[Any], /) -> list[Any]: ...
    def copy_cache_blocks(self, copies: Any, count: int) -> None: ...
    def logits(self, hidden: Any, at_P: np.ndarray, /) -> jax.Array: ...
    def logits_of_chunk(self, hidden: Any, row: int, /) -> jax.Array: ...
    def logits_of_all(self, hidden: Any, /) -> jax.Array: ...
    def tokens_per_expert(self) -> np.ndarray: ...
    def last_expert_choices(self) -> list[np.ndarray]: ...


class ModelRunner:
    """Runs tokens through all layers on one device; owns the KV caches.

    adapters: the LoRA adapters that sequences name, to be set before the first step.
    """

    def __init__(  # noqa: PLR0913  the parts that loading makes
        self,
        config: ModelConfig,
        embed_and_head: EmbedAndHead,
        layers: Sequence[Block],
        residency: Residency,
        caches: tuple[Sequence[LayerCache], int],
        dtype: DTypeLike,
        estimator: Estimator | None = None,
        *,
        native: bool = False,
        draft_width: int = 1,
    ) -> None:
        """Split the modules into structures and arrays.

        embed_and_head, layers: from `LazyCheckpoint.load_dense_modules`.
        caches: (each layer's cache, W).
        native: use native (C++) operations for few tokens; not with adapters, which they lack.
        draft_width: tokens of a chunk with a draft, 1 without speculation.
        """
        self.native, self.adapters = native, NO_ADAPTERS
        self._decode_widths = (1, draft_width)
        self._on_cpu = runs_on_cpu()
        self.config = config
        self.residency = residency
        self.dtype = dtype
        self.estimator = estimator
        self.readback_s, self.estimate_s = 0.0, 0.0  # see `EngineStats`
        # of each batch of the last steps
        self.recent_choices: deque[list[BatchChoices]] = deque(maxlen=RECENT_STEPS)
        self.caches, self.table_width = list(caches[0]), caches[1]
        self.embed_and_head = split_arrays(embed_and_head)
        self._layers = [split_arrays(layer) for layer in layers]
        self._num_moe_layers = config.num_moe_layers
        self._windows: list[Any] = [
            None if layer.window is None else np.int32(layer.window) for layer in config.layers
        ]
        # what an accelerator's steps would otherwise copy there every time
        self._tables_source: np.ndarray | None = None
        self._tables: dict[int, jax.Array] = {}
        if not self._on_cpu:
            self._windows = jax.device_put(self._windows, jax.devices()[0])

    @property
    def num_table_positions(self) -> int:
        """S, the positions of a table; also the position that marks padding."""
        return self.table_width * BLOCK

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        """Begin a step; see `ExpertResidency.begin_step`."""
        self.residency.begin_step(whole_layers=whole_layers, on_host=on_host)

    def make_batch(self, group: ChunkGroup) -> TokenBatch:
        """Return a group's chunks as host arrays, padded to [num_rows, width]."""
        tokens_PC = np.zeros((group.num_rows, group.width), np.int32)
        blocks_PW = np.zeros((group.num_rows, self.table_width), np.int32)
        positions_PC = np.full((group.num_rows, group.width), self.num_table_positions, np.int32)
        for i, chunk in enumerate(group.chunks):
            blocks_PW[i, : len(chunk.block_ids)] = chunk.block_ids
            tokens_PC[i, : len(chunk.tokens)] = chunk.tokens
            positions_PC[i, : len(chunk.tokens)] = np.arange(chunk.start, chunk.end)
        return TokenBatch(
            tokens_PC.reshape(-1),
            blocks_PW,
            positions_PC,
            self.adapters.adapter_numbers_of_rows(group),
            rows_P=self.state_rows(group),
        )

    def state_rows(self, group: ChunkGroup) -> np.ndarray | None:
        """Return `TokenBatch.rows_P` of a group's chunks; None if no layer has states."""
        if not self.config.has_linear_attention:
            return None
        rows_P = np.full(group.num_rows, np.iinfo(np.int32).max, np.int32)
        rows_P[: len(group.chunks)] = [chunk.row for chunk in group.chunks]
        return rows_P

    def padding_batches(self, num_rows: int, width: int) -> list[TokenBatch]:
        """Return a batch of padding for every shape that a group of `num_rows` chunks of `width`
        tokens can take, to compile programs.
        """
        return [self.make_batch(ChunkGroup((), num_rows, width))]

    def zero_output(self, num_rows: int, width: int) -> BatchOutput:
        """Return an output of `forward` that is all zeros and has no logits, to compile programs
        that take one.
        """
        x_PCD = np.zeros((num_rows, width, self.config.hidden_size), self.dtype)
        return BatchOutput(jax.device_put(x_PCD, jax.devices()[0]), BatchChoices([]))

    def forward(self, batches: Sequence[TokenBatch | BatchOutput]) -> list[BatchOutput]:
        """Return the output of every batch of a step; outputs of `run_batch` are passed through.

        Batches of few tokens run one after the other, several layers a program. The others run
        layer by layer together, so that each layer's experts are acquired once. A batch's programs,
        and thus its bits, do not depend on the other batches.
        """
        programs = [
            batch if isinstance(batch, BatchOutput) else self._run_layer_groups_if_possible(batch)
            for batch in batches
        ]
        left = [
            g
            for g, done in zip(batches, programs, strict=True)
            if done is None and isinstance(g, TokenBatch)
        ]
        others = iter(self.run_layer_by_layer(left) if left else [])
        outputs = [done or next(others) for done in programs]
        self.recent_choices.append([output.choices for output in outputs])
        return outputs

    def run_batch(self, batch: TokenBatch) -> BatchOutput:
        """Return a batch's output; its choices count as a step's only once `forward` gets the
        output.
        """
        return self._run_layer_groups_if_possible(batch) or self.run_layer_by_layer([batch])[0]

    def can_run_ahead(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` can begin before the host has read the previous
        tokens.

        Requires experts that stay on the device and, on a CPU, native operations: other programs
        there read every layer's choices back.
        """
        stay = self.residency.tables_NE is not None
        return stay and (self._runs_natively(num_tokens) or not self._on_cpu)

    @property
    def samples_in_step(self) -> bool:
        """Whether programs of single tokens sample as `TokenBatch.sampling` says."""
        return not self._on_cpu and self.residency.tables_NE is not None and self.estimator is None

    def _runs_natively(self, num_tokens: int) -> bool:
        """Return whether native operations run a step of `num_tokens`, several layers a program."""
        slots = self.residency.slots.native
        return (
            slots is not None
            and self.needs_no_choice_readback
            and slots.supports(num_tokens, self.dtype)
        )

    def _can_run_layer_groups(self, positions_PC: Any) -> bool:
        """Return whether a batch runs several layers a program.

        On a CPU this needs few tokens and native operations; on an accelerator, single tokens or
        drafts, and experts that stay there.
        """
        if self._on_cpu:
            return self._runs_natively(positions_PC.size)
        return self.samples_in_step and positions_PC.shape[1] in self._decode_widths

    def _context_bucket(self, batch: TokenBatch) -> int | None:
        """Return the `context_bucket` of a batch of single tokens on an accelerator; None for other
        batches.
        """
        positions_PC, length = batch.positions_PC, self.num_table_positions
        if self._on_cpu or positions_PC.shape[1] > 1:
            return None
        return context_bucket(
            int(positions_PC.max(initial=0, where=positions_PC < length)) + 1, length
        )

    @property
    def needs_no_choice_readback(self) -> bool:
        """Whether native programs of few tokens need not report chosen experts to the host.

        True if experts stay in their slots, or the programs find slots themselves and no estimator
        runs.
        """
        finds = self.residency.finder is not None and self.estimator is None
        return self.native and (finds or self.residency.tables_NE is not None)

    def run_layer_by_layer(self, groups: Sequence[TokenBatch]) -> list[BatchOutput]:
        """Run all batches together, one layer at a time, and return their outputs."""
        variants = [LayerProgramOptions(self.native, self._context_bucket(g)) for g in groups]
        groups = [TokenBatch(*jax.device_put(tuple(g), jax.devices()[0])) for g in groups]
        xs = [_embed(*self.embed_and_head, g.tokens_T, g.positions_PC, self.dtype) for g in groups]
        # the layer with experts whose slots running programs may still read, and its outputs
        held: tuple[int, list[jax.Array]] | None = None
        path: list[np.ndarray] = []
        choices: list[list[jax.Array]] = [[] for _ in groups]
        for i, layer in enumerate(self._layers):
            added: list[jax.Array | ExpertInputs] = []
            for n, g in enumerate(groups):
                of_layer = (
                    *layer,
                    self.caches[i],
                    xs[n],
                    CachePlaces(g.blocks_PW, g.positions_PC, self._windows[i], rows_P=g.rows_P),
                    self.adapters.layer_adapters_for_rows(i, g.adapter_P),
                )
                x_PCD, self.caches[i], y = _attend_and_route_program(variants[n], *of_layer)
                xs[n] = xs[n]._replace(x_PCD=x_PCD)
                if isinstance(y, ExpertInputs):
                    y = with_adapters(y, of_layer[-1])
                added.append(y)
            routed = [y for y in added if isinstance(y, ExpertInputs)]
            ys = [y for y in added if not isinstance(y, ExpertInputs)]
            if routed:
                self._await_outputs_and_release_slots(held)
                record = self.config.layers[i].record
                ys = self._run_experts(record, routed, path)
                held = (record, ys)
                for of_group, r in zip(choices, routed, strict=True):
                    of_group.append(r.idx_TK[None])
            xs = [Hidden(x.x_PCD, y) for x, y in zip(xs, ys, strict=True)]
        self._await_outputs_and_release_slots(held)
        return [
            BatchOutput(_add_alone(x), BatchChoices(of_group))
            for x, of_group in zip(xs, choices, strict=True)
        ]

    def _run_layer_groups_if_possible(self, g: TokenBatch) -> BatchOutput | None:
        """Return a batch's output, run several layers a program; None if the batch does not allow
        it.
        """
        if not self._can_run_layer_groups(g.positions_PC):
            return None
        finder = self.residency.finder
        layout, slots = self.residency.slots.layout_and_program_operand()
        context = self._context_bucket(g)
        if not isinstance(g.tokens_T, jax.Array):  # committed, as tokens sampled on the device are
            g = g._replace(tokens_T=jax.device_put(g.tokens_T, jax.devices()[0]))
        embed_and_head, outside = self.embed_and_head
        output: Hidden | jax.Array | None = None
        sampled = Sampled()
        size = self._num_layers_per_program()
        finds = 0 if finder is None else self.config.num_experts
        chosen: list[jax.Array] = []
        with self.residency.let_programs_use_finder():
            for start in range(0, len(self._layers), size):
                some = slice(start, start + size)
                structures, arrays = zip(*self._layers[some], strict=True)
                numbers = range(start, start + len(arrays))
                adapters = [self.adapters.layer_adapters_for_rows(i, g.adapter_P) for i in numbers]
                is_last = start + size >= len(self._layers)
                place = embed_and_head, start == 0, is_last
                static = _LayerGroupOptions(
                    *(structures, layout, self.config.hidden_act, self.dtype, *place, finds),
                    context=context,
                    samples=not self._on_cpu,
                )
                n = self.config.layers[start].record
                tables = finder.find_slots_operand(n) if finder else self._slot_tables(n, size)
                of_layers = (
                    tuple(map(_LayerOperands, arrays, self._windows[some], adapters)),
                    tuple(self.caches[some]),
                    outside,
                    output,
                    g if is_last else g._replace(sampling=None),  # one program for middle groups
                    (slots, tables),
                )
                output, sampled, self.caches[some], choices_NTK = _apply_layers(static, *of_layers)
                if choices_NTK is not None:
                    chosen.append(choices_NTK)
            if finder is not None:  # the programs read it, so it must not change before they end
                jax.block_until_ready(output)
        assert isinstance(output, jax.Array)  # of the group with the last layer
        step_tokens = None
        if sampled.tokens_P is not None:
            step_tokens = TokensInStep(sampled.tokens_P, are_drawn=g.sampling is not None)
        return BatchOutput(output, BatchChoices(chosen), sampled.logits_PV, step_tokens)

    def _num_layers_per_program(self) -> int:
        """Return the number of layers in a program of several: on an accelerator all of them, or
        equal parts of at most `LAYERS_ON_ACCELERATOR`.
        """
        if self._on_cpu:
            return LAYERS_A_PROGRAM
        num_layers = len(self._layers)
        return -(-num_layers // -(-num_layers // LAYERS_ON_ACCELERATOR))

    def _slot_tables(self, start: int, size: int) -> np.ndarray | jax.Array | None:
        """Return the tables of `size` layers with experts from `start` on, on an accelerator as an
        array there, which later steps use again; None if experts have no permanent slots.
        """
        tables_NE = self.residency.tables_NE
        if tables_NE is None or self._on_cpu:
            return None if tables_NE is None else tables_NE[start : start + size]
        if self._tables_source is not tables_NE:
            self._tables_source, self._tables = tables_NE, {}
        if start not in self._tables:
            some_NE = tables_NE[start : start + size]
            self._tables[start] = jax.device_put(some_NE, jax.devices()[0])
        return self._tables[start]

    def _run_experts(
        self, moe_layer: int, routed: list[ExpertInputs], path: list[np.ndarray]
    ) -> list[jax.Array]:
        """Return the output of a layer's experts for every batch.

        path: choices of the layers before; this layer's are appended if the host needs them.
        """
        residency, chosen = self.residency, None
        if residency.needs_choices:
            if self.estimator is not None:
                self.estimator.start_next_estimate(moe_layer, [r.h_TD for r in routed])
            indices = [r.idx_TK for r in routed]
            for idx_TK in indices:
                idx_TK.copy_to_host_async()
            jax.block_until_ready(indices)  # readback_s excludes the time to compute them
            begun, waited_s = time.perf_counter(), residency.waited_s
            chosen = np.concatenate([np.asarray(idx_TK) for idx_TK in indices])
            path.append(chosen)
        table_E = residency.acquire(moe_layer, chosen)
        if chosen is not None:
            self.readback_s += time.perf_counter() - begun - (residency.waited_s - waited_s)
        out = [residency.add_expert_outputs(r, table_E, self.config.hidden_act) for r in routed]
        following = (moe_layer + 1) % self._num_moe_layers
        if chosen is not None and self.estimator is not None and following != moe_layer:
            begun = time.perf_counter()
            residency.prefetch_guessed(following, self.estimator.estimate_next_experts(path))
            self.estimate_s += time.perf_counter() - begun
        return out

    def tokens_per_expert(self) -> np.ndarray:
        """Return int64 [N, E]: tokens that each expert got in the last `RECENT_STEPS` steps.

        Copies the routers' choices from the device now; steps only keep references to them.
        """
        experts = self.config.num_experts
        use_NE = np.zeros((self.config.num_moe_layers, experts + 1), np.int64)  # last: padding
        for step in self._read_choices(list(self.recent_choices)):
            for layer, idx_TK in enumerate(step):
                use_NE[layer] += np.bincount(idx_TK.reshape(-1), minlength=experts + 1)
        return use_NE[:, :-1]

    def last_expert_choices(self) -> list[np.ndarray]:
        """Return the last step's choices of experts, int32 [T, K] for each layer; E marks padding.

        All layers list the tokens of all batches in the same order. Waits for the device.
        """
        return self._read_choices([self.recent_choices[-1]])[0] if self.recent_choices else []

    def _read_choices(self, steps: list[list[BatchChoices]]) -> list[list[np.ndarray]]:
        """Return the choices of each step and layer as host arrays; E replaces those of lost
        tokens.

        Waits for the device once.
        """
        read = jax.device_get([[choices.layers for choices in step] for step in steps])
        split = [
            [[idx_TK for some in layers for idx_TK in some] for layers in step] for step in read
        ]
        joined = [
            [np.concatenate(of_batches) for of_batches in zip(*step, strict=True)] for step in split
        ]
        for step, batches, layers in zip(steps, split, joined, strict=True):
            first = 0
            for choices, of_layers in zip(step, batches, strict=True):
                for idx_TK in layers:
                    idx_TK[[first + token for token in choices.lost]] = self.config.num_experts
                first += len(of_layers[0]) if of_layers else 0
        return joined

    def _await_outputs_and_release_slots(
        self, layer_and_outputs: tuple[int, list[jax.Array]] | None
    ) -> None:
        """Wait for the outputs of a layer's experts, and release the slots of that layer.

        layer_and_outputs: nothing is done for None.
        """
        if layer_and_outputs is not None and self.residency.streams:
            layer, outputs = layer_and_outputs
            jax.block_until_ready(outputs)
            self.residency.release(layer)

    def copy_cache_blocks(self, copies: Sequence[tuple[int, int]], count: int) -> None:
        """Copy blocks of every cache to other blocks, one after the other.

        copies: at most W pairs (source, target), of which the first `count` are copied.
        """
        sources_W, targets_W = np.zeros((2, self.table_width), np.int32)
        for i, (source, target) in enumerate(copies):
            sources_W[i], targets_W[i] = source, target
        operands = sources_W, targets_W, np.int32(count)
        self.caches = [
            copy_cache_blocks(cache, *operands) if isinstance(cache, KVCache) else cache
            for cache in self.caches
        ]

    def logits_of_chunk(self, output: BatchOutput, row: int) -> jax.Array:
        """Return the logits after every token of chunk `row` of a batch, padding included, float32
        [C, V].
        """
        return logits_of_row(*self.embed_and_head, output.x_PCD, np.int32(row))

    def logits_of_all(self, output: BatchOutput) -> jax.Array:
        """Return the logits after every token of a batch of few, float32 [P, C, V]."""
        return logits_of_all(*self.embed_and_head, output.x_PCD, self.native)

    def logits(self, output: BatchOutput, at_P: np.ndarray) -> jax.Array:
        """Return the logits after token `at_P` of each chunk of a batch, float32 [P, V]."""
        if output.logits_PV is not None:
            return output.logits_PV
        return logits_at_tokens(*self.embed_and_head, output.x_PCD, at_P, self.native)
