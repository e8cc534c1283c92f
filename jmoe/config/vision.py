"""The configuration of a vision transformer that learns several tasks at once. Standard library
only.

Tasks share the trunk. In a layer routed by task, a task uses the expert that its path names, which
other tasks' paths may name as well (UFO, VIMER-UFO 2.0).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_steps_within_limit,
    check_unset,
)
from jmoe.config.layers import LayerKind
from jmoe.config.model import ModelConfig
from jmoe.config.optimizer import check_may_change_optimizer
from jmoe.config.train import TrainConfig

LayoutKind = Literal["even", "elastic"]
HeadKind = Literal["classes", "contrastive"]


@dataclass(frozen=True)
class VisionModelConfig(ModelConfig):
    """A vision transformer (arXiv:2010.11929): patches, learned positions, blocks, the mean of all
    patches, heads.

    `decoder_sparse_step`, `first_k_dense_replace` and `mlp_only_layers` say, as in a decoder, which
    layers have experts routed per token; those of `task_layers` are routed by task instead.
    `vocab_size` has no meaning.
    learn_paths: in every layer routed by task a task learns whether it takes expert 0, which all
    share, or the one that its path names (UFO 2.0).
    """

    image_size: int = 16  # pixels a side; images of another size are resized
    patch_size: int = 4  # pixels a side
    channels: int = 1  # 1: grey, 3: colours
    task_layers: tuple[int, ...] = ()
    learn_paths: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "image_size", "patch_size")
        check_field(self.channels in (1, 3), self, "channels", "must be 1 or 3")
        divides = self.image_size % self.patch_size == 0
        check_field(divides, self, "patch_size", f"must divide image_size = {self.image_size}")
        check_field(self.position == "learned", self, "position", "must be 'learned' for images")
        check_field(self.kv_lora_rank is None, self, "kv_lora_rank", "must be None for images")
        check_field(self.sliding_window is None, self, "sliding_window", "must be None for images")
        check_field(not self.attention_sinks, self, "attention_sinks", "must be False for images")
        alone = self.num_encoder_layers == 0
        check_field(alone, self, "num_encoder_layers", "must be 0 for images")
        layers = self.num_hidden_layers
        inside = all(0 <= layer < layers for layer in self.task_layers)
        check_field(inside, self, "task_layers", f"must lie between 0 and {layers - 1}")
        rising = list(self.task_layers) == sorted(set(self.task_layers))
        check_field(rising, self, "task_layers", "must rise, each layer once")
        needs = not self.task_layers or self.num_experts > 0
        check(needs, "num_experts", self.num_experts, "must be greater than 0 for task_layers")
        check_field(
            bool(self.task_layers) or not self.learn_paths, self, "learn_paths", "needs task_layers"
        )
        enough = self.num_experts > 1 or not self.learn_paths
        check(enough, "num_experts", self.num_experts, "must be greater than 1 for learn_paths")
        super().__post_init__()
        # A balance loss would depend on which images a device has at once; a router's bias is moved
        # by all of a step.
        balanced = "moe" not in self.layer_kinds or self.router.aux_loss_coef == 0
        check(
            balanced,
            "router.aux_loss_coef",
            self.router.aux_loss_coef,
            "must be 0 for images; use kind = 'sigmoid'",
        )
        check_field(
            not self.bidirectional, self, "bidirectional", "must be False for images, which are so"
        )
        jitter = self.router.jitter_noise
        check(jitter == 0, "router.jitter_noise", jitter, "must be 0 for images")

    def _check_experts(self) -> None:
        _ = self.moe  # raises `ValueError` for what does not fit

    @property
    def is_causal(self) -> bool:
        """False: every patch attends to all patches."""
        return False

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer's feed-forward: dense, experts by token, or experts by task."""
        kinds = super().layer_kinds
        return tuple(
            "task" if layer in self.task_layers else kind for layer, kind in enumerate(kinds)
        )

    @property
    def experts_per_image(self) -> int:
        """Experts per image in a task-routed layer in training: 2 with learned paths, else 1."""
        return 2 if self.learn_paths else 1

    def total_and_active_parameters(self) -> tuple[int, int]:
        """Return (total, active per patch) parameters without the task heads.

        Each task's head adds hidden_size x classes.
        """
        d, side, tasks = self.hidden_size, self.image_size // self.patch_size, len(self.task_layers)
        text = (
            self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
            + self.max_position_embeddings * d
        )
        own = (self.patch_size**2 * self.channels + 1 + 2 * side) * d
        dense, expert = self._num_mlp_parameters(self.intermediate_size), self.parameters_per_expert
        total, active = (count - text + own for count in super().total_and_active_parameters())
        return total + tasks * (self.num_experts * expert - dense), active + tasks * (
            expert - dense
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the training FLOPs per patch: 6 per active parameter, plus full attention."""
        attention = (
            12
            * self.num_hidden_layers
            * self.num_attention_heads
            * self.dim_per_head
            * sequence_length
        )
        return 6.0 * self.total_and_active_parameters()[1] + attention

    @property
    def num_patches(self) -> int:
        """Number of tokens (patches) of an image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class TaskConfig:
    """One image task: its images, its share of a step, and its experts.

    source: `digits`, `glyphs`, `fonts` or `photographs` (real images from installed packages), or
    your own images: a folder with one subfolder per class, or a .csv or .tsv file whose first line
    is path,label. path: the task's expert in each of `model.task_layers`; with `model.learn_paths`,
    the alternative to the shared expert 0.
    """

    source: str
    batch_size: int = 16  # images a step, on all devices together
    # classes: logits and cross-entropy. contrastive: an embedding, with a loss over all pairs of
    # the task's images of a step, on whichever devices; a held-out image gets the class whose
    # training images have the nearest mean embedding
    head: HeadKind = "classes"
    embedding_size: int = 64  # output size of a contrastive head
    contrastive_temperature: float = 0.1
    path: tuple[int, ...] = ()
    loss_weight: float = 1.0  # weight of the task's mean loss in the sum over tasks
    # number of steps that train the task; afterwards its own parameters stay fixed and other tasks
    # use its devices; 0: the whole run
    num_steps: int = 0

    def __post_init__(self) -> None:
        check_field_types(self)
        check_field(bool(self.source), self, "source", "must name a built-in task or a folder")
        check_positive(
            self, "batch_size", "loss_weight", "embedding_size", "contrastive_temperature"
        )
        check_not_negative(self, "num_steps")
        check_steps_within_limit(self, "num_steps")
        if self.head == "classes":
            check_unset(
                self, "", ["embedding_size", "contrastive_temperature"], "with head = 'classes'"
            )
        enough = self.head == "classes" or self.batch_size > 1
        check_field(
            enough,
            self,
            "batch_size",
            "must be greater than 1 to compare images (head = 'contrastive')",
        )

    def head_size(self, num_classes: int) -> int:
        """Return the number of output features of the task's head."""
        return num_classes if self.head == "classes" else self.embedding_size

    def is_trained_at(self, step: int) -> bool:
        """Return whether the task is trained in step `step`, counted from 0."""
        return not self.num_steps or step < self.num_steps


@dataclass(frozen=True)
class ImagesConfig:
    """Split and augmentation of the images of all tasks."""

    held_out_fraction: float = 0.2  # share of each class's images that is held out
    # training images are shifted randomly by up to this many pixels in each direction
    max_shift: int = 1

    def __post_init__(self) -> None:
        check_field_types(self)
        check_field(
            0 < self.held_out_fraction < 1, self, "held_out_fraction", "must be between 0 and 1"
        )
        check_not_negative(self, "max_shift")


@dataclass(frozen=True)
class ElasticConfig:
    """When a run changes its elastic layout according to the measured time of each task's
    images.
    """

    replan_every_steps: int = 0  # steps between two measurements; 0: none
    # the layout may change once the busiest device's load exceeds the mean load by this factor
    max_imbalance: float = 1.2

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "replan_every_steps")
        check_field(self.max_imbalance >= 1, self, "elastic.max_imbalance", "must be at least 1")


@dataclass(frozen=True)
class PathLearningConfig:
    """Temperature of the Gumbel-softmax (arXiv:1611.01144) that learns tasks' paths
    (`model.learn_paths`).

    In each step every task draws one expert per layer. The temperature falls by a constant factor
    per step, from `temperature` to `final_temperature` at the end of the run.
    """

    temperature: float = 2.0
    final_temperature: float = 0.2

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "temperature", "final_temperature")
        falls = self.final_temperature <= self.temperature
        limit = f"must not exceed paths.temperature = {self.temperature:g}"
        check(falls, "paths.final_temperature", self.final_temperature, limit)


@dataclass(frozen=True)
class VisionTrainConfig(TrainConfig):
    """One run that learns several image tasks. The batch is that of all tasks; a sequence is an
    image's patches.

    `init_from` is another run's folder. A task that the other run lacks begins with a new head, and
    with the experts that its path names.
    """

    model: VisionModelConfig = field(
        default_factory=lambda: VisionModelConfig(position="learned", num_experts=0)
    )
    tasks: dict[str, TaskConfig] = field(default_factory=dict)  # by name, at least one
    images: ImagesConfig = field(default_factory=ImagesConfig)
    paths: PathLearningConfig = field(default_factory=PathLearningConfig)
    # distribution of images over devices. even: equal shares of the joint batch; elastic: heavy
    # tasks get several devices, light ones share one (SE-MoE, section 4.1)
    layout: LayoutKind = "even"
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    batch_size: int = field(init=False, default=0)
    sequence_length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        check_field_types(self)
        check_field(bool(self.tasks), self, "tasks", "must have at least one task")
        object.__setattr__(self, "batch_size", sum(task.batch_size for task in self.tasks.values()))
        object.__setattr__(self, "sequence_length", self.model.num_patches)
        layers, experts = len(self.model.task_layers), self.model.num_experts
        for name, task in self.tasks.items():
            least = 1 if self.model.learn_paths else 0
            field_name = f"tasks.{name}.path"
            inside = all(least <= expert < experts for expert in task.path)
            check(
                len(task.path) == layers,
                field_name,
                task.path,
                f"must name an expert for {layers} model.task_layers",
            )
            why = "; with model.learn_paths expert 0 is the shared one" if least else ""
            limit = f"must lie between {least} and model.num_experts - 1 = {experts - 1}{why}"
            check(inside, field_name, task.path, limit)
        super().__post_init__()
        check_field(
            not self.estimate,
            self,
            "estimate",
            "must not be given for images: their steps are not estimated",
        )
        self._check_task_num_steps()
        self._check_options_supported_for_images()

    def _check_task_num_steps(self) -> None:
        for name, task in self.tasks.items():
            fits = task.num_steps <= self.num_steps
            check(
                fits,
                f"tasks.{name}.num_steps",
                task.num_steps,
                f"must not exceed num_steps = {self.num_steps}",
            )
        ends = {
            f"tasks.{name}.num_steps": task.num_steps
            for name, task in self.tasks.items()
            if task.num_steps
        }
        all_end = len(ends) == len(self.tasks) and max(ends.values()) < self.num_steps
        check(
            not all_end,
            ", ".join(ends),
            tuple(ends.values()),
            f"one must be 0 or num_steps = {self.num_steps}",
        )
        if self.layout == "even":
            constraint = "must be 0 with layout = 'even'"
            for end, steps in ends.items():
                check(steps == self.num_steps, end, steps, constraint)
            check_field(
                not self.elastic.replan_every_steps,
                self.elastic,
                "elastic.replan_every_steps",
                constraint,
            )

    def _check_options_supported_for_images(self) -> None:
        rank = self.lora.rank
        check(rank is None, "lora.rank", rank, "must not be given for images")
        beta = self.dpo.beta
        check(beta is None, "dpo.beta", beta, "must not be given for images")
        unstretched = "must be 1 for images: their positions are not rotary"
        check_field(self.yarn_factor == 1, self, "yarn_factor", unstretched)
        for name in ("train", "freeze"):
            check_field(not getattr(self, name), self, name, "must be empty for images")
        text_fields = [field.name for field in dataclasses.fields(self.data)]
        check_unset(self.data, "data", text_fields, "for images: each task has a source")
        check_unset(
            self.distil, "distil", ["teacher"], "for images: a language model learns from a teacher"
        )
        check_unset(
            self.evaluation,
            "evaluation",
            ["sample_tokens", "sample_temperature"],
            "for images: no text is sampled",
        )
        constraint = "must be auto or off for images, whose steps are XLA's alone"
        check_field(self.native != "on", self, "native", constraint)
        if not self.model.learn_paths:
            check_unset(
                self.paths,
                "paths",
                ["temperature", "final_temperature"],
                "without model.learn_paths",
            )
        if not self.elastic.replan_every_steps:
            check_unset(
                self.elastic, "elastic", ["max_imbalance"], "without elastic.replan_every_steps"
            )
        check_may_change_optimizer(self, {"for images": True})
        check_unset(self.upcycle, "upcycle", ["num_experts"], "for images")
        self._check_image_tiers()
        wide = self.compute_dtype != "float16"
        check_field(wide, self, "compute_dtype", "must be float32 or bfloat16 for images")
        check_field(not self.cluster, self, "cluster", "must not be given for images")
        self._check_image_comm()

    def _check_image_tiers(self) -> None:
        for name in ("experts", "optimizer"):
            tier = getattr(self.tiers, name)
            check(tier != "auto", f"tiers.{name}", tier, "must be device, host or nvme for images")
        update = self.tiers.update
        check(update != "auto", "tiers.update", update, "must be device or host for images")
        share = self.tiers.device_experts
        check(
            share == 1,
            "tiers.device_experts",
            share,
            "must be 1 for images, whose tasks say what a device holds",
        )
        self.check_chosen_share()
        every = self.elastic.replan_every_steps
        constraint = "must be 0 with experts on other tiers than the device"
        check(
            self.tiers.all_on_device or not every, "elastic.replan_every_steps", every, constraint
        )

    @property
    def can_shard_experts(self) -> bool:
        """False: tasks say which experts a device holds."""
        return False

    def _check_image_comm(self) -> None:
        check(
            not self.comm.bucket_bytes,
            "comm.bucket_bytes",
            self.comm.bucket_bytes,
            "must be 0 for images",
        )
        check(self.comm.packing == 1, "comm.packing", self.comm.packing, "must be 1 for images")
        every = self.comm.balance_every_steps
        check(every == 0, "comm.balance_every_steps", every, "must be 0 for images")
        check(
            self.comm.expert_sharding == "none",
            "comm.shard_experts",
            self.comm.shard_experts,
            "must be none for images",
        )
        check(not self.comm.links, "comm.links", self.comm.links, "must be empty for images")
        check(
            self.comm.schedule == "none",
            "comm.schedule",
            self.comm.schedule,
            "must be none for images",
        )
        padded = self.comm.exchange != "ragged"
        check(padded, "comm.exchange", self.comm.exchange, "must not be ragged for images")
        alone = self.layout == "even" or self.mesh.expert_inter * self.mesh.expert_intra == 1
        shape = self.mesh.expert_inter, self.mesh.expert_intra
        constraint = (
            "must be (1, 1) with layout = 'elastic': devices that exchange tokens take equal steps"
        )
        check(alone, "mesh.(expert_inter, expert_intra)", shape, constraint)

    def check_chosen_share(self) -> None:
        """Raise ValueError if `tiers.chosen_share` is not 0: image tasks name their experts, so no
        share of chosen experts is measured.
        """
        share = self.tiers.chosen_share
        check(
            share == 0,
            "tiers.chosen_share",
            share,
            "must be 0 for images, whose tasks name their experts",
        )

    def tokens_before_step(self, step: int) -> int:
        """Return the number of patches of all steps before this one; ended tasks add none."""
        images = sum(
            task.batch_size * min(step, task.num_steps or step) for task in self.tasks.values()
        )
        return images * self.sequence_length

    def checked_mesh_shape(
        self, num_devices: int, devices_per_host: int = 0
    ) -> tuple[int, int, int]:
        """Return the mesh's shape (data, expert_inter, expert_intra).

        With the layout `even` after the checks of `TrainConfig.checked_mesh_shape`; an elastic
        layout may give devices different numbers of images, so the batch is not checked.
        """
        if self.layout == "even":
            return super().checked_mesh_shape(num_devices, devices_per_host)
        return self.mesh.resolve_shape(num_devices, devices_per_host)
