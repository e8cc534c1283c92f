"""What an engine will put where, from the headers of a checkpoint alone."""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax

from jmoe.inference.expert_tiers import ExpertTier, Policy, plan_experts
from jmoe.inference.kv_cache import empty_cache
from jmoe.models.split_checkpoint import SplitCheckpoint

DEFAULT_MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class EnginePlan:
    """Bytes by purpose and tier. streamed_bytes: of the experts that pass through the slots, 0 if all lie in them."""

    num_parameters: int
    active_parameters: int
    policy: str
    num_slots: int  # one expert each
    ring_slots: int  # one layer each; 0 without a ring
    num_experts: int  # of all layers
    expert_bytes: int  # of one
    rest_bytes: int
    kv_cache_bytes: int
    tier: str  # where experts come from; "" if all lie in slots
    max_batch: int
    max_seq_len: int

    @property
    def slot_bytes(self) -> int:
        return self.num_slots * self.expert_bytes

    @property
    def streamed_bytes(self) -> int:
        return self.num_experts * self.expert_bytes if self.tier else 0

    def lines(self) -> list[str]:
        """For the screen."""
        slots = f"{self.num_slots} of {self.num_experts} experts"
        if self.ring_slots:
            slots += f", a ring of {self.ring_slots} layers"
        lines = [
            f"model      {self.num_parameters / 1e6:,.1f}M parameters, {self.active_parameters / 1e6:,.1f}M active",
            f"policy     {self.policy}: slots on the device for {slots}",
            f"device     {_mib(self.slot_bytes)} experts, {_mib(self.rest_bytes)} other weights, "
            f"{_mib(self.kv_cache_bytes)} keys and values",
        ]
        if self.tier:
            lines.append(f"{self.tier:10} {_mib(self.streamed_bytes)} experts")
        return [*lines, f"limits     {self.max_batch} sequences at once, {self.max_seq_len:,} tokens each"]


def plan_engine(
    path: str | os.PathLike[str],
    *,
    max_batch: int,
    max_seq_len: int | None,
    policy: Policy,
    ring_slots: int | None,
    device_bytes: int | None,
    expert_tier: ExpertTier,
    host_cache_bytes: int | None,
    dtype: Any,
) -> EnginePlan:
    """The plan of `Engine.from_pretrained` with these arguments; reads no weights.

    max_seq_len: None: 2048, or the model's positions if they are fewer. Raises `ValueError` as the engine does.
    """
    with SplitCheckpoint(path, dtype) as checkpoint:
        config = checkpoint.config
        experts = plan_experts(checkpoint, policy, ring_slots, device_bytes)
        length = max_seq_len or min(DEFAULT_MAX_SEQ_LEN, config.max_position_embeddings)
        value_dim = config.v_head_dim if config.kv_lora_rank is not None else config.dim_per_head
        heads, stored = config.num_key_value_heads, checkpoint.dtype
        cache = jax.eval_shape(lambda: empty_cache(max_batch, length, heads, config.dim_per_head, value_dim, stored))
        layer_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
        nvme = expert_tier == "nvme" or (expert_tier == "auto" and host_cache_bytes is not None)
        total, active = config.num_parameters()
        return EnginePlan(
            num_parameters=total,
            active_parameters=active,
            policy=experts.policy,
            num_slots=experts.num_slots,
            ring_slots=experts.ring_slots,
            num_experts=checkpoint.num_experts,
            expert_bytes=checkpoint.expert_bytes,
            rest_bytes=checkpoint.rest_bytes,
            kv_cache_bytes=layer_bytes * config.num_hidden_layers,
            tier="" if experts.policy == "resident" else "nvme" if nvme else "host",
            max_batch=max_batch,
            max_seq_len=length,
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
