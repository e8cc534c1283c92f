"""The engine's decoder on a mesh: each device has a part of the KV cache and some experts of each
layer.

All processes run the same programs in the same order. A layer with experts is two programs:
attention and router, whose choices all processes read (4 K bytes a token), and the experts, to
which tokens are sent. Every process derives the placement of experts and the sizes of buffers from
the choices of all tokens, so processes need no further agreement.

Legend:
N devices
M rows of a step
Q chunks of a group
C tokens a row
T tokens of a device
D hidden
V vocabulary
E experts of a layer
K choices a token
L layers with experts
W blocks of a table
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jmoe.collectives.ragged import supports_ragged_exchange
from jmoe.config import ModelConfig
from jmoe.config.engine import EngineConfig
from jmoe.config.parallel import ExchangeKind
from jmoe.inference.cached_layers import Arrays, Hidden
from jmoe.inference.kv_cache import LayerCache, cache_value_dtype, empty_caches, table_width
from jmoe.inference.layer_programs import logits_at_tokens, logits_of_row
from jmoe.inference.mesh.dense_layout import HeadLayout, MeshBatch, RowLayout
from jmoe.inference.mesh.exchange_rows import (
    buffer_row_counts,
    choose_exchange,
    dedup_row_counts,
)
from jmoe.inference.mesh.expert_placer import ExpertPlacer, SwapCosts
from jmoe.inference.mesh.lockstep import Leader, call_on_all_ranks
from jmoe.inference.mesh.programs import (
    ExchangeShape,
    GateOutput,
    attend_and_route_on_mesh,
    copy_cache_blocks_on_mesh,
    embed_on_mesh,
    experts_on_mesh,
    finish_layers_on_mesh,
    gather_row_on_mesh,
    logits_on_mesh,
    return_rows_on_mesh,
    rows_of_tiles,
    run_experts_for_timing,
    run_rows_on_mesh,
    select_last_hidden_of_chunks,
    send_rows_on_mesh,
)
from jmoe.inference.path_table import PathTable
from jmoe.inference.runner import RECENT_STEPS
from jmoe.inference.scheduler import ChunkGroup
from jmoe.layers.experts import SLOT_MULTIPLE
from jmoe.mesh import BATCH, EXPERT_INTER, REPLICATED, put_sharded
from jmoe.models.functional import ModuleStructure, split_arrays
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.tensor_parallel import per_device_config
from jmoe.offload.mesh_hybrid import ArrivedBatch, MeshHybridExperts
from jmoe.offload.placed_experts import MeshExperts, PlacedExperts

TIMED_RUNS = 3
PlacedModule = tuple[ModuleStructure, Arrays]


class MeshHidden(NamedTuple):
    """Hidden states after the last layer, of each row's last token, on every device.

    place_Q: each chunk's index among the M rows.
    batch_number: the batch's index in the step.
    """

    last_MD: jax.Array
    place_Q: np.ndarray
    batch_number: int


class _FinalHidden(NamedTuple):
    """Hidden states after the last layer, kept until the next step.

    x: of all tokens, split over the devices.
    last_MD: of each row's last token, on every device.
    width: C.
    """

    x: jax.Array
    last_MD: jax.Array
    width: int


class MeshRunner:
    """Runs tokens through all layers on a mesh of devices; owns the KV caches.

    All processes call the `call_on_all_ranks` methods in the same order with the same arguments;
    only rank 0 uses their results.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: RowLayout,
        modules: Sequence[PlacedModule],
        experts: MeshExperts,
        placer: ExpertPlacer,
        caches: Sequence[LayerCache],
        exchange: ExchangeKind = "flat",
    ) -> None:
        """Take modules and caches that are placed as `layout` says.

        modules: `EmbedAndHead`, then the layers. exchange: dedup sends a token once to a node.
        """
        self.config, self.layout, self.residency, self.placer = config, layout, experts, placer
        self.mesh = layout.mesh
        self._hybrid = experts if isinstance(experts, MeshHybridExperts) else None
        self.dedup = exchange == "dedup"
        self.ragged = not self.dedup and supports_ragged_exchange(self.mesh.devices.flat[0])
        self.leader: Leader | None = None  # rank 0's connection to other processes
        self.readback_s, self.estimate_s = 0.0, 0.0  # see `EngineStats`
        self.recent_choices: deque[list[np.ndarray]] = deque(maxlen=RECENT_STEPS)  # [step][layer]
        self.caches = list(caches)
        self._embed_and_head, *self._layers = modules
        self.dtype = self._embed_and_head[0].merge(self._embed_and_head[1]).embedding[...].dtype
        self._embed_and_head_here = (
            self._embed_and_head[0],
            tuple(w.addressable_data(0) for w in self._embed_and_head[1]),
        )
        self._windows = [
            None if layer.window is None else np.int32(layer.window) for layer in config.layers
        ]
        # outputs of the last experts' programs, which may still read slots until these are ready
        self._held: list[jax.Array] | None = None
        self._final: list[_FinalHidden] = []  # one for each batch of the last step

    def make_batch(self, group: ChunkGroup) -> MeshBatch:
        """Return a group's chunks as a batch in the order of the devices."""
        return self.layout.make_batch(group)

    def padding_batches(self, num_rows: int, width: int) -> list[MeshBatch]:
        """Return a batch of padding for every shape that a group of `num_rows` chunks of `width`
        tokens can take, to compile programs.
        """
        return self.layout.padding_batches(num_rows, width)

    def begin_step(self, *, whole_layers: bool, on_host: bool = False) -> None:
        """Begin a step in every process; see `ExpertResidency.begin_step`."""
        if self.residency.follows_steps:
            self.begin_step_on_all_ranks(whole_layers, on_host)

    @call_on_all_ranks
    def begin_step_on_all_ranks(self, whole_layers: bool, on_host: bool) -> None:
        """Begin a step; see `begin_step`."""
        self.residency.begin_step(whole_layers=whole_layers, on_host=on_host)

    @call_on_all_ranks
    def zero_output(self, num_rows: int, width: int) -> MeshHidden:
        """Return an output of `forward` that is all zeros, to compile programs that take one."""
        batch = self.padding_batches(num_rows, width)[-1]
        shape = self.layout.hidden_shape(batch, self.config.hidden_size)
        x = put_sharded(np.zeros(shape, self.dtype), self.mesh, BATCH)
        last_MD = put_sharded(
            np.zeros((len(batch.blocks_MW), shape[-1]), self.dtype), self.mesh, REPLICATED
        )
        self._final = [_FinalHidden(x, last_MD, width)]
        return MeshHidden(last_MD, batch.place_Q, 0)

    @call_on_all_ranks
    def forward(self, batches: Sequence[MeshBatch]) -> list[MeshHidden]:
        """Return the hidden states of every batch of a step.

        A layer's placement of experts is estimated while its attention runs, and corrected after
        the router.
        """
        self.placer.rebalance_next_layer()
        layout, batches = self.layout, [MeshBatch._make(batch) for batch in batches]
        groups = [
            [put_sharded(a, self.mesh, layout.tokens) for a in batch[:3]] for batch in batches
        ]
        xs = [
            embed_on_mesh(layout, *self._embed_and_head, tokens, positions, self.dtype)
            for tokens, _, positions in groups
        ]
        path: list[np.ndarray] = []
        self._held = None
        for i, layer in enumerate(self._layers):
            ys: list[jax.Array] = []
            gates: list[GateOutput] = []
            for n, (_, blocks_MW, positions_MC) in enumerate(groups):
                x, self.caches[i], y = attend_and_route_on_mesh(
                    layout, *layer, self.caches[i], xs[n], blocks_MW, positions_MC, self._windows[i]
                )
                xs[n] = xs[n]._replace(x_PCD=x)
                if isinstance(y, GateOutput):
                    gates.append(y)
                else:
                    ys.append(y)
            if gates:
                ys = self._run_experts(self.config.layers[i].record, gates, path)
            xs = [Hidden(x.x_PCD, y) for x, y in zip(xs, ys, strict=True)]
        self._release_last_layer()
        self.placer.end_step()
        self.recent_choices.append(path)
        outputs = [
            finish_layers_on_mesh(layout, x, positions)
            for x, (_, _, positions) in zip(xs, groups, strict=True)
        ]
        widths = [batch.tokens_MC.shape[1] for batch in batches]
        self._final = [
            _FinalHidden(x, last_MD, width)
            for (x, last_MD), width in zip(outputs, widths, strict=True)
        ]
        return [MeshHidden(a.last_MD, batches[n].place_Q, n) for n, a in enumerate(self._final)]

    @call_on_all_ranks
    def copy_cache_blocks(self, copies: Sequence[tuple[int, int]], count: int) -> None:
        """Copy blocks of every cache to other blocks, one after the other.

        copies: at most W pairs (source, target), of which the first `count` are copied; all or none
            are on two devices.
        """
        at_W4 = np.zeros((self.layout.table_width, 4), np.int32)
        for i, (source, target) in enumerate(copies):
            at_W4[i] = *self.layout.locate_block(source), *self.layout.locate_block(target)
        crosses = bool((at_W4[: len(copies), 0] != at_W4[: len(copies), 2]).any())
        operands = at_W4, np.int32(count)
        self.caches = [
            copy_cache_blocks_on_mesh(self.layout, crosses, cache, *operands)
            for cache in self.caches
        ]

    @call_on_all_ranks
    def gather_row_hidden(self, batch_number: int, place: int) -> jax.Array:
        """Return the hidden states of one row of the last step's batch `batch_number`, [C, D], on
        every device.
        """
        final = self._final[batch_number]
        return gather_row_on_mesh(self.layout, final.width, final.x, np.int32(place))

    @call_on_all_ranks
    def gather_logits(self, batch_number: int, place_Q: np.ndarray) -> jax.Array:
        """Return the logits after the last token of rows `place_Q`, float32 [Q, V], on every
        device.

        Each device computes a part of V.
        """
        last_MD, vocab_size = self._final[batch_number].last_MD, self.config.vocab_size
        return logits_on_mesh(
            self.layout, *self._embed_and_head, last_MD, vocab_size, np.asarray(place_Q, np.int32)
        )

    @call_on_all_ranks
    def gather_row_logits(self, batch_number: int, place: int) -> jax.Array:
        """Return the logits after every token of one row, float32 [C, V], on every device."""
        final = self._final[batch_number]
        x_CD = gather_row_on_mesh(self.layout, final.width, final.x, np.int32(place))
        at_C = np.arange(final.width, dtype=np.int32)
        return logits_on_mesh(
            self.layout, *self._embed_and_head, x_CD, self.config.vocab_size, at_C
        )

    def logits(self, hidden: MeshHidden, at_Q: np.ndarray) -> jax.Array:
        """Return the logits after each chunk's last token, float32 [Q, V].

        at_Q is ignored: `hidden` has the last tokens alone.
        """
        if self.layout.splits_head:
            return self.gather_logits(hidden.batch_number, hidden.place_Q).addressable_data(0)
        x_QCD = select_last_hidden_of_chunks(hidden.last_MD.addressable_data(0), hidden.place_Q)
        return logits_at_tokens(*self._embed_and_head_here, x_QCD, np.zeros_like(at_Q))

    def logits_of_chunk(self, hidden: MeshHidden, row: int) -> jax.Array:
        """Return the logits after every token of chunk `row` of a batch, padding included, float32
        [C, V].
        """
        place = int(hidden.place_Q[row])
        if self.layout.splits_head:
            return self.gather_row_logits(hidden.batch_number, place).addressable_data(0)
        x_CD = self.gather_row_hidden(hidden.batch_number, place).addressable_data(0)
        return logits_of_row(*self._embed_and_head_here, x_CD[None], np.int32(0))

    def logits_of_all(self, hidden: MeshHidden) -> jax.Array:
        """Return the logits after every token of a batch of few, float32 [Q, C, V]."""
        rows = range(len(hidden.place_Q))
        return jnp.stack([self.logits_of_chunk(hidden, row) for row in rows])

    def tokens_per_expert(self) -> np.ndarray:
        """Return int64 [L, E]: tokens that each expert got in the last `RECENT_STEPS` steps."""
        experts = self.config.num_experts
        use_LE = np.zeros((self.config.num_moe_layers, experts + 1), np.int64)  # last: padding
        for layers in self.recent_choices:
            for layer, idx_TK in enumerate(layers):
                use_LE[layer] += np.bincount(idx_TK.reshape(-1), minlength=experts + 1)
        return use_LE[:, :-1]

    def last_expert_choices(self) -> list[np.ndarray]:
        """Return the last step's choices of experts, int32 [T, K] for each layer with experts.

        T counts the tokens of all devices; E marks padding.
        """
        return list(self.recent_choices[-1]) if self.recent_choices else []

    def measure_swap_costs(self) -> SwapCosts:
        """Return the measured seconds of an expert per row, and of a copy of an expert's weights.

        Measured on this process's first device.
        """
        assert isinstance(self.residency, PlacedExperts), (
            "what passes through a ring has no other place"
        )
        weights = jax.tree.map(lambda w: w.addressable_data(0), self.residency.layer_weights(0))
        num_rows = SLOT_MULTIPLE * weights["w_up"].shape[0]
        x_ND = jnp.zeros(
            (num_rows, self.config.hidden_size), self.dtype, device=jax.local_devices()[0]
        )
        run = partial(run_experts_for_timing, self.config.hidden_act, x_ND, weights)
        return SwapCosts(
            _shortest_run_s(run) / num_rows, _shortest_run_s(self.residency.recopy_one_expert)
        )

    @call_on_all_ranks
    def enable_swaps(self, row_s: float, copy_s: float) -> None:
        """Enable changes of placement, with costs that must be equal in all processes.

        row_s, copy_s: see `SwapCosts`.
        """
        self.placer.costs = SwapCosts(row_s, copy_s)

    def _run_experts(
        self, moe_layer: int, gates: list[GateOutput], path: list[np.ndarray]
    ) -> list[jax.Array]:
        """Return the output of a layer's experts for every batch.

        path: choices of the layers before; this layer's are appended.
        """
        self.placer.place_by_estimate(moe_layer, path)
        self.estimate_s = self.placer.estimate_s
        here = [gate.all_idx_TK.addressable_data(0) for gate in gates]
        for choices in here:
            choices.copy_to_host_async()
        jax.block_until_ready(here)  # readback_s excludes the time to compute them
        self._release_last_layer()
        begun = time.perf_counter()
        chosen = [np.asarray(idx_TK) for idx_TK in here]
        path.append(np.concatenate(chosen))
        self.readback_s += time.perf_counter() - begun
        self.placer.record_choices_and_correct_placement(moe_layer, path[-1])
        self.residency.acquire(moe_layer, path[-1])
        hybrid = self._hybrid
        out: list[jax.Array] = []
        if hybrid is not None and (hybrid.on_host or (path[-1] >= hybrid.index.num_experts).all()):
            out = self._run_experts_beside_host(hybrid, moe_layer, gates, chosen)
        if hybrid is None or not hybrid.on_host:  # padding compiles the programs of both forms
            out = self._run_experts_on_devices(moe_layer, gates, chosen)
        self._held = out
        return out

    def _run_experts_on_devices(
        self, moe_layer: int, gates: list[GateOutput], chosen: list[np.ndarray]
    ) -> list[jax.Array]:
        """Return the output of an acquired layer's experts for every batch.

        chosen: the choices of all devices' tokens, by batch.
        """
        replica_EC, out = self.residency.replica_of_row(moe_layer), []
        with self.residency.locked_operands(moe_layer) as operands:
            for gate, idx_TK in zip(gates, chosen, strict=True):
                for exchange in self._exchange_shapes(moe_layer, idx_TK):
                    y_TD = experts_on_mesh(self.mesh, exchange, gate.routed, replica_EC, *operands)
                out.append(y_TD)
        return out

    def _run_experts_beside_host(
        self,
        hybrid: MeshHybridExperts,
        moe_layer: int,
        gates: list[GateOutput],
        chosen: list[np.ndarray],
    ) -> list[jax.Array]:
        """Return what `_run_experts_on_devices` does, with the experts that are in no slot computed
        by the processes that own them, while the devices compute the others.
        """
        replica_EC = self.residency.replica_of_row(moe_layer)
        shapes = [  # (batch, sizes of its exchange)
            (n, exchange)
            for n, idx_TK in enumerate(chosen)
            for exchange in self._exchange_shapes(moe_layer, idx_TK)
        ]
        sent = [
            send_rows_on_mesh(self.mesh, exchange, gates[n].routed, replica_EC)
            for n, exchange in shapes
        ]
        arrived = [ArrivedBatch(rows.rows_MD, rows.sizes_S) for rows in sent]
        activation, num_experts = self.config.hidden_act, self.config.num_experts
        cold = hybrid.start_cold_rows(moe_layer, arrived, activation)
        out = []
        with hybrid.locked_operands(moe_layer) as operands:
            for (n, exchange), batch in zip(shapes, arrived, strict=True):
                num_tokens, k = chosen[n].shape
                tile_rows = rows_of_tiles(self.mesh, exchange, num_tokens, k, num_experts)
                static = self.mesh, activation, tile_rows
                out.append(run_rows_on_mesh(*static, *batch, cold.is_cold_NS, *operands))
        from_host = hybrid.wait_for_cold_rows(cold, arrived)
        ys: list[jax.Array] = [gate.routed.y_TD for gate in gates]
        for (n, exchange), *parts in zip(shapes, sent, out, from_host, strict=True):
            y_TD = gates[n].routed.y_TD
            ys[n] = return_rows_on_mesh(self.mesh, exchange, y_TD, cold.is_cold_NS, *parts)
        return ys

    def _exchange_shapes(self, moe_layer: int, idx_TK: np.ndarray) -> list[ExchangeShape]:
        """Return [the sizes of the exchange of a layer's tokens]; those of all sizes of buffers for
        pure padding. idx_TK: as for `buffer_row_counts`.
        """
        placement = self.residency.placements[moe_layer]
        if self.dedup:
            sizes = dedup_row_counts(placement, idx_TK, self.mesh.shape[EXPERT_INTER])
        else:  # tokens go to devices directly
            sizes = [(rows, 0) for rows in buffer_row_counts(placement, idx_TK, self.ragged)]
        slots, activation = placement.slots_per_device, self.config.hidden_act
        return [
            ExchangeShape(rows, slots, activation, self.ragged, device_rows)
            for rows, device_rows in sizes
        ]

    def _release_last_layer(self) -> None:
        """Release the slots of the layer whose experts ran last, once they have finished."""
        if self._held is not None and self.residency.streams:
            jax.block_until_ready(self._held)
            self.residency.release()
        self._held = None


def make_mesh_runner(
    checkpoint: LazyCheckpoint, options: EngineConfig, experts: MeshExperts, table: PathTable | None
) -> MeshRunner:
    """Load all weights but the experts', and return a runner with zeroed KV caches."""
    assert options.max_seq_len is not None, "the model's positions say it"
    config, mesh = checkpoint.config, experts.mesh
    shapes = jax.eval_shape(lambda: make_mesh_caches(checkpoint, options))
    layout_of = HeadLayout if options.mesh.dense == "tensor" else RowLayout
    width = table_width(options.max_seq_len)
    layout = layout_of(mesh, options.max_batch, options.num_cache_blocks(), width)
    caches = jax.tree.map(
        lambda x: put_sharded(np.zeros(x.shape, x.dtype), mesh, layout.cache), shapes
    )
    modules = (
        _load_sharded(checkpoint, mesh)
        if options.mesh.dense == "tensor"
        else _load_replicated(checkpoint, mesh)
    )
    placer = ExpertPlacer(
        options.mesh, experts, config.num_experts_per_tok, options.estimator is not None, table
    )
    exchange = choose_exchange(config, options.mesh, mesh.shape[EXPERT_INTER])
    return MeshRunner(config, layout, modules, experts, placer, caches, exchange)


def make_mesh_caches(checkpoint: LazyCheckpoint, options: EngineConfig) -> list[LayerCache]:
    """Return zeroed KV caches for all devices together.

    With tensor parallelism every device has the keys and values of its own heads, so there are
    copies of a head that several devices share, and of latents, which all share.
    """
    config, copies = checkpoint.config, 1
    if options.mesh.dense == "tensor":
        copies = options.mesh.devices
        config = per_device_config(config, copies)
    length = checkpoint.choose_sequence_length(options.max_seq_len)
    blocks = replace(options, max_seq_len=length).num_cache_blocks()
    dtype = cache_value_dtype(options, checkpoint.dtype)
    rows = {"num_rows": options.max_batch, "draft_width": options.draft_width}
    return empty_caches(config, blocks, dtype, copies, **rows)


def _load_replicated(checkpoint: LazyCheckpoint, mesh: Mesh) -> list[PlacedModule]:
    """Return `EmbedAndHead` and the layers, replicated on every device."""
    embed_and_head, layers = checkpoint.load_dense_modules()
    modules = [split_arrays(module) for module in (embed_and_head, *layers)]
    return [
        (graph, tuple(put_sharded(np.asarray(w), mesh, REPLICATED) for w in arrays))
        for graph, arrays in modules
    ]


def _load_sharded(checkpoint: LazyCheckpoint, mesh: Mesh) -> list[PlacedModule]:
    """Return `EmbedAndHead` and the layers as stacked shards [N, ...], one on each device."""
    devices = list(mesh.devices.flat)
    mine = [n for n, device in enumerate(devices) if device.process_index == jax.process_index()]
    parts = []  # of this process's devices
    for n in mine:
        embed_and_head, layers = checkpoint.load_dense_shard(n, mesh.size)
        modules = [split_arrays(module) for module in (embed_and_head, *layers)]
        parts.append(
            [
                (graph, jax.device_put([w[None] for w in arrays], devices[n]))
                for graph, arrays in modules
            ]
        )
    where = NamedSharding(mesh, BATCH)

    def stack_shards(shards: tuple[jax.Array, ...]) -> jax.Array:
        shape = (mesh.size, *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, where, list(shards))

    placed = []
    for copies in zip(*parts, strict=True):
        arrays = zip(*(shards for _, shards in copies), strict=True)
        placed.append((copies[0][0], tuple(stack_shards(shards) for shards in arrays)))
    return placed


def _shortest_run_s(run: Callable[[], object]) -> float:
    """Return the shortest time of a few calls in seconds, after one call that compiles."""
    times = []
    for _ in range(1 + TIMED_RUNS):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return min(times[1:])
