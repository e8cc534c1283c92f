"""The families that jmoe recognizes but cannot load, with the parts it lacks for each."""

_INDEXER = "sparse attention to the keys that an indexer chooses"
_IMAGES = "the encoder of images; its language model is supported once saved alone, as {}"

# {model_type: what its layers have and jmoe's have not}
MISSING_PARTS: dict[str, str] = {
    "llama4": _IMAGES.format("llama4_text"),
    "qwen3_5_moe": _IMAGES.format("qwen3_5_moe_text"),
    "deepseek_v32": _INDEXER,
    "deepseek_v4": f"{_INDEXER}, compressed keys and hyper-connections",
    "glm_moe_dsa": _INDEXER,
    "minimax_m3": "sparse attention and experts with clamped gates beside a shared one",
    "gemma4": "experts beside a dense MLP in each layer, and the encoder of images",
    "qwen3_vl_moe": _IMAGES.format("qwen3_moe"),
    "kimi_k25": _IMAGES.format("kimi_k2"),
    "granitemoehybrid": "Mamba-2 layers in turn with attention",
    "bailing_hybrid": "Kimi delta attention in turn with latent attention",
}
