"""Which Hugging Face tensors hold a parameter of the decoder, in a checkpoint of a family."""

from collections.abc import Collection
from dataclasses import replace

from jmoe.config import ModelConfig
from jmoe.models.families import FAMILIES
from jmoe.models.families.tensors import LAYER, OUTSIDE, TensorSource
from jmoe.models.gguf import names as gguf_names


def layer_sources(family: str) -> dict[str, TensorSource]:
    """Return the source of each parameter of a layer, below `model.layers.{layer}`."""
    return {**LAYER, **FAMILIES[family].tensors}


def outside_sources(family: str) -> dict[str, TensorSource]:
    """Return the source of each parameter outside the layers."""
    tensors = FAMILIES[family].tensors
    return {name: tensors.get(name, source) for name, source in OUTSIDE.items()}


def embedding_names() -> set[str]:
    """Return the names that the families give to the embedding."""
    return {name for family in FAMILIES for name in outside_sources(family)["embedding"].names}


def is_gguf(names: Collection[str]) -> bool:
    """Return whether tensors have the names of a GGUF file."""
    (embedding,) = gguf_names.OUTSIDE["embedding"].names
    return embedding in names


def has_fused_experts(names: Collection[str], family: str) -> bool:
    """Return whether a checkpoint with these tensors stores all experts of a layer in one
    tensor.
    """
    fused = FAMILIES[family].fused_tensors
    ends = tuple(fused["moe.experts.w_up"].names) if fused else ()
    return any(name.endswith(ends) for name in names)


def parameter_source(
    path: tuple[str, ...],
    config: ModelConfig,
    family: str,
    *,
    fused: bool = False,
    gguf: Collection[str] = (),
) -> TensorSource:
    """Return the source of a parameter of the decoder.

    path: the parameter's path in the decoder, e.g. (moe_layers, attention, w_qkv).
    fused: whether the checkpoint stores all experts of a layer in one tensor.
    gguf: the names of a GGUF file's tensors; () for other checkpoints.
    """
    if not path[0].endswith("_layers"):
        return (gguf_names.OUTSIDE if gguf else outside_sources(family))[".".join(path)]
    sources = layer_sources(family)
    if fused:
        sources |= FAMILIES[family].fused_tensors
    name = ".".join(path[1:])
    source = gguf_names.layer_source(name, family, config, gguf) if gguf else sources[name]
    prefix = "blk" if gguf else "model.layers"
    if path[-1] in ("w_qkv", "b_qkv") and len(source.names) == 3:
        q = config.num_attention_heads * config.dim_per_head * (1 + config.attention_gate)
        kv = config.num_key_value_heads * config.dim_per_head
        source = replace(source, widths=(q, kv, kv))
    if path[-1] == "w_in":
        keys, values = 2 * config.linear_key_dim, config.linear_value_dim
        heads = config.linear_num_value_heads
        joined = config.linear_projections_by_head
        parts = (keys + 2 * values, 2 * heads) if joined else (keys + values, values, heads, heads)
        source = replace(source, widths=parts)
    return replace(source, names=tuple(f"{prefix}.{{layer}}.{name}" for name in source.names))
