"""Changes of settings that may save memory, for the advice of a plan that does not fit."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jmoe.config.tiers import Tier
from jmoe.planning.roofline import scale_chosen_share
from jmoe.planning.state_bytes import nvme_bytes_per_parameter
from jmoe.planning.training_sizes import (
    EXPERT_SHARDINGS,
    StatePlacement,
    TrainingSizes,
    candidate_tier_pairs,
)

# with records on NVMe: one checkpoint is durable while the other's records are copied
LEAST_CHECKPOINTS = 2


class SettingChange(NamedTuple):
    """A setting's new value, with the model and the placement that result."""

    setting: str
    value: object
    model: TrainingSizes
    placement: StatePlacement


def possible_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield the changes of settings that may save memory, those with the least effect on the run
    first.
    """
    if model.experts_residual_bytes:
        residual_bytes = model.residual_bytes - model.experts_residual_bytes
        again = replace(
            model, residual_bytes=residual_bytes, experts_residual_bytes=0, experts_again=True
        )
        yield SettingChange("remat", "experts", again, place)
    if model.residual_bytes:
        yield SettingChange(
            "remat",
            "layer",
            replace(model, residual_bytes=0, experts_residual_bytes=0, experts_again=False),
            place,
        )
    if model.copies > 1:
        yield SettingChange("mesh.replicate", 1, replace(model, copies=1), place)
    if model.replicas > model.copies and not place.is_streamed:
        for sharding in EXPERT_SHARDINGS[EXPERT_SHARDINGS.index(model.expert_sharding) + 1 :]:
            split = replace(model, expert_sharding=sharding)
            yield SettingChange("comm.shard_experts", sharding, split, place)
    number = model.micro_batches
    while number * 2 <= model.max_micro_batches:
        number *= 2
        smaller = _with_micro_batch_scaled(
            replace(model, micro_batches=number), model.micro_batches / number
        )
        yield SettingChange("gradient_accumulation_steps", number, smaller, place)
    yield from _context_changes(model, place)
    if model.packing > 1:
        yield SettingChange("comm.packing", model.packing // 2, _with_half_packing(model), place)
    if model.any_tier:
        yield from _tier_setting_changes(model, place)
    if place.checkpoints > LEAST_CHECKPOINTS:
        fewer = replace(place, checkpoints=LEAST_CHECKPOINTS)
        yield SettingChange("checkpoint.keep", LEAST_CHECKPOINTS, model, fewer)
    yield from _mesh_and_batch_changes(model, place)


def _context_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield changes to more devices per sequence, where each already has one sequence at a time;
    the batch stays, in as many more micro-batches.
    """
    for times in (2, 4, 8, 16):
        context, number = model.context * times, model.micro_batches * times
        shares = model.sequence_length and model.sequence_length % (2 * context) == 0
        if not shares or place.is_streamed or model.num_all_devices % context:
            return
        if model.micro_batches < model.max_micro_batches:
            return
        smaller = _with_micro_batch_scaled(model, 1 / times)
        smaller = replace(
            smaller,
            context=context,
            micro_batches=number,
            max_micro_batches=number,
            working_bytes=max(smaller.working_bytes, model.num_devices * model.sequence_bytes),
        )
        value = f"{context} with gradient_accumulation_steps = {number}"
        yield SettingChange("mesh.context", value, smaller, place)


def _tier_setting_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield changes of `tiers`: to tiers, dtypes, slots and caches that may take less memory."""
    if (
        model.gradient_bytes_per_parameter > 2
        and model.compute_dtype_bytes == 2
        and place.is_streamed
    ):
        yield SettingChange(
            "tiers.gradient_dtype",
            "bfloat16",
            replace(model, gradient_bytes_per_parameter=2),
            place,
        )
    for experts, optimizer in candidate_tier_pairs("auto", "auto"):
        if experts == "device" and place.update == "host":
            continue
        if experts != place.experts and optimizer != place.optimizer:
            both = f"{experts} and tiers.optimizer = {optimizer}"
            yield SettingChange(
                "tiers.experts", both, model, replace(place, experts=experts, optimizer=optimizer)
            )
        elif experts != place.experts:
            yield SettingChange("tiers.experts", experts, model, replace(place, experts=experts))
        elif optimizer != place.optimizer:
            yield SettingChange(
                "tiers.optimizer", optimizer, model, replace(place, optimizer=optimizer)
            )
    if place.is_streamed:
        gradients: Tier = "nvme" if place.gradients == "host" else "host"
        yield SettingChange(
            "tiers.gradients", gradients, model, replace(place, gradients=gradients)
        )
    if place.is_streamed and place.experts != "device" and place.device_layers > 1:
        yield SettingChange("tiers.device_layers", 1, model, replace(place, device_layers=1))
    share = math.ceil(8 * model.peak_active_experts * model.num_devices / model.num_experts) / 8
    if place.is_streamed and place.experts != "device" and share < place.device_experts:
        yield SettingChange(
            "tiers.device_experts", share, model, replace(place, device_experts=share)
        )
    for share in (8, 16, 64):
        cache_bytes = (
            nvme_bytes_per_parameter(model, place) * model.num_device_expert_parameters // share
        )
        if cache_bytes:
            yield SettingChange(
                "tiers.host_cache_bytes",
                cache_bytes,
                model,
                replace(place, host_cache_bytes=cache_bytes),
            )


def _mesh_and_batch_changes(model: TrainingSizes, place: StatePlacement) -> Iterator[SettingChange]:
    """Yield changes to more devices, or to a smaller batch."""
    hosts = model.num_devices * model.packing // model.devices_per_host
    for times in (2, 4, 8, 16):
        devices = model.num_devices * times
        if (
            model.num_experts % devices == 0
            and model.max_micro_batches >= model.micro_batches * times
        ):
            spread = replace(
                model, num_devices=devices, max_micro_batches=model.max_micro_batches // times
            )
            yield SettingChange(
                "mesh.expert_inter",
                f"{hosts * times}, on {devices * model.replicas} devices",
                spread,
                place,
            )
    for times in (2, 4, 8, 16):
        if model.max_micro_batches >= model.micro_batches * times:
            more = _with_replicas(model, times)
            value = f"{more.replicas // more.packing}, on {more.num_all_devices} devices"
            yield SettingChange("mesh.data", value, more, place)
    sequences = model.max_micro_batches
    while sequences // 2 >= model.micro_batches:
        sequences //= 2
        yield SettingChange(
            "batch_size",
            sequences * model.num_all_devices // model.context,
            _with_sequences_per_device(model, sequences),
            place,
        )


def _with_half_packing(model: TrainingSizes) -> TrainingSizes:
    """Return the model with half the experts per device: half the replicas, each with twice the
    tokens.
    """
    half = _with_micro_batch_scaled(model, 2.0)
    return replace(
        half,
        packing=model.packing // 2,
        num_devices=model.num_devices * 2,
        replicas=model.replicas // 2,
        step_tokens=model.step_tokens * 2,
        dense_flops=model.dense_flops * 2,
    )


def _with_replicas(model: TrainingSizes, times: int) -> TrainingSizes:
    """Return the model on `times` as many replicas, which each hold all experts and share the
    step's tokens.
    """
    return replace(
        _with_micro_batch_scaled(model, 1 / times),
        replicas=model.replicas * times,
        step_tokens=model.step_tokens // times,
        dense_flops=model.dense_flops / times,
        max_micro_batches=model.max_micro_batches // times,
    )


def _with_sequences_per_device(model: TrainingSizes, sequences: int) -> TrainingSizes:
    """Return the model with a step of `sequences` sequences per device."""
    share = sequences / model.max_micro_batches
    smaller = _with_micro_batch_scaled(replace(model, max_micro_batches=sequences), share)
    smaller = replace(
        smaller, step_tokens=int(model.step_tokens * share), dense_flops=model.dense_flops * share
    )
    measured_tokens, num_tokens = (m.step_tokens * m.replicas for m in (model, smaller))
    routing = model.chosen_share, model.num_experts, model.num_experts_per_tok
    chosen = scale_chosen_share(*routing, measured_tokens=measured_tokens, num_tokens=num_tokens)
    return replace(smaller, chosen_share=chosen)


def _with_micro_batch_scaled(model: TrainingSizes, share: float) -> TrainingSizes:
    """Return the model with the sizes of a micro-batch multiplied by `share`."""
    return replace(
        model,
        input_bytes=int(model.input_bytes * share),
        working_bytes=int(model.working_bytes * share),
        residual_bytes=int(model.residual_bytes * share),
        experts_residual_bytes=int(model.experts_residual_bytes * share),
        recomputed_bytes=int(model.recomputed_bytes * share),
        logits_bytes=int(model.logits_bytes * share),
    )
