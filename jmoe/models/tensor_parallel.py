"""Tensor parallelism of the dense layers for inference on N devices.

Attention is split by heads, every MLP by its inner dimension, embedding and head by blocks of the
vocabulary. Each device runs a narrower decoder; outputs are summed over the devices after
attention's output projection and after the MLP (Megatron-LM, arXiv 1909.08053 section 3). With
fewer key/value heads than devices, a head is replicated on several, as in vLLM. Routers,
down-projections to latents and norms are replicated, except for query and key norms over all heads
(OLMoE), which are split with the heads.
"""

import dataclasses
from typing import NamedTuple

from jmoe.config import ModelConfig, check
from jmoe.layers.attention import Attention
from jmoe.mesh import EXPERT_INTRA
from jmoe.models.block import Block

# biases that follow the sum over devices: only the first device has them, the others have zeros
ADDED_ONCE = ("b_out", "b_down")


class ParameterCut(NamedTuple):
    """How a parameter is split over devices.

    dim: the split dimension, negative.
    groups: (units, size of a unit) of each group along `dim`; every group is split over all
        devices.
    """

    dim: int
    groups: tuple[tuple[int, int], ...]


def per_device_config(config: ModelConfig, num_devices: int) -> ModelConfig:
    """Return the configuration of the narrower decoder that each device runs.

    Raises ValueError naming the field that `num_devices` does not divide.
    """
    divides = f"must be a multiple of mesh.devices = {num_devices} with mesh.dense = 'tensor'"
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    check(heads % num_devices == 0, "num_attention_heads", heads, divides)
    shared_out = groups % num_devices == 0 or num_devices % groups == 0
    check(shared_out, "num_key_value_heads", groups, f"{divides}, or divide it")
    if "dense" in config.layer_kinds:
        size = config.intermediate_size
        check(size % num_devices == 0, "intermediate_size", size, divides)
    size = config.shared_expert_intermediate_size
    check(size % num_devices == 0, "shared_expert_intermediate_size", size, divides)
    check(
        config.vocab_size >= num_devices,
        "vocab_size",
        config.vocab_size,
        f"must be at least {num_devices}",
    )
    return dataclasses.replace(
        config,
        num_attention_heads=heads // num_devices,
        num_key_value_heads=max(1, groups // num_devices),
        head_dim=config.head_dim if config.kv_lora_rank is not None else config.dim_per_head,
        intermediate_size=max(1, config.intermediate_size // num_devices),
        shared_expert_intermediate_size=config.shared_expert_intermediate_size // num_devices,
        vocab_size=-(-config.vocab_size // num_devices),
    )


def parameter_cuts(config: ModelConfig) -> dict[tuple[str, ...], ParameterCut]:
    """Return the `ParameterCut` of every parameter that is split over devices, by the last names of
    its path; all others are replicated.
    """
    heads, dim = config.num_attention_heads, config.dim_per_head
    query, key = (heads, dim), (config.num_key_value_heads, dim)
    latent = config.kv_lora_rank is not None
    cuts = {
        ("embedding",): ParameterCut(-2, ((config.vocab_size, 1),)),
        ("head",): ParameterCut(-1, ((config.vocab_size, 1),)),
        ("head_bias",): ParameterCut(-1, ((config.vocab_size, 1),)),
        ("attention", "sinks"): ParameterCut(-1, ((heads, 1),)),
        ("attention", "w_out"): ParameterCut(-2, ((heads, config.v_head_dim if latent else dim),)),
    }
    columns = {
        "w_qkv": (query, key, key),
        "b_qkv": (query, key, key),
        "w_q": (query,),
        "w_q_b": (query,),
    }
    columns["w_kv_b"] = ((heads, config.qk_nope_head_dim + config.v_head_dim),)
    cuts |= {("attention", name): ParameterCut(-1, groups) for name, groups in columns.items()}
    if config.qk_norm == "full":
        cuts |= {
            ("q_norm", "scale"): ParameterCut(-1, (query,)),
            ("k_norm", "scale"): ParameterCut(-1, (key,)),
        }
    inner = {
        "mlp": config.intermediate_size,
        "shared_expert": config.shared_expert_intermediate_size,
    }
    for name, size in inner.items():
        # gate and up lie side by side
        up = ParameterCut(-1, ((size, 1),) * (1 if config.hidden_act == "gelu" else 2))
        cuts |= {
            (name, "w_up"): up,
            (name, "b_up"): up,
            (name, "w_down"): ParameterCut(-2, ((size, 1),)),
        }
    return cuts


def shard_slices(cut: ParameterCut, device: int, num_devices: int) -> list[slice]:
    """Return the slices along `cut.dim` of a parameter that a device holds, one for each group.

    With fewer units than devices, several devices hold the same unit. If units do not divide
    evenly, as in a vocabulary, the last devices hold fewer, and the caller pads with zeros.
    """
    start, parts = 0, []
    for units, size in cut.groups:
        per_device = -(-units // num_devices)
        first = (
            device * units // num_devices
            if units < num_devices
            else min(device * per_device, units)
        )
        end = min(first + per_device, units)
        parts.append(slice(start + first * size, start + end * size))
        start += units * size
    return parts


def average_norms_over_devices(block: Block) -> None:
    """Make query and key norms over all heads (OLMoE) average over the devices, too.

    The mean of the devices' means is the mean over all heads: each head is on equally many devices.
    """
    attention = block.attention
    if type(attention) is Attention and attention.config.qk_norm == "full":
        for norm in (attention.q_norm, attention.k_norm):
            assert norm is not None
            norm.axes = (EXPERT_INTRA,)
