"""Inputs of a training plan: the machine, the sizes of the model and of its step, and the tier of
each kind of state.
"""

from dataclasses import dataclass
from typing import get_args

from jmoe.config.parallel import ExpertSharding
from jmoe.config.tiers import TIERS, Tier, Update
from jmoe.planning.roofline import distinct_experts

EXPERT_SHARDINGS: tuple[ExpertSharding, ...] = get_args(ExpertSharding)
WEIGHT_BYTES = 4  # per parameter, moment or summed gradient
_LARGER = {
    "device": "devices with more memory",
    "host": "more host memory",
    "nvme": "a larger disk (tiers.path)",
}


@dataclass(frozen=True)
class Machine:
    """Free bytes per tier, and speeds, of a device and its host.

    shared: device and host are the same memory, counted as the host's. flops: FLOP/s of matrix
    products. link_bytes_per_s: between host and device. nvme_read_bytes_per_s,
    nvme_write_bytes_per_s: of the disk. memory_bytes_per_s: of the device's memory. source: origin
    of the device's figures. assumed_tiers: tiers whose free bytes were read from the planning
    machine, because the configuration gives none. host_memory_bytes_per_s: of the host's memory,
    all its devices together.
    """

    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    shared: bool
    flops: float
    link_bytes_per_s: float
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    memory_bytes_per_s: float
    source: str = "as given"
    assumed_tiers: tuple[Tier, ...] = ()
    host_memory_bytes_per_s: float = 1e11

    def free_bytes(self, tier: Tier) -> int:
        return {"device": self.device_bytes, "host": self.host_bytes, "nvme": self.nvme_bytes}[tier]

    @property
    def free_bytes_notes(self) -> list[str]:
        """Return a line about the tiers whose free bytes were read from this machine, and the
        options that set them; [] if there are none.
        """
        if not self.assumed_tiers:
            return []
        sizes = " and ".join(f"{tier} bytes" for tier in self.assumed_tiers)
        line = f"free {sizes} are those of this machine"
        options = " and ".join(f"--machine.{tier}-bytes" for tier in self.assumed_tiers)
        return [line if self.shared else f"{line}: give {options} of the hosts that the run is for"]

    def enlarge_advice(self, tier: Tier) -> str:
        """Return advice for a tier that no other change makes large enough."""
        if tier in self.assumed_tiers and not self.shared:
            free = gigabytes_text(self.free_bytes(tier))
            return (
                f"--machine.{tier}-bytes, if a host of the run has more than the {free} of this"
                " machine"
            )
        return _LARGER[tier]


@dataclass(frozen=True)
class TrainingSizes:
    """Sizes of the model to train, of a step, and of the devices that share the experts.

    Of one replica's step: step_tokens, and dense_flops (FLOPs of everything but the experts).

    Of a micro-batch, over the replica's devices: input_bytes, inputs of layers; working_bytes, in
    use at once by a layer's gradients; residual_bytes, other residuals saved for the backward pass,
    0 if layers are recomputed; experts_residual_bytes, the bytes of residual_bytes that experts'
    products make; recomputed_bytes, in use by a layer's recomputation; logits_bytes, logits with
    their gradient. If experts are streamed, the inputs and residuals of all micro-batches exist at
    once.

    loss_chunk_bytes: most bytes of logits that a device has at once. experts_again: experts'
    products are recomputed. max_micro_batches: micro-batches of one sequence per `context` devices.
    packing: expert packing (`comm.packing`), included in num_devices (devices that share the
    experts) and replicas. copies: of the state (`mesh.replicate`), each split over a part of the
    replicas. chosen_share: measured mean fraction of a device's experts of a layer
    that a step's tokens choose; 0: estimated for uniform routing. on_gpu: the devices are GPUs.
    expert_sharding: what replicas split of their experts. context: devices that share a sequence.
    context_bytes: keys and values, with their gradients, that a device sends in a step to those
    that share its sequences. sequence_length: of sequences that devices can share, else 0.
    sequence_bytes: in use on a device by the attention of one sequence that it shares.
    dense_moment_bytes, expert_moment_bytes: of the optimizer's moments, per parameter.
    update_flops: FLOPs of one optimizer step of all parameters. any_tier: the run can have experts
    on other tiers.
    """

    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    parameters_per_expert: int
    dense_parameters: int
    step_tokens: int
    dense_flops: float
    input_bytes: int
    working_bytes: int
    compute_dtype_bytes: int  # per weight, in the compute dtype
    gradient_bytes_per_parameter: int  # of an expert's stored gradient
    num_devices: int = 1
    devices_per_host: int = 1
    residual_bytes: int = 0
    micro_batches: int = 1
    max_micro_batches: int = 1
    replicas: int = 1
    packing: int = 1
    shard_dense: bool = True
    chosen_share: float = 0.0
    experts_residual_bytes: int = 0
    experts_again: bool = False
    logits_bytes: int = 0
    loss_chunk_bytes: int = 0
    recomputed_bytes: int = 0
    on_gpu: bool = False
    expert_sharding: ExpertSharding = "none"
    context: int = 1
    context_bytes: int = 0
    sequence_length: int = 0
    sequence_bytes: int = 0
    copies: int = 1
    dense_moment_bytes: float = 2 * WEIGHT_BYTES
    expert_moment_bytes: float = 2 * WEIGHT_BYTES
    update_flops: float = 0.0
    any_tier: bool = True

    @property
    def layer_activation_bytes(self) -> int:
        """Return the bytes that a device uses for a layer of a micro-batch, besides the layer's
        weights.
        """
        recomputed_bytes = (
            0 if self.residual_bytes and not self.experts_again else self.recomputed_bytes
        )
        return (self.working_bytes + recomputed_bytes) // self.num_devices

    @property
    def device_logits_bytes(self) -> int:
        """Return the bytes of logits that a device has at once."""
        return min(self.loss_chunk_bytes, self.logits_bytes // self.num_devices)

    @property
    def casts_all_experts_at_once(self) -> bool:
        """Return True if the experts of all layers are cast to the compute dtype at once, and their
        gradients stay in that dtype.

        GPUs do so if no other gradients are added to these (`training.sharded_decoder`).
        """
        alone = self.num_all_devices == 1 or (self.replicas == 1 and self.micro_batches == 1)
        return self.on_gpu and alone and self.compute_dtype_bytes < WEIGHT_BYTES

    @property
    def num_all_devices(self) -> int:
        """Return the number of devices of all replicas together."""
        return self.num_devices * self.replicas

    @property
    def num_dense_shards(self) -> int:
        """Return the number of shards of the dense parameters and their state."""
        return self.num_all_devices // self.copies if self.shard_dense else 1

    @property
    def num_expert_shards(self) -> int:
        """Return the number of replicas that split the state of a device's experts."""
        return 1 if self.expert_sharding == "none" else self.replicas // self.copies

    @property
    def num_all_expert_parameters(self) -> int:
        """Return the number of parameters of all experts."""
        return self.num_layers * self.num_experts * self.parameters_per_expert

    @property
    def num_device_expert_parameters(self) -> int:
        """Return the number of parameters of one device's experts."""
        return self.num_all_expert_parameters // self.num_devices

    @property
    def uniform_active_experts(self) -> float:
        """Return the expected number of a device's experts of a layer that any replica's tokens
        choose in a step under uniform routing.
        """
        chosen = distinct_experts(
            self.num_experts, self.num_experts_per_tok, self.step_tokens * self.replicas
        )
        return chosen / self.num_devices

    @property
    def active_experts(self) -> float:
        """Return the mean number of a device's experts of a layer that a step's tokens choose:
        measured if `chosen_share` is set, else `uniform_active_experts`.
        """
        return (
            self.chosen_share * self.num_experts / self.num_devices
            if self.chosen_share
            else self.uniform_active_experts
        )

    @property
    def peak_active_experts(self) -> float:
        """Return the number of a device's experts of a layer to plan slots for: single steps may
        choose more experts than the mean.
        """
        return max(self.uniform_active_experts, self.active_experts)

    @property
    def tokens_per_expert(self) -> float:
        """Return the mean number of a step's tokens per expert, over the experts that are chosen at
        all.
        """
        return (
            self.step_tokens * self.num_experts_per_tok / (self.active_experts * self.num_devices)
        )


@dataclass(frozen=True)
class StatePlacement:
    """Tier of each kind of state. gradients, device_layers, device_experts and update are as in
    `TrainConfig.tiers`.

    host_cache_bytes: None means a quarter of the records on NVMe.
    """

    experts: Tier
    optimizer: Tier
    gradients: Tier
    device_layers: int
    host_cache_bytes: int | None
    checkpoints: int  # number of checkpoints whose records stay on NVMe
    device_experts: float = 1.0  # slots per layer, as a fraction of a device's experts
    update: Update = "device"

    @property
    def is_streamed(self) -> bool:
        """Whether experts or their moments are off the device."""
        return (self.experts, self.optimizer) != ("device", "device")


def candidate_tier_pairs(experts: str, optimizer: str) -> list[tuple[Tier, Tier]]:
    """Return the allowed pairs of tiers (experts, optimizer), fastest first: the optimizer's tier
    is never faster than the experts'. A named tier stays fixed; `auto` allows every tier.
    """
    pairs = [(a, b) for a in TIERS for b in TIERS if TIERS.index(b) >= TIERS.index(a)]
    pairs.sort(key=lambda pair: (TIERS.index(pair[0]) + TIERS.index(pair[1]), TIERS.index(pair[0])))
    return [p for p in pairs if experts in ("auto", p[0]) and optimizer in ("auto", p[1])]


def gigabytes_text(size: int) -> str:
    """Return a number of bytes as text in GB."""
    return f"{size / 1e9:.2f} GB"
