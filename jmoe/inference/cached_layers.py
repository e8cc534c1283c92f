"""The layers of a decoder over a KV cache, up to the experts that their tokens choose.

`inference/mesh` reuses these functions inside `shard_map`.

Legend:
P rows of a step
C tokens a row
T tokens, P * C
D hidden
H query heads
e size of a value head
K experts that a token chooses
W blocks of a table
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import NO_WINDOW
from jmoe.inference import few_tokens
from jmoe.inference.delta_states import DeltaCache, advance_states
from jmoe.inference.kv_cache import BLOCK, KVCache, LayerCache, is_not_padding, write_and_attend
from jmoe.layers.attention import CacheInputs
from jmoe.layers.embedding import lookup
from jmoe.layers.gated_delta import GatedDeltaNet
from jmoe.layers.low_rank import LayerAdapters
from jmoe.layers.router import weigh_inputs
from jmoe.layers.slot_experts import ExpertInputs, UnchosenInputs, sum_outputs
from jmoe.models.block import AttentionModule, Block, add_residual
from jmoe.models.functional import ModuleStructure
from kernels_pallas.expert_choices import WeightedOutputs
from kernels_pallas.implementations import Name, default_implementations, first_supported

# (x + attention [P, C, D], cache, output of a dense MLP or inputs of experts)
Routed = tuple[jax.Array, LayerCache, jax.Array | ExpertInputs | UnchosenInputs]
Arrays = tuple[jax.Array, ...]  # of a module, as `functional.split` returns them


class Hidden(NamedTuple):
    """A layer's input x + y, not added yet.

    y_TD: float32, the output of the previous layer's feed-forward; perhaps summands of it.
    """

    x_PCD: jax.Array
    y_TD: jax.Array | WeightedOutputs

    def sum(self) -> jax.Array:
        """Return x + y in x's dtype."""
        return add_residual(self.x_PCD, sum_outputs(self.y_TD))


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


def places_in_chunk(places: CachePlaces, chunk: int) -> CachePlaces:
    """Return the places of a step's tokens counted from the start of their chunk, in a layer that
    attends within chunks; the places as they are in a layer of full attention.

    chunk: tokens of a chunk. Unless it is a multiple of `BLOCK`, sequences have one chunk at most
    (`LazyCheckpoint.max_positions`). The tokens of a row are all of one chunk, as `Scheduler` cuts
    them.
    """
    blocks_PW, positions_PC, window, *_ = places
    width = blocks_PW.shape[1]
    if chunk % BLOCK or width * BLOCK <= chunk:
        return places
    real_PC = is_not_padding(positions_PC, blocks_PW)
    first_P1 = jnp.where(real_PC, positions_PC, 0)[:, :1] // chunk * chunk
    first_P1 = jnp.where(window == NO_WINDOW, 0, first_P1)
    place_PW = jnp.minimum(first_P1 // BLOCK + jnp.arange(width, dtype=jnp.int32), width - 1)
    return places._replace(
        blocks_PW=jnp.take_along_axis(blocks_PW, place_PW, axis=1),
        positions_PC=jnp.where(real_PC, positions_PC - first_P1, positions_PC),
    )


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
        blocks_PW, positions_PC, window, _, _, rows_P = self._places
        x_PCD = h_PCD.reshape(*positions_PC.shape, -1)
        if isinstance(attention, GatedDeltaNet):
            assert isinstance(self.cache, DeltaCache) and rows_P is not None
            real_PC = is_not_padding(positions_PC, blocks_PW)
            y_PCD, self.cache = advance_states(
                attention, x_PCD, self.cache, rows_P, positions_PC, real_PC
            )
            return y_PCD.reshape(h_PCD.shape)
        sinks_H = None if attention.sinks is None else attention.sinks[...]
        chunk, at = attention.config.attention_chunk_size, self._places
        if chunk is not None:
            at = places_in_chunk(at, chunk)

        def write_and_attend_to_layer(new: CacheInputs) -> jax.Array:
            assert isinstance(self.cache, KVCache)
            out_PCHe, self.cache = write_and_attend(
                new,
                self.cache,
                at.blocks_PW,
                at.positions_PC,
                scale=attention.scale,
                window=at.window,
                sinks_H=sinks_H,
                context=at.context,
                implementation=at.implementation,
            )
            return out_PCHe

        out_PCD: jax.Array = attention.attend_to_cache(
            x_PCD,
            positions_PC,
            write_and_attend_to_layer,
            window=window,
            with_output_bias=with_output_bias,
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
    *,
    chooses: bool = True,
) -> Routed:
    """Run a block without its experts; return (x + attention [P, C, D], cache, y).

    y is the dense MLP's output [T, D], or the inputs of a block's experts: `UnchosenInputs` if not
    `chooses` and a kernel can choose, else `ExpertInputs`.

    places: of all tokens on which attention runs; with tensor parallelism, those of all devices.
    adapters: LoRA adapters of the block's weights; those of its experts are not applied here.
    """
    block: Block = structure.merge(arrays)
    if adapters is not None:
        adapters.install(block, places.positions_PC.size)

    def by_xla() -> Routed:
        return _attend_and_route_in_xla(block, cache, hidden, places, layer_runner)

    def by_kernels() -> Routed:
        if adapters is not None:
            raise NotImplementedError("LoRA adapters")
        cached = CachedAttention(cache, places)
        attend = partial(cached, with_output_bias=False)
        where = places.positions_PC.reshape(-1), places.blocks_PW.shape[1] * BLOCK
        x_PCD, y = few_tokens.attend_and_route(block, hidden, attend, *where, chooses=chooses)
        return x_PCD, cached.cache, y

    if layer_runner is not UNSHARDED or "triton" not in default_implementations():
        return by_xla()
    if not few_tokens.fit_few_token_kernels(places.positions_PC.size):
        return by_xla()
    forms: list[tuple[str, Callable[[], Routed]]] = [("triton", by_kernels), ("xla", by_xla)]
    return first_supported("layer of few tokens", forms)


def _attend_and_route_in_xla(
    block: Block,
    cache: LayerCache,
    hidden: Hidden,
    places: CachePlaces,
    layer_runner: DenseLayerRunner,
) -> tuple[jax.Array, LayerCache, jax.Array | ExpertInputs]:
    """Return `attend_and_route_local`, with norms, sums and router in XLA."""
    x_PCD = hidden.sum()
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
    assert block.moe is not None
    in_TD, routing = weigh_inputs(h_TD, routing, block.moe.config.router)
    return x_PCD, cached.cache, ExpertInputs(in_TD, idx_TK, routing.topk_weights_TK, shared_TD)


def embed_local(
    structure: ModuleStructure,
    arrays: Arrays,
    tokens: jax.Array,
    positions_PC: jax.Array,
    dtype: DTypeLike,
    layer_runner: DenseLayerRunner = UNSHARDED,
    previous_PCD: jax.Array | None = None,
) -> Hidden:
    """Return the first layer's input.

    tokens: int32, any shape of as many elements as positions_PC.
    previous_PCD: see `TokenBatch`.
    """
    tokens_PC, module = tokens.reshape(positions_PC.shape), structure.merge(arrays)
    x_PCD = module.embed(
        tokens_PC, layer_runner.device_positions(positions_PC), dtype, layer_runner.lookup
    )
    if previous_PCD is not None:
        x_PCD = module.join(x_PCD, previous_PCD)
    return Hidden(x_PCD, jnp.zeros((x_PCD.size // x_PCD.shape[-1], x_PCD.shape[-1]), jnp.float32))
