"""All settings of a training run. Standard library only.

Each frozen dataclass checks its own fields in `__post_init__`; `TrainConfig.checked_mesh_shape`
checks the constraints that depend on the number of devices. A bad value raises ValueError before
anything is compiled or written.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jmoe.config.balance import check_may_balance_experts
from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_steps_within_limit,
    check_unset,
)
from jmoe.config.context import check_may_share_sequences, devices_per_sequence
from jmoe.config.denoising import (
    DenoisingConfig,
    TextParts,
    check_may_train_encoder_decoder,
)
from jmoe.config.distil import DistilConfig
from jmoe.config.dpo import DpoConfig
from jmoe.config.layers import CROSS_KINDS, Layer
from jmoe.config.linear_attention import check_may_train_linear_attention
from jmoe.config.lora import LoraConfig
from jmoe.config.masking import MaskingConfig, check_may_train_bidirectional
from jmoe.config.model import ModelConfig, Remat
from jmoe.config.optimizer import OptimizerConfig, check_may_change_optimizer
from jmoe.config.parallel import SPLIT_SIZES, CommConfig, MeshConfig, packed_shape
from jmoe.config.prometheus import MetricsConfig
from jmoe.config.replicas import check_may_replicate
from jmoe.config.router import RouterConfig
from jmoe.config.tiers import EstimatedGpu, MachineConfig, TiersConfig
from jmoe.config.upcycle import UpcycleConfig, check_may_upcycle

Dtype = Literal["float32", "bfloat16", "float16"]
TrainOn = Literal["answers", "last_answer", "all"]
DataLayout = Literal["mixed", "elastic"]
MAX_LOSS_SCALE = 2.0**32


def _offloaded_phrase(tiers: TiersConfig) -> str:
    """Return the end of an error message that blames the expert tiers for a refused setting."""
    return (
        f"with experts on other tiers (tiers.experts = {tiers.experts!r} and tiers.optimizer ="
        f" {tiers.optimizer!r})"
    )


@dataclass(frozen=True)
class DataConfig:
    """The source of the text, or of samples for fine-tuning.

    path: files, folders or globs of UTF-8 text or records (`.jsonl`; `.json`: an array of records;
    Parquet), also compressed (`.gz`, `.zst`), or token shards (`.bin`); empty: the source code of
    the Python standard library on this machine. Files are split into train and held-out by file; a
    single file by its last part.
    """

    path: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()  # one per path; empty: by size
    # which devices get which rows of a batch. mixed: any; elastic: each device rows of as few paths
    # as their shares allow, so that a path with a larger share of the batch has more devices
    layout: DataLayout = "mixed"
    field: str = "text"  # JSONL: the field with the text
    # encodings of text and JSONL files; each file is read in the first one in which it is valid
    encoding: tuple[str, ...] = ("utf-8",)
    # text that spells out "<|im_start|>" is that token, as a server reads it
    control_tokens: bool = False
    # a tokenizer.json; None: a byte-level BPE is trained and cached beside the run
    tokenizer: str | None = None
    # chats: a file with the chat template; None: the template beside the tokenizer
    chat_template: str | None = None
    # chats: the tokens in the loss. answers: what the assistant writes, with its end token;
    # last_answer: the last of each conversation, which ends with it
    train_on: TrainOn = "answers"
    # chats: samples longer than a row of sequence_length tokens
    long_samples: Literal["cut", "drop"] = "cut"
    # chats: several samples in a row, apart from each other; False: one, and padding
    pack_samples: bool = True
    # records are preferences, two answers to a prompt: chosen and rejected. A run with dpo.beta
    # sets it
    preferences: bool = False
    # chats: samples with more tokens before the first one to learn are rejected by line; 0: no
    # limit, with preferences half of sequence_length
    max_prompt_tokens: int = 0
    # text: attention and positions begin anew with each document, in training and evaluation
    mask_documents: bool = False
    held_out_fraction: float = 0.05
    held_out_bytes: int = 500_000  # at most this much text is held out for evaluation
    prefetch_batches: int = 2

    def __post_init__(self) -> None:
        check_field_types(self)
        weighted, paths = not self.weights or len(self.weights) == len(self.path), len(self.path)
        check_field(
            weighted,
            self,
            "data.weights",
            f"needs one weight per data.path, of which there are {paths}",
        )
        several = "must be mixed with fewer than two of data.path: there is nothing to divide"
        mixed = self.layout == "mixed" or paths > 1
        check_field(mixed, self, "data.layout", several)
        check_field(bool(self.encoding), self, "data.encoding", "needs at least one encoding")
        constraint = "must be a text encoding of Python, e.g. utf-8, latin-1"
        for name in self.encoding:
            check(_is_text_encoding(name), "data.encoding", name, constraint)
        check_field(
            all(w > 0 for w in self.weights), self, "data.weights", "must all be greater than 0"
        )
        check_field(
            0 < self.held_out_fraction < 1,
            self,
            "data.held_out_fraction",
            "must be between 0 and 1",
        )
        check_positive(self, "held_out_bytes", "prefetch_batches")
        constraint = "must be True with data.mask_documents: its rows hold several documents"
        check_field(
            self.pack_samples or not self.mask_documents, self, "data.pack_samples", constraint
        )
        check_not_negative(self, "max_prompt_tokens")
        if self.preferences:
            only_answers = "must be answers or last_answer with preferences"
            check_field(self.train_on != "all", self, "data.train_on", only_answers)
            packed = "must be True with preferences: a row holds both answers"
            check_field(self.pack_samples, self, "data.pack_samples", packed)
        if not self.path:
            names = [
                "preferences",
                "max_prompt_tokens",
                "field",
                "encoding",
                "chat_template",
                "train_on",
                "long_samples",
            ]
            why = "without data.path: it is for text of your own"
            check_unset(self, "data", [*names, "pack_samples"], why)


def _is_text_encoding(name: str) -> bool:
    try:
        return b"a".decode(name) is not None
    except LookupError:  # also what turns bytes into bytes, such as base64
        return False
    except UnicodeError:  # one byte is too few for UTF-16
        return True


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scaling for compute_dtype = float16.

    A step whose gradients overflow makes no update and runs again with half the scale. After
    `growth_steps` steps without an overflow the scale doubles.
    """

    initial: int | None = None  # scale at step 0, a power of two; None: 65536
    # steps without an overflow before the scale doubles; None: 1000
    growth_steps: int | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        scale = self.initial
        power = scale is None or (1 <= scale <= MAX_LOSS_SCALE and scale & (scale - 1) == 0)
        check_field(power, self, "loss_scale.initial", "must be a power of two from 1 to 2**32")
        check_field(self.steps_to_grow >= 1, self, "loss_scale.growth_steps", "must be at least 1")
        check_steps_within_limit(self, "growth_steps")

    @property
    def initial_scale(self) -> int:
        """The loss scale at step 0."""
        return 65536 if self.initial is None else self.initial

    @property
    def steps_to_grow(self) -> int:
        """The number of steps without an overflow after which the scale doubles."""
        return 1000 if self.growth_steps is None else self.growth_steps


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 100
    # number of newest checkpoints to keep; 1 also keeps two, because the state in the newest one
    # may fail in the next step
    keep: int = 2
    # time limit for copying the experts' records of one checkpoint
    drain_timeout_s: int = 600
    # a folder in each host's memory, such as /dev/shm, for snapshots of the state from which lost
    # processes restart
    memory_dir: str | None = None
    memory_every_steps: int = 10  # steps between two snapshots

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "every_steps", "keep", "drain_timeout_s", "memory_every_steps")
        check_field(self.memory_dir != "", self, "checkpoint.memory_dir", "must name a folder")
        if self.memory_dir is None:
            check_unset(self, "checkpoint", ["memory_every_steps"], "without checkpoint.memory_dir")

    @property
    def num_kept_checkpoints(self) -> int:
        """The number of checkpoints kept, at least 2.

        The run has continued from the older of two checkpoints with finite values, so it is known
        to be usable.
        """
        return max(2, self.keep)


@dataclass(frozen=True)
class EvaluationConfig:
    # steps between two evaluations; 0: a quarter of a run of 20 steps or more. The end of the run
    # is always evaluated
    every_steps: int = 0
    at_start: bool = True  # also evaluate before step 0
    sample_tokens: int = 160  # length of the sample printed at the end
    sample_temperature: float = 0.8

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "every_steps", "sample_tokens", "sample_temperature")
        if not self.sample_tokens:
            check_unset(
                self, "evaluation", ["sample_temperature"], "with evaluation.sample_tokens = 0"
            )


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of one run. Under SLURM, Open MPI and Kubernetes they are found automatically.

    Elsewhere a run of several processes sets the first three options in each process.
    """

    coordinator_address: str | None = None  # host:port of process 0
    num_processes: int | None = None  # number of processes of the run
    process_id: int | None = None  # rank of this process, from 0
    start_timeout_s: int = 300  # time within which all processes must have started
    # a step, save or evaluation that takes longer ends the run with the names of the stuck ranks
    step_timeout_s: int = 600
    # a process without a heartbeat for this long ends the run
    heartbeat_timeout_s: int = 10
    # folder into which each process writes heartbeats for a supervisor; None: none are written
    heartbeat_folder: str | None = None
    # exit status of a run that a signal has stopped; 75 tells a launcher to start the run again
    stopped_exit_code: int = 0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "start_timeout_s", "step_timeout_s", "heartbeat_timeout_s")
        check_field(
            0 <= self.stopped_exit_code <= 255,
            self,
            "distributed.stopped_exit_code",
            "must be from 0 to 255",
        )
        names = ("coordinator_address", "num_processes", "process_id")
        missing = [f"distributed.{name}" for name in names if getattr(self, name) is None]
        check(
            len(missing) in (0, 3),
            ", ".join(missing),
            None,
            f"{names[0]}, {names[1]} and {names[2]} go together",
        )
        if self.num_processes is not None and self.process_id is not None:
            check_field(
                self.num_processes >= 1, self, "distributed.num_processes", "must be at least 1"
            )
            constraint = f"must be between 0 and num_processes - 1 = {self.num_processes - 1}"
            check_field(
                0 <= self.process_id < self.num_processes,
                self,
                "distributed.process_id",
                constraint,
            )


@dataclass(frozen=True)
class ProfileConfig:
    steps: str = ""  # "10:13" writes a trace of steps 10, 11, 12

    def __post_init__(self) -> None:
        check_field_types(self)
        self.traced_steps()

    def traced_steps(self) -> tuple[int, int] | None:
        """The traced steps as (first, last + 1), or None without a trace. Raises ValueError if
        `steps` does not read FIRST:LAST.
        """
        if not self.steps:
            return None
        first, colon, last = self.steps.partition(":")
        ok = colon == ":" and first.isdigit() and last.isdigit() and int(first) < int(last)
        check_field(ok, self, "profile.steps", "must read FIRST:LAST with FIRST < LAST, e.g. 10:13")
        return int(first), int(last)


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    distil: DistilConfig = field(default_factory=DistilConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    denoising: DenoisingConfig = field(default_factory=DenoisingConfig)
    upcycle: UpcycleConfig = field(default_factory=UpcycleConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    # patterns of the parameters that are trained, such as experts or attention.w_*; empty: all
    train: tuple[str, ...] = ()
    # patterns of parameters that are not trained, among those that `train` names
    freeze: tuple[str, ...] = ()
    num_steps: int = 1000
    batch_size: int = 8  # sequences a step, all devices and accumulation steps together
    sequence_length: int = 256
    gradient_accumulation_steps: int = 1
    # master weights are always float32, and optimizer state unless optimizer.moments = 8bit; with
    # float16 the loss is scaled, see loss_scale
    compute_dtype: Dtype = "bfloat16"
    # on a CPU with AVX512-BF16, run parts of a bfloat16 step with C++ operations, which are
    # compiled once per machine; with tiers.update = "host" any CPU updates experts with them. auto:
    # if a compiler is found; on: required; off: use XLA only
    native: Literal["auto", "on", "off"] = "auto"
    # what the backward pass recomputes. experts: the outputs of the experts' matrices; layer:
    # everything but the layers' inputs
    remat: Remat = "none"
    seed: int = 0
    # a Hugging Face folder, or a run's output folder (its newest checkpoint), from which the run
    # takes its model and initial parameters. Of `model`, only the options of training still apply:
    # capacity_factor and the router's jitter_noise, z_loss_coef and bias_update_speed
    init_from: str = ""
    # with init_from: YaRN (arXiv 2309.00071) stretches the model's rotary positions to this
    # multiple of max_position_embeddings; also --model.rope-scaling yarn --model.rope-factor F
    yarn_factor: float = 1.0
    output_dir: str = ""  # "": runs/PRESET
    plan: bool = False  # only print the run's memory by tier and the predicted step time
    # with plan: a TOML file that describes a cluster and the numbers of nodes to plan for
    cluster: str = ""
    json: bool = False  # with cluster: print one JSON object
    # only compile a step for this GPU, which the machine need not have, and print the predicted
    # step time
    estimate: EstimatedGpu = ""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(
            self, "num_steps", "batch_size", "sequence_length", "gradient_accumulation_steps"
        )
        check_steps_within_limit(self, "num_steps")
        self.optimizer.check_phases(self.num_steps)
        check_field(0 <= self.seed < 2**31, self, "seed", "must be between 0 and 2**31 - 1")
        positions = self.model.max_position_embeddings
        fits = self.model.position != "learned" or self.sequence_length <= positions
        constraint = f"must not exceed model.max_position_embeddings = {positions}"
        check_field(fits, self, "sequence_length", constraint)
        self._check_tiers()
        self._check_ragged_exchange()
        check_may_share_sequences(self)
        check_may_replicate(self)
        check_may_balance_experts(self)
        check_field(
            self.plan or not self.cluster, self, "cluster", "must be given together with plan"
        )
        check_field(
            bool(self.cluster) or not self.json, self, "json", "must be given together with cluster"
        )
        self._check_estimate()
        self._check_memory_dir()
        self._check_precision()
        self._check_teacher()
        self._check_lora()
        check_may_train_linear_attention(self)
        check_may_train_bidirectional(self)
        check_may_train_encoder_decoder(self)
        self._check_dpo()
        self._check_yarn()
        check_may_upcycle(self)
        check_may_change_optimizer(
            self,
            {
                _offloaded_phrase(self.tiers): not self.tiers.all_on_device,
                "with lora.rank": self.lora.rank is not None,
                f"with comm.packing = {self.comm.packing!r}": self.comm.packing != 1,
            },
        )
        if self.train or self.freeze:
            self._check_patterns()
        span = self.profile.traced_steps()
        ends = span is None or span[1] <= self.num_steps
        check_field(
            ends, self.profile, "profile.steps", f"must end by num_steps = {self.num_steps}"
        )

    def _check_tiers(self) -> None:
        tiers = self.tiers.experts, self.tiers.optimizer
        has_experts = self.tiers.all_on_device or bool(self.model.expert_layers)
        check(has_experts, "tiers", tiers, "must be device for a model without experts")
        if not self.init_from:  # whose model is not known here
            self.check_chosen_share()
        whole = self.comm.expert_sharding == "none" or not self.tiers.any_off_device
        check(
            whole,
            "comm.shard_experts",
            self.comm.shard_experts,
            f"must be none {_offloaded_phrase(self.tiers)}",
        )

    def _check_ragged_exchange(self) -> None:
        if self.comm.exchange != "ragged":
            return
        with_ragged = "with comm.exchange = 'ragged'"
        factor = self.model.capacity_factor
        constraint = f"must be unset {with_ragged}: it drops nothing"
        check(factor is None, "model.capacity_factor", factor, constraint)
        tiers = self.tiers.experts, self.tiers.optimizer
        check(self.tiers.all_on_device, "tiers", tiers, f"must be device {with_ragged}")

    @property
    def can_shard_experts(self) -> bool:
        """Whether the step can split experts over the data axis (`comm.shard_experts`): not with
        experts named for other tiers, and not with LoRA.
        """
        one_by_one = self.comm.shard_dense and not self.comm.fuse_dense
        return not self.tiers.any_off_device and not one_by_one and self.lora.rank is None

    def _check_memory_dir(self) -> None:
        memory_dir = self.checkpoint.memory_dir
        alone = memory_dir is None or not self.tiers.any_off_device
        check(
            alone,
            "checkpoint.memory_dir",
            memory_dir,
            f"must not be set {_offloaded_phrase(self.tiers)}",
        )

    def _check_precision(self) -> None:
        for name in ("initial", "growth_steps"):
            unset = getattr(self.loss_scale, name) is None or self.compute_dtype == "float16"
            constraint = (
                f"must not be set with compute_dtype = {self.compute_dtype!r}: only float16"
                " needs it"
            )
            check_field(unset, self.loss_scale, f"loss_scale.{name}", constraint)
        narrow = self.native != "on" or self.compute_dtype == "bfloat16"
        check_field(
            narrow,
            self,
            "native",
            f"must be auto or off with compute_dtype = {self.compute_dtype!r}",
        )

    def _check_teacher(self) -> None:
        if not self.distil.teacher:
            return
        wide = self.compute_dtype != "float16"
        check_field(wide, self, "compute_dtype", "must be float32 or bfloat16 with distil.teacher")
        check(
            not self.data.mask_documents,
            "data.mask_documents",
            self.data.mask_documents,
            "must be False with distil.teacher, which reads whole windows",
        )
        tiers = self.tiers.experts, self.tiers.optimizer
        check(self.tiers.all_on_device, "tiers", tiers, "must be device with distil.teacher")
        check(
            self.comm.packing == 1,
            "comm.packing",
            self.comm.packing,
            "must be 1 with distil.teacher",
        )

    def _check_yarn(self) -> None:
        check_field(self.yarn_factor >= 1, self, "yarn_factor", "must be at least 1")
        if self.yarn_factor == 1:
            return
        needs = "must be 1 without init_from, whose model it stretches"
        check_field(bool(self.init_from), self, "yarn_factor", needs)
        alone = "must be 1 with lora.rank: an adapter's files cannot hold positions"
        check_field(self.lora.rank is None, self, "yarn_factor", alone)

    def _check_lora(self) -> None:
        rank = self.lora.rank
        if rank is None:
            return
        check(bool(self.init_from), "lora.rank", rank, "must be given together with init_from")
        with_lora = "with lora.rank"
        speed, default = self.model.router.bias_update_speed, RouterConfig.bias_update_speed
        check(
            speed in (0, default),
            "model.router.bias_update_speed",
            speed,
            f"must be 0 {with_lora}: router biases do not move",
        )
        wide = self.compute_dtype != "float16"
        check_field(wide, self, "compute_dtype", f"must be float32 or bfloat16 {with_lora}")
        self.tiers.check_frozen_experts()
        packing = self.comm.packing
        check(packing == 1, "comm.packing", packing, f"must be 1 {with_lora}")
        sharding = self.comm.shard_experts
        whole = self.comm.expert_sharding == "none"
        check(whole, "comm.shard_experts", sharding, f"must be none {with_lora}")
        check(
            not self.distil.teacher,
            "distil.teacher",
            self.distil.teacher,
            f"must be empty {with_lora}",
        )
        check_field(not self.plan, self, "plan", f"must not be given {with_lora}: not planned yet")
        check_field(
            not self.estimate, self, "estimate", f"must not be given {with_lora}: not estimated yet"
        )

    def _check_dpo(self) -> None:
        beta = self.dpo.beta
        if beta is None:
            preferences = self.data.preferences
            check(
                not preferences, "data.preferences", preferences, "must be False without dpo.beta"
            )
            return
        check(bool(self.init_from), "dpo.beta", beta, "must be given together with init_from")
        check_field(
            self.sequence_length >= 3, self, "sequence_length", "must be at least 3 with dpo.beta"
        )
        refused = {
            "compute_dtype": self.compute_dtype == "float16",
            "tiers.experts": not self.tiers.all_on_device,
            "comm.packing": self.comm.packing != 1,
            "distil.teacher": bool(self.distil.teacher),
            "plan": self.plan,
            "estimate": bool(self.estimate),
        }
        for name, holds in refused.items():
            section, _, own = name.rpartition(".")
            value = getattr(getattr(self, section) if section else self, own)
            check(not holds, name, value, "is not supported with dpo.beta")

    def with_preferences(self) -> TrainConfig:
        """Return the configuration whose data are read as preferences if `dpo.beta` is set: prompts
        may fill half of a row that both answers share.
        """
        if self.dpo.beta is None:
            return self
        needs = "must name files of preferences, with dpo.beta"
        check(bool(self.data.path), "data.path", self.data.path, needs)
        data = dataclasses.replace(self.data, preferences=True)
        if not data.max_prompt_tokens and data.long_samples == "cut":
            half = (self.sequence_length + 1) // 2
            data = dataclasses.replace(data, max_prompt_tokens=half - 1)
        return dataclasses.replace(self, data=data)

    def _check_patterns(self) -> None:
        """Reject frozen parameters where every parameter has moments."""
        field, patterns = ("train", self.train) if self.train else ("freeze", self.freeze)
        check("" not in (*self.train, *self.freeze), field, patterns, "must hold no empty pattern")
        refused = {
            "with lora.rank, which freezes all but the adapters": self.lora.rank is not None,
            _offloaded_phrase(self.tiers): not self.tiers.all_on_device,
            f"with comm.packing = {self.comm.packing!r}": self.comm.packing != 1,
            "with plan: not planned yet": self.plan,
            "with estimate: not estimated yet": bool(self.estimate),
        }
        for why, holds in refused.items():
            check(not holds, field, patterns, f"must be empty {why}")

    def _check_estimate(self) -> None:
        if self.estimate:
            check_field(not self.plan, self, "estimate", "must not be given together with plan")
            where = (
                f"must not be given {_offloaded_phrase(self.tiers)}: such a step is many programs;"
                " take --plan"
            )
            check_field(self.tiers.all_on_device, self, "estimate", where)
            alone = not self.distil.teacher
            check_field(
                alone,
                self,
                "estimate",
                "must not be given with distil.teacher: its steps are not estimated",
            )

    def check_chosen_share(self) -> None:
        """Raise ValueError if `tiers.chosen_share` is set (not 0) and the model has no experts, or
        if the share is smaller than that of the experts that a single token chooses.
        """
        share, experts = self.tiers.chosen_share, self.model.num_experts
        check(
            not share or experts > 0,
            "tiers.chosen_share",
            share,
            "must be 0 for a model without experts",
        )
        if share:
            least = (
                1
                if self.model.router.second_expert_policy == "random"
                else self.model.num_experts_per_tok
            )
            constraint = f"must be at least {least} / {experts}, what one token chooses"
            check(share > least / experts - 1e-6, "tiers.chosen_share", share, constraint)

    def devices_per_sequence(self, num_devices: int) -> int:
        """Return the number of neighbouring devices that share each sequence; see
        `config.context`.
        """
        return devices_per_sequence(self, num_devices)

    def checked_mesh_shape(
        self, num_devices: int, devices_per_host: int = 0
    ) -> tuple[int, int, int]:
        """Return the mesh shape for this many devices.

        devices_per_host: 0 if unknown or different between hosts. Raises ValueError if the run
        cannot be sharded over the devices.
        """
        shape = packed_shape(
            self.mesh.resolve_shape(num_devices, devices_per_host), self.comm.initial_packing
        )
        self.devices_per_sequence(num_devices)
        if not self.tiers.all_on_device and num_devices > 1:
            fused = self.comm.fuse_dense or not self.comm.shard_dense
            check_field(
                fused, self.comm, "comm.fuse_dense", "must be True with experts on other tiers"
            )
            ordered = self.comm.shard_dense or self.comm.schedule == "none"
            constraint = "must be none with experts on other tiers and comm.shard_dense = False"
            check_field(ordered, self.comm, "comm.schedule", constraint)
        experts = shape[1] * shape[2]
        axes = "mesh.expert_inter x mesh.expert_intra" + " / comm.packing" * (
            self.comm.initial_packing > 1
        )
        constraint = f"must be a multiple of {axes} = {experts}"
        check_field(
            self.model.num_experts % experts == 0, self.model, "model.num_experts", constraint
        )
        for name in (
            () if self.comm.embedding == "auto" else SPLIT_SIZES.get(self.comm.embedding, ())
        ):
            constraint = (
                f"must be a multiple of {num_devices}: comm.embedding = {self.comm.embedding!r}"
                " splits it"
            )
            check_field(
                getattr(self.model, name) % num_devices == 0,
                self.model,
                f"model.{name}",
                constraint,
            )
        return shape

    @property
    def text_vocab_size(self) -> int:
        """Exclusive upper bound of the ids of the text: with masked tokens the vocabulary's last
        id is the mask's, and with span corruption the last ones are sentinels.
        """
        if self.model.num_encoder_layers:
            return self.model.vocab_size - self.denoising.num_sentinels(self.sequence_length)
        return self.model.vocab_size - self.model.bidirectional

    @property
    def text_parts(self) -> TextParts:
        """The positions that encoder and decoder have for a sequence of the text."""
        if self.model.num_encoder_layers:
            return self.denoising.parts(self.sequence_length)
        return TextParts(0, self.sequence_length)

    def positions_of(self, layer: Layer) -> int:
        """Return how many positions of a sequence pass this layer of the model."""
        encoder, decoder = self.text_parts
        crosses = layer.kind in CROSS_KINDS.values()
        return decoder if crosses or not encoder else encoder

    @property
    def flops_per_token(self) -> float:
        """The model FLOPs of a step for each token of its text."""
        if not self.model.num_encoder_layers:
            return self.model.flops_per_token(self.sequence_length)
        return self.model.flops_per_sequence(*self.text_parts) / self.sequence_length

    def with_packing(self, packing: int) -> TrainConfig:
        """Return a copy with `packing` times as many experts per device."""
        return dataclasses.replace(self, comm=dataclasses.replace(self.comm, packing=packing))

    def tokens_before_step(self, step: int) -> int:
        """Return the number of tokens of all steps before this one."""
        return step * self.batch_size * self.sequence_length

    def evaluates_after(self, steps: int) -> bool:
        """Return whether the held-out loss is measured after `steps` steps.

        False at the end of the run, which has its own evaluation.
        """
        every = self.evaluation.every_steps
        if not every:
            every = math.ceil(self.num_steps / 4) if self.num_steps >= 20 else self.num_steps
        return steps % every == 0 and steps < self.num_steps

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that is allowed but probably a mistake."""
        rate, decay, warnings = self.optimizer.learning_rate, self.optimizer.weight_decay, []
        if rate > 0.1:
            warnings.append(
                f"optimizer.learning_rate = {rate:g}: AdamW moves every weight by about as much in"
                " a step; with more than 0.1 a model hardly learns"
            )
        if rate * decay >= 1:
            warnings.append(
                f"optimizer.weight_decay = {decay:g}: with optimizer.learning_rate = {rate:g} a"
                " step takes more from every weight than it has"
            )
        if self.optimizer.warmup_steps >= self.num_steps:
            warnings.append(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps}: all of the run's"
                f" num_steps = {self.num_steps} are warm-up"
            )
        if max(self.text_parts) > self.model.max_position_embeddings:
            warnings.append(
                f"sequence_length = {self.sequence_length}: longer than"
                f" model.max_position_embeddings = {self.model.max_position_embeddings}, to which"
                " the model will be served"
            )
        return warnings

    def to_json(self) -> str:
        """Return the resolved configuration as JSON, as written to the output folder."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def describe_differences(
    saved: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> list[str]:
    """Return a line `field: saved -> now` for every value that differs between two resolved
    configurations.
    """
    lines = []
    for key in sorted(set(saved) | set(now)):
        a, b = saved.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += describe_differences(a, b, f"{prefix}{key}.")
        elif a != b and not (
            isinstance(a, list | tuple) and isinstance(b, list | tuple) and list(a) == list(b)
        ):
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines
