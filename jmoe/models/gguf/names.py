"""The tensors of a GGUF file that make up each parameter of a layer, below `blk.{layer}`."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from jmoe.config import ModelConfig
from jmoe.models.families.tensors import TensorSource, as_stored_source, transposed_source
from jmoe.models.safetensors_io import StoredTensor

OUTSIDE = {
    "embedding": as_stored_source("token_embd.weight"),
    "norm.scale": as_stored_source("output_norm.weight"),
    "head": transposed_source("output.weight"),
}


def _stacked_matrices(*names: str) -> TensorSource:
    """Return the source of tensors that each hold all experts' matrices, as [out, in]."""
    return TensorSource(names, transposed=True, stacked=True)


def _stacked_vectors(*names: str) -> TensorSource:
    """Return the source of tensors that each hold all experts' vectors."""
    return TensorSource(names, stacked=True)


LAYER = {
    "attention_norm.scale": as_stored_source("attn_norm.weight"),
    "attention.w_qkv": transposed_source("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "attention.b_qkv": as_stored_source("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "attention.q_norm.scale": as_stored_source("attn_q_norm.weight"),
    "attention.k_norm.scale": as_stored_source("attn_k_norm.weight"),
    "attention.sinks": as_stored_source("attn_sinks.weight"),
    "attention.w_q": transposed_source("attn_q.weight"),
    "attention.w_q_a": transposed_source("attn_q_a.weight"),
    "attention.q_a_norm.scale": as_stored_source("attn_q_a_norm.weight"),
    "attention.w_q_b": transposed_source("attn_q_b.weight"),
    "attention.w_kv_a": transposed_source("attn_kv_a_mqa.weight"),
    "attention.kv_a_norm.scale": as_stored_source("attn_kv_a_norm.weight"),
    "attention.w_kv_b": transposed_source("attn_kv_b.weight"),
    "attention.w_out": transposed_source("attn_output.weight"),
    "attention.b_out": as_stored_source("attn_output.bias"),
    "feed_forward_norm.scale": as_stored_source("ffn_norm.weight"),
    "mlp.w_up": transposed_source("ffn_gate.weight", "ffn_up.weight"),
    "mlp.w_down": transposed_source("ffn_down.weight"),
    "moe.router.kernel": transposed_source("ffn_gate_inp.weight"),
    "moe.router.bias": as_stored_source("ffn_gate_inp.bias"),
    "moe.router.e_score_correction_bias": as_stored_source("exp_probs_b.bias"),
    "moe.experts.w_up": _stacked_matrices("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "moe.experts.w_down": _stacked_matrices("ffn_down_exps.weight"),
    "moe.experts.b_up": _stacked_vectors("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "moe.experts.b_down": _stacked_vectors("ffn_down_exps.bias"),
    "shared_expert.w_up": transposed_source("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "shared_expert.w_down": transposed_source("ffn_down_shexp.weight"),
}
# families whose second norm has another name
NORM_AFTER_ATTENTION = ("gpt_oss", "glm4_moe")


# Keys and values of latent attention in files since 2025, for all heads: [H, rank, n], [H, v, rank]
KEYS_BY_HEAD, VALUES_BY_HEAD = "attn_k_b.weight", "attn_v_b.weight"


def layer_source(
    name: str, family: str, config: ModelConfig, stored: Collection[str]
) -> TensorSource:
    """Return the source of a parameter of a layer, such as `attention.w_qkv`.

    stored: the names of the file's tensors, after `split_heads`. Raises ValueError if GGUF files of
    the family have no name for it.
    """
    if name == "feed_forward_norm.scale" and family in NORM_AFTER_ATTENTION:
        return as_stored_source("post_attention_norm.weight")
    if name not in LAYER:
        raise ValueError(f"GGUF: has no tensor for {name} of {family}")
    if name == "attention.w_kv_b" and f"blk.0.{KEYS_BY_HEAD}.0" in stored:
        return _keys_and_values_by_head(config)
    if name == "attention.w_qkv" and family == "mixtral":  # rotated as neighbouring pairs
        return replace(LAYER[name], head_dims=(config.dim_per_head, config.dim_per_head, 0))
    return LAYER[name]


def _keys_and_values_by_head(config: ModelConfig) -> TensorSource:
    """Return the source of `w_kv_b` from two tensors for each head."""
    heads = range(config.num_attention_heads)
    names = [f"{name}.{head}" for head in heads for name in (KEYS_BY_HEAD, VALUES_BY_HEAD)]
    widths = (config.qk_nope_head_dim, config.v_head_dim) * len(heads)
    return TensorSource(
        tuple(names), transposed=True, widths=widths, each_transposed=(False, True) * len(heads)
    )


def split_heads(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with each head's keys and values of latent attention apart."""
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith((KEYS_BY_HEAD, VALUES_BY_HEAD)) or len(tensor.shape) != 3:
            result[name] = tensor
            continue
        for head in range(tensor.shape[0]):
            one = f"{name}.{head}"
            result[one] = replace(tensor.entry(head), name=one)
    return result
