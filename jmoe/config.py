"""Every setting of jmoe and every check of a user's value. Standard library only.

A config is a tree of frozen dataclasses. `__post_init__` checks what one dataclass can know alone;
`TrainConfig.check_devices` what needs the number of devices. A bad value raises `ValueError` that names the
field, the value and the constraint, before anything is compiled or written.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

RouterKind = Literal["switch", "gshard", "softmax", "sigmoid", "group_limited"]
Dtype = Literal["float32", "bfloat16"]


def check(ok: bool, name: str, value: object, constraint: str) -> None:
    """Raise `ValueError` naming the field, the value and the constraint unless `ok`."""
    if not ok:
        raise ValueError(f"{name} = {value!r}: {constraint}")


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value > 0, name, value, "must be greater than 0")


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value >= 0, name, value, "must not be negative")


def _one_of(config: object, **allowed: tuple[str, ...]) -> None:
    for name, values in allowed.items():
        value = getattr(config, name)
        check(value in values, name, value, f"must be one of {', '.join(values)}")


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    kind: `switch` top-1 with input jitter (Switch Transformer); `gshard` top-2 (GShard); `softmax` top-k of a
    softmax (Mixtral, OLMoE, Qwen3-MoE); `sigmoid` sigmoid scores with loss-free bias balancing (DeepSeek-V3);
    `group_limited` top-k inside the best `topk_group` of `n_group` groups of experts (DeepSeek-V2/V3).
    """

    kind: RouterKind = "softmax"
    norm_topk_prob: bool = True  # divide the chosen weights by their sum
    jitter_noise: float = 0.0  # switch: inputs are multiplied by uniform(1 - jitter, 1 + jitter) in training
    aux_loss_coef: float = 0.01  # balance loss: E * sum_e f_e P_e
    z_loss_coef: float = 0.0  # mean squared logsumexp of the router's logits
    bias_update_speed: float = 0.001  # sigmoid, group_limited: step of the loss-free bias
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        _one_of(self, kind=("switch", "gshard", "softmax", "sigmoid", "group_limited"))
        _not_negative(self, "aux_loss_coef", "z_loss_coef", "bias_update_speed")
        check(0 <= self.jitter_noise < 1, "jitter_noise", self.jitter_noise, "must be in [0, 1)")
        _positive(self, "n_group", "topk_group", "routed_scaling_factor")
        check(
            self.topk_group <= self.n_group, "topk_group", self.topk_group, f"must not exceed n_group = {self.n_group}"
        )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. Field names are those of Hugging Face configurations where one exists."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    intermediate_size: int = 1024  # dense feed-forward layers
    moe_intermediate_size: int = 1024  # one expert
    num_experts: int = 8  # 0: every layer is dense
    num_experts_per_tok: int = 2
    decoder_sparse_step: int = 1  # every n-th layer after the dense first ones has experts
    first_k_dense_replace: int = 0  # this many first layers are dense
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    hidden_act: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    qk_norm: Literal["none", "head", "full"] = "none"  # per head (Qwen3) or over all heads (OLMoE)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    capacity_factor: float | None = None  # rows per destination device / fair share; None: dropless
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        _positive(self, "num_key_value_heads", "max_position_embeddings", "intermediate_size", "moe_intermediate_size")
        _positive(self, "decoder_sparse_step", "norm_eps", "rope_theta", "initializer_range")
        _not_negative(self, "num_experts", "first_k_dense_replace", "shared_expert_intermediate_size")
        _one_of(self, hidden_act=("swiglu", "gelu"), norm=("rmsnorm", "layernorm"), position=("rope", "learned"))
        _one_of(self, qk_norm=("none", "head", "full"))
        check(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            self.num_key_value_heads,
            f"must divide num_attention_heads = {self.num_attention_heads}",
        )
        if self.head_dim is None:
            check(
                self.hidden_size % self.num_attention_heads == 0,
                "num_attention_heads",
                self.num_attention_heads,
                f"must divide hidden_size = {self.hidden_size} when head_dim is not given",
            )
        check(
            self.position != "rope" or self.dim_per_head % 2 == 0,
            "head_dim",
            self.dim_per_head,
            "must be even for rotary positions",
        )
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        k, router = self.num_experts_per_tok, self.router
        check(
            1 <= k <= self.num_experts,
            "num_experts_per_tok",
            k,
            f"must be between 1 and num_experts = {self.num_experts}",
        )
        check(router.kind != "switch" or k == 1, "num_experts_per_tok", k, "must be 1 for router.kind = 'switch'")
        check(router.kind != "gshard" or k == 2, "num_experts_per_tok", k, "must be 2 for router.kind = 'gshard'")
        check(
            self.num_experts % router.n_group == 0,
            "router.n_group",
            router.n_group,
            f"must divide num_experts = {self.num_experts}",
        )
        reachable = self.num_experts // router.n_group * router.topk_group
        check(
            router.kind != "group_limited" or k <= reachable,
            "num_experts_per_tok",
            k,
            f"must not exceed the {reachable} experts in router.topk_group = {router.topk_group} groups",
        )
        check(
            self.capacity_factor is None or self.capacity_factor > 0,
            "capacity_factor",
            self.capacity_factor,
            "must be greater than 0, or None for dropless",
        )
        after = self.num_hidden_layers - self.first_k_dense_replace
        check(
            after > 0 and after % self.decoder_sparse_step == 0,
            "decoder_sparse_step",
            self.decoder_sparse_step,
            f"must divide the {after} layers after the first_k_dense_replace = {self.first_k_dense_replace} dense ones",
        )

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_moe_layers(self) -> int:
        if not self.num_experts:
            return 0
        return (self.num_hidden_layers - self.first_k_dense_replace) // self.decoder_sparse_step

    def num_parameters(self) -> tuple[int, int]:
        """(total, active per token) parameters, embeddings included."""
        d, dh = self.hidden_size, self.dim_per_head
        q, kv = self.num_attention_heads * dh, self.num_key_value_heads * dh
        norm = d * (2 if self.norm == "layernorm" else 1)
        attention = d * (q + 2 * kv) + q * d + (q + 2 * kv + d if self.attention_bias else 0)
        attention += {"none": 0, "head": 2 * dh, "full": q + kv}[self.qk_norm]

        def mlp(f: int) -> int:
            up = 2 if self.hidden_act == "swiglu" else 1
            return (up + 1) * d * f + (up * f + d if self.mlp_bias else 0)

        moe_layers, experts, k = self.num_moe_layers, self.num_experts, self.num_experts_per_tok
        dense_layers = self.num_hidden_layers - moe_layers
        shared = mlp(self.shared_expert_intermediate_size) if self.shared_expert_intermediate_size else 0
        bias = experts if self.router.kind in ("sigmoid", "group_limited") else 0
        common = self.vocab_size * d * (1 if self.tie_word_embeddings else 2) + norm
        common += self.max_position_embeddings * d if self.position == "learned" else 0
        common += self.num_hidden_layers * (attention + 2 * norm) + dense_layers * mlp(self.intermediate_size)
        common += moe_layers * (d * experts + bias + shared)
        expert = mlp(self.moe_intermediate_size)
        return common + moe_layers * experts * expert, common + moe_layers * k * expert

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of one trained token: 6 per active matrix parameter, plus causal attention."""
        _, active = self.num_parameters()
        lookup = self.vocab_size * self.hidden_size if not self.tie_word_embeddings else 0
        lookup += self.max_position_embeddings * self.hidden_size if self.position == "learned" else 0
        attention = 6 * self.num_hidden_layers * self.num_attention_heads * self.dim_per_head * sequence_length
        return 6.0 * (active - lookup) + attention


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from.

    path: files, folders or globs of UTF-8 text or JSONL (`.jsonl`), or token shards (`.bin`); empty: the source
    code of the Python standard library on this machine. Files are split into train and held-out by file; a single
    file by its last part.
    """

    path: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()  # one per path; empty: by size
    field: str = "text"  # JSONL: the field with the text
    tokenizer: str | None = None  # a tokenizer.json; None: a byte-level BPE is trained and cached beside the run
    held_out_fraction: float = 0.05
    held_out_bytes: int = 500_000  # at most this much text is held out for evaluation
    num_threads: int = 1  # reader threads
    prefetch_batches: int = 2

    def __post_init__(self) -> None:
        check(
            not self.weights or len(self.weights) == len(self.path),
            "data.weights",
            self.weights,
            f"needs one weight per data.path, of which there are {len(self.path)}",
        )
        check(all(w > 0 for w in self.weights), "data.weights", self.weights, "must all be greater than 0")
        check(
            0 < self.held_out_fraction < 1, "data.held_out_fraction", self.held_out_fraction, "must be between 0 and 1"
        )
        _positive(self, "held_out_bytes", "num_threads", "prefetch_batches")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled decay (not on norms, biases and router biases), warm-up, then cosine or constant."""

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 100
    final_learning_rate_fraction: float = 0.1  # cosine ends at this fraction of learning_rate
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # global norm; 0: no clip

    def __post_init__(self) -> None:
        _positive(self, "learning_rate", "eps")
        _not_negative(self, "warmup_steps", "weight_decay", "clip_norm")
        _one_of(self, schedule=("cosine", "constant"))
        for name in ("beta1", "beta2"):
            check(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "must be in [0, 1)")
        fraction = self.final_learning_rate_fraction
        check(0 <= fraction <= 1, "optimizer.final_learning_rate_fraction", fraction, "must be between 0 and 1")


@dataclass(frozen=True)
class MeshConfig:
    """Devices as (data, expert_inter, expert_intra). data = 0: whatever the other two leave."""

    data: int = 0
    expert_inter: int = 1  # across nodes
    expert_intra: int = 1  # inside a node
    exchange: Literal["flat", "two_level"] = "two_level"
    shard_dense: bool = True  # ZeRO-3: dense parameters and their optimizer state sharded over all devices

    def __post_init__(self) -> None:
        _not_negative(self, "data")
        _positive(self, "expert_inter", "expert_intra")
        _one_of(self, exchange=("flat", "two_level"))

    def shape(self, num_devices: int) -> tuple[int, int, int]:
        """(data, expert_inter, expert_intra) for this many devices, or `ValueError`."""
        experts = self.expert_inter * self.expert_intra
        data = self.data or num_devices // experts
        name = "mesh.(data, expert_inter, expert_intra)"
        value = (data, self.expert_inter, self.expert_intra)
        check(math.prod(value) == num_devices, name, value, f"must multiply to the {num_devices} devices")
        return value


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        _positive(self, "every_steps", "keep")


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int = 0  # 0: only before and after
    sample_tokens: int = 160  # length of the sample printed at the end
    sample_temperature: float = 0.8

    def __post_init__(self) -> None:
        _not_negative(self, "every_steps", "sample_tokens", "sample_temperature")


@dataclass(frozen=True)
class DistributedConfig:
    """Many processes. Under SLURM, Open MPI and Kubernetes nothing needs to be given."""

    coordinator_address: str | None = None  # host:port of process 0
    num_processes: int | None = None
    process_id: int | None = None
    start_timeout_s: int = 300  # all processes must have started within this
    step_timeout_s: int = 600  # a step, save or evaluation that takes longer names the stuck ranks and ends the run
    heartbeat_timeout_s: int = 10

    def __post_init__(self) -> None:
        _positive(self, "start_timeout_s", "step_timeout_s", "heartbeat_timeout_s")
        given = [v is not None for v in (self.coordinator_address, self.num_processes, self.process_id)]
        if any(given) and not all(given):
            names = ("coordinator_address", "num_processes", "process_id")
            missing = ", ".join(f"distributed.{n}" for n, g in zip(names, given, strict=True) if not g)
            raise ValueError(f"{missing} = None: coordinator_address, num_processes and process_id go together")
        if self.num_processes is not None and self.process_id is not None:
            check(self.num_processes >= 1, "distributed.num_processes", self.num_processes, "must be at least 1")
            check(
                0 <= self.process_id < self.num_processes,
                "distributed.process_id",
                self.process_id,
                f"must be between 0 and num_processes - 1 = {self.num_processes - 1}",
            )


@dataclass(frozen=True)
class ProfileConfig:
    steps: str = ""  # "10:13" writes a trace of steps 10, 11, 12

    def __post_init__(self) -> None:
        self.span()

    def span(self) -> tuple[int, int] | None:
        """(first, past the last) step of the trace, or None."""
        if not self.steps:
            return None
        first, colon, last = self.steps.partition(":")
        ok = colon == ":" and first.isdigit() and last.isdigit() and int(first) < int(last)
        check(ok, "profile.steps", self.steps, "must read FIRST:LAST with FIRST < LAST, e.g. 10:13")
        return int(first), int(last)


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    num_steps: int = 1000
    batch_size: int = 8  # sequences a step, all devices and accumulation steps together
    sequence_length: int = 256
    gradient_accumulation_steps: int = 1
    compute_dtype: Dtype = "bfloat16"  # master weights and optimizer state are always float32
    remat: Literal["none", "layer"] = "none"  # layer: keep only each layer's input for the backward pass
    seed: int = 0
    output_dir: str = ""  # "": runs/PRESET

    def __post_init__(self) -> None:
        _positive(self, "num_steps", "batch_size", "sequence_length", "gradient_accumulation_steps")
        _one_of(self, compute_dtype=("float32", "bfloat16"), remat=("none", "layer"))
        check(0 <= self.seed < 2**31, "seed", self.seed, "must be between 0 and 2**31 - 1")
        check(
            self.model.position != "learned" or self.sequence_length <= self.model.max_position_embeddings,
            "sequence_length",
            self.sequence_length,
            f"must not exceed model.max_position_embeddings = {self.model.max_position_embeddings}",
        )
        span = self.profile.span()
        check(
            span is None or span[1] <= self.num_steps,
            "profile.steps",
            self.profile.steps,
            f"must end by num_steps = {self.num_steps}",
        )

    def check_devices(self, num_devices: int) -> tuple[int, int, int]:
        """The mesh's shape for this many devices; raises `ValueError` if the run cannot be split over them."""
        shape = self.mesh.shape(num_devices)
        share = num_devices * self.gradient_accumulation_steps
        check(
            self.batch_size % share == 0,
            "batch_size",
            self.batch_size,
            f"must be a multiple of {num_devices} devices x {self.gradient_accumulation_steps} accumulation steps",
        )
        experts = shape[1] * shape[2]
        check(
            self.model.num_experts % experts == 0,
            "model.num_experts",
            self.model.num_experts,
            f"must be a multiple of mesh.expert_inter x mesh.expert_intra = {experts}",
        )
        return shape

    def to_json(self) -> str:
        """The resolved configuration, as it is written beside a run."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines `field: saved -> now` for every value that differs between two resolved configurations."""
    lines = []
    for key in sorted(set(saved) | set(now)):
        a, b = saved.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{key}.")
        elif a != b and not (isinstance(a, list | tuple) and isinstance(b, list | tuple) and list(a) == list(b)):
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines
