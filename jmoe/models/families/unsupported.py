"""The families that jmoe recognizes but cannot load, with the parts it lacks for each."""

_DELTA = "gated delta networks, gates on attention's output and norms with 1 + weight"

# {model_type: what its layers have and jmoe's have not}
MISSING_PARTS: dict[str, str] = {
    "llama4": "attention in chunks, layers without positions and router weights on expert inputs",
    "qwen3_next": _DELTA,
    "qwen3_5_moe": _DELTA,
    "deepseek_v32": "sparse attention to the keys that an indexer chooses",
    "granitemoe": "multipliers of embeddings, attention scores, residuals and logits",
    "phimoe": "the sparsemixer router and longrope positions",
    "hunyuan_v1_moe": "norms of queries and keys after rotation and ntk_alpha positions",
    "bailing_moe": "tensors query_key_value, of code that transformers does not have",
}
