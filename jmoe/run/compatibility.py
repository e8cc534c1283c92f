"""Which settings a run may change when it resumes from a checkpoint. Called by `train.py` and the
training session.
"""

import dataclasses
import json
from pathlib import Path

from jmoe.cluster.coordinator import result_from_rank_0
from jmoe.cluster.processes import check_same_options
from jmoe.config import TRAINING_ONLY, TaskConfig, TrainConfig, check, describe_differences
from jmoe.run.checkpoint import Checkpoints
from jmoe.types import JsonObject

# Settings that may change without a message. Any field that neither FREE nor NOTED lists gives the
# saved state another meaning.
FREE = (
    "checkpoint.",
    "cluster",
    "comm.",
    "data.num_threads",  # a field of earlier versions, like tiers.beta and tiers.decay_every_steps
    "data.prefetch_batches",
    "distil.policy",
    "distil.ring_slots",
    "distributed.",
    "elastic.",
    "estimate",
    "evaluation.",
    "json",
    "layout",
    "machine.",
    "mesh.",
    "metrics.",
    "output_dir",
    "plan",
    "profile.",
    "remat",
    "tiers.beta",
    "tiers.cache_beta",
    "tiers.cache_interval",
    "tiers.cache_policy",
    "tiers.cache_threshold",
    "tiers.chosen_share",
    "tiers.decay_every_steps",
    "tiers.device_experts",
    "tiers.device_layers",
    "tiers.experts",
    "tiers.gradients",
    "tiers.host_cache_bytes",
    "tiers.optimizer",
    "tiers.path",
    "tiers.pin_host_memory",
    "tiers.update",
    "tiers.write_back_every_steps",
)
NOTED = {
    "num_steps": "a cosine schedule now ends at another step",
    "compute_dtype": "losses will differ by rounding",
    "loss_scale.growth_steps": "from here on",
    "loss_scale.initial": "the checkpoint's own loss scale counts, if it has one",
    "native": "losses will differ by rounding",
    "gradient_accumulation_steps": (
        "losses will differ by rounding, balance losses are now taken over other groups"
    ),
    "data.layout": "the same rows of each batch on other devices: losses will differ by rounding",
    "data.mask_documents": "from here on",
    "distil.temperature": "from here on",
    "dpo.beta": "from here on",
    "dpo.label_smoothing": "from here on",
    "distil.weight": "from here on",
    **dict.fromkeys((f"model.{name}" for name in TRAINING_ONLY), "from here on"),
    "model.router.aux_loss_coef": "from here on",
    **dict.fromkeys(
        (f"optimizer.{name}" for name in ("beta1", "beta2", "eps", "momentum")), "from here on"
    ),
    "optimizer.clip_norm": "from here on",
    "optimizer.learning_rate": "from here on",
    "optimizer.schedule": "from here on",
    "optimizer.warmup_steps": "the schedule is another one from here on",
    "optimizer.decay_steps": "the schedule changes from here on",
    "optimizer.final_learning_rate_fraction": "the schedule changes from here on",
    "optimizer.weight_decay": "from here on",
    "tiers.gradient_dtype": "gradients of experts are rounded otherwise from here on",
}
# options that may differ between the processes of a run: places on a host, and its own numbers
PLACES = ("distributed.", "machine.", "metrics.", "profile.")
PLACE_NAMES = (
    *("output_dir", "init_from", "distil.teacher", "comm.links", "tiers.path"),
    *("data.path", "data.tokenizer", "data.chat_template", "checkpoint.memory_dir"),
)
FINGERPRINT, TEACHER = "data_fingerprint", "teacher_fingerprint"
BASE = "base_fingerprint"  # of the frozen model of a run with adapters
ENDS = "tasks.", ".num_steps"  # prefix and suffix of the field's name
ENDS_NOTE = "the task takes part until another step; 0: the last one"
NOTED_WITH_FINGERPRINT = {
    "data.chat_template": "the tokens are the same",
    "data.control_tokens": "the tokens are the same",
    "data.encoding": "the text itself is the same",
    "data.path": "the text itself is the same",
    "data.tokenizer": "the tokenizer itself is the same",
}
# fingerprint of a model that is not trained -> (its field, the note if the model is the same)
MODELS = {
    TEACHER: ("distil.teacher", "the teacher itself is the same"),
    BASE: ("init_from", "the frozen model itself is the same"),
}


def _with_defaults(saved: JsonObject, defaults: JsonObject) -> JsonObject:
    """Return a saved configuration with missing fields filled in. Fields are missing if they were
    added later; their defaults keep the old behaviour.
    """
    filled = defaults | saved
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(filled[name], dict):
            filled[name] = _with_defaults(filled[name], value)
    return filled


def check_same_on_all_processes(config: TrainConfig) -> None:
    """Raise `ValueError` on every process if one of them has other options, code or JAX than
    process 0. Every process must call this.
    """
    places = (*PLACES, *(f"{name}:" for name in PLACE_NAMES))
    check_same_options(json.loads(config.to_json()), places)


def has_compatible_checkpoint(config: TrainConfig, resolved: JsonObject) -> bool:
    """Return True if the run has a checkpoint to resume from, as process 0 sees it; False if it has
    none. Every process must call this.

    resolved: the run's configuration with its teacher's fingerprint, if it has one; the data
    fingerprint may be absent. Raises an error if the checkpoint is of an incompatible configuration
    or has more steps than `num_steps` (`ValueError` on process 0).
    """

    def check_newest_config() -> str:
        checkpoints = Checkpoints(Path(config.output_dir) / "checkpoints", config.checkpoint)
        saved = checkpoints.newest_config()
        if saved is None:
            return ""
        done = checkpoints.steps()[-1]
        constraint = (
            f"must be at least {done}, the steps that the run has done; another output_dir starts"
            " anew"
        )
        check(config.num_steps >= done, "num_steps", config.num_steps, constraint)
        check_and_list_differences(
            saved, resolved | {name: saved[name] for name in (FINGERPRINT,) if name in saved}
        )
        return "resumes"

    return bool(
        result_from_rank_0("configuration", check_newest_config, config.distributed.start_timeout_s)
    )


def raise_if_checkpoint_has_other_data(config: TrainConfig, resolved: JsonObject) -> None:
    """Raise `ValueError` that the training data has changed if there is a checkpoint; the caller
    knows that it has changed.
    """
    saved = Checkpoints(Path(config.output_dir) / "checkpoints", config.checkpoint).newest_config()
    if saved is not None:
        check_and_list_differences(saved, resolved | {FINGERPRINT: "of other data"})


def _compare_model_fingerprints(
    saved: JsonObject, now: JsonObject, changed: dict[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return ({field: note} of models that are the same, lines about models that differ), and
    remove their fingerprints from `changed`.
    """
    noted, refused = {}, []
    for fingerprint, (field, note) in MODELS.items():
        differs, before = changed.pop(fingerprint, ""), saved.get(fingerprint)
        if before and not differs:
            noted[field] = note
        elif before and now.get(fingerprint):
            section, _, name = field.rpartition(".")
            value = (saved[section] if section else saved)[name]
            refused.append(f"{field}: {value!r} -> other weights")
    return noted, refused


def check_and_list_differences(saved: JsonObject, now: JsonObject) -> list[str]:
    """Return lines to print about allowed differences between a checkpoint's configuration and the
    current one.

    Raises `ValueError` listing every field whose change would give the saved state another meaning:
    the model, the data and their order (seed, batch_size, sequence_length), and every other field
    that neither `FREE` nor `NOTED` lists. If both configurations have a `data_fingerprint`, the
    data is compared by it, and its path may change; likewise the fingerprints in `MODELS`.
    """
    saved = _with_defaults(saved, json.loads(TrainConfig().to_json()))
    if "tasks" in saved:
        task = dataclasses.asdict(TaskConfig(source="any"))
        saved = saved | {
            "tasks": {name: _with_defaults(own, task) for name, own in saved["tasks"].items()}
        }
    noted = dict(NOTED)
    if now.get("upcycle", {}).get("num_experts") is not None:
        noted["init_from"] = "the checkpoint has the experts already"
    if FINGERPRINT in saved and FINGERPRINT in now:
        noted |= NOTED_WITH_FINGERPRINT
    changed = {line.partition(":")[0]: line for line in describe_differences(saved, now)}
    same, refused = _compare_model_fingerprints(saved, now, changed)
    noted, notes = noted | same, list[str]()
    other_data = changed.pop(FINGERPRINT, "") and FINGERPRINT in saved and FINGERPRINT in now
    places = [
        changed.pop(name) for name in NOTED_WITH_FINGERPRINT if other_data and name in changed
    ]
    for name, line in changed.items():
        if name in noted:
            notes.append(f"{line} ({noted[name]})")
        elif name.startswith(ENDS[0]) and name.endswith(ENDS[1]):
            notes.append(f"{line} ({ENDS_NOTE})")
        elif not any(
            name == free or (free.endswith(".") and name.startswith(free)) for free in FREE
        ):
            refused.append(line)
    if refused:
        raise ValueError(
            "the checkpoint was made with another configuration (saved -> now): "
            + "; ".join(refused)
            + ". Give the saved values, or start a run of its parameters: --init-from RUN with"
            " another --output-dir"
        )
    if other_data:
        what = "; ".join(places) or f"data.path = {now['data']['path']} names other text now"
        raise ValueError(
            f"the data has changed since the checkpoint was saved: {what}; give the text and the"
            " tokenizer that the run began with, or another output_dir to start anew"
        )
    return notes
