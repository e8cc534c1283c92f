"""Which settings a run may change when it resumes from a checkpoint."""

import json
from typing import Any

from jmoe.config import TrainConfig, differences

# What may change between a checkpoint and the run that resumes it. Everything else changes what the state means.
FREE = (
    "checkpoint.",
    "data.num_threads",
    "data.prefetch_batches",
    "distributed.",
    "evaluation.",
    "machine.",
    "mesh.",
    "output_dir",
    "profile.",
    "remat",
    "tiers.beta",
    "tiers.decay_every_steps",
    "tiers.device_layers",
    "tiers.gradients",
    "tiers.host_cache_bytes",
    "tiers.path",
)
NOTED = {
    "num_steps": "the cosine schedule now ends at another step",
    "compute_dtype": "losses will differ by rounding",
    "gradient_accumulation_steps": "losses will differ by rounding, balance losses are now taken over other groups",
    "optimizer.clip_norm": "from here on",
    "optimizer.final_learning_rate_fraction": "the schedule changes from here on",
    "optimizer.weight_decay": "from here on",
    "tiers.gradient_dtype": "gradients of experts are rounded otherwise from here on",
}
NOTED_WITH_FINGERPRINT = {
    "data.encoding": "the text itself is the same",
    "data.path": "the text itself is the same",
    "data.tokenizer": "the tokenizer itself is the same",
}


def _with_defaults(saved: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration with the fields that jmoe has got since; their defaults are what it did before."""
    filled = defaults | saved
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(filled[name], dict):
            filled[name] = _with_defaults(filled[name], value)
    return filled


def _without_memory_tiers(config: dict[str, Any]) -> dict[str, Any]:
    """What is in memory is saved in the same way, be it the device's or the host's."""
    memory = {name: "device" for name in ("experts", "optimizer") if config["tiers"][name] == "host"}
    return config | {"tiers": config["tiers"] | memory}


def check_compatible(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines to print about allowed differences between a checkpoint's configuration and the present one.

    Raises `ValueError` listing every field whose change would give the saved state another meaning: the model, the
    data and their order (seed, batch_size, sequence_length), the optimizer's moments and schedule, and any field this
    list does not know. A `data_fingerprint` in both stands for the data, and its place may then change.
    """
    saved = _with_defaults(saved, json.loads(TrainConfig().to_json()))
    saved, now = _without_memory_tiers(saved), _without_memory_tiers(now)
    noted = dict(NOTED)
    if "data_fingerprint" in saved and "data_fingerprint" in now:
        noted |= NOTED_WITH_FINGERPRINT
    notes, refused = [], []
    for line in differences(saved, now):
        name = line.partition(":")[0]
        if name in noted:
            notes.append(f"{line} ({noted[name]})")
        elif not any(name == free or (free.endswith(".") and name.startswith(free)) for free in FREE):
            refused.append(line)
    if refused:
        raise ValueError(
            "the checkpoint was made with another configuration (saved -> now): "
            + "; ".join(refused)
            + ". Give the saved values, or another output_dir to start anew"
        )
    return notes
