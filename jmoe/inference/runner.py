"""The decoder of the engine: layer by layer over a KV cache, with expert weights that come and go
in slots.

Legend: P rows of a step, C tokens a row, T = P C, D hidden, V vocabulary, E experts of a layer, K
choices a token.

A layer is a program for attention, router and shared expert, and those of `slot_experts` for its
experts. They are compiled once a shape and serve every layer of a kind and every way of keeping the
experts (`Residency`), which differ in the slots alone: so what is streamed is, bit for bit, what is
computed when everything is resident.
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

from jmoe.config import ModelConfig
from jmoe.inference.kv_cache import KVCache, copy_row, write_and_attend
from jmoe.inference.popularity import Estimator
from jmoe.inference.scheduler import ChunkGroup
from jmoe.layers.embedding import lookup
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.models.block import Block, add_residual
from jmoe.models.functional import Structure, split
from jmoe.models.lazy_checkpoint import EmbedAndHead
from jmoe.offload.policies import ExpertPlaces, Residency
from jmoe.offload.slots import table_mlp_of_tokens
from kernels_pallas.native import SlotLayout, find_slots, native_operations, slot_mlp

RECENT_STEPS = 16
# positions that programs for single tokens are compiled for on a device
CONTEXTS = [512 * 4**n for n in range(12)]
# of few tokens, which ask the host for no choice: a model's first program serves all equal ones
LAYERS_A_PROGRAM = 8
Arrays = tuple[jax.Array, ...]  # of a module


def runs_on_cpu() -> bool:
    """Return whether programs take the forms that are fast on a CPU, with loops over rows and
    blocks.
    """
    return jax.devices()[0].platform == "cpu"


def context_bound(end: int, length: int) -> int:
    """Return how many of a cache's `length` positions programs for single tokens read, if `end`
    of them are in use.
    """
    return min(next(n for n in CONTEXTS if n >= end), length)


class TokenBatch(NamedTuple):
    """The tokens of one program: rows of the cache, each with C tokens; position S: padding.

    Arrays of the host; the tokens may be on the device, where a step before has drawn them.
    """

    tokens_T: Any
    rows_P: Any
    positions_PC: Any


class BatchChoices(NamedTuple):
    """The experts that a batch's tokens chose: int32 [N, T, K] of N layers with experts at a time,
    E for padding.

    lost: tokens whose choices count as padding all the same, as their sequence had ended.
    """

    layers: list[jax.Array]
    lost: tuple[int, ...] = ()


class BatchOutput(NamedTuple):
    """Hidden states of a batch's tokens after the last layer, and the experts that they chose on
    the way.

    logits_PV: float32, where the program of the last layers made them: of single tokens.
    """

    x_PCD: jax.Array
    choices: BatchChoices
    logits_PV: jax.Array | None = None


class Hidden(NamedTuple):
    """A layer's input: x + y, y being float32 and what the feed-forward of the layer before
    adds.
    """

    x_PCD: jax.Array
    y_TD: jax.Array


class InCache(NamedTuple):
    """Where a step's tokens are in a layer's cache, and which positions they see.

    window: int32, how many positions a token sees, None for all before it. context: see
    `write_and_attend`.
    """

    rows_P: jax.Array
    positions_PC: jax.Array
    window: jax.Array | None = None
    context: int | None = None


class CachedAttention:
    """Attention of a step's tokens over a KV cache, which then holds their keys and values too."""

    def __init__(self, cache: KVCache, places: InCache) -> None:
        self.cache, self._places = cache, places

    def __call__(self, attention: Any, h_PCD: jax.Array) -> jax.Array:
        """Return the attention's output, in the shape of its normed input, [P, C, D] or [T, D]."""
        rows_P, positions_PC, window, context = self._places
        new = attention.project(h_PCD.reshape(*positions_PC.shape, -1), positions_PC)
        sinks_H = None if attention.sinks is None else attention.sinks[...]
        options: dict[str, Any] = {
            "scale": attention.scale,
            "window": window,
            "sinks_H": sinks_H,
            "context": context,
        }
        out_PCHe, self.cache = write_and_attend(new, self.cache, rows_P, positions_PC, **options)
        out_PCD: jax.Array = attention.output(out_PCHe)
        return out_PCD.reshape(h_PCD.shape)


class WholeLayers:
    """A device's dense layers where it has all of them, for its own tokens: nothing comes from
    other devices.
    """

    lookup = staticmethod(lookup)

    def own(self, positions_PC: jax.Array) -> jax.Array:
        """Return the positions of this device's tokens, of those that `apply` runs."""
        return positions_PC

    def apply(self, layer: Callable[[jax.Array], jax.Array], h: jax.Array) -> jax.Array:
        """Return what a dense layer makes of this device's tokens."""
        return layer(h)


WHOLE = WholeLayers()


def attend_local(
    structure: Structure,
    arrays: Arrays,
    cache: KVCache,
    hidden: Hidden,
    places: InCache,
    layers: WholeLayers = WHOLE,
) -> tuple[jax.Array, KVCache, jax.Array | ExpertInputs]:
    """Run a block but for its experts: (x + attention, cache, what the dense MLP adds or the
    routing).

    places: of the tokens that attention runs on, of all devices where `layers` are parts of the
    block's.
    """
    block: Block = structure.merge(arrays)
    x_PCD = add_residual(*hidden)
    dtype = x_PCD.dtype
    cached = CachedAttention(cache, places)
    x_PCD = block.attend(x_PCD, lambda module, h: layers.apply(partial(cached, module), h), dtype)
    if block.kind == "dense":
        mlp = lambda x_TD: block.feed_forward(x_TD, dtype)  # noqa: E731
        return x_PCD, cached.cache, layers.apply(mlp, x_PCD.reshape(-1, x_PCD.shape[-1]))
    h_TD, routing = block.route(x_PCD, dtype)
    real_T = layers.own(places.positions_PC).reshape(-1) < cache.length
    # E: padding chooses no expert
    idx_TK = jnp.where(real_T[:, None], routing.topk_idx_TK, routing.counts_E.size)
    shared_TD = (
        block.shared(h_TD) if block.shared_expert is None else layers.apply(block.shared, h_TD)
    )
    return x_PCD, cached.cache, ExpertInputs(h_TD, idx_TK, routing.topk_weights_TK, shared_TD)


class Form(NamedTuple):
    """How a layer but for its experts is computed: with native operations or not; see
    `write_and_attend`.
    """

    native: bool
    context: int | None = None


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _attend(
    form: Form,
    structure: Structure,
    arrays: Arrays,
    cache: KVCache,
    hidden: Hidden,
    rows_P: jax.Array,
    positions_PC: jax.Array,
    window: jax.Array | None,
) -> tuple[jax.Array, KVCache, jax.Array | ExpertInputs]:
    with native_operations(positions_PC.size * form.native):
        return attend_local(
            structure, arrays, cache, hidden, InCache(rows_P, positions_PC, window, form.context)
        )


_add_alone = jax.jit(lambda hidden: add_residual(*hidden))


def embed_local(
    structure: Structure,
    arrays: Arrays,
    tokens: jax.Array,
    positions_PC: jax.Array,
    dtype: Any,
    layers: WholeLayers = WHOLE,
) -> Hidden:
    """Return the first layer's input. tokens: as many as positions, in any shape."""
    tokens_PC = tokens.reshape(positions_PC.shape)
    x_PCD = structure.merge(arrays).embed(tokens_PC, layers.own(positions_PC), dtype, layers.lookup)
    return Hidden(x_PCD, jnp.zeros((x_PCD.size // x_PCD.shape[-1], x_PCD.shape[-1]), jnp.float32))


_embed = jax.jit(embed_local, static_argnums=(0, 4))


class _LayerGroup(NamedTuple):
    """Several layers as one program: their structures, the experts' activation.

    layout: of the slots as native operations read them; None: the slots are a device's arrays by
    name.
    embed_and_head: embeds tokens and makes logits. is_first, is_last: whether these are the first
    and the last layers.
    finds: the number of a layer's experts, where the program finds their slots; 0: tables say where
    they are.
    context: see `write_and_attend`.
    """

    structures: tuple[Structure, ...]
    layout: SlotLayout | None
    activation: str
    dtype: Any
    embed_and_head: Structure
    is_first: bool
    is_last: bool
    finds: int
    context: int | None = None


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _apply_layers(
    static: _LayerGroup,
    arrays: tuple[Arrays, ...],
    caches: tuple[KVCache, ...],
    embed_and_head: Arrays,
    hidden: Hidden | None,
    batch: TokenBatch,
    windows: tuple[jax.Array | None, ...],
    experts: tuple[Any, jax.Array],
) -> tuple[Any, jax.Array | None, tuple[KVCache, ...], jax.Array | None]:
    """Run layers of few tokens: the host is asked for nothing but what was chosen and has no slot.

    embed_and_head: arrays of `static.embed_and_head`. hidden: after the layers before. experts: the
    slots, as `static.layout` says, and the tables [N, E] of these layers with experts, or what
    `find_slots` takes. Returns `Hidden`, or x [P, C, D] after the last layer; the logits [P, V]
    after the last layer of single tokens; the caches; what the tokens chose [N, T, K], None without
    experts.
    """
    slots, tables = experts
    written: list[KVCache] = []
    choices: list[jax.Array] = []
    with native_operations(batch.positions_PC.size * (static.layout is not None)):
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
            form = Form(static.layout is not None, static.context)
            at = batch.rows_P, batch.positions_PC, windows[i]
            # equal layers are one function of the program, traced once
            x_PCD, cache, y = _attend(form, structure, arrays[i], caches[i], hidden, *at)
            if static.layout is None:  # the bits of a program a layer: XLA fuses nothing across
                x_PCD, y = lax.optimization_barrier((x_PCD, y))
            if isinstance(y, ExpertInputs):
                n = len(choices)
                table_E = (
                    find_slots(y.idx_TK, tables, n, static.finds) if static.finds else tables[n]
                )
                choices.append(y.idx_TK)
                y = _experts(static, y, slots, table_E)
            hidden = Hidden(x_PCD, y)
            if static.layout is None:
                hidden = lax.optimization_barrier(hidden)
            written.append(cache)
        after: Any = add_residual(*hidden) if static.is_last else hidden
        single = static.is_last and batch.positions_PC.shape[1] == 1
        logits_PV = (
            static.embed_and_head.merge(embed_and_head).logits(after[:, 0]) if single else None
        )
    return after, logits_PV, tuple(written), jnp.stack(choices) if choices else None


def _experts(
    static: _LayerGroup, routed: ExpertInputs, slots: Any, table_E: jax.Array
) -> jax.Array:
    """Return float32 [T, D]: `routed.y_TD` + the weighted sum of each token's experts."""
    if static.layout is None:
        return table_mlp_of_tokens(static.activation, routed, slots, table_E)
    tokens = (routed.h_TD, routed.idx_TK, routed.weights_TK, routed.y_TD)
    return slot_mlp(tokens, slots, table_E, static.layout, static.activation)


@partial(jax.jit, static_argnums=(0, 4))
def logits_after(
    structure: Structure, arrays: Arrays, x_PCD: jax.Array, at_P: jax.Array, native: bool = False
) -> jax.Array:
    """Return float32 [P, V]: the logits after token `at_P` of each row. native: with native
    operations.
    """
    with native_operations(x_PCD.shape[0] * native):
        return structure.merge(arrays).logits(x_PCD[jnp.arange(x_PCD.shape[0]), at_P])


@partial(jax.jit, static_argnums=0)
def logits_of_row(
    structure: Structure, arrays: Arrays, x_PCD: jax.Array, row: jax.Array
) -> jax.Array:
    """Return float32 [C, V]: the logits after every token of one row."""
    return structure.merge(arrays).logits(x_PCD[row])


class Runner(Protocol):
    """Runs a model for an engine, on one device or several.

    `tokens` and `padding` make batches, `forward` and `zeros` outputs, each of a kind of the
    runner's own.
    """

    config: ModelConfig
    caches: list[KVCache]
    readback_s: float
    estimate_s: float

    @property
    def residency(self) -> ExpertPlaces: ...
    @property
    def recent_choices(self) -> deque[Any]: ...
    def tokens(self, group: ChunkGroup) -> Any: ...
    def padding(self, num_rows: int, width: int) -> list[Any]: ...
    def zeros(self, num_rows: int, width: int) -> Any: ...
    def forward(self, groups: Sequence[Any], /) -> list[Any]: ...
    def copy_row(self, source: int, target: int, num_tokens: int) -> None: ...
    def logits(self, hidden: Any, at_P: np.ndarray, /) -> jax.Array: ...
    def all_logits(self, hidden: Any, row: int, /) -> jax.Array: ...
    def expert_use(self) -> np.ndarray: ...
    def last_choices(self) -> list[np.ndarray]: ...


class ModelRunner:
    """Runs tokens through all layers; holds the caches."""

    def __init__(
        self,
        config: ModelConfig,
        embed_and_head: EmbedAndHead,
        layers: Sequence[Block],
        residency: Residency,
        caches: Sequence[KVCache],
        dtype: Any,
        estimator: Estimator | None = None,
        *,
        native: bool = False,
    ) -> None:
        """Split the modules for programs.

        embed_and_head, layers: from `LazyCheckpoint.load_rest`. native: see `EngineConfig`.
        """
        self.native = native
        self._on_cpu = runs_on_cpu()
        self.config = config
        self.residency = residency
        self.dtype = dtype
        self.estimator = estimator
        self.readback_s, self.estimate_s = 0.0, 0.0  # see `EngineStats`
        # of a step's batches
        self.recent_choices: deque[list[BatchChoices]] = deque(maxlen=RECENT_STEPS)
        self.caches = list(caches)
        self.embed_and_head = split(embed_and_head)  # what embeds tokens, and what makes logits
        self._layers = [split(layer) for layer in layers]
        self._num_moe_layers = config.num_moe_layers
        self._moe_index = (np.cumsum([kind == "moe" for kind in config.layer_kinds]) - 1).tolist()
        windows = config.windows
        self._windows = [
            None if windows is None else np.int32(w) for w in windows or [0] * len(layers)
        ]

    def tokens(self, group: ChunkGroup) -> TokenBatch:
        """Return the chunks of a group as arrays, padded to [num_rows, width]."""
        tokens_PC = np.zeros((group.num_rows, group.width), np.int32)
        rows_P = np.zeros(group.num_rows, np.int32)
        positions_PC = np.full((group.num_rows, group.width), self.caches[0].length, np.int32)
        for i, chunk in enumerate(group.chunks):
            rows_P[i] = chunk.row
            tokens_PC[i, : len(chunk.tokens)] = chunk.tokens
            positions_PC[i, : len(chunk.tokens)] = np.arange(chunk.start, chunk.end)
        return TokenBatch(tokens_PC.reshape(-1), rows_P, positions_PC)

    def padding(self, num_rows: int, width: int) -> list[TokenBatch]:
        """Return batches without tokens, in every shape that a group of this size may take, to
        compile programs.
        """
        return [self.tokens(ChunkGroup((), num_rows, width))]

    def zeros(self, num_rows: int, width: int) -> BatchOutput:
        """Return an output as `forward` gives it, without logits, to compile what follows."""
        x_PCD = np.zeros((num_rows, width, self.config.hidden_size), self.dtype)
        return BatchOutput(jax.device_put(x_PCD, jax.devices()[0]), BatchChoices([]))

    def forward(self, groups: Sequence[TokenBatch | BatchOutput]) -> list[BatchOutput]:
        """Run every batch but those that `run_batch` has run already.

        Those of few tokens run several layers a program, one after the other; for the others, layer
        by layer, a layer is acquired once. So a batch's programs, and its bits, do not depend on
        the others.
        """
        programs = [
            group if isinstance(group, BatchOutput) else self._run_programs(group)
            for group in groups
        ]
        left = [
            g
            for g, done in zip(groups, programs, strict=True)
            if done is None and isinstance(g, TokenBatch)
        ]
        others = iter(self.run_layers(left) if left else [])
        outputs = [done or next(others) for done in programs]
        self.recent_choices.append([output.choices for output in outputs])
        return outputs

    def run_batch(self, batch: TokenBatch) -> BatchOutput:
        """Run a batch whose choices count as a step's only when `forward` is given the output."""
        return self._run_programs(batch) or self.run_layers([batch])[0]

    def can_run_ahead(self, num_tokens: int) -> bool:
        """Return whether a step of so many tokens can begin before the host has seen what the one
        before gave.

        Experts must stay where they are. On a CPU without native programs each layer's choices are
        read back.
        """
        stay = self.residency.tables_NE is not None
        return stay and (self._takes_natively(num_tokens) or not self._on_cpu)

    def _takes_natively(self, num_tokens: int) -> bool:
        """Return whether native operations run so many tokens, several layers a program."""
        slots = self.residency.slots.native
        return slots is not None and self.asks_nothing and slots.takes(num_tokens, self.dtype)

    def _in_groups(self, positions_PC: Any) -> bool:
        """Return whether a batch takes several layers a program: of few tokens natively, of
        single ones on a device.
        """
        if self._on_cpu:
            return self._takes_natively(positions_PC.size)
        stay = self.residency.tables_NE is not None and self.estimator is None
        return stay and positions_PC.shape[1] == 1

    def _context(self, batch: TokenBatch) -> int | None:
        """Return how many positions a program for single tokens reads on a device; see
        `write_and_attend`.
        """
        positions_PC, length = batch.positions_PC, self.caches[0].length
        if self._on_cpu or positions_PC.shape[1] > 1:
            return None
        return context_bound(
            int(positions_PC.max(initial=0, where=positions_PC < length)) + 1, length
        )

    @property
    def asks_nothing(self) -> bool:
        """Return whether programs of few tokens need not tell the host what was chosen: native,
        and without guesses.
        """
        finds = self.residency.finder is not None and self.estimator is None
        return self.native and (finds or self.residency.tables_NE is not None)

    def run_layers(self, groups: Sequence[TokenBatch]) -> list[BatchOutput]:
        """Run every batch, a layer at a time."""
        forms = [Form(self.native, self._context(g)) for g in groups]
        groups = [TokenBatch(*jax.device_put(tuple(g), jax.devices()[0])) for g in groups]
        xs = [_embed(*self.embed_and_head, g.tokens_T, g.positions_PC, self.dtype) for g in groups]
        # the layer whose slots running programs may still read
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
                    g.rows_P,
                    g.positions_PC,
                    self._windows[i],
                )
                x_PCD, self.caches[i], y = _attend(forms[n], *of_layer)
                xs[n] = xs[n]._replace(x_PCD=x_PCD)
                added.append(y)
            routed = [y for y in added if isinstance(y, ExpertInputs)]
            ys = [y for y in added if not isinstance(y, ExpertInputs)]
            if routed:
                self._release(held)
                ys = self._run_experts(self._moe_index[i], routed, path)
                held = (self._moe_index[i], ys)
                for of_group, r in zip(choices, routed, strict=True):
                    of_group.append(r.idx_TK[None])
            xs = [Hidden(x.x_PCD, y) for x, y in zip(xs, ys, strict=True)]
        self._release(held)
        return [
            BatchOutput(_add_alone(x), BatchChoices(of_group))
            for x, of_group in zip(xs, choices, strict=True)
        ]

    def _run_programs(self, g: TokenBatch) -> BatchOutput | None:
        """Do what `run_layers` does for one batch, several layers a program; None where its
        tokens are too many.
        """
        if not self._in_groups(g.positions_PC):
            return None
        tables_NE, finder = self.residency.tables_NE, self.residency.finder
        layout, slots = self.residency.slots.for_programs()
        context = self._context(g)
        if not isinstance(g.tokens_T, jax.Array):  # put where the step before leaves them
            g = g._replace(tokens_T=jax.device_put(g.tokens_T, jax.devices()[0]))
        embed_and_head, outside = self.embed_and_head
        after: Any = None
        logits_PV: jax.Array | None = None
        size = LAYERS_A_PROGRAM
        finds = 0 if finder is None else self.config.num_experts
        chosen: list[jax.Array] = []
        n = 0  # layers with experts that have run
        with self.residency.programs():
            for start in range(0, len(self._layers), size):
                some = slice(start, start + size)
                structures, arrays = zip(*self._layers[some], strict=True)
                place = embed_and_head, start == 0, start + size >= len(self._layers)
                static = _LayerGroup(
                    structures, layout, self.config.hidden_act, self.dtype, *place, finds, context
                )
                places = None if tables_NE is None else tables_NE[n : n + size]
                experts = slots, places if finder is None else finder.where(n)
                of_layers = (
                    arrays,
                    tuple(self.caches[some]),
                    outside,
                    after,
                    g,
                    tuple(self._windows[some]),
                    experts,
                )
                after, logits_PV, self.caches[some], choices_NTK = _apply_layers(static, *of_layers)
                if choices_NTK is not None:
                    chosen.append(choices_NTK)
                    n += choices_NTK.shape[0]
            if finder is not None:  # it must not be changed while they run
                jax.block_until_ready(after)
        return BatchOutput(after, BatchChoices(chosen), logits_PV)

    def _run_experts(
        self, moe_layer: int, routed: list[ExpertInputs], path: list[np.ndarray]
    ) -> list[jax.Array]:
        """Return what a layer's experts add to every batch. path: choices of the layers before."""
        residency, chosen = self.residency, None
        if residency.needs_choices:
            if self.estimator is not None:
                self.estimator.start(moe_layer, [r.h_TD for r in routed])
            indices = [r.idx_TK for r in routed]
            for idx_TK in indices:
                idx_TK.copy_to_host_async()
            jax.block_until_ready(indices)  # computing them is not part of reading them
            begun, waited_s = time.perf_counter(), residency.waited_s
            chosen = np.concatenate([np.asarray(idx_TK) for idx_TK in indices])
            path.append(chosen)
        table_E = residency.acquire(moe_layer, chosen)
        if chosen is not None:
            self.readback_s += time.perf_counter() - begun - (residency.waited_s - waited_s)
        out = [residency.mlp(r, table_E, self.config.hidden_act) for r in routed]
        following = (moe_layer + 1) % self._num_moe_layers
        if chosen is not None and self.estimator is not None and following != moe_layer:
            begun = time.perf_counter()
            residency.expect(following, self.estimator.estimate(path))
            self.estimate_s += time.perf_counter() - begun
        return out

    def expert_use(self) -> np.ndarray:
        """Return int64 [N, E]: tokens that each expert of each layer got in the last `RECENT_STEPS`
        steps.

        Read from the device now and not in the steps, which only keep what their routers computed.
        """
        experts = self.config.num_experts
        use_NE = np.zeros((self.config.num_moe_layers, experts + 1), np.int64)  # the last: padding
        for step in self._read(list(self.recent_choices)):
            for layer, idx_TK in enumerate(step):
                use_NE[layer] += np.bincount(idx_TK.reshape(-1), minlength=experts + 1)
        return use_NE[:, :-1]

    def last_choices(self) -> list[np.ndarray]:
        """Return int32 [T, K] of each layer, what the tokens of the last step chose; E for padding.
        Reads the device.

        Every layer has the tokens of all batches in the same order.
        """
        return self._read([self.recent_choices[-1]])[0] if self.recent_choices else []

    def _read(self, steps: list[list[BatchChoices]]) -> list[list[np.ndarray]]:
        """Return the choices of each layer of each step, with E in place of lost ones; one wait
        for the device.
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

    def _release(self, held: tuple[int, list[jax.Array]] | None) -> None:
        if held is not None and self.residency.streams:
            jax.block_until_ready(held[1])
            self.residency.release(held[0])

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one row of every cache over those of another."""
        numbers = (np.int32(source), np.int32(target), np.int32(num_tokens))
        self.caches = [copy_row(cache, *numbers) for cache in self.caches]

    def all_logits(self, output: BatchOutput, row: int) -> jax.Array:
        """Return float32 [C, V]: the logits after every token of one row."""
        return logits_of_row(*self.embed_and_head, output.x_PCD, np.int32(row))

    def logits(self, output: BatchOutput, at_P: np.ndarray) -> jax.Array:
        """Return float32 [P, V]: the logits after token `at_P` of each row."""
        if output.logits_PV is not None:
            return output.logits_PV
        return logits_after(*self.embed_and_head, output.x_PCD, at_P, self.native)
