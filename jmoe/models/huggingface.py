"""Hugging Face configurations as `ModelConfig`."""

from typing import Any

from jmoe.config import ModelConfig, RouterConfig

SUPPORTED = ("mixtral", "qwen3_moe")


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """The decoder that a Hugging Face `config.json` of Mixtral or Qwen3-MoE describes.

    Raises `ValueError` naming the field for a model type, or an option of one, that jmoe does not have.
    """
    kind = hf.get("model_type")
    if kind not in SUPPORTED:
        raise ValueError(f"model_type = {kind!r}: must be one of {', '.join(SUPPORTED)}")
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window", True):
        raise ValueError(f"sliding_window = {hf['sliding_window']!r}: only full attention is supported")
    if hf.get("mlp_only_layers"):
        raise ValueError(f"mlp_only_layers = {hf['mlp_only_layers']!r}: use decoder_sparse_step instead")
    qwen = kind == "qwen3_moe"
    experts, per_tok = ("num_experts", 128) if qwen else ("num_local_experts", 8), 8 if qwen else 2
    moe_size = hf.get("moe_intermediate_size", 768) if qwen else hf["intermediate_size"]
    rope = hf.get("rope_parameters") or {}
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_key_value_heads=hf.get("num_key_value_heads", hf["num_attention_heads"]),
        head_dim=hf.get("head_dim"),
        max_position_embeddings=hf["max_position_embeddings"],
        intermediate_size=hf["intermediate_size"],
        moe_intermediate_size=moe_size,
        num_experts=hf.get(*experts),
        num_experts_per_tok=hf.get("num_experts_per_tok", per_tok),
        decoder_sparse_step=hf.get("decoder_sparse_step", 1),
        norm_eps=hf.get("rms_norm_eps", 1e-6 if qwen else 1e-5),
        rope_theta=hf.get("rope_theta", rope.get("rope_theta", 10_000.0 if qwen else 1_000_000.0)),
        qk_norm="head" if qwen else "none",
        attention_bias=hf.get("attention_bias", False),
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
        initializer_range=hf.get("initializer_range", 0.02),
        router=RouterConfig(
            kind="softmax",
            norm_topk_prob=hf.get("norm_topk_prob", not qwen),
            aux_loss_coef=hf.get("router_aux_loss_coef", 0.001),
        ),
    )
