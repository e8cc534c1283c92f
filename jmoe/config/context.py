"""How many devices share a sequence (`mesh.context`). Standard library only."""

from __future__ import annotations

from typing import Any

from jmoe.config.checks import check, check_field

TrainConfig = Any  # `config.train`, which imports this module


def _refusals(config: TrainConfig) -> list[str]:
    """Return the settings with which devices cannot share sequences."""
    reasons = {
        "with experts on other tiers": config.tiers.any_off_device,
        "with distil.teacher": bool(config.distil.teacher),
        "with dpo.beta": config.dpo.beta is not None,
        "with attention in both directions": not config.model.is_causal,
        "with linear_attention in model.layer_types": config.model.has_linear_attention,
        "with chunked_attention in model.layer_types": config.model.has_chunked_attention,
    }
    return [why for why, holds in reasons.items() if holds]


def can_share_sequences(config: TrainConfig) -> bool:
    """Return whether no other setting forbids that devices share sequences."""
    return not _refusals(config)


def check_may_share_sequences(config: TrainConfig) -> None:
    """Raise ValueError if devices are to share sequences, and another setting forbids it."""
    context = config.mesh.context
    for why in _refusals(config) if context > 1 else ():
        check(False, "mesh.context", context, f"must be 0 or 1 {why}")


def _fits(config: TrainConfig, context: int, num_devices: int) -> bool:
    """Return whether groups of `context` of the devices can divide batch and sequences."""
    shares = context == 1 or (not _refusals(config) and config.sequence_length % (2 * context) == 0)
    groups = num_devices // context * config.gradient_accumulation_steps
    return shares and num_devices % context == 0 and config.batch_size % groups == 0


def _fewest(config: TrainConfig, num_devices: int) -> int | None:
    """Return the fewest devices that have to share a sequence; None if no number fits."""
    sizes = range(1, num_devices + 1)
    return next((n for n in sizes if _fits(config, n, num_devices)), None)


def planned_devices_per_sequence(config: TrainConfig, num_devices: int) -> int:
    """Return the number of devices that share a sequence, of a run whose mesh need not be complete
    yet: `mesh.context`, or the fewest that fit, or 1.
    """
    return config.mesh.context or _fewest(config, num_devices) or 1


def devices_per_sequence(config: TrainConfig, num_devices: int) -> int:
    """Return the number of neighbouring devices that share each sequence: `mesh.context`, or if it
    is 0 the fewest with which every device gets a part of the batch.

    Raises ValueError if batch, sequences and devices cannot be divided so.
    """
    context, steps = config.mesh.context, config.gradient_accumulation_steps
    batch = f"must be a multiple of {num_devices} devices x {steps} accumulation steps"
    if not context:
        fewest = _fewest(config, num_devices)
        if refusals := _refusals(config):
            batch += f"; devices cannot share a sequence {refusals[0]}"
        else:
            batch += (
                ", or with n devices to a sequence (mesh.context) of a n-th of that, which needs"
                f" sequence_length = {config.sequence_length} to be a multiple of 2 n"
            )
        check_field(fewest is not None, config, "batch_size", batch)
        assert fewest is not None
        return fewest
    check_may_share_sequences(config)
    divides = num_devices % context == 0
    check(divides, "mesh.context", context, f"must divide the {num_devices} devices")
    whole = context == 1 or config.sequence_length % (2 * context) == 0
    chunks = f"must be a multiple of 2 x mesh.context = {2 * context}"
    check_field(whole, config, "sequence_length", chunks)
    batch += f" / mesh.context = {context}" * (context > 1)
    check_field(_fits(config, context, num_devices), config, "batch_size", batch)
    return context
