"""Open a model for inference: plan its memory, load its weights, and make a runner.

`Engine`, its followers in other processes, and `Teacher` use `LoadedModel`.
"""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import jax
from jax.sharding import Mesh

from jmoe.cluster.processes import check_same_identity, check_same_options
from jmoe.config import check
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.delta_states import DeltaCache
from jmoe.inference.kv_cache import cache_value_dtype, empty_caches, table_width
from jmoe.inference.mesh.runner import MeshRunner, make_mesh_caches, make_mesh_runner
from jmoe.inference.path_table import PathTable
from jmoe.inference.popularity import make_estimator
from jmoe.inference.runner import ModelRunner, runs_on_cpu
from jmoe.inference.runner_protocol import Runner
from jmoe.inference.scheduler import Scheduler
from jmoe.inference.served_adapters import ServedAdapters, max_adapter_bytes
from jmoe.inference.token_prediction import (
    TokenPredictor,
    load_predictor,
    open_prediction_layer,
    prediction_bytes,
)
from jmoe.memory.closing import Closing
from jmoe.memory.host_memory import available_bytes
from jmoe.memory.moesys_counts import record_ranks_factory
from jmoe.memory.record_layout import RecordLayout
from jmoe.memory.tiered_store import LinkName, TieredStore
from jmoe.mesh import EXPERT_INTER, device_counts_of_hosts, expert_mesh
from jmoe.models.huggingface import family_of
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.quantization import quantized_cache_note
from jmoe.offload.residency import open_experts, open_placed_experts
from jmoe.offload.segments import read_segments
from jmoe.planning.memory_plan import (
    FreeMemory,
    MemoryPlan,
    ModelBytes,
    default_sequence_length,
    plan_memory,
    plan_mesh_memory,
)
from jmoe.planning.placement import Placement, slot_rows_and_sizes
from jmoe.planning.roofline import ExpertWeightSizes
from jmoe.run.compile_cache import enable_compile_cache
from jmoe.status import status
from jmoe.types import PyTree
from kernels_pallas import fp8_dot, native
from kernels_pallas.formats import FP8, INT8_TAKING
from kernels_pallas.grouped_matmul.fp8_inputs import has_fp8_products

log = logging.getLogger("jmoe")
_BUILT_LATER = (
    "steps of few tokens are slower until the next start: the native operations are being built in"
    " the background; python -m kernels_pallas.native waits for them"
)
FEW_PREFIXES = (
    "prompts share no common prefixes: the states of linear_attention are kept at the end of a"
    " sequence alone, for a prompt that continues it"
)
Say = Callable[[str], None]


def open_checkpoint(folder: str | os.PathLike[str], options: EngineConfig) -> LazyCheckpoint:
    """Open a Hugging Face folder with the dtypes that these options ask for, and return it."""
    return LazyCheckpoint(folder, options.dtype, options.expert_dtype)


def make_engine_mesh(on: EngineMesh) -> Mesh:
    """Return the mesh of an engine's devices, grouped by `mesh.nodes`, or by hosts if that is 0 and
    all hosts have the same number of devices. Collective: every process must call this.
    """
    of_hosts = device_counts_of_hosts() if jax.process_count() > 1 else [on.devices]
    hosts = len(of_hosts) if len({*of_hosts}) == 1 else 1
    mesh = expert_mesh(on.devices, on.nodes or hosts)
    apart = on.exchange != "dedup" or mesh.shape[EXPERT_INTER] > 1
    check(apart, "mesh.exchange", on.exchange, "needs several hosts, or mesh.nodes")
    return mesh


def _uses_several_devices(options: EngineConfig) -> bool:
    return options.mesh.devices > 1 or jax.process_count() > 1


class LoadedModel(Closing):
    """A loaded model with scheduler and runner, as every process of an engine has it."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        options: EngineConfig,
        bandwidth_limit_bytes_per_s: Mapping[LinkName, float] | None = None,
        say: Say = log.info,
    ) -> None:
        """Load a Hugging Face checkpoint.

        bandwidth_limit_bytes_per_s: limits on reads from the tiers "nvme" and "host", for
            measurements.
        say: receives a line about each slow operation.

        Raises ValueError before it reads weights.
        """
        with open_checkpoint(folder, options) as checkpoint, contextlib.ExitStack() as stack:
            _check_linear_attention(checkpoint, options)
            scales_note = _apply_cache_scales(checkpoint, options)
            enable_compile_cache()
            check_same_identity(f"content of {checkpoint.folder}", lambda: checkpoint.content_hash)
            # the server has set a length that its user left open, other processes have not
            options = resolve_sequence_length(checkpoint, options)
            assert options.max_seq_len is not None
            positions_note = checkpoint.fix_sequence_length(options.max_seq_len)
            check_same_options(asdict(replace(options, cache_dir=None)))
            paths = options.estimator == "paths"
            table = (
                PathTable.load(checkpoint.folder, checkpoint.routing_fingerprint) if paths else None
            )
            mesh = make_engine_mesh(options.mesh) if _uses_several_devices(options) else None
            self.memory = plan_engine_memory(checkpoint, options)
            # fewer program sizes on an accelerator: padding is nearly free there, compiling is slow
            ratio = 2 if runs_on_cpu() or mesh is not None else 4
            self.scheduler = Scheduler(
                options,
                checkpoint.eos_token_ids,
                ratio=ratio,
                has_states=checkpoint.config.has_linear_attention,
                attention_chunk=checkpoint.config.attention_chunk_size,
            )
            limits = bandwidth_limit_bytes_per_s
            use_native = mesh is None and not options.lora and load_native_if_used(options, say)
            activations_note = _check_expert_activations(checkpoint, options, use_native)
            notes = (
                scales_note,
                activations_note,
                positions_note,
                checkpoint.expert_conversion_note,
                quantized_cache_note(checkpoint.fields, options.kv_cache_dtype),
                FEW_PREFIXES if checkpoint.config.has_linear_attention else "",
            )
            for note in filter(None, notes):
                say(note)
            stack.enter_context(status(f"loading {checkpoint.folder}", say, timed=True))
            self.on_one: ModelRunner | None = None
            self.on_mesh: MeshRunner | None = None
            self.predictor: TokenPredictor | None = None
            if mesh is None:
                self.on_one, self.store = _make_runner_on_one_device(
                    checkpoint, self.memory, options, table, limits, use_native
                )
                layer = open_prediction_layer(checkpoint, options)
                if layer is not None:
                    with layer:
                        self.predictor = load_predictor(layer, self.on_one, options)
            else:
                experts, self.store = open_placed_experts(
                    checkpoint,
                    self.memory,
                    mesh,
                    cache_dir=options.cache_dir,
                    bandwidth_limit_bytes_per_s=limits,
                    placements=segment_placements(checkpoint, options),
                    on_host=load_native_for_mesh(options, self.memory),
                    pin=options.pin_host_memory,
                    make_ranks=record_ranks_factory(options),
                )
                self.on_mesh = make_mesh_runner(checkpoint, options, experts, table)
        self.folder, self.options = checkpoint.folder, options

    @property
    def runner(self) -> Runner:
        runner = self.on_one or self.on_mesh
        assert runner is not None
        return runner

    def close(self) -> None:
        """Stop the threads that copy experts."""
        self.runner.residency.close()
        if self.predictor is not None:
            self.predictor.close()
        if self.store is not None:
            self.store.close()


def _check_linear_attention(checkpoint: LazyCheckpoint, options: EngineConfig) -> None:
    """Raise ValueError naming an option that gated delta networks do not support."""
    if not checkpoint.config.has_linear_attention:
        return
    beside = "for a model with linear_attention layers"
    several = _uses_several_devices(options)
    check(not several, "mesh.devices", options.mesh.devices, f"must be 1, in one process, {beside}")
    check(not options.lora, "lora", options.lora, f"must be empty {beside}")


def _apply_cache_scales(checkpoint: LazyCheckpoint, options: EngineConfig) -> str:
    """Let the layers have the scales of a cache in FP8; return a sentence about them, or "".

    Raises ValueError for adapters, whose queries, keys and values would lack the scales.
    """
    if options.kv_cache_dtype != "fp8":
        return ""
    note = checkpoint.apply_cache_scales()
    words = "must be auto with lora for a checkpoint with k_scale or v_scale"
    check(not (note and options.lora), "kv_cache_dtype", options.kv_cache_dtype, words)
    return note


def _check_expert_activations(
    checkpoint: LazyCheckpoint, options: EngineConfig, use_native: bool
) -> str:
    """Return a sentence about the rounding of the experts' inputs, or "".

    Raises ValueError if they are to be rounded and no operation does so.
    """
    if options.expert_activations == "exact":
        return ""
    field, value, kind = "expert_activations", options.expert_activations, checkpoint.expert_format
    taken: tuple[str, ...] = INT8_TAKING
    platform = jax.devices()[0].platform
    if value == "fp8":
        taken = (FP8.name,)
        words = (
            f"must be exact on this {platform}: products of fp8 run on NVIDIA GPUs from compute"
            " capability 8.9 on (Ada, Hopper, Blackwell), and on a CPU for comparisons"
        )
        check(platform == "cpu" or has_fp8_products(), field, value, words)
    else:
        words = "must be exact without native operations, which run on one CPU device"
        check(use_native, field, value, words)
    stored = "wide" if kind is None else kind.name
    words = f"must be exact with experts that are {stored}; set expert_dtype to one of "
    check(stored in taken, field, value, words + ", ".join(taken))
    if value == "int8":
        return ""
    how = "the tensor cores multiply E4M3"
    if platform == "cpu":
        how = (
            "XLA multiplies the rounded values in float32, without native operations: slower than"
            " exact, to compare numbers"
        )
    elif not fp8_dot.ALLOWS_FEWER_BITS:
        how += (
            ", which Hopper widens to float16, at half of the rate or less:"
            " kernels_pallas/fp8_dot.py does not know this version of JAX"
        )
    return f"expert_activations = fp8 on a {platform}: {how}"


def _make_runner_on_one_device(
    checkpoint: LazyCheckpoint,
    memory: MemoryPlan,
    options: EngineConfig,
    table: PathTable | None,
    limits: Mapping[LinkName, float] | None,
    use_native: bool,
) -> tuple[ModelRunner, TieredStore | None]:
    """Return (runner on one device, store of the streamed experts, or None if all are on the
    device).
    """
    assert options.max_seq_len is not None, "the model's positions say it"
    config, dtype = checkpoint.config, checkpoint.dtype
    family = family_of(checkpoint.fields)
    adapters = ServedAdapters.load(options.adapter_folders, config, family, dtype)
    residency, store = open_experts(
        checkpoint,
        memory,
        cache_dir=options.cache_dir,
        bandwidth_limit_bytes_per_s=limits,
        native=use_native,
        activations=options.expert_activations,
        on_host=options.pin_host_memory != "on"
        and not options.lora
        and load_native_for_host_experts(options, memory),
        pin=options.pin_host_memory,
        make_ranks=record_ranks_factory(options),
    )
    embed_and_head, layers = checkpoint.load_dense_modules()
    # Arguments committed to a device compile another program than uncommitted ones, so everything
    # that a step replaces is committed from the start.
    caches = jax.device_put(
        empty_caches(
            config,
            options.num_cache_blocks(),
            cache_value_dtype(options, dtype),
            num_rows=options.max_batch,
            draft_width=options.draft_width,
        ),
        jax.devices()[0],
    )
    width = table_width(options.max_seq_len)
    name = options.estimator
    if name == "auto":
        name = "router" if residency.finder is None else None
    estimator = make_estimator(name, residency, layers, config.num_experts, table)
    runner = ModelRunner(
        config,
        embed_and_head,
        layers,
        residency,
        (caches, width),
        dtype,
        estimator,
        native=use_native,
        draft_width=options.draft_width,
    )
    runner.adapters = adapters
    return runner, store


def load_native_if_used(options: EngineConfig, say: Say = log.info, *, waits: bool = False) -> bool:
    """Load native (C++) operations if an engine on one device uses them; return whether it does.

    If they are not built on this machine yet, which takes a minute, this waits only if the options
    ask for them or round activations, or `waits` is set; otherwise they are built in the background
    for the next start. Raises ValueError naming the field if the options ask for them and they are
    not available.
    """
    platform, wanted = jax.devices()[0].platform, options.native
    if options.expert_activations == "fp8":  # no native operation rounds so
        return False
    is_asked, is_hybrid = wanted == "on", options.policy == "hybrid"
    waits |= options.expert_activations == "int8"  # no other operations round them
    if is_asked and not is_hybrid:
        words = f"must be auto or off on a {platform}: the operations are a CPU's"
        check(platform == "cpu", "native", wanted, words)
    if wanted == "off" or platform != "cpu":
        return False
    try:
        return _load_or_build_native(say, waits=waits or is_asked or is_hybrid)
    except native.NotBuiltError as error:
        check(not is_asked, "native", wanted, f"cannot be had here: {error}")
        log.info("no native operations, steps of few tokens are slower: %s", error)
        return False


def load_native_for_host_experts(options: EngineConfig, plan: MemoryPlan) -> bool:
    """Load native operations if the CPU may compute experts that the device lacks; return whether
    it may.

    Policy "hybrid" waits until they are built; otherwise they are built in the background. Policy
    "auto" does not use them if the CPU is the device: no copy would be saved. Raises ValueError if
    policy "hybrid" is set and they are not available.
    """
    is_asked = plan.policy == "hybrid"
    may_pay = (
        plan.policy == "auto" and options.native != "off" and jax.devices()[0].platform != "cpu"
    )
    if plan.expert_tier != "host" or not (is_asked or may_pay):
        return False
    try:
        return _load_or_build_native(log.info, waits=is_asked)
    except native.NotBuiltError as error:
        check(not is_asked, "policy", plan.policy, f"needs native operations: {error}")
        return False


def load_native_for_mesh(options: EngineConfig, plan: MemoryPlan) -> bool:
    """Load native operations if the CPU computes experts of several devices; return whether it
    does: policy "auto" leaves none to it there. Raises ValueError as `load_native_for_host_experts`
    does.
    """
    return options.policy == "hybrid" and load_native_for_host_experts(options, plan)


def _load_or_build_native(say: Say, *, waits: bool) -> bool:
    """Load the native operations; return False if they are not built yet and `waits` is not set.

    waits: build them first if they are not built, and report it; otherwise they are built in the
    background, for the next start. Raises `NotBuiltError` if they cannot be built.
    """
    with contextlib.ExitStack() as stack:
        if not native.is_built():
            if not waits:
                native.build_in_background()
                log.warning(_BUILT_LATER)
                return False
            stack.enter_context(
                status("building the native operations, once on this machine", say, timed=True)
            )
        native.load()
    return True


def segment_placements(checkpoint: LazyCheckpoint, options: EngineConfig) -> list[Placement] | None:
    """Return each layer's placement according to `mesh.segments`, or None if that is not set."""
    config = checkpoint.config
    return (
        read_segments(options.mesh, config.num_moe_layers, config.num_experts)
        if options.mesh.segments
        else None
    )


def model_bytes(checkpoint: LazyCheckpoint, options: EngineConfig) -> ModelBytes:
    """Return the bytes that an engine needs per device, from the checkpoint's headers alone."""
    config, devices = checkpoint.config, options.mesh.devices
    family = family_of(checkpoint.fields)
    caches = jax.eval_shape(lambda: make_mesh_caches(checkpoint, options))
    states = [cache for cache in caches if isinstance(cache, DeltaCache)]
    layer_bytes, layer_cache_bytes = 0, 0
    layer = open_prediction_layer(checkpoint, options)
    if layer is not None:
        with layer:
            layer_bytes, layer_cache_bytes = prediction_bytes(layer, options)
    weights = ExpertWeightSizes(
        config.num_moe_layers,
        config.num_experts,
        config.num_experts_per_tok,
        checkpoint.expert_bytes,
    )
    return ModelBytes(
        weights,
        record_bytes=RecordLayout.from_arrays(checkpoint.expert_fields).record_bytes,
        dense_bytes=checkpoint.dense_bytes_per_device(
            devices if options.mesh.dense == "tensor" else 1
        )
        + max_adapter_bytes(options.adapter_folders, config, family, checkpoint.dtype),
        cache_bytes=(_total_bytes(caches) - _total_bytes(states)) // devices + layer_cache_bytes,
        prediction_bytes=layer_bytes,
        state_bytes=_total_bytes(states),
        draft_bytes=_draft_logits_bytes(options, config.vocab_size),
    )


def _total_bytes(shapes: PyTree) -> int:
    """Return the bytes of all arrays of a tree of arrays or shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _draft_logits_bytes(options: EngineConfig, vocab_size: int) -> int:
    """Return the bytes of the float32 logits after every token of a step in which all sequences
    have drafts; 0 without speculation, whose steps have one row of logits a sequence.
    """
    if options.draft_width == 1:
        return 0
    return 4 * options.max_batch * options.draft_width * vocab_size


@dataclass(frozen=True)
class EngineMachine:
    """The memory of one process: what is free on each of its devices and on its host.

    num_devices: devices of the process.
    """

    free: FreeMemory
    num_devices: int


def this_machine() -> EngineMachine:
    """Return the memory that is free now on this process's first device and on its host."""
    device, host_bytes = jax.local_devices()[0], available_bytes()
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is None:  # the CPU's memory is the host's
        free = FreeMemory(host_bytes, host_bytes, shared=True)
    else:
        free = FreeMemory(stats["bytes_limit"] - stats["bytes_in_use"], host_bytes, shared=False)
    return EngineMachine(free, jax.local_device_count())


def plan_engine_memory(
    checkpoint: LazyCheckpoint, options: EngineConfig, machine: EngineMachine | None = None
) -> MemoryPlan:
    """Return where an engine would put a checkpoint's bytes.

    machine: None for this one. Reads headers only.
    """
    return _make_memory_planner(checkpoint, options, machine or this_machine())(
        model_bytes(checkpoint, options)
    )


def resolve_sequence_length(
    checkpoint: LazyCheckpoint, options: EngineConfig, machine: EngineMachine | None = None
) -> EngineConfig:
    """Return the options with `max_seq_len` set, and `cache_tokens` where memory limits it.

    If both are open, the cache takes what the free memory allows, up to `max_batch` sequences of
    all the model's positions and at least as many of min(`DEFAULT_MAX_SEQ_LEN`, positions). With
    several processes, whose free memory may differ, it is that minimum. A sequence may be as long
    as the cache of a device and the model's positions allow. machine: None for this one. Raises
    ValueError if the options exceed the model's positions.
    """
    if options.max_seq_len is None and options.cache_tokens is not None:
        longest = options.cache_tokens // options.num_cache_pools
        return replace(options, max_seq_len=min(checkpoint.max_positions, longest))
    length = checkpoint.choose_sequence_length(options.max_seq_len)
    shortest = replace(options, max_seq_len=length)
    if (
        options.max_seq_len is not None
        or jax.process_count() > 1
        or length == checkpoint.max_positions
    ):
        return shortest
    machine = machine or this_machine()
    free, local_devices = machine.free, min(machine.num_devices, options.mesh.devices)
    model = model_bytes(checkpoint, shortest)
    a_device = (
        replace(free, device_bytes=free.device_bytes // local_devices) if free.shared else free
    )
    plan = _make_memory_planner(checkpoint, shortest, machine)
    length = default_sequence_length(model, length, checkpoint.max_positions, a_device, plan)
    if length == checkpoint.max_positions:
        return replace(options, max_seq_len=length)
    longest = min(checkpoint.max_positions, options.max_batch // options.num_cache_pools * length)
    return replace(options, max_seq_len=longest, cache_tokens=options.max_batch * length)


def _make_memory_planner(
    checkpoint: LazyCheckpoint, options: EngineConfig, machine: EngineMachine
) -> Callable[[ModelBytes], MemoryPlan]:
    """Return a function from a model's bytes to the memory plan of these options."""
    devices, free, expert_slots = options.mesh.devices, machine.free, None
    # every device has as many slots as the device with the most experts needs
    if (placements := segment_placements(checkpoint, options)) is not None:
        expert_slots = sum(slot_rows_and_sizes(placements)[1])
    if devices > 1:
        local_devices = min(machine.num_devices, devices)
        return lambda model: plan_mesh_memory(model, free, options, local_devices, expert_slots)
    return lambda model: plan_memory(model, free, options)
