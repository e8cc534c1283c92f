"""No option is ignored silently: every field is refused where nothing would honour it, or the table
says why it counts.

`REFUSED` has, by field, a configuration that cannot honour it; `COUNTS` the fields that every
configuration honours, or that change nothing where they describe what a configuration has not. A
new field belongs in one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jmoe.config import (
    CommConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    RouterConfig,
    TaskConfig,
    TrainConfig,
    VisionModelConfig,
    VisionTrainConfig,
    YarnConfig,
)
from jmoe.config.model import MODEL_LIMITS
from jmoe.config.serving import ServeConfig
from jmoe.config.supervise import SuperviseConfig
from jmoe.config.tiers import MachineConfig, TiersConfig

EXPERTS = "describes experts, of which a dense model has none, as configurations of Hugging Face do"
NO_TRAFFIC = "the form and order of traffic between devices: one device has none"
PLANNERS = "read by the planner alone: the machine that it plans for, whatever runs here"
LIMIT = "a limit on a wait: nothing waits where nothing is there to wait for"
SHAPE = "a parameter's shape or a formula of every model"

Change = dict[str, Any]  # field, dotted -> value
ON_DEVICE: Change = {}
ON_HOST: Change = {"tiers.experts": "host", "tiers.optimizer": "host"}
ON_NVME: Change = {"tiers.experts": "nvme", "tiers.optimizer": "nvme"}

# root -> field -> (what it is set to, a configuration that cannot honour it)
REFUSED: dict[str, dict[str, tuple[Any, Change]]] = {
    "train": {
        "tiers.gradients": ("nvme", ON_DEVICE),
        "tiers.gradient_dtype": ("bfloat16", ON_DEVICE),
        "tiers.path": ("/nvme", ON_DEVICE),
        "tiers.host_cache_bytes": (1 << 30, ON_DEVICE),
        "tiers.write_back_every_steps": (5, ON_DEVICE),
        "tiers.cache_policy": ("moesys", ON_DEVICE),
        "tiers.cache_threshold": (2.0, ON_NVME),
        "tiers.cache_beta": (0.5, ON_NVME),
        "tiers.cache_interval": (8, ON_NVME),
        "tiers.pin_host_memory": ("on", ON_DEVICE),
        "tiers.update": ("host", {"tiers.optimizer": "host"}),
        "tiers.device_layers": (3, ON_DEVICE),
        "tiers.device_experts": (0.5, ON_DEVICE),
        "data.weights": ((1.0,), {}),
        "data.layout": ("elastic", {}),
        "data.field": ("body", {}),
        "data.encoding": (("latin-1",), {}),
        "data.chat_template": ("chat.jinja", {}),
        "data.preferences": (True, {}),
        "data.max_prompt_tokens": (8, {}),
        "data.train_on": ("all", {}),
        "data.long_samples": ("drop", {}),
        "data.pack_samples": (False, {}),
        "data.mask_documents": (True, {"distil.teacher": "teacher"}),
        "mesh.context": (2, ON_HOST),
        "mesh.replicate": (2, ON_HOST),
        "optimizer.kind": ("muon", ON_HOST),
        "optimizer.moments": ("8bit", ON_HOST),
        "optimizer.momentum": (0.9, {}),
        "optimizer.decay_steps": (5, {}),
        "optimizer.final_learning_rate_fraction": (0.5, {"optimizer.schedule": "constant"}),
        "loss_scale.initial": (8, {}),
        "loss_scale.growth_steps": (8, {}),
        "comm.exchange_chunks": (2, {}),
        "comm.links": ("links.toml", {"comm.exchange": "flat"}),
        "comm.chunk_bytes": (1 << 20, {"comm.schedule": "priority"}),
        "comm.bucket_bytes": (1 << 20, {"comm.schedule": "none", "comm.fuse_dense": False}),
        "comm.packing": ("auto", {"distil.teacher": "teacher"}),
        "comm.shard_experts": ("weights", ON_HOST),
        "comm.balance_every_steps": (5, ON_HOST),
        "checkpoint.memory_dir": ("/dev/shm", ON_HOST),
        "checkpoint.memory_every_steps": (5, {}),
        "evaluation.sample_temperature": (0.5, {"evaluation.sample_tokens": 0}),
        "metrics.host": ("127.0.0.1", {}),
        "masking.share": (0.3, {}),
        "masking.as_mask": (0.5, {}),
        "masking.as_random": (0.2, {}),
        "denoising.share": (0.3, {}),
        "denoising.span_length": (4.0, {}),
        "dpo.beta": (0.1, {"init_from": ""}),
        "dpo.label_smoothing": (0.1, {}),
        "upcycle.num_experts": (8, {"init_from": ""}),
        "upcycle.num_experts_per_tok": (3, {}),
        "lora.rank": (4, {"init_from": ""}),
        "lora.alpha": (8.0, {}),
        "lora.rslora": (True, {}),
        "lora.dropout": (0.1, {}),
        "lora.targets": (("router",), {}),
        "lora.expert_dtype": ("mxfp4", {}),
        "yarn_factor": (2.0, {"init_from": ""}),
        "train": (("experts",), ON_HOST),
        "freeze": (("router",), ON_HOST),
        "distil.weight": (0.9, {}),
        "distil.temperature": (1.0, {}),
        "distil.policy": ("ring", {}),
        "distil.ring_slots": (2, {"distil.teacher": "teacher", "distil.policy": "resident"}),
        "native": ("on", {"compute_dtype": "float32"}),
        "cluster": ("cluster.toml", {}),
        "json": (True, {}),
        "model.rope_scaling": (YarnConfig(2.0, 16), {"model.position": "learned"}),
        "model.rope_interleave": (True, {"model.position": "learned"}),
        "model.partial_rotary_factor": (0.5, {"model.position": "learned"}),
        "model.q_lora_rank": (4, {}),
        "model.qk_nope_head_dim": (4, {}),
        "model.qk_rope_head_dim": (4, {}),
        "model.v_head_dim": (4, {}),
        "model.linear_num_key_heads": (2, {}),
        "model.linear_num_value_heads": (2, {}),
        "model.linear_key_head_dim": (8, {}),
        "model.linear_value_head_dim": (8, {}),
        "model.linear_conv_kernel_dim": (4, {}),
        "model.linear_projections_by_head": (True, {}),
        "model.shared_expert_gate": (True, {}),
        "model.router.second_expert_policy": ("random", {}),
        "model.router.n_group": (2, {}),
        "model.router.mask_distance": (0.5, {}),
        "model.attention_chunk_size": (16, {}),
        "model.attn_scale": (0.5, {}),
        "model.floor_scale": (16, {}),
        "model.router.bias_update_speed": (0.01, {}),
    },
    "images": {
        "data.path": (("text",), {}),
        "data.held_out_bytes": (1000, {}),
        "data.held_out_fraction": (0.5, {}),
        "data.tokenizer": ("tokenizer.json", {}),
        "data.prefetch_batches": (9, {}),
        "evaluation.sample_tokens": (5, {}),
        "distil.teacher": ("teacher", {}),
        "optimizer.kind": ("muon", {}),
        "optimizer.moments": ("8bit", {}),
        "upcycle.num_experts": (8, {"init_from": "run"}),
        "native": ("on", {}),
        "yarn_factor": (2.0, {"init_from": "run"}),
        "mesh.context": (2, {}),
        "mesh.replicate": (2, {}),
        "estimate": ("h100", {}),
        "tiers.chosen_share": (0.5, {}),
        "tiers.device_experts": (0.5, ON_HOST),
        "tiers.update": ("auto", ON_HOST),
        "comm.schedule": ("priority", {}),
        "comm.bucket_bytes": (1 << 20, {}),
        "comm.packing": (2, {}),
        "comm.shard_experts": ("optimizer", {}),
        "comm.balance_every_steps": (5, {}),
        "comm.links": ("links.toml", {}),
        "paths.temperature": (3.0, {}),
        "paths.final_temperature": (0.1, {}),
        "elastic.replan_every_steps": (5, {}),
        "elastic.max_imbalance": (1.5, {}),
        "model.learn_paths": (True, {}),
        "model.bidirectional": (True, {}),
        "model.num_encoder_layers": (2, {}),
        "model.kv_lora_rank": (4, {}),
        "model.sliding_window": (4, {}),
        "model.attention_sinks": (True, {}),
        "model.router.jitter_noise": (0.1, {}),
    },
    "task": {"embedding_size": (8, {}), "contrastive_temperature": (0.5, {})},
    "serve": {
        "allowed_hosts": (("name",), {"api_key_file": "keys"}),
        "engine.expert_tier": ("nvme", {"engine.policy": "resident"}),
        "engine.host_cache_bytes": (1, {"engine.policy": "resident"}),
        "engine.cache_policy": ("moesys", {"engine.policy": "resident"}),
        "engine.cache_threshold": (2.0, {}),
        "engine.cache_beta": (0.5, {}),
        "engine.cache_interval": (8, {}),
        "engine.pin_host_memory": ("on", {"engine.policy": "resident"}),
        "engine.estimator": ("router", {"engine.policy": "ring"}),
        "engine.native": ("on", {"engine.mesh.devices": 2}),
        "engine.lora": (("name=folder",), {"engine.mesh.devices": 2}),
        "engine.num_speculative_tokens": (3, {}),
        "engine.prompt_lookup_max": (3, {}),
        "engine.prompt_lookup_min": (1, {}),
        "engine.expert_activations": ("int8", {"engine.native": "off"}),
        "engine.ring_slots": (2, {"engine.mesh.devices": 2, "engine.policy": "resident"}),
        "engine.device_bytes": (2, {"engine.mesh.devices": 2, "engine.policy": "resident"}),
        "engine.mesh.placement": ("eplb", {}),
        "engine.mesh.slots_per_device": (2, {}),
        "engine.mesh.rebalance_every": (2, {"engine.mesh.devices": 2}),
        "engine.mesh.rebalance_window": (2, {"engine.mesh.devices": 2}),
        "engine.mesh.segments": ("segments.json", {}),
        "engine.mesh.dense": ("tensor", {}),
        "engine.mesh.nodes": (1, {}),
        "engine.mesh.exchange": ("flat", {}),
        "estimate": ("h100", {"dry_run": True}),
        **{f"machine.{f.name}": (1, {}) for f in dataclasses.fields(MachineConfig)},
        "machine.accelerator": ("h100", {}),
        "machine.host_bytes": (1, {"dry_run": True}),
        "machine.nvme_bytes": (1, {"dry_run": True}),
        "machine.nvme_write_bytes_per_s": (1.0, {"dry_run": True}),
        "distributed.heartbeat_folder": ("beats", {}),
        "distributed.stopped_exit_code": (75, {}),
    },
    "supervise": {"launch": ("rsh {host}", {}), "return_check_s": (1.0, {})},
}
# root -> field, or section with a dot at its end -> why no configuration ignores it
COUNTS: dict[str, dict[str, str]] = {
    "train": {
        **dict.fromkeys(
            (
                "model.vocab_size",
                "model.hidden_size",
                "model.num_hidden_layers",
                "model.num_attention_heads",
            ),
            SHAPE,
        ),
        **dict.fromkeys(
            ("model.num_key_value_heads", "model.head_dim", "model.max_position_embeddings"), SHAPE
        ),
        **dict.fromkeys(
            ("model.norm", "model.norm_eps", "model.position", "model.initializer_range"), SHAPE
        ),
        **dict.fromkeys(("model.hidden_act", "model.mlp_bias", "model.tie_word_embeddings"), SHAPE),
        **dict.fromkeys(
            ("model.qk_norm", "model.clip_qkv", "model.attention_bias", "model.qkv_bias"), SHAPE
        ),
        **dict.fromkeys(
            ("model.embedding_multiplier", "model.residual_multiplier", "model.logits_scaling"),
            SHAPE,
        ),
        "model.head_bias": SHAPE,
        "model.attention_gate": "ordinary attention's output; latent refuses it",
        "model.attention_multiplier": "the scores of ordinary attention; latent refuses it",
        **dict.fromkeys(
            ("model.sliding_window", "model.layer_types", "model.attention_sinks"), SHAPE
        ),
        "model.kv_lora_rank": "latent attention, instead of the ordinary kind",
        "model.bidirectional": "the mask of every attention, and what the run learns",
        "model.num_encoder_layers": "layers of its own, and what the run learns",
        "model.rope_theta": (
            "the angles of rotary positions; models with learned ones have it in their files as"
            " well"
        ),
        "model.intermediate_size": (
            "the dense layers' size; configurations have it where all layers have experts, too"
        ),
        **dict.fromkeys(
            ("model.num_experts", "model.num_experts_per_tok", "model.moe_intermediate_size"),
            EXPERTS,
        ),
        **dict.fromkeys(("model.decoder_sparse_step", "model.first_k_dense_replace"), EXPERTS),
        **dict.fromkeys(
            ("model.mlp_only_layers", "model.shared_expert_intermediate_size"), EXPERTS
        ),
        **dict.fromkeys(("model.capacity_factor", "model.router."), EXPERTS),
        **dict.fromkeys(
            ("data.path", "data.tokenizer", "data.prefetch_batches"), "every run reads text"
        ),
        "data.control_tokens": "every run reads text",
        **dict.fromkeys(
            ("data.held_out_fraction", "data.held_out_bytes"), "every run holds text out"
        ),
        "optimizer.": "AdamW updates every run, and Muon's parameters that are no matrices",
        "mesh.": "every run has a mesh, which must multiply to its devices",
        **dict.fromkeys(("comm.exchange", "comm.schedule", "comm.embedding"), NO_TRAFFIC),
        **dict.fromkeys(("comm.hierarchical", "comm.shard_dense", "comm.fuse_dense"), NO_TRAFFIC),
        **dict.fromkeys(("checkpoint.every_steps", "checkpoint.keep"), "every run is saved"),
        "checkpoint.drain_timeout_s": LIMIT,
        **dict.fromkeys(
            ("evaluation.every_steps", "evaluation.sample_tokens"), "every run of text is evaluated"
        ),
        "evaluation.at_start": "every run has a start",
        **dict.fromkeys(
            ("distributed.coordinator_address", "distributed.num_processes"),
            "refused but all three",
        ),
        "distributed.process_id": "refused but all three",
        "distributed.": LIMIT,
        "profile.steps": "every run has steps, and must have these",
        "metrics.port": "every run has metrics",
        **dict.fromkeys(
            ("tiers.experts", "tiers.optimizer"),
            "say where the experts are, refused in a dense model",
        ),
        "tiers.chosen_share": PLANNERS,
        "distil.teacher": "the teacher itself",
        "machine.": PLANNERS,
        **dict.fromkeys(
            ("num_steps", "batch_size", "sequence_length", "gradient_accumulation_steps"),
            "every run's",
        ),
        **dict.fromkeys(
            ("compute_dtype", "remat", "seed", "init_from", "output_dir"), "every run's"
        ),
        **dict.fromkeys(("plan", "estimate"), "what to do instead of training"),
    },
    "images": {
        **dict.fromkeys(
            ("model.image_size", "model.patch_size", "model.channels", "model.task_layers"), SHAPE
        ),
        **dict.fromkeys(("tasks", "layout"), "every run of images has tasks on devices"),
        "images.": "every run of images reads them",
    },
    "task": (
        dict.fromkeys(("source", "batch_size", "head", "loss_weight", "num_steps"), "every task's")
        | {"path": "refused by the run but for an expert of each layer routed by task"}
    ),
    "serve": {
        **dict.fromkeys(
            ("model", "served_model_name", "host", "port", "api_key_file", "allowed_origins"),
            "the server's",
        ),
        **dict.fromkeys(
            ("max_waiting", "max_body_bytes", "max_connections", "log_prompts", "dry_run"),
            "the server's",
        ),
        **dict.fromkeys(
            ("request_timeout_s", "drain_timeout_s", "header_timeout_s", "scheduling_policy"),
            "every request's",
        ),
        **dict.fromkeys(
            ("body_timeout_s", "send_timeout_s", "sampling_defaults"), "every request's"
        ),
        **dict.fromkeys(
            ("tool_parser", "reasoning_parser"),
            "every chat's; refused with a tokenizer whose special tokens say another format",
        ),
        "otlp_traces_endpoint": "every generating request's; refused without the packages",
        "check_files": "refused by serve.py for what is no bundle",
        **dict.fromkeys(
            (
                "engine.max_batch",
                "engine.max_seq_len",
                "engine.cache_tokens",
                "engine.policy",
                "engine.dtype",
                "engine.kv_cache_dtype",
                "engine.speculation",
                "engine.expert_dtype",
            ),
            "every engine's",
        ),
        **dict.fromkeys(
            ("engine.prefill_chunk_tokens", "engine.max_prefill_tokens"), "every engine's"
        ),
        "engine.cache_dir": "for experts on NVMe, and for what a run's folder cannot hold",
        "engine.mesh.devices": "every engine's",
        **dict.fromkeys(
            ("distributed.coordinator_address", "distributed.num_processes"),
            "refused but all three",
        ),
        "distributed.process_id": "refused but all three",
        **dict.fromkeys(("distributed.start_timeout_s", "distributed.step_timeout_s"), LIMIT),
        "distributed.heartbeat_timeout_s": LIMIT,
    },
    "supervise": {
        **dict.fromkeys(
            ("processes", "min_processes", "hosts", "host_timeout_s", "host_wait_s"),
            "every supervisor's",
        ),
        **dict.fromkeys(
            ("max_restarts", "same_step_limit", "backoff_s", "max_backoff_s"), "every supervisor's"
        ),
    },
}
ROUTER = RouterConfig(aux_loss_coef=0.0)
IMAGES = VisionTrainConfig(
    model=VisionModelConfig(position="learned", num_experts=0, router=ROUTER),
    tasks={"digits": TaskConfig("digits")},
    comm=CommConfig(schedule="none"),
)
BY_TOKEN = dataclasses.replace(
    IMAGES, model=VisionModelConfig(position="learned", num_experts=4, router=ROUTER)
)
ROOTS: dict[str, Any] = {
    "train": TrainConfig(),
    "images": IMAGES,
    "task": TaskConfig("digits"),
    "serve": ServeConfig("model"),
    "supervise": SuperviseConfig(),
}


def changed(config: Any, changes: Change) -> Any:
    """The configuration with other values of these fields, all at once."""
    own = {name: value for name, value in changes.items() if "." not in name}
    for section in {name.partition(".")[0] for name in changes if "." in name}:
        of_section = {
            k.partition(".")[2]: v for k, v in changes.items() if k.startswith(f"{section}.")
        }
        own[section] = changed(getattr(config, section), of_section)
    return dataclasses.replace(config, **own)


def fields_of(config: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{field.name}.")
        elif field.init:
            yield prefix + field.name


@pytest.mark.parametrize("root", ROOTS)
def test_every_field_is_in_the_tables(root: str) -> None:
    names, counts = set(fields_of(ROOTS[root])), dict(COUNTS[root])
    refused = set(REFUSED[root])
    if root == "images":  # what every run has is of `train`
        names -= set(fields_of(TrainConfig())) - refused
    sections = tuple(name for name in counts if name.endswith("."))
    lacking = {
        name
        for name in names - refused
        if name not in counts and not name.startswith(sections or ("-",))
    }
    assert not lacking, (
        "say where these fields are refused, or why every configuration honours them"
    )
    assert refused <= names
    unknown = {
        name for name in counts if name not in names and not any(n.startswith(name) for n in names)
    }
    assert not unknown


@pytest.mark.parametrize(
    ("root", "name"), [(root, name) for root, of_root in REFUSED.items() for name in of_root]
)
def test_what_nothing_would_honour_is_refused_by_name(root: str, name: str) -> None:
    value, without = REFUSED[root][name]
    config = BY_TOKEN if root == "images" and "tiers" in name else ROOTS[root]
    changed(config, without)  # the configuration itself is right
    with pytest.raises(ValueError, match=rf"\b{re.escape(name.rpartition('.')[2])}\b.* = "):
        changed(config, without | {name: value})


def numbers_of(config: Any) -> Iterator[str]:
    """The fields whose value is a number."""
    for name in fields_of(config):
        value = functools.reduce(getattr, name.split("."), config)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name


@pytest.mark.parametrize(
    ("root", "name"), [(root, name) for root in ROOTS for name in numbers_of(ROOTS[root])]
)
def test_a_number_is_finite_and_of_its_type(root: str, name: str) -> None:
    """inf was taken for a learning rate, and failed in the step after the first; 1e30 steps were
    no number of JAX's.
    """
    whole = isinstance(functools.reduce(getattr, name.split("."), ROOTS[root]), int)
    of_wrong_type = (0.5, 10**30) if whole else (1e-320, 1e308)
    for value in (math.inf, -math.inf, math.nan, True, "x", *of_wrong_type):
        with pytest.raises(ValueError, match=rf"\b{name.rpartition('.')[2]} = .*: must "):
            changed(ROOTS[root], {name: value})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TrainConfig, "num_steps"),
        (OptimizerConfig, "warmup_steps"),
        (LossScaleConfig, "growth_steps"),
    ],
)
def test_a_run_counts_its_steps(kind: Callable[..., object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} = 2147483648: must be at most 2,147,483,647"):
        kind(**{name: 2**31})


@pytest.mark.parametrize("name", sorted(MODEL_LIMITS))
def test_absurd_sizes_are_refused(name: str) -> None:
    """XLA ended the process at a hidden size of 1e9, and filled memory for experts of 1e12
    columns.
    """
    with pytest.raises(ValueError, match=rf"{name} = {MODEL_LIMITS[name] + 1}: must be at most"):
        ModelConfig(**{name: MODEL_LIMITS[name] + 1})


def test_tiers_that_the_planner_chooses_drop_what_others_would_honour() -> None:
    tiers = TiersConfig(
        experts="auto", optimizer="auto", path="/nvme", device_layers=3, device_experts=0.5
    )
    assert tiers.with_tiers("device", "device") == TiersConfig()
    assert tiers.with_tiers("host", "host") == TiersConfig(
        "host", "host", device_layers=3, device_experts=0.5
    )
    assert tiers.with_tiers("host", "nvme") == dataclasses.replace(
        tiers, experts="host", optimizer="nvme"
    )
