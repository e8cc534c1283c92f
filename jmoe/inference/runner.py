"""The engine's decoder on one device: layers over a KV cache, with experts in slots.

`Engine` calls `ModelRunner` once a step.

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
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import ModelConfig
from jmoe.inference.cached_layers import CachePlaces, Hidden
from jmoe.inference.kv_cache import BLOCK, KVCache, LayerCache, copy_cache_blocks
from jmoe.inference.layer_programs import (
    LayerGroupOptions,
    LayerOperands,
    LayerProgramOptions,
    Sampled,
    add_alone,
    apply_layers,
    attend_and_route_program,
    context_bucket,
    embed,
    logits_at_tokens,
    logits_of_all,
    logits_of_row,
    with_adapters,
)
from jmoe.inference.popularity import Estimator
from jmoe.inference.runner_protocol import BatchChoices, BatchOutput, TokenBatch
from jmoe.inference.sampler import TokensInStep
from jmoe.inference.scheduler import ChunkGroup
from jmoe.inference.served_adapters import NO_ADAPTERS
from jmoe.layers.slot_experts import ExpertInputs, ExpertProducts, UnchosenInputs
from jmoe.models.block import Block
from jmoe.models.functional import split_arrays
from jmoe.models.lazy_checkpoint import EmbedAndHead
from jmoe.offload.policies import Residency
from kernels_pallas.expert_choices import WeightedOutputs

RECENT_STEPS = 16
# the most layers in one program, for steps of few tokens that need no choices on the host
LAYERS_A_PROGRAM = 8
# the same on an accelerator, whose programs of more layers take minutes to compile
LAYERS_ON_ACCELERATOR = 32


def runs_on_cpu() -> bool:
    """Return whether the default device is a CPU, on which loops over rows and blocks are fast."""
    return jax.devices()[0].platform == "cpu"


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
        self._tables: dict[int, tuple[jax.Array, ...]] = {}
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
        xs = [self._embed_batch(g) for g in groups]
        # the layer with experts whose slots running programs may still read, and its outputs
        held: tuple[int, list[jax.Array | WeightedOutputs]] | None = None
        path: list[np.ndarray] = []
        choices: list[list[jax.Array]] = [[] for _ in groups]
        for i, layer in enumerate(self._layers):
            added: list[jax.Array | ExpertInputs | UnchosenInputs] = []
            for n, g in enumerate(groups):
                of_layer = (
                    *layer,
                    self.caches[i],
                    xs[n],
                    CachePlaces(g.blocks_PW, g.positions_PC, self._windows[i], rows_P=g.rows_P),
                    self.adapters.layer_adapters_for_rows(i, g.adapter_P),
                )
                x_PCD, self.caches[i], y = attend_and_route_program(variants[n], *of_layer)
                xs[n] = xs[n]._replace(x_PCD=x_PCD)
                if isinstance(y, ExpertInputs):
                    y = with_adapters(y, of_layer[-1])
                added.append(y)
            routed = [y for y in added if isinstance(y, ExpertInputs)]
            ys: list[jax.Array | WeightedOutputs] = [y for y in added if isinstance(y, jax.Array)]
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
            BatchOutput(add_alone(x), BatchChoices(of_group))
            for x, of_group in zip(xs, choices, strict=True)
        ]

    def _embed_batch(self, g: TokenBatch) -> Hidden:
        """Return the first layer's input of a batch on the device."""
        place = g.tokens_T, g.positions_PC, self.dtype
        return embed(*self.embed_and_head, *place, previous_PCD=g.previous_PCD)

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
                products = ExpertProducts(self.config.hidden_act, self.residency.slots.fp8_inputs)
                static = LayerGroupOptions(
                    *(structures, layout, products, self.dtype, *place, finds),
                    context=context,
                    samples=not self._on_cpu,
                )
                n = self.config.layers[start].record
                tables = finder.find_slots_operand(n) if finder else self._slot_tables(n, size)
                of_layers = (
                    tuple(map(LayerOperands, arrays, self._windows[some], adapters)),
                    tuple(self.caches[some]),
                    outside,
                    output,
                    g if is_last else g._replace(sampling=None),  # one program for middle groups
                    (slots, tables),
                )
                output, sampled, self.caches[some], choices_NTK = apply_layers(static, *of_layers)
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

    def _slot_tables(self, start: int, size: int) -> np.ndarray | tuple[jax.Array, ...] | None:
        """Return the tables of `size` layers with experts from `start` on; None if experts have no
        permanent slots.

        On an accelerator they are arrays there, which later steps use again: one for each layer,
        since a slice of one would be a launch.
        """
        tables_NE = self.residency.tables_NE
        if tables_NE is None or self._on_cpu:
            return None if tables_NE is None else tables_NE[start : start + size]
        if self._tables_source is not tables_NE:
            self._tables_source, self._tables = tables_NE, {}
        if start not in self._tables:
            some = tuple(tables_NE[start : start + size])
            self._tables[start] = jax.device_put(some, jax.devices()[0])
        return self._tables[start]

    def _run_experts(
        self, moe_layer: int, routed: list[ExpertInputs], path: list[np.ndarray]
    ) -> list[jax.Array | WeightedOutputs]:
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
        self, layer_and_outputs: tuple[int, list[jax.Array | WeightedOutputs]] | None
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
