"""Inputs of the training planner for a run: the model's needs, this machine's memory and speed, and
what the tiers measured.

`train.py --plan`, `with_chosen_tiers` and the end of a run use it; `jmoe.planning.training` holds
the formulas.
"""

import dataclasses
import itertools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jmoe.collectives.schedule import SCHEDULES
from jmoe.config import ModelConfig, TrainConfig
from jmoe.config.context import can_share_sequences, planned_devices_per_sequence
from jmoe.config.parallel import ExpertSharding, largest_packing, packed_shape
from jmoe.config.tiers import Tier, Update
from jmoe.layers.experts import up_projection_columns
from jmoe.layers.loss import logits_bytes
from jmoe.memory.host_memory import available_bytes
from jmoe.models.pretrained import abstract_decoder
from jmoe.offload.expert_state import ExpertStats
from jmoe.optim.moments import moment_bytes, muon_flops
from jmoe.planning.exchange import receive_buffer_rows
from jmoe.planning.expert_packing import MemoryShortfall
from jmoe.planning.first_fitting import first_fitting_expert_sharding, first_fitting_plan
from jmoe.planning.linear_attention import (
    linear_attention_bytes_in_use,
    saved_linear_attention_elements,
)
from jmoe.planning.training import TrainingPlan, plan_training
from jmoe.planning.training_sizes import (
    Machine,
    StatePlacement,
    TrainingSizes,
    candidate_tier_pairs,
)
from jmoe.run.metrics import MetricsLog, read_step_records
from jmoe.runtime import MEMORY_SHARE, gpu_memory_fraction
from jmoe.types import JsonObject


def training_sizes(config: TrainConfig) -> TrainingSizes:
    """Return the run's model and step as numbers for the planner. Mesh axes left open count as 1,
    because devices are not known yet.
    """
    # mesh axes that are left open depend on the devices, which are not known yet: assume 1
    model, mesh = config.model, config.mesh
    inside, packing = max(1, mesh.expert_intra), config.comm.initial_packing
    _, *shared = packed_shape((1, mesh.expert_inter, inside), packing)
    devices, replicas = math.prod(shared), max(1, mesh.data) * packing
    tokens = config.batch_size * config.sequence_length // replicas
    expert, experts = model.parameters_per_expert, model.num_moe_layers * model.num_experts
    micro_batches = config.gradient_accumulation_steps
    # beside an encoder a layer has a part of the text's tokens; memory is counted as if it had all
    passed = sum(map(config.positions_of, model.expert_layers)) / config.sequence_length
    expert_flops = 6.0 * expert * model.num_experts_per_tok * passed
    flops = config.flops_per_token - expert_flops
    context = planned_devices_per_sequence(config, devices * replicas)
    activations = _activation_bytes(config, tokens // micro_batches, devices, context)
    return TrainingSizes(
        num_layers=model.num_moe_layers,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        parameters_per_expert=expert,
        dense_parameters=model.total_and_active_parameters()[0] - experts * expert,
        step_tokens=tokens,
        dense_flops=flops * tokens,
        compute_dtype_bytes=_compute_dtype_bytes(config),
        gradient_bytes_per_parameter=2 if config.tiers.gradient_dtype == "bfloat16" else 4,
        num_devices=devices,
        devices_per_host=inside,
        experts_again=config.remat == "experts",
        micro_batches=micro_batches,
        max_micro_batches=max(micro_batches, config.batch_size * context // (replicas * devices)),
        replicas=replicas,
        packing=packing,
        shard_dense=config.comm.shard_dense,
        chosen_share=config.tiers.chosen_share,
        on_gpu=_has_gpu_memory_size(config),
        expert_sharding=config.comm.expert_sharding if replicas > mesh.replicate else "none",
        copies=mesh.replicate,
        context=context,
        context_bytes=_compute_dtype_bytes(config)
        * context_sent_elements(model, config.sequence_length, context)
        * (tokens // devices),
        sequence_length=config.sequence_length if can_share_sequences(config) else 0,
        sequence_bytes=_compute_dtype_bytes(config)
        * config.sequence_length
        * (context_elements_in_use(model, devices * replicas) // (devices * replicas)),
        **activations._asdict(),
        **_optimizer_sizes(config)._asdict(),
    )


class _OptimizerSizes(NamedTuple):
    """The fields of `TrainingSizes` that the optimizer decides, by default those of AdamW with
    float32 moments.
    """

    dense_moment_bytes: float = 8.0
    expert_moment_bytes: float = 8.0
    update_flops: float = 0.0
    any_tier: bool = True


def _optimizer_sizes(config: TrainConfig) -> _OptimizerSizes:
    """Return the sizes of the run's optimizer."""
    optimizer, model = config.optimizer, config.model
    if optimizer.kind == "adamw" and optimizer.moments == "float32":
        return _OptimizerSizes(any_tier=not model.has_linear_attention)
    shapes = abstract_decoder(model)[2]
    total = model.total_and_active_parameters()[0]
    experts = model.num_moe_layers * model.num_experts * model.parameters_per_expert
    dense_bytes, expert_bytes = moment_bytes(optimizer, shapes)
    return _OptimizerSizes(
        dense_bytes / (total - experts),
        expert_bytes / experts if experts else 0.0,
        muon_flops(optimizer, shapes),
        any_tier=False,
    )


class _ActivationBytes(NamedTuple):
    """The fields of `TrainingSizes` that count the bytes of a micro-batch's activations."""

    input_bytes: int
    working_bytes: int
    recomputed_bytes: int
    residual_bytes: int
    experts_residual_bytes: int
    logits_bytes: int
    loss_chunk_bytes: int


def _activation_bytes(
    config: TrainConfig, num_tokens: int, num_devices: int, context: int
) -> _ActivationBytes:
    """Return the bytes of the activations of a micro-batch of one replica, of whose devices each
    `context` share their sequences.
    """
    model, compute_dtype_bytes, on_gpu = (
        config.model,
        _compute_dtype_bytes(config),
        _has_gpu_memory_size(config),
    )
    number_bytes = (
        compute_dtype_bytes if on_gpu else 4
    )  # XLA:CPU widens what it computes in 16 bits
    ragged = config.comm.exchange == "ragged"
    sizes = model, num_tokens, num_devices, _row_buffers_per_exchange(config), ragged
    chunks = 1 if ragged or num_devices == 1 else _num_exchange_chunks(config)
    working, recomputed = gradient_elements_in_use(*sizes, chunks=chunks)
    working = max(working, num_tokens * context_elements_in_use(model, context))
    by_rule = num_tokens * linear_attention_bytes_in_use(model, on_gpu=on_gpu)
    dense, experts = residual_elements(*sizes, streamed=not config.tiers.all_on_device)
    experts *= config.remat == "none"
    residuals = dense * (config.remat != "layer") + experts
    return _ActivationBytes(
        input_bytes=compute_dtype_bytes * model.num_layers * num_tokens * model.hidden_size,
        working_bytes=max(number_bytes * working, by_rule),
        recomputed_bytes=number_bytes * recomputed,
        residual_bytes=compute_dtype_bytes * residuals,
        experts_residual_bytes=compute_dtype_bytes * experts,
        logits_bytes=(4 + compute_dtype_bytes) * model.vocab_size * num_tokens,
        loss_chunk_bytes=logits_bytes(
            max(1, num_tokens // num_devices),
            model.vocab_size,
            compute_dtype_bytes,
            on_cpu=not on_gpu,
        ),
    )


def _compute_dtype_bytes(config: TrainConfig) -> int:
    return 4 if config.compute_dtype == "float32" else 2


def _has_gpu_memory_size(config: TrainConfig) -> bool:
    """Return whether `machine` gives the memory of an accelerator, so that the plan is for GPUs."""
    return bool(config.machine.resolve_device_peaks().device_bytes)


def _row_buffers_per_exchange(config: TrainConfig) -> int:
    """Return how many row buffers an exchange of a layer needs on a device: with a capacity factor,
    each chunk of a dedup exchange has its own.
    """
    comm, mesh = config.comm, config.mesh
    whole = comm.exchange in ("auto", "dedup") and config.model.capacity_factor is not None
    whole = whole and mesh.expert_inter > 1 and mesh.expert_intra != 1
    return _num_exchange_chunks(config) if whole else 1


def _num_exchange_chunks(config: TrainConfig) -> int:
    """Return into how many chunks a layer's exchanges are cut."""
    return config.comm.exchange_chunks or SCHEDULES[config.comm.schedule].num_chunks


def residual_elements(
    model: ModelConfig,
    num_tokens: int,
    num_devices: int,
    buffers: int = 1,
    ragged: bool = False,
    *,
    streamed: bool = False,
) -> tuple[int, int]:
    """Return (elements saved for the backward pass besides experts' products, elements of experts'
    products), of all layers on all devices.

    Layer inputs are not counted (`models.block.SAVED` lists the residuals). The first number counts
    queries, keys, values, gates and attention outputs, or those of a gated delta network, hidden
    states, and the first products of dense
    feed-forwards. If experts are on other devices or tiers, it also counts the normed tokens; on
    several devices, the rows sent and received.

    num_tokens: of a micro-batch of one replica. buffers: row buffers per device. ragged: rows
    travel by ragged all-to-alls. streamed: experts are off the device.
    """
    hidden, layers = model.hidden_size, model.num_layers
    linear = layers - model.num_attention_layers
    mixed = model.num_attention_layers * _attention_elements(model)
    mixed += linear * saved_linear_attention_elements(model)
    rows = buffers * _received_rows(model, num_tokens, num_devices, ragged)
    up, dense_up, shared_up = (
        up_projection_columns(size, model.hidden_act)
        for size in (
            model.moe_intermediate_size,
            model.intermediate_size,
            model.shared_expert_intermediate_size,
        )
    )
    # several devices save experts' outputs as the rows received back; on one device, the experts
    # weigh their outputs, which nothing saves
    returned = num_tokens * model.num_experts_per_tok if ragged else rows
    sent = num_tokens if num_devices == 1 else rows + returned
    sparse = num_tokens * shared_up
    if num_devices > 1 or streamed:
        sparse += (2 * num_tokens + sent) * hidden
    dense = (layers - model.num_moe_layers) * num_tokens * dense_up
    elements = num_tokens * (mixed + layers * hidden) + model.num_moe_layers * sparse + dense
    return elements, model.num_moe_layers * rows * up


def _attention_elements(model: ModelConfig) -> int:
    """Return the elements of a token's queries, keys, values, gates and attention outputs."""
    heads = (2 + model.attention_gate) * model.num_attention_heads + 2 * model.num_key_value_heads
    return heads * model.dim_per_head


def _received_rows(model: ModelConfig, num_tokens: int, num_devices: int, ragged: bool) -> int:
    """Return the rows of a layer's receive buffers on all devices. num_tokens: on all devices."""
    k, factor = model.num_experts_per_tok, model.capacity_factor
    tokens = num_tokens // num_devices
    return num_devices * receive_buffer_rows(tokens, k, num_devices, factor, ragged=ragged)


def gradient_elements_in_use(
    model: ModelConfig,
    num_tokens: int,
    num_devices: int,
    buffers: int = 1,
    ragged: bool = False,
    chunks: int = 1,
) -> tuple[int, int]:
    """Return (elements in use at once by a layer's gradients, further elements in use if the layer
    is recomputed), on all devices.

    With experts, the first counts the gradients of each product's output and of the rows sent; the
    second counts the rows and each product's output. Of an exchange in `chunks`, one chunk's rows
    have gradients at a time. The counts follow the buffers of compiled
    steps (`benchmarks/train/estimates.py`).
    """
    hidden, inner = model.hidden_size, model.moe_intermediate_size
    attention = _attention_elements(model)
    dense_up, shared_up, up = (
        up_projection_columns(size, model.hidden_act)
        for size in (model.intermediate_size, model.shared_expert_intermediate_size, inner)
    )
    has_dense = model.num_moe_layers < model.num_layers
    each = max(attention + 4 * hidden, 2 * hidden + 2 * (dense_up if has_dense else shared_up))
    if not model.num_moe_layers:
        return num_tokens * each, num_tokens * each
    rows = buffers * _received_rows(model, num_tokens, num_devices, ragged)
    sent = hidden if num_devices > 1 else 0
    # XLA keeps one receive buffer for the loop over a ragged exchange's further rounds
    again = rows * ((3 if ragged else 2) * hidden + up + inner)
    gradients = rows // chunks * (inner + sent)
    return max(num_tokens * each, again + gradients), max(num_tokens * each, again)


def context_elements_in_use(model: ModelConfig, context: int) -> int:
    """Return the elements in use by the gradients of attention in a layer whose sequences lie on
    `context` devices, per token; 0 for one device.

    Keys and values of whole sequences twice, as gathered and in order, with float32 gradients (two
    elements) and those in the compute dtype; and queries, outputs and both gradients of the
    context - 1 pairs of chunks, each of half a device's tokens.
    """
    if context == 1:
        return 0
    kv_heads = model.num_attention_heads if model.kv_lora_rank else model.num_key_value_heads
    whole = context * 2 * kv_heads * model.dim_per_head
    pairs = 4 * model.num_attention_heads * model.dim_per_head * (context - 1) // 2
    return 5 * whole + pairs


def context_sent_elements(model: ModelConfig, sequence_length: int, context: int) -> int:
    """Return the elements that a device sends for each of its tokens in a step, in all layers, to
    the devices that share its sequences.

    In layers with full attention each of its keys and values goes to context - 1 devices in the
    forward and in the backward pass, and their gradients come back. With a window of at most a
    chunk only the ends of chunks go, each to one device at most.
    """
    if context == 1:
        return 0
    chunk = sequence_length // (2 * context)
    kv = 2 * model.num_key_value_heads * model.dim_per_head
    if model.kv_lora_rank:
        kv = model.kv_lora_rank + model.qk_rope_head_dim
    elements = 0.0
    for layer in model.layers:
        near = layer.window is not None and layer.window <= chunk
        tail = min(chunk, max(1, math.ceil(((layer.window or 0) - 1) / 128)) * 128)
        elements += 3 * kv * (context - 1) * (tail / chunk / context if near else 1)
    return round(elements)


def described_machine(config: TrainConfig) -> Machine:
    """Return the machine that the configuration describes; undescribed memory sizes are those free
    on this machine.
    """
    described, folder = config.machine, Path(config.tiers.path or config.output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    device = described.resolve_device_peaks()
    device_bytes, share = device.device_bytes, gpu_memory_fraction()
    if described.accelerator and not described.device_bytes:
        device_bytes = int(share * device_bytes)
    described_bytes: dict[Tier, int] = {"host": described.host_bytes, "nvme": described.nvme_bytes}
    if described.accelerator:
        source = (
            f"the data sheet of {described.accelerator}; programs reach less: --machine.flops etc."
            " take what yours do"
        )
        if not described.device_bytes:
            source += (
                f"; of its memory JAX takes {100 * share:g} %, unless {' or '.join(MEMORY_SHARE)}"
                " says more"
            )
    else:
        source = "two CPU cores where --machine.accelerator or .flops etc. do not say otherwise"
    return Machine(
        device_bytes=device_bytes,
        host_bytes=described.host_bytes or available_bytes(),
        nvme_bytes=described.nvme_bytes or shutil.disk_usage(folder).free,
        shared=not device.device_bytes,
        flops=(
            device.flops
            if config.compute_dtype != "float32" or described.flops
            else device.flops / 2
        ),
        link_bytes_per_s=device.link_bytes_per_s,
        nvme_read_bytes_per_s=described.nvme_read_bytes_per_s,
        nvme_write_bytes_per_s=described.nvme_write_bytes_per_s,
        memory_bytes_per_s=device.memory_bytes_per_s,
        source=source,
        assumed_tiers=tuple(tier for tier, size in described_bytes.items() if not size),
        host_memory_bytes_per_s=described.host_memory_bytes_per_s,
    )


def _state_placement(
    config: TrainConfig, experts: Tier, optimizer: Tier, update: Update = "device"
) -> StatePlacement:
    tiers = config.tiers
    return StatePlacement(
        experts=experts,
        optimizer=optimizer,
        gradients=tiers.gradients,
        device_layers=tiers.device_layers,
        host_cache_bytes=tiers.host_cache_bytes or None,
        checkpoints=config.checkpoint.num_kept_checkpoints,
        device_experts=tiers.device_experts,
        update=update,
    )


def training_plan(config: TrainConfig) -> TrainingPlan:
    """Return the memory and time plan of a run whose tiers are chosen.

    Raises `ValueError` for a model without experts, or if the mesh's devices cannot share the
    model.
    """
    if not config.model.num_moe_layers:
        raise ValueError(
            f"model.num_experts = {config.model.num_experts}: the planner is for models with"
            " experts"
        )
    mesh, inside = config.mesh, max(1, config.mesh.expert_intra)
    config.checked_mesh_shape(max(1, mesh.data) * mesh.expert_inter * inside, inside)
    model, tiers = training_sizes(config), config.tiers
    assert tiers.experts != "auto" and tiers.optimizer != "auto" and tiers.update != "auto"
    place = _state_placement(config, tiers.experts, tiers.optimizer, tiers.update)
    return plan_training(model, place, described_machine(config))


def with_experts_in_host_memory(config: TrainConfig) -> TrainConfig:
    """Return the run with experts and optimizer state in host memory, updated where the planner
    predicts the faster step. Raises `ValueError` if another option needs them on the device.
    """
    tiers = dataclasses.replace(config.tiers, experts="host", optimizer="host", update="auto")
    comm = dataclasses.replace(config.comm, shard_experts="none")
    return with_chosen_tiers(dataclasses.replace(config, tiers=tiers, comm=comm))


def packing_shortfall(config: TrainConfig, machine: Machine) -> MemoryShortfall:
    """Return the bytes that all tiers of `machine` together lack for a run with this
    configuration's expert packing: on the tiers that the configuration names, and with experts,
    optimizer and gradients in host memory; 0 if it fits.
    """

    def lacking_bytes(run: TrainConfig) -> int:
        experts, optimizer = run.tiers.experts, run.tiers.optimizer
        assert experts != "auto" and optimizer != "auto"
        place = _state_placement(run, experts, optimizer)
        return sum(plan_training(training_sizes(run), place, machine).lacking_bytes.values())

    own_bytes = lacking_bytes(config)
    if config.tiers.any_off_device:
        where = f"tiers.experts = {config.tiers.experts!r} is off the device already"
        return MemoryShortfall(own_bytes, refused=where)
    try:
        return MemoryShortfall(own_bytes, lacking_bytes(with_experts_in_host_memory(config)))
    except ValueError as error:
        return MemoryShortfall(own_bytes, refused=f"experts cannot move to host memory: {error}")


def packing_summary(config: TrainConfig) -> str:
    """Return a line with the experts per device and the mesh; for `comm.packing = auto` also the
    most experts that fit in memory.
    """
    mesh, first = config.mesh, config.comm.initial_packing
    full = (max(1, mesh.data), mesh.expert_inter, max(1, mesh.expert_intra))
    alone = config.model.num_experts // (full[1] * full[2])
    line = f"packing: {first * alone} experts a device, mesh {packed_shape(full, first)}"
    if config.comm.packing != "auto":
        return f"{line} (comm.packing = {first})"
    on, fits, on_device = described_machine(config), 1, 1
    while fits < largest_packing(full):
        shortfall = packing_shortfall(config.with_packing(2 * fits), on)
        if shortfall.lacking_bytes and not shortfall.must_offload:
            break
        fits *= 2
        on_device = on_device if shortfall.must_offload else fits
    moved = f", more than {on_device * alone} in host memory" if on_device < fits else ""
    return (
        f"{line} at first; memory and mesh allow up to {fits * alone}{moved} (comm.packing = auto)"
    )


def with_chosen_tiers(config: TrainConfig) -> TrainConfig:
    """Return the run with every `auto` tier replaced by the fastest that fits, and
    `tiers.update = "auto"` by what the planner predicts to be faster. Raises `ValueError` if no
    tier fits.

    If the tier depends on it, or a plan is printed, `comm.shard_experts` is chosen first.
    """
    tiers = config.tiers
    if config.plan or tiers.experts == "auto":
        config = with_chosen_expert_sharding(config)
    if "auto" not in (tiers.experts, tiers.optimizer, tiers.update):
        return config
    model, machine = training_sizes(config), described_machine(config)
    places = list[StatePlacement]()
    for pair in candidate_tier_pairs(tiers.experts, tiers.optimizer):
        updates = _candidate_update_places(tiers.update, experts=pair[0])
        both = [_state_placement(config, *pair, update) for update in updates]
        places += sorted(both, key=lambda place: plan_training(model, place, machine).step_s())
    place = places[0]
    if "auto" in (tiers.experts, tiers.optimizer):
        place = first_fitting_plan(model, machine, places).placement
    chosen = tiers.with_tiers(place.experts, place.optimizer, place.update)
    return dataclasses.replace(config, tiers=chosen)


def with_chosen_expert_sharding(config: TrainConfig) -> TrainConfig:
    """Return the run with `comm.shard_experts = "auto"` replaced by the first value with which the
    experts fit the devices' memory; by the last one if none fits, or, if `auto` tiers can take the
    experts instead, by none.

    A run whose number of replicas is not known yet (`mesh.data` is 0) is returned as it is.
    """
    comm, tiers = config.comm, config.tiers
    replicas = config.mesh.data * comm.initial_packing
    if comm.shard_experts != "auto" or not replicas:
        return config
    sharding: ExpertSharding | None = "none"
    on_device = {tiers.experts, tiers.optimizer} <= {"auto", "device"}
    split = replicas > config.mesh.replicate
    if split and on_device and config.model.num_moe_layers and config.can_shard_experts:
        place = _state_placement(config, "device", "device")
        model, machine = training_sizes(config), described_machine(config)
        sharding = first_fitting_expert_sharding(model, machine, place)
    if sharding is None:
        sharding = "none" if "auto" in (tiers.experts, tiers.optimizer) else "weights"
    return dataclasses.replace(config, comm=dataclasses.replace(comm, shard_experts=sharding))


def _candidate_update_places(update: str, *, experts: Tier) -> tuple[Update, ...]:
    """Return the values of `tiers.update` that are possible with the weights on the tier `experts`:
    the configured `update`, or all if that is `auto`. The first is taken if predictions are equal.
    """
    if experts == "device":
        return ("device",)
    both: tuple[Update, ...] = ("device", "host")
    return tuple(name for name in both if update in ("auto", name))


# fractions of a device's experts of a layer, see `ExpertStats`
SHARES = ("chosen_share", "most_chosen_share", "room")


def tier_counts(stats: ExpertStats) -> dict[str, float]:
    """Return this process's tier counters since its start: bytes moved, updates, replayed steps,
    seconds waited, shares.

    `hit_rate` is present only if experts were looked up in host memory.
    """
    stores = stats.store_stats
    hits, misses = (
        sum(getattr(store.cache, name) for store in stores) for name in ("hits", "misses")
    )
    counts = _summable_counts(stats) | {
        name: getattr(stats, name) for name in ("waited_s", "step_waited_s", *SHARES)
    }
    return counts | ({"hit_rate": hits / (hits + misses)} if hits + misses else {})


def _summable_counts(stats: ExpertStats) -> dict[str, float]:
    """Return the counters of `tier_counts` whose total over processes is their sum."""
    stores = stats.store_stats
    return {
        "nvme_read_bytes": sum(store.nvme.num_bytes for store in stores),
        "nvme_written_bytes": sum(store.nvme_writes.num_bytes for store in stores),
        "host_bytes": sum(store.host.num_bytes for store in stores),
        "slot_bytes": stats.slot_bytes,
        "to_device_bytes": stats.link.to_device,
        "from_device_bytes": stats.link.from_device,
        "updates": stats.updates,
        "replayed_steps": stats.replayed_steps,
    }


def tier_totals(stats: ExpertStats) -> dict[str, float]:
    """Return the tier counters summed over all processes. Collective: every process must call this.

    `waited_s` and the shares are maxima over processes, except `chosen_share`, which is the mean.
    """
    sums = _summable_counts(stats)
    others = ("waited_s", *SHARES)
    own = np.array([*sums.values(), *(getattr(stats, name) for name in others)])
    # as bytes: JAX would round float64 to 32 bits
    every = (
        np.asarray(process_allgather(own.view(np.uint8))).reshape(-1, own.nbytes).view(own.dtype)
    )
    of_others = dict(zip(others, every[:, len(sums) :].T, strict=True))
    return (
        {name: int(total) for name, total in zip(sums, every.sum(axis=0), strict=False)}
        | {name: float(values.max()) for name, values in of_others.items()}
        | {"chosen_share": float(of_others["chosen_share"].mean())}
    )


def summarize_and_log_tiers(config: TrainConfig, totals: dict[str, float], log: MetricsLog) -> str:
    """Return text that compares predicted and measured step time and lists `tier_totals`; also
    write an event `tiers` to the log.

    The prediction is repeated with the measured share of chosen experts, if any step ran. The text
    also has the predicted and the measured share of the steps' time in which the devices waited
    for a tier.
    """
    steps = read_step_records(log.path)
    measured_s = median(line["step_s"] for line in steps[len(steps) // 4 :])
    plan = training_plan(config)
    predicted = {"predicted_step_s": plan.step_s()}
    line = f"step: predicted {plan.step_s():.3g} s"
    if share := totals["chosen_share"]:
        predicted_s = predicted["predicted_step_s_measured_share"] = plan.with_chosen_share(
            share
        ).step_s()
        line += f" ({predicted_s:.3g} s with the measured share of chosen experts)"
        plan = plan.with_chosen_share(share)
    predicted["predicted_waited_share"] = 1 - sum(plan.compute_s_by_pass) / plan.step_s()
    waited = _share_waited_for_tiers(steps)
    if waited is not None:
        predicted["waited_share"] = waited
    log.write_event("tiers", len(steps), **predicted, measured_step_s=measured_s, **totals)
    line += f", measured {measured_s:.3g} s; {totals['waited_s']:.1f} s waited"
    if waited is not None:
        line += (
            f"\ndevices waited for a tier in {100 * waited:.1f} % of the steps' time, predicted"
            f" {100 * predicted['predicted_waited_share']:.1f} %"
        )
    return f"{line}\n{tier_totals_text(totals)}"


def _share_waited_for_tiers(steps: Sequence[JsonObject]) -> float | None:
    """Return the share of the steps' time in which process 0 waited for a tier; None if no step's
    wait is known.

    Steps that compiled, and the first after each start, do not count.
    """
    waited_s = steps_s = 0.0
    for before, step in itertools.pairwise(steps):
        both = [record.get("tiers", {}).get("step_waited_s") for record in (before, step)]
        # the counter begins anew when a run resumes
        if None in both or both[1] < both[0] or step.get("compiled"):
            continue
        waited_s, steps_s = waited_s + both[1] - both[0], steps_s + step["step_s"]
    return waited_s / steps_s if steps_s else None


def tier_totals_text(totals: dict[str, float]) -> str:
    """Return the counters of `tier_totals` as lines of text."""
    return (
        f"NVMe: {totals['nvme_read_bytes'] / 1e9:.2f} GB read,"
        f" {totals['nvme_written_bytes'] / 1e9:.2f} GB written; host to devices"
        f" {totals['to_device_bytes'] / 1e9:.2f} GB, back {totals['from_device_bytes'] / 1e9:.2f}"
        f" GB\nexperts: {totals['updates']}"
        f" updates, {totals['replayed_steps']} missed steps replayed\na layer's step chose"
        f" {100 * totals['chosen_share']:.0f} % of a device's experts, at most"
        f" {100 * totals['most_chosen_share']:.0f} %; room for {100 * totals['room']:.0f} %"
    )
