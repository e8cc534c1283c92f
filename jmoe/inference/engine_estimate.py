"""Estimate an engine's step times and memory on a GPU that is not attached, by compiling for it.

Called by `--estimate`.

Legend:
P rows of a step
C tokens a row
T tokens, P * C
E experts of a layer
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import ACCELERATORS, AcceleratorPeaks
from jmoe.inference import layer_programs, sampler
from jmoe.inference.cached_layers import CachePlaces, Hidden
from jmoe.inference.kv_cache import BLOCK, LayerCache, cache_value_dtype, empty_caches, table_width
from jmoe.inference.loading import model_bytes
from jmoe.inference.runner_protocol import TokenBatch
from jmoe.layers.slot_experts import MATRICES, ExpertInputs, ExpertProducts
from jmoe.memory.host_memory import available_bytes
from jmoe.models.block import Block
from jmoe.models.decoder import Decoder
from jmoe.models.functional import split_arrays
from jmoe.models.lazy_checkpoint import EmbedAndHead, LazyCheckpoint, split_decoder
from jmoe.offload import slots
from jmoe.offload.slot_arrays import with_transposed
from jmoe.planning.gpu_estimate import (
    GpuEstimate,
    KernelFacts,
    estimate_module,
    gpu_rates,
    join_estimates,
)
from jmoe.planning.hlo import HloModule, parse_hlo
from jmoe.planning.memory_plan import FreeMemory, MemoryPlan, plan_memory
from jmoe.planning.roofline import distinct_experts
from jmoe.run import ahead_of_time
from jmoe.runtime import gpu_memory_fraction
from jmoe.types import PyTree
from kernels_pallas.expert_choices import WeightedOutputs
from kernels_pallas.implementations import trace_for_device

MOST_COSTLY = 5  # number of slowest kernels that an estimate lists


@dataclass(frozen=True)
class EngineStep:
    """A step of `num_rows` sequences of `width` tokens each.

    gpu: estimate of the compiled programs.
    link_s: seconds to copy the experts that the device lacks.
    """

    num_rows: int
    width: int
    gpu: GpuEstimate
    link_s: float

    @property
    def seconds(self) -> float:
        """The estimated seconds of the step, if copies and computation overlap fully."""
        return max(self.gpu.seconds, self.link_s)

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows * self.width / self.seconds

    def __str__(self) -> str:
        what = f"{self.num_rows} sequence{'s' * (self.num_rows > 1)}, a token each"
        if self.width > 1:
            what = f"{self.width} tokens of a prompt"
        link = f", {1e3 * self.link_s:.3g} ms of it copies of experts" if self.link_s else ""
        launches = f"{self.gpu.launches:,} launches"
        return (
            f"{what}: {1e3 * self.seconds:.3g} ms a step{link}, {self.tokens_per_s:,.0f} tokens/s,"
            f" {launches}"
        )


@dataclass(frozen=True)
class EngineEstimate:
    """The estimated steps and memory of an engine; single-token steps come before the prompt's.

    context: tokens in the cache before each single token.
    """

    gpu: str
    steps: tuple[EngineStep, ...]
    memory: MemoryPlan
    temporary_bytes: int
    context: int
    prompt_flops: float  # forward model FLOPs of all tokens of the last step

    @property
    def prompt_mfu(self) -> float:
        """Model FLOPs utilization of the prompt's step, a fraction of the GPU's peak."""
        return self.prompt_flops / self.steps[-1].seconds / ACCELERATORS[self.gpu].flops

    def __str__(self) -> str:
        used = self.memory.device_bytes + self.temporary_bytes
        room = gpu_memory_fraction() * ACCELERATORS[self.gpu].device_bytes
        slowest = max(
            (step for step in self.steps if step.width == 1), key=lambda step: step.num_rows
        )
        lines = [
            (
                f"estimated from programs compiled for 1 x {self.gpu}, not measured; the host's own"
                " time is left out:"
            ),
            *map(str, self.steps),
            (
                f"single tokens have {self.context:,} before them; a prompt's reach"
                f" {100 * self.prompt_mfu:.1f} % MFU of {ACCELERATORS[self.gpu].flops / 1e12:g}"
                " TFLOP/s"
            ),
            (
                f"memory of the device: {used / 1e9:.1f} GB, of {room / 1e9:.1f} GB that JAX takes;"
                f" {self.memory}"
            ),
            (
                f"host memory is what is free here; most of the time of {slowest.num_rows} x 1"
                " tokens goes to"
            ),
            *map(str, slowest.gpu.kernels[:MOST_COSTLY]),
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in slowest.gpu.notes)])


def plan_memory_on_gpu(
    checkpoint: LazyCheckpoint, options: EngineConfig, gpu: AcceleratorPeaks
) -> MemoryPlan:
    """Return where an engine on such a GPU would put its bytes.

    Raises ValueError naming the field if the model does not fit.
    """
    device_bytes = int(gpu_memory_fraction() * gpu.device_bytes)
    free = FreeMemory(device_bytes, available_bytes(), shared=False)
    return plan_memory(model_bytes(checkpoint, options), free, options)


def estimate_engine(checkpoint: LazyCheckpoint, options: EngineConfig, gpu: str) -> EngineEstimate:
    """Return the estimate of an engine with these options.

    gpu: a name of `ahead_of_time.TARGETS`. options.max_seq_len must be set.
    """
    ahead_of_time.check_cuda_installed("estimate", gpu)
    assert options.max_seq_len is not None, "the model's positions say it"
    memory = plan_memory_on_gpu(checkpoint, options, ACCELERATORS[gpu])
    (device,) = ahead_of_time.abstract_gpu_devices(gpu)
    estimator = _StepEstimator(checkpoint, options, memory, gpu, device)
    context = options.max_seq_len // 2
    width = min(options.prefill_chunk_tokens, context)
    sizes = dict.fromkeys([(1, 1), (options.max_batch, 1), (1, width)])
    steps = tuple(estimator.estimate_step(*size, context) for size in sizes)
    # a third of a training step's FLOPs: the forward pass alone
    flops = checkpoint.config.flops_per_token(width) / 3 * width
    return EngineEstimate(gpu, steps, memory, estimator.temporary_bytes, context, flops)


def _assumed_loop_trips(attended_blocks: int, expert_tiles: int, scope: str) -> int:
    """Return the assumed iterations of a loop in `scope` of a layer's program."""
    return attended_blocks if "attention" in scope else expert_tiles


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _apply_layer(
    static: layer_programs.LayerGroupOptions, *operands: Any
) -> tuple[Hidden | jax.Array, tuple[LayerCache, ...]]:
    """Return (output, caches) of one of several layers in a program, which returns the choices of
    all layers together.
    """
    output, _, caches, _ = layer_programs.apply_layers(static, *operands)
    return output, caches


_stack = jax.jit(lambda choices: jnp.stack(choices))


class _StepEstimator:
    """Compiles the programs of an engine's steps on one GPU, from shapes alone, and estimates them.

    temporary_bytes: the largest temporary memory of a program so far.
    """

    def __init__(
        self,
        checkpoint: LazyCheckpoint,
        options: EngineConfig,
        memory: MemoryPlan,
        gpu: str,
        device: jax.Device,
    ) -> None:
        self._config = checkpoint.config
        self._dtype = checkpoint.dtype
        self._memory = memory
        assert options.max_seq_len is not None, "the model's positions say it"
        self._options, self._max_seq_len = options, options.max_seq_len
        self._gpu, self._device, self.temporary_bytes = gpu, device, 0
        self._products = ExpertProducts(
            self._config.hidden_act, options.expert_activations == "fp8"
        )
        self._place = jax.sharding.SingleDeviceSharding(device)
        embed_and_head, layers = nnx.eval_shape(self._make_dense_modules)
        self._embed_and_head, self._layers = (
            split_arrays(embed_and_head),
            [split_arrays(layer) for layer in layers],
        )
        flipped = MATRICES if self._products.fp8_inputs else ()
        fields = with_transposed(checkpoint.expert_fields, flipped)
        self._slots = {
            name: self._abstract_array(dtype, memory.expert_slots, *shape)
            for name, (shape, dtype) in fields.items()
        }

    def _make_dense_modules(self) -> tuple[EmbedAndHead, list[Block]]:
        """Return (embedding and head, the layers without their experts) in the engine's dtype."""
        decoder = Decoder(self._config, rngs=nnx.Rngs(0))
        narrow = lambda w: w.astype(self._dtype) if w.dtype == jnp.float32 else w  # noqa: E731
        nnx.update(decoder, jax.tree.map(narrow, nnx.state(decoder)))
        return split_decoder(decoder)

    def _abstract_array(self, dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._place)

    def _abstract_tree(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda array: self._abstract_array(array.dtype, *array.shape), tree)

    def _compile_and_estimate(
        self,
        trips: int | Callable[[str], int],
        function: jax.stages.Wrapped,
        *operands: PyTree,
        attended: int | None = None,
        chosen: float | None = None,
    ) -> tuple[PyTree, GpuEstimate]:
        """Return (shapes of the results, estimate) of a program.

        trips: assumed iterations of each loop whose trip count is not static, or a function of the
        loop's scope. attended, chosen: see `KernelFacts`.
        """
        results, module = self._compile(function, *self._abstract_operands(operands))
        facts = KernelFacts(self._config.num_experts, chosen=chosen, attended=attended)
        trips_of = trips if callable(trips) else lambda scope: trips
        return results, estimate_module(module, gpu_rates(self._gpu), facts, trips_of)

    def _compile(self, function: jax.stages.Wrapped, *operands: PyTree) -> tuple[PyTree, HloModule]:
        """Return (shapes of the results, optimized module) of a program."""
        results, lowered = ahead_of_time.lower_for_device(self._device, function, *operands)
        compiled = lowered.compile()
        sizes = compiled.memory_analysis()
        self.temporary_bytes = max(
            self.temporary_bytes, 0 if sizes is None else sizes.temp_size_in_bytes
        )
        return results, parse_hlo(compiled.as_text() or "")

    def _abstract_operands(self, operands: tuple[PyTree, ...]) -> list[PyTree]:
        is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")  # noqa: E731
        return [
            self._abstract_tree(operand)
            if all(map(is_array, jax.tree.leaves(operand)))
            else operand
            for operand in operands
        ]

    def estimate_step(self, num_rows: int, width: int, context: int) -> EngineStep:
        """Return the estimate of a step of `num_rows` sequences, with `context` tokens before each
        chunk.
        """
        tokens = num_rows * width
        batch = TokenBatch(
            self._abstract_array(jnp.int32, tokens),
            self._abstract_array(jnp.int32, num_rows, table_width(self._max_seq_len)),
            self._abstract_array(jnp.int32, num_rows, width),
            rows_P=self._abstract_array(jnp.int32, num_rows)
            if self._config.has_linear_attention
            else None,
        )
        hidden, embed = self._compile_and_estimate(
            1,
            layer_programs.embed,
            *self._embed_and_head,
            batch.tokens_T,
            batch.positions_PC,
            self._dtype,
        )
        hidden, layers = self._estimate_layers(batch, hidden, context)
        x_PCD, add = self._compile_and_estimate(1, layer_programs.add_alone, hidden)
        at_P = self._abstract_array(jnp.int32, num_rows)
        logits_PV, head = self._compile_and_estimate(
            1, layer_programs.logits_at_tokens, *self._embed_and_head, x_PCD, at_P, False
        )
        _, draw = self._compile_and_estimate(1, sampler._greedy, logits_PV)
        parts = [("embedding", 1, embed), *layers]
        gpu = join_estimates([*parts, ("sum", 1, add), ("head", 1, head), ("draw", 1, draw)])
        return EngineStep(num_rows, width, gpu, self._expert_copy_s(tokens))

    def _abstract_caches(self) -> list[LayerCache]:
        """Return the shapes of each layer's cache or states."""
        options = self._options
        sizes = options.num_cache_blocks(), cache_value_dtype(options, self._dtype)
        make = partial(empty_caches, num_rows=options.max_batch, draft_width=options.draft_width)
        return jax.eval_shape(lambda: make(self._config, *sizes))

    def _estimate_layers(
        self, batch: TokenBatch, hidden: Hidden, context: int
    ) -> tuple[Hidden, list[tuple[str, int, GpuEstimate]]]:
        """Return (shapes of the last layer's output, [(name, how often it runs, estimate) of each
        program]).
        """
        if batch.positions_PC.shape[1] == 1 and self._memory.expert_tier is None:
            return self._estimate_layers_of_single_tokens(batch, hidden, context)
        config = self._config
        caches = self._abstract_caches()
        num_rows, width = batch.positions_PC.shape
        tokens = num_rows * width
        parts: list[tuple[str, int, GpuEstimate]] = []
        routed: ExpertInputs | None = None
        length = table_width(self._max_seq_len) * BLOCK
        with trace_for_device(self._device):
            bound = layer_programs.context_bucket(context + 1, length) if width == 1 else None
        variant = layer_programs.LayerProgramOptions(native=False, context=bound)
        windows = [layer.window for layer in config.layers]
        structures = [structure for structure, _ in self._layers]
        arrays_of = dict(self._layers)
        for (structure, seen), count in Counter(zip(structures, windows, strict=True)).items():
            attended = context + width if seen is None else min(context, seen - 1) + width
            window: Any = None if seen is None else self._abstract_array(jnp.int32)
            places = CachePlaces(batch.blocks_PW, batch.positions_PC, window, rows_P=batch.rows_P)
            operands = caches[structures.index(structure)], hidden, places
            (x_PCD, _, y), attend = self._compile_and_estimate(
                -(-attended // BLOCK),
                layer_programs.attend_and_route_program,
                variant,
                structure,
                arrays_of[structure],
                *operands,
                attended=attended,
            )
            routed = y if isinstance(y, ExpertInputs) else routed
            parts.append(
                (
                    "attention and router" if isinstance(y, ExpertInputs) else "dense layer",
                    count,
                    attend,
                )
            )
        if routed is not None:
            tile_rows = min(slots.TABLE_TILE_ROWS, tokens)
            chosen = distinct_experts(config.num_experts, config.num_experts_per_tok, tokens)
            tiles = round(max(chosen, tokens * config.num_experts_per_tok / tile_rows))
            table_E = self._abstract_array(jnp.int32, config.num_experts)
            function = slots.expert_outputs_in_tiles
            y, mlp = self._compile_and_estimate(
                tiles, function, self._products, routed, self._slots, table_E, chosen=chosen
            )
            parts.append(("experts", config.num_moe_layers, mlp))
        output = Hidden(x_PCD, y)
        is_weighted = isinstance(output.y_TD, WeightedOutputs)
        if is_weighted and not isinstance(hidden.y_TD, WeightedOutputs):
            return self._estimate_layers(batch, output, context)  # as after another layer
        return output, parts

    def _estimate_layers_of_single_tokens(
        self, batch: TokenBatch, hidden: Hidden, context: int
    ) -> tuple[Hidden, list[tuple[str, int, GpuEstimate]]]:
        """Return `_estimate_layers` of experts that stay on the device: the engine runs several
        layers a program there, of which each kind is compiled alone.
        """
        config = self._config
        caches = self._abstract_caches()
        tokens = batch.positions_PC.size
        chosen = distinct_experts(config.num_experts, config.num_experts_per_tok, tokens)
        tile_rows = min(slots.TABLE_TILE_ROWS, tokens)
        tiles = round(max(chosen, tokens * config.num_experts_per_tok / tile_rows))
        with trace_for_device(self._device):
            bound = layer_programs.context_bucket(
                context + 1, table_width(self._max_seq_len) * BLOCK
            )
        parts: list[tuple[str, int, GpuEstimate]] = []
        arrays_of = dict(self._layers)
        kinds = [(layer.window, layer.has_experts) for layer in config.layers]
        structures = [structure for structure, _ in self._layers]
        for (structure, (window, is_moe)), count in Counter(zip(structures, kinds)).items():
            attended = context + 1 if window is None else min(context + 1, window)
            attended_blocks = -(-attended // BLOCK)
            static = layer_programs.LayerGroupOptions(
                (structure,), None, self._products, self._dtype, self._embed_and_head[0],
                False, False, 0, bound,
            )  # fmt: skip
            in_window: Any = None if window is None else self._abstract_array(jnp.int32)
            cache = caches[structures.index(structure)]
            layer = layer_programs.LayerOperands(arrays_of[structure], in_window, None)
            tables = (self._abstract_array(jnp.int32, config.num_experts),) * is_moe
            outside, experts = self._embed_and_head[1], (self._slots, tables)

            operands: list[Any] = [static, (layer,), (cache,), outside, hidden, batch, experts]
            if is_moe:  # as after another such layer
                with trace_for_device(self._device):
                    before = self._abstract_operands(tuple(operands))
                    operands[4], _ = _apply_layer.trace(*before).out_info
            (hidden, _), estimate = self._compile_and_estimate(
                partial(_assumed_loop_trips, attended_blocks, tiles),
                *(_apply_layer, *operands),
                attended=attended,
                chosen=chosen,
            )
            parts.append(("layer" if is_moe else "dense layer", count, estimate))
        if config.num_moe_layers:
            idx_TK = self._abstract_array(jnp.int32, tokens, config.num_experts_per_tok)
            choices = (idx_TK,) * config.num_moe_layers
            parts.append(("choices", 1, self._compile_and_estimate(1, _stack, choices)[1]))
        return hidden, parts

    def _expert_copy_s(self, tokens: int) -> float:
        """Return the seconds to copy the experts that a step's tokens choose and that the device
        lacks.
        """
        config, memory = self._config, self._memory
        if memory.expert_tier is None:
            return 0.0
        weights = memory.model.weights
        lacking = 1 - memory.expert_slots / memory.model.num_experts
        chosen = distinct_experts(config.num_experts, config.num_experts_per_tok, tokens)
        if memory.policy == "ring":  # copies every layer's experts in every step
            lacking, chosen = 1.0, float(config.num_experts)
        copied = weights.num_layers * chosen * lacking * weights.expert_bytes
        return copied / ACCELERATORS[self._gpu].link_bytes_per_s
