"""Settings: every kind of bad value is named with its field and its constraint; presets have
their published sizes.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from jmoe.config import (
    CheckpointConfig,
    CommConfig,
    DataConfig,
    DistributedConfig,
    EvaluationConfig,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ProfileConfig,
    TiersConfig,
    TrainConfig,
    YarnConfig,
    describe_differences,
)
from jmoe.config.distil import DistilConfig
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.config.parallel import largest_packing, packed_shape
from jmoe.config.router import RouterConfig
from jmoe.configs import PRESETS


def experts(**router: Any) -> ModelConfig:
    return ModelConfig(router=RouterConfig(**router))


def latent(**options: Any) -> ModelConfig:
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
    return ModelConfig(**(sizes | options))


def yarn(**options: Any) -> YarnConfig:
    return YarnConfig(factor=4.0, original_max_position_embeddings=16, **options)


def wrong(field: str, value: object, constraint: str) -> str:
    return f"{field} = {value!r}: {constraint}"


# By class: fields that must be greater than 0, and fields that must not be negative.
SIGNS: list[tuple[Callable[..., object], str, str]] = [
    (
        RouterConfig,
        "n_group topk_group routed_scaling_factor",
        "aux_loss_coef z_loss_coef bias_update_speed",
    ),
    (
        ModelConfig,
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads",
        "num_experts",
    ),
    (
        ModelConfig,
        "max_position_embeddings intermediate_size moe_intermediate_size",
        "first_k_dense_replace",
    ),
    (
        ModelConfig,
        "decoder_sparse_step norm_eps rope_theta initializer_range",
        "shared_expert_intermediate_size",
    ),
    (ModelConfig, "sliding_window", ""),
    (DataConfig, "held_out_bytes prefetch_batches", ""),
    (OptimizerConfig, "learning_rate eps", "warmup_steps weight_decay clip_norm"),
    (MeshConfig, "expert_inter", "data expert_intra"),
    (CheckpointConfig, "every_steps keep", ""),
    (EvaluationConfig, "", "every_steps sample_tokens sample_temperature"),
    (EngineMesh, "devices rebalance_every rebalance_window", ""),
    (DistributedConfig, "start_timeout_s step_timeout_s heartbeat_timeout_s", ""),
    (TrainConfig, "num_steps batch_size sequence_length gradient_accumulation_steps", ""),
    (
        TiersConfig,
        "device_layers cache_interval",
        "host_cache_bytes write_back_every_steps cache_threshold",
    ),
]
BAD_VALUES: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *(
        (make, {name: value}, wrong(name, value, constraint))
        for make, positive, not_negative in SIGNS
        for names, value, constraint in (
            (positive, 0, "must be greater than 0"),
            (not_negative, -1, "must not be negative"),
        )
        for name in names.split()
    ),
    (
        RouterConfig,
        {"kind": "top2"},
        wrong("kind", "top2", "must be one of switch, gshard, softmax"),
    ),
    (
        TiersConfig,
        {"cache_beta": 1.5},
        wrong("tiers.cache_beta", 1.5, "must be greater than 0 and at most 1"),
    ),
    (
        EngineConfig,
        {"cache_policy": "moesys"},
        wrong("cache_policy", "moesys", "must be 'lfu' with policy = 'auto'; set experts"),
    ),
    (
        EngineConfig,
        {"policy": "experts", "expert_tier": "host", "cache_policy": "moesys"},
        wrong("cache_policy", "moesys", "must be 'lfu' with expert_tier = 'host', which has no"),
    ),
    (RouterConfig, {"jitter_noise": 1.0}, wrong("jitter_noise", 1.0, "must be in [0, 1)")),
    (
        RouterConfig,
        {"second_expert_policy": "random"},
        wrong("second_expert_policy", "random", "needs router.kind = 'gshard'"),
    ),
    *(
        (RouterConfig, {name: value} | fields, wrong(name, value, f"needs router.kind = {kinds}"))
        for name, value, fields, kinds in (
            ("n_group", 2, {}, "'softmax_group_limited' or 'group_limited'"),
            ("bias_update_speed", 0.01, {}, "'softmax_biased' or 'sigmoid'"),
            ("norm_topk_prob", False, {"kind": "gshard"}, "'softmax' or"),
        )
    ),
    (RouterConfig, {"jitter_noise": -0.1}, wrong("jitter_noise", -0.1, "must be in [0, 1)")),
    (
        RouterConfig,
        {"n_group": 2, "topk_group": 3},
        wrong("topk_group", 3, "must not exceed n_group = 2"),
    ),
    (
        ModelConfig,
        {"hidden_act": "relu"},
        wrong("hidden_act", "relu", "must be one of swiglu, gelu"),
    ),
    (ModelConfig, {"norm": "batch"}, wrong("norm", "batch", "must be one of rmsnorm, layernorm")),
    (
        ModelConfig,
        {"position": "alibi"},
        wrong("position", "alibi", "must be one of rope, learned"),
    ),
    (
        ModelConfig,
        {"qk_norm": "yes"},
        wrong("qk_norm", "yes", "must be one of none, head, rotated_head, rotated_l2, full"),
    ),
    (
        ModelConfig,
        {"num_key_value_heads": 3},
        wrong("num_key_value_heads", 3, "must divide num_attention_heads = 4"),
    ),
    (
        ModelConfig,
        {"hidden_size": 250},
        wrong("num_attention_heads", 4, "must divide hidden_size = 250"),
    ),
    (ModelConfig, {"head_dim": 33}, wrong("head_dim", 33, "must be even for rotary positions")),
    (
        ModelConfig,
        {"num_experts_per_tok": 0},
        wrong("num_experts_per_tok", 0, "must be between 1 and num_experts = 8"),
    ),
    (
        ModelConfig,
        {"num_experts_per_tok": 9},
        wrong("num_experts_per_tok", 9, "must be between 1 and num_experts = 8"),
    ),
    (
        experts,
        {"kind": "switch"},
        wrong("num_experts_per_tok", 2, "must be 1 for router.kind = 'switch'"),
    ),
    (
        experts,
        {"kind": "group_limited", "n_group": 3},
        wrong("router.n_group", 3, "must divide num_experts = 8"),
    ),
    (
        experts,
        {"kind": "group_limited", "n_group": 8},
        wrong("num_experts_per_tok", 2, "must not exceed the 1"),
    ),
    (
        ModelConfig,
        {"capacity_factor": 0.0},
        wrong("capacity_factor", 0.0, "must be greater than 0, or None"),
    ),
    (
        ModelConfig,
        {"decoder_sparse_step": 5},
        wrong("decoder_sparse_step", 5, "must not exceed the 4 layers left"),
    ),
    (
        ModelConfig,
        {"first_k_dense_replace": 4},
        wrong("first_k_dense_replace", 4, "must be less than num_hidden"),
    ),
    (
        ModelConfig,
        {"mlp_only_layers": (4,)},
        wrong("mlp_only_layers", (4,), "must lie between 0 and 3"),
    ),
    (
        ModelConfig,
        {"mlp_only_layers": (0, 1, 2, 3)},
        wrong("mlp_only_layers", (0, 1, 2, 3), "must leave a layer"),
    ),
    (
        ModelConfig,
        {"shared_expert_gate": True},
        wrong("shared_expert_gate", True, "needs shared_expert_intermediate"),
    ),
    (
        ModelConfig,
        {"layer_types": ("full_attention",)},
        wrong("layer_types", ("full_attention",), "must have 4"),
    ),
    (
        ModelConfig,
        {"layer_types": ("local",) * 4},
        wrong("layer_types", ("local",) * 4, "must each be one of sliding"),
    ),
    (
        ModelConfig,
        {"layer_types": ("sliding_attention",) * 4},
        wrong("sliding_window", None, "is needed by layer_"),
    ),
    (
        ModelConfig,
        {"rope_interleave": True, "position": "learned"},
        wrong("rope_interleave", True, "needs position = 'rope'"),
    ),
    (
        ModelConfig,
        {"partial_rotary_factor": 0.5, "position": "learned"},
        wrong("partial_rotary_factor", 0.5, "needs position = 'rope'"),
    ),
    (
        ModelConfig,
        {"partial_rotary_factor": 0.05},
        wrong("partial_rotary_factor", 0.05, "must be an even share of head_dim = 64"),
    ),
    (
        latent,
        {"partial_rotary_factor": 0.5},
        wrong("partial_rotary_factor", 0.5, "is not part of latent attention"),
    ),
    (latent, {"kv_lora_rank": 0}, wrong("kv_lora_rank", 0, "must be greater than 0")),
    (latent, {"q_lora_rank": 0}, wrong("q_lora_rank", 0, "must be above 0")),
    (latent, {"v_head_dim": 0}, wrong("v_head_dim", 0, "must be greater than 0")),
    (latent, {"qk_rope_head_dim": 3}, wrong("qk_rope_head_dim", 3, "must be even")),
    (
        latent,
        {"num_key_value_heads": 2},
        wrong("num_key_value_heads", 2, "must be 4 for latent attention"),
    ),
    (latent, {"qk_norm": "head"}, wrong("qk_norm", "head", "is not part of latent attention")),
    (
        latent,
        {"attention_sinks": True},
        wrong("attention_sinks", True, "is not part of latent attention"),
    ),
    (
        latent,
        {"position": "learned"},
        wrong("position", "learned", "must be 'rope' for latent attention"),
    ),
    (
        YarnConfig,
        {"factor": 0.0, "original_max_position_embeddings": 8},
        wrong("factor", 0.0, "must be greater than 0"),
    ),
    (yarn, {"beta_slow": 64.0}, wrong("beta_slow", 64.0, "must not exceed beta_fast 32.0")),
    (
        yarn,
        {"attention_factor": 0.0},
        wrong("attention_factor", 0.0, "must be greater than 0, or None"),
    ),
    (yarn, {"mscale": -1.0}, wrong("mscale", -1.0, "must not be negative")),
    (
        DataConfig,
        {"path": ("a", "b"), "weights": (1.0,)},
        wrong("data.weights", (1.0,), "needs one weight per"),
    ),
    (
        DataConfig,
        {"path": ("a",), "weights": (0.0,)},
        wrong("data.weights", (0.0,), "must all be greater than 0"),
    ),
    (
        DataConfig,
        {"held_out_fraction": 1.0},
        wrong("data.held_out_fraction", 1.0, "must be between 0 and 1"),
    ),
    (
        OptimizerConfig,
        {"learning_rate": float("nan")},
        wrong("learning_rate", float("nan"), "must be a finite number"),
    ),
    (
        OptimizerConfig,
        {"schedule": "linear"},
        wrong("schedule", "linear", "must be one of cosine, constant, wsd"),
    ),
    (
        TrainConfig,
        {"optimizer": OptimizerConfig(schedule="wsd", decay_steps=10), "num_steps": 109},
        "optimizer.decay_steps = 10: must not exceed num_steps 109 - optimizer.warmup_steps 100",
    ),
    (
        TrainConfig,
        {"init_from": "model", "yarn_factor": 0.5},
        wrong("yarn_factor", 0.5, "must be at least 1"),
    ),
    (
        OptimizerConfig,
        {"decay_steps": 10},
        wrong("optimizer.decay_steps", 10, "must be 0 unless optimizer.schedule = 'wsd'"),
    ),
    (OptimizerConfig, {"beta1": 1.0}, wrong("optimizer.beta1", 1.0, "must be in [0, 1)")),
    (OptimizerConfig, {"beta2": -0.1}, wrong("optimizer.beta2", -0.1, "must be in [0, 1)")),
    (
        OptimizerConfig,
        {"final_learning_rate_fraction": 2.0},
        "final_learning_rate_fraction = 2.0: must be between 0",
    ),
    (
        CommConfig,
        {"embedding": "diagonals"},
        wrong("embedding", "diagonals", "must be one of auto, replicated, columns, rows"),
    ),
    (CommConfig, {"packing": 0}, wrong("packing", 0, "must be a power of two, or auto")),
    (CommConfig, {"packing": 6}, wrong("packing", 6, "must be a power of two, or auto")),
    (CommConfig, {"packing": "off"}, wrong("packing", "off", "must be a power of two, or auto")),
    (
        CommConfig,
        {"exchange": "ring"},
        wrong("exchange", "ring", "must be one of auto, flat, hierarchical, dedup"),
    ),
    (
        CommConfig,
        {"exchange": "ragged", "schedule": "pipelined"},
        wrong("schedule", "pipelined", "must not be pipelined with exchange = 'ragged'"),
    ),
    (
        TrainConfig,
        {"comm": CommConfig(exchange="ragged"), "model": ModelConfig(capacity_factor=1.0)},
        wrong("model.capacity_factor", 1.0, "must be unset with comm.exchange = 'ragged'"),
    ),
    (
        TrainConfig,
        {
            "comm": CommConfig(exchange="ragged"),
            "tiers": TiersConfig(experts="host", optimizer="host"),
        },
        wrong("tiers", ("host", "host"), "must be device with comm.exchange = 'ragged'"),
    ),
    (CommConfig, {"exchange_chunks": -1}, wrong("exchange_chunks", -1, "must not be negative")),
    (
        CommConfig,
        {"schedule": "pipelined", "exchange_chunks": 1},
        wrong("exchange_chunks", 1, "must be at least 2, or 0"),
    ),
    (
        CommConfig,
        {"exchange_chunks": 3},
        wrong(
            "exchange_chunks",
            3,
            "must be 0 with schedule = 'chunks': only pipelined cuts all-to-alls",
        ),
    ),
    (
        CommConfig,
        {"fuse_dense": False},
        wrong(
            "schedule",
            "chunks",
            "must be none with fuse_dense = False: every parameter is gathered",
        ),
    ),
    (EngineMesh, {"placement": "random"}, "placement = 'random': must be one of even, lina, eplb"),
    (
        EngineMesh,
        {"devices": 2, "dense": "pipeline"},
        "dense = 'pipeline': must be one of replicated, tensor",
    ),
    (EngineMesh, {"dense": "tensor"}, "dense = 'tensor': needs mesh.devices above 1"),
    (EngineMesh, {"slots_per_device": 0}, "slots_per_device = 0: must be greater than 0, or None"),
    (
        EngineConfig,
        {"mesh": EngineMesh(3)},
        "max_batch = 8: must be a multiple of mesh.devices = 3",
    ),
    *(
        (
            EngineConfig,
            {"mesh": EngineMesh(2, "lina"), name: value},
            f"{name} = {value!r}: experts stay on their dev",
        )
        for name, value in (
            ("expert_tier", "nvme"),
            ("ring_slots", 2),
            ("device_bytes", 9),
            ("host_cache_bytes", 9),
        )
    ),
    (
        EngineConfig,
        {"mesh": EngineMesh(2, "eplb"), "policy": "hybrid"},
        "mesh.placement = 'eplb': must be even with policy = 'hybrid'",
    ),
    (
        EngineConfig,
        {"mesh": EngineMesh(2, "eplb"), "policy": "experts"},
        "mesh.placement = 'eplb': must be even with policy = 'experts'",
    ),
    (
        EngineConfig,
        {"mesh": EngineMesh(2, slots_per_device=3), "policy": "experts"},
        "mesh.slots_per_device = 3: must be None with policy = 'experts'",
    ),
    (
        EngineConfig,
        {"mesh": EngineMesh(2), "policy": "experts", "estimator": "router"},
        "estimator = 'router': must be auto or None with mesh.devices = 2",
    ),
    (
        EngineConfig,
        {"mesh": EngineMesh(2, "eplb"), "policy": "ring"},
        "mesh.placement = 'eplb': must be even with po",
    ),
    (
        EngineConfig,
        {"mesh": EngineMesh(2, slots_per_device=4), "policy": "ring"},
        "mesh.slots_per_device = 4: must be None with policy = 'ring'",
    ),
    (
        DistributedConfig,
        {"num_processes": 2},
        "distributed.coordinator_address, distributed.process_id = None",
    ),
    (
        DistributedConfig,
        {"coordinator_address": "a:1", "num_processes": 0, "process_id": 0},
        wrong("distributed.num_processes", 0, "must be at least 1"),
    ),
    (
        DistributedConfig,
        {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
        wrong("distributed.process_id", 2, "must be between 0 and num_processes - 1 = 1"),
    ),
    (
        DistributedConfig,
        {"stopped_exit_code": 256},
        wrong("distributed.stopped_exit_code", 256, "must be from 0 to 255"),
    ),
    (ProfileConfig, {"steps": "10"}, wrong("profile.steps", "10", "must read FIRST:LAST")),
    (
        ProfileConfig,
        {"steps": "13:10"},
        wrong("profile.steps", "13:10", "must read FIRST:LAST with FIRST < LAST"),
    ),
    (ProfileConfig, {"steps": "a:b"}, wrong("profile.steps", "a:b", "must read FIRST:LAST")),
    (
        TrainConfig,
        {"compute_dtype": "float8"},
        wrong("compute_dtype", "float8", "must be one of float32, bfloat16, float16"),
    ),
    (
        LossScaleConfig,
        {"initial": 3},
        wrong("loss_scale.initial", 3, "must be a power of two from 1 to 2**32"),
    ),
    (
        LossScaleConfig,
        {"initial": 2**33},
        wrong("loss_scale.initial", 2**33, "must be a power of two from 1 to"),
    ),
    (
        LossScaleConfig,
        {"growth_steps": 0},
        wrong("loss_scale.growth_steps", 0, "must be at least 1"),
    ),
    (
        TrainConfig,
        {"loss_scale": LossScaleConfig(initial=1024)},
        wrong(
            "loss_scale.initial",
            1024,
            "must not be set with compute_dtype = 'bfloat16': only float16 needs it",
        ),
    ),
    (
        TrainConfig,
        {"loss_scale": LossScaleConfig(growth_steps=5), "compute_dtype": "float32"},
        wrong("loss_scale.growth_steps", 5, "must not be set with compute_dtype = 'float32'"),
    ),
    (
        TrainConfig,
        {"distil": DistilConfig(teacher="folder"), "compute_dtype": "float16"},
        wrong("compute_dtype", "float16", "must be float32 or bfloat16 with distil.teacher"),
    ),
    (TrainConfig, {"remat": "all"}, wrong("remat", "all", "must be one of none, experts, layer")),
    (TrainConfig, {"seed": -1}, wrong("seed", -1, "must be between 0 and 2**31 - 1")),
    (TrainConfig, {"seed": 2**31}, wrong("seed", 2**31, "must be between 0 and 2**31 - 1")),
    (
        TrainConfig,
        {
            "model": ModelConfig(position="learned", max_position_embeddings=64),
            "sequence_length": 65,
        },
        wrong("sequence_length", 65, "must not exceed model.max_position_embeddings = 64"),
    ),
    (
        TrainConfig,
        {"profile": ProfileConfig("5:11"), "num_steps": 10},
        wrong("profile.steps", "5:11", "must end by num_steps = 10"),
    ),
    (
        TiersConfig,
        {"experts": "host", "optimizer": "device"},
        wrong("tiers.optimizer", "device", "must be host or nvme"),
    ),
    (
        TiersConfig,
        {"experts": "nvme", "optimizer": "host"},
        wrong("tiers.optimizer", "host", "must be nvme"),
    ),
    *(
        (
            TiersConfig,
            {"experts": "host", "optimizer": "host", "device_experts": share},
            wrong("tiers.device_experts", share, "must be greater than 0 and at most 1"),
        )
        for share in (0.0, -0.5, 1.5)
    ),
    (
        TiersConfig,
        {"optimizer": "host", "device_experts": 0.5},
        wrong("tiers.device_experts", 0.5, "must be 1 with tiers.experts = 'device'"),
    ),
    *(
        (
            TiersConfig,
            {"chosen_share": share},
            wrong("tiers.chosen_share", share, "must be between 0 and 1"),
        )
        for share in (-0.1, 1.01)
    ),
    *(
        (
            TrainConfig,
            {
                "model": ModelConfig(num_experts=16, **model),
                "tiers": TiersConfig(chosen_share=0.0624),
            },
            wrong(
                "tiers.chosen_share",
                0.0624,
                f"must be at least {choices} / 16, what one token chooses",
            ),
        )
        for choices, model in (
            (2, {}),
            (1, {"router": RouterConfig(kind="gshard", second_expert_policy="random")}),
        )
    ),
    (
        TiersConfig,
        {"experts": "disk"},
        wrong("experts", "disk", "must be one of auto, device, host, nvme"),
    ),
    (
        TiersConfig,
        {"gradients": "device"},
        wrong("gradients", "device", "must be one of host, nvme"),
    ),
    (
        TiersConfig,
        {"gradient_dtype": "float16"},
        wrong("gradient_dtype", "float16", "must be one of"),
    ),
]


@pytest.mark.parametrize(
    ("make", "values", "message"), BAD_VALUES, ids=[m for _, _, m in BAD_VALUES]
)
def test_bad_value_is_named(
    make: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**values)


def test_a_share_of_chosen_experts_is_at_least_what_a_token_chooses() -> None:
    third = TiersConfig(chosen_share=1 / 3 - 1e-9)  # as a mean is rounded
    TrainConfig(model=ModelConfig(num_experts=3, num_experts_per_tok=1), tiers=third)
    with pytest.raises(ValueError, match="must be 0 for a model without experts"):
        TrainConfig(model=ModelConfig(num_experts=0), tiers=third)
    few = TiersConfig(chosen_share=0.01)
    config = TrainConfig(init_from="folder", tiers=few)  # which may have more experts
    with pytest.raises(
        ValueError, match=re.escape("tiers.chosen_share = 0.01: must be at least 2 / 8")
    ):
        config.check_chosen_share()


def test_dense_model_needs_no_expert_settings() -> None:
    model = ModelConfig(num_experts=0, num_experts_per_tok=0)
    assert model.num_moe_layers == 0
    assert model.total_and_active_parameters()[0] == model.total_and_active_parameters()[1]


@pytest.mark.parametrize(
    ("mesh", "num_devices", "shape"),
    [
        (MeshConfig(), 1, (1, 1, 1)),
        (MeshConfig(), 8, (8, 1, 1)),
        (MeshConfig(expert_intra=4), 8, (2, 1, 4)),
        (MeshConfig(expert_inter=2, expert_intra=2), 8, (2, 2, 2)),
        (MeshConfig(data=1, expert_inter=2, expert_intra=4), 8, (1, 2, 4)),
    ],
)
def test_check_devices_gives_the_mesh(
    mesh: MeshConfig, num_devices: int, shape: tuple[int, int, int]
) -> None:
    assert TrainConfig(mesh=mesh, batch_size=8).checked_mesh_shape(num_devices) == shape


def test_experts_over_whole_hosts() -> None:
    config = TrainConfig(mesh=MeshConfig(expert_inter=2, expert_intra=0), batch_size=16)
    assert config.checked_mesh_shape(16, devices_per_host=4) == (2, 2, 4)
    with pytest.raises(
        ValueError, match=re.escape("mesh.expert_intra = 0: needs hosts of one number of devices")
    ):
        config.checked_mesh_shape(16)


@pytest.mark.parametrize(
    ("mesh", "packing", "shape"),
    [
        (MeshConfig(1, 2, 4), 1, (1, 2, 4)),
        (MeshConfig(1, 2, 4), "auto", (1, 2, 4)),
        (MeshConfig(1, 2, 4), 2, (2, 1, 4)),
        (MeshConfig(1, 2, 4), 4, (4, 1, 2)),
        (MeshConfig(2, 1, 4), 4, (8, 1, 1)),
        (MeshConfig(expert_inter=2, expert_intra=0), 2, (2, 1, 4)),
    ],
    ids=str,
)
def test_packing_shrinks_the_expert_axes(
    mesh: MeshConfig, packing: Any, shape: tuple[int, int, int]
) -> None:
    config = TrainConfig(mesh=mesh, comm=CommConfig(packing=packing))
    assert config.checked_mesh_shape(8, devices_per_host=4) == shape


def test_the_most_packing() -> None:
    assert [largest_packing(shape) for shape in ((1, 2, 4), (4, 1, 1), (1, 6, 2), (1, 1, 3))] == [
        8,
        1,
        4,
        1,
    ]
    assert packed_shape((1, 6, 2), 4) == (4, 3, 1)


def test_packing_that_changes_is_allowed_with_tiers() -> None:
    tiers = TiersConfig(experts="nvme", optimizer="nvme")
    config = TrainConfig(comm=CommConfig(packing="auto"), tiers=tiers)
    assert config.with_packing(4).tiers == tiers


@pytest.mark.parametrize(
    ("values", "num_devices", "message"),
    [
        (
            {"mesh": MeshConfig(expert_intra=2), "comm": CommConfig(packing=4)},
            8,
            "comm.packing = 4: must divide mesh.expert_inter x mesh.expert_intra = 1 x 2",
        ),
        (
            {
                "model": ModelConfig(num_experts=2),
                "mesh": MeshConfig(expert_inter=2, expert_intra=4),
                "comm": CommConfig(packing=2),
            },
            8,
            (
                "model.num_experts = 2: must be a multiple of mesh.expert_inter x mesh.expert_intra"
                " / comm.packing = 4"
            ),
        ),
        (
            {"mesh": MeshConfig(data=3)},
            8,
            "mesh.(data, expert_inter, expert_intra) = (3, 1, 1): must multiply",
        ),
        (
            {"mesh": MeshConfig(expert_intra=3)},
            8,
            "mesh.(data, expert_inter, expert_intra) = (2, 1, 3): must multiply",
        ),
        (
            {"mesh": MeshConfig(expert_intra=8)},
            4,
            "mesh.(data, expert_inter, expert_intra) = (0, 1, 8): must multiply",
        ),
        (
            {"batch_size": 12, "mesh": MeshConfig(context=1)},
            8,
            "batch_size = 12: must be a multiple of 8 devices x 1 accumulation steps",
        ),
        (
            {"batch_size": 8, "gradient_accumulation_steps": 2, "sequence_length": 63},
            8,
            "batch_size = 8: must be a multiple of 8 devices x 2 accumulation steps",
        ),
        (
            {
                "model": ModelConfig(num_experts=6),
                "mesh": MeshConfig(expert_inter=2, expert_intra=2),
            },
            4,
            (
                "model.num_experts = 6: must be a multiple of mesh.expert_inter x"
                " mesh.expert_intra = 4"
            ),
        ),
        (
            {"model": ModelConfig(vocab_size=50257), "comm": CommConfig(embedding="rows")},
            8,
            "model.vocab_size = 50257: must be a multiple of 8: comm.embedding = 'rows' splits it",
        ),
        (
            {
                "model": ModelConfig(hidden_size=264),
                "comm": CommConfig(embedding="columns"),
                "batch_size": 16,
            },
            16,
            (
                "model.hidden_size = 264: must be a multiple of 16: comm.embedding = 'columns'"
                " splits it"
            ),
        ),
    ],
)
def test_check_devices_names_what_does_not_split(
    values: dict[str, Any], num_devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**values).checked_mesh_shape(num_devices)


def test_differences_name_each_changed_field() -> None:
    saved = json.loads(TrainConfig(data=DataConfig(path=("a",))).to_json())
    now = TrainConfig(data=DataConfig(path=("a",)), model=ModelConfig(hidden_size=512), seed=1)
    assert describe_differences(saved, dataclasses.asdict(now)) == [
        "model.hidden_size: 256 -> 512",
        "seed: 0 -> 1",
    ]
    assert describe_differences(saved, saved) == []


# total: half the bytes of the published bfloat16 weights. active: in billions as published, to its
# last digit.
@pytest.mark.parametrize(
    ("name", "total", "active", "last_digit"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9, 0.1),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3, 0.1),
        ("olmoe-1b-7b", 6_919_161_856, 1.28, 0.01),
    ],
)
def test_published_sizes(name: str, total: int, active: float, last_digit: float) -> None:
    computed_total, computed_active = PRESETS[name][1].model.total_and_active_parameters()
    assert computed_total == total
    assert abs(computed_active / 1e9 - active) < last_digit


@pytest.mark.parametrize(
    ("num_experts", "total"),
    [(8, 13.9), (16, 26.8), (32, 52.6), (64, 104.1), (128, 207.2)],
    ids=str,
)
def test_gpt_moe_has_the_sizes_of_moesys_table_2(num_experts: int, total: float) -> None:
    config = PRESETS[f"gpt-moe-{num_experts}e"][1]
    assert config.model.num_experts == num_experts
    assert config.model.total_and_active_parameters()[0] / 1e9 == pytest.approx(total, abs=0.06)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("tiny", "small"))])
def test_small_presets_split_over_devices(name: str, num_devices: int) -> None:
    config = PRESETS[name][1]
    assert config.checked_mesh_shape(num_devices) == (num_devices, 1, 1)
    experts_apart = dataclasses.replace(config, mesh=MeshConfig(expert_intra=num_devices))
    assert experts_apart.checked_mesh_shape(num_devices) == (1, 1, num_devices)


@pytest.mark.parametrize(
    "name", [name for name in PRESETS if not name.startswith(("tiny", "small", "ufo", "fine"))]
)
def test_large_presets_split_over_nodes_of_8(name: str) -> None:
    config = PRESETS[name][1]
    if not config.model.num_experts:
        assert config.mesh.data % 8 == 0
        assert config.checked_mesh_shape(config.mesh.data) == (config.mesh.data, 1, 1)
        return
    num_devices = 8 * config.mesh.expert_inter
    assert config.checked_mesh_shape(num_devices) == (1, config.mesh.expert_inter, 8)


def test_descriptions_are_one_line() -> None:
    for name, (description, _) in PRESETS.items():
        assert description, name
        assert "\n" not in description, name


def test_what_is_hardly_meant_is_said() -> None:
    assert [config.warnings() for _, config in PRESETS.values()] == [[]] * len(PRESETS)
    config = TrainConfig(
        optimizer=OptimizerConfig(learning_rate=1e9, warmup_steps=20),
        model=ModelConfig(max_position_embeddings=128),
        num_steps=20,
    )
    fields = [warning.partition(":")[0] for warning in config.warnings()]
    assert fields == [
        "optimizer.learning_rate = 1e+09",
        "optimizer.weight_decay = 0.1",
        "optimizer.warmup_steps = 20",
        "sequence_length = 256",
    ]


@pytest.mark.parametrize(
    ("num_steps", "every_steps", "expected"),
    [
        (360, 0, [90, 180, 270]),
        (81, 0, [21, 42, 63]),
        (20, 0, [5, 10, 15]),
        (19, 0, []),
        (19, 8, [8, 16]),
        (8, 4, [4]),
    ],
)
def test_when_a_run_is_evaluated(num_steps: int, every_steps: int, expected: list[int]) -> None:
    config = TrainConfig(num_steps=num_steps, evaluation=EvaluationConfig(every_steps=every_steps))
    assert [step for step in range(1, num_steps + 1) if config.evaluates_after(step)] == expected
